"""Functions of torch's modules replaced while a program is traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, new: dict[str, Any]) -> Iterator[None]:
    old = {name: getattr(owner, name) for name in new if hasattr(owner, name)}
    for name in old:
        setattr(owner, name, new[name])
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)
