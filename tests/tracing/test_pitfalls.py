"""What goes wrong when such programs are sharded: each compared with plain torch, values and
gradients, over meshes and specs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import strategies as st
from plan_reshards import unbucketed
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P

# The simplest case of a property cuts the first dim of each tensor over the first of these.
MESHES = {"3": ((3,), ("x",)), "2x2": ((2, 2), ("x", "y")), "2": ((2,), ("x",))}


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def i(below: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ties(*shape: int) -> Tensor:
    """Few values, each often, the extremes too."""
    return i(3, *shape).to(torch.float64)


def positive(*shape: int) -> Tensor:
    return x(*shape).abs() + 0.5


CLASSES = torch.tensor([3, 0, -100, 4, 2, -100, 1])
SPARSE = torch.tensor([[1, 4, 1], [0, 2, 2], [4, 4, 1], [3, 0, 0], [2, 1, 4]])
WEIGHTS = torch.linspace(0.5, 2, 5, dtype=torch.float64)
MASK = torch.tensor([True, False, True, True, False, False, True])


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _experts(tokens: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(tokens.unsqueeze(1), weight[chosen]).squeeze(1)


def _lookup_used_before_its_reduction(table: Tensor, ids: Tensor) -> list[Tensor]:
    rows = F.embedding(ids, table)
    return [rows.exp(), rows.amax(-1), rows[:, :1] * rows, torch.softmax(rows, -1)]


# A function of tensors to one or several, and its arguments.
Pitfall = tuple[Callable[..., Any], tuple[Tensor, ...]]

LOSSES: dict[str, Pitfall] = {
    "mse_loss": (F.mse_loss, (x(7, 5), x(7, 5, seed=1))),
    "l1_loss": (F.l1_loss, (x(7, 5), x(7, 5, seed=1))),
    "mean of means": (lambda a: a.square().mean(0).sin().mean(), (x(7, 5),)),
    "cross_entropy": (F.cross_entropy, (x(7, 5), CLASSES)),
    "cross_entropy, weights": (
        lambda a, t, w: F.cross_entropy(a, t, weight=w.detach()),
        (x(7, 5), CLASSES, WEIGHTS),
    ),
    "cross_entropy, smoothing": (
        lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1),
        (x(7, 5), CLASSES),
    ),
    "cross_entropy, ignore_index": (
        lambda a, t: F.cross_entropy(a, t, ignore_index=1),
        (x(7, 5), CLASSES.clamp(min=0)),
    ),
    "cross_entropy, classes in uint8": (
        lambda a, t, w: (
            F.cross_entropy(a, t, w.detach(), ignore_index=2)
            + F.cross_entropy(a, t, label_smoothing=0.1)
            + F.nll_loss(a, t, reduction="none").sin().sum()
            + F.cross_entropy(a[0], t[0])
        ),
        (x(7, 5), CLASSES.clamp(min=0).to(torch.uint8), WEIGHTS),
    ),
    "cross_entropy, pixels": (F.cross_entropy, (x(3, 5, 4), i(5, 3, 4))),
    "nll_loss, none": (lambda a, t: F.nll_loss(a, t, reduction="none"), (x(7, 5), CLASSES)),
    "binary_cross_entropy": (
        lambda a, t: F.binary_cross_entropy(a.sigmoid(), t),
        (x(7, 3), x(7, 3, seed=1).sigmoid()),
    ),
    "cosine_embedding_loss": (
        F.cosine_embedding_loss,
        (x(7, 5), x(7, 5, seed=1), torch.tensor([1, -1, 1, 1, -1, 1, -1])),
    ),
    "triplet_margin_loss": (F.triplet_margin_loss, (x(7, 5), x(7, 5, seed=1), x(7, 5, seed=2))),
    "masked mean": (lambda a, m: (a * m[:, None]).sum() / m.sum(), (x(7, 5), MASK)),
}

CONVOLUTIONS: dict[str, Pitfall] = {
    "conv1d": (F.conv1d, (x(3, 4, 7), x(6, 4, 3), x(6))),
    "conv2d, padded and strided": (
        lambda a, w, b: F.conv2d(a, w, b, stride=2, padding=1),
        (x(3, 2, 5, 7), x(4, 2, 3, 3), x(4)),
    ),
    "conv2d, dilated": (lambda a, w: F.conv2d(a, w, dilation=2), (x(2, 3, 7, 6), x(4, 3, 2, 2))),
    "conv2d, groups": (lambda a, w: F.conv2d(a, w, groups=2), (x(3, 4, 5, 5), x(6, 2, 3, 3))),
    "conv2d, depthwise": (
        lambda a, w: F.conv2d(a, w, padding=1, groups=3),
        (x(2, 3, 5, 5), x(3, 1, 3, 3)),
    ),
    "conv_transpose2d": (
        lambda a, w, b: F.conv_transpose2d(a, w, b, stride=2),
        (x(3, 4, 3, 3), x(4, 5, 2, 2), x(5)),
    ),
    "conv3d": (F.conv3d, (x(2, 3, 4, 4, 5), x(4, 3, 2, 2, 2))),
    "pools": (
        lambda a: [F.max_pool2d(a, 2), F.avg_pool2d(a, 3, 2, 1), F.adaptive_avg_pool2d(a, 3)],
        (x(3, 2, 7, 6),),
    ),
    "interpolate": (
        lambda a: F.interpolate(a, scale_factor=2.0, mode="bilinear"),
        (x(3, 2, 3, 5),),
    ),
}

TABLES: dict[str, Pitfall] = {
    "used before its reduction": (_lookup_used_before_its_reduction, (x(7, 4), i(7, 5, 3))),
    "padding_idx": (lambda t, ids: F.embedding(ids, t, padding_idx=4), (x(5, 4), SPARSE)),
    "scale_grad_by_freq": (
        lambda t, ids: F.embedding(ids, t, scale_grad_by_freq=True),
        (x(5, 4), SPARSE),
    ),
    "tied": (lambda t, ids: F.embedding(ids, t) @ t.T, (x(5, 4), SPARSE)),
    "bag, sum": (lambda t, ids: F.embedding_bag(ids, t, mode="sum"), (x(5, 4), SPARSE)),
    "bag, mean": (
        lambda t, ids: F.embedding_bag(ids, t, mode="mean", padding_idx=1),
        (x(5, 4), SPARSE),
    ),
    "bag, weights": (
        lambda t, ids, w: F.embedding_bag(ids, t, mode="sum", per_sample_weights=w),
        (x(5, 4), SPARSE, x(5, 3)),
    ),
    "one_hot": (lambda t, ids: F.one_hot(ids, 5).to(t.dtype) @ t, (x(5, 4), SPARSE)),
}

REDUCTIONS: dict[str, Pitfall] = {
    "amax with ties": (lambda a: [a.amax(), a.amax(0), a.amin(1)], (ties(5, 7),)),
    "max with ties": (lambda a: [a.max(), *a.max(1), *a.min(0)], (ties(5, 7),)),
    "inf norm with ties": (
        lambda a: [
            torch.linalg.vector_norm(a, math.inf),
            torch.linalg.vector_norm(a, -math.inf, 0),
        ],
        (ties(5, 7),),
    ),
    "norms": (lambda a: [torch.linalg.vector_norm(a, p, 1) for p in (1, 2, 3.5, 6)], (x(5, 7),)),
    "var": (lambda a: [a.var(), *torch.var_mean(a, 0), a.std(1, correction=0)], (x(5, 7),)),
    "argmax": (lambda a: [a.argmax(), a.argmax(0), a.argmin(1, keepdim=True)], (ties(5, 7),)),
    "argmax of negatives": (lambda a: [a.argmax(), a.argmin(0)], (-positive(5, 7),)),
    "logsumexp": (lambda a: [a.logsumexp(0), a.softmax(1), a.log_softmax(0)], (x(5, 7),)),
    "prod": (lambda a: [a.prod(0), a.prod()], (x(3, 5),)),
    "any, all, count": (
        lambda a: [(a > 1).any(0), (a >= 0).all(), torch.count_nonzero(a, 1)],
        (ties(5, 7),),
    ),
    "integers": (lambda a: [a.sum(0), a.amax(1), a.prod(), a.cumsum(1)], (i(4, 5, 3) + 1,)),
    "bools": (lambda a: [a.sum(), a.any(), a.all(0), a & ~a.flip(0)], (MASK,)),
    "complex": (
        lambda a, b: [
            torch.complex(a, b).abs(),
            (torch.complex(a, b) * torch.complex(b, a)).sum(0).real,
            torch.complex(a, b).var(0),
            torch.complex(a, b).std(),
            torch.complex(a, b).logsumexp(1).imag,
            torch.linalg.vector_norm(torch.complex(a, b), 3, 0),
        ],
        (x(5, 3), x(5, 3, seed=1)),
    ),
    "scalars": (
        lambda a, b: [a * b, a.sum(), a.amax(), b.sum(0, keepdim=True)],
        (torch.tensor(2.0, dtype=torch.float64), x(5)),
    ),
    "empty": (lambda a, b: [a.sum(0), a @ b, torch.cat([a, b.T]), a.exp()], (x(0, 3), x(3, 0))),
    "no copies": (
        lambda a: [a.repeat(0, 1), a.repeat(1, 0), a.repeat(2, 0, 3), a.sum()],
        (x(5, 3),),
    ),
    "along a dim of size zero": (
        lambda a: [
            a.softmax(1),
            a.log_softmax(1),
            a.logsumexp(1),
            a.exp().any(1),
            a.exp().all(1),
            a.any(),
            a.sum(1),
        ],
        (x(5, 0, 3),),
    ),
    "broadcast of dims of one": (lambda a, b: [a + b, (a * b).sum(0)], (x(1, 5), x(4, 1))),
}

ALONG: dict[str, Pitfall] = {
    "cumsum": (
        lambda a: [a.cumsum(0), a.cumsum(1), a.cumprod(1), a.cummax(0).values, a.logcumsumexp(1)],
        (x(5, 7),),
    ),
    "sort": (
        lambda a: [*a.sort(1), *a.sort(0, descending=True), a.argsort(dim=1, stable=True)],
        (x(5, 7),),
    ),
    "topk": (
        lambda a: [*a.topk(3, 1), *a.topk(2, 0, largest=False), *a.kthvalue(2, 1)],
        (x(5, 7),),
    ),
    "median": (lambda a: [a.median(), *a.median(1), a.quantile(0.3, 0), *a.mode(1)], (x(5, 7),)),
    "histc": (lambda a: [torch.histc(a, 4, -1, 1), torch.histc(a, 3, -2, 0)], (x(23),)),
    "searchsorted": (
        lambda a, v: [
            torch.searchsorted(a.sort(1).values, v),
            torch.bucketize(v, a[0].sort().values),
        ],
        (x(5, 7), x(5, 3)),
    ),
    "unfold": (lambda a: [a.unfold(1, 3, 2), F.unfold(a[None, None], 2)], (x(5, 7),)),
    "roll and flip": (
        lambda a: [a.roll(2, 1), a.roll(3), a.flip(0), a.flip(0, 1), a.rot90()],
        (x(5, 7),),
    ),
    "tril": (lambda a: [a.tril(), a.triu(1), a.tril(-1).sum(0)], (x(5, 7),)),
    "diagonal": (
        lambda a: [
            a.diagonal(),
            a.diagonal(1),
            a[:, :5].trace(),
            torch.diag_embed(a),
            a.diagonal(-1, 1, 0),
        ],
        (x(5, 7),),
    ),
    "fft": (
        lambda a: [
            torch.fft.fft(a).abs(),
            torch.fft.rfft(a, dim=0).real,
            torch.fft.irfft2(torch.fft.rfft2(a)),
        ],
        (x(6, 4),),
    ),
    "diff and trapezoid": (
        lambda a: [a.diff(dim=0), torch.trapezoid(a, dim=1), torch.cumulative_trapezoid(a, dim=0)],
        (x(5, 7),),
    ),
    "view across": (
        lambda a: [
            a.reshape(35),
            a.reshape(7, 5),
            a.reshape(5, 7, 1).permute(2, 1, 0).flatten(),
            a.T.reshape(5, 7),
        ],
        (x(5, 7),),
    ),
    "parts": (
        lambda a: [
            *a.split(2, 0),
            *a.chunk(3, 1),
            *a.tensor_split([1, 4], 0),
            *a.unbind(1),
            a[1:4, ::2],
            a[-1],
        ],
        (x(5, 7),),
    ),
    "joined": (
        lambda a, b: [
            torch.cat([a, b]),
            torch.stack([a, a.exp()], 1),
            torch.cat([a, b[:, :2]], 1)[:, 3:],
        ],
        (x(5, 7), x(5, 7, seed=1)),
    ),
    "einsum": (
        lambda a, b: [
            torch.einsum("ij,kj->ik", a, b),
            torch.einsum("ij,ij->", a, b),
            torch.einsum("ij,kl->ikjl", a, b).sum(1),
            torch.einsum("ij,ij->j", a, b),
            torch.einsum("ii->i", a[:, :5]),
            torch.einsum("...j,...j->...", a, b),
        ],
        (x(5, 7), x(5, 7, seed=1)),
    ),
    "matrices": (
        lambda a: [
            torch.linalg.det(a),
            torch.linalg.inv(a + 3 * torch.eye(3)),
            torch.linalg.cholesky(a @ a.mT + torch.eye(3)),
        ],
        (x(5, 3, 3),),
    ),
    "matrices of no rows": (
        lambda a: [torch.linalg.det(a), *torch.linalg.slogdet(a), torch.logdet(a)],
        (x(3, 0, 0),),
    ),
    "systems": (
        lambda a, b: [
            torch.linalg.solve(a + 3 * torch.eye(3), b),
            torch.linalg.solve_triangular(
                a.triu() + 3 * torch.eye(3), b.mT, upper=True, left=False
            ),
            torch.linalg.solve(a[0] + 3 * torch.eye(3), b[0, :, 0]),
        ],
        (x(5, 3, 3), x(5, 3, 4)),
    ),
    "distance": (
        lambda a, b: [torch.dist(a, b), torch.dist(a, b[0], 3)],
        (x(5, 3), x(5, 3, seed=1)),
    ),
    "distances": (
        lambda a, b: [torch.cdist(a, b), torch.cdist(a, b, p=1), torch.cdist(a[0], b[1], p=3)],
        (x(2, 5, 3), x(2, 4, 3)),
    ),
    "many distances": (lambda a, b: torch.cdist(a, b), (x(27, 3), x(5, 3))),
    "products of integers": (
        lambda a, b, c: [
            torch.addmv(a[:, 0], b, c[:, 0], alpha=2.7),
            torch.addbmm(a, b[None], c[None], beta=1.6, alpha=0.3),
        ],
        (i(5, 4, 3) - 2, i(5, 4, 6) - 2, i(5, 6, 3) - 2),
    ),
}

INDEXED: dict[str, Pitfall] = {
    "index_put": (
        lambda a, at, v: [a.index_put((at,), v), a.index_put((at,), v, accumulate=True)],
        (x(7, 3), torch.tensor([6, 0, 2]), x(3, 3)),
    ),
    "index_add": (
        lambda a, at, v: [a.index_add(0, at, v), a.index_copy(0, at[:3].sort().values * 2, v[:3])],
        (x(9, 3), i(3, 5), x(5, 3)),
    ),
    "scatter_add": (
        lambda a, at, v: [a.scatter_add(0, at, v), a.scatter_add(1, at[:, :2], v[:, :2])],
        (x(5, 5), i(5, 4, 5), x(4, 5)),
    ),
    "scatter": (
        lambda a, v: a.scatter(1, torch.tensor([[0, 2], [3, 1], [2, 0]]), v),
        (x(3, 4), x(3, 2)),
    ),
    "scatter_reduce": (
        lambda a, at, v: [a.scatter_reduce(0, at, v, r) for r in ("sum", "amax", "mean")],
        (x(5, 3), i(5, 7, 3), x(7, 3)),
    ),
    "gather": (
        lambda a, at: [
            a[:, 0].gather(0, at[:0]),
            a.gather(0, at),
            a.gather(1, at[:, :1]),
            torch.take_along_dim(a, at, 0),
        ],
        (x(5, 3), i(3, 4, 3)),
    ),
    "index": (
        lambda a, at: [a[at], a[:, at % 3], a[at, at % 3], a.index_select(0, at), a.take(at)],
        (x(7, 3), i(7, 5)),
    ),
    "masks": (
        lambda a, m: [a.masked_fill(m[:, None], 0), torch.where(m[:, None], a, -a)],
        (x(7, 3), MASK),
    ),
    "experts by index and bmm": (_experts, (x(7, 4), i(5, 7), x(5, 4, 3))),
    "causal attention": (_attention, (x(2, 3, 5, 4), x(2, 3, 5, 4, seed=1), x(2, 3, 5, 4, seed=2))),
    "causal attention, fewer heads of keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        (x(2, 4, 5, 4), x(2, 2, 5, 4), x(2, 2, 5, 4, seed=1)),
    ),
}

NORMS: dict[str, Pitfall] = {
    "batch_norm": (
        lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True),
        (x(7, 3, 5), x(3), x(3, seed=1)),
    ),
    "batch_norm of vectors": (lambda a: F.batch_norm(a, None, None, training=True), (x(7, 3),)),
    "batch_norm, given statistics": (
        lambda a, m, v, w: F.batch_norm(a, m.detach(), v.detach(), w),
        (x(7, 3, 5), x(3), positive(3), x(3, seed=1)),
    ),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (5,), w, b), (x(7, 3, 5), x(5), x(5, seed=1))),
    "rms_norm": (lambda a, w: F.rms_norm(a, (5,), w), (x(7, 3, 5), x(5))),
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), (x(3, 4, 5), x(4), x(4, seed=1))),
    "instance_norm": (
        lambda a, w, b: F.instance_norm(a, weight=w, bias=b),
        (x(3, 4, 5), x(4), x(4, seed=1)),
    ),
    "local_response_norm": (lambda a: F.local_response_norm(a, 3), (x(3, 5, 4),)),
    "normalize": (lambda a: [F.normalize(a), F.cosine_similarity(a, a.roll(1, 0))], (x(7, 5),)),
}

BROAD = x(7, 3)[:, :1] > 0

# What torch computes by looking at values, of shapes that are known all the same.
VALUES: dict[str, Pitfall] = {
    "lstsq": (
        lambda a, b: [
            *torch.linalg.lstsq(a, b)[:1],
            torch.linalg.lstsq(a, b[..., 0], driver="gelsy")[0],
        ],
        (x(3, 5, 2), x(3, 5, 4)),
    ),
    "ctc_loss": (
        lambda a, t: [
            torch.ctc_loss(a.log_softmax(-1), t, (6, 5, 4), (3, 1, 2), 0, 2),
            F.ctc_loss(
                a.log_softmax(-1),
                t.flatten()[:5],
                torch.tensor([6, 3, 4]),
                torch.tensor([2, 1, 2]),
                reduction="none",
            ),
            torch.ctc_loss(a.log_softmax(-1), t, (6, 2, 4), (1, 3, 2), 2, 0, True),
        ],
        (x(6, 3, 5), i(4, 3, 3) + 1),
    ),
    "istft": (
        lambda a, b: [
            torch.istft(
                torch.complex(a, b),
                8,
                3,
                window=torch.hann_window(8, dtype=a.dtype) + 0.1,
                length=20,
            ),
            torch.istft(
                torch.complex(a, b),
                8,
                window=torch.ones(8, dtype=a.dtype),
                normalized=True,
                onesided=True,
            ),
            torch.istft(torch.complex(a, b)[0], 8, 2, 6, torch.ones(6, dtype=a.dtype)),
        ],
        (x(3, 5, 7), x(3, 5, 7, seed=1)),
    ),
    "stft": (
        lambda a, w: [
            torch.view_as_real(torch.stft(a, 6, 2, window=w, return_complex=True)),
            torch.stft(a[0], 8, 3, 6, w, normalized=True, return_complex=True).abs(),
            torch.stft(
                torch.complex(a, a * 2),
                6,
                3,
                window=w,
                center=False,
                return_complex=True,
                onesided=False,
            ).abs(),
        ],
        (x(3, 19), x(6)),
    ),
    "combinations": (
        lambda a: [torch.combinations(a), torch.combinations(a, 3, with_replacement=True)],
        (x(5),),
    ),
    "index_fill by a tensor": (
        lambda a, at, v: [
            a.index_fill(0, at, v),
            a.clone().index_fill_(1, at[:2], v),
            v.index_fill(0, at[:1] * 0, v * 2),
        ],
        (x(5, 3), torch.tensor([2, 0, 2]), x(1)[0]),
    ),
    "index_fill": (
        lambda a, at: [a.index_fill(0, at, 2.0), a.index_fill(1, at - 3, -1.0)],
        (x(5, 3), torch.tensor([2, 0, 2])),
    ),
    "one value where a mask holds": (
        lambda a, m, v, w: [a.index_put((m,), v), a.index_put((m,), w, accumulate=True)],
        (x(7, 3), MASK, x(1, 3), x(1, 1)[0]),
    ),
    "values where a mask holds": (
        lambda a, m, v: [
            a.index_put((m,), v),
            _written(a, m, v[0]),
            _written(a, m, v),
            _written(a, BROAD.expand(7, 3), v[0, 0]),
        ],
        (x(7, 3), MASK, x(4, 3)),
    ),
    "products of what is scattered": (
        lambda a, at, v: [
            a.scatter_reduce(0, at, v, "prod"),
            a.index_reduce(0, at[:, 0], v, "prod", include_self=False),
        ],
        (x(5, 3), i(5, 7, 3), ties(7, 3)),
    ),
    "phases of singular vectors": (
        lambda a, b: (lambda u, s, v: [(u * s.unsqueeze(-2)) @ v, s])(
            *torch.linalg.svd(torch.complex(a, b), full_matrices=False)
        ),
        (x(3, 4, 3), x(3, 4, 3, seed=1)),
    ),
}


def _written(a: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    a = a * 2
    a[mask] = value
    return a


PITFALLS = {
    f"{family}: {name}": pitfall
    for family, members in (
        ("loss", LOSSES), ("convolution", CONVOLUTIONS), ("table", TABLES),
        ("reduction", REDUCTIONS), ("along", ALONG), ("indexed", INDEXED), ("norm", NORMS),
        ("values", VALUES),
    )
    for name, pitfall in members.items()
}  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, ndims: Sequence[int]) -> tuple[str, tuple[P, ...]]:
    """A mesh, and per tensor a spec in which each axis cuts a dim or none."""
    mesh = draw(st.sampled_from(list(MESHES)))
    specs = []
    for ndim in ndims:
        entries: list[tuple[str, ...]] = [()] * ndim
        for axis in draw(st.permutations(MESHES[mesh][1])):
            at = draw(st.integers(0, ndim))
            if at < ndim:
                entries[at] = (*entries[at], axis)
        specs.append(P(*(e or None for e in entries)))
    return mesh, tuple(specs)


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def with_gradients(
    fn: Callable[..., Any], count: int, floats: Sequence[int]
) -> Callable[..., list[Tensor]]:
    """Results, and gradients of their sum weighted by arguments after the function's own."""

    def both(*values: Tensor) -> list[Tensor]:
        given, weights = list(values[:count]), values[count:]

        def loss(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            for at, leaf in zip(floats, leaves, strict=True):
                given[at] = leaf
            out = tensors(fn(*given))
            terms = [
                (t * w).sum()
                for t, w in zip((t for t in out if t.is_floating_point()), weights, strict=True)
            ]
            return sum(terms), out  # type: ignore[return-value]

        grads, out = torch.func.grad(loss, argnums=tuple(range(len(floats))), has_aux=True)(
            *(given[at] for at in floats)
        )
        return [*out, *grads]

    return both


def check(
    fn: Callable[..., Any], arguments: tuple[Tensor, ...], mesh: str, specs: tuple[P, ...]
) -> None:
    floats = [at for at, t in enumerate(arguments) if t.is_floating_point()]
    weights = [x(*t.shape, seed=5) for t in tensors(fn(*arguments)) if t.is_floating_point()]
    if floats and weights:
        fn, arguments = with_gradients(fn, len(arguments), floats), (*arguments, *weights)
        specs = (*specs, *(P() for _ in weights))
    made = ftp.spmd(fn, ftp.simulated_mesh(*MESHES[mesh]), specs)(*arguments)
    torch.testing.assert_close(
        tensors(made),
        tensors(fn(*arguments)),
        rtol=1e-9,
        atol=1e-9,
        equal_nan=True,
        check_stride=False,
    )


BETA = pytest.mark.filterwarnings("ignore:index_reduce")


@pytest.mark.cases_by_default(30)
@BETA
@pytest.mark.parametrize("name", PITFALLS)
@few_or_many(st.data(), few=1, many=60)
def test_pitfall(name: str, data: st.DataObject):
    fn, arguments = PITFALLS[name]
    check(fn, arguments, *data.draw(layouts([t.ndim for t in arguments])))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [n for n in PITFALLS if n.startswith("loss: ")])
def test_a_loss_whose_batch_is_cut(name: str, mesh: str):
    fn, arguments = PITFALLS[name]
    cut = P(MESHES[mesh][1])
    check(fn, arguments, mesh, tuple(cut if t.shape[0] in (3, 7) else P() for t in arguments))


def test_variances_of_complex_numbers_are_real():
    step = ftp.spmd(
        lambda a: [a.var(), *torch.var_mean(a, 0), a.std(1), *torch.std_mean(a)],
        ftp.simulated_mesh((3,), ("x",)),
        (P("x"),),
    )
    a = torch.complex(x(5, 3), x(5, 3, seed=1))
    torch.testing.assert_close(
        list(step(a)), [a.var(), *torch.var_mean(a, 0), a.std(1), *torch.std_mean(a)]
    )


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm of vectors"])
def test_batch_norm_moves_statistics_alone(name: str):
    fn, arguments = NORMS[name]
    step = ftp.spmd(
        fn,
        ftp.simulated_mesh((3,), ("x",)),
        tuple(P("x") if t.ndim > 1 else P() for t in arguments),
        P("x"),
    )
    channels = arguments[0].shape[1]
    assert [(c.op, math.prod(c.shape)) for c in unbucketed(step.lower(*arguments)).collectives] == [
        ("all_reduce", channels)
    ] * 2


SHAPES = [
    lambda a: torch.nonzero(a),
    lambda a: a[a > 0],
    lambda a: torch.unique(a),
    lambda a: a.masked_select(a > 0),
]


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("fn", SHAPES)
def test_rows_whose_number_depends_on_values_are_returned(fn: Callable[[Tensor], Tensor]):
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("x",)), (P("x"),), certify=True)
    for values in (x(5), -x(5), torch.zeros(5)):
        torch.testing.assert_close(step(values), fn(values), rtol=0, atol=0)


@pytest.mark.parametrize("fn", [lambda a: a.sign().long().bincount(), lambda a: a[a > 0].cumsum(0)])
def test_shapes_that_depend_on_values_are_refused(fn: Callable[[Tensor], Tensor]):
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("x",)), (P("x"),), strict=True)
    with pytest.raises(ftp.errors.TraceError, match=r"depends? on values(.|\n)*test_pitfalls.py"):
        step(x(5))
