"""Wrong inputs across the public surface: an error of ftp's that says what to give instead."""

# pyright: reportArgumentType=false

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ftp
from ftp import P

MESH = ftp.simulated_mesh((2, 2), ("dp", "tp"))
X = torch.ones(4, 8)
PARAMS = {"up": torch.ones(8, 16), "down": torch.ones(16, 8)}
SPECS = {"up": P(None, "tp"), "down": P("tp")}
KEY = ftp.random.key(0)
MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x @ params["up"]) @ params["down"]).square().mean()


def shard(**options: Any) -> Any:
    return ftp.shard(loss, MESH, SPECS, **options)


def in_local(fn: Callable[..., Any]) -> Any:
    return ftp.local(fn, MESH, P("dp"), P("dp"))(X)


def lowered() -> ftp.Lowered:
    return shard(batch_specs=P("dp")).lower(PARAMS, X)


optim, random = ftp.optim, ftp.random
Wrong = tuple[Callable[[], Any], str, str]

STEPS: list[Wrong] = [
    (lambda: shard(compile="max-autotune"), "InputError", "compile is 'max-autotune', a str; give"),
    (lambda: shard(certify=1), "InputError", "certify is 1, an int; give True or False."),
    (lambda: shard(rng="key"), "InputError", "rng is 'key', a str; give True or False."),
    (
        lambda: shard(pipeline=ftp.Pipeline("dp", 2)),
        "SpecError",
        "Give the specs of pipeline.place(params, specs, mesh).",
    ),
    (
        lambda: shard(hardware=ftp.Hardware(flops=-1)),
        "InputError",
        "hardware's flops is -1; give a positive number.",
    ),
    (
        lambda: shard(hardware=ftp.Hardware(link=ftp.Link(bandwidth=0))),
        "InputError",
        "the bandwidth of hardware's 'link' is 0; give a positive number.",
    ),
    (
        lambda: shard(hardware=ftp.Hardware(links={"tp": 3})),
        "InputError",
        "hardware's link 'tp' is 3; give an ftp.Link(latency, bandwidth).",
    ),
    (lambda: P(0), "SpecError", "ftp.units(...), or a tuple of names."),
    (lambda: ftp.search(loss, PARAMS, MESH, P("q"), X), "SpecError", "has no axis 'q'"),
    (lambda: ftp.calibrate(device_type="tpu"), "MeshError", "measures 'cpu' or 'cuda'"),
    (lambda: ftp.plan(MODEL, {"0.weight": P("tp")}), "SpecError", "params is a module, Sequential"),
    (lambda: ftp.functionalize(PARAMS), "InputError", "..., a dict. A pure function needs none"),
]

PLACED: list[Wrong] = [
    (lambda: ftp.device_put(MODEL, MESH, P()), "InputError", "ftp.functionalize(module)."),
    (lambda: ftp.local_slice(MESH, P("tp"), 3), "SpecError", "from 0 on, not 3."),
    (lambda: ftp.local_slice(MESH, P("tp"), (-3,)), "SpecError", "from 0 on, not (-3,)."),
    (lambda: ftp.local_slice(MESH, (4,), P("tp")), "SpecError", "takes a spec such as P('dp')"),
    (
        lambda: ftp.spmd(lambda x: ftp.constrain(x, P("tp"), grad="yes"), MESH, P(), P())(X),
        "SpecError",
        "constrain has grad='yes'; give True or False.",
    ),
    (lambda: ftp.local(None, MESH), "SpecError", "local takes a function of shards, not None"),
    (lambda: in_local(lambda x: ftp.axis.ppermute(x, "dp", 1)), "InputError", "has perm=1; it"),
    (
        lambda: in_local(lambda x: ftp.axis.ppermute(x, "dp", [(0, 1.5)])),
        "InputError",
        "pairs (from, to) of ranks 0 to 1",
    ),
    (lambda: ftp.visualize(X, MESH, P("zz")), "SpecError", "has no axis 'zz'"),
]

READ: list[Wrong] = [
    (lambda: lowered().why(lowered().collectives[0]), "ReportError", "in collective.members"),
    (lambda: lowered().loads(), "ReportError", "loads takes the arguments of the step"),
    (lambda: lowered().diff(None), "ReportError", "diff takes another program"),
    (lambda: lowered().assert_collectives(none_over="pp"), "ReportError", "names 'pp', but the"),
    (lambda: ftp.certify(shard()), "InputError", "step.lower(*args) gives one"),
    (lambda: ftp.first_divergence(loss, PARAMS, X), "InputError", "takes a step, as ftp.shard"),
    (
        lambda: ftp.testing.assert_equal_to_one_device(loss, PARAMS),
        "InputError",
        "a function and a tuple of its arguments",
    ),
    (
        lambda: ftp.testing.check_rule(torch.ops.aten.mm.default, [(X, X)]),
        "RuleError",
        "samples of aten.mm.default as pairs (args, kwargs)",
    ),
]

OPTIMIZERS: list[Wrong] = [
    (lambda: optim.select(True, X, X), "InputError", "takes a 0-d bool tensor, not True"),
    (lambda: optim.clip_by_global_norm(PARAMS, "1"), "InputError", "max_norm is '1'; give a"),
    (
        lambda: optim.ema({"a": X}, {"b": X}, 0.9),
        "InputError",
        "missing key(s): ['a'], extra key(s): ['b'].",
    ),
    (
        lambda: optim.by_path({"**": torch.optim.SGD}),
        "InputError",
        "for '**'; give an optimizer",
    ),
    (
        lambda: optim.from_torch(torch.optim.SGD, groups={"**": 1}),
        "InputError",
        "groups has 1 for '**'; give a dict of options",
    ),
    (
        lambda: optim.schedules.sequence([optim.schedules.cosine(1e-3, 10)], [5]),
        "InputError",
        "1 schedules need 0 milestones between them",
    ),
]

DRAWS: list[Wrong] = [
    (lambda: random.dropout(KEY, torch.arange(4)), "InputError", "torch.int64 cannot hold"),
    (lambda: random.dropout(KEY, X, "0.1"), "InputError", "not p='0.1'."),
    (lambda: random.normal(KEY, "3"), "InputError", "takes a shape of sizes from 0 on, not '3'"),
    (lambda: random.permutation(KEY, 3.0), "InputError", "sizes from 0 on, not (3.0,)"),
    (lambda: random.randint(KEY, 0, 1.5), "InputError", "integers low < high, not 0 and 1.5"),
    (
        lambda: random.randint(KEY, 0, 1000, (2,), torch.int8),
        "InputError",
        "from 0 to 999, beyond torch.int8, -128 to 127.",
    ),
    (lambda: random.categorical(KEY, X, dim=5), "InputError", "has dim=5, but its logits have"),
    (lambda: random.megatron_compat("a", MESH), "InputError", "key takes an integer seed"),
    (
        lambda: ftp.static.while_loop(lambda x: x < 3, lambda x: x + 1, X, max_steps=2),
        "InputError",
        "while_loop takes a tuple of carried values, not Tensor.",
    ),
    (
        lambda: ftp.static.while_loop(
            lambda x: x < 3, lambda x: (x, x), (torch.ones(()),), max_steps=2
        ),
        "InputError",
        "body takes 1 values and gives 2.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), STEPS + PLACED + READ + OPTIMIZERS + DRAWS)
def test_says_what_to_give(call: Callable[[], Any], kind: str, text: str):
    with pytest.raises(ftp.FtpError) as raised:
        call()
    assert type(raised.value).__name__ == kind
    assert text in str(raised.value)
    assert len(str(raised.value)) < 600, "an error does not print the caller's tensors"


def test_a_rename_of_what_is_not_saved(tmp_path: Path):
    """A path with a typo would be written under its own name."""
    with pytest.raises(ftp.errors.InputError, match="rename names 'upp', which the tree does not"):
        ftp.save_safetensors(tmp_path / "a", PARAMS, MESH, P(), rename={"upp": "x"})
    with pytest.raises(ftp.errors.InputError, match="rename gives None for 'down'; it must give"):
        ftp.save_safetensors(tmp_path / "a", PARAMS, MESH, P(), rename=lambda path: None)
    assert not list(tmp_path.iterdir())


def test_a_constraint_on_outputs_says_what_the_module_returns():
    pin = {"0": ftp.Constraint(outputs=(P(), P()))}
    fn, params = ftp.functionalize(MODEL, constraints=pin)
    with pytest.raises(ftp.errors.InputError, match="but it returns a Tensor"):
        ftp.spmd(fn, MESH, P(), P())(params, X)


def test_what_is_no_wrong_input():
    """NumPy's numbers and arrays, draws of bools, and a pipeline of one rank."""
    sizes = [(2, 3), np.array([2, 3]), torch.tensor([2, 3]), iter((2, 3))]
    assert all(random.normal(KEY, shape).shape == (2, 3) for shape in sizes)
    assert random.uniform(KEY, np.int64(3)).shape == (3,)
    assert random.randint(KEY, 0, 2, (4,), dtype=torch.bool).dtype == torch.bool
    assert random.megatron_compat(np.int64(3), MESH).default.tolist() == [3, 0]
    assert ftp.spmd(lambda x: x * 2, MESH, P("dp"), check_inputs=np.bool_(True))(X).sum() == 64
    mesh = ftp.simulated_mesh((1, 2), ("pp", "tp"))
    step = ftp.shard(loss, mesh, SPECS, pipeline=ftp.Pipeline("pp", 2))
    torch.testing.assert_close(step(PARAMS, X)[0], loss(PARAMS, X))
