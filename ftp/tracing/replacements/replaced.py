"""Functions of torch's modules replaced while a program is traced."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, new: dict[str, Any]) -> Iterator[None]:
    """Replace those of ``owner``'s attributes that it has within the block."""
    old = {name: inspect.getattr_static(owner, name) for name in new if hasattr(owner, name)}
    for name in old:
        setattr(owner, name, new[name])
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)
