"""Small models in plain torch, with the specs that the tests and benchmarks cut them by.

Each model comes with a config (tiny by default), its ``CUTS`` (see `specs`), and a loss builder.
Nothing here imports the engine: a spec is a value, and constraints are the dict that
``ftp.functionalize(model, constraints=...)`` takes.

    cfg = LlamaConfig(layers=2) fn, params = ftp.functionalize(build(cfg)) step =
    ftp.shard(lm_loss(fn), mesh, ftp.plan(params, specs(cuts(cfg), tp="tp", zero="dp")),
    batch_specs=P("dp")) loss, grads = step(params, lm_batch(cfg))
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftp.sharding.spec import P

Cuts = Mapping[str, tuple[int, int | None]]
"""Path pattern -> (dims of the parameter, the dim that Megatron cuts or None)."""


@dataclass(frozen=True)
class LlamaConfig:
    vocab: int = 32
    dim: int = 16
    layers: int = 2
    heads: int = 4
    kv_heads: int | None = None
    hidden: int = 24

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotary(x_bhsd: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate the two halves of each head by angles that grow with the position."""
    seq, dim = x_bhsd.shape[-2:]
    positions = torch.arange(seq, device=x_bhsd.device, dtype=x_bhsd.dtype)
    frequencies = base ** -(torch.arange(0, dim, 2, device=x_bhsd.device, dtype=x_bhsd.dtype) / dim)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x_bhsd.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LlamaAttention(nn.Module):
    def __init__(self, cfg: LlamaConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            cfg.heads,
            cfg.kv_heads or cfg.heads,
            cfg.head_dim,
        )
        self.wq = nn.Linear(cfg.dim, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(cfg.dim, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = rotary(self._split(self.wq(x)))
        k, v = rotary(self._split(self.wk(x))), self._split(self.wv(x))
        if self.kv_heads != self.heads:
            k, v = self._repeat(k), self._repeat(v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _repeat(self, x_bhsd: Tensor) -> Tensor:
        return x_bhsd.unsqueeze(2).expand(-1, -1, self.heads // self.kv_heads, -1, -1).flatten(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, cfg: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(cfg.dim, cfg.hidden, bias=False)
        self.w2 = nn.Linear(cfg.hidden, cfg.dim, bias=False)
        self.w3 = nn.Linear(cfg.dim, cfg.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, cfg: LlamaConfig):
        super().__init__()
        self.norm1, self.attn = RMSNorm(cfg.dim), LlamaAttention(cfg)
        self.norm2, self.mlp = RMSNorm(cfg.dim), SwiGLU(cfg)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """tokens (batch, seq) -> logits (batch, seq, vocab)."""

    def __init__(self, cfg: LlamaConfig):
        super().__init__()
        self.emb = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleList(LlamaBlock(cfg) for _ in range(cfg.layers))
        self.norm = RMSNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


LLAMA_CUTS: Cuts = {
    "emb.weight": (2, 0),
    "layers.*.norm[12].weight": (1, None),
    "layers.*.attn.w[qkv].weight": (2, 0),
    "layers.*.attn.wo.weight": (2, 1),
    "layers.*.mlp.w[13].weight": (2, 0),
    "layers.*.mlp.w2.weight": (2, 1),
    "norm.weight": (1, None),
    "head.weight": (2, 0),
}


@dataclass(frozen=True)
class GPT2Config:
    """``qkv``: three layers; one of (3, heads, head_dim) as GPT-2's; one of (heads, 3,
    head_dim), which tp cuts in whole heads.
    """

    vocab: int = 32
    dim: int = 16
    layers: int = 2
    heads: int = 4
    context: int = 16
    qkv: Literal["separate", "fused", "interleaved"] = "separate"
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class GPT2Attention(nn.Module):
    def __init__(self, cfg: GPT2Config):
        super().__init__()
        self.layout, self.head_dim, self.heads = cfg.qkv, cfg.head_dim, cfg.heads
        if cfg.qkv == "separate":
            self.wq, self.wk, self.wv = (nn.Linear(cfg.dim, cfg.dim) for _ in range(3))
        else:
            self.wqkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.wo = nn.Linear(cfg.dim, cfg.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self._qkv(x))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.layout == "separate":
            return tuple(
                w(x).unflatten(-1, (self.heads, self.head_dim)) for w in (self.wq, self.wk, self.wv)
            )
        if self.layout == "fused":
            return self.wqkv(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
        return self.wqkv(x).unflatten(-1, (self.heads, 3, self.head_dim)).unbind(-2)


class GPT2MLP(nn.Module):
    def __init__(self, cfg: GPT2Config):
        super().__init__()
        self.w1 = nn.Linear(cfg.dim, 4 * cfg.dim)
        self.w2 = nn.Linear(4 * cfg.dim, cfg.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class GPT2Block(nn.Module):
    def __init__(self, cfg: GPT2Config):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(cfg.dim), GPT2Attention(cfg)
        self.norm2, self.mlp = nn.LayerNorm(cfg.dim), GPT2MLP(cfg)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """tokens (batch, seq) -> logits (batch, seq, vocab)."""

    def __init__(self, cfg: GPT2Config):
        super().__init__()
        self.emb = nn.Embedding(cfg.vocab, cfg.dim)
        self.pos = nn.Embedding(cfg.context, cfg.dim)
        self.layers = nn.ModuleList(GPT2Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        if cfg.tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gpt2_cuts(cfg: GPT2Config) -> Cuts:
    """A tied head answers to ``emb.weight`` alone."""
    qkv = "layers.*.attn.w[qkv]" if cfg.qkv == "separate" else "layers.*.attn.wqkv"
    return {
        "emb.weight": (2, 0),
        "pos.weight": (2, None),
        "layers.*.norm[12].*": (1, None),
        f"{qkv}.weight": (2, 0),
        f"{qkv}.bias": (1, 0),
        "layers.*.attn.wo.weight": (2, 1),
        "layers.*.attn.wo.bias": (1, None),
        "layers.*.mlp.w1.weight": (2, 0),
        "layers.*.mlp.w1.bias": (1, 0),
        "layers.*.mlp.w2.weight": (2, 1),
        "layers.*.mlp.w2.bias": (1, None),
        "norm.*": (1, None),
        **({} if cfg.tied else {"head.weight": (2, 0)}),
    }


@dataclass(frozen=True)
class CNNConfig:
    in_channels: int = 3
    channels: int = 8
    blocks: int = 2
    classes: int = 6
    size: int = 8


class ResidualBlock(nn.Module):
    """Two convolutions and a learned scale in place of a norm."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.conv2 = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.conv2(F.relu(self.conv1(F.relu(x))))


class CNN(nn.Module):
    """images (batch, channels, height, width) -> logits (batch, classes)."""

    def __init__(self, cfg: CNNConfig):
        super().__init__()
        self.stem = nn.Conv2d(cfg.in_channels, cfg.channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(cfg.channels) for _ in range(cfg.blocks))
        self.head = nn.Linear(cfg.channels, cfg.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(x).mean((2, 3)))


CNN_CUTS: Cuts = {
    "stem.weight": (4, None),
    "stem.bias": (1, None),
    "blocks.*.conv1.weight": (4, 0),
    "blocks.*.conv1.bias": (1, 0),
    "blocks.*.conv2.weight": (4, 1),
    "blocks.*.conv2.bias": (1, None),
    "blocks.*.scale": (3, None),
    "head.weight": (2, 0),
    "head.bias": (1, 0),
}


@dataclass(frozen=True)
class MLPConfig:
    dim: int = 8
    hidden: int = 16
    layers: int = 2
    classes: int = 6


class MLPBlock(nn.Module):
    def __init__(self, cfg: MLPConfig):
        super().__init__()
        self.up = nn.Linear(cfg.dim, cfg.hidden)
        self.down = nn.Linear(cfg.hidden, cfg.dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class MLP(nn.Module):
    """features (batch, dim) -> logits (batch, classes)."""

    def __init__(self, cfg: MLPConfig):
        super().__init__()
        self.layers = nn.ModuleList(MLPBlock(cfg) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MLP_CUTS: Cuts = {
    "layers.*.up.weight": (2, 0),
    "layers.*.up.bias": (1, 0),
    "layers.*.down.weight": (2, 1),
    "layers.*.down.bias": (1, None),
    "head.weight": (2, 0),
    "head.bias": (1, 0),
}

Config = LlamaConfig | GPT2Config | CNNConfig | MLPConfig


def build(
    cfg: Config, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> nn.Module:
    """The config's model; on ``meta`` nothing is allocated. Leaves torch's global generator as
    it was.
    """
    kinds: dict[type, Callable[..., nn.Module]] = {
        LlamaConfig: Llama,
        GPT2Config: GPT2,
        CNNConfig: CNN,
        MLPConfig: MLP,
    }
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return kinds[type(cfg)](cfg).to(dtype)


def cuts(cfg: Config) -> Cuts:
    if isinstance(cfg, GPT2Config):
        return gpt2_cuts(cfg)
    return {LlamaConfig: LLAMA_CUTS, CNNConfig: CNN_CUTS, MLPConfig: MLP_CUTS}[type(cfg)]


def specs(
    cuts: Cuts,
    *,
    tp: str | None = None,
    zero: str | None = None,
    order: Literal["free", "tp zero", "zero tp"] = "free",
) -> dict[str, P]:
    """Patterns for ``ftp.plan``: Megatron on axis ``tp``, ZeRO-3 on axis ``zero``, both, or
    neither.

    Where both cut one weight, ``order`` says how: ZeRO on a dim that tp leaves free, or on tp's dim
    with tp or zero as the major axis. Alone, and for what tp leaves whole, ZeRO cuts dim 0.

    >>> specs({"w": (2, 1)}, tp="tp", zero="dp")
    {'w': P('dp', 'tp')}
    >>> specs({"w": (2, 1)}, tp="tp", zero="dp", order="tp zero")
    {'w': P(None, ('tp', 'dp'))}
    """
    return {pattern: _spec(ndim, dim, tp, zero, order) for pattern, (ndim, dim) in cuts.items()}


def _spec(ndim: int, dim: int | None, tp: str | None, zero: str | None, order: str) -> P:
    entries: list[str | tuple[str, ...] | None] = [None] * ndim
    if tp is None or dim is None:
        entries[0] = zero
        return P(*entries)
    entries[dim] = tp
    free = next((d for d in range(ndim) if d != dim), None)
    if zero is None:
        return P(*entries)
    if order == "free" and free is not None:
        entries[free] = zero
    else:
        entries[dim] = (zero, tp) if order == "zero tp" else (tp, zero)
    return P(*entries)


def sequence_parallel(*, tp: str = "tp", dp: str | None = None) -> dict[str, P]:
    """``functionalize``'s constraints for a decoder: each block's output (batch, seq, dim) is
    cut on its tokens.
    """
    return {"layers.*": P(dp, tp, None)}


def lm_loss(fn: Callable[..., Tensor], **options) -> Callable[..., Tensor]:
    """``loss_fn(params, (tokens, targets))``; options are ``F.cross_entropy``'s: ignore_index,
    label_smoothing, weight, reduction.
    """

    def loss_fn(params, batch):
        tokens, targets = batch
        return F.cross_entropy(fn(params, tokens).flatten(0, 1), targets.flatten(), **options)

    return loss_fn


def class_loss(fn: Callable[..., Tensor], **options) -> Callable[..., Tensor]:
    """``loss_fn(params, (inputs, labels))``, one label per row, for the CNN and the MLP."""

    def loss_fn(params, batch):
        inputs, labels = batch
        return F.cross_entropy(fn(params, inputs), labels, **options)

    return loss_fn


def loss(cfg: Config, fn: Callable[..., Tensor], **options) -> Callable[..., Tensor]:
    return (lm_loss if isinstance(cfg, LlamaConfig | GPT2Config) else class_loss)(fn, **options)


def lm_batch(
    cfg: LlamaConfig | GPT2Config,
    batch: int = 4,
    seq: int = 8,
    *,
    seed: int = 0,
    ignored: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Random (tokens, targets), each (batch, seq); about the fraction ``ignored`` of the targets
    is -100.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (
        torch.randint(cfg.vocab, (batch, seq), generator=generator) for _ in range(2)
    )
    mask = torch.rand(batch, seq, generator=generator) < ignored
    return tokens, targets.masked_fill(mask, -100)


def class_batch(
    cfg: CNNConfig | MLPConfig, batch: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Random (inputs, labels)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (cfg.in_channels, cfg.size, cfg.size) if isinstance(cfg, CNNConfig) else (cfg.dim,)
    inputs = torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(cfg.classes, (batch,), generator=generator)


def reference(loss_fn: Callable[..., Tensor], params, *batch) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, grads) of plain torch on one device."""
    grads, value = torch.func.grad_and_value(loss_fn)(params, *batch)
    return value, grads
