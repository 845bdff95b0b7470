"""Fused attention: scores are never stored, so the keys stay whole and queries may be cut."""

import math
from typing import Any

from torch._ops import OpOverload

from ftp.ops.attention import PART, PART_BACKWARD
from ftp.ops.attention_ring import RING, RING_BACKWARD
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD
from ftp.rules.local_forms import zeros
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation, parse
from ftp.rules.overloads import aten
from ftp.rules.registry import register, rule
from ftp.rules.rule import Call, LocalHook, Meta, Rule

Q, K, V, LSE = ("b", "h", "s", "e"), ("b", "h", "t", "e"), ("b", "h", "t", "v"), ("b", "h", "s")
OUT = ("b", "h", "s", "v")
WHOLE = frozenset({"t", "e", "v"})
RING_FACTORS = (("s", "t"),)


def factors_of_heads(call: Call, at: int) -> dict[str, tuple[str, ...]]:
    """The factors of each letter: with fewer heads of keys than of queries, h of the queries is
    (h r).
    """
    q, k = call.operands[at], call.operands[at + 1]
    more = q.shape[1] // k.shape[1] if k.shape[1] else 1
    return {"h": ("h", "r") if more > 1 else ("h",)}


def dims_of(letters: tuple[str, ...], heads: dict[str, tuple[str, ...]] | None = None) -> Dims:
    return tuple((heads or {}).get(f, (f,)) for f in letters)


def _mask_dims(heads: dict[str, tuple[str, ...]], mask: Meta, q: Meta, k: Meta) -> Dims:
    full = ("b", "h", "s", "t")
    sizes = (*q.shape[:3], k.shape[2])
    skip = 4 - mask.ndim
    return tuple(
        heads.get(f, (f,)) if m == s else ()
        for f, s, m in zip(full[skip:], sizes[skip:], mask.shape, strict=True)
    )


def sizes_of_heads(call: Call, at: int) -> dict[str, int]:
    q, k = call.operands[at], call.operands[at + 1]
    return (
        {"h": k.shape[1], "r": q.shape[1] // k.shape[1]}
        if k.shape[1] and q.shape[1] != k.shape[1]
        else {}
    )


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_for_cpu(call: Call) -> Rule:
    q, k, *_ = call.operands
    heads = factors_of_heads(call, 0)
    mask = call.kwargs.get("attn_mask")
    masks = (_mask_dims(heads, mask, q, k),) if mask is not None else ()
    operands = (dims_of(Q, heads), dims_of(K), dims_of(V), *masks)
    whole = WHOLE | ({"r"} if "r" in heads["h"] else set())
    notation = Notation(
        operands, (dims_of(OUT, heads), dims_of(LSE, heads)), frozenset(whole), ((), ())
    )
    # Of one query, a token beside a cache, the scores are small and the keys may be cut.
    is_token = q.shape[2] == 1
    ring = () if masks or is_token else RING_FACTORS
    return Rule(notation, (), _by_position(call, 0), sizes_of_heads(call, 0), is_token, ring)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_for_cpu_backward(call: Call) -> Rule:
    _, q, k, *_ = call.operands
    heads = factors_of_heads(call, 1)
    mask = call.kwargs.get("attn_mask")
    masks = (_mask_dims(heads, mask, q, k),) if mask is not None else ()
    out = dims_of(OUT, heads)
    operands = (out, dims_of(Q, heads), dims_of(K), dims_of(V), out, dims_of(LSE, heads), *masks)
    whole = WHOLE | ({"r"} if "r" in heads["h"] else set())
    over_queries = (("s", "sum"),)
    notation = Notation(
        operands,
        (dims_of(Q, heads), dims_of(K), dims_of(V)),
        frozenset(whole),
        ((), over_queries, over_queries),
    )
    ring = () if masks else RING_FACTORS
    return Rule(notation, ((0,),), _by_position(call, 1), sizes_of_heads(call, 1), False, ring)


def _by_position(call: Call, at: int) -> LocalHook:
    """Where queries are cut, ``is_causal`` would count from this rank's first query: the op of
    parts takes where they stand in the sequence.
    """
    causal = 4 if at == 0 else 7
    part = PART if at == 0 else PART_BACKWARD

    def local(op: LocalOp) -> Any:
        if op.is_cut("t"):
            return _ring(op, causal)
        shapes = [op.operand_shape(i) for i in range(len(op.rule.operands))]
        if op.is_cut() and any(math.prod(s) == 0 for s in shapes):
            return tuple(zeros(op, i) for i in range(len(call.results)))
        if not (op.is_cut("s") and len(op.args) > causal and op.args[causal]):
            return op.default()
        return op.emit(part, *op.args[: causal - 1], op.part("s"), [], True, **op.kwargs)

    return local


def _ring(op: LocalOp, causal: int) -> Any:
    """Queries and keys are cut over one axis, whose ranks pass keys and values around."""
    (keys,), queries = op.cuts["t"], op.cuts["s"]
    at = next(i for i, cut in enumerate(queries) if cut.axis == keys.axis)
    is_last = at == len(queries) - 1
    ring = [
        keys.size,
        keys.n,
        int(keys.second is not None),
        at if is_last else -1,
        int(queries[at].second is not None),
    ]
    return op.emit(
        RING if causal == 4 else RING_BACKWARD,
        *op.args[: causal - 1],
        op.part("s"),
        ring,
        bool(len(op.args) > causal and op.args[causal]),
        op.kwargs.get("scale"),
        op.group(keys.axis),
    )


@rule(VARLEN, VARLEN_BACKWARD)
def varlen(call: Call) -> Rule:
    """Queries may be cut: where they stand is a number. The ends of documents are whole."""
    is_forward = call.target is VARLEN
    heads = factors_of_heads(call, 0 if is_forward else 1)
    out, q, ends = dims_of(OUT, heads), dims_of(Q, heads), ((("ends_q",),), (("ends_k",),))
    whole = WHOLE | {"ends_q", "ends_k"} | ({"r"} if "r" in heads["h"] else set())
    tensors = q, dims_of(K), dims_of(V)
    over_queries = (("s", "sum"),)
    if is_forward:
        operands, results = (*tensors, *ends), (out, dims_of(LSE, heads))
        pending: Any = ((), ())
    else:
        operands, results = (out, *tensors, out, dims_of(LSE, heads), *ends), tensors
        pending = ((), over_queries, over_queries)
    at = len(operands)
    notation = Notation(operands, results, frozenset(whole), pending)

    def local(op: LocalOp) -> Any:
        return op.replaced(at, op.part("s")) if op.is_cut("s") else op.default()

    sizes = sizes_of_heads(call, 0 if is_forward else 1)
    return Rule(notation, () if is_forward else ((0,),), local, sizes, False)


def kernel(*ops: "OpOverload | str", query: int) -> None:
    """Attention kernels of other devices: batch and heads are cut, as long as nothing is dropped at
    random.

    The text has the first operands and results; the others are (b, h, ...) where they have those
    sizes, or else whole and the kernel's own. ``query`` is the index of the queries' operand.
    """
    *targets, last = ops
    text = parse(last)  # type: ignore[arg-type]

    def maker(call: Call) -> Rule:
        b, h = call.operands[query].shape[:2]
        named: dict[bool, list[Dims]] = {}
        for is_result, known, metas in (
            (False, text.operands, call.operands),
            (True, text.results, call.results),
        ):
            named[is_result] = list(known)
            for i, meta in enumerate(metas[len(known) :]):
                own = f"{'r' if is_result else 'o'}{i}_"
                batched = meta.ndim >= 3 and meta.shape[0] in (1, b) and meta.shape[1] in (1, h)
                lead = (
                    tuple(("bh"[d],) if size != 1 else () for d, size in enumerate(meta.shape[:2]))
                    if batched
                    else ()
                )
                named[is_result].append(
                    (*lead, *((f"{own}{d}",) for d in range(len(lead), meta.ndim)))
                )
        free = {"b", "h"} if not call.arg("dropout_p") else set()
        if h != call.operands[query + 1].shape[1]:
            free -= {"h"}
            for is_result, slots in (
                (False, (query + 1, query + 2)),
                (True, (1, 2) if query else ()),
            ):
                for i in slots:
                    named[is_result][i] = (("b",), ("hk",), *named[is_result][i][2:])
        factors = {f for dims in (*named[False], *named[True]) for dim in dims for f in dim}
        notation = Notation(
            tuple(named[False]),
            tuple(named[True]),
            frozenset(factors - free),
            ((),) * len(call.results),
        )
        return Rule(notation, ((0,),) if query else (), decompose=False)

    register(targets, maker)


kernel(
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    "b h s e, b h t e, b h t v -> b h s v",
    query=0,
)
kernel(
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    "b h s v, b h s e, b h t e, b h t v -> b h s e, b h t e, b h t v",
    query=1,
)
