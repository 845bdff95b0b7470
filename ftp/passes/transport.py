"""Replace collectives that backends lack: those of missing dtypes are sent and padded as bytes or
reduced in a wider dtype; maxima and minima that keep NaN are reduced as integers.
"""

from typing import Any

import torch
from torch import fx

from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.ops.windows import HALO_EXCHANGE
from ftp.passes.copy_elimination import copied

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
REDUCING = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)
# Dtypes that every backend takes. The choice depends only on the dtype, so that ranks agree.
TAKEN = frozenset(
    (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8,
    )
)  # fmt: skip
# An overflowing sum of integers, truncated from the wider dtype, wraps around as in its own.
WIDER = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
WITHOUT_ZERO = frozenset((torch.float8_e8m0fnu,))
REARRANGING = frozenset(
    (
        aten.constant_pad_nd.default, aten.reshape.default, aten.contiguous.default,
        aten.permute.default, aten.slice.Tensor,
    )
)  # fmt: skip


def as_backends_take(graph: fx.Graph) -> fx.Graph:
    """The graph with its collectives in dtypes that every backend has; the same graph if no
    collective changes.
    """
    if all(_dtype(node) in (*TAKEN, None) for node in graph.nodes):
        return graph
    new, _ = copied(graph)
    for node in list(new.nodes):
        dtype = _dtype(node)
        if dtype is None or dtype in TAKEN:
            continue
        if node.target not in REDUCING:
            _pad_as_bytes(new, node)
            _convert(new, node, aten.view.dtype, torch.uint8, dtype)
            if node.target is c10d.all_to_all_single.default:
                x, received, sent, group = node.args
                node.args = (
                    x,
                    [n * dtype.itemsize for n in received],
                    [n * dtype.itemsize for n in sent],
                    group,
                )
        elif not dtype.is_complex:
            _convert(new, node, aten._to_copy.default, WIDER.get(dtype, torch.float32), dtype)
    return new


def keeping_nan(graph: fx.Graph) -> fx.Graph:
    """Reduce maxima and minima of floats as integers in the same order, NaN last: gloo's and NCCL's
    reductions of floats lose NaN. The same graph where there are none.
    """
    if not any(_may_lose_nan(node) for node in graph.nodes):
        return graph
    new, _ = copied(graph)
    for node in list(new.nodes):
        if _may_lose_nan(node):
            dtype = node.meta["collective"].dtype
            if dtype in (torch.float16, torch.bfloat16):  # backends take no 16-bit integers
                _convert(new, node, aten._to_copy.default, torch.float32, dtype)
            _as_integers(new, node, torch.int64 if dtype is torch.float64 else torch.int32)
    return new


def _may_lose_nan(node: fx.Node) -> bool:
    dtype = _dtype(node)
    is_extremum = node.target is c10d.all_reduce.default and node.args[1] in ("max", "min")
    return is_extremum and dtype is not None and dtype.is_floating_point


_NAN = {torch.int32: 0x7FC00000, torch.int64: 0x7FF8000000000000}


def _as_integers(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> None:
    """Reduce floats as integers, of which the negative ones have their other bits inverted."""
    most, last = torch.iinfo(dtype).max, _NAN[dtype]
    last = last if node.args[1] == "max" else last - most - 1  # with the sign bit

    def inverted(x: fx.Node) -> fx.Node:
        sign = graph.call_function(
            aten.bitwise_right_shift.Tensor_Scalar, (x, torch.iinfo(dtype).bits - 1)
        )
        mask = graph.call_function(aten.bitwise_and.Scalar, (sign, most))
        return graph.call_function(aten.bitwise_xor.Tensor, (x, mask))

    given: Any = node.args[0]
    with graph.inserting_before(node):
        is_number = graph.call_function(aten.eq.Tensor, (given, given))
        bits = graph.call_function(aten.view.dtype, (given, dtype))
        bits = graph.call_function(aten.where.ScalarOther, (is_number, bits, last))
        node.args = (inverted(bits), *node.args[1:])
    for wait in list(node.users):
        users = list(wait.users)
        with graph.inserting_before(wait.next):
            floats = torch.float64 if dtype is torch.int64 else torch.float32
            back = graph.call_function(aten.view.dtype, (inverted(wait), floats))
        for user in users:
            user.replace_input_with(wait, back)


def pads_as_kernels_take(graph: fx.Graph) -> fx.Graph:
    """The graph with operands of collectives padded in a dtype that has a padding kernel; the same
    graph if no padding changes.
    """
    if all(_dtype(node) not in WITHOUT_ZERO for node in graph.nodes):
        return graph
    new, _ = copied(graph)
    for node in list(new.nodes):
        _pad_as_bytes(new, node)
    return new


def _pad_as_bytes(graph: fx.Graph, node: fx.Node) -> None:
    """Pad a collective's operand as bytes, where its dtype has no zero."""
    dtype = _dtype(node)
    if dtype not in WITHOUT_ZERO:
        return
    x: Any = node.args[0]
    while x.target in REARRANGING:
        if x.target is aten.constant_pad_nd.default:
            with graph.inserting_before(x):
                given = graph.call_function(aten.view.dtype, (x.args[0], torch.uint8))
            x.args = (given, *x.args[1:])
            with graph.inserting_after(x):
                back = graph.call_function(aten.view.dtype, (x, dtype))
            x.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
            x = given
        x = x.args[0]


def _dtype(node: fx.Node) -> torch.dtype | None:
    if node.target in (ALL_TO_ALL_ROWS, HALO_EXCHANGE):  # sends bytes
        return None
    return node.meta["collective"].dtype if "collective" in node.meta else None


def _convert(
    graph: fx.Graph, node: fx.Node, by: Any, there: torch.dtype, back: torch.dtype
) -> None:
    """Insert conversions before a collective and after its wait."""

    def converted(x: Any, dtype: torch.dtype) -> fx.Node:
        if by is aten.view.dtype:
            return graph.call_function(by, (x, dtype))
        return graph.call_function(by, (x,), {"dtype": dtype})

    with graph.inserting_before(node):
        node.args = (converted(node.args[0], there), *node.args[1:])
    for wait in list(node.users):
        with graph.inserting_after(wait):
            own = converted(wait, back)
        wait.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)
