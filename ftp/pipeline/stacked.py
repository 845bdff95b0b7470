"""Stacks of layers that the ranks of a pipeline cut along dim 0: rewrite a graph so that each such
input or output is one tensor per rank.

An op on a stack becomes one op per rank if its rule keeps the layers separate or sums over them.
Any other op reads the concatenated parts.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.errors import SpecError
from ftp.ops.stack import STACK, UNSTACK
from ftp.rules.call import operands_of, replaced
from ftp.rules.local_op import as_module
from ftp.rules.rule import BoundRule
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.spec import P, PartitionSpec, Stage

aten = torch.ops.aten


def is_stack(spec: PartitionSpec, axis: str) -> bool:
    """Whether a spec cuts dim 0 over ``axis``, and nothing else over it or in it.

    >>> is_stack(P("pp", "tp"), "pp"), is_stack(P(None, "pp"), "pp"), is_stack(P("tp"), "pp")
    (True, False, False)
    """
    cuts = spec.cuts(0)
    return len(cuts) == 1 and cuts[0].is_plain and cuts[0].axis == axis


def layers_of_ranks(layers: int, ranks: int) -> tuple[int, ...]:
    """How many layers of a stack each rank holds.

    >>> layers_of_ranks(7, 4), layers_of_ranks(5, 4)
    ((2, 2, 2, 1), (2, 2, 1, 0))
    """
    return tuple(local_shape(P("x"), (layers,), {"x": ranks}, {"x": r})[0] for r in range(ranks))


@dataclass(frozen=True)
class Stacks:
    """Which inputs and outputs are stacks: per input and per output the layers of each rank, or
    None.
    """

    inputs: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[tuple[int, ...] | None, ...]

    @property
    def is_empty(self) -> bool:
        return not any((*self.inputs, *self.outputs))

    def apart(self, tensors: Sequence[Any], rank: int | None) -> list[torch.Tensor]:
        """The inputs with each stack as one tensor per rank, from global inputs or a rank's own."""
        found: list[torch.Tensor] = []
        for x, sizes in zip(tensors, self.inputs, strict=True):
            if sizes is None:
                found.append(x)
            elif rank is None:
                found += x.split(list(sizes))
            else:
                found += [
                    x if r == rank else x.new_empty(0, *x.shape[1:]) for r in range(len(sizes))
                ]
        return found

    def together(self, tensors: Sequence[Any], rank: int | None) -> list[torch.Tensor]:
        """The outputs with each stack as one tensor: the global one, or a rank's part of it."""
        found, at = [], 0
        for sizes in self.outputs:
            parts = tensors[at : at + (1 if sizes is None else len(sizes))]
            at += len(parts)
            if sizes is None:
                found += parts
            else:
                found.append(torch.cat(list(parts)) if rank is None else parts[rank])
        return found

    def specs(self, specs: Sequence[Any], of: Sequence[Any], axis: str) -> list[Any]:
        """Specs of inputs, or of outputs, with a stage for each part of a stack.

        Args:
            of: ``inputs`` or ``outputs``.
        """
        found: list[Any] = []
        for i, rank in self.places(of[: len(specs)]):
            stage = specs[i] if rank is None else P(Stage(axis, stage=rank), *specs[i].entries[1:])
            found.append(stage)
        return found

    def places(self, of: Sequence[tuple[int, ...] | None]) -> list[tuple[int, int | None]]:
        """Per tensor of the rewritten graph: the index of its input or output in the original
        graph, and its rank; None in place of the rank if the tensor is no stack.

        >>> Stacks((None, (2, 1)), ()).places((None, (2, 1)))
        [(0, None), (1, 0), (1, 1)]
        """
        ranks = [range(len(sizes)) if sizes else [None] for sizes in of]
        return [(i, rank) for i, own in enumerate(ranks) for rank in own]

    def shape(self, shape: Sequence[int], i: int, rank: int | None) -> tuple[int, ...]:
        """The shape of input ``i``, or of its part on ``rank``, from its global shape."""
        sizes = self.inputs[i]
        return tuple(shape) if sizes is None or rank is None else (sizes[rank], *shape[1:])


def stacks_of(
    gm: fx.GraphModule,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec | None],
    axis: str,
    ranks: int,
) -> Stacks:
    """The stacks among a graph's first inputs, and among its outputs.

    Args:
        in_specs: of the arguments; the other inputs are no stacks.
    """

    def sizes(node: fx.Node, spec: PartitionSpec | None) -> tuple[int, ...] | None:
        if spec is None or not is_stack(spec, axis):
            return None
        return layers_of_ranks(node.meta["val"].shape[0], ranks)

    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    outputs: Any = gm.graph.output_node().args[0]
    return Stacks(
        tuple(sizes(n, spec) for n, spec in zip(inputs, in_specs, strict=False))
        + (None,) * (len(inputs) - len(in_specs)),
        tuple(sizes(n, spec) for n, spec in zip(outputs, out_specs, strict=True)),
    )


def with_parts(
    gm: fx.GraphModule, stacks: Stacks, names: Sequence[str] | None = None
) -> fx.GraphModule:
    """The graph with each stack among its inputs and outputs as one tensor per rank. A node's meta
    ``traced_as`` names the traced op that it is a part of.

    Args:
        names: of the inputs, where no op may read a stack as a whole.

    Raises:
        SpecError: an op that does.
    """
    expansion = _Expansion(stacks)
    made = expansion.run(gm.graph)
    if names is not None and expansion.gathered:
        node, reader = next(iter(expansion.gathered.items()))
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        while node not in inputs:
            node = next(n for n in node.all_input_nodes if n in expansion.parts)
        source = f" at {reader.meta['source']}" if reader.meta.get("source") else ""
        raise SpecError(
            f"{names[inputs.index(node)]} has the spec of a stack of layers, whose dim 0 the stages"
            f" share, but the function reads it as a whole{source}: {reader.target}. Run its layers"
            " by ftp.scan, or leave the pipeline's axis out. Make the specs with"
            " pipeline.place(params, specs, mesh), which gives it a stage then."
        )
    return made


class _Expansion:
    """Builds the graph with one tensor per rank for each stack.

    Attributes:
        whole: per old node the new node.
        parts: per old node that is a stack, its part on each rank.
        gathered: per stack that an op reads as a whole, that op.
        cut: per old node that is not a stack and is used with one, its part for each part of the
            stack.
        layers: per old node that unstacks a stack, the layers.
    """

    def __init__(self, stacks: Stacks):
        self.stacks, self.graph = stacks, fx.Graph()
        self.whole: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.cut: dict[fx.Node, list[fx.Node]] = {}
        self.gathered: dict[fx.Node, fx.Node] = {}
        self.layers: dict[fx.Node, list[fx.Node]] = {}

    def run(self, old: fx.Graph) -> fx.GraphModule:
        sizes = iter(self.stacks.inputs)
        for node in old.nodes:
            if node.op == "placeholder":
                self._input(node, next(sizes))
            elif node.op == "call_function":
                self._call(node)
        outputs: Any = old.output_node().args[0]
        found: list[fx.Node] = []
        for node, each in zip(outputs, self.stacks.outputs, strict=True):
            found += [self._whole(node)] if each is None else self._parts(node, each)
        self.graph.output(tuple(found))
        self.graph.eliminate_dead_code()
        return as_module(self.graph)

    def _input(self, node: fx.Node, sizes: Sequence[int] | None) -> None:
        val = node.meta["val"]
        if sizes is None:
            self.whole[node] = self.graph.placeholder(node.name)
            self.whole[node].target = self.whole[node].name
            self.whole[node].meta = dict(node.meta)
            return
        made = []
        for rank, size in enumerate(sizes):
            made.append(self.graph.placeholder(f"{node.name}_of_{rank}"))
            made[-1].target = made[-1].name  # which may differ, where an argument has that name
            with val.fake_mode:
                made[-1].meta = {**node.meta, "val": val.new_empty(size, *val.shape[1:])}
        self.parts[node] = made

    def _call(self, node: fx.Node) -> None:
        reads = [n for n in node.all_input_nodes if n in self.parts]
        if node.target is operator.getitem and node.args[0] in self.layers:
            self.whole[node] = self.layers[node.args[0]][node.args[1]]  # type: ignore[index]
        elif not reads:
            self.whole[node] = self.graph.node_copy(node, self._whole)
            self.whole[node].meta = {**node.meta, "traced_as": node.name}
        elif _takes_apart(node):
            self.layers[node] = []
            for part in self.parts[reads[0]]:
                count = part.meta["val"].shape[0]
                apart = self._emit(node, node.target, (part,)) if count else None
                for i in range(count):
                    layer = self._emit(node, operator.getitem, (apart, i))
                    self.layers[node].append(layer)
        elif (rule := _rule(node)) is None or not self._by_rank(node, rule):
            self.gathered |= {n: node for n in reads if n not in self.gathered}
            self.whole[node] = self.graph.node_copy(node, self._whole)
            self.whole[node].meta = {**node.meta, "traced_as": node.name}

    def _by_rank(self, node: fx.Node, rule: BoundRule) -> bool:
        """Emit an op once per rank; False if it combines layers."""
        operands = operands_of(node)
        dims = [rule.operands[i][0] for i, n in enumerate(operands) if n in self.parts]
        if len(set(dims)) != 1 or len(dims[0]) != 1 or dims[0][0] in rule.whole:
            return False
        (factor,) = dims[0]
        sizes = next(self._sizes(n) for n in operands if n in self.parts)
        at: list[int | None] = []  # per operand the dim of the layers
        for of in rule.dims:
            found = [d for d, dim in enumerate(of) if factor in dim]
            if found and of[found[0]] != (factor,):
                return False
            at.append(found[0] if found else None)
        is_stack = at.pop() == 0
        if (not is_stack and rule.pending[0].get(factor) != "sum") or any(
            d != 0 for n, d in zip(operands, at, strict=True) if n in self.parts
        ):
            return False
        made, begin = [], 0
        for rank, size in enumerate(sizes):
            slots = iter(zip(operands, at, strict=True))

            def read(_: fx.Node, rank=rank, begin=begin, size=size, slots=slots) -> fx.Node:
                n, dim = next(slots)
                if dim is None:
                    return self._whole(n)
                if n in self.parts or (dim == 0 and _puts_together(n)):
                    return self._parts(n, sizes)[rank]
                part = (self._whole(n), dim, begin, begin + size)
                return self._emit(node, aten.slice.Tensor, part)

            args, kwargs = replaced((node.args, dict(node.kwargs)), fx.Node, read)
            made.append(self._emit(node, node.target, args, kwargs))
            begin += size
        if is_stack:
            self.parts[node] = made
            return True
        total = made[0]
        for term in made[1:]:
            total = self._emit(node, aten.add.Tensor, (total, term))
        self.whole[node] = total
        return True

    def _sizes(self, node: fx.Node) -> list[int]:
        return [part.meta["val"].shape[0] for part in self.parts[node]]

    def _whole(self, node: fx.Node) -> fx.Node:
        if node not in self.whole:
            self.whole[node] = self._emit(node, aten.cat.default, (self.parts[node],))
        return self.whole[node]

    def _parts(self, node: fx.Node, sizes: Sequence[int]) -> list[fx.Node]:
        """A value as one tensor per rank, with the rank's layers."""
        if node in self.parts or node in self.cut:
            return self.parts.get(node) or self.cut[node]
        made, begin = [], 0
        val = node.meta["val"]
        for size in sizes:
            end = begin + size
            if not size:
                options = {"dtype": val.dtype, "device": val.device}
                nothing = ([0, *val.shape[1:]], 0)
                made.append(self._emit(node, aten.full.default, nothing, options))
            elif _puts_together(node):
                tensors: Any = node.args[0]
                own = [self._whole(n) for n in tensors[begin:end]]
                made.append(self._emit(node, STACK, (own,)))
            else:
                part = (self._whole(node), 0, begin, end)
                made.append(self._emit(node, aten.slice.Tensor, part))
            begin = end
        self.cut[node] = made
        return made

    def _emit(
        self,
        like: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        made = self.graph.call_function(target, args, dict(kwargs or {}))
        vals = replaced((args, dict(kwargs or {})), fx.Node, lambda n: n.meta["val"])
        if target is operator.getitem:
            val = vals[0][0][vals[0][1]]
        else:
            with _mode_of(like):
                val = target(*vals[0], **vals[1])
        made.meta = {**like.meta, "val": val, "traced_as": like.name}
        return made


def _mode_of(node: fx.Node) -> Any:
    val = node.meta["val"]
    return (val[0] if isinstance(val, list | tuple) else val).fake_mode


def _takes_apart(node: fx.Node) -> bool:
    is_unbind = node.target is aten.unbind.int and node.args[1:] in ((), (0,)) and not node.kwargs
    return node.target is UNSTACK or is_unbind


def _puts_together(node: fx.Node) -> bool:
    is_stack = node.target is aten.stack.default and node.args[1:] in ((), (0,))
    return (node.target is STACK or is_stack) and not node.kwargs


def _rule(node: fx.Node) -> BoundRule | None:
    """The rule of an op with one result that runs on parts unchanged."""
    from ftp.rules.bind import rule_of_node

    found = rule_of_node(node) if isinstance(node.meta["val"], torch.Tensor) else None
    return None if found is None or found.local is not None else found
