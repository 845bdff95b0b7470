"""An optimizer's state made of placed shards is the part of the whole one, and trains as on one
device.
"""

from typing import Any

import pytest
import torch
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist

SPECS = {"up": P(None, "tp"), "down": P("tp"), "bias": P()}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": {"fused": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"initial_accumulator_value": 0.25},
    "NAdam": {},
    "Rprop": {"lr": 0.05},
    "ASGD": {},
}
ROUNDED = ("NAdam", "ASGD")  # torch keeps their factors and rates in float32, ftp in float64


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "up": torch.randn(4, 7).double(),
        "down": torch.randn(7, 4).double(),
        "bias": torch.randn(4).double(),
    }


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["up"]) @ params["down"] + params["bias"]).square().mean()


def _trained() -> list[str]:
    """What differs from one device, by optimizer."""
    mesh, wrong = ftp.make_mesh((2,), ("tp",), device_type="cpu"), []
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    for name, options in OPTIMIZERS.items():
        opt = ftp.optim.from_torch(getattr(torch.optim, name), **options)

        def train(params: Any, state: Any, x: torch.Tensor, opt: Any = opt) -> Any:
            grads, loss = torch.func.grad_and_value(loss_fn)(params, x)
            return *opt.update(grads, state, params), loss

        whole = weights()
        of_state = opt.specs(whole, SPECS)
        params = ftp.device_put(whole, mesh, SPECS)
        state = opt.init(params)
        due = ftp.device_put(opt.init(whole), mesh, of_state)
        for key in whole:
            same = all(torch.equal(state[key][slot], due[key][slot]) for slot in due[key])
            if (
                not same
                or set(state[key]) != set(due[key])
                or ftp.specs_of(state[key]) != ftp.specs_of(due[key])
            ):
                wrong.append(f"{name}: the state of {key}")
        step = ftp.spmd(train, mesh, (SPECS, of_state, P()), (SPECS, of_state, P()))
        model = {key: value.clone().requires_grad_() for key, value in whole.items()}
        plain = getattr(torch.optim, name)(model.values(), **options)
        for _ in range(3):
            params, state, _ = step(params, state, x)
            plain.zero_grad()
            loss_fn(model, x).backward()
            plain.step()
        found = ftp.device_get(params, mesh, SPECS)
        rtol = 1e-6 if name in ROUNDED else 1e-10
        wrong += [
            f"{name}: {key}"
            for key in whole
            if not torch.allclose(found[key], model[key], rtol=rtol, atol=1e-12)
        ]
    try:
        ftp.optim.from_torch(torch.optim.Adafactor).init(ftp.device_put(weights(), mesh, SPECS))
        wrong.append("Adafactor: not refused")
    except ftp.errors.InputError as e:
        if (
            "params['down'], params['up']: Adafactor cannot make its global state from shards"
            not in str(e)
        ):
            wrong.append(str(e))
    return wrong


def test_state_of_shards():
    ranks = launch(_trained, 2, timeout=120)
    assert [rank.value for rank in ranks] == [[], []], ranks[0].stderr
