"""Make a recorded graph functional: no writes, no attributes, captured tensors as inputs."""

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ftp.errors import TraceError, raise_all
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.written import writes
from ftp.torch_internals.error_texts import Meaning, meaning_of
from ftp.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.explain_errors import LEAKED, located
from ftp.tracing.recorder import Recorder, record
from ftp.tracing.restride import without_strides
from ftp.tracing.silu_gradient import fuse_silu_gradients

aten = torch.ops.aten


def storages(node: fx.Node) -> set[int]:
    val = node.meta.get("val")
    vals = val if isinstance(val, (list, tuple)) else (val,)
    return {v.untyped_storage()._cdata for v in vals if isinstance(v, Tensor)}


def functional_form(gm: fx.GraphModule, recorder: Recorder) -> fx.GraphModule:
    """The graph without in-place ops; some of torch's gradient formulas have them."""
    if not any(writes(n) for n in gm.graph.nodes):
        return gm
    _check_overlaps(gm.graph)
    if not rename_writes(list(gm.graph.nodes), recorder.mode):
        gm = _replay_functional(gm, recorder)
    raise_all(
        TraceError,
        (
            f"{n.target} writes to its argument{located(n.meta['source'])} and has no form that"
            " returns a new tensor."
            for n in gm.graph.nodes
            if writes(n)
        ),
    )
    return gm


def rename_writes(nodes: Sequence[fx.Node], mode: FakeTensorMode) -> bool:
    """Replace in-place ops on values without views by ops that return the new value. False, with
    the nodes unchanged, where other writes remain. They are all that may share memory.
    """
    sharing: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for storage in storages(node):
            sharing.setdefault(storage, []).append(node)
    new_targets: dict[fx.Node, OpOverload] = {}
    dtypes: dict[tuple[OpOverload, str, str], torch.dtype] = {}
    for node in nodes:
        if not (written := writes(node)):
            continue
        group = [n for s in storages(written[0]) for n in sharing[s]]
        target = _returning(node.target)
        plain = group[0].op == "call_function" and all(
            n is group[0] or (writes(n) and n.args[0] in group) for n in group
        )
        if target is None or not plain or len(written) != 1 or node.args[0] is not written[0]:
            return False
        operands = {n: f"%{i}" for i, n in enumerate(node.all_input_nodes)}
        kinds = [(n.meta["val"].ndim, n.meta["val"].dtype) for n in operands]  # that promote
        call = (target, str(mapped_arguments(node, operands.__getitem__)), str(kinds))
        if call not in dtypes:
            with mode:
                args, kwargs = mapped_arguments(node, lambda n: n.meta["val"])
                dtypes[call] = target(*args, **kwargs).dtype
        # The value written to keeps its dtype; a new one may be promoted.
        if dtypes[call] != node.meta["val"].dtype:
            return False
        new_targets[node] = target
    latest: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if any(n in latest for n in node.all_input_nodes):
            node.args = map_arg(node.args, lambda n: _newest(latest, n))
            node.kwargs = map_arg(node.kwargs, lambda n: _newest(latest, n))
        if node in new_targets:
            node.target = new_targets[node]
            latest[node.args[0]] = node  # type: ignore[index]
    return True


def _newest(latest: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while node in latest:
        node = latest[node]
    return node


@functools.cache
def _returning(target: Any) -> OpOverload | None:
    """``aten.add.Tensor`` of ``aten.add_.Tensor``, ``aten.pow.Tensor_Scalar`` of
    ``aten.pow_.Scalar``.
    """
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    if packet is None:
        return None
    same_name_first = sorted(packet.overloads(), key=lambda o: o != target._overloadname)
    for found in (getattr(packet, overload) for overload in same_name_first):
        if not found._schema.is_mutable and _takes(found) == _takes(target):
            return found
    return None


def _takes(target: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments]


def _replay_functional(gm: fx.GraphModule, recorder: Recorder) -> fx.GraphModule:
    for read in gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        if not read.users:  # a constant, which the graph has as a number
            gm.graph.erase_node(read)
    placeholders = gm.graph.find_nodes(op="placeholder")
    written = {v for node in gm.graph.nodes for w in writes(node) for v in _views_behind(w)}
    # A write through y.conj() leaves a conjugate, of which torch takes no real parts.
    conjugated = {n: found for n in gm.graph.nodes if (found := [*_behind_conjugates(n)])}

    class Replay(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            recorder.replayed = n.meta
            try:
                if n.target is aten.unfold.default and n in written:
                    return _windows(n.meta["source"], *self.fetch_args_kwargs_from_env(n)[0])
                found = super().run_node(n)
                for memory in conjugated.get(n, ()):
                    self.env[memory].copy_(self.env[memory].clone())
                return found
            except RuntimeError as error:
                if meaning_of(error) is not Meaning.WRITES_STRIDED_VIEW:
                    raise
                raise TraceError(
                    f"{n.target}{located(n.meta['source'])} writes through as_strided of a view."
                    " Write through slices, transpose or view instead."
                ) from error

    def flat(*values: Tensor) -> Any:
        with recorder.recording():
            replay = Replay(gm, garbage_collect_values=not conjugated)
            replay.extra_traceback = False  # errors name the user's line
            return replay.run(*values)

    with recorder.mode:
        new = record(
            recorder,
            torch.func.functionalize(flat, remove="mutations"),
            [n.meta["val"] for n in placeholders],
        )
    for old, node in zip(placeholders, new.graph.find_nodes(op="placeholder"), strict=True):
        node.meta |= {k: v for k, v in old.meta.items() if k == "ftp_constant"}
    return new


def _windows(line: str, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """``x.unfold(dim, size, step)`` of windows that do not overlap, by other views: torch's
    functional form of a write to its own zeroes the elements between windows.
    """
    dim %= x.ndim
    count = (x.shape[dim] - size) // step + 1
    if count * step > x.shape[dim]:
        raise TraceError(
            f"unfold{located(line)} is written to: its windows of size {size} have gaps, and the"
            f" last one ends the dim of size {x.shape[dim]}; no form of this write returns a new"
            " tensor. Write through x.narrow."
        )
    parts = x.narrow(dim, 0, count * step).unflatten(dim, (count, step))
    return parts.narrow(dim + 1, 0, size).movedim(dim + 1, -1)


def _check_overlaps(graph: fx.Graph) -> None:
    """Refuse writes to views that hold an element of their tensor more than once."""
    failures: dict[str, str] = {}  # one for a line: its gradient writes to the same view
    for node in graph.nodes:
        for view in (v for value in writes(node) for v in _views_behind(value) if _overlaps(v)):
            line = node.meta["source"]
            failures.setdefault(
                line,
                f"{node.target}{located(line)} writes to {view.target}, which holds elements of its"
                " tensor more than once: torch does not define the result. Write to a copy,"
                " view.clone().",
            )
    raise_all(TraceError, failures.values())


def _views_behind(value: fx.Node) -> Iterator[fx.Node]:
    """A value and the views that it is a view of."""
    memory: fx.Node | None = value
    while memory is not None:
        yield memory
        shared = (n for n in memory.all_input_nodes if storages(n) & storages(value))
        memory = next(shared, None)


def _behind_conjugates(node: fx.Node) -> Iterator[fx.Node]:
    """The values whose conjugates a node writes to."""
    for value in writes(node):
        views = [*_views_behind(value)]
        if any(view.target is aten._conj.default for view in views):
            yield views[-1]


def _overlaps(view: fx.Node) -> bool:
    """Whether a view's strides may lead to one element by several indices."""
    if view.target not in (aten.as_strided.default, aten.expand.default, aten.unfold.default):
        return False
    x, reached = view.meta["val"], 0  # the largest offset by the dims so far
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reached:
                return True
            reached += stride * (size - 1)
    return False


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
    is_copy = node.target is aten.copy.default and _alike(node, node.args[1])
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
    """Normalise a graph: no aliases, fills as constants, no negative dims, devices without an
    index, no unused nodes. Some kernels read the size of a negative dim from foreign memory, and
    raise by chance where a shard is empty.
    """
    graph = gm.graph
    without_strides(graph)
    for node in list(graph.nodes):
        node.meta.setdefault("source", "")
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and type(node.meta.get("val", node)) in (
            int,
            type(None),
        ):
            _replace_by_number(node)  # sizes among an op's results, as of flash attention
            continue
        if (same := _aliased(node)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            continue
        _make_constant(node)
        given = node.args, node.kwargs
        counted = from_the_front(node.target, *given, lambda n: n.meta["val"])
        if counted[0] is not given[0] or counted[1] is not given[1]:  # setting them takes long
            node.args, node.kwargs = counted
        if _is_seed(node):
            _fill(node, _FILLED_LIKE[node.target](node))
        made_on = node.kwargs.get("device")
        if made_on is not None and torch.device(made_on).type in (traced_on.type, device.type):
            node.kwargs = {**node.kwargs, "device": device}
    fuse_silu_gradients(graph)
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


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


def _alike(a: fx.Node, b: Any) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def lift_attributes(gm: fx.GraphModule, recorder: Recorder) -> None:
    """Tensors made from numbers inside the function: single numbers become ops, longer ones
    captured tensors.
    """
    graph = gm.graph
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        made = getattr(gm, node.target)
        if isinstance(made, FakeTensor):
            raise TraceError(f"The function uses {LEAKED}")
        with graph.inserting_before(node):
            if made.numel() == 1:
                new = graph.call_function(
                    aten.full.default,
                    (list(made.shape), made.item()),
                    {"dtype": made.dtype, "device": made.device},
                )
            else:
                new = graph.placeholder("captured")
                new.meta["ftp_constant"] = len(recorder.constants)
                recorder.constants.append(made)
        new.meta |= {
            "val": recorder.fake(made.shape, made.dtype),
            "source": node.meta.get("source", ""),
        }
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def constants_last(
    gm: fx.GraphModule, recorder: Recorder, names: Sequence[str]
) -> tuple[Tensor, ...]:
    """Make captured tensors inputs after the function's own inputs, and drop unused ones. Name the
    inputs; no op has the name of an input.
    """
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [n for n in placeholders if "ftp_constant" not in n.meta]
    constants = [n for n in placeholders if "ftp_constant" in n.meta]
    for node in constants:
        if not node.users:
            graph.erase_node(node)
    kept = [node for node in constants if node.users]
    for node in reversed([*inputs, *kept]):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
    taken = set(names)
    for node in graph.nodes:
        if node.op != "placeholder" and node.name in taken:
            node.name = graph._graph_namespace.create_name(node.name, None)
    named = (*names, *(f"constant_{i}" for i in range(len(kept))))
    for name, node in zip(named, (*inputs, *kept), strict=True):
        node._rename(re.sub(r"\W+", "_", name).strip("_") or "input")
        node.target = node.name
    output = graph.output_node()
    returned = output.args[0]
    output.args = (tuple(returned) if isinstance(returned, list | tuple) else (returned,),)
    gm.graph = graph
    return tuple(recorder.constants[node.meta["ftp_constant"]] for node in kept)
