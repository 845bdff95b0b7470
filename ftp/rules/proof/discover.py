"""Rules for ops that have none: placements found by trial on small calls, and used only if they are
proven on more of them.

The rule depends only on the call's form (seeds are fixed, limits are in processor time), so that
all ranks find the same. If one does not, the ranks' programs differ; ranks compare programs before
they run.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import RuleError
from ftp.rules.bind import bind
from ftp.rules.call import Call, Meta, tensors
from ftp.rules.notation import Notation, parse
from ftp.rules.proof.case import Case, results_of
from ftp.rules.proof.findings import FORMAT, TrialFinding, finding_of, load, save
from ftp.rules.proof.prove import prove
from ftp.rules.proof.sandbox import Ended, apart
from ftp.rules.proof.trial import SoundPlacement, holding, resized, size_arguments
from ftp.rules.rule import Rule
from ftp.torch_internals.op_types import OpOverload

CPU_SECONDS = 10  # per form of a call
SECONDS = 45.0
TIMEOUTS = 2  # after this number in one process no more ops are tried
LARGEST_RANK = 6
OPERANDS = 6
TORCH = (
    "aten",
    "prims",
    "prim",
    "quantized",
    "torch_nn",
)  # ops that change with torch's version only
TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,
)


_known: dict[str, TrialFinding] = {}
_timeouts = 0


def discover(call: Call) -> TrialFinding:
    """The finding of trials for a call: from memory, from the cache on disk, or by running the op
    in a child process for a few seconds.

    Never tried: ops whose result's shape depends on values, that draw random numbers, or that
    change or alias an argument. Set ``FTP_DISCOVERY=0`` to try none, and ``FTP_CACHE`` to use
    another folder than the user's cache.
    """
    if os.environ.get("FTP_DISCOVERY", "1") == "0":
        return TrialFinding(reason="FTP_DISCOVERY is 0")
    if reason := _unfit(call):
        return TrialFinding(reason=reason)
    finding = _found(call, signature(call))
    if finding.stated is not None:
        try:
            bind(finding.stated, [m.shape for m in call.operands], [m.shape for m in call.results])
        except RuleError:
            return TrialFinding(reason="what holds on small calls does not fit this one")
    return finding


def _found(call: Call, key: str) -> TrialFinding:
    global _timeouts
    if key in _known:
        return _known[key]
    cached = load(key)
    if cached is not None and not cached.rule:
        _known[key] = cached
        return cached
    if _timeouts >= TIMEOUTS:
        return TrialFinding(reason=f"trials of {TIMEOUTS} other ops ran too long")
    work = partial(_search, call) if cached is None else partial(_proven_again, call, cached)
    answer = apart(work, CPU_SECONDS, SECONDS)
    if isinstance(answer, Ended):
        _timeouts += answer.timed_out
        finding = TrialFinding(reason=f"the trial ended early: {answer.how}")
    else:
        finding = finding_of(answer)
    if finding != cached and not (isinstance(answer, Ended) and answer.timed_out):
        save(key, finding)
    _known[key] = finding
    return finding


def _unfit(call: Call) -> str:
    """The reason why an op is never tried; empty if it may be."""
    op, schema = call.target, call.target._schema
    if any(tag in op.tags for tag in TAGS):
        return "its result depends on values in shape, or on random numbers"
    if schema.is_mutable or any(
        a.alias_info is not None for a in (*schema.arguments, *schema.returns)
    ):
        return "it changes or aliases an argument"
    if "generator" in {a.name for a in schema.arguments}:
        return "it draws random numbers"
    operands = call.operands
    if (
        not operands
        or len(operands) > OPERANDS
        or any(m.ndim > LARGEST_RANK for m in (*operands, *call.results))
    ):
        return (
            f"it has no tensor operand, more than {OPERANDS} of them, or tensors of more than"
            f" {LARGEST_RANK} dims"
        )
    return ""


def signature(call: Call) -> str:
    """The form of a call: all but the values of its sizes, of which it has which are equal, zero or
    one.
    """
    names: dict[int, str] = {}

    def size(s: Any) -> Any:
        return (
            s
            if not isinstance(s, int) or isinstance(s, bool) or s in (0, 1)
            else names.setdefault(s, f"s{len(names)}")
        )

    def form(tree: Any, sizes: bool) -> Any:
        if isinstance(tree, Meta):
            return [str(tree.dtype), [size(s) for s in tree.shape]]
        if isinstance(tree, list | tuple):
            return [form(t, sizes) for t in tree]
        return names.get(tree, repr(tree)) if sizes and type(tree) is int else repr(tree)

    metas = [form(m, False) for m in (*call.operands, *call.results)]
    fields = [a.name for a in call.target._schema.arguments if not a.kwarg_only]
    known = size_arguments(call.target)
    given = [
        (n, form(a, n in known))
        for n, a in (*zip(fields, call.args, strict=False), *sorted(call.kwargs.items()))
    ]
    return json.dumps(
        [FORMAT, str(call.target), str(call.target._schema), torch.__version__, metas, given]
    )


# In the child.

EVEN = (4, 6, 8, 10, 14, 16, 18)
OTHERS = ((5, 7, 3, 8, 9, 11, 13), (3, 2, 5, 4, 7, 6, 8), (12, 4, 6, 9, 10, 5, 8))
DRAWS = ("normal", "positive", "ties")


def _search(call: Call) -> dict[str, Any]:
    cases = _trials(call)
    if not cases:
        return asdict(
            TrialFinding(
                reason="no small call of it could be made that gives the same twice, new tensors,"
                " and not only zeros"
            )
        )
    few = _one_of_each_size(cases)
    held = [
        h
        for h in holding(cases[0].op, cases[0].args, cases[0].kwargs, cases[0].results)
        if _useful(h)
    ]
    chosen: list[SoundPlacement] = []
    for candidate in sorted(held, key=_preference):
        if all(_apart(candidate, other) for other in chosen) and _holds(
            few, _notation(call, [candidate]), ()
        ):
            chosen.append(candidate)
    linear = tuple(g for g in _groups(call) if _holds(few, _notation(call, []), (g,)))
    while chosen or linear:
        notation = _notation(call, chosen)
        if _holds(cases, notation, linear) and _holds(few, notation, linear, pairs=True):
            return asdict(TrialFinding(str(notation), linear, len(cases)))
        chosen, linear = (chosen[:-1], linear) if chosen else (chosen, ())
    return asdict(TrialFinding(reason="no placement holds on all generated calls"))


def _proven_again(call: Call, cached: TrialFinding) -> dict[str, Any]:
    """The cached finding if it holds, else a new one.

    torch's own ops change with its version only and are tried on few calls; other ops may have
    changed under the same name.
    """
    cases, rule = _trials(call), parse(cached.rule)
    few = _one_of_each_size(cases)
    holds = bool(cases) and _holds(few, rule, cached.linear)
    if holds and call.target.namespace not in TORCH:
        holds = _holds(cases, rule, cached.linear) and _holds(few, rule, cached.linear, pairs=True)
    return asdict(cached) if holds else _search(call)


def _trials(call: Call) -> "list[_Trial]":
    """Small calls of several sizes and values, if the op takes them in double precision and with
    sizes among the arguments replaced too.
    """
    for exact, renamed in itertools.product((True, False), (True, False)):
        make = partial(_Trial.of, call, renamed=renamed, exact=exact)
        cases = [
            t
            for seed in range(2)
            for draw in DRAWS
            if (t := make(sizes=EVEN, draw=draw, seed=seed))
        ]
        if cases:
            return cases + [
                t
                for sizes in OTHERS
                for draw in DRAWS
                if (t := make(sizes=sizes, draw=draw, seed=7))
            ]
    return []


def _one_of_each_size(cases: "Sequence[_Trial]") -> "list[_Trial]":
    by_shapes = {
        tuple(x.shape for x in tensors((t.args, t.kwargs), Tensor)): t for t in reversed(cases)
    }
    return list(by_shapes.values())[::-1]


@dataclass(frozen=True)
class _Trial:
    """A small call of the same form as another."""

    op: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]

    @classmethod
    def of(
        cls, call: Call, sizes: Sequence[int], renamed: bool, exact: bool, draw: str, seed: int
    ) -> "_Trial | None":
        """A trial of a call; None if the op refuses it, or its result differs between two runs or
        cannot tell placements apart.
        """
        distinct = dict.fromkeys(
            s for m in (*call.operands, *call.results) for s in m.shape if s > 1
        )
        if len(distinct) > len(sizes):
            return None
        names = dict(zip(distinct, sizes, strict=False))
        below = min((names[s] for m in call.operands for s in m.shape if s > 1), default=2)
        generator = torch.Generator().manual_seed(seed)
        fill = partial(_drawn, draw=draw, below=below, exact=exact, generator=generator)
        args, kwargs = resized(call.target, call.args, call.kwargs, names, fill, renamed)
        before = [x.clone() for x in tensors((args, kwargs), Tensor)]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                results = results_of(call.target, args, kwargs)
                torch.manual_seed(seed + 1)
                shared = call.target(*args, **kwargs)
        except Exception:
            return None
        again = tuple(shared) if isinstance(shared, list | tuple) else (shared,)
        made = [r for r in again if isinstance(r, Tensor)]
        if (
            len(made) != len(again)
            or len(results) != len(call.results)
            or any(r.layout is not torch.strided for r in made)
        ):
            return None
        if any(r.ndim != m.ndim for r, m in zip(made, call.results, strict=True)):
            return None
        if any(not _equal(a, b) for a, b in zip(results, made, strict=True)):
            return None
        operands = list(tensors((args, kwargs), Tensor))
        if any(not _equal(a, b) for a, b in zip(before, operands, strict=True)):
            return None
        if not all(_tells(r) for r in results):
            return None
        held = {x.untyped_storage().data_ptr() for x in operands if x.numel()}
        if any(r.untyped_storage().data_ptr() in held for r in made if r.numel()):
            return None
        return cls(call.target, args, kwargs, results)


def _drawn(
    shape: tuple[int, ...],
    meta: Meta,
    draw: str,
    below: int,
    exact: bool,
    generator: torch.Generator,
) -> Tensor:
    dtype = meta.dtype
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, below, shape, generator=generator).to(dtype)
    if exact:
        dtype = torch.complex128 if dtype.is_complex else torch.float64
    if draw == "ties":
        return torch.randint(-2, 4, shape, generator=generator).to(dtype)
    if draw == "positive":
        return (torch.rand(shape, dtype=torch.float64, generator=generator) * 0.8 + 0.1).to(dtype)
    real = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=real, generator=generator).to(dtype)


def _equal(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    )


def _tells(result: Any) -> bool:
    """Whether a result tells placements apart: one that is zero or undefined everywhere cannot."""
    return (
        not isinstance(result, Tensor)
        or not result.numel()
        or bool((result.nan_to_num() != 0).any())
    )


def _useful(held: SoundPlacement) -> bool:
    return any(r is not None for r in held.results)


def _preference(held: SoundPlacement) -> tuple[Any, ...]:
    """Sort key: cut results before pending ones before whole ones, then more cut operands, which
    need less communication.
    """
    kinds = [sum(r is None for r in held.results), sum(isinstance(r, str) for r in held.results)]
    return (
        *kinds,
        sum(d is None for d in held.operands),
        [99 if d is None else d for d in held.operands],
    )


def _apart(a: SoundPlacement, b: SoundPlacement) -> bool:
    """Whether two placements cut different dims in every tensor, so that each is its own factor."""
    pairs = [*zip(a.operands, b.operands, strict=True), *zip(a.results, b.results, strict=True)]
    return all(x is None or isinstance(x, str) or x != y for x, y in pairs)


def _notation(call: Call, chosen: Sequence[SoundPlacement]) -> Notation:
    """A factor for each placement; every other dim is whole and each tensor's own."""
    letters: Iterator[str] = (a + b for b in ("", "1", "2") for a in "abcdefghijklmnopqrstuvwxyz")
    named = [next(letters) for _ in chosen]
    whole: list[str] = []

    def dims(places: Callable[[SoundPlacement], Any], ndim: int) -> tuple[tuple[str, ...], ...]:
        out = []
        for d in range(ndim):
            factor = next(
                (
                    f
                    for f, held in zip(named, chosen, strict=True)
                    if places(held) == d and places(held) is not None
                ),
                None,
            )
            if factor is None:
                factor = next(letters)
                whole.append(factor)
            out.append((factor,))
        return tuple(out)

    operands = tuple(
        dims(lambda h, i=i: h.operands[i], m.ndim) for i, m in enumerate(call.operands)
    )
    results = tuple(
        dims(lambda h, i=i: h.results[i] if isinstance(h.results[i], int) else None, m.ndim)
        for i, m in enumerate(call.results)
    )
    pending = tuple(
        tuple(
            (f, op)
            for f, held in zip(named, chosen, strict=True)
            if isinstance(op := held.results[i], str)
        )
        for i in range(len(call.results))
    )
    return Notation(operands, results, frozenset(whole), pending)


def _groups(call: Call) -> list[tuple[int, ...]]:
    """Groups of operands that may be pending sums: each alone, and all floating ones together."""
    floats = [
        i for i, m in enumerate(call.operands) if m.dtype.is_floating_point or m.dtype.is_complex
    ]
    if not all(m.dtype.is_floating_point or m.dtype.is_complex for m in call.results):
        return []
    return [(i,) for i in floats] + ([tuple(floats)] if len(floats) > 1 else [])


def _holds(
    cases: Sequence[_Trial],
    notation: Notation,
    linear: tuple[tuple[int, ...], ...],
    pairs: bool = False,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        for trial in cases:
            rule = Rule(notation, linear)
            prove(Case.of(trial.op, trial.args, trial.kwargs, rule=rule), (2, 3), pairs, generator)
    except Exception:
        return False
    return True
