"""vmap rules for ops that torch maps in a loop, or by one lookup in all mapped tables. With these
rules the mapped dim stays a dim of the op, so that a mesh axis may cut it without collectives.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ftp.rules.op_kinds import ATTENTION
from ftp.torch_internals import pytree
from ftp.torch_internals.dispatch import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard
from ftp.torch_internals.functorch import (
    add_batch_dim,
    retrieve_current_functorch_interpreter,
    unwrap_batched,
)
from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten

# ``(op, n, is_mapped, args, kwargs)``, with mapped dims first, to results and which are mapped.
MappedForm = Callable[..., tuple[Any, Any]]


@contextmanager
def mapped_ops() -> Iterator[None]:
    """Use the rules below in place of torch's."""
    lib = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*[Oo]verrid")
            for op, call in RULES.items():
                lib.impl(op, _kernel(op, call), "FuncTorchBatched", allow_override=True)
        yield
    finally:
        lib._destroy()


def _kernel(op: Any, call: MappedForm) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        leaves, tree = pytree.tree_flatten((args, kwargs))
        pairs = [unwrap_batched(x, level) if isinstance(x, Tensor) else (x, None) for x in leaves]
        batched = DispatchKeySet(DispatchKey.FuncTorchBatched)
        with ExcludeDispatchKeyGuard(batched):
            if all(dim is None for _, dim in pairs):
                return op(*args, **kwargs)
            plain = [x if dim is None else x.movedim(dim, 0) for x, dim in pairs]
            given, by_name = pytree.tree_unflatten(plain, tree)
            is_mapped = pytree.tree_unflatten([dim is not None for _, dim in pairs], tree)
            made, mapped = call(op, interpreter.batch_size(), is_mapped, given, by_name)
        if isinstance(made, Tensor):
            return add_batch_dim(made, 0, level) if mapped else made
        pairs = zip(made, mapped, strict=True)
        return tuple(add_batch_dim(x, 0, level) if has_dim else x for x, has_dim in pairs)

    return run


def _embedding(op: Any, n: int, is_mapped: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Rows of each table, by a gather."""
    table, ids, padding, *_ = (*args, -1)
    if not is_mapped[0][0]:
        return op(*args, **kwargs), True
    ids = _all(ids, n, is_mapped[0][1])
    of_rows = _of_rows(ids, table.shape[-1])
    rows = table.gather(1, of_rows).reshape(*ids.shape, table.shape[-1])
    if padding >= 0:  # has no gradient
        rows = torch.where((ids == padding)[..., None], rows.detach(), rows)
    return rows, True


def _embedding_backward(op: Any, n: int, is_mapped: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Gradients of each table, by adding to its rows."""
    grad, ids, count, padding, by_frequency = args
    of_grad, of_ids, *_ = is_mapped[0]
    grad, ids = _all(grad, n, of_grad), _all(ids, n, of_ids)
    flat = ids.reshape(n, -1)
    grad = grad.reshape(n, flat.shape[1], grad.shape[-1])
    if by_frequency:
        ones = torch.ones_like(flat, dtype=grad.dtype)
        times = grad.new_zeros(n, count).scatter_add(1, flat, ones)
        grad = grad / times.gather(1, flat)[..., None]
    if padding >= 0:
        grad = grad.masked_fill((flat == padding)[..., None], 0)
    zeros = grad.new_zeros(n, count, grad.shape[-1])
    return zeros.scatter_add(1, _of_rows(ids, grad.shape[-1]), grad), True


def _of_rows(ids: Tensor, width: int) -> Tensor:
    """Ids (n, ...) as an index of whole rows, (n, ids, width)."""
    flat = ids.reshape(ids.shape[0], -1)
    return flat[..., None].expand(*flat.shape, width)


def _attention(op: Any, n: int, is_mapped: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Fold the mapped dim into the batch; a bias is expanded over it."""
    batch, *_ = next(
        x.shape[1 if mapped else 0 :]
        for x, mapped in zip(args, is_mapped[0], strict=True)
        if isinstance(x, Tensor)
    )

    def joined(name: str, x: Any, mapped: bool) -> Any:
        if not isinstance(x, Tensor) or x.ndim - mapped < 2:
            return x
        if name in ("attn_mask", "attn_bias"):
            lead = x.ndim - mapped - 2
            if not mapped and (not lead or x.shape[0] == 1):
                return x
            x = _all(x, n, mapped)
            x = x.reshape(n, *(1,) * (2 - lead), *x.shape[1:])
            return x.expand(n, batch, *x.shape[2:]).flatten(0, 1)
        return _all(x, n, mapped).flatten(0, 1)

    names = [argument.name for argument in op._schema.arguments]
    given = map(joined, names, args, is_mapped[0])
    named = {k: joined(k, x, is_mapped[1][k]) for k, x in kwargs.items()}
    made = op(*given, **named)
    made = made if isinstance(made, tuple | list) else (made,)
    is_split = [isinstance(x, Tensor) and x.ndim > 2 for x in made]
    pairs = zip(made, is_split, strict=True)
    parts = [x.unflatten(0, (n, batch)) if split else x for x, split in pairs]
    return (tuple(parts), is_split) if len(parts) > 1 else (parts[0], is_split[0])


def _all(x: Tensor, n: int, mapped: bool) -> Tensor:
    """``x`` with a mapped dim, expanded if it has none."""
    return x if mapped else x.expand(n, *x.shape)


RULES: dict[Any, MappedForm] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    **{
        op: _attention
        for op in sorted(ATTENTION, key=str)
        # The other two are made of these.
        if isinstance(op, OpOverload) and op.__name__.startswith("_") and "math" not in op.__name__
    },
}
