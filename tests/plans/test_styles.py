"""What each style of parallelize_module says of a module, and what is refused."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import ftp
from ftp import P, plans, units
from ftp.errors import FtpError, InputError, MeshError, SpecError
from ftp.ops.constrain import Gradient

LAST = P(..., "tp")
linear, table = nn.Linear(4, 6), nn.Embedding(6, 4)


def read(style, module: nn.Module = linear, **options) -> Any:
    specs, constraints = ftp.from_parallelize_plan(module, style, **options)
    return dict(specs), constraints.get("")


def error_of(function, kind: type[FtpError] = SpecError):
    with pytest.raises(kind) as error:
        function()
    return str(error.value)


@pytest.mark.parametrize(
    ("style", "module", "specs", "inputs", "outputs"),
    [
        (ColwiseParallel(), linear, {"weight": P("tp"), "bias": P("tp")}, P(), LAST),
        (ColwiseParallel(), table, {"weight": P(None, "tp")}, P(), LAST),
        (
            ColwiseParallel(input_layouts=Shard(1)),
            table,
            {"weight": P(None, "tp")},
            (P(None, "tp"), P()),
            LAST,
        ),
        (ColwiseParallel(output_layouts=Replicate()), table, {"weight": P(None, "tp")}, P(), P()),
        (RowwiseParallel(), linear, {"weight": P(None, "tp"), "bias": P()}, LAST, P()),
        (RowwiseParallel(input_layouts=Replicate()), table, {"weight": P("tp")}, P(), P()),
        (RowwiseParallel(), table, {"weight": P("tp")}, (LAST, P()), P()),
        (
            RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            nn.Linear(4, 6, bias=False),
            {"weight": P(None, "tp")},
            (P(), LAST),
            P(None, "tp"),
        ),
        (
            RowwiseParallel(output_layouts=Shard(0)),
            linear,
            {"weight": P(None, "tp"), "bias": P()},
            LAST,
            ((Gradient(P()), P("tp")),),
        ),
        (
            SequenceParallel(),
            nn.LayerNorm(4),
            {"weight": P(), "bias": P()},
            P(None, "tp"),
            P(None, "tp"),
        ),
        (
            SequenceParallel(sequence_dim=-2),
            nn.LayerNorm(4),
            {"weight": P(), "bias": P()},
            P(..., "tp", None),
            P(..., "tp", None),
        ),
    ],
)
def test_styles_of_a_module_with_one_input(style, module, specs, inputs, outputs):
    got, constraint = read(style, module)
    assert got == specs
    assert (constraint.inputs, constraint.outputs) == ((inputs, ...), outputs)
    assert (constraint.axes, constraint.kwargs, constraint.grad) == (("tp",), None, "dtensor")


def test_prepared_inputs_and_outputs():
    style = PrepareModuleInput(
        input_layouts=(Shard(1), None, Replicate()),
        desired_input_layouts=(Replicate(), None, Replicate()),
        input_kwarg_layouts={"mask": Shard(0), "other": Replicate()},
        desired_input_kwarg_layouts={"mask": Replicate(), "other": Replicate()},
    )
    _, constraint = read(style)
    assert constraint.inputs == ((P(None, "tp"), P()), None, P())
    assert constraint.kwargs == {"mask": (P("tp"), P()), "other": P()}
    assert constraint.outputs is None
    _, constraint = read(
        PrepareModuleInput(input_layouts=(Shard(0), ...), desired_input_layouts=(Replicate(), ...))
    )  # type: ignore[arg-type]
    assert constraint.inputs == ((P("tp"), P()), ...)
    _, constraint = read(
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    )
    assert constraint.outputs == ((P(), P("tp")),)
    _, constraint = read(
        PrepareModuleOutput(
            output_layouts=(Replicate(), None), desired_output_layouts=(Replicate(), None)
        )
    )  # type: ignore[arg-type]
    assert constraint.outputs == (P(), None)
    style = PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        output_layouts=Partial(),
        desired_output_layouts=Shard(1),
    )
    _, constraint = read(style)
    assert (constraint.inputs, constraint.outputs) == (((P(None, "tp"), P()),), P(None, "tp"))


def test_a_layout_that_no_spec_states():
    assert error_of(lambda: read(ColwiseParallel(output_layouts=Partial()))).startswith(
        "plan['']: ColwiseParallel: output_layouts: Partial(sum)"
    )
    assert "must be of one length" in error_of(
        lambda: read(
            PrepareModuleInput(
                input_layouts=(Shard(0), ...), desired_input_layouts=(Replicate(), Replicate())
            )
        )  # type: ignore[arg-type]
    )


class Float8ColwiseParallel(ColwiseParallel):
    pass


class Own(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


@pytest.mark.parametrize(
    ("style", "module", "message"),
    [
        (
            Float8ColwiseParallel(),
            linear,
            "plan['']: Float8ColwiseParallel is a subclass of ColwiseParallel",
        ),
        (Own(), linear, "plan['']: Own is no style that is known"),
        (
            ColwiseParallel,
            linear,
            "plan['']: ColwiseParallel is a class; give an instance, ColwiseParallel().",
        ),
        ({"": "colwise"}, linear, "plan['']: 'colwise' is a str; it must be a style"),
        ({"": {"": ColwiseParallel()}}, linear, "Join the two paths by '.'."),
        (None, linear, "The plan is None. Give a style or a dict"),
        ("colwise", linear, "The plan is 'colwise', a str; it must be a style or a dict"),
        ([ColwiseParallel()], linear, "a list; it must be a style or a dict"),
        (ftp.simulated_mesh(2, "tp"), linear, "A mesh is given as mesh=."),
        (
            ColwiseParallel(),
            nn.LayerNorm(4),
            "ColwiseParallel: it shards nn.Linear and nn.Embedding, not a LayerNorm.",
        ),
        (
            RowwiseParallel(),
            nn.Sequential(nn.Linear(2, 2)),
            "not a Sequential. Style what is in it: '0'.",
        ),
        (
            ColwiseParallel(),
            nn.MultiheadAttention(4, 2),
            "ftp.plans.PairwiseParallel() cuts its heads.",
        ),
        (
            lambda path, module: {"weight": P()},
            linear,
            "a style gives a pair of specs and constraints",
        ),
        (
            lambda path, module: ({"wieght": P()}, None),
            linear,
            "names 'wieght', which is no path of it. It has 'weight', 'bias'.",
        ),
        (lambda path, module: ({"weight": "tp"}, None), linear, "gives 'tp', a str, for 'weight'."),
        (
            plans.PairwiseParallel(),
            nn.Sequential(nn.ReLU()),
            "PairwiseParallel pairs the nn.Linear among a module's children",
        ),
        (
            plans.PairwiseParallel(),
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))),
            "'2' of '0', '1', '2' is left over",
        ),
    ],
)
def test_refused(style, module, message):
    assert message in error_of(lambda: read(style, module))


def test_a_style_of_ones_own_may_name_paths_from_the_model_or_from_the_module():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))})

    def whole(path, module):
        return {f"{path}.0.weight": P("tp")}, {
            f"{path}.0": ftp.Constraint(outputs=P(None, "tp")),
            path: P(),
        }

    def relative(path, module):
        return {"0.weight": P("tp")}, {"0": ftp.Constraint(outputs=P(None, "tp")), "": P()}

    found = [ftp.from_parallelize_plan(model, {"a": style}) for style in (whole, relative)]
    assert found[0] == found[1]
    assert found[0][0]["a.0.weight"] == P("tp")
    assert found[0][1] == {
        "a.0": ftp.Constraint(outputs=P(None, "tp")),
        "a": ftp.Constraint(outputs=P()),
    }


def test_the_axis():
    two = ftp.simulated_mesh((2, 4), ("dp", "model"))
    assert read(ColwiseParallel(), axis="model")[0]["weight"] == P("model")
    assert read(ColwiseParallel(), mesh=ftp.simulated_mesh(4, "mp"))[0]["weight"] == P("mp")
    assert read(ColwiseParallel(), mesh=two, axis="model")[0]["weight"] == P("model")
    assert "Name it, as axis='model'" in error_of(
        lambda: read(ColwiseParallel(), mesh=two), MeshError
    )
    assert "no axis 'tp'" in error_of(
        lambda: read(ColwiseParallel(), mesh=two, axis="tp"), MeshError
    )
    with pytest.warns(DeprecationWarning, match="tp_mesh_dim"):
        assert read(ColwiseParallel(), mesh=two, tp_mesh_dim=1)[0]["weight"] == P("model")
    with pytest.warns(DeprecationWarning, match="tp_mesh_dim"):
        assert "the mesh has the axes 'dp', 'model'" in error_of(
            lambda: read(ColwiseParallel(), mesh=two, tp_mesh_dim=2), MeshError
        )


def test_helpers_are_named_constraints():
    assert plans.make_input_shard_1d(dim=1).specs("tp") == (P(None, "tp"),)
    assert plans.make_input_shard_1d_last_dim.specs("tp") == (LAST,)
    assert plans.make_input_reshard_replicate.specs("tp") == (P("tp"), P())
    assert plans.make_output_reshard_tensor.specs("tp") == (P("tp"),)
    assert (
        plans.make_output_tensor.specs("tp") == plans.make_output_replicate_1d.specs("tp") == (P(),)
    )
    assert plans.make_sharded_output_tensor.specs("tp") == ()
    assert plans.make_output_shard_1d(device_mesh=ftp.simulated_mesh(2, "mp"), dim=1).axis == "mp"
    x = torch.ones(2, 4)
    assert plans.make_input_shard_1d(x, ftp.simulated_mesh(2, "mp"), dim=1).equal(x)
    assert "takes a tensor, not 'x', a str" in error_of(
        lambda: plans.make_input_shard_1d("x"), InputError
    )
    assert "give a 1-D mesh" in error_of(
        lambda: plans.make_input_shard_1d(x, ftp.simulated_mesh((2, 2), ("a", "b"))), MeshError
    )
    assert "it takes no dim=" in error_of(lambda: plans.make_input_replicate_1d(dim=1))
    assert "dim= is an int" in error_of(lambda: plans.make_input_shard_1d(dim=True))
    text: Any = "1"
    assert "dim= is an int" in error_of(lambda: plans.make_input_shard_1d(dim=text))


def test_a_helper_inside_a_function_moves_a_tensor():
    mesh = ftp.simulated_mesh(2, "tp")
    step = ftp.shard(
        lambda p, x: plans.make_input_shard_1d(x * p, mesh, dim=1).square().sum(), mesh, P()
    )
    lowered = step.lower(torch.ones(4), torch.ones(3, 4))
    assert [c.op for c in lowered.collectives].count("all_reduce") >= 1
    assert "over tp" in str(lowered)


@pytest.mark.parametrize(
    "style",
    [
        plans.PairwiseParallel,
        plans.PairwiseSequenceParallel,
        plans.older.ColwiseParallel,
        plans.older.RowwiseParallel,
    ],
)
def test_prepare_arguments_take_helpers_and_nothing_else(style):
    for given in (
        Replicate(),
        lambda x, mesh: x,
        partial(plans.make_input_shard_1d, dim=1),
        P(),
        plans.make_output_tensor,
    ):
        message = error_of(lambda given=given: style(_prepare_input=given))
        assert re.match(
            rf"{style.__name__}\(_prepare_input=.*: it must be one of make_input_replicate_1d,"
            " make_input_shard_1d,",
            message,
            re.S,
        )
    assert "must be one of make_output_replicate_1d" in error_of(
        lambda: style(_prepare_output=plans.make_input_shard_1d)
    )


def test_older_styles():
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    specs, constraints = ftp.from_parallelize_plan(mlp, plans.PairwiseParallel())
    assert specs == {
        "0.weight": P("tp"),
        "0.bias": P("tp"),
        "2.weight": P(None, "tp"),
        "2.bias": P(),
    }
    assert (constraints["0"].inputs, constraints["2"].outputs) == ((P(), ...), P())
    specs_too, constraints = ftp.from_parallelize_plan(mlp, plans.PairwiseSequenceParallel())
    assert specs_too == specs
    assert (constraints["0"].inputs, constraints["2"].outputs) == (
        ((P("tp"), P()), ...),
        ((Gradient(P()), P("tp")),),
    )
    specs, constraints = ftp.from_parallelize_plan(
        nn.MultiheadAttention(6, 3), plans.PairwiseParallel()
    )
    packed = P(units("tp", 2, pack=3))
    assert specs == {
        "in_proj_weight": packed,
        "in_proj_bias": packed,
        "out_proj.weight": P(None, units("tp", 2)),
        "out_proj.bias": P(),
    }
    assert constraints[""].inputs == (P(), P(), P(), ...) and constraints[""].outputs == (P(), ...)
