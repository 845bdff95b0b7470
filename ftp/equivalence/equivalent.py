"""``equivalent``: prove that a program written per rank computes what a single-device one does."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, fx

from ftp.axis import Inside, entered
from ftp.certification.certificate import Certificate, Recorded, Unreduced
from ftp.certification.ranks import Ranks
from ftp.dataclass import dataclass
from ftp.equivalence.data_access import READS_VALUE
from ftp.equivalence.decide import SEED, decide
from ftp.equivalence.draws import without_python_draws
from ftp.equivalence.fake_world import as_rank
from ftp.equivalence.given_specs import as_specs, placements_of, require_placements
from ftp.equivalence.program_lines import operations, without_dead
from ftp.equivalence.recorded_exchanges import ExchangeRecorder
from ftp.equivalence.recorder import ProgramRecorder, recording
from ftp.errors import FtpError, InputError, SpecError, TraceError
from ftp.sharding.arguments import argument_names, argument_specs
from ftp.sharding.dtensor_placements import is_placements
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import AnyMesh, Mesh, resolve
from ftp.sharding.pytree import broadcast_specs, check_specs, flatten, leaf_names
from ftp.sharding.spec import PartitionSpec, cuts_of
from ftp.source import raised_line
from ftp.torch_internals.error_texts import Meaning, meaning_of
from ftp.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def equivalent(
    reference: Callable[..., Any],
    rank_program: Callable[..., Any],
    mesh: AnyMesh,
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    grad: bool = False,
    every_routing: bool = False,
) -> Certificate:
    """Prove that a program written per rank computes what a single-device program does.

    Both are recorded on fake tensors, the rank program once for each rank, in a fake world: it may
    use ``torch.distributed`` in every form, autograd functions around it, ``ftp.axis``, and the
    groups of ``mesh``. Then both run on random residues modulo primes, all ranks side by side.

    Args:
        reference: the single-device program, of whole tensors.
        rank_program: takes this rank's shards of ``args``, returns this rank's shards of the
            results; a DTensor where its spec is a sequence of DTensor placements.
        mesh: of any kind; in ``rank_program`` it stands for the rank's DeviceMesh.
        in_specs: prefix tree of the tuple of arguments, of specs or placements.
        out_specs: prefix tree of the result.
        args: whole tensors, which give shapes, dtypes, and the range of integers; others are
            passed as they are.
        grad: also prove the gradients of each floating-point argument, under its spec, for every
            gradient of the results. Each rank gets its shard of the results' gradients, or the
            whole if the result is replicated; with ``ftp.axis``, the ranks' outputs are summed, as
            in ``ftp.local``.
        every_routing: prove it for every outcome of the one choice that the reference makes, such
            as a router's ``topk``, in place of some that are drawn: every experts of every token.

    Returns:
        The proof; its ``save`` writes it, ``python -m ftp certify`` checks it again.

    Raises:
        CertificateError: a result or a gradient differs, or the ranks wait for each other forever;
            ``output``, ``rank``, ``line`` and ``inputs`` tell where, and on which inputs.
        Undecided: neither a proof nor a difference was found; ``ops`` are those without algebra.
        TraceError: a program that reads a tensor's value, draws random numbers that reach its
            results, or writes to its arguments.
        SpecError: specs that do not fit the arguments or the results; ``every_routing`` of a
            reference that chooses never, or several times, or in too many ways.

    >>> import torch, ftp
    >>> import torch.distributed as dist
    >>> def row_parallel(x, w):
    ...     y = x @ w
    ...     dist.all_reduce(y)
    ...     return y
    >>> mesh = ftp.AbstractMesh((2,), ("tp",))
    >>> args = torch.ones(3, 4), torch.ones(4, 5)
    >>> specs = ftp.P(None, "tp"), ftp.P("tp")
    >>> ftp.equivalent(torch.matmul, row_parallel, mesh, specs, ftp.P(), *args)
    certificate of 3 values and ops on (tp 2), 2 ranks
    """
    resolved = resolve(mesh)
    call = _Comparison.of(reference, rank_program, resolved, in_specs, out_specs, args, grad)
    call.every_routing = every_routing
    whole = call.record_reference()
    certificate = call.certificate(mesh, whole)
    decide(certificate)
    return certificate


@dataclass
class _RecordedProgram:
    """A recorded program, whose graph has no output yet.

    Attributes:
        outputs: its results and gradients, tensors.
        names: of the outputs.
        tree: of the results.
        returned: the results as the program returned them.
    """

    recorder: ProgramRecorder
    outputs: list[Tensor]
    names: list[str]
    tree: Any
    returned: list[Any]

    @property
    def results(self) -> int:
        return len(self.returned)

    @property
    def nodes(self) -> list[fx.Node]:
        return [self.recorder.node_of(x) for x in self.outputs]


@dataclass
class _Comparison:
    """One call of ``equivalent``."""

    reference: Callable[..., Any]
    rank_program: Callable[..., Any]
    mesh: Mesh
    leaves: list[Any]
    tree: optree.PyTreeSpec
    names: list[str]
    specs: list[PartitionSpec]
    placements: list[Any]
    out_specs: Any
    grad: bool
    every_routing: bool = False

    @classmethod
    def of(
        cls,
        reference: Callable[..., Any],
        rank_program: Callable[..., Any],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        args: tuple[Any, ...],
        grad: bool,
    ) -> "_Comparison":
        leaves, tree = flatten(args)
        roots = argument_names(reference)
        whole = in_specs
        if is_placements(in_specs):
            in_specs = tuple(in_specs for _ in args)
            whole = in_specs
        placed = placements_of(whole, args)
        specs = argument_specs(as_specs(in_specs, args, mesh, "in_specs"), args, roots, "in_specs")
        names = [
            name
            for i, arg in enumerate(args)
            for name in leaf_names(arg, roots[i] if i < len(roots) else f"args[{i}]")
        ]
        check_specs(specs, leaves, names, mesh.axes, takes_sums=True)
        for leaf, name in zip(leaves, names, strict=True):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.is_meta:
                raise InputError(
                    f"{name} is a meta tensor of {leaf.dtype}: integers are taken in the range of"
                    " those given. Pass a real tensor."
                )
        return cls(
            reference, rank_program, mesh, leaves, tree, names, specs, placed, out_specs, grad
        )

    # The programs.

    def record_reference(self) -> _RecordedProgram:
        with recording() as recorder:
            given = [
                self._input(recorder, x, tuple(x.shape), name) if isinstance(x, Tensor) else x
                for x, name in zip(self.leaves, self.names, strict=True)
            ]
            return self._run(recorder, self.reference, given, given, None, "The reference")

    def record_rank(
        self, mesh: AnyMesh, rank: int, whole: _RecordedProgram, specs: list[PartitionSpec]
    ) -> tuple[_RecordedProgram, bool]:
        coordinate = self.mesh.coordinates()[rank]
        with as_rank(mesh, self.mesh, rank) as device_mesh:
            exchanges = ExchangeRecorder(device_mesh)
            with recording(exchanges) as recorder:
                index = {a: torch.full((), i, dtype=torch.int64) for a, i in coordinate.items()}
                local = [
                    self._input(recorder, x, local_shape(s, x.shape, self.mesh.axes, coordinate), n)
                    if isinstance(x, Tensor)
                    else x
                    for x, s, n in zip(self.leaves, self.specs, self.names, strict=True)
                ]
                passed = [
                    self._dtensor(x, whole_x, placed, device_mesh) if placed is not None else x
                    for x, whole_x, placed in zip(local, self.leaves, self.placements, strict=True)
                ]
                with entered(Inside(self.mesh.axes, index)):
                    cotangents = (whole, specs, coordinate, exchanges)
                    program = self._run(
                        recorder, self.rank_program, local, passed, cotangents, f"Rank {rank}"
                    )
            return program, exchanges.uses_axis

    def _input(
        self, recorder: ProgramRecorder, x: Tensor, shape: Sequence[int], name: str
    ) -> Tensor:
        made = _empty(recorder, shape, x.dtype)
        recorder.input(made, "x")
        recorder.protect(made, name)
        if self.grad and x.is_floating_point():
            made.requires_grad_()
        return made

    @staticmethod
    def _dtensor(local: Tensor, whole: Tensor, placements: Any, mesh: Any) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            mesh,
            list(placements),
            run_check=False,
            shape=whole.shape,
            stride=torch.empty(whole.shape, device="meta").stride(),
        )

    def _run(
        self,
        recorder: ProgramRecorder,
        fn: Callable[..., Any],
        local: list[Any],
        passed: list[Any],
        ranked: Any,
        who: str,
    ) -> _RecordedProgram:
        try:
            with without_python_draws(who):
                result = fn(*self.tree.unflatten(passed))
        except FtpError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            raise TraceError(
                f"{who}: {raised_line(e) or 'the program'}\n  The program reads the value of a"
                f" tensor, or makes a shape of it ({e.func}), {READS_VALUE}"
            ) from e
        except Exception as e:
            meaning = meaning_of(e)
            if meaning is Meaning.NEEDS_VALUE:
                raise TraceError(
                    f"{who}: {raised_line(e) or 'the program'}\n  The program reads the value of a"
                    f" tensor, {READS_VALUE}"
                ) from e
            if meaning is Meaning.MUTATES_LEAF:
                raise TraceError(
                    f"{who}: {raised_line(e) or 'the program'}\n  The program writes to one of its"
                    " inputs: the caller's tensor would change. Work on a copy, as .clone() makes"
                    " it."
                ) from e
            raise TraceError(
                f"{who}: {raised_line(e) or 'the program'} raises {type(e).__name__} on fake"
                f" tensors: {e}"
            ) from e
        leaves, tree = flatten(result)
        if not leaves or any(not isinstance(x, Tensor) for x in leaves):
            raise TraceError(
                f"{who} returns {[type(x).__name__ for x in leaves]}: a program returns tensors, or"
                " a tree of them."
            )
        names = leaf_names(result, "output")
        tensors = [_local(x) for x in leaves]
        outputs = list(tensors)
        if self.grad:
            outputs += self._gradients(recorder, tensors, local, ranked)
            names += [
                f"the gradient of {n}"
                for n, x in zip(self.names, self.leaves, strict=True)
                if isinstance(x, Tensor) and x.is_floating_point()
            ]
        for x in outputs:
            recorder.node_of(x)
        return _RecordedProgram(recorder, outputs, names, tree, leaves)

    def _gradients(
        self,
        recorder: ProgramRecorder,
        tensors: Sequence[Tensor],
        local: Sequence[Any],
        ranked: Any,
    ) -> list[Tensor]:
        """The gradients of the floating-point arguments, for gradients of the results that are
        inputs of the recorded program.
        """
        wrt = [x for x in local if isinstance(x, Tensor) and x.is_floating_point()]
        seeds = []
        for i, x in enumerate(tensors):
            if not x.is_floating_point():
                continue
            shape = tuple(x.shape)
            made = _empty(recorder, shape, x.dtype)
            recorder.input(made, f"{SEED}{i}")
            seed = made.clone()
            if ranked is not None and ranked[3].uses_axis:
                seed = seed / self._replicas(ranked[1][i])
            seeds.append((x, seed))
        live = [(x, s) for x, s in seeds if x.requires_grad]
        if not live:
            return [torch.zeros_like(x) for x in wrt]
        try:
            found = torch.autograd.grad(
                [x for x, _ in live], wrt, [s for _, s in live], allow_unused=True
            )
        except FtpError:
            raise
        except RuntimeError as e:
            raise TraceError(
                f"{raised_line(e) or 'The backward pass'} raises {type(e).__name__}: {e}"
            ) from e
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wrt, found, strict=True)]

    def _replicas(self, spec: PartitionSpec) -> int:
        n = 1
        for axis, size in self.mesh.axes.items():
            if axis not in spec.axes and axis not in spec.unreduced:
                n *= size
        return n

    # The certificate.

    def certificate(self, mesh: AnyMesh, whole: _RecordedProgram) -> Certificate:
        results = whole.outputs[: whole.results]
        tree = whole.tree.unflatten(results)
        given = as_specs(self.out_specs, tree, self.mesh, "out_specs")
        specs = broadcast_specs(given, tree, "out_specs")
        check_specs(specs, results, whole.names[: whole.results], self.mesh.axes, takes_sums=True)
        programs, graphs = [], []
        sums = False
        for rank in range(self.mesh.size()):
            program, uses_axis = self.record_rank(mesh, rank, whole, specs)
            self._require_outputs(program, whole, specs, rank)
            programs.append(program)
            sums = sums or uses_axis
        for program in programs:
            program.recorder.graph.output(program.nodes)
            graphs.append(without_dead(program.recorder.graph))
        tensors = [
            (x, s, n)
            for x, s, n in zip(self.leaves, self.specs, self.names, strict=True)
            if isinstance(x, Tensor)
        ]
        floats = [(x, s) for x, s, _ in tensors if x.is_floating_point()]
        seeds = [s for x, s in zip(results, specs, strict=True) if x.is_floating_point()]
        in_specs = [s for _, s, _ in tensors] + (seeds if self.grad else [])
        out_specs = specs + ([s for _, s in floats] if self.grad else [])
        pending = [s.unreduced for s in in_specs]
        if self.grad:  # gradients of pending sums are whole; with ``sums`` it is the reverse
            for i in range(len(tensors), len(in_specs)):
                pending[i] = ()
        out_pending = [s.unreduced for s in specs]
        if self.grad:
            out_pending += [
                tuple(a for a in self.mesh.axes if a not in s.axes and a not in s.unreduced)
                if sums
                else ()
                for _, s in floats
            ]
        lines, refs = operations(
            whole.recorder.graph,
            whole.nodes,
            [cuts_of(s) for s in in_specs],
            [name for _, _, name in tensors],
        )
        integers = {
            i: tuple(x.detach().to(torch.int64).reshape(-1).tolist())
            for i, (x, _, _) in enumerate(tensors)
            if not x.is_floating_point()
        }
        return Certificate(
            dict(self.mesh.axes),
            {},
            lines,
            tuple(zip(refs, map(cuts_of, out_specs), strict=True)),
            Unreduced(tuple(pending), tuple(out_pending)),
            Ranks.of(
                graphs,
                {tuple(c.values()): (i, ()) for i, c in enumerate(self.mesh.coordinates())},
            ),
            (),
            Recorded(tuple(whole.names), integers, self.every_routing),
        )

    def _require_outputs(
        self,
        program: _RecordedProgram,
        whole: _RecordedProgram,
        specs: Sequence[PartitionSpec],
        rank: int,
    ) -> None:
        if program.results != whole.results:
            raise SpecError(
                f"Rank {rank} returns {program.results} tensors; the reference returns"
                f" {whole.results}."
            )
        coordinate = self.mesh.coordinates()[rank]
        for x, held, expected, spec, name in zip(
            program.outputs, program.returned, whole.outputs, specs, whole.names, strict=False
        ):
            require_placements(held, spec, expected.shape, self.mesh, f"{name} on rank {rank}")
            due = local_shape(spec, expected.shape, self.mesh.axes, coordinate)
            if tuple(x.shape) != due:
                raise SpecError(
                    f"{name} has shape {tuple(x.shape)} on rank {rank}. The reference's has shape"
                    f" {tuple(expected.shape)}, of which {spec} gives this rank {due}."
                )
            if x.dtype != expected.dtype:
                raise SpecError(
                    f"{name} is of {x.dtype} on rank {rank}; the reference's is of"
                    f" {expected.dtype}."
                )


def _empty(recorder: ProgramRecorder, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    from ftp.torch_internals.modes import disable_current_modes

    with disable_current_modes(), recorder.fake:
        return torch.empty(tuple(shape), dtype=dtype)


def _local(x: Any) -> Tensor:
    """A rank's part of a result."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    if isinstance(x, DTensor):
        x = x.to_local()
    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    return x
