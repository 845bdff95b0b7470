"""Run the programs of all ranks in turn: each rank runs until it waits for an exchange that a peer
has not issued.
"""

import operator
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx

from ftp.certification.lockstep.exchanges import SENDS, Issued, Mismatch, delivered
from ftp.dataclass import dataclass
from ftp.errors import CertificateError
from ftp.ops.exchange import ARRIVED, EXCHANGE
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.written import writes


class RunError(CertificateError):
    """A rank's program cannot go on; ``rank`` and ``line`` say where."""

    def __init__(self, message: str, rank: int, line: str):
        super().__init__(message)
        self.rank, self.line = rank, line


class OpFailed(RunError):
    """An op refuses its operands, such as an index beyond the end."""


@dataclass(eq=False)
class _PendingExchange:
    """An exchange under way on one rank."""

    node: fx.Node
    issued: Issued
    key: Any  # the group, and the number of the call in the group
    into: list[Any]
    delivery: list[Any] | None = None
    is_done: bool = False

    @property
    def title(self) -> str:
        return f"{self.issued.title}, {source_of(self.node)}"


@dataclass
class Rank:
    """One rank's program as it runs.

    Attributes:
        calls: ``{number: exchange}``.
        counts: number of calls issued per group.
        busy: ``{storage: exchange under way that reads or writes it}``.
        at: index of the next node.
        given: number of inputs taken.
    """

    number: int
    nodes: list[fx.Node]
    inputs: Sequence[Any]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    calls: dict[int, _PendingExchange] = field(default_factory=dict)
    counts: dict[Any, int] = field(default_factory=dict)
    busy: dict[int, _PendingExchange] = field(default_factory=dict)
    at: int = 0
    given: int = 0
    outputs: list[Any] | None = None

    @property
    def node(self) -> fx.Node:
        return self.nodes[self.at]


def source_of(node: fx.Node) -> str:
    return node.meta.get("source") or "an unknown line"


def run_ranks(
    domain: Any, graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Any]], watch: Any = None
) -> list[list[Any]]:
    """The outputs of every rank.

    Args:
        domain: of numbers: residues or reals.
        graphs, inputs: one for each rank.
        watch: is called with each result and each arrival: ``watch(rank, node, value)``.

    Raises:
        RunError: the ranks' exchanges do not fit each other; a tensor is read that an exchange is
            still to write, or written that an exchange still reads.
    """
    ranks = [
        Rank(i, list(g.nodes), xs) for i, (g, xs) in enumerate(zip(graphs, inputs, strict=True))
    ]
    table: dict[Any, dict[int, _PendingExchange]] = {}
    while any(r.outputs is None for r in ranks):
        progress = [_go_on(domain, r, table, watch) for r in ranks]
        if not any(progress):
            _raise_deadlock(ranks)
    return [r.outputs for r in ranks]  # type: ignore[misc]


def _go_on(
    domain: Any, rank: Rank, table: dict[Any, dict[int, _PendingExchange]], watch: Any
) -> bool:
    """Run a rank until it waits; whether it ran any node."""
    start = rank.at
    while rank.outputs is None:
        node = rank.node
        if node.target is ARRIVED:
            if not _arrive(domain, rank, node, table):
                break
            if watch is not None:
                call = rank.calls[node.args[0]]  # type: ignore[index]
                watch(rank, call.node, call.into)
        else:
            _step(domain, rank, node, table, watch)
        rank.at += 1
    return rank.at > start


def _step(
    domain: Any,
    rank: Rank,
    node: fx.Node,
    table: dict[Any, dict[int, _PendingExchange]],
    watch: Any,
) -> None:
    values = rank.values
    if node.op == "placeholder":
        values[node] = rank.inputs[rank.given]
        rank.given += 1
    elif node.op == "output":
        _require_quiet(domain, rank, node)
        returned: Any = node.args[0]
        rank.outputs = [values[n] if isinstance(n, fx.Node) else n for n in returned]
        return
    elif node.target is operator.getitem:
        parent: Any = node.args[0]
        values[node] = values[parent][node.args[1]]
    elif node.target is EXCHANGE:
        _issue(domain, rank, node, table)
        return
    else:
        _require_quiet(domain, rank, node)
        args, kwargs = mapped_arguments(node, lambda n: values[n])
        try:
            found = domain.call(node.target, args, kwargs, dtypes_of(node))
        except (IndexError, RuntimeError) as e:
            said = str(e).splitlines()[0]
            raise OpFailed(
                f"{source_of(node)}: on rank {rank.number} {node.target} raises"
                f" {type(e).__name__}: {said}",
                rank.number,
                source_of(node),
            ) from e
        values[node] = found if is_view(node) else domain.laid_out(found, node.meta.get("strides"))
    if watch is not None and node.op == "call_function":
        watch(rank, node, values[node])


def dtypes_of(node: fx.Node) -> list[torch.dtype]:
    return [getattr(torch, name) for name in node.meta.get("dtypes", ())]


def _issue(
    domain: Any, rank: Rank, node: fx.Node, table: dict[Any, dict[int, _PendingExchange]]
) -> None:
    arguments: Any = node.args
    kind, sent, into, ranks, group, option, sizes, number = arguments
    _require_quiet(domain, rank, node)
    sent = [rank.values[n] for n in sent]
    into = [rank.values[n] for n in into]
    copies = [domain.separate(x) for x in sent]
    issued = Issued(kind, copies, tuple(ranks), option, tuple(sizes))
    if kind in SENDS:
        me, peer = rank.number, issued.sizes[0]
        pair = (me, peer) if kind == "send" else (peer, me)
        group_key, who = (*pair, option), kind
    else:
        group_key, who = (issued.ranks, group), rank.number
    counted = (group_key, kind) if kind in SENDS else group_key
    at = rank.counts.get(counted, 0)
    rank.counts[counted] = at + 1
    call = _PendingExchange(node, issued, (group_key, at), into)
    table.setdefault(call.key, {})[who] = call  # type: ignore[index]
    rank.calls[number] = call
    rank.values[node] = call
    for x in (*sent, *into):
        rank.busy[domain.storage(x)] = call


def _arrive(
    domain: Any, rank: Rank, node: fx.Node, table: dict[Any, dict[int, _PendingExchange]]
) -> bool:
    """Complete an exchange; False if a peer has not issued its part."""
    call = rank.calls[node.args[0]]  # type: ignore[index]
    if call.is_done:
        return True
    there = table[call.key]
    kind = call.issued.kind
    parts: list[Any] = list(SENDS) if kind in SENDS else list(call.issued.ranks)
    if any(p not in there for p in parts):
        return False
    if call.delivery is None:
        calls = [there[p] for p in parts]
        try:
            if kind in SENDS:
                found = [[], [domain.separate(x) for x in calls[0].issued.sent]]
            else:
                found = delivered(domain, [c.issued for c in calls])
        except Mismatch as e:
            raise RunError(
                f"Ranks issue exchanges that do not fit each other: {e}.\n"
                + "\n".join(f"  {c.title}" for c in dict.fromkeys(calls)),
                rank.number,
                source_of(call.node),
            ) from None
        for c, delivery in zip(calls, found, strict=True):
            c.delivery = delivery
    assert call.delivery is not None
    for storage in [s for s, c in rank.busy.items() if c is call]:
        del rank.busy[storage]
    call.is_done = True
    if call.into and call.delivery:
        if len(call.into) != len(call.delivery):
            raise RunError(
                f"{call.title}: {len(call.delivery)} tensors arrive for {len(call.into)} buffers.",
                rank.number,
                source_of(call.node),
            )
        for x, new in zip(call.into, call.delivery, strict=True):
            if x.shape.numel() != new.shape.numel():
                raise RunError(
                    f"{call.title}: a tensor of shape {tuple(new.shape)} arrives for a buffer of"
                    f" shape {tuple(x.shape)} on rank {rank.number}.",
                    rank.number,
                    source_of(call.node),
                )
            domain.write(x, new)
    return True


def _require_quiet(domain: Any, rank: Rank, node: fx.Node) -> None:
    """Raise RunError for a read of memory that an exchange under way writes, and for a write to
    memory that it reads.
    """
    if not rank.busy:
        return
    for operand in node.all_input_nodes:
        value = rank.values.get(operand)
        for x in value if isinstance(value, list | tuple) else [value]:
            if x is None or isinstance(x, _PendingExchange | int | float | bool):
                continue
            call = rank.busy.get(domain.storage(x))
            if call is None:
                continue
            only_sent = all(domain.storage(x) != domain.storage(w) for w in call.into)
            if not only_sent and node.op == "output":
                raise RunError(
                    f"The result of {call.title} is returned before it is waited for.",
                    rank.number,
                    source_of(call.node),
                )
            if not only_sent and not is_view(node):
                raise RunError(
                    f"{source_of(node)}: the result of {call.title} is used before it is waited"
                    " for.",
                    rank.number,
                    source_of(node),
                )
            if only_sent and _writes(node, operand):
                raise RunError(
                    f"{source_of(node)}: what {call.title} sends is written to before it is waited"
                    " for.",
                    rank.number,
                    source_of(node),
                )


def is_view(node: fx.Node) -> bool:
    """Whether an op's results share the memory of its operands."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )


def _writes(node: fx.Node, operand: fx.Node) -> bool:
    if node.target is EXCHANGE:
        return operand in node.args[2]  # type: ignore[operator]
    return operand in writes(node)


def _raise_deadlock(ranks: Sequence[Rank]) -> None:
    stuck = [r for r in ranks if r.outputs is None]
    lines = [
        f"  rank {r.number} waits for {r.calls[r.node.args[0]].title}"  # type: ignore[index]
        for r in stuck
    ] + [f"  rank {r.number} has ended" for r in ranks if r.outputs is not None]
    raise RunError(
        "The ranks wait for each other for ever:\n" + "\n".join(lines),
        stuck[0].number,
        source_of(stuck[0].calls[stuck[0].node.args[0]].node),  # type: ignore[index]
    )
