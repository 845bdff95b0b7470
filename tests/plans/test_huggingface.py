"""Plans of transformers' models: read as specs, and the models equal to plain torch in loss and
every gradient.
"""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from real_models import TRANSFORMERS, transformer
from torch import nn

import ftp
from ftp import P, units
from tests.plans.test_real_models import MESHES, close  # type: ignore[import-not-found]

# Norms and positions are much of models as small as these.
pytestmark = pytest.mark.filterwarnings("ignore::ftp.errors.PlanWarning")


def check(name: str, mesh: str, **options: Any) -> Any:
    case = transformer(name, "sdpa")
    specs, constraints = ftp.from_hf(case.model, **options)
    fn, params = ftp.functionalize(case.model, constraints=constraints)
    expected = case.loss(lambda params, *args, **kwargs: case.model(*args, **kwargs))(
        params, *case.batch
    )
    trained = dict(case.model.named_parameters())
    found = torch.autograd.grad(expected, list(trained.values()), allow_unused=True)
    shape, axes = MESHES[mesh]
    step = ftp.shard(
        case.loss(fn),
        ftp.simulated_mesh(shape, axes),
        specs,
        batch_specs=case.batch_specs if "dp" in axes else P(),
    )
    loss, grads = step(params, *case.batch)
    close("the loss", loss, expected.detach(), float(expected.detach().abs()), case.tolerance)
    reference = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(trained.items(), found, strict=True)
    }
    largest = max(float(g.abs().max()) for g in reference.values())
    for path, grad in reference.items():
        close(
            f"gradient of {path}",
            grads[path],
            grad,
            max(float(grad.abs().max()), 1e-3 * largest),
            case.tolerance,
        )
    return step.lower(params, *case.batch)


NAMES = [name for name in TRANSFORMERS if name != "Mixtral, experts"]
FEW = {("Llama", "tp4"), ("GPT-2", "tp3")}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(n, m, marks=() if (n, m) in FEW else pytest.mark.slow, id=f"{n} | {m}")
        for n in NAMES
        for m in MESHES
    ],
)
def test_transformers(name: str, mesh: str):
    pytest.importorskip("transformers")
    check(name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_whole_experts(mesh: str):
    pytest.importorskip("transformers")
    check("Mixtral", mesh, experts="whole")


@pytest.mark.slow
def test_a_whole_vocabulary():
    pytest.importorskip("transformers")
    check("Llama", "tp2", vocab_parallel=False)


# Without transformers: modules with the names and attributes that its models have.


class Attention(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.config, self.head_dim = config, config.head_dim
        wide, narrow = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj, self.k_proj = nn.Linear(8, wide), nn.Linear(8, narrow)
        self.v_proj, self.o_proj = nn.Linear(8, narrow), nn.Linear(wide, 8)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.ones(4, 12, 8)),
            nn.Parameter(torch.ones(4, 8, 6)),
        )


class Layer(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.self_attn, self.experts = Attention(config), Experts()
        self.norm = nn.LayerNorm(8)


class Base(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(16, 8), nn.ModuleList([Layer(config)])


class Model(nn.Module):
    """A head on a base model whose config has the plan, as transformers' models before they
    merge it into ``tp_plan``.
    """

    base_model_prefix = "model"
    _tp_plan = MappingProxyType({"lm_head": "colwise_gather_output"})

    def __init__(self, **plan: str):
        super().__init__()
        named = {f"layers.*.{key.replace('__', '.')}": style for key, style in plan.items()}
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}
        self.config = SimpleNamespace(
            base_model_tp_plan=named,
            base_model_ep_plan={"layers.*.experts.down_proj": "grouped_gemm"},
            **sizes,
        )
        self.model, self.lm_head = Base(self.config), nn.Linear(8, 16, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_styles_units_and_packs():
    model = Model(
        self_attn__q_proj="colwise",
        self_attn__k_proj="colwise_rep",
        self_attn__v_proj="colwise_gather_output",
        self_attn__o_proj="rowwise_split_input",
        experts__gate_up_proj="packed_colwise",
        experts__down_proj="packed_rowwise",
        experts="moe_tp_experts",
        norm="sequence_parallel",
        absent="colwise",
    )
    specs, constraints = ftp.from_hf(model, axis="t")
    head = units("t", 3)
    expected = {
        "lm_head.weight": P("t"),
        "model.embed_tokens.weight": P("t"),
        "model.layers.0.self_attn.o_proj.bias": P(),
        "model.layers.0.self_attn.o_proj.weight": P(None, head),
        "model.layers.0.experts.gate_up_proj": P(None, units("t", pack=2)),
        "model.layers.0.experts.down_proj": P(None, None, units("t", pack=2)),
        "model.layers.0.norm.weight": P(),
        "model.layers.0.norm.bias": P(),
    }
    expected |= {
        f"model.layers.0.self_attn.{n}_proj.{p}": P(head) for n in "qkv" for p in ("weight", "bias")
    }
    assert dict(specs) == expected
    pinned = ftp.Constraint(inputs=(P(None, "t"), ...), outputs=P(None, "t"), axes="t")
    assert constraints == {"model.layers.0.norm": pinned}
    assert "'model.layers.*.self_attn.k_proj': colwise_rep" in str(specs)


def test_choices():
    model = Model(experts__gate_up_proj="packed_colwise", experts__down_proj="rowwise")
    specs, _ = ftp.from_hf(model, experts="whole", vocab_parallel=False)
    assert (
        specs["model.layers.0.experts.down_proj"] == P("tp")
        and specs["lm_head.weight"] == P() == specs["model.embed_tokens.weight"]
    )
    specs, _ = ftp.from_hf(
        model,
        plan={
            "model.layers.*.experts.gate_up_proj": "replicate",
            "model.layers.*.self_attn": "replicate",
        },
    )
    assert specs["model.layers.0.experts.gate_up_proj"] == P() and specs[
        "model.layers.0.experts.down_proj"
    ] == P(None, None, "tp")


def test_tied_weights_are_cut_as_either_name_says():
    model = Model(norm="replicate")
    model.lm_head.weight = model.model.embed_tokens.weight
    assert ftp.from_hf(model)[0]["model.embed_tokens.weight"] == P("tp")


def test_what_has_no_meaning_is_named():
    model = Model(self_attn__q_proj="colwize", norm="spiral")
    with pytest.raises(ftp.FtpError) as caught:
        ftp.from_hf(model, plan={"model.layers.*.self_attn.qproj": "colwise"})
    text = str(caught.value)
    assert (
        "'model.layers.*.self_attn.q_proj' has style 'colwize', which ftp does not know; the"
        " nearest are 'colwise'" in text
    )
    assert "'model.layers.*.norm' has style 'spiral'" in text
    assert (
        "plan['model.layers.*.self_attn.qproj'] names no module and no parameter; the nearest are"
        " 'model.layers.0.self_attn.q" in text
    )


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (
            nn.Linear(2, 2),
            {},
            "Linear has no tensor-parallel plan: no tp_plan, and no base_model_tp_plan in its"
            " config.",
        ),
        (
            Model(norm="replicate"),
            {"experts": "some"},
            "it is 'columns', each expert cut, or 'whole'",
        ),
        (3, {}, "from_hf takes a model, not 3, an int."),
    ],
)
def test_refusals(model: Any, options: Any, text: str):
    with pytest.raises(ftp.FtpError) as caught:
        ftp.from_hf(model, **options)
    assert text in str(caught.value)


class GatedBlock(nn.Module):
    """A gate and what it multiplies are one layer, of which no name or config tells."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.Wi, self.Wo = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.Wi(x).chunk(2, -1)
        return x + self.Wo(value.sigmoid() * gate)


def test_layers_side_by_side_are_packs_by_their_sizes():
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Sequential(*(GatedBlock(6, 8) for _ in range(2)))}).double()
    specs, _ = ftp.from_hf(model)
    for i in (0, 1):
        assert specs[f"layers.{i}.Wi.weight"] == specs[f"layers.{i}.Wi.bias"]
        assert specs[f"layers.{i}.Wi.weight"] == P(units("tp", pack=2))
        assert specs[f"layers.{i}.Wo.weight"] == P(None, "tp")
    fn, params = ftp.functionalize(model["layers"])
    x = torch.randn(4, 6, dtype=torch.float64)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fn(params, x).square().sum()

    cut = {path.removeprefix("layers."): spec for path, spec in specs.items()}
    step = ftp.shard(loss, ftp.simulated_mesh((4,), ("tp",)), cut, batch_specs=P())
    value, grads = step(params, x)
    expected, right = torch.func.grad_and_value(loss)(params, x)[::-1]
    torch.testing.assert_close(value, expected)
    for path, grad in right.items():
        torch.testing.assert_close(grads[path], grad)
    # As by hand: an all-reduce of each block's output, and one of its input's gradient.
    assert [c.op for c in step.lower(params, x).collectives] == ["all_reduce"] * 3


@pytest.mark.parametrize("sizes", [[(16, 8), (8, 4)], [(8, 40), (8, 4)]])
def test_layers_whose_sizes_divide_by_chance_are_no_packs(sizes: list[tuple[int, int]]):
    """The first one is sharded by rows itself, or of five times the size."""
    block = nn.Sequential(*(nn.Linear(*pair) for pair in sizes))
    specs, _ = ftp.from_hf(nn.ModuleDict({"layers": nn.ModuleList([block])}))
    assert specs["layers.0.0.weight"] in (P("tp"), P(None, "tp"))
