"""Issued collectives: the tensors that each sends, by the names of the plan's reshards."""

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ftp.partitioning.collectives import Collective, Member
from ftp.planning.graph import Node


def resharded_name(reshard: Node) -> str:
    """The name of the value that a chain of reshards starts from."""
    (value,) = reshard.operands
    while value.node.kind == "reshard":
        (value,) = value.node.operands
    return repr(value)


def part_of(record: Collective, members: Sequence[Member]) -> Collective:
    """The part of a bucket that holds some of its members."""
    if len(members) == len(record.members):
        return record
    nbytes = sum(member.nbytes for member in members)
    return replace(
        record,
        nbytes=nbytes,
        wire_nbytes=record.wire_nbytes * nbytes // max(record.nbytes, 1),
        shape=(nbytes // record.dtype.itemsize,),
        cause=members[0].cause,
        members=tuple(members),
    )


def members_of(node: fx.Node) -> tuple[Member, ...]:
    """What an issued collective sends, by the names of the plan's reshards."""
    record = node.meta["collective"]
    own = Member(node.meta.get("origin", ""), record.nbytes, record.cause)
    return record.members or (own,)
