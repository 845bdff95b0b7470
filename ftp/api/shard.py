"""shard() and spmd(): from a pure function, a mesh and specs to a step function."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from ftp.api.definition import Definition
from ftp.api.dynamic_shapes import dynamic_arguments
from ftp.api.options import check_flags, check_pipeline, checked_options, has_stages
from ftp.api.step import Step
from ftp.errors import InputError, SpecError
from ftp.pipeline.placement import Pipeline
from ftp.planning.machine import GivenHardware
from ftp.random.distributions import check_key, is_key
from ftp.random.draws import keyed
from ftp.runtime.options import PROGRAMS, Options
from ftp.sharding.arguments import argument_names, argument_specs
from ftp.sharding.mesh import AnyMesh, Mesh, resolve
from ftp.sharding.pytree import broadcast_specs, flatten, kind_of
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.data_dependent.values_read import ValuesRead
from ftp.tracing.gradient import grad_and_value

if TYPE_CHECKING:
    from ftp.report.lowered import Lowered


def shard(
    loss_fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    batch_specs: Any = PartitionSpec(),
    data_axes: Sequence[str] | None = None,
    has_aux: bool = False,
    reshard_after_forward: bool = True,
    donate: Sequence[int] = (),
    compile: bool = False,
    strict: bool = False,
    explicit: bool = False,
    certify: bool = False,
    bucket: bool = True,
    check_inputs: bool = False,
    prefetch: int | None = None,
    chunks: int = 1,
    cuda_graph: bool = False,
    async_tp: bool = False,
    programs: int = PROGRAMS,
    pipeline: Pipeline | None = None,
    hardware: GivenHardware = None,
    reduce_dtype: torch.dtype | None = None,
    rng: bool = False,
    dynamic_shapes: Any = None,
) -> Step:
    """The step function ``step(params, *batch) -> (loss, grads)`` of a loss, as every rank of
    ``mesh`` runs it.

    Args:
        loss_fn: pure function ``(params, *batch)`` to a scalar, with ``has_aux`` to ``(scalar,
            aux)``.
        mesh: a torch DeviceMesh, or an ftp mesh; default that of the surrounding ``ftp.use_mesh``.
        specs: spec tree of the parameters, or a prefix of one; gradients come back sharded as it
            says.
        batch_specs: prefix tree of the tuple of batch arguments; one ``P`` covers all. With one
            batch argument it may be that argument's own tree.
        data_axes: the axes on which parameters are resharded and activations are not; default those
            that cut a batch argument.
        has_aux: the loss function returns ``(loss, aux)``, and the step ``((loss, aux), grads)``,
            aux replicated.
        reshard_after_forward: drop a parameter's gathered copy after the forward pass and gather it
            again for the backward pass.
        donate: positions of arguments whose memory the step may reuse; they must not be used
            afterwards.
        compile: compile each rank's graph with inductor (the simulator runs it as it is).
        strict: raise an error for what ``lowered.lint`` warns of: large parameters on every rank,
            uneven shards that waste much, activations gathered whole, ops whose inputs disagree on
            their layout with no constraint to decide. An op without a sharding rule is an error
            too; by default it is replicated with a warning. So is a value that the function needs
            as a Python number; by default it is read, with a warning (see docs/values.md).
        explicit: refuse collectives that no line asks for; the error names the lines to add. Asked
            for are gathers of parameters, sums of gradients, reshards that the specs of inputs and
            outputs need, and those of ``ftp.constrain``, with their transposes in the backward pass
            (see docs/explicit.md).
        certify: check each program independently before its first run, as ``ftp.certify`` does.
        bucket: issue small collectives that are ready together as one: gathers of the parameters of
            a layer, reductions of gradients, of statistics and of losses. It changes no value.
        check_inputs: at each call check that replicas of every input are equal, as
            ``ftp.check_replicas`` does, and that inputs which index a dim (ids, classes) are in its
            range.
        prefetch: bytes of parameters that a rank gathers before they are needed; default the size
            of the largest parameter. A step uses at most this much more memory than with 0, where
            each is gathered when it is needed.
        chunks: under sequence parallelism, the number of chunks (of the batch, which it must
            divide) in which to reshard activations beside a matmul; one chunk is sent while
            another is computed.
        cuda_graph: record the step, its collectives included, as one CUDA graph at its third call,
            and replay it from then on (see docs/gpus.md; the simulator runs the step as it is).
        async_tp: under sequence parallelism, fuse gathers of activations with the matmuls that
            read them, and matmuls with their reduce-scatter, as torch's ops on symmetric memory:
            one part is sent over NVLink while another is computed. The certificate is that of the
            program before fusion.
        programs: how many programs the step keeps, one per combination of shapes, dtypes and
            static values; the least recently used is dropped, and planned again when needed.
        pipeline: run the model in stages over one axis, microbatch by microbatch; ``specs`` are
            those of ``pipeline.place(params, specs, mesh)`` (see docs/pipelines.md).
        hardware: the machine that plans are made for: a preset (``"h100"``, ``"h200"``,
            ``"b200"``, ``"cpu"``), what ``ftp.calibrate(mesh)`` returned, or a ``Hardware`` with
            ``links`` by axis; equal on all ranks. Default: the preset of the mesh's device type,
            with the network's link for axes that leave a host.
        reduce_dtype: ``torch.bfloat16`` sends the terms of gradients' sums in bfloat16, by
            all-to-all, and sums them in float32 at the receiver; half the bytes of float32. Other
            sums, of activations and of the loss, keep their dtype.
        rng: the step takes one more argument, the last, ``ftp.random.key(...)``. torch's random
            functions in the function, and models that are given no key of their own, draw from it:
            the same numbers on any mesh. With a pipeline of ``n`` microbatches the i-th one draws
            from ``ftp.random.split(key, n)[i]``.
        dynamic_shapes: the dims of the batch that change size, as torch.export takes them:
            ``{1: torch.export.Dim("S", max=8192)}``, a prefix tree of the tuple of batch
            arguments; ``{}``: none. The step is traced once for all their sizes (see
            docs/shapes.md). Default: the dims that have changed when shapes are the third ones.

    Returns:
        A ``Step``: call it, or ``step.lower(params, *batch)`` to read the program first.

    Raises:
        FtpError: the mesh or the function is wrong by itself; other errors come when the step is
            first called, on every rank.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> step = ftp.shard(lambda p, x: (x @ p["w"]).sum(), mesh, {"w": ftp.P(None, "tp")})
    >>> loss, grads = step({"w": torch.ones(3, 4)}, torch.ones(2, 3))
    >>> float(loss), grads["w"].shape
    (24.0, torch.Size([3, 4]))
    """
    options = Options.among(locals())
    _check_callable(loss_fn, "loss_fn", "(params, *batch) -> scalar")
    loss_fn = keyed(loss_fn) if rng else loss_fn
    loss_fn = _with_row(loss_fn) if rng and pipeline is not None else loss_fn
    names = argument_names(loss_fn)

    def in_specs(args: tuple[Any, ...]) -> list[PartitionSpec]:
        (params, *batch), of_key = _before_key(args, pipeline is not None) if rng else (args, [])
        given = broadcast_specs(PartitionSpec() if specs is None else specs, params, "params")
        if sums := [spec for spec in given if spec.unreduced]:
            raise SpecError(
                f"specs hold {sums[0]}, but parameters are no pending sums, and gradients come back"
                " as parameters are. For gradients that are not reduced yet use ftp.spmd with"
                " out_specs."
            )
        return given + argument_specs(batch_specs, tuple(batch), names[1:], "batch_specs") + of_key

    def out_specs(
        result: Any, given: Sequence[PartitionSpec], args: tuple[Any, ...]
    ) -> list[PartitionSpec]:
        replicated = [PartitionSpec()] * len(flatten(result[0])[0])
        return replicated + list(given[: len(flatten(args[0])[0])])

    m = resolve(mesh)
    options = checked_options(m, options)
    check_flags({"has_aux": has_aux, "rng": rng})
    fn, arguments = grad_and_value(loss_fn, has_aux=has_aux), ("params", *names[1:])
    if pipeline is not None:
        if dynamic_shapes is not None:
            raise InputError(
                "dynamic_shapes does not go with a pipeline, whose stages send activations of"
                " fixed shapes. Leave one out; without it each size is planned for itself."
            )
        from ftp.api.pipelined_step import PipelinedStep

        check_pipeline(pipeline, m, options, specs)
        definition = Definition(fn, m, in_specs, out_specs, arguments, frozenset({0}), options)
        return PipelinedStep(definition, pipeline, takes_key=rng)
    if has_stages(specs):
        raise SpecError(
            "specs give stages of a pipeline, and there is none. Pass pipeline=, the one whose"
            " place() made them."
        )
    dynamic = dynamic_arguments(dynamic_shapes, arguments, 1, rng=rng)
    state, reads = frozenset({0}), _reads(m, options)
    return Step(
        Definition(fn, m, in_specs, out_specs, arguments, state, options, dynamic, True, reads)
    )


def spmd(
    fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    donate: Sequence[int] = (),
    data_axes: Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    compile: bool = False,
    strict: bool = False,
    explicit: bool = False,
    certify: bool = False,
    bucket: bool = True,
    check_inputs: bool = False,
    prefetch: int | None = None,
    chunks: int = 1,
    cuda_graph: bool = False,
    async_tp: bool = False,
    programs: int = PROGRAMS,
    pipeline: Pipeline | None = None,
    hardware: GivenHardware = None,
    reduce_dtype: torch.dtype | None = None,
    rng: bool = False,
    dynamic_shapes: Any = None,
) -> Step:
    """Any pure function as every rank of ``mesh`` runs it; a whole train step, optimizer state
    included.

    Args:
        fn: takes and returns trees of tensors, and has no side effects.
        in_specs: prefix tree of the tuple of arguments; one ``P`` covers all. With one argument it
            may be that argument's own tree.
        out_specs: prefix tree of the result; None leaves the choice to propagation. A tree of the
            result that is like an argument (parameters, an optimizer's state) keeps the argument's
            specs.
        data_axes: default the axes that cut an argument that is not state. State: the first
            argument, donated arguments, and arguments that the result returns with the same shapes
            and specs.
        pipeline: run the gradient that ``fn`` takes, by ``torch.func.grad_and_value`` or
            ``ftp.optim.accumulate`` of it, in stages over one axis, microbatch by microbatch. Ops
            after the gradient, such as clipping and an optimizer's update, run once, on the means
            over the microbatches. ``in_specs`` hold the specs of ``pipeline.place`` (see
            docs/pipelines.md).

    The other arguments are those of ``shard``.

    Raises:
        SpecError: specs that do not fit the mesh or, at a call, the arguments. At the first call of
            new shapes also: TraceError, a function that cannot be traced; PlanningError, specs that
            no program satisfies.

    >>> import ftp
    >>> double = ftp.spmd(lambda x: 2 * x, ftp.simulated_mesh((2,), ("dp",)), ftp.P("dp"))
    >>> double(torch.ones(3))
    tensor([2., 2., 2.])
    """
    options = Options.among(locals())
    _check_callable(fn, "fn", "(*args) -> result")
    in_rows = rng and pipeline is not None
    fn = keyed(fn) if rng else fn
    fn = _with_row(fn) if in_rows else fn
    names = argument_names(fn)

    def input_specs(args: tuple[Any, ...]) -> list[PartitionSpec]:
        given, of_key = _before_key(args, in_rows) if rng else (args, [])
        specs = PartitionSpec() if in_specs is None else in_specs
        return argument_specs(specs, given, names, "in_specs") + of_key

    def output_specs(
        result: Any, given: Sequence[PartitionSpec], args: tuple[Any, ...]
    ) -> Sequence[PartitionSpec | None]:
        if out_specs is None:
            return [None] * len(flatten(result)[0])
        return broadcast_specs(out_specs, result, "the result")

    m = resolve(mesh)
    options = checked_options(m, options)
    dynamic = dynamic_arguments(dynamic_shapes, names, 0, rng=rng)
    in_stages = pipeline is not None or has_stages((in_specs, out_specs))
    if dynamic is not None and in_stages:
        raise InputError(
            "dynamic_shapes does not go with the stages of a pipeline: they send activations of"
            " fixed shapes. Leave it out; each size is planned for itself."
        )
    state = frozenset({0, *donate})
    reads = None if in_stages else _reads(m, options)
    definition = Definition(
        fn, m, input_specs, output_specs, names, state, options, dynamic, not in_stages, reads
    )
    if pipeline is not None:
        from ftp.api.pipelined_train_step import PipelinedTrainStep

        check_pipeline(pipeline, m, options, in_specs, updates=True)
        return PipelinedTrainStep(definition, pipeline, takes_key=rng)
    if in_stages:
        from ftp.api.staged_step import StagedStep

        return StagedStep(definition)
    return Step(definition)


def lower(
    fn: Callable[..., Any],
    mesh: AnyMesh | None,
    in_specs: Any,
    *args: Any,
    out_specs: Any = None,
    hardware: GivenHardware = None,
) -> "Lowered":
    """The program of ``spmd(fn, mesh, in_specs)`` for ``args`` (real, fake or meta), before it
    runs.

    Args:
        args: the arguments of ``fn``, tensors whole.

    The other arguments are those of ``spmd``.

    Raises:
        FtpError: as the first call of the step would.

    >>> import ftp
    >>> mesh = ftp.AbstractMesh((4,), ("tp",))
    >>> x, w = torch.empty(2, 8, device="meta"), torch.empty(8, 3, device="meta")
    >>> specs = ftp.P(None, "tp"), ftp.P("tp")
    >>> lowered = ftp.lower(lambda x, w: x @ w, mesh, specs, x, w, out_specs=ftp.P())
    >>> [c.op for c in lowered.collectives]
    ['all_reduce']
    """
    return spmd(fn, mesh, in_specs, out_specs, hardware=hardware).lower(*args)


def _reads(mesh: Mesh, options: Options) -> ValuesRead | None:
    """An abstract mesh runs nothing, and so reads no values."""
    return None if mesh.kind == "abstract" or options.strict else ValuesRead()


def _before_key(
    args: tuple[Any, ...], in_rows: bool
) -> tuple[tuple[Any, ...], list[PartitionSpec]]:
    """The arguments before the key, and the key's spec, P().

    Args:
        in_rows: the last argument is a row of keys for each microbatch.
    """
    given, key = args[:-1], args[-1] if args else torch.empty(0)
    if not (in_rows and isinstance(key, torch.Tensor) and key.ndim == 2 and is_key(key[0])):
        check_key(key, "The step's last argument, as rng=True,")
    return given, [PartitionSpec()]


def _with_row(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` of a key as a function of a microbatch's row of keys, which holds one key."""

    @wraps(fn)
    def with_row(*args: Any) -> Any:
        return fn(*args[:-1], args[-1][0])

    return with_row


def _check_callable(fn: Any, name: str, form: str) -> None:
    if not callable(fn):
        raise InputError(f"{name} is {fn!r}, {kind_of(fn)}; give a pure function {form}.")
    if isinstance(fn, torch.nn.Module):
        raise InputError(
            f"{name} is a module, {type(fn).__name__}; give a pure function {form}. fn, params ="
            " ftp.functionalize(module) makes one."
        )
