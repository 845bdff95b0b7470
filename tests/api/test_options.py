"""The page on options: its examples; every pair of options works, or is refused with a reason."""

import enum
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from few_or_many import slow_unless
from pages import run_examples
from torch import nn

import ftp
from ftp import P
from ftp.errors import FtpError

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
OPTIONS = {
    "compile": True,
    "bucket": False,
    "certify": True,
    "strict": True,
    "explicit": True,
    "chunks": 2,
    "cuda_graph": True,
    "async_tp": True,
    "donate": (0,),
    "hardware": "h100",
    "reduce_dtype": torch.bfloat16,
    "remat": {"up": "nothing"},
    "dynamic_shapes": {1: torch.export.Dim("S", max=64)},
}


def test_the_page():
    run_examples("options.md")
    listed = re.findall(r"^\| `(\w+)[=`]", PAGE.read_text(), re.M)
    assert set(listed) == set(OPTIONS)


def refused_on_the_page() -> set[frozenset[str]]:
    return {
        frozenset(pair)
        for pair in re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.read_text(), re.M)
        if set(pair) <= set(OPTIONS)
    }


class Block(nn.Module):
    """An MLP between constraints, as sequence parallelism has it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        h = ftp.constrain(x, P(None, "tp"), axes=("tp",))
        h = ftp.constrain(h, P("dp", None, None))
        h = self.down(torch.relu(self.up(h)))
        return ftp.constrain(h, P(None, "tp"), axes=("tp",)).square().mean()


def made(mesh, remat=None, **options):
    """A step on two axes, and its arguments."""
    torch.manual_seed(0)
    fn, params = ftp.functionalize(Block(), remat=remat)
    specs = {"up.weight": P("tp"), "down.weight": P(None, "tp")}
    step = ftp.shard(fn, mesh, specs, batch_specs=P("dp"), **options)
    return step, {k: v.clone() for k, v in params.items()}, torch.randn(4, 4, 8)


@pytest.mark.cases_by_default(26)
@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids=" × ".join)
def test_every_pair_works_or_is_refused(pair):
    given = {name: OPTIONS[name] for name in pair}
    if frozenset(pair) in refused_on_the_page():
        with pytest.raises(FtpError) as e:
            made(ftp.simulated_mesh((2, 2), ("dp", "tp")), **given)
        assert all(name in str(e.value) for name in pair), e.value
        return
    if "cuda_graph" in pair:  # recorded on a GPU; planned anywhere
        step, params, x = made(ftp.AbstractMesh((2, 2), ("dp", "tp"), "cuda"), **given)
        params = {k: v.to("meta") for k, v in params.items()}
        assert len(step.lower(params, x.to("meta")).collectives) > 4
        return
    step, params, x = made(ftp.simulated_mesh((2, 2), ("dp", "tp")), **given)
    check(step, params, x, 2**-7 if "reduce_dtype" in pair else 1e-5)


def check(step, params, x, bound):
    """Checks that loss and gradients are what one device computes."""
    want_grads, want = torch.func.grad_and_value(
        lambda p: (torch.relu(x @ p["up.weight"].T) @ p["down.weight"].T).square().mean()
    )(params)
    want_grads = {k: v.clone() for k, v in want_grads.items()}
    loss, grads = step(params, x)
    assert abs(float(loss - want)) <= 1e-5 * abs(float(want))
    for name, grad in grads.items():
        assert (grad - want_grads[name]).abs().max() <= bound * want_grads[name].abs().max(), name


FEW = {name: OPTIONS[name] for name in OPTIONS if name not in ("dynamic_shapes", "cuda_graph")}


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("chunks", "async_tp"), FEW))
def test_one_plan_serves_all_sizes_beside_each_option(name):
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    given = {name: OPTIONS[name], "dynamic_shapes": OPTIONS["dynamic_shapes"]}
    step, params, _ = made(mesh, **given)
    for size in (4, 7, 6, 9, 12):
        x, own = torch.randn(4, size, 8), {k: v.clone() for k, v in params.items()}
        check(step, own, x, 2**-7 if name == "reduce_dtype" else 1e-5)
    assert step.shapes.traces == 1 and step.shapes.plans <= 3 and not step.shapes.one_by_one


def test_each_refusal_says_why_and_nothing_else_is_on_the_page():
    assert refused_on_the_page() == {
        frozenset({"chunks", "async_tp"}),
        frozenset({"certify", "reduce_dtype"}),
    }


class Count(enum.IntEnum):
    ONE = 1
    TWO = 2


def test_counts_of_other_kinds_of_ints():
    x = torch.arange(12, dtype=torch.float64).reshape(4, 3)  # sums in any order are exact
    mesh = ftp.simulated_mesh((2,), ("tp",))

    def made(**options):
        return ftp.spmd(lambda w, x: (w * 2, (x @ w).sum()), mesh, (P(), P("tp")), **options)

    w = torch.ones(3, dtype=torch.float64)
    for given in (np.int64(2), Count.TWO):
        step = made(chunks=given, programs=given, prefetch=given, donate=[np.int32(0)])
        assert step(w.clone(), x)[1] == x.sum()
    for wrong in (True, 2.0, "2", np.float64(2), np.bool_(True)):
        for name in ("chunks", "programs", "prefetch", "donate"):
            with pytest.raises(FtpError, match=f"{name} is"):
                made(**{name: wrong if name != "donate" else (wrong,)})
