"""``torch.cond`` in a trace: the ops of both branches, each marked with its branch, and a choice of
results. Its gradient is a ``cond`` of the branches' gradients, which compute the branches again.

Tensors that a branch captures become operands, so that they have a gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from ftp.axis import is_inside
from ftp.dataclass import dataclass
from ftp.errors import TraceError, raise_all
from ftp.functional.contents import bound_now
from ftp.functional.differentiable import (
    is_differentiable,
    of_some,
    pulled_by_autograd,
    save_inputs,
)
from ftp.functional.remat import Again, run_again
from ftp.ops.assume import assumptions_to
from ftp.ops.choose import CHOOSE, BranchPath, branch, common, number_of, read_in
from ftp.ops.written import writes
from ftp.source import at_line
from ftp.torch_internals import pytree
from ftp.torch_internals.functorch import is_batched, peek_interpreter_stack, unwrap_if_dead
from ftp.tracing.captured_tensors import CapturedFinder, Swapped, nodes_so_far, plain
from ftp.tracing.data_dependent.known_values import KnownValues
from ftp.tracing.data_dependent.paths import new_number
from ftp.tracing.explain_errors import located, typed
from ftp.tracing.functionalize_graph import storages

Some = Callable[..., tuple[Tensor, ...]]
SIDES = (True, False)  # in the order of torch.cond's arguments


class Conds:
    """The conds of one trace."""

    def __init__(self, known: KnownValues) -> None:
        self._known = known

    def cond(
        self, predicate: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()
    ) -> Any:
        """As ``torch.cond``."""
        if (known := self._known.of(predicate)) is not None:
            return true_fn(*operands) if known else false_fn(*operands)
        predicate = predicate.detach().reshape(())
        predicate = predicate if predicate.dtype is torch.bool else predicate != 0
        if is_batched(predicate):
            return _where(predicate, true_fn(*operands), false_fn(*operands))
        leaves, tree = pytree.tree_flatten(tuple(operands))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def given(fn: Any) -> Callable[[Sequence[Tensor]], Any]:
            def call(tensors: Sequence[Tensor]) -> Any:
                filled = list(leaves)
                for i, tensor in zip(at, tensors, strict=True):
                    filled[i] = tensor
                return fn(*pytree.tree_unflatten(filled, tree))

            return call

        fns = given(bound_now(true_fn)), given(bound_now(false_fn))
        operands = [leaves[i] for i in at]
        again = run_again()
        before = nodes_so_far()
        captured: dict[fx.Node, Tensor] = {}
        found = []
        for side, fn in zip(SIDES, fns, strict=True):
            with again(), _branch(-1, side), CapturedFinder(before, captured) as mode:
                result = fn([plain(x) for x in operands])
            leaves_of, tree_of = pytree.tree_flatten(result)
            mode.check(leaves_of)
            found.append((leaves_of, tree_of))
        (results, out_tree), _ = _alike(found)
        outer = list(captured)
        n = len(operands)

        def some(fn: Callable[[Sequence[Tensor]], Any]) -> Some:
            def run(*tensors: Tensor) -> tuple[Tensor, ...]:
                with Swapped(before, dict(zip(outer, tensors[n:], strict=True))):
                    leaves = pytree.tree_leaves(fn(tensors[:n]))
                return tuple(x for x in leaves if isinstance(x, Tensor))

            return run

        # Through a call that an outer cond sees: it does not see an autograd.Function's arguments.
        tensors = [x.view_as(x) for x in (*operands, *captured.values())]
        branches = _Branches(self, (some(fns[0]), some(fns[1])), again)
        chosen: Any = _Cond.apply(branches, predicate, *tensors)
        made = iter(chosen)
        return pytree.tree_unflatten(
            [next(made) if isinstance(x, Tensor) else x for x in results], out_tree
        )

    def choose(self, predicate: Tensor, fns: Sequence[Some], tensors: Any) -> tuple[Tensor, ...]:
        """Compute both branches, and choose each result by the predicate."""
        number = new_number()
        if is_inside():  # of ftp.local: each rank has a predicate of its own, and computes both
            number = -1 - number
        results = []
        for side, fn in zip(SIDES, fns, strict=True):
            with _branch(number, side):
                results.append(fn(*tensors))
        return tuple(CHOOSE(predicate, a, b, number) for a, b in zip(*results, strict=True))


@contextmanager
def _branch(number: int, side: bool) -> Iterator[None]:
    # No assumptions are noted in a branch: they need not hold where it is not taken.
    with branch(number, side), assumptions_to(None):
        yield


def _where(predicate: Tensor, if_true: Any, if_false: Any) -> Any:
    """Choose between results for each slice of torch.vmap's mapped dim."""
    (a, tree), (b, _) = _alike([pytree.tree_flatten(if_true), pytree.tree_flatten(if_false)])
    picked = [
        torch.where(predicate, x, y) if isinstance(x, Tensor) else x
        for x, y in zip(a, b, strict=True)
    ]
    return pytree.tree_unflatten(picked, tree)


def _alike(found: Sequence[tuple[list[Any], Any]]) -> Sequence[tuple[list[Any], Any]]:
    """Raise where branches give results of another structure, shape, dtype or static value."""
    (a, tree), (b, other) = found
    if tree != other:
        raise TraceError(
            f"{at_line()}torch.cond's branches give results of two structures:"
            f" {_structure(a, tree)} if true, {_structure(b, other)} if false. Return one."
        )
    failures = [
        f"{at_line()}torch.cond's branches give {_described(x)} if true and {_described(y)} if"
        f" false, as result {i}. Give tensors of equal shape and dtype, and equal static values."
        for i, (x, y) in enumerate(zip(a, b, strict=True))
        if _described(x) != _described(y)
    ]
    raise_all(TraceError, failures)
    return found


def _structure(leaves: Sequence[Any], tree: Any) -> str:
    return "one tensor" if tree.is_leaf() else str(pytree.tree_unflatten(["*"] * len(leaves), tree))


def _described(x: Any) -> str:
    return typed(x) if isinstance(x, Tensor) else repr(x)


@dataclass(frozen=True, eq=False)
class _Branches:
    """Two functions of the same tensors.

    Attributes:
        again: re-enters the contexts that surrounded the cond, for a run in the backward pass.
    """

    conds: Conds
    fns: tuple[Some, Some]
    again: Again

    def of(self, derived: Callable[[Some], Some]) -> "_Branches":
        """``derived`` of each branch, which runs after the surrounding contexts have ended."""

        def run(fn: Some) -> Some:
            def call(*tensors: Tensor) -> tuple[Tensor, ...]:
                with self.again():
                    return derived(fn)(*tensors)

            return call

        return _Branches(self.conds, (run(self.fns[0]), run(self.fns[1])), self.again)


class _Cond(torch.autograd.Function):
    """A cond whose gradient is a cond of the branches' gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(branches: _Branches, predicate: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return branches.conds.choose(predicate, branches.fns, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.branches, *tensors = inputs
        save_inputs(ctx, tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        predicate, *tensors = map(unwrap_if_dead, ctx.saved_tensors)
        given = [unwrap_if_dead(g) for g, has in zip(grads, ctx.has_gradient, strict=True) if has]
        n = len(tensors)
        at = [
            i for i, x in enumerate(tensors) if is_differentiable(x) and ctx.needs_input_grad[i + 2]
        ]

        def pulled(fn: Some) -> Some:
            def pull(*values: Tensor) -> tuple[Tensor, ...]:
                return _pull(of_some(fn, values[:n], at), [values[i] for i in at], values[n:])

            return pull

        found: Any = _Cond.apply(ctx.branches.of(pulled), predicate, *tensors, *given)
        result: list[Any] = [None] * (2 + n)
        for i, grad in zip(at, found, strict=True):
            result[i + 2] = grad
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Any:
        predicate, *tensors = map(unwrap_if_dead, ctx.saved_tensors)
        n = len(tensors)
        at = [i for i, t in enumerate(tangents) if t is not None and is_differentiable(tensors[i])]

        def pushed(fn: Some) -> Some:
            def push(*values: Tensor) -> tuple[Tensor, ...]:
                primals = tuple(values[i] for i in at)
                jvp: Any = torch.func.jvp(of_some(fn, values[:n], at), primals, values[n:])
                return jvp[1]

            return push

        given = [tangents[i] for i in at]
        found: Any = _Cond.apply(ctx.branches.of(pushed), predicate, *tensors, *given)
        made = iter(found)
        return tuple(next(made) if has else None for has in ctx.has_gradient)


def _pull(fn: Some, given: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of a branch, taken as the surrounding gradient is (torch.func or autograd)."""
    if peek_interpreter_stack() is not None:
        pull: Any = torch.func.vjp(fn, *given)[1]
        return pull(tuple(grads))
    found = pulled_by_autograd(fn, given, grads, again=True)
    return tuple(
        torch.zeros_like(x) if grad is None else grad for x, grad in zip(given, found, strict=True)
    )


def check_writes(graph: fx.Graph) -> None:
    """Refuse branches that write to tensors made outside of them."""
    if not any(node.meta.get("branch") for node in graph.nodes):
        return
    made: dict[int, BranchPath] = {}
    for node in graph.nodes:
        for storage in storages(node):
            made.setdefault(storage, node.meta.get("branch", ()))
    failures = [
        f"A branch of torch.cond changes a tensor that was made outside of it, in place"
        f"{located(node.meta['source'])} by {node.target}. Work on a copy, x = x.clone(), and"
        " return what has changed."
        for node in graph.nodes
        if (branch := node.meta.get("branch", ()))
        for value in writes(node)
        if any(made[storage] != branch for storage in storages(value))
    ]
    raise_all(TraceError, dict.fromkeys(failures))


def unmark_cut(graph: fx.Graph) -> None:
    """Compute both branches of each cond that has a value read outside of its branch, such as a
    cond that the stages of a pipeline cut in two.
    """
    marked = [node for node in graph.nodes if node.meta.get("branch")]
    chosen = {number_of(node.target, node.args) for node in graph.nodes}
    cut = {number for node in marked for number, _ in node.meta["branch"]} - chosen
    for node in marked:
        own: BranchPath = node.meta["branch"]
        for user in node.users:
            there = user.meta.get("branch", ())
            operands = list(enumerate(user.args)) if user.target is CHOOSE else [(0, node)]
            for slot in (i for i, x in operands if x is node):
                at = common([own, read_in(user.target, user.args, there, slot)])
                cut |= {number for number, _ in own[len(at) :]}
    for node in graph.nodes if cut else ():
        node.meta["branch"] = tuple(s for s in node.meta.get("branch", ()) if s[0] not in cut)
        if node.target is CHOOSE and node.args[3] in cut:
            node.args = (*node.args[:3], -1)
