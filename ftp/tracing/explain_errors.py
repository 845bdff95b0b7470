"""torch's errors while tracing, in the user's terms: why a function cannot be one graph, and what
to do.
"""

from typing import Any

import torch

from ftp.errors import FtpError, TraceError
from ftp.functional.gradient_hooks import GradientRefused
from ftp.source import describe_line, raised_line
from ftp.torch_internals.error_texts import Meaning, meaning_of, operator_of
from ftp.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from ftp.tracing.forward_mode import ForwardModeRefused
from ftp.tracing.selected_rows.refused import number_asked_at, value_error, value_refused

aten = torch.ops.aten


def defined_at(fn: Any) -> str:
    code = getattr(fn, "__code__", None)
    return f" ({describe_line(code.co_filename, code.co_firstlineno)})" if code else ""


_FIXED_SHAPES = (
    "\n  A program has fixed shapes: use torch.where(mask, x, 0) or weights rather than x[mask];"
    " nonzero, masked_select, unique and bincount of ftp.static take a size."
)


_REWRITES = {
    aten.linalg_lstsq.default: (
        "\n  Its residuals exist only for matrices of full rank. driver='gelsy' (on CPU) gives"
        " none; torch.linalg.pinv(a) @ b or the normal equations give just the solution."
    ),
    aten.repeat_interleave.Tensor: (
        "\n  A program has fixed shapes: pass the sum of the repeats as output_size=, a Python"
        " number; where it is another, the call raises."
    ),
}


COPY = (
    "Inputs and captured tensors are never written to: work on a copy, x = x.clone(), and"
    " return what has changed."
)
_WRITES = f"The function changes an input or a captured tensor in place{{at}}. {COPY}"


NO_COLLECTIVE = (
    "In place of torch.distributed: the function of a step takes whole tensors and calls no"
    " collective, as specs say what ranks hold; code of one rank, ftp.local(fn, mesh, in_specs,"
    " out_specs), calls ftp.axis.all_reduce(x, axis) and its kin."
)


LEAKED = (
    "a tensor that an earlier trace left behind: it has no values. Return intermediates from the"
    " function (has_aux=True) rather than storing them."
)


SURROUNDING = (
    "a tensor of the surrounding function that is no argument: it would be whole on every rank and"
    " have no gradient. Pass it as an argument, with its spec in in_specs; detach it if it needs"
    " no gradient."
)


def of_earlier_trace(line: str) -> TraceError:
    """The error of a function that uses a tensor of an earlier trace at ``line``."""
    error = TraceError(f"The function uses{located(line)} {LEAKED}")
    error.is_of_earlier_trace = True
    return error


def typed(x: torch.Tensor) -> str:
    """A tensor's dtype and shape, such as ``float32[2, 3]``."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def located(line: str) -> str:
    """`` at LINE,`` for an error; "" for an unknown line."""
    return f" at {line}," if line else ""


# By meaning: the error to raise, and its message; ``{at}`` is where, as in " at LINE".
_BY_MEANING: dict[Meaning, tuple[type[TraceError], str]] = {
    Meaning.MAPS_ROWS: (
        TraceError,
        "torch.vmap over rows that a mask selects{at}, whose number depends on values, is not"
        " supported. Write the function for all rows at once (rows @ w), or map over"
        " torch.where(mask, x, 0).",
    ),
    Meaning.NO_PROCESS_GROUP: (
        TraceError,
        f"The function asks torch.distributed{{at}}, which has no process group. {NO_COLLECTIVE}",
    ),
    Meaning.OF_OTHER_TRACE: (TraceError, f"The function uses{{at}} {LEAKED}"),
    Meaning.MUTATES_CAPTURED: (TraceError, _WRITES),
    Meaning.MUTATES_LEAF: (TraceError, _WRITES),
    Meaning.NOT_REQUIRING_GRAD: (
        GradientRefused,
        "The function asks autograd for a gradient{at}, of inputs that do not require one."
        " Use torch.func.grad.",
    ),
    Meaning.CALLS_BACKWARD: (
        TraceError,
        "The function calls backward(){at}. Return the loss: ftp.shard differentiates it;"
        " inside a function use torch.func.grad.",
    ),
    Meaning.CALLS_REQUIRES_GRAD: (
        GradientRefused,
        "The function calls requires_grad_(){at}. ftp.shard takes the gradients of the first"
        " argument's leaves; inside a function use torch.func.grad, whose argnums name the"
        " arguments.",
    ),
    Meaning.REENTRANT_CHECKPOINT: (
        GradientRefused,
        "The function uses torch.utils.checkpoint with use_reentrant=True{at}, which can only"
        " compute the gradients of all leaves at once. Pass use_reentrant=False.",
    ),
    Meaning.SAVED_TENSOR_HOOKS: (
        GradientRefused,
        "The function uses saved tensor hooks, as torch.utils.checkpoint does{at}; they"
        " cannot be traced. Recompute a block with ftp.remat(block)(*args), or call it as it is.",
    ),
    Meaning.WRITES_ARRAY: (
        TraceError,
        "The function writes to an array that is read-only{at}, as those that x.numpy() gives: in"
        " torch that is a write to the tensor. Write to the tensor, or to a copy of the array,"
        " x.numpy().copy().",
    ),
    Meaning.META_IN_FORWARD_MODE: (
        ForwardModeRefused,
        "torch does not trace the gradient of a forward-mode derivative under torch.vmap of"
        " torch.vmap, such as torch.vmap(torch.func.hessian(f)){at}. Use reverse mode:"
        " torch.func.jacrev(torch.func.jacrev(f)).",
    ),
}


def explain(error: Exception) -> FtpError | None:
    """The error to raise for an error of torch's while tracing; None for an ordinary mistake in the
    function.
    """
    line, meaning = raised_line(error), meaning_of(error)
    at = f" at {line}" if line else ""
    found = _of_values(error, meaning, line, at) or _of_call(error, meaning, at)
    if found is None and meaning in _BY_MEANING:
        kind, message = _BY_MEANING[meaning]
        found = kind(message.replace("{at}", at))
        found.is_of_earlier_trace = meaning is Meaning.OF_OTHER_TRACE
    if found is None and line:
        error.add_note(f"Raised while ftp traced the function, on whole tensors, at {line}")
    return found


def _of_values(error: Exception, meaning: Meaning | None, line: str, at: str) -> TraceError | None:
    """The error of code that needs values, or shapes that depend on values."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # loads sympy

    if (
        isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode)
        or meaning is Meaning.NEEDS_VALUE
    ):
        return value_refused(line, _advice_on(error))
    asked_of = number_asked_at(line) if isinstance(error, TypeError) else None
    if asked_of is False:
        return value_refused(line)
    if meaning is Meaning.NUMBER and not asked_of:
        return value_error(
            f"A number that the function reads from a tensor is asked for its value{at}: it can"
            " only be used in arithmetic, in comparisons and with tensors. Instead of"
            " torch.tensor(n) keep the tensor itself; for a tensor as long as selected rows use"
            " zeros_like(rows), ones_like or full_like."
        )
    if meaning is Meaning.SIZE_OF_ROWS or asked_of:
        return value_error(
            f"The function makes a tensor of the shape of rows that a mask selects{at}, whose"
            " number depends on values. Make it from the rows: torch.zeros_like(rows),"
            " ones_like or full_like."
        )
    if isinstance(error, DynamicOutputShapeException) and meaning is not Meaning.MAPS_ROWS:
        rewrite = _REWRITES.get(error.func, _FIXED_SHAPES)
        return value_error(
            f"{error.func} gives a shape that depends on values{at}.{_advice_on(error) or rewrite}"
        )
    return None


def _of_call(error: Exception, meaning: Meaning | None, at: str) -> TraceError | None:
    """The error of a call of an op or function that cannot be traced; the message names it."""
    if isinstance(error, UnsupportedOperatorException):
        return TraceError(
            f"{error.func} has no fake kernel, which computes shapes only{at}. Register one with"
            " torch.library.register_fake."
        )
    if meaning is Meaning.TAKES_FUNCTIONS:
        name = operator_of(error) or "A higher-order operator"
        return TraceError(
            f"{name} takes functions, which a trace cannot see into{at}. Call the function itself;"
            " instead of flex_attention pass its scores' changes as attn_mask of"
            " F.scaled_dot_product_attention."
        )
    if meaning is Meaning.FORWARD_TAKES_CTX:
        function = _function_behind(error)
        what = f"{function} is" if function else "The function uses"
        return GradientRefused(
            f"{what} an autograd.Function whose forward takes ctx{at}; to trace its gradient, write"
            " it in two parts:\n  forward(*args) without ctx, and setup_context(ctx, inputs,"
            " output) that saves what backward needs."
        )
    if meaning is Meaning.DTYPES:
        advice = _advice_on(error) or " Convert them with .to(dtype)."
        return TraceError(
            f"torch refuses operands of these dtypes{at}: {str(error).rstrip('.')}.{advice}"
        )
    return None


def _function_behind(error: Exception) -> str:
    """The autograd.Function that an error came from, as ``Name (file.py:12  class Name(...):)``; ""
    where C++ calls it, as in torch 2.14.
    """
    traceback, found = error.__traceback__, None
    while traceback is not None:
        given = traceback.tb_frame.f_locals.get("cls")
        if isinstance(given, type) and issubclass(given, torch.autograd.Function):
            found = given
        traceback = traceback.tb_next
    return "" if found is None else f"{found.__name__}{defined_at(found.forward)}"


def _advice_on(error: Exception) -> str:
    """Advice on an error that another library's code raises; "" where there is none."""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if "transformers" in code.co_filename and (
            "Experts" in code.co_qualname or code.co_filename.endswith("moe.py")
        ):
            return (
                "\n  These are a model's experts, in a form that cannot be traced. Build the model"
                ' with config.experts_implementation="batched_mm" (from_config(...,'
                ' experts_implementation="batched_mm")): its shapes are fixed.'
            )
        traceback = traceback.tb_next
    return ""
