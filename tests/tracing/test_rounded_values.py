"""``round(x.item(), n)`` of a value gives the number that Python's ``round`` gives."""

import random

import pytest
import torch

import ftp
from ftp import P
from ftp.errors import InputError
from ftp.tracing.data_dependent.traced_number import _rounded

D = torch.float64


def floats(digits: int) -> list[float]:
    """Numbers of all magnitudes, and those around ties."""
    draws = random.Random(0)
    spread = [draws.uniform(-10, 10) * 10 ** draws.randint(-6, 9) for _ in range(2000)]
    ties = [(k + 0.5) / 10**digits for k in range(-300, 300)]
    few = (2.675, 1.005, 1e300, 0.0, -0.0, 5e-324, -5e-324)
    return [*spread, *ties, *(k / 8 for k in range(-80, 80)), *few]


@pytest.mark.parametrize("digits", range(9))
def test_it_is_pythons(digits):
    every = floats(digits)
    found = _rounded(torch.tensor(every, dtype=D), digits).tolist()
    assert list(map(str, found)) == [str(round(x, digits)) for x in every]  # also the sign of zero


def test_a_program_rounds():
    def fn(x):
        return torch.stack([torch.as_tensor(round(v.item(), 2), dtype=D) for v in x.unbind()])

    x = torch.tensor([2.675, 1.005, -0.125], dtype=D)
    assert torch.equal(ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), P("dp"))(x), fn(x))


def test_without_digits_and_of_ints():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 7.3], dtype=D)
    fn = lambda x: [(round(v.item()), round(v.long().item(), 2)) for v in x.unbind()]  # noqa: E731
    found = ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), P("dp"))(x)
    assert [tuple(map(int, pair)) for pair in found] == fn(x)


def test_what_no_integer_can_be_is_an_assumption():
    fn = lambda x: round(x.item())  # noqa: E731
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), P(), check_inputs=True)
    assert int(step(torch.tensor(2.5, dtype=D))) == 2
    for x in (float("nan"), float("inf"), -1e19):
        with pytest.raises(InputError, match=r"round\(\) gets a number of less than 64 bits"):
            step(torch.tensor(x, dtype=D))


def test_a_loss_prints_it(capsys: pytest.CaptureFixture[str]):
    def loss(w, x):
        value = (x @ w).square().mean()
        print("loss", round(value.item(), 4))
        return value

    w, x = torch.randn(4, 3, dtype=D), torch.randn(6, 4, dtype=D)
    value, _ = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), batch_specs=P("dp"))(w, x)
    assert "loss a value of the program" in capsys.readouterr().out
    torch.testing.assert_close(value, (x @ w).square().mean())
