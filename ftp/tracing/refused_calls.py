"""Calls of ops that a trace refuses: collectives, draws, writes of custom ops, operands that
torch's kernels refuse where shape functions take them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.errors import TraceError
from ftp.functional.gradient_hooks import GradientRefused
from ftp.rules.call import tensors
from ftp.rules.overloads import aten
from ftp.sharding.dtensor_placements import is_dtensor
from ftp.torch_internals.functorch import is_functorch_wrapped_tensor, unwrap_if_dead
from ftp.torch_internals.modes import is_wrapper
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.explain_errors import NO_COLLECTIVE, located
from ftp.tracing.op_facts import ONE_DTYPE, PROMOTING, OpFacts, is_deterministic

# These take parameters in float32 with an input in half precision.
_NARROW_INPUT = (aten.native_group_norm.default, aten.native_layer_norm.default)


def check_call(
    func: OpOverload, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], line: str
) -> None:
    """Raises for calls that no graph may hold."""
    if facts.is_collective:
        raise TraceError(f"{func}{located(line)} is a collective. {NO_COLLECTIVE}")
    if facts.is_random and not is_deterministic(func, args, kwargs):
        raise TraceError(
            f"{func} draws random numbers{located(line)} and different ones on each rank. Draw"
            " them from a key: ftp.random.normal(key, shape) and its kin do; functionalized models"
            " take fn(params, ..., rng=key). To turn off dropout, call model.eval() before"
            " ftp.functionalize."
        )
    if facts.is_mutable and func.namespace not in ("aten", "prims"):
        raise TraceError(
            f"{func} writes to an operand{located(line)} and no graph holds such a custom op."
            " Register one that returns what it computes, with mutates_args=()."
        )
    if facts.of_one_dtype:
        _check_dtypes(func, args, line)
    if facts.needs_elements:
        _check_elements(func, args[0], line)
    if facts.promotes:
        _check_result(func, args, line)
    if facts.writes_values:
        _check_values(args, line)


def wrappers_in(arguments: Any, line: str) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The tensors among a call's arguments that hold others, with these.

    Raises:
        TraceError: a tensor holds others in a way that no graph has.
    """
    for x in tensors(arguments, Tensor):
        if not is_wrapper(type(x)):
            continue
        check_captured(x, line)
        kind = type(x).__name__
        if is_dtensor(x):
            raise TraceError(
                f"The function captures a {kind}{located(line)} but ftp takes plain tensors only."
                " Pass a DTensor's shard, ftp.from_dtensor(x), as an argument."
            )
        names, _ = x.__tensor_flatten__()  # type: ignore[attr-defined]
        held = [unwrap_if_dead(getattr(x, name)) for name in names]
        if any(map(is_functorch_wrapped_tensor, held)):
            raise GradientRefused(
                f"A {kind} that is made{located(line)} holds a tensor of a transform of torch.func,"
                " which its class does not know. Make it outside of the transform, or compute with"
                " plain tensors."
            )
        yield x, held


def check_captured(x: Tensor, line: str) -> None:
    """Raises for a captured tensor that has no strides."""
    if x.layout is not torch.strided:
        raise TraceError(
            f"The function captures a tensor of layout {x.layout}{located(line)} which no spec"
            " describes. Capture x.to_dense()."
        )


def check_strided(func: OpOverload, out: Any, line: str) -> None:
    if isinstance(out, Tensor) and out.layout is not torch.strided:
        layout = str(out.layout).removeprefix("torch.")
        raise TraceError(
            f"{func} makes a tensor of layout {layout}{located(line)} which no spec describes. Keep"
            " tensors strided."
        )


def _check_elements(func: OpOverload, x: Tensor, line: str) -> None:
    """Refuse an extremum of no elements, as torch's kernels do. Shape functions do not, and with
    another dim cut no rank would.
    """
    if any(type(size) is int and size == 0 for size in x.shape):
        raise TraceError(
            f"{func} takes the extremum of a tensor of shape {tuple(x.shape)}{located(line)} which"
            " has no elements: torch refuses it."
        )


def _check_result(func: OpOverload, args: Sequence[Any], line: str) -> None:
    x, *operands = args
    for operand in PROMOTING[func](*operands):
        check_written(str(func), torch.result_type(x, operand), x, line)


def check_written(name: str, dtype: torch.dtype, x: Tensor, line: str) -> None:
    """Refuse an op in place whose result the tensor's dtype cannot hold, as torch's kernels do."""
    if not torch.can_cast(dtype, x.dtype):
        made, held = (str(d).removeprefix("torch.") for d in (dtype, x.dtype))
        raise TraceError(
            f"{name} writes a result of dtype {made} to a tensor of dtype {held}{located(line)}"
            " which torch refuses. Convert the tensor with .to(dtype) first."
        )


def _check_values(args: Sequence[Any], line: str) -> None:
    """Refuse values that do not broadcast to the elements that they are written to."""
    x, indices, values, *_ = args
    given = [i for i in indices if i is not None]
    has_mask = any(i.dtype in (torch.bool, torch.uint8) for i in given)
    if has_mask or any(t._has_symbolic_sizes_strides for t in (x, *given, values)):
        return
    at = [d for d, i in enumerate(indices) if i is not None]
    first = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    rest = [size for d, size in enumerate(x.shape) if d not in at]
    written = (*rest[:first], *torch.broadcast_shapes(*(i.shape for i in given)), *rest[first:])
    sizes = zip(reversed(values.shape), reversed(written), strict=False)
    if values.ndim > len(written) or any(own not in (1, size) for own, size in sizes):
        raise TraceError(
            f"aten.index_put writes values of shape {tuple(values.shape)} to elements of shape"
            f" {written}{located(line)} which torch refuses: they do not broadcast."
        )


def _check_dtypes(func: OpOverload, args: Sequence[Any], line: str) -> None:
    """Refuse operands of different dtypes where torch's kernels refuse them."""
    operands = [args[i] for i in ONE_DTYPE[func] if i < len(args) and isinstance(args[i], Tensor)]
    if (
        func in _NARROW_INPUT
        and operands[0].dtype in (torch.bfloat16, torch.float16)
        and operands[-1].dtype == torch.float32
    ):
        operands = operands[1:]
    if len({x.dtype for x in operands}) > 1:
        dtypes = " and ".join(str(x.dtype).removeprefix("torch.") for x in operands)
        raise TraceError(
            f"{func} gets operands of dtypes {dtypes}{located(line)} which torch refuses. Convert"
            " them to one with .to(dtype)."
        )
