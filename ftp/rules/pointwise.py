"""Elementwise ops, grouped by what they are linear in."""

from ftp.rules.call import Call
from ftp.rules.dims import broadcast_notation, factors
from ftp.rules.forms import along_dim, pointwise
from ftp.rules.local_forms import unless_empty
from ftp.rules.notation import Notation
from ftp.rules.overloads import aten, prims
from ftp.rules.registry import rule
from ftp.rules.rule import Rule
from ftp.torch_internals.op_types import OpOverload


def overloads(names: str, kinds: str = "default") -> list[OpOverload]:
    """The existing overloads of the named aten ops, without those of Python numbers."""
    packets = [getattr(aten, name) for name in names.split()]
    found = [
        getattr(packet, kind)
        for packet in packets
        for kind in kinds.split()
        if kind in packet.overloads()
    ]
    return [op for op in found if any(str(a.type) == "Tensor" for a in op._schema.arguments)]


# f(x): no partial sum passes.
UNARY = """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad digamma elu
    erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0
    isfinite isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid
    logical_not logit mish mvlgamma nan_to_num polygamma rad2deg reciprocal relu relu6 round rsqrt
    selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh
    threshold trunc special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai
"""
BINARY = """
    atan2 copysign floor_divide fmax fmin fmod gcd heaviside hypot igamma igammac lcm logaddexp
    logaddexp2 logical_and logical_or logical_xor maximum minimum nextafter pow remainder
    special_chebyshev_polynomial_t special_hermite_polynomial_h special_xlog1py
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_zeta xlogy
    polar ldexp bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor eq ge gt
    le lt ne __lshift__ __rshift__
"""
pointwise(*overloads(UNARY))
pointwise(
    *overloads(
        BINARY,
        "default Tensor Scalar Tensor_Tensor Tensor_Scalar Scalar_Tensor self_scalar other_scalar",
    )
)
pointwise(*overloads("clamp clamp_max clamp_min", "default Tensor"))
pointwise(*overloads("div", "Tensor_mode Scalar_mode"))
pointwise(*overloads("empty_like full_like ones_like"))
pointwise(aten.fill.Scalar, aten.frexp.Tensor, aten.round.decimals)
pointwise(aten.fake_quantize_per_tensor_affine_cachemask.default)

# f(x + y) = f(x) + f(y).
ADDITIVE = (
    "_conj _conj_physical _neg_view alias alias_copy clone conj_physical detach detach_copy"
    " imag lift lift_fresh_copy neg positive real"
)
pointwise(*overloads(ADDITIVE), *overloads("zeros_like"), linear=[(0,)])
pointwise(*overloads("div mul", "Scalar"), linear=[(0,)])

# Bilinear, or linear in the numerator.
pointwise(aten.mul.Tensor, linear=[(0,), (1,)])
pointwise(aten.div.Tensor, linear=[(0,)])

# Linear in several operands together.
pointwise(aten.complex.default, aten.lerp.Scalar, aten.lerp.Tensor, linear=[(0, 1)])
pointwise(*overloads("add rsub sub", "Scalar Tensor"), linear=[(0, 1)], if_zero="other")
pointwise(aten.addcdiv.default, linear=[(0, 1)])
pointwise(aten.addcmul.default, linear=[(0, 1), (0, 2)])
pointwise(aten.masked_fill.Tensor, linear=[(0, 2)])
pointwise(aten.where.self, linear=[(1, 2)])

# One operand gives the values, the other the shape.
pointwise(aten.copy.default, aten.fill.Tensor, linear=[(1,)])

# The backward of f(x) is linear in the gradient.
BACKWARD = """
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward
    rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward tanh_backward
    threshold_backward
"""
pointwise(
    *overloads(BACKWARD), *overloads("hardshrink_backward softshrink_backward"), linear=[(0,)]
)


# Filling with zeros passes pending sums on; each rank would add any other fill value.
pointwise(aten.masked_fill.Scalar, linear=[(0,)], if_zero="value")
pointwise(aten.where.ScalarOther, linear=[(1,)], if_zero="other")
pointwise(aten.where.ScalarSelf, linear=[(1,)], if_zero="self")

# The weight broadcasts to x; its gradient has x's shape.
pointwise(aten._prelu_kernel.default)
pointwise(aten._prelu_kernel_backward.default, linear=[(0,)])


@rule(aten.rrelu_with_noise_functional.default)
def rrelu(call: Call) -> Rule | None:
    """Elementwise in evaluation; in training slopes are drawn."""
    if call.arg("training"):
        return None
    shapes = [m.shape for m in call.operands], [m.shape for m in call.results]
    return Rule(broadcast_notation(*shapes))


# Scales and zero points are per channel, or one element.
along_dim(
    aten.fake_quantize_per_channel_affine_cachemask.default,
    "... c, c, c -> ... c, ... c", dim="axis", local=unless_empty(),
)  # fmt: skip
rule(
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    "..., [a], [a], [a] -> ..., ...", local=unless_empty(),
)  # fmt: skip


@rule(aten.isin.Tensor_Tensor)
def isin(call: Call) -> Rule:
    x, among = (
        tuple((f"{letter}{d}",) for d in range(m.ndim))
        for letter, m in zip("xy", call.operands, strict=True)
    )
    return Rule(Notation((x, among), (x,), factors(among), ((),)))


# Casts.
pointwise(aten._to_copy.default, prims.convert_element_type.default, linear=[(0,)])

# The second result is a buffer, empty on some devices.
rule(aten.log_sigmoid_forward.default, "... -> ..., ...", "... -> ..., [b]")
