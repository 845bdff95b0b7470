"""Language models and other models of sequences.

One long file of short programs, each of which can be read alone.
"""

# Modules hold tensors of all kinds as attributes, of which no type is known.
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false

import math
from typing import Any

import torch
from public_programs import Program, of_model
from real_models import COLUMN, ROW, randn, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from ftp import P

VOCAB, SEQ, DIM, HEADS = 23, 6, 12, 3
IDS = tokens(VOCAB, 4, SEQ + 1)
X, Y = IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous()


def _next(call: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(call(x).flatten(0, 1), y.flatten())


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class _Residual(nn.Module):
    """x + fn(norm(x)), one after another."""

    def __init__(self, *fns: nn.Module, norm: Any = nn.LayerNorm):
        super().__init__()
        self.fns = nn.ModuleList(fns)
        self.norms = nn.ModuleList(norm(DIM) for _ in fns)

    def forward(self, x: Tensor) -> Tensor:
        for fn, norm in zip(self.fns, self.norms, strict=True):
            x = x + fn(norm(x))
        return x


class _Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, *blocks: nn.Module, norm: Any = nn.LayerNorm, tied: bool = False):
        super().__init__()
        self.emb, self.blocks = nn.Embedding(VOCAB, DIM), nn.Sequential(*blocks)
        self.norm, self.head = norm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.emb(ids))))


class _Packed(nn.Module):
    """Causal attention of q, k and v from one projection."""

    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(DIM, 3 * DIM, bias=False)
        self.c_proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(t) for t in self.c_attn(x).split(DIM, dim=2))
        return self.c_proj(_merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def _mlp(act: nn.Module, hidden: int = 20) -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, hidden), act, nn.Linear(hidden, DIM))


def nanogpt() -> Program:
    class GPT(_Decoder):
        def __init__(self):
            super().__init__(*(_Residual(_Packed(), _mlp(nn.GELU())) for _ in range(2)), tied=True)
            self.pos = nn.Embedding(SEQ, DIM)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.emb(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
            return self.head(self.norm(self.blocks(x)))

    cuts = {"**.c_attn.weight": COLUMN, "**.c_proj.weight": ROW, "pos.weight": P(None, "tp")}
    return of_model(GPT(), _next, X, Y, cuts=cuts)


def _rotary(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** -(torch.arange(half) / half))
    cos, sin = angles.to(x).cos(), angles.to(x).sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


class _QKNorm(nn.Module):
    """Rotary attention with normed q and k and fewer heads of keys."""

    def __init__(self):
        super().__init__()
        self.q, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.kv = nn.Linear(DIM, 2 * DIM // HEADS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = _heads(self.q(x))
        k, v = (t.unsqueeze(1) for t in self.kv(x).chunk(2, -1))
        q, k = (F.rms_norm(_rotary(t), (t.shape[-1],)) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(_merged(y))


class _Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,))


class _Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def nanochat() -> Program:
    class Chat(_Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = F.rms_norm(self.emb(ids), (DIM,))
            return 15 * torch.tanh(self.head(self.norm(self.blocks(x))) / 15)

    blocks = (_Residual(_QKNorm(), _mlp(_Squared()), norm=_Norm) for _ in range(2))
    cuts = {"**.q.weight": COLUMN, "**.o.weight": ROW}
    return of_model(Chat(*blocks, norm=_Norm), _next, X, Y, cuts=cuts)


def modded_nanogpt() -> Program:
    """Value embeddings, a residual from the embedding, and skips as in a U-net."""

    class Modded(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.values = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM)
            self.blocks = nn.ModuleList(
                _Residual(_Packed(), _mlp(_Squared()), norm=_Norm) for _ in range(4)
            )
            self.lambdas = nn.Parameter(torch.tensor([[1.0, 0.0]] * 4))
            self.skips, self.head = nn.Parameter(torch.ones(2)), nn.Linear(DIM, VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = first = F.rms_norm(self.emb(ids), (DIM,))
            kept = []
            for i, block in enumerate(self.blocks):
                if i >= 2:
                    x = x + self.skips[i - 2] * kept.pop()
                x = block(self.lambdas[i, 0] * x + self.lambdas[i, 1] * first)
                x = x + self.values(ids) if i in (0, 3) else x
                if i < 2:
                    kept.append(x)
            return 30 * torch.sigmoid(self.head(x) / 7.5)

    return of_model(Modded(), _next, X, Y)


def rwkv7() -> Program:
    """Time mixing by a generalized delta rule: state S <- S (diag(w) - k^T (a k)) + v^T k."""

    class TimeMix(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.rand(6, DIM))
            self.r, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
            self.w, self.a, self.g = (
                nn.Sequential(nn.Linear(DIM, 4, bias=False), nn.Tanh(), nn.Linear(4, DIM))
                for _ in range(3)
            )
            self.norm = nn.GroupNorm(HEADS, DIM)

        def forward(self, x: Tensor) -> Tensor:
            before = F.pad(x, (0, 0, 1, -1)) - x
            r, w, k, v, a, g = (x + before * m for m in self.mix)
            decay = torch.exp(-0.606531 * torch.sigmoid(self.w(w)))
            r, k, v = self.r(r), self.k(k), self.v(v)
            a, g = torch.sigmoid(self.a(a)), torch.sigmoid(self.g(g))
            split = [t.unflatten(-1, (HEADS, -1)) for t in (r, decay, k, v, a)]
            r, decay, k, v, a = split
            n = F.normalize(k, dim=-1)
            state = x.new_zeros(x.shape[0], HEADS, DIM // HEADS, DIM // HEADS)
            out = []
            for t in range(x.shape[1]):
                removed = (state @ n[:, t, :, :, None]) @ (n[:, t] * a[:, t])[:, :, None]
                added = v[:, t, :, :, None] @ k[:, t, :, None]
                state = state * decay[:, t, :, None] - removed + added
                out.append((state @ r[:, t, :, :, None]).squeeze(-1))
            y = torch.stack(out, 1).flatten(2)
            return self.o(self.norm(y.flatten(0, 1)).view_as(y) * g)

    blocks = (_Residual(TimeMix(), _mlp(_Squared())) for _ in range(2))
    return of_model(
        _Decoder(*blocks), _next, X, Y, cuts={"**.[rkv].weight": COLUMN, "**.o.weight": ROW}
    )


def mamba() -> Program:
    class Selective(nn.Module):
        def __init__(self, inner: int = 10, state: int = 4):
            super().__init__()
            self.into, self.out = nn.Linear(DIM, 2 * inner), nn.Linear(inner, DIM)
            self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
            self.bc, self.dt = nn.Linear(inner, 2 * state), nn.Linear(inner, inner)
            self.log_a = nn.Parameter(torch.log(torch.arange(1.0, state + 1)).repeat(inner, 1))
            self.d = nn.Parameter(torch.ones(inner))

        def forward(self, x: Tensor) -> Tensor:
            x, gate = self.into(x).chunk(2, -1)
            x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            b, c = self.bc(x).chunk(2, -1)
            dt = F.softplus(self.dt(x))
            decay = torch.exp(-dt[..., None] * self.log_a.exp())
            fed = (dt * x)[..., None] * b[:, :, None]
            h, out = torch.zeros_like(fed[:, 0]), []
            for t in range(x.shape[1]):
                h = decay[:, t] * h + fed[:, t]
                out.append((h * c[:, t, None]).sum(-1))
            return self.out((torch.stack(out, 1) + self.d * x) * F.silu(gate))

    blocks = (_Residual(Selective()) for _ in range(2))
    return of_model(_Decoder(*blocks), _next, X, Y)


def mamba2() -> Program:
    """The dual form: masked matmuls with decays within a sequence, as of one chunk."""

    class Dual(nn.Module):
        def __init__(self, state: int = 4):
            super().__init__()
            self.into = nn.Linear(DIM, 2 * DIM + 2 * state + HEADS)
            self.out, self.log_a = nn.Linear(DIM, DIM), nn.Parameter(torch.zeros(HEADS))
            self.sizes = [DIM, DIM, state, state, HEADS]

        def forward(self, x: Tensor) -> Tensor:
            x, z, b, c, dt = self.into(x).split(self.sizes, -1)
            dt = F.softplus(dt).transpose(1, 2)
            total = (dt * -self.log_a.exp()[:, None]).cumsum(-1)
            gap = total[..., :, None] - total[..., None, :]
            seen = torch.ones_like(gap[0, 0]).tril().bool()
            decay = torch.exp(gap.masked_fill(~seen, -torch.inf))
            scores = (c @ b.mT)[:, None] * decay * dt[..., None, :]
            return self.out(F.rms_norm(_merged(scores @ _heads(x)) * F.silu(z), (DIM,)))

    return of_model(_Decoder(*(_Residual(Dual()) for _ in range(2))), _next, X, Y)


def retnet() -> Program:
    class Retention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.gate = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.norm, self.out = nn.GroupNorm(HEADS, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (_heads(t) for t in self.qkv(x).chunk(3, -1))
            gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=x.dtype, device=x.device))
            at = torch.arange(x.shape[1], device=x.device)
            gap = at[:, None] - at
            decay = torch.where(gap >= 0, gamma[:, None, None] ** gap.clamp(min=0), 0)
            y = _merged((q @ k.mT * decay) @ v)
            return self.out(F.silu(self.gate(x)) * self.norm(y.flatten(0, 1)).view_as(y))

    return of_model(_Decoder(_Residual(Retention(), _mlp(nn.GELU()))), _next, X, Y)


def titan_llama3() -> Program:
    """Rotary embedding by complex numbers; SwiGLU."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            half = DIM // HEADS // 2
            freqs = 1.0 / 500000 ** (torch.arange(half, dtype=x.dtype, device=x.device) / half)
            angles = torch.outer(torch.arange(x.shape[1], device=x.device).to(x.dtype), freqs)
            turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]

            def turned(t: Tensor) -> Tensor:
                pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
                return torch.view_as_real(pairs * turns).flatten(3)

            q, k, v = (w(x).view(*x.shape[:2], HEADS, -1) for w in (self.wq, self.wk, self.wv))
            q, k, v = (t.transpose(1, 2) for t in (turned(q), turned(k), v))
            return self.wo(_merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    class SwiGLU(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w3 = (nn.Linear(DIM, 20, bias=False) for _ in range(2))
            self.w2 = nn.Linear(20, DIM, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    blocks = (_Residual(Attention(), SwiGLU(), norm=nn.RMSNorm) for _ in range(2))
    cuts = {"**.wq.weight": COLUMN, "**.wo.weight": ROW, "**.w2.weight": ROW}
    return of_model(_Decoder(*blocks, norm=nn.RMSNorm), _next, X, Y, cuts=cuts)


class _Experts(nn.Module):
    """A router by sigmoid with a bias that chooses only, two of four experts, and a shared one."""

    def __init__(self):
        super().__init__()
        self.router, self.shared = nn.Linear(DIM, 4, bias=False), _mlp(nn.SiLU(), 8)
        self.up = nn.Parameter(torch.randn(4, DIM, 8))
        self.down = nn.Parameter(torch.randn(4, 8, DIM))
        self.register_buffer("bias", torch.tensor([0.3, -0.2, 0.1, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.router(x))
        chosen = (scores + self.bias).topk(2, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(scores).scatter(-1, chosen, weights)
        made = F.silu(torch.einsum("bsd,edh->bseh", x, self.up))
        return self.shared(x) + torch.einsum("bseh,ehd,bse->bsd", made, self.down, gates)


def titan_deepseek() -> Program:
    """Attention over a latent of low rank, experts."""

    class Latent(nn.Module):
        def __init__(self, rank: int = 5, rope: int = 2):
            super().__init__()
            self.q, self.o = nn.Linear(DIM, HEADS * (4 + rope)), nn.Linear(HEADS * 4, DIM)
            self.down, self.up = nn.Linear(DIM, rank + rope), nn.Linear(rank, HEADS * 8)
            self.norm, self.sizes = nn.RMSNorm(rank), [rank, rope]

        def forward(self, x: Tensor) -> Tensor:
            q, q_rope = _heads(self.q(x)).split([4, self.sizes[1]], -1)
            latent, k_rope = self.down(x).split(self.sizes, -1)
            k, v = _heads(self.up(self.norm(latent))).chunk(2, -1)
            k_rope = _rotary(k_rope[:, None]).expand(-1, HEADS, -1, -1)
            q, k = torch.cat([q, _rotary(q_rope)], -1), torch.cat([k, k_rope], -1)
            return self.o(_merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    cuts = {"**.up": P("tp"), "**.down": P("tp")}
    return of_model(
        _Decoder(_Residual(Latent(), _Experts(), norm=nn.RMSNorm)), _next, X, Y, cuts=cuts
    )


def switch() -> Program:
    """One expert a token with room for few; the auxiliary loss balances the router."""

    class Switch(nn.Module):
        def __init__(self, capacity: int = 7):
            super().__init__()
            self.router, self.capacity = nn.Linear(DIM, 4), capacity
            self.up = nn.Parameter(torch.randn(4, DIM, 8))
            self.down = nn.Parameter(torch.randn(4, 8, DIM))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            flat = x.flatten(0, 1)
            probabilities = self.router(flat).softmax(-1)
            weight, expert = probabilities.max(-1)
            chosen = F.one_hot(expert, 4)
            place = (chosen.cumsum(0) * chosen).sum(-1) - 1
            sent = F.one_hot(place.clamp(max=self.capacity), self.capacity + 1)[:, :-1]
            sent = (chosen[:, :, None] * sent[:, None]).to(x.dtype)
            queue = torch.einsum("tec,td->ecd", sent, flat)
            made = torch.bmm(F.relu(torch.bmm(queue, self.up)), self.down)
            out = torch.einsum("tec,ecd->td", sent * weight[:, None, None], made)
            aux = (chosen.to(x.dtype).mean(0) * probabilities.mean(0)).sum() * 4
            return x + out.view_as(x), aux

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.layer = nn.Embedding(VOCAB, DIM), Switch()
            self.head = nn.Linear(DIM, VOCAB)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x, aux = self.layer(self.emb(ids))
            return self.head(x), aux

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        logits, aux = call(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.01 * aux

    return of_model(Model(), loss, X, Y)


def alibi() -> Program:
    class Biased(_Packed):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (_heads(t) for t in self.c_attn(x).chunk(3, -1))
            slopes = 2.0 ** -(torch.arange(1, HEADS + 1, device=x.device) * 8 / HEADS)
            at = torch.arange(x.shape[1], device=x.device)
            bias = slopes[:, None, None] * (at - at[:, None])
            bias = bias.masked_fill(at > at[:, None], -torch.inf).to(x.dtype)
            return self.c_proj(_merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))

    return of_model(_Decoder(_Residual(Biased(), _mlp(nn.GELU()))), _next, X, Y)


def transformer_xl() -> Program:
    """Relative positions by the shift of a padded matrix; a memory beside the keys."""

    class Relative(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.kv, self.r = (nn.Linear(DIM, n, bias=False) for n in (DIM, 2 * DIM, DIM))
            self.u, self.v = (nn.Parameter(torch.randn(HEADS, 1, DIM // HEADS)) for _ in range(2))
            self.out = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            seen = torch.cat([x.detach().roll(1, 0), x], 1)
            q = _heads(self.q(x))
            k, v = (_heads(t) for t in self.kv(seen).chunk(2, -1))
            at = torch.arange(2 * n - 1, -1, -1, device=x.device).to(x.dtype)
            waves = at[:, None] * 10000.0 ** -torch.arange(0, 1, 2 / DIM, device=x.device)
            r = _heads(self.r(torch.cat([waves.sin(), waves.cos()], -1).to(x.dtype))[None])
            by_place = (q + self.v) @ r.mT
            padded = F.pad(by_place, (1, 0)).view(x.shape[0], HEADS, 2 * n + 1, n)
            shifted = padded[:, :, 1:].reshape(by_place.shape)
            scores = ((q + self.u) @ k.mT + shifted) / math.sqrt(DIM // HEADS)
            hidden = torch.ones(n, 2 * n, dtype=torch.bool, device=x.device).triu(n + 1)
            return self.out(_merged(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v))

    return of_model(_Decoder(_Residual(Relative(), _mlp(nn.ReLU()))), _next, X, Y)


def word_language_model() -> Program:
    """pytorch/examples: an LSTM whose decoder is tied to its encoder."""

    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.rnn = nn.Embedding(VOCAB, DIM), nn.LSTM(DIM, DIM, 2)
            self.decoder = nn.Linear(DIM, VOCAB)
            self.decoder.weight = self.encoder.weight

        def forward(self, ids: Tensor) -> Tensor:
            states = torch.zeros(2, ids.shape[0], DIM, dtype=torch.float64, device=ids.device)
            out, _ = self.rnn(self.encoder(ids).transpose(0, 1), (states, states))
            return F.log_softmax(self.decoder(out.transpose(0, 1)), -1)

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(call(x).flatten(0, 1), y.flatten())

    return of_model(RNN(), loss, X, Y)


def translation() -> Program:
    """nn.Transformer with causal and padding masks."""

    class Seq2Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
            self.transformer = nn.Transformer(DIM, HEADS, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).double()
            out = self.transformer(
                self.emb(source),
                self.emb(target),
                tgt_mask=mask,
                src_key_padding_mask=torch.where(source < 3, -torch.inf, 0.0).double(),
            )
            return self.head(out)

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(x, y)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), ignore_index=2)

    return of_model(Seq2Seq(), loss, X, Y)


def bahdanau() -> Program:
    """Recurrent encoder and decoder, additive attention, teacher forcing."""

    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.encoder = nn.Embedding(VOCAB, DIM), nn.GRU(DIM, DIM, batch_first=True)
            self.cell, self.head = nn.GRUCell(2 * DIM, DIM), nn.Linear(DIM, VOCAB)
            self.wa, self.ua, self.va = (nn.Linear(DIM, n) for n in (DIM, DIM, 1))

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            keys, last = self.encoder(self.emb(source))
            h, out = last[0], []
            for t in range(target.shape[1]):
                scores = self.va(torch.tanh(self.wa(h)[:, None] + self.ua(keys)))
                context = (scores.softmax(1) * keys).sum(1)
                h = self.cell(torch.cat([self.emb(target[:, t]), context], -1), h)
                out.append(self.head(h))
            return torch.stack(out, 1)

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(call(x, y)[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    return of_model(Attend(), loss, X, Y)


def crf() -> Program:
    """A tagger's negative log-likelihood: the forward algorithm by logsumexp."""

    class Tagger(nn.Module):
        def __init__(self, tags: int = 5):
            super().__init__()
            self.emb, self.tags = nn.Embedding(VOCAB, DIM), nn.Linear(2 * DIM, tags)
            self.lstm = nn.LSTM(DIM, DIM, bidirectional=True, batch_first=True)
            self.moves = nn.Parameter(torch.randn(tags, tags))

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            scores = self.tags(self.lstm(self.emb(ids))[0])
            total = scores[:, 0]
            for t in range(1, ids.shape[1]):
                total = torch.logsumexp(total[:, :, None] + self.moves, 1) + scores[:, t]
            gold = scores.gather(-1, y[..., None]).sum((1, 2)) + self.moves[
                y[:, :-1], y[:, 1:]
            ].sum(1)
            return (total.logsumexp(1) - gold).mean()

    return of_model(Tagger(), lambda call, x, y: call(x, y), X, Y % 5)


def ctc() -> Program:
    """Speech to letters: convolutions, a GRU both ways, CTC."""

    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(5, DIM, 3, padding=1)
            self.gru = nn.GRU(DIM, DIM, bidirectional=True, batch_first=True)
            self.head = nn.Linear(2 * DIM, 7)

        def forward(self, x: Tensor) -> Tensor:
            y = F.hardtanh(self.conv(x), 0, 20).transpose(1, 2)
            return F.log_softmax(self.head(self.gru(y)[0]), -1)

    def loss(call: Any, x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.full((4,), 9), torch.tensor([3, 2, 3, 1])
        return F.ctc_loss(call(x).transpose(0, 1), y, *lengths, zero_infinity=True)

    return of_model(Speech(), loss, randn(4, 5, 9), 1 + tokens(7, 4, 3) % 6, batch_specs=P())


def hyena() -> Program:
    """Long convolutions by FFT, with filters from a network over positions."""

    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.filter = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, DIM))

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            at = torch.linspace(0, 1, n, dtype=x.dtype, device=x.device)
            waves = torch.stack([at, torch.sin(6.28 * at), torch.cos(6.28 * at)], -1)
            h = self.filter(waves) * torch.exp(-3 * at)[:, None]
            q, k, v = self.into(x).chunk(3, -1)
            spectrum = torch.fft.rfft(k * v, 2 * n, dim=1) * torch.fft.rfft(h, 2 * n, dim=0)
            return self.out(q * torch.fft.irfft(spectrum, 2 * n, dim=1)[:, :n])

    return of_model(_Decoder(_Residual(Long(), _mlp(nn.GELU()))), _next, X, Y)


def wavenet() -> Program:
    class Wave(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv1d(1, DIM, 1), nn.Conv1d(DIM, 5, 1)
            self.gates = nn.ModuleList(nn.Conv1d(DIM, 2 * DIM, 2, dilation=2**i) for i in range(3))
            self.mixes = nn.ModuleList(nn.Conv1d(DIM, 2 * DIM, 1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x, skips = self.first(x), 0
            for gate, mix in zip(self.gates, self.mixes, strict=True):
                a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
                out, skip = mix(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
                x, skips = x + out, skips + skip
            return self.last(F.relu(skips))

    return of_model(
        Wave(), lambda call, x, y: F.cross_entropy(call(x), y), randn(4, 1, 9), tokens(5, 4, 9)
    )


def reward_model() -> Program:
    """Preference pairs by DPO, with a frozen reference's log-probabilities given."""

    def loss(call: Any, good: Tensor, bad: Tensor, base: Tensor) -> Tensor:
        def score(ids: Tensor) -> Tensor:
            logp = F.log_softmax(call(ids[:, :-1]), -1)
            return logp.gather(-1, ids[:, 1:, None]).sum((1, 2))

        return -F.logsigmoid(0.1 * (score(good) - score(bad) - base)).mean()

    model = _Decoder(_Residual(_Packed(), _mlp(nn.GELU())))
    return of_model(model, loss, X, Y, randn(4))


LANGUAGE = {
    "nanoGPT": nanogpt,
    "nanochat": nanochat,
    "modded-nanogpt": modded_nanogpt,
    "RWKV-7": rwkv7,
    "mamba": mamba,
    "mamba-2": mamba2,
    "RetNet": retnet,
    "torchtitan's Llama 3": titan_llama3,
    "torchtitan's DeepSeek-V3": titan_deepseek,
    "Switch Transformer": switch,
    "ALiBi": alibi,
    "Transformer-XL": transformer_xl,
    "word language model": word_language_model,
    "translation": translation,
    "additive attention": bahdanau,
    "CRF tagger": crf,
    "speech with CTC": ctc,
    "Hyena": hyena,
    "WaveNet": wavenet,
    "DPO": reward_model,
}
