"""Reads and writes at all rows, by ``torch.arange``, and one index a row."""

from collections.abc import Callable

import pytest
import torch
from torch.func import grad

import ftp
from ftp import P

V = 5  # columns


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0])


def _less_one(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss in Megatron's cross entropy."""
    x = x.clone()
    x.view(-1, V)[torch.arange(x.numel() // V), k[:, 0].view(-1)] -= 1.0
    return x


def _put(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[_rows(x), k[:, 0]] = 3.0
    return x


def _put_parts(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x.index_put((_rows(x), k[:, 1]), x[:, 0] * 2, accumulate=True)


def _put_many(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x.index_put((_rows(x)[:, None], k), k.double(), accumulate=True)


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one": lambda x, k: x[_rows(x), k[:, 0]],
    "from the end": lambda x, k: x[_rows(x), -1 - k[:, 0]],
    "many": lambda x, k: x[_rows(x)[:, None], k],
    "many alike": lambda x, k: x[_rows(x)[:, None].expand(-1, 3), k[:, :1]],
    "first dim": lambda x, k: x.T[k[:, 0], _rows(x)],
    "long rows": lambda x, k: x.unflatten(0, (-1, 1)).expand(-1, 3, -1)[_rows(x), k[:, 0] % 3],
    "two dims of rows": lambda x, k: x[:, None].expand(-1, 2, V)[
        _rows(x)[:, None], torch.arange(2), k
    ],
    "after a dim": lambda x, k: x.T.unsqueeze(-1)[:, _rows(x), k[:, 0] * 0],
    "start and step": lambda x, k: x[torch.arange(0, x.shape[0], 1), k[:, 0]],
    "gradient": lambda x, k: grad(lambda x: x[_rows(x), k[:, 0]].sin().sum())(x),
    "gradient of many": lambda x, k: grad(lambda x: x[_rows(x)[:, None], k].sin().sum())(x),
    "less one": _less_one,
    "put": _put,
    "put parts": _put_parts,
    "put many": _put_many,
}  # fmt: skip
OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "an index alone": lambda x, k: x[k[:, 0] % x.shape[0]],
    "some rows": lambda x, k: x[torch.arange(2), k[:2, 0]],
    "shifted": lambda x, k: x[torch.arange(1, x.shape[0]), k[1:, 0]],
    "every second": lambda x, k: x[torch.arange(0, x.shape[0], 2), k[::2, 0]],
    "two of many": lambda x, k: x[k[:, 0] % x.shape[0], k[:, 1]],
    "rows twice": lambda x, k: x[_rows(x)[:, None], k[:1].expand(x.shape[0], -1)],
    "square": lambda x, k: x[:V, :V][torch.arange(V), torch.arange(V)],
    "transposed": lambda x, k: x[:, :V][_rows(x), k[:, :1]],
    "writes twice": lambda x, k: x.index_put((_rows(x)[:, None], k * 0), x[:, :1]),
}  # fmt: skip


def _arguments(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, V, dtype=torch.float64, generator=generator)
    return x, torch.randint(V, (n, 2), generator=generator)


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
@pytest.mark.parametrize(
    "specs", [(P("a"), P("a")), (P(None, "a"), P()), (P("b", "a"), P("a"))], ids=str
)
def test_equals_one_device(name, specs):
    fn = {**FORMS, **OTHERS}[name]
    args = _arguments(7)
    step = ftp.spmd(fn, ftp.simulated_mesh((3, 2), ("a", "b")), specs)
    torch.testing.assert_close(step(*args), fn(*args), rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMS)
def test_cut_rows_are_not_sent(name):
    lowered = ftp.spmd(FORMS[name], ftp.AbstractMesh((3,), ("a",)), (P("a"), P("a"))).lower(
        *_arguments(9)
    )
    assert sum(c.nbytes for c in lowered.collectives) == 0


@pytest.mark.parametrize("name", ["one", "many", "put parts", "gradient"])
def test_many_sizes_have_one_trace(name):
    step = ftp.spmd(FORMS[name], ftp.simulated_mesh((2,), ("a",)), (P("a"), P("a")))
    for n in (5, 6, 7, 9):
        args = _arguments(n)
        torch.testing.assert_close(step(*args), FORMS[name](*args), rtol=0, atol=0)
    assert step.shapes.traces == 1


@pytest.mark.parametrize("wrong", [V, -V - 1])
def test_an_index_out_of_range_is_an_error(wrong):
    x, k = _arguments(4)
    k[2, 0] = wrong
    mesh = ftp.simulated_mesh((2,), ("a",))
    step = ftp.spmd(FORMS["one"], mesh, (P(None, "a"), P()), check_inputs=True)
    with pytest.raises(ftp.errors.InputError, match=rf"holds {wrong}, which is not in \[-5, 5\)"):
        step(x, k)


def test_an_index_alone_is_no_gather():
    fn = OTHERS["an index alone"]
    lowered = ftp.spmd(fn, ftp.AbstractMesh((2,), ("a",)), (P(None, "a"), P())).lower(
        *_arguments(6)
    )
    targets = {node.target for node in lowered.graph.graph.nodes}
    assert torch.ops.aten.index.Tensor in targets and torch.ops.aten.gather.default not in targets


@pytest.mark.parametrize("shape", [(5,), (3, V), (1, 2, V)])
@pytest.mark.parametrize("key", [(slice(None), [0, 1]), ([0, 1],), ([0, 1, 2, 3], [0, 1, 1, 0])])
def test_values_that_do_not_broadcast_are_refused(key, shape):
    indices = [None if isinstance(i, slice) else torch.tensor(i) for i in key]

    def put(x, values):
        return torch.ops.aten.index_put(x, indices, values)

    x, values = torch.zeros(4, V), torch.zeros(shape)
    step = ftp.spmd(put, ftp.simulated_mesh((2,), ("a",)), (P("a"), P()))
    try:
        expected = put(x, values)
    except (RuntimeError, IndexError):
        with pytest.raises(ftp.errors.TraceError, match="they do not broadcast"):
            step(x, values)
    else:
        torch.testing.assert_close(step(x, values), expected)
