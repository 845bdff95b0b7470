"""An update that is traced once for parameters of equal shape gives the program that tracing each
update would: the same program without copies is the reference.
"""

from typing import Any

import pytest
import torch
from few_or_many import slow_after
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import ftp
from ftp import P
from ftp.errors import TraceError
from ftp.optim import traceable_step as module
from ftp.tracing.call_cache import Recall

LAYERS = 3

OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "Adam, amsgrad": (optim.Adam, {"amsgrad": True, "maximize": True}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, dampened": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "NAdam": (optim.NAdam, {"weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {}),
    "Rprop": (optim.Rprop, {}),
    "Muon": (optim.Muon, {}),
    "Adafactor": (optim.Adafactor, {}),
    "AdamW, fused": (optim.AdamW, {"fused": True}),
}


def layers(seed: int) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    kinds = {"up": torch.float32, "down": torch.float64}
    return [
        {
            **{k: torch.randn(4, 6, generator=rng).to(dtype) for k, dtype in kinds.items()},
            "wide": torch.randn(4, 8, generator=rng),
        }
        for _ in range(LAYERS)
    ]


def lowered(update: Any, opt: ftp.optim.Optimizer) -> ftp.Lowered:
    params, grads = layers(0), layers(1)
    state = opt.init(params)
    mesh = ftp.AbstractMesh((2,), ("tp",))
    step = ftp.spmd(update, mesh, (P("tp"), P("tp"), P("tp")), (P("tp"), P("tp")))
    return step.lower(params, grads, state)


def both(
    update: Any, opt: ftp.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[Any], int]:
    """The traced nodes with copies, those without, and how many updates were copied."""
    copied: list[Any] = []
    again = Recall.again

    def counted(self, call, tracer):
        found = again(self, call, tracer)
        is_step = isinstance(call.key[0], tuple) and "clones" not in call.key[0][1]
        copied.extend([call] if is_step and found is not None else [])
        return found

    monkeypatch.setattr(Recall, "again", counted)
    found = nodes(lowered(update, opt))
    monkeypatch.setattr(module, "steps_of_trace", lambda: None)
    return found, nodes(lowered(update, opt)), len(copied)


def nodes(program: ftp.Lowered) -> list[Any]:
    found = []
    for node in program._program.traced.graph.nodes:
        val = node.meta.get("val", ())
        vals = val if isinstance(val, tuple | list) else [val]
        held = [(v.shape, v.stride(), v.dtype, v.device) for v in vals]
        facts = [node.meta.get(key) for key in ("source", "phase", "region", "branch")]
        found.append((node.name, node.target, str(node.args), str(node.kwargs), held, facts))
    return found


@pytest.mark.parametrize("name", slow_after(5, OPTIMIZERS))
def test_the_graph_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    cls, options = OPTIMIZERS[name]
    opt = ftp.optim.from_torch(cls, **options)

    def update(params, grads, state):
        params, state = opt.update(grads, state, params)
        return opt.update(grads, state, params)

    with_copies, without, copies = both(update, opt, monkeypatch)
    assert with_copies == without
    # Formulas of others write to views, or to results of their own.
    runs = 0 if name in ("Adafactor", "Adamax", "AdamW, fused", "Muon") else 2
    assert copies == (4 if "dampened" in name else runs) * (LAYERS - 1) * 3


def test_a_rate_that_is_computed(monkeypatch: pytest.MonkeyPatch):
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=lambda step: 0.1 / (1 + step))

    def update(params, grads, state):
        return opt.update(grads, state, params)

    with_copies, without, copies = both(update, opt, monkeypatch)
    assert with_copies == without
    assert copies == (LAYERS - 1) * 3


def test_new_parameters_may_be_written_to(monkeypatch: pytest.MonkeyPatch):
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.1)

    def update(params, grads, state):
        params, state = opt.update(grads, state, params)
        params[1]["up"].mul_(0.5)
        state[2]["up"]["exp_avg"].add_(params[2]["up"])
        return params, state

    with_copies, without, copies = both(update, opt, monkeypatch)
    assert with_copies == without
    assert copies == (LAYERS - 1) * 3
    params, grads = layers(0), layers(1)
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(update, mesh, (P("tp"), P("tp"), P("tp")), (P("tp"), P("tp")))
    wanted = update(layers(0), grads, opt.init(params))
    found = step(params, grads, opt.init(params))
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1])


def test_gradients_that_were_written_to(monkeypatch: pytest.MonkeyPatch):
    """Views of one see the write; a write to an argument is refused."""
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.1)

    def update(params, grads, state):
        flat = torch.stack([x["up"] for x in grads])
        grads = [{**x, "up": flat[i]} for i, x in enumerate(grads)]
        grads[0]["up"].mul_(2)
        new, _ = opt.update(grads, state, params)
        return new, flat * 1

    with_copies, without, copies = both(update, opt, monkeypatch)
    assert with_copies == without
    assert copies == (LAYERS - 1) * 2  # each row begins elsewhere in its memory

    def writes(params, grads, state):
        grads[0]["up"].mul_(2)
        return opt.update(grads, state, params)

    monkeypatch.undo()
    with pytest.raises(TraceError, match="is changed in place"):
        lowered(writes, opt)


def test_a_mode_of_the_user_sees_each_update(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.1)

    def update(params, grads, state):
        with Seeing():
            return opt.update(grads, state, params)

    with_copies, without, copies = both(update, opt, monkeypatch)
    assert with_copies == without
    assert copies == 0
    assert seen.count(torch.Tensor.addcdiv_) == 2 * LAYERS * 3


def test_hooks_of_all_optimizers_see_one_step(monkeypatch: pytest.MonkeyPatch):
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.1)
    seen: list[int] = []

    def update(params, grads, state):
        return opt.update(grads, state, params)

    hook = register_optimizer_step_pre_hook(
        lambda given, args, kwargs: seen.append(len(given.param_groups[0]["params"]))
    )
    try:
        lowered(update, opt)
    finally:
        hook.remove()
    assert set(seen) <= {1, LAYERS * 3}
    assert seen.count(LAYERS * 3) == 1


FUSED = {
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "dampening": 0.3},
    "Adagrad": {},
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_is_recorded_without_writes(name: str):
    """What the function writes to later is its own, and the arguments keep their values."""
    cls: Any = getattr(optim, name)
    opt = ftp.optim.from_torch(cls, lr=0.1, fused=True, **FUSED[name])
    params = {"up": torch.randn(4, 6), "down": torch.randn(6, 4), "scale": torch.tensor(1.5)}
    grads = {key: torch.randn_like(p) for key, p in params.items()}
    state = opt.init(params)
    slots = sorted(state["up"])

    def update(params, grads, state):
        new, now = opt.update(grads, state, params)
        new["up"].mul_(0.5)
        now["down"][slots[0]].add_(params["up"].T.sum())
        return new, now, params, opt.update(grads, now, new)

    expected = update(params, grads, state)
    step = ftp.spmd(update, ftp.simulated_mesh((2,), ("tp",)), P(), P())
    torch.testing.assert_close(step(params, grads, state), expected)

    lowered = ftp.spmd(
        lambda *given: opt.update(*given), ftp.simulated_mesh((2,), ("tp",)), P(), P()
    ).lower(grads, state, params)
    called = [str(node.target) for node in lowered._program.traced.graph.nodes]
    assert called.count("aten.clone.default") <= len(params) * (1 + ("SGD" in name))
    assert not any("copy" in target for target in called)


def test_two_fused_steps_of_parameters_that_autograd_follows():
    """The new parameters need gradients, as those of the same code outside of a program."""
    opt = ftp.optim.from_torch(optim.AdamW, lr=0.1, fused=True)

    def update(w, x):
        params = {"w": w.detach().requires_grad_()}
        state = opt.init(params)
        for _ in range(2):
            loss = (params["w"] @ x).sin().sum()
            (grad,) = torch.autograd.grad(loss, [params["w"]])
            params, state = opt.update({"w": grad}, state, params)
        return params["w"].detach(), state

    given = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    step = ftp.spmd(update, ftp.simulated_mesh((2,), ("tp",)), P(), P())
    torch.testing.assert_close(step(*given), update(*given))


def test_the_strides_of_fused_steps():
    """What is new has the strides of what was, though the kernels' results are contiguous."""
    opt = ftp.optim.from_torch(optim.AdamW, lr=0.1, fused=True)

    def update(w):
        params = {"w": w.T}
        new, state = opt.update({"w": w.T.sin()}, opt.init(params), params)
        return [torch.as_strided(x, (24,), (1,)) for x in (new["w"], state["w"]["exp_avg"])]

    given = torch.randn(4, 6, dtype=torch.float64)
    step = ftp.spmd(update, ftp.simulated_mesh((2,), ("tp",)), P(), P())
    torch.testing.assert_close(step(given), update(given))


def test_two_slots_of_one_tensor():
    """A step of kernels writes to copies, which each slot has of its own."""
    opt = ftp.optim.from_torch(optim.AdamW, lr=0.1, fused=True)
    params = {"up": torch.randn(4, 6)}

    def update(params, grads):
        state = opt.init(params)
        zeros = torch.zeros_like(params["up"])
        state["up"].update(exp_avg=zeros, exp_avg_sq=zeros)
        return opt.update(grads, state, params)

    step = ftp.spmd(update, ftp.simulated_mesh((2,), ("tp",)), P(), P())
    grads = {"up": torch.randn(4, 6)}
    torch.testing.assert_close(step(params, grads), update(params, grads))
