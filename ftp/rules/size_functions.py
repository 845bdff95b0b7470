"""Functions of sizes that rules compute with: of ints, or of formulas of dynamic sizes."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ftp.dynamic_int import is_dynamic, terms_of, value_of


def gcd(*numbers: Any) -> Any:
    """A common divisor: of ints the greatest; of formulas the greatest that divides at all sizes.

    >>> from ftp.dynamic_int import Sizes, Symbol
    >>> (s,) = Sizes([Symbol("S", 7, 1, 512)]).symbols
    >>> gcd(12, 18), gcd(8 * s, 12), gcd(6 * s, 4 * s), gcd(0, s)
    (6, 4, 2*S, S)
    >>> gcd(-8 * (-s // 8), -(-s // 8))
    -((-S)//8)
    """
    found = 0
    for x in numbers:
        found = _gcd(found, x)
    return found


def _gcd(a: Any, b: Any) -> Any:
    if not is_dynamic(a) and not is_dynamic(b):
        return math.gcd(a, b)
    if not is_dynamic(a) and a == 0:
        return b
    if not is_dynamic(b) and b == 0:
        return a
    terms = [*terms_of(a).items(), *terms_of(b).items()]
    if is_dynamic(a) and is_dynamic(b) and a.terms == b.terms:
        return a
    content = math.gcd(*(c for _, c in terms))
    common = Counter(terms[0][0])
    for atoms, _ in terms[1:]:
        common &= Counter(atoms)
    sizes = (a if is_dynamic(a) else b).sizes
    found = sizes.formula({tuple(sorted(common.elements())): content})
    return -found if value_of(found) < 0 else found


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of tensors that broadcast together; a trace has checked that they do.

    >>> from ftp.dynamic_int import Sizes, Symbol
    >>> (s,) = Sizes([Symbol("S", 7, 1, 512)]).symbols
    >>> broadcast_shapes((4, 1), (s,))
    (4, S)
    """
    ndim = max(map(len, shapes), default=0)
    found: list[int] = [1] * ndim
    for shape in shapes:
        for d, size in enumerate(shape, ndim - len(shape)):
            found[d] = size if size != 1 else found[d]
    return tuple(found)


def slice_bounds(start: Any, end: Any, step: Any, size: Any) -> tuple[Any, Any, Any]:
    """``slice(start, end, step).indices(size)`` for a positive step.

    >>> from ftp.dynamic_int import Sizes, Symbol
    >>> (s,) = Sizes([Symbol("S", 7, 2, 512)]).symbols
    >>> slice_bounds(1, 2**63 - 1, 1, s), slice_bounds(None, -1, 1, s + 1), slice_bounds(0, 9, 2, 5)
    ((1, S, 1), (0, S, 1), (0, 5, 2))
    """
    if not any(map(is_dynamic, (start, end, size))):
        return slice(start, end, step).indices(size)

    def within(at: Any) -> Any:
        at = at + size if at < 0 else at
        return 0 if at < 0 else size if at > size else at

    step = 1 if step is None else step
    return within(0 if start is None else start), within(size if end is None else end), step
