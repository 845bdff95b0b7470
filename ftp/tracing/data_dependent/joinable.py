"""Which ``if`` statements of a function's source only compute: their body only binds names and
writes to tensors, so it may run for either value of the condition and its results be chosen
afterwards.
"""

import ast
import dis
import functools
from types import CodeType, FrameType

from ftp.dataclass import dataclass
from ftp.tracing.data_dependent.guards import (
    asked_in,
    asks_for_any,
    nodes_of,
    position_of,
    source_of,
    spans,
)


@dataclass(frozen=True)
class Joinable:
    """An ``if`` statement without ``else``, or ``if ...: continue`` with the rest of its loop.

    Attributes:
        value: the value of the condition with which the statements run.
        first, last: their lines.
        names: the names that they bind.
        written: the tensors to whose elements they write, as expressions.
    """

    value: bool
    first: int
    last: int
    names: frozenset[str]
    written: tuple[str, ...]


def joinable_at(frame: FrameType) -> Joinable | None:
    """The statement whose condition ``frame`` evaluates now; None if it does more than compute."""
    code = frame.f_code
    found = _joinable(code, frame.f_lasti)
    is_own = found is not None and found.names <= {*code.co_varnames, *code.co_cellvars}
    return found if is_own and not asks_for_identity(code) else None


@functools.lru_cache(maxsize=4096)
def _joinable(code: CodeType, instruction: int) -> Joinable | None:
    position = position_of(code, instruction)
    if position is None or None in position:
        return None
    for statement, behind in _statements(source_of(code)):
        if spans(statement.test, position):
            parts = {type(n) for n in ast.walk(statement.test)}
            asked = asked_in(statement.test, position, value=True)
            if asked == "number" and isinstance(statement.test, ast.Compare):
                if not asks_for_any(code, position):
                    return None
                is_none = isinstance(statement.test.ops[0], ast.Eq | ast.Lt)
                asked = "false" if is_none else "true"
            if parts & {ast.BoolOp, ast.IfExp} or statement.orelse:
                return None
            if asked not in ("true", "false"):
                return None
            is_skip = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
            body = behind if is_skip else statement.body
            if not body or not all(map(_computes, body)):
                return None
            return Joinable(
                (asked == "true") != is_skip,
                body[0].lineno,
                max(s.end_lineno or s.lineno for s in body),
                frozenset(_bound(body)),
                tuple(_written(body)),
            )
    return None


@functools.lru_cache(maxsize=256)
def _statements(source: str) -> list[tuple[ast.If, list[ast.stmt]]]:
    """The ``if`` statements of a file, inner ones first, each with the statements that follow it in
    the loop's body that it stands in.
    """
    nodes = nodes_of(source)
    behind = {
        id(s): n.body[i + 1 :]
        for n in nodes
        if isinstance(n, ast.For | ast.While) and not n.orelse
        for i, s in enumerate(n.body)
    }
    return [(n, behind.get(id(n), [])) for n in nodes[::-1] if isinstance(n, ast.If)]


# Methods that change Python's objects. They are no part of what can be chosen.
_METHODS = """
    append appendleft extend insert pop popleft popitem remove discard clear update setdefault
    register_buffer register_parameter add_module put send write backward __setattr__ add sort
    reverse extendleft rotate move_to_end difference_update intersection_update
    symmetric_difference_update __setitem__ __delitem__ __iadd__ __ior__ heappush heappop insort
"""
_CHANGING = frozenset(_METHODS.split())
_CALLED = ("next", "setattr", "delattr", "exec", "eval", "print")


def _computes(statement: ast.stmt) -> bool:
    """Whether a statement only binds names and writes to tensors."""
    for n in ast.walk(statement):
        if isinstance(n, ast.Yield | ast.YieldFrom | ast.Await | ast.NamedExpr):
            return False
        if isinstance(n, ast.Attribute) and n.attr in _CHANGING:
            return False
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in _CALLED:
            return False
    return _is_plain(statement)


def _is_plain(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            return all(map(_is_target, targets))
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name.endswith("_") and not name.endswith("__")
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            return True
        case ast.If():
            return all(map(_is_plain, [*statement.body, *statement.orelse]))
        case ast.For():
            body = [*statement.body, *statement.orelse]
            return _is_target(statement.target) and all(map(_is_plain, body))
        case ast.With():
            is_named = any(item.optional_vars is not None for item in statement.items)
            return not is_named and all(map(_is_plain, statement.body))
        case _:
            return False


def _is_target(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_target, node.elts))
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Subscript) and _is_path(node.value) is True
    )


def _is_path(node: ast.expr) -> bool:
    """Whether an expression is a name or an attribute of one, as ``self.table``."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_path(node.value))


def _bound(body: list[ast.stmt]) -> list[str]:
    nodes = [n for s in body for n in ast.walk(s)]
    inner = {id(n) for f in nodes if isinstance(f, _SCOPES) for n in ast.walk(f)}
    return [
        n.id
        for n in nodes
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and id(n) not in inner
    ]


_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def _written(body: list[ast.stmt]) -> list[str]:
    return [
        ast.unparse(n.value)
        for s in body
        for n in ast.walk(s)
        if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)
    ]


_STORING = (
    "STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR",
    "STORE_SLICE",
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def asks_for_identity(code: CodeType) -> bool:
    """Whether a function compares by ``is`` with an object other than None, True and False: a value
    chosen from two objects is neither of them.
    """
    before = ""
    for each in dis.get_instructions(code):
        if each.opname == "IS_OP" and before != "LOAD_CONST":
            return True
        before = each.opname
    return False


@functools.lru_cache(maxsize=4096)
def changes_objects(code: CodeType) -> bool:
    """Whether a function may change objects other than those it makes: attributes, items, names of
    other scopes.
    """
    for each in dis.get_instructions(code):
        if each.opname in _STORING or (each.opname == "BINARY_OP" and each.argrepr.endswith("=")):
            return True
        if each.opname == "LOAD_GLOBAL" and each.argval in (*_CALLED, *_CHANGING):
            return True
        if each.opname == "STORE_DEREF" and each.argval in code.co_freevars:
            return True
        if each.argval in _CHANGING and each.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            return True
    return False
