"""Build a rank's ``ExportedProgram``: its graph, the original's signature, the rank's shards as
state, and the origin of every op.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from ftp import random
from ftp.dataclass import dataclass
from ftp.dynamic_int import Sizes
from ftp.exported.module_calls import memory_of
from ftp.exported.open_dims import OpenDims, SizeNodes
from ftp.partitioning.local_program import LocalProgram
from ftp.planning.graph import Node
from ftp.planning.plan import Plan
from ftp.sharding.arguments import Shape
from ftp.sharding.local_pieces import local_pieces, local_shape
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import P
from ftp.tensors.device_put import take
from ftp.torch_internals import pytree
from ftp.tracing.recorder import PROVENANCE
from ftp.tracing.trace import Traced

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import ExportGraphSignature, InputSpec, OutputSpec

aten = torch.ops.aten
KEY = "rng"  # the name of the argument for the random key


@dataclass(frozen=True)
class SignatureEntry:
    """One placeholder of the functional graph.

    Attributes:
        value: the tensor of the state, the fake tensor of a user's input, or a static value.
        cut: the spec.
    """

    spec: "InputSpec"
    name: str
    value: Any
    cut: P

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def is_training(program: "ExportedProgram") -> bool:
    return any(v.dialect == "TRAINING" for v in program.verifiers)


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore torch's warnings about its own use of deprecated functions."""
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        yield


@dataclass(eq=False)
class Build:
    """Builds a rank's program."""

    original: "ExportedProgram"
    functional: "ExportedProgram"
    entries: list[SignatureEntry]
    traced: Traced
    plan: Plan
    local: LocalProgram
    mesh: Mesh
    coordinate: dict[str, int]
    open_dims: OpenDims

    def program(self, state_specs: Mapping[str, P]) -> "ExportedProgram":
        from torch.export import ExportedProgram

        self.graph = fx.Graph()
        self.constants = dict(self.original.constants)
        signature = self._signature()
        copies: dict[Any, torch.Tensor] = {}
        cut = {e.spec.target: e.cut for e in self.entries if e.spec.target is not None}
        for path, value in self.constants.items():
            if isinstance(value, torch.Tensor):
                self.constants[path] = self._cut(value, cut.get(path, P()), copies)
        state = {
            path: self._cut(value, state_specs[path], copies)
            for path, value in self.original.state_dict.items()
        }
        self._values(signature, state)
        module = fx.GraphModule({}, self.graph)
        module.meta.update(self.original.graph_module.meta)
        calls = [copy.copy(entry) for entry in self.original.module_call_graph]
        for entry in calls[1:]:
            entry.signature = None  # it names values of the original graph
        if self._takes_key:
            calls[0].signature = _with_key(calls[0].signature)
        with quiet():
            return ExportedProgram(
                root=module,
                graph=module.graph,
                graph_signature=signature,
                state_dict=state,
                range_constraints=self._number.range_constraints(),
                module_call_graph=calls,
                example_inputs=self._example_inputs(),
                constants=self.constants,
                verifiers=list(self.original.verifiers),
            )

    @property
    def _takes_key(self) -> bool:
        return len(self.entries) > len(self.functional.graph_signature.input_specs)

    def _signature(self) -> "ExportGraphSignature":
        """Fill the graph and return its signature: the original's inputs and outputs, with their
        names and in their order.
        """
        from torch.export.graph_signature import ExportGraphSignature, TensorArgument

        specs = self._input_specs()
        placed = {spec.arg.name: self._placeholder(spec) for spec in specs}
        outputs = self.original.graph_signature.output_specs
        free = {s.arg.name for s in outputs if isinstance(s.arg, TensorArgument)} - set(placed)
        self.graph._graph_namespace._used_names.update(free)
        held = self._held(placed)
        self._body(held)
        values = self._results(held)
        if is_training(self.original):
            values = self._write_back(values, specs, placed)
        output_specs = self._output_specs(values, free)
        self.graph.output(tuple(values))
        return ExportGraphSignature([copy.deepcopy(s) for s in specs], output_specs)

    @cached_property
    def _constant_names(self) -> list[str]:
        """Placeholders of tensors that the trace captured."""
        return [f"c_ftp_constant_{i}" for i in range(len(self.traced.constants))]

    def _input_specs(self) -> "list[InputSpec]":
        """The original's inputs, the key, and the trace's constants before the user's inputs."""
        from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

        specs = [*self.original.graph_signature.input_specs]
        if self._takes_key:
            specs.append(self.entries[-1].spec)
        first = next((i for i, s in enumerate(specs) if s.kind is InputKind.USER_INPUT), len(specs))
        constants = []
        for name, tensor in zip(self._constant_names, self.traced.constants, strict=True):
            path = name.removeprefix("c_")
            self.constants[path] = tensor
            constants.append(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name), path))
        return [*specs[:first], *constants, *specs[first:]]

    def _placeholder(self, spec: "InputSpec") -> fx.Node:
        name = spec.arg.name
        node = self._named(self.graph.placeholder(name), name)
        node.target = node.name
        if name in self._original_placeholders:
            meta = self._original_placeholders[name].meta
            node.meta = {k: v for k, v in meta.items() if k not in ("tensor_meta", "from_node")}
        elif spec.target is None:
            node.meta = {"val": self.entries[-1].value}
        return node

    @cached_property
    def _original_placeholders(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.original.graph.nodes if n.op == "placeholder"}

    def _held(self, placed: Mapping[str, fx.Node]) -> dict[fx.Node, Any]:
        """Per placeholder of the local program its value: a placeholder of the graph, or this
        rank's offset as a number.
        """
        inputs = [n for n in self.local.gm.graph.nodes if n.op == "placeholder"]
        names = [*(e.spec.arg.name for e in self.entries if e.is_tensor), *self._constant_names]
        users = [e for e in self.entries if e.is_tensor and e.spec.target is None]
        self._number = SizeNodes(
            self.graph,
            self._sizes,
            {placed[e.spec.arg.name]: self._local_shape(e) for e in users},
        )
        self._number.check_known()
        offsets = map(self._number, self.local.offsets_at(self.coordinate))
        held: dict[fx.Node, Any] = dict(zip(inputs[len(names) :], offsets, strict=True))
        held |= {node: placed[n] for n, node in zip(names, inputs, strict=False) if n in placed}
        return held

    def _formulas(self, numbers: Sequence[Any]) -> tuple[int, ...]:
        """A shape or strides of the exported program, with formulas for open dims."""
        return self.open_dims.formulas(numbers, self._sizes)

    @property
    def _sizes(self) -> Sizes:
        return self.plan.sizes or Sizes(())

    def _local_shape(self, entry: SignatureEntry) -> Shape:
        """The shape of this rank's shard."""
        shape = self._formulas(entry.value.shape)
        return local_shape(entry.cut, shape, self.mesh.axes, self.coordinate)

    def _results(self, held: Mapping[fx.Node, Any]) -> list[Any]:
        """The functional graph's results, mutated values first."""
        from torch.export.graph_signature import TensorArgument

        output: Any = self.local.gm.graph.output_node().args[0]
        returned = iter(held[n] for n in output)
        args = [s.arg for s in self.functional.graph_signature.output_specs]
        return [
            next(returned) if isinstance(arg, TensorArgument) else getattr(arg, "value", None)
            for arg in args
        ]

    def _write_back(
        self, values: list[Any], specs: "list[InputSpec]", placed: Mapping[str, fx.Node]
    ) -> list[Any]:
        """Write mutated values within the graph, as training programs do. Returns the others."""
        from torch.export.graph_signature import OutputKind

        results = []
        functional = self.functional.graph_signature.output_specs
        for spec, value in zip(functional, values, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(value)
                continue
            into = next(
                s.arg.name
                for s in specs
                if spec.target in (s.target, s.arg.name if s.target is None else None)
            )
            written = self.graph.call_function(aten.copy_.default, (placed[into], value))
            written.meta.update(_kept(value.meta))
        return results

    def _output_specs(self, values: list[Any], free: set[str]) -> "list[OutputSpec]":
        """The original's outputs, with the names of ``values``. A value gets the original's name if
        the name is ``free``.
        """
        from torch.export.graph_signature import OutputSpec, TensorArgument

        outputs, named = [], set()
        original = self.original.graph_signature.output_specs
        for spec, value in zip(original, values, strict=True):
            if not isinstance(spec.arg, TensorArgument):
                outputs.append(copy.copy(spec))
                continue
            if value.op != "placeholder" and spec.arg.name in free and value not in named:
                free.remove(spec.arg.name)
                named.add(self._named(value, spec.arg.name))
            outputs.append(OutputSpec(spec.kind, TensorArgument(value.name), spec.target))
        return outputs

    def _named(self, node: fx.Node, name: str) -> fx.Node:
        """Give the node torch.export's name, even if a Python builtin has the name."""
        self.graph._graph_namespace._used_names.add(name)
        node.name = name
        return node

    def _body(self, held: dict[fx.Node, Any]) -> None:
        """Copy the local program's ops, each with its origin's module and line."""
        traced = {n.name: n.meta for n in self.traced.gm.graph.nodes if n.op == "call_function"}
        root = self._root_stack()
        causes = {node.name: self._cause(node, traced) for node in self.plan.graph.nodes}
        last: dict[str, Any] = root
        # A program on meta stays on meta.
        is_meta = {e.value.device.type for e in self.entries if e.is_tensor} == {"meta"}
        for node in self.local.gm.graph.nodes:
            if node.op != "call_function":
                continue
            arguments: Any = (node.args, dict(node.kwargs))
            numbered = map_aggregate(arguments, self._number)
            args, kwargs = map_arg(numbered, lambda n: held.get(n, n))
            made = held[node] = self.graph.call_function(node.target, args, kwargs, name=node.name)
            if is_meta and made.kwargs.get("device") is not None:
                made.kwargs = {**made.kwargs, "device": torch.device("meta")}
            meta = causes.get(node.meta.get("origin"))
            last = meta or last
            made.meta = {"nn_module_stack": root["nn_module_stack"], **_kept(last)}

    def _root_stack(self) -> dict[str, Any]:
        for node in self.original.graph.nodes:
            for key, value in (node.meta.get("nn_module_stack") or {}).items():
                return {"nn_module_stack": {key: value}}
        return {"nn_module_stack": {"": ("", "torch.nn.modules.module.Module")}}

    def _cause(self, node: Node, traced: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
        """The exported graph's metadata of a node's origin.

        The origin of a reshard is the op whose result it reshards. For an input it is the first op
        that reads the input.
        """
        node = _unresharded(node)
        if node.kind == "input":
            users = self._users.get(id(node), [])
            node = next((u for u in users if u.kind == "op"), node)
        return traced.get(node.name.split(".")[0])

    @cached_property
    def _users(self) -> dict[int, list[Node]]:
        """Per node, by its id, the nodes that read its results, directly or resharded."""
        found: dict[int, list[Node]] = {}
        for node in self.plan.graph.nodes:
            for value in node.operands:
                found.setdefault(id(_unresharded(value.node)), []).append(node)
        return found

    def _cut(self, value: Any, spec: P, copies: dict[Any, torch.Tensor]) -> Any:
        """A copy of this rank's shard; tied tensors stay tied."""
        if not isinstance(value, torch.Tensor):
            return value
        key = (memory_of(value), spec, isinstance(value, nn.Parameter))
        if key not in copies:
            pieces = local_pieces(spec, value.shape, self.mesh.axes, self.coordinate)
            part = take(value.detach(), pieces) if spec else value.detach()
            part = part.clone(memory_format=torch.contiguous_format) if spec else part.clone()
            copies[key] = (
                nn.Parameter(part, value.requires_grad) if isinstance(value, nn.Parameter) else part
            )
        return copies[key]

    def _values(self, signature: "ExportGraphSignature", state: Mapping[str, torch.Tensor]) -> None:
        """Set ``meta["val"]`` of each node: a fake tensor of this rank's shape, or a number that is
        computed from open sizes. Then add nodes that check the conditions on open sizes.
        """
        held: dict[Any, Any] = {**self.constants, **state}
        tensors = {s.arg.name: held.get(s.target) for s in signature.input_specs}
        users = {e.spec.arg.name: e for e in self.entries if e.is_tensor and e.spec.target is None}

        def value(node: fx.Node) -> Any:
            if node.op == "call_function":
                arguments: Any = (node.args, node.kwargs)
                args, kwargs = map_arg(arguments, lambda n: n.meta["val"])
                return node.target(*args, **kwargs)  # type: ignore[operator]
            if (known := tensors.get(node.name)) is not None:
                options = {"dtype": known.dtype, "device": known.device}
                return torch.empty_strided(known.shape, known.stride(), **options)
            return self._shard(users[node.name]) if node.name in users else node.meta.get("val")

        def set_values(nodes: Iterable[fx.Node]) -> None:
            with self._number.ops():
                for node in nodes:
                    node.meta["val"] = value(node)

        output = self.graph.output_node()
        set_values([n for n in self.graph.nodes if n is not output])
        self.open_dims.check(self._number.sizes)
        with self.graph.inserting_before(output):
            set_values(self._number.add_conditions())

    def _shard(self, entry: SignatureEntry) -> torch.Tensor:
        """A fake tensor of this rank's shard of a user's input."""
        value, shape = entry.value, self._local_shape(entry)
        sizes, options = list(map(self._number.symint, shape)), {"device": value.device}
        if shape != self._formulas(value.shape):
            return torch.empty(sizes, dtype=value.dtype, **options)
        strides = list(map(self._number.symint, self._formulas(value.stride())))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, **options)

    def _example_inputs(self) -> Any:
        from torch.export.graph_signature import InputKind

        if (example := self.original.example_inputs) is None:
            return None
        if self._takes_key:
            example = (example[0], {**example[1], KEY: random.key(0)})
        leaves, tree = pytree.tree_flatten(example)
        users = [e for e in self.entries if e.spec.kind is InputKind.USER_INPUT]
        if len(leaves) != len(users):
            return None
        return tree.unflatten(
            [self._cut(x, e.cut, {}) if e.cut else x for x, e in zip(leaves, users, strict=True)]
        )


def _unresharded(node: Node) -> Node:
    """The node whose result a chain of reshards and constraints takes."""
    while node.kind in ("reshard", "constrain"):
        node = node.operands[0].node
    return node


def _kept(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {k: copy.copy(meta[k]) for k in PROVENANCE if k in meta}


def _with_key(signature: Any) -> Any:
    """The signature of the whole program with the key as its last keyword argument."""
    from torch.export.graph_signature import TensorArgument

    args, kwargs = pytree.tree_unflatten(range(signature.in_spec.num_leaves), signature.in_spec)
    _, tree = pytree.tree_flatten((args, {**kwargs, KEY: 0}))
    names = signature.forward_arg_names
    return replace(
        signature,
        inputs=[*signature.inputs, TensorArgument(KEY)],
        in_spec=tree,
        forward_arg_names=None if names is None else [*names, KEY],
    )
