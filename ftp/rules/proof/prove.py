"""Proofs of sharding rules: the op on every rank's shards, joined, equals the op on the whole."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.errors import RuleError
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.rules.call import replaced, tensors
from ftp.rules.dims import factors
from ftp.rules.local_op import LocalCut, LocalOp, localize
from ftp.rules.notation import Dims
from ftp.rules.proof.case import Case, as_tuple
from ftp.rules.rule import BoundRule
from ftp.torch_internals.op_types import OpOverload

Sample = tuple[Sequence[Any], Mapping[str, Any]]
UNDEFINED = ("aten.empty", "aten.new_empty")  # results whose values mean nothing


def check_rule(
    op: OpOverload,
    samples: Iterable[Sample],
    *,
    ranks: Sequence[int] = (2, 3),
    pairs: bool = True,
    kernel: Callable[..., Any] | None = None,
    seed: int = 0,
) -> list[str]:
    """Prove the rule that is stated for ``op`` on samples of its arguments.

    For every strategy of the rule the op's local form runs on every rank's shards; the results are
    joined and compared with the op on the whole. Strategies: each factor that may be cut, also as
    the middle of ``[outer, f, inner]``, in uneven and empty shards, and over two axes; each linear
    group with random terms of a sum as operands. Give floats as float64, and small sizes that are
    not all equal.

    Args:
        op: such as ``torch.ops.aten.mm.default``.
        samples: pairs of positional and keyword arguments.
        ranks: sizes of the axis; each factor is also cut over so many that one rank has nothing.
        pairs: also prove every two cuts together.
        kernel: computes the op, if it has no kernel here.

    Returns:
        A line per proven strategy.

    >>> x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    >>> for line in check_rule(torch.ops.aten.t.default, [((x,), {})], ranks=[2], pairs=False):
    ...     print(line)
    m n -> n m: cut m of 2 in 2
    m n -> n m: cut m of 2 in 3
    m n -> n m: cut n of 3 in 2
    m n -> n m: cut n of 3 in 4
    m n -> n m: operands 0 as sums over 2

    Raises:
        RuleError: with the rule, the strategy and the first difference.
    """
    proven: dict[str, None] = {}
    generator = torch.Generator().manual_seed(seed)
    for sample in samples:
        args, kwargs = _checked_sample(op, sample)
        case = Case.of(op, list(args), dict(kwargs), kernel or op)
        proven |= dict.fromkeys(prove(case, ranks, pairs, generator))
    return list(proven)


def _checked_sample(op: OpOverload, sample: Any) -> Sample:
    match sample:
        case (tuple() | list() as args, Mapping() as kwargs):
            return args, kwargs
    raise RuleError(
        f"check_rule takes samples of {op} as pairs (args, kwargs), such as ((x, y), {{}}); one is"
        f" of type {type(sample).__name__}."
    )


def prove(case: Case, ranks: Sequence[int], pairs: bool, generator: torch.Generator) -> list[str]:
    """Every strategy of one call's rule, as ``check_rule`` proves it."""
    proven = []
    _prove(case, (), None)
    for strategy in _strategies(case, ranks, pairs):
        _prove(case, strategy, None)
        proven.append(f"{case.rule}: {'; '.join(map(str, strategy))}")
    for group in case.rule.linear:
        for n in ranks:
            _prove(case, (), (group, n, generator))
            proven.append(f"{case.rule}: operands {', '.join(map(str, group))} as sums over {n}")
        if pairs:
            for strategy in _strategies(case, ranks[:1], pairs=False):
                _prove(case, strategy, (group, ranks[0], generator))
    return proven


@dataclass(frozen=True)
class _TrialCut:
    """Factor ``f``, viewed as ``[outer, size, inner]``, of which ``size`` is cut in ``n``."""

    factor: str
    outer: int
    size: int
    inner: int
    n: int

    def __str__(self) -> str:
        if self.size < 0:
            return f"cut the rest of {self.factor} in {self.n}"
        seen = (
            f" of [{self.outer}, {self.size}, {self.inner}]"
            if self.outer * self.inner != 1
            else f" of {self.size}"
        )
        return f"cut {self.factor}{seen} in {self.n}"


def _strategies(case: Case, ranks: Sequence[int], pairs: bool) -> Iterator[tuple[_TrialCut, ...]]:
    rule = case.rule
    free = sorted(factors(*rule.dims) - rule.whole)
    for factor in free:
        for n in dict.fromkeys((*ranks, _leaves_one_empty(rule.sizes[factor]))):
            yield from ((cut,) for cut in _cuts(factor, rule.sizes[factor], n))
    if pairs:
        for a, b in itertools.combinations_with_replacement(free, 2):
            n, m = ranks[0], ranks[-1]
            first = _TrialCut(a, 1, rule.sizes[a], 1, n)
            second = _TrialCut(b, 1, rule.sizes[b] if a != b else -1, 1, m)
            yield first, second
            outer = _TrialCut(a, 2, rule.sizes[a] // 2, 1, n)
            if rule.sizes[a] and rule.sizes[a] % 2 == 0:
                yield outer, second


def _leaves_one_empty(size: int) -> int:
    """The smallest number of ranks whose last one holds nothing of ``size``.

    >>> [_leaves_one_empty(size) for size in (1, 2, 3, 4, 9)]
    [2, 3, 4, 3, 4]
    """
    return next(n for n in itertools.count(2) if not chunk(size, n, n - 1)[1])


def _cuts(factor: str, size: int, n: int) -> Iterator[_TrialCut]:
    yield _TrialCut(factor, 1, size, 1, n)
    for outer, inner in ((2, 1), (1, 2), (2, 2)):
        if size > outer * inner and size % (outer * inner) == 0:
            yield _TrialCut(factor, outer, size // (outer * inner), inner, n)


@dataclass
class _RankFactors:
    """One rank's part of each factor: the positions that it holds, and the cuts that led to it."""

    held: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[str, list[LocalCut]] = field(default_factory=dict)
    levels: list[tuple[int, int, int]] = field(default_factory=list)

    def cut(self, cut: _TrialCut, at: int, start: Any, whole: int) -> None:
        held = self.held.get(cut.factor, torch.arange(whole))
        outer, inner = (cut.outer, cut.inner) if cut.size >= 0 else (1, 1)
        size = len(held) // (outer * inner)
        begin, length = chunk(size, cut.n, at)
        self.held[cut.factor] = held.reshape(outer, size, inner)[:, begin : begin + length].reshape(
            -1
        )
        self.cuts.setdefault(cut.factor, []).append(
            LocalCut(outer, size, inner, start(begin), length)
        )
        self.levels.append((outer, length, inner))


def chunk(size: int, n: int, at: int) -> tuple[int, int]:
    """Start and length of part ``at`` of ``size`` cut in ``n`` as ``torch.chunk`` does: equal
    parts, the last ones smaller or empty.

    >>> [chunk(5, 4, at) for at in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // n)
    start = min(at * step, size)
    return start, min(step, size - start)


def _prove(
    case: Case,
    strategy: Sequence[_TrialCut],
    pending: tuple[tuple[int, ...], int, torch.Generator] | None,
) -> None:
    operands = list(tensors((case.args, case.kwargs), Tensor))
    how = [str(cut) for cut in strategy]
    try:
        if pending is None:
            results = _sharded(case, strategy, operands)
        else:
            group, n, generator = pending
            how.append(f"operands {', '.join(map(str, group))} as sums over {n}")
            parts = {i: random_sum(operands[i], n, generator) for i in group}
            shares = [
                _sharded(
                    case,
                    strategy,
                    [parts[i][r] if i in parts else x for i, x in enumerate(operands)],
                )
                for r in range(n)
            ]
            results = tuple(
                None if r[0] is None else sum(r[1:], r[0]) for r in zip(*shares, strict=True)
            )
        _compare(case, results)
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in operands)
        rest = [a for a in (*case.args, *case.kwargs.items()) if not isinstance(a, Tensor)]
        raise RuleError(
            f"The rule {str(case.rule)!r} of {case.op} does not hold for operands of shapes"
            f" {shapes or 'none'} (other arguments {rest}),"
            f" {'; '.join(how) or 'nothing cut'}:\n"
            f"  {type(error).__name__}: {error}"
        ) from error


def _sharded(
    case: Case, strategy: Sequence[_TrialCut], operands: Sequence[Tensor]
) -> tuple[Any, ...]:
    """The op's results, computed on all ranks' shards and joined."""
    coordinates = itertools.product(*(range(cut.n) for cut in strategy))
    return _join(case.rule, strategy, {c: _run(case, strategy, c, operands) for c in coordinates})


def _run(
    case: Case,
    strategy: Sequence[_TrialCut],
    coordinate: tuple[int, ...],
    operands: Sequence[Tensor],
) -> tuple[_RankFactors, tuple[Any, ...]]:
    """The op's local form on one rank's shards."""
    rule, graph, env = case.rule, fx.Graph(), {}

    def given(value: Any) -> fx.Node:
        node = graph.placeholder(f"x{len(env)}")
        env[node] = value
        return node

    rank = _RankFactors()
    for cut, at in zip(strategy, coordinate, strict=True):
        rank.cut(cut, at, given, rule.sizes[cut.factor])
    sizes = {f: len(rank.held[f]) if f in rank.held else s for f, s in rule.sizes.items()}
    nodes = iter(
        [
            given(_shard(x, dims, rule.sizes, rank.held))
            for x, dims in zip(operands, rule.operands, strict=True)
        ]
    )
    args, kwargs = (
        replaced(case.args, Tensor, lambda _: next(nodes)),
        replaced(case.kwargs, Tensor, lambda _: next(nodes)),
    )
    device = next((x.device for x in operands), torch.device("cpu"))
    op = LocalOp(graph, case.op, tuple(args), kwargs, rule, sizes, rank.cuts, device)
    made = localize(op)
    for node in graph.nodes:
        if node.op == "call_function":
            a, k = mapped_arguments(node, env.__getitem__)
            env[node] = (case.kernel if node.target is case.op else node.target)(*a, **k)
            if str(node.target).startswith(UNDEFINED):
                env[node].zero_()
    value = (
        tuple(None if m is None else env[m] for m in made)
        if isinstance(made, tuple)
        else as_tuple(env[made])
    )
    for r, dims in zip(value, rule.results, strict=True):
        shape = tuple(math.prod(sizes[f] for f in dim) for dim in dims)
        if isinstance(r, Tensor) and tuple(r.shape) != shape:
            raise AssertionError(
                f"rank {coordinate} makes a result of shape {tuple(r.shape)}, not {shape}"
            )
    return rank, value


def _shard(x: Tensor, dims: Dims, sizes: Mapping[str, int], held: Mapping[str, Tensor]) -> Tensor:
    factors = [f for dim in dims for f in dim]
    part = x.reshape([sizes[f] for f in factors])
    for d, f in enumerate(factors):
        if f in held:
            part = part.index_select(d, held[f].to(x.device))
    shape = [math.prod(len(held[f]) if f in held else sizes[f] for f in dim) for dim in dims]
    return part.reshape(shape).contiguous().clone()


def _join(
    rule: BoundRule,
    strategy: Sequence[_TrialCut],
    ranks: dict[tuple[int, ...], tuple[_RankFactors, tuple[Any, ...]]],
) -> tuple[Any, ...]:
    """All ranks' results as one, the last axis first."""
    joined = {c: values for c, (_, values) in ranks.items()}
    levels = {c: rank.levels for c, (rank, _) in ranks.items()}
    for axis in reversed(range(len(strategy))):
        factor, n = strategy[axis].factor, strategy[axis].n
        shorter = {}
        for c in [c for c in joined if c[axis] == 0]:
            group = [(*c[:axis], i) for i in range(n)]
            values = []
            for index, dims in enumerate(rule.results):
                parts = [joined[g][index] for g in group]
                cuts = [levels[(*g, *(0,) * (len(strategy) - axis - 1))][axis] for g in group]
                sizes = _sizes_within(
                    rule, strategy[:axis], ranks[(*c, *(0,) * (len(strategy) - axis - 1))][0]
                )
                values.append(
                    _joined(parts, cuts, dims, factor, rule.pending[index].get(factor), sizes)
                )
            shorter[c[:axis]] = tuple(values)
        joined = shorter
    return joined[()]


def _sizes_within(
    rule: BoundRule, strategy: Sequence[_TrialCut], rank: _RankFactors
) -> dict[str, int]:
    sizes = dict(rule.sizes)
    for cut, (outer, length, inner) in zip(strategy, rank.levels, strict=False):
        sizes[cut.factor] = outer * length * inner
    return sizes


def _joined(
    parts: Sequence[Any],
    cuts: Sequence[tuple[int, int, int]],
    dims: Dims,
    factor: str,
    op: str | None,
    sizes: Mapping[str, int],
) -> Any:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    factors = [f for dim in dims for f in dim]
    if factor in factors:
        at = factors.index(factor)
        seen = []
        for part, (outer, length, inner) in zip(parts, cuts, strict=True):
            shape = [sizes[f] for f in factors]
            seen.append(part.reshape([*shape[:at], outer, length, inner, *shape[at + 1 :]]))
        return torch.cat(seen, at + 1).reshape([math.prod(sizes[f] for f in dim) for dim in dims])
    if op is not None:
        reduce = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
        total = parts[0]
        for part in parts[1:]:
            total = reduce(total, part)
        return total
    for part in parts[1:]:
        torch.testing.assert_close(
            part,
            parts[0],
            equal_nan=True,
            msg=lambda m: f"ranks differ in a result that none of them holds a part of: {m}",
        )
    return parts[0]


def _compare(case: Case, results: Sequence[Any]) -> None:
    for index, (whole, joined) in enumerate(zip(case.results, results, strict=True)):
        if not isinstance(whole, Tensor):
            continue
        if str(case.op).startswith(UNDEFINED):
            assert whole.shape == joined.shape and whole.dtype == joined.dtype, (
                whole.shape,
                joined.shape,
            )
            continue
        torch.testing.assert_close(
            joined,
            whole,
            equal_nan=True,
            check_stride=False,
            msg=lambda m, i=index: f"result {i}: {m}",
        )


def random_sum(x: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    """``n`` tensors that add up to ``x``: floats of its order of magnitude, integers of any size,
    which wrap around. A bool has its True on one of them.
    """
    if x.dtype is torch.bool:
        holder = torch.randint(n, x.shape, generator=generator).to(x.device)
        return [x & (holder == rank) for rank in range(n)]
    if x.dtype.is_floating_point or x.dtype.is_complex:
        parts = [
            torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device)
            for _ in range(n - 1)
        ]
    else:
        of = torch.iinfo(x.dtype)
        parts = [
            torch.randint(of.min, of.max, x.shape, generator=generator).to(x.device, x.dtype)
            for _ in range(n - 1)
        ]
    return [*parts, x - sum(parts[1:], parts[0])]
