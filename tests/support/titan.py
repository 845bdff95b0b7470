"""A Llama with torchtitan's module names, and torchtitan's tensor-parallel plan for it as
torchtitan states it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    vocab: int = 64
    dim: int = 16
    layers: int = 2
    heads: int = 4
    hidden: int = 24


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """``heads`` is what the views are written with: the model's, or a rank's share of it in an
    edited model.
    """

    def __init__(self, cfg: Config):
        super().__init__()
        self.heads, self.head_dim = cfg.heads, cfg.dim // cfg.heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(cfg.dim, cfg.dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            w(x).view(batch, seq, self.heads, self.head_dim) for w in (self.wq, self.wk, self.wv)
        )
        q, k, v = (t.transpose(1, 2) for t in (rotated(q, angles), rotated(k, angles), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))


def rotated(x_bshd: Tensor, angles: Tensor) -> Tensor:
    a, b = x_bshd.chunk(2, dim=-1)
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.w1 = nn.Linear(cfg.dim, cfg.hidden, bias=False)
        self.w2 = nn.Linear(cfg.hidden, cfg.dim, bias=False)
        self.w3 = nn.Linear(cfg.dim, cfg.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.attention, self.feed_forward = Attention(cfg), FeedForward(cfg)
        self.attention_norm, self.ffn_norm = RMSNorm(cfg.dim), RMSNorm(cfg.dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """tokens (batch, seq) -> logits (batch, seq, vocab)."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.head_dim = cfg.dim // cfg.heads
        self.tok_embeddings = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleDict({str(i): Block(cfg) for i in range(cfg.layers)})
        self.norm = RMSNorm(cfg.dim)
        self.output = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        steps = torch.arange(0, self.head_dim, 2, dtype=x.dtype) / self.head_dim
        angles = torch.arange(tokens.shape[1], dtype=x.dtype)[:, None] * 10000.0**-steps
        for layer in self.layers.values():
            x = layer(x, angles)
        return self.output(self.norm(x))


def root_plan(sequence: bool, loss: bool) -> dict[str, Any]:
    """What torchtitan's ``apply_tp`` gives ``parallelize_module`` for the model itself."""
    layout = Shard(1) if sequence else Replicate()
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        **({"norm": SequenceParallel()} if sequence else {}),
        "output": ColwiseParallel(
            input_layouts=layout,
            output_layouts=Shard(-1) if loss else Replicate(),
            use_local_output=not loss,
        ),
    }


def layer_plan(sequence: bool) -> dict[str, Any]:
    """What it gives for each block."""
    layout = Shard(1) if sequence else Replicate()
    return {
        **({"attention_norm": SequenceParallel()} if sequence else {}),
        "attention": PrepareModuleInput(
            input_layouts=(layout, None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=layout),
        **({"ffn_norm": SequenceParallel()} if sequence else {}),
        "feed_forward": PrepareModuleInput(
            input_layouts=(layout,), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=layout),
        "feed_forward.w3": ColwiseParallel(),
    }


def plan(sequence: bool, loss: bool) -> dict[str, Any]:
    """Both calls as one plan."""
    return root_plan(sequence, loss) | {
        f"layers.*.{path}": style for path, style in layer_plan(sequence).items()
    }


def loss(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cross_entropy(params: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(fn(params, tokens).flatten(0, 1), targets.flatten())

    return cross_entropy


def batch(cfg: Config, batch: int = 2, seq: int = 8) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(cfg.vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
