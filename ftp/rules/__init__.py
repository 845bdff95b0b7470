"""Pass 2, rules: how each aten op's dims correspond, one file per family; importing it registers
them.
"""

from ftp.rules import (  # noqa: F401
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
from ftp.rules.registry import RULES

OWN_RULES = dict(RULES)  # before a user registers one
