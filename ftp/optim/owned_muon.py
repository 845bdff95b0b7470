"""Steps of torch.optim.Muon in which owners orthogonalize the matrices (``by_owner``). The rest of
the step is elementwise and sharded like the parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

from ftp.errors import InputError
from ftp.optim.by_owner import apply_by_owner
from ftp.optim.slots import Slots
from ftp.sharding.traced_arguments import spec_of_argument

# A step of a group: gradients, states and parameters to new parameters and states.
RunMatrices = Callable[
    [Sequence[Tensor], Sequence[Slots], Sequence[Tensor]], list[tuple[Tensor, Slots]]
]


def check_owned(cls: type, owned: Any) -> None:
    if cls is not torch.optim.Muon:
        raise InputError(
            f"{cls.__name__} has owned={owned!r}, which is for torch.optim.Muon only: from_torch"
            " does not know which part of another class takes whole matrices. Write the step of"
            " your own optimizer with ftp.optim.by_owner."
        )


def owned_step(
    runs: Sequence[RunMatrices],
    grads: Sequence[Tensor],
    slots: Sequence[Slots],
    params: Sequence[Tensor],
    paths: Sequence[str],
    axes: Sequence[str] | None,
) -> list[tuple[Tensor, Slots]]:
    """Per parameter its new value and state.

    The step runs twice: first up to the matrices that Muon orthogonalizes, then with the owners'
    results. A program computes the common ops once.

    Args:
        runs: per parameter, the step of its group.
        axes: the mesh axes whose ranks own matrices; None for all.
    """
    given = list(zip(runs, grads, slots, params, strict=True))
    asked = [_asked(*one) for one in given]
    # Muon rounds a matrix to bfloat16 first, so half the bytes of float32 are sent.
    updates = {path: x.bfloat16() for path, (x, _) in zip(paths, asked, strict=True)}
    options = {path: args for path, (_, args) in zip(paths, asked, strict=True)}
    specs = dict(zip(paths, map(spec_of_argument, params), strict=True))
    in_order = [specs[path] for path in sorted(specs)]
    made = apply_by_owner(_orthogonalized, updates, [options], axes, in_order)
    return [_completed(*one, made[path]) for one, path in zip(given, paths, strict=True)]


def _orthogonalized(matrix: Tensor, options: tuple[Any, ...]) -> dict[str, Tensor]:
    matrix = matrix.clone()
    made = _muon._zeropower_via_newtonschulz(matrix, *options)
    # torch scales a bfloat16 matrix in place, and the matrix may be the momentum itself.
    return {"update": made, "matrix": matrix}


def _asked(
    run: RunMatrices, grad: Tensor, slots: Slots, param: Tensor
) -> tuple[Tensor, tuple[Any, ...]]:
    """The matrix that Muon would orthogonalize, and the function's options."""
    options: list[tuple[Any, ...]] = []

    def one(grad: Tensor, param: Tensor, like: Sequence[Tensor]) -> Tensor:
        taken: list[Tensor] = []

        def take(matrix: Tensor, *args: Any) -> Tensor:
            taken.append(matrix.clone())
            options.append(args)
            return matrix

        with _orthogonalizing_by(take):
            run([grad], [_filled(slots, like)], [param])
        return taken[0]

    return _mapped(one, param.ndim - 2, 0)(grad, param, _like(slots)), options[0]


def _completed(
    run: RunMatrices, grad: Tensor, slots: Slots, param: Tensor, made: dict[str, Tensor]
) -> tuple[Tensor, Slots]:
    """The step with the owner's result."""
    rest = [name for name in slots if name not in slots.like]

    def one(
        grad: Tensor, param: Tensor, like: Sequence[Tensor], made: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        def give(matrix: Tensor, *args: Any) -> Tensor:
            if matrix.dtype is torch.bfloat16:
                matrix.copy_(made["matrix"])
            return made["update"]

        with _orthogonalizing_by(give):
            ((new, kept),) = run([grad], [_filled(slots, like)], [param])
        return new, _like(kept), [kept[name] for name in rest]

    out_dims = (0, 0, None)
    new, like, others = _mapped(one, param.ndim - 2, out_dims)(grad, param, _like(slots), made)
    kept = dict(zip(rest, others, strict=True)) | dict(zip(slots.like, like, strict=True))
    return new, Slots(kept, slots.like)


def _mapped(fn: Callable[..., Any], times: int, out_dims: Any) -> Callable[..., Any]:
    for _ in range(times):
        fn = torch.vmap(fn, out_dims=out_dims)
    return fn


def _like(slots: Slots) -> list[Tensor]:
    return [slots[name] for name in slots.like]


def _filled(slots: Slots, like: Sequence[Tensor]) -> Slots:
    return Slots({**slots, **dict(zip(slots.like, like, strict=True))}, slots.like)


@contextmanager
def _orthogonalizing_by(fn: Callable[..., Tensor]) -> Iterator[None]:
    module: Any = _muon
    saved = module._zeropower_via_newtonschulz
    module._zeropower_via_newtonschulz = fn
    try:
        yield
    finally:
        module._zeropower_via_newtonschulz = saved
