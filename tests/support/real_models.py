"""Models that others wrote: transformers' with random weights and torch.nn's, each with a plan and
a loss.

A ``Case`` is built in float64. ``cuts`` is the Megatron plan: ``{path pattern: spec}`` over the
mesh axis "tp", the embedding and the head cut along the vocabulary; what it does not name is whole
on every rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import ftp
from ftp.sharding.spec import P, units

Specs = Mapping[str, P]
COLUMN, ROW, BIAS = P("tp", None), P(None, "tp"), P("tp")


@dataclass(frozen=True)
class Case:
    """``loss(fn)`` is ``(params, *batch) -> scalar``; ``batch_specs`` cut the batch on a mesh
    that has "dp".
    """

    model: nn.Module
    cuts: Specs
    batch: tuple[Any, ...]
    loss: Callable[[Callable[..., Any]], Callable[..., Tensor]]
    batch_specs: tuple[P, ...]
    tolerance: float = 1e-10


def float64(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 with weights far from zeros and ones, biases and norms included."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + 0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(vocab: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(2, vocab, shape, generator=torch.Generator().manual_seed(seed))


# transformers.

VOCAB, BATCH, SEQ = 37, 4, 6

_LLAMA: Specs = {
    "**.embed_tokens.weight": COLUMN,
    "**.self_attn.[qkv]_proj.weight": COLUMN,
    "**.self_attn.o_proj.weight": ROW,
    "**.mlp.gate_proj.weight": COLUMN,
    "**.mlp.up_proj.weight": COLUMN,
    "**.mlp.down_proj.weight": ROW,
    "lm_head.weight": COLUMN,
}
_QWEN2: Specs = _LLAMA | {"**.self_attn.[qkv]_proj.bias": BIAS}
# Its q, k and v are one layer of three widths, its gate and up another of two equal ones.
_PHI3: Specs = {
    k: v for k, v in _LLAMA.items() if "[qkv]" not in k and "gate" not in k and "up_proj" not in k
} | {
    "**.self_attn.qkv_proj.weight": P(units("tp", 4, pack=(16, 8, 8)), None),
    "**.mlp.gate_up_proj.weight": P(units("tp", pack=2), None),
}
_GEMMA: Specs = {
    k: v for k, v in _LLAMA.items() if k != "lm_head.weight"
}  # its head is the embedding
_MIXTRAL: Specs = {k: v for k, v in _LLAMA.items() if ".mlp." not in k} | {
    "**.experts.gate_up_proj": P(None, "tp", None),
    "**.experts.down_proj": P(None, None, "tp"),
}
_MIXTRAL_EP: Specs = _MIXTRAL | {
    "**.experts.gate_up_proj": P("tp", None, None),
    "**.experts.down_proj": P("tp", None, None),
}
# GPT-2's layers are input by output.
_GPT2: Specs = {
    "**.wte.weight": COLUMN,
    "**.attn.c_attn.weight": ROW,
    "**.attn.c_attn.bias": BIAS,
    "**.attn.c_proj.weight": COLUMN,
    "**.mlp.c_fc.weight": ROW,
    "**.mlp.c_fc.bias": BIAS,
    "**.mlp.c_proj.weight": COLUMN,
}
_ENCODER: Specs = {
    "**.attention.self.*.weight": COLUMN,
    "**.attention.self.*.bias": BIAS,
    "**.attention.output.dense.weight": ROW,
    "**.intermediate.dense.weight": COLUMN,
    "**.intermediate.dense.bias": BIAS,
    "bert.encoder.layer.*.output.dense.weight": ROW,
}
_BERT: Specs = _ENCODER | {"**.word_embeddings.weight": COLUMN, "cls.predictions.bias": BIAS}
_VIT: Specs = {
    "**.attention.[qkv]_proj.weight": COLUMN,
    "**.attention.[qkv]_proj.bias": BIAS,
    "**.attention.o_proj.weight": ROW,
    "**.mlp.fc1.weight": COLUMN,
    "**.mlp.fc1.bias": BIAS,
    "**.mlp.fc2.weight": ROW,
    "classifier.weight": COLUMN,
    "classifier.bias": BIAS,
}
_T5: Specs = {
    "shared.weight": COLUMN,
    "**.*Attention.[qkv].weight": COLUMN,
    "**.*Attention.o.weight": ROW,
    "**.wi.weight": COLUMN,
    "**.wo.weight": ROW,
    "lm_head.weight": COLUMN,
}

_QWEN_MOE: Specs = _MIXTRAL
_PHI: Specs = {
    "**.embed_tokens.weight": COLUMN,
    "**.self_attn.[qkv]_proj.*": P("tp"),
    "**.self_attn.dense.weight": ROW,
    "**.mlp.fc1.*": P("tp"),
    "**.mlp.fc2.weight": ROW,
    "lm_head.*": P("tp"),
}
_OPT: Specs = {
    "**.embed_tokens.weight": COLUMN,
    "**.self_attn.[qkv]_proj.*": P("tp"),
    "**.self_attn.out_proj.weight": ROW,
    "**.fc1.*": P("tp"),
    "**.fc2.weight": ROW,
}
_BART: Specs = {k: v for k, v in _OPT.items() if "embed" not in k and "self_attn" not in k} | {
    "model.shared.weight": COLUMN,
    "**.*_attn.[qkv]_proj.*": P("tp"),
    "**.*_attn.out_proj.weight": ROW,
}
_DISTILBERT: Specs = {
    "**.word_embeddings.weight": COLUMN,
    "**.attention.[qkv]_lin.*": P("tp"),
    "**.attention.out_lin.weight": ROW,
    "**.ffn.lin1.*": P("tp"),
    "**.ffn.lin2.weight": ROW,
    "vocab_projector.bias": BIAS,
}
_ROBERTA: Specs = {k: v for k, v in _ENCODER.items() if not k.startswith("bert")} | {
    "**.word_embeddings.weight": COLUMN,
    "roberta.encoder.layer.*.output.dense.weight": ROW,
    "lm_head.bias": BIAS,
}
_FUSED: Specs = {
    "**.query_key_value.*": P("tp"),
    "**.dense.weight": ROW,
    "**.dense_h_to_4h.*": P("tp"),
    "**.dense_4h_to_h.weight": ROW,
}

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER = _SMALL | {
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# Class of the config, class of the model, the config's arguments, the plan.
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], Specs]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER, _LLAMA),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER, _QWEN2),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _DECODER | {"head_dim": 4}, _LLAMA),
    "Phi3": ("Phi3Config", "Phi3ForCausalLM", _DECODER | {"pad_token_id": 0}, _PHI3),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", _DECODER | {"head_dim": 4}, _GEMMA),
    "Mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        _DECODER | {"num_local_experts": 4},
        _MIXTRAL,
    ),
    "Mixtral, experts": (
        "MixtralConfig",
        "MixtralForCausalLM",
        _DECODER | {"num_local_experts": 4},
        _MIXTRAL_EP,
    ),
    "GPT-2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
        _GPT2,
    ),
    "BERT": (
        "BertConfig",
        "BertForMaskedLM",
        _SMALL | _NO_DROPOUT | {"intermediate_size": 24, "max_position_embeddings": 32},
        _BERT,
    ),
    "T5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        _T5,
    ),
    "ViT": (
        "ViTConfig",
        "ViTForImageClassification",
        {k: v for k, v in _SMALL.items() if k != "vocab_size"}
        | _NO_DROPOUT
        | {"intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 7},
        _VIT,
    ),
}
# Others of these families.
MORE: dict[str, tuple[str, str, dict[str, Any], Specs]] = {
    "Mistral": ("MistralConfig", "MistralForCausalLM", _DECODER, _LLAMA),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _DECODER | {"head_dim": 4}, _LLAMA),
    "Qwen3 MoE": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _DECODER
        | {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        _QWEN_MOE,
    ),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", _DECODER | {"head_dim": 4}, _GEMMA),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _DECODER | {"head_dim": 4}, _GEMMA),
    "Phi": (
        "PhiConfig",
        "PhiForCausalLM",
        _DECODER | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        _PHI,
    ),
    "GPT-NeoX": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        _SMALL | {"intermediate_size": 24, "max_position_embeddings": 32},
        _FUSED | {"gpt_neox.embed_in.weight": COLUMN, "lm_head.weight": COLUMN},
    ),
    "Bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 4},
        _FUSED | {"transformer.word_embeddings.weight": COLUMN},
    ),
    "OPT": (
        "OPTConfig",
        "OPTForCausalLM",
        _SMALL | {"ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16},
        _OPT,
    ),
    "BART": (
        "BartConfig",
        "BartForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 16, "max_position_embeddings": 32}
        | {
            f"{part}_{what}": n
            for part in ("encoder", "decoder")
            for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))
        }
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
        _BART,
    ),
    "DistilBERT": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCAB,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 24,
            "max_position_embeddings": 32,
        },
        _DISTILBERT,
    ),
    "RoBERTa": (
        "RobertaConfig",
        "RobertaForMaskedLM",
        _SMALL | _NO_DROPOUT | {"intermediate_size": 24},
        _ROBERTA,
    ),
}
_MASKED = ("BERT", "DistilBERT", "RoBERTa")
_ENCODERS = (*_MASKED, "ViT")


class InFloat64(TorchFunctionMode):
    """Models go to float32 for norms, softmaxes and losses; with these left in float64 a
    comparison can be exact to 1e-10.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **kwargs)


def transformer(name: str, attention: str) -> Case:
    """A model of transformers in eval mode with its own loss; ``attention`` is "eager" or
    "sdpa".
    """
    import transformers  # pyright: ignore[reportMissingImports]

    config_class, model_class, arguments, cuts = (TRANSFORMERS | MORE)[name]
    if name.startswith("Mixtral") or "MoE" in name:
        arguments = arguments | {"experts_implementation": "batched_mm"}
    config = getattr(transformers, config_class)(**arguments, attn_implementation=attention)
    model = float64(getattr(transformers, model_class)(config).eval())
    if name == "ViT":
        batch: tuple[Tensor, ...] = (randn(BATCH, 3, 8, 8), tokens(7, BATCH))
        call: tuple[str, ...] = ("pixel_values", "labels")
    elif name in _MASKED:
        mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
        mask[1, 4:] = 0
        batch, call = (
            (tokens(VOCAB, BATCH, SEQ), tokens(VOCAB, BATCH, SEQ, seed=2), mask),
            ("input_ids", "labels", "attention_mask"),
        )
    else:
        batch, call = (
            (tokens(VOCAB, BATCH, SEQ), tokens(VOCAB, BATCH, SEQ, seed=2)),
            ("input_ids", "labels"),
        )
    options = {} if name in _ENCODERS else {"use_cache": False}

    def loss(fn: Callable[..., Any]) -> Callable[..., Tensor]:
        def of(params: Any, *batch: Tensor) -> Tensor:
            with InFloat64():
                return fn(params, **dict(zip(call, batch, strict=True)), **options).loss

        return of

    return Case(model, cuts, batch, loss, (P("dp"),) * len(batch))


# torch.nn.


def _squared(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """Mean of squares of all tensors that the module returns."""

    def loss(params: Any, *batch: Any) -> Tensor:
        out = fn(params, *batch)
        return sum(t.square().mean() for t in _tensors(out))  # type: ignore[return-value]

    return loss


def _tensors(out: Any) -> list[Tensor]:
    return (
        [out]
        if isinstance(out, Tensor)
        else [t for item in out if item is not None for t in _tensors(item)]
    )


class _SelfAttention(nn.Module):
    def __init__(self, causal: bool = False, **options: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.causal, self.options = causal, options

    def forward(self, x: Tensor) -> Any:
        mask = (
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            if self.causal
            else None
        )
        return self.attention(x, x, x, attn_mask=mask, **self.options)


def _attention(**options: Any) -> Case:
    cuts = {
        "attention.in_proj_weight": COLUMN,
        "attention.in_proj_bias": BIAS,
        "attention.out_proj.weight": ROW,
    }
    return Case(float64(_SelfAttention(**options)), cuts, (randn(4, 5, 16),), _squared, (P("dp"),))


def _encoder_layer(train: bool, **options: Any) -> Case:
    cuts = {
        "self_attn.in_proj_weight": COLUMN,
        "self_attn.in_proj_bias": BIAS,
        "self_attn.out_proj.weight": ROW,
        "linear1.weight": COLUMN,
        "linear1.bias": BIAS,
        "linear2.weight": ROW,
    }
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, **options)
    return Case(float64(layer).train(train), cuts, (randn(4, 5, 16),), _squared, (P("dp"),))


def _recurrent(cls: type[nn.Module], **options: Any) -> Case:
    model = cls(6, 8, batch_first=True, **options)
    cuts = {"weight_ih_l*": COLUMN, "weight_hh_l*": COLUMN, "bias_ih_l*": BIAS, "bias_hh_l*": BIAS}
    return Case(float64(model), cuts, (randn(4, 3, 6),), _squared, (P("dp"),))


class _Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + x)


class ResNet(nn.Module):
    """Images (batch, 3, 8, 8) -> 7 classes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.block = _Block(8)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.block(self.stem(x))).flatten(1))


RESNET_CUTS: Specs = {
    "block.conv1.weight": P("tp"),
    "block.norm1.*": BIAS,
    "block.conv2.weight": P(None, "tp"),
    "head.weight": COLUMN,
}


class _Pools(nn.Module):
    """Every pooling layer, on the output of a convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.pools = nn.ModuleList(
            [
                nn.AvgPool2d(3, 2, padding=1),
                nn.MaxPool2d(3, 2),
                nn.AdaptiveAvgPool2d(3),
                nn.AdaptiveMaxPool2d(3),
                nn.LPPool2d(2, 2),
            ]
        )
        self.line = nn.ModuleList([nn.AvgPool1d(2), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(4)])

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.conv(x).square()
        return [pool(y) for pool in self.pools] + [pool(y.flatten(2)) for pool in self.line]


class _Double(torch.autograd.Function):
    """A function whose gradient is its own: three times what it ought to be, so that a trace
    through the forward pass is seen.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 6 * grad * x.cos()


class OldDouble(torch.autograd.Function):
    """The same with ``ctx`` in forward, the form of most code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return 2 * x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 6 * grad * x.cos()


class WithFunction(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]):
        super().__init__()
        self.up, self.down, self.function = nn.Linear(6, 8), nn.Linear(8, 5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function.apply(self.up(x)))


def with_function(function: type[torch.autograd.Function]) -> Case:
    cuts = {"up.weight": COLUMN, "up.bias": BIAS, "down.weight": ROW}
    return Case(float64(WithFunction(function)), cuts, (randn(4, 6),), _squared, (P("dp"),))


@torch.library.custom_op("ftp_models::bend", mutates_args=())
def bend(x: Tensor) -> Tensor:
    """A kernel that no trace sees into."""
    return torch.from_numpy(np.tanh(x.detach().numpy()) + 0.1 * x.detach().numpy())


@bend.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


ftp.pointwise(torch.ops.ftp_models.bend.default)


class _Bend(torch.autograd.Function):
    """The kernel with its gradient, in the form that torch.func knows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.ftp_models.bend(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * (1.1 - (y - 0.1 * x).square())


def _bag(mode: str, **options: Any) -> Case:
    batch = (tokens(VOCAB, 4, 5),)
    return Case(
        float64(nn.EmbeddingBag(VOCAB, 6, mode=mode, **options)),
        {"weight": COLUMN},
        batch,
        _squared,
        (P("dp"),),
    )


def _bag_of_offsets() -> Case:
    batch = (tokens(VOCAB, 12), torch.tensor([0, 2, 2, 7]))
    return Case(
        float64(nn.EmbeddingBag(VOCAB, 6, mode="sum")),
        {"weight": COLUMN},
        batch,
        _squared,
        (P(), P()),
    )


def _with_loss(make: Callable[[Tensor, Tensor], Tensor], target: Tensor) -> Case:
    """A classifier whose head is cut along the classes, with one of torch's losses."""
    model = float64(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7)))
    cuts = {"0.weight": COLUMN, "0.bias": BIAS, "2.weight": COLUMN, "2.bias": BIAS}

    def loss(fn: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda params, x, y: make(fn(params, x), y)

    return Case(model, cuts, (randn(5, 6), target), loss, (P("dp"), P("dp")))


_CLASSES = torch.tensor([3, 0, 6, -100, 2])
_POSITIVE = torch.linspace(0.5, 2, 7, dtype=torch.float64)

MODULES: dict[str, Callable[[], Case]] = {
    "MultiheadAttention": _attention,
    "MultiheadAttention, no weights": lambda: _attention(need_weights=False),
    "MultiheadAttention, causal": lambda: _attention(
        need_weights=False, is_causal=True, causal=True
    ),
    "TransformerEncoderLayer, train": lambda: _encoder_layer(True),
    "TransformerEncoderLayer, eval": lambda: _encoder_layer(False),
    "TransformerEncoderLayer, eval, norm first, gelu": lambda: _encoder_layer(
        False, norm_first=True, activation="gelu"
    ),
    "LSTM": lambda: _recurrent(nn.LSTM),
    "LSTM, both ways": lambda: _recurrent(nn.LSTM, bidirectional=True),
    "GRU": lambda: _recurrent(nn.GRU),
    "RNN": lambda: _recurrent(nn.RNN),
    "pools": lambda: Case(
        float64(_Pools()),
        {"conv.weight": P("tp"), "conv.bias": BIAS},
        (randn(4, 3, 9, 9),),
        _squared,
        (P("dp"),),
    ),
    "autograd.Function": lambda: with_function(_Double),
    "custom op": lambda: with_function(_Bend),
    "EmbeddingBag, sum": lambda: _bag("sum"),
    "EmbeddingBag, mean": lambda: _bag("mean", padding_idx=3),
    "EmbeddingBag, max": lambda: _bag("max"),
    "EmbeddingBag, offsets": _bag_of_offsets,
    "mse_loss": lambda: _with_loss(F.mse_loss, randn(5, 7)),
    "l1_loss": lambda: _with_loss(F.l1_loss, randn(5, 7)),
    "huber_loss": lambda: _with_loss(F.huber_loss, randn(5, 7)),
    "smooth_l1_loss": lambda: _with_loss(F.smooth_l1_loss, randn(5, 7)),
    "binary_cross_entropy_with_logits": lambda: _with_loss(
        F.binary_cross_entropy_with_logits, randn(5, 7).sigmoid()
    ),
    "binary_cross_entropy_with_logits, weights": lambda: _with_loss(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=_POSITIVE),
        randn(5, 7).sigmoid(),
    ),
    "kl_div": lambda: _with_loss(
        lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"), randn(5, 7).softmax(-1)
    ),
    "kl_div, sum": lambda: _with_loss(
        lambda x, y: F.kl_div(x.log_softmax(-1), y.log(), reduction="sum", log_target=True),
        randn(5, 7).softmax(-1),
    ),
    "nll_loss": lambda: _with_loss(lambda x, y: F.nll_loss(x.log_softmax(-1), y), _CLASSES),
    "nll_loss, weights": lambda: _with_loss(
        lambda x, y: F.nll_loss(x.log_softmax(-1), y, weight=_POSITIVE), _CLASSES
    ),
    "soft cross_entropy": lambda: _with_loss(F.cross_entropy, randn(5, 7).softmax(-1)),
}
