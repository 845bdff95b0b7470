"""``visualize``: which rank holds which shard, of a tensor or a whole program."""

from pathlib import Path
from typing import Any

import torch

from ftp.errors import InputError
from ftp.report.html.page import page
from ftp.report.html.tree import ShownLeaf
from ftp.report.lowered import Lowered
from ftp.report.pipelined import LoweredPipeline
from ftp.report.shard_grid import as_text
from ftp.report.staged import LoweredRounds
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import broadcast_specs, check_specs, flatten, leaf_names
from ftp.tensors.placement import placement_of


class Picture:
    """Text when printed, a page in a notebook; ``save`` writes the page.

    Attributes:
        html: one self-contained page.
    """

    def __init__(self, text: str, html: str):
        self._text, self.html = text, html

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.html, encoding="utf-8")


def visualize(what: Any, mesh: AnyMesh | None = None, specs: Any = None) -> Picture:
    """Show which rank holds which shard, of a program, a placed tensor, or a tree with specs.

    Args:
        what: a program, as ``step.lower`` returns it; a tensor or tree that ``device_put`` placed;
            or, with ``specs``, any tree of tensors or of shapes (tuples).
        mesh: for a tree; default that of the surrounding ``ftp.use_mesh``.
        specs: prefix tree of specs of the tree.

    Raises:
        InputError: a leaf that is neither a tensor nor a shape. PlacementError: without ``specs``,
            a tensor that ftp has not placed. SpecError: specs that do not fit.

    >>> import ftp
    >>> print(ftp.visualize(torch.ones(4, 6), ftp.simulated_mesh((2,), ("tp",)), ftp.P(None, "tp")))
    tensor (4, 6) as P(None, 'tp') on tp 2
    +----------+----------+
    | rank 0   | rank 1   |
    | 0:4, 0:3 | 0:4, 3:6 |
    +----------+----------+
    """
    if isinstance(what, Lowered):
        return Picture(str(what), program_page(what))
    if isinstance(what, LoweredPipeline | LoweredRounds):
        axes = what.mesh.axes
        return Picture(str(what), page("ftp report", axes, (), what.collectives, program=str(what)))
    leaves = flatten(what)[0]
    names = leaf_names(what, "tensor")
    if specs is None:
        return _placed(leaves, names)
    axes = resolve(mesh).axes
    spec_leaves = broadcast_specs(specs, what, "tensor")
    check_specs(spec_leaves, leaves, names, axes, takes_sums=True)
    found = [
        ShownLeaf.of(name, spec, leaf.shape, leaf.dtype)
        for name, leaf, spec in zip(names, leaves, spec_leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    return _picture(found, axes)


def _placed(leaves: list[Any], names: list[str]) -> Picture:
    found, axes = [], {}
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        where = placement_of(leaf)
        if where is None:
            raise InputError(
                f"{name} was not placed by ftp.device_put, so its spec is not known. Call"
                " visualize(tree, mesh, specs)."
            )
        axes = where.mesh.axes
        found.append(ShownLeaf.of(name, where.spec, where.shape, leaf.dtype))
    return _picture(found, axes)


def _picture(leaves: list[ShownLeaf], axes: dict[str, int]) -> Picture:
    text = "\n".join(f"{leaf.name} {as_text(leaf.spec, leaf.shape, axes)}" for leaf in leaves)
    return Picture(text, page("tensors", axes, leaves))


def program_page(lowered: Lowered, hardware: Any = None) -> str:
    """The page of a program."""
    cost = lowered.cost(hardware) if hardware is not None else lowered.cost()
    program = lowered._program
    leaves = [
        ShownLeaf.of(node.name, spec, node.results[0].shape, node.results[0].dtype)
        for node, spec in zip(lowered.plan.graph.inputs, program.input_specs, strict=True)
    ]
    found = lowered.collectives, lowered.memory, cost, lowered.lint, str(lowered), lowered.by_layer
    return page("ftp report", program.mesh.axes, leaves, *found)
