"""Plans of parallelize_module over whole models: what their keys match, how they merge, and one
device's numbers.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import titan  # type: ignore[import-not-found]
import torch
from plan_reshards import unbucketed
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import ftp
from ftp import P, plans, units
from ftp.errors import InputError, MeshError, SpecError, TraceError

COLUMNS = ColwiseParallel()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)


class Model(nn.Module):
    """Modules of one name at several depths."""

    def __init__(self):
        super().__init__()
        self.w1, self.wq = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.blk = Pair()
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict({"attn": nn.ModuleDict({"wq": nn.Linear(4, 4, bias=False)})})
                for _ in range(2)
            ]
        )


def cut(plan, model=None):
    specs, _ = ftp.from_parallelize_plan(model or Model(), plan)
    return {path for path, spec in specs.items() if spec}


def error_of(plan, model=None):
    with pytest.raises(SpecError) as error:
        ftp.from_parallelize_plan(model or Model(), plan)
    return str(error.value)


def test_keys_match_whole_paths():
    assert cut({"blk.w1": COLUMNS}) == {"blk.w1.weight"}
    assert cut({"w1": COLUMNS}) == {"w1.weight"}
    assert cut({"blk.*": COLUMNS}) == {"blk.w1.weight", "blk.w2.weight"}
    assert cut({"layers.*.attn.wq": COLUMNS}) == {
        "layers.0.attn.wq.weight",
        "layers.1.attn.wq.weight",
    }
    assert cut({"layers.[1-9].attn.w?": COLUMNS}) == {"layers.1.attn.wq.weight"}
    assert cut({"*.w[12]": COLUMNS}) == {"blk.w1.weight", "blk.w2.weight"}
    assert cut({"": SequenceParallel()}) == cut({}) == set()
    assert cut(COLUMNS, nn.Linear(4, 4, bias=False)) == {"weight"}
    # The pattern of everything styles no container above what it names.
    assert "ColwiseParallel: it shards nn.Linear and nn.Embedding, not a Pair" in error_of(
        {"b*": COLUMNS}
    )


def test_two_stars_are_any_depth_as_in_every_other_pattern():
    model = Model()
    assert cut({"**.w1": COLUMNS}) == {"w1.weight", "blk.w1.weight"}
    assert cut({"layers.**.wq": COLUMNS}) == {"layers.0.attn.wq.weight", "layers.1.attn.wq.weight"}
    params = ftp.functionalize(model)[1]
    for pattern in ("**.w1", "**.w[1q]", "layers.**.wq", "**.attn.*", "**.layers.*.*.wq"):
        assert cut({pattern: COLUMNS}) == {
            path for path, spec in ftp.plan(params, {f"{pattern}.weight": P("tp")}).items() if spec
        }
    assert "pattern '**.w3' matches no module; " in error_of({"**.w3": COLUMNS})


@pytest.mark.parametrize("pattern", ["blk..w1", ".blk.w1", "blk.w1."])
def test_an_empty_element_is_an_error(pattern):
    assert (
        error_of({pattern: COLUMNS}) == f"pattern {pattern!r} has an empty element. Try 'blk.w1'."
    )


def test_all_that_is_wrong_is_said_at_once():
    message = error_of(
        {
            "blk.w3": COLUMNS,
            "attn.wq": COLUMNS,
            "zzz.zzz.zzz.zzz.zzz": COLUMNS,
            3: COLUMNS,
            "w1": None,
            "layers.0": COLUMNS,
        }
    )
    assert "pattern 'blk.w3' matches no module; did you mean 'blk.w1', which matches 1?" in message
    assert (
        "pattern 'attn.wq' matches no module; did you mean 'layers.*.attn.wq'? A pattern is a"
        " whole path." in message
    )
    assert "pattern 'zzz.zzz.zzz.zzz.zzz' matches no module; the nearest are" in message
    assert "3 is no pattern" in message
    assert "plan['w1']: None is a NoneType; it must be a style" in message
    assert (
        "plan['layers.0']: ColwiseParallel: it shards nn.Linear and nn.Embedding, not a"
        " ModuleDict. Style what is in it: 'attn.wq'." in message
    )


def test_a_path_of_a_parameter_and_names_of_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert error_of({"0.weight": COLUMNS}, model).endswith(
        "a plan styles modules, and 'weight' is a parameter of '0'. Style '0'."
    )
    assert error_of({"9": COLUMNS}, model) == "pattern '9' matches no module; the nearest are '0'."


def test_a_pattern_of_parameters_may_match_a_buffer_of_fewer_dims():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))  # its counter has no dims
    specs, _ = ftp.from_parallelize_plan(model, {"1.*": P("tp")})
    assert {path for path, spec in specs.items() if spec} == {"1.weight", "1.bias"}
    with pytest.raises(SpecError, match=r"1.num_batches_tracked.* its shape \(\) has 0 dims"):
        ftp.from_parallelize_plan(model, {"1.*": P("tp")}, buffers=True)


def test_frozen_weights_are_cut_where_they_are_an_argument():
    model = Model()
    model.blk.w1.requires_grad_(False)
    plan = {"blk.w1": COLUMNS, "blk.w2": RowwiseParallel()}
    specs, constraints = ftp.from_parallelize_plan(model, plan)
    assert "blk.w1.weight" not in specs
    again, same, frozen = ftp.from_parallelize_plan(model, plan, buffers=True)
    assert (again, same) == (specs, constraints) and frozen == {"blk.w1.weight": P("tp")}
    assert str(frozen).endswith("blk.w1.weight  P('tp')  (4, 4)  'blk.w1': ColwiseParallel")


def test_a_style_function_that_does_not_fit_is_named_with_its_path():
    def narrow(path):
        return {}, {}

    def long(path, module):
        return {"weight": P(None, None, "tp")}, {}

    assert error_of({"blk.w1": narrow, "blk.w2": long}) == (
        "plan['blk.w1']: narrow(path) must take (path, module), as every style:"
        " too many positional arguments.\n"
        "plan['blk.w2']: long('blk.w2', ...) gives P(None, None, 'tp'), of 3 entries, for"
        " 'weight', whose shape (4, 4) has 2 dims."
        " Give at most 2."
    )


def test_a_mesh_of_several_axes_says_what_takes_which():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    with pytest.raises(MeshError) as error:
        ftp.from_parallelize_plan(Model(), {"blk.w1": COLUMNS}, mesh=mesh)
    several = "The plan is for one axis, and the mesh has 'dp', 'tp'. "
    assert str(error.value) == several + "Name it, as axis='tp', or give a 1-D mesh."
    with pytest.raises(MeshError) as error:
        plans.make_input_shard_1d(device_mesh=mesh)
    assert str(error.value) == several + "Of such a mesh give a 1-D mesh, mesh['tp']."
    assert plans.make_input_shard_1d(device_mesh=mesh["tp"]).axis == "tp"
    specs, _ = ftp.from_parallelize_plan(Model(), {"blk.w1": COLUMNS}, mesh=mesh["tp"])
    assert specs["blk.w1.weight"] == P("tp")


class OfDict(nn.Module):
    """Returns a dict."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        hidden = self.up(x)
        return {"hidden": hidden, "out": self.down(hidden)}


class AroundDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = OfDict()

    def forward(self, x):
        out = self.inner(x)
        return out["out"].square().sum() + out["hidden"].sin().sum()


def prepared(layouts, desired):
    return PrepareModuleOutput(output_layouts=layouts, desired_output_layouts=desired)


@pytest.mark.parametrize(
    ("style", "outputs"),
    [
        (prepared((Shard(-1), Partial()), (Replicate(), Replicate())), ((P(..., "tp"), P()), P())),
        (prepared({"hidden": Shard(-1)}, {"hidden": Replicate()}), {"hidden": (P(..., "tp"), P())}),
    ],
    ids=["in order", "by name"],
)
def test_outputs_in_a_dict_and_a_sum_that_stays_pending(style, outputs):
    model, x, mesh = (
        AroundDict().double(),
        torch.randn(2, 4, dtype=torch.float64),
        ftp.simulated_mesh((2,), ("tp",)),
    )
    plan = {
        "inner.up": COLUMNS,
        "inner.down": RowwiseParallel(output_layouts=Partial()),
        "inner": style,
    }
    specs, constraints = ftp.from_parallelize_plan(model, plan)
    assert constraints["inner"].outputs == outputs and constraints["inner.down"].outputs is None
    fn, params = ftp.functionalize(model, constraints=constraints)
    loss, grads = ftp.shard(fn, mesh, specs)(params, x)
    expected = model(x)
    torch.testing.assert_close(loss, expected.detach())
    for path, grad in zip(
        grads, torch.autograd.grad(expected, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(grads[path], grad)
    assert [c.op for c in unbucketed(ftp.shard(fn, mesh, specs).lower(params, x)).collectives] == [
        "all_reduce",
        "all_gather",
    ]


def test_outputs_in_a_dict_that_do_not_fit():
    def said(layouts):
        _, constraints = ftp.from_parallelize_plan(
            AroundDict(), {"inner": prepared(layouts, layouts)}
        )
        fn, params = ftp.functionalize(AroundDict(), constraints=constraints)
        with pytest.raises(InputError) as error:
            fn(params, torch.ones(2, 4))
        return str(error.value)

    where = "module 'inner' (OfDict), constrained by 'inner': "
    assert (
        said({"logits": Shard(0)})
        == where + "the constraint names output 'logits'; it returns 'hidden', 'out'."
    )
    assert (
        said((Shard(0), Shard(0), Shard(0)))
        == where + "the constraint has 3 outputs, but it returns a dict of 2."
    )
    assert said((Shard(0),)) == (
        where
        + "its output is a dict; P('tp') can pin a tensor only. Give ftp.Constraint(outputs=...) a"
        " spec or None for each."
    )
    fn, params = ftp.functionalize(
        AroundDict(), constraints={"inner.up": ftp.Constraint(outputs={"out": P()})}
    )
    with pytest.raises(
        InputError, match="the constraint names outputs, 'out', but it returns a Tensor"
    ):
        fn(params, torch.ones(2, 4))


def test_two_styles_that_disagree():
    message = error_of({"blk.w1": COLUMNS, "blk.*": RowwiseParallel()})
    assert message == (
        "'blk.w1': ColwiseParallel gives P('tp') for parameter 'blk.w1.weight', and 'blk.*':"
        " RowwiseParallel gives P(None, 'tp')."
        " Give both the same, or narrow one."
    )


def test_plans_of_several_calls_merge_into_the_one_wildcard_plan():
    model = titan.Transformer(titan.Config(layers=3))
    calls = {"": ftp.from_parallelize_plan(model, titan.root_plan(True, True))}
    for i, block in model.layers.items():
        calls[f"layers.{i}"] = ftp.from_parallelize_plan(block, titan.layer_plan(True))
    whole = ftp.from_parallelize_plan(model, titan.plan(True, True))
    merged = plans.merge(calls)
    assert merged == whole
    assert plans.merge(dict(reversed(calls.items()))) == whole
    assert str(merged[0]).count("ColwiseParallel") == str(whole[0]).count("ColwiseParallel") == 16
    with pytest.raises(
        SpecError,
        match=r"plans\['layers.0'\] gives P\(None, 'tp'\) for 'layers.0.feed_forward.w1.weight',"
        r" and one before",
    ):
        plans.merge(
            {
                "": whole,
                "layers.0": ftp.from_parallelize_plan(
                    model.layers["0"], {"feed_forward.w1": RowwiseParallel()}
                ),
            }
        )
    with pytest.raises(
        SpecError,
        match=r"plans\['a'\] is a dict; it must be the pair that from_parallelize_plan gives.",
    ):
        plans.merge({"a": {}})  # type: ignore[dict-item]
    with pytest.raises(
        SpecError,
        match=r"speaks of 'layer.0.attention.wq.weight', .*; the nearest is"
        r" 'layers.0.attention.wq.weight'",
    ):
        plans.merge({"": calls[""], "layer.0": calls["layers.0"]})
    with pytest.raises(SpecError, match="3 is no prefix"):
        plans.merge({3: whole})  # type: ignore[dict-item]


def test_a_tied_weight_takes_the_style_of_either_name():
    model = nn.ModuleDict({"emb": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["emb"].weight
    specs, _ = ftp.from_parallelize_plan(model, {"head": COLUMNS})
    assert dict(specs) == {"emb.weight": P("tp")}
    both = {"emb": RowwiseParallel(input_layouts=Replicate()), "head": COLUMNS}
    assert dict(ftp.from_parallelize_plan(model, both)[0]) == {"emb.weight": P("tp")}
    assert "parameter 'emb.weight'" in error_of({"emb": COLUMNS, "head": COLUMNS}, model)


def equal_to_one_device(model, plan, mesh, *batch, batch_specs=P(), call=None):
    """The step's program, after a check of its loss and gradients."""
    model = model.double()
    specs, constraints = ftp.from_parallelize_plan(model, plan, axis="tp")
    call = call or (lambda fn, p, *batch: fn(p, *batch).square().sum())
    fn, params = ftp.functionalize(model, constraints=constraints)
    plain, _ = ftp.functionalize(model)
    expected, value = torch.func.grad_and_value(lambda p: call(plain, p, *batch))(params)
    step = ftp.shard(lambda p, *batch: call(fn, p, *batch), mesh, specs, batch_specs=batch_specs)
    loss, grads = step(params, *batch)
    torch.testing.assert_close(loss, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-12)
    return step.lower(params, *batch)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_plan_of_one_axis_leaves_the_batch_cut_over_another(sequence):
    cfg = titan.Config(layers=1)
    torch.manual_seed(0)
    lowered = equal_to_one_device(
        titan.Transformer(cfg),
        titan.plan(sequence, True),
        ftp.simulated_mesh((2, 2), ("dp", "tp")),
        *titan.batch(cfg, batch=4),
        batch_specs=P("dp"),
        call=lambda fn, p, tokens, targets: titan.loss(fn)(p, tokens, targets),
    )
    assert {c.op for c in lowered.collectives if c.axes == ("dp",)} == {"all_reduce"}


def test_a_row_wise_output_of_shard_1_is_a_reduce_scatter():
    net = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False))
    plan = {"0": COLUMNS, "1": RowwiseParallel(output_layouts=Shard(1))}
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    lowered = equal_to_one_device(net, plan, ftp.simulated_mesh(2, "tp"), x)
    assert sorted(c.op for c in unbucketed(lowered).collectives if c.op != "all_reduce") == [
        "all_gather",
        "reduce_scatter",
    ]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        a, b = self.inner(x, x + 1, scale=x * 2)
        return a + b


class Inner(nn.Module):
    def forward(self, x, y, *, scale):
        return x * scale, y * scale


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (Shard(1), Replicate(), None),
            "the constraint has 3 inputs, but it is called with 2 arguments and the keywords"
            " 'scale'.",
        ),
        (
            (Shard(1),),
            "the constraint has 1 inputs, but it is called with 2 arguments and the keywords"
            " 'scale'.",
        ),
        ((Shard(1), ...), None),
        ((None, Shard(0)), None),
    ],
)
def test_layouts_for_another_number_of_inputs(given, message):
    desired = tuple(Replicate() if isinstance(layout, Shard) else layout for layout in given)
    style = PrepareModuleInput(input_layouts=given, desired_input_layouts=desired)
    _, constraints = ftp.from_parallelize_plan(Named(), {"inner": style})
    fn, params = ftp.functionalize(Named(), constraints=constraints)
    x = torch.ones(2, 2)
    if message is None:
        assert fn(params, x).equal(Named()(x))
    else:
        with pytest.raises(InputError) as error:
            fn(params, x)
        assert message in str(error.value)


def test_a_model_edited_to_its_local_head_count_is_refused_with_a_hint():
    cfg = titan.Config(layers=1)
    model = titan.Transformer(cfg)
    specs, constraints = ftp.from_parallelize_plan(model, titan.plan(False, False))
    fn, params = ftp.functionalize(model, constraints=constraints)
    batch = titan.batch(cfg)
    ftp.shard(titan.loss(fn), ftp.simulated_mesh(2, "tp"), specs).lower(params, *batch)
    model.layers["0"].attention.heads //= 2  # type: ignore[operator, union-attr]
    fn, params = ftp.functionalize(model, constraints=constraints)
    with pytest.raises(TraceError) as error:
        ftp.shard(titan.loss(fn), ftp.simulated_mesh(2, "tp"), specs).lower(params, *batch)
    assert "shape '[2, 8, 2, 4]' is invalid for input of size 256" in str(error.value)
    assert "edited for 2 ranks to view to its local head count" in str(error.value)


def attend(fn, p, x):
    return fn(p, x, x, x, need_weights=False)[0].square().sum()


@pytest.mark.parametrize("style", [plans.PairwiseParallel(), plans.PairwiseSequenceParallel()])
def test_multihead_attention_is_cut_by_heads(style):
    torch.manual_seed(0)
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    lowered = equal_to_one_device(
        nn.MultiheadAttention(8, 4), style, ftp.simulated_mesh(2, "tp"), x, call=attend
    )
    assert (
        max(
            c.global_shape[0]
            for c in unbucketed(lowered).collectives
            if len(c.global_shape) == 2 and c.global_shape[-1] == 8
        )
        <= 8
    )
    specs, _ = ftp.from_parallelize_plan(
        nn.MultiheadAttention(8, 4), {"out_proj": RowwiseParallel()}
    )
    assert specs["out_proj.weight"] == P(None, "tp")
    equal_to_one_device(
        nn.MultiheadAttention(8, 4),
        {"out_proj": RowwiseParallel()},
        ftp.simulated_mesh(2, "tp"),
        x,
        call=attend,
    )


def test_a_transformer_from_a_plan():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, dim_feedforward=12, dropout=0.0, batch_first=True)
    src, tgt = torch.randn(4, 2, 8, dtype=torch.float64), torch.randn(4, 3, 8, dtype=torch.float64)
    specs, _ = ftp.from_parallelize_plan(model, plans.PairwiseParallel())
    assert specs["decoder.layers.0.multihead_attn.in_proj_weight"] == P(units("tp", 4, pack=3))
    assert specs["encoder.layers.0.linear2.weight"] == P(None, "tp")
    mesh = ftp.simulated_mesh(2, "tp")
    # Each of five blocks reduces activations forward, and backward too, but for the first, whose
    # input needs no gradient.
    lowered = equal_to_one_device(model, plans.PairwiseParallel(), mesh, src, tgt)
    assert [c.op for c in unbucketed(lowered).collectives] == ["all_reduce"] * 9
    assert all(
        len(c.global_shape) == 3 or c.global_shape in ((8, 8), (12, 8))
        for c in unbucketed(lowered).collectives
    )
    lowered = equal_to_one_device(model.encoder, plans.PairwiseParallel(), mesh, src)
    assert {c.op for c in lowered.collectives} == {"all_reduce"}


def test_the_page_runs(capsys):
    page = (Path(__file__).resolve().parents[2] / "docs/from_parallelize_module.md").read_text()
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S):
        exec(compile(block, "docs/from_parallelize_module.md", "exec"), scope)
    assert re.search(
        r"layers.0.w2.weight +P\(None, 'tp'\) +\(16, 32\) +'layers.\*.w2': RowwiseParallel",
        capsys.readouterr().out,
    )
    plain, params = ftp.functionalize(scope["model"])
    assert plain(params, torch.ones(2, 3, 16)).shape == (2, 3, 8) and scope["loss"].isfinite()


def test_styles_and_specs_in_one_dict():
    """The more specific pattern wins between a style and a spec too."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = {"**": P("dp"), "0": ColwiseParallel(), "2": RowwiseParallel(), "2.bias": P("dp")}
    specs, constraints = ftp.from_parallelize_plan(model, plan)
    assert specs == {
        "0.weight": P("tp"),
        "0.bias": P("tp"),
        "2.weight": P(None, "tp"),
        "2.bias": P("dp"),
    }
    assert set(constraints) == {"0", "2"}
    assert error_of({"0": ColwiseParallel(), "**.weight": P("dp")}, model) == (
        "'0': ColwiseParallel gives P('tp') for parameter '0.weight', and '**.weight' gives"
        " P('dp'). Give both the same, or narrow one."
    )
    assert error_of({"0": P("tp")}, model) == (
        "plan['0'] is P('tp'), but '0' matches modules, and a P is a parameter's. Try '0.*', or"
        " give a style."
    )
    assert "matches no path of the parameters" in error_of({"0.wieght": P("tp")}, model)
