"""The tensors that a call writes to, from the schema of its op."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.torch_internals.op_types import OpOverload


@functools.cache
def written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an op writes to.

    >>> import torch
    >>> written_arguments(torch.ops.aten.add_.Tensor)
    ((0, 'self'),)
    """
    if not isinstance(target, OpOverload):
        return ()
    return tuple(
        (i, a.name)
        for i, a in enumerate(target._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


@functools.cache
def is_in_place(target: Any) -> bool:
    """Whether an op writes to its first argument alone, returns it, and leaves its shape as it
    is.
    """
    if [at for at, _ in written_arguments(target)] != [0]:
        return False
    returned = [result.alias_info is not None for result in target._schema.returns]
    return returned == [True] and torch.Tag.inplace_view not in target.tags


def written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments, values or lists of values, that a call writes to."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written_arguments(target)]


def writing(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of the nodes that may write to an argument."""
    return [node for node in nodes if written_arguments(node.target)]


def writes(node: fx.Node) -> list[fx.Node]:
    """The values that a node writes to."""
    if not written_arguments(node.target):
        return []
    found: list[fx.Node] = []
    map_arg(written(node.target, node.args, node.kwargs), found.append)
    return found
