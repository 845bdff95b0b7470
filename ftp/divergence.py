"""``first_divergence``: one device and all simulated ranks side by side, up to the first value that differs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ftp.attest import certificate_of
from ftp.certificate import Certificate, Coordinate, Operation, Ref
from ftp.checker import Checker
from ftp.errors import MeshError
from ftp.holding import Held, Unsound, held_by
from ftp.partition import LocalProgram
from ftp.program import groups_of, shard_of
from ftp.registry import replaced
from ftp.simulate import simulate
from ftp.step import Step
from ftp.tree import flatten


@dataclass(frozen=True)
class Divergence:
    """The first value of a program that some rank holds wrong.

    Attributes:
        name: of the op in the printed program; ``source`` is the user's line.
        rank: ``{axis: index}``; the first of those whose sum is wrong, where it is a pending sum.
        error: the largest absolute difference; infinite where the rank's form of the op cannot be right for any input.
        why: in words.
    """

    name: str
    source: str
    rank: Mapping[str, int]
    error: float
    why: str


def first_divergence(step: Step, *args: Any, rtol: float | None = None, atol: float | None = None) -> Divergence | None:
    """Run a step's single-device form and every rank's on ``args``, value by value; None where all agree.

    Args:
        args: what the step takes, tensors whole.
        rtol, atol: as ``torch.testing.assert_close``; its defaults for each dtype.

    Raises:
        MeshError: on a mesh of processes, which have only their own parts.

    >>> import ftp
    >>> step = ftp.spmd(lambda x: x.cumsum(0), ftp.simulated_mesh((2,), ("dp",)), ftp.P("dp"))
    >>> first_divergence(step, torch.ones(5)) is None
    True
    """
    if step.mesh.kind == "process":
        raise MeshError("first_divergence runs all ranks in one process. Make the step on ftp.simulated_mesh with the same axes.")
    program = step.lower(*args)._program
    certificate = certificate_of(program)
    leaves, _ = flatten(args)
    args = tuple(leaves[i] for i in program.tensor_leaves)
    inputs = [*args, *program.constants]
    shards = []
    for coordinate in program.mesh.coordinates():
        parts = [shard_of(x, spec, program.mesh.axes, coordinate) for x, spec in zip(args, program.in_specs, strict=True)]
        shards.append([*parts, *program.constants])
    return compare(certificate, inputs, shards, groups_of(program.mesh), rtol, atol)


def compare(
    certificate: Certificate,
    inputs: Sequence[torch.Tensor],
    shards: Sequence[Sequence[torch.Tensor]],
    groups: Mapping[str, Any],
    rtol: float | None,
    atol: float | None,
) -> Divergence | None:
    """The first divergence of a certificate's programs on whole ``inputs`` and every rank's ``shards`` of them."""
    checker = Checker(certificate)
    ranks = list(certificate.ranks.at)
    watched: dict[Coordinate, list[tuple[fx.Node, Held]]] = {}
    for cell in checker.cells:
        for name in checker.local_ops[cell.graph]:
            try:
                checker.bind(cell, name)
            except Unsound as e:
                op, coordinate = checker.operations[name], next(cell.coordinates())
                return Divergence(name, op.source, dict(zip(certificate.axes, coordinate, strict=True)), float("inf"), str(e))
        nodes = [(node, held) for (c, node), held in checker.made.items() if c is cell]
        for coordinate in cell.coordinates():
            at = [together.index(i) for together, i in zip(cell.at, coordinate, strict=True)]
            watched[coordinate] = [(node, held_by(held, at)) for node, held in nodes]
    programs, given = [], []
    for coordinate, parts in zip(ranks, shards, strict=True):
        number, offsets = certificate.ranks.at[coordinate]
        nodes = [n for n, _ in watched[coordinate]]
        programs.append(LocalProgram(fx.GraphModule({}, _watching(checker.pure_graphs()[number], nodes)), (), ()))
        given.append([*parts, *offsets])
    held: dict[str, dict[Coordinate, tuple[Held, torch.Tensor]]] = {}
    for coordinate, values in zip(ranks, simulate(programs, given, groups), strict=True):
        for (_, what), value in zip(watched[coordinate], values, strict=True):
            held.setdefault(what.value, {})[coordinate] = (what, value)
    feed = iter(inputs)
    env: dict[str, torch.Tensor] = {}
    for op in certificate.operations:
        for index, whole in enumerate([next(feed)] if op.target is None else _run(op, env)):
            key = Ref(op.name, index).key
            env[key] = whole
            if isinstance(whole, torch.Tensor) and (found := _compared(op, whole, held.get(key, {}), certificate, rtol, atol)):
                return found
    return None


def _watching(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Graph:
    """A copy that returns ``nodes``."""
    copied = fx.Graph()
    places: dict[fx.Node, Any] = {}
    copied.graph_copy(graph, places)
    copied.output(tuple(places[n] for n in nodes))
    return copied


def _run(op: Operation, env: Mapping[str, torch.Tensor]) -> Sequence[Any]:
    def value(ref: Ref) -> torch.Tensor:
        return env[ref.key]

    out = op.target(*replaced(tuple(op.args), Ref, value), **replaced(dict(op.kwargs), Ref, value))
    return out if isinstance(out, list | tuple) else [out]


def _compared(
    op: Operation,
    whole: torch.Tensor,
    held: Mapping[Coordinate, tuple[Held, torch.Tensor]],
    certificate: Certificate,
    rtol: float | None,
    atol: float | None,
) -> Divergence | None:
    names = list(certificate.axes)
    for coordinate, (what, value) in held.items():
        pending = sorted(what.pending)
        if any(coordinate[names.index(axis)] for axis, _ in pending):
            continue  # the first rank along these axes compares for all
        for _, reduction in pending[:1]:
            others = [names.index(a) for a, _ in pending]
            moved = [range(certificate.axes[names[i]]) if i in others else [c] for i, c in enumerate(coordinate)]
            parts = [held[c][1] for c in itertools.product(*moved) if c in held]
            stacked = torch.stack(parts)
            value = stacked.sum(0) if reduction == "sum" else stacked.amax(0) if reduction == "max" else stacked.amin(0)
        due = whole
        for dim, index in enumerate(what.index):
            due = due.index_select(dim, torch.from_numpy(index.reshape(-1)).to(due.device))
        try:
            torch.testing.assert_close(value, due, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
        except AssertionError as e:
            error = float((value.to(torch.float64) - due.to(torch.float64)).abs().max()) if value.shape == due.shape else float("inf")
            return Divergence(op.name, op.source, dict(zip(names, coordinate, strict=True)), error, str(e).splitlines()[0])
    return None
