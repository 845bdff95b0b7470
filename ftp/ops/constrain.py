"""``constrain``: pins an activation's sharding, as one differentiable op that every transform
and the tracer keep.
"""

import ast
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.errors import SpecError
from ftp.ops.define import define
from ftp.sharding.spec import P, Units, Zigzag
from ftp.source import at_line
from ftp.torch_internals.functorch import TransformType, custom_function_call


@dataclass(frozen=True)
class Pin:
    """A spec and the mesh axes that it fixes; None for all axes of the mesh."""

    spec: P
    axes: tuple[str, ...] | None = None

    def holds(self, axis: str) -> bool:
        """Whether the layout on ``axis`` is fixed."""
        return self.axes is None or axis in self.axes

    @property
    def probe(self) -> int | None:
        """The number of a probe, which fixes nothing."""
        at = self.axes[0] if self.axes else ""
        return int(at.removeprefix(_PROBE)) if at.startswith(_PROBE) else None

    def __str__(self) -> str:
        return str(self.spec) if self.axes is None else f"{self.spec} over {', '.join(self.axes)}"


@dataclass(frozen=True)
class Gradient:
    """A spec of a tensor's gradient and not of the tensor, as an entry of a ``Constraint``."""

    spec: P


def constrain(
    x: Tensor, spec: P, *, axes: str | Sequence[str] | None = None, grad: bool = True
) -> Tensor:
    """``x``, sharded by ``spec`` inside ``ftp.shard`` or ``ftp.spmd``; its gradient is too.

    Outside it is a copy of ``x``. Under ``torch.vmap`` the spec is that of one example; the mapped
    dim is not cut.

    Args:
        spec: an entry per dim; missing trailing entries, and ``None``, mean that the dim is whole.
            A leading ``...`` stands for the dims before the last ones.
        axes: the mesh axes that the spec fixes. On other axes the planner chooses, as if there were
            no constraint: with ``axes="tp"``, ``P()`` means whole over tp, and a batch stays cut
            over dp. Default: all axes.
        grad: whether the gradient is sharded by ``spec`` too, or left to the planner.

    >>> constrain(torch.ones(2, 3), P("dp", None)).sum()
    tensor(6.)
    >>> constrain(torch.ones(2, 3), P(..., "tp"), axes="tp").sum()
    tensor(6.)

    Raises:
        SpecError: a spec with more entries than ``x`` has dims, or that names an axis beside
            ``axes``. Axes are checked against the mesh when the program is planned.

    Source: JAX, ``jax.lax.with_sharding_constraint``.
    """
    if not isinstance(x, Tensor):
        raise SpecError(
            f"{at_line()}constrain pins a tensor, not {x!r}, a {type(x).__name__}. Map it over the"
            " leaves of a tree."
        )
    if not isinstance(spec, P):
        raise SpecError(
            f"{at_line()}constrain takes a spec such as P('dp', None), not {spec!r}, a"
            f" {type(spec).__name__}."
        )
    if not isinstance(grad, bool):
        raise SpecError(f"{at_line()}constrain has grad={grad!r}; give True or False.")
    if entries_over(spec, x.dim()):
        raise SpecError(
            f"{at_line()}{spec} has {len(spec)} entries, but the tensor that it pins has {x.dim()}"
            f" dims, shape {tuple(x.shape)}."
            f" Give at most {x.dim()}."
        )
    pin = Pin(
        spec.at_rank(x.dim()),
        (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes),
    )
    if problem := misnamed(spec, pin.axes):
        raise SpecError(f"{at_line()}{problem}")
    return _Constrain.apply(x, pin_to_str(pin), grad)


def constrain_gradient(x: Tensor, spec: P, *, axes: Sequence[str] | None = None) -> Tensor:
    """``x``, with its gradient sharded by ``spec``; the arguments are those of `constrain`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> constrain_gradient(x, P("tp")).sum().backward()
    >>> x.grad
    tensor([1., 1.])
    """
    return _ConstrainGradient.apply(
        x, pin_to_str(Pin(spec.at_rank(x.dim()), None if axes is None else tuple(axes)))
    )


_PROBE = "probe "  # no mesh axis is called so
_MARKED: ContextVar[bool] = ContextVar("ftp.ops.constrain", default=False)


def marked_gradients() -> AbstractContextManager[bool]:
    """Within the block, a constraint that leaves its gradient to the planner marks the gradient by
    a constraint that fixes no axis.
    """
    return set_within(_MARKED, True)


def asked_for(x: Tensor) -> Tensor:
    """``x``; under `marked_gradients` with a constraint, which says that a function of ftp asks for
    it whole on every rank.
    """
    return constrain(x, P()) if _MARKED.get() else x


def probe(x: Tensor, number: int) -> Tensor:
    """``x`` with a numbered constraint that fixes nothing, on it and on its gradient.

    >>> probe(torch.ones(2), 3)
    tensor([1., 1.])
    """
    entries = pin_to_str(Pin(P(), (f"{_PROBE}{number}",)))
    return _Constrain.apply(x, entries, True)


def entries_over(spec: P, ndim: int) -> bool:
    """Whether ``spec`` has more entries than a tensor of ``ndim`` dims; a leading ``...`` may
    stand for no dim.
    """
    return len(spec.at_rank(ndim)) > ndim


def misnamed(spec: P, axes: tuple[str, ...] | None) -> str | None:
    """The error message for a spec limited to ``axes``, or for ``axes``; None if both are right."""
    if spec.unreduced:
        return (
            f"{spec} is no constraint: where a sum is left pending is the planner's choice. Give"
            f" {P(*spec.entries)}."
        )
    if axes is None:
        return None
    if not axes or not all(isinstance(axis, str) for axis in axes):
        return f"axes={axes!r}: it takes the name of a mesh axis, or several, as axes='tp'."
    beside = [axis for axis in dict.fromkeys(spec.axes) if axis not in axes]
    return (
        f"{spec} names {', '.join(map(repr, beside))}, which axes={axes!r} does not list."
        if beside
        else None
    )


def pin_to_str(pin: Pin) -> str:
    """The op's argument for ``pin``.

    >>> pin_to_str(Pin(P(("dp", "tp"), None))), pin_to_str(Pin(P(), ("tp",)))
    ("P(('dp', 'tp'), None)", "P(), ('tp',)")
    """
    return repr(pin.spec) if pin.axes is None else f"{pin.spec!r}, {pin.axes!r}"


def pin_from_str(text: str) -> Pin:
    """The inverse of ``pin_to_str``.

    >>> pin_from_str("P(units('tp', 64), None)").spec, pin_from_str("P('tp'), ('tp',)").axes
    (P(units('tp', 64), None), ('tp',))
    """
    parsed = ast.parse(text, mode="eval").body
    call, axes = parsed.elts if isinstance(parsed, ast.Tuple) else (parsed, None)
    assert isinstance(call, ast.Call), text
    return Pin(P(*map(_entry, call.args)), None if axes is None else ast.literal_eval(axes))


def _entry(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(map(_entry, node.elts))
    if isinstance(node, ast.Call):
        made = Zigzag if isinstance(node.func, ast.Name) and node.func.id == "zigzag" else Units
        return made(
            *map(ast.literal_eval, node.args),
            **{k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg},
        )
    return ast.literal_eval(node)


MARK = pin_to_str(Pin(P(), ()))  # marks a gradient that no constraint fixes

CONSTRAIN = define("constrain(Tensor x, str entries) -> Tensor")


@torch.library.impl("ftp::constrain", "CompositeExplicitAutograd")
def _copy(x: Tensor, entries: str) -> Tensor:
    # An op must not return its input.
    return x.clone()


def _batched(
    info: Any, in_dims: tuple[int | None, None], x: Tensor, entries: str
) -> tuple[Tensor, int | None]:
    dim = in_dims[0]
    pin = pin_from_str(entries)
    spec = list(pin.spec)
    if dim is not None and dim < len(spec):
        spec.insert(dim, None)
    return CONSTRAIN(x, pin_to_str(Pin(P(*spec), pin.axes))), dim


torch.library.register_vmap("ftp::constrain", _batched)


class _Constrain(torch.autograd.Function):
    """Carries the op through autograd and torch.func, whose transforms do not see a gradient that
    is registered for the op itself.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, entries: str, grad: bool) -> Tensor:
        return CONSTRAIN(x, entries)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str, bool], output: Tensor) -> None:
        _, ctx.entries, ctx.grad = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.grad or _MARKED.get():
            return _Constrain.apply(grad, ctx.entries if ctx.grad else MARK, True), None, None
        return grad, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Constrain.apply(tangent, ctx.entries, ctx.grad)


class _ConstrainGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, entries: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.entries = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Constrain.apply(grad, ctx.entries, True), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return tangent.view_as(tangent)


def _run_forward(interpreter: Any, function: type[torch.autograd.Function], *operands: Any) -> Any:
    return function.forward(*operands)


# torch does not functionalize autograd.Functions. Outside all differentiation run the forward,
# whose ops are functionalized.
custom_function_call.functorch_table[TransformType.Functionalize] = _run_forward
