"""Ops that stand for torch's collectives in a recorded rank program; they are never run.

``exchange`` is a collective or one side of a send. Its arguments are the tensors that it sends, the
buffers that it writes (none if its results are new tensors), and the ranks of its group in order.
``arrived`` waits for it. ``literal`` is a constant tensor.
"""

import torch

_LIBRARY = torch.library.Library("ftp_rank", "DEF")
_LIBRARY.define(
    "exchange(str kind, Tensor[] sent, Tensor(a!)[] into, int[] ranks, str group, str option,"
    " int[] sizes, int call) -> Tensor[]"
)
_LIBRARY.define("arrived(int call) -> ()")
_LIBRARY.define("literal(Scalar[] values, int[] shape, ScalarType dtype) -> Tensor")

EXCHANGE = torch.ops.ftp_rank.exchange.default
ARRIVED = torch.ops.ftp_rank.arrived.default
LITERAL = torch.ops.ftp_rank.literal.default
