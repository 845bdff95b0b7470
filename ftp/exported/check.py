"""Refuse exported programs that cannot be sharded."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ftp.errors import InputError, raise_all
from ftp.exported.module_calls import module_of
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

    if not isinstance(program, ExportedProgram):
        raise InputError(
            f"shard_exported takes an ExportedProgram, not {type(program).__name__}."
            " torch.export.export(model, args) makes one."
        )
    failures = [*_unfit_inputs(program), *_unfit_outputs(program), *_taken_for_one(program)]
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            failures += filter(None, (_unfit(node, draws) for node in module.graph.nodes))
    raise_all(InputError, dict.fromkeys(failures))


def _unfit_inputs(program: Any) -> Iterator[str]:
    from torch.export.graph_signature import InputKind

    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            kind = spec.kind.name.lower().replace("_", " ")
            yield f"input {spec.arg.name} is a {kind}, which cannot be cut or traced."
        elif spec.kind is InputKind.PARAMETER or (
            spec.kind is InputKind.BUFFER and spec.persistent
        ):
            if spec.target not in program.state_dict:
                yield f"{spec.target!r} is missing from the program's state dict."
        elif spec.kind is not InputKind.USER_INPUT and spec.target not in program.constants:
            yield f"{spec.target!r} is missing from the program's constants."


def _unfit_outputs(program: Any) -> Iterator[str]:
    from torch.export.graph_signature import OutputKind, SymIntArgument

    backward = (
        OutputKind.LOSS_OUTPUT,
        OutputKind.GRADIENT_TO_PARAMETER,
        OutputKind.GRADIENT_TO_USER_INPUT,
        OutputKind.TOKEN,
    )
    for spec in program.graph_signature.output_specs:
        if spec.kind in backward:
            kind = spec.kind.name.lower().replace("_", " ")
            yield f"output {spec.arg.name} is a {kind}; only forward passes are taken."
        elif isinstance(spec.arg, SymIntArgument):
            yield (
                f"output {spec.arg.name} is a size, which differs between a rank's shard and the"
                " whole; return tensors, and take sizes from them."
            )


def _taken_for_one(program: Any) -> Iterator[str]:
    """Arguments that were one tensor in the call of torch.export, whose program reads only one."""
    given = pytree.tree_leaves(program.example_inputs)
    if len(given) != len(program.graph_signature.user_inputs):
        return
    users = {n.name: n.users for n in program.graph.nodes if n.op == "placeholder"}
    names: dict[int, list[str]] = {}
    for x, name in zip(given, program.graph_signature.user_inputs, strict=True):
        if isinstance(x, torch.Tensor):
            names.setdefault(id(x), []).append(str(name))
    for alike in names.values():
        if len(alike) > 1 and not all(map(users.get, alike)):
            yield (
                f"inputs {' and '.join(alike)} were one tensor when the program was exported, and"
                " torch.export made it read one of them alone. Export it with tensors of their"
                " own: x.clone()."
            )


_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _unfit(node: fx.Node, draws: bool) -> str | None:
    """Why a node cannot be sharded; None if it can."""
    line, module = told_line(node.meta.get("stack_trace") or ""), module_of(node)
    at = (f" at {line}" if line else "") + (f" (module {module!r})" if module else "")
    if isinstance(node.target, HigherOrderOperator) and node.target.name() not in _INLINED:
        return (
            f"{node.target.name()}{at} is a higher-order op, which has no sharding rule. Export"
            " the program without it."
        )
    if (
        node.op == "call_function"
        and _depends_on_values(node)
        and not any(map(_depends_on_values, node.all_input_nodes))
    ):
        if any(isinstance(v, _NUMBERS) for v in pytree.tree_leaves(node.meta["val"])):
            return (
                f"{node.target}{at} reads a tensor's value; a program has shapes and no values."
                " Keep the number as a tensor."
            )
        return (
            f"{node.target}{at} gives a shape that depends on values; a program has fixed shapes."
            " Use torch.where(mask, x, 0) or weights rather than x[mask], a fixed size rather than"
            " nonzero or unique."
        )
    if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt):
        return (
            f"input {node.name} is a number that torch.export left open; a program takes tensors"
            " of open sizes. Export it as a number, once for each."
        )
    if not is_random(node):
        return None
    if not draws:
        return (
            f"{node.target} draws random numbers{at}, and different ones on each rank. Give"
            " rng=True for a key as one more input, which they are drawn from; if it is dropout"
            " that should be off, export model.eval()."
        )
    why = undrawn(node)
    return None if why is None else f"{node.target}{at} {why}"


def _depends_on_values(node: fx.Node) -> bool:
    """Whether a node gives a number, or a size, that depends on tensors' values."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(
        free_unbacked_symbols(v)
        for v in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(v, (torch.Tensor, *_NUMBERS))
    )
