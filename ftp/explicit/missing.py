"""The content of an ``ExplicitError``: the lines to write, each with its place and bytes."""

import ast
import linecache
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ftp.explicit.suggest import Wanted
from ftp.report.memory import in_bytes
from ftp.sharding.spec import PartitionSpec
from ftp.source import describe_line
from ftp.tracing.calls import Expression, Operand, Output, Site


@dataclass(frozen=True)
class Missing:
    """A line that a program lacks.

    Attributes:
        source: the line that the collectives belong to, as ``file:line  text``.
        line: the line to write.
        nbytes: bytes that a rank sends in the collectives that the line asks for.
        place: where to write it: ``after`` or ``in place of`` the source, ``before`` anything else
            in the function, or in the ``constraints`` of ``ftp.functionalize``.
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
    outputs: dict[tuple[str, int | None, str, bool], list[Wanted]] = defaultdict(list)
    found: list[Missing] = []
    for wanted in suggested:
        site, ndim = wanted.site, ndims[wanted.site]
        if isinstance(site, Operand):
            operand = _operand(site)
            if operand is None:
                words, nbytes = sent(wanted.reshards)
                source = describe_line(site.call.file, site.call.first)
                line, place = f"x = {_constrained('x', wanted, ndim)}", "where x is its operand"
                found.append(Missing(source, line, nbytes, place, words))
                continue
            site = operand
            wanted, ndims = replace(wanted, site=site), {**ndims, site: ndim}
        if isinstance(site, Expression):
            statements[site.file, *_statement(site)].append(wanted)
        elif isinstance(site, Output):
            spec = readable(wanted.pin.spec, ndim)
            key = site.module, site.index, _axes(wanted, spec), wanted.grad
            outputs[key].append(wanted)
    for (file, first, last), group in statements.items():
        words, nbytes = sent([name for wanted in group for name in wanted.reshards])
        line, place = _written(file, first, last, group, ndims)
        source = describe_line(file, min(w.site.first for w in group))  # type: ignore[union-attr]
        found.append(Missing(source, line, nbytes, place, words, file, first, last))
    found.sort(key=lambda m: (m.file, m.first))
    for (pattern, index, text, grad), group in _by_pattern(outputs, ndims).items():
        words, nbytes = sent([name for wanted in group for name in wanted.reshards])
        spec = text if index is None else f"({'None, ' * index}{text}, ...)"
        if index is not None or not grad or ", axes=" in text:
            spec, _, axes = spec.partition(", axes=") if index is None else (spec, "", "")
            more = (f", axes={axes}" if axes else "") + ("" if grad else ", grad=False")
            spec = f"ftp.Constraint(outputs={spec}{more})"
        line = f'constraints={{"{pattern}": {spec}}}'
        place = "in ftp.functionalize"
        found.append(Missing(f"output of module {pattern}", line, nbytes, place, words))
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
            named = {k.arg: k.value for k in node.keywords if k.arg}
            if isinstance(node.func, ast.Attribute):
                named.setdefault("self", node.func.value)
            if isinstance(site.slot, str):
                return _place(named[site.slot], call.file) if site.slot in named else None
            if any(isinstance(a, ast.Starred) for a in node.args):
                return None
            if site.slot < len(node.args):
                return _place(node.args[site.slot], call.file)
    return None


def _place(node: ast.expr, file: str) -> Expression:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return Expression(file, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def _by_pattern(
    outputs: Mapping[tuple[str, int | None, str, bool], list[Wanted]], sites: Iterable[Site]
) -> dict[tuple[str, int | None, str, bool], list[Wanted]]:
    """Constraints on modules; one constraint for all modules of a pattern if these are equal."""
    probed = {site.module for site in sites if isinstance(site, Output)}
    found: dict[tuple[str, int | None, str, bool], list[Wanted]] = defaultdict(list)
    for (path, *rest), group in outputs.items():
        pattern = _pattern(path)
        alike = {p for p in probed if _pattern(p) == pattern}
        is_whole = all((p, *rest) in outputs for p in alike)
        found[pattern if is_whole else path, *rest] += group  # type: ignore[index]
    return found


def _pattern(path: str) -> str:
    """A module's path with ``*`` in place of layers' numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _axes(wanted: Wanted, spec: str) -> str:
    axes = wanted.pin.axes
    if axes is None:
        return spec
    named = repr(axes[0]) if len(axes) == 1 else repr(axes)
    return f"{spec}, axes={named}".replace("'", '"')


def _constrained(text: str, wanted: Wanted, ndim: int) -> str:
    given = _axes(wanted, readable(wanted.pin.spec, ndim))
    return f"ftp.constrain({text}, {given}{'' if wanted.grad else ', grad=False'})"


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
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
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
