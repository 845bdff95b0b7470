"""The dims of a step's arguments that change size from call to call: ``dynamic_shapes`` names them
as torch.export takes them, or they have changed in earlier calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import optree
import torch

from ftp.dataclass import dataclass
from ftp.errors import InputError, raise_all
from ftp.sharding.arguments import Shape, padded_names
from ftp.sharding.pytree import NAMESPACE, flatten, kind_of

if TYPE_CHECKING:
    from ftp.api.arguments import Arguments


@dataclass(frozen=True)
class DimSize:
    """The size of a dynamic dim: ``times`` a named size, plus ``plus``. So a mask of ``S - 1``
    tokens beside ``S`` tokens has no size of its own, of which a trace would have to ask that it
    fits the other.

    >>> DimSize("S", 2, -1).at(5), DimSize("S", 2, -1).named(9), DimSize("S", 2, -1).named(8)
    (9, 5, None)
    """

    name: str
    times: int = 1
    plus: int = 0

    def at(self, named: Any) -> Any:
        """The size, an int or a formula as the named one is."""
        return self.times * named + self.plus

    def named(self, size: int) -> int | None:
        """The named size; None where it is no int."""
        named, rest = divmod(size - self.plus, self.times)
        return None if rest else named

    def __str__(self) -> str:
        times = "" if self.times == 1 else f"{self.times}*"
        return f"{times}{self.name}{f'{self.plus:+d}' if self.plus else ''}"


DynamicDims = Mapping[int, Mapping[int, DimSize]]
"""Per leaf of the arguments its dynamic dims."""


@dataclass(frozen=True)
class Range:
    """A size that changes: its name and limits, both included."""

    name: str
    low: int
    high: float

    def __str__(self) -> str:
        most = "" if self.high == float("inf") else f", max={int(self.high)}"
        return f"Dim({self.name!r}, min={self.low}{most})"


@dataclass(frozen=True)
class Dynamic:
    """The dynamic dims of one call's arguments.

    Attributes:
        dims: per leaf.
        ranges: of each name, in the order of first use.
        is_seen: whether calls showed them; the user named none.
    """

    dims: DynamicDims
    ranges: tuple[Range, ...]
    is_seen: bool = False

    def values(self, shapes: Sequence[Shape | None], names: Sequence[str]) -> tuple[int, ...]:
        """The sizes in a call with these global shapes.

        Raises:
            InputError: a size out of its range, or dims of one name and several sizes.
        """
        found: dict[str, tuple[int, str, DimSize]] = {}
        failures = []
        limits = {r.name: r for r in self.ranges}
        for leaf, dims in self.dims.items():
            shape = shapes[leaf]
            assert shape is not None
            for dim, of in dims.items():
                size, limit = of.named(shape[dim]), limits[of.name]
                here = f"dim {dim} of {names[leaf]} has size {shape[dim]}"
                if size is None:
                    failures.append(f"{here}, which is no {of}, as dynamic_shapes has it.")
                    continue
                first, where, other = found.setdefault(
                    of.name, (size, f"dim {dim} of {names[leaf]} has {shape[dim]}", of)
                )
                if not limit.low <= size <= limit.high:
                    alias = "" if of == DimSize(of.name) else f" for {of}"
                    failures.append(
                        f"{here}, outside {limit} of dynamic_shapes{alias}. Pad or cut it, or"
                        " widen the range."
                    )
                elif size != first:
                    both = f"both {of.name!r}" if of == other else f"them {of} and {other}"
                    failures.append(
                        f"{here}, but {where}: dynamic_shapes calls {both}. Give dims of different"
                        " sizes different Dims."
                    )
        raise_all(InputError, failures)
        return tuple(found[r.name][0] for r in self.ranges)

    def fits(self, shapes: Sequence[Shape | None]) -> bool:
        """Whether dims of one name have one size."""
        sizes: dict[str, int | None] = {}
        found = (
            (of.name, of.named((shapes[leaf] or ())[dim]))
            for leaf, dims in self.dims.items()
            for dim, of in dims.items()
        )
        return all(sizes.setdefault(name, size) == size for name, size in found)


class SeenShapes:
    """Finds the dims that change size from the shapes of a step's calls, from the third shapes on.

    Args:
        limit: the number of keys of arguments that are kept: those that came last.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shapes: dict[Any, list[tuple[Shape | None, ...]]] = {}
        self._found: dict[Any, Dynamic] = {}

    def known(self, call: "Arguments") -> Dynamic | None:
        """The dims that changed in earlier calls with such arguments; None before the third."""
        return self._found.get(call.key_without_sizes())

    def add(self, call: "Arguments", shapes: Sequence[Shape | None]) -> Dynamic | None:
        """The dims that changed up to this call, of these global shapes; None before the third."""
        key, new = call.key_without_sizes(), tuple(shapes)
        seen = self._shapes[key] = self._shapes.pop(key, [])
        if len(self._shapes) > self._limit:
            oldest = next(iter(self._shapes))
            del self._shapes[oldest]
            self._found.pop(oldest, None)
        if new not in seen:
            seen.append(new)
            del seen[:-_SEEN]
        if len(seen) >= _THIRD:
            self._found[key] = _changing(seen, call.names)
        return self._found.get(key)


_THIRD, _SEEN = 3, 8  # the number of shapes that show what changes, and of those remembered


def _changing(seen: Sequence[tuple[Shape | None, ...]], names: Sequence[str]) -> Dynamic:
    """The dims whose size changes. Dims whose sizes always had one difference share a name, that of
    the smallest.
    """
    changing = [
        (leaf, dim, sizes)
        for leaf, of_calls in enumerate(zip(*seen, strict=True))
        for dim, sizes in enumerate(zip(*(shape or () for shape in of_calls), strict=True))
        if len(set(sizes)) > 1
    ]
    named: dict[tuple[int, ...], tuple[Range, int]] = {}
    for leaf, dim, sizes in sorted(changing, key=lambda found: found[2][0]):
        smallest = Range(f"dim {dim} of {names[leaf]}", 0, float("inf")), sizes[0]
        named.setdefault(_differences(sizes), smallest)
    dims: dict[int, dict[int, DimSize]] = {}
    ranges: dict[Range, None] = {}
    for leaf, dim, sizes in changing:
        found, least = named[_differences(sizes)]
        ranges[found] = None
        dims.setdefault(leaf, {})[dim] = DimSize(found.name, plus=sizes[0] - least)
    return Dynamic(dims, tuple(ranges), is_seen=True)


def _differences(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size - sizes[0] for size in sizes)


def dynamic_dims(given: Any, args: tuple[Any, ...], roots: Sequence[str], first: int) -> Dynamic:
    """The dynamic dims of arguments.

    Args:
        given: a prefix tree of the tuple of arguments from ``first`` on, or of a single one; at a
            tensor ``{dim: Dim}``, a tuple with an entry a dim, or None.
        roots: what the arguments are called.

    Raises:
        InputError: where it does not fit the arguments.
    """
    reader = _RangeReader()
    mine, called = args[first:], padded_names(roots, len(args))[first:]
    if isinstance(given, Mapping) and set(called) & set(given) and not _is_of_tensor(given):
        if unknown := [name for name in given if name not in called]:
            raise InputError(
                f"dynamic_shapes names {unknown[0]!r}, which is no argument: they are"
                f" {', '.join(called)}."
            )
        given = tuple(given.get(name) for name in called)
    entries: Sequence[Any]
    if given is None or _is_of_tensor(given):
        entries = [given] * len(mine)
    elif len(mine) == 1 and not (isinstance(given, tuple | list) and len(given) == 1):
        entries = [given]
    elif isinstance(given, tuple | list) and len(given) == len(mine):
        entries = given
    else:
        raise InputError(
            f"dynamic_shapes is {kind_of(given)}, for the arguments {', '.join(called)}. Give a"
            " tuple with an entry for each, or one {dim: torch.export.Dim(...)} for all tensors."
        )
    leaf = len(flatten(args[:first])[0])
    for entry, arg, name in zip(entries, mine, called, strict=True):
        leaf = reader.read(entry, arg, name, leaf)
    least = dict.fromkeys(reader.ranges, 0)  # so that no dim is smaller than zero
    for size in (size for dims in reader.dims.values() for size in dims.values()):
        least[size.name] = max(least[size.name], -(size.plus // size.times))
    ranges = (replace(r, low=max(r.low, least[r.name])) for r in reader.ranges.values())
    return Dynamic(reader.dims, tuple(ranges))


def dynamic_arguments(
    given: Any, roots: Sequence[str], first: int, *, rng: bool
) -> Callable[[tuple[Any, ...]], Dynamic] | None:
    """A function from a step's arguments to their dynamic dims; None where none are given."""
    if given is None:
        return None
    check_dims(given)
    return lambda args: dynamic_dims(given, args[:-1] if rng else args, roots, first)


def check_dims(given: Any) -> None:
    """Raise for a ``dynamic_shapes`` that is wrong whatever the arguments.

    Raises:
        InputError: a value that is no Dim.
    """
    reader = _RangeReader()

    def visit(entry: Any) -> None:
        if isinstance(entry, Mapping | tuple | list):
            for x in entry.values() if isinstance(entry, Mapping) else entry:
                visit(x)
        else:
            reader.range(entry, "a dim")

    if not isinstance(given, Mapping | tuple | list):
        raise InputError(
            f"dynamic_shapes is {given!r}. Give a prefix tree of the tuple of batch arguments,"
            ' such as {1: torch.export.Dim("S", max=8192)}.'
        )
    visit(given)


class _RangeReader:
    def __init__(self) -> None:
        self.dims: dict[int, dict[int, DimSize]] = {}
        self.ranges: dict[str, Range] = {}

    def read(self, given: Any, tree: Any, name: str, leaf: int) -> int:
        """Record the dynamic dims that ``given`` states for a tree whose first leaf is ``leaf``.
        Returns the number of the leaf after the tree.
        """
        if isinstance(tree, torch.Tensor):
            self._tensor(given, tree, name, leaf)
            return leaf + 1
        if tree is None or optree.tree_is_leaf(tree, none_is_leaf=False, namespace=NAMESPACE):
            return leaf + (tree is not None)
        level = optree.tree_flatten_one_level(tree, none_is_leaf=False, namespace=NAMESPACE)
        for key, child in zip(level.entries, level.children, strict=True):
            entry = self._entry(given, key, name, len(level.children))
            leaf = self.read(entry, child, f"{name}[{key!r}]", leaf)
        return leaf

    def _entry(self, given: Any, key: Any, name: str, count: int) -> Any:
        if given is None or _is_of_tensor(given):
            return given
        if isinstance(given, Mapping) and key in given:
            return given[key]
        if isinstance(given, tuple | list) and isinstance(key, int) and len(given) == count:
            return given[key]
        raise InputError(
            f"dynamic_shapes gives {kind_of(given)} for {name}, which has no entry for {key!r}."
            " Give one for each, or one {dim: torch.export.Dim(...)} for all its tensors."
        )

    def _tensor(self, given: Any, tensor: torch.Tensor, name: str, leaf: int) -> None:
        if given is None:
            return
        if isinstance(given, tuple | list):
            if len(given) != tensor.ndim:
                raise InputError(
                    f"dynamic_shapes gives {len(given)} entries for {name}, which has"
                    f" {tensor.ndim} dims."
                )
            given = dict(enumerate(given))
        if not isinstance(given, Mapping):
            raise InputError(
                f"dynamic_shapes gives {given!r} for {name}. Give"
                " {dim: torch.export.Dim(name, min=..., max=...)}."
            )
        for dim, size in given.items():
            if not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
                raise InputError(
                    f"dynamic_shapes names dim {dim!r} of {name}, which has {tensor.ndim} dims."
                )
            dim %= tensor.ndim
            found = self.range(size, f"dim {dim} of {name}")
            if found is not None:
                self.dims.setdefault(leaf, {})[dim] = found

    def range(self, size: Any, where: str) -> DimSize | None:
        """The size that a Dim names, whose range is recorded; None for one that does not change."""
        if size is None or isinstance(size, int) or size is torch.export.Dim.STATIC:
            return None
        if size in (torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC):
            found, of = Range(where, 0, float("inf")), DimSize(where)
        elif (root := getattr(size, "root", None)) is not None:  # as 2 * Dim("seq") - 1
            found, of = _range_of(root), _derived(size, root)
        elif type(size).__name__ != "Dim" or not hasattr(size, "min"):
            raise InputError(
                f"dynamic_shapes gives {size!r} for {where}. Give a"
                " torch.export.Dim(name, min=..., max=...)."
            )
        else:
            found, of = _range_of(size), DimSize(size.__name__)
        known = self.ranges.setdefault(found.name, found)
        if known != found:
            raise InputError(
                f"dynamic_shapes has {known} and {found}: one name with two different limits."
            )
        return of


def _range_of(dim: Any) -> Range:
    return Range(dim.__name__, _limit(dim.min), _limit(dim.max))


def _derived(dim: Any, root: Any) -> DimSize:
    """The size of a Dim that is computed from another, ``root``: torch allows products with
    positive ints, and sums with ints.
    """
    plus = dim.fn(0)
    return DimSize(root.__name__, dim.fn(1) - plus, plus)


def _limit(x: Any) -> Any:
    try:
        return int(x)
    except (OverflowError, TypeError, ValueError, AttributeError):
        return float("inf")


def _is_of_tensor(given: Any) -> bool:
    """Whether ``given`` describes the dims of one tensor rather than a tree of tensors."""
    return isinstance(given, Mapping) and all(isinstance(key, int) for key in given)
