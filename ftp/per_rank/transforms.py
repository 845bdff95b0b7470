"""Transforms of a program: its gradient, for derivatives of any order, and its map over a batch,
for torch.vmap.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from ftp.ops.axis_collectives import axis_of, differentiable
from ftp.ops.mapped_arguments import evaluated, mapped_arguments
from ftp.per_rank.gradient import Pair, contributed, has_gradient, split
from ftp.per_rank.program import Port, RankCode, program_of
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec, Units
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import disable_current_modes
from ftp.tracing.trace import Traced, trace

_KEPT = 1024  # programs; more than a model has


@lru_cache(maxsize=_KEPT)
def pair_of(key: str, device_type: str) -> Pair:
    """A program with the program of its gradient."""
    program = program_of(key)
    wrt = [i for i, port in enumerate(program.operands) if has_gradient(port.dtype)]
    differentiable = [i for i, port in enumerate(program.results) if has_gradient(port.dtype)]

    def joint(leaves: list[Tensor], index: list[Tensor], cotangents: list[Tensor]) -> Any:
        def primal(*values: Tensor) -> Any:
            filled = list(leaves)
            for i, value in zip(wrt, values, strict=True):
                filled[i] = value
            outputs = _run(program, [*filled, *index])
            return [outputs[i] for i in differentiable], outputs

        vjp: Any = torch.func.vjp
        _, pull, primals = vjp(primal, *(leaves[i] for i in wrt), has_aux=True)
        return primals, pull(contributed(program, differentiable, cotangents))

    ports = [program.results[i] for i in differentiable]
    args = _metas(program.operands), _index(program), _metas(ports)
    traced = _traced(joint, args, device_type)
    return split(program, len(program.operands), traced, wrt, differentiable)


@lru_cache(maxsize=_KEPT)
def batched(key: str, is_batched: tuple[bool, ...], size: int, device_type: str) -> RankCode:
    """A program mapped over a batch of ``size``, the leading dim of the operands with
    ``is_batched`` and of every result.
    """
    program = program_of(key)
    ports = [
        _with_batch(port, size) if has else port
        for port, has in zip(program.operands, is_batched, strict=True)
    ]

    def mapped(leaves: list[Tensor], index: list[Tensor]) -> Any:
        in_dims = (*(0 if has else None for has in is_batched), *(None for _ in index))
        run: Any = torch.vmap(lambda *xs: tuple(_run(program, xs)), in_dims)
        return run(*leaves, *index)

    traced = _traced(mapped, (_metas(ports), _index(program)), device_type)
    return program.like(traced.gm, ports, [_with_batch(port, size) for port in program.results])


def _run(program: RankCode, values: Sequence[Any]) -> list[Any]:
    """The results of a program's ops, whose collectives have gradients."""

    def call(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = mapped_arguments(node, known.__getitem__)
        is_own = axis_of(node.target, node.args[1:]) is not None
        target: Any = differentiable(node.target) if is_own else node.target
        return target(*args, **kwargs)

    return evaluated(program.gm.graph, values, call)


def _traced(fn: Any, args: Any, device_type: str) -> Traced:
    leaves, tree = flatten(args)
    names = [f"input {i}" for i in range(len(leaves))]
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        traced = trace(fn, leaves, tree, device_type, names=names)
    assert not traced.constants, "a program has its constants as operands"
    return traced


def _metas(ports: Sequence[Port]) -> list[Tensor]:
    return [torch.empty(port.shape, dtype=port.dtype, device="meta") for port in ports]


def _index(program: RankCode) -> list[Tensor]:
    return [torch.empty((), dtype=torch.int64, device="meta") for _ in program.axes]


def _with_batch(port: Port, size: int) -> Port:
    cuts = [port.spec.cuts(d) for d in range(len(port.shape))]
    entries = [tuple(Units(c.axis, c.size, c.pack) for c in of_dim) or None for of_dim in cuts]
    return Port(PartitionSpec(None, *entries), (size, *port.shape), port.dtype, port.pending)
