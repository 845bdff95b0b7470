"""How reports write: short names of dtypes, texts without the numbers of repeated layers, and the
report of a number in a notebook.
"""

import re
from functools import lru_cache
from typing import Any

import torch

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b1",
}
# A name with the number of an op, or a key or an index of a path (no shape: dtypes end in a digit).
# Both alternatives begin with what few places have: most of a report's time is spent here.
_NUMBERED = re.compile(
    r"\b(?:[A-Za-z_][\w.]*_\d+(?=\b|_)|[A-Za-z]\w*\.\d+\b)"
    r"|\[(?:'[^']*'\]|(?<=[a-z\]]\[)\d+\])"
)
_NUMBER = re.compile(r"[_.]?\d+")


def dtype_name(dtype: torch.dtype) -> str:
    """
    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def without_numbers(text: str) -> str:
    """The text with the numbers in names of values and paths left out, for comparing.

    >>> without_numbers("params['layers.10.w'] for mm_12 at a.py:7  x @ w")
    "params['layers.w'] for mm at a.py:7  x @ w"
    >>> without_numbers("f32[4, 8]"), without_numbers("mm")
    ('f32[4, 8]', 'mm')
    >>> without_numbers("%x = P['a    # 1']    # a.py:7"), without_numbers("P['a    # 1'] for mm")
    ("%x = P['a    # ']    # a.py:7", "P['a    # '] for mm")
    """
    line, mark, comment = text.rpartition("    # ")
    if not mark or line.count("'") % 2:  # in a name
        return _without_numbers(text)
    return _without_numbers(line) + mark + _comment_without_numbers(comment)


def _without_numbers(text: str) -> str:
    return _NUMBERED.sub(lambda m: _name_without_numbers(m.group()), text)


_comment_without_numbers = lru_cache(maxsize=4096)(_without_numbers)  # layers share lines of code


@lru_cache(maxsize=65536)
def _name_without_numbers(name: str) -> str:
    return _NUMBER.sub("", name)


class Reported:
    """A number that a notebook shows as its report."""

    def report(self) -> str:
        raise NotImplementedError

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.report())

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.report())}</pre>"
