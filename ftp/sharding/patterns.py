"""Path patterns: which leaves of a tree they match, and what they resemble when they match none."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

Path = tuple[str, ...]
T = TypeVar("T")


def dotted(path: Path) -> str:
    return ".".join(path)


def match_patterns(
    patterns: Mapping[str, T],
    answers: Sequence[tuple[Path, ...]],
    names: Sequence[str],
    where: str,
    failures: list[str],
    check: Callable[[str, Any], str | None] = lambda pattern, value: None,
) -> list[tuple[str, T] | None]:
    """For each leaf, the first pattern that matches it and the pattern's value, or ``None``.

    Args:
        answers: the paths of each leaf; a tied weight has several.
        names: what messages call the leaves.
        where: what messages call the tree.
        failures: gains each pattern that matches nothing, each pair that disagrees on a leaf, and
            each value that ``check`` refuses.
        check: what is wrong with a pattern's value, None if nothing.
    """
    found: list[list[tuple[str, T]]] = [[] for _ in answers]
    for pattern, value in patterns.items():
        if not isinstance(pattern, str):
            failures.append(
                f"{pattern!r} is no pattern; a pattern is a str of path elements joined by '.'."
            )
            continue
        if problem := check(pattern, value):
            failures.append(problem)
            continue
        matched = [
            i for i, paths in enumerate(answers) if any(matches(pattern, path) for path in paths)
        ]
        if not matched:
            failures.append(_matches_nothing(pattern, answers, where))
        for i in matched:
            found[i].append((pattern, value))
    disagreements: dict[tuple[str, str], list[int]] = {}
    for i, given in enumerate(found):
        for other, value in given[1:]:
            if value != given[0][1]:
                disagreements.setdefault((given[0][0], other), []).append(i)
    for (first, second), where_both in disagreements.items():
        i = where_both[0]
        named = several([names[i] for i in where_both])
        tied = (
            f", a tied weight with paths {listed([dotted(p) for p in answers[i]])}"
            if len(answers[i]) > 1
            else ""
        )
        failures.append(
            f"patterns {first!r} and {second!r} disagree for {named}{tied}:"
            f" {patterns[first]} and {patterns[second]}. Give both the same value, or narrow one."
        )
    return [given[0] if given else None for given in found]


def matches(pattern: str, path: Path) -> bool:
    """Whether a pattern matches all elements of ``path``. The empty pattern matches the root, and
    every path matches itself.

    >>> matches("layers.*.w[qkv]", ("layers", "0", "wq"))
    True
    >>> matches("**.weight", ("weight",)), matches("*", ("a", "b"))
    (True, False)
    >>> matches("w[0]", ("w[0]",))
    True
    """
    return _matches(tuple(pattern.split(".")) if pattern else (), path)


def _matches(pattern: Path, path: Path) -> bool:
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(_matches(rest, path[i:]) for i in range(len(path) + 1))
    return (
        bool(path) and (path[0] == head or fnmatchcase(path[0], head)) and _matches(rest, path[1:])
    )


def _matches_nothing(pattern: str, answers: Sequence[tuple[Path, ...]], where: str) -> str:
    paths = [path for paths in answers for path in paths]
    if not paths:
        return f"pattern {pattern!r} matches nothing: {where} is empty."
    message = f"pattern {pattern!r} matches no path of {where}"
    for wider in (f"{pattern}.**", f"**.{pattern}"):
        if n := sum(matches(wider, path) for path in paths):
            return f"{message}; {wider!r} matches {n}."
    return (
        f"{message}; the nearest are {listed(nearest(pattern, [dotted(path) for path in paths]))}."
    )


def nearest(name: str, candidates: Sequence[str], n: int = 3) -> list[str]:
    """The candidates most like ``name``, whatever their case; of those that differ in numbers only,
    the first.

    >>> nearest("layers.*.atn", ["layers.0.attn", "layers.1.attn", "head"], n=2)
    ['layers.0.attn', 'head']
    """
    families: dict[str, str] = {}
    for candidate in candidates:
        families.setdefault(
            ".".join("*" if e.isdigit() else e for e in candidate.split(".")), candidate
        )
    likeness = difflib.SequenceMatcher(b=name.lower())

    def like(family: str) -> tuple[float, str]:
        likeness.set_seq1(family.lower())
        return likeness.ratio(), family

    return [families[family] for family in sorted(families, key=like, reverse=True)[:n]]


def listed(items: Sequence[str]) -> str:
    return ", ".join(map(repr, items))


def several(names: Sequence[str], shown: int = 8) -> str:
    return ", ".join(names[:shown]) + (
        f" and {len(names) - shown} more" if len(names) > shown else ""
    )
