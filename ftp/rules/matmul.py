"""Products: rules for ops that are einsums."""

from dataclasses import replace

from torch import fx
from torch._ops import OpOverload

from ftp.rules.forms import einsum
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation, parse
from ftp.rules.overloads import aten
from ftp.rules.registry import register, rule
from ftp.rules.rule import Call, LocalHook, Rule

einsum(aten.bmm.default, "b m k, b k n -> b m n")
einsum(aten.dot.default, "k, k -> ()")
einsum(aten.mm.default, "m k, k n -> m n")
einsum(aten.mv.default, "m k, k -> m")
einsum(aten.vdot.default, "k, k -> ()")


def added_product(op: OpOverload, text: str) -> None:
    """A product to which ``self``, broadcast, is added. Every rank that holds a part of k would
    add it, so that k is whole; the decomposition cuts k.

    >>> added_product(aten.addmm.default, "m [k], [k] n -> m n")
    """
    n = parse(text)
    (result,) = n.results

    def maker(call: Call) -> Rule:
        shape, out = call.operands[0].shape, call.results[0].shape
        skip = len(out) - len(shape)
        own = tuple(
            f if s == o else () for f, s, o in zip(result[skip:], shape, out[skip:], strict=True)
        )
        return Rule(replace(n, operands=(own, *n.operands)), ((0, 1), (0, 2)))

    register([op], maker)


added_product(aten.addmm.default, "m [k], [k] n -> m n")
added_product(aten.addmv.default, "m [k], [k] -> m")
added_product(aten.addr.default, "m, n -> m n")
added_product(aten.baddbmm.default, "b m [k], b [k] n -> b m n")


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
        return Rule(n, ((0,), (1,)), unless_empty(_aligned(call)))
    bias = (
        (n.results[0][-1],) if call.operands[-1].ndim == 1 else (n.results[0][0], n.results[0][-1])
    )
    whole = n.whole | {f for dim in bias for f in dim} | {"k"}
    return Rule(Notation((*n.operands, bias), n.results, whole, ((),)), (), unless_empty())


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
