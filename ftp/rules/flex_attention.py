"""Rules of flex_attention by tiles: batch, heads and queries may be cut."""

from typing import Any

from ftp.ops.attention_flex import FLEX, FLEX_BACKWARD
from ftp.ops.attention_flex_ring import FLEX_RING, FLEX_RING_BACKWARD, sees_of
from ftp.ops.score_functions import Letters, letters
from ftp.rules.attention import (
    LSE,
    OUT,
    RING_FACTORS,
    WHOLE,
    K,
    Q,
    V,
    dims_of,
    factors_of_heads,
    ring_of,
    sizes_of_heads,
)
from ftp.rules.call import Call, Meta
from ftp.rules.dims import factors
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.registry import rule
from ftp.rules.rule import Rule

_PLACES = {"b": "batch", "h": "heads", "s": "rows"}


@rule(FLEX, FLEX_BACKWARD)
def flex_attention(call: Call) -> Rule:
    is_forward = call.target is FLEX
    at = 0 if is_forward else 1
    heads = factors_of_heads(call, at)
    q, rows = dims_of(Q, heads), dims_of(LSE, heads)
    tensors, out = (q, dims_of(K), dims_of(V)), dims_of(OUT, heads)
    lead = call.operands[at].shape[:2]
    of_tables = [
        (*_lead(x, lead, heads), *_own(f"t{i}_", x.ndim - 2))
        for i, x in enumerate(call.arg("tables"))
    ]
    found = []
    for name, is_mask in (("score", False), ("mask", True)):
        named = letters(call.arg(name), is_mask)
        found.append([_of_captured(f"{name}{i}_", of, heads) for i, of in enumerate(named)])
    of_drop = [_own(f"d{i}_", x.ndim) for i, x in enumerate(call.arg("drop_keys"))]
    more = (*of_tables, *found[0], *found[1], *of_drop)
    summed = ("b", *heads["h"], "s")
    if is_forward:
        operands, results, pending = (*tensors, *more), (out, rows, rows), ((),) * 3
    else:
        wants = call.arg("wants")
        of_wanted = [of for of, is_wanted in zip(found[0], wants, strict=True) if is_wanted]
        operands, results = (out, *tensors, rows, rows, *more), (*tensors, *of_wanted)
        own = [factors(of) for of in (q, *operands[2:4], *of_wanted)]
        pending = tuple(tuple((f, "sum") for f in summed if f not in of) for of in own)
        pending = ((), (("s", "sum"),), (("s", "sum"),), *pending[3:])
    named_own = factors(*more) - {"b", "h", "r", "s", "t"}
    whole = WHOLE | named_own | ({"r"} if "r" in heads["h"] else set())
    notation = Notation(tuple(operands), tuple(results), frozenset(whole), pending)
    linear = () if is_forward else ((0, 5),)
    sees = sees_of(*call.arg("block")[:2], call.arg("known"))
    return Rule(notation, linear, _local, sizes_of_heads(call, at), False, RING_FACTORS, sees)


def _own(name: str, ndim: int) -> Dims:
    return tuple((f"{name}{d}",) for d in range(ndim))


def _lead(x: Meta, lead: tuple[int, ...], heads: dict[str, tuple[str, ...]]) -> Dims:
    """Dims of batch and heads of a mask's block tables; a size of one serves all."""
    names = (("b",), heads["h"])
    return tuple(
        of if n == size else () for of, n, size in zip(names, lead, x.shape[:2], strict=True)
    )


def _of_captured(name: str, named: Letters, heads: dict[str, tuple[str, ...]]) -> Dims:
    """Dims of a captured tensor: a dim indexed by key is whole, even where a ring cuts the keys."""
    known = {"b": ("b",), "h": heads["h"], "q": ("s",)}
    return tuple(known.get(c, (f"{name}{d}",)) for d, c in enumerate(named))


def _local(op: LocalOp) -> Any:
    """The op with the offsets of batch, heads, queries and keys as numbers."""
    names = [a.name for a in op.call.target._schema.arguments]
    args = list(op.args)
    for factor, name in _PLACES.items():
        if op.is_cut(factor):
            args[names.index(name)] = op.part(factor)
    if op.is_cut("t"):
        args[names.index("columns")], group = ring_of(op)
        return op.emit(FLEX_RING if op.call.target is FLEX else FLEX_RING_BACKWARD, *args, group)
    return op.default(*args)
