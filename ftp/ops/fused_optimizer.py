"""torch's fused optimizer updates as pure ops of a program, one parameter each.

``ftp.fused_adamw([param, grad, exp_avg, exp_avg_sq, step], lr=...)`` returns the new ``[param,
exp_avg, exp_avg_sq, step]``, by torch's own kernel for lists of tensors. In a rank's graph adjacent
updates become one call of that kernel, in place (`passes.fuse_optimizer_updates`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.ops.define import define, register_fake

aten = torch.ops.aten
COUNT_UP = aten._foreach_add_.Scalar  # of the list of steps; one kernel for each on a CPU


@dataclass(frozen=True)
class Update:
    """An optimizer's fused kernel.

    Attributes:
        kernel: aten's op, in place on lists: parameters, gradients, moments, steps.
        columns: number of lists that it takes.
        optional: position of the list that may be empty, if any.
        counts: whether the last list holds steps, which are incremented before the update.
    """

    kernel: Any
    columns: int
    optional: int | None
    counts: bool

    def run(self, rows: Sequence[Sequence[Tensor]], options: dict[str, Any]) -> None:
        """Update parameters in place, one row ``[param, grad, ...]`` each."""
        lists = self.lists(rows)
        if self.counts:
            COUNT_UP(lists[-1], 1)
        self.kernel(*lists, **options)

    def lists(self, rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The kernel's lists."""
        found = [list(column) for column in zip(*rows, strict=True)]
        if len(found) < self.columns:
            assert self.optional is not None
            found.insert(self.optional, [])
        return found


UPDATES: dict[Any, Update] = {}
_BY_KERNEL: dict[str, dict[str, Any]] = {}


def update_of(kernel: str, rate: Any) -> Any:
    """The op for one of torch's kernels, by its name and the kind of the learning rate."""
    return _BY_KERNEL[kernel]["tensor_lr" if isinstance(rate, Tensor) else "default"]


def fused_kernels() -> frozenset[str]:
    """The names of torch's kernels for which there is an op.

    >>> sorted(fused_kernels())
    ['_fused_adagrad_', '_fused_adam_', '_fused_adamw_', '_fused_sgd_']
    """
    return frozenset(_BY_KERNEL)


def _define(name: str, columns: int, optional: int | None, counts: bool) -> None:
    kernels = getattr(aten, f"_fused_{name}_")
    for overload in ("default", "tensor_lr"):
        kernel = getattr(kernels, overload)
        options = [
            a
            for a in kernel._schema.arguments
            if a.kwarg_only and a.name not in ("grad_scale", "found_inf")
        ]
        taken = ", ".join(f"{a.type} {a.name}" for a in options)
        suffix = "" if overload == "default" else f".{overload}"
        made = define(f"fused_{name}{suffix}(Tensor[] tensors, *, {taken}) -> Tensor[]")
        op = f"ftp::fused_{name}{suffix}"
        update = Update(kernel, columns, optional, counts)
        torch.library.impl(op, "CompositeExplicitAutograd", _pure(update))
        register_fake(op, lambda tensors, **options: replacements(tensors))
        UPDATES[made] = update
        _BY_KERNEL.setdefault(f"_fused_{name}_", {})[overload] = made


def _pure(update: Update) -> Callable[..., list[Tensor]]:
    def run(tensors: list[Tensor], **options: Any) -> list[Tensor]:
        param, grad, *moments = (
            t if i == 1 else t.clone(memory_format=torch.contiguous_format)
            for i, t in enumerate(tensors)
        )
        update.run([[param, grad.contiguous(), *moments]], options)
        return [param, *moments]

    return run


def written(tensors: Sequence[Any]) -> list[Any]:
    """The operands that an update replaces: all but the gradient."""
    return [tensors[0], *tensors[2:]]


def replacements(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of an update, without values: contiguous, as the kernel takes them."""
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in written(tensors)]


_define("adam", 6, 4, True)
_define("adamw", 6, 4, True)
_define("sgd", 3, 2, False)
_define("adagrad", 4, None, True)

ADAM, ADAMW = torch.ops.ftp.fused_adam.default, torch.ops.ftp.fused_adamw.default
