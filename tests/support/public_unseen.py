"""Programs that were written before any of them was tried: of many fields, each as its authors'
code writes it.
"""

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
from public_programs import Program
from public_recent import drawn
from public_signals import indices
from public_values import uniform
from real_models import randn
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from ftp import P


def test_time_training() -> Program:
    """TTT-Linear: each chunk of tokens takes a step of an inner loss, whose weights are state."""

    def inner(w: Tensor, b: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = k @ w + b
        mean, var = z.mean(-1, keepdim=True), z.var(-1, keepdim=True, unbiased=False)
        return ((z - mean) / torch.sqrt(var + 1e-6) - (v - k)).square().sum(-1).mean()

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        batch, steps, dim = x.shape
        heads, chunk = 2, 2
        shape = (batch, steps // chunk, chunk, heads, dim // heads)
        q, k, v = ((x @ params[n]).view(shape).permute(1, 0, 3, 2, 4) for n in "qkv")
        rate = torch.sigmoid(x @ params["rate"]).view(*shape[:4]).permute(1, 0, 3, 2)
        w = params["w"].expand(batch, heads, -1, -1)
        b = params["b"].expand(batch, heads, 1, -1)
        step, out = vmap(vmap(grad(inner, argnums=(0, 1)))), []
        for t in range(steps // chunk):
            of_w, of_b = step(w, b, k[t], v[t])
            lr = rate[t].mean(-1)[..., None, None]
            w, b = w - lr * of_w, b - lr * of_b
            out.append(q[t] @ w + b)
        h = torch.stack(out, 1).permute(0, 1, 3, 2, 4).reshape(x.shape)
        return F.mse_loss(F.layer_norm(h, (dim,)) @ params["o"], y)

    shapes: dict[str, tuple[int, ...]] = dict.fromkeys("qkv", (6, 6)) | {"o": (6, 3)}
    shapes |= {"rate": (6, 2), "w": (2, 3, 3), "b": (2, 1, 3)}
    return Program(loss, drawn(shapes, 0.5), (randn(4, 6, 6), randn(4, 6, 3, seed=2)))


def token_merging() -> Program:
    """ToMe: the most alike tokens of two halves become one, with a mean and a size."""

    def merge(x: Tensor, kept: Tensor, gone: Tensor, to: Tensor, how: str) -> Tensor:
        source, target = x[..., ::2, :], x[..., 1::2, :]
        batch, _, dim = source.shape
        rest = source.gather(dim=-2, index=kept.expand(batch, -1, dim))
        source = source.gather(dim=-2, index=gone.expand(batch, -1, dim))
        target = target.scatter_reduce(-2, to.expand(batch, -1, dim), source, reduce=how)
        return torch.cat([rest, target], dim=1)

    def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        size = torch.ones_like(x[..., :1])
        for i in range(2):
            q, k, v = (F.layer_norm(x, (8,)) @ params[f"qkv{i}"]).chunk(3, -1)
            scores = q @ k.transpose(1, 2) / 8**0.5 + size.log().transpose(1, 2)
            x = x + scores.softmax(-1) @ v @ params[f"o{i}"]
            with torch.no_grad():
                k = k / k.norm(dim=-1, keepdim=True)
                near = k[..., ::2, :] @ k[..., 1::2, :].transpose(-1, -2)
                near[..., 0, :] = -math.inf
                best, at = near.max(dim=-1)
                order = best.argsort(dim=-1, descending=True)[..., None]
                kept, gone = order[..., 2:, :].sort(dim=1)[0], order[..., :2, :]
                to = at[..., None].gather(dim=-2, index=gone)
            total = merge(size, kept, gone, to, "sum")
            peak = merge(x, kept, gone, to, "amax")
            x = merge(x * size, kept, gone, to, "sum") / total + 0.1 * peak
            size = total
        return F.cross_entropy(x[:, 0] @ params["head"], labels)

    shapes: dict[str, tuple[int, ...]] = {"head": (8, 3)}
    for i in range(2):
        shapes |= {f"qkv{i}": (8, 24), f"o{i}": (8, 8)}
    return Program(loss, drawn(shapes), (randn(4, 9, 8), indices(3, 4)))


def optical_flow() -> Program:
    """RAFT: all-pairs correlation read around a flow that a recurrence refines, and upsampled."""

    def loss(params: Any, first: Tensor, second: Tensor, due: Tensor) -> Tensor:
        f1, f2 = (torch.tanh(F.conv2d(x, params["in"], None, 2, 1)) for x in (first, second))
        batch, dim, height, width = f1.shape
        related = f1.flatten(2).transpose(1, 2) @ f2.flatten(2) / dim**0.5
        pyramid = [related.reshape(-1, 1, height, width)]
        pyramid.append(F.avg_pool2d(pyramid[0], 2, stride=2))
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        start = torch.stack([x, y]).to(f1.dtype)[None].repeat(batch, 1, 1, 1)
        now, h, total = start.clone(), f1, torch.zeros((), dtype=f1.dtype)
        around = torch.linspace(-1, 1, 3, dtype=f1.dtype)
        around = torch.stack(torch.meshgrid(around, around, indexing="ij"), -1).view(1, 3, 3, 2)
        for i in range(2):
            now, found = now.detach(), []
            for level, values in enumerate(pyramid):
                at = now.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2) / 2**level + around
                sides = at.new_tensor([values.shape[3] - 1, values.shape[2] - 1])
                read = F.grid_sample(values, 2 * at / sides - 1, align_corners=True)
                found.append(read.view(batch, height, width, -1))
            seen = torch.cat([torch.cat(found, -1).permute(0, 3, 1, 2), now - start, f1], 1)
            gate = torch.sigmoid(F.conv2d(torch.cat([h, seen], 1), params["gate"], padding=1))
            new = torch.tanh(F.conv2d(torch.cat([gate * h, seen], 1), params["new"], padding=1))
            h = (1 - gate) * h + gate * new
            now = now + F.conv2d(h, params["flow"], padding=1)
            mask = F.conv2d(h, params["mask"]).view(batch, 1, 9, 2, 2, height, width).softmax(2)
            flow = F.unfold(2 * (now - start), 3, padding=1)
            flow = (mask * flow.view(batch, 2, 9, 1, 1, height, width)).sum(2)
            flow = flow.permute(0, 1, 4, 2, 5, 3).reshape(batch, 2, 2 * height, 2 * width)
            total += 0.8 ** (1 - i) * (flow - due).abs().mean()
        return total

    shapes: dict[str, tuple[int, ...]] = {"in": (4, 3, 3, 3), "flow": (2, 4, 3, 3)}
    shapes |= {"gate": (4, 28, 3, 3), "new": (4, 28, 3, 3), "mask": (36, 4, 1, 1)}
    batch = (randn(4, 3, 8, 10), randn(4, 3, 8, 10, seed=2), randn(4, 2, 8, 10, seed=3))
    return Program(loss, drawn(shapes, 0.3), batch)


def hash_grid() -> Program:
    """Instant-NGP: corners of a voxel are hashed into tables of several resolutions."""

    def loss(params: Any, x: Tensor, due: Tensor) -> Tensor:
        corners = torch.cartesian_prod(*[torch.arange(2)] * 3)
        points, parts = x.reshape(-1, 3), []
        for level in range(3):
            grid = 1.0 / math.floor(3 * 1.9**level)
            low = torch.floor(points / grid).int()
            near = (low.unsqueeze(1) + corners).long()
            key = torch.zeros_like(near)[..., 0]
            for i, prime in enumerate((1, 2654435761, 805459861)):
                key ^= near[..., i] * prime
            table = F.embedding(torch.tensor(31) & key, params["tables"][level])
            inside = ((points - low * grid) / grid).unsqueeze(1)
            weights = torch.where(corners == 1, inside, 1 - inside).prod(-1, keepdim=True)
            parts.append((table * weights).sum(1))
        h = F.relu(torch.cat(parts, -1) @ params["a"]) @ params["b"]
        alpha = 1 - torch.exp(-h[:, 0].clamp(max=5).exp().view(x.shape[:2]) * 0.2)
        ahead = torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1)
        weights = alpha * torch.cumprod(ahead, -1)[:, :-1]
        colour = (weights[..., None] * torch.sigmoid(h[:, 1:]).view(x.shape)).sum(1)
        return F.mse_loss(colour, due) - 1e-3 * (weights * torch.log(weights + 1e-6)).sum()

    params = drawn({"tables": (3, 32, 2), "a": (6, 8), "b": (8, 4)})
    cuts = {"tables": P(None, "tp"), "a": P(None, "tp"), "b": P("tp")}
    return Program(loss, params, (uniform(4, 5, 3), uniform(4, 3, seed=2)), cuts)


def point_attention() -> Program:
    """AlphaFold's structure module: attention by points in frames, which it turns and moves."""

    def turned(u: Tensor) -> Tensor:
        q = F.normalize(torch.cat([torch.ones_like(u[..., :1]), u], -1), dim=-1)
        w, x, y, z = q.unbind(-1)
        rows = [1 - 2 * (y**2 + z**2), 2 * (x * y - w * z), 2 * (x * z + w * y)]
        rows += [2 * (x * y + w * z), 1 - 2 * (x**2 + z**2), 2 * (y * z - w * x)]
        rows += [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x**2 + y**2)]
        return torch.stack(rows, -1).unflatten(-1, (3, 3))

    def loss(params: Any, s: Tensor, z: Tensor, turn: Tensor, at: Tensor, due: Tensor) -> Tensor:
        batch, count, _ = s.shape
        for _ in range(2):
            q, k, v = (s @ params["qkv"]).view(batch, count, 2, 9).chunk(3, -1)
            points = torch.stack((s @ params["points"]).split(12, dim=-1), dim=-1)
            points = torch.einsum("bnij,bnpj->bnpi", turn, points) + at[:, :, None]
            qp, kp, vp = points.view(batch, count, 2, 6, 3).chunk(3, -2)
            scores = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) + (z @ params["pair"]).permute(
                0, 3, 1, 2
            )
            far = ((qp.unsqueeze(2) - kp.unsqueeze(1)) ** 2).sum(-1)
            far = (far * F.softplus(params["heads"])[:, None]).sum(-1)
            a = (scores - 0.1 * far.permute(0, 3, 1, 2)).softmax(-1)
            o = (a @ v.transpose(1, 2)).transpose(1, 2).reshape(batch, count, -1)
            op = (a[..., None, :, :, None] * vp.permute(0, 2, 4, 1, 3)[..., None, :, :]).sum(-2)
            op = op.permute(0, 3, 1, 4, 2) - at[:, :, None, None]
            op = torch.einsum("bnji,bnhpj->bnhpi", turn, op).reshape(batch, count, -1, 3)
            norm = torch.sqrt((op**2).sum(-1) + 1e-8)
            s = s + torch.cat([o, *op.unbind(-1), norm], -1) @ params["o"]
            u = s @ params["frame"]
            at = at + torch.einsum("bnij,bnj->bni", turn, u[..., 3:])
            turn = turn @ turned(u[..., :3])
        local = torch.einsum("bnji,bnmj->bnmi", turn, at[:, None] - at[:, :, None])
        return torch.sqrt(((local - due) ** 2).sum(-1) + 1e-4).clamp(max=10).mean()

    shapes: dict[str, tuple[int, ...]] = {"qkv": (6, 18), "points": (6, 36), "pair": (4, 2)}
    shapes |= {"heads": (2,), "o": (22, 6), "frame": (6, 6)}
    batch = (randn(4, 5, 6), randn(4, 5, 5, 4), torch.linalg.qr(randn(4, 5, 3, 3))[0])
    return Program(loss, drawn(shapes, 0.5), (*batch, randn(4, 5, 3), randn(4, 5, 5, 3, seed=3)))


def particle_mesh() -> Program:
    """Particle-mesh Ewald: charges are spread on a grid, whose potential an FFT gives."""

    def loss(params: Any, x: Tensor, at: Tensor, cell: Tensor) -> Tensor:
        q = (torch.tanh(x @ params["a"]) @ params["b"]).squeeze(-1)
        q, n = q - q.mean(), 6
        inverse = torch.linalg.inv(cell)
        place = (at @ inverse) % 1.0 * n
        f = place - place.floor()
        spline = torch.stack([(1 - f) ** 2 / 2, 0.5 + f * (1 - f), f**2 / 2], -1)
        near = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3)
        nodes = (place.floor().long()[:, None] + near) % n
        weights = spline.gather(2, (near + 1).T[None].expand(len(x), 3, -1)).prod(1)
        grid = torch.zeros(n, n, n, dtype=x.dtype)
        grid.index_put_(nodes.unbind(-1), q[:, None] * weights, accumulate=True)
        k, last = torch.fft.fftfreq(n, 1 / n), torch.fft.rfftfreq(n, 1 / n)
        waves = torch.stack(torch.meshgrid(k, k, last, indexing="ij"), -1).to(x.dtype)
        squared = (waves @ inverse.T * 2 * math.pi).square().sum(-1)
        green = torch.exp(-squared / (4 * params["alpha"] ** 2)) / squared.clamp(min=1e-9)
        green = torch.where(squared == 0, 0.0, 4 * math.pi * green)
        potential = torch.fft.irfftn(torch.fft.rfftn(grid) * green, s=grid.shape)
        off = at[:, None] - at
        off = off - torch.round(off @ inverse) @ cell
        far = (off.square().sum(-1) + torch.eye(len(x), dtype=x.dtype)).sqrt()
        near_by = torch.triu(q[:, None] * q * torch.erfc(params["alpha"] * far) / far, diagonal=1)
        return 0.5 * (potential * grid).sum() / torch.linalg.det(cell).abs() + near_by.sum()

    params = drawn({"a": (5, 8), "b": (8, 1)}) | {"alpha": 0.7 * torch.ones(1).double()}
    cell = torch.eye(3, dtype=torch.float64) * 4 + 0.2 * randn(3, 3)
    cuts = {"a": P(None, "tp"), "b": P("tp")}
    return Program(loss, params, (randn(7, 5), uniform(7, 3) * 4, cell), cuts, P())


def monte_carlo() -> Program:
    """A wave function of determinants: local energies by forward over reverse, for each sample."""

    def log_psi(params: Any, r: Tensor) -> Tensor:
        x = r.view(4, 3)
        h = torch.tanh(torch.cat([x, x.norm(dim=-1, keepdim=True)], -1) @ params["a"])
        h = h + torch.tanh(torch.cat([h, h.mean(0, keepdim=True).expand(4, -1)], -1) @ params["b"])
        orbitals = (h @ params["orbitals"]).view(4, 3, 4) * torch.exp(-x.norm(dim=-1))[
            :, None, None
        ]
        sign, log = torch.linalg.slogdet(orbitals.permute(1, 0, 2))
        largest = log.max().detach()
        return (sign * torch.exp(log - largest)).sum().abs().log() + largest

    def energy(params: Any, r: Tensor) -> Tensor:
        slope = grad(lambda r: log_psi(params, r))
        curve = torch.zeros((), dtype=r.dtype)
        for i, way in enumerate(torch.eye(12, dtype=r.dtype)[:3]):
            curve = curve + torch.func.jvp(slope, (r,), (way,))[1][i]
        return -0.5 * (curve + slope(r).square().sum()) - (1 / r.view(4, 3).norm(dim=-1)).sum()

    def loss(params: Any, r: Tensor) -> Tensor:
        found = vmap(energy, (None, 0))(params, r).detach()
        middle = found.median()
        spread = (found - middle).abs().mean()
        clipped = torch.clip(found, middle - 5 * spread, middle + 5 * spread)
        log = vmap(log_psi, (None, 0))(params, r)
        return 2 * ((clipped - clipped.mean()) * log).mean()

    shapes: dict[str, tuple[int, ...]] = {"a": (4, 8), "b": (16, 8), "orbitals": (8, 12)}
    return Program(loss, drawn(shapes, 0.4), (randn(4, 12),), {"a": P(None, "tp"), "b": P("tp")})


def lattice() -> Program:
    """Lattice Boltzmann: populations collide, bounce off a solid, and move, written in place."""
    ways = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
    back = [0, 3, 4, 1, 2, 7, 8, 5, 6]

    def loss(params: Any, density: Tensor, speed: Tensor, solid: Tensor, due: Tensor) -> Tensor:
        w = density.new_tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4)[:, None, None]
        c = density.new_tensor(ways)

        def rest(density: Tensor, speed: Tensor) -> Tensor:
            along = torch.einsum("qd,dxy->qxy", c, speed)
            return w * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * (speed**2).sum(0))

        thickness = torch.tanh(params["z"] @ params["a"]) @ params["b"]
        tau, f = 0.6 + F.softplus(thickness.view(density.shape)), rest(density, speed)
        for _ in range(2):
            density = f.sum(0)
            moved = f - (f - rest(density, torch.einsum("qd,qxy->dxy", c, f) / density)) / tau
            moved = torch.where(solid, f[back], moved)
            for i, way in enumerate(ways):
                f[i] = torch.roll(moved[i], shifts=way, dims=(0, 1))
            f[1, 0, :] = f[3, 0, :] + 2 / 3 * density[0] * 0.1
        return F.mse_loss(torch.einsum("qd,qxy->dxy", c, f) / f.sum(0), due)

    solid = torch.zeros(6, 5, dtype=torch.bool)
    solid[2:4, 2] = True
    params = drawn({"z": (30, 4), "a": (4, 6), "b": (6, 1)})
    batch = (1 + 0.1 * uniform(6, 5), 0.05 * randn(2, 6, 5), solid, 0.1 * randn(2, 6, 5, seed=5))
    return Program(loss, params, batch, {"z": P("tp"), "a": P(None, "tp"), "b": P("tp")}, P())


def quantum_circuit() -> Program:
    """A state of four qubits under rotations and controlled flips; a class by expectations."""

    def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        def turned(state: Tensor, angle: Tensor, qubit: int) -> Tensor:
            c, s = torch.cos(angle / 2), torch.sin(angle / 2)
            gate = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
            state = torch.movedim(state, qubit + 1, -1)
            state = torch.einsum("bij,b...j->b...i", gate.expand(len(x), 2, 2).to(state), state)
            return torch.movedim(state, -1, qubit + 1)

        state = torch.zeros(len(x), 16, dtype=torch.complex128)
        state[:, 0] = 1
        state, angles = state.view(-1, 2, 2, 2, 2), torch.tanh(x @ params["in"])
        for qubit in range(4):
            state = turned(state, angles[:, qubit], qubit)
        for layer in range(2):
            for qubit in range(4):
                phase = torch.exp(torch.tensor([-0.5j, 0.5j]) * params["angles"][layer, qubit, 0])
                state = state * phase.view([2 if i == qubit else 1 for i in range(4)])
                state = turned(state, params["angles"][layer, qubit, 1], qubit)
            for qubit in range(3):
                first, second = state.select(qubit + 1, 0), state.select(qubit + 1, 1)
                state = torch.stack([first, second.flip(qubit + 1)], dim=qubit + 1)
        chance = state.abs().square()
        ups = [chance.movedim(i + 1, 1).flatten(2).sum(-1) for i in range(4)]
        values = torch.stack([up[:, 0] - up[:, 1] for up in ups], -1)
        return F.cross_entropy(values @ params["head"], labels)

    params = drawn({"in": (5, 4), "angles": (2, 4, 2), "head": (4, 3)})
    cuts = {"in": P(None, "tp"), "angles": P(), "head": P("tp")}
    return Program(loss, params, (randn(4, 5), indices(3, 4)), cuts)


def particle_filter() -> Program:
    """Particles that a net moves, weighed by observations, soft resampling by their cumulated
    weights.
    """

    def loss(params: Any, seen: Tensor, noise: Tensor, drawn: Tensor) -> Tensor:
        batch, steps, count = len(seen), seen.shape[1], noise.shape[2]
        at, log = noise[:, 0], torch.full((batch, count), -math.log(count), dtype=seen.dtype)
        total = torch.zeros((), dtype=seen.dtype)
        for t in range(steps):
            at = torch.tanh(at @ params["a"]) @ params["b"] + 0.3 * noise[:, t]
            off = at @ params["c"] - seen[:, t].unsqueeze(1)
            log = log - 0.5 * off.square().sum(-1)
            evidence = torch.logsumexp(log, 1, keepdim=True)
            total = total - evidence.mean()
            weights = (log - evidence).exp()
            mixed = 0.5 * weights + 0.5 / count
            summed = mixed.cumsum(-1)
            summed[:, -1] = 1.0
            due = (torch.arange(count) + drawn[:, t].unsqueeze(-1)) / count
            chosen = torch.searchsorted(summed.detach(), due).clamp(max=count - 1)
            at = at.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 3))
            log = (weights / mixed).gather(1, chosen).log()
            log = log - torch.logsumexp(log, 1, keepdim=True)
        return total + 0.01 / (log.exp() ** 2).sum(1).mean()

    params = drawn({"a": (3, 8), "b": (8, 3), "c": (3, 2)}, 0.6)
    cuts = {"a": P(None, "tp"), "b": P("tp"), "c": P()}
    return Program(loss, params, (randn(4, 4, 2), randn(4, 4, 5, 3, seed=2), uniform(4, 4)), cuts)


def ranking() -> Program:
    """LambdaRank and ListMLE of lists of unequal lengths."""

    def loss(params: Any, x: Tensor, due: Tensor, mask: Tensor) -> Tensor:
        s = (torch.relu(x @ params["a"]) @ params["b"]).squeeze(-1)
        found, right = s.clone(), due.clone()
        found[~mask] = float("-inf")
        right[~mask] = float("-inf")
        found, order = found.sort(descending=True, dim=-1)
        best, right = right.sort(descending=True, dim=-1)[0], right.gather(1, order)
        gaps = right[:, :, None] - right[:, None, :]
        pairs = torch.isfinite(gaps) & (gaps > 0)
        first = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        first[:3, :3] = 1
        right.clamp_(min=0.0)
        best.clamp_(min=0.0)
        discount = torch.log2(1.0 + torch.arange(1, x.shape[1] + 1).to(x.dtype))[None]
        largest = ((torch.pow(2, best) - 1) / discount)[:, :3].sum(-1).clamp(min=1e-10)
        gain = (torch.pow(2, right) - 1) / largest[:, None]
        weights = (1 / discount[:, :, None] - 1 / discount[:, None, :]).abs()
        weights = weights * (gain[:, :, None] - gain[:, None, :]).abs()
        off = (found[:, :, None] - found[:, None, :]).clamp(min=-1e8, max=1e8)
        off = off.masked_fill(torch.isnan(off), 0.0)
        chance = torch.sigmoid(off).clamp(min=1e-10) ** weights.masked_fill(~pairs, 0.0)
        listed = s.gather(1, due.argsort(1, descending=True))
        rest = torch.logcumsumexp(listed.flip(1), 1).flip(1)
        return (rest - listed).mean() - torch.log2(chance.clamp(min=1e-10))[pairs & first].sum()

    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[3, 4:] = False
    due = 0.6 * ((torch.arange(5) * 2 + torch.arange(4)[:, None]) % 5).double()
    params, cuts = drawn({"a": (4, 8), "b": (8, 1)}), {"a": P(None, "tp"), "b": P("tp")}
    return Program(loss, params, (randn(4, 5, 4), due, mask), cuts)


def separation() -> Program:
    """Conv-TasNet: overlapping frames are masked and added up; the best order of the sources."""

    def added(frames: Tensor, step: int) -> Tensor:
        *outer, count, length = frames.shape
        at = torch.arange(count + length // step - 1).unfold(0, length // step, 1)
        out = frames.new_zeros(*outer, count + length // step - 1, step)
        out.index_add_(-2, at.contiguous().view(-1), frames.reshape(*outer, -1, step))
        return out.view(*outer, -1)

    def loss(params: Any, mixed: Tensor, due: Tensor) -> Tensor:
        h = F.relu(F.conv1d(mixed.unsqueeze(1), params["in"], stride=2))
        y = F.prelu(F.conv1d(h, params["a"]), params["slope"])
        y = F.conv1d(y, params["deep"], padding=2, dilation=2, groups=8)
        mask = F.relu(F.conv1d(F.group_norm(y, 1), params["mask"])).view(len(h), 2, *h.shape[1:])
        found = added((h.unsqueeze(1) * mask).transpose(2, 3) @ params["out"], 2)
        due, found = (t - t.mean(2, keepdim=True) for t in (due, found))
        target, guess = due.unsqueeze(1), found.unsqueeze(2)
        along = (guess * target).sum(3, keepdim=True) * target
        along = along / (target**2).sum(3, keepdim=True)
        ratio = (along**2).sum(3) / ((guess - along) ** 2).sum(3)
        orders = due.new_tensor(list(permutations(range(2))), dtype=torch.long)
        ways = due.new_zeros(2, 2, 2).scatter_(2, orders.unsqueeze(2), 1)
        score = torch.einsum("bij,pij->bp", 10 * torch.log10(ratio + 1e-8), ways)
        order = orders.index_select(0, score.argmax(1))
        sorted_ = torch.zeros_like(found)
        for b in range(len(found)):
            for k in range(2):
                sorted_[b, k] = found[b, order[b][k]]
        return F.l1_loss(sorted_, due) - score.max(1).values.mean() / 2

    shapes: dict[str, tuple[int, ...]] = {"in": (6, 1, 4), "a": (8, 6, 1), "slope": (1,)}
    shapes |= {"deep": (8, 1, 3), "mask": (12, 8, 1), "out": (6, 4)}
    return Program(loss, drawn(shapes, 0.5), (randn(4, 14), randn(4, 2, 14, seed=2)))


UNSEEN: dict[str, Callable[[], Program]] = {
    "test-time training": test_time_training,
    "token merging": token_merging,
    "RAFT": optical_flow,
    "Instant-NGP": hash_grid,
    "invariant point attention": point_attention,
    "particle-mesh Ewald": particle_mesh,
    "variational Monte Carlo": monte_carlo,
    "lattice Boltzmann": lattice,
    "quantum circuit": quantum_circuit,
    "particle filter": particle_filter,
    "LambdaRank": ranking,
    "Conv-TasNet": separation,
}
