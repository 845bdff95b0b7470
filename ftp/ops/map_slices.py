"""One op that applies a function to every slice along dim 0 of stacked tensors; its results are
stacked too.

The function is a graph on the shapes of one slice. A rank runs it on the slices that it holds; the
other dims of a stack stay whole.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.ops.choose import number_of
from ftp.ops.define import define, register_fake

MAP_SLICES = define("map_slices(Tensor[] stacks, Tensor[] shared, str program) -> Tensor[]")

Described = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class SliceProgram:
    """A function of one slice.

    Attributes:
        gm: takes a slice of each stack, then the tensors that all slices share; returns a tuple.
        inputs: shape and dtype of each of these.
        results: shape and dtype of each result.
        key: hash of the content, equal on all ranks.
    """

    gm: fx.GraphModule
    inputs: tuple[Described, ...]
    results: tuple[Described, ...]
    key: str


_programs: dict[str, SliceProgram] = {}


def slice_program_of(key: str) -> SliceProgram:
    return _programs[key]


def interned(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> SliceProgram:
    """The program of this graph; equal graphs give one object.

    Args:
        inputs: tensors like those that ``gm`` takes.
    """
    for node in gm.graph.nodes:
        if number_of(node.target, node.args) >= 0:
            # Each slice decides for itself, and slices share the number: compute both branches.
            node.args = (*node.args[:3], -1)
    gm.recompile()
    output: Any = next(reversed(gm.graph.nodes))
    made, given = ([_described(x) for x in xs] for xs in (_vals(output.args[0]), inputs))
    return remembered(gm, tuple(given), tuple(made))


def remembered(
    gm: fx.GraphModule, inputs: tuple[Described, ...], results: tuple[Described, ...]
) -> SliceProgram:
    """The program with these attributes; equal ones give one object."""
    lines = [node.format_node() or repr(node.args) for node in gm.graph.nodes]
    text = "\n".join([*map(str, lines), repr((inputs, results))])
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _programs.setdefault(key, SliceProgram(gm, inputs, results, key))


def _vals(nodes: Sequence[fx.Node]) -> list[Tensor]:
    return [node.meta["val"] for node in nodes]


def _described(x: Tensor) -> Described:
    return tuple(map(int, x.shape)), x.dtype


@register_fake("ftp::map_slices")
def _shapes(stacks: list[Tensor], shared: list[Tensor], program: str) -> list[Tensor]:
    n = stacks[0].shape[0]
    return [
        stacks[0].new_empty((n, *shape), dtype=dtype)
        for shape, dtype in slice_program_of(program).results
    ]


@torch.library.impl("ftp::map_slices", "CompositeExplicitAutograd")
def _run(stacks: list[Tensor], shared: list[Tensor], program: str) -> list[Tensor]:
    known = slice_program_of(program)
    if not stacks[0].shape[0]:
        return _shapes(stacks, shared, program)
    made = [known.gm(*row, *shared) for row in zip(*(x.unbind(0) for x in stacks), strict=True)]
    return [torch.stack(column) for column in zip(*made, strict=True)]
