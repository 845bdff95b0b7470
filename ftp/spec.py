"""PartitionSpec: which mesh axes cut which dim of a tensor."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftp.errors import SpecError


@dataclass(frozen=True)
class Units:
    """An axis name that cuts a dim in whole units of ``size`` elements."""

    axis: str
    size: int

    def __repr__(self) -> str:
        return f"units({self.axis!r}, {self.size})"


def units(axis: str, size: int) -> Units:
    """An entry of a spec that cuts a dim over ``axis`` in whole units of ``size`` elements, such as attention heads.

    >>> P(units("tp", 64), None)
    P(units('tp', 64), None)
    """
    if not isinstance(axis, str) or not isinstance(size, int) or size < 1:
        raise SpecError(f"units(axis, size) takes a mesh axis name and a positive int, not units({axis!r}, {size!r}).")
    return Units(axis, size)


Entry = None | str | Units | tuple["str | Units", ...]


class PartitionSpec:
    """One entry per tensor dim: ``None``, an axis name, or a tuple of names, major to minor.

    Missing trailing entries are ``None``; specs that differ only in those are equal.

    >>> P("tp", None) == P("tp")
    True
    >>> P(("dp", "tp")).axes
    ('dp', 'tp')

    Source: JAX, ``jax.sharding.PartitionSpec``.
    """

    __slots__ = ("_entries",)
    _entries: tuple[Entry, ...]

    def __init__(self, *entries: "Entry | Sequence[str | Units]"):
        self._entries = tuple(_entry(entries, e) for e in entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self._entries

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis the spec names, in order, repeats included."""
        return tuple(cut.axis for d in range(len(self._entries)) for cut in self.cuts(d))

    def cuts(self, dim: int) -> tuple[Units, ...]:
        """The cuts of one dim, major to minor; a plain axis name is a unit of one element."""
        entry = self._entries[dim] if dim < len(self._entries) else None
        if entry is None:
            return ()
        parts = entry if isinstance(entry, tuple) else (entry,)
        return tuple(p if isinstance(p, Units) else Units(p, 1) for p in parts)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, dim: int) -> Entry:
        return self._entries[dim]

    def __bool__(self) -> bool:
        """Whether any dim is cut."""
        return any(e is not None for e in self._entries)

    def _key(self) -> tuple[Entry, ...]:
        end = max((d + 1 for d, e in enumerate(self._entries) if e is not None), default=0)
        return self._entries[:end]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self._entries))})"

    def __reduce__(self):
        return (PartitionSpec, self._entries)


P = PartitionSpec


def _entry(entries: Sequence[object], entry: object) -> Entry:
    if entry is None or isinstance(entry, str | Units):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(e, str | Units) for e in entry):
        return entry[0] if len(entry) == 1 else (tuple(entry) or None)
    given = ", ".join(map(repr, entries))
    raise SpecError(f"P({given}): entry {entry!r} is a {type(entry).__name__}; an entry is None, an axis name or a tuple of names.")


def check_spec(spec: PartitionSpec, shape: Sequence[int] | None, axes: dict[str, int], where: str) -> list[str]:
    """What is wrong with ``spec`` for a tensor of global ``shape`` on a mesh of ``axes`` {name: size}; empty if nothing.

    ``where`` names the leaf in the messages, as ``params['mlp']['up']``.
    """
    failures = []
    seen: dict[str, int] = {}
    for dim in range(len(spec)):
        for cut in spec.cuts(dim):
            if cut.axis not in axes:
                failures.append(f"{where} has spec {spec}, but the mesh has no axis {cut.axis!r}; its axes are {_sizes(axes)}.")
            elif cut.axis in seen:
                failures.append(_repeated(spec, shape, axes, where, cut.axis, seen[cut.axis], dim))
            seen.setdefault(cut.axis, dim)
    if shape is not None and not failures and len(spec) <= len(shape):
        failures += _ragged(spec, shape, axes, where)
    if shape is not None and len(spec) > len(shape):
        failures.append(
            f"{where} has spec {spec} of {len(spec)} entries, but its shape {tuple(shape)} has {len(shape)} dims."
            f" Give at most {len(shape)} {'entry' if len(shape) == 1 else 'entries'}."
        )
    return failures


def _ragged(spec: PartitionSpec, shape: Sequence[int], axes: dict[str, int], where: str) -> list[str]:
    """Units that do not divide what they cut, on any rank."""
    failures = []
    for dim in range(len(spec)):
        sizes = {int(shape[dim])}
        for cut in spec.cuts(dim):
            if odd := [size for size in sizes if size % cut.size]:
                held = "" if odd == [shape[dim]] else f", of which some ranks hold {max(odd)} before {cut.axis!r} cuts it"
                failures.append(
                    f"{where} has spec {spec}: units of {cut.size} do not divide dim {dim} of size {shape[dim]}{held}."
                    f" Pad the dim, or cut it by {cut.axis!r} alone."
                )
                break
            sizes = {chunk(size, axes[cut.axis], i, cut.size)[1] for size in sizes for i in range(axes[cut.axis])}
    return failures


def _repeated(spec: PartitionSpec, shape: Sequence[int] | None, axes: dict[str, int], where: str, axis: str, first: int, dim: int) -> str:
    message = f"{where} has spec {spec}, which uses mesh axis {axis!r} (size {axes[axis]}) for dim {first} and again for dim {dim}."
    entries = list(spec)
    kept = tuple(c if c.size > 1 else c.axis for c in spec.cuts(dim) if c.axis != axis)
    entries[dim] = kept or None
    suggestion = P(*entries)
    if shape is None or check_spec(suggestion, shape, axes, where):
        return message
    local = local_shape(suggestion, shape, axes)
    return f"{message}\n  Try {suggestion}, which gives every rank a shard of shape {local} of {tuple(shape)}."


def _sizes(axes: dict[str, int]) -> str:
    return ", ".join(f"{name!r} (size {size})" for name, size in axes.items())


def local_shape(
    spec: PartitionSpec, shape: Sequence[int], axes: dict[str, int], coordinate: dict[str, int] | None = None
) -> tuple[int, ...]:
    """The shape of the shard at ``coordinate`` {axis: index} (the first rank, which holds the largest, if not given).

    >>> local_shape(P("tp"), (5, 3), {"tp": 2}), local_shape(P("tp"), (5, 3), {"tp": 2}, {"tp": 1})
    ((3, 3), (2, 3))
    """
    return tuple(stop - start for start, stop in local_bounds(spec, shape, axes, coordinate or dict.fromkeys(axes, 0)))


def local_bounds(spec: PartitionSpec, shape: Sequence[int], axes: dict[str, int], coordinate: dict[str, int]) -> list[tuple[int, int]]:
    """Per dim the (start, stop) that the rank at ``coordinate`` holds, cut as ``torch.chunk`` cuts, axis inside axis."""
    bounds = []
    for dim, size in enumerate(shape):
        start, length = 0, int(size)
        for cut in spec.cuts(dim):
            offset, length = chunk(length, axes[cut.axis], coordinate[cut.axis], cut.size)
            start += offset
        bounds.append((start, start + length))
    return bounds


def chunk(size: int, n: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Offset and length of chunk ``index`` of ``n``, in whole units, the last unit possibly short; as ``torch.chunk``.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = math.ceil(math.ceil(size / unit) / n) * unit
    start = min(index * step, size)
    return start, min(step, size - start)
