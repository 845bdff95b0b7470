"""Recurrent layers are traced step by step: results and gradients of plain torch's kernels, on any
mesh and for any device.
"""

from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import strategies as st
from torch import Tensor, nn

import ftp
from ftp import P

KINDS = {
    "LSTM": lambda *a, **k: nn.LSTM(*a, **k),
    "LSTM, projected": lambda *a, **k: nn.LSTM(*a, proj_size=2, **k),
    "GRU": lambda *a, **k: nn.GRU(*a, **k),
    "RNN": lambda *a, **k: nn.RNN(*a, **k),
    "RNN, relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}


def _loss_of(fn: Any) -> Any:
    def loss(params: Any, x: Tensor, *states: Tensor) -> Tensor:
        out, last = fn(params, x, *([states if len(states) > 1 else states[0]] if states else []))
        last = last if isinstance(last, tuple) else (last,)
        return out.sin().square().mean() + sum(h.cos().mean() for h in last)

    return loss


@few_or_many(
    few=3,
    many=40,
    kind=st.sampled_from([*KINDS]),
    options=st.fixed_dictionaries(
        {
            "num_layers": st.integers(1, 2),
            "bias": st.booleans(),
            "bidirectional": st.booleans(),
            "batch_first": st.booleans(),
        }
    ),
    steps=st.integers(1, 4),
    batch=st.integers(1, 5),
    is_batched=st.booleans(),
    placed=st.sampled_from([((2,), P(), P("tp")), ((3,), P("tp"), P()), ((2,), P("tp"), P("tp"))]),
)
def test_equal_to_torch_on_one_device(kind, options, steps, batch, is_batched, placed):
    shape, spec, batch_spec = placed
    module = KINDS[kind](3, 4, dtype=torch.float64, **options)
    fn, params = ftp.functionalize(module)
    first = (batch, steps) if options["batch_first"] else (steps, batch)
    x = torch.randn(*(first if is_batched else (steps,)), 3, dtype=torch.float64)
    grads, value = torch.func.grad_and_value(_loss_of(fn))(params, x)
    mesh = ftp.simulated_mesh(shape, ("tp",))
    specs = {path: spec if p.ndim else P() for path, p in params.items()}
    step = ftp.shard(_loss_of(fn), mesh, specs, batch_specs=batch_spec, certify=True)
    loss, found = step(*(ftp.device_put(t, mesh, s) for t, s in ((params, specs), (x, batch_spec))))
    torch.testing.assert_close(loss, value, rtol=1e-11, atol=1e-11)
    found = ftp.device_get(found, mesh, specs)
    torch.testing.assert_close(found, grads, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [*KINDS])
def test_no_kernel_of_a_whole_sequence(kind, device):
    """Those of oneDNN, which CPUs take in float32, and of cuDNN have no rule and are no CPU's or
    GPU's alone. Rows of the batch need no collective but the gradients' sum.
    """
    fn, params = ftp.functionalize(KINDS[kind](3, 4, device="meta"))
    mesh = ftp.AbstractMesh((2,), ("dp",), device_type=device)
    step = ftp.shard(_loss_of(fn), mesh, P(), batch_specs=P(None, "dp"), strict=True)
    lowered = step.lower(params, torch.randn(5, 4, 3, device="meta"))
    targets = [str(n.target) for n in lowered.graph.graph.nodes]
    assert not any("rnn" in t or "lstm" in t or "gru" in t for t in targets)
    assert {c.op for c in lowered.collectives} == {"all_reduce"}


def test_states_that_are_given():
    fn, params = ftp.functionalize(nn.LSTM(3, 4, dtype=torch.float64))
    x, *states = (torch.randn(s, dtype=torch.float64) for s in ((5, 6, 3), (1, 6, 4), (1, 6, 4)))
    grads, value = torch.func.grad_and_value(_loss_of(fn))(params, x, *states)
    step = ftp.shard(
        _loss_of(fn), ftp.simulated_mesh((4,), ("dp",)), P(), batch_specs=P(None, "dp")
    )
    loss, found = step(params, *ftp.device_put((x, *states), step.mesh, P(None, "dp")))
    torch.testing.assert_close(loss, value, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found, grads, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", [*KINDS])
def test_many_sizes_of_batches_have_one_trace(kind):
    """Also of the second layer, whose input the parameters' gradient flows through."""
    module = KINDS[kind](3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    fn, params = ftp.functionalize(module)
    step = ftp.shard(
        _loss_of(fn), ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P(None, "dp")
    )
    for n in (5, 6, 7, 9):
        x = torch.randn(2, n, 3, dtype=torch.float64)
        grads, value = torch.func.grad_and_value(_loss_of(fn))(params, x)
        loss, found = step(params, x)
        torch.testing.assert_close(loss, value, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found, grads, rtol=1e-10, atol=1e-11)
    assert step.shapes.traces == 1
