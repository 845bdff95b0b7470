"""Plans from the attributes that Megatron's layers leave on parameters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P, units


def mark(parameter, dim, stride=1):
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = (
        dim >= 0,
        dim,
        stride,
    )
    return parameter


class Attention(nn.Module):
    """Megatron's: of each group of heads its queries, then its key, then its value, side by side
    in one layer.
    """

    def __init__(self, heads, groups, dim, size):
        super().__init__()
        self.heads, self.groups, self.dim = heads, groups, dim
        self.linear_qkv, self.linear_proj = (
            nn.Linear(size, (heads + 2 * groups) * dim),
            nn.Linear(heads * dim, size),
        )
        (
            mark(self.linear_qkv.weight, 0),
            mark(self.linear_qkv.bias, 0),
            mark(self.linear_proj.weight, 1),
        )

    def forward(self, x):
        b, t, _ = x.shape
        each = self.heads // self.groups
        q, k, v = (
            self.linear_qkv(x).view(b, t, self.groups, each + 2, self.dim).split([each, 1, 1], 3)
        )
        k, v = k.expand_as(q), v.expand_as(q)
        q, k, v = (y.reshape(b, t, self.heads, self.dim).transpose(1, 2) for y in (q, k, v))
        return self.linear_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    """Gate and up in one layer: a stride of two."""

    def __init__(self, size, hidden):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(size, 2 * hidden), nn.Linear(hidden, size)
        (
            mark(self.linear_fc1.weight, 0, 2),
            mark(self.linear_fc1.bias, 0, 2),
            mark(self.linear_fc2.weight, 1),
        )

    def forward(self, x):
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


class GPT(nn.Module):
    def __init__(self, heads=4, groups=2, dim=2, size=8, hidden=6, vocab=11):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads, num_query_groups=groups)
        self.embedding, self.self_attention, self.mlp = (
            nn.Embedding(vocab, size),
            Attention(heads, groups, dim, size),
            MLP(size, hidden),
        )
        self.norm, self.output_layer = nn.LayerNorm(size), nn.Linear(size, vocab, bias=False)
        mark(self.embedding.weight, 0), mark(self.output_layer.weight, 0)
        mark(self.norm.weight, -1)

    def forward(self, x):
        y = self.embedding(x)
        y = y + self.self_attention(self.norm(y))
        return self.output_layer(y + self.mlp(y))


def test_specs():
    specs, constraints = ftp.from_megatron(GPT())
    fused = units("tp", 8)
    assert constraints == {} and {path: spec for path, spec in specs.items() if spec} == {
        "embedding.weight": P("tp"),
        "self_attention.linear_qkv.weight": P(fused),
        "self_attention.linear_qkv.bias": P(fused),
        "self_attention.linear_proj.weight": P(None, units("tp", 2)),
        "mlp.linear_fc1.weight": P(units("tp", pack=2)),
        "mlp.linear_fc1.bias": P(units("tp", pack=2)),
        "mlp.linear_fc2.weight": P(None, "tp"),
        "output_layer.weight": P("tp"),
    }
    assert "partition_dim=0, partition_stride=2" in str(specs)


@pytest.mark.parametrize(
    ("shape", "axes"), [((2,), ("tp",)), ((3,), ("tp",)), ((2, 2), ("dp", "tp"))]
)
def test_equal_to_one_device(shape, axes):
    torch.manual_seed(0)
    model = GPT().double()
    specs, _ = ftp.from_megatron(model)
    fn, params = ftp.functionalize(model)
    x, y = torch.randint(11, (4, 5)), torch.randint(11, (4, 5))

    def loss(params, x, y):
        return F.cross_entropy(fn(params, x).flatten(0, 1), y.flatten())

    expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    found = torch.autograd.grad(expected, list(model.parameters()))
    step = ftp.shard(
        loss, ftp.simulated_mesh(shape, axes), specs, batch_specs=P("dp") if "dp" in axes else P()
    )
    value, grads = step(params, x, y)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    for (name, _), grad in zip(model.named_parameters(), found, strict=True):
        torch.testing.assert_close(grads[name], grad, rtol=1e-10, atol=1e-12)
    if shape == (2,):
        # Two groups of heads on two ranks: activations are summed, nothing is gathered.
        assert {c.op for c in step.lower(params, x, y).collectives} <= {
            "all_reduce",
            "reduce_scatter",
        }


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (
            {"tensor_model_parallel": True},
            "has tensor_model_parallel=True, but no partition_dim, the dim that is cut.",
        ),
        ({"partition_dim": 0}, "tensor_model_parallel must say True or False."),
        (
            {"tensor_model_parallel": False, "partition_dim": 1},
            "a dim to cut, but not tensor parallel.",
        ),
        (
            {"tensor_model_parallel": True, "partition_dim": 2},
            "there is no dim 2. Set one of 0 to 1.",
        ),
        (
            {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 0},
            "partition_stride must be a positive int.",
        ),
        (
            {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 3},
            "dim 1 is not 3 packs of one size.",
        ),
    ],
)
def test_attributes_that_say_nothing_or_contradict(attributes, text):
    model = nn.ModuleDict({"a": nn.Linear(4, 6, bias=False), "b": nn.Linear(4, 6, bias=False)})
    for module in model.values():
        for name, value in attributes.items():
            setattr(module.weight, name, value)
    with pytest.raises(ftp.FtpError) as caught:
        ftp.from_megatron(model)
    assert all(
        f"parameter '{name}.weight' of shape (6, 4) has {next(iter(attributes))}="
        in str(caught.value)
        for name in "ab"
    )
    assert text in str(caught.value)


def test_no_layers_of_megatron():
    with pytest.raises(
        ftp.FtpError, match="no parameter of Linear has any of tensor_model_parallel"
    ):
        ftp.from_megatron(nn.Linear(2, 2))
