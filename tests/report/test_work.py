"""``lowered.work`` against the matmuls of every rank's program, and what strict=True says."""

import pytest
import torch
from models import (
    CNNConfig,
    LlamaConfig,
    MLPConfig,
    build,
    class_batch,
    cuts,
    lm_batch,
    loss,
    specs,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import ftp
from ftp import P
from ftp.report.flops import flops_of
from ftp.runtime.executed import in_order

CASES = {
    "uneven tp": (MLPConfig(), (3,), {"tp": "tp"}, P()),
    "dp, tp unused": (LlamaConfig(), (2, 2), {}, P("dp")),
    "uneven": (LlamaConfig(hidden=25), (2, 3), {"tp": "tp", "zero": "dp"}, P("dp")),
    "convolutions": (CNNConfig(blocks=1), (2, 2), {"tp": "tp"}, P("dp")),
}  # fmt: skip


def done_by(program: ftp.Lowered, at: dict[str, int]) -> float:
    """FLOP of the graph that a rank's eager runner runs, by the shapes in it."""
    made = in_order(program._program, program._program.local(at), at)
    return sum(flops_of(n, made.shapes) for n in made.graph.nodes if n.op == "call_function")


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("name", CASES)
def test_work_is_what_all_ranks_programs_do(name):
    cfg, shape, cut, batch_specs = CASES[name]
    names = ("dp", "tp") if len(shape) == 2 else ("tp" if cut else "dp",)
    fn, params = ftp.functionalize(build(cfg, device="meta"))
    batch = lm_batch(cfg, 6, 8) if isinstance(cfg, LlamaConfig) else class_batch(cfg, 6)

    def lowered(mesh, cut, batch_specs):
        spec_of = ftp.plan(params, specs(cuts(cfg), **cut))
        return ftp.shard(loss(cfg, fn), mesh, spec_of, batch_specs=batch_specs).lower(params, batch)

    mesh = ftp.AbstractMesh(shape, names)
    found = lowered(mesh, cut, batch_specs)
    one = lowered(ftp.AbstractMesh((1,), ("none",)), {}, P())
    everywhere = [done_by(found, at) for at in found._program.mesh.coordinates()]
    assert found.work.flops == sum(everywhere)
    assert found.work.one_device == done_by(one, {"none": 0})
    assert found.work == pytest.approx(sum(everywhere) / found.work.one_device, rel=1e-12)
    assert one.work == 1.0
    if name == "dp, tp unused":
        assert found.work == 2.0 and list(found.work.by_layer) == ["layers.0", "layers.1", ""]


def test_work_of_attention_over_cut_queries():
    """Every pair of a query and a key counts, as torch's counter has it."""

    def attend(params, x):
        q, k, v = [(x @ params[name]).unflatten(-1, (2, -1)).transpose(1, 2) for name in "qkv"]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum()

    params = {name: torch.empty(8, 8, device="meta") for name in "qkv"}
    x = torch.empty(2, 7, 8, device="meta")

    def lowered(mesh, batch_specs):
        return ftp.shard(attend, mesh, P(), batch_specs=batch_specs).lower(params, x)

    found = lowered(ftp.AbstractMesh((3,), ("cp",)), P(None, "cp"))
    one = lowered(ftp.AbstractMesh((1,), ("none",)), P())
    everywhere = [done_by(found, at) for at in found._program.mesh.coordinates()]
    assert found.work.flops == sum(everywhere) and found.work == 1.0
    assert found.work.one_device == done_by(one, {"none": 0})


@pytest.mark.parametrize("hardware", [{"flops": 1e3, "ring_step": 0.0}, {"ring_step": 1.0}])
@pytest.mark.parametrize("name", ["window", "packed"])
@pytest.mark.parametrize("cut", [P(None, None, "cp"), P(None, None, ftp.zigzag("cp"))])
def test_operations_of_attention_are_those_of_pairs_that_a_mask_leaves(cut, name, hardware):
    """Of a BlockMask whole blocks; of packed documents the window, wherever documents end."""
    length, heads, dim, side = 512, 2, 4, 100
    at = torch.arange(length)
    sees = (at[:, None] >= at) & (at[:, None] - at < side)
    blocks = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < side), None, None, length, length, "cpu", 32
    )
    ends = torch.tensor([0, length], dtype=torch.int32)

    def run(batch, w):
        q, k, v = (w * x for x in batch)
        if name == "window":
            return flex_attention(q, k, v, block_mask=blocks)
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        out = varlen_attn(*rows, ends, None, length, length, window_size=(side - 1, 0))
        return out.transpose(0, 1).unsqueeze(0)

    def both(batch, w):
        *x, grad = batch
        out, vjp = torch.func.vjp(lambda *x: run(x, w), *x)
        return out, *vjp(w * grad)

    mesh, x = ftp.AbstractMesh((4,), ("cp",)), torch.empty(1, heads, length, dim, device="meta")
    step = ftp.spmd(both, mesh, ((cut,) * 4, P()), (cut,) * 4, hardware=ftp.Hardware(**hardware))
    found = step.lower((x,) * 4, torch.empty((), device="meta"))
    assert ("ring" in {c.op for c in found.collectives}) == ("flops" in hardware)
    if name == "window":
        sees = sees.unflatten(1, (-1, 32)).unflatten(0, (-1, 32)).any(3).any(1)
        sees = sees.repeat_interleave(32, 0).repeat_interleave(32, 1)
    done = sum(done_by(found, rank) for rank in found._program.mesh.coordinates())
    assert done == int(sees.sum()) * heads * dim * (4 + 10)


def losses_of_a_vocabulary():
    """Ways to write the loss of a language model's head."""
    nn = torch.nn.functional

    def cross_entropy(p, x, y):
        return nn.cross_entropy(x @ p["head"].T, y)

    def smoothed(p, x, y):
        return nn.cross_entropy(x @ p["head"].T, y, label_smoothing=0.1, ignore_index=0)

    def with_z(p, x, y):
        logits = 30 * torch.tanh(x @ p["head"].T / 30)
        return nn.cross_entropy(logits, y) + 1e-4 * logits.logsumexp(-1).square().mean()

    def of_picked(p, x, y):
        logits = x @ p["head"].T
        return (logits.logsumexp(-1) - logits.gather(1, y[:, None])[:, 0]).mean()

    def distilled(p, x, y):
        teacher = (x @ p["teacher"].T).softmax(-1)
        return nn.kl_div((x @ p["head"].T).log_softmax(-1), teacher, reduction="batchmean")

    return [cross_entropy, smoothed, with_z, of_picked, distilled]


@pytest.mark.parametrize("loss_fn", losses_of_a_vocabulary(), ids=lambda f: f.__name__)
def test_losses_on_a_cut_vocabulary_do_nothing_twice(loss_fn):
    """Matmuls of all ranks were 1.5 times one device's; now numbers a token travel, no logits."""
    params = {k: torch.empty(32000, 512, device="meta") for k in ("head", "teacher")}
    batch = torch.empty(64, 512, device="meta"), torch.empty(64, dtype=torch.int64, device="meta")
    mesh = ftp.AbstractMesh((4,), ("tp",))
    lowered = ftp.shard(loss_fn, mesh, P("tp"), strict=True).lower(params, *batch)
    assert lowered.work == 1.0 and {c.op for c in lowered.collectives} == {"all_reduce"}
    assert max(c.nbytes for c in lowered.collectives) <= 4 * 64 * 4  # four numbers a token


class DLRM(torch.nn.Module):
    """Tables of categories, products of all pairs of features, two MLPs."""

    def __init__(self, tables=4, rows=1000, dim=64):
        super().__init__()
        self.bottom = torch.nn.Sequential(
            torch.nn.Linear(13, 256), torch.nn.ReLU(), torch.nn.Linear(256, dim)
        )
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(rows, dim) for _ in range(tables))
        pairs = tables * (tables + 1) // 2
        self.top = torch.nn.Sequential(
            torch.nn.Linear(dim + pairs, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )

    def forward(self, dense, ids):
        x = self.bottom(dense).relu()
        z = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        i, j = torch.tril_indices(z.shape[1], z.shape[1], -1)
        return self.top(torch.cat([x, (z @ z.mT)[:, i, j]], 1))[:, 0]


@pytest.mark.parametrize("cut", ["rows", "features", "ZeRO-3"])
def test_tables_on_the_batch_axis_leave_dlrm_to_do_nothing_twice(cut):
    """Of tables that the batch's axis cuts: 1.67 times one device's work was done."""
    with torch.device("meta"):
        fn, params = ftp.functionalize(DLRM())
        batch = torch.empty(64, 13), torch.empty(64, 4, dtype=torch.int64), torch.empty(64)

    def loss_fn(p, dense, ids, y):
        return torch.nn.functional.binary_cross_entropy_with_logits(fn(p, dense, ids), y)

    patterns = {
        "rows": {"tables.*.weight": P("dp")},
        "features": {"tables.*.weight": P(None, "dp")},
        "ZeRO-3": {"**": P("dp"), "top.2.*": P()},
    }[cut]
    mesh = ftp.AbstractMesh((4,), ("dp",))
    step = ftp.shard(loss_fn, mesh, ftp.plan(params, patterns), batch_specs=P("dp"), strict=True)
    assert step.lower(params, *batch).work == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("mamba2", 1.0), ("vit", 1.08)])
def test_work_of_published_plans(kind, most):
    """Mamba-2 did 1.72 times one device's work, ViT 1.27: what a plan leaves whole is a
    classifier's head and the embedding of patches.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "vit":
        config = transformers.ViTConfig(
            hidden_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=768,
            image_size=64,
            patch_size=8,
            num_labels=1000,
        )
        model = transformers.ViTForImageClassification(config).eval()
        x, y = torch.zeros(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)
    else:
        config = transformers.Mamba2Config(
            vocab_size=1024,
            hidden_size=256,
            num_hidden_layers=2,
            state_size=16,
            num_heads=8,
            head_dim=64,
            n_groups=1,
            chunk_size=16,
        )
        model = transformers.Mamba2ForCausalLM(config).eval()
        x = y = torch.zeros(4, 64, dtype=torch.int64)
    specs, constraints = ftp.from_hf(model)
    fn, params = ftp.functionalize(model, constraints=constraints)
    options = {} if kind == "vit" else {"use_cache": False}

    def loss_fn(p, x, y):
        logits = fn(p, x, **options).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    work = ftp.shard(loss_fn, ftp.AbstractMesh((4,), ("tp",)), specs).lower(params, x, y).work
    assert 1.0 <= work <= most
    assert {ratio for layer, ratio in work.by_layer.items() if layer} == {1.0}


def test_repeated_work_is_named_with_its_cause():
    sizes = {"up": (64, 256), "down": (256, 64), "extra": (64, 128)}
    params = {name: torch.empty(shape, device="meta") for name, shape in sizes.items()}

    def fn(p, x):
        return (torch.relu(x @ p["up"]) @ p["down"]).square().mean() + (x @ p["extra"]).mean()

    mesh = ftp.AbstractMesh((4,), ("tp",))
    given = {"up": P(None, "tp"), "down": P("tp"), "extra": P()}
    lowered = ftp.shard(fn, mesh, given).lower(params, torch.empty(8, 64, device="meta"))
    # Of up 2 matmuls and of down 3 are cut; of extra, half as wide, 2 are done by all four ranks.
    assert lowered.work == (5 + 2 / 2 * 4) / (5 + 2 / 2)
    (finding,) = [f for f in lowered.lint if f.kind == "repeated work"]
    assert "1.5 times one device's" in finding.text and "done 4 times" in finding.text
    assert "its inputs are whole over 'tp'" in finding.text and "test_work.py" in finding.text
    assert finding.severity == "note" and "on 4 ranks: %mm" in str(lowered.work)


def test_strict_names_an_axis_that_cuts_no_matmul():
    params = {"w": torch.empty(64, 64, device="meta"), "b": torch.empty(64, device="meta")}
    x = torch.empty(8, 64, device="meta")

    def step(specs, mesh):
        return ftp.shard(
            lambda p, x: (x @ p["w"]).sum() + p["b"].square().sum(), mesh, specs, strict=True
        )

    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    with pytest.raises(ftp.errors.PlanningError, match="mesh axis 'tp' cuts no matmul"):
        step({"w": P("dp"), "b": P("tp")}, mesh).lower(params, x)
    step({"w": P("dp"), "b": P()}, mesh).lower(params, x)  # no spec names tp


def test_strict_names_a_reshard_that_no_spec_asked_for():
    """``x + y`` of inputs cut on two dims."""
    mesh = ftp.AbstractMesh((2,), ("tp",))
    x = torch.empty(1024, 1024, device="meta")

    def add(x, y):
        return x + y

    for data_axes in (None, ()):
        step = ftp.spmd(add, mesh, (P("tp"), P(None, "tp")), strict=True, data_axes=data_axes)
        with pytest.raises(ftp.errors.PlanningError, match=r"'tp' cuts on different dims") as e:
            step.lower(x, x)
        assert "ftp.constrain" in str(e.value) and "test_work.py" in str(e.value)
    both = ftp.spmd(lambda s, x, y: s + (x + y), mesh, (P(), P("tp"), P(None, "tp")), strict=True)
    with pytest.raises(ftp.errors.PlanningError, match=r"'tp' cuts on different dims"):
        both.lower(x, x, x)
    ftp.spmd(add, mesh, (P("tp"), P("tp")), strict=True).lower(x, x)


def test_strict_names_constraints_that_no_plan_keeps():
    """A parameter's shard that no op can take without moving it."""
    params = {"w": torch.empty(8, 64, 64, device="meta")}

    def scanned(p, x):
        return torch.cumprod(p["w"], 0)[-1].mul(x).sum()

    mesh = ftp.AbstractMesh((2,), ("tp",))
    step = ftp.shard(scanned, mesh, {"w": P("tp")}, strict=True)
    with pytest.raises(ftp.errors.PlanningError, match="no plan that keeps all constraints"):
        step.lower(params, torch.empty(64, 64, device="meta"))


@pytest.mark.parametrize("tp", [1, 2])
def test_per_rank_code_is_not_counted(tp):
    """``tp`` cuts matmuls inside of the per-rank code, so that they are ops of the plan."""

    def rank(x, w):
        return x @ w

    def loss_fn(p, x):
        made = ftp.local(rank, in_specs=(P("dp"), P()), out_specs=P("dp"), axes="dp")(x, p["up"])
        return (made @ p["down"]).square().mean()

    mesh = ftp.AbstractMesh((4, tp), ("dp", "tp"))
    specs_of = {"up": P(None, "tp"), "down": P("tp")}
    params = {"up": torch.ones(8, 16), "down": torch.ones(16, 8)}
    step = ftp.shard(loss_fn, mesh, specs_of, batch_specs=P("dp"))
    lowered = step.lower(params, torch.ones(32, 8))
    assert lowered.work == 1.0 and not [f for f in lowered.lint if f.kind == "repeated work"]
