"""Speech, codes, quantised weights, recurrences in parallel form, and geometry, as their authors'
code writes them. Short programs, each of which can be read alone.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from public_programs import Program, of_model
from real_models import randn, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from ftp import P


def indices(count: int, *shape: int) -> Tensor:
    """Indices below ``count``, zero among them."""
    return tokens(count + 2, *shape) - 2


def packed_integers() -> Program:
    """GPTQ: two 4-bit weights in a byte, a scale for each group of four, LoRA beside them."""

    def loss(params: Any, x: Tensor, packed: Tensor, due: Tensor) -> Tensor:
        each = torch.stack([packed & 0xF, packed >> 4], -1).reshape(8, 8).to(x.dtype) - 8
        weight = (each.view(8, 2, 4) * params["scale"][..., None]).view(8, 8)
        return F.mse_loss(x @ weight.T + (x @ params["a"]) @ params["b"], due)

    params = {"scale": randn(8, 2), "a": randn(8, 2), "b": randn(2, 8)}
    packed = indices(256, 8, 4).to(torch.uint8)
    batch_specs = (P("dp"), P(), P("dp"))
    batch = (randn(4, 8), packed, randn(4, 8, seed=2))
    return Program(loss, params, batch, batch_specs=batch_specs)


def straight_through() -> Program:
    """Quantisation-aware training: weights by row, activations by token."""

    def quantised(x: Tensor, levels: int) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True) / levels
        return x + ((x / scale).round().clamp(-levels - 1, levels) * scale - x).detach()

    def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = F.gelu(quantised(x, 127) @ quantised(params["up"], 7).T)
        return F.cross_entropy(h @ params["down"], labels)

    return Program(loss, {"up": randn(6, 8), "down": randn(6, 3)}, (randn(4, 8), indices(3, 4)))


def many_adapters() -> Program:
    """S-LoRA: each row of the batch with an adapter of its own."""

    def loss(params: Any, x: Tensor, which: Tensor, due: Tensor) -> Tensor:
        low = torch.bmm(torch.bmm(x, params["a"][which]), params["b"][which])
        return F.mse_loss(x @ params["base"] + low, due)

    params = {"base": randn(6, 4), "a": randn(5, 6, 2), "b": randn(5, 2, 4)}
    return Program(loss, params, (randn(4, 3, 6), indices(5, 4), randn(4, 3, 4)))


def sparse_features() -> Program:
    """TabNet: a sparsemax over features, by a sort, in each of two decisions."""

    def sparsemax(scores: Tensor) -> Tensor:
        ordered = scores.sort(-1, descending=True).values
        places = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
        sums = ordered.cumsum(-1)
        count = (1 + places * ordered > sums).sum(-1, keepdim=True)
        return (scores - (sums.gather(-1, count - 1) - 1) / count).clamp(min=0)

    def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        prior, out, mask = torch.ones_like(x), torch.zeros(()), x
        for attend, feature in (("attend1", "feature1"), ("attend2", "feature2")):
            mask = sparsemax((x @ params[attend]) * prior)
            prior = prior * (1.3 - mask)
            out = out + F.relu(F.glu((mask * x) @ params[feature], -1))
        entropy = (-mask * torch.log(mask + 1e-10)).sum(-1).mean()
        return F.cross_entropy(out @ params["head"], labels) + 1e-2 * entropy

    params = {f"attend{i}": randn(6, 6, seed=i) for i in (1, 2)}
    params |= {f"feature{i}": randn(6, 8, seed=i) for i in (1, 2)}
    return Program(loss, {**params, "head": randn(4, 3)}, (randn(4, 6), indices(3, 4)))


def transducer() -> Program:
    """RNN-T: the forward algorithm over frames and labels, in logarithms."""

    def loss(params: Any, frames: Tensor, labels: Tensor) -> Tensor:
        before = F.embedding(F.pad(labels, (1, 0)), params["embed"]) @ params["predict"]
        joint = torch.tanh((frames @ params["encode"])[:, :, None] + before[:, None])
        logp = (joint @ params["out"]).log_softmax(-1)
        blank, given = logp[..., 0], labels[:, None, :, None].expand(-1, logp.shape[1], -1, 1)
        label = logp[:, :, :-1].gather(-1, given)[..., 0]
        alpha = {(0, 0): torch.zeros_like(blank[:, 0, 0])}
        for t in range(blank.shape[1]):
            for u in range(blank.shape[2]):
                ways = [alpha[t - 1, u] + blank[:, t - 1, u]] if t else []
                ways += [alpha[t, u - 1] + label[:, t, u - 1]] if u else []
                if ways:
                    alpha[t, u] = torch.logaddexp(*ways) if len(ways) == 2 else ways[0]
        return -(alpha[max(alpha)] + blank[:, -1, -1]).mean()

    params = {"encode": randn(5, 6), "embed": randn(4, 5), "predict": randn(5, 6)}
    batch = (randn(4, 3, 5), indices(3, 4, 2) + 1)
    return Program(loss, {**params, "out": randn(6, 4)}, batch)


def mel_spectrogram() -> Program:
    """A learned filter bank on the short-time Fourier transform."""

    def loss(params: Any, wave: Tensor, due: Tensor) -> Tensor:
        window = torch.hann_window(16, dtype=wave.dtype)
        spectrum = torch.stft(wave, 16, 4, window=window, return_complex=True)
        mel = torch.einsum("mf,bft->bmt", params["bank"].abs(), spectrum.abs().square())
        h = F.conv1d(torch.log(mel + 1e-5), params["conv"], padding=1)
        return F.l1_loss(h.mean(-1), due)

    params = {"bank": randn(6, 9), "conv": randn(4, 6, 3)}
    return Program(loss, params, (randn(4, 40), randn(4, 4)))


def contrastive_speech() -> Program:
    """wav2vec 2.0: masked frames, a Gumbel codebook of two groups, negatives of the same row."""

    def loss(params: Any, wave: Tensor, mask: Tensor, noise: Tensor, others: Tensor) -> Tensor:
        z = F.gelu(F.conv1d(wave, params["conv"], stride=2)).transpose(1, 2)
        c = torch.where(mask[..., None], params["mask"], z)
        c = c + ((c @ params["q"]) @ (c @ params["k"]).transpose(1, 2)).softmax(-1) @ c
        soft = ((z @ params["codes"]).view(*z.shape[:2], 2, 4) + noise).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), 4).to(soft.dtype)
        quantised = ((hard - soft).detach() + soft).flatten(-2) @ params["book"]
        wrong = quantised[torch.arange(len(wave))[:, None, None], others]
        candidates = torch.cat([quantised[:, :, None], wrong], 2)
        near = (F.cosine_similarity(c[:, :, None], candidates, dim=-1) / 0.1).flatten(0, 1)
        each = F.cross_entropy(near, torch.zeros(len(near), dtype=torch.long), reduction="none")
        used, kept = soft.mean((0, 1)), mask.flatten().to(near.dtype)
        return (each * kept).sum() / kept.sum() + 0.1 * (used * torch.log(used + 1e-7)).sum()

    params = {"conv": randn(6, 2, 3), "mask": randn(6), "q": randn(6, 4), "k": randn(6, 4, seed=2)}
    params |= {"codes": randn(6, 8), "book": randn(8, 6)}
    mask = randn(4, 5) > 0.3
    batch = (randn(4, 2, 11), mask, randn(4, 5, 2, 4), indices(5, 4, 5, 3))
    return Program(loss, params, batch)


def own_target() -> Program:
    """BYOL: a target network without gradient, batch normalisation without running statistics."""

    def net(params: Any, x: Tensor) -> Tensor:
        h = F.batch_norm(x @ params["body"], None, None, params["gain"], params["shift"], True)
        return h.relu() @ params["out"]

    def loss(params: Any, x1: Tensor, x2: Tensor, target: Any) -> Tensor:
        with torch.no_grad():
            due1, due2 = net(target, x1), net(target, x2)

        def off(x: Tensor, due: Tensor) -> Tensor:
            near = F.normalize(net(params, x) @ params["predict"], dim=-1) * F.normalize(
                due, dim=-1
            )
            return 2 - 2 * near.sum(-1)

        return (off(x1, due2) + off(x2, due1)).mean()

    net_params = {"body": randn(5, 6), "gain": randn(6), "shift": randn(6), "out": randn(6, 4)}
    batch = (randn(8, 5), randn(8, 5, seed=2), {k: 0.9 * v for k, v in net_params.items()})
    batch_specs = (P("dp"), P("dp"), P())
    return Program(loss, {**net_params, "predict": randn(4, 4)}, batch, batch_specs=batch_specs)


def normed_weights() -> Program:
    """torch's spectral and weight norm as parametrizations."""
    parametrized = nn.utils.parametrizations
    first, last = nn.Linear(5, 6), nn.Linear(6, 2)
    layers = [parametrized.spectral_norm(first), nn.Tanh(), parametrized.weight_norm(last)]
    model = nn.Sequential(*layers).double().eval()
    return of_model(model, lambda call, x, due: F.mse_loss(call(x), due), randn(4, 5), randn(4, 2))


def boxes_by_grid() -> Program:
    """RoIAlign by grid_sample: features at a grid of places in each box."""

    def loss(params: Any, image: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        features = F.conv2d(image, params["conv"], padding=1)
        line = torch.linspace(0, 1, 3, dtype=image.dtype)
        down, across = torch.meshgrid(line, line, indexing="ij")
        left, top, right, low = boxes[..., None, None].unbind(2)
        grid = torch.stack([left + across * (right - left), top + down * (low - top)], -1) * 2 - 1
        repeated = features.repeat_interleave(boxes.shape[1], 0)
        found = F.grid_sample(repeated, grid.flatten(0, 1), align_corners=False)
        return F.cross_entropy(found.flatten(1) @ params["head"], labels.flatten())

    params = {"conv": randn(4, 3, 3, 3), "head": randn(36, 3)}
    return Program(loss, params, (randn(4, 3, 5, 5), randn(4, 2, 4).sigmoid(), indices(3, 4, 2)))


def gated_linear_attention() -> Program:
    """GLA in chunks: attention with decays inside, a state from chunk to chunk."""

    def loss(params: Any, x: Tensor) -> Tensor:
        q, k, v = ((x @ params[name]).unflatten(1, (2, 3)) for name in "qkv")
        decay = (F.logsigmoid(x @ params["gate"]) / 4).unflatten(1, (2, 3)).cumsum(2)
        state, found = x.new_zeros(len(x), 6, 6), []
        for i in range(2):
            at = decay[:, i]
            queries = q[:, i] * at.exp()
            inside = (queries @ (k[:, i] * (-at).exp()).mT).tril()
            found.append(inside @ v[:, i] + queries @ state)
            rest = (at[:, -1:] - at).exp()
            state = state * at[:, -1].exp()[..., None] + (k[:, i] * rest).mT @ v[:, i]
        return (torch.cat(found, 1) @ params["out"]).square().mean()

    params = {name: randn(4, 6, seed=i) / 2 for i, name in enumerate(("q", "k", "v", "gate"))}
    return Program(loss, {**params, "out": randn(6, 4)}, (randn(4, 6, 4),))


def matrix_memory() -> Program:
    """xLSTM's mLSTM in its parallel form, with its stabilised gates."""

    def loss(params: Any, x: Tensor) -> Tensor:
        q, k, v = ((x @ params[name]).unflatten(-1, (2, 3)) for name in "qkv")
        forget = F.logsigmoid(x @ params["forget"]).cumsum(1)
        decay = forget[:, :, None] - forget[:, None] + (x @ params["enter"])[:, None]
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[..., None]
        decay = decay.masked_fill(~seen, -math.inf)
        most = decay.amax(2, keepdim=True)
        scores = torch.einsum("bthd,bshd->btsh", q, k) / 3**0.5 * (decay - most).exp()
        norm = torch.maximum(scores.sum(2).abs(), (-most[:, :, 0]).exp())
        h = torch.einsum("btsh,bshd->bthd", scores, v) / norm[..., None]
        return (h.flatten(2) @ params["out"]).square().mean()

    params = {name: randn(4, 6, seed=i) for i, name in enumerate("qkv")}
    params |= {"enter": randn(4, 2), "forget": randn(4, 2, seed=2), "out": randn(6, 4)}
    return Program(loss, params, (randn(4, 5, 4),))


def structured_perceptron() -> Program:
    """The score of the best path, found by Viterbi and traced back, less that of the given one."""

    def loss(params: Any, x: Tensor, given: Tensor) -> Tensor:
        emitted, steps = x @ params["emit"], params["steps"]
        score, back = emitted[:, 0], []
        for t in range(1, x.shape[1]):
            best, where = (score[:, :, None] + steps).max(1)
            score = best + emitted[:, t]
            back.append(where)
        path = [score.argmax(-1)]
        for where in reversed(back):
            path.append(where.gather(1, path[-1][:, None])[:, 0])

        def total(path: Tensor) -> Tensor:
            along = emitted.gather(-1, path[..., None]).sum()
            return along + steps[path[:, :-1], path[:, 1:]].sum()

        return (total(torch.stack(path[::-1], 1)) - total(given)) / len(x)

    params = {"emit": randn(5, 4), "steps": randn(4, 4)}
    return Program(loss, params, (randn(4, 6, 5), indices(4, 4, 6)))


def made_weights() -> Program:
    """A hypernetwork: each example's network is made from its code, mapped by vmap."""

    def net(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        return torch.sin(x @ up) @ down

    def loss(params: Any, code: Tensor, x: Tensor, due: Tensor) -> Tensor:
        h = torch.tanh(code @ params["body"])
        up = (h @ params["up"]).unflatten(-1, (3, 5))
        down = (h @ params["down"]).unflatten(-1, (5, 1))
        return F.mse_loss(torch.vmap(net)(up, down, x), due)

    params = {"body": randn(3, 6), "up": randn(6, 15), "down": randn(6, 5)}
    return Program(loss, params, (randn(4, 3), randn(4, 7, 3), randn(4, 7, 1)))


def turned_geometry() -> Program:
    """Quaternions, a matrix exponential, angles and determinants of rotations."""

    def loss(params: Any, x: Tensor, points: Tensor) -> Tensor:
        w, a, b, c = F.normalize(x @ params["turn"], dim=-1).unbind(-1)
        rows = [1 - 2 * (b * b + c * c), 2 * (a * b - c * w), 2 * (a * c + b * w)]
        rows += [2 * (a * b + c * w), 1 - 2 * (a * a + c * c), 2 * (b * c - a * w)]
        rows += [2 * (a * c - b * w), 2 * (b * c + a * w), 1 - 2 * (a * a + b * b)]
        axis = torch.linalg.cross(points, points @ params["mix"], dim=-1)
        skew = (axis[:, :, None] - axis[:, None]) / 10
        turned = torch.stack(rows, -1).unflatten(-1, (3, 3)) @ torch.linalg.matrix_exp(skew)
        cosine = (turned.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
        volume = torch.linalg.det(turned + 3 * torch.eye(3, dtype=x.dtype))
        return torch.acos(cosine.clamp(-0.99, 0.99)).mean() + volume.log1p().mean()

    return Program(loss, {"turn": randn(5, 4), "mix": randn(3, 3)}, (randn(4, 5), randn(4, 3)))


def rotated_filters() -> Program:
    """A convolution that is equivariant to quarter turns, circular padding."""

    def loss(params: Any, image: Tensor, labels: Tensor) -> Tensor:
        turned = [torch.rot90(params["filter"], k, (2, 3)) for k in range(4)]
        h = F.relu(F.conv2d(image, torch.stack(turned, 1).flatten(0, 1), padding=1))
        h = F.pad(h.unflatten(1, (-1, 4)).amax(2), (1, 1, 1, 1), mode="circular")
        return F.cross_entropy(F.adaptive_avg_pool2d(h, 2).flatten(1) @ params["head"], labels)

    params = {"filter": randn(4, 2, 3, 3), "head": randn(16, 3)}
    return Program(loss, params, (randn(4, 2, 5, 5), indices(3, 4)))


def softmax_of_a_tree() -> Program:
    """word2vec's hierarchical softmax on bags of words, paths of unequal lengths."""

    def loss(params: Any, bags: Tensor, path: Tensor, code: Tensor, count: Tensor) -> Tensor:
        h = F.embedding_bag(bags, params["embed"], mode="mean")
        scores = torch.einsum("bd,bld->bl", h, params["nodes"][path])
        kept = (torch.arange(path.shape[1]) < count[:, None]).to(scores.dtype)
        each = F.binary_cross_entropy_with_logits(scores, code, weight=kept, reduction="sum")
        return each / kept.sum()

    params = {"embed": randn(9, 6), "nodes": randn(7, 6)}
    code = (randn(4, 5, seed=3) > 0).double()
    batch = (indices(9, 4, 3), indices(7, 4, 5), code, indices(4, 4) + 1)
    return Program(loss, params, batch)


def contractive_encoder() -> Program:
    """A contractive autoencoder, and its Laplacian: jacrev, and jacfwd of grad."""

    def loss(params: Any, x: Tensor) -> Tensor:
        def f(x: Tensor) -> Tensor:
            return torch.sigmoid(x @ params["code"] + params["bias"]) @ params["code"].T

        def curved(x: Tensor) -> Tensor:
            return torch.func.jacfwd(torch.func.grad(lambda z: f(z).sum()))(x)

        jacobian = torch.vmap(torch.func.jacrev(f))(x)
        laplacian = torch.vmap(curved)(x).diagonal(dim1=1, dim2=2).sum(-1)
        penalty = jacobian.square().sum((1, 2)).mean() + laplacian.square().mean() / 10
        return F.mse_loss(f(x), x) + penalty / 10

    return Program(loss, {"code": randn(5, 4), "bias": randn(4)}, (randn(4, 5),))


def masked_diffusion() -> Program:
    """A masked diffusion language model: its time turns and scales the activations."""

    def loss(params: Any, ids: Tensor, time: Tensor, mask: Tensor) -> Tensor:
        h = F.embedding(torch.where(mask, torch.full_like(ids, 10), ids), params["embed"])
        angles = time[:, None] * torch.arange(1, 4)
        scale, shift = (torch.cat([angles.sin(), angles.cos()], -1) @ params["time"]).chunk(2, -1)
        h = h * (1 + scale[:, None]) + shift[:, None]
        q, k, v = (h @ params["qkv"]).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v)
        h = h + found.transpose(1, 2).flatten(2) @ params["out"]
        logits = (h @ params["embed"].T)[..., :10].flatten(0, 1)
        each = F.cross_entropy(logits, ids.flatten(), reduction="none").view_as(ids)
        return (each * mask / time[:, None]).sum() / mask.numel()

    params = {"embed": randn(11, 6), "time": randn(6, 12), "qkv": randn(6, 18), "out": randn(6, 6)}
    mask = randn(4, 5, seed=2) > 0
    return Program(loss, params, (indices(10, 4, 5), randn(4).sigmoid() + 0.1, mask))


SIGNALS: dict[str, Callable[[], Program]] = {
    "GPTQ with LoRA": packed_integers,
    "quantisation-aware training": straight_through,
    "S-LoRA": many_adapters,
    "TabNet": sparse_features,
    "RNN transducer": transducer,
    "mel spectrogram": mel_spectrogram,
    "wav2vec 2.0": contrastive_speech,
    "BYOL": own_target,
    "spectral and weight norm": normed_weights,
    "RoIAlign": boxes_by_grid,
    "gated linear attention": gated_linear_attention,
    "mLSTM": matrix_memory,
    "structured perceptron": structured_perceptron,
    "hypernetwork": made_weights,
    "quaternions and rotations": turned_geometry,
    "group convolution": rotated_filters,
    "hierarchical softmax": softmax_of_a_tree,
    "contractive autoencoder": contractive_encoder,
    "masked diffusion language model": masked_diffusion,
}
