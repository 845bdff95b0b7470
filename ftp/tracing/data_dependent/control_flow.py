"""torch's operators of control flow while a program is traced: ``cond``, ``scan``, ``map``,
``while_loop``, ``associative_scan``, ``invoke_subgraph``.

torch compiles the functions that these operators take. Here they are traced in place, so that their
ops have rules, plans and gradients like any other op.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import utils
from torch._higher_order_ops.associative_scan import AssociativeScanOp, generic_associative_scan
from torch._higher_order_ops.cond import CondOp
from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP
from torch._higher_order_ops.map import MapImpl
from torch._higher_order_ops.scan import ScanOp
from torch._higher_order_ops.while_loop import WhileLoopOp

from ftp.errors import TraceError
from ftp.functional.scan import scan
from ftp.source import at_line
from ftp.torch_internals import pytree
from ftp.tracing.data_dependent.branches import Conds
from ftp.tracing.data_dependent.known_values import KnownValues
from ftp.tracing.explain_errors import typed
from ftp.tracing.replacements.replaced import replaced
from ftp.tracing.selected_rows.refused import tried


@contextmanager
def control_flow() -> Iterator[None]:
    """Replace the operators by functions that a trace sees through."""
    known = KnownValues()
    conds = Conds(known)

    def associative_scan(
        _: Any, combine_fn: Any, xs: Sequence[Tensor], additional_inputs: Sequence[Any]
    ) -> Any:
        return generic_associative_scan(combine_fn, xs, additional_inputs=tuple(additional_inputs))

    calls: dict[Any, Callable[..., Any]] = {
        CondOp: lambda _, *args: conds.cond(*args),
        ScanOp: _scan,
        MapImpl: _map,
        WhileLoopOp: lambda _, *args, **named: _while_loop(known, *args, **named),
        AssociativeScanOp: associative_scan,
        InvokeSubgraphHOP: lambda _, subgraph, identifier, *operands: subgraph(*operands),
    }
    with ExitStack() as stack:
        for operator, call in calls.items():
            stack.enter_context(replaced(operator, {"__call__": call}))
        direct = lambda fn, args, kwargs=None: fn(*args, **(kwargs or {}))  # noqa: E731
        stack.enter_context(replaced(utils, {"_hop_compile_and_call": direct}))
        yield


def _scan(
    _: Any,
    combine_fn: Callable[..., Any],
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    """As ``ftp.scan``, whose steps are planned as one. The result has the structure that
    ``combine_fn`` gives: the last carry's leaves, then the outputs', stacked.
    """
    made: list[Any] = []

    def step(slices: list[Tensor], carry: list[Tensor]) -> tuple[list[Any], list[Any]]:
        leaves, tree = pytree.tree_flatten(combine_fn(*carry, *slices, *additional_inputs))
        made[:] = [tree]
        return leaves[: len(carry)], leaves[len(carry) :]

    step.__name__ = _name(combine_fn)
    carry, outputs = scan(step, list(xs), list(init), has_outputs=True)
    return pytree.tree_unflatten([*carry, *outputs], made[0])


def _name(fn: Any) -> str:
    """The name of the user's function inside torch's partial functions."""
    while (inner := getattr(fn, "keywords", {})) and (inner := inner.get("combine_fn")):
        fn = inner
    return getattr(fn, "__name__", type(fn).__name__)


def _map(_: Any, f: Callable[..., Any], xs: Sequence[Tensor], pos_args: Sequence[Any]) -> Any:
    """Call ``f`` on all slices at once by torch.vmap, so that the mapped dim may be cut; if vmap
    refuses the function, slice by slice.
    """
    try:
        mapped = torch.vmap(lambda *slices: f(*slices, *pos_args), randomness="different")
        with tried():
            return mapped(*xs)
    except (RuntimeError, ValueError, NotImplementedError):
        return _scan(None, f, [], xs, pos_args)


def _while_loop(
    known: KnownValues,
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any],
) -> Any:
    """Unroll the loop: its condition must depend only on numbers."""
    values: Sequence[Any] = tuple(carried_inputs)
    result: Any = tuple(x.clone() if isinstance(x, Tensor) else x for x in values)
    trips = 0
    while (goes_on := known.of(condition := cond_fn(*values, *additional_inputs))) is not None:
        if not goes_on:
            return result
        result = body_fn(*values, *additional_inputs)
        found = pytree.tree_leaves(result)
        taken, given = ([*map(_described, xs)] for xs in (values, found))
        if taken != given:
            raise TraceError(
                f"{at_line()}while_loop's body takes {', '.join(taken)} and gives"
                f" {', '.join(given)} in iteration {trips}; the next iteration takes what this one"
                " gives. Return tensors of equal shape and dtype."
            )
        values, trips = found, trips + 1
    raise TraceError(
        f"{at_line()}while_loop has a condition, {_described(condition)}, that depends on tensors'"
        " values: how often it runs is not known when it is traced. Count its iterations from"
        " and up to known numbers (torch.tensor(0), or 0), or state their maximum:"
        " ftp.static.while_loop(cond_fn, body_fn, carried, max_steps=n)."
    )


def _described(x: Any) -> str:
    return typed(x) if isinstance(x, Tensor) else type(x).__name__
