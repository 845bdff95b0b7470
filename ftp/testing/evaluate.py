"""Evaluate one op of a certificate's program on one device, as it is and in double precision."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ftp.certification.certificate import Operation, Ref
from ftp.certification.checker import Checker
from ftp.rules.call import replaced


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.to(
        torch.complex128
        if x.is_complex()
        else torch.float64
        if x.is_floating_point()
        else torch.int64
    )


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def evaluate_in_double(
    op: Operation, operands: Sequence[Any], wide: Sequence[Any], checker: Checker
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """An op's results on these operands on one device, in double precision, and the magnitudes that
    a linear op sums.
    """

    def double(tree: Any) -> Any:
        if isinstance(tree, torch.dtype) and (tree.is_floating_point or tree.is_complex):
            return torch.complex128 if tree.is_complex else torch.float64
        return tree

    one = evaluate(op, operands)
    wide = [
        w if x.is_floating_point() or x.is_complex() else x
        for x, w in zip(operands, wide, strict=True)
    ]
    precise = replace(
        op,
        args=replaced(op.args, torch.dtype, double),
        kwargs=replaced(dict(op.kwargs), torch.dtype, double),
    )
    exact, terms = (
        [doubled(x) if isinstance(x, torch.Tensor) else x for x in one],
        [0.0] * len(one),
    )
    if op.ports is not None or not any(
        x.is_floating_point() or x.is_complex() for x in one if isinstance(x, torch.Tensor)
    ):
        return one, exact, terms
    try:
        found = evaluate(precise, wide)
        exact = [doubled(x) if isinstance(x, torch.Tensor) else x for x in found]
        if checker.forms.rule(op).linear:
            found = evaluate(precise, [x.abs() if x.is_floating_point() else x for x in wide])
            terms = [doubled(x).abs() if isinstance(x, torch.Tensor) else 0.0 for x in found]
    except (RuntimeError, NotImplementedError):  # no kernel in double precision
        pass
    return one, exact, terms


def evaluate(op: Operation, operands: Sequence[Any]) -> Sequence[Any]:
    feed = iter(operands)
    args, kwargs = (
        replaced(tuple(op.args), Ref, lambda _: next(feed)),
        replaced(dict(op.kwargs), Ref, lambda _: next(feed)),
    )
    out = op.target(*args, **kwargs)
    return out if isinstance(out, list | tuple) else [out]
