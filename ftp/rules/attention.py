"""Rules of fused attention: scores are never stored, so keys stay whole; queries may be cut."""

import math
from collections.abc import Sequence
from typing import Any

from ftp.ops import attention_varlen_ring
from ftp.ops.attention import PART, PART_BACKWARD
from ftp.ops.attention_ring import RING, RING_BACKWARD, sees_of
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD
from ftp.ops.attention_varlen_ring import VARLEN_RING, VARLEN_RING_BACKWARD
from ftp.ops.ring_pieces import RingAxis
from ftp.rules.call import Call, Meta
from ftp.rules.dims import factors
from ftp.rules.local_forms import zeros
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation, parse
from ftp.rules.overloads import aten
from ftp.rules.registry import register, rule
from ftp.rules.rule import LocalHook, Rule

Q, K, V, LSE = ("b", "h", "s", "e"), ("b", "h", "t", "e"), ("b", "h", "t", "v"), ("b", "h", "s")
OUT = ("b", "h", "s", "v")
WHOLE = frozenset({"t", "e", "v", "m"})
RING_FACTORS = (("s", "t"),)


def factors_of_heads(call: Call, at: int) -> dict[str, tuple[str, ...]]:
    """Each letter's factors. If keys have fewer heads than queries, h of the queries is (h r)."""
    q, k = call.operands[at], call.operands[at + 1]
    more = q.shape[1] // k.shape[1] if k.shape[1] else 1
    return {"h": ("h", "r") if more > 1 else ("h",)}


def dims_of(letters: tuple[str, ...], heads: dict[str, tuple[str, ...]] | None = None) -> Dims:
    return tuple((heads or {}).get(f, (f,)) for f in letters)


def pending_over_queries(heads: dict[str, tuple[str, ...]]) -> tuple[tuple[str, str], ...]:
    """The factors of queries that keys lack, over which gradients of keys are pending sums."""
    return (("s", "sum"), *((f, "sum") for f in heads["h"] if f != "h"))


def _mask_dims(heads: dict[str, tuple[str, ...]], mask: Meta, q: Meta, k: Meta) -> Dims:
    """The mask's columns are whole unless it is one query's, even where a ring cuts the keys."""
    full = ("b", "h", "s", "t" if q.shape[2] == 1 else "m")
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
    notation = Notation(operands, (dims_of(OUT, heads), dims_of(LSE, heads)), WHOLE, ((), ()))
    # With one query, a token decoded with a cache, scores are small and the keys may be cut.
    is_token = q.shape[2] == 1
    ring = () if is_token else RING_FACTORS
    sees = sees_of(call.arg("is_causal"))
    local = _by_position(call, 0, 4)
    return Rule(notation, (), local, sizes_of_heads(call, 0), is_token, ring, sees)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_for_cpu_backward(call: Call) -> Rule:
    _, q, k, *_ = call.operands
    heads = factors_of_heads(call, 1)
    mask = call.kwargs.get("attn_mask")
    masks = (_mask_dims(heads, mask, q, k),) if mask is not None else ()
    out = dims_of(OUT, heads)
    operands = (out, dims_of(Q, heads), dims_of(K), dims_of(V), out, dims_of(LSE, heads), *masks)
    over_queries = pending_over_queries(heads)
    notation = Notation(
        operands,
        (dims_of(Q, heads), dims_of(K), dims_of(V)),
        WHOLE,
        ((), over_queries, over_queries),
    )
    rest = sizes_of_heads(call, 1), False, RING_FACTORS, sees_of(call.arg("is_causal"))
    return Rule(notation, ((0,),), _by_position(call, 1, 7), *rest)


def of_gpu(op: Any, causal: int, tensors: tuple[int, ...], is_padded: bool = False) -> None:
    """Register the rule of a GPU's kernel, see `_of_gpu`.

    Args:
        is_padded: whether the kernel may pad its log-sum-exps. In that case, and with a bias, only
            batch and heads may be cut.
    """

    def maker(call: Call) -> Rule:
        at = int(len(tensors) > 3)
        out, lse = call.operands[4:6] if at else call.results[:2]
        is_biased = any(a.name == "attn_bias" for a in call.target._schema.arguments) and (
            call.arg("attn_bias") is not None
        )
        if is_biased or (is_padded and lse.shape != out.shape[:3]):
            return _by_heads(call, BACKWARD if at else FORWARD, at)
        return _of_gpu(call, causal, tensors)

    register((op,), maker)


of_gpu(aten._scaled_dot_product_flash_attention.default, 4, (0, 1, 2))
of_gpu(aten._scaled_dot_product_flash_attention_backward.default, 11, (0, 1, 2, 3, 4, 5))
of_gpu(aten._scaled_dot_product_efficient_attention.default, 6, (0, 1, 2), is_padded=True)
of_gpu(
    aten._scaled_dot_product_efficient_attention_backward.default,
    11,
    (0, 1, 2, 3, 5, 6),
    is_padded=True,
)
of_gpu(aten._scaled_dot_product_cudnn_attention.default, 6, (0, 1, 2))
of_gpu(aten._scaled_dot_product_cudnn_attention_backward.default, 14, (0, 1, 2, 3, 4, 5))


def _of_gpu(call: Call, causal: int, tensors: tuple[int, ...]) -> Rule:
    """The rule of a GPU's kernel. Its first operands and results are those of the CPU's kernel; the
    others are its own.

    Args:
        causal, tensors: positions of the argument ``is_causal`` and of the shared operands.
    """
    at = 0 if len(tensors) == 3 else 1
    heads = factors_of_heads(call, at)
    out, q, over_queries = dims_of(OUT, heads), dims_of(Q, heads), pending_over_queries(heads)
    lse = dims_of(LSE, heads) + ((),) * _has_column(call)
    operands: tuple[Dims, ...] = (q, dims_of(K), dims_of(V))
    results: tuple[Dims, ...] = (out, lse)
    pending: tuple[Any, ...] = ((), ())
    if at:
        operands, results = (out, *operands, out, lse), operands
        pending = (), over_queries, over_queries

    def own(metas: Sequence[Meta], lead: str) -> tuple[Dims, ...]:
        return tuple(
            tuple((f"{lead}{i}_{d}",) for d in range(meta.ndim)) for i, meta in enumerate(metas)
        )

    more = own(call.operands[len(operands) :], "o"), own(call.results[len(results) :], "r")
    whole = WHOLE | factors(*more[0], *more[1])
    ring = RING_FACTORS
    if call.arg("dropout_p"):  # the kernel draws for the whole tensor
        whole, ring = whole | factors(*operands), ()
    notation = Notation(
        (*operands, *more[0]),
        (*results, *more[1]),
        frozenset(whole),
        (*pending, *[()] * len(more[1])),
    )
    local = _by_position(call, at, causal, tensors)
    rest = sizes_of_heads(call, at), False, ring, sees_of(bool(call.arg("is_causal")))
    return Rule(notation, ((0,),) if at else (), local, *rest)


def _has_column(call: Call) -> bool:
    """Whether log-sum-exps have a dim of one element behind those of ftp's op, as cuDNN's have."""
    return call.target in (
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    )


def _by_position(
    call: Call, at: int, causal: int, tensors: Sequence[int] | None = None
) -> LocalHook:
    """A local form for cut queries. ``is_causal`` of the op would count from this rank's first
    query, so `ftp.ops.attention`'s op takes its place, which is given the queries' positions.

    Args:
        at: position of the queries among the operands.
        causal, tensors: positions of ``is_causal`` and of the operands among the arguments; by
            default the operands come first.
    """
    places = range(6 if at else 3) if tensors is None else tensors
    own = 3 if at else 2  # results of every kernel
    has_column = _has_column(call)
    # Memory-efficient attention pads log-sum-exps; ftp's op does not.
    is_padded = call.target in (
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    )

    def filled(op: LocalOp, made: Any) -> Any:
        """``made`` with placeholders for the kernel's own results: no random numbers were drawn."""
        if len(call.results) == own:
            return made
        first = made if isinstance(made, tuple) else tuple(op.item(made, i) for i in range(own))
        if has_column and not at and not isinstance(made, tuple):
            first = first[0], op.emit(aten.unsqueeze.default, first[1], -1)
        more = [
            op.emit(aten.zeros.default, list(meta.shape), dtype=meta.dtype)
            for meta in (call.results[own:] if not at else ())
        ]
        return (*first, *more) if more else (*first, *[None] * (len(call.results) - own))

    def in_rows(op: LocalOp, given: list[Any]) -> list[Any]:
        """The operands of ftp's op: a backward pass is given log-sum-exps last."""
        if not (has_column and at):
            return given
        return [*given[:-1], op.emit(aten.squeeze.dim, given[-1], -1)]

    def local(op: LocalOp) -> Any:
        given = [op.args[i] for i in places]
        is_causal = bool(len(op.args) > causal and op.args[causal])
        if op.is_cut("t"):
            return filled(op, _ring(op, in_rows(op, given), is_causal))
        shapes = [op.operand_shape(i) for i in range(len(places))]
        if op.is_cut() and any(math.prod(s) == 0 for s in shapes):
            return filled(op, tuple(zeros(op, i) for i in range(own)))
        if not (op.is_cut("s") and (is_causal or is_padded)):
            if op.target is aten._scaled_dot_product_flash_attention_backward.default:
                return op.default(*op.args[:8], shapes[1][2], shapes[2][2])  # local lengths
            if op.target is aten._scaled_dot_product_cudnn_attention_backward.default:
                return op.default(*op.args[:11], shapes[1][2], shapes[2][2])
            return op.default()
        part, given = PART_BACKWARD if at else PART, in_rows(op, given)
        return filled(op, op.emit(part, *given, op.part("s"), [], is_causal, **op.kwargs))

    return local


def ring_of(op: LocalOp) -> tuple[list[int], str]:
    """The cuts of queries and keys over the axes whose ranks pass keys and values around, as
    numbers for `ftp.ops.ring_pieces.Ring`, and the group of these ranks.
    """
    keys, queries = op.cuts["t"], op.cuts["s"]
    at = {cut.axis: i for i, cut in enumerate(queries)}
    before = len(queries) - len(keys)
    is_last = all(at[cut.axis] >= before for cut in keys)
    in_order = sorted(keys, key=lambda cut: cut.place)
    ring = [keys[0].outer * keys[0].size * keys[0].inner]
    for cut in keys:
        ring += RingAxis(
            cut.n,
            cut.outer,
            cut.inner,
            int(cut.second is not None),
            at[cut.axis] if is_last else -1,
            int(queries[at[cut.axis]].second is not None),
            math.prod(other.n for other in in_order if other.place > cut.place),
        )
    return ring, op.group(*(cut.axis for cut in in_order))


def _ring(op: LocalOp, tensors: Sequence[Any], is_causal: bool) -> Any:
    ring, group = ring_of(op)
    return op.emit(
        RING if len(tensors) == 3 else RING_BACKWARD,
        *tensors,
        op.kwargs.get("attn_mask"),
        op.part("s"),
        ring,
        is_causal,
        op.kwargs.get("scale"),
        group,
    )


@rule(VARLEN, VARLEN_BACKWARD)
def varlen(call: Call) -> Rule:
    """Queries may be cut: the op takes their positions. The ends of documents are whole."""
    is_forward = call.target is VARLEN
    heads = factors_of_heads(call, 0 if is_forward else 1)
    out, q, ends = dims_of(OUT, heads), dims_of(Q, heads), ((("ends_q",),), (("ends_k",),))
    whole = WHOLE | {"ends_q", "ends_k"}
    tensors = q, dims_of(K), dims_of(V)
    over_queries = pending_over_queries(heads)
    if is_forward:
        operands, results = (*tensors, *ends), (out, dims_of(LSE, heads))
        pending: Any = ((), ())
    else:
        operands, results = (out, *tensors, out, dims_of(LSE, heads), *ends), tensors
        pending = ((), over_queries, over_queries)
    at = len(operands)
    notation = Notation(operands, results, frozenset(whole), pending)

    def local(op: LocalOp) -> Any:
        if op.is_cut("t"):
            ring, group = ring_of(op)
            target = VARLEN_RING if is_forward else VARLEN_RING_BACKWARD
            return op.emit(target, *op.args[:at], op.part("s"), ring, *op.args[at + 2 :], group)
        return op.replaced(at, op.part("s")) if op.is_cut("s") else op.default()

    sees = attention_varlen_ring.sees_of(*(call.arg(x) for x in ("left", "right", "is_self")))
    rest = sizes_of_heads(call, 0 if is_forward else 1), False, RING_FACTORS, sees
    return Rule(notation, () if is_forward else ((0,),), local, *rest)


FORWARD = "b h s e, b h t e, b h t v -> b h s v"
BACKWARD = "b h s v, b h s e, b h t e, b h t v -> b h s e, b h t e, b h t v"


def _by_heads(call: Call, text: str, query: int) -> Rule:
    """Attention kernels of other devices: batch and heads may be cut if there is no dropout.

    The text has the first operands and results. Another tensor has dims (b, h, ...) if it has these
    sizes; else it is whole. ``query`` is the index of the queries' operand.
    """
    known_dims = parse(text)
    b, h = call.operands[query].shape[:2]
    named: dict[bool, list[Dims]] = {}
    for is_result, known, metas in (
        (False, known_dims.operands, call.operands),
        (True, known_dims.results, call.results),
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
            named[is_result].append((*lead, *((f"{own}{d}",) for d in range(len(lead), meta.ndim))))
    free = {"b", "h"} if not call.arg("dropout_p") else set()
    if h != call.operands[query + 1].shape[1]:
        free -= {"h"}
        for is_result, slots in (
            (False, (query + 1, query + 2)),
            (True, (1, 2) if query else ()),
        ):
            for i in slots:
                named[is_result][i] = (("b",), ("hk",), *named[is_result][i][2:])
    notation = Notation(
        tuple(named[False]),
        tuple(named[True]),
        factors(*named[False], *named[True]) - free,
        ((),) * len(call.results),
    )
    return Rule(notation, ((0,),) if query else (), decompose=False)
