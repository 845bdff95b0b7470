"""Conditions on values that guard and decide nothing are assumptions."""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from few_or_many import slow_after
from torch import nn

import ftp
from ftp import P
from ftp.errors import InputError

W, X = torch.randn(4, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
MESH = ftp.simulated_mesh((2,), ("tp",))


def _assert(x):
    assert x.min() >= 0, "negative"


def _if(x):
    if x.min() < 0:
        raise ValueError("negative")


def _if_not(x):
    ok = x >= 0
    if not ok.all():
        message = f"negative in {x.shape}"
        raise ValueError(message)


def _either(x):
    if x.ndim == 2 and (x.min().item() < 0 or bool(x.isnan().any())):
        raise ValueError("negative")


def _not(x):
    assert not (x < 0).any() and x.ndim == 2


def _else(x):
    if x.min() >= 0:
        pass
    else:
        raise ValueError("negative")


def _chained(x):
    assert 0 <= x.min() <= x.max() < 1e9


def _finite(x):
    loss = x.min().sqrt()
    if not math.isfinite(loss.item()) or math.isnan(loss):
        raise ValueError(f"the loss is {loss}")


def _torch(x):
    torch._assert(x.min() >= 0, "negative")


def _helper(x):
    def require(condition, message):
        if not condition:
            raise ValueError(message)

    require(x.min() >= 0, "negative")


def _torch_check(x):
    torch._check(x.min().item() >= 0, lambda: f"negative {x.min():.3f}")


def _torch_check_all(x):
    torch._check_tensor_all_with(ValueError, x >= 0, lambda: f"negative {x.min()}")


@pytest.mark.cases_by_default(5)
@pytest.mark.parametrize(
    "guard",
    [
        _assert, _if, _finite, _torch_check, _torch_check_all, _if_not, _either, _not, _else,
        _chained, _torch, _helper,
    ],
)  # fmt: skip
def test_a_guard_is_assumed_and_can_be_checked(guard: Callable[[torch.Tensor], None]):
    def loss(w, x):
        guard(x)
        return (x @ w).square().sum()

    step = ftp.shard(loss, MESH, P("tp"), check_inputs=True)
    torch.testing.assert_close(step(W, X)[0], loss(W, X), rtol=1e-12, atol=0)
    claims = step.lower(W, X).assumptions
    assert claims and all("test_guards.py" in claim for claim in claims)
    with pytest.raises(InputError, match="does not hold at call"):
        step(W, X - 0.9)
    free = ftp.shard(loss, MESH, P("tp"))
    assert free.lower(W, X).assumptions == claims
    free(W, X - 0.9)
    issued = [c.op for c in free.lower(W, X).collectives]
    plain = ftp.shard(lambda w, x: (x @ w).square().sum(), MESH, P("tp"))
    assert issued == [c.op for c in plain.lower(W, X).collectives]


def test_collectives_of_checked_assumptions_are_listed():
    """They are reported as any others: an answer has no place in the result."""

    def loss(w, x):
        assert (x.sum(0) > 0).all()
        return (x @ w).square().sum()

    step = ftp.shard(loss, MESH, P(None, "tp"), batch_specs=P("tp"), check_inputs=True)
    assert "all_reduce" in [c.op for c in step.lower(W, X).collectives]


def _branch(x):
    if x.sum() > 0:
        return x
    return 2 * x


def _raise_or_more(x):
    if x.sum() > 1e9:
        x = 2 * x
    elif x.sum() < 0:
        raise ValueError("negative")
    return x


def _sure_of_neither(x):
    if x.sum() < 0 and x.max() > 1:  # one of them false is enough
        raise ValueError("negative")
    return x


def _inside_of_body(x):
    if x.ndim:
        x = x * (1 if x.sum() > 0 else 2)
    return x


def _number(x):
    if x.sum() < (n := x.max().item()):
        raise ValueError(n)
    return n * x


def _tried(x):
    try:
        _if(x - 0.9)
    except ValueError:
        return 2 * x
    return x


def _retried(x):
    for shift in (0.9, 0.8, 0.0):
        with contextlib.suppress(AssertionError):
            torch._assert(x.min() >= shift, "negative")
            return x - shift
    return x


@pytest.mark.parametrize(
    "decide", [_branch, _raise_or_more, _sure_of_neither, _inside_of_body, _tried, _retried]
)
def test_a_decision_is_followed(decide: Callable[[torch.Tensor], Any]):
    def loss(w, x):
        return (decide(x) @ w).sum()

    step = ftp.shard(loss, MESH, P("tp"))
    torch.testing.assert_close(step(W, X)[0], loss(W, X))
    assert bool(step.lower(W, X).assumptions) == (decide in (_raise_or_more, _sure_of_neither))


def test_a_number_that_is_compared_in_a_guard_stays_a_tensor():
    def loss(w, x):
        return (_number(x) @ w).sum()

    value, grad = ftp.shard(loss, MESH, P("tp"))(W, X)
    torch.testing.assert_close(value, loss(W, X), rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, _gradient(loss, W, X), rtol=1e-12, atol=0)


def test_a_warning_decides_nothing():
    def loss(w, x):
        if x.max() > 0:
            warnings.warn("positive", stacklevel=1)
        return (x @ w).sum()

    step = ftp.shard(loss, MESH, P("tp"), check_inputs=True)
    assert step.lower(W, X).assumptions == ()
    step(W, X)


def test_distributions_with_their_validation():
    actions = torch.tensor([1, 0, 2])

    def loss(w, x, actions):
        d = torch.distributions.Categorical(logits=x @ w, validate_args=True)
        mean = torch.distributions.Normal(x @ w, torch.ones(()), validate_args=True)
        return -d.log_prob(actions).mean() - mean.log_prob(x).mean()

    step = ftp.shard(loss, MESH, P(None, "tp"), check_inputs=True)
    value, grad = step(W, X, actions)
    torch.testing.assert_close(value, loss(W, X, actions), rtol=1e-12, atol=0)
    wanted = _gradient(loss, W, X, actions)
    torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-14)
    assert len(step.lower(W, X, actions).assumptions) >= 3
    with pytest.raises(InputError, match="_is_all_true"):
        step(W * torch.nan, X, actions)


try:
    import math as _math

    def _defined_in_try(x):
        if x.sum() < (n := x.max().item()):
            raise ValueError(n)
        return _math.pi * n * x

except ImportError:
    pass


def test_a_function_that_a_try_block_defines_is_not_caught_by_it():
    def loss(w, x):
        return (_defined_in_try(x) @ w).sum()

    step = ftp.shard(loss, MESH, P("tp"))
    value, grad = step(W, X)
    torch.testing.assert_close(value, loss(W, X), rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, _gradient(loss, W, X), rtol=1e-12, atol=0)
    (assumed,) = step.lower(W, X).assumptions
    assert assumed.endswith("x.sum() < (n := x.max().item()) is False")


def _gradient(loss, w, *args):
    w = w.clone().requires_grad_()
    return torch.autograd.grad(loss(w, *args), w)[0]


@pytest.mark.parametrize("name", slow_after(1, ["transformer", "encoder"]))
def test_transformers_of_torch_with_a_causal_mask(name: str):
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    else:
        model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).double()
    fn, params = ftp.functionalize(model)
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def call(f: Any, x: torch.Tensor) -> torch.Tensor:
        return f(x, mask=mask) if name == "encoder" else f(x, x, tgt_mask=mask)

    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    specs = ftp.plan(
        params, {"**.linear1.*": P("tp"), "**.linear2.weight": P(None, "tp"), "**": P()}
    )
    step = ftp.shard(
        lambda p, x: call(lambda *a, **k: fn(p, *a, **k), x).square().mean(),
        mesh,
        specs,
        batch_specs=P("dp"),
    )
    value, grads = step(params, x)
    expected = call(model, x).square().mean()
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=0)
    for (path, _), grad in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(grads[path], grad, rtol=1e-9, atol=1e-12)


class _Checked(torch.distributions.Distribution):
    """A distribution whose arguments are matrices."""

    arg_constraints: ClassVar = {
        "half": torch.distributions.constraints.positive_semidefinite,
        "whole": torch.distributions.constraints.positive_definite,
        "even": torch.distributions.constraints.symmetric,
    }

    def __init__(self, m):
        self.half = self.whole = self.even = m
        super().__init__(validate_args=True)


def test_matrices_of_distributions_are_checked():
    def loss(w, x):
        covariance = w @ w.T + torch.eye(4, dtype=w.dtype)
        _Checked(covariance)
        normal = torch.distributions.MultivariateNormal(x[0], covariance, validate_args=True)
        return -normal.log_prob(x).mean()

    step = ftp.shard(loss, MESH, P("tp"), check_inputs=True, certify=True)
    value, grad = step(W, X)
    gradient, expected = torch.func.grad_and_value(loss)(W, X)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad, gradient, rtol=1e-10, atol=1e-12)

    def skew(w, x):
        return torch.distributions.MultivariateNormal(x[0], w, validate_args=True).loc.sum()

    with pytest.raises(InputError, match="does not hold"):
        ftp.shard(skew, MESH, P("tp"), check_inputs=True)(W + torch.eye(4).triu(), X)


def test_adaptive_softmax():
    layer = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [2, 5], div_value=2.0).double()
    fn, params = ftp.functionalize(layer)
    params = {path: p.detach() for path, p in params.items()}
    targets = torch.tensor([0, 8, 3])

    def loss(params, x, targets):
        found = fn(params, x, targets)
        return found.loss + found.output.square().sum()

    given = {path: p.clone().requires_grad_() for path, p in params.items()}
    expected = loss(given, X, targets)
    gradients = torch.autograd.grad(expected, list(given.values()))
    specs = {path: P("tp") for path in params}
    step = ftp.shard(loss, MESH, specs, check_inputs=True, certify=True)
    value, grads = step(params, X, targets)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close([*grads.values()], [*gradients], rtol=1e-10, atol=1e-12)
    with pytest.raises(InputError, match="targets holds 9, which is not in"):
        step(params, X, targets + 1)
    (assumed,) = step.lower(params, X, targets).assumptions
    assert "targets of the adaptive softmax are in [0, 9)" in assumed
    alone = ftp.shard(loss, MESH, P())(params, X[0], targets[1])[0]
    torch.testing.assert_close(alone, loss(params, X[0], targets[1]), rtol=1e-11, atol=1e-12)


def test_a_file_that_changed_since_its_code_was_compiled_is_not_read(tmp_path):
    """A reloaded module, and one whose file is edited: what raises in one version may be a choice
    in the other.
    """
    raises = "def f(x):\n    if x.sum() > 0:\n        raise ValueError\n    return x\n"
    chooses = raises.replace("raise ValueError", "return -x")
    file = tmp_path / "edited.py"

    def loaded(text: str) -> Callable[..., Any]:
        file.write_text(text)
        own: dict[str, Any] = {"__name__": "edited"}
        exec(compile(text, str(file), "exec"), own)
        return own["f"]

    def lowered(f: Callable[..., Any]) -> Any:
        x = torch.ones(4, dtype=torch.float64)
        step = ftp.spmd(lambda x: f(x), MESH, P("tp"), P("tp"))
        return len(step.lower(x).assumptions), step(x)[0].item()

    assert lowered(loaded(raises)) == (1, 1.0)
    chosen = loaded(chooses)
    assert lowered(chosen) == (0, -1.0)
    file.write_text(raises)
    assert lowered(chosen) == (0, -1.0)
