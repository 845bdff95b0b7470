"""``certify``: from a program to its checked certificate."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, fx

from ftp.certification.certificate import (
    Certificate,
    Claim,
    Operation,
    Ports,
    Ref,
    Unreduced,
)
from ftp.certification.certificate_file import NOTES
from ftp.certification.checker import check
from ftp.certification.rank_code import unproven
from ftp.certification.ranks import Ranks, shrunk
from ftp.certification.value_numbering import check_traced
from ftp.dynamic_float import DynamicFloat, evaluated
from ftp.dynamic_int import DynamicInt
from ftp.errors import CertificateError, InputError
from ftp.paused_gc import collection_paused
from ftp.per_rank.program import LOCAL, RankCode, program_of
from ftp.planning.graph import Node, Value
from ftp.report.lowered import Lowered
from ftp.rules.call import replaced
from ftp.runtime.executed import in_order
from ftp.runtime.mesh_groups import axes_of_groups
from ftp.runtime.program import Program
from ftp.runtime.sized_program import SizedProgram
from ftp.sharding.layout import Size
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import PartitionSpec, cuts_of
from ftp.torch_internals.pytree import tree_leaves


def certify(lowered: Lowered) -> Certificate:
    """Prove that a program's collectives make every output of every rank right.

    Args:
        lowered: of ``ftp.lower`` or ``step.lower``, on a mesh of any kind and size.

    Returns:
        The proof, checked; its ``save`` writes it to a file.

    Raises:
        CertificateError: each value that is wrong, on which rank, and why. That is a fault of ftp:
            please report it.

    >>> import torch, ftp
    >>> from ftp import P
    >>> x, w, mesh = torch.empty(2, 8), torch.empty(8, 3), ftp.AbstractMesh((4,), ("tp",))
    >>> lowered = ftp.lower(
    ...     lambda x, w: x @ w, mesh, (P(None, "tp"), P("tp")), x, w, out_specs=P()
    ... )
    >>> [o.name for o in certify(lowered).operations]
    ['x', 'w', 'mm']
    """
    if not isinstance(lowered, Lowered):
        raise InputError(
            f"certify takes a program, not {kind_of(lowered)}. step.lower(*args) gives one; that of"
            " a pipeline has one for each action, as lowered.stages[0]['F']. With certify=True a"
            " step proves all that it runs."
        )
    return certified(lowered._program)


@collection_paused()
def certified(program: Program) -> Certificate:
    """The checked certificate of a program."""
    certificate = certificate_of(program)
    check_traced(_traced_graph(program), certificate)
    try:
        return check(certificate)
    except CertificateError:
        if not isinstance(program, SizedProgram):
            raise
    # Sizes that are one, or equal by coincidence, such as a length and the model's width, may give
    # ops other rules than those by which they were planned.
    with program.ranks.sizes.noting(program.values):
        return check(_with_formulas(certificate, program))


def _traced_graph(program: Program) -> fx.Graph:
    """The single-device program, with numbers for formulas in its per-rank code too."""
    graph = program.traced_graph
    if isinstance(program, SizedProgram):
        with program.ranks.symbolic.sizes.noting(program.values):
            for node in graph.nodes:
                if node.target is LOCAL:
                    xs, key = node.args
                    node.args = xs, program_of(str(key)).with_numbers(evaluated).key
    return graph


def _with_formulas(certificate: Certificate, program: Program) -> Certificate:
    nodes = {node.name: node for node in program.plan.graph.nodes}
    operations = []
    for op in certificate.operations:
        node = nodes[op.name]
        given = op.args, op.kwargs
        if node.kind == "op":
            given = tuple(_arguments(x, lambda n: n) for x in (node.args, dict(node.kwargs)))
        formulas = replace(op, args=given[0], kwargs=given[1], results=node.results)
        operations.append(replace(op, formulas=formulas))
    return replace(certificate, operations=tuple(operations))


def certificate_of(program: Program) -> Certificate:
    """The certificate of a program, unchecked."""
    program = provable(program)
    if isinstance(program, SizedProgram):
        return _at_sizes(program)
    return certificate_of_ranks(program, _ranks(program))


def provable(program: Program) -> Program:
    """The program that is certified: with ``async_tp`` that before matmuls and collectives are
    fused.

    Raises:
        InputError: its options change numbers.
    """
    if program.options.reduce_dtype is not None:
        raise InputError(
            "A certificate proves that a program sums what one device sums; with reduce_dtype="
            "torch.bfloat16 its terms are rounded. Certify the step without reduce_dtype, whose"
            " plan is the same."
        )
    if program.options.async_tp:
        program = program.with_options(async_tp=False)
    return program


def _at_sizes(program: SizedProgram) -> Certificate:
    """The certificate of a program at its sizes: its graphs with numbers in place of formulas."""
    with program.ranks.sizes.noting(program.values):
        return certificate_of_ranks(program, written_ranks(program))


def written_ranks(program: SizedProgram, *, as_formulas: bool = False) -> Ranks:
    """The ranks' graphs with numbers in place of formulas, or with the formulas."""
    graphs: dict[str, int] = {}
    numbers: dict[fx.Graph, int] = {}
    known: dict[Any, fx.Graph] = {}
    made: list[fx.Graph] = []
    at: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
    for coordinate in program.mesh.coordinates():
        graph, offsets = program.written(coordinate, known, as_formulas=as_formulas)
        if graph not in numbers:
            lines = (f"{n.format_node()} {[n.meta.get(k) for k in NOTES]}" for n in graph.nodes)
            numbers[graph] = graphs.setdefault("\n".join(lines), len(graphs))
            if numbers[graph] == len(made):
                made.append(graph)
        at[tuple(coordinate.values())] = numbers[graph], offsets
    return Ranks.of(made, at)


def _ranks(program: Program) -> Ranks:
    mesh = program.mesh
    numbers: dict[fx.GraphModule, int] = {}
    graphs: list[fx.Graph] = []
    offsets: list[tuple[np.ndarray, ...]] = []
    alike = program.alike()
    numbered = np.empty(list(map(len, alike)), dtype=np.int64)
    for at in np.ndindex(numbered.shape):
        first = [classes[i][0] for classes, i in zip(alike, at, strict=True)]
        coordinate = dict(zip(mesh.axes, first, strict=True))
        local = program.local(coordinate)
        if local.gm not in numbers:
            numbers[local.gm] = len(graphs)
            graphs.append(in_order(program, local, coordinate).executed(program.donated))
            offsets.append(tuple(local.offset_tables(mesh.axes)))
        numbered[at] = numbers[local.gm]
    for dim, classes in enumerate(alike):
        if len(classes) > 1:
            numbered = numbered.take(
                [next(k for k, c in enumerate(classes) if i in c) for i in range(mesh.shape[dim])],
                dim,
            )
    return Ranks(tuple(mesh.shape), tuple(graphs), shrunk(numbered), tuple(offsets))


def certificate_of_ranks(
    program: Program, ranks: Ranks, number: Callable[[Any], Any] = evaluated
) -> Certificate:
    """The certificate of a program with these ranks' graphs, with ``number`` of formulas."""
    plan, mesh = program.plan, program.mesh
    in_specs = dict(zip(plan.graph.inputs, program.in_specs, strict=False))
    made = Certificate(
        dict(mesh.axes),
        axes_of_groups(mesh),
        tuple(
            _operation(node, in_specs, number)
            for node in plan.graph.nodes
            if node.kind in ("input", "op", "local")
        ),
        tuple(
            (_ref(v), cuts_of(spec))
            for v, spec in zip(plan.graph.outputs, plan.out_specs, strict=True)
        ),
        Unreduced(
            tuple(
                in_specs.get(node, PartitionSpec()).unreduced
                for node in plan.graph.nodes
                if node.kind == "input"
            ),
            tuple(spec.unreduced for spec in plan.out_specs),
        ),
        ranks,
        program.donated,
    )
    return replace(made, trusted=tuple(left.key for left in unproven(made)))


def _operation(
    node: Node, in_specs: Mapping[Node, PartitionSpec], number: Callable[[Any], Any]
) -> Operation:
    results = tuple(replace(m, shape=tuple(map(number, m.shape))) for m in node.results)
    if node.kind == "input":
        spec = cuts_of(in_specs.get(node, PartitionSpec()))
        return Operation(node.name, None, (), {}, results, spec=spec)
    if node.kind == "local":
        program: RankCode = node.target.with_numbers(evaluated)
        ports = Ports(
            tuple(cuts_of(p.spec) for p in program.operands),
            tuple((cuts_of(p.spec), p.pending) for p in program.results),
        )
        args = (tuple(map(_ref, node.operands)), program.key)
        return Operation(
            node.name,
            LOCAL,
            args,
            {},
            results,
            source=node.source,
            ports=ports,
            body=_body(program.gm.graph),
        )
    size = partial(_size, number=number)
    claims = tuple(
        Claim(c.axis, c.factor, size(c.outer), size(c.extent), size(c.inner), c.zigzag)
        for c in node.cuts
    )
    pending: dict[str, list[int]] = {}
    for slot, value in enumerate(node.operands):
        for axis, op in _pending(value):
            if op == "sum":
                pending.setdefault(axis, []).append(slot)
    slots = {axis: tuple(found) for axis, found in pending.items()}
    found = (str(node.rule), node.rule.linear) if node.rule.is_found else ("", ())
    return Operation(
        node.name,
        node.target,
        _arguments(node.args, number),
        _arguments(dict(node.kwargs), number),
        results,
        claims,
        slots,
        (),
        node.source,
        None,
        *found,
    )


def _body(graph: fx.Graph) -> fx.Graph:
    """Per-rank code, with the shapes, strides and dtypes of its values."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
        held = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        env[node].meta = {
            "source": node.meta.get("source", ""),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in held],
            "shape": [list(map(int, t.shape)) for t in held],
            "strides": [list(map(int, t.stride())) for t in held],
        }
    return new


def _pending(value: Value) -> tuple[tuple[str, str], ...]:
    """The pending reductions (axis, op) of a value, after its reshards."""
    node = value.node
    if node.kind == "constrain":
        return _pending(node.operands[0])
    if node.kind != "reshard":
        return tuple(node.pending.get(value.index, ()))
    reshard = node.target
    others = tuple(p for p in _pending(node.operands[0]) if p[0] != reshard.axis)
    return (*others, (reshard.axis, reshard.dst.op)) if reshard.dst.kind == "P" else others


def _arguments(given: Any, number: Callable[[Any], Any]) -> Any:
    """An op's arguments with references for values, and ``number`` of formulas."""
    new = lambda x: _ref(x) if isinstance(x, Value) else number(x)  # noqa: E731
    return replaced(given, (Value, DynamicInt, DynamicFloat), new)


def _ref(value: Value) -> Ref:
    while value.node.kind in ("reshard", "constrain"):
        value = value.node.operands[0]
    return Ref(value.node.name, value.index)


def _size(size: Size, number: Callable[[Any], Any]) -> Any:
    if isinstance(size, int):
        return number(size)
    chunks = [[_size(c.size, number), c.axis, c.n, c.zigzag] for c in size.chunks]
    return [number(size.const), chunks]
