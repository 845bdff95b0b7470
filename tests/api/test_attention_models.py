"""Models of packed documents along a cut sequence, and decoding from a paged cache, against one
device.
"""

from typing import Any

import pytest
import titan
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import ftp
from ftp import P, zigzag

TP = {
    "tok_embeddings.weight": P("tp"),
    "layers.*.attention.w[qkv].weight": P("tp"),
    "layers.*.attention.wo.weight": P(None, "tp"),
    "layers.*.feed_forward.w[13].weight": P("tp"),
    "layers.*.feed_forward.w2.weight": P(None, "tp"),
    "output.weight": P("tp"),
}


class Attention(titan.Attention):
    """With torchtitan's flex attention, or by a dense mask."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        angles, mask = given
        q, k, v = (
            w(x).unflatten(-1, (self.heads, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        q, k, v = (
            t.transpose(1, 2) for t in (titan.rotated(q, angles), titan.rotated(k, angles), v)
        )
        if isinstance(mask, Tensor):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = flex_attention(q, k, v, block_mask=mask)
        return self.wo(out.transpose(1, 2).flatten(2))


class Packed(titan.Transformer):
    """Token 0 ends a document. The mask is torchtitan's, made of the tokens."""

    def __init__(self, cfg: titan.Config, is_dense: bool):
        super().__init__(cfg)
        self.is_dense = is_dense
        for layer in self.layers.values():
            layer.attention = Attention(cfg)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, size = tokens.shape
        is_end = (tokens == 0).long()
        document = is_end.cumsum(-1) - is_end
        mask: Any
        if self.is_dense:
            same = document[:, None, :, None] == document[:, None, None]
            mask = same & torch.ones(size, size, dtype=torch.bool).tril()
        else:
            mods = and_masks(
                lambda b, h, q, k: q >= k, lambda b, h, q, k: document[b, q] == document[b, k]
            )
            mask = create_block_mask(mods, batch, None, size, size, "cpu", BLOCK_SIZE=4)
        x = self.tok_embeddings(tokens)
        steps = torch.arange(0, self.head_dim, 2, dtype=x.dtype) / self.head_dim
        angles = torch.arange(size, dtype=x.dtype)[:, None] * 10000.0**-steps
        for layer in self.layers.values():
            x = layer(x, (angles, mask))
        return self.output(self.norm(x))


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("names", "specs", "cut"),
    [(("dp", "cp"), {}, P("dp", "cp")), (("cp", "tp"), TP, P(None, zigzag("cp")))],
)
def test_torchtitan_s_llama_with_flex_attention(names: Any, specs: Any, cut: P):
    """Documents of their own in each row; 13 tokens, which no cut divides."""
    torch.manual_seed(0)
    cfg = titan.Config(layers=1)
    model, dense = (Packed(cfg, is_dense).double() for is_dense in (False, True))
    dense.load_state_dict(model.state_dict())
    tokens, targets = titan.batch(cfg, 2, 13)
    tokens[:, 5] = tokens[0, 9] = 0
    expected = F.cross_entropy(dense(tokens).flatten(0, 1), targets.flatten())
    expected.backward()
    fn, params = ftp.functionalize(model)
    mesh = ftp.simulated_mesh((2, 2), names)
    step = ftp.shard(titan.loss(fn), mesh, ftp.plan(params, specs), batch_specs=cut, certify=True)
    loss, grads = step(params, tokens, targets)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for name, p in dense.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=0, atol=1e-10)


def by_cu_seq_lens(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers that calls torch's own, as its flash attention calls
    the package of that name."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    ends = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    return varlen_attn(q, k, v, *ends, window_size=(-1, 0), enable_gqa=True)[None], None


@pytest.mark.cases_by_default(1)
@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")  # of transformers
@pytest.mark.parametrize("kind", ["sdpa", "flex_attention", "by_cu_seq_lens"])
def test_packed_sequences_of_transformers(kind: str):
    """``position_ids`` that start again, or ``cu_seq_lens``, say where documents begin: as each
    document alone."""
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("by_cu_seq_lens", by_cu_seq_lens)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model, alone = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=of).double()
        for of in (kind, "sdpa")
    )
    alone.load_state_dict(model.state_dict())
    ids, lengths = torch.randint(64, (1, 16)), [5, 7, 4]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    logits = [alone(x, use_cache=False).logits for x in ids.split(lengths, 1)]
    expected = F.cross_entropy(torch.cat(logits, 1).flatten(0, 1), ids.flatten())
    expected.backward()
    fn, params = ftp.functionalize(model)

    ends = torch.tensor([0, 5, 12, 16], dtype=torch.int32)
    options: Any = {"position_ids": positions, "use_cache": False}
    if kind == "by_cu_seq_lens":
        names = ("cu_seq_lens_q", "cu_seq_lens_k")
        options |= {**dict.fromkeys(names, ends), "max_length_q": 7, "max_length_k": 7}

    def loss(params: Any, ids: Tensor, positions: Tensor) -> Tensor:
        logits = fn(params, ids, **{**options, "position_ids": positions}).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    mesh, specs = ftp.simulated_mesh((3,), ("cp",)), ftp.plan(params, {})
    step = ftp.shard(loss, mesh, specs, batch_specs=P(None, "cp"))
    found, grads = step(params, ids, positions)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-10)
    for name, p in alone.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("cut", "of_token"),
    [(P(None, None, "tp"), P(None, "tp")), (P("tp"), P()), (P(None, "tp"), P())],
    ids=["heads", "pages", "within a page"],
)
def test_a_paged_cache(cut: P, of_token: P):
    """Keys and values are written to pages and read by a table of pages: under a cut of the heads
    nothing moves; under a cut of the pages or within them they are gathered."""
    torch.manual_seed(0)
    make = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    keys, values, q, k, v = make(6, 4, 4, 8), make(6, 4, 4, 8), *(make(2, 4, 8) for _ in "qkv")
    table, lengths = torch.tensor([[3, 0, 5], [1, 4, 2]]), torch.tensor([6, 9])

    def decode(keys, values, table, lengths, q, k, v):
        page = table.gather(1, (lengths // 4)[:, None])[:, 0]
        near = []
        for pages, x in ((keys, k), (values, v)):
            pages = pages.index_put((page, lengths % 4), x)
            near.append((pages, pages.index_select(0, table.flatten()).reshape(2, 12, 4, 8)))
        sees = torch.arange(12)[None] <= lengths[:, None]
        rows = [x.transpose(1, 2) for _, x in near]
        out = F.scaled_dot_product_attention(q[:, :, None], *rows, attn_mask=sees[:, None, None])
        return out[:, :, 0], *(pages for pages, _ in near)

    args = keys, values, table, lengths, q, k, v
    mesh, given = ftp.simulated_mesh((2,), ("tp",)), (cut, cut, P(), P(), *(of_token,) * 3)
    step = ftp.spmd(decode, mesh, given, (of_token, cut, cut), certify=True)
    for one, other in zip(step(*args), decode(*args), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    moved = [c.op for c in step.lower(*args).collectives]
    assert moved == ([] if cut == P(None, None, "tp") else ["all_gather"] * 2)


@pytest.mark.slow
def test_prefill_in_zigzag_and_decode():
    """A cache of ten slots in zigzag over two ranks, its heads over two: filled by causal attention
    to seven tokens, then read and written by two more."""
    torch.manual_seed(0)
    make = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    mesh, cut = ftp.simulated_mesh((2, 2), ("cp", "tp")), P(None, "tp", zigzag("cp"))

    def prefill(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out, *(F.pad(x, (0, 0, 0, 3)) for x in (k, v))

    def decode(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, at: Tensor):
        keys, values = (x.index_copy(2, at.reshape(1), new) for x, new in ((keys, k), (values, v)))
        sees = (torch.arange(10) <= at)[None, None, None]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=sees, enable_gqa=True)
        return out, keys, values

    args = make(2, 4, 7, 8), make(2, 2, 7, 8), make(2, 2, 7, 8)
    token = P(None, "tp")
    first = ftp.spmd(prefill, mesh, (cut,) * 3, (cut,) * 3, certify=True)
    next_ = ftp.spmd(
        decode, mesh, (cut, cut, token, token, token, P()), (token, cut, cut), certify=True
    )
    found, right = first(*args), prefill(*args)
    for at in (7, 8):
        given = make(2, 4, 1, 8), make(2, 2, 1, 8), make(2, 2, 1, 8), torch.tensor(at)
        found, right = next_(*found[1:], *given), decode(*right[1:], *given)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    moved = next_.lower(*found[1:], *given).collectives
    assert {c.op for c in moved} == {"all_reduce"}
    assert moved.wire_nbytes < found[1].nbytes
