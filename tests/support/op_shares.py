"""How much of one device's work each of two ranks does, for ops of PyTorch's database whose inputs
are cut where the op can be split.

Whether it can is found by trial, not taken from the rules: cut in two, the plain op's results on
the parts make up its result on the whole.
"""

import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

import op_sweep
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ftp
from ftp import P
from ftp.planning.plan import Plan
from ftp.rules.op_kinds import VIEWS, is_matmul
from ftp.rules.proof.sandbox import Ended, apart
from ftp.rules.proof.trial import SoundPlacement, holding
from ftp.sharding.layout import nominal

MESH = ftp.AbstractMesh((2,), ("x",))
LIMITS = {"cpu_seconds": 20, "seconds": 120.0}


def share_of(name: str, sample: Any) -> float | None:
    """The share that the busier rank has; None where no cut of the sample's inputs holds, or the
    op is random or not planned.
    """
    leaves, tree = pytree.tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    info = op_sweep.database()[name]

    def apply(*values: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        given, args, kwargs = pytree.tree_unflatten(filled, tree)
        return [
            t for t in pytree.tree_leaves(info.op(given, *args, **kwargs)) if isinstance(t, Tensor)
        ]

    for given in (_even([leaves[i] for i in at]), [leaves[i].detach() for i in at]):
        found = apart(lambda given=given: _cut(apply, given), **LIMITS)
        if found and not isinstance(found, Ended):
            specs = tuple(
                P(*("x" if d == cut else None for d in range(x.ndim)))
                for x, cut in zip(given, found, strict=True)
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    cut, whole = (ftp.lower(apply, MESH, s, *given).plan for s in (specs, P()))
                except Exception:  # refused, or reported by the sweep
                    return None
            return _share(cut, whole)
    return None


def _even(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Odd sizes as the next even ones, so that halves are halves; values drawn from those that
    were there.
    """
    out = []
    for x in tensors:
        shape = [s + s % 2 if s > 1 else s for s in x.shape]
        generator = torch.Generator().manual_seed(0)
        count = math.prod(shape)
        at = (
            torch.randint(0, x.numel(), (count,), generator=generator)
            if x.numel()
            else torch.zeros(0, dtype=torch.int64)
        )
        out.append(x.detach().reshape(-1)[at].reshape(shape) if x.numel() else x.detach())
    return out


def _cut(apply: Any, given: Sequence[Tensor]) -> list[int | None] | None:
    """The dims to cut in two: of the placements that hold, the one with the fewest results
    pending or whole.
    """
    torch.manual_seed(0)
    first, again = apply(*(x.clone() for x in given)), apply(*(x.clone() for x in given))
    if any(op_sweep._difference(a, b, b) for a, b in zip(first, again, strict=True)):
        return None

    def preference(held: SoundPlacement) -> tuple[int, int, str]:
        whole = sum(r is None for r in held.results)
        return (
            whole + sum(isinstance(r, str) for r in held.results),
            sum(d is None for d in held.operands),
            str(held),
        )

    even = [
        h
        for h in holding(lambda *values: tuple(apply(*values)), list(given), {}, first)
        if all(d is None or x.shape[d] % 2 == 0 for d, x in zip(h.operands, given, strict=True))
    ]
    return list(min(even, key=preference).operands) if even else None


def _share(cut: Plan, whole: Plan) -> float | None:
    """Work per rank of the plan over that of one device: operations of matmuls; elements where
    there are none.
    """
    for matmuls in (True, False):
        one = _work(whole, matmuls)
        if one:
            return _work(cut, matmuls) / one
    return None


def _work(plan: Plan, matmuls: bool) -> float:
    total = 0
    for node in plan.graph.nodes:
        if (
            node.kind != "op"
            or node.target in VIEWS
            or (matmuls is not is_matmul(node.target) and matmuls)
        ):
            continue
        sizes = {f: nominal(s) for f, s in node.sizes.items()}
        if matmuls:
            total += math.prod(sizes.values())
        else:
            total += sum(
                math.prod(sizes[f] for dim in dims for f in dim)
                for dims in (*node.rule.operands, *node.rule.results)
            )
    return total


def shares(names: Sequence[str], count: int = 2) -> dict[str, float]:
    """Per op the median over its samples."""
    found = {}
    for name in names:
        random.seed(0)
        given = [share_of(name, sample) for _, sample in op_sweep.samples(name, count)]
        known = sorted(s for s in given if s is not None)
        if known:
            found[name] = known[len(known) // 2]
    return found
