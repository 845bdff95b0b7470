"""Transforms of a program: its gradient, for derivatives of any order, and its map over a batch,
for torch.vmap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ftp.dynamic_int import is_dynamic
from ftp.ops.axis_collectives import axis_of, differentiable
from ftp.ops.mapped_arguments import evaluated, mapped_arguments
from ftp.per_rank.gradient import Pair, with_gradient
from ftp.per_rank.program import Port, RankCode, program_of
from ftp.per_rank.sizes import number
from ftp.per_rank.trace_locally import index_of, trace_apart
from ftp.sharding.spec import PartitionSpec, Units
from ftp.tracing.settings import uncast

_KEPT = 1024  # programs; more than a model has


@lru_cache(maxsize=_KEPT)
def pair_of(key: str, device_type: str) -> Pair:
    """A program with the program of its gradient."""
    program = program_of(key)
    names = [f"input {i}" for i in range(len(program.operands))]
    with uncast():  # the program's ops are cast already
        pair = with_gradient(program, partial(_run, program), names, device_type)
    assert not pair.constants, "a program has its constants as operands"
    return pair


@lru_cache(maxsize=_KEPT)
def batched(key: str, is_batched: tuple[bool, ...], size: int, device_type: str) -> RankCode:
    """A program mapped over a batch of ``size``, an int or a formula, the leading dim of the
    operands with ``is_batched`` and of every result.
    """
    program = program_of(key)
    sizes = size.sizes if is_dynamic(size) else program.sizes  # type: ignore[attr-defined]
    ports = [
        _with_batch(port, size) if has else port
        for port, has in zip(program.operands, is_batched, strict=True)
    ]

    def mapped(leaves: list[Tensor], index: list[Tensor]) -> Any:
        in_dims = ([0 if has else None for has in is_batched], None)
        run: Any = torch.vmap(lambda xs, index: tuple(_run(program, xs, index)), in_dims)
        return run(leaves, index)

    args = [port.meta for port in ports], index_of(program.axes)
    with uncast():
        traced = trace_apart(mapped, args, device_type, (), sizes)
    assert not traced.constants, "a program has its constants as operands"
    results = [_with_batch(port, size) for port in program.results]
    return replace(program, sizes=sizes).like(traced.gm.graph, ports, results)


def _run(program: RankCode, operands: Sequence[Any], index: Sequence[Any]) -> list[Any]:
    """The results of a program's ops, whose collectives have gradients."""

    def call(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = mapped_arguments(node, known.__getitem__)
        if program.sizes is not None:
            args, kwargs = map_aggregate((args, kwargs), number)  # type: ignore[misc]
        is_own = axis_of(node.target, node.args[1:]) is not None
        target: Any = differentiable(node.target) if is_own else node.target
        return target(*args, **kwargs)

    return evaluated(program.gm.graph, [*operands, *index], call)


def _with_batch(port: Port, size: int) -> Port:
    cuts = [port.spec.cuts(d) for d in range(len(port.shape))]
    entries = [tuple(Units(c.axis, c.size, c.pack) for c in of_dim) or None for of_dim in cuts]
    return Port(PartitionSpec(None, *entries), (size, *port.shape), port.dtype, port.pending)
