"""Functions of each element of selected rows, by name: what stands beside the rows may be broadcast
over them, or have a row for each. Other functions of each row are found out by ``row_dims.py``.
"""

from ftp.tracing.selected import POINTWISE

_NAMES = """
    abs add sub subtract rsub mul multiply div divide true_divide pow neg negative exp exp2 expm1
    log log2 log10 log1p sqrt rsqrt square reciprocal relu relu6 gelu silu mish elu celu selu
    leaky_relu softplus softsign sigmoid logsigmoid hardsigmoid hardswish tanh hardtanh sin cos tan
    asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc erfinv lgamma digamma sign sgn clamp
    clip clamp_min clamp_max maximum minimum fmax fmin where eq ne lt le gt ge logical_and
    logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not isnan isfinite
    isinf isclose nan_to_num float double half bfloat16 long int bool to type type_as detach clone
    contiguous floor ceil round trunc frac fmod remainder floor_divide hypot logit logaddexp lerp
    addcmul addcdiv xlogy masked_fill zeros_like ones_like full_like dropout
"""
POINTWISE.update(_NAMES.split())
