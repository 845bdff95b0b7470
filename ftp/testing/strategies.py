"""Hypothesis strategies: meshes, specs, shapes, tensors and the inputs of ops. All shrink to small
and even ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ftp.rules.proof.case import results_of
from ftp.rules.proof.prove import Sample
from ftp.rules.proof.trial import resized
from ftp.sharding.check_spec import check_spec
from ftp.sharding.make_mesh import simulated_mesh
from ftp.sharding.mesh import AnyMesh, SimulatedMesh, resolve
from ftp.sharding.pytree import NAMESPACE
from ftp.sharding.spec import PartitionSpec, units
from ftp.torch_internals.op_types import OpOverload

try:
    from hypothesis import assume
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "The strategies of ftp.testing need hypothesis: pip install hypothesis"
    ) from error

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (8,), (1, 3), (1,))
AXES = ("a", "b", "c", "d")


def meshes(
    shapes: Sequence[tuple[int, ...]] = MESHES, axis_names: Sequence[str] = AXES
) -> st.SearchStrategy[SimulatedMesh]:
    """Simulated meshes of one and two axes, of at most eight ranks.

    >>> from hypothesis import find
    >>> find(meshes([(2, 3), (2,)], ["dp", "tp"]), lambda mesh: mesh.size() > 2).axis_names
    ('dp', 'tp')
    """
    return st.sampled_from(list(shapes)).map(
        lambda shape: simulated_mesh(shape, tuple(axis_names[: len(shape)]))
    )


def shapes(
    min_dims: int = 0, max_dims: int = 4, min_size: int = 1, max_size: int = 6
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors, of sizes that need not divide. ``min_size=0`` includes empty tensors."""
    return st.lists(st.integers(min_size, max_size), min_size=min_dims, max_size=max_dims).map(
        tuple
    )


@st.composite
def tensors(draw: st.DrawFn, shape: Any = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Tensors of a shape, or of shapes that a strategy draws: normal floats, small integers."""
    drawn = (
        draw(shapes() if shape is None else shape)
        if shape is None or isinstance(shape, st.SearchStrategy)
        else tuple(shape)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(drawn, dtype=dtype, generator=generator)
    return torch.randint(0, 2 if dtype is torch.bool else 6, drawn, generator=generator).to(dtype)


@st.composite
def specs(
    draw: st.DrawFn, shape: Sequence[int], axes: Mapping[str, int] | AnyMesh
) -> PartitionSpec:
    """Any spec of a tensor of ``shape``: each axis cuts one dim or none; several may cut one dim in
    any order, some in units.

    Args:
        axes: a mesh, or the size of each of its axes.
    """
    sizes = dict(axes if isinstance(axes, Mapping) else resolve(axes).axes)
    entries: list[tuple[Any, ...]] = [()] * len(shape)
    for axis in sizes:
        at = draw(st.integers(-1, len(shape) - 1))
        if at >= 0 and not entries[at] and draw(st.integers(0, 4)) == 4:
            entries[at] = (
                units(
                    axis,
                    draw(
                        st.sampled_from(
                            [k for k in range(1, shape[at] + 1) if shape[at] % k == 0] or [1]
                        )
                    ),
                ),
            )
        elif at >= 0:
            entries[at] = (
                draw(st.sampled_from([(*entries[at], axis), (axis, *entries[at])]))
                if entries[at]
                else (axis,)
            )
    spec = PartitionSpec(*[e if len(e) > 1 else (e or (None,))[0] for e in entries])
    assume(not check_spec(spec, tuple(shape), sizes, "x"))  # nested units need not divide
    return spec


@st.composite
def spec_trees(draw: st.DrawFn, tree: Any, axes: Mapping[str, int] | AnyMesh) -> Any:
    """A tree of specs with one for each tensor of a tree; ``P()`` for other leaves."""
    leaves, form = optree.tree_flatten(tree, namespace=NAMESPACE)
    return form.unflatten(
        [draw(specs(x.shape, axes)) if isinstance(x, Tensor) else PartitionSpec() for x in leaves]
    )


@st.composite
def op_inputs(
    draw: st.DrawFn,
    op: OpOverload,
    like: Sequence[Sample],
    *,
    max_size: int = 6,
    kernel: Callable[..., Any] | None = None,
) -> Sample:
    """Arguments of an op like one of ``like``, with other sizes (equal ones stay equal) and new
    values in the same range.

    Args:
        like: pairs of positional and keyword arguments.
        max_size: of a dim; a size that the op does not take is not drawn.
        kernel: computes the op, if it has no kernel here.

    Example, for a rule of your own::

        @given(op_inputs(torch.ops.mine.f.default, [((torch.randn(4, 3),), {})]))
        def test_rule(sample):
            check_rule(torch.ops.mine.f.default, [sample])
    """
    args, kwargs = draw(st.sampled_from(list(like)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    call: Any = (args, kwargs)
    tensors = [x for x in optree.tree_leaves(call, namespace=NAMESPACE) if isinstance(x, Tensor)]
    old = sorted({size for x in tensors for size in x.shape if size > 1})
    sizes = {size: draw(st.integers(1, max_size)) for size in old}
    below = min(sizes.values(), default=1)

    def fill(shape: tuple[int, ...], x: Tensor) -> Tensor:
        return _resampled(x, shape, below, generator)

    sample = resized(op, list(args), dict(kwargs), sizes, fill, draw(st.booleans()))
    try:
        results_of(kernel or op, *sample)
    except Exception:
        assume(False)
    return sample


def _resampled(x: Tensor, shape: tuple[int, ...], below: int, generator: torch.Generator) -> Tensor:
    """Values drawn from those of ``x``. Integers, which may be indices, stay below the smallest
    size if they were below the largest.
    """
    count = int(torch.tensor(shape).prod()) if shape else 1
    if x.numel() == 0:
        return x.new_zeros(shape)
    picked = (
        x.detach()
        .reshape(-1)[torch.randint(0, x.numel(), (count,), generator=generator)]
        .reshape(shape)
    )
    if x.is_floating_point():
        return picked * (1 + 1e-3 * torch.rand(shape, generator=generator).to(x.dtype))
    if x.dtype is torch.bool or x.is_complex() or not x.ndim:
        return picked
    return picked.remainder(max(below, 1))
