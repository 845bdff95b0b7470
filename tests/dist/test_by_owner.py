"""Muon by owners on gloo processes: torch's bits, and state that is saved, loaded on other specs
and resharded.
"""

import pytest
import torch
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist

SHAPES = {"a": (7, 4), "b": (7, 4), "c": (7, 4), "experts": (3, 5, 6)}
SPECS = {"a": P("dp"), "b": P("dp"), "c": P(None, "dp"), "experts": P("dp")}
OTHER = {"a": P(None, "dp"), "b": P(), "c": P("dp"), "experts": P(None, "dp")}


def _draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _trained(folder: str) -> list[str]:
    """What differs from torch on one device."""
    mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
    opt = ftp.optim.from_torch(torch.optim.Muon, lr=0.1, owned=True)

    def step_with(specs: dict[str, P]) -> ftp.Step:
        return ftp.spmd(
            lambda g, s, p: opt.update(g, s, p), mesh, (specs, specs, specs), (specs, specs)
        )

    whole = _draw(0)
    plain = {
        (k, i): torch.nn.Parameter(m.clone())
        for k, p in whole.items()
        for i, m in enumerate(p.reshape(-1, *p.shape[-2:]))
    }
    reference = torch.optim.Muon(plain.values(), lr=0.1)
    params = ftp.device_put(whole, mesh, SPECS)
    state, specs, wrong = opt.init(params), SPECS, []
    for seed in range(1, 5):
        if seed == 3:  # saved, and loaded on other specs
            ftp.save(
                folder, {"params": params, "state": state}, mesh, {"params": SPECS, "state": SPECS}
            )
            like = {"params": whole, "state": opt.init(whole)}
            loaded = ftp.load(folder, like, mesh, {"params": OTHER, "state": OTHER})
            params, state, specs = loaded["params"], loaded["state"], OTHER
        if seed == 4:
            params = ftp.reshard(params, mesh, OTHER, SPECS)
            state = ftp.reshard(state, mesh, OTHER, SPECS)
            specs = SPECS
        grads = _draw(seed)
        for (k, i), leaf in plain.items():
            leaf.grad = grads[k].reshape(-1, *grads[k].shape[-2:])[i]
        reference.step()
        params, state = step_with(specs)(ftp.device_put(grads, mesh, specs), state, params)
        found = ftp.device_get(
            {"params": params, "state": state}, mesh, {"params": specs, "state": specs}
        )
        for (k, i), leaf in plain.items():
            value = found["params"][k].reshape(-1, *leaf.shape)[i]
            momentum = found["state"][k]["momentum_buffer"].reshape(-1, *leaf.shape)[i]
            same = (
                torch.equal(value, leaf),
                torch.equal(momentum, reference.state[leaf]["momentum_buffer"]),
            )
            if same != (True, True):
                wrong.append(f"step {seed}: {k}[{i}]: {same}")
    return wrong


def test_muon_trains_with_torchs_bits(tmp_path):
    ranks = launch(_trained, 2, str(tmp_path), timeout=120)
    assert [rank.value for rank in ranks] == [[], []], ranks[0].stderr
