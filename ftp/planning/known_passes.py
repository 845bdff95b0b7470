"""Results of passes that several plans of one program share."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class KnownPasses:
    """Results of passes over the graphs of one program, for one mesh and one hardware. Plans for
    other specs, or in another order of the axes, repeat many of them.

    >>> known, graph = KnownPasses(), object()
    >>> known.once(graph, "dp", 2, make=lambda: "made")
    'made'
    >>> known.once(graph, "dp", 2, make=lambda: "made again")
    'made'
    """

    def __init__(self):
        self._found: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def once(self, graph: Any, *facts: Any, make: Callable[[], T]) -> T:
        """The result of ``make``, which depends on a graph, which no one changes, and on facts."""
        key = (id(graph), *facts)
        if key not in self._found:
            self._found[key] = graph, make()  # the graph is kept, so its id stays its own
        return self._found[key][1]
