"""Normalise a recorded graph: no aliases, fills as constants, dims counted from the front."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ftp.ops.mapped_arguments import mapped_arguments
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.restride import without_strides
from ftp.tracing.silu_gradient import fuse_silu_gradients
from ftp.tracing.zero_tangents import drop_zero_tangents, is_alike

aten = torch.ops.aten


_ALIASES = {
    aten._conj.default, aten.alias.default, aten.detach.default, aten.lift.default,
    aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.positive.default,
}  # fmt: skip


_FILLED_LIKE: dict[Any, Callable[[fx.Node], Any]] = {
    aten.ones_like.default: lambda node: 1,
    aten.full_like.default: lambda node: node.args[1],
}


def _is_seed(node: fx.Node) -> bool:
    """Whether a node is ``ones_like`` of a scalar that nothing else reads: the seed of a backward
    pass from a loss that is not returned. The loss need not be computed then.
    """
    if node.target not in _FILLED_LIKE or node.meta["val"].ndim:
        return False
    like: Any = node.args[0]
    return len(like.users) == 1


_EMPTY_LIKE = (aten.empty_like.default, aten.new_empty.default)


def _aliased(node: fx.Node) -> Any:
    """The operand whose values a node returns unchanged; None for another node."""
    if node.target is aten._conj.default and node.meta["val"].is_complex():
        given: Any = node.args[0]
        if not isinstance(given, fx.Node) or given.target is not aten._conj_physical.default:
            return None
        return given.args[0]
    if node.target in _ALIASES:
        return node.args[0]
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1:  # in the derivative of x ** 2
        is_equal = is_alike(node, node.args[0]) and not node.meta["val"].is_complex()
        return node.args[0] if is_equal else None
    is_copy = node.target is aten.copy.default and is_alike(node, node.args[1])
    return node.args[1] if is_copy else None


# Lazy views: their memory, which collectives send, holds another number.
_LAZY: dict[Any, Any] = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


def _make_constant(node: fx.Node) -> None:
    """Write views as ``view``, lazy ones as the op, and fills as ``full``, ``full_like`` or
    ``zeros``.
    """
    target = node.target
    if target is aten._conj.default and not isinstance(node.args[0], fx.Node):
        number: Any = node.args[0]
        _fill(node, number.conjugate())  # in the derivative of a product with a number
    elif target in _LAZY:
        node.target = _LAZY[target]
    elif target in (aten._unsafe_view.default, aten._reshape_alias.default):
        node.target, node.args = aten.view.default, node.args[:2]
    elif target is aten._to_copy.default and not isinstance(node.args[0], fx.Node):
        _fill(node, node.args[0])  # a number that meets a tensor which torch.vmap maps over
    elif target is aten._efficientzerotensor.default:
        node.target = aten.zeros.default  # autograd's zero tensor, which has no memory
    elif target in (aten.fill.Scalar, aten.zero.default):
        like: Any = node.args[0]
        val = node.meta["val"]
        if like.target in _EMPTY_LIKE and like.args[0].meta["val"].shape == val.shape:
            like = like.args[0]
        node.target, node.args = aten.full_like.default, (like, *(node.args[1:] or (0,)))
        node.kwargs = {} if like.meta["val"].dtype == val.dtype else {"dtype": val.dtype}


def _fill(node: fx.Node, number: Any) -> None:
    """Make a node the 0-d tensor that holds a number."""
    val = node.meta["val"]
    node.target, node.args = aten.full.default, ([], number)
    node.kwargs = {"dtype": val.dtype, "device": val.device}


def clean(gm: fx.GraphModule, traced_on: torch.device, device: torch.device) -> None:
    """Normalise a graph: no aliases, fills as constants, no zero tangents, no negative dims,
    devices without an index, no unused nodes. Some kernels read the size of a negative dim from
    foreign memory, and raise by chance where a shard is empty.
    """
    graph = gm.graph
    without_strides(graph)
    drop_zero_tangents(graph)
    for node in list(graph.nodes):
        node.meta.setdefault("source", "")
        if node.op == "call_function" and not _has_one_form(node.target):
            _normalise(node)
        made_on = node.kwargs.get("device")
        if made_on is not None and torch.device(made_on).type in (traced_on.type, device.type):
            node.kwargs = {**node.kwargs, "device": device}
    fuse_silu_gradients(graph)
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


@functools.cache
def _has_one_form(target: Any) -> bool:
    """Whether `_normalise` changes no call of an op."""
    is_changed = target in _LAZY or target in _FILLED_LIKE or target in _ALIASES
    return not (is_changed or target in _OF_TWO_FORMS or _dim_arguments(target))


_OF_TWO_FORMS = {
    operator.getitem, aten.pow.Tensor_Scalar, aten.copy.default, aten._unsafe_view.default,
    aten._reshape_alias.default, aten._to_copy.default, aten._efficientzerotensor.default,
    aten.fill.Scalar, aten.zero.default,
}  # fmt: skip


def _normalise(node: fx.Node) -> None:
    """Replace a node that equals its operand or a number, or write its call in the normal form."""
    if node.target is operator.getitem and type(node.meta.get("val", node)) in (int, type(None)):
        _replace_by_number(node)  # sizes among an op's results, as of flash attention
        return
    if (same := _aliased(node)) is not None:
        node.replace_all_uses_with(same)
        node.graph.erase_node(node)
        return
    _make_constant(node)
    given = node.args, node.kwargs
    counted = from_the_front(node.target, *given, lambda n: n.meta["val"])
    if counted[0] is not given[0] or counted[1] is not given[1]:  # setting them takes long
        node.args, node.kwargs = counted
    if _is_seed(node):
        _fill(node, _FILLED_LIKE[node.target](node))


def _replace_by_number(node: fx.Node) -> None:
    value = node.meta["val"]
    for user in list(node.users):
        if user.op == "call_function":
            given = mapped_arguments(user, lambda n: value if n is node else n)
            user.args, user.kwargs = given
    if not node.users:
        node.graph.erase_node(node)


_DIMS = ("dim", "dims", "dim0", "dim1", "dim2", "dimension", "axis")
# Ops whose dims are those of the result, which has one more than the operand.
_OF_ONE_MORE = ("aten::unsqueeze", "aten::unsqueeze_copy", "aten::stack", "aten::diag_embed")


@functools.cache
def _dim_arguments(target: Any) -> list[tuple[int, str]]:
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return []
    return [
        (i, a.name)
        for i, a in enumerate(target._schema.arguments)
        if a.name in _DIMS and "int" in str(a.type)
    ]


def from_the_front(
    target: Any, args: Any, kwargs: Any, val: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """A call's arguments with its dims as non-negative numbers.

    Args:
        val: gives the tensor of an argument.
    """
    for i, name in _dim_arguments(target):
        given = args[i] if i < len(args) else kwargs.get(name)
        dims = [given] if isinstance(given, int) else given
        if dims is None or all(d >= 0 for d in dims):
            continue
        first = args[0] if args else next(iter(kwargs.values()))
        ndim = max(val(x).ndim for x in (first if isinstance(first, list | tuple) else [first]))
        at = next(
            (k for k, a in enumerate(target._schema.arguments) if a.name == "input_sizes"), None
        )
        if at is not None:  # a gradient op has the dims of its forward op's input
            ndim = len(args[at])
        ndim = max(ndim + (target._schema.name in _OF_ONE_MORE), 1)
        counted = [d + ndim if d < 0 else d for d in dims]
        new = counted[0] if isinstance(given, int) else type(given)(counted)
        args = (*args[:i], new, *args[i + 1 :]) if i < len(args) else args
        kwargs = kwargs if i < len(args) else {**kwargs, name: new}
    return args, kwargs
