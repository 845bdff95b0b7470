"""What rounding may do to a result below double precision, on any machine; as ``ftp.testing``.

Kernels add up in different orders on different machines, so no fixed bound holds on all of them.
This one is made of float64's result and of how far plain torch itself is off from it.
"""

import torch
from torch import Tensor

from ftp.testing.divergence import OF_DEVICE, OF_DTYPE


def room(plain: Tensor, exact: Tensor) -> float:
    """How far a right result may be from plain torch's ``plain``; ``exact`` is float64's.

    >>> room(torch.ones(2), torch.ones(2, dtype=torch.float64)) / torch.finfo(torch.float32).eps
    8.0
    """
    wide = exact.to(torch.complex128 if exact.is_complex() else torch.float64)
    own = float((plain.to(wide.dtype) - wide).abs().max()) if plain.numel() else 0.0
    largest = float(wide.abs().max()) if wide.numel() else 0.0
    return OF_DTYPE * torch.finfo(plain.dtype).eps * largest + OF_DEVICE * own
