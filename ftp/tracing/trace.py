"""A function and abstract inputs to one functional aten graph, gradient included; nothing is
allocated and nothing is run.

torch's own pytrees never see a user's container: leaves go in and out as flat lists, each with a
fake tensor of its own.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._functorch import eager_transforms
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
)
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ftp import deferred_compiler
from ftp.errors import InputError, TraceError, join_failures
from ftp.functional.gradient_hooks import GradientRefused
from ftp.ops.assume import assumptions_to
from ftp.ops.microbatch_means import means_of_trace
from ftp.paused_gc import collection_paused
from ftp.sharding.pytree import flatten, kind_of, leaf_names
from ftp.source import describe_line, user_line
from ftp.tracing.assumptions import Assumptions
from ftp.tracing.branches import check_writes
from ftp.tracing.calls import TorchCalls
from ftp.tracing.explain_errors import COPY, at_line, defined_at
from ftp.tracing.functionalize_graph import (
    clean,
    constants_last,
    functional_form,
    lift_attributes,
    storages,
    writes,
)
from ftp.tracing.gpu_attention import with_gpu_attention
from ftp.tracing.libraries import patched_libraries
from ftp.tracing.microbatch_gradients import noted_gradients
from ftp.tracing.recorder import Recorder, record
from ftp.tracing.selected import Selected
from ftp.tracing.value_independent import unchecked

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic

aten = torch.ops.aten


@dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
        gm: functional aten graph; its placeholders are the tensor leaves in order, then the
            constants; it returns a flat tuple, last the means over microbatches that a pipeline
            asks for (`ftp.ops.microbatch_means`). Every node knows its ``meta["val"]``, in
            ``meta["source"]`` the user's line that caused it ("" if none did), in ``meta["phase"]``
            how often forward and backward passes took turns before it, and in ``meta["region"]``
            the recomputation that it is part of.
        constants: tensors that the function captured, in the order of their first use.
        out_tree: the structure of the result.
        out_leaves: per leaf of the result the index of its output, or its static value.
        is_static: per leaf of the result whether it is a static value.
        captured: the tensors that the function found outside of its arguments, as the objects that
            they are.
        assumptions: claims about values that the function takes as true. Where they are kept to be
            checked, the graph's last outputs are whether they hold.
        symbolic: of a trace with dynamic sizes, what its symbolic numbers are.
    """

    gm: fx.GraphModule
    constants: tuple[Tensor, ...]
    out_tree: optree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    is_static: tuple[bool, ...]
    captured: tuple[Tensor, ...]
    assumptions: tuple[str, ...] = ()
    symbolic: "Symbolic | None" = None

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        """Of each output its global shape."""
        shapes = [tuple(node.meta["val"].shape) for node in self.gm.graph.output_node().args[0]]  # type: ignore[union-attr]
        if self.symbolic is None:
            return shapes
        return [tuple(map(self.symbolic.dynamic, shape)) for shape in shapes]


@dataclass
class _Gradient:
    """How ``grad_and_value`` takes gradients in a trace: by torch.func, by torch.autograd.grad, or
    by backward().

    Attributes:
        is_taken: whether the traced function has asked for one.
    """

    by: str = "func"
    is_taken: bool = False


_gradient: ContextVar[_Gradient | None] = ContextVar("ftp.tracing.gradient", default=None)


@contextmanager
def _taking(by: str) -> Iterator[_Gradient]:
    taken = _Gradient(by)
    token = _gradient.set(taken)
    try:
        yield taken
    finally:
        _gradient.reset(token)


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
) -> Traced:
    """Trace ``fn`` on the arguments that ``in_tree`` makes of ``leaves``.

    A gradient that ``grad_and_value`` asks for is taken by torch.func, and where that refuses the
    function by torch.autograd, which sees through fewer of torch.func's operators within it.

    Args:
        leaves: tensors (real, fake or meta; only shape and dtype count) and static values.
        device_type: where the program will run; on another one some ops have other kernels.
        names: what each leaf is called in messages.
        line: tells the user's line that is running, where ``fn`` replays a program and the stack
            does not show it.
        checked: keep assumptions as outputs, after those of the result.
        within: the call is in a function that is being traced, whose values may be captured.
        calls: numbers torch's calls in the lines of the nodes.
        shapes: per leaf the shape to trace with, where dims are dynamic; default its own.
        symbolic: of the dynamic sizes.

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
    made = partial(
        _traced,
        fn,
        leaves,
        in_tree,
        device_type,
        names=names,
        line=line,
        checked=checked,
        within=within,
        calls=calls,
        shapes=shapes,
        symbolic=symbolic,
    )
    refused: GradientRefused | None = None
    for by in ("func", "grad", "backward"):
        with _taking(by) as gradient:
            try:
                return _with_derivatives(made)
            except GradientRefused as error:
                refused = refused or error
                if not gradient.is_taken:
                    break
            except Exception as error:
                if not (deferred_compiler.is_deferred() and _lacks_module(error)):
                    raise
                deferred_compiler.load()
                return trace(
                    fn, leaves, in_tree, device_type, names=names, line=line, checked=checked
                )
    assert refused is not None
    raise refused


def _with_derivatives(made: Callable[[], Traced]) -> Traced:
    """A trace, with attention as primitives where a derivative is asked for that its fused kernels
    lack: a second one, or one in forward mode.
    """
    try:
        return made()
    except RuntimeError as error:
        if not _is_of_fused_attention(error):
            raise
    with sdpa_kernel(SDPBackend.MATH):
        return made()


def _is_of_fused_attention(error: BaseException) -> bool:
    """Whether torch's error is of a derivative that fused attention lacks."""
    text = str(error)
    return "_scaled_dot_product_" in text and ("forward AD" in text or "derivative for" in text)


def _lacks_module(error: BaseException | None) -> bool:
    """Whether an error is of a module of torch's that loading its compiler would have loaded."""
    while error is not None:
        if isinstance(error, AttributeError) and str(error).startswith("module 'torch"):
            return True
        error = error.__cause__ or error.__context__
    return False


@collection_paused()
def _traced(
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
) -> Traced:
    _check_leaves(leaves, names)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    described = calls.line if calls else describe_line
    recorder = Recorder(device_type, line, within, described, symbolic)
    given = [tuple(map(int, leaves[i].shape)) for i in at]
    if shapes is not None:
        given = [shapes[i] or own for i, own in zip(at, given, strict=True)]
    fakes = [recorder.fake(shape, leaves[i].dtype) for i, shape in zip(at, given, strict=True)]
    result: list[Any] = []
    assumed, means = Assumptions(recorder), None if within else means_of_trace()
    if means is not None:
        means.begin()

    def flat(*values: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        with recorder.recording():
            with assumptions_to(assumed.note), calls.noted() if calls else nullcontext():
                out = fn(*in_tree.unflatten(filled))
            out_leaves, out_tree = flatten(out)
            _check_results(out_leaves, out)
            result[:] = out_tree, out_leaves
            outputs = [recorder.known(leaf) for leaf in out_leaves if isinstance(leaf, Tensor)]
            noted = [] if means is None else [recorder.known(x) for x in means.tensors]
            return [*outputs, *(assumed.conditions if checked else ()), *noted]

    # A write to a view has its gradient by the view's own op, rather than by strides that a shard
    # does not have.
    with (
        _nested_traces(),
        patched_libraries(),
        noted_gradients(),
        unchecked(),
        nullcontext()
        if symbolic is None
        else symbolic.generic(lambda: user_line() or recorder.line),
        recorder.mode,
        _force_original_view_tracking(True),
    ):
        gm = record(flat, fakes)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and "ftp_constant" not in n.meta]
    if len(inputs) != len(at):
        raise TraceError(
            f"The trace has {len(inputs)} inputs for {len(at)} tensors: some argument is in a"
            " container that is not seen through."
        )
    check_writes(gm.graph)
    _check_unwritten(gm, dict(zip(inputs, (names[i] for i in at), strict=True)))
    gm = functional_form(gm, recorder)
    lift_attributes(gm, recorder)
    if device_type == "cuda" and recorder.device.type != "cuda":
        with_gpu_attention(gm.graph, recorder.mode)
    clean(gm, recorder.device, torch.device(device_type))
    constants = constants_last(gm, recorder, [names[i] for i in at])
    if symbolic is not None:
        symbolic.inline(gm.graph)
    out_tree, out_leaves = result
    statics = tuple(not isinstance(leaf, Tensor) for leaf in out_leaves)
    index = iter(range(len(out_leaves)))
    numbered = tuple(
        leaf if static else next(index) for leaf, static in zip(out_leaves, statics, strict=True)
    )
    return Traced(
        gm,
        constants,
        out_tree,
        numbered,
        statics,
        recorder.captured,
        tuple(assumed.claims),
        symbolic,
    )


def grad_and_value(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """``fn(params, *batch) -> (loss, grads)``, or ``((loss, aux), grads)``, over optree trees;
    gradients as ``params`` is.

    >>> fn = grad_and_value(lambda params, x: (params["w"] * x).sum())
    >>> fn({"w": torch.ones(2)}, torch.tensor([2.0, 3.0]))
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
            # An alias, so that a write to a batch tensor is seen in the graph, where it can be
            # named; torch.func's error cannot.
            own = [
                aten.alias.default(leaf) if isinstance(leaf, Tensor) else leaf
                for leaf in batch_leaves
            ]
            loss, extra = _split(
                loss_fn, loss_fn(treedef.unflatten(tensors), *batch_tree.unflatten(own)), has_aux
            )
            aux_leaves, aux_tree = flatten(extra)
            aux[:] = aux_tree, aux_leaves
            return loss, [leaf for leaf in aux_leaves if isinstance(leaf, Tensor)]

        grads, (loss, extras) = _differentiated(scalar, leaves)
        grads = treedef.unflatten(grads)
        if not has_aux:
            return loss, grads
        aux_tree, aux_leaves = aux
        fresh = iter(extras)
        return (
            loss,
            aux_tree.unflatten(
                [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in aux_leaves]
            ),
        ), grads

    return fn


def _differentiated(
    scalar: Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]], leaves: list[Tensor]
) -> tuple[list[Tensor], tuple[Tensor, list[Tensor]]]:
    """Gradients, and the loss with the function's other tensors."""
    gradient = _gradient.get()
    if gradient is not None:
        gradient.is_taken = True
    if gradient is None or gradient.by == "func":
        return torch.func.grad_and_value(scalar, has_aux=True)(leaves)
    with torch.enable_grad():
        given = [leaf.detach().requires_grad_() for leaf in leaves]
        loss, extras = scalar(given)
        if not loss.requires_grad:
            grads: list[Tensor | None] = [None] * len(given)
        elif gradient.by == "grad":
            grads = list(torch.autograd.grad(loss, given, allow_unused=True))
        else:
            loss.backward()
            grads = [leaf.grad for leaf in given]
    found = [
        torch.zeros_like(leaf) if grad is None else grad.detach()
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
    return found, (loss.detach(), [x.detach() for x in extras])


def _split(loss_fn: Callable[..., Any], out: Any, has_aux: bool) -> tuple[Tensor, Any]:
    where = defined_at(loss_fn)
    if has_aux:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise InputError(
                f"has_aux=True, so the loss function{where} must return a pair (loss, aux), not"
                f" {_kind(out)}."
            )
        loss, aux = out
    else:
        loss, aux = out, ()
        if isinstance(out, tuple | list):
            raise InputError(
                f"The loss function{where} returns {_kind(out)}. Return the loss alone, or (loss,"
                " aux) with has_aux=True."
            )
    if not isinstance(loss, Tensor):
        raise InputError(
            f"The loss function{where} returns {_kind(loss)}, not a tensor. Return a scalar"
            " computed from the parameters."
        )
    if loss.ndim:
        raise InputError(
            f"The loss function{where} returns a tensor of shape {tuple(loss.shape)}; a gradient"
            " needs a scalar, of shape ()."
            " Reduce it with .mean() or .sum()."
        )
    if not loss.dtype.is_floating_point:
        raise InputError(
            f"The loss function{where} returns {loss.dtype}; a gradient needs a real"
            " floating-point scalar."
        )
    return loss, aux


def _kind(value: Any) -> str:
    return (
        f"{kind_of(value)} of {len(value)}" if isinstance(value, tuple | list) else kind_of(value)
    )


def _check_differentiable(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, Tensor):
            failures.append(
                f"{name} is {leaf!r}, {kind_of(leaf)}: it has no gradient. Close over it, or pass"
                " it as a batch argument."
            )
        elif not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            failures.append(
                f"{name} is {leaf.dtype}: it has no gradient. Make it a buffer or a batch"
                " argument, or a floating-point tensor."
            )
    if failures:
        raise InputError(join_failures(failures))


def decompose(
    target: OpOverload,
    args: Any,
    kwargs: Mapping[str, Any],
    by: Callable[..., Any] | None = None,
    symbolic: "Symbolic | None" = None,
) -> fx.GraphModule | None:
    """One call as a functional graph of primitives, by a decomposition (default torch's own); None
    where there is none.

    Args:
        args, kwargs: as the op takes them, with anything that has ``shape`` and ``dtype`` in place
            of tensors.
        symbolic: of the dynamic sizes among shapes and arguments.

    >>> x = torch.empty(4, 3, device="meta")
    >>> made = decompose(aten.addcmul.default, [x, x, x], {}, lambda x, a, b: x + a * b)
    >>> print(made.code.strip())
    def forward(self, arg_0, arg_1, arg_2):
        mul = torch.ops.aten.mul.Tensor(arg_1, arg_2);  arg_1 = arg_2 = None
        add = torch.ops.aten.add.Tensor(arg_0, mul);  arg_0 = mul = None
        return (add,)
    """
    by = by or decomposition_table.get(target)
    if by is None:
        return None
    recorder = Recorder("cpu", symbolic=symbolic)
    flat_args, tree = flatten((list(args), dict(kwargs)))
    at = [i for i, a in enumerate(flat_args) if hasattr(a, "shape") and hasattr(a, "dtype")]
    fakes = [recorder.fake(tuple(flat_args[i].shape), flat_args[i].dtype) for i in at]

    def flat(*values: Tensor) -> list[Any]:
        filled = list(flat_args) if symbolic is None else [*map(symbolic.symint, flat_args)]
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        with recorder.recording():
            full_args, full_kwargs = tree.unflatten(filled)
            out = by(*full_args, **full_kwargs)
        return list(out) if isinstance(out, tuple | list) else [out]

    dynamic = nullcontext() if symbolic is None else symbolic.generic(lambda: "")
    with dynamic, recorder.mode:
        gm = record(flat, fakes)
    gm = functional_form(gm, recorder)
    lift_attributes(gm, recorder)
    clean(gm, recorder.device, recorder.device)
    constants_last(gm, recorder, [f"arg_{i}" for i in range(len(at))])
    if symbolic is not None:
        symbolic.inline(gm.graph)
    return gm


def _check_leaves(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, Tensor):
            failures += _unfit_static(leaf, name)
        elif is_traceable_wrapper_subclass(leaf) and not isinstance(leaf, FakeTensor):
            failures.append(f"{name} is a {type(leaf).__name__}; ftp takes plain tensors.")
        elif leaf.layout is not torch.strided or leaf.is_quantized:
            failures.append(
                f"{name} is a {leaf.layout} tensor of {leaf.dtype}; ftp takes dense ones. Pass its"
                " indices and values, and add rows up: y.index_add(0, rows, values[:, None] *"
                " x[columns]). A matrix that the function captures may be sparse."
            )
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
    if isinstance(leaf, Selected):
        return [leaf.refused_as(name)]
    if isinstance(leaf, torch.nn.Module):
        return [
            f"{name} is a module, {type(leaf).__name__}. Give its parameters: fn, params ="
            " ftp.functionalize(module)."
        ]
    if held := _held_tensors(leaf):
        return [
            f"{name} is {kind_of(leaf)}, which optree does not know, and holds tensors"
            f" ({', '.join(held)}) that would be baked in as"
            " constants. Register the class with optree (namespace='ftp'), or use a dict."
        ]
    try:
        hash(leaf)
    except TypeError:
        return [
            f"{name} is {kind_of(leaf)}, neither a tensor, nor a container that optree knows, nor"
            " a hashable static value."
            " Register the class with optree (namespace='ftp'), or use a dict, list or tuple."
        ]
    return []


def _held_tensors(leaf: Any) -> list[str]:
    fields = dict(getattr(leaf, "__dict__", {}))
    for kind in type(leaf).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        fields |= {
            s: getattr(leaf, s)
            for s in ((slots,) if isinstance(slots, str) else slots)
            if hasattr(leaf, s)
        }
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


def _check_unwritten(gm: fx.GraphModule, names: Mapping[fx.Node, str]) -> None:
    writers = [n for n in gm.graph.nodes if writes(n)]
    if not writers:
        return
    placeholders = {s: n for n in gm.graph.nodes if n.op == "placeholder" for s in storages(n)}
    failures = []
    for node in writers:
        for storage in sorted({s for v in writes(node) for s in storages(v)} & set(placeholders)):
            placeholder = placeholders[storage]
            name = names.get(placeholder)
            if name is None:
                shape = tuple(placeholder.meta["val"].shape)
                name = f"a captured tensor of shape {shape}"
            failures.append(
                f"{name} is changed in place{at_line(node.meta['source'])} by {node.target}. {COPY}"
            )
    if failures:
        raise TraceError(join_failures(dict.fromkeys(failures)))


@contextmanager
def _nested_traces() -> Iterator[None]:
    """What would trace or compile within the trace is called as it is: torch.func.linearize, and
    helpers under torch.compile.
    """
    original = eager_transforms.lazy_dynamo_disallow
    eager_transforms.lazy_dynamo_disallow = lambda fn: (
        _uncalled if fn is make_fx else lambda traced: traced
    )
    dynamo = sys.modules.get("torch._dynamo")  # imported where there is anything compiled
    try:
        with (
            nullcontext() if dynamo is None else dynamo.config.patch(error_on_nested_fx_trace=False)
        ):
            yield
    finally:
        eager_transforms.lazy_dynamo_disallow = original


def _uncalled(traced: Callable[..., Any]) -> Callable[..., Callable[..., list[Any]]]:
    """In place of ``make_fx`` in torch.func.linearize: the function of tangents as
    torch.func.jvp, which all transforms see through.
    """
    known = inspect.getclosurevars(traced).nonlocals
    func, tree = known["func"], known["primals_argspec"]
    primals = pytree.tree_unflatten(known["flat_primals"], tree)
    return lambda _: (
        lambda *given: pytree.tree_leaves(
            torch.func.jvp(func, primals, pytree.tree_unflatten(given, tree))[1]
        )
    )
