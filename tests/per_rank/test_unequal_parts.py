"""``ftp.axis.all_to_all`` with parts whose sizes are values: results, gradients, vmap, errors."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ftp
from ftp import P


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def exchanged(x: torch.Tensor, counts: torch.Tensor, bound: int) -> torch.Tensor:
    """What all ranks receive, from what all ranks hold: in plain torch, on the whole."""
    n = counts.shape[0]
    parts = [
        mine[: sum(sent)].split(sent)
        for mine, sent in zip(x.chunk(n), counts.tolist(), strict=True)
    ]
    found = []
    for rank in range(n):
        rows = torch.cat([p[rank] for p in parts])
        found.append(torch.cat([rows, rows.new_zeros(bound - len(rows), *x.shape[1:])]))
    return torch.cat(found)


@st.composite
def cases(draw):
    n = draw(st.sampled_from((2, 3)))
    rows = draw(st.integers(0, 4))
    counts = []
    for _ in range(n):
        left, sent = rows, []
        for _ in range(n):
            sent.append(draw(st.integers(0, left)))
            left -= sent[-1]
        counts.append(draw(st.permutations(sent)))
    least = max(map(sum, zip(*counts, strict=True)))
    bound = draw(st.one_of(st.none(), st.integers(least, least + 2)))
    return n, rows, counts, bound


@given(cases())
@example((2, 3, [[0, 3], [0, 3]], None))  # all rows to one rank
@example((3, 2, [[0, 0, 0]] * 3, 0))  # none
@settings(max_examples=5)
def test_rows_and_gradients_are_those_of_one_device(case):
    n, rows, counts, bound = case
    mesh = ftp.simulated_mesh(n, "ep")
    counts = torch.tensor(counts)
    generator = torch.Generator().manual_seed(rows)
    w = torch.randn(n * rows, 2, dtype=torch.float64, generator=generator)
    size = n * rows if bound is None else bound
    send = ftp.local(
        lambda x, c: ftp.axis.all_to_all(x, "ep", send_counts=c.flatten(), bound=bound).square(),
        mesh,
        (P("ep"), P("ep")),
        P("ep"),
    )

    def loss_of(send):
        def loss(w, c):
            y = send(w.sin(), c)
            return (y * torch.arange(1.0, 1 + y.numel()).reshape(y.shape)).sum()

        return loss

    plain = loss_of(lambda x, c: exchanged(x, c.reshape(n, n), size).square())
    expected_grad, expected = torch.func.grad_and_value(plain)(w, counts.flatten())
    step = ftp.shard(loss_of(send), mesh, P("ep"), batch_specs=P("ep"), certify=True)
    loss, grad = step(w, counts.flatten())
    close(loss, expected)
    close(grad, expected_grad)


def test_rows_stay_in_their_group_of_the_axis():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "ep"))
    x = torch.randn(12, 2, dtype=torch.float64)
    counts = torch.tensor([1, 2, 0, 3, 3, 0, 1, 0])
    both = P(("dp", "ep"))
    send = ftp.local(
        lambda x, c: ftp.axis.all_to_all(x, "ep", send_counts=c), mesh, (both, both), both
    )
    halves = zip(x.chunk(2), counts.view(2, 2, 2), strict=True)
    close(send(x, counts), torch.cat([exchanged(a, c, 6) for a, c in halves]))


def swap(mesh, bound, **options):
    return ftp.local(
        lambda x, c: ftp.axis.all_to_all(x, "ep", send_counts=c, bound=bound),
        mesh,
        P("ep"),
        P("ep"),
        **options,
    )


def test_the_rows_of_a_batch_travel_together_and_each_by_its_own_counts():
    mesh = ftp.simulated_mesh(2, "ep")
    x = torch.randn(3, 6, 2, dtype=torch.float64)
    counts = torch.tensor([1, 2, 0, 3])
    own = torch.tensor([[1, 2, 0, 3], [3, 0, 0, 0], [0, 1, 1, 1]])

    def mapped(in_dims):
        def f(x, c):
            send = lambda x, c: ftp.axis.all_to_all(x, "ep", send_counts=c, bound=5)  # noqa: E731
            return torch.vmap(send, in_dims)(x, c)

        specs = (P(None, "ep"), P("ep") if in_dims[1] is None else P(None, "ep"))
        return ftp.local(f, mesh, specs, P(None, "ep"))

    close(
        mapped((0, None))(x, counts), torch.stack([exchanged(a, counts.view(2, 2), 5) for a in x])
    )
    expected = [exchanged(a, c.view(2, 2), 5) for a, c in zip(x, own, strict=True)]
    close(mapped((0, 0))(x, own), torch.stack(expected))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_forward_mode_inside():
    mesh = ftp.simulated_mesh(2, "ep")
    counts = torch.tensor([1, 2, 0, 3])

    def f(x, t, c):
        send = lambda x: ftp.axis.all_to_all(x.square(), "ep", send_counts=c)  # noqa: E731
        return torch.func.jvp(send, (x,), (t,))[1]

    x, t = torch.randn(2, 6, 2, dtype=torch.float64)
    got = ftp.local(f, mesh, P("ep"), P("ep"))(x, t, counts)
    close(got, exchanged(2 * x * t, counts.view(2, 2), 6))


@pytest.mark.parametrize(
    ("counts", "bound", "message"),
    [
        ([1, 2, 0, 3], 4, "rank 1 of the axis would receive 5 rows, more than bound=4"),
        (
            [1, 3, 0, 0],
            None,
            r"rank 0 of the axis has send_counts \[1, 3\], but its tensor has 3 rows",
        ),
        ([1, 1, -1, 0], None, r"rank 1 of the axis has send_counts \[-1, 0\]"),
    ],
)
def test_no_row_moves_where_counts_do_not_fit(counts, bound, message):
    mesh = ftp.simulated_mesh(2, "ep")
    with pytest.raises(ftp.errors.InputError, match=f"test_unequal_parts.*{message}"):
        swap(mesh, bound)(torch.zeros(6, 2), torch.tensor(counts))


def test_what_the_trace_can_see_is_refused_there():
    mesh = ftp.simulated_mesh(2, "ep")

    def refused(message, **options):
        with pytest.raises(ftp.errors.InputError, match=message):
            ftp.local(lambda x: ftp.axis.all_to_all(x, "ep", **options), mesh, P("ep"), P("ep"))(
                torch.zeros(4, 2)
            )

    refused("bound=3 without send_counts", bound=3)
    refused(r"takes 2 integers, one for each rank", send_counts=[1, 0, 1])
    refused(r"takes 2 integers", send_counts=torch.ones(2))
    refused("split_dim=1", send_counts=[1, 1], split_dim=1)
    refused("takes a number of rows", send_counts=[1, 1], bound=-1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int16])
def test_dtypes_and_a_rank_alone(dtype):
    x = torch.arange(12).reshape(6, 2).to(dtype)
    counts = torch.tensor([1, 2, 0, 3])
    assert torch.equal(
        swap(ftp.simulated_mesh(2, "ep"), None)(x, counts), exchanged(x, counts.view(2, 2), 6)
    )
    alone = swap(ftp.simulated_mesh(1, "ep"), 4)(x, counts[1:2])
    assert torch.equal(alone, exchanged(x, counts[1:2].view(1, 1), 4))
    with pytest.raises(ftp.errors.InputError, match="more than bound=4"):
        swap(ftp.simulated_mesh(1, "ep"), 4)(x, torch.tensor([5]))


def test_records_say_the_load_of_equal_parts_and_the_worst():
    mesh = ftp.AbstractMesh((4,), ("ep",))
    x, counts = torch.zeros(4 * 6, 8), torch.zeros(16, dtype=torch.int64)
    lowered = ftp.lower(swap(mesh, None), mesh, P("ep"), x, counts, out_specs=P("ep"))
    travels, moves = lowered.collectives
    assert (travels.op, travels.wire_nbytes, travels.worst_nbytes) == (
        "all_gather",
        3 * 4 * 8,
        None,
    )
    assert moves.op == "all_to_all" and moves.axes == ("ep",)
    assert moves.wire_nbytes == 6 * 8 * 4 * 3 // 4
    assert moves.worst_nbytes == 4 * 6 * 8 * 4
    assert "at most" in str(lowered.collectives)
    cost = lowered.cost(ftp.Hardware.h100())
    assert cost.worst > cost
    assert "as unequal as they can be" in cost.report()
