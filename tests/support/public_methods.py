"""Methods of training, sampling and inference, as their authors' code writes them: reinforcement
learning, flows, samplers, second-order steps, memories, sets and sequences of unequal lengths.

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
from torch.distributions import Categorical, Independent, MultivariateNormal, Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ftp import P


def group_relative() -> Program:
    """GRPO: rewards of four answers beside their mean, a clipped ratio, and a KL term."""

    def loss(params: Any, ids: Tensor, old: Tensor, ref: Tensor, reward: Tensor) -> Tensor:
        h = params["embed"][ids].cumsum(1)
        logits = F.gelu(h @ params["up"]) @ params["down"]
        logp = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(-1)
        groups = reward.view(-1, 4)
        mean, std = (t.repeat_interleave(4, 0) for t in (groups.mean(1), groups.std(1)))
        advantage = ((reward - mean) / (std + 1e-4))[:, None]
        ratio = (logp - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = (ref - logp).exp() - (ref - logp) - 1
        kept = (ids[:, 1:] != 2).to(logp.dtype)
        each = ((0.04 * kl - gain) * kept).sum(1) / kept.sum(1).clamp(min=1)
        return each.mean()

    params = {"embed": randn(11, 8) / 8, "up": randn(8, 9), "down": randn(9, 11) / 8}
    old, ref = -randn(8, 5).abs() - 1, -randn(8, 5, seed=2).abs() - 1
    return Program(loss, params, (tokens(11, 8, 6), old, ref, randn(8)))


def advantage_actor() -> Program:
    """A2C: generalized advantages are written in place, step by step from the last one."""

    def loss(params: Any, seen: Tensor, acts: Tensor, reward: Tensor, done: Tensor) -> Tensor:
        h = torch.tanh(seen @ params["body"])
        value = (h @ params["value"]).squeeze(-1)
        steps, advantage, last = len(reward), torch.zeros_like(reward), 0.0
        with torch.no_grad():
            for t in reversed(range(steps)):
                ahead = value[t + 1] if t + 1 < steps else torch.zeros_like(value[0])
                surprise = reward[t] + 0.9 * ahead * (1 - done[t]) - value[t]
                advantage[t] = last = surprise + 0.9 * 0.95 * (1 - done[t]) * last
            due = advantage + value
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = Categorical(logits=h @ params["policy"])
        chosen = policy.log_prob(acts) * advantage
        return F.mse_loss(value, due) - chosen.mean() - 0.01 * policy.entropy().mean()

    params = {"body": randn(4, 6), "value": randn(6, 1), "policy": randn(6, 3)}
    acts, done = tokens(5, 5, 4) - 2, (tokens(4, 5, 4) == 2).double()
    return Program(
        loss, params, (randn(5, 4, 4), acts, randn(5, 4), done), batch_specs=P(None, "dp")
    )


def distributional() -> Program:
    """C51: the target's distribution is projected onto the support by two writes of an index."""

    def loss(params: Any, seen: Tensor, acts: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        atoms, batch = 7, len(seen)
        support = torch.linspace(-2, 2, atoms, dtype=seen.dtype)

        def of(x: Tensor) -> Tensor:
            return (F.relu(x @ params["up"]) @ params["down"]).view(batch, 3, atoms)

        with torch.no_grad():
            p = of(after).softmax(-1)
            p = p[range(batch), (p * support).sum(-1).argmax(1)]
            at = ((reward[:, None] + 0.9 * support).clamp(-2, 2) + 2) / (4 / (atoms - 1))
            low, high = at.floor().long(), at.ceil().long()
            low[(high > 0) & (low == high)] -= 1
            high[(low < atoms - 1) & (low == high)] += 1
            rows, due = torch.arange(batch)[:, None] * atoms, seen.new_zeros(batch, atoms)
            due.view(-1).index_add_(0, (low + rows).view(-1), (p * (high - at)).view(-1))
            due.view(-1).index_add_(0, (high + rows).view(-1), (p * (at - low)).view(-1))
        return -(due * of(seen).log_softmax(-1)[range(batch), acts]).sum(1).mean()

    params = {"up": randn(4, 8), "down": randn(8, 21)}
    batch = (randn(4, 4), tokens(5, 4) - 2, randn(4), randn(4, 4, seed=2))
    return Program(loss, params, batch)


def quantile_regression() -> Program:
    """QR-DQN: pairs of quantiles under a Huber loss that is weighted by the sign of the error."""

    def loss(params: Any, seen: Tensor, acts: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        def of(x: Tensor) -> Tensor:
            return (F.relu(x @ params["up"]) @ params["down"]).unflatten(-1, (3, 5))

        with torch.no_grad():
            best = of(after).mean(2).argmax(1)
            due = reward[:, None] + 0.9 * of(after)[range(len(best)), best]
        found = of(seen)[torch.arange(len(seen)), acts]
        error = due[:, None] - found[:, :, None]
        tau = (torch.arange(5, dtype=seen.dtype) + 0.5) / 5
        size = F.huber_loss(*torch.broadcast_tensors(found[:, :, None], due[:, None]), "none")
        return ((tau[:, None] - (error.detach() < 0).double()).abs() * size).sum(1).mean()

    params = {"up": randn(4, 8), "down": randn(8, 15)}
    return Program(loss, params, (randn(4, 4), tokens(5, 4) - 2, randn(4), randn(4, 4, seed=2)))


def world_model() -> Program:
    """Dreamer's recurrent state: prior and posterior of each step, free nats, reconstructions."""

    def loss(params: Any, seen: Tensor, acts: Tensor, noise: Tensor) -> Tensor:
        h, z = seen.new_zeros(len(seen), 6), seen.new_zeros(len(seen), 3)
        costs, logps = [], []
        for t in range(seen.shape[1]):
            h = torch.tanh(torch.cat([z, acts[:, t]], -1) @ params["in"] + h @ params["own"])
            mean, scale = (h @ params["prior"]).chunk(2, -1)
            prior = Independent(Normal(mean, F.softplus(scale) + 0.1), 1)
            mean, scale = (torch.cat([h, seen[:, t]], -1) @ params["posterior"]).chunk(2, -1)
            posterior = Independent(Normal(mean, F.softplus(scale) + 0.1), 1)
            z = posterior.mean + posterior.stddev * noise[:, t]
            costs.append(kl_divergence(posterior, prior).clamp(min=0.3))
            decoded = Normal(torch.cat([h, z], -1) @ params["decode"], 1.0)
            logps.append(decoded.log_prob(seen[:, t]).sum(-1))
        return torch.stack(costs).mean() - torch.stack(logps, 1).mean()

    sizes = {"in": (5, 6), "own": (6, 6), "prior": (6, 6), "posterior": (10, 6), "decode": (9, 4)}
    params = {name: randn(*size, seed=i) / 2 for i, (name, size) in enumerate(sizes.items())}
    return Program(loss, params, (randn(4, 3, 4), randn(4, 3, 2), randn(4, 3, 3)))


def spline_flow() -> Program:
    """A neural spline flow: bins are found by comparison, their rational quadratics by gather."""

    def spline(x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor) -> Any:
        inside, at = (x >= -3) & (x <= 3), x.clamp(-3, 3)
        widths, heights = (F.softmax(t, -1) * 0.96 + 0.01 for t in (widths, heights))
        left, low = (F.pad(t.cumsum(-1), (1, 0)) * 6 - 3 for t in (widths, heights))
        left[..., -1], low[..., -1] = 3.0, 3.0
        slopes = F.pad(F.softplus(slopes) + 1e-3, (1, 1), value=1.0)
        bins = ((at[..., None] >= left[..., :-1]).sum(-1) - 1)[..., None]

        def of(t: Tensor) -> Tensor:
            return t.gather(-1, bins).squeeze(-1)

        width, height = of(left.diff()), of(low.diff())
        theta, slope = (at - of(left)) / width, height / width
        first, last, mixed = of(slopes), of(slopes[..., 1:]), theta * (1 - theta)
        below = slope + (first + last - 2 * slope) * mixed
        y = of(low) + height * (slope * theta.square() + first * mixed) / below
        steep = last * theta.square() + 2 * slope * mixed + first * (1 - theta).square()
        logdet = (slope.square() * steep).log() - 2 * below.log()
        return torch.where(inside, y, x), torch.where(inside, logdet, 0.0)

    def loss(params: Any, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, -1)
        knots = (torch.tanh(kept @ params["up"]) @ params["down"]).unflatten(-1, (3, 11))
        changed, logdet = spline(changed, *knots.split([4, 4, 3], -1))
        return (torch.cat([kept, changed], -1).square() / 2).sum(-1).mean() - logdet.sum(-1).mean()

    return Program(loss, {"up": randn(3, 8), "down": randn(8, 33) / 2}, (randn(4, 6) * 1.7,))


def autoregressive_flow() -> Program:
    """MAF: masked layers, and a prior of torch.distributions whose covariance it validates."""

    class Masked(nn.Linear):
        def __init__(self, of: Tensor, to: Tensor, strict: bool):
            super().__init__(len(of), len(to))
            mask = to[:, None] > of if strict else to[:, None] >= of
            self.register_buffer("mask", mask.double())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.mask, self.bias)

    dims, hidden = torch.arange(5), torch.arange(9) % 4
    blocks = [
        nn.Sequential(Masked(dims, hidden, False), nn.ReLU(), Masked(hidden, dims.repeat(2), True))
        for _ in range(2)
    ]

    def loss(call: Any, x: Tensor) -> Tensor:
        z, logdet = call(x)
        prior = MultivariateNormal(z.new_zeros(5), torch.eye(5, dtype=z.dtype))
        return -(prior.log_prob(z) + logdet).mean()

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logdet = x.new_zeros(len(x))
            for block in self.blocks:
                shift, scale = block(x).chunk(2, 1)
                x = ((x - shift) * torch.exp(-scale.tanh())).flip(1)
                logdet = logdet - scale.tanh().sum(1)
            return x, logdet

    return of_model(Flow(), loss, randn(4, 5))


def continuous_flow() -> Program:
    """FFJORD with exact traces: a vmap of Jacobians at each step of a solver."""

    def loss(params: Any, x: Tensor) -> Tensor:
        def velocity(z: Tensor, t: Tensor) -> Tensor:
            return torch.tanh(torch.cat([z, t.expand(1)]) @ params["up"]) @ params["down"]

        logdet, step = x.new_zeros(len(x)), 1 / 3
        for t in torch.linspace(0, 1, 4, dtype=x.dtype)[:-1]:
            jacobians = torch.func.vmap(torch.func.jacrev(velocity), (0, None))(x, t)
            logdet = logdet + step * jacobians.diagonal(dim1=-2, dim2=-1).sum(-1)
            x = x + step * torch.func.vmap(velocity, (0, None))(x, t)
        return (x.square().sum(-1) / 2 - logdet).mean()

    return Program(loss, {"up": randn(4, 6), "down": randn(6, 3)}, (randn(4, 3),))


def score_matching() -> Program:
    """Sliced score matching: the gradient of a gradient that autograd.grad takes of inputs."""

    def loss(params: Any, x: Tensor, direction: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        logp = -(torch.tanh(x @ params["up"]) @ params["down"]).sum()
        (score,) = torch.autograd.grad(logp, x, create_graph=True)
        along = (score * direction).sum()
        (change,) = torch.autograd.grad(along, x, create_graph=True)
        return ((score * direction).sum(-1).square() / 2 + (change * direction).sum(-1)).mean()

    params = {"up": randn(5, 8), "down": randn(8, 1)}
    return Program(loss, params, (randn(4, 5), randn(4, 5, seed=2)))


def guided_sampler() -> Program:
    """DDIM under classifier-free guidance, through which a loss is taken."""

    def loss(params: Any, x: Tensor, classes: Tensor) -> Tensor:
        kept = torch.cos((torch.arange(21, dtype=x.dtype) / 20 + 0.008) / 1.008 * math.pi / 2) ** 2

        def noise(x: Tensor, t: Tensor, c: Tensor) -> Tensor:
            return (
                torch.tanh(x @ params["up"] + params["time"][t] + params["class"][c])
                @ params["out"]
            )

        for now, then in ((15, 10), (10, 5), (5, 0)):
            t = torch.full((2 * len(x),), now)
            both = noise(torch.cat([x, x]), t, torch.cat([classes, torch.zeros_like(classes)]))
            conditional, free = both.chunk(2)
            guided = free + 2.0 * (conditional - free)
            start = ((x - guided * (1 - kept[now]).sqrt()) / kept[now].sqrt()).clamp(-1, 1)
            x = kept[then].sqrt() * start + (1 - kept[then]).clamp(min=0).sqrt() * guided
        return x.square().mean() + 0.1 * x.sum()

    params = {"up": randn(4, 7), "time": randn(20, 7), "class": randn(5, 7), "out": randn(7, 4)}
    return Program(loss, params, (randn(4, 4), tokens(5, 4)))


def nucleus() -> Program:
    """Sampling's filters: a penalty of repetition, the top k, the nucleus of a sort."""

    def loss(params: Any, ids: Tensor) -> Tensor:
        logits = params["embed"][ids].mean(1) @ params["head"]
        score = logits.gather(1, ids)
        logits = logits.scatter(1, ids, torch.where(score < 0, score * 1.2, score / 1.2))
        logits = logits.masked_fill(logits < logits.topk(6).values[:, [-1]], -math.inf)
        ordered, order = logits.sort(descending=False)
        is_rare = ordered.softmax(-1).cumsum(-1) <= 0.2
        is_rare[..., -1:] = False
        logits = logits.masked_fill(is_rare.scatter(1, order, is_rare), -math.inf)
        return logits.softmax(-1).square().sum(-1).mean()

    return Program(loss, {"embed": randn(11, 6), "head": randn(6, 11)}, (tokens(11, 4, 3),))


def cached_decoding() -> Program:
    """Greedy decoding into a cache of fixed length, one position at a time."""

    def loss(params: Any, ids: Tensor) -> Tensor:
        batch, steps = ids.shape
        keys, values = (params["embed"].new_zeros(batch, steps, 4) for _ in range(2))
        made, token = [], ids[:, 0]
        for t in range(steps):
            h = params["embed"][token]
            keys = keys.index_copy(1, torch.tensor([t]), (h @ params["k"])[:, None])
            values = values.index_copy(1, torch.tensor([t]), (h @ params["v"])[:, None])
            scores = torch.einsum("bd,bsd->bs", h @ params["q"], keys)
            scores = scores.masked_fill(torch.arange(steps) > t, -math.inf)
            h = h + torch.einsum("bs,bsd->bd", scores.softmax(-1), values) @ params["out"]
            made.append(h @ params["embed"].T)
            token = made[-1].argmax(-1)
        return F.cross_entropy(torch.stack(made, 1).flatten(0, 1), ids.flatten())

    params = {name: randn(6, 4, seed=i) for i, name in enumerate("qkv")}
    return Program(loss, {**params, "embed": randn(9, 6), "out": randn(4, 6)}, (tokens(9, 4, 5),))


class _Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.lstm = nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.lstm(packed)[0], True, total_length=ids.shape[1])
        return self.out(padded)


def packed_tagger() -> Program:
    """A tagger of sentences of unequal lengths: a bidirectional LSTM over packed sequences."""
    lengths = torch.tensor([3, 5, 1, 4])
    kept = torch.arange(5) < lengths[:, None]

    def loss(call: Any, ids: Tensor, lengths: Tensor, tags: Tensor) -> Tensor:
        return F.cross_entropy(call(ids, lengths).transpose(1, 2), tags, ignore_index=-100)

    tags = torch.where(kept, tokens(5, 4, 5) - 2, -100)
    return of_model(_Tagger(), loss, tokens(9, 4, 5) * kept, lengths, tags)


def packed_classifier() -> Program:
    """pytorch's text classification with a GRU: the last state of each sentence."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Embedding(9, 4), nn.GRU(4, 6)
            self.out = nn.Linear(6, 3)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            _, last = self.gru(pack_padded_sequence(self.embed(ids.T), lengths.cpu()))
            return self.out(last[-1])

    def loss(call: Any, ids: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(ids, lengths), y)

    lengths = torch.tensor([4, 3, 3, 1])
    return of_model(Classifier(), loss, tokens(9, 4, 5), lengths, tokens(5, 4) - 2)


def adaptive_softmax() -> Program:
    """A language model with torch's adaptive softmax of rare words."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body = nn.Embedding(14, 6), nn.Linear(6, 8)
            self.out = nn.AdaptiveLogSoftmaxWithLoss(8, 14, [4, 9], div_value=2.0)

        def forward(self, ids: Tensor, due: Tensor) -> Tensor:
            return self.out(self.body(self.embed(ids)).tanh().flatten(0, 1), due.flatten()).loss

    ids = tokens(14, 4, 5)
    return of_model(Model(), lambda call, x, y: call(x, y), ids, ids.roll(-1, 1))


def soft_alignment() -> Program:
    """Soft-DTW: a table of costs, cell by cell."""

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(x @ params["w"], y @ params["w"]).square()
        batch, n, m = cost.shape
        far = cost.new_full((batch,), 1e8)
        row = [cost.new_zeros(batch)] + [far] * m
        for i in range(n):
            above, row = row, [far]
            for j in range(m):
                soft = torch.logsumexp(-torch.stack([above[j], above[j + 1], row[j]], -1), -1)
                row.append(cost[:, i, j] - soft)
        return row[-1].mean()

    return Program(loss, {"w": randn(3, 4)}, (randn(4, 4, 3), randn(4, 3, 3, seed=2)))


def mixture_of_depths() -> Program:
    """A router takes three of five tokens, in order, through attention; the others skip it."""

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        weight, chosen = torch.topk((x @ params["router"]).squeeze(-1), 3, dim=1, sorted=False)
        chosen, order = chosen.sort(1)
        weight = weight.gather(1, order).sigmoid()[..., None]
        at = chosen[..., None].expand(-1, -1, x.shape[-1])
        picked = x.gather(1, at)
        q, k, v = (picked @ params[name] for name in "qkv")
        made = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        out = x.scatter_add(1, at, weight * made[:, 0])
        return F.cross_entropy((out @ params["head"]).flatten(0, 1), y.flatten())

    params = {name: randn(6, 6, seed=i) for i, name in enumerate("qkv")}
    params |= {"router": randn(6, 1), "head": randn(6, 7)}
    return Program(loss, params, (randn(4, 5, 6), tokens(7, 4, 5)))


def delta_rule() -> Program:
    """DeltaNet in chunks: a triangular inverse row by row in place, then a state over chunks."""

    def loss(params: Any, x: Tensor) -> Tensor:
        q, k, v = x @ params["q"], F.normalize(x @ params["k"], dim=-1), x @ params["v"]
        beta = (x @ params["beta"]).sigmoid()
        q, k, v, beta = (t.unflatten(1, (-1, 3)) for t in (q, k, v, beta))
        upper = torch.ones(3, 3, dtype=torch.bool).triu()
        inverse = -((k * beta) @ k.mT).masked_fill(upper, 0)
        for i in range(1, 3):
            row = inverse[..., i, :, None].clone()
            inverse[..., i, :i] += (row * inverse[..., :i].clone()).sum(-2)
        inverse = inverse + torch.eye(3, dtype=x.dtype)
        writes, reads = inverse @ (v * beta), inverse @ (k * beta)
        state, out = x.new_zeros(len(x), 4, 4), torch.zeros_like(v)
        for i in range(q.shape[1]):
            new = writes[:, i] - reads[:, i] @ state
            near = (q[:, i] @ k[:, i].mT).masked_fill(upper.triu(1), 0)
            out[:, i] = q[:, i] @ state + near @ new
            state = state + k[:, i].mT @ new
        return out.square().mean()

    params = {name: randn(5, 4, seed=i) for i, name in enumerate("qkv")} | {"beta": randn(5, 1)}
    return Program(loss, params, (randn(4, 6, 5),))


def random_features() -> Program:
    """Performer: attention by positive random features."""

    def features(x: Tensor, w: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        at = torch.einsum("...id,jd->...ij", x, w) - x.square().sum(-1, keepdim=True) / 2
        return (at - at.amax(dim=(-1, -2), keepdim=True).detach()).exp() + 1e-4

    def loss(params: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        q, k, v = (x @ params["qkv"]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        q, k = features(q, w), features(k, w)
        scale = 1 / torch.einsum("...nd,...d->...n", q, k.sum(-2))
        context = torch.einsum("...nd,...ne->...de", k, v)
        out = torch.einsum("...de,...nd,...n->...ne", context, q, scale)
        return F.mse_loss(out.transpose(1, 2).flatten(2) @ params["out"], y)

    params, w = {"qkv": randn(6, 24), "out": randn(8, 6)}, torch.linalg.qr(randn(5, 4))[0]
    specs = (P("dp"), P(), P("dp"))
    return Program(loss, params, (randn(4, 5, 6), w, randn(4, 5, 6, seed=2)), batch_specs=specs)


def hashed_attention() -> Program:
    """Reformer: positions are sorted by a hash, attend within chunks, and are sorted back."""

    def loss(params: Any, x: Tensor, turns: Tensor) -> Tensor:
        q, v, steps = x @ params["q"], x @ params["v"], x.shape[1]
        turned = q @ turns
        buckets = torch.cat([turned, -turned], -1).argmax(-1)
        order = (steps * buckets + torch.arange(steps)).argsort(-1)
        back = order.argsort(-1)

        def taken(t: Tensor, at: Tensor) -> Tensor:
            return t.gather(1, at[..., None].expand(-1, -1, t.shape[-1]))

        def with_last(t: Tensor) -> Tensor:
            return torch.cat([t, t.roll(1, 1)], 2)

        q, v, at = (t.unflatten(1, (2, -1)) for t in (taken(q, order), taken(v, order), order))
        k, v = with_last(F.normalize(q, dim=-1)), with_last(v)
        scores = q @ k.mT / 2
        scores.masked_fill_(at[..., :, None] == with_last(at)[..., None, :], -5e4)
        return taken((scores.softmax(-1) @ v).flatten(1, 2), back).square().mean()

    params = {"q": randn(5, 4), "v": randn(5, 3)}
    return Program(loss, params, (randn(4, 6, 5), randn(4, 2)), batch_specs=(P("dp"), P()))


def turing_machine() -> Program:
    """A neural Turing machine's head: content, shift by a circular convolution, erase and add."""

    def loss(params: Any, x: Tensor) -> Tensor:
        memory, made = params["memory"].expand(len(x), -1, -1), []
        weight = F.one_hot(torch.zeros(len(x), dtype=torch.long), 5).to(x.dtype)
        for t in range(x.shape[1]):
            parts = (x[:, t] @ params["control"]).split([4, 1, 1, 3, 1, 4, 4], 1)
            key, strength, gate, shift, sharp, erase, add = parts
            near = F.cosine_similarity(memory + 1e-16, key[:, None], dim=-1)
            near = F.softmax(F.softplus(strength) * near, 1)
            near = gate.sigmoid() * near + (1 - gate.sigmoid()) * weight
            moved = torch.stack([near.roll(s, 1) for s in (-1, 0, 1)], 1)
            weight = torch.einsum("bs,bsn->bn", shift.softmax(1), moved)
            weight = weight ** (1 + F.softplus(sharp))
            weight = weight / (weight.sum(1, keepdim=True) + 1e-16)
            memory = memory * (1 - weight[..., None] * erase.sigmoid()[:, None])
            memory = memory + weight[..., None] * add[:, None]
            made.append((weight[:, None] @ memory).squeeze(1))
        return torch.stack(made).square().mean()

    return Program(loss, {"memory": randn(5, 4), "control": randn(3, 18)}, (randn(4, 3, 3),))


def slots() -> Program:
    """Slot attention: slots compete for the inputs, and a GRU cell updates them."""

    class Slots(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in range(3))
            self.cell, self.norms = nn.GRUCell(6, 6), nn.ModuleList(nn.LayerNorm(6) for _ in "abc")
            self.mlp = nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 6))

        def forward(self, x: Tensor, slots: Tensor) -> Tensor:
            x = self.norms[0](x)
            k, v = self.k(x), self.v(x)
            for _ in range(2):
                scores = torch.einsum("bid,bjd->bij", self.q(self.norms[1](slots)), k)
                share = scores.softmax(1) + 1e-8
                share = share / share.sum(-1, keepdim=True)
                seen = torch.einsum("bjd,bij->bid", v, share)
                slots = self.cell(seen.reshape(-1, 6), slots.reshape(-1, 6)).view_as(slots)
                slots = slots + self.mlp(self.norms[2](slots))
            return slots

    def loss(call: Any, x: Tensor, slots: Tensor) -> Tensor:
        return call(x, slots).square().mean()

    return of_model(Slots(), loss, randn(4, 5, 6), randn(4, 3, 6))


def point_groups() -> Program:
    """PointNet++: farthest points, then the first four neighbours within a radius of each."""

    def loss(params: Any, points: Tensor) -> Tensor:
        batch, n, _ = points.shape
        rows, centres = torch.arange(batch), torch.zeros(batch, 3, dtype=torch.long)
        distance = points.new_full((batch, n), 1e10)
        farthest = torch.zeros(batch, dtype=torch.long)
        for i in range(3):
            centres[:, i] = farthest
            away = (points - points[rows, farthest][:, None]).square().sum(-1)
            is_nearer = away < distance
            distance[is_nearer] = away[is_nearer]
            farthest = distance.max(-1)[1]
        chosen = points[rows[:, None], centres]
        group = torch.arange(n).expand(batch, 3, n).clone()
        group[torch.cdist(chosen, points) > 1.3] = n
        group = group.sort(-1)[0][:, :, :4]
        first, is_none = group[:, :, :1].expand(-1, -1, 4), group == n
        group[is_none] = first[is_none]
        near = points[rows[:, None, None], group] - chosen[:, :, None]
        return F.relu(near @ params["w"]).max(2)[0].mean()

    return Program(loss, {"w": randn(3, 6)}, (randn(4, 7, 3),))


def equivariant() -> Program:
    """EGNN: messages by distance move the nodes of a graph."""
    edges = torch.stack([torch.arange(12) % 6, (torch.arange(12) * 5 + 1) % 6])

    def loss(params: Any, h: Tensor, x: Tensor) -> Tensor:
        to, of = edges
        for _ in range(2):
            away = x[to] - x[of]
            length = away.square().sum(1, keepdim=True)
            message = F.silu(torch.cat([h[to], h[of], length], 1) @ params["edge"])
            pull = away / (length.sqrt() + 1) * (message @ params["pull"])
            at, ones = to[:, None].expand(-1, 3), torch.ones_like(pull)
            count = x.new_zeros(x.shape).scatter_add_(0, at, ones).clamp(min=1)
            x = x + x.new_zeros(x.shape).scatter_add_(0, at, pull) / count
            heard = h.new_zeros(len(h), 7).index_add(0, to, message)
            h = h + torch.cat([h, heard], 1) @ params["node"]
        return h.square().mean() + x.square().mean()

    params = {"edge": randn(11, 7) / 9, "pull": randn(7, 1) / 4, "node": randn(12, 5) / 9}
    return Program(loss, params, (randn(6, 5), randn(6, 3)))


def modulated() -> Program:
    """StyleGAN2: each sample has a convolution of its own, as groups of one convolution."""

    def loss(params: Any, x: Tensor, style: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        scale = (style @ params["style"])[:, None, :, None, None] + 1
        kernel = params["kernel"] * scale
        kernel = kernel * torch.rsqrt(kernel.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        x = x.reshape(1, batch * channels, height, width)
        x = F.conv2d(x, kernel.flatten(0, 1), padding=1, groups=batch)
        x = x.view(batch, -1, height, width)
        blur = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=x.dtype)
        blur = (torch.outer(blur, blur) / 16).expand(6, 1, 4, 4)
        return F.leaky_relu(F.conv2d(x, blur, padding=2, groups=6), 0.2).square().mean()

    params = {"style": randn(5, 4), "kernel": randn(6, 4, 3, 3)}
    return Program(loss, params, (randn(4, 4, 5, 4), randn(4, 5)))


def meta_shampoo() -> Program:
    """A loss after one step of Shampoo: inverse roots by eigh of the inner gradient's products."""

    def root(m: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(m)
        return (vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.mT

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        def inner(w: Tensor) -> Tensor:
            return F.mse_loss(torch.tanh(x @ w), y)

        g = torch.func.grad(inner)(params["w"])
        left = root(g @ g.T + torch.diag(torch.tensor([0.5, 0.7, 0.9, 1.1], dtype=g.dtype)))
        right = root(g.T @ g + torch.diag(torch.tensor([0.6, 0.8, 1.0], dtype=g.dtype)))
        return inner(params["w"] - 0.1 * left @ g @ right)

    return Program(loss, {"w": randn(4, 3)}, (randn(8, 4), randn(8, 3, seed=2)))


def sharpness_aware() -> Program:
    """SAM: the gradient at the worst of the weights nearby."""

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        def inner(p: Any) -> Tensor:
            return F.cross_entropy(torch.relu(x @ p["up"]) @ p["down"], y)

        gradients = torch.func.grad(inner)(params)
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        step = {name: (0.05 / (norm + 1e-12) * g).detach() for name, g in gradients.items()}
        return inner({name: p + step[name] for name, p in params.items()})

    return Program(loss, {"up": randn(4, 6), "down": randn(6, 5)}, (randn(4, 4), tokens(5, 4)))


def hamiltonian() -> Program:
    """Hamiltonian Monte Carlo: leapfrog steps and the probability of acceptance."""

    def loss(params: Any, start: Tensor, momentum: Tensor) -> Tensor:
        def energy(q: Tensor) -> Tensor:
            own = (q @ params["root"]).square().sum() / 2
            return torch.tanh(q @ params["wells"]).square().sum() + own

        q, p, force = start, momentum, torch.func.grad(energy)
        p = p - 0.05 * force(q)
        for _ in range(2):
            q = q + 0.1 * p
            p = p - 0.1 * force(q)
        gained = energy(start) + momentum.square().sum() / 2 - energy(q) - p.square().sum() / 2
        return gained.exp().clamp(max=1) + q.square().mean()

    return Program(loss, {"wells": randn(3, 4), "root": randn(3, 3)}, (randn(4, 3), randn(4, 3)))


def least_squares() -> Program:
    """Alternating least squares of a matrix with holes: batches of small systems."""

    def loss(params: Any, x: Tensor, seen: Tensor) -> Tensor:
        v, ridge = params["v"], 0.1 * torch.eye(3, dtype=x.dtype)
        gram = torch.einsum("ui,ik,il->ukl", seen, v, v) + ridge
        due = torch.einsum("ui,ik->uk", seen * x, v)[..., None]
        u = torch.cholesky_solve(due, torch.linalg.cholesky(gram)).squeeze(-1)
        gram = torch.einsum("ui,uk,ul->ikl", seen, u, u) + ridge
        v = torch.linalg.solve(gram, torch.einsum("ui,uk->ik", seen * x, u))
        return ((u @ v.T - x) * seen).square().sum() / seen.sum()

    return Program(loss, {"v": randn(5, 3)}, (randn(4, 5), (randn(4, 5, seed=3) > -0.5).double()))


def hard_negatives() -> Program:
    """SSD's loss: of the boxes without an object, two sorts pick those of the largest loss."""

    def loss(params: Any, x: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
        scores, found = x @ params["classes"], x @ params["boxes"]
        is_object = classes > 0
        of_object = is_object.unsqueeze(2).expand_as(found)
        near = F.smooth_l1_loss(
            found[of_object].view(-1, 4), boxes[of_object].view(-1, 4), reduction="sum"
        )
        flat = scores.view(-1, 5)
        each = torch.logsumexp(flat, 1, keepdim=True) - flat.gather(1, classes.view(-1, 1))
        each = each.view(len(x), -1)
        each[is_object] = 0
        rank = each.sort(1, descending=True)[1].sort(1)[1]
        count = is_object.long().sum(1, keepdim=True)
        is_hard = rank < torch.clamp(3 * count, max=is_object.size(1) - 1).expand_as(rank)
        picked = is_object.unsqueeze(2).expand_as(scores) + is_hard.unsqueeze(2).expand_as(scores)
        logits = scores[picked.gt(0)].view(-1, 5)
        due = classes[(is_object + is_hard).gt(0)]
        return (F.cross_entropy(logits, due, reduction="sum") + near) / count.sum()

    params = {"classes": randn(6, 5), "boxes": randn(6, 4)}
    classes = (tokens(12, 4, 7) - 7).clamp(min=0)
    return Program(loss, params, (randn(4, 7, 6), classes, randn(4, 7, 4)))


def sparse_experts() -> Program:
    """DeepSeek-V3's experts as its own code runs them, by writes at the tokens' indices."""

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = (tokens @ params["router"]).sigmoid()
        weights, chosen = scores.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for e in range(4):
            at, top = torch.where(chosen == e)
            h = F.silu(tokens[at] @ params["gate"][e]) * (tokens[at] @ params["up"][e])
            out[at] += (h @ params["down"][e]) * weights[at, top, None]
        return F.mse_loss(out.view_as(x), y)

    params = {"router": randn(6, 4), "gate": randn(4, 6, 5), "up": randn(4, 6, 5, seed=2)}
    params["down"] = randn(4, 5, 6)
    return Program(loss, params, (randn(4, 5, 6), randn(4, 5, 6, seed=2)))


def anchor_detector() -> Program:
    """FCOS and its kin: positions with an object, by nonzero, are scored by centredness."""

    def loss(params: Any, x: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        h = F.relu(x @ params["body"]).flatten(0, 1)
        scores, sides = h @ params["scores"], (h @ params["sides"]).exp()
        centre, labels, boxes = (
            (h @ params["centre"]).flatten(),
            labels.flatten(),
            boxes.flatten(0, 1),
        )
        at = ((labels >= 0) & (labels < 4)).nonzero().squeeze(1)
        found, due = sides[at], boxes[at]
        across, down = due[:, [0, 2]], due[:, [1, 3]]
        centred = across.amin(1) / across.amax(1) * (down.amin(1) / down.amax(1))
        centred = centred.clamp(min=1e-6).sqrt()
        least = torch.min(found, due)
        shared = (least[:, 0] + least[:, 2]) * (least[:, 1] + least[:, 3])
        area = [(b[:, 0] + b[:, 2]) * (b[:, 1] + b[:, 3]) for b in (found, due)]
        iou = shared / (area[0] + area[1] - shared).clamp(min=1e-6)
        classes = F.one_hot(labels.clamp(max=4), 5)[:, :4].to(scores.dtype)
        focal = F.binary_cross_entropy_with_logits(scores, classes, reduction="sum")
        near = (-iou.clamp(min=1e-6).log() * centred).sum() / centred.sum()
        return focal / 20 + near + F.binary_cross_entropy_with_logits(centre[at], centred)

    sizes = {"body": (5, 6), "scores": (6, 4), "sides": (6, 4), "centre": (6, 1)}
    params = {name: randn(*size) / 2 for name, size in sizes.items()}
    batch = (randn(4, 5, 5), tokens(9, 4, 5) - 2, randn(4, 5, 4).exp())
    return Program(loss, params, batch)


METHODS: dict[str, Callable[[], Program]] = {
    "GRPO": group_relative,
    "A2C with advantages in place": advantage_actor,
    "C51": distributional,
    "quantile DQN": quantile_regression,
    "Dreamer's world model": world_model,
    "neural spline flow": spline_flow,
    "masked autoregressive flow": autoregressive_flow,
    "continuous normalizing flow": continuous_flow,
    "sliced score matching": score_matching,
    "DDIM with guidance": guided_sampler,
    "nucleus sampling": nucleus,
    "decoding with a cache": cached_decoding,
    "packed LSTM tagger": packed_tagger,
    "packed GRU classifier": packed_classifier,
    "adaptive softmax": adaptive_softmax,
    "soft-DTW": soft_alignment,
    "mixture of depths": mixture_of_depths,
    "DeltaNet": delta_rule,
    "Performer": random_features,
    "Reformer": hashed_attention,
    "neural Turing machine": turing_machine,
    "slot attention": slots,
    "PointNet++": point_groups,
    "EGNN": equivariant,
    "StyleGAN2's convolution": modulated,
    "Shampoo": meta_shampoo,
    "sharpness-aware minimization": sharpness_aware,
    "Hamiltonian Monte Carlo": hamiltonian,
    "alternating least squares": least_squares,
    "SSD's hard negatives": hard_negatives,
    "DeepSeek-V3's experts, one by one": sparse_experts,
    "FCOS": anchor_detector,
}
