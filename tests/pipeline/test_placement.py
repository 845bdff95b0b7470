"""Stages of parameters: by cost, by pattern; and what every verb makes of them."""

from typing import Any

import optree
import pytest
import torch

import ftp
from ftp import P
from ftp.errors import MeshError, SpecError
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.spec import staged
from tests.support.staged_models import Model, plan_of

MESH = ftp.AbstractMesh((2, 2), ("pp", "tp"))


def stage_of(spec: P) -> int:
    entry = staged(spec)
    assert entry is not None
    return entry.stage


def stages_of(specs):
    return [[stage_of(s) for s in layer.values()] for layer in specs["layers"]]


def test_layers_of_equal_cost():
    params = Model(6).params()
    specs = ftp.Pipeline("pp", 2).place(params, P(), ftp.AbstractMesh((3,), ("pp",)))
    assert stages_of(specs) == [[0] * 4] * 2 + [[1] * 4] * 2 + [[2] * 4] * 2
    assert stage_of(specs["emb"]) == 0 and stage_of(specs["head"]) == 2


def test_a_heavy_head_takes_layers_from_its_stage():
    layers = [{"w": torch.empty(8, 8)} for _ in range(6)]
    params = {"emb": torch.empty(99, 8), "layers": layers, "head": torch.empty(16, 8)}
    specs = ftp.Pipeline("pp", 2).place(params, None, ftp.AbstractMesh((2,), ("pp",)))
    assert stages_of(specs) == [[0]] * 4 + [[1]] * 2


class Tied(torch.nn.Module):
    """A model of ``body`` whose table has two names."""

    def __init__(self, table: str, other: str):
        super().__init__()
        tables = {name: torch.nn.Embedding(16, 8) for name in (table, other)}
        tables[other].weight = tables[table].weight
        layers = (torch.nn.Linear(8, 8, bias=False) for _ in range(6))
        for path, module in (
            (table, tables[table]),
            ("body.layers", torch.nn.ModuleList(layers)),
            (other, tables[other]),
        ):
            owner, _, name = path.rpartition(".")
            if owner and owner not in self._modules:
                self.add_module(owner, torch.nn.Module())
            self.get_submodule(owner).add_module(name, module)


@pytest.mark.parametrize(
    ("table", "other", "inside", "layers"),
    [
        ("body.emb", "head", False, (4, 2)),
        ("body.emb", "head", True, (4, 2)),  # with a prefix that all parameters have
        ("shared", "body.emb", False, (3, 3)),  # looked up twice, as T5's
    ],
)
def test_a_tied_head_takes_layers_from_the_last_stage(table, other, inside, layers):
    model = Tied(table, other)
    _, params = ftp.functionalize(torch.nn.ModuleDict({"model": model}) if inside else model)
    specs = ftp.Pipeline("pp", 2).place(params, P(), ftp.AbstractMesh((2,), ("pp",)))
    stages = {name: stage_of(spec) for name, spec in specs.items()}
    held = [stage for path, stage in stages.items() if "layers" in path]
    assert held == [0] * layers[0] + [1] * layers[1]
    assert [stage for path, stage in stages.items() if "layers" not in path] == [0]


def test_stages_by_pattern():
    params = Model(3).params()
    pipe = ftp.Pipeline("pp", 2, stages=[["emb", "layers.0.*"], ["layers.[12].*", "norm", "head"]])
    specs = pipe.place(
        params, plan_of(params, lambda name: P("tp") if name == "emb" else P()), MESH
    )
    assert repr(specs["emb"]) == "P((stage('pp', 0), 'tp'))"
    assert stages_of(specs) == [[0] * 4, [1] * 4, [1] * 4]


@pytest.mark.parametrize(
    ("pipe", "specs", "error", "text"),
    [
        (ftp.Pipeline("dp", 2), P(), MeshError, "over axis 'dp', but the mesh is"),
        (ftp.Pipeline("pp", 2), P(None, "pp"), SpecError, "which cuts a dim over 'pp'"),
        (
            ftp.Pipeline("pp", 2, "gpipe", chunks=2),
            P(),
            SpecError,
            "3 numbered layers for 4 stages",
        ),
        (
            ftp.Pipeline("pp", 2, stages=[["**"]]),
            P(),
            SpecError,
            "1 lists of patterns; the pipeline",
        ),
        (ftp.Pipeline("pp", 2, stages=[["**"], ["mlp"]]), P(), SpecError, "'mlp' matches no path"),
        (
            ftp.Pipeline("pp", 2, stages=[["emb"], ["norm"]]),
            P(),
            SpecError,
            r"\['up'\] matches no p",
        ),
    ],
)
def test_errors_of_place(pipe, specs, error, text):
    with pytest.raises(error, match=text):
        pipe.place(Model(3).params(), specs, MESH)


def test_a_rank_holds_its_stages_alone():
    spec = ftp.Pipeline("pp", 1).place({"layers": [torch.empty(5, 3)] * 2}, P("tp"), MESH)["layers"]
    held = [
        [local_shape(s, (5, 3), MESH.axes, {"pp": pp, "tp": 1}) for s in spec] for pp in range(2)
    ]
    assert held == [[(2, 3), (0, 3)], [(0, 3), (2, 3)]]


@pytest.mark.parametrize(
    ("of", "on", "text"),
    [
        (4, 2, r"\['head'\] has spec P\(stage\('pp', 3\)\), but the pipeline has 2 stages on 2 r"),
        (2, 4, "No parameter is at stage 2 of the pipeline's 4 stages on 4 ranks of 'pp'"),
    ],
)
def test_specs_of_another_number_of_stages(of, on, text):
    """Placed for one mesh, as a checkpoint was, and given to a step on another."""
    model, pipe = Model(4), ftp.Pipeline("pp", 2)
    params = model.params()
    placed, mesh = (ftp.AbstractMesh((n,), ("pp",)) for n in (of, on))
    step = ftp.shard(model.loss, mesh, pipe.place(params, P(), placed), pipeline=pipe)
    with pytest.raises(SpecError, match=text):
        step.lower(params, *model.batch(4))
    step = ftp.shard(model.loss, mesh, pipe.place(params, P(), mesh), pipeline=pipe)
    step.lower(params, *model.batch(4))


def test_verbs_take_placed_specs(tmp_path):
    model, mesh = Model(2, scaled=True), ftp.simulated_mesh((2, 2), ("pp", "tp"))
    params = model.params()
    specs = ftp.Pipeline("pp", 2).place(params, P(), mesh)
    placed = ftp.device_put(params, mesh, specs)
    ftp.save(tmp_path / "saved", placed, mesh, specs, step=3)
    back = ftp.load(tmp_path / "saved", params, ftp.simulated_mesh((4,), ("dp",)), P())
    moved = ftp.reshard(placed, mesh, specs, P())
    trees: list[Any] = [params, back, moved]
    for a, b, c in zip(*map(optree.tree_leaves, trees), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert ftp.specs_of(placed)["layers"][1]["up"] == specs["layers"][1]["up"]
