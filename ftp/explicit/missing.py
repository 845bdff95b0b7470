"""The content of an ``ExplicitError``: the lines to write, each with its place and bytes."""

import ast
import linecache
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ftp.dataclass import dataclass
from ftp.explicit.suggest import Wanted
from ftp.report.memory import in_bytes
from ftp.sharding.spec import PartitionSpec
from ftp.source import describe_line
from ftp.tracing.calls import Expression, Operand, Output, Site

_OutputKey = tuple[str, int | None, str, tuple[str, ...]]  # module, output's index, spec, options


@dataclass(frozen=True)
class Missing:
    """A line that a program lacks.

    Attributes:
        source: the line that the collectives belong to, as ``file:line  text``.
        line: the line to write.
        nbytes: bytes that a rank sends in the collectives that the line asks for.
        place: where to write it: ``after`` or ``in place of`` the source, or another place in
            words, such as ``in ftp.functionalize``.
        collectives: the collectives that it asks for, such as ``all_reduce over tp``.
        file: the file of the statement; ``first`` and ``last`` are its line numbers. "" and 0 if
            there is none.
    """

    source: str
    line: str
    nbytes: int
    place: str
    collectives: tuple[str, ...] = ()
    file: str = ""
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        sent = ", ".join(self.collectives)
        where = {"after": "after it", "in place of": "in its place"}.get(self.place, self.place)
        line = self.line.replace("\n", "\n      ")
        return f"{self.source}\n    {sent}, {in_bytes(self.nbytes)}; write {where}:\n      {line}"


def lines_of(
    suggested: Sequence[Wanted],
    ndims: Mapping[Site, int],
    sent: Callable[[Sequence[str]], tuple[tuple[str, ...], int]],
) -> list[Missing]:
    """The lines that write constraints, in the order of the source.

    Args:
        ndims: per place, the number of dims of its value.
        sent: from names of reshards to their collectives, in words, and the bytes.
    """
    statements: dict[tuple[str, int, int], list[Wanted]] = defaultdict(list)
    outputs: dict[_OutputKey, list[Wanted]] = defaultdict(list)
    found: list[Missing] = []

    def add(source: str, line: str, place: str, group: Sequence[Wanted], *at: Any) -> None:
        words, nbytes = sent([name for wanted in group for name in wanted.reshards])
        found.append(Missing(source, line, nbytes, place, words, *at))

    for wanted in suggested:
        site, ndim = wanted.site, ndims[wanted.site]
        if isinstance(site, Operand):
            operand = _operand(site)
            if operand is None:
                source = describe_line(site.call.file, site.call.first)
                line = f"x = {_constrained('x', wanted, ndim)}"
                add(source, line, "where x is its operand", [wanted])
                continue
            site = operand
            wanted, ndims = replace(wanted, site=site), {**ndims, site: ndim}
        if isinstance(site, Expression):
            statements[site.file, *_statement(site)].append(wanted)
        elif isinstance(site, Output):
            key = site.module, site.index, readable(wanted.pin.spec, ndim), _options(wanted)
            outputs[key].append(wanted)
    for (file, first, last), group in statements.items():
        line, place = _written(file, first, last, group, ndims)
        source = describe_line(file, min(w.site.first for w in group))  # type: ignore[union-attr]
        add(source, line, place, group, file, first, last)
    found.sort(key=lambda m: (m.file, m.first))
    for (pattern, index, spec, options), group in _by_pattern(outputs, ndims).items():
        if index is not None:
            spec = f"({'None, ' * index}{spec}, ...)"
        if index is not None or options:
            spec = f"ftp.Constraint({', '.join([f'outputs={spec}', *options])})"
        line = f'constraints={{"{pattern}": {spec}}}'
        add(f"output of module {pattern}", line, "in ftp.functionalize", group)
    return found


def readable(spec: PartitionSpec, ndim: int) -> str:
    """A spec with an entry for each dim, as source code.

    >>> readable(PartitionSpec("dp"), 3)
    'P("dp", None, None)'
    """
    entries = [*spec, *(None,) * (ndim - len(spec))]
    return f"P({', '.join(repr(e) for e in entries)})".replace("'", '"')


def _operand(site: Operand) -> Expression | None:
    """The expression that is an operand."""
    call = site.call
    statement = _node_around(call)
    for node in ast.walk(statement) if statement is not None else ():
        if not isinstance(node, ast.expr) or _place(node, call.file) != call:
            continue
        if isinstance(node, ast.BinOp):
            return _place(node.left if site.slot == "self" else node.right, call.file)
        if isinstance(node, ast.Call):
            given: dict[Any, ast.expr] = {k.arg: k.value for k in node.keywords if k.arg}
            if isinstance(node.func, ast.Attribute):
                given.setdefault("self", node.func.value)
            if not any(isinstance(a, ast.Starred) for a in node.args):
                given.update(enumerate(node.args))
            return _place(given[site.slot], call.file) if site.slot in given else None
    return None


def _place(node: ast.expr, file: str) -> Expression:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return Expression(file, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def _by_pattern(
    outputs: Mapping[_OutputKey, list[Wanted]], sites: Iterable[Site]
) -> dict[_OutputKey, list[Wanted]]:
    """Constraints on modules; one for a pattern if all its modules need the same constraint."""
    probed = {site.module for site in sites if isinstance(site, Output)}
    found: dict[_OutputKey, list[Wanted]] = defaultdict(list)
    for (path, *rest), group in outputs.items():
        pattern = _pattern(path)
        is_whole = all((p, *rest) in outputs for p in probed if _pattern(p) == pattern)
        found[pattern if is_whole else path, *rest] += group  # type: ignore[index]
    return found


def _pattern(path: str) -> str:
    """A module's path with ``*`` in place of layers' numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _options(wanted: Wanted) -> tuple[str, ...]:
    """The keyword arguments of a constraint, as source code."""
    axes = wanted.pin.axes
    named = repr(axes[0] if axes is not None and len(axes) == 1 else axes).replace("'", '"')
    return (
        *(() if axes is None else (f"axes={named}",)),
        *(() if wanted.grad else ("grad=False",)),
    )


def _constrained(text: str, wanted: Wanted, ndim: int) -> str:
    given = [text, readable(wanted.pin.spec, ndim), *_options(wanted)]
    return f"ftp.constrain({', '.join(given)})"


def _statement(site: Expression) -> tuple[int, int]:
    """The first and last line of the innermost statement around an expression; for a compound
    statement, those of the expression.
    """
    node = _node_around(site)
    if node is None or hasattr(node, "body"):
        return site.first, site.last
    return node.lineno, node.end_lineno or node.lineno


def _node_around(site: Expression) -> ast.stmt | None:
    try:
        tree = ast.parse("".join(linecache.getlines(site.file)))
    except SyntaxError:
        return None
    around = None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.stmt)
            and node.lineno <= site.first
            and site.last <= (node.end_lineno or node.lineno)
            and (around is None or node.lineno >= around.lineno)
        ):
            around = node
    return around


def _written(
    file: str, first: int, last: int, group: Sequence[Wanted], ndims: Mapping[Site, int]
) -> tuple[str, str]:
    """The line to write for a statement, and its place."""
    sites: list[Expression] = [w.site for w in group]  # type: ignore[misc]
    if len(group) == 1 and (name := _assigned(sites[0])):
        return f"{name} = {_constrained(name, group[0], ndims[sites[0]])}", "after"
    lines = [linecache.getline(file, n).encode() for n in range(first, last + 1)]
    starts = list(accumulate(map(len, lines), initial=0))
    text = b"".join(lines)
    edits: list[tuple[int, bytes]] = []
    for wanted, site in zip(group, sites, strict=True):
        start = starts[site.first - first] + site.start
        stop = starts[site.last - first] + site.stop
        before, _, after = _constrained("\0", wanted, ndims[site]).partition("\0")
        edits += [(start, before.encode()), (stop, after.encode())]
    for at, new in sorted(edits, key=lambda e: -e[0]):
        text = text[:at] + new + text[at:]
    indent = len(lines[0]) - len(lines[0].lstrip())
    kept = [line[indent:] if not line[:indent].strip() else line for line in text.splitlines()]
    return b"\n".join(kept).decode().rstrip(), "in place of"


def _assigned(site: Expression) -> str | None:
    """The variable that takes exactly the expression's value."""
    node = _node_around(site)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target = node.targets[0]
    is_all = isinstance(target, ast.Name) and _place(node.value, site.file) == site
    return target.id if is_all else None  # type: ignore[union-attr]
