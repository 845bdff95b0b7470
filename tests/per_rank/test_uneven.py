"""Per-rank code on uneven dims: plain torch on ``torch.chunk``'s shards, with gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import SpecError, TraceError


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def chunks(x: Tensor, n: int) -> list[Tensor]:
    """A shard per rank; the last ones may be empty."""
    found = list(x.chunk(n))
    return found + [x[:0]] * (n - len(found))


def of_shard(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the shard's own, and what it adds to a sum."""
    y = (x @ w).tanh()
    rows = y.softmax(0) * y.square().sum(0).add(1).rsqrt() + x.shape[0]
    total = (y.T @ y).sin() + y.exp().sum(0) * x.shape[0] + torch.einsum("nd,ne->de", x, rows)
    return rows, total + rows.log_softmax(-1).sum() + y.square().sum((0, 1))


def check(
    layer: Any,
    plain: Any,
    specs: Any,
    batch_specs: Any,
    params: Any,
    batch: Any,
    mesh: Any,
    **options: Any,
) -> None:
    """A step with ``layer`` has the loss and gradients of ``plain`` in plain torch, and the layer
    on whole tensors has its results.
    """

    def weighted(y: Tensor) -> Tensor:
        weights = torch.linspace(0, 1, y.numel(), dtype=y.dtype)
        return (y * weights.view(y.shape)).sum() + y.square().sum()

    def loss_of(f):
        def loss(params, batch):
            return torch.stack([weighted(y) for y in f(params, batch)]).sum()

        return loss

    step = ftp.shard(loss_of(layer), mesh, specs, batch_specs=batch_specs, **options)
    value, grads = step(params, batch)
    given = [p.clone().requires_grad_() for p in params]
    expected = loss_of(plain)(given, batch)
    close(value, expected.detach())
    for grad, due in zip(grads, torch.autograd.grad(expected, given), strict=True):
        close(grad, due)
    for made, due in zip(layer(params, batch), plain(params, batch), strict=True):
        close(made, due)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "size"), [(2, 5), (3, 4), (3, 1)])
def test_shards_of_unequal_size(n: int, size: int):
    mesh = ftp.simulated_mesh((n,), ("tp",))

    def code(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, total = of_shard(x, w)
        count = ftp.axis.all_reduce(torch.ones_like(x[:, 0]).sum(), "tp")
        return ftp.axis.all_reduce(total, "tp") / count, rows.T, count * torch.ones(1)

    def plain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, totals = zip(*(of_shard(part, w) for part in chunks(x, n)), strict=True)
        return torch.stack(totals).sum(0) / size, torch.cat(rows).T, torch.tensor([float(size)])

    layer = ftp.local(code, mesh, (P("tp"), P()), (P(), P(None, "tp"), P()))
    check(
        lambda params, _: layer(*params), lambda params, _: plain(*params),
        [P("tp"), P()], P(), [drawn(size, 3), drawn(3, 3)], torch.ones(()), mesh, certify=True,
    )  # fmt: skip


def mlp_with_attention(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
    y = (x @ up).relu() @ down
    return ((y @ y.T).softmax(-1) @ y,)


@pytest.mark.slow
def test_an_uneven_dim_that_is_joined():
    """Megatron's MLP with a hidden dim that the ranks do not divide, and attention to all rows."""
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))

    def code(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
        y = ftp.axis.all_reduce((x @ up).relu() @ down, "tp")
        every = ftp.axis.all_gather(y, "dp")
        return ((y @ every.T).softmax(-1) @ every,)

    layer = ftp.local(code, mesh, (P("dp"), P(None, "tp"), P("tp")), P("dp"))
    check(
        lambda p, x: layer(x, *p), lambda p, x: mlp_with_attention(x, *p),
        [P(None, "tp"), P("tp")], P("dp"), [drawn(4, 7), drawn(7, 4)], drawn(6, 4), mesh,
        certify=True,
    )  # fmt: skip


@pytest.mark.parametrize("size", [5, 1])
def test_uneven_rows_that_are_gathered_with_weights_that_are_planned(size: int):
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))

    def code(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor]:
        y = (x @ up).relu() @ down
        every = ftp.axis.all_gather(y, "dp")
        return ((y @ every.T).softmax(-1) @ every,)

    layer = ftp.local(code, mesh, (P("dp"), P(), P()), P("dp"), axes=("dp",))
    check(
        lambda p, x: layer(x, *p), lambda p, x: mlp_with_attention(x, *p),
        [P(None, "tp"), P("tp")], P("dp"), [drawn(4, 6), drawn(6, 4)], drawn(size, 4), mesh,
    )  # fmt: skip


def test_collectives_over_another_axis():
    """Columns are cut in unequal parts over tp; rows and a third dim move over dp."""
    mesh, x = ftp.simulated_mesh((2, 2), ("dp", "tp")), drawn(4, 5, 2)

    def code(x: Tensor) -> tuple[Any, ...]:
        count: Any = x.shape[1]
        rows = ftp.axis.all_gather(x.sin(), "dp")
        return (
            ftp.axis.all_reduce(count, "tp").item(),  # a number before parts
            ftp.axis.reduce_scatter(rows, "dp", dim=2),
            ftp.axis.all_to_all(x, "dp", split_dim=2, concat_dim=0),
            ftp.axis.ppermute(x, "dp", [(0, 1), (1, 0)]),
            ftp.axis.all_reduce(x, "dp"),
        )

    cut = P(None, "tp", "dp")
    layer = ftp.local(code, mesh, P("dp", "tp"), (P(), cut, cut, P("dp", "tp"), P(None, "tp")))
    for made, due in zip(
        layer(x), (torch.tensor(5), 2 * x.sin(), x, x.roll(2, 0), x[:2] + x[2:]), strict=True
    ):
        close(made, due)


def test_what_uneven_parts_may_not_do():
    mesh, x = ftp.simulated_mesh((2,), ("tp",)), drawn(5, 3)
    both = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    for collective in (
        lambda x: ftp.axis.all_reduce(x, "tp"),
        lambda x: ftp.axis.all_gather(x, "tp", dim=1),
        lambda x: ftp.axis.reduce_scatter(x, "tp"),
        lambda x: ftp.axis.all_to_all(x, "tp"),
        lambda x: ftp.axis.ppermute(x, "tp", [(0, 1)]),
    ):
        with pytest.raises(TraceError) as e:
            ftp.local(collective, mesh, P("tp"), P("tp"))(x)
        assert (
            "over 'tp' takes equal parts, and dim 0 has 5 rows over the 2 ranks of 'tp'. Reduce the"
            " rows first, gather them by ftp.axis.all_gather(x, 'tp', 0), or pad the dim."
        ) in str(e.value)
    with pytest.raises(TraceError, match="all_gather over 'dp' takes equal parts, and dim 0 has 5"):
        ftp.local(lambda x: ftp.axis.all_gather(x, "dp"), both, P("tp"), P("tp"))(x)
    with pytest.raises(SpecError, match=r"the result has out spec P.None, 'tp'., and in dim 0 the"):
        ftp.local(lambda x: x * 2, mesh, P("tp"), P(None, "tp"))(x)
    with pytest.raises(SpecError, match=r"it comes from x, which in_specs cut as P.'tp'., or from"):
        ftp.local(lambda x: x.sum(0), mesh, P("tp"), P())(x)
    with pytest.raises(TraceError, match=r"x is changed in place. Inputs and captured tensors are"):
        ftp.local(lambda x: x.mul_(2), mesh, P("tp"), P("tp"))(x)
    with pytest.raises(TraceError, match=r"a tensor of shape \(2, 3\) beside a rank's own rows"):
        ftp.local(lambda x, y: x + y, mesh, (P("tp"), P()), P("tp"))(x, drawn(2, 3))
    with pytest.raises(TraceError, match="cumsum, which is asked of rows that a mask selects"):
        ftp.local(lambda x: x.cumsum(0), mesh, P("tp"), P("tp"))(x)
