"""Experts of transformers' models on a mesh axis: tokens are sent to the ranks that own their
experts, weights are not.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ftp.dataclass import dataclass
from ftp.errors import InputError, MeshError, SpecError
from ftp.functional.module_constraints import Constraint
from ftp.per_rank.dispatch import dispatch
from ftp.sharding.mesh import resolve
from ftp.sharding.spec import P


@dataclass(frozen=True)
class ExpertAxis:
    """How ``from_hf`` places experts.

    Attributes:
        token_axes: the mesh axes that shard the tokens, ``axis`` among them.
        capacity: see ``from_hf``.
    """

    axis: str
    token_axes: tuple[str, ...]
    capacity: float | None

    def constraints(self, model: nn.Module) -> dict[str, Constraint]:
        """A constraint on each module of experts, which sends tokens to the experts' ranks."""
        found = {
            path: Constraint(forward=partial(_dispatched, self))
            for path, module in model.named_modules()
            if is_experts(module)
        }
        if not found:
            raise SpecError(
                f"from_hf(expert_axis={self.axis!r}): {type(model).__name__} has no module of"
                " experts whose weights are stacked, as transformers 5 has them."
            )
        return found

    def spec(self, model: nn.Module, path: str, parameter: Tensor, spec: P) -> P:
        """The spec of a parameter: experts sharded over the axis, other dims as in ``spec``."""
        holder: Any = model.get_submodule(path.rpartition(".")[0])
        if not is_experts(holder) or parameter.shape[0] != holder.num_experts:
            return spec
        rest = [spec[d] if d < len(spec) else None for d in range(1, parameter.ndim)]
        return P(self.axis, *(None if self.axis in P(entry).axes else entry for entry in rest))


def is_experts(module: Any) -> bool:
    """Whether a module is transformers' stacked experts."""
    return hasattr(module, "_is_expert_parallel") and isinstance(
        getattr(module, "num_experts", None), int
    )


def _dispatched(placed: ExpertAxis, module: Any, forward: Any, *args: Any, **given: Any):
    """The forward of a module of experts on the surrounding mesh; without a mesh, its own."""
    try:
        mesh = resolve(None)
    except MeshError:
        return forward(*args, **given)
    if lacking := [a for a in placed.token_axes if a not in mesh.axes]:
        raise MeshError(
            f"from_hf placed experts by expert_axis={placed.axis!r}, token_axes="
            f"{placed.token_axes!r}, but the mesh {mesh} has no axis {lacking[0]!r}."
        )
    called = inspect.signature(forward).bind(*args, **given).arguments.values()
    if len(called) != 3 or any(t.is_floating_point() == (i == 1) for i, t in enumerate(called)):
        raise InputError(
            f"from_hf(expert_axis={placed.axis!r}) takes experts that are called with rows, chosen"
            f" experts and weights; {type(module).__name__} is called with"
            f" {', '.join(f'{t.dtype} {tuple(t.shape)}' for t in called)}."
        )
    x, chosen, weights = called
    names = [name for name, p in module._parameters.items() if p is not None]
    values: list[Any] = [module._parameters[name] for name in names]
    implementation, dtype = _implementation(module, forward), weights.dtype

    def experts(rows: Tensor, own: Tensor, parts: Sequence[Tensor]) -> Tensor:
        ones = torch.ones((rows.shape[0], 1), dtype=dtype, device=rows.device)
        with _holding(module, dict(zip(names, parts, strict=True))):
            return implementation(rows, own[:, None], ones)

    return dispatch(
        experts,
        mesh,
        x,
        chosen,
        weights,
        values,
        axis=placed.axis,
        token_axes=placed.token_axes,
        capacity=placed.capacity,
    ).to(x.dtype)


def _implementation(module: Any, forward: Any) -> Any:
    """The module's forward; in place of its loop, which reads values, transformers' grouped_mm."""
    if getattr(module.config, "_experts_implementation", None) in (None, "eager"):
        moe: Any = sys.modules["transformers.integrations.moe"]
        return partial(moe.grouped_mm_experts_forward, module)
    return forward


@contextmanager
def _holding(module: Any, parts: Mapping[str, Any]) -> Iterator[None]:
    """Set the module's parameters to a rank's experts within the block; transformers then skips
    rows of the expert ``num_experts``.
    """
    old, count, flag = dict(module._parameters), module.num_experts, module._is_expert_parallel
    module._parameters.update(parts)
    module.num_experts = next(iter(parts.values())).shape[0]
    module._is_expert_parallel = True
    try:
        yield
    finally:
        module._parameters.update(old)
        module.num_experts, module._is_expert_parallel = count, flag
