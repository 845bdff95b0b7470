"""``constrain``: pins an activation's sharding, as one differentiable op that every transform and the tracer keep."""

import ast
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call

from ftp.errors import SpecError
from ftp.source import user_line
from ftp.spec import P, Units


def constrain(x: Tensor, spec: P) -> Tensor:
    """``x``, laid out as ``spec`` says where this runs inside ``ftp.shard`` or ``ftp.spmd``; so is its gradient.

    Outside it is a copy of ``x``. Under ``torch.vmap`` the spec is that of one example; the mapped dim is not cut.

    Args:
        spec: an entry per dim; missing trailing entries, and ``None``, mean that the dim is whole.

    >>> constrain(torch.ones(2, 3), P("dp", None)).sum()
    tensor(6.)

    Raises:
        SpecError: a spec with more entries than ``x`` has dims. Axes are checked against the mesh when the program is planned.

    Source: JAX, ``jax.lax.with_sharding_constraint``.
    """
    if not isinstance(x, Tensor):
        raise SpecError(f"{_at()}constrain pins a tensor, not {x!r}, a {type(x).__name__}. Map it over the leaves of a tree.")
    if not isinstance(spec, P):
        raise SpecError(f"{_at()}constrain takes a spec such as P('dp', None), not {spec!r}, a {type(spec).__name__}.")
    if len(spec) > x.dim():
        raise SpecError(
            f"{_at()}{spec} has {len(spec)} entries, but the tensor that it pins has {x.dim()} dims, shape {tuple(x.shape)}."
            f" Give at most {x.dim()}."
        )
    return _Constrain.apply(x, spec_to_str(spec))  # type: ignore[return-value]


def spec_to_str(spec: P) -> str:
    """The op's argument for ``spec``.

    >>> spec_to_str(P(("dp", "tp"), None))
    "P(('dp', 'tp'), None)"
    """
    return repr(spec)


def spec_from_str(text: str) -> P:
    """The inverse of ``spec_to_str``.

    >>> spec_from_str("P(units('tp', 64), None)")
    P(units('tp', 64), None)
    """
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call), text
    return P(*map(_entry, call.args))


def _entry(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(map(_entry, node.elts))
    if isinstance(node, ast.Call):
        return Units(*map(ast.literal_eval, node.args), **{k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg})
    return ast.literal_eval(node)


def _at() -> str:
    line = user_line()
    return f"{line}\n  " if line else ""


torch.library.define("ftp::constrain", "(Tensor x, str entries) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("ftp::constrain", "CompositeExplicitAutograd")
def _copy(x: Tensor, entries: str) -> Tensor:
    # An op must not return its input.
    return x.clone()


def _batched(info: Any, in_dims: tuple[int | None, None], x: Tensor, entries: str) -> tuple[Tensor, int | None]:
    dim = in_dims[0]
    spec = list(spec_from_str(entries))
    if dim is not None and dim < len(spec):
        spec.insert(dim, None)
    return torch.ops.ftp.constrain.default(x, spec_to_str(P(*spec))), dim


torch.library.register_vmap("ftp::constrain", _batched)


class _Constrain(torch.autograd.Function):
    """Carries the op through autograd and torch.func: a gradient registered for the op itself does not pass their transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, entries: str) -> Tensor:  # type: ignore[override]
        return torch.ops.ftp.constrain.default(x, entries)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.entries = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Constrain.apply(grad, ctx.entries), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:  # type: ignore[override]
        return _Constrain.apply(tangent, ctx.entries)


def _run_forward(interpreter: Any, function: type[torch.autograd.Function], *operands: Any) -> Any:
    return function.forward(*operands)


# torch leaves functionalization of autograd.Functions open. Outside all differentiation one is its forward, whose ops are functionalized.
custom_function_call.functorch_table[TransformType.Functionalize] = _run_forward
