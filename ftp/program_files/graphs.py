"""A rank's graph, a traced graph and a planner's graph as plain data, and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields
from typing import Any

from torch import fx

from ftp.errors import ProgramFileError
from ftp.ops.attention_flex import FLEX, FLEX_BACKWARD, KEYS, KEYS_BACKWARD
from ftp.ops.attention_flex_ring import FLEX_RING, FLEX_RING_BACKWARD
from ftp.ops.map_slices import MAP_SLICES, remembered, slice_program_of
from ftp.partitioning.local_program import LocalProgram
from ftp.per_rank.program import LOCAL, RankCode, interned, program_of
from ftp.planning.graph import Graph, Node
from ftp.planning.plan import Plan
from ftp.program_files.plain import GROUP, Reader, Writer
from ftp.rules.local_op import RankGraph, as_module
from ftp.rules.rule import BoundRule

_KINDS = ("placeholder", "call_function", "output")
# Metadata of nodes that is written, and metadata that only earlier passes needed.
_OF_RANK = (
    "collective", "source", "origin", "branch", "is_ahead", "gives", "takes", "axis",
)  # fmt: skip
_OF_TRACE = ("val", "source", "phase", "from_the_front")
_OF_EXECUTED = ("collective", "source", "direct", "is_crowded")
_PAST = frozenset(
    ("val", "tensor_meta", "region", "nn_module_stack", "stack_trace", "ftp_constant", "phase")
)
_PAST_EXECUTED = _PAST | {*_OF_RANK, "origins", "arrived"}
_APART = ("target", "rule", "operands")
_FIELDS = tuple(f.name for f in fields(Node) if f.init and f.name not in _APART)

Groups = Mapping[str, tuple[str, ...]]


def write_graph(
    writer: Writer,
    graph: fx.Graph,
    kept: Sequence[str] = _OF_TRACE,
    groups: Groups | None = None,
    past: Set[str] = _PAST,
) -> list[Any]:
    """Plain data of a graph of calls.

    Args:
        kept: the keys of ``meta`` that are written.
        groups: axes by the name of their process group; the names differ where the program is
            loaded.
        past: the keys of a rank's graph that need not be written.
    """
    writer.nodes, made = {}, []
    for node in graph.nodes:
        # Passes read the metadata of a rank's nodes: unknown metadata is an error.
        is_known = groups is None or set(node.meta) <= {*kept, *past}
        assert node.op in _KINDS and is_known, (node.op, node.target, list(node.meta))
        meta = [x for key in kept if key in node.meta for x in (key, writer.of(node.meta[key]))]
        args = [writer.of(a) for a in node.args]
        if groups is not None and "collective" in node.meta and node.args[-1] in groups:
            args[-1] = [GROUP, *groups[node.args[-1]]]
        target = writer.of(node.target) if node.op == "call_function" else None
        made.append([_KINDS.index(node.op), node.name, target, args, writer.of(node.kwargs), meta])
        writer.nodes[node] = len(writer.nodes)
    return made


def read_graph(
    reader: Reader, data: Sequence[Any], group_name: Callable[..., str] | None = None
) -> fx.Graph:
    """The inverse of `write_graph`; ``group_name`` gives the process groups of the collectives'
    axes.
    """
    graph = RankGraph()
    reader.nodes = []
    for kind, name, target, args, kwargs, meta in data:
        given = [
            group_name(*a[1:]) if group_name and type(a) is list and a[0] == GROUP else reader.of(a)
            for a in args
        ]
        op = _KINDS[kind]
        node = graph.create_node(
            op,
            reader.of(target) if op == "call_function" else name,
            tuple(given),
            reader.of(kwargs),
            name,
        )
        if node.name != name:
            node.name = name
        for key, value in zip(meta[::2], meta[1::2], strict=True):
            node.meta[key] = reader.of(value)
        reader.nodes.append(node)
    return graph


def write_local(writer: Writer, program: LocalProgram, groups: Groups) -> list[Any]:
    """Plain data of the program of ranks with equal shapes, and of the score functions that it
    calls.
    """
    offsets = [writer.of(o) for o in program.offsets]
    graph = program.gm.graph
    slices = _write_slices(writer, graph.nodes)
    return [offsets, write_graph(writer, graph, _OF_RANK, groups), slices]


def read_local(reader: Reader, data: Sequence[Any], group_name: Callable[..., str]) -> LocalProgram:
    """The inverse of `write_local`."""
    _read_slices(reader, data[2])
    graph = read_graph(reader, data[1], group_name)
    issued = tuple(n.meta["collective"] for n in graph.nodes if "collective" in n.meta)
    return LocalProgram(as_module(graph), tuple(map(reader.of, data[0])), issued)


def write_executed(writer: Writer, graph: fx.Graph, groups: Groups) -> list[Any]:
    """Plain data of a rank's graph in the form that the eager runner takes."""
    return write_graph(writer, graph, _OF_EXECUTED, groups, _PAST_EXECUTED)


def write_traced(
    writer: Writer, graph: fx.Graph, kept: Sequence[str] = _OF_TRACE
) -> dict[str, Any]:
    """Plain data of a traced graph, and of the per-rank code and the functions of slices that it
    calls.

    Args:
        kept: as of `write_graph`.
    """
    keys = dict.fromkeys(str(n.args[1]) for n in graph.nodes if n.target is LOCAL)
    return {
        "programs": [_write_code(writer, program_of(key)) for key in keys],
        "slices": _write_slices(writer, graph.nodes),
        "nodes": write_graph(writer, graph, kept),
    }


def read_traced(reader: Reader, data: Mapping[str, Any]) -> fx.GraphModule:
    """A module of the graph that `write_traced` was given."""
    for code in data["programs"]:
        _read_code(reader, code)
    _read_slices(reader, data["slices"])
    return as_module(read_graph(reader, data["nodes"]))


def _write_slices(writer: Writer, nodes: Iterable[fx.Node] | Iterable[Node]) -> list[Any]:
    """Plain data of the functions of slices and of scores that nodes call."""
    at: Any = {MAP_SLICES: (2,), **dict.fromkeys((FLEX, FLEX_RING), KEYS)}
    at |= dict.fromkeys((FLEX_BACKWARD, FLEX_RING_BACKWARD), KEYS_BACKWARD)
    keys = dict.fromkeys(str(n.args[i]) for n in nodes for i in at.get(n.target, ()))
    programs = [slice_program_of(key) for key in keys if key]
    return [
        [write_graph(writer, p.gm.graph), writer.of(p.inputs), writer.of(p.results)]
        for p in programs
    ]


def _read_slices(reader: Reader, data: Sequence[Any]) -> None:
    for graph, inputs, results in data:
        gm = fx.GraphModule({}, read_graph(reader, graph))
        remembered(gm, reader.of(inputs), reader.of(results))


def _write_code(writer: Writer, program: RankCode) -> list[Any]:
    ports = [writer.of(tuple(program.operands)), writer.of(tuple(program.results))]
    kept = (*_OF_TRACE, "axis")
    graph = write_graph(writer, program.gm.graph, kept)
    return [writer.of(dict(program.axes)), *ports, program.is_planned, graph]


def _read_code(reader: Reader, data: Sequence[Any]) -> RankCode:
    axes, operands, results, is_planned, graph = data
    gm = fx.GraphModule({}, read_graph(reader, graph))
    return interned(gm, reader.of(axes), reader.of(operands), reader.of(results), bool(is_planned))


def write_plan(writer: Writer, plan: Plan) -> dict[str, Any]:
    """Plain data of a plan. Its rules are kept without the hooks that emit local forms."""
    slices = _write_slices(writer, plan.graph.nodes)
    writer.nodes, nodes, codes = {}, [], {}
    rules: dict[int, int] = {}
    pool: list[Any] = []
    for node in plan.graph.nodes:
        if node.kind == "local" and node.target.key not in codes:
            numbers, writer.nodes = writer.nodes, {}
            codes[node.target.key] = _write_code(writer, node.target)
            writer.nodes = numbers
        target = node.target.key if node.kind == "local" else writer.of(node.target)
        if id(node.rule) not in rules:
            rules[id(node.rule)] = len(pool)
            pool.append(_write_rule(writer, node.rule))
        given = [None if name == "region" else writer.of(getattr(node, name)) for name in _FIELDS]
        nodes.append([target, rules[id(node.rule)], *given])
        writer.nodes[node] = len(writer.nodes)
    return {
        "codes": codes,
        "slices": slices,
        "rules": pool,
        "nodes": nodes,
        "outputs": [writer.of(v) for v in plan.graph.outputs],
        "axes": writer.of(plan.axes),
        "solutions": writer.of(plan.solutions),
        "kept_rules": writer.of(plan.kept_rules),
        "out_specs": writer.of(plan.out_specs),
        "entries": [[writer.nodes[n], writer.of(s)] for n, s in plan.entries.items()],
        "exits": [[i, writer.of(s)] for i, s in plan.exits.items()],
        "alike": plan.alike,
    }


def read_plan(reader: Reader, data: Mapping[str, Any]) -> Plan:
    """The inverse of `write_plan`. The plan can be read, but not partitioned again."""
    codes = {key: _read_code(reader, code) for key, code in data["codes"].items()}
    _read_slices(reader, data["slices"])
    reader.nodes = []
    rules = [_read_rule(reader, rule) for rule in data["rules"]]
    for target, rule, *given in data["nodes"]:
        known = dict(zip(_FIELDS, map(reader.of, given), strict=True))
        is_local = known["kind"] == "local"
        found = codes[target] if is_local else reader.of(target)
        reader.nodes.append(Node(target=found, rule=rules[rule], **known))
    return Plan(
        Graph(list(reader.nodes), [reader.of(v) for v in data["outputs"]]),
        reader.of(data["axes"]),
        reader.of(data["solutions"]),
        reader.of(data["kept_rules"]),
        reader.of(data["out_specs"]),
        {reader.nodes[n]: reader.of(s) for n, s in data["entries"]},
        {i: reader.of(s) for i, s in data["exits"]},
        data["alike"],
    )


_OF_RULE = tuple(f.name for f in fields(BoundRule) if f.name not in ("local", "sees", "call"))


def _write_rule(writer: Writer, rule: BoundRule) -> list[Any]:
    return [rule.local is not None, *(writer.of(getattr(rule, name)) for name in _OF_RULE)]


def _read_rule(reader: Reader, data: Sequence[Any]) -> BoundRule:
    has_local, *given = data
    known = dict(zip(_OF_RULE, map(reader.of, given), strict=True))
    return BoundRule(local=_absent if has_local else None, **known)


def _absent(op: Any) -> Any:
    raise ProgramFileError(
        "A saved program holds its ranks' graphs as they run, and cannot make other forms of them."
        " Lower the function to get another form of its program."
    )
