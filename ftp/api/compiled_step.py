"""CompiledStep: one program as a step, made ahead of time or loaded from a file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optree
import torch

from ftp.api.arguments import Arguments, check_donated_once, check_static
from ftp.api.definition import Definition, estimated_shapes
from ftp.api.inputs import Inputs
from ftp.api.planned import Planned, planned_for
from ftp.api.step import Step
from ftp.dataclass import dataclass
from ftp.errors import InputError, MeshError, raise_all
from ftp.planning.known_passes import KnownPasses
from ftp.planning.problem import Watch
from ftp.program_files.saved import LoadedProgram, Signature, load, save, tree_text
from ftp.report.lowered import Lowered
from ftp.rules.call import Meta
from ftp.runtime.code_of_ranks import code_of_ranks
from ftp.runtime.program import Program
from ftp.sharding.arguments import Shape
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.make_mesh import make_mesh
from ftp.sharding.mesh import AnyMesh, Mesh, current_mesh, resolve
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.placement import check_alive, check_placed
from ftp.tracing.settings import uncast
from ftp.tracing.trace import Traced


def load_program(
    path: str | Path, mesh: AnyMesh | None = None, *, trust_code: bool = False
) -> "CompiledStep":
    """The program that ``lowered.save(path)`` or ``compiled.save(path)`` wrote, ready to run on
    this process' rank: nothing is traced or planned.

    Reading a file runs no code; running its program runs torch's ops with the arguments that the
    file gives them. The file must be owned by this user, like the files of ftp's cache.

    Args:
        path: of the file; every rank reads it.
        mesh: the mesh to run on, of the shape, axes and device type that the program was made for.
            Default: the mesh of the surrounding ``ftp.use_mesh``, else a new ``ftp.make_mesh`` of
            that shape, axes and device type.
        trust_code: run the compiled code of a file of ``compiled.save(path)``, a library that can
            do all that this user can. Without it, and on another kind of machine, the program is
            compiled again, with a ``CodeWarning``.

    Returns:
        ``step(params, *batch)`` for the program's shapes and dtypes; ``lowered`` has its reports.

    Raises:
        ProgramFileError: a file that is damaged, that another user owns or can write to, or that
            another version of torch or ftp saved; an op that is not registered here.
        MeshError: a mesh of another shape, other axes or another device type.
        InputError: at a call with other arguments than the program's, or under another default
            dtype of torch than it was made under, before any collective.

    >>> import ftp, tempfile, torch
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> step = ftp.shard(lambda p, x: (x @ p["w"]).sum(), mesh, {"w": ftp.P(None, "tp")})
    >>> params, x = {"w": torch.ones(3, 4)}, torch.ones(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     step.lower(params, x).save(f"{folder}/step.ftp")
    ...     loaded = ftp.load_program(f"{folder}/step.ftp", mesh)
    >>> loss, grads = loaded(params, x)
    >>> float(loss), [c.op for c in loaded.lowered.collectives]
    (24.0, ['all_reduce'])
    """

    def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], device_type: str) -> Mesh:
        given = mesh or current_mesh() or make_mesh(shape, names, device_type=device_type)
        return resolve(given)

    program, signature = load(path, mesh_of, trust_code)
    return CompiledStep(program, signature)


def bound(definition: Definition, call: Arguments, planned: Planned) -> "BoundProgram | None":
    """A planned program with the signature of its calls; None for a program of pipeline stages."""
    program = planned.program
    if not isinstance(program, Program):
        return None
    leaves = tuple(
        Meta(tuple(shape), leaf.dtype) if shape is not None else leaf
        for leaf, shape in zip(call.leaves, planned.shapes, strict=True)
    )
    signature = Signature(
        definition.function_name,
        tuple(map(definition.argument_name, range(len(call.args)))),
        tuple(call.names),
        tree_text(call.treedef),
        leaves,
        tuple(sorted(definition.state)),
        call.settings[0],
    )
    return BoundProgram(
        program, signature, call, bool(definition.reads and definition.reads.values)
    )


@dataclass(frozen=True)
class BoundProgram:
    """A program with the signature of its calls.

    Attributes:
        is_of_values: whether the program is for values that the function reads as Python numbers.
    """

    program: Program
    signature: Signature
    call: Arguments
    is_of_values: bool = False

    def compile(self) -> "CompiledStep":
        """See ``Lowered.compile``."""
        if self.program.mesh.kind == "abstract":
            raise MeshError(
                f"The mesh {self.program.mesh} is abstract: it plans programs and runs none. Write"
                " the program to a file with lowered.save(path), for ftp.load_program(path) where"
                " it runs, or lower it on ftp.make_mesh(...) or ftp.simulated_mesh(...)."
            )
        self._check_values()
        made = CompiledStep(self.program, self.signature, self.call.treedef)
        made.prepare()
        return made

    def save(self, path: str | Path) -> None:
        """See ``Lowered.save``."""
        self._check_values()
        save(path, self.program, self.signature, self.call.treedef)

    def _check_values(self) -> None:
        """Raises for a program that would give wrong numbers at other values, and not notice."""
        if self.is_of_values and not self.program.options.check_inputs:
            claims = "".join(f"\n  {claim}" for claim in self.program.assumptions)
            raise InputError(
                "The program is for values that the function reads as Python numbers: at others it"
                " gives wrong results. Call the step, which reads them, or make it with"
                f" check_inputs=True, by which the program raises at others.{claims}"
            )


class CompiledStep(Step):
    """``Step`` of one program: it takes arguments of one structure, with their shapes and dtypes,
    and makes no other program.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("dp",))
    >>> compiled = ftp.spmd(lambda x: 2 * x, mesh, ftp.P("dp")).lower(torch.ones(2)).compile()
    >>> isinstance(compiled, CompiledStep), compiled(torch.ones(2))
    (True, tensor([2., 2.]))
    """

    def __init__(
        self, program: Program, signature: Signature, given: optree.PyTreeSpec | None = None
    ):
        """``given``: the structure of the arguments, of a program that was not loaded."""
        self.program, self._signature, self._given_tree = program, signature, given
        super().__init__(
            Definition(
                _named(signature.function),
                program.mesh,
                lambda args: list(program.leaf_specs),
                lambda result, specs, args: [],
                signature.arguments,
                frozenset(signature.state),
                program.options,
            )
        )

    @property
    def lowered(self) -> Lowered:
        """The program's reports: collectives, memory, cost, text."""
        return Lowered(self.program)

    def prepare(self) -> None:
        """Compile the program and load its kernels before its first call. On processes all ranks
        call it together.
        """
        record, program = self._record, self.program
        try:
            self._check_default_dtype()
        except InputError as e:
            record.agree(record.next(), e)
        with uncast(), record.running(program.fingerprint):
            program.prepare(self._metas)

    @property
    def _metas(self) -> list[Meta]:
        return [self._signature.leaves[i] for i in self.program.tensor_leaves]

    def save(self, path: str | Path) -> None:
        """See ``report.startable.CompiledProgram.save``."""
        program, code = self.program, None
        if program.options.compile:
            with uncast():
                code = code_of_ranks(program, self._metas)
        save(path, program, self._signature, self._given_tree, code)

    def lower_traced(
        self, traced: Traced | None, *args: Any, known: KnownPasses | None = None
    ) -> Lowered:
        """The reports of the program, where it is the one of these arguments."""
        self._build(self._abstract(args))
        return self.lowered

    def _checked_specs(self, call: Arguments) -> list[PartitionSpec]:
        self._check_default_dtype()
        self._check_tree(call)
        specs = list(self.program.leaf_specs)
        check_static(call)
        if self._options.donate:
            check_donated_once(call, self._options.donate)
        check_alive(call.leaves, call.names)
        check_placed(call.leaves, specs, call.names, self.mesh)
        shapes = estimated_shapes(call, specs, self.mesh)
        due = [*map(self._due, self._signature.leaves, specs)]
        self._check(call, [*map(self._given, call.leaves, shapes)], due)
        return specs

    def _due(self, leaf: Any, spec: PartitionSpec) -> str:
        """The tensor or static value that this rank must pass for a leaf, in words."""
        if not isinstance(leaf, Meta):
            return _static(leaf)
        shape = leaf.shape
        if self.mesh.kind == "process":
            shape = local_shape(spec, shape, self.mesh.axes, self.mesh.coordinate or {})
        return _typed(leaf.dtype, shape)

    def _given(self, leaf: Any, shape: Shape | None) -> str:
        if not isinstance(leaf, torch.Tensor):
            return _static(leaf)
        is_whole = leaf.device.type == "meta" or self.mesh.kind != "process"
        return _typed(leaf.dtype, shape if is_whole and shape is not None else leaf.shape)

    def _check_default_dtype(self) -> None:
        """Raises under another default dtype than the trace's: ops of integers would give it."""
        now, then = torch.get_default_dtype(), self._signature.default_dtype
        if now != then:
            raise InputError(
                f"The program of {self._signature.function} was made under the default dtype"
                f" {then}; it is {now} now, by which results of integers get another dtype."
                f" Call torch.set_default_dtype({then}) first, or lower the function again."
            )

    def _check_tree(self, call: Arguments) -> None:
        own = self._signature
        if tree_text(call.treedef) == own.tree:
            return
        missing = [name for name in own.names if name not in call.names]
        beyond = [name for name in call.names if name not in own.names]
        told = [f"it has no {', '.join(missing[:3])}"] if missing else []
        told += [f"the program has no {', '.join(beyond[:3])}"] if beyond else []
        raise InputError(
            f"The program of {own.function} takes ({', '.join(own.arguments)}) of another"
            f" structure than this call's: {'; '.join(told) or 'containers of other classes'}."
            " Call it with arguments of the structure that it was lowered with."
        )

    def _check(self, call: Arguments, given: Sequence[str], due: Sequence[str]) -> None:
        failures = [
            f"{name} is {held}; the program of {self._signature.function} was made for {wanted}."
            " Lower the function with arguments like this call's."
            for name, held, wanted in zip(call.names, given, due, strict=True)
            if held != wanted
        ]
        raise_all(InputError, failures)

    def _build(
        self, inputs: Inputs, watch: Watch | None = None, traced: Traced | None = None
    ) -> Planned:
        """The program with these inputs, whose agreed shapes are checked."""
        own, program, call = self._signature.leaves, self.program, inputs.call
        due = [_typed(x.dtype, x.shape) if isinstance(x, Meta) else "" for x in own]
        given = [
            "" if shape is None else _typed(x.dtype, shape)
            for x, shape in zip(call.leaves, inputs.shapes, strict=True)
        ]
        self._check(call, given, due)
        if isinstance(program, LoadedProgram):
            program.resolve_tree(call.treedef)
        return planned_for(inputs, program, self.mesh, self._definition.donated_names, [])


def _named(name: str) -> Callable[..., Any]:
    """A stand-in for the function, for messages."""

    def fn(*args: Any) -> Any:
        raise AssertionError(f"the program of {name} is run, not its function")

    fn.__name__ = name
    return fn


def _typed(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _static(leaf: Any) -> str:
    return f"{leaf!r}, {kind_of(leaf)}"
