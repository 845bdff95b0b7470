"""Kernels that misread operands of some strides are given others."""

from collections.abc import Callable, Sequence
from typing import Any

import op_calls
import pytest
import torch
from strategies import samples
from torch import Tensor
from torch.utils import _pytree as pytree

import ftp
from ftp import P
from ftp.ops.kernel_strides import _TAKES, kernel_of, laid_out, traced_kernels
from ftp.rules.own import RULES

aten = torch.ops.aten
F = torch.nn.functional


def _reversed(x: Tensor) -> Tensor:
    dims = [*reversed(range(x.ndim))]
    return x.permute(dims).contiguous().permute(dims)


def _stepped(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": _reversed,
    "swapped": lambda x: x.mT.contiguous().mT,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "every second": _stepped,
}


def _results(call: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    torch.manual_seed(0)
    try:
        found = call(*args, **kwargs)
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    return [x.clone() for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]


def _misread(op: Any, call: Any, at: Sequence[int] | None = None) -> list[str]:
    """The operands of samples of an op, at these positions, that ``call`` misreads in a layout."""
    found = []
    for args, kwargs in samples(op):
        given = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        if (due := _results(op, *given)) is None:
            continue
        for i, x in enumerate(args):
            if not isinstance(x, Tensor) or x.numel() < 2 or not (at is None or i in at):
                continue
            for name, layout in LAYOUTS.items():
                if x.ndim < 2 and name != "every second":
                    continue
                other = [*args[:i], layout(x), *args[i + 1 :]]
                got = _results(call, other, kwargs)
                if got is None or not all(_is_near(*xs) for xs in zip(got, due, strict=True)):
                    found.append(f"{op}: operand {i}, {name}")
    return found


def _is_near(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    tolerance = 1e-9 if x.dtype in (torch.float64, torch.complex128, torch.int64) else 1e-2
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("op", [op for op in _TAKES if op not in op_calls.ELSEWHERE], ids=str)
def test_operands_of_any_strides(op: Any):
    assert not _misread(op, kernel_of(op), _TAKES[op][0])


# Their results hold memory orders, or they read memory as it lies; `scaled_mm` says what it takes.
KNOWN = {
    aten._linalg_det.default, aten._linalg_slogdet.default, aten._reshape_alias.default,
    aten.view.default, aten.view.dtype, aten._unsafe_view.default, aten.view_as_complex.default,
    aten.view_as_complex_copy.default, aten._scaled_mm.default, aten._scaled_mm_v2.default,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_other_kernel_misreads():
    ops = [op for op in RULES if op.namespace in ("aten", "prims") and op not in KNOWN]
    drawn = ("rand", "bernoulli", "dropout", "empty", "normal", "multinomial")
    found, seen = [], 0
    for op in ops:
        if op in op_calls.ELSEWHERE or op in _TAKES or any(name in str(op) for name in drawn):
            continue
        seen += 1
        found += _misread(op, op)
    assert seen > 400
    assert not found


W = torch.linspace(-1, 2, 64, dtype=torch.float64).sin().reshape(8, 8)
X = torch.linspace(-2, 3, 96, dtype=torch.float64).cos().reshape(2, 6, 8)


def _attention(w: Tensor, x: Tensor) -> Tensor:
    """Channels of images, in whose order a trace keeps them and a gather does not."""
    images = ftp.constrain((x @ w).mT.sin(), P())
    q, k, v = (images * n for n in (1, 0.5, -2))
    heads = (z.reshape(2, 2, 4, 6).mT for z in (q, k, v))
    out = F.scaled_dot_product_attention(*heads)
    return (out * torch.arange(6.0, dtype=out.dtype)[:, None]).sin().sum()


@pytest.mark.parametrize("spec", [P(None, "tp"), P("tp")], ids=str)
def test_attention_after_a_gather(spec: P):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(_attention, mesh, P(), batch_specs=P(None, *spec))
    grads, value = torch.func.grad_and_value(_attention)(W, X)
    torch.testing.assert_close(step(W, X), (value, grads), rtol=1e-10, atol=1e-10)
    assert "flash" in str(step.lower(W, X))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_rank(compile: bool):
    """The op itself, which plain torch misreads."""
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = X.reshape(2, 2, 4, 6)
    mesh = ftp.simulated_mesh((1,), ("tp",))
    step = ftp.spmd(lambda q: op(_reversed(q), q, q)[0], mesh, P(), compile=compile)
    torch.testing.assert_close(step(q), op(q, q, q)[0], rtol=1e-10, atol=1e-10)


def test_operands_that_fit_are_not_copied():
    q = X.reshape(2, 2, 4, 6)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    at, fits = _TAKES[op]
    assert all(x is q for x in laid_out([q, q, q], at, fits))
    assert traced_kernels()[op](q, q, q) is NotImplemented
