"""Live bytes over a rank's program: what the eager runner holds at each op."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ftp.dynamic_int import value_of
from ftp.ops.choose import BranchPath
from ftp.passes.branch_order import branches, conds
from ftp.report.names import Reported
from ftp.runtime.local_shapes import LocalShapes

aten = torch.ops.aten
KINDS = (
    "parameters",
    "optimizer",
    "batch",
    "constants",
    "gradients",
    "outputs",
    "activations",
    "collectives",
    "temporaries",
)
_EIGHTHS = " ▁▂▃▄▅▆▇█"


class Moment(NamedTuple):
    """The memory while one op runs: ``live`` bytes, by kind in ``parts``."""

    op: str
    source: str
    live: int
    parts: Mapping[str, int]


class Memory(Reported, int):
    """Peak bytes per rank, an int; prints the parts at the peak and a picture of live bytes over
    the program.

    Attributes:
        parts: ``{kind: bytes}`` at the peak; they add up to it. Kinds: parameters, optimizer (other
            state that comes in), batch, constants (tensors that the function captured), gradients,
            outputs (whatever else is returned), activations (kept by a forward pass for a backward
            pass), collectives (what they have received), temporaries.
        totals: ``{kind: bytes}`` of all parameters, gradients and so on, at any time; exact.
        peak_op: the op at the peak, and its source line.
        timeline: a ``Moment`` per op.
        expected: the memory if ranks exchange equally many rows, where the numbers are values. The
            peak itself assumes the most rows that a rank may receive, or has room for.
    """

    parts: Mapping[str, int]
    totals: Mapping[str, int]
    peak_op: str
    timeline: Sequence[Moment]
    expected: "Memory"

    def __new__(
        cls,
        timeline: Sequence[Moment],
        totals: Mapping[str, int],
        expected: "Memory | None" = None,
    ) -> "Memory":
        peak = max(timeline, key=lambda m: m.live) if timeline else Moment("", "", 0, {})
        made = super().__new__(cls, peak.live)
        made.parts, made.totals, made.timeline = (
            {k: n for k, n in peak.parts.items() if n},
            totals,
            tuple(timeline),
        )
        made.peak_op = f"{peak.op} at {peak.source}" if peak.source else peak.op
        made.expected = made if expected is None else expected
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.timeline, self.totals, None if self.expected is self else self.expected

    def with_expected(self, expected: "Memory") -> "Memory":
        """This memory, of the largest loads, with ``expected``, the memory of equal loads."""
        return Memory(self.timeline, self.totals, expected)

    @property
    def parameters(self) -> int:
        return self.totals.get("parameters", 0)

    @property
    def gradients(self) -> int:
        return self.totals.get("gradients", 0)

    @property
    def optimizer(self) -> int:
        return self.totals.get("optimizer", 0)

    @property
    def activations(self) -> int:
        """Bytes at the peak that are neither inputs, constants nor gradients."""
        return self - sum(
            self.parts.get(k, 0)
            for k in ("parameters", "optimizer", "batch", "constants", "gradients")
        )

    def picture(self, width: int = 72, height: int = 8) -> str:
        """Live bytes over the program, as text: each column is the maximum over some ops."""
        columns = self.columns(width)
        top = max(max(columns, default=0), 1)
        lines = []
        for row in reversed(range(height)):
            cells = [
                _EIGHTHS[max(0, min(8, round(n / top * height * 8) - row * 8))] for n in columns
            ]
            label = (
                in_bytes(top * (row + 1) // height) if row in (height - 1, height // 2 - 1) else ""
            )
            lines.append(f"{label:>10} |{''.join(cells)}".rstrip())
        return "\n".join([*lines, f"{'0':>10} +{'-' * len(columns)}"])

    def columns(self, width: int) -> list[int]:
        """At most ``width`` numbers: the most live bytes in each stretch of the program."""
        return [moment.live for moment in self.moments(width)]

    def moments(self, width: int) -> list[Moment]:
        """At most ``width`` moments: those with most live bytes in each stretch of the program."""
        ops, n = len(self.timeline), min(width, len(self.timeline))
        return [
            max(self.timeline[i * ops // n : (i + 1) * ops // n], key=lambda m: m.live)
            for i in range(n)
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: peak, expected, peak_op, parts, totals."""
        return {
            "peak": int(self),
            "expected": int(self.expected),
            "peak_op": self.peak_op,
            "parts": dict(self.parts),
            "totals": dict(self.totals),
        }

    def report(self) -> str:
        """The peak, its parts and a picture."""
        lines = [f"memory: {in_bytes(int(self))} at the peak, {self.peak_op}"]
        if self.expected != self:
            lines[0] += f"; {in_bytes(int(self.expected))} if ranks exchange equally many rows"
        lines += [
            f"  {in_bytes(n):>10}  {n / max(self, 1):6.1%}  {kind}"
            for kind, n in sorted(self.parts.items(), key=lambda p: -p[1])
        ]
        return "\n".join([*lines, self.picture()])


def in_bytes(n: float) -> str:
    """
    >>> in_bytes(1536), in_bytes(7)
    ('1.50 KiB', '7 B')
    """
    n = value_of(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError


def measure(
    graph: fx.Graph,
    shapes: LocalShapes,
    roles: Sequence[str],
    phase: Callable[[fx.Node], int],
    collective: Callable[[fx.Node], bool],
    workspace: Callable[[fx.Node], int],
    copies: int,
    given_up: Collection[int] = (),
) -> Memory:
    """The memory of a rank's program. A value is freed after its last use, a tensor of the caller
    at the end. A cond needs the memory of its larger branch.

    Args:
        roles: per input tensor its kind; inputs are kept by the caller throughout.
        given_up: positions of inputs that the caller does not keep: they are freed after their last
            use.
        phase: how often forward and backward passes alternated before a node.
        collective: whether a node issues a collective.
        workspace: bytes that an op needs while it runs, without its operands and results.
        copies: bytes of outputs that are copied when they are returned.
    """
    nodes = list(graph.nodes)
    position = {node: at for at, node in enumerate(nodes)}
    phases = {node: phase(node) for node in nodes}
    end = len(nodes) - 1
    inputs = shapes.inputs
    kept = {
        held.storage
        for at, node in enumerate(inputs)
        for held in shapes.values[node]
        if at not in given_up or not node.users
    }
    dies: dict[int, int] = {}
    size: dict[int, int] = {}
    read: dict[int, int] = {}  # per storage, the last phase in which it is read
    for node, values in shapes.values.items():
        users = node.users
        last = max(map(position.__getitem__, users), default=position[node])
        phase_read = max([phases[user] for user in users if user.op != "output"], default=-1)
        for held in values:
            storage = held.storage
            if last > dies.get(storage, -1):
                dies[storage] = last
            size[storage] = held.storage_nbytes
            if phase_read > read.get(storage, -1):
                read[storage] = phase_read
    dies |= dict.fromkeys(kept, end)
    kind = _kinds(graph, shapes, roles, inputs, phases, collective, read)
    of_branch = branches(graph)
    _hold_operands(of_branch, shapes, position, dies)
    births: dict[int, list[int]] = {}
    for storage, maker in shapes.makers.items():
        births.setdefault(position[maker], []).append(storage)
    deaths: dict[int, list[int]] = {}
    for storage, at in dies.items():
        deaths.setdefault(at, []).append(storage)
    held_in: dict[BranchPath, dict[str, int]] = {(): dict.fromkeys(KINDS, 0)}
    totals: dict[str, int] = {}
    of_maker = {storage: of_branch.get(maker, ()) for storage, maker in shapes.makers.items()}
    live: dict[BranchPath, tuple[int, Mapping[str, int]]] = {}  # since the last birth or death
    timeline = []
    for at, node in enumerate(nodes):
        for storage in births.get(at, ()):
            parts = held_in.setdefault(of_maker.get(storage, ()), dict.fromkeys(KINDS, 0))
            parts[kind[storage]] += size[storage]
            totals[kind[storage]] = totals.get(kind[storage], 0) + size[storage]
            live.clear()
        if node.op == "output":
            held_in[()]["outputs"] += copies
            live.clear()
        if node.op != "placeholder":
            branch, extra = of_branch.get(node, ()), workspace(node)
            if branch not in live:
                parts = _live(held_in, branch)
                live[branch] = sum(parts.values()), parts
            total, parts = live[branch]
            if extra:
                total, parts = total + extra, {**parts, "temporaries": parts["temporaries"] + extra}
            timeline.append(Moment(node.name, node.meta.get("source", ""), total, parts))
        for storage in deaths.get(at, ()):
            held_in[of_maker.get(storage, ())][kind[storage]] -= size[storage]
            live.clear()
    inputs_and_gradients = KINDS[: KINDS.index("activations")]
    kept_totals = {k: n for k, n in totals.items() if k in inputs_and_gradients}
    return Memory(timeline, kept_totals)


def _hold_operands(
    of_branch: Mapping[fx.Node, BranchPath],
    shapes: LocalShapes,
    position: Mapping[fx.Node, int],
    dies: dict[int, int],
) -> None:
    """Hold the operands of a cond's nodes until the cond is done."""
    for nodes in conds(of_branch).values():
        inside = [node for node in nodes if of_branch[node]]
        end = max(position[node] for node in nodes)
        for value in {x for node in inside for x in node.all_input_nodes if not of_branch[x]}:
            for held in shapes.values.get(value, ()):
                dies[held.storage] = max(dies[held.storage], end)


def _live(held_in: Mapping[BranchPath, Mapping[str, int]], at: BranchPath) -> dict[str, int]:
    """Live bytes by kind in a branch, without other branches; after a cond, in the larger one."""
    if len(held_in) == 1:
        return dict(held_in[()])
    decided = dict(at)
    sides: dict[tuple[int, bool] | None, dict[str, int]] = {None: dict.fromkeys(KINDS, 0)}
    for branch, parts in held_in.items():
        if all(decided.get(number, side) == side for number, side in branch):
            step = next((s for s in branch if s[0] not in decided), None)
            found = sides.setdefault(step, dict.fromkeys(KINDS, 0))
            for kind, nbytes in parts.items():
                found[kind] += nbytes
    total = sides.pop(None)
    for number in {step[0] for step in sides if step is not None}:
        either = [sides[step] for step in ((number, True), (number, False)) if step in sides]
        for kind, nbytes in max(either, key=lambda parts: sum(parts.values())).items():
            total[kind] += nbytes
    return total


def on_cpu(node: fx.Node, shapes: LocalShapes) -> int:
    """The workspace of oneDNN's float32 convolutions: copies of the tensors in a blocked layout.
    Other ops need next to none.
    """
    if node.target not in (aten.convolution.default, aten.convolution_backward.default):
        return 0
    operands = [shapes.values[a][0] for a in node.args[:3] if isinstance(a, fx.Node)]
    if operands[0].dtype != torch.float32:
        return 0
    first, second = operands[0].nbytes, operands[1].nbytes
    if node.target is aten.convolution_backward.default:
        return first + second  # copies of the gradient and the input
    return max(first + second, shapes.values[node][0].nbytes)


def _kinds(
    graph: fx.Graph,
    shapes: LocalShapes,
    roles: Sequence[str],
    inputs: Sequence[fx.Node],
    phases: Mapping[fx.Node, int],
    collective: Callable[[fx.Node], bool],
    read: Mapping[int, int],
) -> dict[int, str]:
    """The kind of each storage; ``read`` has the last phase in which each is read."""
    kind = {
        held.storage: role
        for node, role in zip(inputs, roles, strict=True)
        for held in shapes.values[node]
    }
    parameters = [node for node, role in zip(inputs, roles, strict=True) if role == "parameters"]
    like_parameters = {
        (held.shape, held.dtype) for node in parameters for held in shapes.values[node]
    }
    looks = {
        held.storage
        for values in shapes.values.values()
        for held in values
        if (held.shape, held.dtype) in like_parameters
    }
    outputs: Any = graph.output_node().args[0]
    returned = {held.storage for out in outputs for held in shapes.values.get(out, ())}
    for storage, maker in shapes.makers.items():
        if storage in kind:
            continue
        made = phases[maker]
        is_kept = read.get(storage, -1) > made
        if made % 2 and storage in looks and (is_kept or storage in returned):
            kind[storage] = "gradients"
        elif storage in returned:
            kind[storage] = "outputs"
        elif is_kept and made % 2 == 0:
            kind[storage] = "activations"
        elif collective(maker):
            kind[storage] = "collectives"
        else:
            kind[storage] = "temporaries"
    return kind


def copied_bytes(output: fx.Node, shapes: LocalShapes, donated: Collection[int]) -> list[int]:
    """Bytes of outputs that are copied, since they share memory with an input or another output."""
    seen = {held.storage for node in shapes.inputs for held in shapes.values[node]} - set(donated)
    copies = []
    for out in output.args[0]:  # type: ignore[union-attr]
        for held in shapes.values.get(out, ()):
            if held.storage in seen:
                copies.append(held.nbytes)
            seen.add(held.storage)
    return copies
