"""Functions of each selected row: of its elements, or along the dims of its features."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.assume import assume
from ftp.tracing.selected import OF_EACH_ROW, POINTWISE, Selected, flat, is_over_rows


def _keeps_rows(at: int, default: Any = None, name: str = "dim") -> Callable[..., bool]:
    """For a function along the dim in argument ``at``: whether this is not the dim of rows."""

    def check(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        dim = args[at] if len(args) > at else kwargs.get(name, default)
        return dim not in (None, (), []) and not is_over_rows(ndim, dim)

    return check


def _features(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The selection is the first operand, with its features behind the rows."""
    others = flat((args[1:], kwargs))
    return (
        isinstance(args[0], Selected)
        and ndim > 1
        and not any(isinstance(a, Selected) for a in others)
        and all(a.ndim <= 2 for a in others if isinstance(a, Tensor))
    )


def _normalized(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
    return _features(ndim, args, kwargs) and len(shape) < ndim


def _lookup(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return isinstance(args[0], Selected) and isinstance(args[1], Tensor)


def _same_rows(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``x.reshape(-1, ...)`` changes the shape of each row alone."""
    x, *sizes = args
    sizes = [*sizes[0]] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    is_first = sizes[:1] == [-1] and all(isinstance(s, int) and s >= 0 for s in sizes[1:])
    return is_first and not kwargs and math.prod(sizes[1:]) == math.prod(x.rows.shape[1:])


def _item(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``x[:, ...]`` of a selection, or ``x[i, j]`` at selected indices."""
    x, key = args
    keys = key if isinstance(key, tuple) else (key,)
    if isinstance(x, Selected):
        lists = [k for k in keys if isinstance(k, list)]
        simple = all(k is None or isinstance(k, int | slice | list) for k in keys[1:])
        simple = simple and len(lists) < 2 and all(isinstance(i, int) for k in lists for i in k)
        all_rows = isinstance(keys[0], slice) and keys[0] == slice(None)
        return simple and (all_rows or (keys[0] is Ellipsis and len(keys) <= ndim))
    if any(k is Ellipsis or isinstance(k, Tensor | int) for k in keys):
        return False
    chosen = [i for i, k in enumerate(keys) if isinstance(k, Selected)]
    together = chosen == list(range(len(chosen))) and len({keys[i].ndim for i in chosen}) == 1
    return together and all(keys[i].dtype is not torch.bool for i in chosen)


def _joined(is_new: int) -> Callable[..., bool]:
    """Of ``cat`` and ``stack``: whether all operands are selected, and joined beside the rows."""

    def check(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return all(isinstance(x, Selected) for x in args[0]) and dim % (ndim + is_new) > 0

    return check


def _transposed(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return len(args) == 3 and args[1] % ndim > 0 and args[2] % ndim > 0


def _pairs(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return len(args) == 2 and all(isinstance(x, Selected) for x in args)


def _similarity(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    alike = _pairs(ndim, args[:2], kwargs) and args[0].ndim == args[1].ndim
    return alike and _keeps_rows(2, 1)(ndim, args, kwargs)


def _squeezed(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if len(args) == 1 and not kwargs and args[0].rows.shape[0] != 1:
        count = args[0].group.valid.sum()
        assume(count != 1, "the mask does not select one row alone, whose dim squeeze() drops")
        return True
    return _keeps_rows(1)(ndim, args, kwargs)


def _gathered(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``x.gather(dim, index)`` of rows, by an index of each."""
    if kwargs or len(args) != 3 or not isinstance(args[0], Selected):
        return False
    is_index = isinstance(args[2], Selected) and args[2].rows.ndim == ndim
    return is_index and args[1] % ndim > 0


def _flipped(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dims = args[1:] if len(args) > 2 else kwargs.get("dims", *args[1:])
    return not is_over_rows(ndim, dims)


def _sized(kept: int) -> Callable[..., bool]:
    """Of ``expand`` and ``repeat``: whether the size of the dim of rows is ``kept``, as it was."""

    def check(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        sizes = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return len(sizes) == ndim and sizes[0] == kept and not kwargs

    return check


def _selected_features(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``x.index_select(dim, index)`` by an index that is the same for all rows."""
    plain = len(args) == 3 and isinstance(args[0], Selected) and isinstance(args[2], Tensor)
    return plain and args[1] % ndim > 0


def _flattened(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``flatten`` of the dims beside the rows, or of rows of one element."""
    start = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    return start % ndim > 0 or math.prod(args[0].rows.shape[1:]) == 1


def _of_first(check: Callable[..., bool]) -> Callable[..., bool]:
    """Whether the first operand alone is selected, and ``check`` holds."""

    def of(ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        others = flat((args[1:], kwargs))
        alone = not any(isinstance(a, Selected | Tensor) for a in others)
        return alone and isinstance(args[0], Selected) and check(ndim, args, kwargs)

    return of


OF_EACH_ROW.update(
    {
        **dict.fromkeys(("sum", "mean", "amax", "amin", "argmax", "argmin"), _keeps_rows(1)),
        **dict.fromkeys(("prod", "all", "any", "cumprod"), _of_first(_keeps_rows(1))),
        "glu": _of_first(_keeps_rows(1, -1)),
        "unbind": _of_first(_keeps_rows(1, 0)),
        "transpose": _of_first(_transposed),
        "bmm": _pairs,
        "cosine_similarity": _similarity,
        **dict.fromkeys(("max", "min"), _of_first(_keeps_rows(1))),
        **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cumsum"), _keeps_rows(1)),
        **dict.fromkeys(("chunk", "split"), _keeps_rows(2)),
        **dict.fromkeys(("linear", "matmul", "mm"), _features),
        **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
        "embedding": _lookup,
        "unsqueeze": lambda ndim, args, kwargs: len(args) == 2 and args[1] % (ndim + 1) > 0,
        "squeeze": _squeezed,
        **dict.fromkeys(("view", "reshape"), _same_rows),
        **dict.fromkeys(("cat", "concat", "concatenate"), _joined(0)),
        "stack": _joined(1),
        "gather": _gathered,
        "flatten": _of_first(_flattened),
        "unflatten": _of_first(_keeps_rows(1)),
        "dropout": _of_first(lambda ndim, args, kwargs: True),
        "normalize": _of_first(_keeps_rows(2, 1)),
        **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm"), _of_first(_keeps_rows(2))),
        **dict.fromkeys(("var", "std"), _of_first(_keeps_rows(1))),
        "topk": _of_first(_keeps_rows(2, -1)),
        **dict.fromkeys(("sort", "argsort"), _of_first(_keeps_rows(1, -1))),
        "flip": _of_first(_flipped),
        "roll": _of_first(_keeps_rows(2, name="dims")),
        "diff": _of_first(_keeps_rows(2, -1)),
        "expand": _of_first(_sized(-1)),
        "repeat": _of_first(_sized(1)),
        "index_select": _selected_features,
        "__getitem__": _item,
    }
)

_NAMES = """
    abs add sub subtract rsub mul multiply div divide true_divide pow neg negative exp exp2 expm1
    log log2 log10 log1p sqrt rsqrt square reciprocal relu relu6 gelu silu mish elu celu selu
    leaky_relu softplus softsign sigmoid logsigmoid hardsigmoid hardswish tanh hardtanh sin cos tan
    asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc erfinv lgamma digamma sign sgn clamp
    clip clamp_min clamp_max maximum minimum fmax fmin where eq ne lt le gt ge logical_and
    logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not isnan isfinite
    isinf isclose nan_to_num float double half bfloat16 long int bool to type type_as detach clone
    contiguous floor ceil round trunc frac fmod remainder floor_divide hypot logit logaddexp lerp
    addcmul addcdiv xlogy masked_fill zeros_like ones_like full_like
"""
POINTWISE.update(_NAMES.split())
