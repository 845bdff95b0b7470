"""Where a traced function takes means over microbatches: a pipeline runs what is before them once
for each microbatch, and what follows once a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Means:
    """The means of one trace.

    Attributes:
        microbatches: of a step.
        values: each mean's value for one microbatch, a tensor of its own.
        of: per mean the parameter that it is the gradient of; None of another result.
        batch: tensors that ``ftp.optim.accumulate`` was to cut into microbatches.
        calls: how many gradients were taken, those within others not counted.
        is_within: whether one is being taken.
    """

    microbatches: int
    values: list[Tensor] = field(default_factory=list)
    of: list[Tensor | None] = field(default_factory=list)
    batch: list[Tensor] = field(default_factory=list)
    calls: int = 0
    is_within: bool = False

    def begin(self) -> None:
        """Forget all, for a trace that begins."""
        self.values, self.of, self.batch, self.calls = [], [], [], 0

    @contextmanager
    def taking(self) -> Iterator[None]:
        """While a gradient is taken."""
        self.calls += 1
        self.is_within = True
        try:
            yield
        finally:
            self.is_within = False

    def mean(self, value: Tensor, of: Tensor | None = None) -> Tensor:
        """The mean of ``value`` over the microbatches."""
        # Copies: the first is a node of its own for each mean, the second may be written to.
        own = value.clone()
        self.values.append(own)
        self.of.append(of)
        return own.clone()

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one order: means, parameters, batch."""
        return [*self.values, *(x for x in self.of if x is not None), *self.batch]


_means: ContextVar[Means | None] = ContextVar("microbatch means", default=None)


def current_means() -> Means | None:
    """Those of the trace that is going on; None where no pipeline asks for them, and within a
    gradient that is taken already.
    """
    means = _means.get()
    return None if means is None or means.is_within else means


def means_of_trace() -> Means | None:
    """As `current_means`, within a gradient too."""
    return _means.get()


@contextmanager
def noting_means(microbatches: int) -> Iterator[Means]:
    """Inside the block, a trace notes its means over microbatches."""
    means = Means(microbatches)
    token = _means.set(means)
    try:
        yield means
    finally:
        _means.reset(token)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no wrapper of a torch.func transform that is going on."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]
