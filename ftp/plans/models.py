"""Tensor-parallel plans of well-known models: patterns over parameter paths -> specs.

Each function returns a dict for ``ftp.plan``; join dicts of parts with ``|``. ``ftp.plan`` raises
for a pattern that matches nothing, so say what a model lacks (``head=False``); absent biases are
skipped.
"""

from collections.abc import Sequence
from typing import Any

from ftp.errors import SpecError
from ftp.functional.module_constraints import Constraint
from ftp.plans.model_config import head_dim_of, value_of
from ftp.plans.names import Names, names_of
from ftp.sharding.patterns import IfPresent
from ftp.sharding.spec import Entry, P, units

Patterns = dict[str, P]


def mlp(
    prefix: str = "**.mlp",
    *,
    axis: str = "tp",
    up: str | Sequence[str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    pack: int = 1,
) -> Patterns:
    """A feed-forward block: ``up`` column-wise with its bias, ``down`` row-wise. One all-reduce in
    the forward pass, one in the backward pass.

    Args:
        prefix: pattern of the block's path.
        axis: the mesh axis to shard over.
        up, down: names of its linear layers.
        pack: number of layers fused in each of ``up``: 2 for gate and up.

    >>> for pattern, spec in mlp("layers.*.ff", up=["w1", "w3"], down="w2").items():
    ...     print(pattern, spec)
    layers.*.ff.w1.* P('tp')
    layers.*.ff.w3.* P('tp')
    layers.*.ff.w2.weight P(None, 'tp')

    Source: Shoeybi et al. (2019), Megatron-LM, section 3.
    """
    cut = axis if pack == 1 else units(axis, pack=pack)
    return {
        **{_join(prefix, name, "*"): P(cut) for name in _each(up)},
        _join(prefix, down, "weight"): P(None, axis),
    }


def attention(
    prefix: str = "**.self_attn",
    *,
    axis: str = "tp",
    head_dim: int | None = None,
    qkv: str | Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    out: str = "o_proj",
    pack: int | Sequence[int] = 1,
) -> Patterns:
    """An attention block: q, k, v column-wise by heads with their biases, the output projection
    row-wise. One all-reduce in the forward pass, one in the backward pass.

    Args:
        prefix: pattern of the block's path.
        axis: the mesh axis to shard over.
        head_dim: elements of a head; shards are whole heads, and 2 key heads on 4 ranks are stored
            on two ranks each. Without it dims are sharded evenly, and heads that this divides are
            gathered by collectives.
        qkv, out: names of its linear layers.
        pack: of one fused q, k, v layer: 3, or the three widths where they differ (see
            ``ftp.units``).

    >>> for pattern, spec in attention("h.*.attn", head_dim=64, qkv="qkv", pack=3).items():
    ...     print(pattern, spec)
    h.*.attn.qkv.* P(units('tp', 64, pack=3))
    h.*.attn.o_proj.weight P(None, units('tp', 64))
    """
    head = _heads(axis, head_dim)
    packed = head if pack == 1 else units(axis, head_dim or 1, pack=pack)
    return {
        **{_join(prefix, name, "*"): P(packed) for name in _each(qkv)},
        _join(prefix, out, "weight"): P(None, head),
    }


def vocabulary(
    prefix: str = "",
    *,
    axis: str = "tp",
    embedding: str | None = "**.embed_tokens",
    head: str | None = "**.lm_head",
) -> Patterns:
    """The embedding and the output head, sharded along the vocabulary: a masked lookup, and a loss
    reduced over ranks; logits are not gathered.

    Args:
        prefix: path of the model in the parameters.
        axis: the mesh axis to shard over.
        embedding, head: their paths below ``prefix``; None if absent, or if the head is tied to the
            embedding.

    >>> vocabulary("model", head=None)
    {'model.**.embed_tokens.weight': P('tp')}
    """
    found = {} if embedding is None else {_join(prefix, embedding, "weight"): P(axis)}
    return found if head is None else {**found, _join(prefix, head, "*"): P(axis)}


def llama(
    config: Any = None,
    *,
    names: str | Names = "hf",
    prefix: str = "",
    axis: str = "tp",
    head: bool | None = None,
) -> Patterns:
    """A decoder of Llama's family (Llama, Mistral, Qwen, Gemma): attention, gated MLP, embedding
    and head.

    Args:
        config: the model's config, or a dict of its sizes: ``head_dim``, or ``hidden_size`` and
            ``num_attention_heads`` (torchtitan: ``dim`` and ``n_heads``; Megatron: ``kv_channels``
            and ``num_query_groups``). None shards dims without regard to heads.
        names: "hf", "torchtitan", "megatron", or your own ``Names``. Megatron's fused q, k, v is
            sharded between groups of heads; its fused gate and up are two packs.
        prefix: path of the model in the parameters.
        axis: the mesh axis to shard over.
        head: whether the head is a weight of its own; default: not ``config.tie_word_embeddings``.

    Raises:
        SpecError: unknown ``names``; a config that does not tell the head size.

    >>> for pattern, spec in llama({"dim": 4096, "n_heads": 32}, names="torchtitan").items():
    ...     print(pattern, spec)
    **.attention.wq.* P(units('tp', 128))
    **.attention.wk.* P(units('tp', 128))
    **.attention.wv.* P(units('tp', 128))
    **.attention.wo.weight P(None, units('tp', 128))
    **.feed_forward.w1.* P('tp')
    **.feed_forward.w3.* P('tp')
    **.feed_forward.w2.weight P(None, 'tp')
    **.tok_embeddings.weight P('tp')
    **.output.* P('tp')
    """
    n = names_of(names)
    pack = 2 if len(n.up) == 1 else 1
    gates = mlp(_join(prefix, "**", n.mlp), axis=axis, up=n.up, down=n.down, pack=pack)
    return _decoder(config, n, prefix, axis, head, gates)


def mixtral(
    config: Any = None,
    *,
    experts: str = "columns",
    names: str | Names = "hf",
    prefix: str = "",
    axis: str = "tp",
    head: bool | None = None,
) -> Patterns:
    """A decoder with experts, stacked in ``experts.gate_up_proj`` (expert, 2 × hidden, dim) and
    ``experts.down_proj`` (expert, dim, hidden).

    Args:
        experts: "columns" shards each expert as an MLP, gate and up as packs; "whole" gives each
            rank some of the experts.
        config, names, prefix, axis, head: as of ``llama``.

    Raises:
        SpecError: as ``llama``; another value of ``experts``.

    >>> list(mixtral(experts="whole").items())[4:6]
    [('**.experts.gate_up_proj', P('tp')), ('**.experts.down_proj', P('tp'))]
    """
    n = names_of(names)
    if experts not in ("columns", "whole"):
        raise SpecError(
            f"mixtral(experts={experts!r}): it is 'columns', each expert cut, or 'whole', each"
            " rank some of them."
        )
    up, down = P(axis), P(axis)
    if experts == "columns":
        up, down = P(None, units(axis, pack=2)), P(None, None, axis)
    of_experts = {
        _join(prefix, "**.experts.gate_up_proj"): up,
        _join(prefix, "**.experts.down_proj"): down,
    }
    return _decoder(config, n, prefix, axis, head, of_experts)


def gpt2(
    config: Any = None,
    *,
    prefix: str = "",
    axis: str = "tp",
    transposed: bool = True,
    head: bool = False,
) -> Patterns:
    """GPT-2, its fused q, k, v as three packs.

    Args:
        config: as of ``llama``, with ``n_embd`` and ``n_head``.
        prefix: path of the model in the parameters.
        axis: the mesh axis to shard over.
        transposed: weights are (in, out), as in transformers; nanoGPT's are (out, in).
        head: whether the head is a weight of its own.

    >>> for pattern, spec in gpt2({"n_embd": 768, "n_head": 12}).items():
    ...     print(pattern, spec)
    **.attn.c_attn.weight P(None, units('tp', 64, pack=3))
    **.attn.c_attn.bias P(units('tp', 64, pack=3))
    **.attn.c_proj.weight P(units('tp', 64))
    **.mlp.c_fc.weight P(None, 'tp')
    **.mlp.c_fc.bias P('tp')
    **.mlp.c_proj.weight P('tp')
    **.wte.weight P('tp')
    """
    head_dim = head_dim_of(config)
    qkv, one = units(axis, head_dim or 1, pack=3), _heads(axis, head_dim)

    def column(cut: Entry) -> P:
        return P(None, cut) if transposed else P(cut)

    def row(cut: Entry) -> P:
        return P(cut) if transposed else P(None, cut)

    found = {
        "**.attn.c_attn.weight": column(qkv),
        IfPresent("**.attn.c_attn.bias"): P(qkv),
        "**.attn.c_proj.weight": row(one),
        "**.mlp.c_fc.weight": column(axis),
        IfPresent("**.mlp.c_fc.bias"): P(axis),
        "**.mlp.c_proj.weight": row(axis),
        **vocabulary(axis=axis, embedding="**.wte", head="**.lm_head" if head else None),
    }
    return {_join(prefix, pattern): spec for pattern, spec in found.items()}


def bert(config: Any = None, *, prefix: str = "", axis: str = "tp", head: bool = True) -> Patterns:
    """BERT with transformers' names.

    Args:
        config, prefix, axis: as of ``llama``.
        head: whether it predicts masked words, with a head tied to the embedding.

    >>> bert()["**.attention.self.*.*"], bert()["**.intermediate.dense.*"]
    (P('tp'), P('tp'))
    """
    one = _heads(axis, head_dim_of(config))
    found = {
        "**.attention.self.*.*": P(one),
        "**.attention.output.dense.weight": P(None, one),
        "**.intermediate.dense.*": P(axis),
        "**.layer.*.output.dense.weight": P(None, axis),
        "**.word_embeddings.weight": P(axis),
        **({IfPresent("**.predictions.bias"): P(axis)} if head else {}),
    }
    return {_join(prefix, pattern): spec for pattern, spec in found.items()}


def vit(config: Any = None, *, prefix: str = "", axis: str = "tp", head: bool = True) -> Patterns:
    """Vision transformer with transformers' names.

    Args:
        config, prefix, axis: as of ``llama``.
        head: whether it has a classifier.

    >>> vit()["**.mlp.fc2.weight"]
    P(None, 'tp')
    """
    block = attention(_join(prefix, "**.attention"), axis=axis, head_dim=head_dim_of(config))
    found = block | mlp(_join(prefix, "**.mlp"), axis=axis, up=["fc1"], down="fc2")
    return found | vocabulary(
        prefix, axis=axis, embedding=None, head="classifier" if head else None
    )


def t5(
    config: Any = None, *, prefix: str = "", axis: str = "tp", head: bool | None = None
) -> Patterns:
    """T5 with transformers' names, with or without gated MLPs; relative positions are replicated.

    Args:
        config: the model's config, or a dict with ``d_kv``.
        prefix, axis, head: as of ``llama``.

    >>> t5({"d_kv": 64})["**.*Attention.q.weight"]
    P(units('tp', 64))
    """
    head = not value_of(config, "tie_word_embeddings") if head is None else head
    one = _heads(axis, value_of(config, "d_kv"))
    found = {f"**.*Attention.{name}.weight": P(one) for name in "qkv"}
    found |= {
        "**.*Attention.o.weight": P(None, one),
        "**.wi*.weight": P(axis),
        "**.wo.weight": P(None, axis),
    }
    found |= vocabulary(axis=axis, embedding="shared", head="lm_head" if head else None)
    return {_join(prefix, pattern): spec for pattern, spec in found.items()}


def sequence_parallel(blocks: str = "**.layers.*", *, axis: str = "tp") -> dict[str, Constraint]:
    """Constraints for ``ftp.functionalize`` that shard the tokens of (batch, tokens, dim) between
    blocks, and so norms and residuals.

    Args:
        blocks: pattern of the blocks' paths; each returns its activation.
        axis: the mesh axis to shard over.

    >>> sequence_parallel("layers.*")["layers.*"].outputs
    P(None, 'tp')

    Source: Korthikanti et al. (2022), Reducing Activation Recomputation in Large Transformer
    Models.
    """
    return {blocks: Constraint(outputs=P(None, axis), axes=axis)}


def _decoder(
    config: Any, n: Names, prefix: str, axis: str, head: bool | None, mlps: Patterns
) -> Patterns:
    head_dim = head_dim_of(config)
    found = attention(
        _join(prefix, "**", n.attention), axis=axis, head_dim=head_dim, qkv=n.qkv, out=n.out
    )
    if len(n.qkv) == 1 and head_dim:
        # Megatron's fused layer, group by group: queries, key, value.
        heads = value_of(config, "num_attention_heads", "n_head", "n_heads")
        groups = value_of(config, "num_query_groups", "num_key_value_heads", "n_kv_heads") or heads
        if heads is None or heads % groups:
            raise SpecError(
                f"{heads} attention heads in {groups} groups. Give num_attention_heads, a multiple"
                " of num_query_groups."
            )
        found[_join(prefix, "**", n.attention, n.qkv[0], "*")] = P(
            units(axis, (heads // groups + 2) * head_dim)
        )
    own = not value_of(config, "tie_word_embeddings") if head is None else head
    return {
        **found,
        **mlps,
        **vocabulary(
            prefix, axis=axis, embedding=f"**.{n.embedding}", head=f"**.{n.head}" if own else None
        ),
    }


def _heads(axis: str, head_dim: int | None) -> Entry:
    return axis if head_dim is None else units(axis, head_dim)


def _each(given: str | Sequence[str]) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given


def _join(*parts: str) -> str:
    joined = ".".join(part for part in parts if part)
    while "**.**." in joined:
        joined = joined.replace("**.**.", "**.")
    return IfPresent(joined) if isinstance(parts[-1], IfPresent) else joined
