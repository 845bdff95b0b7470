"""PartitionSpec: which mesh axes cut which dim of a tensor."""

import functools
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any

from ftp.dataclass import dataclass
from ftp.errors import SpecError


@dataclass(frozen=True)
class Units:
    """A cut of a dim over a mesh axis in whole units of ``size`` elements; `units` makes it.

    Attributes:
        pack: the number of equal packs along the dim, each of which is cut by itself; or the size
            of each pack.
    """

    axis: str
    size: int
    pack: int | tuple[int, ...] = 1

    def __repr__(self) -> str:
        pack = "" if self.pack == 1 else f", pack={self.pack!r}"
        return f"units({self.axis!r}, {self.size}{pack})"

    @property
    def is_plain(self) -> bool:
        """Whether the axis name alone means the same."""
        return self.size == 1 and self.pack == 1

    @property
    def zigzag(self) -> bool:
        """Whether each rank holds a chunk from the front and one from the back."""
        return False

    def sizes(self, size: int) -> tuple[int, ...]:
        """The sizes of the packs along a dim of ``size``."""
        return (size // self.pack,) * self.pack if isinstance(self.pack, int) else self.pack

    def fits(self, size: int) -> bool:
        """Whether the packs make up a dim of ``size`` and hold whole units."""
        sizes = self.sizes(size)
        return sum(sizes) == size and not any(s % self.size for s in sizes)

    def repeats(self, size: int, n: int) -> int:
        """The number of ranks of ``n`` that share a unit of a pack of ``size``: more than one if
        there are fewer units than ranks.
        """
        count = size // self.size
        return n // count if self.size > 1 and 0 < count < n and n % count == 0 else 1


@dataclass(frozen=True, repr=False)
class Stage(Units):
    """An entry that gives a dim whole to one rank of an axis and none of it to the others: a
    parameter of a pipeline's stage. ``ftp.Pipeline.place`` makes it.

    Attributes:
        stage: rank ``stage % n`` of the axis holds the dim.
    """

    size: int = 1
    stage: int = 0

    def __repr__(self) -> str:
        return f"stage({self.axis!r}, {self.stage})"

    @property
    def is_plain(self) -> bool:
        return False


@dataclass(frozen=True, repr=False)
class Zigzag(Units):
    """A cut of a dim over a mesh axis of n ranks in 2n chunks, of which rank r holds chunks r and
    2n-1-r; `zigzag` makes it.
    """

    size: int = 1

    def __repr__(self) -> str:
        return f"zigzag({self.axis!r})"

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def zigzag(self) -> bool:
        return True


def zigzag(axis: str) -> Zigzag:
    """An entry of a ``P`` that cuts a dim over ``axis`` so that all ranks have equal work in causal
    attention along it. The dim is cut in 2n chunks like ``torch.chunk`` (the last may be short or
    empty); rank r holds chunks r and 2n-1-r, one after the other.

    Shards, checkpoints, positions, masks, random draws and labels follow the spec: they are those
    of the elements that a rank holds.

    Args:
        axis: a mesh axis.

    Raises:
        SpecError: ``axis`` is no axis name.

    >>> P(None, zigzag("cp"))
    P(None, zigzag('cp'))
    >>> from ftp.sharding.local_pieces import local_pieces
    >>> [local_pieces(P(zigzag("cp")), (8,), {"cp": 2}, {"cp": i}) for i in range(2)]
    [[[(0, 2), (6, 8)]], [[(2, 6)]]]
    """
    if not isinstance(axis, str):
        raise SpecError(f"zigzag(axis) takes the name of a mesh axis, not {axis!r}.")
    return Zigzag(axis)


def units(axis: str, size: int = 1, *, pack: int | Sequence[int] = 1) -> Units:
    """An entry of a ``P`` that cuts a dim over ``axis`` in whole units of ``size`` elements, such
    as attention heads.

    If the number of ranks is a multiple of the number of units, as 4 ranks for 2 heads, adjacent
    ranks hold the same unit, and its gradient is the sum of theirs.

    Args:
        axis: a mesh axis.
        size: elements that stay together; the dim, or each pack, is a multiple of it.
        pack: the tensors that are concatenated along the dim, each of which is cut by itself: a
            shard is this rank's part of the first, then of the second, and so on. Give their number
            if all have one size (3 for q, k and v; Megatron's ``partition_stride``), else the size
            of each: ``(32 * 128, 8 * 128, 8 * 128)`` for grouped q, k and v.

    Raises:
        SpecError: ``axis`` is no axis name, or a number is not positive.

    >>> P(units("tp", 64), None), P(units("tp", 64, pack=3))
    (P(units('tp', 64), None), P(units('tp', 64, pack=3)))
    >>> from ftp.sharding.local_pieces import local_pieces
    >>> local_pieces(P(units("tp", 2, pack=2)), (8,), {"tp": 2}, {"tp": 1})
    [[(2, 4), (6, 8)]]
    """
    sizes = pack if isinstance(pack, int) else tuple(pack)
    numbers = (size, *(sizes if isinstance(sizes, tuple) else (sizes,)))
    if (
        not isinstance(axis, str)
        or not all(isinstance(x, int) and x >= 1 for x in numbers)
        or sizes == ()
    ):
        raise SpecError(
            "units(axis, size, pack=) takes a mesh axis name, a positive int, and the number of"
            " packs or a size for each,"
            f" not units({axis!r}, {size!r}, pack={pack!r})."
        )
    return Units(axis, size, sizes)


@functools.cache
def _by_element(axis: str) -> Units:
    return Units(axis, 1)


Entry = None | str | Units | EllipsisType | tuple["str | Units", ...]


class PartitionSpec:
    """The sharding of a tensor: which mesh axes cut each dim. ``P`` is an alias.

    Args:
        entries: one for each dim: ``None`` if the dim is whole, an axis name, ``units(...)``, or a
            tuple of these, major to minor. Missing trailing entries are ``None``. In a constraint
            a leading ``...`` stands for any number of ``None``: ``P(..., "tp")`` cuts the last dim.
        unreduced: axes over which a sum is pending: the value is the sum of the ranks' tensors.

    Raises:
        SpecError: an axis that is named twice, an entry that is none of these.

    >>> P("tp", None) == P("tp")
    True
    >>> P(("dp", "tp")).axes
    ('dp', 'tp')

    Source: JAX, ``jax.sharding.PartitionSpec``.
    """

    __slots__ = ("_entries", "_unreduced")
    _entries: tuple[Entry, ...]
    _unreduced: tuple[str, ...]

    def __init__(
        self, *entries: "Entry | Sequence[str | Units]", unreduced: "str | Sequence[str]" = ()
    ):
        self._entries = tuple(
            e if e is ... and not i else _entry(entries, e) for i, e in enumerate(entries)
        )
        self._unreduced = (unreduced,) if isinstance(unreduced, str) else tuple(unreduced)
        if any(not isinstance(a, str) for a in self._unreduced):
            raise SpecError(f"{self!r}: unreduced is an axis name or a tuple of names.")
        if len(set(axes := (*self.axes, *self._unreduced))) < len(axes):
            raise SpecError(_repeated(self))

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self._entries

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis the spec names, in order."""
        return tuple(cut.axis for d in range(len(self._entries)) for cut in self.cuts(d))

    def parts(self, dim: int) -> tuple["str | Units", ...]:
        """The cuts of one dim, major to minor, as the simplest entries of the same meaning: an axis
        name for a unit of one element.
        """
        return tuple(cut.axis if cut.is_plain else cut for cut in self.cuts(dim))

    def cuts(self, dim: int) -> tuple[Units, ...]:
        """The cuts of one dim, major to minor; a plain axis name is a unit of one element."""
        entry = self._entries[dim] if dim < len(self._entries) else None
        if entry is None or entry is ...:
            return ()
        parts = entry if isinstance(entry, tuple) else (entry,)
        return tuple([p if isinstance(p, Units) else _by_element(p) for p in parts])

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, dim: int) -> Entry:
        return self._entries[dim]

    @property
    def unreduced(self) -> tuple[str, ...]:
        """The axes over which the ranks' tensors are the terms of a sum.

        >>> P("dp", unreduced=("tp",)).unreduced
        ('tp',)
        """
        return self._unreduced

    def __bool__(self) -> bool:
        """Whether any dim is cut, or a sum is pending."""
        return bool(self._unreduced) or any(e is not None and e is not ... for e in self._entries)

    def at_rank(self, ndim: int) -> "PartitionSpec":
        """The spec for a tensor of ``ndim`` dims, with a leading ``...`` written out as ``None``.

        >>> P(..., "tp", None).at_rank(3)
        P(None, 'tp', None)
        """
        if not self._entries or self._entries[0] is not ...:
            return self
        return PartitionSpec(
            *(None,) * (ndim - len(self._entries) + 1),
            *self._entries[1:],
            unreduced=self._unreduced,
        )

    def _key(self) -> tuple[tuple[Entry, ...], frozenset[str]]:
        return (self._cut_key(), frozenset(self._unreduced))

    def _cut_key(self) -> tuple[Entry, ...]:
        if self._entries[:1] == (...,):
            return self._entries
        end = max((d + 1 for d, e in enumerate(self._entries) if e is not None), default=0)
        return self._entries[:end]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        entries = ["..." if e is ... else repr(e) for e in self._entries]
        entries += [f"unreduced={self._unreduced!r}"] if self._unreduced else []
        return f"P({', '.join(entries)})"

    def __reduce__(self):
        return (_remade, (self._entries, self._unreduced))


P = PartitionSpec


def _remade(entries: tuple[Entry, ...], unreduced: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*entries, unreduced=unreduced)


def _entry(entries: Sequence[object], entry: object) -> Entry:
    if entry is None or isinstance(entry, str | Units):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(e, str | Units) for e in entry):
        return entry[0] if len(entry) == 1 else (tuple(entry) or None)
    given = ", ".join(map(repr, entries))
    raise SpecError(
        f"P({given}): entry {entry!r} is of type {type(entry).__name__}; an entry is None, an axis"
        " name, ftp.units(...), or a tuple of names."
    )


def _repeated(spec: PartitionSpec) -> str:
    """The error for a spec that uses an axis twice, with a spec that keeps its first use."""
    first: dict[str, int] = {}
    again, kept = [], []
    for dim in range(len(spec)):
        left = []
        for part, cut in zip(spec.parts(dim), spec.cuts(dim), strict=True):
            if cut.axis in first:
                again.append((cut.axis, dim))
            else:
                left.append(part)
            first.setdefault(cut.axis, dim)
        kept.append(... if spec[dim] is ... else tuple(left))
    if not again:
        twice = [a for a in spec.unreduced if a in first] or [
            a for i, a in enumerate(spec.unreduced) if a in spec.unreduced[:i]
        ]
        return (
            f"{spec!r} uses mesh axis {twice[0]!r} twice: a sum over an axis is pending once, and"
            " only for a tensor that the axis does not cut."
        )
    axis, dim = again[0]
    return (
        f"{spec} uses mesh axis {axis!r} for dim {first[axis]} and again for dim {dim}. Try"
        f" {P(*kept)}."
    )


def cuts_of(spec: PartitionSpec) -> tuple[tuple[tuple[str, int, Any], ...], ...]:
    """The cuts of each dim as plain data, as certificates hold them."""
    return tuple(
        tuple((c.axis, c.size, "zigzag" if c.zigzag else c.pack) for c in spec.cuts(d))
        for d in range(len(spec))
    )


def staged(spec: PartitionSpec) -> Stage | None:
    """The entry that gives a tensor to stages of a pipeline, if it has one."""
    found = (cut for dim in range(len(spec)) for cut in spec.cuts(dim) if isinstance(cut, Stage))
    return next(found, None)


def without_stage(spec: PartitionSpec) -> PartitionSpec:
    """The spec on the ranks of the tensor's stage.

    >>> without_stage(P((Stage("pp", stage=1), "tp"), "dp"))
    P('tp', 'dp')
    """
    dims = map(spec.parts, range(len(spec)))
    return P(*(tuple(part for part in dim if not isinstance(part, Stage)) for dim in dims))


def known_size(spec: PartitionSpec, dim: int) -> int | None:
    """The global size of a dim if its spec determines it: the sum of the packs, if the major cut
    lists their sizes.
    """
    cuts = spec.cuts(dim)
    return sum(cuts[0].pack) if cuts and isinstance(cuts[0].pack, tuple) else None
