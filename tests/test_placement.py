"""device_put and device_get without processes: copies, any dtype and layout, and nothing cut twice."""

import pytest
import torch

import ftp
from ftp import P
from ftp.placement import placement_of

MESH = ftp.simulated_mesh((2, 2), ("dp", "tp"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_there_and_back_is_the_identity(dtype):
    x = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
    tree = {"plain": x, "strided": x.T, "expanded": x[:1].expand(4, 6), "empty": x[:0], "scalar": x[0, 0], "n": 3, "none": None}
    specs = {"plain": P("dp", "tp"), "strided": P("tp"), "expanded": P("dp"), "empty": P("dp"), "scalar": P(), "n": P(), "none": None}
    placed = ftp.device_put(tree, MESH, specs)
    back = ftp.device_get(placed, MESH, specs)
    for name in ("plain", "strided", "expanded", "empty", "scalar"):
        assert torch.equal(back[name], tree[name]) and back[name].dtype == dtype
        assert name == "empty" or (placed[name].is_contiguous() and placed[name].data_ptr() != tree[name].data_ptr())
    assert back["n"] == 3 and back["none"] is None


def test_what_is_placed_is_returned_as_it_is():
    placed = ftp.device_put(torch.ones(4), MESH, P("tp"))
    assert ftp.device_put(placed, MESH, P("tp")) is placed
    where = placement_of(placed)
    assert where is not None and where.shape == (4,) and where.spec == P("tp")


def test_parameters_are_placed_as_plain_tensors():
    placed = ftp.device_put(torch.nn.Parameter(torch.ones(4)), MESH, P("tp"))
    assert type(placed) is torch.Tensor and not placed.requires_grad


def test_meta_tensors_stay_meta():
    placed = ftp.device_put(torch.empty(5, 3, device="meta"), ftp.AbstractMesh((2,), ("tp",)), P("tp"))
    assert placed.device.type == "meta"
    assert ftp.device_get(placed, ftp.AbstractMesh((2,), ("tp",)), P("tp")).shape == (5, 3)


def test_local_slice_checks_its_spec():
    assert ftp.local_slice(MESH, P("dp"), (6, 3)) == (slice(0, 6), slice(0, 3))
    with pytest.raises(ftp.FtpError, match="of 3 entries, but its shape"):
        ftp.local_slice(MESH, P(None, None, "dp"), (6, 3))
