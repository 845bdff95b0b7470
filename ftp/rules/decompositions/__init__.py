"""Fused ops as primitives with rules, used where a factor that the fused op keeps whole is cut.

They are written so that a cut dim costs few small collectives: reductions first, sums rather than
means, no tensor stored that the fused op does not store. Half precision is computed in float32 and
rounded at the end, as in the kernels.
"""

from ftp.rules.decompositions import factory, index, matmul, norm, reduce, softmax  # noqa: F401
from ftp.rules.decompositions.registry import DECOMPOSITIONS

OWN_DECOMPOSITIONS = dict(DECOMPOSITIONS)
