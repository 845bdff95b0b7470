"""A function and abstract inputs to one functional aten graph, gradient included; nothing is allocated and nothing is run.

torch's own pytrees never see a user's container: leaves go in and out as flat lists, each with a fake tensor of its own.
"""

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.func import functionalize
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ftp.errors import FtpError, InputError, TraceError, join_failures
from ftp.tree import flatten, leaf_names

aten = torch.ops.aten


@dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
        gm: functional aten graph; its placeholders are the tensor leaves in order, then the constants; it returns a flat tuple.
        constants: tensors that the function captured.
        out_tree: the structure of the result.
        out_leaves: per leaf of the result the index of its output, or its static value.
        is_static: per leaf of the result whether it is a static value.
    """

    gm: fx.GraphModule
    constants: tuple[torch.Tensor, ...]
    out_tree: optree.PyTreeSpec
    out_leaves: tuple[Any, ...]
    is_static: tuple[bool, ...]


def trace(fn: Callable[..., Any], leaves: Sequence[Any], in_tree: optree.PyTreeSpec, device_type: str, *, names: Sequence[str]) -> Traced:
    """Trace ``fn`` on the arguments that ``in_tree`` makes of ``leaves``.

    Args:
        leaves: tensors (real, fake or meta; only shape and dtype count) and static values.
        device_type: where the program will run; on another one some ops have other kernels.
        names: what each leaf is called in messages.

    Raises:
        TraceError: what the function does cannot be one graph. InputError: an argument that it cannot be traced with.
    """
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    _check_static(leaves, names)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device(device_type)
    with mode:
        fakes = [torch.empty(tuple(leaves[i].shape), dtype=leaves[i].dtype, device=device) for i in tensors]
    result: dict[str, Any] = {}
    inputs: list[torch.Tensor] = []

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        inputs[:] = values
        filled = list(leaves)
        for i, value in zip(tensors, values, strict=True):
            filled[i] = value
        out = fn(*in_tree.unflatten(filled))
        out_leaves, result["tree"] = flatten(out)
        result["leaves"] = out_leaves
        _check_static(out_leaves, leaf_names(out, "the result"))
        return [leaf for leaf in out_leaves if isinstance(leaf, torch.Tensor)]

    with _sources() as sources, _meta_constants(mode, device), _transformers_tracing(), mode:
        try:
            gm = make_fx(functionalize(flat, remove="mutations"), decomposition_table=DECOMPOSE_ALWAYS, tracing_mode="fake")(*fakes)
        except FtpError:
            raise
        except Exception as e:
            raise _explain(e, sources) from e
    _check_inputs_unwritten(gm, len(tensors), [names[i] for i in tensors])
    constants = _lift_constants(gm, mode, device)
    _clean(gm)
    _check_graph(gm, len(tensors) + len(constants))
    statics, out_leaves, at = [], [], 0
    for leaf in result["leaves"]:
        is_tensor = isinstance(leaf, torch.Tensor)
        statics.append(not is_tensor)
        out_leaves.append(at if is_tensor else leaf)
        at += is_tensor
    return Traced(gm, constants, result["tree"], tuple(out_leaves), tuple(statics))


def grad_and_value(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """``fn(params, *batch) -> (loss, grads)``, or ``((loss, aux), grads)``, over optree trees; gradients as ``params`` is."""

    def fn(params: Any, *batch: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(params)
        _check_differentiable(leaves, leaf_names(params, "params"))
        aux: list[Any] = []

        def scalar(flat_params: list[torch.Tensor]) -> torch.Tensor:
            out = loss_fn(treedef.unflatten(flat_params), *batch)
            loss, extra = _split_aux(out, has_aux)
            aux_leaves, aux_tree = flatten(extra)
            aux[:] = [aux_tree, aux_leaves]
            return loss, [leaf for leaf in aux_leaves if isinstance(leaf, torch.Tensor)]  # type: ignore[return-value]

        grads, (loss, extras) = torch.func.grad_and_value(scalar, has_aux=True)(leaves)
        value = loss
        if has_aux:
            aux_tree, aux_leaves = aux
            fresh = iter(extras)
            value = (loss, aux_tree.unflatten([next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in aux_leaves]))
        return value, treedef.unflatten(grads)

    return fn


def _split_aux(out: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    if has_aux:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise InputError(f"has_aux=True, so the loss function must return a pair (loss, aux), not a {type(out).__name__}.")
        loss, aux = out
    else:
        loss, aux = out, ()
        if isinstance(out, tuple | list):
            raise InputError(f"The loss function returns a {type(out).__name__} of {len(out)}. Return the loss alone, or (loss, aux) with has_aux=True.")
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"The loss is a {type(loss).__name__}, not a tensor. Return a scalar tensor computed from the parameters.")
    if loss.ndim:
        raise InputError(f"The loss has shape {tuple(loss.shape)}; a gradient needs a scalar. Reduce it with .mean() or .sum().")
    if not loss.dtype.is_floating_point:
        raise InputError(f"The loss is {loss.dtype}; a gradient needs a real floating-point scalar.")
    return loss, aux


def _check_differentiable(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, torch.Tensor):
            failures.append(f"{name} is {leaf!r}, a {type(leaf).__name__}: it has no gradient. Close over it, or pass it as a batch argument.")
        elif not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            failures.append(f"{name} is {leaf.dtype}: it has no gradient. Make it a buffer or a batch argument, or a floating-point tensor.")
    if failures:
        raise InputError(join_failures(failures))


def decompose(target: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any], by: Callable[..., Any] | None = None) -> fx.GraphModule | None:
    """One call as a functional graph of primitives, by a decomposition (default torch's own); None where there is none.

    Args:
        args, kwargs: as the op takes them, with anything that has ``shape`` and ``dtype`` in place of tensors.
    """
    by = by or decomposition_table.get(target)
    if by is None:
        return None
    mode = FakeTensorMode()
    fakes: list[torch.Tensor] = []

    def fake(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            return leaf
        with mode:
            fakes.append(torch.empty(tuple(leaf.shape), dtype=leaf.dtype))
        return fakes[-1]

    pytree = torch.utils._pytree
    flat_args, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    flat_args = [fake(leaf) for leaf in flat_args]

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        fresh = iter(values)
        full_args, full_kwargs = pytree.tree_unflatten([next(fresh) if isinstance(a, torch.Tensor) else a for a in flat_args], spec)
        out = by(*full_args, **full_kwargs)
        return list(out) if isinstance(out, tuple | list) else [out]

    with mode:
        gm = make_fx(functionalize(flat, remove="mutations"), decomposition_table=DECOMPOSE_ALWAYS, tracing_mode="fake")(*fakes)
    _clean(gm)
    return gm


def _mean(x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    dims = list(range(x.ndim)) if not dim and not (isinstance(dim, int)) else [dim] if isinstance(dim, int) else list(dim)  # type: ignore[arg-type]
    count = 1
    for d in dims:
        count *= x.shape[d]
    return torch.sum(x, dims, keepdim, dtype=dtype) / count if x.ndim else x.to(dtype or x.dtype).clone()


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = torch.mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = torch.bmm(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _addmv(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = torch.mv(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


# Fewer primitives where no kernel is lost: a product and a sum, a sum and a division.
DECOMPOSE_ALWAYS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.addmv.default: _addmv,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    **{op: decomposition_table[op] for op in (aten.addcmul.default, aten.addcdiv.default, aten.var.correction, aten.std.correction, aten.var_mean.correction) if op in decomposition_table},
}


# Errors.


def _check_static(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, torch.Tensor):
            continue
        held = [k for k, v in getattr(leaf, "__dict__", {}).items() if isinstance(v, torch.Tensor)]
        if held or isinstance(leaf, torch.nn.Module):
            what = f"{name} is a {type(leaf).__name__}, which holds tensors ({', '.join(held[:3]) or 'parameters'}) that would be baked in as constants"
            failures.append(f"{what}. Register the class with optree (namespace='ftp'), or pass a dict; for a module see ftp.functionalize.")
    if failures:
        raise InputError(join_failures(failures))


_WRITES = "An input is changed in place; inputs are never written to. Work on a copy: x = x.clone()."


def _explain(error: Exception, sources: "_Sources") -> FtpError:
    where = _where(error) or sources.last or "an unknown line"
    text = str(error)
    if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode) or "data-dependent" in text or ".item()" in text or "aten._local_scalar_dense" in text or "Boolean value" in text:
        return TraceError(
            f"The function needs a tensor's value while it is traced (`if`, `while`, bool(), float(), .item() or .tolist()) at {where}."
            "\n  There are no values then. Use torch.where for a choice, keep numbers as tensors, or pass the value as a static argument."
        )
    if isinstance(error, DynamicOutputShapeException):
        return TraceError(
            f"{error.func if hasattr(error, 'func') else 'An op'} gives a shape that depends on values, at {where}."
            "\n  A program has fixed shapes: use torch.where(mask, x, 0) or a weight instead of x[mask], and one_hot or a fixed size instead of nonzero or unique."
        )
    if isinstance(error, UnsupportedOperatorException):
        return TraceError(f"An op cannot be traced without values: {text}, at {where}. Give it a meta kernel with torch.library.register_fake.")
    if "Mixing fake modes" in text or "from different FakeTensorMode" in text or "FunctionalTensor" in text or "fake_mode is not" in text:
        return TraceError(f"A tensor left over from an earlier trace is used at {where}: it has no values. Return intermediates from the function (has_aux=True), do not store them.")
    if "mutat" in text and "input" in text or "leaf Variable that requires grad" in text:
        return TraceError(f"{_WRITES}\n  At {where}: {text}")
    return TraceError(f"The function fails while it is traced, at {where}:\n  {type(error).__name__}: {text}")


def _where(error: BaseException) -> str:
    """The innermost line of the user's code in an error's traceback."""
    found = ""
    tb = error.__traceback__
    while tb is not None:
        if is_user_code(tb.tb_frame.f_code.co_filename):
            found = _line(tb.tb_frame.f_code.co_filename, tb.tb_lineno)
        tb = tb.tb_next
    return found


_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OPTREE = os.path.dirname(os.path.abspath(optree.__file__)) + os.sep


def is_user_code(filename: str) -> bool:
    return not filename.startswith((_OWN, _TORCH, _OPTREE, "<frozen", "<eval_with_key", "<string"))


def _line(filename: str, number: int) -> str:
    return f"{os.path.basename(filename)}:{number}  {linecache.getline(filename, number).strip()}".rstrip()


class _Sources:
    """The user's line of each node as it is traced; a backward node has its forward op's."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, str] = {}
        self.last = ""
        self._known: dict[tuple[str, int], str] = {}

    def annotate(self, node: fx.Node) -> None:
        if node.op != "call_function":
            return
        behind = torch._C._current_autograd_node()
        if behind is not None:
            node.meta["source"] = self.by_sequence.get(behind._sequence_nr(), "")  # type: ignore[attr-defined]
            return
        source = self._current()
        if source:
            self.last = source
            self.by_sequence[torch.autograd._get_sequence_nr() - 1] = source
        node.meta["source"] = source

    def _current(self) -> str:
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            key = (code.co_filename, frame.f_lineno)
            if key in self._known:
                return self._known[key]
            if is_user_code(code.co_filename):
                return self._known.setdefault(key, _line(*key))
            frame = frame.f_back
        return ""


@contextmanager
def _sources() -> Iterator[_Sources]:
    sources = _Sources()
    original = proxy_tensor.PythonKeyTracer.create_node

    def create_node(self: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(self, *args, **kwargs)
        sources.annotate(node)
        return node

    proxy_tensor.PythonKeyTracer.create_node = create_node  # type: ignore[method-assign]
    try:
        yield sources
    finally:
        proxy_tensor.PythonKeyTracer.create_node = original  # type: ignore[method-assign]


@contextmanager
def _meta_constants(mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Captured tensors on the meta device count as tensors of the mesh's device: they have a shape and no more."""
    original = mode.from_tensor

    def from_tensor(tensor: torch.Tensor, **kwargs: Any) -> FakeTensor:
        if tensor.device.type == "meta" and device.type != "meta" and not isinstance(tensor, FakeTensor):
            known = mode.__dict__.setdefault("_ftp_meta", {})
            if id(tensor) not in known:
                with mode:
                    known[id(tensor)] = (tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
            return known[id(tensor)][1]
        return original(tensor, **kwargs)

    mode.from_tensor = from_tensor  # type: ignore[method-assign]
    yield


@contextmanager
def _transformers_tracing() -> Iterator[None]:
    """transformers builds its masks without asking for values when it believes that it is traced."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "is_tracing"):
        yield
        return
    original = masking.is_tracing
    masking.is_tracing = lambda *args, **kwargs: True
    try:
        yield
    finally:
        masking.is_tracing = original


def _check_inputs_unwritten(gm: fx.GraphModule, n: int, names: Sequence[str]) -> None:
    """Functionalization writes a mutated input back with ``copy_`` at the end."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    failures = [
        f"{names[placeholders.index(node.args[0])]} is changed in place, at {node.meta.get('source') or 'an unknown line'}."
        " Inputs are never written to: work on a copy, x = x.clone(), and return what has changed."
        for node in gm.graph.nodes
        if node.target is aten.copy_.default and node.args[0] in placeholders
    ]
    if failures:
        raise TraceError(join_failures(failures))


def _lift_constants(gm: fx.GraphModule, mode: FakeTensorMode, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Make captured tensors inputs, one each."""
    constants: list[torch.Tensor] = []
    lifted: dict[int, fx.Node] = {}
    *_, last = [None, *(n for n in gm.graph.nodes if n.op == "placeholder")]
    for node in list(gm.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(gm, node.target)
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is not mode:
            raise TraceError("A tensor left over from an earlier trace is used: it has no values. Return intermediates from the function, do not store them.")
        if id(tensor) not in lifted:
            with gm.graph.inserting_after(last) if last is not None else gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                last = gm.graph.placeholder(f"constant_{len(constants)}")
            with mode:
                last.meta["val"] = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
            lifted[id(tensor)] = last
            constants.append(tensor.detach())
        node.replace_all_uses_with(lifted[id(tensor)])
        gm.graph.erase_node(node)
    return tuple(constants)


_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}


def _clean(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def _without_dropout(node: fx.Node) -> bool:
    """Attention kernels count as random ops; they are none when their dropout probability is zero."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return (node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0)) == 0.0


_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.convolution.default, aten.mv.default, aten.dot.default}


def _check_graph(gm: fx.GraphModule, placeholders: int) -> None:
    failures = []
    found = 0
    for node in gm.graph.nodes:
        found += node.op == "placeholder"
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        where = node.meta.get("source") or "an unknown line"
        if torch.Tag.nondeterministic_seeded in target.tags and not _without_dropout(node):
            failures.append(f"{target} draws random numbers, at {where}. They would differ from rank to rank: call model.eval() before ftp.functionalize to turn dropout off.")
        elif target._schema.is_mutable:
            failures.append(f"{target} writes to its argument, at {where}; a program has no in-place ops. Use the form that returns a new tensor.")
        elif target in _PRODUCTS:
            dtypes = {str(a.meta["val"].dtype).removeprefix("torch.") for a in node.args[:2] if isinstance(a, fx.Node)}
            if len(dtypes) > 1:
                failures.append(f"{target} multiplies {' by '.join(sorted(dtypes))}, at {where}, which torch refuses. Convert one of them with .to(dtype).")
    if failures:
        raise TraceError(join_failures(dict.fromkeys(failures)))
    if found != placeholders:
        raise TraceError(f"The trace has {found} inputs for {placeholders} tensors: some argument is in a container that is not seen through.")
