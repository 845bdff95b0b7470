"""What ranks say about their leaves: samples, by which they compare copies, and shapes."""

from dataclasses import replace

import pytest
import torch

import ftp
from ftp import P
from ftp.sharding.mesh import resolve
from ftp.tensors import replicas
from ftp.tensors.global_shapes import agreed_shapes, describe_held, sample
from ftp.tensors.replicas import check_samples


def test_a_sample_of_strided_memory_reads_few_elements():
    base = torch.arange(60.0).reshape(3, 4, 5)
    for x in (base.permute(2, 0, 1), base[:, ::2], torch.ones(2, 1).expand(2, 30)):
        assert sample(x) == sample(x.contiguous())
    # 4 TB if it were copied
    assert sample(torch.zeros(1).expand(10**12)) == [0.0] * 16


def test_packed_numbers_have_no_sample():
    assert sample(torch.empty(4, dtype=torch.float4_e2m1fn_x2)) is None


def test_a_leaf_is_compared_once_for_all_ranks_that_hold_the_same(monkeypatch: pytest.MonkeyPatch):
    """The work for each rank is a comparison: specs, and the groups of ranks that share a leaf, are
    looked at once.
    """
    n, count = 16, 40
    mesh = resolve(ftp.simulated_mesh((n,), ("tp",)))
    specs = [P("tp"), P()] * (count // 2)
    leaves = [torch.ones(3, 2), torch.ones(48, 2)] * (count // 2)
    held = [describe_held(x, spec, mesh) for x, spec in zip(leaves, specs, strict=True)]
    hashes, own = [], P.__hash__
    monkeypatch.setattr(P, "__hash__", lambda spec: (hashes.append(1), own(spec))[1])
    names = [f"leaf {i}" for i in range(count)]
    assert agreed_shapes([held] * n, specs, names, mesh) == [(48, 2)] * count
    assert len(hashes) <= 3 * count
    monkeypatch.setattr(replicas, "_odd_ranks", None)
    check_samples([held] * n, specs, names, mesh, "")


def test_a_rank_of_other_shapes_is_named_whatever_the_others_hold():
    mesh = replace(resolve(ftp.simulated_mesh((3,), ("tp",))), ranks=(0, 1, 2))
    held = [describe_held(torch.ones(2, 2), P("tp"), mesh) for _ in range(2)]
    for odd in (torch.ones(3, 2), torch.ones(2, 2, 1), torch.ones(())):
        ranks = [[held[0]], [held[1]], [describe_held(odd, P("tp"), mesh)]]
        with pytest.raises(ftp.errors.MismatchError, match=r"rank 2 \("):
            agreed_shapes(ranks, [P("tp")], ["x"], mesh)
