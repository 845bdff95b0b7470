"""Attributes and variables whose classes are containers without a length."""

import torch
from torch import Tensor, nn

import ftp
from ftp import P


class Pair(tuple):
    """As representations of groups are: a tuple whose length has no meaning."""

    def __new__(cls, degree: int, parity: int) -> "Pair":
        return super().__new__(cls, (degree, parity))

    def __len__(self) -> int:
        raise NotImplementedError


OF_ALL = Pair(2, 1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pair, self.pairs = nn.Linear(4, 4).double(), Pair(3, -1), [Pair(5, 1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.pair[0] * self.pairs[0][0]


def test_containers_without_a_length():
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(3, 4).double()
    fn, params = ftp.functionalize(model)
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(lambda p, x: (fn(p, x) * OF_ALL[0]).sin().sum(), mesh, P("tp"))
    expected = (model(x) * 2).sin().sum()
    expected.backward()
    value, grads = step(params, x)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grads["linear.weight"], model.linear.weight.grad)
