"""``flex_attention`` by tiles while a program is traced.

torch's own kernel needs whole sequences, and on a CPU has no backward pass. ``score_mod`` and
``mask_mod`` become separate graphs, which run on one tile of scores at a time.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ftp.ops.attention import sum_dtype
from ftp.ops.flex_function import WHOLE, Flex, Kept
from ftp.ops.listed_blocks import known_of
from ftp.ops.score_programs import as_program
from ftp.torch_internals.functorch import (
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
)
from ftp.torch_internals.modes import disable_current_modes
from ftp.tracing.replacements.replaced import replaced


@contextmanager
def flex_attention() -> Iterator[None]:
    """``flex_attention`` by tiles."""
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    new = {
        "flex_attention_hop": _flex,
        "_validate_device": lambda *_: None,  # it refuses gradients on a CPU
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    with replaced(module, new):
        yield


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the scores' log-sum-exp and maximum, in base 2 like the kernel's."""
    module: Any = sys.modules["torch.nn.attention.flex_attention"]
    *block, mask_mod = block_mask[-3:]
    tables = [x for x in block_mask[2:6] if x is not None] if min(block) < WHOLE else []
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    sizes = *query.shape[:3], key.shape[2]
    given: Any = sizes, sum_dtype(query.dtype), query.device
    score, of_score = "", []
    if score_mod is not module._identity:
        score, of_score = as_program(score_mod, False, *given)
    mask, of_mask = "", []
    if mask_mod is not module.noop_mask:
        mask, of_mask = as_program(mask_mod, True, *given)
    counts = len(tables), len(of_score), len(of_mask), 0
    kept = Kept(counts, tuple(block), scale, score, mask, _known(tables))
    out, logsumexp, top = Flex.apply(query, key, value, kept, *tables, *of_score, *of_mask)
    return out, logsumexp / math.log(2), top / math.log(2)


def _known(tables: Sequence[Tensor]) -> str:
    """Facts about block tables that were made before the trace."""
    if not tables or not all(map(_is_given, tables)):
        return ""
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        return known_of(tables)


def _is_given(x: Tensor) -> bool:
    is_wrapped = is_functorch_wrapped_tensor(x)
    return type(x) is Tensor and not is_wrapped and x.device.type != "meta"
