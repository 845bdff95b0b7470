"""Free a rank's compiled code of the offsets of its shards, so that ranks of equal local shapes
have the same code.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_WITH_TENSOR: Mapping[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
}


def with_offset_tensors(graph: fx.Graph, numbers: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
    """Replace offsets by 0-d tensors, which are new inputs after the graph's others, where ops on a
    CPU read them as elements. A kernel reads such a tensor once, and is as fast as with a number.
    Returns the tensors. An offset in a dim of equal elements is left out.

    Other bounds of slices and pads stay numbers, and all offsets on other devices: a kernel there
    would wait for a copy of the tensor.

    Args:
        graph: from `with_values`; changed in place.
        numbers: the known numbers among its nodes.
    """
    made: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        number = next((x for x in node.all_input_nodes if x in numbers), None)
        if number is None or type(numbers[number]) is not int:
            continue
        value = node.meta.get("val")
        if _is_of_equal_elements(node):
            x, dim, *_ = node.args
            node.args = (x, dim, 0, value.shape[dim])
        elif _reads_element(node, number):
            if number not in made:
                with value.fake_mode:  # `new_empty` of a fake tensor would load DTensor
                    fake = torch.empty((), dtype=torch.int64)
                made[number] = _new_input(graph, number, fake)
            _read_from(node, made[number])
    return [torch.tensor(numbers[number]) for number in made]


def _is_of_equal_elements(node: fx.Node) -> bool:
    """Whether a node slices a dim whose elements share memory."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return False
    x, dim, *_ = node.args
    sizes: Any = x.meta["val"].stride(dim), node.meta["val"].shape[dim]  # type: ignore[union-attr]
    return all(isinstance(size, int) for size in sizes) and not sizes[0]


def _reads_element(node: fx.Node, number: fx.Node) -> bool:
    """Whether a node has the same result where the number is a 0-d int64 tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    if node.target in _WITH_TENSOR:
        # A tensor without dims has a part in promotion; a number has one by its kind alone.
        is_alike = value.dim() > 0 or value.dtype == torch.int64
        is_integer = not (value.dtype.is_floating_point or value.dtype.is_complex)
        return node.args[1:] == (number,) and node.args[0] is not number and is_alike and is_integer
    given = node.args[1:] if node.target is aten.full.default else node.args
    return node.target in _MADE_OF and given == (number,) and not value.dim()


_MADE_OF = (aten.full.default, aten.scalar_tensor.default)


def _read_from(node: fx.Node, offset: fx.Node) -> None:
    """Let a node read a 0-d tensor in place of a number."""
    if (reading := _WITH_TENSOR.get(node.target)) is not None:
        node.target, node.args = reading, (node.args[0], offset)
    else:
        dtype = node.meta["val"].dtype
        node.target, node.args, node.kwargs = aten._to_copy.default, (offset,), {"dtype": dtype}


def _new_input(graph: fx.Graph, number: fx.Node, value: torch.Tensor) -> fx.Node:
    (*_, last) = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last):
        made = graph.placeholder(f"{number.name}_tensor")
    made.meta |= {"val": value, "branch": ()}
    return made
