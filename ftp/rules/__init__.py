"""The sharding rules of aten's ops, one file per family; importing it registers them."""

from ftp.rules import attention, conv, ctc, einsum, factory, index, linalg, norm, optim, pointwise, random, reduce, scan, shape, stacked

__all__ = [
    "attention",
    "conv",
    "ctc",
    "einsum",
    "factory",
    "index",
    "linalg",
    "norm",
    "optim",
    "pointwise",
    "random",
    "reduce",
    "scan",
    "shape",
    "stacked",
]
