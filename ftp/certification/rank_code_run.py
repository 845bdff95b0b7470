"""Run per-rank code on all ranks, both the ranks' graphs and the code as written, and compare."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.certification.certificate import Certificate, Operation, Spec
from ftp.certification.collective_semantics import COLLECTIVES
from ftp.certification.lockstep.check import depth_of_graphs, first_over_draws, is_equal
from ftp.certification.lockstep.program import coordinates, shard
from ftp.certification.lockstep.reals import Reals
from ftp.certification.lockstep.run import RunError, run_ranks
from ftp.certification.rank_code_body import NotRun, run_body
from ftp.certification.rank_graphs import RankGraphs
from ftp.certification.residues.domain import Residues
from ftp.certification.residues.value import Blind, Degenerate
from ftp.errors import CertificateError
from ftp.ops.exchange import ARRIVED, EXCHANGE
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.rules.call import Meta

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
RANKS = 64  # at most
LARGEST = 1 << 20  # elements of all values of all ranks, at most
SIMULATIONS = 4
_CLOSE = 1e-9  # in float64, relative to the largest element
Results = Sequence[tuple[int, tuple[str, ...]]]


def open_after_a_run(
    certificate: Certificate, graphs: RankGraphs, op: Operation, claims: Results
) -> list[str]:
    """The claims that a run does not prove: "code", that the ranks compute what is written;
    "specs", that results are equal along axes.

    Args:
        claims: (result, axes) that are claimed.

    Raises:
        CertificateError: a claim is wrong, as a simulation in floating point shows.
    """
    left = ["code", *(["specs"] if claims else [])]
    try:
        programs = _Programs(certificate, graphs, op)
        depth = depth_of_graphs([*programs.graphs, programs.body])
        if first_over_draws(depth, lambda d, draw: programs.differs(d, draw, claims)) is None:
            return []
        for draw in range(SIMULATIONS):
            if why := programs.differs(Reals(draw + 1), draw, claims):
                raise CertificateError(f"{op}: {why}")
    except (NotRun, Blind, Degenerate, RunError):
        pass
    return left


class _Programs:
    """The ranks' graphs of one op of per-rank code, as graphs that ``run_ranks`` runs."""

    def __init__(self, certificate: Certificate, graphs: RankGraphs, op: Operation):
        self.certificate, self.op = certificate, op
        every = coordinates(certificate)
        if len(every) > RANKS:
            raise NotRun(f"it runs on more than {RANKS} ranks")
        if op.body is None:
            raise NotRun("the code is not known")
        self.body = op.body
        self.graphs: list[fx.Graph] = []
        elements = 0
        at = certificate.ranks.at
        for coordinate in every:
            number, offsets = at[coordinate]
            placeholders = list(graphs.placeholders[number])[graphs.inputs :]
            given: dict[fx.Node, int] = dict(zip(placeholders, offsets, strict=True))
            made = _Written(certificate, op, coordinate, given)
            try:
                self.graphs.append(made.run(graphs.local_ops[number].get(op.name, [])))
            except (KeyError, IndexError, ValueError):
                raise NotRun("another use shares its nodes") from None
            elements += made.elements
            if elements > LARGEST:
                raise NotRun(f"its values have more than {LARGEST:,} elements")

    def differs(self, domain: Any, draw: int, claims: Results) -> str | None:
        """The first result that is not what the code computes, or not equal where it is claimed to
        be, as text.
        """
        axes = self.certificate.axes
        every = coordinates(self.certificate)
        inputs: list[list[Any]] = [[] for _ in every]
        for slot, (meta, spec) in enumerate(_operands(self.certificate, self.op)):
            whole = _drawn(domain, tuple(map(int, meta.shape)), meta.dtype, slot, draw)
            for own, c in zip(inputs, every, strict=True):
                own.append(shard(domain, whole, spec, axes, dict(zip(axes, c, strict=True))))
        copies = [[domain.separate(x) for x in own] for own in inputs]
        try:
            found = run_ranks(domain, self.graphs, inputs)
            written = run_body(domain, self.body, axes, copies)
        except (IndexError, RuntimeError, TypeError, ValueError) as e:
            raise NotRun(f"it does not take random inputs: {e}") from None
        for rank, (own, due) in enumerate(zip(found, written, strict=True)):
            for at, (x, y) in enumerate(zip(own, due, strict=True)):
                if x is not None and not _is_same(domain, x, y):
                    return f"result {at} on rank {rank} is not what the per-rank code computes."
        numbers = {c: i for i, c in enumerate(every)}
        for at, along in claims:
            dims = [i for i, axis in enumerate(axes) if axis in along]
            for c, rank in numbers.items():
                other = numbers[tuple(0 if i in dims else x for i, x in enumerate(c))]
                if not _is_same(domain, found[rank][at], found[other][at]):
                    return (
                        f"per-rank code returns other values on rank {rank} than on rank {other},"
                        f" and its out specs say that result {at} is equal on all ranks along"
                        f" {', '.join(along)}. Sum it over {along[0]} with ftp.axis.all_reduce, or"
                        " name the axis in out_specs."
                    )
        return None


def _operands(certificate: Certificate, op: Operation) -> list[tuple[Meta, Spec]]:
    """The operands of per-rank code: shape and dtype, and the spec."""
    assert op.ports is not None
    results = {o.name: o.results for o in certificate.operations}
    metas = [results[ref.name][ref.index] for ref in op.operands]
    return list(zip(metas, op.ports.operands, strict=True))


def _drawn(domain: Any, shape: tuple[int, ...], dtype: torch.dtype, key: int, draw: int) -> Any:
    if dtype.is_floating_point:
        return domain.draw(shape, key, dtype)
    if dtype.is_complex:
        raise NotRun("it takes complex numbers")
    generator = torch.Generator().manual_seed(64 * draw + key)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _is_same(domain: Any, a: Any, b: Any) -> bool:
    if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
        return False
    if isinstance(domain, Residues):
        return is_equal(domain, a, b)
    if not a.is_floating_point():
        return bool((a == b).all())
    scale = max(float(a.abs().max()), float(b.abs().max()), 1.0) if a.numel() else 1.0
    return not a.numel() or float((a - b).abs().max()) <= _CLOSE * scale


class _Written:
    """Writes one rank's nodes of an op as a graph whose collectives are exchanges.

    Attributes:
        elements: the number of elements of all values.
    """

    def __init__(
        self,
        certificate: Certificate,
        op: Operation,
        coordinate: tuple[int, ...],
        offsets: Mapping[fx.Node, int],
    ):
        self.certificate, self.op, self.coordinate = certificate, op, coordinate
        self.offsets = offsets
        self.graph = fx.Graph()
        self.metas: dict[fx.Node, Any] = {}
        self.elements = self.calls = 0

    def run(self, nodes: Sequence[fx.Node]) -> fx.Graph:
        metas = self._operand_metas()
        operands = [self.graph.placeholder(f"x{i}") for i in range(len(metas))]
        env: dict[fx.Node, Any] = dict(self.offsets)
        given: dict[int, Any] = {}
        arriving: dict[fx.Node, tuple[int, Any]] = {}
        for node in nodes:
            if "takes" in node.meta and node.target is aten.contiguous.default:
                slot = node.meta["takes"]
                env[node] = operands[slot]
                self._note(operands[slot], metas[slot], node)
            elif node.target in COLLECTIVES:
                x: Any = env[node.args[0]]  # type: ignore[index]
                arriving[node] = self._issue(node, x)
            elif node.target is c10d.wait_tensor.default:
                number, finish = arriving[node.args[0]]  # type: ignore[index]
                wait = self.graph.call_function(ARRIVED, (number,))
                wait.meta["source"] = node.meta.get("source", "")
                env[node] = finish()
            else:
                args, kwargs = mapped_arguments(node, env.__getitem__)
                env[node] = self._call(node.target, args, kwargs, node)
            for at in node.meta.get("gives", ()):
                given[at] = env[node]
        assert self.op.ports is not None
        # None is a gradient that nothing reads.
        self.graph.output([given.get(at) for at in range(len(self.op.ports.results))])
        return self.graph

    def _operand_metas(self) -> list[torch.Tensor]:
        found = []
        for meta, spec in _operands(self.certificate, self.op):
            shape = list(map(int, meta.shape))
            for dim, cuts in enumerate(spec):
                shape[dim] //= math.prod(self.certificate.axes[axis] for axis, _, _ in cuts)
            found.append(torch.empty(shape, dtype=meta.dtype, device="meta"))
        return found

    def _call(self, target: Any, args: Any, kwargs: Mapping[str, Any], of: fx.Node) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        on_meta, options = map_arg((tuple(args), dict(kwargs)), self.metas.__getitem__)
        if "device" in options:
            options = {**options, "device": torch.device("meta")}
        try:
            made = target(*on_meta, **options)
        except (RuntimeError, TypeError, IndexError, ValueError) as e:
            raise NotRun(f"{target} does not run on meta tensors: {e}") from None
        self._note(node, made, of)
        return node

    def _note(self, node: fx.Node, made: Any, of: fx.Node) -> None:
        self.metas[node] = made
        results = made if isinstance(made, list | tuple) else [made]
        tensors = [t for t in results if isinstance(t, torch.Tensor)]
        self.elements += sum(t.numel() for t in tensors)
        node.meta["source"] = of.meta.get("source", "")
        node.meta["dtypes"] = [str(t.dtype).removeprefix("torch.") for t in tensors]
        node.meta["shape"] = [list(t.shape) for t in tensors]
        node.meta["strides"] = [list(t.stride()) for t in tensors]

    # Collectives.

    def _group(self, name: str) -> list[int]:
        """The ranks of this rank's group, in order."""
        axes = list(self.certificate.axes)
        over = [axes.index(a) for a in self.certificate.groups[name]]
        return [
            i
            for i, c in enumerate(coordinates(self.certificate))
            if all(c[d] == at for d, at in enumerate(self.coordinate) if d not in over)
        ]

    def _issue(self, node: fx.Node, x: fx.Node) -> tuple[int, Any]:
        """Issue a collective. Returns its number, and a function that makes its result when it has
        arrived.
        """
        self.calls += 1
        number, args, name = self.calls, node.args, str(node.args[-1])
        ranks = self._group(name)
        n = len(ranks)
        option = ""
        match node.target:
            case c10d.all_reduce.default:
                kind, sent, into, option = "all_reduce", [x], [self._like(x, node)], str(args[1])
            case c10d.all_gather_into_tensor.default:
                kind, sent, into = "all_gather", [x], [self._like(x, node) for _ in range(n)]
            case c10d.reduce_scatter_tensor.default:
                kind, sent, option = "reduce_scatter", self._rows(x, None, n, node), str(args[1])
                into = [self._like(sent[0], node)]
            case c10d.all_to_all_single.default:
                received: Any = args[1]
                kind, sent = "all_to_all", self._rows(x, args[2], n, node)
                rest = list(self.metas[x].shape[1:])
                into = [
                    self._call(aten.new_empty.default, (x, [int(r), *rest]), {}, node)
                    for r in received
                ]
            case _:
                assert node.target is ALL_TO_ALL_ROWS or node.target in COLLECTIVES
                raise NotRun(f"{node.target} sends as many rows as values say")
        call = (kind, sent, into, ranks, name, option.lower(), [], number)
        issued = self.graph.call_function(EXCHANGE, call)
        issued.meta["source"] = node.meta.get("source", "")
        if len(into) == 1 and kind != "all_to_all":
            return number, lambda: into[0]
        return number, lambda: self._call(aten.cat.default, (into,), {}, node)

    def _like(self, x: fx.Node, of: fx.Node) -> fx.Node:
        return self._call(aten.empty_like.default, (x,), {}, of)

    def _rows(self, x: fx.Node, sizes: Any, n: int, of: fx.Node) -> list[fx.Node]:
        size = self.metas[x].shape[0]
        sizes = list(map(int, sizes)) if sizes is not None else [size // n] * n
        ends = [sum(sizes[: i + 1]) for i in range(n)]
        return [
            self._call(aten.slice.Tensor, (x, 0, end - size, end), {}, of)
            for size, end in zip(sizes, ends, strict=True)
        ]
