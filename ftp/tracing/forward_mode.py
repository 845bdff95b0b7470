"""Forward-mode derivatives by two reverse ones, where torch traces no gradient of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._functorch import eager_transforms

from ftp.errors import TraceError
from ftp.torch_internals import pytree
from ftp.tracing.replacements.replaced import replaced


class ForwardModeRefused(TraceError):
    """torch traces no gradient of this forward-mode derivative."""


def by_reverse_mode() -> AbstractContextManager[None]:
    """Within the block `jvp`, `jacfwd` and `hessian` of `torch.func` take reverse mode."""
    return replaced(eager_transforms, {"_jvp_with_argnums": _jvp_with_argnums})


def _jvp_with_argnums(
    func: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    argnums: int | tuple[int, ...] | None,
    *,
    strict: bool = False,
    has_aux: bool,
) -> tuple[Any, ...]:
    """``pull(u)`` is the product of ``u`` with the Jacobian, linear in ``u``; so its own product
    with tangents is that of the Jacobian with them.

    Source: Townsend (2017), "A new trick for calculating Jacobian vector products".
    """
    chosen = (argnums,) if isinstance(argnums, int) else argnums or range(len(primals))

    def of_chosen(*given: Any) -> Any:
        args = dict(enumerate(primals)) | dict(zip(chosen, given, strict=True))
        return func(*args.values())

    value, pull, *aux = torch.func.vjp(of_chosen, *(primals[i] for i in chosen), has_aux=has_aux)
    anywhere = pytree.tree_map(torch.zeros_like, value)
    (product,) = torch.func.vjp(pull, anywhere)[1](tuple(tangents))
    return value, product, *aux
