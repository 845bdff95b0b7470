"""The meaning of torch's errors that differ only in their text: of one type, mostly
``RuntimeError``, without code or attribute. No other file of ftp decides by an error's text.

The texts are those of torch 2.13. If another release words an error differently, the caller gets
torch's own message instead of ftp's advice, and tests of the advice fail (tests/tracing,
tests/api/test_errors.py, tests/dist). The first meaning in the table whose text matches applies.
"""

import math
import re
from enum import Enum

import torch.distributed as dist


class Meaning(Enum):
    """The cause of an error that torch raised."""

    NEEDS_VALUE = "needs value"  # a number of a tensor that has none in a trace
    TAKES_FUNCTIONS = "takes functions"  # a higher-order operator without a rule for the mode
    OF_OTHER_TRACE = "of other trace"
    MUTATES_CAPTURED = "mutates captured"  # under functorch, of a tensor that is not its argument
    MUTATES_LEAF = "mutates leaf"
    NOT_REQUIRING_GRAD = "not requiring grad"  # torch.autograd.grad of what requires no gradient
    CALLS_BACKWARD = "calls backward"  # inside a functorch transform
    CALLS_REQUIRES_GRAD = "calls requires grad"  # inside a functorch transform
    FORWARD_TAKES_CTX = "forward takes ctx"  # of an autograd.Function inside a functorch transform
    REENTRANT_CHECKPOINT = "reentrant checkpoint"
    SAVED_TENSOR_HOOKS = "saved tensor hooks"  # inside a functorch transform
    META_IN_FORWARD_MODE = "meta in forward mode"  # a forward-mode derivative under two vmaps
    SIZE_OF_ROWS = "size of rows"  # of rows that a mask selects, where torch wants an int
    NUMBER = "number"  # of the program, where torch or Python want one of their own
    MAPS_ROWS = "maps rows"  # torch.vmap over rows that a mask selects
    WRITES_STRIDED_VIEW = "writes strided view"  # through as_strided of a view
    WRITES_CONJUGATE = "writes conjugate"  # through a part of a view of a conjugate
    NO_PROCESS_GROUP = "no process group"  # asked of torch.distributed without one
    WRITES_ARRAY = "writes array"  # of NumPy, which may not be written to
    DTYPES = "dtypes"


_TEXTS = {
    Meaning.NEEDS_VALUE: r"data-dependent control flow|\.item\(\)|numpy\(\)|tolist\(\)"
    r"|Cannot access data pointer|data is not allocated yet",
    Meaning.TAKES_FUNCTIONS: r"no rule registered for HigherOrderOperator (?P<operator>\w+)"
    r"|(?P<flex>FlexAttention) does not support backward|TransformType\.Grad",
    Meaning.OF_OTHER_TRACE: r"Mixing fake modes|different fake mode",
    Meaning.MUTATES_CAPTURED: r"would mutate a captured Tensor",
    Meaning.MUTATES_LEAF: r"leaf Variable .* in-place operation",
    Meaning.NOT_REQUIRING_GRAD: r"does not require grad",
    Meaning.CALLS_BACKWARD: r"backward\(\) called inside a functorch transform",
    Meaning.CALLS_REQUIRES_GRAD: r"call Tensor\.requires_grad_\(\)",
    Meaning.FORWARD_TAKES_CTX: r"must override the setup_context",
    Meaning.REENTRANT_CHECKPOINT: r"incompatible with \.grad\(\)",
    Meaning.SAVED_TENSOR_HOOKS: r"saved tensor hooks",
    Meaning.META_IN_FORWARD_MODE: r"expected device meta but got|has_fw_view",
    Meaning.SIZE_OF_ROWS: r"ShapeOfSelection",
    Meaning.NUMBER: r"TracedNumber|dtype\('O'\)|numpy\.object_|PyList_Check",
    Meaning.MAPS_ROWS: r"is of type <class 'ftp\.tracing\.selected_rows\.selected\.Selected'>",
    Meaning.WRITES_STRIDED_VIEW: r"as_strided\(\) is non-compositional",
    Meaning.WRITES_CONJUGATE: r"unresolved conjugated tensors",
    Meaning.NO_PROCESS_GROUP: r"Default process group has not been|Unsupported group type: <class"
    r" 'NoneType'>",
    Meaning.WRITES_ARRAY: r"(assignment destination|output array) is read-only",
    Meaning.DTYPES: r"\bdtypes?\b|scalar type|same datatype",
}
# Words that the user's own errors may hold too.
_OF_TYPE = {
    Meaning.NEEDS_VALUE: lambda error: type(error) is RuntimeError,
    Meaning.DTYPES: lambda error: isinstance(error, RuntimeError),
}


def meaning_of(error: BaseException) -> Meaning | None:
    """The meaning of an error of torch's; None for one that the table does not know.

    >>> meaning_of(RuntimeError("expected scalar type Float but found Double"))
    <Meaning.DTYPES: 'dtypes'>
    """
    text = str(error)
    for meaning, pattern in _TEXTS.items():
        if _OF_TYPE.get(meaning, bool)(error) and re.search(pattern, text):
            return meaning
    return None


def operator_of(error: BaseException) -> str:
    """The operator of an error that means `Meaning.TAKES_FUNCTIONS`; "" where it names none."""
    found = re.search(_TEXTS[Meaning.TAKES_FUNCTIONS], str(error))
    assert found is not None
    return found["operator"] or ("flex_attention" if found["flex"] else "")


def times_too_large(error: BaseException) -> int | None:
    """The whole factor by which the tensor of a failed view or reshape is too large; None for other
    errors.

    >>> times_too_large(RuntimeError("shape '[2, 3]' is invalid for input of size 24"))
    4
    """
    found = re.search(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)", str(error))
    if found is None:
        return None
    wanted = math.prod(map(int, found[1].split(",")))
    times, rest = divmod(int(found[2]), wanted) if wanted else (0, 0)
    return times if times > 1 and not rest else None


def is_of_collective(error: RuntimeError) -> bool:
    """Whether a collective raised it, rather than an op on local tensors."""
    # gloo's messages name its source path, except for a connection that a timeout has closed.
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text.lower() or "pair closure" in text


def has_timed_out(error: RuntimeError) -> bool:
    """Whether a collective waited for a peer as long as its timeout allows."""
    return "timed out" in str(error).lower()
