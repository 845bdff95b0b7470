"""Products: rules for ops that are einsums."""

from dataclasses import replace

import torch
from torch import fx

from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation, parse
from ftp.rules.registry import einsum, make, rule
from ftp.rules.rule import Call, LocalHook, Rule

aten = torch.ops.aten

einsum(aten.bmm.default, "b m k, b k n -> b m n")
einsum(aten.dot.default, "k, k -> ()")
einsum(aten.mm.default, "m k, k n -> m n")
einsum(aten.mv.default, "m k, k -> m")
einsum(aten.vdot.default, "k, k -> ()")


@rule(aten.addmm.default, aten.addmv.default, aten.addr.default, aten.baddbmm.default)
def added_product(call: Call) -> Rule:
    """``self`` would be added by every rank that holds a part of k, so k is whole; the
    decomposition cuts it.
    """
    products = {
        aten.addmm.default: "m [k], [k] n -> m n",
        aten.addmv.default: "m [k], [k] -> m",
        aten.addr.default: "m, n -> m n",
        aten.baddbmm.default: "b m [k], b [k] n -> b m n",
    }
    made = make(products[call.target])
    result = made.notation.results[0]
    shape, out = call.operands[0].shape, call.results[0].shape
    self_dims = tuple(
        f if s == o else ()
        for f, s, o in zip(
            result[len(out) - len(shape) :], shape, out[len(out) - len(shape) :], strict=True
        )
    )
    n = made.notation
    return Rule(Notation((self_dims, *n.operands), n.results, n.whole, n.pending), ((0, 1), (0, 2)))


@rule(aten._grouped_mm.default)
def grouped_mm(call: Call) -> Rule:
    """Groups of rows (2-D x 3-D), columns (3-D x 2-D) or of the summed dim (2-D x 2-D) end where
    ``offs`` says: it and g are whole.
    """
    forms = {
        (2, 3): "[m] k, [g] k n, [g] -> [m] n {k}",
        (3, 2): "[g] [m] k, k [n], [g] -> [m] [n] {k}",
        (2, 2): "m [k], [k] n, [g] -> [g] m n",
        (3, 3): "g m k, g k n, g -> g m n {k}",
    }
    ndims = (call.operands[0].ndim, call.operands[1].ndim)
    n = parse(forms[ndims])
    if call.arg("offs") is None:
        n = replace(n, operands=n.operands[:2])
    if call.arg("bias") is None:
        return Rule(n, ((0,), (1,)), unless_empty(call, _aligned(call)))
    bias = (
        (n.results[0][-1],) if call.operands[-1].ndim == 1 else (n.results[0][0], n.results[0][-1])
    )
    whole = n.whole | {f for dim in bias for f in dim} | {"k"}
    return Rule(Notation((*n.operands, bias), n.results, whole, ((),)), (), unless_empty(call))


def _aligned(call: Call) -> LocalHook:
    """The kernel wants rows of whole 16 bytes: shorter ones are filled up with zeros."""
    unit = 16 // call.operands[0].dtype.itemsize

    def local(op: LocalOp) -> fx.Node:
        x, w, *_ = op.args
        shape = op.shape()

        def filled(t: fx.Node, dims: Dims) -> fx.Node:
            amounts = [
                (-op.sizes[dim[0]] % unit)
                if dim[0] in ("k", "n") and dim[0] not in op.rule.whole
                else 0
                for dim in dims
            ]
            pad = [p for amount in reversed(amounts) for p in (0, amount)]
            return op.emit(aten.constant_pad_nd.default, t, pad) if any(pad) else t

        made = op.default(filled(x, op.rule.operands[0]), filled(w, op.rule.operands[1]))
        if op.sizes.get("n", 0) % unit and "n" not in op.rule.whole:
            made = op.emit(aten.slice.Tensor, made, len(shape) - 1, 0, shape[-1])
        return made

    return local
