"""Convolutions, pooling and resampling: batch and channels are cut, space is whole."""

import math
from typing import Any

import torch

from ftp.rules.forms import leading
from ftp.rules.local_forms import contributed_once, unless_empty, zeros
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.registry import RuleMaker, rule
from ftp.rules.rule import Call, LocalHook, Rule

aten = torch.ops.aten


@rule(aten.convolution.default)
def convolution(call: Call) -> Rule:
    """``n (g i) [y], (g o) i [w], (g o) -> n (g o) [z] {i}``; the bias is added once."""
    x, weight = call.operands[:2]
    dims = _conv_dims(call, x.ndim, 0)
    bias = (dims["bias"],) * (len(call.operands) - 2)
    linear = ((0, 2), (1, 2)) if bias else ((0,), (1,))

    def local(op: LocalOp) -> Any:
        x, weight, bias, stride, padding, dilation, transposed, output_padding, _ = op.args
        if op.is_cut() and 0 in (*op.operand_shape(0), *op.operand_shape(1)):
            return zeros(op, call)
        if bias is not None and op.is_cut("i"):
            bias = contributed_once(op, bias, "i")
        return op.emit(
            op.target,
            x,
            weight,
            bias,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            op.sizes["g"],
        )

    notation = Notation(
        (dims["x"], dims["w"], *bias), (dims["y"],), dims["whole"], ((("i", "sum"),),)
    )
    return Rule(notation, linear, local, _conv_sizes(call, weight.shape))


@rule(aten.convolution_backward.default)
def convolution_backward(call: Call) -> Rule:
    """Each gradient names what it sums over: the bias' does not see i."""
    _, x, weight = call.operands
    dims = _conv_dims(call, x.ndim, 1)
    wanted = call.arg("output_mask")
    named = zip((dims["x"], dims["w"], dims["bias"]), wanted, strict=True)
    results = tuple(d if want else () for d, want in named)
    sums = tuple(((f, "sum"),) if want else () for f, want in zip("onn", wanted, strict=True))

    def local(op: LocalOp) -> Any:
        (
            dy,
            x,
            weight,
            bias_sizes,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            _,
            mask,
        ) = op.args
        if op.is_cut() and 0 in (*op.operand_shape(0), *op.operand_shape(1), *op.operand_shape(2)):
            made = [zeros(op, call, i) if want else None for i, want in enumerate(mask)]
            if mask[2]:  # it may lack input channels alone, of which the bias knows nothing
                made[2] = op.emit(
                    aten.sum.dim_IntList, dy, [0, *range(2, len(op.operand_shape(0)))]
                )
            return tuple(made)
        sizes = None if bias_sizes is None else op.shape(2) if mask[2] else bias_sizes
        return op.emit(
            op.target,
            dy,
            x,
            weight,
            sizes,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            op.sizes["g"],
            mask,
        )

    notation = Notation((dims["y"], dims["x"], dims["w"]), results, dims["whole"], sums)
    return Rule(notation, ((0,),), local, _conv_sizes(call, weight.shape))


def _conv_dims(call: Call, ndim: int, at: int) -> dict[str, Any]:
    space = {k: tuple((f"{k}{d}",) for d in range(ndim - 2)) for k in "ywz"}
    i, o = ("g", "i"), ("g", "o")
    weight = (i, ("o",)) if call.arg("transposed") else (o, ("i",))
    return {
        "x": (("n",), i, *space["y"]),
        "w": (*weight, *space["w"]),
        "y": (("n",), o, *space["z"]),
        "bias": (o,),
        "whole": frozenset(f for dims in space.values() for dim in dims for f in dim),
    }


def _conv_sizes(call: Call, weight: tuple[int, ...]) -> dict[str, int]:
    groups = call.arg("groups")
    i, o = (
        (weight[0] // groups, weight[1])
        if call.arg("transposed")
        else (weight[1], weight[0] // groups)
    )
    return {"g": groups, "i": i, "o": o}


def _spatial(call: Call, dims: int, local: LocalHook | None = None, linear: bool = False) -> Rule:
    """The last ``dims`` dims are space."""
    return leading(
        call, call.operands[0].ndim - dims, [(0,)] if linear else (), unless_empty(call, local)
    )


@rule(aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default)
def max_pool2d(call: Call) -> Rule:
    """Indices count within a plane."""
    return _spatial(call, 2)


@rule(aten.max_pool3d_with_indices.default, aten.adaptive_max_pool3d.default)
def max_pool3d(call: Call) -> Rule:
    return _spatial(call, 3)


@rule(aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default)
def max_pool2d_backward(call: Call) -> Rule:
    return _spatial(call, 2, linear=True)


@rule(aten.max_pool3d_with_indices_backward.default, aten.adaptive_max_pool3d_backward.default)
def max_pool3d_backward(call: Call) -> Rule:
    return _spatial(call, 3, linear=True)


@rule(
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default, aten.upsample_nearest2d.default,
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.default, aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.default, aten.upsample_bicubic2d.vec,
    aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d.vec,
    aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default,
    aten.reflection_pad2d.default, aten.reflection_pad2d_backward.default,
    aten.replication_pad2d.default, aten.replication_pad2d_backward.default,
)  # fmt: skip
def plane(call: Call) -> Rule:
    return _spatial(call, 2, linear=True)


@rule(
    aten.avg_pool3d.default, aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default, aten.upsample_nearest3d.default,
    aten.upsample_nearest3d.vec, aten.upsample_trilinear3d.default, aten.upsample_trilinear3d.vec,
    aten._upsample_nearest_exact3d.default, aten._upsample_nearest_exact3d.vec,
    aten.reflection_pad3d.default, aten.reflection_pad3d_backward.default,
    aten.replication_pad3d.default, aten.replication_pad3d_backward.default,
)  # fmt: skip
def volume(call: Call) -> Rule:
    return _spatial(call, 3, linear=True)


@rule(
    aten.upsample_nearest1d.default, aten.upsample_nearest1d.vec, aten.upsample_linear1d.default,
    aten.upsample_linear1d.vec, aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact1d.vec, aten.reflection_pad1d.default,
    aten.reflection_pad1d_backward.default, aten.replication_pad1d.default,
    aten.replication_pad1d_backward.default,
)  # fmt: skip
def line(call: Call) -> Rule:
    return _spatial(call, 1, linear=True)


@rule(aten.max_unpool2d.default)
def max_unpool2d(call: Call) -> Rule:
    return _spatial(call, 2)


@rule(aten.max_unpool3d.default)
def max_unpool3d(call: Call) -> Rule:
    return _spatial(call, 3)


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: Call) -> Rule:
    """``n c [h] [w], n y x [t] -> n c y x``: points are cut, the image is whole."""
    image, points, out = _grid_dims(call.operands[0].ndim - 2)
    return Rule(
        Notation((image, points), (out,), _whole_of(image, points), ((),)),
        ((0,),),
        unless_empty(call),
    )


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: Call) -> Rule:
    image, points, out = _grid_dims(call.operands[1].ndim - 2)
    wanted = call.arg("output_mask")
    over_points = tuple((f, "sum") for (f,) in out[2:])
    sums = (over_points if wanted[0] else (), (("c", "sum"),))
    results = (image if wanted[0] else (), points)

    def local(op: LocalOp) -> Any:
        shapes = [op.operand_shape(i) for i in range(3)]
        if op.is_cut() and any(0 in shape for shape in shapes):
            return tuple(
                zeros(op, call, i) if want else None for i, want in enumerate((wanted[0], True))
            )
        return op.default()

    return Rule(
        Notation((out, image, points), results, _whole_of(image, points), sums), ((0,),), local
    )


def _grid_dims(space: int) -> tuple[Dims, Dims, Dims]:
    inside, at = tuple((f"h{d}",) for d in range(space)), tuple((f"y{d}",) for d in range(space))
    return (("n",), ("c",), *inside), (("n",), *at, ("t",)), (("n",), ("c",), *at)


def _whole_of(image: Dims, points: Dims) -> frozenset[str]:
    return frozenset({"t"} | {f for (f,) in image[2:]})


def _resample_backward(dims: int) -> RuleMaker:
    def made(call: Call) -> Rule:
        def local(op: LocalOp) -> Any:
            return op.replaced(2, op.shape())

        return _spatial(call, dims, local, linear=True)

    return made


rule(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
)(_resample_backward(1))
rule(
    aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default, aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_bilinear2d_aa_backward.default, aten._upsample_bicubic2d_aa_backward.default,
)(_resample_backward(2))  # fmt: skip
rule(
    aten.upsample_nearest3d_backward.default,
    aten.upsample_trilinear3d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
)(_resample_backward(3))


@rule(aten.im2col.default)
def im2col(call: Call) -> Rule:
    """Patches as columns: channels and taps share a dim, channels major."""
    return _columns(call, call.operands[0], call.results[0], flip=False)


@rule(aten.col2im.default)
def col2im(call: Call) -> Rule:
    return _columns(call, call.results[0], call.operands[0], flip=True)


def _columns(call: Call, image: Any, columns: Any, flip: bool) -> Rule:
    taps = math.prod(call.arg("kernel_size"))
    batch = (("n",),) * (image.ndim - 3)
    sizes = {"c": image.shape[-3], "k": taps}
    image_dims: Dims = (*batch, ("c",), ("y",), ("x",))
    column_dims: Dims = (*batch, ("c", "k"), ("l",))
    pair = (column_dims, image_dims) if flip else (image_dims, column_dims)
    return Rule(
        Notation((pair[0],), (pair[1],), frozenset("kyxl"), ((),)),
        ((0,),),
        unless_empty(call),
        sizes,
    )
