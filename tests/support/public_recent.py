"""Programs of recent years, as their authors' code writes them: attention, decoding, depth,
forecasting. Short programs, each of which can be read alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from public_programs import Program, of_model
from public_signals import indices
from real_models import randn
from torch import Tensor, nn
from torch.nn import functional as F

from ftp import P


def drawn(shapes: dict[str, tuple[int, ...]], scale: float = 1.0) -> dict[str, Tensor]:
    """A parameter of each shape."""
    return {name: scale * randn(*s, seed=i + 1) for i, (name, s) in enumerate(shapes.items())}


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def absorbed_latents() -> Program:
    """DeepSeek's MLA as its inference code writes it: complex rotary, absorbed weights."""
    rank, nope, rope = 5, 4, 2

    def turned(x: Tensor, angles: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angles.view(1, x.shape[1], 1, -1)).flatten(3)

    def loss(params: Any, x: Tensor, angles: Tensor) -> Tensor:
        q = (x @ params["q"]).unflatten(-1, (2, nope + rope))
        q_nope, q_rope = torch.split(q, [nope, rope], dim=-1)
        latent, k_rope = torch.split(x @ params["kv_a"], [rank, rope], dim=-1)
        q_rope, k_rope = turned(q_rope, angles), turned(k_rope.unsqueeze(2), angles).squeeze(2)
        up = params["kv_b"].view(2, -1, rank)
        latent = normed(latent)
        q_nope = torch.einsum("bshd,hdc->bshc", q_nope, up[:, :nope])
        scores = torch.einsum("bshc,btc->bsht", q_nope, latent)
        scores = (scores + torch.einsum("bshr,btr->bsht", q_rope, k_rope)) * (nope + rope) ** -0.5
        steps = x.shape[1]
        scores += torch.full((steps, steps), float("-inf"), device=x.device).triu_(1).unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float64).type_as(x)
        found = torch.einsum("bsht,btc->bshc", scores, latent)
        return (torch.einsum("bshc,hdc->bshd", found, up[:, nope:]).flatten(2) @ params["o"]).std()

    angles = torch.outer(torch.arange(5), torch.ones(1)).double()
    params = drawn({"q": (8, 12), "kv_a": (8, 7), "kv_b": (14, 5), "o": (6, 8)})
    batch = (randn(4, 5, 8), torch.polar(torch.ones_like(angles), angles))
    return Program(loss, params, batch, batch_specs=(P("dp"), P()))


def native_sparse_attention() -> Program:
    """NSA: compressed blocks, the blocks of the largest scores, a window, and gates."""

    def loss(params: Any, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        heads = (batch, steps, 2, 4)
        q, k, v = ((x @ params[n]).view(heads).transpose(1, 2) for n in "qkv")
        blocks, at = torch.arange(steps // 2), torch.arange(steps)
        k_blocks = k.reshape(batch, 2, -1, 8) @ params["k_block"]
        v_blocks = v.reshape(batch, 2, -1, 8) @ params["v_block"]
        is_past = at[:, None] >= blocks * 2 + 1
        scores = q @ k_blocks.transpose(-1, -2) / 2
        scores = scores.masked_fill(~is_past, -torch.finfo(scores.dtype).max)
        weights = scores.softmax(-1) * is_past.any(-1, keepdim=True)
        worth = weights.sum(1).masked_fill(at[:, None] // 2 == blocks, 10.0)
        chosen = worth.topk(2, dim=-1).indices
        seen = torch.zeros(batch, steps, len(blocks), dtype=torch.bool).scatter(-1, chosen, True)
        causal = at[:, None] >= at
        seen = seen.repeat_interleave(2, dim=-1) & causal
        window = causal & (at[:, None] - at < 3)
        parts = [weights @ v_blocks]
        parts += [F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])]
        parts += [F.scaled_dot_product_attention(q, k, v, attn_mask=window)]
        gates = (x @ params["gate"]).sigmoid().view(batch, steps, 2, 3).permute(3, 0, 2, 1)
        mixed = (gates[..., None] * torch.stack(parts)).sum(0)
        return (mixed.transpose(1, 2).reshape(batch, steps, 8) @ params["o"]).square().mean()

    shapes: dict[str, tuple[int, ...]] = {"q": (6, 8), "k": (6, 8), "v": (6, 8), "o": (8, 6)}
    shapes |= {"k_block": (8, 4), "v_block": (8, 4), "gate": (6, 6)}
    return Program(loss, drawn(shapes), (randn(4, 8, 6),))


class Medusa(nn.Module):
    """Heads on a frozen model in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh())
        self.base.requires_grad_(False)
        heads = [nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 11)) for _ in range(3)]
        self.heads = nn.ModuleList(heads)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden = self.base(ids)
        return torch.stack([head(hidden.clone()) for head in self.heads], dim=0)


def medusa_heads() -> Program:
    def loss(call: Any, ids: Tensor, labels: Tensor) -> Tensor:
        logits, total = call(ids), torch.zeros(())
        for i in range(len(logits)):
            of_head = logits[i, :, : -(2 + i)].contiguous().view(-1, logits.shape[-1])
            due = labels[..., 2 + i :].contiguous().view(-1)
            total = total + 0.8**i * F.cross_entropy(of_head, due, ignore_index=-100)
        return total

    labels = indices(11, 4, 7)
    labels[1, :4] = -100
    return of_model(Medusa(), loss, indices(11, 4, 7), labels)


def monocular_depth() -> Program:
    """Depth: a scale-invariant loss of valid pixels, and MiDaS' alignment of each image."""

    def loss(params: Any, image: Tensor, due: Tensor) -> Tensor:
        h = F.relu(F.conv2d(image, params["in"], padding=1))
        depth = F.softplus(F.conv2d(h, params["o"], padding=1)) + 1e-3
        mask = (due > 0.2).detach()
        off = torch.log(due[mask]) - torch.log(depth[mask])
        invariant = torch.sqrt((off**2).mean() - 0.85 * (off.mean() ** 2)) * 10
        m = mask.double()
        squares, sums, count = ((m * t).sum((1, 2, 3)) for t in (depth * depth, depth, m))
        first, last = (m * depth * due).sum((1, 2, 3)), (m * due).sum((1, 2, 3))
        det = squares * count - sums * sums
        scale, shift = torch.zeros_like(first), torch.zeros_like(first)
        valid = det.nonzero()
        scale[valid] = (count[valid] * first[valid] - sums[valid] * last[valid]) / det[valid]
        shift[valid] = (squares[valid] * last[valid] - sums[valid] * first[valid]) / det[valid]
        aligned = scale.view(-1, 1, 1, 1) * depth + shift.view(-1, 1, 1, 1)
        edges = image.diff(dim=3).abs().mean(1, keepdim=True).neg().exp()
        return (
            invariant
            + (m * (aligned - due) ** 2).sum() / (2 * m.sum())
            + (depth.diff(dim=3).abs() * edges).mean()
        )

    params = drawn({"in": (4, 3, 3, 3), "o": (1, 4, 3, 3)})
    return Program(loss, params, (randn(4, 3, 5, 5), randn(4, 1, 5, 5).abs()))


def auto_correlation() -> Program:
    """Autoformer: lags of the largest auto-correlation, a moving average, and quantiles."""

    def loss(params: Any, x: Tensor, due: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).detach()
        x = (x - mean) * params["scale"]
        ends = torch.cat([x[:, :1], x, x[:, -1:]], 1).permute(0, 2, 1)
        trend = F.avg_pool1d(ends, 3, 1).permute(0, 2, 1)
        q, k, v = ((x - trend) @ params[n] for n in "qkv")
        length = x.shape[1]
        q, k = (torch.fft.rfft(t.transpose(1, 2).contiguous(), dim=-1) for t in (q, k))
        related = torch.fft.irfft(q * torch.conj(k), n=length, dim=-1).mean(1)
        lags = torch.topk(related.mean(0), 3, dim=-1)[1]
        weights = torch.softmax(torch.stack([related[:, lags[i]] for i in range(3)], -1), -1)
        values = v.transpose(1, 2)
        out = torch.zeros_like(values)
        for i in range(3):
            at = (torch.arange(length) + lags[i]) % length
            out = out + values[..., at] * weights[:, i].view(-1, 1, 1)
        h = out.transpose(1, 2) @ params["o"] + trend
        patches = F.pad(h.permute(0, 2, 1), (0, 2), mode="replicate").unfold(-1, 4, 2)
        found = (F.gelu(patches @ params["patch"]).flatten(-2) @ params["head"]).view(-1, 3, 2, 3)
        error = due.unsqueeze(-1) - found.permute(0, 2, 1, 3) - mean[..., None]
        quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=x.dtype)
        return torch.max((quantiles - 1) * error, quantiles * error).sum(-1).mean()

    shapes: dict[str, tuple[int, ...]] = {"scale": (3,), "o": (4, 3), "patch": (4, 5)}
    shapes |= dict.fromkeys("qkv", (3, 4)) | {"head": (20, 6)}
    return Program(loss, drawn(shapes), (randn(4, 8, 3), randn(4, 2, 3)))


RECENT: dict[str, Callable[[], Program]] = {
    "MLA, absorbed": absorbed_latents,
    "native sparse attention": native_sparse_attention,
    "Medusa": medusa_heads,
    "monocular depth": monocular_depth,
    "Autoformer": auto_correlation,
}
