"""Convolutions, pooling and resampling: batch and channels are cut, space is whole."""

from typing import Any

from ftp.rules.call import Call
from ftp.rules.dims import factors
from ftp.rules.forms import batched
from ftp.rules.local_forms import contributed_once, unless_empty, with_shape, zeros
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import rule
from ftp.rules.rule import Rule


@rule(aten.convolution.default)
def convolution(call: Call) -> Rule:
    """``n (g i) [y], (g o) i [w], (g o) -> n (g o) [z] {i}``; the bias is added once. In a
    transposed convolution z and y are swapped: positions of z meet all taps.
    """
    x, weight = call.operands[:2]
    dims = _conv_dims(call, x.ndim)
    bias = (dims["bias"],) * (len(call.operands) - 2)
    linear = ((0, 2), (1, 2)) if bias else ((0,), (1,))

    def local(op: LocalOp) -> Any:
        x, weight, bias, *options, _ = op.args
        if op.is_cut() and 0 in (*op.operand_shape(0), *op.operand_shape(1)):
            return zeros(op)
        if bias is not None and op.is_cut("i"):
            bias = contributed_once(op, bias, "i")
        return op.emit(op.target, x, weight, bias, *options, op.sizes["g"])

    notation = Notation(
        (dims["x"], dims["w"], *bias), (dims["y"],), dims["whole"], ((("i", "sum"),),)
    )
    return Rule(notation, linear, local, _conv_sizes(call, weight.shape))


@rule(aten.convolution_backward.default)
def convolution_backward(call: Call) -> Rule:
    """Each gradient names what it sums over: the bias' does not see i."""
    _, x, weight = call.operands
    dims = _conv_dims(call, x.ndim)
    wanted = call.arg("output_mask")
    named = zip((dims["x"], dims["w"], dims["bias"]), wanted, strict=True)
    results = tuple(d if want else () for d, want in named)
    sums = tuple(((f, "sum"),) if want else () for f, want in zip("onn", wanted, strict=True))

    def local(op: LocalOp) -> Any:
        dy, x, weight, bias_sizes, *options, _, mask = op.args
        if op.is_cut() and 0 in (*op.operand_shape(0), *op.operand_shape(1), *op.operand_shape(2)):
            made = [zeros(op, i) if want else None for i, want in enumerate(mask)]
            if mask[2]:  # a rank without input channels still has the bias' gradient
                made[2] = op.emit(
                    aten.sum.dim_IntList, dy, [0, *range(2, len(op.operand_shape(0)))]
                )
            return tuple(made)
        sizes = None if bias_sizes is None else op.shape(2) if mask[2] else bias_sizes
        return op.emit(op.target, dy, x, weight, sizes, *options, op.sizes["g"], mask)

    notation = Notation((dims["y"], dims["x"], dims["w"]), results, dims["whole"], sums)
    return Rule(notation, ((0,),), local, _conv_sizes(call, weight.shape))


def _conv_dims(call: Call, ndim: int) -> dict[str, Any]:
    space = {k: tuple((f"{k}{d}",) for d in range(ndim - 2)) for k in "ywz"}
    given, made = "zy" if call.arg("transposed") else "yz"
    i, o = ("g", "i"), ("g", "o")
    weight = (i, ("o",)) if call.arg("transposed") else (o, ("i",))
    return {
        "x": (("n",), i, *space[given]),
        "w": (*weight, *space["w"]),
        "y": (("n",), o, *space[made]),
        "bias": (o,),
        "whole": factors(*space.values()),
    }


def _conv_sizes(call: Call, weight: tuple[int, ...]) -> dict[str, int]:
    groups = call.arg("groups")
    i, o = (
        (weight[0] // groups, weight[1])
        if call.arg("transposed")
        else (weight[1], weight[0] // groups)
    )
    return {"g": groups, "i": i, "o": o}


# Pooling, resampling and padding: the last dims are space. Indices count within a plane.

batched(aten.max_pool2d_with_indices.default, core=2, local=unless_empty())
batched(aten.adaptive_max_pool2d.default, aten.max_unpool2d.default, core=2, local=unless_empty())
batched(aten.max_pool3d_with_indices.default, core=3, local=unless_empty())
batched(aten.adaptive_max_pool3d.default, aten.max_unpool3d.default, core=3, local=unless_empty())
batched(
    aten.upsample_nearest1d.default, aten.upsample_nearest1d.vec, aten.upsample_linear1d.default,
    aten.upsample_linear1d.vec, aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact1d.vec, aten.reflection_pad1d.default,
    aten.reflection_pad1d_backward.default, aten.replication_pad1d.default,
    aten.replication_pad1d_backward.default,
    core=1, linear=[(0,)], local=unless_empty(),
)  # fmt: skip
batched(
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default, aten.upsample_nearest2d.default,
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.default, aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.default, aten.upsample_bicubic2d.vec,
    aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d.vec,
    aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default,
    aten.reflection_pad2d.default, aten.reflection_pad2d_backward.default,
    aten.replication_pad2d.default, aten.replication_pad2d_backward.default,
    aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default,
    core=2, linear=[(0,)], local=unless_empty(),
)  # fmt: skip
batched(
    aten.avg_pool3d.default, aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default, aten.upsample_nearest3d.default,
    aten.upsample_nearest3d.vec, aten.upsample_trilinear3d.default, aten.upsample_trilinear3d.vec,
    aten._upsample_nearest_exact3d.default, aten._upsample_nearest_exact3d.vec,
    aten.reflection_pad3d.default, aten.reflection_pad3d_backward.default,
    aten.replication_pad3d.default, aten.replication_pad3d_backward.default,
    aten.max_pool3d_with_indices_backward.default, aten.adaptive_max_pool3d_backward.default,
    core=3, linear=[(0,)], local=unless_empty(),
)  # fmt: skip

# The backward of resampling takes the shape of its result.
batched(
    aten.upsample_nearest1d_backward.default, aten.upsample_linear1d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    core=1, linear=[(0,)], local=unless_empty(with_shape(2)),
)  # fmt: skip
batched(
    aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default, aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_bilinear2d_aa_backward.default, aten._upsample_bicubic2d_aa_backward.default,
    core=2, linear=[(0,)], local=unless_empty(with_shape(2)),
)  # fmt: skip
batched(
    aten.upsample_nearest3d_backward.default, aten.upsample_trilinear3d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    core=3, linear=[(0,)], local=unless_empty(with_shape(2)),
)  # fmt: skip


# Sampling at points: points are cut, the image is whole. An affine map's grid is whole too.
def _affine_grid_of_part(op: LocalOp) -> Any:
    """Replace the batch in the argument ``size`` by the local batch."""
    return op.replaced(1, [op.shape()[0], *op.args[1][1:]])


rule(
    aten.affine_grid_generator.default,
    "n [i] [k] -> n [y] [x] [i]", "n [i] [k] -> n [z] [y] [x] [i]",
    linear=[(0,)], local=unless_empty(_affine_grid_of_part),
)  # fmt: skip
rule(
    aten.grid_sampler_2d.default, "n c [h] [w], n y x [t] -> n c y x",
    linear=[(0,)], local=unless_empty(),
)  # fmt: skip
rule(
    aten.grid_sampler_3d.default, "n c [d] [h] [w], n z y x [t] -> n c z y x",
    linear=[(0,)], local=unless_empty(),
)  # fmt: skip


def _grid_backward_of_part(op: LocalOp) -> Any:
    wants_image = op.call.arg("output_mask")[0]
    if op.is_cut() and any(0 in op.operand_shape(i) for i in range(3)):
        return zeros(op, 0) if wants_image else None, zeros(op, 1)
    return op.default()


rule(
    aten.grid_sampler_2d_backward.default,
    "n c y x, n c [h] [w], n y x [t] -> n c [h] [w] {y x}, n y x [t] {c}",
    wanted="output_mask", linear=[(0,)], local=_grid_backward_of_part,
)  # fmt: skip
rule(
    aten.grid_sampler_3d_backward.default,
    "n c z y x, n c [d] [h] [w], n z y x [t] -> n c [d] [h] [w] {z y x}, n z y x [t] {c}",
    wanted="output_mask", linear=[(0,)], local=_grid_backward_of_part,
)  # fmt: skip

# Patches as columns: channels and taps share a dim, channels major.
rule(aten.im2col.default, "... c [y] [x] -> ... (c [k]) [l]", linear=[(0,)], local=unless_empty())
rule(aten.col2im.default, "... (c [k]) [l] -> ... c [y] [x]", linear=[(0,)], local=unless_empty())
