"""Where in the user's code something happens: the innermost line that is neither torch's nor
ours.
"""

import functools
import linecache
import os
import re
import sys
import sysconfig
from types import CodeType, FrameType, TracebackType

import optree
import torch
import typing_extensions  # whose decorators wrap functions of torch

_OURS = (
    os.path.abspath(typing_extensions.__file__),
    *(
        os.path.dirname(os.path.abspath(m.__file__)) + os.sep
        for m in (torch, optree, sys.modules["ftp"])
        if m.__file__
    ),
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = sysconfig.get_paths()["purelib"] + os.sep


def users_frame() -> FrameType | None:
    """The innermost user's frame on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users_frame(frame):
        frame = frame.f_back
    return frame


def users_call() -> tuple[int, int] | None:
    """The call that the innermost user's frame makes now, for comparisons."""
    frame = users_frame()
    return None if frame is None else (id(frame), frame.f_lasti)


def user_line() -> str:
    """``"file.py:12  code text"`` of the innermost user's frame; "" if there is none."""
    frame = users_frame()
    return "" if frame is None else describe_line(frame.f_code.co_filename, frame.f_lineno)


def user_lines(count: int, root: str) -> list[str]:
    """The ``count`` innermost user's lines on the stack, as far as the first frame of the file
    ``root``.
    """
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < count:
        if frame.f_code.co_filename == root:
            break
        if _is_users_frame(frame):
            found.append(describe_line(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def is_called_from(file: str) -> bool:
    """Whether a frame on the stack is of the code of a file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


def at_line() -> str:
    """How an error begins that speaks of the innermost user's line: the line and a new one; ""
    if there is none.
    """
    line = user_line()
    return f"{line}\n  " if line else ""


def raised_line(error: BaseException) -> str:
    """The innermost user's line that ``error`` passed through."""
    at = _users_traceback(error)
    return "" if at is None else describe_line(at.tb_frame.f_code.co_filename, at.tb_lineno)


def raised_call(error: BaseException) -> tuple[int, int] | None:
    """The call, as of `users_call`, that ``error`` passed through."""
    at = _users_traceback(error)
    return None if at is None else (id(at.tb_frame), at.tb_lasti)


def _users_traceback(error: BaseException) -> TracebackType | None:
    """Where ``error`` passed through the innermost user's frame."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        if _is_users_frame(traceback.tb_frame):
            found = traceback
        traceback = traceback.tb_next
    return found


def raised_by_user(error: BaseException) -> bool:
    """Whether the user's own code raised ``error``, rather than a function that it called."""
    traceback, frame = error.__traceback__, None
    while traceback is not None:
        traceback, frame = traceback.tb_next, traceback.tb_frame
    return frame is not None and _is_users_frame(frame)


def told_line(stack_trace: str) -> str:
    """The innermost user's line of a stack trace that was kept as text; its innermost line at all
    if none is the user's.

    >>> told_line('File "model.py", line 3, in forward\\n    x = x + 1')
    'model.py:3'
    """
    found = [
        (file, int(number))
        for file, number in re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    ]
    users = [at for at in found if _is_users_file(at[0])] or found
    return describe_line(*users[-1]) if users else ""


def _is_users_frame(frame: FrameType) -> bool:
    """Code that torch makes from text, as ``python -c`` does, is in no module."""
    return is_users(frame.f_code) and "__name__" in frame.f_globals


def is_users(code: CodeType) -> bool:
    return _is_users_file(code.co_filename)  # cached by file: the hash of code takes longer


@functools.cache
def is_ours(file: str) -> bool:
    """Whether a file's code is torch's, optree's or ours."""
    return file.startswith(_OURS)


def is_editable(name: str) -> bool:
    """Whether a file is the user's own rather than an installed library's."""
    return _is_users_file(name) and not name.startswith(_SITE)


@functools.cache
def _is_users_file(name: str) -> bool:
    if name.startswith(_OURS) or (
        name.startswith("<") and not name.startswith(("<doctest", "<ipython", "<stdin", "<string"))
    ):
        return False
    return name.startswith(_SITE) or not name.startswith(_STDLIB)


@functools.lru_cache(maxsize=65536)
def describe_line(file: str, number: int) -> str:
    """A line of a file as messages show it; the path relative to where Python finds it, so that
    it is the same on every machine.
    """
    text = linecache.getline(file, number).strip()
    roots = [os.path.abspath(p) + os.sep for p in (*sys.path, os.getcwd())]
    root = max((r for r in roots if os.path.abspath(file).startswith(r)), key=len, default="")
    name = os.path.abspath(file)[len(root) :] if root else file
    return f"{name}:{number}  {text}".strip()
