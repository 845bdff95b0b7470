"""Views, and ops that move elements without looking at them."""

import math
from collections.abc import Sequence
from itertools import count

import torch
from torch import fx

from ftp.rules.forms import acting_on, broadcast_notation
from ftp.rules.local_forms import held_rows, masked, unless_empty, unsqueezed, with_shape, zeros
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.registry import make, rule
from ftp.rules.rule import Call, Meta, Rule

aten = torch.ops.aten


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten._reshape_alias.default,
)
def view(call: Call) -> Rule:
    """Both shapes in the factors that they have in common; what does not divide is whole."""
    operand, result, whole, sizes = common_factors(call.operands[0].shape, call.results[0].shape)
    return Rule(Notation((operand,), (result,), frozenset(whole), ((),)), ((0,),), _reshape, sizes)


def _reshape(op: LocalOp) -> fx.Node:
    return op.emit(aten.reshape.default, op.args[0], op.shape())


def common_factors(
    old: Sequence[int], new: Sequence[int]
) -> tuple[Dims, Dims, list[str], dict[str, int]]:
    """Two shapes of one number of elements as lists of factors: dims of each, whole factors, sizes.

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
            common = (
                sized[0]
                if sized[0] == sized[1]
                else math.gcd(*sized)
                if 0 not in (*rest[0], *rest[1])
                else 1
            )
            if common == 1:
                break
            name = named(common)
            for side, dim in ((0, a), (1, b)):
                found[side][dim].insert(0 if end else len(found[side][dim]), name)
                rest[side][dim] = rest[side][dim] // common if common else 1
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


@rule(
    aten.t.default, aten.t_copy.default, aten.transpose.int, aten.transpose_copy.int,
    aten.permute.default, aten.permute_copy.default, aten.adjoint.default, aten.mT.default,
)  # fmt: skip
def permute(call: Call) -> Rule:
    ndim = call.operands[0].ndim
    order = list(range(ndim))
    if "dims" in {a.name for a in call.target._schema.arguments}:
        order = [d % ndim for d in call.arg("dims")]
    elif ndim:
        swap = (
            [call.arg("dim0"), call.arg("dim1")]
            if len(call.args) > 1
            else [-2, -1]
            if ndim > 1
            else [0, 0]
        )
        a, b = (d % ndim for d in swap)
        order[a], order[b] = b, a
    dims = tuple((f"~{d}",) for d in range(ndim))
    return Rule(Notation((dims,), (tuple(dims[d] for d in order),), frozenset(), ((),)), ((0,),))


@rule(aten.expand.default, aten.expand_copy.default)
def expand(call: Call) -> Rule:
    return Rule(
        broadcast_notation([call.operands[0].shape], [call.results[0].shape]),
        ((0,),),
        with_shape(1),
    )


@rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(call: Call) -> Rule:
    dims = tuple((f"~{d}",) for d in range(call.operands[0].ndim))
    at = call.arg("dim") % (len(dims) + 1)
    return Rule(Notation((dims,), ((*dims[:at], (), *dims[at:]),), frozenset(), ((),)), ((0,),))


@rule(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
)
def squeeze(call: Call) -> Rule:
    """A dim that is of size one on some rank alone stays."""
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


# Parts of a dim. Where all of them, and what lies around them, are whole numbers of s elements, the
# dim is seen as (k s), and s may be cut within each of the k alike: three packs of heads, of which
# a part takes one or two.


@rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(call: Call) -> Rule:
    x, (y,) = call.operands[0], call.results
    dim = call.arg("dim") % x.ndim
    start, _, step = slice(call.arg("start"), call.arg("end"), call.arg("step")).indices(
        x.shape[dim]
    )
    size = math.gcd(x.shape[dim], start, y.shape[dim])
    if step != 1 or not y.shape[dim] or (size == 1 and y.shape[dim] > 1):
        return acting_on(call, [dim], linear=[(0,)])
    first, last = start // size, (start + y.shape[dim]) // size

    def local(op: LocalOp) -> fx.Node:
        return op.emit(op.target, op.args[0], dim, first * op.sizes["s"], last * op.sizes["s"])

    notation, sizes = _in_parts(
        _dims(x.ndim), dim, size, x.shape[dim], [y.shape[dim]], reverse=False
    )
    return Rule(notation, ((0,),), local, sizes)


@rule(aten.slice_backward.default)
def slice_backward(call: Call) -> Rule:
    y, (x,) = call.operands[0], call.results
    dim = call.arg("dim") % x.ndim
    start, end, step = slice(call.arg("start"), call.arg("end"), call.arg("step")).indices(
        x.shape[dim]
    )
    size = math.gcd(x.shape[dim], start, y.shape[dim])
    # The op spreads a gradient of one element over a longer slice.
    if (
        step != 1
        or end - start != y.shape[dim]
        or not y.shape[dim]
        or (size == 1 and y.shape[dim] > 1)
    ):
        return acting_on(call, [dim], linear=[(0,)], local=with_shape(1))
    first, last = start // size, (start + y.shape[dim]) // size

    def local(op: LocalOp) -> fx.Node:
        return op.emit(
            op.target, op.args[0], op.shape(), dim, first * op.sizes["s"], last * op.sizes["s"], 1
        )

    notation, sizes = _in_parts(
        _dims(x.ndim), dim, size, x.shape[dim], [y.shape[dim]], reverse=True
    )
    return Rule(notation, ((0,),), local, sizes)


@rule(
    aten.split.Tensor, aten.split_with_sizes.default, aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)  # fmt: skip
def split(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.arg("dim") % x.ndim
    parts = [m.shape[dim] for m in call.results]
    size = math.gcd(*parts)
    if not parts or not all(parts) or (size == 1 and len(set(parts)) > 1):
        return acting_on(call, [dim], linear=[(0,)])
    with_sizes = "split_with_sizes" in str(call.target) or len(set(parts)) > 1

    def local(op: LocalOp) -> fx.Node:
        if with_sizes or not op.sizes["s"]:
            return op.emit(
                aten.split_with_sizes.default,
                op.args[0],
                [part // size * op.sizes["s"] for part in parts],
                dim,
            )
        return op.emit(op.target, op.args[0], op.sizes["s"], dim)

    notation, sizes = _in_parts(_dims(x.ndim), dim, size, x.shape[dim], parts, reverse=False)
    return Rule(notation, ((0,),), local, sizes)


@rule(aten.cat.default)
def cat(call: Call) -> Rule:
    (y,) = call.results
    together = [tuple(range(len(call.operands)))]
    if any(m.ndim != y.ndim for m in call.operands):  # torch skips empty vectors among matrices
        return _cat_with_vectors(call, together)
    dim = call.arg("dim") % y.ndim
    parts = [m.shape[dim] for m in call.operands]
    size = math.gcd(*parts)
    if not all(parts) or (size == 1 and len(set(parts)) > 1):
        return acting_on(call, [dim], linear=together)
    notation, sizes = _in_parts(_dims(y.ndim), dim, size, y.shape[dim], parts, reverse=True)
    return Rule(notation, tuple(together), None, sizes)


def _cat_with_vectors(call: Call, linear: Sequence[Sequence[int]]) -> Rule:
    (y,) = call.results
    dim = call.arg("dim") % y.ndim
    whole = {f"s{i}" for i in range(len(call.operands))} | {"s"}

    def dims(i: int, ndim: int) -> Dims:
        return tuple((f"s{i}",) if d == dim or ndim != y.ndim else (f"~{d}",) for d in range(ndim))

    operands = tuple(dims(i, m.ndim) for i, m in enumerate(call.operands))
    result = tuple(("s",) if d == dim else (f"~{d}",) for d in range(y.ndim))
    return Rule(Notation(operands, (result,), frozenset(whole), ((),)), tuple(map(tuple, linear)))


@rule(aten.stack.default)
def stack(call: Call) -> Rule:
    dims = _dims(call.operands[0].ndim)
    at = call.arg("dim") % (len(dims) + 1)
    n = len(call.operands)
    return Rule(
        Notation((dims,) * n, ((*dims[:at], ("k",), *dims[at:]),), frozenset("k"), ((),)),
        (tuple(range(n)),),
    )


@rule(aten.unbind.int, aten.unbind_copy.int)
def unbind(call: Call) -> Rule:
    dims = list(_dims(call.operands[0].ndim))
    at = call.arg("dim") % len(dims)
    result = tuple(dims[:at] + dims[at + 1 :])
    n = len(call.results)
    return Rule(Notation((tuple(dims),), (result,) * n, frozenset(dims[at]), ((),) * n), ((0,),))


@rule(aten.select.int, aten.select_copy.int)
def select(call: Call) -> Rule:
    """The rank that holds the element gives it, the others zero."""
    x = call.operands[0]
    dim = call.arg("dim") % x.ndim
    index = call.arg("index") % x.shape[dim]
    dims = _dims(x.ndim)
    (factor,) = dims[dim]

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut(factor):
            return op.default()
        if not op.sizes[factor]:
            return zeros(op, call)
        at, held = held_rows(
            op, factor, op.emit(aten.full.default, [1], index, dtype=torch.int64, device=op.device)
        )
        row = op.emit(
            aten.squeeze.dims, op.emit(aten.index_select.default, op.args[0], dim, at), [dim]
        )
        return masked(op, row, op.emit(aten.squeeze.dims, held, [0]))

    return Rule(
        Notation((dims,), (dims[:dim] + dims[dim + 1 :],), frozenset(), (((factor, "sum"),),)),
        ((0,),),
        local,
    )


@rule(aten.select_backward.default)
def select_backward(call: Call) -> Rule:
    (y,) = call.results
    dim = call.arg("dim") % y.ndim
    index = call.arg("index") % y.shape[dim]
    dims = _dims(y.ndim)
    (factor,) = dims[dim]

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut(factor):
            return op.replaced(1, op.shape())
        at = op.emit(aten.eq.Scalar, op.positions(factor), index)
        at = unsqueezed(op, at, 0, y.ndim - dim - 1)
        row = op.emit(
            aten.expand.default, op.emit(aten.unsqueeze.default, op.args[0], dim), op.shape()
        )
        return masked(op, row, at)

    return Rule(
        Notation((dims[:dim] + dims[dim + 1 :],), (dims,), frozenset(), ((),)), ((0,),), local
    )


# Ops along dims.


@rule(aten.slice_scatter.default)
def slice_scatter(call: Call) -> Rule:
    return acting_on(call, [call.arg("dim")], linear=[(0, 1)])


@rule(aten.select_scatter.default)
def select_scatter(call: Call) -> Rule:
    dims = _dims(call.operands[0].ndim)
    at = call.arg("dim") % len(dims)
    return Rule(
        Notation((dims, dims[:at] + dims[at + 1 :]), (dims,), frozenset(dims[at]), ((),)), ((0, 1),)
    )


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Rule:
    x = call.operands[0]
    a, b = call.arg("dim1") % x.ndim, call.arg("dim2") % x.ndim
    dims = _dims(x.ndim)
    rest = tuple(dim for d, dim in enumerate(dims) if d not in (a, b))
    return Rule(
        Notation((dims, (*rest, ("y",))), (dims,), frozenset({*dims[a], *dims[b], "y"}), ((),)),
        ((0, 1),),
    )


@rule(aten.glu.default)
def glu(call: Call) -> Rule:
    """The halves of a dim: (k s), k = 2."""
    return _halves(call, call.operands[0].ndim, reverse=False)


@rule(aten.glu_backward.default)
def glu_backward(call: Call) -> Rule:
    made = _halves(call, call.operands[1].ndim, reverse=True)
    n = made.notation
    return Rule(
        Notation((n.operands[0], n.results[0]), n.results, n.whole, ((),)),
        ((0,),),
        None,
        made.sizes,
    )


def _halves(call: Call, ndim: int, *, reverse: bool) -> Rule:
    dim = call.arg("dim") % ndim
    size = (call.operands[0] if reverse else call.results[0]).shape[dim]
    notation, sizes = _in_parts(_dims(ndim), dim, size, 2 * size, [size], reverse=reverse)
    return Rule(notation, (), unless_empty(call), sizes)


@rule(aten.flip.default)
def flip(call: Call) -> Rule:
    return acting_on(call, call.arg("dims"), linear=[(0,)])


@rule(aten.roll.default)
def roll(call: Call) -> Rule:
    """Without dims it rolls the flattened tensor."""
    x = call.operands[0]
    return acting_on(
        call, call.arg("dims") or range(x.ndim), linear=[(0,)], local=unless_empty(call)
    )


@rule(aten.constant_pad_nd.default)
def pad(call: Call) -> Rule:
    x, amounts = call.operands[0], call.arg("pad")
    at = [x.ndim - 1 - i for i in range(len(amounts) // 2) if amounts[2 * i] or amounts[2 * i + 1]]
    return acting_on(call, at, linear=[(0,)] if call.arg("value") == 0 else ())


@rule(aten.repeat.default)
def repeat(call: Call) -> Rule:
    """Each dim's copies are a factor of their own."""
    x, counts = call.operands[0], call.arg("repeats")
    skip = len(counts) - x.ndim
    operand = tuple((f"x{d}",) for d in range(x.ndim))
    # Of no copies nothing of the dim is left to cut.
    result = tuple(
        (f"r{d}", *(operand[d - skip] if d >= skip and counts[d] else ()))
        for d in range(len(counts))
    )
    whole = frozenset(f"x{d - skip}" for d, count in enumerate(counts) if d >= skip and not count)
    sizes = {f"r{d}": c for d, c in enumerate(counts)} | {f"x{d}": s for d, s in enumerate(x.shape)}

    def local(op: LocalOp) -> fx.Node:
        return op.replaced(1, [op.sizes[f"r{d}"] for d in range(len(counts))])

    return Rule(Notation((operand,), (result,), whole, ((),)), ((0,),), local, sizes)


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(call: Call) -> Rule:
    x = call.operands[0]
    a, b = call.arg("dim1") % x.ndim, call.arg("dim2") % x.ndim
    dims = _dims(x.ndim)
    rest = tuple(dim for d, dim in enumerate(dims) if d not in (a, b))
    return Rule(
        Notation((dims,), ((*rest, ("y",)),), frozenset({*dims[a], *dims[b], "y"}), ((),)), ((0,),)
    )


@rule(aten.diagonal_backward.default)
def diagonal_backward(call: Call) -> Rule:
    (x,) = call.results
    a, b = call.arg("dim1") % x.ndim, call.arg("dim2") % x.ndim
    dims = _dims(x.ndim)
    rest = tuple(dim for d, dim in enumerate(dims) if d not in (a, b))
    return Rule(
        Notation(((*rest, ("y",)),), (dims,), frozenset({*dims[a], *dims[b], "y"}), ((),)),
        ((0,),),
        with_shape(1),
    )


@rule(aten.unfold.default, aten.unfold_copy.default)
def unfold(call: Call) -> Rule:
    x = call.operands[0]
    if not x.ndim:
        return make("() -> [w]", linear=[(0,)])
    at = call.arg("dimension") % x.ndim
    dims = _dims(x.ndim)
    result = (*dims[:at], ("y",), *dims[at + 1 :], ("w",))
    return Rule(Notation((dims,), (result,), frozenset({*dims[at], "y", "w"}), ((),)), ((0,),))


@rule(aten.unfold_backward.default)
def unfold_backward(call: Call) -> Rule:
    (x,) = call.results
    if not x.ndim:
        return make("[w] -> ()", linear=[(0,)])
    at = call.arg("dim") % x.ndim
    dims = _dims(x.ndim)
    grad = (*dims[:at], ("y",), *dims[at + 1 :], ("w",))
    return Rule(
        Notation((grad,), (dims,), frozenset({*dims[at], "y", "w"}), ((),)), ((0,),), with_shape(1)
    )


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(call: Call) -> Rule:
    """``... (c a b) h w -> ... c (h a) (w b)``; a pixel's parts are whole."""
    return _pixels(
        call, call.operands[0], call.results[0], call.arg("upscale_factor"), shuffled=False
    )


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(call: Call) -> Rule:
    return _pixels(
        call, call.results[0], call.operands[0], call.arg("downscale_factor"), shuffled=True
    )


def _pixels(call: Call, deep: Meta, wide: Meta, factor: int, *, shuffled: bool) -> Rule:
    batch = _dims(deep.ndim - 3)
    deep_dims: Dims = (*batch, ("c", "a", "b"), ("h",), ("w",))
    wide_dims: Dims = (*batch, ("c",), ("h", "a"), ("w", "b"))
    sizes = {
        "a": factor,
        "b": factor,
        "c": wide.shape[-3],
        "h": deep.shape[-2],
        "w": deep.shape[-1],
    }
    pair = (wide_dims, deep_dims) if shuffled else (deep_dims, wide_dims)
    return Rule(
        Notation((pair[0],), (pair[1],), frozenset("ab"), ((),)), ((0,),), unless_empty(call), sizes
    )


@rule(aten.channel_shuffle.default)
def channel_shuffle(call: Call) -> Rule:
    """``n (g c) ... -> n (c g) ...``; groups are whole."""
    x, groups = call.operands[0], call.arg("groups")
    space = tuple((f"y{d}",) for d in range(x.ndim - 2))
    notation = Notation(
        ((("n",), ("g", "c"), *space),), ((("n",), ("c", "g"), *space),), frozenset("g"), ((),)
    )
    return Rule(notation, ((0,),), unless_empty(call), {"g": groups, "c": x.shape[1] // groups})


@rule(aten.narrow_copy.default)
def narrow(call: Call) -> Rule:
    return acting_on(call, [call.arg("dim")], linear=[(0,)])


@rule(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(call: Call) -> Rule:
    dims = _dims(call.operands[0].ndim)
    return Rule(Notation((dims,), ((*dims, ("c",)),), frozenset("c"), ((),)), ((0,),))


@rule(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(call: Call) -> Rule:
    dims = _dims(call.results[0].ndim)
    return Rule(
        Notation(((*dims, ("c",)),), (dims,), frozenset("c"), ((),)),
        ((0,),),
        lambda op: op.default(op.emit(aten.contiguous.default, op.args[0])),
    )


@rule(aten.view.dtype)
def view_dtype(call: Call) -> Rule:
    """Bits read as another type: a last dim that shrinks or grows is whole."""
    x, (y,) = call.operands[0], call.results
    return acting_on(call, [] if x.shape == y.shape else [-1])


@rule(aten.tril.default, aten.triu.default)
def triangle(call: Call) -> Rule:
    """Where rows or columns are cut, a mask of the global positions says what is kept."""
    x, diagonal = call.operands[0], call.arg("diagonal")
    dims = _dims(x.ndim)
    (m,), (n,) = dims[-2:]
    keep = aten.le.Scalar if call.target is aten.tril.default else aten.ge.Scalar

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut(m, n):
            return op.default()
        rows, columns = (op.positions(f) for f in (m, n))
        ahead = op.emit(aten.sub.Tensor, columns, op.emit(aten.unsqueeze.default, rows, 1))
        return masked(op, op.args[0], op.emit(keep, ahead, diagonal))

    return Rule(Notation((dims,), (dims,), frozenset(), ((),)), ((0,),), local)


def _dims(ndim: int) -> Dims:
    return tuple((f"~{d}",) for d in range(ndim))


def _in_parts(
    dims: Dims, dim: int, size: int, all_of: int, parts: Sequence[int], *, reverse: bool
) -> tuple[Notation, dict[str, int]]:
    """A tensor of ``all_of`` elements along ``dim``, seen as (k s) with s of ``size``, and
    ``parts`` of it, each a (k s) of its own; the latter first if ``reverse``. Each k is whole."""
    sizes = {"s": size}

    def seen(name: str, length: int) -> Dims:
        if length != size:
            sizes[name] = length // size
        return (*dims[:dim], (name, "s") if length != size else ("s",), *dims[dim + 1 :])

    whole = (seen("k", all_of),)
    each = tuple(seen(f"k{i}", length) for i, length in enumerate(parts))
    first, then = (each, whole) if reverse else (whole, each)
    return Notation(first, then, frozenset(sizes.keys() - {"s"}), ((),) * len(then)), sizes
