"""Ops that run along a dim: running sums, orders."""

from collections.abc import Callable
from typing import Any

from torch import fx

from ftp.ops.reverse_scans import FROM_START, REVERSED
from ftp.rules.forms import along_dims
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.overloads import aten
from ftp.rules.rule import LocalHook
from ftp.torch_internals.op_types import OpOverload

along_dims(aten.cumsum.default, linear=[(0,)])
along_dims(
    aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.logcumsumexp.default,
    aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable,
    aten.topk.default,
    local=unless_empty(),
)  # fmt: skip


def _from_the_end(scan: OpOverload) -> LocalHook:
    def local(op: LocalOp) -> fx.Node:
        x, dim = op.args
        scanned = op.emit(scan, op.emit(aten.flip.default, x, [dim]), dim)
        return op.emit(aten.flip.default, scanned, [dim])

    return local


for _reverse, _scan in FROM_START.items():
    _linear = [(0,)] if _scan is aten.cumsum.default else ()
    along_dims(_reverse, linear=_linear, local=unless_empty(_from_the_end(_scan)))


def scan_between_flips(
    call: Any, made: Callable[[Any], Any], ndim: int
) -> tuple[OpOverload, Any, int] | None:
    """The scan from the other end that a call computes as ``scan(x.flip(dim)).flip(dim)``: its op,
    operand and dim. None for another call.

    Args:
        made: gives the call, with ``target`` and ``args``, that makes a value; None for an input.
    """
    scanned, dim = _flipped(call, ndim)
    scan = made(scanned)
    if scan is None or scan.target not in REVERSED or scan.kwargs:
        return None
    x, dim_before = _flipped(made(scan.args[0]), ndim)
    return (REVERSED[scan.target], x, dim) if dim_before == dim == scan.args[1] % ndim else None


def _flipped(call: Any, ndim: int) -> tuple[Any, int]:
    """What a call flips, and along which dim; None and -1 where it flips nothing, or several."""
    if call is None or call.target is not aten.flip.default or len(call.args) < 2 or not ndim:
        return None, -1
    x, dims = call.args
    return (x, dims[0] % ndim) if len(dims) == 1 else (None, -1)
