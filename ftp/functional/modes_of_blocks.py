"""Modes that are also active inside of recomputed blocks."""

from torch import Tensor
from torch.overrides import TorchFunctionMode


class ModeOfBlocks(TorchFunctionMode):
    """A function mode that is also active inside blocks: torch runs autograd functions, and their
    backward passes, without the modes in which they are called. It is entered several times, so it
    keeps no state of where it was entered.
    """

    def stands_for(self, new: Tensor, old: Tensor) -> None:
        """Take ``new`` for ``old``: inside of a block other tensors stand for those outside."""
