"""Refuse exported programs that cannot be sharded, with the source line."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ftp.errors import InputError, join_failures
from ftp.exported.random_ops import is_random, undrawn
from ftp.source import told_line
from ftp.torch_internals import pytree
from ftp.torch_internals.op_types import HigherOrderOperator


def check_program(program: Any, draws: bool) -> None:
    """Raise an InputError that lists everything that cannot be sharded, with source lines.

    Args:
        draws: random ops will draw from a key that the program takes.
    """
    from torch.export import ExportedProgram
    from torch.export.graph_signature import InputKind, OutputKind, SymIntArgument

    if not isinstance(program, ExportedProgram):
        raise InputError(
            f"shard_exported takes an ExportedProgram, not {type(program).__name__}."
            " torch.export.export(model, args) makes one."
        )
    failures = []
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            failures.append(
                f"input {spec.arg.name} is a {spec.kind.name.lower().replace('_', ' ')}, which"
                " cannot be cut or traced."
            )
        elif spec.kind is InputKind.PARAMETER or (
            spec.kind is InputKind.BUFFER and spec.persistent
        ):
            if spec.target not in program.state_dict:
                failures.append(f"{spec.target!r} is missing from the program's state dict.")
        elif spec.kind is not InputKind.USER_INPUT and spec.target not in program.constants:
            failures.append(f"{spec.target!r} is missing from the program's constants.")
    for spec in signature.output_specs:
        if spec.kind in (
            OutputKind.LOSS_OUTPUT,
            OutputKind.GRADIENT_TO_PARAMETER,
            OutputKind.GRADIENT_TO_USER_INPUT,
            OutputKind.TOKEN,
        ):
            failures.append(
                f"output {spec.arg.name} is a {spec.kind.name.lower().replace('_', ' ')}; only"
                " forward passes are taken."
            )
        elif isinstance(spec.arg, SymIntArgument):
            failures.append(
                f"output {spec.arg.name} is a size, which differs between a rank's shard and the"
                " whole; return tensors, and take sizes from them."
            )
    for graph in _graphs(program.graph_module):
        for node in graph.nodes:
            failures += _unfit(node, draws)
    if failures:
        raise InputError(join_failures(dict.fromkeys(failures)))


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            yield inner.graph


_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def _unfit(node: fx.Node, draws: bool) -> list[str]:
    line = told_line(node.meta.get("stack_trace") or "")
    module = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()][-1:]
    at = (f" at {line}" if line else "") + (
        f" (module {module[0]!r})" if module and module[0] else ""
    )
    if isinstance(node.target, HigherOrderOperator) and node.target.name() not in _INLINED:
        return [
            f"{node.target.name()}{at} is a higher-order op, which has no sharding rule. Export"
            " the program without it."
        ]
    if (
        node.op == "call_function"
        and _is_of_values(node)
        and not any(map(_is_of_values, node.all_input_nodes))
    ):
        if any(
            isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool)
            for v in pytree.tree_leaves(node.meta["val"])
        ):
            return [
                f"{node.target}{at} reads a tensor's value; a program has shapes and no values."
                " Keep the number as a tensor."
            ]
        return [
            f"{node.target}{at} gives a shape that depends on values; a program has fixed shapes."
            " Use torch.where(mask, x, 0) or weights rather than x[mask], a fixed size rather than"
            " nonzero or unique."
        ]
    if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt):
        return [
            f"input {node.name} is a number that torch.export left open; a program takes tensors"
            " of open sizes. Export it as a number, once for each."
        ]
    if is_random(node):
        if not draws:
            return [
                f"{node.target} draws random numbers{at}, and different ones on each rank. Give"
                " rng=True for a key as one more input, which"
                " they are drawn from; if it is dropout that should be off, export model.eval()."
            ]
        if (why := undrawn(node)) is not None:
            return [f"{node.target}{at} {why}"]
    return []


def _is_of_values(node: fx.Node) -> bool:
    """Whether a value is a number that tensors' values decide, or has such a size."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    vals = pytree.tree_leaves(node.meta.get("val"))
    return any(
        free_unbacked_symbols(v)
        for v in vals
        if isinstance(v, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    )
