"""``constrain``: pin an activation's layout; JAX's ``with_sharding_constraint``."""

import ast
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call

from ftp.errors import SpecError
from ftp.spec import PartitionSpec, Units

torch.library.define("ftp::constrain", "(Tensor x, str spec) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("ftp::constrain", "CompositeExplicitAutograd")
def _copy(x: torch.Tensor, spec: str) -> torch.Tensor:
    return x.clone()


def _vmap(info: Any, in_dims: tuple[int | None, None], x: torch.Tensor, spec: str) -> tuple[torch.Tensor, int | None]:
    dim = in_dims[0]
    if dim is None:
        return torch.ops.ftp.constrain(x, spec), None
    entries = list(spec_from_str(spec))
    entries += [None] * (dim - len(entries))
    entries.insert(dim, None)
    return torch.ops.ftp.constrain(x, spec_to_str(PartitionSpec(*entries))), dim


torch.library.register_vmap("ftp::constrain", _vmap)


class _Constrain(torch.autograd.Function):
    """The gradient of a constraint is constrained as its value is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, spec: str) -> torch.Tensor:  # type: ignore[override]
        return torch.ops.ftp.constrain(x, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
        ctx.spec = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _Constrain.apply(grad, ctx.spec), None  # type: ignore[return-value]

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:  # type: ignore[override]
        return _Constrain.apply(tangent, ctx.spec)  # type: ignore[return-value]


def _run_forward(interpreter: Any, function: type[torch.autograd.Function], *operands: Any) -> Any:
    return function.forward(*operands)


# torch leaves functionalization of autograd.Functions open. Outside all differentiation one is its forward, whose ops are functionalized.
custom_function_call.functorch_table[TransformType.Functionalize] = _run_forward


def constrain(x: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
    """``x`` itself, laid out as ``spec`` says wherever the program is sharded; so is its gradient.

    Args:
        x: any tensor computed in a sharded function. Outside one this is a copy.
        spec: an entry per dim; missing trailing entries, and ``None``, mean that the dim is whole.

    Raises:
        SpecError: a spec longer than the tensor's rank.

    >>> import ftp
    >>> constrain(torch.ones(2, 2), ftp.P("dp")).sum()
    tensor(4.)

    Source: JAX, ``jax.lax.with_sharding_constraint``.
    """
    if not isinstance(spec, PartitionSpec):
        raise SpecError(f"constrain(x, spec) takes a PartitionSpec such as P('dp', None), not {spec!r}, a {type(spec).__name__}.")
    if len(spec) > x.ndim:
        raise SpecError(f"constrain(x, {spec}) gives {len(spec)} entries to a tensor of shape {tuple(x.shape)}. Give at most {x.ndim}.")
    return _Constrain.apply(x, spec_to_str(spec))  # type: ignore[return-value]


def spec_to_str(spec: PartitionSpec) -> str:
    """A spec as text, for an op's argument.

    >>> spec_from_str(spec_to_str(PartitionSpec(None, ("a", "b")))) == PartitionSpec(None, ("a", "b"))
    True
    """
    return repr([[(c.axis, c.size) for c in spec.cuts(d)] for d in range(len(spec))])


def spec_from_str(text: str) -> PartitionSpec:
    entries = [tuple(axis if size == 1 else Units(axis, size) for axis, size in cuts) for cuts in ast.literal_eval(text)]
    return PartitionSpec(*[e or None for e in entries])
