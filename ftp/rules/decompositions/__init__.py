"""Fused ops as primitives that have rules, for when a factor that the fused op keeps whole is cut.

Written so that a cut dim costs few small collectives: reductions before anything else, sums rather
than means, nothing materialised that the fused op does not hold. Half precision is computed in
float32 and rounded at the end, as the kernels do.
"""

from ftp.rules.decompositions import index, matmul, norm, reduce, softmax
from ftp.rules.decompositions.registry import DECOMPOSITIONS, HALF, decomposition

__all__ = [
    "DECOMPOSITIONS",
    "HALF",
    "decomposition",
    "index",
    "matmul",
    "norm",
    "reduce",
    "softmax",
]
