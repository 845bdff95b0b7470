"""Fast path: recognise a call whose arguments are the last call's results, and skip validation.

A train loop passes a step what the last call returned, and a batch of the same shape. Finding the
program by the call's key takes longer than a small program runs. Here one pass of C++ compares the
metadata of all tensors, and results of the last call are compared by identity.
"""

from collections.abc import Callable, Sequence
from operator import call, is_, itemgetter
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from ftp.api.arguments import Arguments
from ftp.tensors.placement import Fact, Returned, known_of
from ftp.torch_internals.storages import is_shared
from ftp.tracing.settings import settings


class Expected:
    """The call that is expected next: one like the last.

    Args:
        arguments: of the last call, which a program served.
        facts: per leaf its recorded fact.
        before: the results of the call before the last, if it ran the same program.
        outputs: the facts of a call's outputs, until something changes them.
        donated: leaves whose memory the program reuses, and the fact to record of each.
    """

    def __init__(
        self,
        arguments: Arguments,
        facts: Sequence[Fact | None],
        before: Returned | None,
        outputs: Sequence[Fact],
        donated: dict[int, Fact],
    ):
        leaves = arguments.leaves
        came_from = [
            None if before is None or not isinstance(leaf, torch.Tensor) else before.find(leaf)
            for leaf in leaves
        ]
        came_from = [
            at if at is not None and fact is outputs[at] else None
            for at, fact in zip(came_from, facts, strict=True)
        ]
        returned = [i for i, at in enumerate(came_from) if at is not None]
        self.outputs = outputs
        self.is_likely = (
            set(donated) <= set(returned)
            and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
            and len(leaves) > 0
        )
        self._treedef: Any = arguments.treedef
        self._settings, self._orders = arguments.settings, arguments.orders
        self._donated = sorted(donated)
        self._returned = items_at(returned)
        self._refs = items_at([at for at in came_from if at is not None])
        self._others = [i for i, at in enumerate(came_from) if at is None]
        self._facts = [facts[i] for i in self._others]
        # A leaf without a fact is no result of the last call, and so none of the donated ones.
        self._may_repeat = any(fact is not None for fact in self._facts)
        # The facts about the outputs once they were passed to the next call.
        used = {came_from[i]: fact for i, fact in donated.items()}
        self.afterwards: Sequence[Fact] = [used.get(at, fact) for at, fact in enumerate(outputs)]
        if self.is_likely:
            sizes, strides = [list(x.shape) for x in leaves], [list(x.stride()) for x in leaves]
            guards: Any = TensorGuards  # its declared types differ from those it takes
            self._are_alike = guards(
                *leaves, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
            ).check

    def leaves(self, args: tuple[Any, ...], last: Returned) -> list[torch.Tensor] | None:
        """The leaves of a call that is like the last one, which returned ``last``; None if it is
        not. Dicts with the same keys in one order are alike, whatever their class.
        """
        if not self.is_likely or last.facts is not self.outputs or self._settings != settings():
            return None
        try:
            leaves: list[Any] = self._treedef.flatten_up_to(args)
        except ValueError:
            return None
        if not self._orders.hold(args):
            return None
        if not self._are_alike(*leaves) or not all(
            map(is_, self._returned(leaves), map(call, self._refs(last.refs)))
        ):
            return None
        if [known_of(leaves[i]) for i in self._others] != self._facts:
            return None
        if self._donated and (
            (self._may_repeat and len(set(map(id, leaves))) < len(leaves))
            or self._may_share_donated(leaves)
        ):
            return None
        return leaves

    def _may_share_donated(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor that is no result of the last call has the memory of a donated one,
        which is. Results share none with each other.
        """
        others = [leaves[i].untyped_storage() for i in self._others]
        shared = {x.data_ptr() for x in others if is_shared(x)}
        return bool(shared) and not shared.isdisjoint(
            leaves[i].untyped_storage().data_ptr() for i in self._donated
        )


def items_at(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that gives the items at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: [items[i] for i in positions]
