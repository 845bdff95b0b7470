"""Plan the subgraphs of a pipeline: an input keeps the sharding that its producer gives it, and
equal subgraphs share a program.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.pipeline.subgraphs import StageGraph
from ftp.planning.cost import Hardware
from ftp.planning.layers.labels import prefix_and_numbers
from ftp.planning.prepare import Prepared, plan_prepared, prepare
from ftp.runtime.options import Options
from ftp.runtime.pipelines.first_microbatch import without_sums
from ftp.runtime.program import Program
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import Mesh
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class StoredValue:
    """A value that outlives the action that computed it: its spec over the other axes, its global
    shape and its dtype.
    """

    spec: PartitionSpec
    shape: tuple[int, ...]
    dtype: torch.dtype

    def local_shape(
        self, axes: dict[str, int], coordinate: dict[str, int] | None = None
    ) -> tuple[int, ...]:
        """As ``ftp.sharding.local_pieces.local_shape``."""
        return local_shape(self.spec, self.shape, axes, coordinate)

    def local_nbytes(self, axes: dict[str, int]) -> int:
        """Bytes of the largest shard."""
        return math.prod(self.local_shape(axes)) * self.dtype.itemsize


@dataclass
class SubgraphPlanner:
    """Plans subgraphs, each after those whose values it reads.

    Attributes:
        mesh: from `within_stage`.
        names, params, batch: of `plan_stages`.
        asked: specs of values whose layout is decided, by name.
        gradients: the names of gradients and of their sums, from `names_of_gradients`.
        layers: by name the number of the layer that computes a result of a subgraph.
        check: raises for constraints that do not fit the mesh.
        values: the results of the subgraphs so far, by name.
    """

    mesh: Mesh
    names: tuple[Sequence[str], Sequence[str]]
    params: Sequence[PartitionSpec]
    batch: Sequence[PartitionSpec]
    constants: Sequence[torch.Tensor]
    asked: dict[str, PartitionSpec]
    options: Options
    hardware: Hardware
    check: Callable[[Prepared], None]
    gradients: set[str] = field(default_factory=set)
    values: dict[str, StoredValue] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    _known: dict[str, Program] = field(default_factory=dict)
    _first: dict[tuple[int, tuple[bool, ...]], Program] = field(default_factory=dict)

    def start_sum(self, name: str, subgraph: StageGraph, leaf: int) -> None:
        """Shard the sum of a parameter's gradient over microbatches like the gradient."""
        val = outputs_of(subgraph.gm)[subgraph.outputs.index(name)].meta["val"]
        held = StoredValue(self.asked[name], tuple(val.shape), val.dtype)
        self.values[name] = self.values[f"{name}, summed"] = held
        self.asked[f"{name}, summed"] = held.spec
        if leaf in self._numbers[1]:
            self.layers[f"{name}, summed"] = self._numbers[1][leaf]

    def plan(self, subgraph: StageGraph, given_up: tuple[int, ...] = ()) -> Program:
        """The program of a subgraph; the one of an equal subgraph, if there was one.

        Args:
            given_up: inputs, other than the sums, that nothing reads after it.
        """
        given = [
            *(self.params[i] for i in subgraph.params),
            *(self.batch[i] for i in subgraph.batch),
            *(self.values[name].spec for name in subgraph.values),
        ]
        asked = [self.asked.get(name) for name in subgraph.outputs]
        given_up = (*given_up, *range(len(given) - len(subgraph.sums), len(given)))
        gradients = tuple(i for i, x in enumerate(subgraph.outputs) if x in self.gradients)
        text = f"{_describe(subgraph, given, asked)}\n{given_up} {gradients}"
        if text not in self._known:
            self._known[text] = _planned(
                subgraph,
                self.mesh,
                self._called(subgraph),
                given,
                asked,
                self.constants,
                self.options,
                self.hardware,
                self.check,
                given_up,
                gradients,
            )
        program = self._known[text]
        for name, spec, shape, node in zip(
            subgraph.outputs,
            program.out_specs,
            program.out_shapes,
            outputs_of(subgraph.gm),
            strict=True,
        ):
            self.values[name] = StoredValue(spec, shape, node.meta["val"].dtype)
        self._note_layers(subgraph)
        return program

    @cached_property
    def _numbers(self) -> tuple[str, dict[int, int]]:
        """The prefix of layers' numbers in the parameters' names, and each parameter's number."""
        return prefix_and_numbers(dict(enumerate(self.names[0])))

    def _called(self, subgraph: StageGraph) -> list[str]:
        """The names of a subgraph's inputs; that of a value of a layer ends in the layer."""
        prefix, _ = self._numbers
        params, batch = self.names
        return [
            *(params[i] for i in subgraph.params),
            *(batch[i] for i in subgraph.batch),
            *(
                f"{name} of {prefix}{self.layers[name]}" if name in self.layers else name
                for name in subgraph.values
            ),
        ]

    def _note_layers(self, subgraph: StageGraph) -> None:
        """Note the layers of a subgraph's results: as `label` does, the last layer that a value is
        computed from, in a backward pass the first one.
        """
        inputs = [n for n in subgraph.gm.graph.nodes if n.op == "placeholder"]
        numbers = [self._numbers[1].get(i) for i in subgraph.params]
        numbers += [None] * len(subgraph.batch) + [self.layers.get(x) for x in subgraph.values]
        of = {n: k for n, k in zip(inputs, numbers, strict=False) if k is not None}
        last = max if subgraph.kind == "F" else min
        for node in subgraph.gm.graph.nodes:
            read = {of[x] for x in node.all_input_nodes if x in of}
            if read and max(read) - min(read) <= 1:
                of[node] = last(read)
        for name, node in zip(subgraph.outputs, outputs_of(subgraph.gm), strict=True):
            if node in of:
                self.layers[name] = of[node]

    def plan_first(
        self,
        subgraph: StageGraph,
        summed: StageGraph,
        program: Program,
        given_up: tuple[int, ...],
    ) -> Program:
        """The program of a subgraph for a stage's first microbatch.

        Args:
            summed, program: the subgraph and its program for the other microbatches.
        """
        key = id(program), tuple(name in summed.sums for name in subgraph.outputs)
        if key not in self._first:
            found = without_sums(program, subgraph, summed, given_up)
            self._first[key] = found or self.plan(subgraph, given_up)
        return self._first[key]


def _planned(
    subgraph: StageGraph,
    mesh: Mesh,
    called: Sequence[str],
    given: Sequence[PartitionSpec],
    asked: Sequence[PartitionSpec | None],
    constants: Sequence[torch.Tensor],
    options: Options,
    hardware: Hardware,
    check: Callable[[Prepared], None],
    given_up: tuple[int, ...],
    gradients: tuple[int, ...],
) -> Program:
    is_state = [True] * len(subgraph.params) + [False] * (
        len(subgraph.batch) + len(subgraph.values)
    )
    prepared = prepare(subgraph.gm, called, is_state, strict=options.strict)
    check(prepared)
    plan = plan_prepared(
        prepared,
        mesh.axes,
        given,
        asked,
        data_axes=options.data_axes,
        reshard_after_forward=options.reshard_after_forward,
        strict=options.strict,
        hardware=hardware,
    )
    roles = ["parameters"] * len(subgraph.params) + ["batch"] * len(subgraph.batch)
    roles += ["activations"] * (len(subgraph.values) - len(subgraph.sums))
    roles += ["gradients"] * len(subgraph.sums)
    outputs = len(subgraph.outputs)
    return Program(
        mesh=mesh,
        traced=subgraph.gm,
        plan=plan,
        tensor_leaves=tuple(range(len(given))),
        in_specs=tuple(given),
        constants=tuple(constants[i] for i in subgraph.constants),
        out_tree=flatten((0,) * outputs)[1],
        out_leaves=tuple(range(outputs)),
        is_static=(False,) * outputs,
        leaf_specs=tuple(given),
        roles=tuple(roles),
        donated=tuple(range(len(given) - len(subgraph.sums), len(given))),
        given_up=given_up,
        gradients=gradients,
        options=options,
        hardware=hardware,
    )


def _describe(
    subgraph: StageGraph, given: Sequence[PartitionSpec], asked: Sequence[PartitionSpec | None]
) -> str:
    """A subgraph as text without names, equal for subgraphs that one program serves."""
    number: dict[fx.Node, str] = {}
    lines = [subgraph.kind, str(given), str(asked), str(subgraph.constants)]
    lines += [str(len(subgraph.params)), str(len(subgraph.sums))]
    for node in subgraph.gm.graph.nodes:
        number[node] = f"%{len(number)}"
        val = node.meta.get("val")
        kind = [
            (*v.shape, v.dtype)
            for v in (val if isinstance(val, list | tuple) else [val])
            if isinstance(v, torch.Tensor)
        ]
        arguments = mapped_arguments(node, number.__getitem__)
        target = "" if node.op == "placeholder" else str(node.target)
        lines.append(f"{node.op} {target} {arguments} {kind} {node.meta.get('region')}")
    return "\n".join(lines)


def outputs_of(gm: fx.GraphModule) -> Sequence[Any]:
    """The nodes that a graph returns."""
    return gm.graph.output_node().args[0]  # type: ignore[return-value]
