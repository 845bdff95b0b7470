"""Programs with structure that layers alone do not have: memories, filters, solvers, routing,
quantization, search, rendering.

One long file of short programs, each of which can be read alone.
"""

# Modules hold tensors of all kinds as attributes, of which no type is known.
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import math
from collections.abc import Callable
from typing import Any

import torch
from public_programs import Program, of_model
from real_models import randn, tokens
from torch import Tensor, nn
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ftp import P


def perceiver() -> Program:
    """Latents read an array with Fourier features of its positions, again and again."""

    class Perceiver(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents = nn.Parameter(torch.randn(5, 12))
            self.read, self.own = (
                nn.MultiheadAttention(12, 3, kdim=k, vdim=k, batch_first=True) for k in (9, 12)
            )
            self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 4)
            self.query = nn.Parameter(torch.randn(3, 12))

        def forward(self, x: Tensor) -> Tensor:
            at = torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[:, None]
            bands = at * math.pi * torch.tensor([1.0, 2.0, 4.0], dtype=x.dtype)
            place = torch.cat([bands.sin(), bands.cos()], -1).expand(x.shape[0], -1, -1)
            array = torch.cat([x, place], -1)
            z = self.latents.expand(x.shape[0], -1, -1)
            for _ in range(2):  # one set of weights, as the paper has it
                z = z + self.read(self.norm(z), array, array, need_weights=False)[0]
                z = z + self.own(self.norm(z), z, z, need_weights=False)[0]
            query = self.query.expand(x.shape[0], -1, -1)
            return self.head(self.own(query, z, z, need_weights=False)[0])

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(x).flatten(0, 1), y.flatten())

    return of_model(Perceiver(), loss, randn(4, 7, 3), tokens(4, 4, 3))


def capsules() -> Program:
    """Routing by agreement; what the first rounds weigh has no gradient."""

    def squash(s: Tensor) -> Tensor:
        square = s.square().sum(-1, keepdim=True)
        return square / (1 + square) * s / (square + 1e-8).sqrt()

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        low = squash((x @ params["primary"]).unflatten(-1, (5, 4)))
        votes = torch.einsum("bid,ijde->bije", low, params["routes"])
        logits = votes.new_zeros(votes.shape[:3])
        given = votes.detach()
        for _ in range(2):
            v = squash(torch.einsum("bij,bije->bje", logits.softmax(2), given))
            logits = logits + torch.einsum("bije,bje->bij", given, v)
        v = squash(torch.einsum("bij,bije->bje", logits.softmax(2), votes))
        length, one = v.norm(dim=-1), F.one_hot(y, 3).to(v.dtype)
        margin = one * F.relu(0.9 - length).square() + 0.5 * (1 - one) * F.relu(length - 0.1) ** 2
        seen = (v * one[..., None]).flatten(1) @ params["decoder"]
        return margin.sum(-1).mean() + 0.1 * F.mse_loss(seen, x)

    params = {"primary": randn(7, 20), "routes": randn(5, 3, 4, 6), "decoder": randn(18, 7)}
    return Program(loss, params, (randn(4, 7), tokens(3, 4)))


def kalman() -> Program:
    """The likelihood of sequences under a linear Gaussian model, filtered step by step."""

    def loss(params: Any, y: Tensor) -> Tensor:
        a = torch.linalg.matrix_exp(0.3 * params["drift"])
        c, q = params["emit"], params["noise"] @ params["noise"].T
        r = torch.diag(F.softplus(params["sensor"])) + 0.1 * torch.eye(3, dtype=y.dtype)
        eye = torch.eye(4, dtype=y.dtype)
        mean, cov = y.new_zeros(y.shape[0], 4), eye.expand(y.shape[0], 4, 4)
        total = y.new_zeros(())
        for t in range(y.shape[1]):
            mean, cov = mean @ a.T, a @ cov @ a.T + q + 0.1 * eye
            s = c @ cov @ c.T + r
            lower = torch.linalg.cholesky(s)
            off = (y[:, t] - mean @ c.T)[..., None]
            white = torch.linalg.solve_triangular(lower, off, upper=False)
            total = total + 0.5 * white.square().sum()
            total = total + lower.diagonal(dim1=-2, dim2=-1).log().sum()
            gain = torch.cholesky_solve(c @ cov, lower).mT
            mean = mean + (gain @ off)[..., 0]
            cov = (eye - gain @ c) @ cov
        return total / y.numel()

    params = {"drift": randn(4, 4), "emit": randn(3, 4), "noise": randn(4, 4), "sensor": randn(3)}
    return Program(loss, params, (randn(4, 5, 3),))


def momentum_contrast() -> Program:
    """MoCo: a slow copy of the encoder makes keys, which replace the oldest of a queue."""

    def loss(params: Any, x: Tensor, again: Tensor, slow: Tensor, queue: Tensor) -> Tensor:
        def encoded(x: Tensor, up: Tensor) -> Tensor:
            return F.normalize(F.relu(x @ up) @ params["down"], dim=1)

        q = encoded(x, params["up"])
        with torch.no_grad():
            slow = slow.lerp(params["up"], 0.01)
            k = encoded(again, slow)
        near = torch.einsum("nc,nc->n", q, k)[:, None]
        logits = torch.cat([near, q @ queue.T], 1) / 0.2
        queue = queue.clone()
        queue[3 : 3 + k.shape[0]] = k
        queue = queue.roll(1, 0)
        labels = torch.zeros(x.shape[0], dtype=torch.int64)
        return F.cross_entropy(logits, labels) + 0.1 * (queue @ q.T).square().mean()

    params = {"up": randn(6, 10), "down": randn(10, 5)}
    batch = randn(4, 6), randn(4, 6, seed=2), randn(6, 10, seed=3), randn(11, 5)
    return Program(loss, params, batch, batch_specs=(P("dp"), P("dp"), P(), P()))


def spectral_gan() -> Program:
    """A critic whose weights are divided by their norm, found by power iteration."""
    critic = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 9), n_power_iterations=2),
        nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(9, 1)),
    ).eval()

    def loss(call: Any, real: Tensor, fake: Tensor) -> Tensor:
        return F.relu(1 - call(real)).mean() + F.relu(1 + call(fake)).mean()

    return of_model(critic, loss, randn(4, 6), randn(4, 6, seed=2))


def splatting() -> Program:
    """Gaussians in the plane, blended from front to back at each pixel."""

    def loss(params: Any, image: Tensor) -> Tensor:
        sx, sy = params["scale"].exp().unbind(1)
        cos, sin = params["turn"].cos(), params["turn"].sin()
        turn = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
        half = turn * torch.stack([sx, sy], 1)[:, None]
        inverse = torch.linalg.inv(half @ half.mT + 0.1 * torch.eye(2, dtype=image.dtype))
        order = params["depth"].argsort()
        rows, cols = torch.meshgrid(torch.arange(5), torch.arange(4), indexing="ij")
        pixels = torch.stack([rows, cols], -1).to(image.dtype).flatten(0, 1) / 3
        off = pixels[:, None] - params["place"][order]
        power = -0.5 * torch.einsum("pgi,gij,pgj->pg", off, inverse[order], off)
        alpha = (params["opacity"][order].sigmoid() * power.exp()).clamp(max=0.99)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)
        color = (alpha * left[:, :-1]) @ params["color"][order].sigmoid()
        made = color.T.unflatten(1, (5, 4))
        return (made - image).abs().mean() + 0.2 * (1 - F.avg_pool2d(made, 2)).square().mean()

    params = {
        "place": randn(7, 2).abs(),
        "scale": 0.3 * randn(7, 2, seed=2),
        "turn": randn(7),
        "depth": randn(7, seed=4),
        "opacity": randn(7, seed=5),
        "color": randn(7, 3),
    }
    return Program(loss, params, (randn(3, 5, 4),), batch_specs=P())


def beam_search() -> Program:
    """A GRU's best guesses, found without a gradient, are scored with one: minimum risk."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.cell = nn.Embedding(7, 6), nn.GRUCell(6, 8)
            self.head = nn.Linear(8, 7)

        def step(self, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(self.emb(token), h)
            return F.log_softmax(self.head(h), -1), h

        def forward(self, h: Tensor, gold: Tensor) -> Tensor:
            n, width, steps = h.shape[0], 3, 4
            with torch.no_grad():
                beam = torch.zeros(n, width, 1, dtype=torch.int64)
                score = torch.full((n, width), -1e9, dtype=h.dtype)
                score[:, 0] = 0.0
                held = h[:, None].expand(-1, width, -1)
                for _ in range(steps):
                    logp, held = self.step(beam[:, :, -1].reshape(-1), held.reshape(-1, 8))
                    every = score[..., None] + logp.view(n, width, 7)
                    score, best = every.view(n, -1).topk(width, 1)
                    parent = best // 7
                    held = held.view(n, width, 8).gather(1, parent[..., None].expand(-1, -1, 8))
                    beam = beam.gather(1, parent[..., None].expand(-1, -1, beam.shape[2]))
                    beam = torch.cat([beam, (best % 7)[..., None]], 2)
                risk = (beam[:, :, 1:] != gold[:, None]).to(h.dtype).mean(-1)
            held, total = h.repeat_interleave(width, 0), h.new_zeros(n, width)
            for t in range(steps):
                logp, held = self.step(beam[:, :, t].reshape(-1), held)
                chosen = logp.gather(1, beam[:, :, t + 1].reshape(-1, 1))
                total = total + chosen.view(n, width)
            return (total.softmax(1) * risk).sum(1).mean()

    return of_model(Decoder(), lambda call, h, y: call(h, y), randn(4, 8), tokens(7, 4, 4))


def gaussian_process() -> Program:
    """Evidence and prediction of a deep kernel."""

    def loss(params: Any, x: Tensor, y: Tensor, new: Tensor) -> Tensor:
        def feature(x: Tensor) -> Tensor:
            return torch.tanh(x @ params["up"]) @ params["down"]

        def kernel(a: Tensor, b: Tensor) -> Tensor:
            return (-0.5 * torch.cdist(a, b).square()).exp()

        a, b = feature(x), feature(new)
        noise = params["noise"].exp() * torch.eye(x.shape[0], dtype=x.dtype)
        k = kernel(a, a) + noise
        sign, logdet = torch.linalg.slogdet(k)
        solved = torch.linalg.solve(k, y)
        guess = kernel(b, a) @ solved
        return 0.5 * (y @ solved + logdet * sign) + guess.square().mean()

    params = {"up": randn(3, 9), "down": randn(9, 2), "noise": torch.tensor(-1.0).double()}
    return Program(loss, params, (randn(6, 3), randn(6), randn(4, 3)), batch_specs=P())


def quantized() -> Program:
    """Weights and activations rounded to eight and four bits; the gradient goes straight
    through.
    """

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, low: int, high: int) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward((x >= low) & (x <= high))
            return x.round().clamp(low, high)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            (inside,) = ctx.saved_tensors
            return grad * inside, None, None

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        for name in ("first", "last"):
            w = params[name]
            step = w.detach().abs().amax(0, keepdim=True) / 127
            w = Round.apply(w / step, -128, 127) * step
            scale = params[f"{name}.scale"].exp()
            x = F.gelu((Round.apply(x / scale, -8, 7) * scale) @ w)
        return F.mse_loss(x, y)

    params = {
        "first": randn(6, 10),
        "first.scale": torch.tensor(-1.0).double(),
        "last": randn(10, 5),
        "last.scale": torch.tensor(-1.5).double(),
    }
    return Program(loss, params, (randn(4, 6), randn(4, 5)))


def swav() -> Program:
    """Codes of prototypes by Sinkhorn's iterations over the batch."""

    def loss(params: Any, x: Tensor, again: Tensor) -> Tensor:
        proto = F.normalize(params["proto"], dim=1)

        def scores(x: Tensor) -> Tensor:
            return F.normalize(F.relu(x @ params["up"]) @ params["down"], dim=1) @ proto.T

        @torch.no_grad()
        def codes(s: Tensor) -> Tensor:
            q = (s / 0.3).exp().T
            q /= q.sum()
            for _ in range(3):
                q /= q.sum(1, keepdim=True) * q.shape[0]
                q /= q.sum(0, keepdim=True) * q.shape[1]
            return (q * q.shape[1]).T

        a, b = scores(x), scores(again)
        swapped = codes(b) * F.log_softmax(a / 0.1, 1) + codes(a) * F.log_softmax(b / 0.1, 1)
        return -0.5 * swapped.sum(1).mean()

    params = {"up": randn(6, 10), "down": randn(10, 5), "proto": randn(7, 5)}
    return Program(loss, params, (randn(4, 6), randn(4, 6, seed=2)))


def barlow_twins() -> Program:
    """Cross-correlation of two views; the off-diagonal by a flat view."""
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7))

    def loss(call: Any, x: Tensor, again: Tensor) -> Tensor:
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (call(x), call(again)))
        c = a.T @ b / a.shape[0]
        n = c.shape[0]
        off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()
        return torch.diagonal(c).add(-1).pow(2).sum() + 0.1 * off.pow(2).sum()

    return of_model(model, loss, randn(4, 6), randn(4, 6, seed=2))


def soft_actor_critic() -> Program:
    """An action of a squashed Gaussian, two critics, a temperature."""

    def loss(params: Any, x: Tensor, noise: Tensor, reward: Tensor) -> Tensor:
        mean, scale = (F.relu(x @ params["pi.up"]) @ params["pi.down"]).chunk(2, -1)
        base = Normal(mean, scale.clamp(-3, 1).exp())
        policy = TransformedDistribution(base, [TanhTransform(cache_size=1)])
        action = torch.tanh(base.loc + base.scale * noise)
        logp = policy.log_prob(action.clamp(-0.999, 0.999)).sum(-1)
        both = torch.cat([x, action], -1)
        q = [F.relu(both @ params[f"q{i}.up"]) @ params[f"q{i}.down"] for i in (0, 1)]
        alpha = params["alpha"].exp()
        actor = (alpha.detach() * logp - torch.min(*q)[:, 0]).mean()
        critic = sum(F.mse_loss(v[:, 0], reward) for v in q)
        return actor + critic - (alpha * (logp.detach() - 2.0)).mean()

    params = {
        "pi.up": randn(5, 8),
        "pi.down": 0.3 * randn(8, 4),
        **{f"q{i}.up": randn(7, 9, seed=i) for i in (0, 1)},
        **{f"q{i}.down": randn(9, 1, seed=i) for i in (0, 1)},
        "alpha": torch.tensor(-1.0).double(),
    }
    return Program(loss, params, (randn(4, 5), randn(4, 2), randn(4)))


def hard_triplets() -> Program:
    """Each row's farthest of its own class and nearest of another."""
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(call(x), dim=1)
        squared = (2 - 2 * z @ z.T).clamp(min=0)
        far = squared + 1e-12
        same = y[:, None] == y
        own = same & ~torch.eye(len(y), dtype=torch.bool)
        positive = torch.where(own, far, far.new_zeros(())).amax(1)
        negative = far.masked_fill(same, float("inf")).amin(1)
        valid = own.any(1)
        return (F.softplus(positive.sqrt() - negative.sqrt()) * valid).sum() / valid.sum()

    return of_model(model, loss, randn(6, 6), torch.tensor([0, 1, 0, 2, 1, 0]), batch_specs=P())


def triangle_updates() -> Program:
    """AlphaFold's pairs: products along triangles, attention biased by pairs."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.left, self.right, self.gate = (nn.Linear(8, 12) for _ in range(3))
            self.close, self.qkv = nn.Linear(12, 8), nn.Linear(8, 36, bias=False)
            self.bias, self.out = nn.Linear(8, 3, bias=False), nn.Linear(12, 8)

        def forward(self, z: Tensor, mask: Tensor) -> Tensor:
            y = self.norm(z)
            left = self.left(y) * self.gate(y).sigmoid() * mask[..., None]
            z = z + self.close(torch.einsum("bikc,bjkc->bijc", left, self.right(y)))
            y = self.norm(z)
            q, k, v = self.qkv(y).unflatten(-1, (3, 3, 4)).permute(3, 0, 1, 4, 2, 5)
            bias = self.bias(y).permute(0, 3, 1, 2)[:, None]
            bias = bias + torch.where(mask, 0.0, -1e9)[:, :, None, None, :]
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            return z + self.out(got.transpose(2, 3).flatten(3))

    def loss(call: Any, z: Tensor, mask: Tensor) -> Tensor:
        made = call(z, mask)
        return (made * made.transpose(1, 2)).mean()

    mask = torch.arange(5) < torch.tensor([5, 4])[:, None]
    return of_model(Pairs(), loss, randn(2, 5, 5, 8), mask[:, :, None] & mask[:, None])


def swin() -> Program:
    """Shifted windows with a table of relative positions."""
    window = 3
    axis = torch.arange(window)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).flatten(1)
    apart = (grid[:, :, None] - grid[:, None]).permute(1, 2, 0) + window - 1
    where = apart[..., 0] * (2 * window - 1) + apart[..., 1]

    class Block(nn.Module):
        def __init__(self, shift: int):
            super().__init__()
            self.shift, self.norm = shift, nn.LayerNorm(12)
            self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
            self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, 3))
            self.register_buffer("where", where)
            region = (torch.arange(6) >= 3).int() + (torch.arange(6) >= 6 - shift).int()
            region = self._cut((3 * region[:, None] + region)[None, :, :, None])[..., 0]
            apart = region[:, None] != region[:, :, None]
            self.register_buffer("mask", torch.where(apart, -100.0, 0.0))

        def _cut(self, x: Tensor) -> Tensor:
            b, h, w, c = x.shape
            x = x.view(b, h // window, window, w // window, window, c)
            return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, window * window, c)

        def forward(self, x: Tensor) -> Tensor:
            b, h, w, c = x.shape
            y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
            q, k, v = self.qkv(self._cut(y)).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            near = self.table[self.where.view(-1)].view(9, 9, 3).permute(2, 0, 1)
            score = q * 0.5 @ k.mT + near
            if self.shift:
                score = score.view(b, -1, 3, 9, 9) + self.mask[:, None].to(x.dtype)
                score = score.view(-1, 3, 9, 9)
            y = (score.softmax(-1) @ v).transpose(1, 2).reshape(-1, window, window, c)
            y = y.view(b, h // window, w // window, window, window, c)
            y = y.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
            return x + self.out(torch.roll(y, (self.shift, self.shift), (1, 2)))

    class Merge(nn.Module):
        def __init__(self):
            super().__init__()
            self.reduce = nn.Linear(48, 10, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
            return self.reduce(torch.cat(parts, -1))

    model = nn.Sequential(Block(0), Block(1), Merge())

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(x).mean((1, 2)), y)

    return of_model(model, loss, randn(4, 6, 6, 12), tokens(10, 4))


def spatial_transformer() -> Program:
    """An image sampled at places that a net chooses."""

    class Spatial(nn.Module):
        def __init__(self):
            super().__init__()
            self.find = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6))
            self.head = nn.Linear(50, 4)

        def forward(self, x: Tensor) -> Tensor:
            eye = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=x.dtype)
            theta = (0.1 * self.find(x) + eye).view(-1, 2, 3)
            grid = F.affine_grid(theta, list(x.shape), align_corners=False)
            return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(x), y)

    return of_model(Spatial(), loss, randn(4, 2, 5, 5), tokens(4, 4))


def vocoder() -> Program:
    """Transposed convolutions under weight norm, judged by spectra of two sizes."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.ConvTranspose1d(4, 6, 4, 2, 1)),
        nn.LeakyReLU(0.1),
        parametrizations.weight_norm(nn.ConvTranspose1d(6, 1, 4, 2, 1)),
        nn.Tanh(),
    )

    def loss(call: Any, mel: Tensor, wave: Tensor) -> Tensor:
        made, total = call(mel)[:, 0], wave.new_zeros(())
        for size in (8, 16):
            window = torch.hann_window(size, dtype=wave.dtype)
            a, b = (
                torch.stft(w, size, size // 4, window=window, return_complex=True).abs() + 1e-3
                for w in (made, wave)
            )
            total = total + (a - b).norm() / b.norm() + F.l1_loss(a.log(), b.log())
        return total

    return of_model(model, loss, randn(3, 4, 8), randn(3, 32))


def glow() -> Program:
    """Invertible 1x1 convolutions by their LU factors, and by their determinant."""

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(4, 4)).Q)
            self.register_buffer("p", p)
            self.lower, self.upper = nn.Parameter(lower), nn.Parameter(upper)
            self.full = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            eye = torch.eye(4, dtype=x.dtype)
            w = self.p @ (self.lower.tril(-1) + eye) @ self.upper
            x = F.conv2d(x, w[:, :, None, None])
            x = F.conv2d(x, self.full[:, :, None, None])
            area = x.shape[2] * x.shape[3]
            det = self.upper.diagonal().abs().log().sum() + torch.linalg.slogdet(self.full)[1]
            return x, area * det

    def loss(call: Any, x: Tensor) -> Tensor:
        z, det = call(x)
        return 0.5 * z.square().sum((1, 2, 3)).mean() - det

    return of_model(Mix(), loss, randn(4, 4, 3, 3))


def hidden_markov() -> Program:
    """The forward algorithm in logs, and the path of Viterbi taken as pseudo-labels."""

    def loss(params: Any, x: Tensor) -> Tensor:
        step = params["step"].log_softmax(1)
        emit = params["emit"].log_softmax(1)
        seen = emit.T[x]  # (batch, time, states)
        alpha = params["start"].log_softmax(0) + seen[:, 0]
        best, back = alpha.detach(), []
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + step, 1) + seen[:, t]
            score, parent = (best[:, :, None] + step.detach()).max(1)
            best = score + seen[:, t].detach()
            back.append(parent)
        path = [best.argmax(1)]
        for parent in reversed(back):
            path.append(parent.gather(1, path[-1][:, None])[:, 0])
        states = torch.stack(path[::-1], 1)
        chosen = seen.gather(2, states[..., None]).mean()
        return -torch.logsumexp(alpha, 1).mean() - 0.1 * chosen

    params = {"step": randn(5, 5), "emit": randn(5, 7), "start": randn(5)}
    return Program(loss, params, (tokens(7, 4, 6),))


def langevin() -> Program:
    """An energy model whose negatives walk down its own gradient, with given noise."""

    def loss(params: Any, x: Tensor, start: Tensor, noise: Tensor) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return (F.silu(x @ params["up"]) @ params["down"])[:, 0]

        z = start
        for i in range(2):
            z = z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(energy(z).sum(), z)
            z = z - 0.1 * slope + 0.05 * noise[:, i]
        z = z.detach()
        apart = energy(x).mean() - energy(z).mean()
        return apart + 0.1 * (energy(x).square().mean() + energy(z).square().mean())

    params = {"up": randn(5, 9), "down": randn(9, 1)}
    return Program(loss, params, (randn(4, 5), randn(4, 5, seed=2), randn(4, 2, 5)))


def state_space() -> Program:
    """S4D: a kernel of complex exponentials, applied by an FFT."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.rand(6, 4).log())
            self.turn = nn.Parameter(math.pi * torch.arange(4.0).repeat(6, 1))
            self.c = nn.Parameter(torch.randn(6, 4, 2))
            self.dt, self.skip = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
            self.out = nn.Linear(6, 12)

        def forward(self, u: Tensor) -> Tensor:  # (batch, channels, time)
            n = u.shape[-1]
            a = torch.complex(-self.rate.exp(), self.turn) * self.dt.exp()[:, None]
            k = (a[..., None] * torch.arange(n)).exp()
            c = torch.view_as_complex(self.c) * (a.exp() - 1) / a
            kernel = 2 * torch.einsum("hn,hnl->hl", c, k).real
            y = torch.fft.irfft(torch.fft.rfft(u, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)
            y = F.gelu(y[..., :n] + u * self.skip[:, None])
            return F.glu(self.out(y.transpose(1, 2)), -1)

    def loss(call: Any, u: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(call(u), y)

    return of_model(Mixer(), loss, randn(4, 6, 9), randn(4, 9, 6))


def adaptive_halting() -> Program:
    """A layer repeated until each position has seen enough: masks instead of loops that end."""

    class Universal(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
            self.halt = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            seen = x.new_zeros(x.shape[:2])
            steps, out = torch.zeros_like(seen), torch.zeros_like(x)
            for i in range(3):
                p = self.halt(x).squeeze(-1).sigmoid()
                running = (seen < 0.9).to(x.dtype)
                ends = ((seen + p * running) >= 0.9).to(x.dtype) * running
                if i == 2:
                    ends = running
                goes = running - ends
                weight = goes * p + ends * (1 - seen)
                seen, steps = seen + weight, steps + running
                x = self.layer(x)
                out = out + weight[..., None] * x
            return out, steps + 1 - seen

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        out, ponder = call(x)
        return F.mse_loss(out, y) + 0.01 * ponder.mean()

    return of_model(Universal(), loss, randn(4, 5, 8), randn(4, 5, 8, seed=2))


def segmentation() -> Program:
    """A U-net's logits under dice and Lovász losses, which sort the errors."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.deep = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 10, 3, padding=1)
            self.norm = nn.GroupNorm(2, 6)
            self.up = nn.ConvTranspose2d(10, 6, 2, 2)
            self.head = nn.Conv2d(12, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            skip = F.silu(self.norm(self.down(x)))
            deep = F.silu(self.deep(F.max_pool2d(skip, 2)))
            up = F.interpolate(self.up(deep), size=x.shape[2:], mode="bilinear")
            return self.head(torch.cat([skip, up], 1))[:, 0]

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = call(x)
        p = logits.sigmoid()
        dice = 1 - (2 * (p * y).sum((1, 2)) + 1) / (p.sum((1, 2)) + y.sum((1, 2)) + 1)
        flat, truth = logits.flatten(1), y.flatten(1)
        errors, order = (1 - flat * (2 * truth - 1)).sort(1, descending=True)
        truth = truth.gather(1, order)
        total = truth.sum(1, keepdim=True)
        jaccard = 1 - (total - truth.cumsum(1)) / (total + (1 - truth).cumsum(1))
        slope = torch.cat([jaccard[:, :1], jaccard[:, 1:] - jaccard[:, :-1]], 1)
        return dice.mean() + (F.relu(errors) * slope).sum(1).mean()

    mask = (randn(3, 7, 6, seed=9) > 0).to(torch.float64)
    return of_model(Net(), loss, randn(3, 2, 7, 6), mask)


def graph_in_batch() -> Program:
    """A GCN whose adjacency comes with the batch."""

    def loss(params: Any, a: Tensor, x: Tensor, y: Tensor) -> Tensor:
        h = torch.sparse.mm(a, x @ params["up"]).relu()
        return F.cross_entropy(torch.sparse.mm(a, h @ params["down"]), y)

    at = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 5], [1, 0, 0, 5, 3, 2, 4, 5]])
    adjacency = torch.sparse_coo_tensor(at, 0.1 + randn(8).abs(), (6, 6), check_invariants=True)
    params = {"up": randn(4, 9), "down": randn(9, 3)}
    return Program(loss, params, (adjacency, randn(6, 4), tokens(3, 6)))


STRUCTURE: dict[str, Callable[[], Program]] = {
    "Perceiver": perceiver,
    "capsule routing": capsules,
    "Kalman filter": kalman,
    "MoCo": momentum_contrast,
    "spectral norm": spectral_gan,
    "Gaussian splatting": splatting,
    "beam search": beam_search,
    "Gaussian process": gaussian_process,
    "quantization-aware training": quantized,
    "SwAV": swav,
    "Barlow Twins": barlow_twins,
    "soft actor-critic": soft_actor_critic,
    "hard triplets": hard_triplets,
    "AlphaFold's triangles": triangle_updates,
    "Swin": swin,
    "spatial transformer": spatial_transformer,
    "vocoder": vocoder,
    "Glow": glow,
    "hidden Markov model": hidden_markov,
    "energy model": langevin,
    "S4D": state_space,
    "adaptive halting": adaptive_halting,
    "segmentation": segmentation,
    "GCN, adjacency in the batch": graph_in_batch,
}
