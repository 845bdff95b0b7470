"""Fused attention: scores are never stored, so the keys stay whole and queries may be cut."""

import math
from typing import Any

import torch
from torch import fx

from ftp.localize import LocalOp
from ftp.notation import Dims, Notation
from ftp.registry import Call, Rule, rule
from ftp.rules.local import zeros

aten = torch.ops.aten

Q, K, V, LSE = ("b", "h", "s", "e"), ("b", "h", "t", "e"), ("b", "h", "t", "v"), ("b", "h", "s")
O = ("b", "h", "s", "v")
WHOLE = frozenset({"t", "e", "v"})


def _heads(call: Call, at: int) -> dict[str, tuple[str, ...]]:
    """The factors of each letter: with fewer heads of keys than of queries, h of the queries is (h r)."""
    q, k = call.operands[at], call.operands[at + 1]
    more = q.shape[1] // k.shape[1] if k.shape[1] else 1
    return {"h": ("h", "r") if more > 1 else ("h",)}


def _dims(letters: tuple[str, ...], heads: dict[str, tuple[str, ...]] | None = None) -> Dims:
    return tuple((heads or {}).get(f, (f,)) for f in letters)


def _mask_dims(call: Call, heads: dict[str, tuple[str, ...]], mask: Any, q: Any, k: Any) -> Dims:
    full = ("b", "h", "s", "t")
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    skip = 4 - mask.ndim
    return tuple(heads.get(f, (f,)) if m == s else () for f, s, m in zip(full[skip:], sizes[skip:], mask.shape, strict=True))


def _sizes(call: Call, at: int) -> dict[str, int]:
    q, k = call.operands[at], call.operands[at + 1]
    return {"h": k.shape[1], "r": q.shape[1] // k.shape[1]} if k.shape[1] and q.shape[1] != k.shape[1] else {}


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_for_cpu(call: Call) -> Rule:
    q, k, *_ = call.operands
    heads = _heads(call, 0)
    mask = call.kwargs.get("attn_mask")
    masks = (_mask_dims(call, heads, mask, q, k),) if mask is not None else ()
    operands = (_dims(Q, heads), _dims(K), _dims(V), *masks)
    whole = WHOLE | ({"r"} if "r" in heads["h"] else set())
    notation = Notation(operands, (_dims(O, heads), _dims(LSE, heads)), frozenset(whole), ((), ()))
    return Rule(notation, (), _masked_by_position(call, 0), _sizes(call, 0), decompose=False)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_for_cpu_backward(call: Call) -> Rule:
    _, q, k, *_ = call.operands
    heads = _heads(call, 1)
    mask = call.kwargs.get("attn_mask")
    masks = (_mask_dims(call, heads, mask, q, k),) if mask is not None else ()
    out = _dims(O, heads)
    operands = (out, _dims(Q, heads), _dims(K), _dims(V), out, _dims(LSE, heads), *masks)
    whole = WHOLE | ({"r"} if "r" in heads["h"] else set())
    over_queries = (("s", "sum"),)
    notation = Notation(operands, (_dims(Q, heads), _dims(K), _dims(V)), frozenset(whole), ((), over_queries, over_queries))
    return Rule(notation, ((0,),), _masked_by_position(call, 1), _sizes(call, 1), decompose=False)


def _masked_by_position(call: Call, at: int):
    """Where queries are cut, ``is_causal`` would count from this rank's first query: an explicit mask counts from the first of all."""
    causal = 4 if at == 0 else 7
    dtype = call.operands[0].dtype

    def local(op: LocalOp) -> Any:
        shapes = [op.operand_shape(i) for i in range(len(op.rule.operands))]
        if op.is_cut() and any(math.prod(s) == 0 for s in shapes):
            return tuple(zeros(op, call, i) for i in range(len(call.results)))
        if not (op.is_cut("s") and len(op.args) > causal and op.args[causal]):
            return op.default()
        keys = op.emit(aten.arange.default, op.sizes["t"], device=op.device)
        ahead = op.emit(aten.gt.Tensor, keys, op.emit(aten.unsqueeze.default, op.positions("s"), 1))
        mask = op.emit(aten.full.default, [1, 1, op.sizes["s"], op.sizes["t"]], 0, dtype=dtype, device=op.device)
        mask = op.emit(aten.masked_fill.Scalar, mask, ahead, -math.inf)
        args = [*op.args[:causal], False, *op.args[causal + 1 :]]
        return op.emit(op.target, *args, **{**op.kwargs, "attn_mask": mask})

    return local


@rule(
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)  # fmt: skip
def by_heads(call: Call) -> Rule:
    """Kernels of other devices: batch and heads, as long as nothing is dropped at random."""
    q, k, *_ = call.operands
    return _kernel(call, 0, [_dims(Q), _dims(K), _dims(V)], [_dims(O), _lse(call, 1)], q, k)


@rule(
    aten._scaled_dot_product_flash_attention_backward.default, aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)  # fmt: skip
def by_heads_backward(call: Call) -> Rule:
    _, q, k, *_ = call.operands
    return _kernel(call, 1, [_dims(O), _dims(Q), _dims(K), _dims(V)], [_dims(Q), _dims(K), _dims(V)], q, k)


def _kernel(call: Call, at: int, operands: list[Dims], results: list[Dims], q: Any, k: Any) -> Rule:
    names = [a.name for a in call.target._schema.arguments]
    heads = {"h": ("h",)}
    sequence = {"out": _dims(O), "attn_bias": None, "logsumexp": None}
    by_name = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    whole = {"s", "t", "e", "v"}
    given: list[Dims] = []
    for name, value in by_name.items():
        if not hasattr(value, "shape"):
            continue
        if len(given) < len(operands):
            given.append(operands[len(given)])
        elif name == "out":
            given.append(_dims(O))
        elif name == "attn_bias":
            given.append(_mask_dims(call, heads, value, q, k) if value.ndim == 4 else _own(value, f"m{len(given)}", whole))
        elif name == "logsumexp" and value.shape[:2] == q.shape[:2]:
            given.append((("b",), ("h",), *(("l",),) * 1, *((),) * (value.ndim - 3)))
        else:
            given.append(_own(value, f"o{len(given)}", whole))
    made = list(results)
    for i, meta in enumerate(call.results[len(results) :]):
        made.append(_own(meta, f"r{i}", whole))
    whole.add("l")
    free = (call.arg("dropout_p") or 0) == 0 and q.shape[1] == k.shape[1]
    if not free:
        whole |= {"b", "h"}
    if q.shape[1] != k.shape[1]:
        swap = {("h",): ("hk",)}
        given = [tuple(swap.get(dim, dim) if i in (at + 1, at + 2) else dim for dim in dims) for i, dims in enumerate(given)]
        made = [tuple(swap.get(dim, dim) if at and i in (1, 2) else dim for dim in dims) for i, dims in enumerate(made)]
        whole.add("hk")
    del sequence
    named = {f for dims in (*given, *made) for dim in dims for f in dim}
    return Rule(Notation(tuple(given), tuple(made), frozenset(whole & named), ((),) * len(made)), ((0,),) if at else (), decompose=False)


def _lse(call: Call, result: int) -> Dims:
    """Its last dim is the queries', padded by some kernels."""
    meta = call.results[result]
    return (("b",), ("h",), ("l",), *((),) * (meta.ndim - 3)) if meta.ndim >= 3 else tuple((f"l{d}",) for d in range(meta.ndim))


def _own(meta: Any, name: str, whole: set[str]) -> Dims:
    dims = tuple((f"{name}_{d}",) for d in range(meta.ndim))
    whole |= {f for dim in dims for f in dim}
    return dims


def _unused(x: fx.Node) -> fx.Node:
    return x
