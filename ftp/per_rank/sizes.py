"""Dynamic sizes in per-rank code: a shard's sizes are formulas of the global ones.

The code is traced once, on symbolic sizes. Its graph has formulas in place of numbers; a symbolic
size of the surrounding trace becomes one, and the plan's sizes take their place later. All ranks
run one graph: where a dim is cut unevenly, all have parts of one size (``uneven.py``).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor, fx
from torch.fx.node import map_aggregate

from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.dynamic_float import FUNCTIONS, OPERATORS, DynamicFloat, evaluated, is_formula
from ftp.dynamic_int import INT_FUNCTIONS, Sizes, is_dynamic
from ftp.rules.call import Meta, formula_of
from ftp.rules.local_op import copied
from ftp.torch_internals.modes import disable_current_modes
from ftp.torch_internals.pytree import tree_map

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic

Replacement = Callable[[Any], Any]


@dataclass(frozen=True)
class StridedMeta(Meta):
    """Shape, dtype and strides of a value of per-rank code, as formulas."""

    strides: tuple[int, ...] = ()


def shape_of(x: Any) -> tuple[Any, ...]:
    """The shape of a value of a trace, with formulas for dynamic sizes."""
    return tuple(map(formula_of, x.shape))


def sizes_in(shapes: Iterable[Sequence[Any]]) -> Sizes | None:
    """The dynamic sizes that shapes are computed from, if any."""
    return next((s.sizes for shape in shapes for s in shape if is_dynamic(s)), None)


def as_symbolic(sizes: Sizes) -> "Symbolic":
    from ftp.tracing.symbolic import symbolic_of  # which takes long to import

    return symbolic_of(sizes)


def meta(shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A tensor on meta. Formulas in its shape become symbolic sizes of their trace."""
    sizes = sizes_in([shape])
    with disable_current_modes():
        given = shape if sizes is None else map(as_symbolic(sizes).symint, shape)
        return torch.empty(tuple(given), dtype=dtype, device="meta")


def held(shape: Sequence[Any], dtype: torch.dtype) -> Any:
    """What a node's ``meta["val"]`` is for a contiguous value: a tensor on meta, or what stands for
    one whose sizes are formulas.
    """
    if not any(map(is_dynamic, shape)):
        return meta(shape, dtype)
    sizes = [*shape[1:], 1]
    strides = tuple(math.prod(sizes[d:], start=1) for d in range(len(shape)))
    return StridedMeta(tuple(shape), dtype, strides)


_NUMBERS = count()


def name_of(sizes: Sizes) -> str:
    """A name that no other sizes in this process have."""
    if "name" not in sizes.memo:
        sizes.memo["name"] = f"sizes {next(_NUMBERS)}"
    return sizes.memo["name"]


# A graph whose numbers are formulas.


def with_formulas(graph: fx.Graph) -> None:
    """Replace the tensors in the metadata of a trace's nodes by shapes of formulas."""
    _map_vals(graph, formula_of)


def with_numbers(graph: fx.Graph, number: Replacement) -> fx.Graph:
    """A copy of a graph with ``number(x)`` in place of each number of its calls and shapes."""
    new = copied(graph)
    for node in new.nodes:
        made: Any = map_aggregate((node.args, dict(node.kwargs)), number)
        node._update_args_kwargs(*made)
    _map_vals(new, number)
    return new


def _map_vals(graph: fx.Graph, number: Replacement) -> None:
    def value(x: Any) -> Any:
        if not isinstance(x, Tensor | StridedMeta):
            return x
        strides = x.stride() if isinstance(x, Tensor) else x.strides
        shape, strides = (tuple(map(number, of)) for of in (x.shape, strides))
        if not any(map(is_formula, (*shape, *strides))):
            return torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")
        return StridedMeta(shape, x.dtype, strides)

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(value, node.meta["val"])


# Formulas as numbers of a trace.

_counts: ContextVar[tuple[Sizes, Sequence[SymInt]] | None] = ContextVar("counts", default=None)


@contextmanager
def numbers_from(sizes: Sizes, counts: Sequence[Tensor]) -> Iterator[None]:
    """Within the block, which is traced, `number` knows the dynamic sizes: the sizes of the tensors
    ``counts``, inputs of the trace.
    """
    with set_within(_counts, (sizes, [x.shape[0] for x in counts])):  # type: ignore[misc]
        yield


def number(x: Any) -> Any:
    """A formula as the number that ops of the trace take; anything else as it is."""
    if not is_formula(x):
        return x
    if type(x) is DynamicFloat:
        if x.operator in FUNCTIONS:
            return getattr(math, x.operator)(number(x.left))
        left, right = (torch.sym_float(number(part)) for part in (x.left, x.right))
        return OPERATORS[x.operator](left, right)
    known = _counts.get()
    assert known is not None and known[0] is x.sizes, x
    total: Any = 0
    for atoms, c in x.terms.items():
        total = total + reduce(lambda a, b: a * b, (_atom(*known, a) for a in atoms), c)
    return total


def _atom(sizes: Sizes, counts: Sequence[SymInt], atom: int) -> Any:
    kind, of = sizes.made_of(atom)
    if kind == "symbol":
        return counts[[s.name for s in sizes.given].index(of[0])]
    return INT_FUNCTIONS[kind](*map(number, of))


def at_hand(x: Any) -> Any:
    """A tensor's shape and dtype at the sizes at hand, as a tensor on meta, where it has dynamic
    ones; anything else as it is.
    """
    if not isinstance(x, Tensor | StridedMeta):
        return x
    shape = shape_of(x)
    is_static = isinstance(x, Tensor) and not any(map(is_dynamic, shape))
    return x if is_static else meta(tuple(map(evaluated, shape)), x.dtype)
