"""Collectives that a rank's program issues, as records; the all-gather of a backend."""

from typing import Any

import torch
from torch.fx.node import has_side_effect

from ftp.dataclass import dataclass
from ftp.ops.define import define, like, register_fake
from ftp.torch_internals.op_types import OpOverload
from ftp.torch_internals.process_groups import resolve_process_group

c10d = torch.ops._c10d_functional

# Graph passes keep a collective that one rank has no use for.
has_side_effect(c10d.wait_tensor.default)

# gloo's call behind ``all_gather_into_tensor`` corrupts the heap, once in some 50,000 calls on a
# CPU, and reads a GPU's memory as if it were the host's; its call behind
# ``all_gather_into_tensor_out`` does neither. Seen in torch 2.13.0 and 2.14.1.
OVER_GLOO = define(like("all_gather_over_gloo", c10d.all_gather_into_tensor.default))
register_fake(OVER_GLOO, c10d.all_gather_into_tensor.default)


def _gather_over_gloo(shard: torch.Tensor, n: int, group: Any) -> torch.Tensor:
    whole = shard.new_empty([n * shard.shape[0], *shard.shape[1:]])
    return c10d.all_gather_into_tensor_out.default(shard, n, group, out=whole)


torch.library.impl(OVER_GLOO._name, "CompositeExplicitAutograd", _gather_over_gloo)


def is_over_gloo(group: Any, device: torch.device) -> bool:
    """Whether a process group's collectives of tensors on ``device`` go over gloo."""
    return resolve_process_group(group)._get_backend(device).name() == "gloo"


def gather_of(group: Any, device: torch.device) -> OpOverload:
    """The functional all-gather to call for tensors on ``device``."""
    return OVER_GLOO if is_over_gloo(group, device) else c10d.all_gather_into_tensor.default


@dataclass(frozen=True)
class Member:
    """A tensor that an issued collective sends.

    Attributes:
        name: of the value, such as ``params['w']``.
        nbytes: its bytes in this rank's buffer on the larger side.
        cause: the purpose of its reshard.
    """

    name: str
    nbytes: int
    cause: str = ""


@dataclass(frozen=True)
class Collective:
    """One issued collective: of one tensor, or of a bucket of several.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``ring`` or
            ``halo_exchange``.
        axes: the mesh axes it runs over.
        shape, dtype, nbytes: of this rank's buffer on the larger side.
        global_shape: global shape of the value that is resharded.
        wire_nbytes: bytes that this rank sends, in a ring.
        source: the line of the user's code that the value comes from.
        cause: the purpose of the reshard; for a bucket, of its first member's.
        worst_nbytes: the most bytes that this rank may send or receive, where the sizes of parts
            depend on values; the other figures then assume equal parts.
        members: the tensors that it sends.

    >>> import ftp
    >>> mesh = ftp.AbstractMesh((2,), ("dp",))
    >>> sums = lambda x: (x.sum(), x.exp().sum())
    >>> step = ftp.spmd(sums, mesh, ftp.P("dp"), ftp.P(), bucket=True)
    >>> lowered = step.lower(torch.ones(4))
    >>> [(c.op, c.axes, c.nbytes) for c in lowered.collectives]
    [('all_reduce', ('dp',), 8)]
    >>> [(member.name, member.nbytes) for member in lowered.collectives[0].members]
    [('sum_1', 4), ('sum_2', 4)]
    """

    op: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    global_shape: tuple[int, ...]
    wire_nbytes: int
    source: str
    cause: str = ""
    worst_nbytes: int | None = None
    members: tuple[Member, ...] = ()
