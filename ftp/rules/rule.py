"""The sharding rule of one call: how its tensors' dims share factors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from ftp.errors import RuleError
from ftp.rules.notation import Dims, Notation


@dataclass(frozen=True)
class Meta:
    """Global shape and dtype of a tensor in a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def ndim(self) -> int:
        return len(self.shape)


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
        """Every tensor among the arguments, in order, list members too."""
        return tuple(tensors((self.args, dict(self.kwargs)), Meta))

    def arg(self, name: str) -> Any:
        """The argument called ``name`` in the op's schema, its default where it is not given."""
        for i, a in enumerate(self.target._schema.arguments):
            if a.name == name:
                if not a.kwarg_only and i < len(self.args):
                    return self.args[i]
                return self.kwargs.get(name, a.default_value)
        raise RuleError(
            f"{self.target} has no argument {name!r}: its schema is {self.target._schema}."
        )


def tensors(tree: Any, kind: type) -> Iterator[Any]:
    """The members of nested arguments that are of ``kind``, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for t in tree:
            yield from tensors(t, kind)
    elif isinstance(tree, dict):
        for t in tree.values():
            yield from tensors(t, kind)


def replaced(tree: Any, kind: type | tuple[type, ...], new: Callable[[Any], Any]) -> Any:
    """Nested arguments with each member of ``kind`` replaced by what ``new`` makes of it;
    containers come out plain.
    """
    if isinstance(tree, kind):
        return new(tree)
    if isinstance(tree, list):
        return [replaced(t, kind, new) for t in tree]
    if isinstance(tree, tuple):
        return tuple(replaced(t, kind, new) for t in tree)
    if isinstance(tree, dict):
        return {k: replaced(t, kind, new) for k, t in tree.items()}
    return tree


LocalHook = Callable[[Any], Any]


@dataclass(frozen=True)
class Rule:
    """How one call's dims share factors.

    Attributes:
        notation: the factors.
        linear: groups of operand indices that may be pending sums together, giving a pending sum.
        local: emits the op's local form, where that is more than the op itself (see
            ``partition.LocalOp``).
        sizes: sizes of factors that the shapes do not tell.
        decompose: whether the op is worth replacing by primitives when a whole factor is within
            reach.
        ring: pairs of factors that one axis may cut together, the second of which is whole
            otherwise: the local form then passes its parts around the ranks of the axis.
        resized: factors that are whole dims whose size the op changes, and with it that of each
            rank's chunk. ``sizes`` has those of the result; an operand's chunks are of its own.
    """

    notation: Notation
    linear: tuple[tuple[int, ...], ...] = ()
    local: LocalHook | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    decompose: bool = True
    ring: tuple[tuple[str, str], ...] = ()
    resized: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return str(self.notation)


@dataclass(frozen=True)
class BoundRule:
    """A rule fitted to a call: one factor list per dim, all sizes known.

    Attributes:
        is_found: the rule is not stated, but found by trial.
        call: the call, for local hooks; None for a rule that no registry states.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str]
    pending: tuple[Mapping[str, str], ...]
    linear: tuple[tuple[int, ...], ...]
    sizes: Mapping[str, int]
    local: LocalHook | None
    decompose: bool
    is_found: bool = False
    ring: tuple[tuple[str, str], ...] = ()
    call: Call | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return str(
            Notation(
                self.operands,
                self.results,
                self.whole,
                tuple(tuple(p.items()) for p in self.pending),
            )
        )
