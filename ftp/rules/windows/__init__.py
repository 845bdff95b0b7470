"""Ops in which neighbours along a dim meet, as the same ops on windows of the dim: slices, padding,
rolls, convolutions, pooling and upsampling. Scans, whose windows need their totals.

Each rank of an axis that cuts the dim computes one window. It needs a halo: the elements around its
own, which the ranks next to it hold. The windows are a new first dim, which ops take as the batch.
"""

from ftp.rules.windows import convolution, movement, pooling  # noqa: F401
from ftp.rules.windows.overlays import OVERLAYS  # noqa: F401
from ftp.rules.windows.registry import WINDOWED, FarApart, by_windows  # noqa: F401
from ftp.rules.windows.scans import SCANS  # noqa: F401
