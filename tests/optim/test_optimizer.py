"""Optimizers against torch.optim over twenty steps, unsharded and cut; schedules against
torch.optim.lr_scheduler.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from few_or_many import slow_after
from plan_reshards import unbucketed
from torch.optim import lr_scheduler

import ftp
from ftp import P
from ftp.optim import schedules

STEPS = 20
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "SGD, dampened": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    ),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "RMSprop, centered": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "Adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
    ),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 5}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "Muon": (torch.optim.Muon, {"lr": 1e-2}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "Adam, fused, amsgrad": (
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True, "fused": True},
    ),
    "SGD, fused": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "fused": True}),
    "SGD, fused, dampened": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "fused": True},
    ),
    "Adagrad, fused": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "fused": True},
    ),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
}
SPECS = {"up": P("tp"), "down": P(None, "tp"), "scale": P("tp")}


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's own counters and Muon's products in float64 too, so that nothing hides behind
    rounding.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def parameters(cls: type = torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Sizes that do not divide; Muon takes matrices only."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"up": (7, 4), "down": (4, 5)} | ({} if cls is torch.optim.Muon else {"scale": (5,)})
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gradients(params: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}
        for _ in range(STEPS)
    ]


def of_torch(
    opt: torch.optim.Optimizer, leaves: dict[str, torch.Tensor], scheduler: Any = None
) -> dict[str, torch.Tensor]:
    for grads in gradients(leaves):
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        opt.step()
        if scheduler is not None:
            scheduler.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def leaves_of(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: p.clone().requires_grad_() for name, p in params.items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.cases_by_default(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "scheduled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["cut", "scheduled"]
)
def test_as_torch(name: str, scheduled: bool):
    cls, options = OPTIMIZERS[name]
    params, leaves = parameters(cls), leaves_of(parameters(cls))
    theirs = cls(list(leaves.values()), **options)
    expected = of_torch(
        theirs, leaves, lr_scheduler.ExponentialLR(theirs, 0.9) if scheduled else None
    )
    rate: Any = schedules.exponential(options["lr"], 0.9) if scheduled else options["lr"]
    opt = ftp.optim.from_torch(cls, **{**options, "lr": rate})
    state = opt.init(params)
    specs = {key: SPECS[key] for key in params}
    update = (
        opt.update
        if scheduled
        else ftp.spmd(opt.update, ftp.simulated_mesh((2,), ("tp",)), (specs,) * 3, (specs,) * 2)
    )
    for grads in gradients(params):
        params, state = update(grads, state, params)
    same(params, expected)


@pytest.mark.parametrize("how", ["number", "schedule", "by torch.vmap"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_of_zero_leaves_what_has_no_gradient(name: str, how: str):
    """As at the first step of a warm-up: rows of an embedding that no token has read yet."""
    cls, options = OPTIMIZERS[name]
    params, leaves = parameters(cls), leaves_of(parameters(cls))
    theirs = cls(list(leaves.values()), **{**options, "lr": 0.0})
    rate: Any = schedules.linear(options["lr"], 10, start=0.0)
    opt = ftp.optim.from_torch(cls, **{**options, "lr": 0.0 if how == "number" else rate})
    grads = gradients(params)[0]
    for grad in grads.values():
        grad[::2] = 0
    for key, leaf in leaves.items():
        leaf.grad = grads[key]
    theirs.step()
    update, state = opt.update, opt.init(params)
    if how == "by torch.vmap":
        trees: Any = (
            {k: p[None] for k, p in params.items()},
            {k: g[None] for k, g in grads.items()},
        )
        state = torch.vmap(opt.init)(trees[0])
        new, _ = torch.vmap(update)(trees[1], state, trees[0])
        new = {k: p[0] for k, p in new.items()}
    else:
        new, _ = update(grads, state, params)
    same(new, {k: leaf.detach() for k, leaf in leaves.items()})
    if issubclass(cls, torch.optim.Adam):
        assert all(torch.equal(new[k], p) for k, p in params.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_a_rate_of_another_dtype_than_float(dtype: torch.dtype):
    """A schedule's, whose dtype does not hold Adam's epsilon."""
    x, grad = torch.linspace(1, 2, 6), torch.tensor([0.0, 1, 0, -1, 0, 2])
    leaf = x.clone().requires_grad_()
    theirs = torch.optim.AdamW([leaf])
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=lambda step: (step / 2).to(dtype))
    new, state = x, opt.init(x)
    for step in range(3):
        theirs.param_groups[0]["lr"] = float(torch.tensor(step / 2).to(dtype))
        leaf.grad = grad.clone()
        theirs.step()
        new, state = opt.update(grad, state, new)
    torch.testing.assert_close(new, leaf.detach())


@pytest.mark.cases_by_default(4)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Muon"])
def test_a_scalar_parameter(name: str):
    """Its moments have the shape of a step counter, and the dtype of the parameter."""
    torch.set_default_dtype(torch.float32)
    cls, options = OPTIMIZERS[name]
    due = {
        "temperature": torch.tensor(0.7),
        "wide": torch.tensor(0.7, dtype=torch.float64),
        "w": torch.tensor([0.2, -0.3]),
    }
    theirs, ours = cls(due.values(), **options), ftp.optim.from_torch(cls, **options)
    params = {k: p.clone() for k, p in due.items()}
    state = ours.init(params)
    assert state["temperature"].like == state["w"].like
    for factor in (1.0, -2.0, 0.5):
        for p in due.values():
            p.grad = p * factor
        params, state = ours.update({k: p * factor for k, p in params.items()}, state, params)
        theirs.step()
    torch.testing.assert_close(params, due)


REFUSED = {
    torch.optim.LBFGS: "torch.optim.LBFGS cannot be made pure: it evaluates the loss several times"
    " in one step",
    torch.optim.SparseAdam: "torch.optim.SparseAdam cannot be made pure: it takes sparse gradients",
}


@pytest.mark.parametrize("cls", REFUSED)
def test_refused_by_name(cls: type[torch.optim.Optimizer]):
    with pytest.raises(ftp.FtpError, match=REFUSED[cls]):
        ftp.optim.from_torch(cls, lr=0.1)


class OwnSigns(torch.optim.Optimizer):
    """Somebody's own: a counter that is a number, and a slot that begins as the parameter."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"], state["anchor"] = 0, p.detach().clone()
                state["count"] += 1
                p.add_(p.grad.sign(), alpha=-group["lr"] / state["count"])
                p.lerp_(state["anchor"], 0.01)


def test_a_class_of_ones_own():
    params, leaves = parameters(), leaves_of(parameters())
    expected = of_torch(OwnSigns(list(leaves.values())), leaves)
    opt = ftp.optim.from_torch(OwnSigns)
    state = opt.init(params)
    for grads in gradients(params):
        params, state = opt.update(grads, state, params)
    same(params, expected)


class OwnRows(torch.optim.Optimizer):
    """One second moment a row, made on the default device."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, of_rows = self.state[p], p.grad.flatten(1).square().mean(1)
                if not state:
                    state["rows"] = torch.zeros(p.shape[0])
                state["rows"].lerp_(of_rows, 0.1)
                p.sub_(group["lr"] * p.grad / (state["rows"].sqrt()[:, None] + 1e-3))


def test_a_class_whose_state_is_on_the_default_device():
    """Specs of the state are those of one on meta."""
    mesh, params = ftp.simulated_mesh((2,), ("tp",)), parameters(torch.optim.Muon)
    expected = of_torch(OwnRows(list((leaves := leaves_of(params)).values())), leaves)
    opt, specs = ftp.optim.from_torch(OwnRows), {"up": P("tp"), "down": P(None, "tp")}
    state, state_specs = opt.init(params), opt.specs(params, specs)
    assert state_specs["up"] == {"rows": P()}
    step = ftp.spmd(opt.update, mesh, (specs, state_specs, specs), (specs, state_specs))
    for grads in gradients(params):
        params, state = step(grads, state, params)
    same(params, expected)


def test_state_that_torchs_optimizer_holds():
    """A run goes on from the state of torch.optim, in dicts as they are."""
    params, leaves = parameters(), leaves_of(parameters())
    theirs = torch.optim.AdamW(leaves.values(), lr=1e-2)
    of_torch(theirs, leaves)
    now = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    state = {
        name: {slot: x.clone() for slot, x in theirs.state[leaf].items()}
        for name, leaf in leaves.items()
    }
    expected = of_torch(theirs, leaves)
    mesh, opt = ftp.simulated_mesh((2,), ("tp",)), ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state_specs = opt.specs(params, SPECS)
    step = ftp.spmd(opt.update, mesh, (SPECS, state_specs, SPECS), (SPECS, state_specs))
    for grads in gradients(params):
        now, state = step(grads, state, now)
    same(now, expected)
    assert type(state["up"]) is dict
    del state["up"]["step"]
    with pytest.raises(ftp.FtpError, match=r"state\['up'\] is \['exp_avg', 'exp_avg_sq'\]; AdamW"):
        opt.update(gradients(params)[0], state, now)


class OwnMomentum(torch.optim.Optimizer):
    """No counter; ``how`` its momentum comes to be, or what beside it changes."""

    def __init__(self, params: Any, lr: float = 0.1, how: str = "update"):
        super().__init__(params, {"lr": lr, "how": how})
        self.steps, self.decay = 0, 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            how, scale = group["how"], 1.0
            if how == "attribute":
                self.steps += 1
                scale = self.steps
            elif how == "group":
                group["steps"] = scale = group.get("steps", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if how == "setdefault":
                    state.setdefault("momentum", torch.zeros_like(p))
                elif how == "first" and not state:
                    state["momentum"] = 10 * p.grad
                elif how == "flag" and not state.get("is_ready"):
                    state["momentum"], state["is_ready"] = torch.zeros_like(p), True
                elif not state:
                    state.update(momentum=torch.zeros_like(p))
                state["momentum"].mul_(self.decay).add_(p.grad)
                p.sub_(group["lr"] / scale * state["momentum"])


@pytest.mark.parametrize("how", ["update", "setdefault"])
def test_a_schedule_of_a_class_that_counts_no_steps(how: str):
    params, leaves = parameters(), leaves_of(parameters())
    theirs = OwnMomentum(list(leaves.values()), how=how)
    expected = of_torch(theirs, leaves, lr_scheduler.ExponentialLR(theirs, 0.9))
    opt = ftp.optim.from_torch(OwnMomentum, lr=schedules.exponential(0.1, 0.9), how=how)
    state = opt.init(params)
    for grads in gradients(params):
        params, state = opt.update(grads, state, params)
    same(params, expected)


@pytest.mark.parametrize("lr", [0.1, 1e-5])
@pytest.mark.parametrize("how", ["attribute", "group", "first", "flag"])
def test_state_outside_of_the_parameters_is_refused(how: str, lr: float):
    with pytest.raises(ftp.FtpError, match="OwnMomentum is not a function of its state"):
        ftp.optim.from_torch(OwnMomentum, lr=lr, how=how)


class Factored(torch.optim.Optimizer):
    """Rates by Python's math of a counter, as classes write them that were made before a counter
    was a tensor.
    """

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["square"] = 0, torch.zeros_like(p)
                state["step"] += 1
                new = math.pow(state["step"], -0.8)
                state["square"].mul_(1 - new).add_(p.grad.square(), alpha=new)
                root = state["square"].sqrt() / math.sqrt(1 - 0.9 ** state["step"])
                rate = group["lr"] * math.log(state["step"] + 1, 2)
                p.addcdiv_(p.grad, root.add_(1e-8), value=-rate)


class Projected(torch.optim.Optimizer):
    """A step that decides by values."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                move = state["momentum"].mul_(0.9).add_(p.grad)
                along = (p * move).sum() / p.square().sum().clamp(min=1e-8)
                if along > 0:
                    move = move - p * along
                p.sub_(group["lr"] * move)


@pytest.mark.parametrize("cls", [Factored, Projected])
def test_steps_of_numbers_and_decisions(cls: Any):
    params = {"w": torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.5, -1.0]], dtype=torch.float64)}
    leaf = params["w"].clone().requires_grad_()
    theirs, opt = cls([leaf]), ftp.optim.from_torch(cls)
    specs = {"w": ftp.P(None, "tp")}
    of_state, mesh = opt.specs(params, specs), ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(opt.update, mesh, (specs, of_state, specs), (specs, of_state))
    state = opt.init(params)
    for turn in range(3):
        leaf.grad = leaf.detach().roll(turn, 1).sin()
        params, state = step({"w": leaf.grad}, state, params)
        theirs.step()
        torch.testing.assert_close(params["w"], leaf.detach(), rtol=1e-13, atol=0)


def test_two_leaves_of_one_path_are_refused():
    params = {"a": {"b": torch.ones(1, 1)}, "a.b": torch.full((1, 1), 5.0)}
    muon = ftp.optim.from_torch(torch.optim.Muon, lr=0.5, owned=True)
    opt = ftp.optim.by_path({"**": ftp.optim.from_torch(torch.optim.SGD, lr=0.5)})
    told = r"params\['a'\]\['b'\] and params\['a.b'\] have one path, 'a.b'"
    with pytest.raises(ftp.FtpError, match=told):
        opt.init(params)
    with pytest.raises(ftp.FtpError, match=told):
        muon.update(params, muon.init(params), params)


def test_parameters_of_one_shape_start_apart():
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.1)
    params = {name: torch.randn(3, 2) for name in "abc"}
    state = opt.init(params)
    alone = {name: opt.init({name: value})[name] for name, value in params.items()}
    assert all(
        torch.equal(state[name][slot], alone[name][slot]) for name in params for slot in alone[name]
    )
    slots = [value.data_ptr() for kept in state.values() for value in kept.values()]
    assert len(set(slots)) == len(slots) == 9


def test_groups_by_path():
    params, leaves = parameters(), leaves_of(parameters())
    theirs = torch.optim.AdamW(
        [
            {"params": [leaves["up"], leaves["down"]]},
            {"params": [leaves["scale"]], "weight_decay": 0.0, "lr": 0.3},
        ]
    )
    expected = of_torch(theirs, leaves)
    opt = ftp.optim.from_torch(
        torch.optim.AdamW, groups={"scale": {"weight_decay": 0.0, "lr": 0.3}}
    )
    state = opt.init(params)
    for grads in gradients(params):
        params, state = opt.update(grads, state, params)
    same(params, expected)


def test_another_optimizer_by_path_and_none_for_the_frozen():
    params, leaves = parameters(), leaves_of(parameters())
    expected = of_torch(torch.optim.Muon([leaves["up"]], lr=0.1), {"up": leaves["up"]})
    muon, adam = (
        ftp.optim.from_torch(torch.optim.Muon, lr=0.1),
        ftp.optim.from_torch(torch.optim.AdamW),
    )
    opt = ftp.optim.by_path({"up": muon, "down": None, "scale": adam})
    given, state = params, opt.init(params)
    assert {name: sorted(slots) for name, slots in state.items()} == {
        "up": ["momentum_buffer"],
        "down": [],
        "scale": ["exp_avg", "exp_avg_sq", "step"],
    }
    for grads in gradients({"up": params["up"]}):
        params, state = opt.update({**given, **grads}, state, params)
    same({"up": params["up"]}, expected)
    assert torch.equal(params["down"], given["down"]) and not torch.equal(
        params["scale"], given["scale"]
    )


def test_foreach_changes_nothing():
    params = parameters()
    one, other = (
        ftp.optim.from_torch(torch.optim.AdamW, lr=0.1, foreach=foreach) for foreach in (True, None)
    )
    same(*(opt.update(gradients(params)[0], opt.init(params), params)[0] for opt in (one, other)))
    with pytest.raises(ftp.FtpError, match=r"refuses its options: .*'foreach'"):
        ftp.optim.from_torch(OwnSigns, foreach=True)


def test_errors_name_the_leaf():
    opt, params = (
        ftp.optim.from_torch(torch.optim.SGD, lr=0.1, groups={"uq": {"lr": 1.0}}),
        parameters(),
    )
    with pytest.raises(
        ftp.FtpError, match=r"pattern 'uq' matches no path of params; the nearest are 'up'"
    ):
        opt.init(params)
    opt = ftp.optim.from_torch(torch.optim.SGD, lr=0.1)
    with pytest.raises(
        ftp.FtpError, match=r"grads\['up'\] has shape \(3,\), not its parameter's, \(7, 4\)"
    ):
        opt.update({**params, "up": torch.ones(3)}, opt.init(params), params)
    with pytest.raises(ftp.FtpError, match="grads and params are trees of different structures"):
        opt.update({"up": params["up"]}, opt.init(params), params)
    with pytest.raises(
        ftp.FtpError, match=r"params\['scale'\] has no optimizer: no pattern names it"
    ):
        ftp.optim.by_path({"up": opt, "down": None}).init(params)
    with pytest.raises(
        ftp.FtpError,
        match=r"torch.optim.SGD refuses its options: .*unexpected keyword argument 'betas'",
    ):
        ftp.optim.from_torch(torch.optim.SGD, lr=0.1, betas=(0.9, 0.9))
    with pytest.raises(ftp.FtpError, match=r"AdamW\(capturable=True\) has no meaning in a program"):
        ftp.optim.from_torch(torch.optim.AdamW, capturable=True)


def test_specs_of_the_state():
    opt, params = ftp.optim.from_torch(torch.optim.Adafactor), parameters()
    found = opt.specs(params, SPECS)
    assert found["up"] == {"col_var": P(), "row_var": P(), "step": P()} and found["scale"] == {
        "step": P(),
        "variance": P("tp"),
    }
    adam = ftp.optim.from_torch(torch.optim.AdamW)
    found = adam.specs(params, SPECS, {"**.exp_avg_sq": P("dp")})
    assert found["down"] == {"exp_avg": P(None, "tp"), "exp_avg_sq": P("dp"), "step": P()}
    with pytest.raises(ftp.FtpError, match="pattern 'momentum' matches no path of state"):
        adam.specs(params, SPECS, {"momentum": P()})


def test_state_made_on_the_mesh():
    """The parameters' spec tree covers the state: what is no parameter's shape is replicated."""
    mesh, opt, params = (
        ftp.simulated_mesh((2,), ("tp",)),
        ftp.optim.from_torch(torch.optim.AdamW),
        parameters(),
    )
    state = ftp.spmd(opt.init, mesh, (SPECS,), SPECS)(ftp.device_put(params, mesh, SPECS))
    placed = ftp.device_put(opt.init(params), mesh, SPECS)
    assert state.keys() == placed.keys() and all(
        torch.equal(state[k][s], placed[k][s]) for k in state for s in state[k]
    )


NORMS = {
    "tp": (SPECS, 1),
    "replicated": (P(), 0),
    "dp×tp": ({"up": P("tp", "dp"), "down": P("dp"), "scale": P("tp")}, 2),
}


@pytest.mark.parametrize("case", NORMS)
def test_global_norm_counts_every_element_once(case: str):
    specs, axes = NORMS[case]
    grads = gradients(parameters())[0]
    leaves = leaves_of(grads)
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(list(leaves.values()), 0.5)
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    clip = ftp.spmd(
        lambda grads: ftp.optim.clip_by_global_norm(grads, 0.5), mesh, (specs,), (specs, P())
    )
    clipped, found = clip(grads)
    torch.testing.assert_close(found, norm, rtol=1e-14, atol=0)
    same(clipped, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
    collectives = unbucketed(clip.lower(grads)).collectives
    assert Counter((c.op, c.shape) for c in collectives) == (
        {("all_reduce", ()): axes} if axes else {}
    )


@pytest.mark.parametrize("value", [math.nan, *slow_after(0, [math.inf, -math.inf]), 1.0])
def test_an_update_from_what_is_not_finite_is_skipped(value: float):
    params = parameters()
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2)
    grads = gradients(params)[0]
    grads["up"][-1, 0] *= value  # in the last rank's shard alone

    def update(grads: Any, state: Any, params: Any) -> Any:
        bad = ftp.optim.count_nonfinite(grads)
        return ftp.optim.select(bad == 0, opt.update(grads, state, params), (params, state)), bad

    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    specs = {"up": P("tp", "dp"), "down": P("dp"), "scale": P("tp")}
    step = ftp.spmd(update, mesh, (specs, specs, specs), ((specs, specs), P()))
    (new, state), bad = step(grads, opt.init(params), params)
    (expected, expected_state), _ = update(grads, opt.init(params), params)
    assert int(bad) == (value != 1.0)
    same(new, params if value != 1.0 else expected)
    for name, slots in state.items():
        same(slots, opt.init(params)[name] if value != 1.0 else expected_state[name])
    collectives = unbucketed(step.lower(grads, opt.init(params), params)).collectives
    assert [(c.op, c.shape) for c in collectives] == [("all_reduce", ())] * 2


def test_which_leaf_is_not_finite():
    params = parameters()
    params["down"][1, 2], params["scale"][:3] = float("nan"), float("inf")
    count = ftp.spmd(
        lambda p: ftp.optim.count_nonfinite(p, by_leaf=True),
        ftp.simulated_mesh((3,), ("tp",)),
        (SPECS,),
        P(),
    )
    assert {name: int(n) for name, n in count(params).items()} == {"up": 0, "down": 1, "scale": 3}


def test_select_takes_trees_alike():
    with pytest.raises(ftp.FtpError, match="otherwise and tree are trees of different"):
        ftp.optim.select(torch.tensor(True), {"a": torch.ones(1)}, {"b": torch.ones(1)})


def test_ema():
    params = parameters()
    average = {name: torch.zeros_like(p) for name, p in params.items()}
    theirs = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    expected = {name: p.clone() for name, p in average.items()}
    for grads in gradients(params):
        theirs(list(expected.values()), list(grads.values()), 0)
        average = ftp.optim.ema(average, grads, 0.9)
    same(average, expected)
    counters = ftp.optim.ema({"n": torch.tensor(3)}, {"n": torch.tensor(5)}, 0.5)
    assert torch.equal(counters["n"], torch.tensor(4))


SCHEDULES: dict[str, tuple[Any, Any]] = {
    "linear": (
        schedules.linear(0.1, 7, start=0.2, end=0.8),
        lambda o: lr_scheduler.LinearLR(o, 0.2, 0.8, 7),
    ),
    "constant": (
        schedules.constant(0.1, 4, factor=0.3),
        lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    ),
    "exponential": (schedules.exponential(0.1, 0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "steps": (
        schedules.steps(0.1, [3, 8], 0.5),
        lambda o: lr_scheduler.MultiStepLR(o, [3, 8], 0.5),
    ),
    "steps, evenly": (schedules.steps(0.1, 7, 0.5), lambda o: lr_scheduler.StepLR(o, 7, 0.5)),
    "polynomial": (
        schedules.polynomial(0.1, 9, 2.0),
        lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    ),
    "cosine": (
        schedules.cosine(0.1, 25, end=0.01),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 25, 0.01),
    ),
    "cosine_restarts": (
        schedules.cosine_restarts(0.1, 6, end=0.01),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6, 1, 0.01),
    ),
    "sequence": (
        schedules.sequence([schedules.linear(0.1, 5, start=0.1), schedules.cosine(0.1, 20)], [5]),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(o, 20)], [5]
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str):
    mine, theirs = SCHEDULES[name]
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = theirs(opt)
    for i in range(STEPS):
        assert math.isclose(
            float(mine(torch.tensor(float(i)))),
            opt.param_groups[0]["lr"],
            rel_tol=1e-12,
            abs_tol=1e-15,
        ), i
        assert float(mine(i)) == float(mine(torch.tensor(float(i))))
        opt.step()
        scheduler.step()


@pytest.mark.parametrize("period", [49, 100])
def test_a_cosine_with_restarts_is_torchs_to_the_last_bit(period: int):
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(opt, period)
    rates = []
    for _ in range(2 * period + 3):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    steps = torch.arange(len(rates), dtype=torch.float64)
    assert schedules.cosine_restarts(0.1, period)(steps).tolist() == rates


def test_schedules_of_no_steps_are_at_their_end():
    start = torch.tensor(0.0)
    assert float(schedules.linear(0.1, 0, start=0.0)(start)) == pytest.approx(0.1)
    assert float(schedules.cosine(0.1, 0, end=0.02)(start)) == pytest.approx(0.02)
    assert float(schedules.polynomial(0.1, 0)(start)) == 0.0


def test_norms_take_tensors_alone():
    for norm in (ftp.optim.global_norm, ftp.optim.count_nonfinite):
        with pytest.raises(ftp.FtpError, match=r"tree\['n'\] is 3.0, a float; .* tensors alone"):
            norm({"n": 3.0, "w": torch.ones(2)})


@pytest.mark.cases_by_default(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_under_vmap(name: str):
    """Each as it is alone; cut over their own axis, nothing moves."""
    cls, options = OPTIMIZERS[name]
    opt, n = ftp.optim.from_torch(cls, **options), 3
    params = {k: torch.stack([v * (i + 1) for i in range(n)]) for k, v in parameters(cls).items()}
    grads = {
        k: torch.stack([v * (i - 1) for i in range(n)])
        for k, v in gradients(parameters(cls))[0].items()
    }

    def run(update: Any, params: Any, state: Any, grads: Any) -> Any:
        for _ in range(2):
            params, state = update(grads, state, params)
        return params, state

    def one(tree: Any, i: int) -> Any:
        return {
            k: {s: x[i] for s, x in v.items()} if isinstance(v, dict) else v[i]
            for k, v in tree.items()
        }

    state = torch.vmap(opt.init)(params)
    found = run(torch.vmap(opt.update), params, state, grads)
    for i in range(n):
        expected = run(opt.update, one(params, i), opt.init(one(params, i)), one(grads, i))
        assert expected[1].keys() == found[1].keys()
        torch.testing.assert_close(
            (one(found[0], i), one(found[1], i)),
            (expected[0], {k: dict(v) for k, v in expected[1].items()}),
        )
    cut = {k: {slot: P("replica") for slot in slots} for k, slots in state.items()}
    step = ftp.spmd(
        torch.vmap(opt.update),
        ftp.simulated_mesh((2,), ("replica",)),
        (P("replica"), cut, P("replica")),
    )
    lowered = step.lower(grads, state, params)
    assert not lowered.collectives
    torch.testing.assert_close(run(step, params, state, grads), found, rtol=1e-10, atol=1e-12)
