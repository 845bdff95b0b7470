"""Definition: the function, mesh, specs and options that a step is made of, and its trace."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor

from ftp.api.arguments import Arguments, check_donated_once, check_static, is_other_tensor, nones
from ftp.api.dynamic_shapes import Dynamic
from ftp.api.inputs import Inputs
from ftp.api.outputs import returned_trees, with_given
from ftp.dataclass import dataclass
from ftp.dynamic_int import Sizes
from ftp.errors import InputError, SpecError, raise_all
from ftp.planning.cost import Hardware
from ftp.planning.machine import hardware_on
from ftp.runtime.options import Options
from ftp.sharding.arguments import Shape, check_signature, padded_names
from ftp.sharding.check_spec import check_spec
from ftp.sharding.counted_rows import are_counted
from ftp.sharding.mesh import Mesh, use_mesh
from ftp.sharding.patterns import several
from ftp.sharding.pytree import check_specs, flatten, kind_of, leaf_names
from ftp.sharding.spec import PartitionSpec
from ftp.sharding.traced_arguments import arguments_with
from ftp.source import raised_line
from ftp.tensors.global_shapes import abstract, global_shape
from ftp.tensors.placement import check_alive, check_placed, placement_of
from ftp.torch_internals.tracer_lock import TRACING
from ftp.tracing.alike import Alike, RecordedOps
from ftp.tracing.calls import TorchCalls
from ftp.tracing.data_dependent.values_read import ValuesRead
from ftp.tracing.input_values import WholeInputs
from ftp.tracing.settings import as_called
from ftp.tracing.trace import Traced, trace

InSpecs = Callable[[tuple[Any, ...]], list[PartitionSpec]]
OutSpecs = Callable[[Any, Sequence[PartitionSpec], tuple[Any, ...]], Sequence[PartitionSpec | None]]


@dataclass(frozen=True, eq=False)
class Definition:
    """The function, mesh, specs and options of a step.

    Attributes:
        in_specs: function from the arguments to a spec per leaf.
        out_specs: function from the result, the arguments' specs and the arguments to a spec per
            leaf of the result; None where propagation is to choose.
        arguments: names of the positional arguments, for messages.
        state: positions of arguments that are state rather than a batch.
        dynamic: function from the arguments to their dims that change size; None where the user
            names none.
        finds_dynamic: whether dims that change are found by the shapes of calls, where the user
            names none.
        reads: the values that a call has read so far; None where functions read none.
    """

    fn: Callable[..., Any]
    mesh: Mesh
    in_specs: InSpecs
    out_specs: OutSpecs
    arguments: tuple[str, ...]
    state: frozenset[int]
    options: Options
    dynamic: Callable[[tuple[Any, ...]], Dynamic] | None = None
    finds_dynamic: bool = False
    reads: ValuesRead | None = None

    @property
    def function_name(self) -> str:
        return getattr(self.fn, "__name__", kind_of(self.fn))

    def argument_name(self, position: int) -> str:
        return padded_names(self.arguments, position + 1)[position]

    @property
    def donated_names(self) -> dict[int, str]:
        """The names of donated arguments, by position."""
        return {position: self.argument_name(position) for position in self.options.donate}

    @property
    def hardware(self) -> Hardware:
        """The hardware that programs are planned for."""
        return self.hardware_on(self.mesh.hosts)

    def hardware_on(self, hosts: tuple[str, ...]) -> Hardware:
        """The hardware that programs are planned for, with the ranks on these hosts."""
        return hardware_on(replace(self.mesh, hosts=hosts), self.options.hardware)


def estimated_shapes(
    call: Arguments, specs: Sequence[PartitionSpec], mesh: Mesh
) -> list[Shape | None]:
    """Global shapes, as far as this rank can tell."""
    return [global_shape(leaf, spec, mesh) for leaf, spec in zip(call.leaves, specs, strict=True)]


def changed_from(
    call: Arguments, shapes: Sequence[Shape | None], before: Sequence[Any] | None
) -> str:
    """The tensors that differ from those of a call with key ``before``, for messages:
    ``x float32[2, 4]``.
    """
    if before is None or len(before) != len(call.key):
        return ""
    leaves = zip(call.leaves, shapes, call.names, call.key[1:], before[1:], strict=True)
    return several(
        [
            f"{name} {str(leaf.dtype).removeprefix('torch.')}{list(shape or leaf.shape)}"
            for leaf, shape, name, now, then in leaves
            if isinstance(leaf, Tensor) and is_other_tensor(now, then)
        ]
    )


def taken_for_shards(
    definition: Definition, call: Arguments, shapes: Sequence[Shape | None]
) -> str | None:
    """What to say of parameters that are taken for shards, as each unplaced tensor of a rank is. A
    call compares what the ranks hold; ``lower`` asks nobody.
    """
    leaves = zip(call.leaves, shapes, call.names, call.positions, strict=True)
    for leaf, shape, name, position in leaves:
        is_cut = shape is not None and tuple(leaf.shape) != shape and placement_of(leaf) is None
        if is_cut and position in definition.state:
            return (
                f"lower takes {name}, of shape {tuple(leaf.shape)}, for this rank's shard of a"
                f" tensor of shape {shape}: ftp.device_put has not placed it. If it is whole, call"
                " ftp.device_put(tree, mesh, specs) before, or lower with tensors on meta, which"
                " are whole."
            )
    return None


def checked_specs(definition: Definition, call: Arguments) -> list[PartitionSpec]:
    """A spec per leaf of the arguments, both checked."""
    mesh, names = definition.mesh, map(definition.argument_name, range(len(call.args)))
    check_static(call)
    check_signature(definition.fn, call.args, f"the step, ({', '.join(names)})")
    if definition.options.donate:
        check_donated_once(call, definition.options.donate)
    specs = definition.in_specs(call.args)
    check_alive(call.leaves, call.names)
    check_placed(call.leaves, specs, call.names, mesh)
    shapes = estimated_shapes(call, specs, mesh)
    leaves = [abstract(leaf, shape) for leaf, shape in zip(call.leaves, shapes, strict=True)]
    check_specs(specs, leaves, call.names, mesh.axes, takes_sums=True)
    return specs


def traced_for(
    definition: Definition,
    inputs: Inputs,
    calls: TorchCalls | None = None,
    formulas: Sequence[Shape | None] | None = None,
    sizes: Sizes | None = None,
    mesh: Mesh | None = None,
    recognises: Callable[[RecordedOps], bool] | None = None,
    replayed: Alike | None = None,
    whole: WholeInputs | None = None,
) -> Traced:
    """The trace of the function for these inputs; with ``sizes``, for all sizes of dynamic dims.

    Args:
        mesh: that the function finds around it; default the definition's.
        recognises, replayed, whole: as of `trace`.
    """
    call = inputs.call
    if calls is None and definition.options.explicit:
        calls = TorchCalls()
    leaves = [abstract(x, shape) for x, shape in zip(call.leaves, inputs.shapes, strict=True)]

    @wraps(definition.fn)
    def fn(*args: Any) -> Any:
        with arguments_with(flatten(args)[0], inputs.specs):
            return definition.fn(*args)

    with TRACING, use_mesh(mesh or definition.mesh), as_called():
        try:
            return trace(
                fn,
                leaves,
                call.treedef,
                definition.mesh.device_type,
                names=call.names,
                checked=definition.options.check_inputs,
                calls=calls,
                shapes=formulas,
                symbolic=None if sizes is None else _symbolic_of(sizes),
                recognises=recognises,
                replayed=replayed,
                reads=definition.reads if sizes is None else None,
                whole=whole,
            )
        except (AttributeError, TypeError) as e:
            names = nones(call)
            if not names or (isinstance(e, AttributeError) and e.obj is not None):
                raise
            raise InputError(_of_nones(names, e)) from e


def _of_nones(names: Sequence[str], error: AttributeError | TypeError) -> str:
    """The message for an error of a function with None among its arguments. An AttributeError is
    about None; a TypeError may have other causes.
    """
    line = raised_line(error)
    at = f" at {line}" if line else ""
    given = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} None"
    mend = "Give a tensor, or let the function ask whether it is None."
    if isinstance(error, AttributeError):
        return f"{given}, which the function uses as something else{at}: {error}. {mend}"
    return f"{given}, and the function raises a TypeError{at}: {error}. If None is why: {mend}"


def specs_of_results(
    definition: Definition, inputs: Inputs, traced: Traced
) -> tuple[list[PartitionSpec | None], Collection[int]]:
    """A spec per output, None where propagation is to choose; and the positions of the arguments
    that the result returns.
    """
    call, specs = inputs.call, inputs.specs
    if traced.asked is not None:
        return [PartitionSpec()] * len(traced.out_shapes), ()
    out_specs = _checked_out_specs(definition, inputs, traced)
    trees = returned_trees(call.treedef, inputs.shapes, specs, traced, out_specs)
    given = {
        position: [spec for spec, at in zip(specs, call.positions, strict=True) if at == position]
        for position in trees
    }
    return list(with_given(out_specs, trees, given, traced)), trees.keys()


def _checked_out_specs(
    definition: Definition, inputs: Inputs, traced: Traced
) -> list[PartitionSpec | None]:
    """A spec per output of the graph, or None where propagation is to choose."""
    result = traced.out_tree.unflatten(traced.out_leaves)
    found: list[PartitionSpec | None] = [None] * len(traced.out_shapes)
    failures = []
    leaf_specs = definition.out_specs(result, inputs.specs, inputs.call.args)
    names = leaf_names(result, "the result")
    counted = are_counted(traced.out_tree)
    for leaf, static, spec, name, is_counted in zip(
        traced.out_leaves, traced.is_static, leaf_specs, names, counted, strict=True
    ):
        if not static:
            found[leaf] = PartitionSpec() if is_counted else spec
            if is_counted:
                failures += _of_counted_rows(name, spec)
                continue
            shape, axes = traced.out_shapes[leaf], definition.mesh.axes
            failures += check_spec(spec, shape, axes, name, takes_sums=True) if spec else []
        elif spec:
            failures.append(
                f"{name} has spec {spec}, but is {leaf!r}, {kind_of(leaf)}; only a tensor can"
                " be cut. Give P()."
            )
    raise_all(SpecError, failures)
    results = sum(not static for static in traced.is_static)
    found[results:] = [PartitionSpec()] * (len(found) - results)  # the assumptions' conditions
    return found


def _of_counted_rows(name: str, spec: PartitionSpec | None) -> list[str]:
    if not spec or not name.endswith(".rows"):
        return []
    return [
        f"{name.removesuffix('.rows')} has spec {spec}, but how many rows it has is known after the"
        " run, so that it is whole on every rank. Give P()."
    ]


def _symbolic_of(sizes: Sizes) -> Any:
    """The sizes as torch's symbolic ints; imported late, because sympy takes long to import."""
    from ftp.tracing.symbolic import symbolic_of

    return symbolic_of(sizes)
