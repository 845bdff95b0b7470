"""Pass 2, rules: how each aten op's dims correspond, one file per family; importing it registers
them.
"""

from ftp.rules import (
    along_dim,
    attention,
    conv,
    factory,
    flex_attention,
    ftp_ops,
    index,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    reduce,
    shape,
    slices,
)

__all__ = [
    "along_dim",
    "attention",
    "conv",
    "factory",
    "flex_attention",
    "ftp_ops",
    "index",
    "linalg",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "reduce",
    "shape",
    "slices",
]
