"""Programs around solvers, recursions and implicit steps, written before any of them was tried: of
many fields, each as its authors' code writes it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from public_programs import Program
from public_recent import drawn
from public_signals import indices
from public_values import uniform
from real_models import randn
from torch import Tensor
from torch.func import grad, jacfwd, jvp, vmap
from torch.nn import functional as F

from ftp import P


def chunked_delta() -> Program:
    """Gated DeltaNet by chunks: a triangular system in each, and a state between them."""

    def loss(params: Any, x: Tensor, due: Tensor) -> Tensor:
        (batch, steps, _), heads, chunk = x.shape, 2, 3
        q, k, v = ((x @ params[n]).view(batch, steps, heads, 4).transpose(1, 2) for n in "qkv")
        q, k = (F.normalize(F.silu(t), dim=-1) for t in (q, k))
        beta = (x @ params["b"]).sigmoid().transpose(1, 2)
        g = -params["A"].exp()[:, None] * F.softplus((x @ params["a"]).transpose(1, 2))
        q, k, v = (t.reshape(batch, heads, -1, chunk, 4) for t in (q, k, v))
        beta, g = (t.reshape(batch, heads, -1, chunk) for t in (beta, g))
        g = g.cumsum(-1)
        decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
        k_beta, v_beta = k * beta[..., None], v * beta[..., None]
        a = (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
        eye = torch.eye(chunk, dtype=x.dtype)
        inverse = torch.linalg.solve_triangular(
            eye + a, eye.expand_as(a), upper=False, unitriangular=True
        )
        u, w = inverse @ v_beta, inverse @ (k_beta * g.exp()[..., None])
        state, out = x.new_zeros(batch, heads, 4, 4), []
        for i in range(steps // chunk):
            qi, ki, gi = q[:, :, i], k[:, :, i], g[:, :, i]
            new = u[:, :, i] - w[:, :, i] @ state
            within = (qi @ ki.transpose(-1, -2) * decay[:, :, i]).tril()
            out.append((qi * gi.exp()[..., None]) @ state + within @ new)
            last = gi[..., -1, None]
            written = (ki * (last - gi).exp()[..., None]).transpose(-1, -2) @ new
            state = state * last.exp()[..., None] + written
        o = torch.stack(out, 2).reshape(batch, heads, steps, 4).transpose(1, 2).flatten(2)
        return F.mse_loss(o @ params["o"], due)

    shapes: dict[str, tuple[int, ...]] = dict.fromkeys("qkv", (6, 8)) | {"o": (8, 6)}
    shapes |= {"a": (6, 2), "b": (6, 2), "A": (2,)}
    cuts = {name: P(None, "tp") for name in "qkvab"} | {"A": P("tp"), "o": P("tp")}
    return Program(loss, drawn(shapes, 0.5), (randn(4, 9, 6), randn(4, 9, 6, seed=4)), cuts)


def dependency_parser() -> Program:
    """A biaffine parser whose partition function is a determinant, by the matrix-tree theorem."""

    def loss(params: Any, x: Tensor, heads: Tensor, lengths: Tensor) -> Tensor:
        dependent, head = (F.leaky_relu(x @ params[n], 0.1) for n in ("dependent", "head"))
        dependent = torch.cat((dependent, torch.ones_like(dependent[..., :1])), -1)
        scores = torch.einsum("bxi,ij,byj->bxy", dependent, params["U"], head)
        mask = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        both = mask.unsqueeze(1) & mask.unsqueeze(2)
        weights = scores.masked_fill(~both, -math.inf).exp()
        weights = weights * (1 - torch.eye(x.shape[1], dtype=x.dtype))
        laplacian = torch.diag_embed(weights.sum(-1)) - weights
        laplacian = laplacian + torch.diag_embed((~mask).to(x.dtype))
        log_z = torch.linalg.slogdet(laplacian[:, 1:, 1:])[1]
        gold = scores.gather(-1, heads.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0.0)
        return (log_z - gold[:, 1:].sum(-1)).sum() / mask.sum()

    heads = [[0, 0, 1, 1, 2], [0, 2, 0, 2, 0], [0, 0, 1, 2, 3], [0, 0, 1, 0, 0]]
    batch = (randn(4, 5, 6), torch.tensor(heads), torch.tensor([5, 4, 5, 3]))
    return Program(loss, drawn({"dependent": (6, 4), "head": (6, 5), "U": (5, 5)}, 0.4), batch)


def grammar() -> Program:
    """A probabilistic grammar: the inside algorithm fills a chart of spans in place."""

    def loss(params: Any, ids: Tensor) -> Tensor:
        batch, n = ids.shape
        rules = params["rules"].view(3, -1).log_softmax(-1).view(3, 7, 7)
        emitted = params["emit"].log_softmax(-1).T[ids]
        chart = ids.new_full((batch, n, n + 1, 7), -1e9, dtype=emitted.dtype)
        for i in range(n):
            chart[:, i, i + 1, 3:] = emitted[:, i]
        for width in range(2, n + 1):
            for i in range(n - width + 1):
                j = i + width
                left, right = chart[:, i, i + 1 : j], chart[:, i + 1 : j, j]
                both = torch.logsumexp(left.unsqueeze(-1) + right.unsqueeze(-2), 1)
                chart[:, i, j, :3] = torch.logsumexp(both.unsqueeze(1) + rules, dim=(2, 3))
        whole = chart[:, 0, n, :3] + params["root"].log_softmax(-1)
        return -torch.logsumexp(whole, -1).mean()

    cuts = {"emit": P(None, "tp"), "rules": P(None, "tp"), "root": P()}
    params = drawn({"rules": (3, 7, 7), "emit": (4, 9), "root": (3,)}, 0.6)
    return Program(loss, params, (indices(9, 4, 5),), cuts)


def bundle_adjustment() -> Program:
    """Levenberg-Marquardt over poses: Jacobians in forward mode, mapped, within the loss."""

    def turned(w: Tensor) -> Tensor:
        angle = torch.sqrt((w * w).sum(-1) + 1e-12)[..., None, None]
        zero, (x, y, z) = torch.zeros_like(w[..., 0]), w.unbind(-1)
        k = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
        eye = torch.eye(3, dtype=w.dtype)
        return eye + torch.sin(angle) / angle * k + (1 - torch.cos(angle)) / angle**2 * k @ k

    def residual(pose: Tensor, points: Tensor, seen: Tensor, weights: Tensor) -> Tensor:
        ahead = torch.tensor([0.0, 0.0, 4.0], dtype=pose.dtype)
        y = points @ turned(pose[:3]).T + pose[3:] + ahead
        return ((y[:, :2] / y[:, 2:] - seen) * weights[:, None]).flatten()

    def loss(params: Any, x: Tensor, points: Tensor, seen: Tensor, due: Tensor) -> Tensor:
        pose = torch.tanh(x @ params["a"]) @ params["b"]
        given = (points, seen, F.softplus(x @ params["w"]))
        for _ in range(3):
            r, J = vmap(residual)(pose, *given), vmap(jacfwd(residual))(pose, *given)
            squared = J.mT @ J
            damped = squared + 0.1 * torch.diag_embed(squared.diagonal(dim1=-2, dim2=-1))
            factor = torch.linalg.cholesky(damped + 1e-6 * torch.eye(6, dtype=x.dtype))
            pose = pose - torch.cholesky_solve(J.mT @ r[..., None], factor).squeeze(-1)
        return F.huber_loss(pose, due, delta=0.5)

    params = drawn({"a": (5, 8), "b": (8, 6), "w": (5, 6)}, 0.2)
    batch = (randn(4, 5), randn(4, 6, 3), 0.3 * randn(4, 6, 2, seed=5), 0.3 * randn(4, 6, seed=6))
    return Program(loss, params, batch, {"a": P(None, "tp"), "b": P("tp"), "w": P()})


def material_points() -> Program:
    """The material point method: particles to a grid and back, by scatters and gathers."""

    def loss(params: Any, x: Tensor, v: Tensor, goal: Tensor) -> Tensor:
        n, dx, step, eye = 6, 1 / 6, 0.02, torch.eye(2, dtype=x.dtype)
        C, stretch = torch.zeros(len(x), 2, 2, dtype=x.dtype), eye.repeat(len(x), 1, 1)
        mood = torch.cat([x.mean(0), v.mean(0)])
        force = torch.diag(torch.tanh(mood @ params["a"]) @ params["b"])
        for _ in range(2):
            base = (x / dx - 0.5).floor().long()
            f = x / dx - base
            w = torch.stack([0.5 * (1.5 - f) ** 2, 0.75 - (f - 1) ** 2, 0.5 * (f - 0.5) ** 2])
            volume = torch.det(stretch).log() * F.softplus(params["volume"])
            stress = -(stretch @ stretch.mT - eye) * F.softplus(params["shear"])
            affine = step * 14.4 * (stress - volume[:, None, None] * eye + force) + C
            speed, mass = x.new_zeros(n * n, 2), x.new_zeros(n * n)
            nodes = torch.cartesian_prod(torch.arange(3), torch.arange(3))
            for node in nodes:
                share = (w[node[0], :, 0] * w[node[1], :, 1])[:, None]
                at = (base + node).clamp(0, n - 1) @ torch.tensor([n, 1])
                pushed = v + (affine @ ((node - f) * dx)[..., None]).squeeze(-1)
                speed = speed.index_add(0, at, share * pushed)
                mass.scatter_add_(0, at, share.squeeze(1))
            speed = (speed / (mass[:, None] + 1e-6)).view(n, n, 2).clone()
            speed[:1, :, 0].clamp_(min=0)
            speed[..., 1] -= step * 2
            speed[:, :1] = 0
            v, C = torch.zeros_like(v), torch.zeros_like(C)
            for node in nodes:
                share = (w[node[0], :, 0] * w[node[1], :, 1])[:, None]
                at = (base + node).clamp(0, n - 1)
                got = share * speed[at[:, 0], at[:, 1]]
                v = v + got
                C = C + 4 / dx * torch.einsum("bi,bj->bij", got, node - f)
            x, stretch = x + step * v, (eye + step * C) @ stretch
        return ((x - goal) ** 2).sum(1).mean() + v.square().mean()

    shapes: dict[str, tuple[int, ...]] = {"a": (4, 8), "b": (8, 2), "shear": (), "volume": ()}
    batch = (uniform(6, 2) * 0.5 + 0.25, randn(6, 2) * 0.3, uniform(6, 2, seed=4))
    return Program(loss, drawn(shapes, 0.5), batch, {"a": P(None, "tp"), "b": P("tp")})


def self_consistent() -> Program:
    """Kohn-Sham: eigenvectors give a density, whose potential is a gradient, until they agree."""

    def loss(params: Any, outside: Tensor, due: Tensor) -> Tensor:
        n, dx = 8, 0.5
        beside = torch.diag(torch.ones(n - 1), 1)
        kinetic = -0.5 * (beside + beside.T - 2 * torch.eye(n)).to(outside) / dx**2
        at = torch.arange(n, dtype=outside.dtype) * dx
        soft = 1 / torch.sqrt((at[:, None] - at) ** 2 + 1)

        def exchange(rho: Tensor) -> Tensor:
            return (torch.tanh(rho[..., None] * params["a"] + params["b"]) * params["c"]).sum(-1)

        rho = torch.full_like(outside, 2 / (n * dx))
        for _ in range(3):
            slope = grad(lambda r: (r * exchange(r)).sum())(rho)
            potential = outside + dx * rho @ soft + slope
            e, c = torch.linalg.eigh(kinetic + torch.diag_embed(potential))
            rho = 0.5 * rho + 0.5 * (c[..., :2] ** 2).sum(-1) / dx
        energy = e[:, :2].sum(-1) + dx * (rho * exchange(rho)).sum(-1)
        energy = energy - 0.5 * dx**2 * torch.einsum("bi,ij,bj->b", rho, soft, rho)
        return F.mse_loss(energy, due) + rho.square().mean()

    params = drawn({"a": (7,), "b": (7,), "c": (7,)}, 0.3)
    return Program(loss, params, (randn(4, 8), randn(4)), dict.fromkeys("abc", P("tp")))


class _Riccati(torch.autograd.Function):
    """The solution of a Riccati equation; its gradient solves a Lyapunov equation."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, Q: Tensor, R: Tensor) -> Tensor:
        X = Q
        for _ in range(40):
            K = torch.linalg.solve(R + B.mT @ X @ B, B.mT @ X @ A)
            X = Q + A.mT @ X @ (A - B @ K)
        ctx.save_for_backward(A, B, X, K)
        return X

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        A, B, X, K = ctx.saved_tensors
        closed, g = A - B @ K, 0.5 * (gradients[0] + gradients[0].mT)
        L = g
        for _ in range(40):
            L = g + closed @ L @ closed.mT
        of_a = 2 * X @ closed @ L
        return of_a, -of_a @ K.mT, L, K @ L @ K.mT


def riccati_control() -> Program:
    """A linear controller from a Riccati equation, differentiated through its fixed point."""

    def loss(params: Any, x: Tensor, seen: Tensor) -> Tensor:
        A, B = 0.4 * torch.tanh(params["A"]), params["B"]
        Q = torch.diag(F.softplus((seen @ params["f"]).mean(0)) + 0.1)
        R = torch.diag(F.softplus(params["r"]) + 0.1)
        X: Any = _Riccati.apply(A, B, Q, R)
        K, cost = torch.linalg.solve(R + B.mT @ X @ B, B.mT @ X @ A), x.new_zeros(())
        for _ in range(3):
            u = -x @ K.mT
            x = x @ A.mT + u @ B.mT
            cost = cost + x.square().sum(-1).mean() + 0.1 * u.square().sum(-1).mean()
        return cost

    params = drawn({"A": (4, 4), "B": (4, 2), "r": (2,), "f": (5, 4)}, 0.5)
    return Program(loss, params, (randn(4, 4), randn(4, 5)))


def belief_propagation() -> Program:
    """A neural decoder of LDPC codes: messages along the edges of a constant graph."""
    checks = [[1, 1, 0, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0, 1]]

    def loss(params: Any, ratios: Tensor, bits: Tensor) -> Tensor:
        check, variable = torch.tensor(checks).nonzero(as_tuple=True)
        other = ~torch.eye(len(check), dtype=torch.bool)
        same_v = ((variable[:, None] == variable) & other).to(ratios)
        same_c = (check[:, None] == check) & other
        message, total = ratios.new_zeros(len(ratios), len(check)), ratios.new_zeros(())
        for i in range(3):
            read = (message * params["edges"][i]) @ same_v
            up = torch.tanh(0.5 * (ratios[:, variable] * params["own"][i] + read))
            product = torch.where(same_c[None], up[:, None, :], 1.0).prod(-1)
            message = 2 * torch.atanh(product.clamp(-1 + 1e-6, 1 - 1e-6))
            out = ratios + torch.zeros_like(ratios).index_add(1, variable, message)
            total = total + F.binary_cross_entropy_with_logits(-out, bits)
        return total

    params = drawn({"own": (3, 12), "edges": (3, 12)}, 0.5)
    cuts = {"own": P(None, "tp"), "edges": P(None, "tp")}
    return Program(loss, params, (2 * randn(4, 7), indices(2, 4, 7).double()), cuts)


class _Perturbed(torch.autograd.Function):
    """The mean of top-k choices under noise; its gradient is a covariance with the noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, k: int, sigma: float) -> Tensor:
        best = torch.topk(x[:, None] + noise * sigma, k=k, sorted=False).indices.sort(-1).values
        hot = F.one_hot(best, x.shape[-1]).to(x)
        ctx.save_for_backward(hot, noise)
        ctx.sigma = sigma
        return hot.mean(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hot, noise = ctx.saved_tensors
        slopes = torch.einsum("bnkd,bnp->bkdp", hot, noise) / hot.shape[1] / ctx.sigma
        return torch.einsum("bkd,bkdp->bp", gradients[0], slopes), None, None, None


def perturbed_top() -> Program:
    """Differentiable top-k of patches, ranks by SoftSort, and subsets by Gumbel's trick."""

    def loss(params: Any, x: Tensor, noise: Tensor, gumbel: Tensor, rank: Tensor, due: Tensor):
        s = (torch.tanh(x @ params["a"]) @ params["b"]).squeeze(-1)
        ordered = s.sort(descending=True, dim=1)[0]
        soft = (-(ordered.unsqueeze(2) - s.unsqueeze(1)).abs() / 0.5).softmax(-1)
        hot = F.one_hot(rank.argsort(1, descending=True), 5).to(s)
        sorting = F.binary_cross_entropy(soft.clamp(1e-6, 1 - 1e-6), hot)
        chosen: Any = _Perturbed.apply(s, noise, 2, 0.3)
        left, one, picked = s + gumbel, torch.zeros_like(s), torch.zeros_like(s)
        for _ in range(2):
            left = left + torch.log(torch.clamp(1 - one, min=1e-20))
            one = F.softmax(left / 0.5, 1)
            picked = picked + one
        hard = torch.zeros_like(picked).scatter_(1, picked.topk(2, 1).indices, 1.0)
        kept = ((hard - picked.detach() + picked)[..., None] * x).mean(1)
        return sorting + F.mse_loss(((chosen @ x).mean(1) + kept) @ params["c"], due)

    params = drawn({"a": (6, 8), "b": (8, 1), "c": (6, 3)}, 0.5)
    batch = (randn(4, 5, 6), randn(4, 7, 5), randn(4, 5, seed=3), randn(4, 5, seed=4), randn(4, 3))
    return Program(loss, params, batch, {"a": P(None, "tp"), "b": P("tp"), "c": P("tp")})


def mean_flow() -> Program:
    """MeanFlow: the target of an average velocity holds its own derivative along the path."""

    def loss(params: Any, x: Tensor, noise: Tensor, first: Tensor, second: Tensor) -> Tensor:
        def velocity(z: Tensor, t: Tensor, r: Tensor) -> Tensor:
            waves = params["freq"]
            times = torch.cat(
                [torch.cos(t[:, None] * waves), torch.sin((t - r)[:, None] * waves)], -1
            )
            h = F.silu(torch.cat([z, times], -1) @ params["a"])
            return (h * (1 + times @ params["mod"])) @ params["b"]

        r, t = torch.minimum(first, second), torch.maximum(first, second)
        z, along = (1 - t[:, None]) * x + t[:, None] * noise, noise - x
        rates = (along, torch.ones_like(t), torch.zeros_like(r))
        found, change, *_ = jvp(velocity, (z, t, r), rates)
        error = (found - (along - (t - r)[:, None] * change).detach()).square().sum(-1)
        return (error / (error.detach() + 1e-3).sqrt()).mean()

    params = drawn({"freq": (3,), "a": (10, 8), "mod": (6, 8), "b": (8, 4)}, 0.5)
    batch = (randn(4, 4), randn(4, 4, seed=3), uniform(4), uniform(4, seed=4))
    cuts = {"a": P(None, "tp"), "mod": P(None, "tp"), "b": P("tp"), "freq": P()}
    return Program(loss, params, batch, cuts)


def beamformer() -> Program:
    """MVDR: complex masks and linear systems of each frequency between two Fourier transforms."""

    def loss(params: Any, x: Tensor, clean: Tensor) -> Tensor:
        window = torch.hann_window(16, dtype=x.dtype)
        X = torch.stft(x.flatten(0, 1), 16, 8, window=window, return_complex=True)
        X = X.unflatten(0, x.shape[:2])
        h = torch.einsum("bmft,mk->bkft", X, torch.complex(params["real"], params["imag"]))
        h = torch.complex(F.relu(h.real), F.relu(h.imag))
        mask = torch.sigmoid((h.abs() * params["v"][:, None, None]).sum(1))

        def covariance(mask: Tensor) -> Tensor:
            mask = mask / (mask.sum(-1, keepdim=True) + 1e-6)
            return torch.einsum("bft,bmft,bnft->bfmn", mask.to(X.dtype), X, X.conj())

        noise = covariance(1 - mask) + 1e-2 * torch.eye(x.shape[1], dtype=X.dtype)
        ratio = torch.linalg.solve(noise, covariance(mask))
        trace = torch.diagonal(ratio, dim1=-2, dim2=-1).sum(-1, keepdim=True)
        Y = torch.einsum("bfm,bmft->bft", (ratio[..., 0] / (trace + 1e-2)).conj(), X)
        y = torch.istft(Y, 16, 8, window=window, length=x.shape[-1])
        y, clean = (t - t.mean(-1, keepdim=True) for t in (y, clean))
        along = (y * clean).sum(-1, keepdim=True) * clean
        along = along / (clean.square().sum(-1, keepdim=True) + 1e-8)
        return -10 * torch.log10(along.square().sum(-1) / (y - along).square().sum(-1)).mean()

    params = drawn({"real": (3, 5), "imag": (3, 5), "v": (5,)}, 0.5)
    cuts = {"real": P(None, "tp"), "imag": P(None, "tp"), "v": P("tp")}
    return Program(loss, params, (randn(4, 3, 64), randn(4, 64, seed=7)), cuts)


def tensor_field() -> Program:
    """A tensor field network trained on energies and forces, mapped over molecules."""

    def loss(params: Any, kinds: Tensor, at: Tensor, due: Tensor, forces: Tensor) -> Tensor:
        def energy(x: Tensor, kind: Tensor) -> Tensor:
            h0 = (kind[:, None] == torch.arange(4)).to(x) @ params["kinds"]
            h1, eye = x.new_zeros(len(x), 5, 3), torch.eye(len(x), dtype=torch.bool)
            d = x[:, None] - x[None]
            r = torch.sqrt((d**2).sum(-1) + 1e-12 + eye.to(x))
            near = (0.5 * (torch.cos(math.pi * r / 4) + 1) * (r < 4)).masked_fill(eye, 0.0)
            radial = torch.exp(-((r[..., None] - torch.linspace(0, 4, 6, dtype=x.dtype)) ** 2))
            w = F.silu(radial * near[..., None] @ params["r"]) @ params["s"]
            w0, w1, w2, w3 = w.unflatten(-1, (4, 5)).unbind(2)
            y = d / r[..., None]
            for _ in range(2):
                across = (y[:, :, None].expand(-1, -1, 5, -1), h1.expand(len(x), -1, -1, -1))
                m0 = torch.einsum("ijc,jc->ic", w0, h0) + torch.einsum("ijc,ijx,jcx->ic", w1, y, h1)
                m1 = torch.einsum("ijc,ijx,jc->icx", w2, y, h0)
                m1 = m1 + torch.einsum("ijc,ijcx->icx", w3, torch.linalg.cross(*across))
                h1 = h1 + torch.einsum("icx,cd->idx", m1, params["v"])
                h0 = h0 + F.silu(m0) @ params["l"] + (h1 * h1).sum(-1) @ params["g"]
            return (F.silu(h0) @ params["out"]).sum()

        found = vmap(lambda x, kind: (energy(x, kind), -grad(energy)(x, kind)))(at, kinds)
        return F.mse_loss(found[0], due) + F.mse_loss(found[1], forces)

    shapes: dict[str, tuple[int, ...]] = {"kinds": (4, 5), "r": (6, 8), "s": (8, 20)}
    shapes |= {"l": (5, 5), "v": (5, 5), "g": (5, 5), "out": (5, 1)}
    batch = (indices(4, 4, 5), 1.5 * randn(4, 5, 3), randn(4), randn(4, 5, 3, seed=4))
    return Program(loss, drawn(shapes, 0.3), batch, {"r": P(None, "tp"), "s": P("tp")})


SOLVERS: dict[str, Callable[[], Program]] = {
    "Gated DeltaNet, by chunks": chunked_delta,
    "matrix-tree parser": dependency_parser,
    "inside algorithm": grammar,
    "bundle adjustment": bundle_adjustment,
    "material point method": material_points,
    "Kohn-Sham": self_consistent,
    "Riccati control": riccati_control,
    "LDPC belief propagation": belief_propagation,
    "perturbed top-k": perturbed_top,
    "MeanFlow": mean_flow,
    "MVDR beamformer": beamformer,
    "tensor field network": tensor_field,
}
