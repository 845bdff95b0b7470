"""torch's classes of ops, and its table of decompositions. Read at torch 2.13."""

from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
