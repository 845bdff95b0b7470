"""Programs that can be made ready to run ahead of time, or written to a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import optree

from ftp.errors import ReportError
from ftp.sharding.spec import PartitionSpec


class CompiledProgram(Protocol):
    """A program that is ready to run."""

    def __call__(self, *args: Any) -> Any: ...

    def save(self, path: str | Path) -> None:
        """Write the program with its compiled code to a file, for
        ``ftp.load_program(path, trust_code=True)``, which starts any rank of such a mesh without
        torch's compiler: on a machine with this one's instruction sets, versions of torch, ftp and
        Python, and number of threads.

        It holds the code of every rank; what this process has not compiled is compiled now. Any
        process may save it, also for a ``simulated_mesh``. ``docs/starting.md`` has the rules.

        Raises:
            ProgramFileError: code that cannot be saved, as for GPUs; see ``Lowered.save``.

        >>> import ftp, tempfile, torch
        >>> mesh = ftp.simulated_mesh((2,), ("dp",))
        >>> compiled = ftp.lower(lambda x: x.sum(), mesh, ftp.P("dp"), torch.ones(4)).compile()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     compiled.save(f"{folder}/sum.ftp")
        ...     ftp.load_program(f"{folder}/sum.ftp", mesh, trust_code=True)(torch.ones(4))
        tensor(4.)

        Source: JAX, ``jax.experimental.serialize_executable``.
        """
        ...


class CallableProgram(Protocol):
    """A program with the shapes and structure of its arguments, which can be compiled or saved."""

    def compile(self) -> CompiledProgram: ...

    def save(self, path: str | Path) -> None: ...


class ReturningProgram(Protocol):
    """A program with the specs and structure of its result, as ``Program`` describes them."""

    out_tree: optree.PyTreeSpec
    assumptions: tuple[str, ...]

    @property
    def out_specs(self) -> Sequence[PartitionSpec]: ...

    @property
    def out_leaves(self) -> Sequence[Any]: ...

    @property
    def is_static(self) -> Sequence[bool]: ...


class Startable:
    """A program that can be compiled or saved; the base of the results of ``step.lower(...)``."""

    _returning: ReturningProgram
    _bound: CallableProgram | None = None

    @property
    def out_specs(self) -> Any:
        """The result's tree with a spec for each leaf."""
        program = self._returning
        leaves = [
            PartitionSpec() if static else program.out_specs[leaf]
            for leaf, static in zip(program.out_leaves, program.is_static, strict=True)
        ]
        return program.out_tree.unflatten(leaves)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Claims about values that the program takes as true, each with the line that would
        otherwise raise: a trace has no values. ``check_inputs=True`` of the step checks them at
        every call.
        """
        return tuple(dict.fromkeys(self._returning.assumptions))

    def compile(self) -> CompiledProgram:
        """The program itself, ready to run: ``compiled(params, *batch)`` takes the arguments of one
        call of the step, of these shapes and dtypes, and neither traces nor plans.
        ``compiled.save(path)`` writes it to a file with its code.

        The function that runs it is made now, with ``compile=True`` inductor's code too. On
        processes all ranks call it together.

        Raises:
            MeshError: an abstract mesh, which runs nothing; ``save`` the program instead.

        >>> import ftp, torch
        >>> mesh = ftp.simulated_mesh((2,), ("dp",))
        >>> step = ftp.spmd(lambda x: x.sum(), mesh, ftp.P("dp"), ftp.P())
        >>> compiled = step.lower(torch.empty(4, device="meta")).compile()
        >>> compiled(torch.ones(4))
        tensor(4.)

        Source: JAX, ``jax.stages.Lowered.compile``.
        """
        return self._is_bound.compile()

    def save(self, path: str | Path) -> None:
        """Write the program to a file, from which ``ftp.load_program(path)`` starts it on any rank
        of such a mesh without tracing or planning.

        It holds the graph of every rank once for all ranks with equal shapes, what the reports
        need, and the tensors that the function captured. ``docs/starting.md`` has the rules.

        Raises:
            ProgramFileError: a program with what is no plain data, such as static values of classes
                of yours; a path that cannot be written to.

        >>> import ftp, tempfile, torch
        >>> mesh = ftp.simulated_mesh((2,), ("dp",))
        >>> lowered = ftp.lower(lambda x: x.sum(), mesh, ftp.P("dp"), torch.ones(4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lowered.save(f"{folder}/sum.ftp")
        ...     ftp.load_program(f"{folder}/sum.ftp", mesh)(torch.ones(4))
        tensor(4.)
        """
        self._is_bound.save(path)

    @property
    def _is_bound(self) -> CallableProgram:
        if self._bound is None:
            raise ReportError(
                "A program of stages, or a part of one, is not compiled or saved by itself. A"
                " program file holds one graph of each rank; stages are several, with actions and"
                " messages between them. Call the step, which compiles them with compile=True."
            )
        return self._bound
