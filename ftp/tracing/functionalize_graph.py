"""Make a recorded graph functional: no writes, no attributes, captured tensors as inputs."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ftp.errors import TraceError, raise_all
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.written import writes, writing
from ftp.torch_internals.error_texts import Meaning, meaning_of
from ftp.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.explain_errors import LEAKED, located
from ftp.tracing.recorder import Recorder, record

aten = torch.ops.aten


def storages(node: fx.Node) -> set[int]:
    val = node.meta.get("val")
    vals = val if isinstance(val, (list, tuple)) else (val,)
    return {v.untyped_storage()._cdata for v in vals if isinstance(v, Tensor)}


def functional_form(gm: fx.GraphModule, recorder: Recorder) -> fx.GraphModule:
    """The graph without in-place ops; some of torch's gradient formulas have them."""
    if not (writers := [n for n in writing(gm.graph.nodes) if writes(n)]):
        return gm
    _check_overlaps(writers)
    if not rename_writes(list(gm.graph.nodes), recorder.mode):
        gm = _replay_functional(gm, recorder)
    raise_all(
        TraceError,
        (
            f"{n.target} writes to its argument{located(n.meta['source'])} and has no form that"
            " returns a new tensor."
            for n in writing(gm.graph.nodes)
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
    for node in writing(nodes):
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
        if not latest.keys().isdisjoint(node.all_input_nodes):
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
                if (advice := _UNWRITTEN.get(meaning_of(error))) is None:
                    raise
                raise TraceError(
                    f"{n.target}{located(n.meta['source'])} writes through {advice} instead."
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


_UNWRITTEN: dict[Meaning | None, str] = {
    Meaning.WRITES_STRIDED_VIEW: "as_strided of a view. Write through slices, transpose or view",
    Meaning.WRITES_CONJUGATE: "a part of a view of x.conj(). Write to x[...].real and x[...].imag",
}


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


def _check_overlaps(writing: Sequence[fx.Node]) -> None:
    """Refuse writes to views that hold an element of their tensor more than once."""
    failures: dict[str, str] = {}  # one for a line: its gradient writes to the same view
    for node in writing:
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
