"""Graphs, physics, fields, recommendation, control; and classic programs of torch.func.

One long file of short programs, each of which can be read alone.
"""

# Modules hold tensors of all kinds as attributes, of which no type is known.
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false

import math
from collections.abc import Callable
from typing import Any

import torch
from public_programs import Program, of_model
from real_models import randn, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from ftp import P

SOURCES = torch.tensor([0, 1, 1, 2, 3, 4, 4, 6, 0, 5])
TARGETS = torch.tensor([1, 0, 2, 1, 4, 3, 6, 4, 5, 0])  # of edges between 7 nodes


def _adjacency() -> Tensor:
    """Symmetrically normalized, with loops."""
    dense = torch.eye(7, dtype=torch.float64)
    dense[TARGETS, SOURCES] = 1.0
    degree = dense.sum(1).rsqrt()
    return degree[:, None] * dense * degree


class _GCN(nn.Module):
    def __init__(self, adjacency: Tensor):
        super().__init__()
        self.first, self.last = nn.Linear(5, 9), nn.Linear(9, 4)
        self.adjacency = adjacency

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(torch.sparse.mm(self.adjacency, self.first(x)))
        return F.log_softmax(self.adjacency @ self.last(h), dim=1)


def gcn(layout: torch.layout) -> Program:
    """pytorch/examples: the adjacency is sparse."""
    adjacency = _adjacency().to_sparse(layout=layout)
    model = _GCN(adjacency)
    return of_model(model, lambda call, x, y: F.nll_loss(call(x), y), randn(7, 5), tokens(4, 7))


def gat() -> Program:
    """Scores of edges, a softmax over each node's neighbours."""

    class Layer(nn.Module):
        def __init__(self, into: int, out: int, heads: int = 3):
            super().__init__()
            self.project, self.heads = nn.Linear(into, heads * out, bias=False), heads
            self.source, self.target = (nn.Parameter(torch.randn(heads, out)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = self.project(x).unflatten(-1, (self.heads, -1))
            scores = (h * self.source).sum(-1)[SOURCES] + (h * self.target).sum(-1)[TARGETS]
            scores = F.leaky_relu(scores, 0.2)
            at = TARGETS[:, None].expand_as(scores)
            top = scores.new_zeros(7, self.heads).scatter_reduce(
                0, at, scores, "amax", include_self=False
            )
            weights = torch.exp(scores - top.detach()[TARGETS])
            total = weights.new_zeros(7, self.heads).index_add(0, TARGETS, weights)
            weights = weights / total[TARGETS]
            sent = h[SOURCES] * weights[..., None]
            return h.new_zeros(h.shape).index_add(0, TARGETS, sent).flatten(1)

    model = nn.Sequential(Layer(5, 4), nn.ELU(), Layer(12, 3))

    def loss(call, x, y):
        return F.cross_entropy(call(x), y)

    return of_model(model, loss, randn(7, 5), tokens(4, 7))


def message_passing() -> Program:
    """Distances of atoms, filters of them, sums over neighbours: forces are in the loss."""

    class SchNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.out = (
                nn.Embedding(5, 9),
                nn.Sequential(nn.Linear(9, 7), nn.Softplus(), nn.Linear(7, 1)),
            )
            self.filter = nn.Sequential(nn.Linear(6, 9), nn.Softplus(), nn.Linear(9, 9))
            self.dense = nn.Linear(9, 9)

        def forward(self, kinds: Tensor, places: Tensor) -> Tensor:
            gap = (places[SOURCES] - places[TARGETS]).square().sum(-1).sqrt()
            waves = torch.exp(-((gap[:, None] - torch.arange(6).to(gap)) ** 2))
            x = self.emb(kinds)
            sent = self.dense(x)[SOURCES] * self.filter(waves)
            x = x + torch.zeros_like(x).index_add(0, TARGETS, sent)
            return self.out(x).sum()

    def loss(call: Any, kinds: Tensor, places: Tensor, forces: Tensor) -> Tensor:
        def energy(places):
            return call(kinds, places)

        found, value = torch.func.grad_and_value(energy)(places)
        return (value - 1).square() + F.mse_loss(-found, forces)

    batch = tokens(5, 7), randn(7, 3), randn(7, 3, seed=2)
    return of_model(SchNet(), loss, *batch, batch_specs=P())


def pinn() -> Program:
    """The heat equation: derivatives of the network by its inputs, by torch.autograd."""
    net = nn.Sequential(nn.Linear(2, 11), nn.Tanh(), nn.Linear(11, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(call: Any, points: Tensor) -> Tensor:
        points = points.clone().requires_grad_()
        u = call(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        inside = first[:, 1] - 0.3 * second[:, 0]
        return inside.square().mean() + (u[:, 0] - torch.sin(points[:, 0])).square().mean()

    return of_model(net, loss, randn(5, 2))


def siren() -> Program:
    """A field by its Laplacian at each point."""

    class Siren(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 9), nn.Linear(9, 9), nn.Linear(9, 1)])

        def forward(self, x: Tensor) -> Tensor:
            *hidden, last = self.layers
            for layer in hidden:
                x = torch.sin(3 * layer(x))
            return last(x)[..., 0]

    def loss(call: Any, points: Tensor, values: Tensor) -> Tensor:
        hessian = torch.vmap(torch.func.jacrev(torch.func.jacrev(call)))(points)
        return (torch.einsum("bii->b", hessian) - values).square().mean()

    return of_model(Siren(), loss, randn(4, 2), randn(4))


def neural_ode() -> Program:
    """Runge-Kutta steps."""
    net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        h = 0.25
        for _ in range(4):
            a = call(x)
            b = call(x + h / 2 * a)
            c = call(x + h / 2 * b)
            d = call(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return F.mse_loss(x, y)

    return of_model(net, loss, randn(4, 5), randn(4, 5, seed=2))


def equilibrium() -> Program:
    """A fixed point, its gradient by iterations of the transpose: an autograd.Function."""
    steps = 12

    class Fixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
            z = torch.zeros_like(x)
            for _ in range(steps):
                z = torch.tanh(z @ w + x)
            ctx.save_for_backward(w, x, z)
            return z

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            w, x, z = ctx.saved_tensors
            slope = 1 - torch.tanh(z @ w + x).square()
            u = grad
            for _ in range(steps):
                u = grad + (u * slope) @ w.T
            return z.T @ (u * slope), u * slope

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        z = Fixed.apply(params["w"], x @ params["u"])
        return F.mse_loss(z @ params["out"], y)

    params = {"w": 0.2 * randn(7, 7), "u": randn(5, 7, seed=2), "out": randn(7, 3, seed=3)}
    return Program(loss, params, (randn(4, 5), randn(4, 3)))


def fourier_operator() -> Program:
    """Complex weights on few frequencies."""

    class Layer(nn.Module):
        def __init__(self, dim: int = 6, modes: int = 3):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, dim, dim, modes, modes))
            self.skip, self.modes = nn.Conv2d(dim, dim, 1), modes

        def forward(self, x: Tensor) -> Tensor:
            m = self.modes
            spectrum = torch.fft.rfft2(x)
            kept = torch.einsum(
                "bixy,ioxy->boxy", spectrum[..., :m, :m], torch.complex(*self.weight)
            )
            full = F.pad(kept, (0, spectrum.shape[-1] - m, 0, spectrum.shape[-2] - m))
            return F.gelu(torch.fft.irfft2(full, s=x.shape[-2:]) + self.skip(x))

    model = nn.Sequential(nn.Conv2d(2, 6, 1), Layer(), Layer(), nn.Conv2d(6, 1, 1))

    def loss(call, x, y):
        return (call(x) - y).flatten(1).norm(dim=1).mean()

    return of_model(model, loss, randn(4, 2, 8, 8), randn(4, 1, 8, 8, seed=2))


def real_nvp() -> Program:
    """Coupling layers; the likelihood by the logarithm of their determinant."""

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList(
                nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            total = 0
            for net in self.nets:
                a, b = x.chunk(2, -1)
                scale, shift = net(a).chunk(2, -1)
                scale = torch.tanh(scale)
                x, total = torch.cat([b * scale.exp() + shift, a], -1), total + scale.sum(-1)
            return total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)

    return of_model(Flow(), lambda call, x: -call(x).mean(), randn(4, 6))


def nerf() -> Program:
    """Colours along rays, what is behind hidden by what is before."""
    net = nn.Sequential(nn.Linear(18, 11), nn.ReLU(), nn.Linear(11, 4))

    def loss(call: Any, origin: Tensor, way: Tensor, y: Tensor) -> Tensor:
        t = torch.linspace(0.5, 2, 6, dtype=origin.dtype, device=origin.device)
        points = origin[:, None] + way[:, None] * t[:, None]
        scaled = (points[..., None] * 2.0 ** torch.arange(3, device=t.device)).flatten(2)
        colour, density = call(torch.cat([scaled.sin(), scaled.cos()], -1)).split([3, 1], -1)
        gap = torch.cat([t.diff(), t.new_full((1,), 1e3)])
        alpha = 1 - torch.exp(-F.relu(density[..., 0]) * gap)
        free = torch.cumprod(1 - alpha + 1e-10, -1).roll(1, -1)
        free = torch.cat([torch.ones_like(free[:, :1]), free[:, 1:]], -1)
        return F.mse_loss(((alpha * free)[..., None] * colour.sigmoid()).sum(1), y)

    return of_model(net, loss, randn(4, 3), randn(4, 3, seed=2), randn(4, 3, seed=3))


def pointnet() -> Program:
    class PointNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.Conv1d(8, 10, 1))
            self.head, self.turn = nn.Linear(10, 5), nn.Linear(10, 9)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            turn = self.turn(self.mlp(x).amax(-1)).view(-1, 3, 3)
            return self.head(self.mlp(turn @ x).max(-1).values), turn

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, turn = call(x)
        off = torch.eye(3, dtype=x.dtype, device=x.device) - turn @ turn.mT
        return F.cross_entropy(logits, y) + 1e-3 * off.norm(dim=(1, 2)).mean()

    return of_model(PointNet(), loss, randn(4, 3, 9), tokens(5, 4))


def dlrm() -> Program:
    """Bags of categories, products of all pairs of features."""

    class DLRM(nn.Module):
        def __init__(self):
            super().__init__()
            self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
            self.tables = nn.ModuleList(nn.EmbeddingBag(n, 6, mode="sum") for n in (11, 7, 5))
            self.top = nn.Linear(6 + 6, 1)

        def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
            x = self.bottom(dense)
            bags = (
                table(ids[:, i] % n)
                for i, (table, n) in enumerate(zip(self.tables, (11, 7, 5), strict=True))
            )
            z = torch.stack([x, *bags], 1)
            row, column = torch.tril_indices(4, 4, -1)
            return self.top(torch.cat([x, (z @ z.mT)[:, row, column]], 1))[:, 0]

    def loss(call: Any, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(call(x, ids), y)

    return of_model(DLRM(), loss, randn(4, 5), tokens(11, 4, 3, 2), randn(4).sigmoid())


class _ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(4, 9), nn.Linear(9, 3), nn.Linear(9, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.trunk(x))
        return self.actor(h), self.critic(h)[:, 0]


def reinforce() -> Program:
    def loss(call: Any, x: Tensor, action: Tensor, returns: Tensor) -> Tensor:
        logits, value = call(x)
        policy = torch.distributions.Categorical(logits=logits)
        ahead = returns - value.detach()
        return -(policy.log_prob(action) * ahead).sum() + F.smooth_l1_loss(value, returns)

    return of_model(_ActorCritic(), loss, randn(5, 4), tokens(3, 5), randn(5))


def ppo() -> Program:
    def loss(call: Any, x: Tensor, action: Tensor, old: Tensor, ahead: Tensor) -> Tensor:
        logits, value = call(x)
        policy = torch.distributions.Categorical(logits=logits)
        ratio = torch.exp(policy.log_prob(action) - old)
        ahead = (ahead - ahead.mean()) / (ahead.std() + 1e-8)
        clipped = torch.min(ratio * ahead, ratio.clamp(0.8, 1.2) * ahead).mean()
        return 0.5 * value.square().mean() - clipped - 0.01 * policy.entropy().mean()

    return of_model(_ActorCritic(), loss, randn(5, 4), tokens(3, 5), -randn(5).abs(), randn(5))


def dqn() -> Program:
    """Two networks in one tree; the target has no gradient."""

    def loss(params: Any, x: Tensor, action: Tensor, reward: Tensor, then: Tensor) -> Tensor:
        def q(side: str, x: Tensor) -> Tensor:
            return F.relu(x @ params[f"{side}.up"]) @ params[f"{side}.down"]

        best = q("online", then).argmax(1, keepdim=True)
        with torch.no_grad():
            aim = reward + 0.9 * q("target", then).gather(1, best)[:, 0]
        return F.huber_loss(q("online", x).gather(1, action[:, None])[:, 0], aim)

    shapes = {"up": (4, 9), "down": (9, 3)}
    params = {
        f"{side}.{name}": randn(*shape, seed=i)
        for i, side in enumerate(("online", "target"))
        for name, shape in shapes.items()
    }
    return Program(loss, params, (randn(5, 4), tokens(3, 5), randn(5), randn(5, 4, seed=2)))


def mixture() -> Program:
    """A mixture of normals by torch.distributions."""
    net = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 12))

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, mean, deviation = call(x).chunk(3, -1)
        each = torch.distributions.Normal(mean, F.softplus(deviation) + 0.1)
        weights = torch.distributions.Categorical(logits=logits)
        return -torch.distributions.MixtureSameFamily(weights, each).log_prob(y).mean()

    return of_model(net, loss, randn(5, 3), randn(5))


def sine_waves() -> Program:
    """pytorch/examples: LSTM cells, which go on from what they predict."""

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm1, self.lstm2 = nn.LSTMCell(1, 7), nn.LSTMCell(7, 7)
            self.linear = nn.Linear(7, 1)

        def forward(self, x: Tensor, future: int) -> Tensor:
            h1 = c1 = h2 = c2 = x.new_zeros(x.shape[0], 7)
            outputs, output = [], x[:, :1]
            for t in range(x.shape[1] + future):
                h1, c1 = self.lstm1(x[:, t : t + 1] if t < x.shape[1] else output, (h1, c1))
                h2, c2 = self.lstm2(h1, (h2, c2))
                output = self.linear(h2)
                outputs.append(output)
            return torch.cat(outputs, dim=1)

    def loss(call, x, y):
        return F.mse_loss(call(x, 2), y)

    return of_model(Sequence(), loss, randn(4, 5), randn(4, 7, seed=2))


def kan() -> Program:
    """Splines on the edges, by the recursion of de Boor."""

    class Layer(nn.Module):
        def __init__(self, into: int, out: int, knots: int = 8):
            super().__init__()
            self.base = nn.Linear(into, out, bias=False)
            self.spline = nn.Parameter(torch.randn(out, into, knots - 3))
            self.register_buffer("knots", torch.linspace(-2, 2, knots))

        def forward(self, x: Tensor) -> Tensor:
            t, x1 = self.knots, x[..., None]
            b = ((x1 >= t[:-1]) & (x1 < t[1:])).to(x.dtype)
            for k in range(1, 3):
                left = (x1 - t[: -k - 1]) / (t[k:-1] - t[: -k - 1]) * b[..., :-1]
                b = left + (t[k + 1 :] - x1) / (t[k + 1 :] - t[1:-k]) * b[..., 1:]
            return self.base(F.silu(x)) + torch.einsum("bik,oik->bo", b, self.spline)

    model = nn.Sequential(Layer(3, 7), Layer(7, 2))
    return of_model(model, lambda call, x, y: F.mse_loss(call(x), y), randn(5, 3), randn(5, 2))


# torch.func's own tutorials.


def _net(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


_NET = {"up": randn(3, 7), "bias": randn(7, seed=2), "down": randn(7, 2, seed=3)}
_PAIR = randn(5, 3, seed=4), randn(5, 2, seed=5)


def _of_net(loss: Callable[..., Tensor], *batch: Tensor, batch_specs: Any = P("dp")) -> Program:
    return Program(loss, _NET, batch or _PAIR, batch_specs=batch_specs)


def _error(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(_net(p, x), y)


def maml() -> Program:
    """A step within each task, mapped over tasks."""

    def task(p: Any, x: Tensor, y: Tensor) -> Tensor:
        slopes = torch.func.grad(_error)(p, x[:3], y[:3])
        return _error({k: v - 0.1 * slopes[k] for k, v in p.items()}, x[3:], y[3:])

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.vmap(task, in_dims=(None, 0, 0))(p, x, y).mean()

    return _of_net(loss, randn(4, 5, 3), randn(4, 5, 2))


def ensemble() -> Program:
    """Models stacked in one tree, mapped over."""
    params = {k: torch.stack([v, v + 0.1, -v]) for k, v in _NET.items()}

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.vmap(_error, in_dims=(0, None, None))(p, x, y).sum()

    return Program(loss, params, _PAIR)


def clipped_gradients() -> Program:
    """Gradients of each sample, clipped, as differential privacy has them; differentiated."""

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        def one(p, x, y):
            return _error(p, x[None], y[None])

        each = torch.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(p, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (1.0 / norms).clamp(max=1.0)
        return sum(torch.einsum("b,b...->...", factor, g).square().sum() for g in each.values())

    return _of_net(loss)


def tangent_kernel() -> Program:
    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        def one(p, x):
            return _net(p, x[None])[0]

        jacobian = torch.vmap(torch.func.jacrev(one), in_dims=(None, 0))(p, x)
        parts = (
            torch.einsum("nof,mpf->nmop", j.flatten(2), j.flatten(2)) for j in jacobian.values()
        )
        return (sum(parts) * 0.01).square().sum()

    return _of_net(loss)


def hessian_vector() -> Program:
    """Forward over reverse, in the loss."""

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        way = {k: torch.ones_like(v) for k, v in p.items()}

        def error(p):
            return (_net(p, x) - y).square().mean()

        found = torch.func.jvp(torch.func.grad(error), (p,), (way,))[1]
        return sum(h.square().sum() for h in found.values())

    return _of_net(loss)


def orthogonal() -> Program:
    """A weight made orthogonal by Newton and Schulz's iteration, as Muon's updates are."""

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        w = p["up"] / p["up"].norm()
        for _ in range(3):
            a = w @ w.T
            w = 3.4445 * w + (-4.775 * a + 2.0315 * a @ a) @ w
        return _error({**p, "up": w}, x, y)

    return _of_net(loss)


SCIENCE = {
    "GCN, COO": lambda: gcn(torch.sparse_coo),
    "GCN, CSR": lambda: gcn(torch.sparse_csr),
    "GAT": gat,
    "SchNet": message_passing,
    "PINN": pinn,
    "SIREN": siren,
    "neural ODE": neural_ode,
    "deep equilibrium": equilibrium,
    "Fourier neural operator": fourier_operator,
    "RealNVP": real_nvp,
    "NeRF": nerf,
    "PointNet": pointnet,
    "DLRM": dlrm,
    "REINFORCE": reinforce,
    "PPO": ppo,
    "double DQN": dqn,
    "mixture density": mixture,
    "sine waves": sine_waves,
    "KAN": kan,
    "MAML": maml,
    "ensemble": ensemble,
    "clipped gradients of samples": clipped_gradients,
    "neural tangent kernel": tangent_kernel,
    "Hessian-vector product": hessian_vector,
    "orthogonalized weight": orthogonal,
}
