"""Dynamic dims whose sizes are computed from one another: a mask of one token less, pairs of
rows.
"""

import pytest
import torch
import torch.nn.functional as F
from few_or_many import slow_after

import ftp
from ftp import P
from ftp.errors import InputError

SEQ = torch.export.Dim("seq", max=64)
ROWS = torch.export.Dim("rows", min=1)


def policy(params, tokens, mask):
    """Log-probabilities of the next tokens, weighed by a mask of one token less."""
    logits = F.embedding(tokens, params["table"]).tanh() @ params["head"]
    logp = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return -(logp * mask).sum() / mask.sum()


def preference(params, pairs, margin):
    """Chosen rows, and below them as many rejected ones."""
    chosen, rejected = (pairs @ params["table"]).square().mean(1).chunk(2)
    return F.softplus(margin - chosen + rejected).mean()


PARAMS = {
    "table": torch.randn(7, 4, dtype=torch.float64),
    "head": torch.randn(4, 7, dtype=torch.float64),
}
SPECS = {"table": P("tp"), "head": P(None, "tp")}


def steps_of(fn, params, mesh, specs, spec, sizes, batch, **options):
    step = ftp.shard(fn, mesh, specs, batch_specs=spec, **options)
    for size in sizes:
        args = batch(size)
        found, (grads, value) = step(params, *args), torch.func.grad_and_value(fn)(params, *args)
        torch.testing.assert_close(found, (value, grads), rtol=1e-11, atol=1e-12)
    assert step.shapes.traces == 1 and not step.shapes.one_by_one, step.shapes
    return step


def tokens_and_mask(size):
    return torch.randint(7, (4, size)), torch.rand(4, size - 1, dtype=torch.float64)


@pytest.mark.parametrize("axis", slow_after(2, ["tp", "cp", "dp"]))
@pytest.mark.parametrize("named", [False, True], ids=["found", "named"])
def test_a_mask_of_one_token_less(axis, named):
    mesh = ftp.simulated_mesh((2,), (axis,))
    specs = SPECS if axis == "tp" else P()
    spec = {"tp": P(), "cp": P(None, "cp"), "dp": P("dp")}[axis]
    dims = {"dynamic_shapes": ({1: SEQ}, {1: SEQ - 1}), "certify": axis == "cp"} if named else {}
    sizes = (6, 7, 9, 4, 12, 11, 3)
    step = steps_of(policy, PARAMS, mesh, specs, spec, sizes, tokens_and_mask, **dims)
    assert step.shapes.plans <= 3


def test_twice_as_many_rows():
    dims = ({0: 2 * ROWS}, {0: ROWS})
    params = {"table": torch.randn(3, 4, dtype=torch.float64)}

    def batch(rows):
        x = torch.randn(2 * rows + rows, 3, dtype=torch.float64)
        return x[: 2 * rows], x[2 * rows :, 0]

    mesh = ftp.simulated_mesh((2,), ("dp",))
    steps_of(preference, params, mesh, P(), P("dp"), (2, 3, 5, 8), batch, dynamic_shapes=dims)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((4, 6), (4, 6)), "dim 1 of mask has size 6, but dim 1 of tokens has 6: dynamic_shapes"),
        (((4, 66), (4, 65)), "dim 1 of tokens has size 66, outside Dim('seq', min=1, max=64)"),
    ],
)
def test_sizes_that_do_not_fit(shapes, said):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(policy, mesh, SPECS, dynamic_shapes=({1: SEQ}, {1: SEQ - 1}))
    with pytest.raises(InputError) as error:
        step(PARAMS, torch.zeros(shapes[0], dtype=torch.long), torch.ones(shapes[1]))
    assert said in str(error.value), error.value


def test_a_size_that_is_no_multiple():
    mesh = ftp.simulated_mesh((2,), ("dp",))
    step = ftp.shard(preference, mesh, P(), dynamic_shapes=({0: 2 * ROWS}, {0: ROWS}))
    with pytest.raises(InputError, match=r"has size 5, which is no 2\*rows"):
        step({"table": torch.ones(3, 4)}, torch.ones(5, 3), torch.ones(2))


def test_few_conditions_are_shown_the_equation_first():
    def loss(params, x):
        total = x.new_zeros(())
        for t in range(x.shape[1]):
            total = total + (x[:, t : t + 2] @ params[: x[:, t : t + 2].shape[1]]).square().sum()
        return total

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), batch_specs=P("dp"))
    for size in (4, 5, 6):
        step(torch.ones(2), torch.ones(4, size))
    (said,) = step.shapes.one_by_one
    assert said.startswith("the function asks for sizes: Eq(") and said.count(" at ") <= 4, said


def test_a_quotient_by_a_negative_size_is_named_where_it_allows_one_size():
    def fn(x):
        return x.sum() * (100 // (x.shape[1] - 13))

    dims = {1: torch.export.Dim("S", min=2, max=300)}
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("cp",)), P(None, "cp"), P(), dynamic_shapes=dims)
    with pytest.warns(UserWarning, match=r"asks for sizes: .*S - 9 == 0"):
        step(torch.ones(2, 9))
    for size in (9, 12, 20):
        assert step(torch.ones(2, size)) == fn(torch.ones(2, size))
