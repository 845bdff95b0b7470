"""One call of an op as a graph of primitives."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ftp.sharding.pytree import flatten
from ftp.torch_internals.op_types import OpOverload, decomposition_table
from ftp.tracing.clean_graph import clean
from ftp.tracing.functionalize_graph import constants_last, functional_form, lift_attributes
from ftp.tracing.recorder import Recorder, record

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic

aten = torch.ops.aten


def decompose(
    target: OpOverload,
    args: Any,
    kwargs: Mapping[str, Any],
    by: Callable[..., Any] | None = None,
    symbolic: "Symbolic | None" = None,
) -> fx.GraphModule | None:
    """One call as a functional graph of primitives, by a decomposition (default torch's own); None
    where there is none.

    Args:
        args, kwargs: of the op; anything with ``shape`` and ``dtype`` stands for a tensor.
        symbolic: the dynamic sizes among shapes and arguments.

    >>> x = torch.empty(4, 3, device="meta")
    >>> made = decompose(aten.addcmul.default, [x, x, x], {}, lambda x, a, b: x + a * b)
    >>> print(made.code.strip())
    def forward(self, arg_0, arg_1, arg_2):
        mul = torch.ops.aten.mul.Tensor(arg_1, arg_2);  arg_1 = arg_2 = None
        add = torch.ops.aten.add.Tensor(arg_0, mul);  arg_0 = mul = None
        return (add,)
    """
    by = by or decomposition_table.get(target)
    if by is None:
        return None
    recorder = Recorder("cpu", symbolic=symbolic)
    flat_args, tree = flatten((list(args), dict(kwargs)))
    at = [i for i, a in enumerate(flat_args) if hasattr(a, "shape") and hasattr(a, "dtype")]
    fakes = [recorder.fake(tuple(flat_args[i].shape), flat_args[i].dtype) for i in at]

    def flat(*values: Tensor) -> list[Any]:
        filled = list(flat_args) if symbolic is None else [*map(symbolic.symint, flat_args)]
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        with recorder.recording():
            full_args, full_kwargs = tree.unflatten(filled)
            out = by(*full_args, **full_kwargs)
        return list(out) if isinstance(out, tuple | list) else [out]

    dynamic = nullcontext() if symbolic is None else symbolic.generic(lambda: "")
    with dynamic, recorder.mode:
        gm = record(recorder, flat, fakes)
    gm = functional_form(gm, recorder)
    lift_attributes(gm, recorder)
    clean(gm, recorder.device, recorder.device)
    constants_last(gm, recorder, [f"arg_{i}" for i in range(len(at))])
    if symbolic is not None:
        symbolic.inline(gm.graph)
    return gm
