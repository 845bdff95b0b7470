"""Names of torch's functions, grouped by what they do with selected rows (``selected.py``)."""

import torch

_POINTWISE = """
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
_VIEWING = """
    view reshape flatten unflatten squeeze unsqueeze detach contiguous expand expand_as view_as
    reshape_as ravel transpose swapaxes swapdims permute movedim moveaxis t adjoint select narrow
    chunk split tensor_split unbind unfold diagonal diag real imag view_as_real view_as_complex
    to type type_as float double half bfloat16 long int bool alias as_strided __getitem__ __get__
"""
# Pointwise functions: a plain operand broadcasts over the rows, or has a row per selected row.
POINTWISE = frozenset(_POINTWISE.split())
# Functions whose result may be a view of their operand.
VIEWING = frozenset(_VIEWING.split())
CONCATENATING = ("cat", "concat", "concatenate")  # they take rows of several masks
# Matmuls: one that sums over rows is right if the unselected rows are zero.
MATMULS = ("matmul", "mm", "bmm", "mv", "dot", "inner", "einsum", "linear", "tensordot")
LOOKUPS = ("__getitem__", "embedding", "gather", "index_select", "take_along_dim")
SAME_VALUES = ("view", "reshape", "flatten", "squeeze", "detach", "clone", "contiguous", "long")
SIZED = ("view", "reshape", "expand")
FACTORIES = ("new", "new_zeros", "new_ones", "new_full", "new_empty")  # by sizes
OF_DTYPE = ("is_floating_point", "is_complex", "is_signed", "element_size", "get_device")
# Methods that fill a tensor with one value, and the functions that return such a tensor.
FILLING = {"fill": torch.full_like, "zero": torch.zeros_like}
