"""Ops on each matrix of a batch, and on lines of it: spectra, distances."""

import torch

from ftp.registry import Call, Rule, acting_on, leading, rule
from ftp.rules.local import unless_empty

aten = torch.ops.aten


@rule(
    aten._linalg_det.default, aten._linalg_eigh.default, aten._linalg_slogdet.default, aten._linalg_svd.default, aten.cholesky.default,
    aten.linalg_cholesky_ex.default, aten.linalg_eig.default,
    aten.linalg_inv_ex.default, aten.linalg_lu.default, aten.linalg_lu_factor_ex.default,
    aten.linalg_qr.default, aten.linalg_householder_product.default, aten.cholesky_inverse.default, aten.geqrf.default,
    aten.linalg_ldl_factor_ex.default, aten.linalg_matrix_exp.default,
)  # fmt: skip
def matrices(call: Call) -> Rule:
    return leading(call, call.operands[0].ndim - 2, local=unless_empty(call))


@rule(
    aten.linalg_solve_triangular.default, aten.triangular_solve.default, aten.cholesky_solve.default, aten._linalg_solve_ex.default,
    aten.linalg_lu_solve.default, aten.linalg_ldl_solve.default, aten.lu_unpack.default,
)  # fmt: skip
def systems(call: Call) -> Rule:
    """Batches that broadcast are whole."""
    ndim = min(m.ndim for m in call.operands) - 2
    metas = (*call.operands, *call.results)
    alike = 0
    while alike < ndim and len({m.shape[alike] for m in metas if m.ndim > alike}) == 1 and len({m.ndim for m in call.operands}) == 1:
        alike += 1
    return leading(call, alike, local=unless_empty(call))


@rule(aten.linalg_pinv.atol_rtol_tensor)
def pseudoinverse(call: Call) -> Rule:
    """Batches whose tolerances differ are whole."""
    x, *tolerances = call.operands
    return leading(call, 0 if any(t.ndim for t in tolerances) else x.ndim - 2, local=unless_empty(call))


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
    """Batches that broadcast are whole."""
    x, y = call.operands
    same = x.shape[:-2] == y.shape[:-2]
    return leading(call, x.ndim - 2 if same else 0, local=unless_empty(call))


@rule(aten._cdist_backward.default)
def distances_backward(call: Call) -> Rule:
    same = len({m.shape[:-2] for m in call.operands}) == 1
    return leading(call, call.operands[0].ndim - 2 if same else 0, linear=[(0,)], local=unless_empty(call))
