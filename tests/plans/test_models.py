"""Our plans of well-known models: on code as people write it equal to one device, with
Megatron's collectives; adapters too.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from few_or_many import slow_after
from plan_reshards import unbucketed
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P, units
from ftp.plans import (
    Names,
    attention,
    gpt2,
    llama,
    lora,
    mixtral,
    mlp,
    sequence_parallel,
    vocabulary,
)

OUR_NAMES = Names(
    "attn", ("wq", "wk", "wv"), "wo", "mlp", ("w1", "w3"), "w2", "emb", "head", "layers.*"
)


def check(loss, mesh, specs, params, *batch, batch_specs: Any = P(), **options):
    expected, found = models.reference(loss, params, *batch)
    step = ftp.shard(loss, mesh, specs, batch_specs=batch_specs, **options)
    value, grads = step(params, *batch)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert grads.keys() == params.keys()
    for name, grad in found.items():
        assert float((grads[name] - grad).abs().max()) <= 1e-10 * max(
            float(grad.abs().max()), 1e-3
        ), name
    return [c.op for c in unbucketed(step.lower(params, *batch)).collectives]


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("shape", "axes"), [((2,), ("tp",)), ((3,), ("tp",)), ((4,), ("tp",)), ((2, 2), ("dp", "tp"))]
)
def test_llama(shape, axes):
    cfg = models.LlamaConfig(layers=1, kv_heads=2)
    fn, params = ftp.functionalize(models.build(cfg, dtype=torch.float64))
    specs = ftp.plan(params, llama({"head_dim": cfg.head_dim}, names=OUR_NAMES))
    assert specs["layers.0.attn.wk.weight"] == P(units("tp", 4)) and specs["emb.weight"] == specs[
        "head.weight"
    ] == P("tp")
    mesh = ftp.simulated_mesh(shape, axes)
    found = check(
        models.lm_loss(fn),
        mesh,
        specs,
        params,
        models.lm_batch(cfg),
        batch_specs=P("dp") if "dp" in axes else P(),
    )
    if shape == (2,):
        assert found == ["all_reduce"] * (2 + 4 + 3)


def test_llama_with_sequence_parallelism():
    cfg = models.LlamaConfig(layers=2)
    constraints = sequence_parallel("layers.*")
    fn, params = ftp.functionalize(models.build(cfg, dtype=torch.float64), constraints=constraints)
    specs = ftp.plan(params, llama({"head_dim": cfg.head_dim}, names=OUR_NAMES))
    found = check(
        models.lm_loss(fn), ftp.simulated_mesh((2,), ("tp",)), specs, params, models.lm_batch(cfg)
    )
    assert found.count("reduce_scatter") == found.count("all_gather") == 2 + 4 * 2


def test_gpt2_skips_absent_biases():
    """nanoGPT's default has no biases."""
    shapes = {"h.0.attn.c_attn.weight": (24, 8), "h.0.attn.c_proj.weight": (8, 8)}
    shapes |= {
        "h.0.mlp.c_fc.weight": (32, 8),
        "h.0.mlp.c_proj.weight": (8, 32),
        "wte.weight": (9, 8),
    }
    params = {f"m.{path}": torch.ones(shape) for path, shape in shapes.items()}
    patterns = gpt2({"n_embd": 8, "n_head": 2}, transposed=False, prefix="m")
    specs = ftp.plan(params, patterns, strict=True)
    assert specs["m.h.0.attn.c_attn.weight"] == P(units("tp", 4, pack=3))
    with_bias = params | {"m.h.0.attn.c_attn.bias": torch.ones(24)}
    assert ftp.plan(with_bias, patterns)["m.h.0.attn.c_attn.bias"] == P(units("tp", 4, pack=3))
    with pytest.raises(ftp.errors.SpecError, match=r"c_proj.weight' matches no path"):
        ftp.plan({"m.wte.weight": torch.ones(9, 8)}, patterns)


def test_gpt2_from_its_parts():
    cfg = models.GPT2Config(layers=1, qkv="fused")
    fn, params = ftp.functionalize(models.build(cfg, dtype=torch.float64))
    patterns = attention("layers.*.attn", head_dim=cfg.head_dim, qkv=["wqkv"], out="wo", pack=3)
    patterns |= mlp("layers.*.mlp", up=["w1"], down="w2") | vocabulary(embedding="emb", head="head")
    specs = ftp.plan(params, patterns)
    assert (
        specs["layers.0.attn.wqkv.weight"]
        == P(units("tp", 4, pack=3))
        == specs["layers.0.attn.wqkv.bias"]
    )
    for n in (2, 3):
        found = check(
            models.lm_loss(fn),
            ftp.simulated_mesh((n,), ("tp",)),
            specs,
            params,
            models.lm_batch(cfg),
        )
        assert found == ["all_reduce"] * (2 + 4 + 3)


def test_names_of_code_bases():
    """Each plan names exactly what the code base's own model cuts."""
    hf = [
        "embed_tokens.weight",
        "norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.mlp.down_proj.weight",
    ]
    hf += [f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"] + [
        f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")
    ]
    params = {f"model.{name}": torch.ones(8, 8) for name in hf} | {
        "lm_head.weight": torch.ones(8, 8)
    }
    specs = ftp.plan(
        params,
        llama(SimpleNamespace(hidden_size=8, num_attention_heads=4, tie_word_embeddings=False)),
    )
    assert [name for name, spec in specs.items() if not spec] == [
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
    ]
    assert specs["model.layers.0.self_attn.o_proj.weight"] == P(None, units("tp", 2))
    titan = [
        "tok_embeddings",
        "output",
        "layers.0.attention.wq",
        "layers.0.attention.wk",
        "layers.0.attention.wv",
        "layers.0.attention.wo",
    ]
    titan += [f"layers.0.feed_forward.w{i}" for i in (1, 2, 3)]
    specs = ftp.plan(
        {f"{name}.weight": torch.ones(8, 8) for name in titan},
        llama(names="torchtitan", axis="x"),
        strict=True,
    )
    assert specs["layers.0.feed_forward.w2.weight"] == P(None, "x") and specs[
        "layers.0.attention.wq.weight"
    ] == P("x")
    layer = "decoder.layers.0"
    megatron = {
        f"{layer}.self_attention.linear_qkv.weight": (16, 8),
        f"{layer}.self_attention.linear_proj.weight": (8, 8),
    }
    megatron |= {
        f"{layer}.mlp.linear_fc1.weight": (12, 8),
        f"{layer}.mlp.linear_fc2.weight": (8, 6),
    }
    megatron |= {"embedding.word_embeddings.weight": (8, 8), "output_layer.weight": (8, 8)}
    params = {f"m.{name}": torch.ones(shape) for name, shape in megatron.items()}
    sizes = {"kv_channels": 2, "num_attention_heads": 4, "num_query_groups": 2}
    specs = ftp.plan(params, llama(sizes, names="megatron", prefix="m"), strict=True)
    assert specs[f"m.{layer}.self_attention.linear_qkv.weight"] == P(units("tp", 8))
    assert specs[f"m.{layer}.mlp.linear_fc1.weight"] == P(units("tp", pack=2))
    assert mlp("b", up="w1", down="w2") == mlp("b", up=["w1"], down="w2") and attention(
        "b", qkv="w"
    ) == attention("b", qkv=["w"])
    assert gpt2(transposed=False, head=True)["**.attn.c_proj.weight"] == P(None, "tp")


class Experts(nn.Module):
    """Each token goes through all experts, weighted by a router."""

    def __init__(self, experts, dim, hidden):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ParameterDict(
            {
                "gate_up_proj": nn.Parameter(torch.randn(experts, 2 * hidden, dim)),
                "down_proj": nn.Parameter(torch.randn(experts, dim, hidden)),
            }
        )

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        gate, up = torch.einsum("ehd, td -> eth", self.experts["gate_up_proj"], x).chunk(2, -1)
        return torch.einsum(
            "edh, eth, te -> td", self.experts["down_proj"], F.silu(gate) * up, weights
        )


@pytest.mark.parametrize("experts", slow_after(1, ["columns", "whole"]))
def test_experts(experts):
    torch.manual_seed(0)
    fn, params = ftp.functionalize(Experts(5, 4, 6).double())
    patterns = {
        pattern: spec for pattern, spec in mixtral(experts=experts).items() if "experts" in pattern
    }
    specs = ftp.plan(params, patterns)
    cut = P(None, units("tp", pack=2)) if experts == "columns" else P("tp")
    assert specs["experts.gate_up_proj"] == cut and specs["router.weight"] == P()
    x = torch.randn(3, 4, dtype=torch.float64)
    for n in (2, 3):
        found = check(
            lambda p, x: fn(p, x).square().sum(),
            ftp.simulated_mesh((n,), ("tp",)),
            specs,
            params,
            x,
        )
        assert set(found) <= {"all_reduce", "reduce_scatter"} or experts == "whole"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: llama(names="jax"), "names='jax' is none of 'hf', 'torchtitan', 'megatron'."),
        (
            lambda: llama({"hidden_size": 8}),
            "config says neither head_dim, nor hidden_size and num_attention_heads",
        ),
        (
            lambda: llama({"dim": 8, "n_heads": 3}),
            "3 heads do not divide a width of 8. Give head_dim.",
        ),
        (
            lambda: mixtral(experts="rows"),
            "it is 'columns', each expert cut, or 'whole', each rank some of them.",
        ),
        (
            lambda: llama(
                {"kv_channels": 4, "n_heads": 3, "num_query_groups": 2}, names="megatron"
            ),
            "3 attention heads in 2 groups.",
        ),
    ],
)
def test_refusals(call, text):
    with pytest.raises(ftp.FtpError) as caught:
        call()
    assert text in str(caught.value)


# Adapters.


class LoraLinear(nn.Module):
    """A frozen linear layer and its adapter, named as peft names them."""

    def __init__(self, base, rank=3):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


def adapted(cfg):
    model: Any = models.build(cfg).requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.layers:
        for holder, names in ((layer.attn, ("wq", "wk", "wv", "wo")), (layer.mlp, ("w1", "w2"))):
            for name in names:
                setattr(holder, name, LoraLinear(getattr(holder, name)))
    return model.double()


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("shape", "axes"), [((2,), ("tp",)), ((3,), ("tp",)), ((2, 2), ("dp", "tp"))]
)
def test_adapters_are_trained_alone(shape, axes):
    cfg = models.LlamaConfig(layers=1)
    model = adapted(cfg)
    specs, frozen = lora(model, llama({"head_dim": cfg.head_dim}, names=OUR_NAMES))
    fn, params, buffers = ftp.functionalize(model, buffers=True)
    assert (
        all("lora_" in path for path in params)
        and specs.keys() == params.keys()
        and frozen.keys() == buffers.keys()
    )
    head = units("tp", 4)
    assert frozen["layers.0.attn.wo.base_layer.weight"] == P(None, head) and frozen[
        "layers.0.mlp.w3.weight"
    ] == P("tp")
    assert (
        specs["layers.0.attn.wq.lora_B.default.weight"] == P(head)
        and specs["layers.0.attn.wq.lora_A.default.weight"] == P()
    )
    assert (
        specs["layers.0.attn.wo.lora_A.default.weight"] == P(None, head)
        and specs["layers.0.attn.wo.lora_B.default.weight"] == P()
    )

    def loss(params, buffers, tokens, targets):
        return F.cross_entropy(fn(params, buffers, tokens)[0].flatten(0, 1), targets.flatten())

    data = P("dp") if "dp" in axes else P()
    batch_specs, data_axes = (frozen, data, data), [axis for axis in axes if axis == "dp"]
    mesh = ftp.simulated_mesh(shape, axes)
    found = check(
        loss,
        mesh,
        specs,
        params,
        buffers,
        *models.lm_batch(cfg),
        batch_specs=batch_specs,
        data_axes=data_axes,
    )
    assert set(found) <= {"all_reduce", "reduce_scatter"} or shape == (3,)


class LoraEmbedding(nn.Module):
    def __init__(self, rank=2):
        super().__init__()
        self.base_layer = nn.Embedding(7, 4).requires_grad_(False)
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(rank, 7))})
        self.lora_embedding_B = nn.ParameterDict({"default": nn.Parameter(torch.randn(4, rank))})


def test_adapters_of_other_layers():
    embedding, transposed = LoraEmbedding(), LoraLinear(nn.Linear(4, 8))
    transposed.fan_in_fan_out = True  # type: ignore[assignment]
    transposed.base_layer.weight = nn.Parameter(torch.randn(4, 8), requires_grad=False)
    trained = nn.ModuleDict({"default": nn.Linear(4, 7)})
    saved = nn.ModuleDict(
        {"original_module": nn.Linear(4, 7).requires_grad_(False), "modules_to_save": trained}
    )
    inner = nn.ModuleDict({"emb": embedding, "up": transposed, "head": saved})
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": inner})})
    specs, frozen = lora(
        model,
        {"emb.weight": P("tp"), "up.weight": P(None, "tp"), "up.bias": P("tp"), "head.*": P("tp")},
    )
    at = "base_model.model."
    assert dict(specs) == {
        f"{at}emb.lora_embedding_A.default": P(None, "tp"),
        f"{at}emb.lora_embedding_B.default": P(),
        f"{at}up.lora_A.default.weight": P(),
        f"{at}up.lora_B.default.weight": P("tp"),
        f"{at}head.modules_to_save.default.weight": P("tp"),
        f"{at}head.modules_to_save.default.bias": P("tp"),
    }
    assert {path: spec for path, spec in frozen.items() if spec} == {
        f"{at}emb.base_layer.weight": P("tp"),
        f"{at}up.base_layer.weight": P(None, "tp"),
        f"{at}up.base_layer.bias": P("tp"),
        f"{at}head.original_module.weight": P("tp"),
        f"{at}head.original_module.bias": P("tp"),
    }


def test_a_base_that_is_not_there():
    model = nn.ModuleDict({"up": LoraLinear(nn.Linear(4, 8))})
    with pytest.raises(
        ftp.FtpError, match=r"pattern 'down.weight' matches no path of the adapted model"
    ):
        lora(model, {"down.weight": P("tp")})
    del model["up"].base_layer
    with pytest.raises(
        ftp.FtpError,
        match=r"adapter 'up.lora_A.default.weight' adapts 'up', which has no weight"
        r" up.base_layer.weight",
    ):
        lora(model, {})


@pytest.mark.filterwarnings(
    "ignore:.*is deprecated:FutureWarning"
)  # what peft calls of transformers
def test_peft():
    """peft's own wrapper around a model of transformers, its plan read before."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from real_models import transformer

    case = transformer("Llama", "sdpa")
    base, _ = ftp.from_hf(case.model)
    model = peft.get_peft_model(
        case.model,
        peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj", "up_proj"], lora_dropout=0.0),
    )
    model = model.double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view_as(p))
    specs, frozen = lora(model, base)
    fn, params, buffers = ftp.functionalize(model, buffers=True)
    assert all("lora_" in path for path in params)

    def loss(params, buffers, *batch):
        return case.loss(lambda params, *a, **k: fn(params, buffers, *a, **k)[0])(params, *batch)

    mesh = ftp.simulated_mesh((2,), ("tp",))
    check(
        loss,
        mesh,
        specs,
        params,
        buffers,
        *case.batch,
        batch_specs=(frozen, *[P()] * len(case.batch)),
        data_axes=(),
    )


def test_the_page_runs():
    """From the first block that imports what it needs; those before it speak of any model."""
    page = (Path(__file__).resolve().parents[2] / "docs/plans.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    first = next(i for i, block in enumerate(blocks) if block.startswith("import"))
    assert len(blocks[first:]) == 3
    exec(compile("\n".join(blocks[first:]), "docs/plans.md", "exec"), {})
