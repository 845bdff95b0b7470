"""Explicit mode: what is asked for, the lines that ask for the rest, and that they are enough."""

import re
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
from torch import nn
from written_lines import HEADER, Source, sent

import ftp
from ftp import P
from ftp.errors import ExplicitError

TP = ftp.AbstractMesh((2,), ("tp",))
DP_TP = ftp.AbstractMesh((2, 2), ("dp", "tp"))

# Megatron's block: column and row linear, attention by heads, vocabulary-parallel embedding and
# loss.
BLOCK = """
import torch
import torch.nn.functional as F


def attention(p, x):
    b, t, d = x.shape
    q, k, v = ((x @ p[w]).view(b, t, 4, -1).transpose(1, 2) for w in ("wq", "wk", "wv"))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = a.transpose(1, 2).flatten(2) @ p["wo"]
    return y


def mlp(p, x):
    return F.gelu(x @ p["up"]) @ p["down"]


def loss(p, batch):
    ids, labels = batch
    x = F.embedding(ids, p["emb"])
    h = F.layer_norm(x, (16,), p["norm1"])
    x = x + attention(p, h)
    x = x + mlp(p, F.layer_norm(x, (16,), p["norm2"]))
    logits = F.layer_norm(x, (16,), p["norm"]) @ p["head"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""
SHAPES = {"emb": (32, 16), "up": (16, 32), "down": (32, 16), "head": (16, 32)}
SHAPES |= {"wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "wo": (16, 16)}
SHAPES |= {"norm1": (16,), "norm2": (16,), "norm": (16,)}
COLUMN, ROW = P(None, "tp"), P("tp", None)
SPECS = {k: P() if "norm" in k else COLUMN for k in SHAPES} | dict.fromkeys(
    ("emb", "down", "wo"), ROW
)
MEGATRON = [
    'y = ftp.constrain(y, P("dp", None, None))',
    'return ftp.constrain(F.gelu(x @ p["up"]) @ p["down"], P("dp", None, None))',
    'x = ftp.constrain(x, P("dp", None, None))',
    'h = ftp.constrain(h, P("dp", None, None))',
    'x = x + mlp(p, ftp.constrain(F.layer_norm(x, (16,), p["norm2"]), P("dp", None, None)))',
    'logits = ftp.constrain(F.layer_norm(x, (16,), p["norm"]), P("dp", None, None)) @ p["head"]',
    "return ftp.constrain(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), P())",
]


def block(source: Source, mesh=DP_TP, batch=P("dp"), specs=SPECS, **options) -> ftp.Lowered:
    params = {k: torch.empty(shape, device="meta") for k, shape in SHAPES.items()}
    ids = torch.empty((4, 8), dtype=torch.int64, device="meta")
    step = ftp.shard(source.load().loss, mesh, specs, batch_specs=batch, **options)
    return step.lower(params, (ids, ids))


def missing(make, source: Source):
    with pytest.raises(ExplicitError) as e:
        make(source, explicit=True)
    return e.value.missing, str(e.value)


def check_lines(make, source: Source, *, removals: bool = True):
    """Written, the lines are accepted and the program is the default one; each is needed."""
    want = sent(make(source))
    found, text = missing(make, source)
    assert text.endswith("exactly what it sends without explicit=True."), text
    assert all(m.nbytes > 0 and m.line in text.replace("\n      ", "\n") for m in found)
    assert sent(make(source.with_lines(found), explicit=True)) == want
    for line in found if removals else ():
        less, _ = missing(make, source.with_lines([m for m in found if m is not line]))
        assert [m.line for m in less] == [line.line]


@pytest.fixture(scope="module")
def of_block():
    return missing(block, Source(BLOCK))


def test_megatrons_block_gets_the_lines_of_megatron(of_block):
    found, text = of_block
    default = block(Source(BLOCK)).collectives
    assert [m.line for m in found] == MEGATRON, text
    assert sum(m.nbytes for m in found) == sum(c.wire_nbytes for c in default if c.axes == ("tp",))


def test_each_line_is_needed(of_block):
    found, _ = of_block
    less = [m for m in found if m.line != MEGATRON[3]]
    (line,), _ = missing(block, Source(BLOCK).with_lines(less))
    assert line.line == MEGATRON[3]
    assert line.source.endswith('h = F.layer_norm(x, (16,), p["norm1"])')
    assert line.collectives == ("all_reduce over tp",)


def test_data_parallelism_is_asked_for():
    for spec in (P(), P("dp")):
        specs = dict.fromkeys(SHAPES, spec)
        lowered = block(Source(BLOCK), specs=specs, explicit=True, bucket=False)
        assert len(lowered.collectives) > len(SHAPES)


def test_with_its_lines_it_is_the_default_program_and_the_reference(of_block):
    written = Source(BLOCK).with_lines(of_block[0])
    assert sent(block(written, explicit=True)) == sent(block(Source(BLOCK)))
    loss = written.load().loss
    torch.manual_seed(0)
    params = {k: torch.randn(shape, dtype=torch.float64) for k, shape in SHAPES.items()}
    batch = torch.randint(32, (3, 8)), torch.randint(32, (3, 8))  # uneven over dp
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    step = ftp.shard(loss, mesh, SPECS, batch_specs=P("dp"), explicit=True)
    got, grads = step(params, batch)
    want, value = torch.func.grad_and_value(Source(BLOCK).load().loss)(params, batch)
    torch.testing.assert_close(got, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, want, rtol=1e-9, atol=1e-12)


def test_specs_ask_for_what_an_output_needs_and_no_more():
    x, w = torch.empty(4, 8), torch.empty(8, 6)
    specs = P(None, "tp"), P("tp")

    def summed(x, w):
        return (x @ w) * 2

    step = ftp.spmd(summed, TP, specs, P(), explicit=True)
    assert [c.op for c in step.lower(x, w).collectives] == ["all_reduce"]

    def bent(x, w):
        return (x @ w).relu().sum()

    with pytest.raises(ExplicitError) as e:
        ftp.spmd(bent, TP, specs, P(), explicit=True).lower(x, w)
    (line,) = e.value.missing
    assert line.line == "return (ftp.constrain(x @ w, P(None, None))).relu().sum()"
    assert (line.place, line.nbytes) == ("in place of", 4 * 4 * 6)


def test_the_sum_of_an_unreduced_input_is_asked_for_where_ops_are_linear_in_it():
    x, sum_ = torch.empty(4, 6), P(unreduced=("tp",))

    def make(source: Source, **options) -> ftp.Lowered:
        return ftp.spmd(source.load().fn, TP, sum_, P(), **options).lower(x)

    check_lines(make, Source("def fn(x):\n    h = x * 2\n    return h.relu()\n"))

    def sends(fn, *specs):
        found = ftp.spmd(fn, TP, specs, P(), explicit=True).lower(*[x for _ in specs])
        return [c.op for c in found.collectives]

    assert sends(lambda x: x.t() * 2, sum_) == ["all_reduce"]
    assert sends(lambda x, y: x * y, sum_, P()) == ["all_reduce"]
    assert sends(lambda x, y: x - y, sum_, sum_) == ["all_reduce"]
    for fn in (
        lambda x, y: x.relu() * y,
        lambda x, y: x * x * y,
        lambda x, y: y / x,
        lambda x, y: x + y,
    ):
        with pytest.raises(ExplicitError) as e:
            sends(fn, sum_, P())
        assert any("ftp.constrain(x, P(None, None))" in m.line for m in e.value.missing)
    with pytest.raises(ExplicitError) as e:  # the sum of products is not the product of sums
        sends(lambda x, y: (x * 2) * (y * 2), sum_, sum_)
    assert sum(m.nbytes for m in e.value.missing) == 2 * 4 * x.numel()


def test_an_operand_that_is_cut_anew_is_named():
    def fn(s, x, y):
        total = x + y
        return s + total

    specs = P(), P("tp"), P(None, "tp")
    x = torch.empty(4, 4)
    with pytest.raises(ExplicitError) as e:
        ftp.spmd(fn, TP, specs, P("tp"), explicit=True).lower(x, x, x)
    (line,) = e.value.missing
    assert line.line == 'total = x + ftp.constrain(y, P("tp", None))'
    assert line.collectives == ("all_to_all over tp",)


def test_a_constrained_call_may_send_within_itself():
    def fn(p, x):
        a = (x @ p["w"]).softmax(-1)
        return (a * a).sum()

    def written(p, x):
        a = (x @ p["w"]).softmax(-1)
        a = ftp.constrain(a, P(None, "tp"))
        return (a * a).sum()

    args = {"w": torch.empty(8, 8)}, torch.empty(4, 8)
    with pytest.raises(ExplicitError) as e:
        ftp.shard(fn, TP, {"w": P(None, "tp")}, explicit=True).lower(*args)
    assert [m.line for m in e.value.missing] == ['a = ftp.constrain(a, P(None, "tp"))']
    step = ftp.shard(written, TP, {"w": P(None, "tp")}, explicit=True, bucket=False)
    assert len(step.lower(*args).collectives) >= 3


def test_modules_of_a_library_get_constraints_by_path():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    specs = {"0.weight": P("tp"), "0.bias": P("tp"), "2.weight": P(None, "tp"), "*.bias": P()}
    specs |= {"3.weight": P()}

    def make(source: Source, **options) -> ftp.Lowered:
        fn, params = ftp.functionalize(model, constraints=source.constraints)
        step = ftp.shard(
            lambda p, x: fn(p, x).square().mean(), TP, ftp.plan(params, specs), **options
        )
        return step.lower(params, torch.empty(4, 8))

    found, _ = missing(make, Source(""))
    assert [m.line for m in found] == ['constraints={"2": P(None, None)}']
    check_lines(make, Source(""))


def test_lines_that_are_not_proven_say_why(monkeypatch):
    from ftp.explicit import check

    def bent(x, w):
        y = x @ w
        return y.relu().sum()

    def lower():
        step = ftp.spmd(bent, TP, (P(None, "tp"), P("tp")), P(), explicit=True)
        with pytest.raises(ExplicitError) as e:
            step.lower(torch.empty(4, 8), torch.empty(8, 6))
        return str(e.value).splitlines()[-1]

    def fails(*_):
        raise TypeError("no probe passes")

    own = check.suggest
    assert lower().endswith("exactly what it sends without explicit=True.")
    monkeypatch.setattr(check, "suggest", lambda *a: replace(own(*a), is_proven=False))
    assert lower().startswith("They were tried, and with them the step sends something else.")
    monkeypatch.setattr(check, "suggest", fails)
    assert lower().startswith("They could not be tried: TypeError: no probe passes.")


def test_what_per_rank_code_says_is_asked_for():
    def rank(x):
        return ftp.axis.all_reduce(x.relu(), "tp")

    def fn(x):
        return ftp.local(rank, TP, P("tp"), P())(x).square().sum()

    lowered = ftp.spmd(fn, TP, P("tp"), P(), explicit=True).lower(torch.empty(4))
    assert [c.op for c in lowered.collectives] == ["all_reduce"]


def test_stages_refuse_it():
    pipeline = ftp.Pipeline("pp", 2)
    mesh = ftp.AbstractMesh((2,), ("pp",))
    with pytest.raises(ftp.errors.InputError, match="explicit= does not go with stages"):
        ftp.shard(lambda p, x: x, mesh, {}, pipeline=pipeline, explicit=True)


def test_the_page():
    page = (Path(__file__).parents[2] / "docs/explicit.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    module = Source("\n".join(blocks)).load()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.S)
    with pytest.raises(ExplicitError) as e:
        Source(blocks[0].replace("except ftp.errors.ExplicitError", "except KeyError")).load()
    at = len(HEADER.splitlines())
    printed = re.sub(
        r"\S*written_\d+\.py:(\d+)", lambda m: f"mlp.py:{int(m[1]) - at}", str(e.value)
    )
    assert printed.strip() == shown.strip()
    assert module.lines


def small(config: str, mesh=TP, tp="tp", zero=None, batch=P(), pins=None, **arguments):
    """A model of tests/support/models.py, from its text."""

    def make(source: Source, **options) -> ftp.Lowered:
        module = source.load()
        cfg = getattr(module, config)(**arguments)
        fn, params = ftp.functionalize(
            module.build(cfg, device="meta"), constraints={**(pins or {}), **source.constraints}
        )
        is_lm = config in ("LlamaConfig", "GPT2Config")
        data = module.lm_batch(cfg) if is_lm else module.class_batch(cfg)
        specs = ftp.plan(params, module.specs(module.cuts(cfg), tp=tp, zero=zero))
        step = ftp.shard(module.loss(cfg, fn), mesh, specs, batch_specs=batch, **options)
        return step.lower(params, data)

    return make


CASES = {
    "llama": small("LlamaConfig"),
    "llama × dp": small("LlamaConfig", DP_TP, batch=P("dp")),
    "llama × zero": small("LlamaConfig", DP_TP, zero="dp", batch=P("dp")),
    "llama, sequence parallel × zero": small(
        "LlamaConfig",
        DP_TP,
        zero="dp",
        batch=P("dp"),
        pins=models.sequence_parallel(dp="dp"),
    ),
    "llama, grouped queries, sequence parallel": small(
        "LlamaConfig", kv_heads=2, pins=models.sequence_parallel()
    ),
    "llama, uneven": small("LlamaConfig", heads=3, dim=12, vocab=31),
    "llama, context parallel": small(
        "LlamaConfig", ftp.AbstractMesh((2,), ("cp",)), tp=None, batch=P(None, "cp")
    ),
    "gpt2": small("GPT2Config"),
    "gpt2, tied, interleaved × dp": small(
        "GPT2Config", DP_TP, batch=P("dp"), tied=True, qkv="interleaved"
    ),
    "gpt2, fused": small("GPT2Config", qkv="fused"),
    "cnn × dp": small("CNNConfig", DP_TP, batch=P("dp")),
    "mlp × zero": small("MLPConfig", DP_TP, zero="dp", batch=P("dp")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_models(case: str):
    check_lines(CASES[case], Source(Path(models.__file__).read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TP, DP_TP], ids=["tp", "dp × tp"])
def test_the_block(mesh):
    def make(source: Source, **options) -> ftp.Lowered:
        return block(source, mesh, P("dp") if "dp" in mesh.axes else P(), **options)

    check_lines(make, Source(BLOCK))


def test_a_long_chain_of_pointwise_ops_after_a_reshard():
    def fn(w, x):
        y = x @ w
        for _ in range(1200):
            y = -y
        return y

    w, x = torch.randn(4, 2, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(fn, mesh, (P("tp"), P(None, "tp")), P(), explicit=True)
    torch.testing.assert_close(step(w, x), x @ w)
