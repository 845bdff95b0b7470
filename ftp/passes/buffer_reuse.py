"""Write results to the memory of operands that are not needed any more: donated weights and moments
are updated in place.
"""

import functools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import getitem
from typing import Any, cast

import torch
from torch import fx
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx.node import map_arg
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.meta_results import FakeOf, is_plain, meta_result
from ftp.passes.aliasing import ALL_REDUCE, WAIT, WHOLE_VIEWS, families, is_view, last_uses
from ftp.rules.op_kinds import ONTO_FIRST
from ftp.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from ftp.torch_internals.modes import DisableTorchDispatch
from ftp.torch_internals.op_types import OpOverload
from ftp.torch_internals.process_groups import load_python_kernels

aten = torch.ops.aten


def with_values(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The same module, with each node's fake result for these inputs in ``meta["val"]``."""
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if mode is None else mode
    fake = FakeOf(mode)
    given = [
        fake.like(x) if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) else x
        for x in inputs
    ]
    with torch.no_grad(), mode, python_forms(mode):
        _FakeValues(gm, mode, fake).find(given)
    return gm


def python_forms(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """A context for dynamic sizes, under which ops run their Python form, which takes symbolic
    ints.
    """
    if mode.shape_env is None:
        return nullcontext()
    from ftp.torch_internals.modes import enable_python_dispatcher  # takes long to import

    return enable_python_dispatcher()


class _FakeValues(FakeTensorProp):
    """Computes equal calls, as of repeated layers, once; they may share one fake tensor. Views are
    equal if they are views of one fake tensor.
    """

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode, fake: FakeOf):
        super().__init__(gm, mode)
        self.fake = fake
        self.known: dict[Any, Any] = {}
        self.layouts: dict[int, str] = {}  # by id; ``env`` keeps all values alive

    def find(self, inputs: Sequence[Any]) -> None:
        """Compute all values, without `torch.fx.Interpreter.run`, which takes half of the time."""
        given, graph = iter(inputs), cast(fx.Graph, self.module.graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.env[node] = node.meta["val"] = next(given)
            elif node.op != "output":
                self.env[node] = self.run_node(node)

    def run_node(self, n: fx.Node) -> Any:
        target: Any = n.target
        if target is getitem and isinstance(n.args[0], fx.Node):
            n.meta["val"] = self.env[n.args[0]][n.args[1]]
            return n.meta["val"]
        if not isinstance(target, OpOverload) or target._schema.is_mutable:
            return self._asked(n)
        described = self._number if is_view(n) else self._layout
        key = (target, str(mapped_arguments(n, described)))
        if key not in self.known:
            foreseen = self._foreseen(n)
            self.known[key] = self._asked(n) if foreseen is None else foreseen
        n.meta["val"] = self.known[key]
        return self.known[key]

    def _asked(self, n: fx.Node) -> Any:
        """The result that torch's fake tensors find."""
        if getattr(n.target, "namespace", "") in (WAIT.namespace, "ftp"):  # may be a collective
            load_python_kernels()
        return super().run_node(n)

    def _foreseen(self, n: fx.Node) -> Any:
        """The fake result of a plain op, or of a composite one, from metadata, or of a sum over
        ranks; None for others.
        """
        target: Any = n.target
        if target is WAIT or target is ALL_REDUCE:
            x = self.env[n.all_input_nodes[0]]
            is_known = type(x) is FakeTensor and not x._has_symbolic_sizes_strides
            return self.fake.like(x) if is_known and x.is_contiguous() else None
        if not is_plain(target) and target not in _COMPOSITE:
            return None
        args, kwargs = mapped_arguments(n, self.env.__getitem__)
        with DisableTorchDispatch():
            found = meta_result(n.target, args, kwargs)  # type: ignore[arg-type]
            if found is None:
                return None
            device = next(
                x.fake_device for x in map(self.env.get, n.all_input_nodes) if type(x) is FakeTensor
            )
            if isinstance(found, torch.Tensor):
                return self.fake(found, device)
            return type(found)([self.fake(part, device) for part in found])

    def _number(self, operand: fx.Node) -> Any:
        value = self.env[operand]
        return f"tensor {id(value)}" if isinstance(value, torch.Tensor) else value

    def _layout(self, operand: fx.Node) -> Any:
        """The properties of an operand that determine an op's result."""
        value = self.env[operand]
        if not isinstance(value, torch.Tensor):
            return value
        found = self.layouts.get(id(value))
        if found is None:
            device = value.fake_device if type(value) is FakeTensor else value.device
            found = f"{tuple(value.shape)} {value.stride()} {value.dtype} {device}"
            self.layouts[id(value)] = found
        return found


_COMPOSITE = (
    aten.contiguous.default, aten.reshape.default, aten.silu_backward.default,
    aten.where.ScalarOther,
)  # fmt: skip


def reuse_memory_in(graph: fx.Graph, donated: Collection[int] = ()) -> None:
    """Let elementwise ops of a graph that the caller owns, and those that change some elements,
    write their result to the memory of an operand of equal shape, strides and dtype that no later
    node reads.

    Only results of the graph's own ops and the inputs at positions ``donated`` are written to. An
    output in an input's memory, or written to a view, is a new tensor object, which autograd takes
    for no view. The graph must come from `with_values`.

    Later readers whose results are small, such as the gather of targets' logits after their exp,
    are moved before the op that writes.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    free = {inputs[i] for i in donated}
    family = families(graph)
    last = last_uses(nodes, family)
    kept: dict[fx.Node, fx.Node] = {}  # per family in another's memory, the operand it overwrites
    written: set[fx.Node] = set()
    through_views: set[fx.Node] = set()
    readers = _Readers(nodes, family)

    def base(node: fx.Node) -> fx.Node:
        found = family[node]
        while found in kept:
            found = family[kept[found]]
        return found

    for at, node in enumerate(nodes):
        target = in_place(node)
        if target is None or not node.users or node in readers.moved:
            continue
        first = node.args[0]
        if not isinstance(first, fx.Node) or not _same_layout(first, node):
            continue
        root = base(first)
        if (
            (is_view(first) and first not in written and not _is_all_of(first, root))
            or any(base(other) is root for other in _others(node))
            or not (root in free or _is_fresh(root))
            or not (last[root] <= at or readers.move_before(node, root))
        ):
            continue
        node.target = target
        if first in through_views or (is_view(first) and first not in written):
            through_views.add(node)
        written.add(node)
        kept[family[node]] = first
        last[root] = last[family[node]]
        readers.join(root, family[node])
    output = graph.output_node()
    taken: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(output):
        for result in dict.fromkeys(output.all_input_nodes):
            is_of_input = base(result).op == "placeholder" and base(result) is not family[result]
            if is_of_input or result in through_views:
                taken[result] = graph.call_function(aten.detach.default, (result,))
    output.args = (map_arg(output.args[0], lambda n: taken.get(n, n)),)


class _Readers:
    """The nodes that read the memory of a family, and the nodes that were moved."""

    def __init__(self, nodes: Sequence[fx.Node], family: dict[fx.Node, fx.Node]):
        self.moved: set[fx.Node] = set()
        self._position = {node: at for at, node in enumerate(nodes)}
        self._of: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            for root in {family[x] for x in node.all_input_nodes}:
                self._of.setdefault(root, []).append(node)

    def join(self, root: fx.Node, other: fx.Node) -> None:
        """Record that a family is in the memory of another one."""
        self._of[root] = [*self._of.get(root, ()), *self._of.get(other, ())]

    def move_before(self, node: fx.Node, root: fx.Node) -> bool:
        """Move all later readers, and what they need, before a node if all of it is small."""
        at, readers = self._position[node], self._of[root]
        if not all(_is_of_torch(x) for x in readers):  # a collective reads until its wait
            return False
        found: set[fx.Node] = set()
        waiting = [x for x in readers if self._position[x] > at]
        while waiting:
            x = waiting.pop()
            if self._position[x] < at or x in found:
                continue
            if len(found) == _MOST_MOVED or not _may_move(x, node):
                return False
            found.add(x)
            waiting.extend(x.all_input_nodes)
        for x in sorted(found):
            node.prepend(x)
            self._position[x] = at
        self.moved |= found
        return True


def _may_move(x: fx.Node, node: fx.Node) -> bool:
    """Whether ``x`` may run before ``node`` if what it needs does."""
    return (
        x is not node
        and _is_of_torch(x)
        and not x.target._schema.is_mutable  # type: ignore[union-attr]
        and torch.Tag.nondeterministic_seeded not in x.target.tags  # type: ignore[union-attr]
        and x.meta.get("branch", ()) == node.meta.get("branch", ())
        and _is_small(x, node)
    )


_MOST_MOVED = 16  # nodes before one that writes
_SMALL = 8  # times as many elements has what is overwritten as the result of a node that is moved


def _is_of_torch(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def _is_small(node: fx.Node, beside: fx.Node) -> bool:
    x, y = node.meta.get("val"), beside.meta["val"]
    values: list[Any] = [x, y]
    if not isinstance(x, FakeTensor) or any(v._has_symbolic_sizes_strides for v in values):
        return False
    return _SMALL * x.numel() <= y.numel()


def _is_all_of(view: fx.Node, root: fx.Node) -> bool:
    """Whether a view has each element of the memory that an op of torch allocated, once."""
    while view is not root and view.target in WHOLE_VIEWS:
        view = view.args[0]  # type: ignore[assignment]
    return view is root and _is_of_torch(root)


def in_place(node: fx.Node) -> Any:
    """The in-place form of a node's op; None where there is none."""
    return _in_place_form(node.target) if node.op == "call_function" else None


@functools.cache
def _in_place_form(target: Any) -> Any:
    if not isinstance(target, OpOverload):
        return None
    if torch.Tag.pointwise not in target.tags and target not in ONTO_FIRST:
        return None
    name = target._schema.name.split("::")[1]
    packet = getattr(getattr(torch.ops, target.namespace), f"{name}_", None)
    if packet is None or target._overloadname not in packet.overloads():
        return None
    found = getattr(packet, target._overloadname)
    if len(found._schema.arguments) != len(target._schema.arguments):
        return None
    writes = found._schema.arguments[0].alias_info
    return found if writes is not None and writes.is_write else None


def _others(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg((node.args[1:], node.kwargs), found.append)
    return found


def _same_layout(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, FakeTensor) or not isinstance(y, FakeTensor):
        return False
    if x is not y and (  # equal results may share one fake tensor
        x.dtype != y.dtype or not has_shape_of(x, y) or not _are_equal(x.stride(), y.stride())
    ):
        return False
    return _is_dense(x)


def has_shape_of(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have one shape; symbolic ones, at all sizes."""
    return _are_equal(x.shape, y.shape)


def _are_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    if not any(isinstance(size, torch.SymInt) for size in (*a, *b)):
        return tuple(a) == tuple(b)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    return len(a) == len(b) and all(
        statically_known_true(x == y) for x, y in zip(a, b, strict=True)
    )


def _is_dense(x: torch.Tensor) -> bool:
    """Whether elements neither overlap nor leave gaps."""
    if x._has_symbolic_sizes_strides:  # type: ignore[attr-defined]
        return is_non_overlapping_and_dense_or_false(x)  # loads sympy
    if not x.numel():
        return True
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def _is_fresh(node: fx.Node) -> bool:
    """Whether a node allocates its result's memory, which nothing outside the graph refers to."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and not is_view(node)
