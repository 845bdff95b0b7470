"""A function and abstract inputs to one functional aten graph, gradient included; nothing is allocated and nothing is run.

torch's own pytrees never see a user's container: leaves go in and out as flat lists, each with a fake tensor of its own.
"""

import dataclasses
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

from ftp.axis import is_inside
from ftp.collection import collection_paused
from ftp.decompositions import DECOMPOSITIONS
from ftp.errors import FtpError, InputError, TraceError, join_failures
from ftp.recall import Recall
from ftp.recompute import current_region
from ftp.source import describe_line, is_users, raised_line
from ftp.tree import flatten, kind_of, leaf_names
from ftp.unchecked import unchecked

aten = torch.ops.aten


@dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
        gm: functional aten graph; its placeholders are the tensor leaves in order, then the constants; it returns a flat tuple.
            Every node knows its ``meta["val"]``, in ``meta["source"]`` the user's line that caused it ("" if none did), in
            ``meta["phase"]`` how often forward and backward passes took turns before it, and in ``meta["region"]`` the recomputation
            that it is part of.
        constants: tensors that the function captured, in the order of their first use.
        out_tree: the structure of the result.
        out_leaves: per leaf of the result the index of its output, or its static value.
        is_static: per leaf of the result whether it is a static value.
    """

    gm: fx.GraphModule
    constants: tuple[Tensor, ...]
    out_tree: optree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    is_static: tuple[bool, ...]


@collection_paused()
def trace(
    fn: Callable[..., Any],
    leaves: Sequence[Any],
    in_tree: optree.PyTreeSpec,
    device_type: str,
    *,
    names: Sequence[str],
    line: Callable[[], str] | None = None,
) -> Traced:
    """Trace ``fn`` on the arguments that ``in_tree`` makes of ``leaves``.

    Args:
        leaves: tensors (real, fake or meta; only shape and dtype count) and static values.
        device_type: where the program will run; on another one some ops have other kernels.
        names: what each leaf is called in messages.
        line: tells the user's line that is running, where ``fn`` replays a program and the stack does not show it.

    Raises:
        TraceError: what the function does cannot be one graph. InputError: an argument that it cannot be traced with.

    >>> leaves, tree = flatten(({"w": torch.ones(2, 3)}, torch.ones(4, 2)))
    >>> traced = trace(lambda p, x: x @ p["w"], leaves, tree, "cpu", names=["p['w']", "x"])
    >>> print(traced.gm.code.strip())
    def forward(self, p_w, x):
        mm = torch.ops.aten.mm.default(x, p_w);  x = p_w = None
        return (mm,)
    """
    _check_leaves(leaves, names)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    recorder = _Recorder(device_type, line)
    fakes = [recorder.fake(tuple(map(int, leaves[i].shape)), leaves[i].dtype) for i in at]
    result: list[Any] = []

    def flat(*values: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        with recorder.recording():
            out = fn(*in_tree.unflatten(filled))
            out_leaves, out_tree = flatten(out)
            _check_results(out_leaves, out)
            result[:] = out_tree, out_leaves
            return [recorder.known(leaf) for leaf in out_leaves if isinstance(leaf, Tensor)]

    # A write to a view has its gradient by the view's own op, rather than by strides that a shard does not have.
    with _transformers_tracing(), unchecked(), recorder.mode, _force_original_view_tracking(True):
        gm = _make_fx(flat, fakes)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and "ftp_constant" not in n.meta]
    if len(inputs) != len(at):
        raise TraceError(
            f"The trace has {len(inputs)} inputs for {len(at)} tensors: some argument is in a container that is not seen through."
        )
    _check_unwritten(gm, dict(zip(inputs, (names[i] for i in at), strict=True)))
    gm = _functional(gm, recorder)
    _lift_attributes(gm, recorder)
    _clean(gm, recorder.device, torch.device(device_type))
    constants = _constants_last(gm, recorder, [names[i] for i in at])
    out_tree, out_leaves = result
    statics = tuple(not isinstance(leaf, Tensor) for leaf in out_leaves)
    index = iter(range(len(out_leaves)))
    numbered = tuple(leaf if static else next(index) for leaf, static in zip(out_leaves, statics, strict=True))
    return Traced(gm, constants, out_tree, numbered, statics)


def grad_and_value(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """``fn(params, *batch) -> (loss, grads)``, or ``((loss, aux), grads)``, over optree trees; gradients as ``params`` is.

    >>> grad_and_value(lambda params, x: (params["w"] * x).sum())({"w": torch.ones(2)}, torch.tensor([2.0, 3.0]))
    (tensor(5.), {'w': tensor([2., 3.])})

    Raises:
        InputError: leaves that have no gradient, or a loss that is not one scalar tensor.

    Source: JAX, ``jax.value_and_grad``.
    """

    @wraps(loss_fn)
    def fn(params: Any, *batch: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(params)
        _check_differentiable(leaves, leaf_names(params, "params"))
        batch_leaves, batch_tree = flatten(batch)
        aux: list[Any] = []

        def scalar(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            # An alias, so that a write to a batch tensor is seen in the graph, where it can be named; torch.func's error cannot.
            own = [aten.alias.default(leaf) if isinstance(leaf, Tensor) else leaf for leaf in batch_leaves]
            loss, extra = _split(loss_fn, loss_fn(treedef.unflatten(tensors), *batch_tree.unflatten(own)), has_aux)
            aux_leaves, aux_tree = flatten(extra)
            aux[:] = aux_tree, aux_leaves
            return loss, [leaf for leaf in aux_leaves if isinstance(leaf, Tensor)]

        grads, (loss, extras) = torch.func.grad_and_value(scalar, has_aux=True)(leaves)
        grads = treedef.unflatten(grads)
        if not has_aux:
            return loss, grads
        aux_tree, aux_leaves = aux
        fresh = iter(extras)
        return (loss, aux_tree.unflatten([next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in aux_leaves])), grads

    return fn


def _split(loss_fn: Callable[..., Any], out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    where = _defined(loss_fn)
    if has_aux:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise InputError(f"has_aux=True, so the loss function{where} must return a pair (loss, aux), not {_kind(out)}.")
        loss, aux = out
    else:
        loss, aux = out, ()
        if isinstance(out, tuple | list):
            raise InputError(f"The loss function{where} returns {_kind(out)}. Return the loss alone, or (loss, aux) with has_aux=True.")
    if not isinstance(loss, Tensor):
        raise InputError(f"The loss function{where} returns {_kind(loss)}, not a tensor. Return a scalar computed from the parameters.")
    if loss.ndim:
        raise InputError(
            f"The loss function{where} returns a tensor of shape {tuple(loss.shape)}; a gradient needs a scalar, of shape ()."
            " Reduce it with .mean() or .sum()."
        )
    if not loss.dtype.is_floating_point:
        raise InputError(f"The loss function{where} returns {loss.dtype}; a gradient needs a real floating-point scalar.")
    return loss, aux


def _defined(fn: Any) -> str:
    code = getattr(fn, "__code__", None)
    return f" ({describe_line(code.co_filename, code.co_firstlineno)})" if code else ""


def _kind(value: Any) -> str:
    return f"{kind_of(value)} of {len(value)}" if isinstance(value, tuple | list) else kind_of(value)


def _check_differentiable(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, Tensor):
            failures.append(f"{name} is {leaf!r}, {kind_of(leaf)}: it has no gradient. Close over it, or pass it as a batch argument.")
        elif not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            failures.append(
                f"{name} is {leaf.dtype}: it has no gradient. Make it a buffer or a batch argument, or a floating-point tensor."
            )
    if failures:
        raise InputError(join_failures(failures))


def decompose(target: OpOverload, args: Any, kwargs: Mapping[str, Any], by: Callable[..., Any] | None = None) -> fx.GraphModule | None:
    """One call as a functional graph of primitives, by a decomposition (default torch's own); None where there is none.

    Args:
        args, kwargs: as the op takes them, with anything that has ``shape`` and ``dtype`` in place of tensors.

    >>> x = torch.empty(4, 3, device="meta")
    >>> print(decompose(aten.addcmul.default, [x, x, x], {}, lambda x, a, b: x + a * b).code.strip())
    def forward(self, arg_0, arg_1, arg_2):
        mul = torch.ops.aten.mul.Tensor(arg_1, arg_2);  arg_1 = arg_2 = None
        add = torch.ops.aten.add.Tensor(arg_0, mul);  arg_0 = mul = None
        return (add,)
    """
    by = by or decomposition_table.get(target)
    if by is None:
        return None
    recorder = _Recorder("cpu")
    flat_args, tree = flatten((list(args), dict(kwargs)))
    at = [i for i, a in enumerate(flat_args) if hasattr(a, "shape") and hasattr(a, "dtype")]
    fakes = [recorder.fake(tuple(flat_args[i].shape), flat_args[i].dtype) for i in at]

    def flat(*values: Tensor) -> list[Any]:
        filled = list(flat_args)
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        with recorder.recording():
            full_args, full_kwargs = tree.unflatten(filled)
            out = by(*full_args, **full_kwargs)
        return list(out) if isinstance(out, tuple | list) else [out]

    with recorder.mode:
        gm = _make_fx(flat, fakes)
    gm = _functional(gm, recorder)
    _lift_attributes(gm, recorder)
    _clean(gm, recorder.device, recorder.device)
    _constants_last(gm, recorder, [f"arg_{i}" for i in range(len(at))])
    return gm


# While tracing.


# Fewer primitives where no kernel is lost: a product and a sum, a sum and a division.
ALWAYS = {
    op: DECOMPOSITIONS[op]
    for packet in (aten.addmm, aten.addmv, aten.baddbmm, aten.mean, aten.std, aten.std_mean, aten.var, aten.var_mean)
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if op in DECOMPOSITIONS
}

_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default)

# Operands that must be of one dtype, though kernels for shapes alone take any.
_ONE_DTYPE: dict[OpOverload, tuple[int, ...]] = {
    aten._cdist_forward.default: (0, 1),
    aten._prelu_kernel.default: (0, 1),
    aten._softmax_backward_data.default: (0, 1),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.addbmm.default: (0, 1, 2),
    aten.addmm.default: (0, 1, 2),
    aten.addmv.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.binary_cross_entropy.default: (0, 1, 2),
    aten.bmm.default: (0, 1),
    aten.complex.default: (0, 1),
    aten.convolution.default: (0, 1, 2),
    aten.dot.default: (0, 1),
    aten.grid_sampler_2d.default: (0, 1),
    aten.grid_sampler_3d.default: (0, 1),
    aten.heaviside.default: (0, 1),
    aten.index_add.default: (0, 3),
    aten.index_copy.default: (0, 3),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
    aten.mm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_layer_norm.default: (0, 2, 3),
    aten.nll_loss_forward.default: (0, 2),
    aten.polar.default: (0, 1),
    aten.vdot.default: (0, 1),
}

# These take parameters in float32 with an input in half precision.
_NARROW_INPUT = (aten.native_group_norm.default, aten.native_layer_norm.default)

_NO_VALUES = (
    "\n  A trace has shapes and no values. Choose with torch.where, keep numbers as tensors, or pass the value as a static argument"
    " (a Python number). Sizes, split points and numbers of classes are Python numbers too."
)
_OF_FUNCTIONS = re.compile(
    r"no rule registered for HigherOrderOperator (\w+)|(FlexAttention) does not support backward|TransformType\.Grad"
)
_FIXED_SHAPES = (
    "\n  A program has fixed shapes: use torch.where(mask, x, 0) or weights rather than x[mask], one_hot or a fixed size rather than"
    " nonzero or unique."
)
_REWRITES = {
    aten.linalg_lstsq.default: (
        "\n  Where the matrix has full rank, torch.linalg.pinv(a) @ b or the normal equations give the solution alone."
    ),
} | dict.fromkeys(
    (aten._ctc_loss.default, aten._ctc_loss.Tensor),
    "\n  It keeps a table as wide as the longest target. Compute the loss outside the program, from its returned log-probabilities, or"
    " give it as an op of your own (torch.library.custom_op) with a rule (ftp.rule).",
)
_COPY = "Inputs and captured tensors are never written to: work on a copy, x = x.clone(), and return what has changed."
_LEAKED = (
    "a tensor that an earlier trace left behind: it has no values. Return intermediates from the function (has_aux=True) rather than"
    " storing them."
)
SURROUNDING = (
    "a tensor of the surrounding function that it is not given: it would be whole on every rank, and without a gradient. Give it as an"
    " argument, with its spec in in_specs; what has no gradient, detached."
)


class _Recorder(TorchDispatchMode):
    """Sees every op before it is traced: refuses those that cannot be, lifts captured tensors to inputs, notes the user's line.

    A node of the backward pass has the line of its forward op, which autograd's sequence numbers tell.
    """

    def __init__(self, device_type: str, told: Callable[[], str] | None = None):
        super().__init__()
        self._told = told
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._recall = Recall(self.mode)
        self.device = torch.device(device_type if _has_guard(device_type) else "cpu")
        self.device_types = {device_type, "meta"}
        self.constants: list[Tensor] = []
        self.line = ""
        self.replayed: Mapping[str, Any] | None = None
        self._phase = 0
        self._known: dict[int, tuple[Tensor, FakeTensor]] = {}
        self._lines: dict[int, str] = {}
        self._graph: fx.Graph | None = None
        self._last: fx.Node | None = None

    def fake(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> FakeTensor:
        with _disable_current_modes(), self.mode:
            if strides is None:
                return torch.empty(tuple(shape), dtype=dtype, device=self.device)  # type: ignore[return-value]
            return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=self.device)  # type: ignore[return-value]

    @contextmanager
    def recording(self) -> Iterator[None]:
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self._tracer: Any = proxy_mode.tracer
        self._graph = self._tracer.graph
        self._last = None
        self._numbered = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._boundary = sys._getframe(2)
        with self:
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = dict(kwargs or {})
        self.line = line = self._line()
        if torch.Tag.nondeterministic_seeded in func.tags and not is_deterministic(func, args, kwargs):
            raise TraceError(
                f"{func} draws random numbers{_at(line)} and other ones on each rank. Draw them from a key: functionalized models take"
                " fn(params, ..., rng=key). If it is dropout that should be off, call model.eval() before ftp.functionalize."
            )
        if func in _ONE_DTYPE:
            _check_dtypes(func, args, line)
        if func is aten._local_scalar_dense.default and type(args[0]) is not FakeTensor and args[0].device.type != "meta":
            with _disable_current_modes():
                return func(*args)
        if func not in _LIFTS:
            args, kwargs = self._lifted(args), self._lifted(kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type in self.device_types:
            kwargs["device"] = self.device
        phase, region = self._turn()
        meta = {"source": line, "phase": phase, "region": region}
        assert self._graph is not None
        root = self._graph._root
        call = self._recall.call(func, args, kwargs, self._tracer)
        out = self._recall.again(call, self._tracer) if call else None
        if out is None:
            if func._schema.is_mutable:
                self._keep_vals(args)
            before = root._prev
            out = _called(func, args, kwargs)
            if call:
                self._recall.learn(call, out, _since(before, root), self._tracer)
        newest = root._prev
        for node in _since(self._last, root):
            node.meta |= meta
        self._last = newest
        return out

    def _keep_vals(self, args: Sequence[Any]) -> None:
        """Ops in place may change shapes; what nodes say of their values is not to change with them."""
        for tensor in args:
            if type(tensor) is FakeTensor and tensor in self._tracer.tensor_tracker:
                node = self._tracer.tensor_tracker[tensor].proxy.node
                if node.meta.get("val") is tensor:
                    with _disable_current_modes(), self.mode:
                        node.meta["val"] = tensor.detach()

    def _lifted(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self.known(tree)
        if isinstance(tree, list | tuple):
            return [self._lifted(t) for t in tree] if type(tree) is list else tuple(map(self._lifted, tree))
        if isinstance(tree, dict):
            return {k: self._lifted(v) for k, v in tree.items()}
        return tree

    def known(self, tensor: Tensor) -> Tensor:
        """``tensor``, or if it is not this trace's but a captured one, the input that stands for it."""
        tensor = torch._C._functorch.unwrap_if_dead(tensor)  # type: ignore[attr-defined]
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
            return tensor
        if is_inside() and (isinstance(tensor, FakeTensor) or tensor.requires_grad):
            raise TraceError(f"The function given to ftp.local uses{_at(self.line)} {SURROUNDING}")
        if isinstance(tensor, FakeTensor):
            raise TraceError(f"The function uses{_at(self.line)} {_LEAKED}")
        if id(tensor) not in self._known:
            if is_traceable_wrapper_subclass(tensor):
                raise TraceError(f"The function captures a {type(tensor).__name__}{_at(self.line)}; plain tensors only.")
            fake = self.fake(tensor.shape, tensor.dtype, tensor.stride())
            proxy = self._tracer.create_proxy("placeholder", "captured", (), {})
            proxy.node.meta["ftp_constant"] = len(self.constants)
            with _disable_current_modes():
                self.constants.append(tensor.detach())
            track_tensor_tree(fake, proxy, constant=None, tracer=self._tracer)
            self._known[id(tensor)] = (tensor, fake)
        return self._known[id(tensor)][1]

    def _turn(self) -> tuple[int, Any]:
        """The pass that is going on, even numbers forward and odd ones backward, and the recomputation."""
        if self.replayed is not None:
            return self.replayed.get("phase", 0), self.replayed.get("region")
        is_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        self._phase += is_backward != bool(self._phase % 2)
        return self._phase, current_region()

    def _line(self) -> str:
        if self.replayed is not None:
            return self.replayed.get("source", "")
        if self._told is not None:
            return self._told()
        behind = torch._C._current_autograd_node()
        frame = sys._getframe(2)
        while frame is not None and frame is not self._boundary:
            code = frame.f_code
            if is_users(code):
                line = describe_line(code.co_filename, frame.f_lineno)
                if behind is None:
                    now = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
                    for number in range(self._numbered, now):
                        self._lines[number] = line
                    self._numbered = max(self._numbered, now)
                return line
            if behind is not None and code.co_name == "_engine_run_backward":
                line = self._lines.get(behind._sequence_nr())  # type: ignore[attr-defined]
                if line is not None:
                    return line
                behind = None
            frame = frame.f_back
        return ""


def _since(last: fx.Node | None, root: fx.Node) -> list[fx.Node]:
    """The nodes of a graph after ``last``, or all."""
    nodes = []
    node = root._prev
    while node is not last and node is not root:
        nodes.append(node)
        node = node._prev
    return nodes[::-1]


def _called(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The op's result; batch norms by the kernel that all devices have, with a schema that tells when it writes to its statistics."""
    if func is aten.native_batch_norm.default and args[3] is not None and args[5]:
        return aten._native_batch_norm_legit.default(*args)
    if func is aten.cudnn_batch_norm.default:
        reserve = args[0].new_empty((0,), dtype=torch.uint8)
        return (*_called(aten.native_batch_norm.default, args, {}), reserve)
    if func is aten.cudnn_batch_norm_backward.default:
        x, dy, weight, mean, var, save_mean, save_rstd, eps, _ = args
        return aten.native_batch_norm_backward.default(dy, x, weight, mean, var, save_mean, save_rstd, True, eps, [True] * 3)
    return func(*args, **kwargs)


def _at(line: str) -> str:
    return f" at {line}," if line else ""


def _has_guard(device_type: str) -> bool:
    """Whether this build of torch knows the device; autograd aborts the process on one that it does not. Its CPU kernels stand in."""
    if device_type in ("cpu", "meta"):
        return True
    module = getattr(torch, device_type, None)
    return bool(getattr(module, "_is_compiled", lambda: False)() or getattr(module, "is_available", lambda: False)())


def is_deterministic(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Attention and recurrent kernels count as random ops; they are none without dropout."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in ("dropout_p", "dropout", "p") and value == 0:
            return True
        if argument.name in ("train", "training") and value is False:
            return True
    return False


def _check_dtypes(func: OpOverload, args: Sequence[Any], line: str) -> None:
    operands = [args[i] for i in _ONE_DTYPE[func] if i < len(args) and isinstance(args[i], Tensor)]
    if func in _NARROW_INPUT and operands[0].dtype in (torch.bfloat16, torch.float16) and operands[-1].dtype == torch.float32:
        operands = operands[1:]
    if len({x.dtype for x in operands}) > 1:
        dtypes = " and ".join(str(x.dtype).removeprefix("torch.") for x in operands)
        raise TraceError(f"{func} gets operands of dtypes {dtypes}{_at(line)} which torch refuses. Convert them to one with .to(dtype).")


def _make_fx(flat: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    try:
        # Lazy: most graphs are read and never called, and generating their code takes time.
        with _use_lazy_graph_module(True), _without_log():
            return make_fx(flat, decomposition_table=ALWAYS, tracing_mode="fake")(*inputs)
    except FtpError:
        raise
    except Exception as error:
        explained = _explain(error)
        if explained is None:
            raise
        raise explained from error


@contextmanager
def _without_log() -> Iterator[None]:
    """torch logs a traceback of its own for every op whose arguments are wrong, beside the error that says so."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _explain(error: Exception) -> FtpError | None:
    """What is wrong in the function, where torch's error says so in its own terms; None for an ordinary mistake in it."""
    line, text = raised_line(error), str(error)
    at = f" at {line}" if line else ""
    if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode) or (
        type(error) is RuntimeError
        and re.search(
            r"data-dependent control flow|\.item\(\)|numpy\(\)|tolist\(\)|Cannot access data pointer|data is not allocated yet", text
        )
    ):
        return TraceError(
            "The function needs a tensor's value (if, while, bool(), float(), int(), .item(), .tolist(), .numpy())"
            f"{at}.{_of_experts(error) or _NO_VALUES}"
        )
    if isinstance(error, DynamicOutputShapeException):
        rewrite = _REWRITES.get(error.func, _FIXED_SHAPES)
        return TraceError(f"{error.func} gives a shape that depends on values{at}.{_of_experts(error) or rewrite}")
    if isinstance(error, UnsupportedOperatorException):
        return TraceError(f"{error.func} has no kernel for shapes alone{at}. Give it one with torch.library.register_fake.")
    if found := _OF_FUNCTIONS.search(text):
        name = found[1] or ("flex_attention" if found[2] else "A higher-order operator")
        return TraceError(
            f"{name} takes functions, into which a trace does not see{at}."
            " Write both branches with torch.where, a loop as a Python loop, and what flex_attention does to scores as attn_mask of"
            " F.scaled_dot_product_attention."
        )
    if "Mixing fake modes" in text or "different fake mode" in text:
        return TraceError(f"The function uses{at} {_LEAKED}")
    if "would mutate a captured Tensor" in text or re.search(r"leaf Variable .* in-place operation", text):
        return TraceError(f"The function changes an input or a captured tensor in place{at}. {_COPY}")
    if "does not require grad" in text:
        return TraceError(f"The function asks autograd for a gradient{at}, of inputs that do not require one. Use torch.func.grad.")
    if "backward() called inside a functorch transform" in text:
        return TraceError(
            f"The function calls backward(){at}. Return the loss: ftp.shard differentiates it; inside a function use torch.func.grad."
        )
    if "setup_context" in text and (function := _function_behind(error)):
        return TraceError(
            f"{function} is an autograd.Function whose forward takes ctx{at}; a gradient that is traced needs the form in two parts:"
            "\n  forward(*args) without ctx, and setup_context(ctx, inputs, output) that saves what backward needs."
        )
    if "saved tensor hooks" in text:
        return TraceError(
            f"The function uses saved tensor hooks, as torch.utils.checkpoint does{at}; they cannot be traced. Call the function itself."
        )
    if isinstance(error, RuntimeError) and re.search(r"\bdtypes?\b|scalar type|same datatype", text):
        advice = _of_experts(error) or " Convert them with .to(dtype)."
        return TraceError(f"torch refuses operands of these dtypes{at}: {text.rstrip('.')}.{advice}")
    if line:
        error.add_note(f"Raised while ftp traced the function, at {line}")
    return None


def _of_experts(error: Exception) -> str:
    """What to do where the experts of one of transformers' models failed, "" elsewhere."""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if "transformers" in code.co_filename and ("Experts" in code.co_qualname or code.co_filename.endswith("moe.py")):
            return (
                "\n  These are a model's experts, in a form that cannot be traced. Build the model with"
                ' config.experts_implementation="batched_mm" (from_config(..., experts_implementation="batched_mm")): its shapes are fixed.'
            )
        traceback = traceback.tb_next
    return ""


def _function_behind(error: Exception) -> str:
    """The autograd.Function that an error came from, as ``Name (file.py:12  class Name(...):)``."""
    traceback, found = error.__traceback__, None
    while traceback is not None:
        given = traceback.tb_frame.f_locals.get("cls")
        if isinstance(given, type) and issubclass(given, torch.autograd.Function):
            found = given
        traceback = traceback.tb_next
    return "" if found is None else f"{found.__name__}{_defined(found.forward)}"


# Guards.


def _check_leaves(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, Tensor):
            failures += _unfit_static(leaf, name)
        elif is_traceable_wrapper_subclass(leaf) and not isinstance(leaf, FakeTensor):
            failures.append(f"{name} is a {type(leaf).__name__}; ftp takes plain tensors, a rank's shard of a DTensor is its .to_local().")
        elif leaf.layout is not torch.strided or leaf.is_quantized:
            failures.append(f"{name} is a {leaf.layout} tensor of {leaf.dtype}; ftp takes dense ones.")
    if failures:
        raise InputError(join_failures(failures))


def _check_results(leaves: Sequence[Any], out: Any) -> None:
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return
    failures = []
    for leaf, name in zip(leaves, leaf_names(out, "the result"), strict=True):
        failures += [] if isinstance(leaf, Tensor) else _unfit_static(leaf, name)
    if failures:
        raise TraceError(join_failures(failures))


def _unfit_static(leaf: Any, name: str) -> list[str]:
    """Why a leaf cannot be a static value, if so."""
    if isinstance(leaf, torch.nn.Module):
        return [f"{name} is a module, {type(leaf).__name__}. Give its parameters: fn, params = ftp.functionalize(module)."]
    if held := _held_tensors(leaf):
        return [
            f"{name} is {kind_of(leaf)}, which optree does not know, and holds tensors ({', '.join(held)}) that would be baked in as"
            " constants. Register the class with optree (namespace='ftp'), or use a dict."
        ]
    try:
        hash(leaf)
    except TypeError:
        return [
            f"{name} is {kind_of(leaf)}, neither a tensor, nor a container that optree knows, nor a hashable static value."
            " Register the class with optree (namespace='ftp'), or use a dict, list or tuple."
        ]
    return []


def _held_tensors(leaf: Any) -> list[str]:
    fields = dict(getattr(leaf, "__dict__", {}))
    for kind in type(leaf).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        fields |= {s: getattr(leaf, s) for s in ((slots,) if isinstance(slots, str) else slots) if hasattr(leaf, s)}
    if dataclasses.is_dataclass(leaf):
        fields |= {f.name: getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)}
    if isinstance(leaf, set | frozenset):
        fields |= {f"member {i}": v for i, v in enumerate(leaf)}
    if isinstance(leaf, Mapping):
        fields |= {str(k): v for k, v in leaf.items()}
    return [name for name, value in fields.items() if _has_tensor(value)]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(isinstance(v, Tensor) for v in flatten(value)[0])
    return isinstance(value, Tensor)


def _writes(node: fx.Node) -> list[fx.Node]:
    """The values that a node writes to."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    written = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            map_arg(given, written.append)  # type: ignore[arg-type]
    return written


def _storages(node: fx.Node) -> set[int]:
    val = node.meta.get("val")
    vals = val if isinstance(val, list | tuple) else [val]
    return {v.untyped_storage()._cdata for v in vals if isinstance(v, Tensor)}


def _check_unwritten(gm: fx.GraphModule, names: Mapping[fx.Node, str]) -> None:
    writers = [n for n in gm.graph.nodes if _writes(n)]
    if not writers:
        return
    placeholders = {s: n for n in gm.graph.nodes if n.op == "placeholder" for s in _storages(n)}
    failures = []
    for node in writers:
        for storage in sorted({s for v in _writes(node) for s in _storages(v)} & set(placeholders)):
            placeholder = placeholders[storage]
            name = names.get(placeholder)
            if name is None:
                shape = tuple(placeholder.meta["val"].shape)
                name = f"a captured tensor of shape {shape}"
            failures.append(f"{name} is changed in place{_at(node.meta['source'])} by {node.target}. {_COPY}")
    if failures:
        raise TraceError(join_failures(dict.fromkeys(failures)))


# From a trace to a functional graph.


def _functional(gm: fx.GraphModule, recorder: _Recorder) -> fx.GraphModule:
    """The graph without in-place ops, of which torch's own formulas for gradients have some."""
    if not any(_writes(n) for n in gm.graph.nodes):
        return gm
    if not _rename_writes(gm.graph, recorder.mode):
        gm = _replay_functional(gm, recorder)
    left = [n for n in gm.graph.nodes if _writes(n)]
    if left:
        raise TraceError(
            join_failures(
                f"{n.target} writes to its argument{_at(n.meta['source'])} and has no form that returns a new tensor." for n in left
            )
        )
    return gm


def _rename_writes(graph: fx.Graph, mode: FakeTensorMode) -> bool:
    """In-place ops on values that have no views as ops that return the new value; False, and nothing changed, where that is not enough."""
    sharing: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for storage in _storages(node):
            sharing.setdefault(storage, []).append(node)
    new_targets: dict[fx.Node, OpOverload] = {}
    dtypes: dict[tuple[OpOverload, str], torch.dtype] = {}
    for node in graph.nodes:
        if not (written := _writes(node)):
            continue
        group = [n for s in _storages(written[0]) for n in sharing[s]]
        target = _returning(node.target)
        plain = group[0].op == "call_function" and all(n is group[0] or (_writes(n) and n.args[0] in group) for n in group)
        if target is None or not plain or len(written) != 1 or node.args[0] is not written[0]:
            return False
        call = (target, repr(map_arg((node.args, node.kwargs), lambda n: (n.meta["val"].shape, n.meta["val"].dtype))))  # type: ignore[arg-type]
        if call not in dtypes:
            with mode:
                args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])  # type: ignore[misc]
                dtypes[call] = target(*args, **kwargs).dtype
        # The value written to keeps its dtype; a new one may be promoted.
        if dtypes[call] != node.meta["val"].dtype:
            return False
        new_targets[node] = target
    latest: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if any(n in latest for n in node.all_input_nodes):
            node.args = map_arg(node.args, lambda n: _newest(latest, n))
            node.kwargs = map_arg(node.kwargs, lambda n: _newest(latest, n))
        if node in new_targets:
            node.target = new_targets[node]
            latest[node.args[0]] = node  # type: ignore[index]
    return True


def _newest(latest: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while node in latest:
        node = latest[node]
    return node


def _returning(target: Any) -> OpOverload | None:
    """``aten.add.Tensor`` of ``aten.add_.Tensor``, ``aten.pow.Tensor_Scalar`` of ``aten.pow_.Scalar``."""
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overloads = [] if packet is None else sorted(packet.overloads(), key=lambda o: o != target._overloadname)  # its namesake first
    for found in (getattr(packet, o) for o in overloads):
        if not found._schema.is_mutable and _takes(found) == _takes(target):
            return found
    return None


def _takes(target: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments]


def _replay_functional(gm: fx.GraphModule, recorder: _Recorder) -> fx.GraphModule:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]

    class Replay(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            recorder.replayed = n.meta
            return super().run_node(n)

    def flat(*values: Tensor) -> Any:
        with recorder.recording():
            return Replay(gm).run(*values)

    with recorder.mode:
        new = _make_fx(torch.func.functionalize(flat, remove="mutations"), [n.meta["val"] for n in placeholders])
    for old, node in zip(placeholders, (n for n in new.graph.nodes if n.op == "placeholder"), strict=True):
        node.meta |= {k: v for k, v in old.meta.items() if k == "ftp_constant"}
    return new


_ALIASES = {
    aten._conj.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
}
_EMPTY_LIKE = (aten.empty_like.default, aten.new_empty.default)


def _clean(gm: fx.GraphModule, traced_on: torch.device, device: torch.device) -> None:
    """One name for each thing: no aliases, fills as constants, devices without an index, nothing unused."""
    graph = gm.graph
    for node in list(graph.nodes):
        node.meta.setdefault("source", "")
        if node.op != "call_function":
            continue
        target = node.target
        if target in _ALIASES and not (target is aten._conj.default and node.meta["val"].is_complex()):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        if target in (aten._unsafe_view.default, aten._reshape_alias.default):
            node.target, node.args = aten.view.default, node.args[:2]
        elif target in (aten.fill.Scalar, aten.zero.default):
            of = node.args[0]
            if of.target in _EMPTY_LIKE and of.args[0].meta["val"].shape == node.meta["val"].shape:
                of = of.args[0]
            node.target, node.args = aten.full_like.default, (of, node.args[1] if len(node.args) > 1 else 0)
            node.kwargs = {} if of.meta["val"].dtype == node.meta["val"].dtype else {"dtype": node.meta["val"].dtype}
        elif target is aten.copy.default and _alike(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
            continue
        given = node.kwargs.get("device")
        if given is not None and torch.device(given).type in (traced_on.type, device.type):
            node.kwargs = {**node.kwargs, "device": device}
    _drop_unused(graph)


def _alike(a: fx.Node, b: Any) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _lift_attributes(gm: fx.GraphModule, recorder: _Recorder) -> None:
    """Tensors made from numbers inside the function: single numbers become ops, longer ones captured tensors."""
    graph = gm.graph
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        made = getattr(gm, node.target)
        if isinstance(made, FakeTensor):
            raise TraceError(f"The function uses {_LEAKED}")
        with graph.inserting_before(node):
            if made.numel() == 1:
                new = graph.call_function(aten.full.default, (list(made.shape), made.item()), {"dtype": made.dtype, "device": made.device})
            else:
                new = graph.placeholder("captured")
                new.meta["ftp_constant"] = len(recorder.constants)
                recorder.constants.append(made)
        new.meta |= {"val": recorder.fake(made.shape, made.dtype), "source": node.meta.get("source", "")}
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _constants_last(gm: fx.GraphModule, recorder: _Recorder, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Captured tensors become inputs after the function's own; those that are not used go. Inputs are named."""
    graph = gm.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder" and "ftp_constant" not in n.meta]
    constants = [(n, recorder.constants[n.meta["ftp_constant"]]) for n in graph.nodes if n.op == "placeholder" and "ftp_constant" in n.meta]
    for node, _ in constants:
        if not node.users:
            graph.erase_node(node)
    kept = [(node, tensor) for node, tensor in constants if node.users]
    for node in reversed([*inputs, *(n for n, _ in kept)]):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
    for name, node in zip((*names, *(f"constant_{i}" for i in range(len(kept)))), (*inputs, *(n for n, _ in kept)), strict=True):
        node._rename(re.sub(r"\W+", "_", name).strip("_") or "input")
        node.target = node.name
    output = next(reversed(graph.nodes))
    returned = output.args[0]
    output.args = (tuple(returned) if isinstance(returned, list | tuple) else (returned,),)
    graph.lint()
    gm.graph = graph
    return tuple(tensor for _, tensor in kept)


@contextmanager
def _transformers_tracing() -> Iterator[None]:
    """transformers builds its masks without asking for values when it believes that it is traced."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "is_tracing"):
        yield
        return
    original = masking.is_tracing
    masking.is_tracing = lambda *args, **kwargs: True
    try:
        yield
    finally:
        masking.is_tracing = original
