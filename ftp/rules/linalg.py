"""Rules of linear algebra on batches of matrices, and of spectra and distances."""

import math

from torch import fx

from ftp.ops.static_shape import lstsq
from ftp.rules.call import Call
from ftp.rules.forms import along_dim, along_dims, batched
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import register, rule
from ftp.rules.rule import Rule
from ftp.torch_internals.op_types import OpOverload

batched(
    aten._linalg_det.default, aten._linalg_eigh.default, aten._linalg_slogdet.default,
    aten._linalg_svd.default, aten.cholesky.default, aten.linalg_cholesky_ex.default,
    aten.linalg_eig.default, aten.linalg_inv_ex.default, aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default, aten.linalg_qr.default,
    aten.linalg_householder_product.default, aten.cholesky_inverse.default, aten.geqrf.default,
    aten.linalg_ldl_factor_ex.default, aten.linalg_matrix_exp.default,
    core=2, local=unless_empty(),
)  # fmt: skip


def systems(
    op: OpOverload,
    operands: tuple[int, ...],
    results: tuple[int, ...],
    rhs: int | None = None,
    vectors: bool = False,
) -> None:
    """Solvers of batches of linear systems. Batches that broadcast are whole, and so are results
    that are not asked for.

    They take no pending sums: solutions may be infinite.

    Args:
        op: the op overload.
        operands, results: the number of dims of one system in each tensor; dims before them are the
            batch.
        rhs: the operand whose right-hand sides are independent. Right-hand sides of least squares
            are whole, as its kernels crash without any.
        vectors: operand 1 may have one right-hand side, a vector, per matrix.

    >>> systems(aten.cholesky_solve.default, (2, 2), (2,), rhs=0)
    """

    def maker(call: Call) -> Rule:
        own = [*operands, *results]
        n = len(call.operands)
        metas = (*call.operands, *call.results)
        if vectors and call.results[0].ndim == call.operands[0].ndim - 1:
            own[1] = own[n] = 1
        empty = any(0 in m.shape for m in call.operands)
        unwanted = {t for t, m in enumerate(metas) if t >= n and 0 in m.shape and not empty}
        batches = {
            m.shape[: m.ndim - k]
            for t, (m, k) in enumerate(zip(metas, own, strict=True))
            if t not in unwanted
        }
        shared = len(next(iter(batches))) if len(batches) == 1 else 0
        columns = {}
        if rhs is not None and own[rhs] == 2:
            names = {a.name for a in op._schema.arguments}
            left = "left" not in names or call.arg("left")
            columns = {(t, metas[t].ndim - (1 if left else 2)) for t in (rhs, n)}
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
            return Rule(notation, (), unless_empty())
        # Ranks without a right-hand side must compute the other results too, not only the solution.
        zero = unless_empty()
        return Rule(
            notation,
            (),
            lambda op: (
                op.default()
                if shared == 0 or all(op.sizes[f"~{d}"] for d in range(shared))
                else zero(op)
            ),
        )

    register([op], maker)


systems(aten._linalg_solve_ex.default, (2, 2), (2, 2, 1, 0), rhs=1, vectors=True)
systems(aten.cholesky_solve.default, (2, 2), (2,), rhs=0)
systems(aten.linalg_ldl_solve.default, (2, 1, 2), (2,), rhs=2)
systems(aten.linalg_lu_solve.default, (2, 1, 2), (2,), rhs=2)
systems(aten.linalg_solve_triangular.default, (2, 2), (2,), rhs=1)
systems(aten.lu_unpack.default, (2, 1), (2, 2, 2))
systems(aten.triangular_solve.default, (2, 2), (2, 2), rhs=0)
systems(lstsq, (2, 2), (2, 1, 0, 1), vectors=True)


# Batches whose tolerances differ are whole.
rule(
    aten.linalg_pinv.atol_rtol_tensor,
    "... [m] [n], (), () -> ... [n] [m]",
    or_whole=True,
    local=unless_empty(),
)

along_dims(
    aten._fft_c2c.default, aten._fft_c2r.default, aten._fft_r2c.default,
    linear=[(0,)], local=unless_empty(),
)  # fmt: skip


along_dim(aten.linalg_cross.default, "... [d], ... [d] -> ... [d]", linear=[(0,), (1,)])


def _by_size_of_whole(op: LocalOp) -> fx.Node:
    """Use matmuls if the whole is large, whatever the size of the shard."""
    as_matmul = op.call.arg("compute_mode") or 0
    if as_matmul == 0:
        as_matmul = 1 if max(m.shape[-2] for m in op.call.operands) > 25 else 2
    return op.replaced(3, as_matmul)


# Distances; batches that broadcast are whole.
rule(
    aten._cdist_forward.default,
    "... p [m], ... r [m] -> ... p r",
    or_whole=True,
    local=unless_empty(_by_size_of_whole),
)
rule(
    aten._euclidean_dist.default,
    "... p [m], ... r [m] -> ... p r",
    or_whole=True,
    local=unless_empty(),
)
rule(
    aten._cdist_backward.default,
    "... p r, ... p m, ... r m, ... p r -> ... p m {r}",
    or_whole=True,
    linear=[(0,)],
    local=unless_empty(),
)


@rule(aten._pdist_forward.default)
def pairwise_distances(call: Call) -> str:
    """Distances of all pairs of rows. Columns add up if no root is taken of the sum."""
    columns = {0: "sum", 1: "sum", math.inf: "max"}.get(call.arg("p"))
    return f"[n] m -> [p] {{m:{columns}}}" if columns else "[n] [m] -> [p]"


# A column's gradient needs only that column.
rule(
    aten._pdist_backward.default, "[p], [n] m, [p] -> [n] m",
    linear=[(0,)], local=unless_empty(),
)  # fmt: skip
