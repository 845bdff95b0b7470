"""Models of images, generative ones among them.

One long file of short programs, each of which can be read alone.
"""

# Modules hold tensors of all kinds as attributes, of which no type is known.
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false

import math
from typing import Any

import torch
from public_programs import Program, of_model
from real_models import randn, tokens
from torch import Tensor, nn
from torch.nn import functional as F

IMAGES, LABELS = randn(4, 3, 8, 8), tokens(7, 4)


def _classes(call: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(call(x), y)


def _classifier(model: nn.Module) -> Program:
    return of_model(model, _classes, IMAGES, LABELS)


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 3):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, dim: int = 12):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), _Attention(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 20), nn.GELU(), nn.Linear(20, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def vit() -> Program:
    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 12, 4, 4)
            self.cls, self.pos = nn.Parameter(randn(1, 1, 12)), nn.Parameter(randn(1, 5, 12))
            self.blocks, self.norm = nn.Sequential(_Block(), _Block()), nn.LayerNorm(12)
            self.head = nn.Linear(12, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patch(x).flatten(2).mT
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
            return self.head(self.norm(self.blocks(x))[:, 0])

    return _classifier(ViT())


def mixer() -> Program:
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
            self.tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
            self.channels = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.norms[0](x).mT).mT
            return x + self.channels(self.norms[1](x))

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.head = nn.Linear(48, 12), nn.Linear(12, 7)
            self.blocks = nn.Sequential(Mix(), Mix())

        def forward(self, x: Tensor) -> Tensor:
            patches = x.unflatten(3, (2, 4)).unflatten(2, (2, 4)).permute(0, 2, 4, 3, 5, 1)
            return self.head(self.blocks(self.patch(patches.flatten(3).flatten(1, 2))).mean(1))

    return _classifier(Mixer())


def convnext() -> Program:
    class Block(nn.Module):
        def __init__(self, dim: int):
            super().__init__()
            self.depthwise, self.norm = (
                nn.Conv2d(dim, dim, 3, padding=1, groups=dim),
                nn.LayerNorm(dim),
            )
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
            self.scale = nn.Parameter(torch.full((dim,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)

    layers = nn.Conv2d(3, 6, 2, 2), Block(6), nn.Conv2d(6, 10, 2, 2), Block(10)
    return _classifier(
        nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 7))
    )


def mobilenet() -> Program:
    """Inverted residuals and squeeze-excitation, statistics of the batch frozen."""

    class Inverted(nn.Module):
        def __init__(self, dim: int, hidden: int):
            super().__init__()
            self.up = nn.Sequential(nn.Conv2d(dim, hidden, 1, bias=False), nn.BatchNorm2d(hidden))
            self.mid = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
            self.norm = nn.BatchNorm2d(hidden)
            self.squeeze, self.excite = nn.Conv2d(hidden, 4, 1), nn.Conv2d(4, hidden, 1)
            self.down = nn.Sequential(nn.Conv2d(hidden, dim, 1, bias=False), nn.BatchNorm2d(dim))

        def forward(self, x: Tensor) -> Tensor:
            y = F.hardswish(self.norm(self.mid(F.relu6(self.up(x)))))
            gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
            return x + self.down(y * gate)

    layers = nn.Conv2d(3, 6, 3, 2, 1), Inverted(6, 10), Inverted(6, 8)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 7))
    return _classifier(model.eval())


def densenet() -> Program:
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3 + 5 * i, 5, 3, padding=1) for i in range(3))
            self.norms = nn.ModuleList(nn.BatchNorm2d(3 + 5 * i) for i in range(3))
            self.head = nn.Linear(18, 7)

        def forward(self, x: Tensor) -> Tensor:
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = torch.cat([x, conv(F.relu(norm(x)))], 1)
            return self.head(F.avg_pool2d(x, 8).flatten(1))

    return _classifier(Dense().eval())


def vgg() -> Program:
    layers = (
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2),
        nn.Conv2d(8, 10, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(40, 11), nn.ReLU(True), nn.Dropout(), nn.Linear(11, 7),
    )  # fmt: skip
    return _classifier(nn.Sequential(*layers).eval())


def mnist() -> Program:
    """pytorch/examples."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 6, 3)
            self.fc1, self.fc2 = nn.Linear(24, 11), nn.Linear(11, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)

    return of_model(Net(), lambda call, x, y: F.nll_loss(call(x), y), IMAGES, LABELS)


def unet() -> Program:
    """Predicts noise: time embedding, group norms, attention at the bottom, skips."""

    class Res(nn.Module):
        def __init__(self, into: int, out: int):
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(3, into), nn.Conv2d(into, out, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(3, out), nn.Conv2d(out, out, 3, padding=1)
            self.time, self.skip = nn.Linear(8, out), nn.Conv2d(into, out, 1)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
            return self.skip(x) + self.conv2(F.silu(self.norm2(y)))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(6, 8), nn.SiLU())
            self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)
            self.down, self.mid, self.up = Res(6, 12), Res(12, 12), Res(18, 6)
            self.attention = _Attention(12)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            angles = t[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=t.dtype)
            time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
            high = self.first(x)
            low = self.mid(self.down(F.avg_pool2d(high, 2), time), time)
            low = low + self.attention(low.flatten(2).mT).mT.view_as(low)
            both = torch.cat([high, F.interpolate(low, scale_factor=2, mode="nearest")], 1)
            return self.last(self.up(both, time))

    def loss(call: Any, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        kept = torch.cos(t / 10)[:, None, None, None]
        return F.mse_loss(call(kept * x + (1 - kept**2).sqrt() * noise, t), noise)

    return of_model(UNet(), loss, IMAGES, randn(4).abs(), randn(4, 3, 8, 8, seed=3))


def dit() -> Program:
    """Norms whose shift, scale and gate come from time and class; rectified flow."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.mod = _Attention(12), nn.Linear(12, 72)
            self.mlp = nn.Sequential(nn.Linear(12, 20), nn.GELU("tanh"), nn.Linear(20, 12))

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            a, b, g, d, e, h = self.mod(F.silu(c))[:, None].chunk(6, -1)
            x = x + g * self.attn(F.layer_norm(x, (12,), eps=1e-6) * (1 + b) + a)
            return x + h * self.mlp(F.layer_norm(x, (12,), eps=1e-6) * (1 + e) + d)

    class DiT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.classes = nn.Linear(48, 12), nn.Embedding(7, 12)
            self.time, self.blocks = nn.Linear(6, 12), nn.ModuleList([Block(), Block()])
            self.last, self.pos = nn.Linear(12, 48), nn.Parameter(randn(4, 12))

        def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            angles = t[:, None] * torch.exp(-torch.arange(3).to(t) * math.log(10.0))
            c = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(y)
            patches = F.unfold(x, 4, stride=4).mT
            h = self.patch(patches) + self.pos
            for block in self.blocks:
                h = block(h, c)
            return F.fold(self.last(F.layer_norm(h, (12,))).mT, (8, 8), 4, stride=4)

    def loss(call: Any, x: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        at = t[:, None, None, None]
        return F.mse_loss(call((1 - at) * x + at * noise, t, y), noise - x)

    return of_model(DiT(), loss, IMAGES, randn(4).sigmoid(), LABELS, randn(4, 3, 8, 8, seed=3))


def flux() -> Program:
    """Text and image in one attention, each with weights of its own."""

    class Double(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.mlp = (
                nn.ModuleDict({side: make() for side in ("image", "text")})
                for make in (
                    lambda: nn.Linear(12, 36),
                    lambda: nn.Linear(12, 12),
                    lambda: nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)),
                )
            )

        def forward(self, streams: dict[str, Tensor]) -> dict[str, Tensor]:
            heads = {
                side: self.qkv[side](F.layer_norm(x, (12,))).unflatten(-1, (3, 3, 4))
                for side, x in streams.items()
            }
            q, k, v = torch.cat(list(heads.values()), 1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(F.rms_norm(q, (4,)), F.rms_norm(k, (4,)), v)
            parts = y.transpose(1, 2).flatten(2).split([x.shape[1] for x in streams.values()], 1)
            out = {}
            for (side, x), part in zip(streams.items(), parts, strict=True):
                x = x + self.out[side](part)
                out[side] = x + self.mlp[side](F.layer_norm(x, (12,)))
            return out

    class Flux(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = nn.Linear(6, 12), nn.Embedding(11, 12)
            self.blocks, self.last = nn.Sequential(Double(), Double()), nn.Linear(12, 6)

        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            streams = self.blocks({"text": self.text(text), "image": self.image(x)})
            return self.last(streams["image"])

    return of_model(
        Flux(), lambda call, x, ids, y: F.mse_loss(call(x, ids), y),
        randn(4, 5, 6), tokens(11, 4, 3), randn(4, 5, 6, seed=2),
    )  # fmt: skip


def vae() -> Program:
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.mean, self.logvar = nn.Linear(20, 11), nn.Linear(11, 5), nn.Linear(11, 5)
            self.fc3, self.fc4 = nn.Linear(5, 11), nn.Linear(11, 20)

        def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = F.relu(self.fc1(x))
            mean, logvar = self.mean(h), self.logvar(h)
            z = mean + noise * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, logvar

    def loss(call: Any, x: Tensor, noise: Tensor) -> Tensor:
        made, mean, logvar = call(x, noise)
        bce = F.binary_cross_entropy(made, x, reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())

    return of_model(VAE(), loss, randn(4, 20).sigmoid(), randn(4, 5))


def vqvae() -> Program:
    """Codes by the nearest, gradients straight through."""

    class VQVAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Conv2d(3, 6, 2, 2), nn.ConvTranspose2d(6, 3, 2, 2)
            self.codes = nn.Embedding(7, 6)

        def forward(self, x: Tensor) -> Tensor:
            z = self.encoder(x).permute(0, 2, 3, 1)
            nearest = torch.cdist(z.flatten(0, 2), self.codes.weight).argmin(-1)
            q = self.codes(nearest).view_as(z)
            commit = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
            q = z + (q - z).detach()
            return F.mse_loss(self.decoder(q.permute(0, 3, 1, 2)), x) + commit

    return of_model(VQVAE(), lambda call, x: call(x), IMAGES)


def dcgan() -> Program:
    class GAN(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Sequential(
                nn.ConvTranspose2d(5, 6, 4, bias=False), nn.BatchNorm2d(6), nn.ReLU(True),
                nn.ConvTranspose2d(6, 3, 4, 2, 1, bias=False), nn.Tanh(),
            )  # fmt: skip
            self.d = nn.Sequential(
                nn.Conv2d(3, 6, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True),
                nn.Conv2d(6, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten(0),
            )  # fmt: skip

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            real, fake = self.d(x), self.d(self.g(z))
            ones = torch.ones_like(real)
            return F.binary_cross_entropy(real, ones) + F.binary_cross_entropy(fake, 0 * ones)

    model = GAN()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean = False, None
            module.running_var = module.num_batches_tracked = None
    return of_model(model, lambda call, x, z: call(x, z), IMAGES, randn(4, 5, 1, 1))


def wgan_gp() -> Program:
    """The penalty is a gradient with respect to the input, by torch.autograd."""
    critic = nn.Sequential(nn.Linear(6, 11), nn.LeakyReLU(0.2), nn.Linear(11, 1))

    def loss(call: Any, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(call(between).sum(), between, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        return call(fake).mean() - call(real).mean() + 10 * penalty

    return of_model(critic, loss, randn(4, 6), randn(4, 6, seed=2), randn(4, 1, seed=3).sigmoid())


def super_resolution() -> Program:
    layers = (
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(),
        nn.Conv2d(6, 12, 3, padding=1), nn.PixelShuffle(2),
    )  # fmt: skip

    def loss(call: Any, x: Tensor) -> Tensor:
        small = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)
        return F.mse_loss(call(small), x)

    return of_model(nn.Sequential(*layers), loss, IMAGES)


def style_transfer() -> Program:
    """Reflection padding, instance norms, upsampling; Gram matrices."""

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True)
            self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, 2), nn.InstanceNorm2d(6, affine=True)
            self.conv3 = nn.Conv2d(6, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.norm1(self.conv1(F.pad(x, (1, 1, 1, 1), mode="reflect"))))
            y = F.relu(self.norm2(self.conv2(F.pad(y, (1, 1, 1, 1), mode="reflect"))))
            y = F.interpolate(y, scale_factor=2.0, mode="nearest")
            return self.conv3(F.pad(y, (1, 1, 1, 1), mode="reflect"))

    def gram(y: Tensor) -> Tensor:
        features = y.flatten(2)
        return features.bmm(features.mT) / features[0].numel()

    def loss(call: Any, x: Tensor, style: Tensor) -> Tensor:
        made = call(x)
        return F.mse_loss(made, x) + F.mse_loss(gram(made), gram(style))

    return of_model(Transformer(), loss, IMAGES, randn(4, 3, 8, 8, seed=2))


def siamese() -> Program:
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Sequential(
                nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 9)
            )
            self.head = nn.Sequential(nn.Linear(18, 11), nn.ReLU(True), nn.Linear(11, 1))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.sigmoid(self.head(torch.cat([self.tower(a), self.tower(b)], 1)))

    def loss(call: Any, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(call(a, b).squeeze(), y)

    return of_model(Siamese(), loss, IMAGES, randn(4, 3, 8, 8, seed=2), (LABELS % 2).double())


class _Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(10, 9), nn.Linear(7, 9)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1), self.scale


def clip() -> Program:
    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b, scale = call(x, y)
        logits, target = scale.exp() * a @ b.T, torch.arange(x.shape[0], device=x.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    return of_model(_Towers(), loss, randn(5, 10), randn(5, 7))


def siglip() -> Program:
    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b, scale = call(x, y)
        sign = 2 * torch.eye(x.shape[0], dtype=x.dtype, device=x.device) - 1
        return -F.logsigmoid(sign * (scale.exp() * a @ b.T - 3)).sum() / x.shape[0]

    return of_model(_Towers(), loss, randn(5, 10), randn(5, 7))


def simclr() -> Program:
    """Two views of a batch against each other, own pairs left out."""
    tower = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 6))

    def loss(call: Any, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(torch.cat([call(a), call(b)]), dim=1)
        own = torch.eye(z.shape[0], dtype=torch.bool, device=z.device)
        similar = (z @ z.T / 0.5).masked_fill(own, -torch.inf)
        return F.cross_entropy(similar, torch.arange(z.shape[0], device=z.device).roll(a.shape[0]))

    return of_model(tower, loss, randn(4, 10), randn(4, 10, seed=2))


def mae() -> Program:
    """Patches that a permutation keeps are encoded, the others restored and predicted."""

    class MAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.encoder, self.decoder = nn.Linear(12, 12), _Block(), _Block()
            self.mask, self.out = nn.Parameter(randn(1, 1, 12)), nn.Linear(12, 12)
            self.pos = nn.Parameter(randn(16, 12))

        def forward(self, x: Tensor, order: Tensor) -> Tensor:
            patches = F.pixel_unshuffle(x, 2).flatten(2).mT
            kept = order[:, :6, None].expand(-1, -1, 12)
            y = self.encoder((self.into(patches) + self.pos).gather(1, kept))
            y = torch.cat([y, self.mask.expand(x.shape[0], 10, -1)], 1)
            back = order.argsort(1)[:, :, None].expand(-1, -1, 12)
            error = (self.out(self.decoder(y.gather(1, back) + self.pos)) - patches).square()
            hidden = (order.argsort(1) >= 6).to(x.dtype)
            return (error.mean(-1) * hidden).sum() / hidden.sum()

    order = torch.stack([torch.randperm(16) for _ in range(4)])
    return of_model(MAE(), lambda call, x, order: call(x, order), IMAGES, order)


def detector() -> Program:
    """A grid of boxes: objectness, boxes by IoU, classes, weighted by where objects are."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 9, 3, 2, 1))

    def loss(call: Any, x: Tensor, boxes: Tensor, has: Tensor, y: Tensor) -> Tensor:
        out = call(x)
        corner, size = out[:, 1:3].sigmoid(), out[:, 3:5].exp()
        low = torch.maximum(corner, boxes[:, :2])
        high = torch.minimum(corner + size, boxes[:, :2] + boxes[:, 2:])
        common = (high - low).clamp(min=0).prod(1)
        iou = common / (size.prod(1) + boxes[:, 2:].prod(1) - common)
        classes = F.cross_entropy(out[:, 5:], y, reduction="none")
        objects = F.binary_cross_entropy_with_logits(out[:, 0], has)
        return objects + (has * (1 - iou + classes)).sum() / has.sum().clamp(min=1)

    has = (randn(4, 2, 2) > 0).double()
    return of_model(net, loss, IMAGES, randn(4, 4, 2, 2).sigmoid(), has, tokens(4, 4, 2, 2))


VISION = {
    "ViT": vit,
    "MLP-Mixer": mixer,
    "ConvNeXt": convnext,
    "MobileNetV3": mobilenet,
    "DenseNet": densenet,
    "VGG": vgg,
    "MNIST": mnist,
    "diffusion U-net": unet,
    "DiT": dit,
    "Flux": flux,
    "VAE": vae,
    "VQ-VAE": vqvae,
    "DCGAN": dcgan,
    "WGAN-GP": wgan_gp,
    "super resolution": super_resolution,
    "style transfer": style_transfer,
    "siamese network": siamese,
    "CLIP": clip,
    "SigLIP": siglip,
    "SimCLR": simclr,
    "MAE": mae,
    "detector": detector,
}
