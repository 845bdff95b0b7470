"""Modules of an exported program: their calls, with inputs and outputs, and the kind of layer that
reads a weight.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.torch_internals import pytree

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.exported_program import ModuleCallSignature

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class CallValues:
    """Arguments and results of a call; None for one that is not a tensor of the graph."""

    args: tuple[fx.Node | None, ...]
    kwargs: dict[str, fx.Node | None]
    results: tuple[fx.Node | None, ...]


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        reads: the values from outside that its ops read, without state, in order of first use.
        gives: its values that ops outside read.
        signature: None unless exported with ``preserve_module_call_signature``.
    """

    module: str
    nodes: frozenset[fx.Node]
    reads: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    signature: CallValues | None


def call_signature(program: "ExportedProgram") -> "ModuleCallSignature":
    """The signature of the whole program's call."""
    signature = program.module_call_graph[0].signature
    assert signature is not None
    return signature


def module_of(node: fx.Node) -> str:
    """The path of the innermost module of a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].split("@")[0] if stack else ""


def modules_of(program: "ExportedProgram", paths: Sequence[str]) -> dict[str, str]:
    """``{path: class name}`` of modules that run or hold state; "" where the graph has no name."""
    found: dict[str, str] = {}
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            found[path.split("@")[0]] = (
                kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            )
    for path in paths:
        while "." in path:
            path = path.rpartition(".")[0]
            found.setdefault(path, "")
    return found


def calls_of(
    program: "ExportedProgram", signatures: "Sequence[tuple[str, ModuleCallSignature]]"
) -> dict[str, list[ModuleCall]]:
    """Each module's calls, in order.

    Args:
        program: a functional program.
        signatures: call signatures of the original program, ``(path, signature)``; the path of a
            second call ends with ``@1``.
    """
    inputs = set(program.graph_signature.user_inputs)
    named = {node.name: node for node in program.graph.nodes}
    nodes: dict[str, dict[str, list[fx.Node]]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
                nodes.setdefault(path.split("@")[0], {}).setdefault(key, []).append(node)
    kept: dict[str, list[ModuleCallSignature]] = {}
    for path, signature in signatures:
        kept.setdefault(path.split("@")[0], []).append(signature)
    found: dict[str, list[ModuleCall]] = {}
    for path, by_key in nodes.items():
        signed = kept.get(path, [])
        for at, own in enumerate(by_key.values()):
            within = frozenset(own)
            read = [
                n
                for node in own
                for n in node.all_input_nodes
                if n not in within and (n.op != "placeholder" or n.name in inputs)
            ]
            reads = tuple(n for n in dict.fromkeys(read) if _is_tensor(n))
            gives = tuple(
                n for n in own if _is_tensor(n) and any(user not in within for user in n.users)
            )
            signature = (
                _signature(signed[at], named, {*reads}, {*gives})
                if len(signed) == len(by_key)
                else None
            )
            found.setdefault(path, []).append(ModuleCall(path, within, reads, gives, signature))
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _signature(
    kept: "ModuleCallSignature", named: dict[str, fx.Node], reads: set[fx.Node], gives: set[fx.Node]
) -> CallValues:
    def found(arguments: Sequence[Any], among: set[fx.Node]) -> list[Any]:
        # pytree treats nodes as leaves; None stands for a value that is not in the graph.
        return [
            node if (node := named.get(getattr(a, "name", ""))) in among else None
            for a in arguments
        ]

    args, kwargs = pytree.tree_unflatten(found(kept.inputs, reads), kept.in_spec)
    results = pytree.tree_unflatten(found(kept.outputs, gives), kept.out_spec)
    results = results if isinstance(results, tuple | list) else (results,)
    return CallValues(
        tuple(map(_leaf, args)),
        {k: _leaf(v) for k, v in kwargs.items()},
        tuple(map(_leaf, results)),
    )


def _leaf(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def memory_of(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors with the same elements in the same memory."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


_LINEAR: dict[Any, int] = {
    aten.linear.default: 1,
    aten.addmm.default: 2,
    aten.mm.default: 1,
    aten.matmul.default: 1,
    aten.bmm.default: 1,
}
# ``expand`` counts too: a linear layer decomposed into a batched matmul broadcasts its weight.
_VIEWS = {
    aten._to_copy.default,
    aten.detach.default,
    aten.expand.default,
    aten.numpy_T.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def reader_of(program: "ExportedProgram", module: str, weight: str) -> str | None:
    """The kind of layer that reads a weight, "linear" or "embedding"; None for neither or both."""
    signature = program.graph_signature
    held = {**program.state_dict, **program.constants}
    # The graph reads a tied weight under one of its names.
    names = {
        name
        for name, path in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items()
        if isinstance(held.get(path), torch.Tensor)
        and memory_of(held[path]) == memory_of(held[weight])
    }
    readers = [
        found for node in program.graph.nodes if node.name in names for found in _readers(node)
    ]
    kinds = {kind for kind, at in readers if at == module} or {kind for kind, _ in readers}
    return kinds.pop() if len(kinds) == 1 else None


def _readers(node: fx.Node) -> list[tuple[str, str]]:
    """``(kind, module)`` of the layers that read a weight or a view of it."""
    found = []
    for user in node.users:
        if user.target in _VIEWS:
            found += _readers(user)
        elif user.target is aten.embedding.default and user.args[0] is node:
            found.append(("embedding", module_of(user)))
        elif (at := _LINEAR.get(user.target)) is not None and user.args[at] is node:
            found.append(("linear", module_of(user)))
    return found
