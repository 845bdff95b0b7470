"""Functions that torch would trace or compile within a trace are called directly."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.fx.experimental.proxy_tensor import make_fx

from ftp.torch_internals import pytree
from ftp.tracing.replacements.replaced import replaced


@contextmanager
def nested_traces() -> Iterator[None]:
    """Call functions directly that would otherwise be traced or compiled within the trace:
    torch.func.linearize's, and helpers under torch.compile.
    """
    direct = lambda fn: _uncalled if fn is make_fx else lambda traced: traced  # noqa: E731
    dynamo = sys.modules.get("torch._dynamo")  # imported if anything is compiled
    with (
        replaced(eager_transforms, {"lazy_dynamo_disallow": direct}),
        nullcontext() if dynamo is None else dynamo.config.patch(error_on_nested_fx_trace=False),
    ):
        yield


def _uncalled(traced: Callable[..., Any]) -> Callable[..., Callable[..., list[Any]]]:
    """Replaces ``make_fx`` in torch.func.linearize: computes the function of tangents by
    torch.func.jvp, which works under all transforms.
    """
    known = inspect.getclosurevars(traced).nonlocals
    func, tree = known["func"], known["primals_argspec"]
    primals = pytree.tree_unflatten(known["flat_primals"], tree)
    return lambda _: (
        lambda *given: pytree.tree_leaves(
            torch.func.jvp(func, primals, pytree.tree_unflatten(given, tree))[1]
        )
    )
