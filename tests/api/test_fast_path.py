"""Calls that go on from the last one are known at a glance, and nothing that a key would tell
goes unseen.
"""

from collections import OrderedDict, defaultdict
from functools import partial
from typing import Any

import optree
import pytest
import torch

import ftp
from ftp import P
from ftp.api import step as module

MESH = ftp.simulated_mesh((2,), ("tp",))
SPECS = {"w": P(None, "tp"), "b": P("tp")}
OPT = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2)


def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
    grads, loss = torch.func.grad_and_value(lambda p: (x @ p["w"] + p["b"]).square().mean())(params)
    params, state = OPT.update(grads, state, params)
    return params, state, loss


def made(**options: Any) -> Any:
    params = {"w": torch.randn(4, 6, dtype=torch.float64), "b": torch.randn(6, dtype=torch.float64)}
    of_state = OPT.specs(params, SPECS)
    options = {"donate": (0, 1), **options}
    run = ftp.spmd(train_step, MESH, (SPECS, of_state, P()), (SPECS, of_state, P()), **options)
    return run, params, OPT.init(params)


def batch(seed: int, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def copy(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree, namespace="ftp")


def same(a: Any, b: Any) -> None:
    for x, y in zip(
        optree.tree_leaves(a, namespace="ftp"), optree.tree_leaves(b, namespace="ftp"), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.fixture
def keys(monkeypatch) -> list[Any]:
    """A key that was made for each call that was not known at a glance."""
    found = []

    class Counted(module.Arguments):
        def __init__(self, *args: Any):
            found.append(args)
            super().__init__(*args)

    monkeypatch.setattr(module, "Arguments", Counted)
    return found


def test_a_train_loop_is_known_from_the_third_call_on(keys):
    run, *mine = made()
    alone = copy(mine)
    for i in range(6):
        *alone, expected = train_step(alone[0], alone[1], batch(i))
        *mine, loss = run(*mine, batch(i))
        same(loss, expected)
    same(mine, alone)
    assert len(keys) == 2


def test_an_evaluation_is_known_too(keys):
    run = ftp.spmd(lambda p, x: x @ p["w"] + p["b"], MESH, (SPECS, P()), P())
    params = ftp.device_put(made()[1], MESH, SPECS)
    for i in range(3):
        same(run(params, batch(i)), batch(i) @ params["w"] + params["b"])
    assert len(keys) == 1
    changed = {**params, "b": params["b"] + 1}  # nobody has placed it
    same(run(changed, batch(0)), batch(0) @ changed["w"] + changed["b"])
    assert len(keys) == 2


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_what_was_donated_is_not_taken_again(calls: int):
    run, *mine = made()
    for i in range(calls):
        old = mine
        *mine, _ = run(*mine, batch(i))
    with pytest.raises(
        ftp.errors.DonationError, match=r"params\['b'\] was donated, as params of an earlier call"
    ):
        run(*old, batch(0))
    with pytest.raises(ftp.errors.DonationError):
        ftp.device_get(old[0], MESH, SPECS)
    assert ftp.specs_of(mine[0]) == SPECS
    run(*mine, batch(0))


def test_what_another_step_was_given_is_not_taken():
    run, *mine = made()
    for i in range(3):
        *mine, _ = run(*mine, batch(i))
    other = ftp.spmd(lambda p: {k: v + 1 for k, v in p.items()}, MESH, (SPECS,), SPECS, donate=(0,))
    renewed = other(mine[0])
    with pytest.raises(ftp.errors.DonationError, match="was donated, as p of an earlier call"):
        run(*mine, batch(3))
    run(renewed, mine[1], batch(3))


def test_one_tensor_as_state_and_batch():
    run = ftp.spmd(lambda p, x: (p + x.sum(), x.sum()), MESH, donate=(0,))
    p = torch.randn(3)
    for _ in range(3):
        p, _ = run(p, torch.ones(3))
    with pytest.raises(ftp.errors.DonationError, match="are the same tensor"):
        run(p, p)


@pytest.mark.parametrize("view", [lambda w: w.detach(), lambda w: w[1:]])
def test_a_view_of_what_is_donated_is_not_taken(view: Any):
    """On one rank, whose program writes to the donated memory before it reads the view."""
    run = ftp.spmd(lambda p, x: (p * 2, x * 3), ftp.simulated_mesh(1, "tp"), P(), P(), donate=(0,))
    p = torch.arange(4.0)
    for _ in range(3):
        given = view(p).clone()
        p, tripled = run(p, given)
        same(tripled, given * 3)
    with pytest.raises(ftp.errors.DonationError, match="share memory"):
        run(p, view(p))


def test_what_changes_is_seen(keys):
    run, *mine = made()
    for i in range(3):
        *mine, _ = run(*mine, batch(i))
    alone = copy(mine)
    *alone, expected = train_step(alone[0], alone[1], batch(7, rows=3))
    *mine, loss = run(*mine, batch(7, rows=3))  # another program
    same([mine, loss], [alone, expected])
    before = len(keys)
    mine[0]["w"] = mine[0]["w"].t().contiguous().t()  # another tensor, with other strides
    *alone, expected = train_step(alone[0], alone[1], batch(8, rows=3))
    *mine, loss = run(*mine, batch(8, rows=3))
    same([mine, loss], [alone, expected])
    assert len(keys) == before + 1
    for i in range(3):
        *mine, _ = run(*mine, batch(i))
    mine[0]["b"].data = torch.zeros(3, dtype=torch.float64)  # the same tensor, of another shape
    with pytest.raises((ftp.FtpError, RuntimeError), match=r"b|size|shape"):
        run(*mine, batch(0))


def test_what_is_kept_of_many_calls_stays_known():
    run, *mine = made()
    kept = []
    for i in range(12):
        *mine, loss = run(*mine, batch(i))
        kept.append(loss)
    assert ftp.specs_of(kept) == [P()] * 12
    assert ftp.specs_of(mine[0]) == SPECS


def test_two_steps_take_turns():
    train, *mine = made()
    evaluate = ftp.spmd(lambda p, x: (x @ p["w"] + p["b"]).square().mean(), MESH, (SPECS, P()), P())
    alone = copy(mine)
    for i in range(5):
        *alone, _ = train_step(alone[0], alone[1], batch(i))
        *mine, _ = train(*mine, batch(i))
        same(
            evaluate(mine[0], batch(9)), (batch(9) @ alone[0]["w"] + alone[0]["b"]).square().mean()
        )


@pytest.mark.parametrize("kind", [dict, OrderedDict, partial(defaultdict, list)])
def test_dicts_whose_keys_have_another_order_have_their_own_program(kind):
    """A function may go through a dict in its order."""

    def scaled(d):
        return kind([(key, x * (i + 2)) for i, (key, x) in enumerate(d.items())])

    step = ftp.spmd(scaled, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P("tp"))
    given = kind([("x", torch.ones(4)), ("y", torch.ones(4))])
    for _ in range(2):
        for _ in range(3):
            found, given = step(given), scaled(given)
            assert list(found) == list(given)
            assert all(map(torch.equal, found.values(), given.values()))
            given = found
        given = kind(reversed(given.items()))


def test_per_rank_code_has_dicts_in_the_order_of_its_call():
    def stacked(d):
        return torch.stack(list(d.values()), -1)

    per_rank = ftp.local(stacked, MESH, P("tp"), P("tp"))
    given = {"x": torch.zeros(4), "y": torch.ones(4)}
    for d in (given, dict(reversed(given.items())), given):
        assert torch.equal(per_rank(d), stacked(d))
