"""Means over microbatches in a traced function: a pipeline runs the ops before them once per
microbatch, and the ops after them once per step.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import field

from torch import Tensor, contiguous_format

from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.torch_internals.functorch import is_functorch_wrapped_tensor


@dataclass(eq=False)
class Means:
    """The means of one trace.

    Attributes:
        microbatches: number of microbatches of a step.
        values: each mean's value for one microbatch, as a separate tensor.
        of: per mean, the parameter whose gradient it is; None for another result.
        batch, rows: tensors that ``ftp.optim.accumulate`` was given to cut into microbatches, and
            one microbatch of each.
        calls: number of gradients taken, without those inside others.
        is_within: whether a gradient is being taken.
    """

    microbatches: int
    values: list[Tensor] = field(default_factory=list)
    of: list[Tensor | None] = field(default_factory=list)
    batch: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    calls: int = 0
    is_within: bool = False

    def begin(self) -> None:
        """Forget all means, for a new trace."""
        self.values, self.of, self.batch, self.rows, self.calls = [], [], [], [], 0

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Inside the block a gradient is taken."""
        self.calls += 1
        self.is_within = True
        try:
            yield
        finally:
            self.is_within = False

    def cut(self, tensor: Tensor) -> Tensor:
        """The first microbatch of a batch tensor; one that has no such rows is an error later."""
        n = self.microbatches
        whole = not tensor.ndim or tensor.shape[0] % n
        rows = tensor if whole else tensor.unflatten(0, (-1, n)).select(1, 0)
        # A node of its own.
        own = rows.clone(memory_format=contiguous_format)
        self.batch.append(tensor)
        self.rows.append(own)
        return own

    def mean(self, value: Tensor, of: Tensor | None = None) -> Tensor:
        """The mean of ``value`` over the microbatches."""
        # Two copies: the first gives each mean its own node, the second may be written to.
        own = value.clone()
        self.values.append(own)
        self.of.append(of)
        return own.clone()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in one order: means, parameters, batch, rows."""
        of = (x for x in self.of if x is not None)
        return [*self.values, *of, *self.batch, *self.rows]


_means: ContextVar[Means | None] = ContextVar("microbatch means", default=None)


def current_means() -> Means | None:
    """The current trace's means; None if no pipeline asks for them, or inside a gradient."""
    means = _means.get()
    return None if means is None or means.is_within else means


def means_of_trace() -> Means | None:
    """As `current_means`, inside a gradient too."""
    return _means.get()


def noting_means(microbatches: int) -> AbstractContextManager[Means]:
    """Within the block note the means over microbatches of a trace."""
    return set_within(_means, Means(microbatches))


def noting_none() -> AbstractContextManager[None]:
    """Within the block a trace is made apart from the surrounding one, whose means stay."""
    return set_within(_means, None)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is not wrapped by an active torch.func transform."""
    return not is_functorch_wrapped_tensor(tensor)
