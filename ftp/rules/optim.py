"""Optimizers' updates: elementwise over a parameter's tensors; counters have no dims."""

from ftp.fused import UPDATES
from ftp.registry import pointwise

pointwise(*UPDATES)
