"""Turn a traced fx graph into a ``Graph`` with a rule on every op; replace ops by primitives."""

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

from ftp.dynamic_float import is_formula
from ftp.dynamic_int import Sizes, moved
from ftp.errors import DiscoveryWarning, PlanningError, ReplicationWarning, RuleError
from ftp.ops.choose import BranchPath
from ftp.ops.constrain import CONSTRAIN, Pin, pin_from_str
from ftp.paused_gc import collection_paused
from ftp.per_rank.planned import expanded, rank_axes, region_of
from ftp.per_rank.program import LOCAL, RankCode, program_of
from ftp.planning.algebra import simplified
from ftp.planning.graph import (
    Graph,
    Node,
    Rewrite,
    Value,
    identity_rule,
    in_turn,
    unchanged,
    whole_rule,
)
from ftp.planning.graph_passes import key_of, live, merge_common
from ftp.rules.bind import bind, lookup
from ftp.rules.call import Call, Meta, replaced, tensors
from ftp.rules.decompositions.registry import DECOMPOSITIONS, decomposition_of
from ftp.rules.own import RULES
from ftp.rules.proof.discover import discover
from ftp.rules.rule import BoundRule
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.decompose import decompose as trace_decomposition

aten = torch.ops.aten


def from_fx(
    gm: fx.GraphModule,
    names: Sequence[str] = (),
    *,
    strict: bool = False,
    size: Callable[[Any], Any] | None = None,
    sizes: Sizes | None = None,
) -> Graph:
    """The graph of a traced program; inputs in the order of its placeholders.

    Args:
        names: of the first inputs.
        strict: an op without a rule is an error, rather than replicated with a warning.
        size: gives the formula for a number of the trace, if sizes are dynamic.
        sizes: that formulas are of.
    """
    builder = _GraphBuilder(strict, size=size, sizes=sizes)
    with collection_paused():
        for node in gm.graph.nodes:
            builder.add(node)
    assert builder.outputs is not None
    for node, name in zip((n for n in builder.nodes if n.kind == "input"), names, strict=False):
        node.name = name
    return Graph(builder.nodes, builder.outputs)


def constraints(graph: Graph) -> dict[Node, Pin]:
    """The pin of every constraint node."""
    return {node: pin_from_str(node.target) for node in graph.nodes if node.kind == "constrain"}


def found_by_trial(graph: Graph) -> str:
    """The rules found by trial for ops without a stated rule, as text. Ranks compare the text, so
    that an error can name the rule in which they differ.
    """
    unstated = {
        f"{n.target}: {n.rule}"
        for n in graph.nodes
        if n.kind == "op" and n.target not in RULES and n.target not in DECOMPOSITIONS
    }
    return "; ".join(sorted(unstated))


def prune(graph: Graph) -> Rewrite:
    """Drop operands that per-rank code does not use, and results of it that nothing uses, of a live
    graph.
    """
    if not any(node.kind == "local" for node in graph.nodes):
        return unchanged(graph)
    graph, copies = graph.copied()
    used = set(graph.outputs)
    swapped: dict[Value, Value] = {}
    cut: set[Node] = set()
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        kept = [v.index for v in node.values if v in used] if node.kind == "local" else []
        if 0 < len(kept) < len(node.results):
            program, taken = node.target.giving(kept)
            less = replace(
                node,
                target=program,
                args=tuple(node.args[i] for i in taken),
                results=tuple(node.results[i] for i in kept),
                rule=program.rule,
                sizes={},
            )
            swapped.update({Value(node, i): Value(less, at) for at, i in enumerate(kept)})
            cut.add(node)
            node = less
        used.update(node.operands)
        nodes.append(node)
    for node in nodes:
        node.replace_operands([swapped.get(v, v) for v in node.operands])
    pruned = live(Graph(nodes[::-1], [swapped.get(v, v) for v in graph.outputs]))
    return pruned, {node: copy for node, copy in copies.items() if copy not in cut}


_WRAP = (
    "\n  or say how the ranks share the work: wrap the function that calls it in"
    " ftp.local(fn, mesh, in_specs, out_specs)."
)


class _Bound(NamedTuple):
    """What equal calls share: the rule, and the axes of a `Node` of them whose operands have none
    of their own.
    """

    rule: BoundRule
    own_axes: frozenset[str]
    rank_axes: frozenset[str]


class _GraphBuilder:
    """Builds a ``Graph`` from fx nodes; ``env`` maps each fx node to its value or values."""

    def __init__(
        self,
        strict: bool,
        env: dict[fx.Node, Any] | None = None,
        size: Callable[[Any], Any] | None = None,
        sizes: Sizes | None = None,
    ):
        self.strict, self.size, self.sizes = strict, size, sizes
        self.env: dict[fx.Node, Any] = {} if env is None else env
        self.nodes: list[Node] = []
        self.rules: dict[Any, _Bound] = {}
        self.outputs: list[Any] | None = None  # an output is None if it was not asked for

    def add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if node not in self.env:
                meta = self.metas(node)
                made = Node(node.name, "input", None, (), {}, meta, identity_rule(meta[0].shape, 0))
                self.nodes.append(made)
                self.env[node] = Value(made)
        elif node.op == "output":
            self.outputs = [self.env.get(n) for n in node.args[0]]  # type: ignore[union-attr]
        elif node.target is operator.getitem:
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            self.env[node] = self.call(node)

    def inlined(self, node: fx.Node, program: RankCode, operands: Sequence[Value]) -> list[Any]:
        """Per-rank code as ops of the program, planned over the axes that are not its own."""
        graph = expanded(program)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        builder = _GraphBuilder(
            self.strict, dict(zip(placeholders, operands, strict=True)), self.size, self.sizes
        )
        builder.rules = self.rules
        for inner in graph.nodes:
            builder.add(inner)
        for made in builder.nodes:
            made.name = f"{node.name}.{made.name}"
            made.source = made.source or node.meta.get("source", "")
            made.phase, made.region = node.meta.get("phase", 0), node.meta.get("region")
            made.branch = _branch(node)
        self.nodes += builder.nodes
        assert builder.outputs is not None
        return builder.outputs

    def call(self, node: fx.Node) -> Any:
        arguments: Any = node.args
        if node.target is LOCAL and (program := self.code(node)).is_planned:
            return self.inlined(node, program, [self.env[x] for x in arguments[0]])
        named: Any = node.kwargs
        if (size := self.size) is not None:
            arguments, named = map_aggregate(
                (arguments, dict(named)), lambda a: a if isinstance(a, fx.Node) else size(a)
            )
        args = replaced(arguments, fx.Node, self.env.__getitem__)
        kwargs = replaced(dict(named), fx.Node, self.env.__getitem__) if named else {}
        results = self.metas(node)
        source = node.meta.get("source", "")
        origin = {
            "source": source,
            "phase": node.meta.get("phase", 0),
            "region": node.meta.get("region"),
            "branch": _branch(node),
        }
        if node.target is LOCAL:
            program = self.code(node)
            made = Node(
                node.name, "local", program, tuple(args[0]), {}, results, program.rule, **origin
            )
            made.own_axes = frozenset(program.axes)
        elif node.target is CONSTRAIN:
            # On an axis that the constraint does not name it is the identity, for pending sums too.
            rule = replace(identity_rule(results[0].shape), linear=((0,),))
            made = Node(node.name, "constrain", args[1], (args[0],), {}, results, rule, **origin)
            made.rank_axes = args[0].node.rank_axes
        else:
            assert isinstance(node.target, OpOverload), node.target
            bound = self.bound(node.target, args, kwargs, results, source)
            made = Node(node.name, "op", node.target, args, kwargs, results, bound.rule, **origin)
            made.own_axes, made.rank_axes = bound.own_axes, bound.rank_axes
            if inside := [v.node.rank_axes for v in made.operands if v.node.rank_axes]:
                made.rank_axes = rank_axes(node.target, args, inside)
        self.nodes.append(made)
        return list(made.values) if isinstance(node.meta["val"], (list, tuple)) else Value(made)

    def code(self, node: fx.Node) -> RankCode:
        """The per-rank code that a node calls, in the sizes of the plan."""
        program = program_of(str(node.args[1]))
        return program if self.size is None else program.with_numbers(self.size, self.sizes)

    def metas(self, node: fx.Node) -> tuple[Meta, ...]:
        """Shape and dtype of each of a node's results."""
        found = _metas(node.meta["val"])
        if self.size is None:
            return found
        return tuple(Meta(tuple(map(self.size, m.shape)), m.dtype) for m in found)

    def bound(
        self,
        target: OpOverload,
        args: Any,
        kwargs: Any,
        results: tuple[Meta, ...],
        source: str,
    ) -> "_Bound":
        # Repeated blocks make equal calls.
        key = target, key_of(args, _meta), key_of(kwargs, _meta) if kwargs else ()
        found = self.rules.get(key)
        if found is None:
            own, axes = frozenset(region_of(target, args)), rank_axes(target, args, ())
            args, kwargs = replaced((args, kwargs), Value, _meta)
            rule = self._rule(Call(target, args, kwargs, results), source)
            found = self.rules[key] = _Bound(rule, own, axes)
        return found

    def _rule(self, call: Call, source: str) -> BoundRule:
        line = source or "an unknown line"
        try:
            found = lookup(call)
        except RuleError as e:
            raise RuleError(f"{e}\n  The call is at {line}.") from None
        if found is None and call.target not in DECOMPOSITIONS:
            found = _rule_by_trial(call, f"It is called at {line}.", self.strict)
        if found is not None:
            return found
        return whole_rule([m.shape for m in call.operands], [m.shape for m in call.results])


def _rule_by_trial(call: Call, at: str, strict: bool) -> BoundRule | None:
    """The rule found by trial for an op without a stated one, with a warning; None, with another
    warning, if none was found.

    Args:
        at: says where the op is called.

    Raises:
        PlanningError: if ``strict``.
    """
    target, finding = call.target, discover(call)
    if strict:
        proven, line = "", f"ftp.rule(torch.ops.{target}, {_candidate(call)!r})"
        if finding.rule:
            proven = f" proven on {finding.cases} generated calls"
            line = finding.line(target)
        raise PlanningError(
            f"{target} has no sharding rule. {at}\n  State one, such as this one{proven}:"
            f" {line}{_WRAP}"
        )
    if finding.stated is None:
        warnings.warn(
            f"{target} has no sharding rule: every rank computes it whole. {at} None was found"
            f" by trial: {finding.reason}.\n  State one, such as: ftp.rule(torch.ops.{target},"
            f" {_candidate(call)!r}){_WRAP}",
            ReplicationWarning,
            stacklevel=2,
        )
        return None
    warnings.warn(
        f"{target} has no sharding rule; one was found by trial, is proven on"
        f" {finding.cases} generated calls, and is used. {at}\n  State it, and no trial"
        f" is needed: {finding.line(target)}",
        DiscoveryWarning,
        stacklevel=2,
    )
    metas = [m.shape for m in call.operands], [m.shape for m in call.results]
    return replace(bind(finding.stated, *metas, str(target)), is_found=True)


def decompose(
    graph: Graph,
    nodes: Iterable[Node] = (),
    *,
    strict: bool = False,
    sizes: Sizes | None = None,
    by: Mapping[Node, Callable[..., Any]] | None = None,
) -> Rewrite:
    """The graph with those of ``nodes`` that have a decomposition replaced by other ops; the same
    graph if none has.

    Args:
        sizes: the dynamic sizes, if any.
        by: the decompositions, in place of those that are registered.
    """
    size = None if sizes is None else size_in(sizes)
    if by is None:
        by = {n: _by(n) for n in nodes if n.target in DECOMPOSITIONS}
    if not by:
        return unchanged(graph)
    graph, copies = graph.copied()
    wanted = {copies.pop(node): made for node, made in by.items()}
    swapped: dict[Value, Value] = {}
    out: list[Node] = []
    for node in graph.nodes:
        node.replace_operands([swapped.get(v, v) for v in node.operands])
        if node not in wanted:
            out.append(node)
            continue
        gm = _primitives(node, sizes, wanted[node])
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        builder = _GraphBuilder(strict, dict(zip(placeholders, node.operands, strict=True)), size)
        for inner in gm.graph.nodes:
            builder.add(inner)
        for inner in builder.nodes:
            inner.name, inner.source = f"{node.name}.{inner.name}", node.source
            inner.phase, inner.region, inner.branch = node.phase, node.region, node.branch
            for value in inner.operands:
                inner.depends |= value.node.depends
        out += builder.nodes
        assert builder.outputs is not None
        swapped.update({Value(node, i): v for i, v in enumerate(builder.outputs) if v is not None})
    graph, merged = merge_common(Graph(out, [swapped.get(v, v) for v in graph.outputs]))
    graph, simpler = simplified(graph)
    return graph, in_turn(in_turn(copies, merged), simpler)


def _by(node: Node) -> Callable[..., Any]:
    found = decomposition_of(node, [v.meta.shape for v in node.operands])
    assert found is not None
    return found


_traced: dict[Any, fx.GraphModule] = {}
_MOST_TRACED = 256  # more than the distinct decomposed calls of a model


def size_in(sizes: Sizes) -> Callable[[Any], Any]:
    """Gives the formula of ``sizes`` for a number of a trace with dynamic sizes."""
    from ftp.tracing.symbolic import symbolic_of

    known = symbolic_of(sizes)
    return lambda x: moved(known.dynamic(x), sizes)


def _primitives(node: Node, sizes: Sizes | None, by: Callable[..., Any]) -> fx.GraphModule:
    args, kwargs = replaced(node.args, Value, _meta), replaced(dict(node.kwargs), Value, _meta)
    key = (node.target, by, repr(args), repr(kwargs))
    metas = tensors((args, kwargs), Meta)
    numbers = [*tensors((args, kwargs), (int, float)), *(s for m in metas for s in m.shape)]
    if sizes is not None and any(map(is_formula, numbers)):
        from ftp.tracing.symbolic import symbolic_of

        traced = sizes.memo.setdefault("primitives", {})
        if key not in traced:
            traced[key] = trace_decomposition(node.target, args, kwargs, by, symbolic_of(sizes))
        return traced[key]
    if key not in _traced:
        gm = trace_decomposition(node.target, args, kwargs, by)
        assert gm is not None
        while len(_traced) >= _MOST_TRACED:
            del _traced[next(iter(_traced))]
        _traced[key] = gm
    return _traced[key]


def _branch(node: fx.Node) -> BranchPath:
    path = node.meta.get("branch", ())
    return tuple(step for step in path if step[0] >= 0) if path else ()


def _meta(value: Value) -> Meta:
    return value.meta


def _metas(val: Any) -> tuple[Meta, ...]:
    return tuple(map(Meta.of, val if isinstance(val, (list, tuple)) else (val,)))


def _candidate(call: Call) -> str:
    """A rule that holds for any call with as many dims: every dim is whole."""

    def dims(metas: Sequence[Meta], letters: Any) -> str:
        return ", ".join(" ".join(f"[{next(letters)}]" for _ in m.shape) or "()" for m in metas)

    letters = ("".join(x) for n in count(1) for x in product(ascii_lowercase, repeat=n))
    return f"{dims(call.operands, letters)} -> {dims(call.results, letters)}"
