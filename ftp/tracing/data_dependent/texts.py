"""Texts of values that a trace does not know: they serve messages, and no code may decide by them.

In ``f"v{n}"`` Python joins them to others into plain text. So the source around a text tells
whether code decides by it: whether it is compared, looked up, measured or an argument of a call
whose result is used.
"""

import ast
import functools
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, NoReturn

from ftp.source import is_users, users_frame
from ftp.tracing.data_dependent.guards import (
    SourcePosition,
    asking_frame,
    nodes_of,
    position_of,
    source_of,
    span_of,
    spans,
)
from ftp.tracing.selected_rows.refused import number_refused


def _refused(*_: Any) -> NoReturn:
    raise number_refused(is_of_rows=False)


def _length(self: str) -> int:
    return str.__len__(self) if _only_shows(asking_frame()) else _refused()


class Text(str):
    """The text of a value, for messages printed while tracing; no code may read it."""

    _asked: Any = _refused
    __eq__ = __ne__ = __lt__ = __gt__ = __hash__ = __contains__ = _asked
    __iter__ = __getitem__ = startswith = endswith = isdigit = isnumeric = _asked
    find = index = count = split = partition = _asked
    __len__ = _length

    def __bool__(self) -> bool:
        return True


UNKNOWN = Text("a value of the program")


def decides() -> bool:
    """Whether the user's code decides by the text of a value that it makes now, or the callers of
    functions that return it do.
    """
    frame = users_frame()
    while frame is not None and frame.f_globals.get("__name__") != "ftp.tracing.trace":
        if is_users(frame.f_code) and not _only_shows(frame):
            found = _decides(frame.f_code, frame.f_lasti)
            if found is not None:
                return found
        frame = frame.f_back
    return False


def _only_shows(frame: FrameType) -> bool:
    """Whether a frame's code shows what it is given: it shortens long texts."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("rich", "tqdm")


@functools.lru_cache(maxsize=4096)
def _decides(code: CodeType, instruction: int) -> bool | None:
    """None where the code returns the text."""
    position = position_of(code, instruction)
    if position is None or None in position:
        return False
    return _is_read(nodes_of(source_of(code)), position, frozenset())


def _is_read(
    nodes: Sequence[ast.AST], position: SourcePosition, names: frozenset[str], is_held: bool = False
) -> bool | None:
    """Whether code decides by the text of the expression at ``position``; None where it returns it.

    Args:
        names: those that the text was assigned to on the way to the expression.
        is_held: the expression is a list or another container that holds the text.
    """
    around = [
        node for node in nodes if isinstance(node, ast.expr | ast.stmt) and spans(node, position)
    ]
    around.reverse()  # `nodes_of` lists outer nodes first
    for text, node, outer in zip(around, around[1:], [*around[2:], None], strict=False):
        if isinstance(text, ast.Lambda) or isinstance(node, ast.Return):
            return False if is_held else None
        if is_held and _takes_item(node, text):
            is_held = False
        elif _reads(node, text, not isinstance(outer, _UNUSED)):
            return True
        elif isinstance(node, _DISPLAYS):
            is_held = True
        elif isinstance(node, _MAKE_TEXTS):
            is_held = False
        if isinstance(node, ast.stmt):
            assigned = _assigned(node) - names
            function = next((n for n in around if isinstance(n, _FUNCTIONS)), None)
            if not assigned or function is None:
                return False
            uses = (n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in assigned)
            loads = (n for n in uses if isinstance(n.ctx, ast.Load))
            found = {_is_read(nodes, span_of(n), names | assigned, is_held) for n in loads}
            return True if True in found else None if None in found else False
    return False


def _assigned(statement: ast.stmt) -> frozenset[str]:
    """The name that a statement assigns to; none where it assigns to several."""
    match statement:
        case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
            return frozenset({name})
        case ast.AugAssign(target=ast.Name(name)) | ast.For(target=ast.Name(name)):
            return frozenset({name})
    return frozenset()


def _takes_item(node: ast.AST, held: ast.AST) -> bool:
    """Whether an expression or a statement takes items of a container."""
    return held is (
        node.iter
        if isinstance(node, ast.For)
        else node.value
        if isinstance(node, ast.Subscript)
        else None
    )


_MAKE_TEXTS = (ast.BinOp, ast.Call, ast.JoinedStr)  # also of a container: "%s" % (n,)
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.GeneratorExp, ast.DictComp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_UNUSED = (ast.Expr, ast.Raise, ast.Assert, ast.With)  # what they hold goes into no other value
_TEXTS = (  # whose results are texts of their arguments
    "str", "repr", "format", "join", "ljust", "rjust", "center", "zfill", "upper", "lower", "strip",
    "lstrip", "rstrip", "replace",
)  # fmt: skip


def _reads(node: ast.AST, text: ast.AST, is_result_used: bool) -> bool:
    """Whether an expression would be another with another ``text`` in it, or a statement do
    another thing.
    """
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        is_error = name.endswith(("Error", "Exception", "Warning"))
        return is_result_used and not is_error and name not in _TEXTS
    if isinstance(node, ast.Attribute):
        return node.attr not in _TEXTS
    if isinstance(node, ast.Dict):
        return text in node.keys
    if isinstance(node, ast.For | ast.Match):
        return text is (node.iter if isinstance(node, ast.For) else node.subject)
    return isinstance(node, ast.Compare | ast.Subscript)
