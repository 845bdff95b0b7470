"""Trace: a function and abstract inputs to one functional aten graph, with gradients. Nothing runs.

torch's own pytrees never see a user's container: leaves go in and out as flat lists, each with a
separate fake tensor.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor, fx
from torch.autograd.grad_mode import _force_original_view_tracking

from ftp.dataclass import dataclass
from ftp.errors import TraceError
from ftp.functional.carried_values import values_left
from ftp.functional.gradient_hooks import GradientRefused
from ftp.ops.assume import assumptions_to
from ftp.ops.microbatch_means import means_of_trace
from ftp.paused_gc import collection_paused
from ftp.sharding.pytree import flatten
from ftp.source import describe_line, user_line
from ftp.torch_internals import deferred_compiler
from ftp.torch_internals.fake_tensors import LISTS
from ftp.tracing.alike import Alike, RecordedOps, recording_of
from ftp.tracing.calls import TorchCalls
from ftp.tracing.captured import ReadTensor
from ftp.tracing.captured_values import CapturedValues
from ftp.tracing.changed_state import check_changes, state_around
from ftp.tracing.check_traced import check_leaves, check_unwritten, checked_results
from ftp.tracing.clean_graph import clean
from ftp.tracing.data_dependent.assumptions import Assumptions
from ftp.tracing.data_dependent.branches import check_writes
from ftp.tracing.data_dependent.joins import Joins
from ftp.tracing.data_dependent.known_values import KnownValues
from ftp.tracing.data_dependent.paths import Paths, Ran, Static, merge_runs
from ftp.tracing.data_dependent.values_read import (
    Asked,
    Reading,
    ValuesRead,
    captured_values_from,
)
from ftp.tracing.forward_mode import ForwardModeRefused, by_reverse_mode
from ftp.tracing.functionalize_graph import constants_last, functional_form, lift_attributes
from ftp.tracing.gradient import WAYS, gradients_by_torch, refusals_noted, taking
from ftp.tracing.input_values import InputValues, ReadProgram, WholeInputs, small_inputs
from ftp.tracing.left_behind import LeftBehind, as_next_call, ending, forget_cached, left_behind
from ftp.tracing.reads import result_of, with_reads
from ftp.tracing.recorder import Recorder, record
from ftp.tracing.replacements.fused_ops import FUSED, as_on_device, as_primitives
from ftp.tracing.replacements.libraries import patched_libraries
from ftp.tracing.replacements.nested_traces import nested_traces
from ftp.tracing.replacements.replaced import replaced
from ftp.tracing.replacements.reshaped_views import check_reshaped_views
from ftp.tracing.replacements.value_independent import unchecked
from ftp.tracing.row_indices import gather_rows
from ftp.tracing.same_values import NumberedValues, holds_same
from ftp.tracing.selected_rows.narrow import check_copied_views
from ftp.tracing.settings import casting_once

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic


@dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
        gm: functional aten graph; its placeholders are the tensor leaves in order, then the
            constants; it returns a flat tuple, last the means over microbatches that a pipeline
            asks for (`ftp.ops.microbatch_means`). Every node has ``meta["val"]``;
            ``meta["source"]``, the user's line that caused it ("" if none did);
            ``meta["phase"]``, how often forward and backward passes took turns before it; and
            ``meta["region"]``, the recomputation that it is part of.
        constants: tensors that the function captured, in the order of their first use.
        out_tree: the structure of the result.
        out_leaves: per leaf of the result the index of its output, or its static value.
        is_static: per leaf of the result whether it is a static value.
        captured: the tensor objects that the function found outside of its arguments.
        read: of those that it read as Python numbers, what they held.
        assumptions: claims about values that the function takes as true. Where they are to be
            checked, the graph's last outputs are bools that say whether they hold.
        symbolic: for a trace with dynamic sizes, its symbolic numbers.
        recording: the recorded ops, if the trace keeps them.
        read_program: the ops that compute the values which the function reads, if inputs were
            given whole.
        asked: set if the program returns a value that the function reads, not its result.
        is_recognised: the trace ended with its recording.
    """

    gm: fx.GraphModule
    constants: tuple[Tensor, ...]
    out_tree: optree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    is_static: tuple[bool, ...]
    captured: tuple[Tensor, ...]
    read: tuple[ReadTensor, ...] = ()
    assumptions: tuple[str, ...] = ()
    symbolic: "Symbolic | None" = None
    recording: RecordedOps | None = None
    read_program: ReadProgram | None = None
    asked: Asked | None = None
    is_recognised: bool = False

    @cached_property
    def out_shapes(self) -> list[tuple[int, ...]]:
        """The global shape of each output."""
        returned: Any = self.gm.graph.output_node().args[0]
        shapes = [tuple(node.meta["val"].shape) for node in returned]
        if self.symbolic is None:
            return shapes
        return [tuple(map(self.symbolic.dynamic, shape)) for shape in shapes]


def trace(
    fn: Callable[..., Any],
    leaves: Sequence[Any],
    in_tree: optree.PyTreeSpec,
    device_type: str,
    *,
    names: Sequence[str],
    line: Callable[[], str] | None = None,
    checked: bool = False,
    within: bool = False,
    calls: TorchCalls | None = None,
    shapes: Sequence[tuple[int, ...] | None] | None = None,
    symbolic: "Symbolic | None" = None,
    recognises: Callable[[RecordedOps], bool] | None = None,
    replayed: Alike | None = None,
    reads: ValuesRead | None = None,
    whole: WholeInputs | None = None,
) -> Traced:
    """Trace ``fn`` on the arguments that ``in_tree`` makes of ``leaves``.

    ``grad_and_value`` takes gradients by torch.func; if torch.func refuses the function, by
    torch.autograd, which supports fewer of torch.func's operators inside the function.

    Args:
        leaves: tensors (real, fake or meta; only shape and dtype count) and static values.
        device_type: where the program will run; some ops have other kernels on another device.
        names: name of each leaf, for messages.
        line: gives the user's line that is running, where ``fn`` replays a program and the stack
            does not show it.
        checked: keep assumptions as outputs, after those of the result.
        within: the call is inside a function that is being traced, whose values may be captured.
        calls: numbers torch's calls in the lines of the nodes.
        shapes: per leaf the shape to trace with, where dims are dynamic; default its own.
        symbolic: the dynamic sizes.
        recognises: is given the trace's recording, where that can be replayed. If it knows the
            recording, the trace ends: its graph is that of the recording.
        replayed: recordings of the function to trace instead of it.
        reads: the values that the function has read so far, if it may read values as Python
            numbers: the trace ends at the next one. None: a function that needs one is refused.
        whole: inputs of which the trace computes values that the function reads, and goes on.

    Raises:
        TraceError: what the function does cannot be one graph. InputError: an argument that it
            cannot be traced with.

    >>> leaves, tree = flatten(({"w": torch.ones(2, 3)}, torch.ones(4, 2)))
    >>> traced = trace(lambda p, x: x @ p["w"], leaves, tree, "cpu", names=["p['w']", "x"])
    >>> print(traced.gm.code.strip())
    def forward(self, p_w, x):
        mm = torch.ops.aten.mm.default(x, p_w);  x = p_w = None
        return (mm,)
    """
    options = (line, checked, within, calls, shapes, symbolic, recognises, replayed)
    request = _Request(fn, leaves, in_tree, device_type, names, *options)
    made = partial(_made, request)
    state = {} if within else state_around(fn)
    again = replace(request, calls=None, shapes=None, symbolic=None, left=[])
    ended = ending(request.left, again.left)
    no_anomaly = torch.autograd.set_detect_anomaly(False)  # it reads gradients
    with ended, values_left() as carried, no_anomaly:
        try:
            traced = with_reads(made, reads, whole)
        except Exception as error:
            if not deferred_compiler.is_lacking(error):
                raise
            deferred_compiler.load()
            traced = with_reads(made, reads, whole)
        anew = partial(with_reads, partial(_made, again), reads, whole)
        if request.left:
            next_made = partial(_made, replace(request, recognises=None))
            of_next = partial(with_reads, next_made, reads, whole)
            traced = as_next_call(traced, request.left, anew, of_next)
            forget_cached(fn)
        if not (traced.is_recognised or within):
            check_changes(fn, state, carried, traced, anew)
    return traced


@dataclass(frozen=True)
class _Request:
    """The arguments of `trace`, except ``reads`` and ``whole``.

    Attributes:
        left: gets what the function leaves behind, at each attempt.
    """

    fn: Callable[..., Any]
    leaves: Sequence[Any]
    in_tree: optree.PyTreeSpec
    device_type: str
    names: Sequence[str]
    line: Callable[[], str] | None
    checked: bool
    within: bool
    calls: TorchCalls | None
    shapes: Sequence[tuple[int, ...] | None] | None
    symbolic: "Symbolic | None"
    recognises: Callable[[RecordedOps], bool] | None
    replayed: Alike | None
    left: list[LeftBehind] = field(default_factory=list)

    @cached_property
    def tensors(self) -> list[int]:
        """The positions of tensors among the leaves."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    @cached_property
    def small(self) -> tuple[int, ...]:
        """The places, among the tensors, of those that may be whole on every rank."""
        return small_inputs([self.leaves[i] for i in self.tensors])

    @cached_property
    def tensor_names(self) -> list[str]:
        return [self.names[i] for i in self.tensors]

    def fakes(self, recorder: Recorder) -> list[Tensor]:
        given = [tuple(map(int, self.leaves[i].shape)) for i in self.tensors]
        if self.shapes is not None:
            given = [self.shapes[i] or own for i, own in zip(self.tensors, given, strict=True)]
        dtypes = [self.leaves[i].dtype for i in self.tensors]
        return list(map(recorder.fake, given, dtypes))


def _made(
    request: _Request, *, reads: ValuesRead | None, whole: WholeInputs | None = None
) -> Traced:
    """A trace by the first of `WAYS` to take gradients that the function accepts. One that has read
    values begins with the way by which it did: by another way it may read others.
    """
    refused: GradientRefused | None = None
    first = 0 if reads is None or not reads.values else WAYS.index(reads.way)
    for by in WAYS[first:]:
        reads = reads and replace(reads, way=by)
        with taking(by) as gradient:
            try:
                return _with_derivatives(partial(_traced, request, reads=reads, whole=whole))
            except GradientRefused as error:
                refused = refused or error
                if not gradient.is_taken:
                    break
        reads, whole = reads and replace(reads, values=()), whole and replace(whole, after=0)
    assert refused is not None
    raise refused


def _with_derivatives(made: Callable[[list[Recorder]], Traced]) -> Traced:
    """A trace. If it fails after a fused op was called, or with torch's error about derivatives in
    forward mode, torch may lack a derivative of the op: trace again with fused ops as primitives,
    or with derivatives in reverse mode.
    """
    recorders: list[Recorder] = []
    try:
        return made(recorders)
    except ForwardModeRefused:
        with by_reverse_mode(), suppress(RuntimeError):
            return made([])
        raise
    except RuntimeError as error:
        called = recorders[-1].targets if recorders else set()
        if not isinstance(error, NotImplementedError) and called.isdisjoint(FUSED):
            raise
        with as_primitives(), suppress(RuntimeError):
            return made([])
        raise


@collection_paused()
def _traced(
    request: _Request,
    recorders: list[Recorder],
    *,
    reads: ValuesRead | None,
    whole: WholeInputs | None,
) -> Traced:
    """One attempt at a trace; appends its recorder to ``recorders``, even if it fails."""
    check_leaves(request.leaves, request.names)
    described = request.calls.line if request.calls else describe_line
    symbolic, device_type = request.symbolic, request.device_type
    recorder = Recorder(device_type, request.line, request.within, described, symbolic)
    recorders.append(recorder)
    paths = Paths(not request.within, request.checked, Joins, holds_same)
    reading = None
    if reads is not None:
        values = InputValues(recorder, request.small, reads.inputs, whole)
        reading = Reading(reads, holds_same, NumberedValues().of, values)
    try:
        gm, ran = _recorded(request, recorder, paths, reading)
    finally:
        if not request.within:
            for left in request.left:
                left.keep()
            forget_cached(request.fn, request.left)
    recording = None
    if request.recognises and not (paths.asked or recorder.read) and reading is None:
        recording = recording_of(gm, recorder, ran)
    if recording is not None and request.recognises is not None:
        if not request.left[-1].all and request.recognises(recording):
            return Traced(gm, (), ran.tree, (), (), (), recording=recording, is_recognised=True)
        recording = recording.kept()
    check_writes(gm.graph)
    check_copied_views(gm.graph)
    check_reshaped_views(gm.graph)
    check_unwritten(gm, dict(zip(_inputs(gm), request.tensor_names, strict=True)))
    with _sizes_asked(recorder):
        gm = functional_form(gm, recorder)
    lift_attributes(gm, recorder)
    if paths.runs > 1:
        merge_runs(gm, recorder.constants, list(map(len, paths.asked.values())))
    as_on_device(gm.graph, recorder.mode, recorder.device, device_type)
    gather_rows(gm.graph, recorder.mode)
    clean(gm, recorder.device, torch.device(device_type))
    if symbolic is not None:
        symbolic.refuse_ones()
        symbolic.inline(gm.graph)
        ran.statics[:] = [s and Static(symbolic.dynamic(s.value)) for s in ran.statics]
    constants = constants_last(gm, recorder, request.tensor_names)
    index = iter(range(len(ran.statics)))
    return Traced(
        gm,
        constants,
        ran.tree,
        out_leaves=tuple(next(index) if s is None else s.value for s in ran.statics),
        is_static=tuple(s is not None for s in ran.statics),
        captured=(*recorder.captured, *recorder.wrappers),
        read=tuple(recorder.read.values()),
        assumptions=tuple(claim for claim, _ in ran.claims),
        symbolic=symbolic,
        recording=recording,
        read_program=reading.inputs.program(reading.read) if reading and whole else None,
        asked=None if reading is None or reading.asked is None else reading.made(),
    )


def _recorded(
    request: _Request, recorder: Recorder, paths: Paths, reading: Reading | None
) -> tuple[fx.GraphModule, Ran]:
    """The graph of all ops that the function runs, writes included, and its result."""
    result: list[Ran] = []
    replayed, means = request.replayed, None if request.within else means_of_trace()
    casts_once = torch.is_autocast_cache_enabled()
    calls, known = request.calls, KnownValues()

    def run(filled: Sequence[Any]) -> Ran:
        assumed = Assumptions(recorder, request.checked, known)
        if means is not None:
            means.begin()
        recorder.begin()
        with assumptions_to(assumed.note), calls.noted() if calls else nullcontext():
            args = request.in_tree.unflatten(filled)
            out = result_of(request.fn, args, reading, paths.has_decided)
        if reading is not None and reading.asked is not None:
            return Ran(flatten(out)[1], [None], [recorder.known(out)], {})
        out_leaves, out_tree = flatten(out)
        out_leaves = checked_results(out_leaves, out)
        tensors = [leaf for leaf in out_leaves if isinstance(leaf, Tensor)]
        tensors += [] if means is None else means.tensors
        statics = [None if isinstance(leaf, Tensor) else Static(leaf) for leaf in out_leaves]
        return Ran(out_tree, statics, [recorder.known(x) for x in tensors], assumed.found)

    def flat(*values: Tensor) -> list[Tensor]:
        if replayed is not None:
            first = replayed.first
            result[:] = [Ran(first.out_tree, list(first.statics), [], dict.fromkeys(first.claims))]
            with recorder.recording():
                return replayed.run(recorder, values)
        filled = list(request.leaves)
        for i, value in zip(request.tensors, values, strict=True):
            filled[i] = value
        # Not around make_fx: it asks some twenty attributes of every input.
        captured = captured_values_from(CapturedValues(recorder).read)
        once = casting_once(casts_once)
        read = unchecked(recorder.note_read, known, recorder.arrays)
        with read, captured, once, recorder.recording():
            try:
                ran = paths.of(lambda: run(filled))
            finally:
                if not request.within:
                    request.left.append(left_behind(request.fn, recorder))
            result[:] = [ran]
            own = sum(s is None for s in ran.statics)
            checks = [x for x in ran.claims.values() if x is not None]
            asked = [x for runs in paths.asked.values() for x in runs]
            return [*ran.tensors[:own], *checks, *ran.tensors[own:], *asked]

    # The gradient of a write to a view replays the view's op, rather than strides that a shard does
    # not have.
    fakes = request.fakes(recorder)
    with (
        nested_traces(),
        patched_libraries(),
        gradients_by_torch(),
        refusals_noted(),
        replaced(*LISTS),
        _sizes_asked(recorder),
        recorder.mode,
        _force_original_view_tracking(True),
    ):
        gm = record(recorder, flat, fakes)
    if len(_inputs(gm)) != len(fakes):
        raise TraceError(
            f"The trace has {len(_inputs(gm))} inputs for {len(fakes)} tensors: an argument is in a"
            " container that optree does not know. Register its class, or use a dict or list."
        )
    return gm, result[0]


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph, without captured tensors."""
    return [n for n in gm.graph.find_nodes(op="placeholder") if "ftp_constant" not in n.meta]


def _sizes_asked(recorder: Recorder) -> AbstractContextManager[None]:
    """Within the block, code may ask for dynamic sizes."""
    if recorder.symbolic is None:
        return nullcontext()
    return recorder.symbolic.generic(lambda: user_line() or recorder.line)
