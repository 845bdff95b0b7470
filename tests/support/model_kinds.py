"""Small models of many kinds of transformers', for ``ftp.from_hf``: configs with two layers, and
heads that 3 does not divide.
"""

from typing import Any

import torch
from real_models import BATCH, SEQ, VOCAB, Case, InFloat64, float64, randn, tokens

from ftp import P

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
_GROUPS = {"num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_BOTH: dict[str, Any] = {
    f"{part}_{what}": n
    for part in ("encoder", "decoder")
    for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 24))
}

# Class prefix of config and model, class suffix of the model, the config's arguments.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": (
        "Albert",
        "ForMaskedLM",
        _SIZES | _NO_DROPOUT | {"embedding_size": 8, "num_hidden_groups": 1},
    ),
    "bart": (
        "Bart",
        "ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 16, "max_position_embeddings": 32} | _BOTH | _IDS,
    ),
    "bert": ("Bert", "ForMaskedLM", _SIZES | _NO_DROPOUT),
    "bloom": (
        "Bloom",
        "ForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    ),
    "codegen": (
        "CodeGen",
        "ForCausalLM",
        {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 2}
        | {"n_positions": 32},
    ),
    "cohere": ("Cohere", "ForCausalLM", _SIZES | _GROUPS | {"pad_token_id": 0}),
    "deberta": ("DebertaV2", "ForMaskedLM", _SIZES | _NO_DROPOUT | {"type_vocab_size": 0}),
    "deepseek_v2": (
        "DeepseekV2",
        "ForCausalLM",
        _SIZES | _MLA | {"v_head_dim": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 12}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
        | {"num_key_value_heads": 4, "head_dim": 4, "topk_method": "greedy", "n_group": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        "ForCausalLM",
        _SIZES | _MLA | {"v_head_dim": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 12}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"num_key_value_heads": 4},
    ),
    "distilbert": (
        "DistilBert",
        "ForMaskedLM",
        {"vocab_size": VOCAB, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24}
        | {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 32},
    ),
    "electra": ("Electra", "ForMaskedLM", _SIZES | _NO_DROPOUT | {"embedding_size": 16}),
    "falcon": (
        "Falcon",
        "ForCausalLM",
        {k: v for k, v in _SIZES.items() if k != "intermediate_size"}
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False},
    ),
    "falcon, one key head": (
        "Falcon",
        "ForCausalLM",
        {k: v for k, v in _SIZES.items() if k != "intermediate_size"} | {"multi_query": True},
    ),
    "falcon_h1": (
        "FalconH1",
        "ForCausalLM",
        _SIZES | _GROUPS
        | {"mamba_d_ssm": 16, "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_n_groups": 1}
        | {"mamba_d_state": 4, "mamba_chunk_size": 4, "head_dim": 4},
    ),
    "gemma": ("Gemma", "ForCausalLM", _SIZES | _GROUPS | {"head_dim": 4}),
    "gemma2": ("Gemma2", "ForCausalLM", _SIZES | _GROUPS | {"head_dim": 4}),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", _SIZES),
    "gpt_oss": (
        "GptOss",
        "ForCausalLM",
        _SIZES | _GROUPS | {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 4},
    ),
    "gptj": (
        "GPTJ",
        "ForCausalLM",
        {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 2}
        | {"n_positions": 32},
    ),
    "granite": ("Granite", "ForCausalLM", _SIZES | _GROUPS),
    "granitemoe": (
        "GraniteMoe",
        "ForCausalLM",
        _SIZES | _GROUPS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama": ("Llama", "ForCausalLM", _SIZES | _GROUPS),
    "mamba": (
        "Mamba",
        "ForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
        | {"use_mambapy": False},
    ),
    "mamba2": (
        "Mamba2",
        "ForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
        | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    "minicpm3": (
        "MiniCPM3",
        "ForCausalLM",
        _SIZES | _MLA | {"v_head_dim": 4, "num_key_value_heads": 4},
    ),
    "mistral": ("Mistral", "ForCausalLM", _SIZES | _GROUPS),
    "mixtral": ("Mixtral", "ForCausalLM", _SIZES | _GROUPS | {"num_local_experts": 4}),
    "mpt": (
        "Mpt",
        "ForCausalLM",
        {"vocab_size": VOCAB, "d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
    ),
    "olmo2": ("Olmo2", "ForCausalLM", _SIZES | _GROUPS | {"pad_token_id": 0}),
    "opt": (
        "OPT",
        "ForCausalLM",
        _SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "persimmon": ("Persimmon", "ForCausalLM", _SIZES),
    "phi3": ("Phi3", "ForCausalLM", _SIZES | _GROUPS | {"pad_token_id": 0}),
    "qwen2": ("Qwen2", "ForCausalLM", _SIZES | _GROUPS),
    "qwen3": ("Qwen3", "ForCausalLM", _SIZES | _GROUPS | {"head_dim": 4}),
    "recurrent_gemma": (
        "RecurrentGemma",
        "ForCausalLM",
        _SIZES | {"num_hidden_layers": 3, "lru_width": 16, "head_dim": 4, "num_key_value_heads": 2}
        | {"attention_window_size": 8},
    ),
    "roberta": ("Roberta", "ForMaskedLM", _SIZES | _NO_DROPOUT | {"pad_token_id": 1}),
    "rwkv": (
        "Rwkv",
        "ForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 32},
    ),
    "stablelm": ("StableLm", "ForCausalLM", _SIZES | _GROUPS),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2}
        | {"num_heads": 4, "decoder_start_token_id": 0},
    ),
    "dinov2": (
        "Dinov2",
        "ForImageClassification",
        {k: v for k, v in _SIZES.items() if "vocab" not in k and "position" not in k}
        | _NO_DROPOUT | {"image_size": 8, "patch_size": 4, "num_labels": 7},
    ),
    "swin": (
        "Swin",
        "ForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4]}
        | {"window_size": 4, "num_labels": 7, "drop_path_rate": 0.0} | _NO_DROPOUT,
    ),
    "vit": (
        "ViT",
        "ForImageClassification",
        {k: v for k, v in _SIZES.items() if "vocab" not in k and "position" not in k}
        | _NO_DROPOUT | {"image_size": 8, "patch_size": 4, "num_labels": 7},
    ),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 16, "num_mel_bins": 4, "max_source_positions": SEQ}
        | {"max_target_positions": 16} | _BOTH | _IDS,
    ),
}  # fmt: skip


def model_of(kind: str) -> torch.nn.Module:
    """The model, built in float32, with random weights, in eval mode; RWKV in train mode, as it
    rescales its weights in the other.
    """
    import transformers  # pyright: ignore[reportMissingImports]

    prefix, suffix, arguments = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(
        **arguments, attn_implementation="eager", experts_implementation="batched_mm"
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}{suffix}")(config).train(kind == "rwkv")


def case_of(kind: str) -> Case:
    """The model in float64 with a batch; its plan is that of ``ftp.from_hf``."""
    model = float64(model_of(kind))
    labels = tokens(VOCAB, BATCH, SEQ, seed=2)
    if KINDS[kind][1] == "ForImageClassification":
        size = KINDS[kind][2]["image_size"]
        batch: dict[str, Any] = {
            "pixel_values": randn(BATCH, 3, size, size),
            "labels": tokens(7, BATCH, seed=2),
        }
    elif kind == "whisper":
        batch = {"input_features": randn(BATCH, 4, 2 * SEQ), "labels": labels}
    else:
        batch = {"input_ids": tokens(VOCAB, BATCH, SEQ), "labels": labels}
    options = {"use_cache": False} if KINDS[kind][1] in ("ForCausalLM", "LMHeadModel") else {}

    def loss(fn: Any) -> Any:
        def of_batch(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            with InFloat64():
                return fn(params, **batch, **options).loss

        return of_batch

    return Case(model, {}, (batch,), loss, (P("dp"),))
