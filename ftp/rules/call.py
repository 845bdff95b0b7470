"""One call of an op, with shapes and dtypes in place of tensors."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.errors import RuleError
from ftp.torch_internals.op_types import OpOverload


@dataclass(frozen=True)
class Meta:
    """Global shape and dtype of a tensor in a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __repr__(self) -> str:  # a dataclass' own takes thrice as long
        return f"Meta(shape={self.shape!r}, dtype={self.dtype!r})"

    @classmethod
    def of(cls, x: Any) -> "Meta":
        """The meta of a tensor, or of what has its shape and dtype; a number is a 0-d integer."""
        if not isinstance(x, (torch.Tensor, Meta)):
            return cls((), torch.int64)
        if isinstance(x, torch.Tensor) and not x._has_symbolic_sizes_strides:
            return _meta(tuple(x.shape), x.dtype)
        return cls(tuple(map(formula_of, x.shape)), x.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)


_meta = lru_cache(maxsize=8192)(Meta)  # repeated layers share them: quick to compare


def formula_of(size: Any) -> Any:
    """A symbolic size of a trace as a formula; any other size as it is."""
    if not isinstance(size, torch.SymInt):
        return size
    symbolic = getattr(size.node.shape_env, "symbolic", None)
    return size if symbolic is None else symbolic.dynamic(size)


@dataclass(frozen=True)
class Call:
    """An op with its arguments, a ``Meta`` in place of each tensor, and the metas of its
    results.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Meta, ...]

    @property
    def operands(self) -> tuple[Meta, ...]:
        """Every tensor among the arguments, in order, members of lists included."""
        return tuple(tensors((self.args, dict(self.kwargs)), Meta))

    def arg(self, name: str) -> Any:
        """The argument ``name`` of the op's schema; its default if it is not given."""
        for i, a in enumerate(self.target._schema.arguments):
            if a.name == name:
                if not a.kwarg_only and i < len(self.args):
                    return self.args[i]
                return self.kwargs.get(name, a.default_value)
        raise RuleError(
            f"{self.target} has no argument {name!r}: its schema is {self.target._schema}."
        )


def tensors(tree: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """The members of nested arguments that are of ``kind``, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for t in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(t, kind):
                yield t
            elif isinstance(t, (list, tuple, dict)):
                yield from tensors(t, kind)


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensors of a node's call, in order; one that it reads twice is listed twice."""
    return list(tensors((node.args, dict(node.kwargs)), fx.Node))


@cache
def returns_tuple(op: OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))


def replaced(tree: Any, kind: type | tuple[type, ...], new: Callable[[Any], Any]) -> Any:
    """Nested arguments with each member ``x`` of ``kind`` replaced by ``new(x)``, in plain
    containers.
    """
    if isinstance(tree, kind):
        return new(tree)
    if isinstance(tree, (list, tuple)):
        made = [
            new(t)
            if isinstance(t, kind)
            else replaced(t, kind, new)
            if isinstance(t, (list, tuple, dict))
            else t
            for t in tree
        ]
        return made if isinstance(tree, list) else tuple(made)
    if isinstance(tree, dict):
        return {k: replaced(t, kind, new) for k, t in tree.items()}
    return tree
