"""Find the placements that hold for an op by trying every cut of its operands and comparing the
results.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.rules.call import Meta, replaced, tensors
from ftp.rules.proof.prove import chunk
from ftp.rules.rule import BoundRule
from ftp.torch_internals.op_types import OpOverload

Fill = Callable[[tuple[int, ...], Any], Tensor]
_TENSORS = (Tensor, Meta)


@dataclass(frozen=True)
class SoundPlacement:
    """A placement over one axis that holds.

    Attributes:
        operands: per operand the dim that is cut; None if it is whole.
        results: per result the dim that is cut, the pending reduction, or None: equal on all ranks.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | str | None, ...]

    def __str__(self) -> str:
        def text(places: Sequence[int | str | None]) -> str:
            return ", ".join(
                "R" if p is None else f"S({p})" if isinstance(p, int) else f"P({p})" for p in places
            )

        return f"{text(self.operands)} -> {text(self.results)}"


def holding(
    kernel: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Any],
    n: int = 2,
) -> list[SoundPlacement]:
    """The placements that hold for one call, over an axis of ``n``; cut operands share one size.

    A kernel may crash on shards that make no sense: call it in a child process (``ftp.child``).

    >>> x, y = torch.arange(8.0).reshape(2, 4), torch.arange(12.0).reshape(4, 3)
    >>> for held in holding(torch.mm, [x, y], {}, [x @ y]):
    ...     print(held)
    S(0), R -> S(0)
    S(1), S(0) -> P(sum)
    R, S(1) -> S(1)
    """
    operands = list(tensors((list(args), dict(kwargs)), Tensor))
    found = []
    for size in sorted({s for x in operands for s in x.shape if s >= n}):
        choices = [[*(d for d, s in enumerate(x.shape) if s == size), None] for x in operands]
        for dims in itertools.product(*choices):
            if all(d is None for d in dims):
                continue
            places = _outcome(kernel, args, kwargs, results, operands, dims, n)
            if places is not None and any(p is not None for p in places):
                found.append(SoundPlacement(dims, places))
    return sorted(found, key=lambda h: [len(operands) if d is None else d for d in h.operands])


def _outcome(
    kernel: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Any],
    operands: Sequence[Tensor],
    dims: Sequence[int | None],
    n: int,
) -> tuple[int | str | None, ...] | None:
    parts = []
    for at in range(n):
        mine = iter(
            [
                x.clone() if d is None else x.narrow(d, *chunk(x.shape[d], n, at)).contiguous()
                for x, d in zip(operands, dims, strict=True)
            ]
        )
        try:
            made = kernel(
                *replaced(list(args), _TENSORS, lambda _, m=mine: next(m)),
                **replaced(dict(kwargs), _TENSORS, lambda _, m=mine: next(m)),
            )
        except Exception:
            return None
        parts.append(tuple(made) if isinstance(made, list | tuple) else (made,))
    if any(len(made) != len(results) for made in parts):
        return None
    places = []
    for whole, *shares in zip(results, *parts, strict=True):
        if not isinstance(whole, Tensor):
            places.append(None)
            continue
        place = _place(whole, shares)
        if place is False:
            return None
        places.append(place)
    return tuple(places)


def _place(whole: Tensor, parts: Sequence[Tensor]) -> int | str | bool | None:
    """The placement under which the parts join to the whole: None (each equals it), the dim to
    concatenate along, or the reduction. False if there is none.
    """
    if any(p.ndim != whole.ndim or p.dtype != whole.dtype for p in parts):
        return False
    if all(_same(p, whole) for p in parts):
        return None
    for d in range(whole.ndim):
        rest = [(*p.shape[:d], *p.shape[d + 1 :]) for p in parts]
        if all(r == (*whole.shape[:d], *whole.shape[d + 1 :]) for r in rest) and _same(
            torch.cat(list(parts), d), whole
        ):
            return d
    if any(p.shape != whole.shape for p in parts) or whole.dtype is torch.bool:
        return False
    reductions = {"sum": torch.add} | (
        {} if whole.is_complex() else {"max": torch.maximum, "min": torch.minimum}
    )
    for name, reduce in reductions.items():
        total = parts[0]
        for p in parts[1:]:
            total = reduce(total, p)
        if _same(total, whole):
            return name
    return False


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not (b.is_floating_point() or b.is_complex()):
        return bool(torch.equal(a, b))
    low = b.dtype not in (torch.float64, torch.complex128)
    return torch.allclose(
        a, b, rtol=1e-4 if low else 1e-8, atol=1e-5 if low else 1e-10, equal_nan=True
    )


def stated(rule: BoundRule) -> set[SoundPlacement]:
    """The contiguous cuts that a rule states: of factors that are major in all their dims."""
    found = set()
    for factor in rule.sizes:
        if factor in rule.whole:
            continue

        def place(dims: Sequence[Sequence[str]], factor: str = factor) -> int | None:
            return next((d for d, dim in enumerate(dims) if factor in dim), None)

        results = [
            at if (at := place(dims)) is not None else pending.get(factor)
            for dims, pending in zip(rule.results, rule.pending, strict=True)
        ]
        found.add(SoundPlacement(tuple(place(dims) for dims in rule.operands), tuple(results)))
    return found


def resized(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Mapping[int, int],
    fill: Fill,
    arguments: bool = True,
) -> tuple[list[Any], dict[str, Any]]:
    """A call of the same form with sizes replaced wherever they occur; each tensor is made anew by
    ``fill(shape, old tensor)``.

    Args:
        arguments: whether to replace sizes in arguments too that are sizes by the op's schema.

    >>> view, zeros = torch.ops.aten.view.default, lambda shape, old: old.new_zeros(shape)
    >>> args, _ = resized(view, [torch.ones(2, 3), [3, 2]], {}, {2: 4}, zeros)
    >>> args[0].shape, args[1]
    (torch.Size([4, 3]), [3, 4])
    """

    def renamed(tree: Any) -> Any:
        if isinstance(tree, list | tuple):
            return type(tree)(map(renamed, tree))
        return (
            sizes.get(tree, tree) if isinstance(tree, int) and not isinstance(tree, bool) else tree
        )

    def argument(name: str, value: Any) -> Any:
        if arguments and name in size_arguments(op):
            return renamed(value)
        return replaced(value, _TENSORS, lambda x: fill(tuple(sizes.get(s, s) for s in x.shape), x))

    names = [a.name for a in op._schema.arguments if not a.kwarg_only]
    return [argument(n, a) for n, a in zip(names, args, strict=False)], {
        k: argument(k, a) for k, a in kwargs.items()
    }


def size_arguments(op: OpOverload) -> set[str]:
    """The names of an op's arguments that are sizes, or lists of sizes."""
    return set(re.findall(r"SymInt(?:\[\d*\])?\??\s+(\w+)", str(op._schema)))
