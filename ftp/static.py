"""Functions whose results' shapes depend on values, with the size given: a program has fixed
shapes.

Results are padded to ``size``. What does not fit is left out, as in JAX, and is listed in
``lowered.assumptions``; ``check_inputs=True`` of the step raises an InputError for it. Outside of a
step they are plain functions of tensors, with the same results.

>>> import torch
>>> from ftp import static
>>> static.masked_select(x := torch.arange(5), x > 2, size=3, fill_value=-1)
tensor([ 3,  4, -1])
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.errors import InputError
from ftp.ops.assume import assume
from ftp.torch_internals.fake_tensors import is_fake


def nonzero(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """The indices of the elements that are not zero, in row-major order, as ``torch.nonzero``.

    Args:
        x: of any shape.
        size: rows of the result.
        fill_value: of the rows after the last index.

    Returns:
        int64 of shape ``(size, x.ndim)``.

    Raises:
        InputError: a ``size`` that is no int, or negative.

    >>> nonzero(torch.tensor([0, 3, 0, 5]), size=3).tolist()
    [[1], [3], [-1]]

    Source: JAX, ``jax.numpy.nonzero``; PyTorch, ``torch.nonzero_static``.
    """
    _check_size("nonzero", size)
    found = _claimed(x != 0, size, "elements are not zero", "nonzero")
    return torch.nonzero_static(found, size=size, fill_value=fill_value)


def masked_select(x: Tensor, mask: Tensor, *, size: int, fill_value: float = 0) -> Tensor:
    """The elements of ``x`` where ``mask`` is true, in row-major order, as
    ``torch.masked_select``; differentiable in ``x``.

    Args:
        x, mask: of shapes that broadcast; ``mask`` is bool.
        size: elements of the result.
        fill_value: of the elements after the last one.

    Returns:
        Of shape ``(size,)``.

    Raises:
        InputError: a ``size`` that is no int, or negative; a mask that is not bool.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> masked_select(x, x > 1.5, size=4).tolist()
    [2.0, 3.0, 0.0, 0.0]

    Source: JAX, ``jax.numpy.extract``.
    """
    _check_size("masked_select", size)
    if mask.dtype is not torch.bool:
        raise InputError(f"masked_select takes a mask of torch.bool, not of {mask.dtype}.")
    x, mask = torch.broadcast_tensors(x, mask)
    mask = _claimed(mask.reshape(-1), size, "elements are selected", "masked_select")
    return _taken(x.reshape(-1), mask, size, fill_value)


def unique(
    x: Tensor,
    *,
    size: int,
    fill_value: float = -1,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    """The distinct elements of ``x`` in ascending order, as ``torch.unique``.

    Args:
        x: of any shape.
        size: elements of the result.
        fill_value: of the elements after the last one.
        return_inverse: return the place of each of ``x``'s elements among them too, of its shape.
        return_counts: return how often each occurs too; 0 after the last one.

    Returns:
        Of shape ``(size,)``, or a tuple of what is asked for, in the order of ``torch.unique``.

    Raises:
        InputError: a ``size`` that is no int, or negative.

    >>> values, counts = unique(torch.tensor([4, 2, 4]), size=3, return_counts=True)
    >>> values.tolist(), counts.tolist()
    ([2, 4, -1], [1, 2, 0])

    Source: JAX, ``jax.numpy.unique``.
    """
    _check_size("unique", size)
    ordered, order = x.reshape(-1).sort(stable=True)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    if ordered.numel() > 1:
        is_new = torch.cat([is_new[:1], ordered[1:] != ordered[:-1]])
    is_new = _claimed(is_new, size, "elements are distinct", "unique")
    places = is_new.cumsum(0) - 1  # of each ordered element among the distinct ones
    results = [_taken(ordered, is_new, size, fill_value)]
    if return_inverse:
        inverse = torch.zeros_like(places).scatter(0, order, places)
        results.append(inverse.reshape(x.shape))
    if return_counts:
        results.append(_counted(places, torch.ones_like(places), size))
    return results[0] if len(results) == 1 else tuple(results)


def bincount(
    x: Tensor, weights: Tensor | None = None, minlength: int = 0, *, size: int | None = None
) -> Tensor:
    """How often each of 0, 1, ... occurs in ``x``, as ``torch.bincount``.

    Args:
        x: integers in [0, size), of one dim.
        weights: what each counts, of ``x``'s shape; default 1. Differentiable.
        minlength: the size, where ``size`` is None.
        size: elements of the result.

    Returns:
        Of shape ``(size,)``: int64, or with weights float32 for those of float32, else float64.

    Raises:
        InputError: neither ``size`` nor ``minlength``; ``x`` that is not of integers and one dim.

    >>> bincount(torch.tensor([1, 1, 3]), minlength=4).tolist()
    [0, 2, 0, 1]

    Source: JAX, ``jax.numpy.bincount``.
    """
    size = size if size is not None else minlength
    _check_size("bincount", size)
    if not size:
        raise InputError("bincount needs size=, or minlength=: the range of x, plus one.")
    if x.ndim != 1 or x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool:
        raise InputError(
            f"bincount takes integers of one dim, not {x.dtype} of shape {tuple(x.shape)}."
        )
    x = x.long()  # size may be beyond the range of its dtype
    is_in = (x >= 0) & (x < size)
    assume(is_in, f"all values are in [0, {size}), the size of ftp.static.bincount")
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    zero = weights.new_zeros(())
    return _counted(x.clamp(0, size - 1), torch.where(is_in, weights, zero), size)


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    *,
    max_steps: int,
) -> tuple[Any, ...]:
    """``torch``'s ``while_loop`` of at most ``max_steps`` iterations, with gradients of any order:
    each iteration is a ``torch.cond``, and those after the last one run nothing.

    Args:
        cond_fn: of the carried values, whether another iteration runs: one element.
        body_fn: of the carried values, the next ones, of equal shapes and dtypes.
        carried_inputs: the first ones.
        max_steps: a loop that would go on is ended here.

    Returns:
        The last carried values.

    Raises:
        InputError: ``max_steps`` that is no int, or negative; carried values in no tuple; a body
            that gives another number of them. TraceError: a body that changes a shape or dtype.

    >>> while_loop(lambda x: x < 100, lambda x: (x * x,), (torch.tensor(3.0),), max_steps=5)
    (tensor(6561.),)

    Source: equinox, ``equinox.internal.while_loop(kind="bounded")``.
    """
    _check_size("while_loop", max_steps, "max_steps")
    if not isinstance(carried_inputs, tuple | list):
        raise InputError(
            f"while_loop takes a tuple of carried values, not {type(carried_inputs).__name__}."
        )
    values = tuple(carried_inputs)

    def body(*given: Any) -> tuple[Any, ...]:
        made = body_fn(*given)
        made = tuple(made) if isinstance(made, tuple | list) else (made,)
        if len(made) != len(given):
            raise InputError(f"while_loop's body takes {len(given)} values and gives {len(made)}.")
        return made

    def stay(*given: Any) -> tuple[Any, ...]:
        return tuple(x.clone() if isinstance(x, Tensor) else x for x in given)

    for _ in range(max_steps):
        goes_on = cond_fn(*values)
        if isinstance(goes_on, Tensor) and is_fake(goes_on):
            values = torch.cond(goes_on, body, stay, values)
        elif goes_on:
            values = body(*values)
        else:
            return values
    claim = f"a loop ends within {max_steps} iterations, the max_steps of ftp.static.while_loop"
    assume(lambda: ~(torch.as_tensor(cond_fn(*values)) != 0), claim)
    return values


def _check_size(name: str, size: object, argument: str = "size") -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        of = "elements" if argument == "size" else "iterations"
        raise InputError(f"{name}({argument}={size!r}): it must be a number of {of}, 0 or more.")


def _claimed(mask: Tensor, size: int, what: str, name: str) -> Tensor:
    if mask.numel() > size:
        assume(mask.sum() <= size, f"at most {size} {what}, the size of ftp.static.{name}")
    return mask


def _taken(x: Tensor, mask: Tensor, size: int, fill_value: float) -> Tensor:
    """The elements of ``x`` at ``mask``, both of one dim, and what fills the rest."""
    if not x.numel():
        return x.new_full((size,), fill_value)
    places = torch.nonzero_static(mask, size=size, fill_value=-1)[:, 0]
    return torch.where(places >= 0, x[places.clamp(min=0)], x.new_full((), fill_value))


def _counted(places: Tensor, weights: Tensor, size: int) -> Tensor:
    """Sums of weights at places below ``size``; those above are left out."""
    counts = weights.new_zeros(size + 1)
    return counts.index_add(0, places.clamp(max=size), weights)[:size]
