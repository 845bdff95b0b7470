"""Guards: conditions on values whose statement only raises or warns, such as ``assert c``,
``if c: raise ...``, ``if not c: warnings.warn(...)``.

When code asks for the value of a condition, its source tells whether the statement is a guard. If
it is, the trace takes the value with which the function continues.
"""

import ast
import dis
import functools
import linecache
import sys
import warnings
from types import CodeType, FrameType

from ftp.dataclass import dataclass
from ftp.source import is_ours, is_users

SourcePosition = tuple[int | None, int | None, int | None, int | None]  # line, last line, columns


@dataclass(frozen=True)
class Guard:
    """The assumed value of a guard's condition.

    Attributes:
        value: the bool that the code asks for; None where it asks for a number to compare.
        claim: the assumption in the words of the code; "" where both values give the same result.
    """

    value: bool | None
    claim: str


def guard_at(frame: FrameType) -> Guard | None:
    """The guard whose condition ``frame`` evaluates now; None if the statement is no guard, or if a
    caller catches the guard's error and continues.
    """
    found, caller = _guard(frame.f_code, frame.f_lasti), frame
    while found is not None and found.claim and caller is not None:
        if caller.f_globals.get("__name__") == "ftp.tracing.trace":
            break
        is_read = caller is frame or is_users(caller.f_code)
        if is_read and _is_caught(caller.f_code, caller.f_lasti):
            return None
        caller = caller.f_back
    return found


@functools.lru_cache(maxsize=4096)
def _is_caught(code: CodeType, instruction: int) -> bool:
    position = position_of(code, instruction)
    if position is None or None in position:
        return False
    source = source_of(code)
    within = [part for part in _run_later(source) if spans(part, position)]
    return any(
        spans(statement, position) and not any(spans(statement, span_of(part)) for part in within)
        for statement in _caught(source)
    )


@functools.lru_cache(maxsize=4096)
def _guard(code: CodeType, instruction: int) -> Guard | None:
    position = position_of(code, instruction)
    if position is None or None in position:
        return None
    for statement in _statements(source_of(code)):
        if not spans(statement.test, position) and span_of(statement) != position:
            continue
        wanted = _wanted(statement)
        if wanted is None:
            return None
        value, warns_only = wanted
        found = _asked(statement, position, value)
        if found is None:
            return None
        claim = "" if warns_only else f"{ast.unparse(statement.test)} is {value}"
        return Guard(None if found == "number" else found == "true", claim)
    return None


def asking_frame() -> FrameType:
    """The frame that calls ``len(x)``, whose ``__len__`` is the caller."""
    frame = sys._getframe(2)
    # Of symbolic sizes the user's code calls a function of ours.
    return frame.f_back if frame.f_back and is_ours(frame.f_code.co_filename) else frame


def asks_whether_any(frame: FrameType) -> bool:
    """Whether the ``len(x)`` that ``frame`` calls now only tells whether there are any, as in
    ``if len(x) > 0`` and ``if not len(x)``, and no guard is made of it.
    """
    return _is_of_none(frame.f_code, frame.f_lasti) and guard_at(frame) is None


@functools.lru_cache(maxsize=4096)
def _is_of_none(code: CodeType, instruction: int) -> bool:
    position = position_of(code, instruction)
    return position is not None and asks_for_any(code, position)


def asks_for_any(code: CodeType, position: SourcePosition) -> bool:
    """Whether at ``position`` there is a ``len(...)`` that only tells whether there are any."""
    return position in _asking_for_any(source_of(code))


@functools.lru_cache(maxsize=256)
def _asking_for_any(source: str) -> set[SourcePosition]:
    """The places of calls ``len(...)`` of which a file's code asks only whether they are zero."""
    nodes = nodes_of(source)
    asked: list[ast.expr] = [n.test for n in nodes if isinstance(n, ast.If | ast.While | ast.IfExp)]
    asked += [n.operand for n in nodes if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not)]
    asked += [
        n.left
        for n in nodes
        if isinstance(n, ast.Compare)
        and len(n.ops) == 1
        and (type(n.ops[0]), ast.unparse(n.comparators[0])) in _COMPARED_TO_NONE
    ]
    return {span_of(n) for n in asked if isinstance(n, ast.Call) and ast.unparse(n.func) == "len"}


_COMPARED_TO_NONE = {
    (ast.Gt, "0"), (ast.Eq, "0"), (ast.NotEq, "0"), (ast.GtE, "1"), (ast.Lt, "1"),
}  # fmt: skip


def line_of_identity(code: CodeType) -> int | None:
    """The first line of a function that asks whether something ``is True`` or ``is False``."""
    lines = {line for *_, line in code.co_lines() if line is not None}
    return min(lines & _asking_for_identity(source_of(code)), default=None)


@functools.lru_cache(maxsize=256)
def _asking_for_identity(source: str) -> set[int]:
    return {
        n.lineno
        for n in nodes_of(source)
        if isinstance(n, ast.Compare)
        and any(isinstance(op, ast.Is | ast.IsNot) for op in n.ops)
        and any(isinstance(c, ast.Constant) and type(c.value) is bool for c in n.comparators)
    }


def position_of(code: CodeType, instruction: int) -> SourcePosition | None:
    """The position of the expression whose value is asked for. A conditional jump asks for the
    value of the instruction before it; its own position is that of the statement.
    """
    found: SourcePosition | None = None
    for each in dis.get_instructions(code):
        if each.offset > instruction:  # the instruction may be a cache of the one before
            break
        is_jump = "JUMP" in each.opname or each.opname == "TO_BOOL"
        if not is_jump and each.positions is not None:
            found = tuple(each.positions)  # type: ignore[assignment]
    return found


def source_of(code: CodeType) -> str:
    """The text of a code's file; "" if the file has changed since the code was compiled."""
    linecache.checkcache(code.co_filename)
    source = "".join(linecache.getlines(code.co_filename))
    # pytest rewrites the functions of tests that assert.
    is_rewritten = any(name.startswith("@py") for name in (*code.co_varnames, *code.co_names))
    return source if is_rewritten or code in _codes(source) else ""


@functools.lru_cache(maxsize=256)
def _codes(source: str) -> set[CodeType]:
    """The code of all functions of a file, and of the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [compile(source, "", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return set()
    for code in found:  # the loop appends to it
        found += [x for x in code.co_consts if isinstance(x, CodeType)]
    return {*found}


@functools.lru_cache(maxsize=256)
def nodes_of(source: str) -> list[ast.AST]:
    try:
        return [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError):
        return []


@functools.lru_cache(maxsize=256)
def _statements(source: str) -> list[ast.If | ast.Assert]:
    """The conditional statements of a file, inner ones first."""
    return [n for n in nodes_of(source)[::-1] if isinstance(n, ast.If | ast.Assert)]


@functools.lru_cache(maxsize=256)
def _caught(source: str) -> list[ast.stmt]:
    """The statements of a file whose errors are caught, so that the function continues."""
    return [
        statement
        for n in nodes_of(source)
        if (
            any(not isinstance(handler.body[-1], ast.Raise) for handler in n.handlers)
            if isinstance(n, ast.Try | ast.TryStar)
            else isinstance(n, ast.With)
            and any(_is_call(i.context_expr, _SUPPRESS) for i in n.items)
        )
        for statement in n.body
    ]


@functools.lru_cache(maxsize=256)
def _run_later(source: str) -> list[ast.stmt | ast.expr]:
    """The bodies of a file's functions: they run where they are called."""
    functions = [
        n.body
        for n in nodes_of(source)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    return [part for body in functions for part in (body if isinstance(body, list) else [body])]


def _wanted(statement: ast.If | ast.Assert) -> tuple[bool, bool] | None:
    """The value of its test with which a statement lets the function go on, and whether the other
    value only warns; None where the statement does more.
    """
    if isinstance(statement, ast.Assert):
        return True, False
    if _raises(statement.body):
        return False, False
    if statement.orelse and _raises(statement.orelse):
        return True, False
    is_warning = [isinstance(s, ast.Expr) and _is_call(s.value, _WARN) for s in statement.body]
    return (False, True) if not statement.orelse and all(is_warning) else None


def _raises(body: list[ast.stmt]) -> bool:
    """Whether the statements do nothing but raise an error."""
    return bool(body) and isinstance(body[-1], ast.Raise) and all(map(_is_plain, body[:-1]))


def _is_plain(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr)


_WARN = ("warn", "warning", "warning_once", "warn_once")
_SUPPRESS = ("suppress",)


def _is_call(node: ast.expr, names: tuple[str, ...]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in names


def spans(node: ast.expr | ast.stmt, position: SourcePosition) -> bool:
    line, end_line, column, end_column = position
    return (node.lineno, node.col_offset) <= (line, column) and (end_line, end_column) <= (
        node.end_lineno,
        node.end_col_offset,
    )


def span_of(node: ast.expr | ast.stmt) -> SourcePosition:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _asked(statement: ast.If | ast.Assert, position: SourcePosition, value: bool) -> str | None:
    """The value of the expression at ``position`` that makes a statement's test ``value``: "true",
    "false", or the "number" that a comparison reads; None where it is not determined.
    """
    if span_of(statement) != position:
        return asked_in(statement.test, position, value)
    # pytest rewrites an assert part by part; each part must be true.
    parts = {type(n) for n in ast.walk(statement.test)}
    is_sure = isinstance(statement, ast.Assert) and not parts & {ast.Or, ast.IfExp, ast.Lambda}
    return "true" if is_sure else None


def asked_in(node: ast.expr, position: SourcePosition, value: bool) -> str | None:
    if span_of(node) == position and not isinstance(node, ast.BoolOp):
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        return "true" if value != is_not else "false"  # ``not`` asks for its operand
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return asked_in(node.operand, position, not value)
    if isinstance(node, ast.BoolOp):
        part = next((i for i, n in enumerate(node.values) if spans(n, position)), None)
        if part is None:
            return None
        # All parts of a true ``and`` are true, all parts of a false ``or`` are false. In a false
        # ``and`` the last part must be false: Python evaluates it when the others are true.
        is_sure = isinstance(node.op, ast.And) == value or part == len(node.values) - 1
        return asked_in(node.values[part], position, value) if is_sure else None
    if isinstance(node, ast.Compare):
        is_sure = len(node.ops) == 1 or value
        operands = (node.left, *node.comparators)
        return "number" if is_sure and any(spans(n, position) for n in operands) else None
    return None
