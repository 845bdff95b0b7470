"""Ops on each matrix of a batch, and on lines of it: spectra, distances."""

import torch
from torch._ops import OpOverload

from ftp.ops.static_shape import lstsq
from ftp.rules.forms import acting_on, leading
from ftp.rules.local_forms import unless_empty
from ftp.rules.notation import Notation
from ftp.rules.registry import make, rule
from ftp.rules.rule import Call, Rule

aten = torch.ops.aten


@rule(
    aten._linalg_det.default, aten._linalg_eigh.default, aten._linalg_slogdet.default,
    aten._linalg_svd.default, aten.cholesky.default, aten.linalg_cholesky_ex.default,
    aten.linalg_eig.default, aten.linalg_inv_ex.default, aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default, aten.linalg_qr.default,
    aten.linalg_householder_product.default, aten.cholesky_inverse.default, aten.geqrf.default,
    aten.linalg_ldl_factor_ex.default, aten.linalg_matrix_exp.default,
)  # fmt: skip
def matrices(call: Call) -> Rule:
    return leading(call, call.operands[0].ndim - 2, local=unless_empty(call))


# How many dims of each operand and result are those of one system; what else there is, is a batch.
_SYSTEMS: dict[OpOverload, tuple[tuple[int, ...], tuple[int, ...]]] = {
    aten._linalg_solve_ex.default: ((2, 2), (2, 2, 1, 0)),
    aten.cholesky_solve.default: ((2, 2), (2,)),
    aten.linalg_ldl_solve.default: ((2, 1, 2), (2,)),
    aten.linalg_lu_solve.default: ((2, 1, 2), (2,)),
    aten.linalg_solve_triangular.default: ((2, 2), (2,)),
    aten.lu_unpack.default: ((2, 1), (2, 2, 2)),
    aten.triangular_solve.default: ((2, 2), (2, 2)),
    lstsq: ((2, 2), (2, 1, 0, 1)),
}
_RIGHT_HAND_SIDE = {
    aten._linalg_solve_ex.default: 1,
    aten.cholesky_solve.default: 0,
    aten.linalg_ldl_solve.default: 2,
    aten.linalg_lu_solve.default: 2,
    aten.linalg_solve_triangular.default: 1,
    aten.triangular_solve.default: 0,
}


@rule(*_SYSTEMS)
def systems(call: Call) -> Rule:
    """Batches that broadcast are whole, and so are results that are not asked for; right-hand sides
    are independent.

    Those of least squares, whose kernels crash where there are none, are whole. Pending sums are
    none here: solutions may be infinite.
    """
    own = list(sum(_SYSTEMS[call.target], ()))
    at = _RIGHT_HAND_SIDE.get(call.target)
    n = len(call.operands)
    metas = (*call.operands, *call.results)
    if (
        call.target in (aten._linalg_solve_ex.default, lstsq)
        and call.results[0].ndim == call.operands[0].ndim - 1
    ):
        own[1] = own[n] = 1  # vectors, one a matrix
    empty = any(0 in m.shape for m in call.operands)
    unwanted = {t for t, m in enumerate(metas) if t >= n and 0 in m.shape and not empty}
    batches = {
        m.shape[: m.ndim - k]
        for t, (m, k) in enumerate(zip(metas, own, strict=True))
        if t not in unwanted
    }
    shared = len(next(iter(batches))) if len(batches) == 1 else 0
    columns = {}
    if at is not None and own[at] == 2:
        left = not any(a.name == "left" for a in call.target._schema.arguments) or call.arg("left")
        columns = {(t, metas[t].ndim - (1 if left else 2)) for t in (at, n)}
    named = [
        tuple(
            (f"~{d}",)
            if d < shared and t not in unwanted
            else ("rhs",)
            if (t, d) in columns
            else (f"y{t}_{d}",)
            for d in range(m.ndim)
        )
        for t, m in enumerate(metas)
    ]
    whole = frozenset(f for dims in named for (f,) in dims if f.startswith("y"))
    notation = Notation(tuple(named[:n]), tuple(named[n:]), whole, ((),) * len(call.results))
    if len(call.results) == 1:
        return Rule(notation, (), unless_empty(call))
    zero = unless_empty(
        call
    )  # what comes out beside the solution is due on ranks without a right-hand side too
    return Rule(
        notation,
        (),
        lambda op: (
            op.default()
            if shared == 0 or all(op.sizes[f"~{d}"] for d in range(shared))
            else zero(op)
        ),
    )


@rule(aten.linalg_pinv.atol_rtol_tensor)
def pseudoinverse(call: Call) -> Rule:
    """Batches whose tolerances differ are whole."""
    x, *tolerances = call.operands
    return leading(
        call, 0 if any(t.ndim for t in tolerances) else x.ndim - 2, local=unless_empty(call)
    )


@rule(aten._fft_c2c.default, aten._fft_r2c.default)
def spectrum(call: Call) -> Rule:
    return acting_on(call, call.arg("dim"), linear=[(0,)], local=unless_empty(call))


@rule(aten._fft_c2r.default)
def real_spectrum(call: Call) -> Rule:
    return acting_on(call, call.arg("dim"), linear=[(0,)], local=unless_empty(call))


@rule(aten.linalg_cross.default)
def cross(call: Call) -> Rule:
    if len({m.shape for m in call.operands}) > 1:
        return leading(call, 0)
    return acting_on(call, [call.arg("dim")], linear=[(0,), (1,)])


@rule(aten._cdist_forward.default)
def distances(call: Call) -> Rule:
    """``... p [m], ... r [m] -> ... p r``; batches that broadcast are whole. Large ones are
    products, whatever the size of a part.
    """
    x, y = call.operands
    if x.shape[:-2] != y.shape[:-2]:
        return leading(call, 0)
    as_product = call.arg("compute_mode") or 0
    if as_product == 0:
        as_product = 1 if max(x.shape[-2], y.shape[-2]) > 25 else 2
    return make(
        "... p [m], ... r [m] -> ... p r",
        local=unless_empty(call, lambda op: op.replaced(3, as_product)),
    )


@rule(aten._euclidean_dist.default)
def distances_by_products(call: Call) -> Rule:
    """``... p [m], ... r [m] -> ... p r``"""
    x, y = call.operands
    if x.shape[:-2] != y.shape[:-2]:
        return leading(call, 0)
    return make("... p [m], ... r [m] -> ... p r", local=unless_empty(call))


@rule(aten._cdist_backward.default)
def distances_backward(call: Call) -> Rule:
    """``... p r, ... p m, ... r m, ... p r -> ... p m {r}``"""
    if len({m.shape[:-2] for m in call.operands}) > 1:
        return leading(call, 0, linear=[(0,)])
    return make(
        "... p r, ... p m, ... r m, ... p r -> ... p m {r}", linear=[(0,)], local=unless_empty(call)
    )
