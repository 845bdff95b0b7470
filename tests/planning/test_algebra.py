"""Laws of algebra by which the planner rewrites losses on a cut vocabulary: what they save, that
values are those of one device where a law holds and where it does not, and that certificates know
them.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.errors import CertificateError
from ftp.planning import algebra
from ftp.planning.graph import Value

aten = torch.ops.aten
MESHES = {
    "tp2": (ftp.simulated_mesh((2,), ("tp",)), P(None, "tp")),
    "tp3": (ftp.simulated_mesh((3,), ("tp",)), P(None, "tp")),
    "dp2 x tp3": (ftp.simulated_mesh((2, 3), ("dp", "tp")), P("dp", "tp")),
}


def made(seed: int, rows: int, vocabulary: int, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    w = scale * torch.randn(5, vocabulary, generator=generator, dtype=torch.float64)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return w, x, torch.randint(vocabulary, (rows,), generator=generator)


def check(loss, name, w, x, y, **options):
    mesh, spec = MESHES[name]
    step = ftp.shard(loss, mesh, spec, **options)
    value, grad = step(w, x, y)
    expected, wanted = torch.func.grad_and_value(loss)(w, x, y)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-12, equal_nan=True)
    return step.lower(w, x, y)


def counts(lowered) -> dict[str, int]:
    """Of ops on tensors of the logits' shape."""
    lines = [line for line in str(lowered).splitlines() if "f64[6, 12@tp]" in line.split(" = ")[0]]
    return {op: sum(f"= {op}." in line for line in lines) for op in ("exp", "sub", "zeros_like")}


def test_a_loss_on_a_cut_vocabulary_has_one_exponential_and_no_zeros():
    loss = lambda w, x, y: F.cross_entropy(x @ w, y)  # noqa: E731
    lowered = check(loss, "tp2", *made(0, 6, 12), certify=True)
    assert counts(lowered) == {"exp": 1, "sub": 1, "zeros_like": 0}
    # The sum of exponentials and the target's logit travel together.
    assert [c.op for c in lowered.collectives] == ["all_reduce", "all_reduce"]


KEYWORDS = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"ignore_index": 1},
    {"weight": torch.arange(1.0, 10.0, dtype=torch.float64)},
]


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@settings(max_examples=3)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 7),
    vocabulary=st.integers(1, 9),
    scale=st.sampled_from([1.0, 1e3]),
)
def test_losses_are_those_of_one_device(name, keywords, seed, rows, vocabulary, scale):
    given = dict(keywords)
    if "weight" in given:
        given["weight"] = given["weight"][:vocabulary]

    def loss(w, x, y):
        return F.cross_entropy(x @ w, y, **given)

    check(loss, name, *made(seed, rows, vocabulary, scale), certify=True)


def _shifted(w, x):
    z = x @ w
    return z - z.amax(1, True)


def exponential_of_another_sum(w, x, y):
    z = _shifted(w, x)
    e = z.exp()
    return (z - (2 * e).sum(1, True).log()).exp().square().sum()


def sum_over_rows(w, x, y):
    z = _shifted(w, x)
    return (z - z.exp().sum(0, True).log()).exp().square().sum()


def half_a_logarithm(w, x, y):
    z = _shifted(w, x)
    return torch.sub(z, z.exp().sum(1, True).log(), alpha=0.5).exp().square().sum()


def large_without_a_maximum(w, x, y):
    z = 400 * (x @ w)  # exp overflows
    return (z - z.exp().sum(1, True).log()).exp().nan_to_num(2.0).sum()


def rows_of_infinities(w, x, y):
    z = (x @ w).index_fill(0, y[:1] * 0, -math.inf)
    return z.log_softmax(1).exp().nan_to_num(3.0).sum() + z[1:].log_softmax(1).exp().max()


def probabilities_beside(w, x, y):
    z = (x @ w).log_softmax(1)
    return (z.exp() * z).sum() + F.nll_loss(z, y)


def a_scatter_that_is_used_twice(w, x, y):
    z = x @ w
    s = torch.zeros_like(z).scatter_add(1, y[:, None], z[:, :1])
    return (s - z * z.sum(1, True)).square().sum() + s.sin().sum()


def a_scatter_with_a_rest(w, x, y):
    z = x @ w
    s = torch.zeros_like(z).scatter_add(1, y[:, None].expand(-1, 2), z[:, :2])
    return (s - z * z.sum(1, True)).square().sum()


def a_gather_of_a_difference(w, x, y):
    z = x @ w
    at = torch.stack((y, y.flip(0)), 1)
    return (z - z.mean(1, True)).gather(1, at).square().sum()


def a_gather_of_rows(w, x, y):
    z = x @ w
    at = (y % z.shape[0])[:, None].expand(-1, z.shape[1])
    return (z - z.sum(1, True)).gather(0, at).square().sum()


def a_gather_of_fewer_rows(w, x, y):
    z = x @ w
    return (z - z.sum(1, True)).gather(1, y[:3, None]).square().sum()


def _onehot_less(z, y, row):
    ones = torch.ones_like(y[:, None], dtype=z.dtype)
    return (torch.zeros_like(z).scatter_add(1, y[:, None], ones) - z.detach() * row).square().sum()


def a_row_that_is_a_mask(w, x, y):
    z = (x @ w).softmax(1)
    return z.square().sum() + _onehot_less(z, y, (y > 4)[:, None])


def a_row_without_negatives(w, x, y):
    z = (x @ w).softmax(1)
    return z.square().sum() + _onehot_less(z, y, (y % 3)[:, None].to(torch.uint8))


def sums_over_all(w, x, y):
    z = x @ w
    z = z - z.amax(keepdim=True)
    return (z - z.exp().sum(None, True).log()).exp().square().sum() + z.log_softmax(1).sum()


def a_sum_in_another_dtype(w, x, y):
    z = x @ w
    counts = torch.zeros_like(z, dtype=torch.int32).scatter_add(1, y[:, None], y[:, None].int())
    return z.log_softmax(1).sum() / (2 + counts.sum(1, dtype=torch.float64).sum())


def a_gather_with_options(w, x, y):
    z = x @ w
    gathered = torch.gather(z - z.sum(1, True), 1, y[:, None], sparse_grad=True)
    return gathered.detach().sum() * z.log_softmax(1).sum()


def a_block_without_the_softmax(w, x, y):
    z = (x @ w).log_softmax(1)
    return ftp.remat(lambda z: F.nll_loss(z, y) + (z.exp() * z).sum())(z)


def a_block_of_the_softmax(w, x, y):
    z = ftp.remat(lambda w: (x @ w).log_softmax(1))(w)
    return F.nll_loss(z, y) + (z.exp() * z).sum()


def a_difference_used_again_in_one_place(w, x, y):
    def block(w):
        z = x @ w
        less = z - z.mean(1, True)
        return less.gather(1, y[:, None]).square().sum() + less.sum() + z.log_softmax(1).mean()

    return ftp.remat(block)(w)


@pytest.mark.parametrize(
    "loss",
    [
        exponential_of_another_sum, sum_over_rows, half_a_logarithm, large_without_a_maximum,
        rows_of_infinities, probabilities_beside, a_scatter_that_is_used_twice,
        a_scatter_with_a_rest, a_gather_of_a_difference, a_gather_of_rows, a_gather_of_fewer_rows,
        a_row_that_is_a_mask, a_row_without_negatives, sums_over_all, a_sum_in_another_dtype,
        a_gather_with_options, a_block_without_the_softmax, a_block_of_the_softmax,
        a_difference_used_again_in_one_place,
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["tp2"])
def test_programs_like_them(loss, name):
    check(loss, name, *made(1, 6, 12), certify=True)


EXPONENTIAL, SCATTER, GATHER = (
    algebra.exponential_again,
    algebra.scatter_onto_rest,
    algebra.gather_before_difference,
)


def _swapped(graph):
    graph, now = EXPONENTIAL(graph)
    for node in graph.nodes:
        if node.target is aten.div.Tensor and node.operands[0].node.target is aten.exp.default:
            node.replace_operands([node.operands[1], node.operands[1]])
    return graph, now


def _without_sign(graph):
    graph, now = SCATTER(graph)
    for node in graph.nodes:
        if node.target is aten.neg.default and node.name.endswith(".sub.neg"):
            node.target = aten.abs.default
    return graph, now


def _twice(graph):
    graph, now = GATHER(graph)
    for node in graph.nodes:
        if node.target is aten.sub.Tensor and node.name.endswith(".gather"):
            node.replace_operands([node.operands[0], Value(node.operands[0].node)])
    return graph, now


@pytest.mark.parametrize(
    ("law", "wrong"), [(EXPONENTIAL, _swapped), (SCATTER, _without_sign), (GATHER, _twice)]
)
def test_certificates_refuse_a_wrong_law(law, wrong, monkeypatch):
    monkeypatch.setattr(algebra, law.__name__, wrong)
    mesh, spec = MESHES["tp2"]
    step = ftp.shard(lambda w, x, y: F.cross_entropy(x @ w, y), mesh, spec, certify=True)
    with pytest.raises(CertificateError):
        step(*made(0, 6, 12))
