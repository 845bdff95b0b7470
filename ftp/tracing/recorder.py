"""The recorder: sees every op before it is traced, with the user's line that called it."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree

from ftp.axis import is_inside
from ftp.context import set_within
from ftp.errors import FtpError, TraceError
from ftp.functional.remat import current_region
from ftp.ops.choose import BranchPath, current_branch
from ftp.ops.static_shape import FIXED
from ftp.rules.call import replaced
from ftp.source import describe_line, is_users
from ftp.torch_internals import deferred_compiler
from ftp.torch_internals.autograd_state import (
    current_autograd_node,
    current_graph_task_id,
    get_sequence_nr,
)
from ftp.torch_internals.deferred_symbols import keep_unused_numbers
from ftp.torch_internals.fake_tensors import FakeTensor, mode_for
from ftp.torch_internals.functorch import unwrap_if_dead
from ftp.torch_internals.graph_nodes import GraphNames, new_node, since
from ftp.torch_internals.modes import (
    DisableTorchFunction,
    TorchDispatchMode,
    disable_current_modes,
    get_current_function_mode_stack,
    is_wrapper,
)
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.call_cache import Recall, TracedCall, track
from ftp.tracing.captured import ReadTensor, read_now
from ftp.tracing.data_dependent.arrays import Arrays
from ftp.tracing.data_dependent.paths import same_region
from ftp.tracing.explain_errors import SURROUNDING, explain, located, of_earlier_trace
from ftp.tracing.op_facts import (
    ALWAYS,
    checks_in_gradient,
    op_facts,
)
from ftp.tracing.refused_calls import (
    check_call,
    check_captured,
    check_strided,
    wrappers_in,
)
from ftp.tracing.zero_tangents import RECORDED_AS

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic

aten = torch.ops.aten
deferred_compiler.defer()


# Metadata of an exported graph's nodes: where in the user's code each comes from.
PROVENANCE = ("nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack", "custom")


_DEVICE = torch.ops.prim.device.default


class Recorder(TorchDispatchMode):
    """Sees every op before it is traced: refuses ops that a program cannot hold, lifts captured
    tensors to inputs, notes the user's line.

    Attributes:
        constants: the captured tensors.
        with_values: those of them that have values, by their places among the constants.
        read: of those that the function read as Python numbers, by their ids, what they held.
        arrays: NumPy's arrays of traced tensors.

    A node of the backward pass gets the line of its forward op, found by autograd's sequence
    numbers.
    """

    def __init__(
        self,
        device_type: str,
        told: Callable[[], str] | None = None,
        within: bool = False,
        describe: Callable[[str, int], str] = describe_line,
        symbolic: "Symbolic | None" = None,
    ):
        super().__init__()
        self._told, self._within, self._describe = told, within, describe
        self.symbolic = symbolic
        env = None if symbolic is None else symbolic.env
        self.mode = mode_for(env)
        self.device = torch.device(device_type if _is_available(device_type) else "cpu")
        outer = _current.get()
        is_alike = outer is not None and (outer.symbolic, outer.device) == (symbolic, self.device)
        self.recall = Recall(self.mode, outer.recall if outer is not None and is_alike else None)
        self.device_types = {device_type, "meta"}
        self.constants: list[Tensor] = []
        self.with_values: dict[int, Tensor] = {}
        self.read: dict[int, ReadTensor] = {}
        self.arrays = Arrays()
        self.line = ""
        self.replayed: Mapping[str, Any] | None = None
        self._phase = 0
        self._known: dict[int, tuple[Tensor, FakeTensor]] = {}
        self._wrappers: dict[int, Tensor] = {}
        self._lines: dict[int, str] = {}
        self.tracer: Any = None
        self._graph: fx.Graph | None = None
        self._last: fx.Node | None = None
        self._boundary: FrameType | None = None

    @property
    def targets(self) -> set[Any]:
        """The ops recorded so far."""
        return set() if self._graph is None else {node.target for node in self._graph.nodes}

    def fake(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> FakeTensor:
        if strides is None and self.symbolic is None and not self._within:
            return self.recall.fake.contiguous(shape, dtype, self.device)
        if self.symbolic is not None:
            shape = [self.symbolic.symint(s) for s in shape]
        options: Any = {"dtype": dtype, "device": self.device}
        with disable_current_modes(), self.mode:
            made: Any = (
                torch.empty(tuple(shape), **options)
                if strides is None
                else torch.empty_strided(tuple(shape), tuple(strides), **options)
            )
            return made

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.tracer = keep_unused_numbers()  # there are none
        self._graph = self.tracer.graph
        self._last = None
        self._numbered = get_sequence_nr()
        self._boundary = sys._getframe(2)
        self.modes = get_current_function_mode_stack()
        with set_within(_current, self), self:
            yield

    def place(self, inputs: Sequence[Any]) -> None:
        """Make placeholders of the function's tensors: make_fx takes ten times as long for each."""
        mode: Any = get_proxy_mode()
        tracer = mode.tracer
        tracer.graph._graph_namespace = GraphNames()
        for i, tensor in enumerate(inputs):
            if self.symbolic is not None:
                proxy = tracer.create_proxy("placeholder", f"arg{i}_1", (), {})
                track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
                continue
            node = new_node(tracer.graph, "placeholder", f"arg{i}_1", (), {}, f"arg{i}_1")
            track(tensor, node, tracer)
            node.meta["val"] = self.recall.alias(tensor)

    def begin(self) -> None:
        """Begin a run of the function, of which a recording may have several."""
        self._phase = 0

    def release(self) -> None:
        """Drop what a recording leaves in reference cycles: frames, and proxies, each of which
        refers to its tracer.
        """
        self._boundary = None
        if self.tracer is not None:
            self.tracer.tensor_tracker.data.clear()  # its own goes one by one

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled while tracing, and torch would report a skip at every call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        facts = op_facts(func)
        kwargs = dict(kwargs or {})
        self.line = line = self._line()
        if any(map(is_wrapper, types)):
            for wrapper, held in wrappers_in((args, kwargs), line):
                if not any(isinstance(x, FakeTensor) for x in held):
                    self._wrappers[id(wrapper)] = wrapper
            return NotImplemented  # their class runs ops on the tensors in them
        check_call(func, facts, args, kwargs, line)
        if facts.is_mutable:
            self.arrays.check_written(func, args, kwargs, line)
        if facts.reads_value and _is_real_number(func, args):
            self.note_read(args[0])
            with disable_current_modes():
                return func(*args)
        if facts.reads_value and checks_in_gradient():
            return True
        device = kwargs.get("device")
        if device is not None and torch.device(device).type in self.device_types:
            kwargs["device"] = self.device
        meta = self._meta(line)
        assert self._graph is not None
        root = self._graph._root
        call, out = self._again(func, args, kwargs)
        if call is None and not facts.is_lift:  # there may be captured tensors among them
            args, kwargs = replaced((tuple(args), kwargs), Tensor, self.known)
            call, out = self._again(func, args, kwargs)
        if out is None:
            if facts.is_mutable:
                self._keep_vals(args)
            before = root._prev
            out = _called(RECORDED_AS.get(func, func), args, kwargs)
            check_strided(func, out, line)
            if call:
                self.recall.learn(call, out, since(before, root), self.tracer)
        self._annotate(meta)
        return out

    def _annotate(self, meta: Mapping[str, Any]) -> None:
        assert self._graph is not None
        for node in since(self._last, self._graph._root):
            node.meta.update(meta)
        self._last = self._graph._root._prev

    def again(self, call: TracedCall) -> Any:
        """Replay what one line of the function calls; None where it is not cached."""
        out = self.recall.again(call, self.tracer)
        self._annotate(self._meta(self._line()))
        return out

    def _meta(self, line: str) -> dict[str, Any]:
        """The metadata of new nodes: where in the function they are recorded."""
        phase, region, branch = self._turn()
        meta = {"source": line, "phase": phase, "region": region, "branch": branch}
        # torch copies its own facts to nodes that it records itself, and not to replayed ones.
        if fx_traceback.has_preserved_node_meta():
            current = fx_traceback.get_current_meta()
            meta |= {key: value for key, value in current.items() if key in PROVENANCE}
        return meta

    def _again(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[TracedCall | None, Any]:
        """The call, if it can be cached, and its result, if it was replayed from the cache."""
        with DisableTorchFunction():  # ops that run on tensors in here are no calls of the program
            call = self.recall.call(func, args, kwargs, self.tracer)
            out = self.recall.again(call, self.tracer) if call else None
            if call and out is None and func not in ALWAYS and func not in FIXED:
                self.recall.foresee(call, args, kwargs, self.tracer)
                out = self.recall.again(call, self.tracer)
            return call, out

    def _keep_vals(self, args: Sequence[Any]) -> None:
        """Give each node its own ``val`` before an in-place op, which may change its shape."""
        for tensor in args:
            if type(tensor) is FakeTensor and tensor in self.tracer.tensor_tracker:
                node = self.tracer.tensor_tracker[tensor].proxy.node
                if node.meta.get("val") is tensor:
                    with disable_current_modes(), self.mode:
                        node.meta["val"] = tensor.detach()

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """The tensors that the function found outside of its arguments."""
        return tuple(tensor for tensor, _ in self._known.values())

    @property
    def wrappers(self) -> tuple[Tensor, ...]:
        """The tensors that hold captured ones, by which the function found these."""
        return tuple(self._wrappers.values())

    def note_read(self, tensor: Tensor) -> None:
        """Note a tensor that has values, such as a captured one, and that is read as numbers."""
        if id(tensor) not in self.read:
            self.read[id(tensor)] = read_now(tensor)

    def known(self, tensor: Tensor) -> Tensor:
        """``tensor`` if it belongs to this trace; for a captured tensor its input."""
        tensor = unwrap_if_dead(tensor)
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
            return tensor
        if is_inside() and (isinstance(tensor, FakeTensor) or tensor.requires_grad):
            raise TraceError(
                f"The function given to ftp.local uses{located(self.line)} {SURROUNDING}"
            )
        is_outer = isinstance(tensor, FakeTensor)
        if is_outer and not self._within:
            raise of_earlier_trace(self.line)
        if id(tensor) not in self._known:
            check_captured(tensor, self.line)
            if not is_outer and tensor.device.type != "meta":
                self.with_values[len(self.constants)] = tensor
            fake = self.fake(tensor.shape, tensor.dtype, tensor.stride())
            with disable_current_modes():
                self._capture(tensor if is_outer else tensor.detach(), fake)
            self._known[id(tensor)] = (tensor, fake)
        return self._known[id(tensor)][1]

    def _capture(self, tensor: Tensor, fake: FakeTensor) -> None:
        proxy = self.tracer.create_proxy("placeholder", "captured", (), {})
        proxy.node.meta["ftp_constant"] = len(self.constants)
        self.constants.append(tensor)
        track_tensor_tree(fake, proxy, constant=None, tracer=self.tracer)

    def number(self, size: Any) -> Any:
        """A dynamic size as the symbolic number that ops of the recording take."""
        fake = self.fake((size,), torch.bool)
        self._capture(fake, fake)  # without users once numbers are formulas
        return fake.shape[0]

    def _turn(self) -> tuple[int, Any, BranchPath]:
        """The current pass (even numbers forward, odd ones backward), recomputation and branch."""
        if (of := self.replayed) is not None:
            return of.get("phase", 0), of.get("region"), of.get("branch", ())
        is_backward = current_graph_task_id() != -1
        self._phase += is_backward != bool(self._phase % 2)
        return self._phase, same_region(current_region()), current_branch()

    def _line(self) -> str:
        if self.replayed is not None:
            return self.replayed.get("source", "")
        if self._told is not None:
            return self._told()
        forward = current_autograd_node()
        frame = sys._getframe(2)
        while frame is not None and frame is not self._boundary:
            code = frame.f_code
            if is_users(code):
                line = self._describe(code.co_filename, frame.f_lineno)
                if forward is None:
                    now = get_sequence_nr()
                    for number in range(self._numbered, now):
                        self._lines[number] = line
                    self._numbered = max(self._numbered, now)
                return line
            if forward is not None and code.co_name == "_engine_run_backward":
                line = self._lines.get(forward._sequence_nr())
                if line is not None:
                    return line
                forward = None
            frame = frame.f_back
        return ""


_current: ContextVar[Recorder | None] = ContextVar("ftp_recorder", default=None)


def current_recorder() -> Recorder | None:
    return _current.get()


def note_read(tensors: Iterable[Tensor]) -> None:
    """Note tensors that a function which was traced by itself has read as numbers."""
    if (recorder := _current.get()) is not None:
        for tensor in tensors:
            recorder.note_read(tensor)


def _is_real_number(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a call reads a number from a tensor that has values, such as a captured one."""
    if func is not aten._local_scalar_dense.default:
        return False
    return type(args[0]) is not FakeTensor and args[0].device.type != "meta"


def _called(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The op's result. Batch norms use the kernel that all devices have, whose schema tells whether
    it writes to its statistics.
    """
    if func is aten.native_batch_norm.default and args[3] is not None and args[5]:
        return aten._native_batch_norm_legit.default(*args)
    if func is aten.cudnn_batch_norm.default:
        reserve = args[0].new_empty((0,), dtype=torch.uint8)
        return (*_called(aten.native_batch_norm.default, args, {}), reserve)
    if func is aten.cudnn_batch_norm_backward.default:
        x, dy, weight, mean, var, save_mean, save_rstd, eps, _ = args
        return aten.native_batch_norm_backward.default(
            dy, x, weight, mean, var, save_mean, save_rstd, True, eps, [True] * 3
        )
    return FIXED.get(func, func)(*args, **kwargs)


def _is_available(device_type: str) -> bool:
    """Whether this machine has the device. Autograd fails on a device that the machine lacks, or
    aborts the process, even if this build of torch knows it: the CPU's kernels replace its own.
    """
    if device_type in ("cpu", "meta"):
        return True
    module = getattr(torch, device_type, None)
    return bool(getattr(module, "is_available", lambda: False)())


def record(
    recorder: Recorder, flat: Callable[..., Any], inputs: Sequence[Tensor]
) -> fx.GraphModule:
    """The graph of a function on fake tensors, under their mode; ``recorder`` sees its ops."""

    def on_inputs():  # torch would copy an annotation into the graph's code
        recorder.place(inputs)
        return flat(*inputs)

    # Autograd has a thread for each GPU, which sees neither the user's frames nor what is set here.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    try:
        # Lazy: most graphs are read and never called, and generating their code takes time.
        with one_thread, _use_lazy_graph_module(True), _without_log():
            made = make_fx(
                on_inputs, decomposition_table=ALWAYS, _disable_torch_fn_metadata_mode=True
            )
            gm = made()
        if recorder.symbolic is not None:
            recorder.symbolic.note_rounded(gm.graph)  # unused numbers too, which guards may be of
        return gm
    except FtpError:
        raise
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error
    finally:
        recorder.release()


@contextmanager
def _without_log() -> Iterator[None]:
    """Silence torch's log, which prints a traceback for every op with wrong arguments beside the
    error that it raises.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
