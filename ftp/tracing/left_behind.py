"""Tensors of a trace that the function leaves in variables, containers and attributes: a program
does not renew them, so that the function must not read them at its next call.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ftp.errors import TraceError
from ftp.tracing.captured import tensors_around
from ftp.tracing.captured_tensors import node_of


def left_behind(fn: Callable[..., Any]) -> list[str]:
    """While ``fn`` is traced: the places where it finds tensors of the trace; none where one of
    them is the same at each call, such as a mask that is made once: a second trace has no use of
    it.
    """
    depends: dict[fx.Node, bool] = {}
    found = {
        place.name: _is_of_arguments(node, depends)
        for place in tensors_around(getattr(fn, "__wrapped__", fn))
        if (node := node_of(place.tensor)) is not None
    }
    return list(found) if all(found.values()) else []


def _is_of_arguments(node: fx.Node, depends: dict[fx.Node, bool]) -> bool:
    for each in node.graph.nodes if node not in depends else ():
        depends[each] = (
            "ftp_constant" not in each.meta
            if each.op == "placeholder"
            else any(depends[operand] for operand in each.all_input_nodes)
        )
    return depends[node]


def check_unread(places: Sequence[str], again: Callable[[], Any]) -> None:
    """Refuse a function that reads what its trace left in ``places``: ``again`` traces it anew."""
    try:
        again()
    except Exception as error:
        raise TraceError(
            f"{places[0]}, holds a tensor that the function computed and left there for its next"
            " call. A step is traced once, and its calls do not go through Python: each would"
            " begin with what was there at first. Pass such a tensor as an argument, and return"
            " it (has_aux=True)."
        ) from error
