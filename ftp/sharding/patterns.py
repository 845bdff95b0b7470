"""Path patterns: the leaves of a tree that they match, and similar paths if they match none."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

Path = tuple[str, ...]
T = TypeVar("T")


class IfPresent(str):
    """A pattern that may match nothing: for a part that only some models have, such as a bias."""


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
    """For each leaf, the most specific pattern that matches it and the pattern's value, or
    ``None``.

    Args:
        answers: the paths of each leaf; a tied weight has several.
        names: of the leaves, for messages.
        where: the tree's name in messages.
        failures: gets a message for each pattern that matches nothing, each pair of patterns that
            disagree on a leaf while neither is more specific, and each value that ``check``
            refuses.
        check: gives the error message for a pattern's value, or None.
    """
    if not isinstance(patterns, Mapping):
        failures.append(f"{patterns!r} is no dict of patterns for {where}, as {{'layers.*': ...}}.")
        return [None for _ in answers]
    found: list[list[tuple[str, T]]] = [[] for _ in answers]
    for pattern, value in patterns.items():
        if not isinstance(pattern, str):
            failures.append(
                f"{pattern!r} is no pattern; a pattern is a str of path elements joined by '.'."
            )
            continue
        if problem := check(pattern, value) or _joined(pattern, answers, where):
            failures.append(problem)
            continue
        matched = [
            i for i, paths in enumerate(answers) if any(matches(pattern, path) for path in paths)
        ]
        if not matched and not isinstance(pattern, IfPresent):
            failures.append(_matches_nothing(pattern, answers, where))
        for i in matched:
            found[i].append((pattern, value))
    disagreements: dict[tuple[str, str], list[int]] = {}
    found = [_most_specific(given) for given in found]
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


def _joined(pattern: str, answers: Sequence[tuple[Path, ...]], where: str) -> str | None:
    """The failure of a pattern such as ``**norm.weight``: it would match one element, as
    ``*norm.weight`` does, where its author means any number of them.
    """
    own = {element for paths in answers for path in paths for element in path}
    elements = pattern.split(".")
    if not any("**" in one and one != "**" and one not in own for one in elements):
        return None
    apart = [one.replace("**", "*.**.*").removeprefix("*.").removesuffix(".*") for one in elements]
    wider = ".".join(apart)
    n = sum(any(matches(wider, path) for path in paths) for paths in answers)
    return (
        f"pattern {pattern!r} of {where} joins '**', which is any number of path elements, to a"
        " part of one." + (f" {wider!r} matches {n}." if n else " Put a '.' between them.")
    )


def _most_specific(given: list[tuple[str, T]]) -> list[tuple[str, T]]:
    if len(given) < 2:
        return given
    return [one for one in given if not any(narrows(other, one[0]) for other, _ in given)]


def narrows(pattern: str, other: str) -> bool:
    """Whether ``pattern`` is more specific: ``other`` matches all paths that it matches, and more.

    >>> narrows("layers.0.**", "layers.**"), narrows("layers.**", "**.norm")
    (True, False)
    >>> narrows("w[qk]", "w*"), narrows("w", "w")
    (True, False)
    """
    first, second = (tuple(p.split(".")) if p else () for p in (pattern, other))
    return _covers(second, first) and not _covers(first, second)


def _covers(wide: Path, narrow: Path) -> bool:
    """Whether a pattern matches everything that another one can match."""
    if not wide:
        return not narrow
    head, rest = wide[0], wide[1:]
    if head == "**":
        return any(_covers(rest, narrow[i:]) for i in range(len(narrow) + 1))
    if not narrow or narrow[0] == "**":
        return False
    of_element = head == narrow[0] or _covers_text(_tokens(head), _tokens(narrow[0]))
    return of_element and _covers(rest, narrow[1:])


_ANY = "*"
_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)


def _tokens(element: str) -> tuple[Any, ...]:
    """The parts of a path element's pattern: ``_ANY``, or the characters that one place may be, as
    ``(is_all_but, characters)``.
    """
    found: list[Any] = []
    for token in _TOKEN.findall(element):
        if token == "*":
            found.append(_ANY)
        elif token == "?":
            found.append((True, frozenset()))
        elif len(token) > 1:
            found.append(_characters(token[1:-1]))
        else:
            found.append((False, frozenset(token)))
    return tuple(found)


def _characters(inside: str) -> tuple[bool, frozenset[str]]:
    is_all_but = inside.startswith("!")
    inside = inside[is_all_but:]
    found = set()
    while inside:
        if len(inside) > 2 and inside[1] == "-":
            found |= {chr(c) for c in range(ord(inside[0]), ord(inside[2]) + 1)}
            inside = inside[3:]
        else:
            found.add(inside[0])
            inside = inside[1:]
    return is_all_but, frozenset(found)


def _covers_text(wide: tuple[Any, ...], narrow: tuple[Any, ...]) -> bool:
    if not wide:
        return not narrow
    head, rest = wide[0], wide[1:]
    if head is _ANY:
        return any(_covers_text(rest, narrow[i:]) for i in range(len(narrow) + 1))
    if not narrow or narrow[0] is _ANY:
        return False
    (wide_but, ours), (narrow_but, theirs) = head, narrow[0]
    if wide_but:
        covered = ours <= theirs if narrow_but else not ours & theirs
    else:
        covered = not narrow_but and theirs <= ours
    return covered and _covers_text(rest, narrow[1:])


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
    """The candidates most like ``name``, ignoring case; of candidates that differ in numbers only,
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


def listed(items: Iterable[str]) -> str:
    return ", ".join(map(repr, items))


def several(names: Sequence[str]) -> str:
    shown = 8
    return ", ".join(names[:shown]) + (
        f" and {len(names) - shown} more" if len(names) > shown else ""
    )
