"""Module names of decoders, by code base."""

from ftp.dataclass import dataclass
from ftp.errors import SpecError


@dataclass(frozen=True)
class Names:
    """The module names of a code base's decoder. One name in ``qkv`` or ``up`` is a fused layer.

    Args:
        attention, mlp: the blocks; ``qkv``, ``out`` and ``up``, ``down`` are layers in them.
        embedding, head: the input embedding and the output layer.
        block: pattern of a decoder layer's path.

    >>> from ftp.plans import llama
    >>> names = Names("attn", ("qkv",), "proj", "mlp", ("fc1",), "fc2", "wte", "head", "h.*")
    >>> list(llama({"head_dim": 64, "n_heads": 4}, names=names))[:2]
    ['**.attn.qkv.*', '**.attn.proj.weight']
    """

    attention: str
    qkv: tuple[str, ...]
    out: str
    mlp: str
    up: tuple[str, ...]
    down: str
    embedding: str
    head: str
    block: str


NAMES = {
    "hf": Names(
        "self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj", "mlp", ("gate_proj", "up_proj"),
        "down_proj", "embed_tokens", "lm_head",
        "layers.*",
    ),
    "torchtitan": Names(
        "attention", ("wq", "wk", "wv"), "wo", "feed_forward", ("w1", "w3"), "w2",
        "tok_embeddings", "output",
        "layers.*",
    ),
    "megatron": Names(
        "self_attention", ("linear_qkv",), "linear_proj", "mlp", ("linear_fc1",), "linear_fc2",
        "embedding.word_embeddings", "output_layer",
        "layers.*",
    ),
}  # fmt: skip


def names_of(names: str | Names) -> Names:
    if isinstance(names, Names):
        return names
    if names not in NAMES:
        raise SpecError(
            f"names={names!r} is none of {', '.join(map(repr, NAMES))}. Give one of them, or"
            " ftp.plans.Names(...) of your own."
        )
    return NAMES[names]
