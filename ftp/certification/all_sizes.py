"""Certificates for all sizes: ops without values on sizes that are formulas.

The check of a certificate whose sizes are `DynamicInt`s computes with formulas. A question with
another answer at another size is recorded as a condition, and C code that asks for a size records
the condition that the size is this one. So the certificate holds for every size that meets its
conditions. Two formulas are taken for equal only if they are at all sizes. Where the checker takes
two for different, it refuses, or goes on in a way that is right for equal ones too. What is right
only for numbers that differ, it decides by an order or a test for zero, which are conditions.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ftp.dynamic_float import DynamicFloat
from ftp.dynamic_int import DynamicInt, Sizes
from ftp.rules.call import replaced
from ftp.torch_internals.fake_tensors import mode_for

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic


class WithoutValues:
    """Runs ops on tensors without values, of shapes that may be formulas.

    Args:
        sizes: the dynamic sizes; None for plain numbers.
    """

    def __init__(self, sizes: Sizes | None):
        self.symbolic = None if sizes is None else symbolic_of(sizes)
        self._mode = nullcontext() if self.symbolic is None else mode_for(self.symbolic.env)

    def number(self, x: Any) -> Any:
        return x if self.symbolic is None else self.symbolic.symint(x)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._mode:
            return torch.empty([*map(self.number, shape)], dtype=dtype, device="meta")

    def run(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of an op. What torch asks of sizes is recorded."""
        options = {k: "meta" if k == "device" else x for k, x in kwargs.items()}
        if self.symbolic is None:
            return target(*args, **options)
        given = replaced((args, options), (DynamicInt, DynamicFloat), self.number)
        with self.symbolic.generic(lambda: ""), self._mode:
            made = target(*given[0], **given[1])
        self.symbolic.note_guards()
        return made

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        if self.symbolic is None:
            return tuple(x.shape)
        return tuple(map(self.symbolic.dynamic, x.shape))


def symbolic_of(sizes: Sizes) -> "Symbolic":
    """The sizes as torch's symbolic ints, of which no question is answered yet: so each is
    recorded. Imported late, because sympy takes long to import.
    """
    from ftp.tracing.symbolic import Symbolic

    return Symbolic(sizes)
