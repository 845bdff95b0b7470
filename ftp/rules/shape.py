"""Rules of views, and of ops that copy elements without reading their values."""

from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import fx

from ftp.dynamic_int import is_dynamic
from ftp.rules.call import Call
from ftp.rules.dims import acting_on, all_whole, numbered
from ftp.rules.forms import along_dim, along_dims, pointwise
from ftp.rules.local_forms import (
    NOTHING,
    addend,
    contiguous,
    held_rows,
    masked,
    unless_empty,
    unsqueezed,
    with_shape,
    zeros,
)
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import register, rule
from ftp.rules.rule import Rule
from ftp.rules.size_functions import gcd
from ftp.torch_internals.op_types import OpOverload


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten._reshape_alias.default,
)
def view(call: Call) -> Rule:
    """Both shapes in their common factors; a dim that does not divide into these is whole."""
    operand, result, whole, sizes = common_factors(call.operands[0].shape, call.results[0].shape)
    return Rule(Notation((operand,), (result,), frozenset(whole), ((),)), ((0,),), _reshape, sizes)


def _reshape(op: LocalOp) -> fx.Node:
    return op.emit(aten.reshape.default, op.args[0], op.shape())


def common_factors(
    old: Sequence[int], new: Sequence[int]
) -> tuple[Dims, Dims, list[str], dict[str, int]]:
    """Two shapes with equal numbers of elements in common factors: dims of each, whole factors,
    sizes.

    >>> common_factors((4, 6), (24,))[:2]
    ((('a',), ('b',)), (('a', 'b'),))
    """
    left = [[d for d, s in enumerate(shape) if s != 1] for shape in (old, new)]
    rest = [list(old), list(new)]
    lead: list[list[list[str]]] = [[[] for _ in shape] for shape in (old, new)]
    trail: list[list[list[str]]] = [[[] for _ in shape] for shape in (old, new)]
    sizes: dict[str, int] = {}
    whole: list[str] = []
    names = (chr(97 + i) if i < 26 else f"f{i}" for i in count())

    def named(size: int) -> str:
        name = next(names)
        sizes[name] = size
        return name

    for end, found in ((0, lead), (-1, trail)):
        while left[0] and left[1]:
            a, b = left[0][end], left[1][end]
            sized = rest[0][a], rest[1][b]
            is_same = sized[0] == sized[1]
            if is_same:
                common = sized[0]
            else:
                common = 1 if 0 in (*rest[0], *rest[1]) else gcd(*sized)
            if common == 1:
                break
            name = named(common)
            for side, dim in ((0, a), (1, b)):
                found[side][dim].insert(0 if end else len(found[side][dim]), name)
                rest[side][dim] = 1 if is_same else rest[side][dim] // common
                if rest[side][dim] == 1:
                    left[side].pop(end)
    dims = []
    for side, shape in enumerate((old, new)):
        made = []
        for d in range(len(shape)):
            middle = []
            if rest[side][d] != 1:
                middle = [named(rest[side][d])]
                whole += middle
            made.append((*lead[side][d], *middle, *trail[side][d]))
        dims.append(tuple(made))
    return dims[0], dims[1], whole, sizes


def reordered(*ops: OpOverload, order: Callable[[Call, int], Sequence[int]]) -> None:
    """Ops whose result has the operand's dims in another order: ``order(call, number of dims)``.

    >>> reordered(aten.permute.default, order=lambda call, n: call.arg("dims"))
    """

    def maker(call: Call) -> Rule:
        ndim = call.operands[0].ndim
        dims = numbered(ndim)
        result = tuple(dims[d % ndim] for d in order(call, ndim))
        return Rule(Notation((dims,), (result,), frozenset(), ((),)), ((0,),))

    register(ops, maker)


def _swapped(call: Call, ndim: int) -> list[int]:
    found = list(range(ndim))
    if ndim:
        a, b = (call.arg(name) % ndim for name in ("dim0", "dim1"))
        found[a], found[b] = b, a
    return found


reordered(aten.permute.default, aten.permute_copy.default, order=lambda call, n: call.arg("dims"))
reordered(aten.transpose.int, aten.transpose_copy.int, order=_swapped)
rule(aten.t.default, aten.t_copy.default, "m n -> n m", "m -> m", "() -> ()", linear=[(0,)])
rule(aten.adjoint.default, aten.mT.default, "... m n -> ... n m", "() -> ()", linear=[(0,)])


pointwise(aten.expand.default, aten.expand_copy.default, linear=[(0,)], local=with_shape(1))
along_dim(aten.unsqueeze.default, aten.unsqueeze_copy.default, "... -> ... 1", linear=[(0,)])


@rule(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
)
def squeeze(call: Call) -> Rule:
    """A dim whose size is one only on some ranks stays."""
    x = call.operands[0]
    asked = call.arg("dim") if len(call.args) > 1 else range(x.ndim)
    asked = [d % max(x.ndim, 1) for d in ([asked] if isinstance(asked, int) else asked)]
    gone = [d for d in asked if d < x.ndim and x.shape[d] == 1]
    operand = tuple(() if d in gone else (f"~{d}",) for d in range(x.ndim))
    result = tuple(dim for d, dim in enumerate(operand) if d not in gone)
    return Rule(
        Notation((operand,), (result,), frozenset(), ((),)),
        ((0,),),
        lambda op: op.emit(aten.squeeze.dims, op.args[0], gone),
    )


along_dim(aten.stack.default, "... -> ... [k]", linear="all")
along_dim(aten.unbind.int, aten.unbind_copy.int, "... [k] -> ...", linear=[(0,)])


def _selected(op: LocalOp) -> fx.Node:
    """The rank that holds the element returns it; the others return zero."""
    if not op.is_cut("d"):
        return op.default()
    if not op.sizes["d"]:
        return zeros(op, zero=NOTHING)
    size = op.rule.sizes["d"]
    dim = op.call.arg("dim") % op.call.operands[0].ndim
    index = op.call.arg("index") % size
    index = op.emit(aten.full.default, [1], index, dtype=torch.int64, device=op.device)
    at, held = held_rows(op, "d", index)
    row = op.emit(aten.index_select.default, op.args[0], dim, at)
    row = op.emit(aten.squeeze.dims, row, [dim])
    return addend(op, row, op.emit(aten.squeeze.dims, held, [0]))


def _selected_backward(op: LocalOp) -> fx.Node:
    if not op.is_cut("d"):
        return op.replaced(1, op.shape())
    ndim = op.call.results[0].ndim
    dim = op.call.arg("dim") % ndim
    index = op.call.arg("index") % op.rule.sizes["d"]
    at = op.emit(aten.eq.Scalar, op.positions("d"), index)
    at = unsqueezed(op, at, ndim - dim - 1)
    row = op.emit(aten.unsqueeze.default, op.args[0], dim)
    return masked(op, op.emit(aten.expand.default, row, op.shape()), at)


along_dim(aten.select.int, aten.select_copy.int, "... d -> ... {d}", linear=[(0,)], local=_selected)
along_dim(aten.select_backward.default, "... -> ... d", linear=[(0,)], local=_selected_backward)


# Ops along dims.

DIAGONAL = ("dim1", "dim2")
along_dim(
    aten.diagonal.default, aten.diagonal_copy.default, "... [a] [b] -> ... [y]",
    dim=DIAGONAL, linear=[(0,)],
)  # fmt: skip
along_dim(
    aten.diagonal_backward.default, "... [y] -> ... [a] [b]",
    dim=DIAGONAL, linear=[(0,)], local=with_shape(1),
)  # fmt: skip
along_dim(
    aten.diagonal_scatter.default, "... [a] [b], ... [y] -> ... [a] [b]",
    dim=DIAGONAL, linear=[(0, 1)],
)  # fmt: skip
along_dim(aten.select_scatter.default, "... [d], ... -> ... [d]", linear=[(0, 1)])


# The windows of a dim replace it; the elements of each are in a new last dim.
along_dim(
    aten.unfold.default, aten.unfold_copy.default, "... [d] -> ... [y] [w]",
    dim="dimension", linear=[(0,)],
)  # fmt: skip
along_dim(
    aten.unfold_backward.default, "... [y] [w] -> ... [d]",
    linear=[(0,)], local=with_shape(1),
)  # fmt: skip

# The halves of a dim are (k s), k = 2.
along_dim(aten.glu.default, "... ([k] s) -> ... s", local=unless_empty())
along_dim(
    aten.glu_backward.default, "... s, ... ([k] s) -> ... ([k] s)",
    linear=[(0,)],
)  # fmt: skip

along_dims(aten.flip.default, dims="dims", linear=[(0,)])
along_dims(aten.narrow_copy.default, linear=[(0,)])
along_dims(aten.roll.default, dims="dims", linear=[(0,)], local=unless_empty())
along_dims(aten.slice_scatter.default, linear=[(0, 1)])


@rule(aten.block_diag.default)
def block_diag(call: Call) -> Rule:
    return all_whole(call, linear=[range(len(call.operands))])


@rule(aten.constant_pad_nd.default)
def pad(call: Call) -> Rule:
    x, amounts = call.operands[0], call.arg("pad")
    pairs = enumerate(zip(amounts[::2], amounts[1::2], strict=True))
    # An amount that dynamic sizes decide may be zero: the dim is whole then too.
    at = [x.ndim - 1 - i for i, pair in pairs if any(is_dynamic(n) or n for n in pair)]
    return acting_on(call, at, linear=[(0,)] if call.arg("value") == 0 else ())


@rule(aten.repeat.default)
def repeat(call: Call) -> Rule:
    """Each dim's copies are a separate factor."""
    x, counts = call.operands[0], call.arg("repeats")
    skip = len(counts) - x.ndim
    operand = tuple((f"x{d}",) for d in range(x.ndim))
    # With zero copies there is nothing of the dim to cut.
    result = tuple(
        (f"r{d}", *(operand[d - skip] if d >= skip and counts[d] else ()))
        for d in range(len(counts))
    )
    whole = frozenset(f"x{d - skip}" for d, count in enumerate(counts) if d >= skip and not count)
    sizes = {f"r{d}": c for d, c in enumerate(counts)} | {f"x{d}": s for d, s in enumerate(x.shape)}

    def local(op: LocalOp) -> fx.Node:
        return op.replaced(1, [op.sizes[f"r{d}"] for d in range(len(counts))])

    return Rule(Notation((operand,), (result,), whole, ((),)), ((0,),), local, sizes)


# The parts of a pixel and the groups of channels are whole.
rule(
    aten.pixel_shuffle.default, "... (c [a] [b]) h w -> ... c (h [a]) (w [b])",
    sizes={"a": "upscale_factor", "b": "upscale_factor"}, linear=[(0,)], local=unless_empty(),
)  # fmt: skip
rule(
    aten.pixel_unshuffle.default, "... c (h [a]) (w [b]) -> ... (c [a] [b]) h w",
    sizes={"a": "downscale_factor", "b": "downscale_factor"}, linear=[(0,)], local=unless_empty(),
)  # fmt: skip
rule(
    aten.channel_shuffle.default, "n ([g] c) ... -> n (c [g]) ...",
    sizes={"g": "groups"}, linear=[(0,)], local=unless_empty(),
)  # fmt: skip


rule(aten.view_as_real.default, aten.view_as_real_copy.default, "... -> ... [c]", linear=[(0,)])
rule(
    aten.view_as_complex.default, aten.view_as_complex_copy.default, "... [c] -> ...",
    linear=[(0,)], local=unless_empty(contiguous(0)),  # which keeps the strides of no elements
)  # fmt: skip
# Bits read as another dtype: a last dim that changes its size is whole.
rule(
    aten.view.dtype, "... -> ...", "... [x] -> ... [y]", local=unless_empty(contiguous(0))
)  # fmt: skip


def _triangle_of_part(op: LocalOp) -> fx.Node:
    """If rows or columns are cut, keep elements by a mask of global positions."""
    if not op.is_cut("m", "n"):
        return op.default()
    keep = aten.le.Scalar if op.target is aten.tril.default else aten.ge.Scalar
    rows, columns = (op.positions(f) for f in ("m", "n"))
    above = op.emit(aten.sub.Tensor, columns, op.emit(aten.unsqueeze.default, rows, 1))
    return masked(op, op.args[0], op.emit(keep, above, op.call.arg("diagonal")))


rule(
    aten.tril.default, aten.triu.default, "... m n -> ... m n",
    linear=[(0,)], local=_triangle_of_part,
)  # fmt: skip
