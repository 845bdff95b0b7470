"""Functions that decide by values are followed in all the ways that they can go."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ftp
from ftp import P
from ftp.errors import InputError, ReadWarning, TraceError
from ftp.sharding.pytree import flatten
from ftp.torch_internals.fake_tensors import is_fake

W = torch.linspace(-1, 2, 16, dtype=torch.float64).cos().reshape(4, 4)
X = torch.linspace(-2, 3, 24, dtype=torch.float64).sin().reshape(6, 4)


def _early_exit(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    h = x
    for _ in range(4):
        h, before = torch.tanh(h @ w), h
        if (h - before).abs().mean().item() < at.item():
            break
    return h.square().sum()


def _unsafe(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """The other way's gradient is nan."""
    y = x @ w
    if (y > at).all():
        y = (y - at).sqrt()
    elif torch.equal(y, x):
        y = y / 0
    return y.sum() / max(y.abs().max().item(), 1)


def _writes(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Writes before a decision, and constants that every run makes."""
    out, scales = torch.zeros_like(x), torch.tensor([1.0, 2, 3, 4], dtype=x.dtype)
    for t in range(4):
        out[:, t] = (x @ w)[:, t] * scales[t]
        if out.sum() > at:
            break
    return out.square().sum()


def _rows(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """A mean of no rows is nan, and is not taken."""
    y = x @ w
    kept = y[y[:, 0] > at]
    loss = y.square().mean()
    if kept.shape[0] > 0:
        loss = loss + kept.mean()
    counts = torch.stack([(y[:, 1] > at).sum(), (y[:, 1] <= at).sum()]).tolist()
    for i, n in enumerate(counts):
        if n == 0:
            continue
        loss = loss + (i + 1) * w[i].sum() / n
    return loss


def _known(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Numbers alone decide: nothing is followed."""
    sizes = (torch.arange(3) + 1).tolist()
    parts = x.split(sizes)
    if torch.tensor(sizes).sum() == 6 and int(torch.tensor([2, 1]).max()) == 2:
        w = w * torch.linspace(0, 1, 4, dtype=w.dtype).numpy().sum().item()
    return sum(((part @ w) ** n).sum() for n, part in zip(sizes, parts, strict=True)) + 0 * at


def _plain_cond(predicate: Tensor, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    return (true_fn if predicate else false_fn)(*operands)


def _after_cond(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    cond = torch.cond if is_fake(at) else _plain_cond
    y = cond(at > 0, lambda y: y.sin(), lambda y: y * 2, (x @ w,))
    if y.sum() > at:
        y = cond(at > 1, lambda y: y.cos(), lambda y: y * 3, (y,))
    return y.square().sum()


def _clips(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Decides by a gradient of recomputed blocks."""
    block = ftp.remat(lambda w, h: torch.tanh(h @ w))
    grad = torch.func.grad(lambda w: block(w, block(w, x)).square().sum())(w)
    if (norm := grad.norm()) > 1 + at:
        grad = grad / norm
    return (w - grad).square().sum()


def _in_blocks(w: Tensor, x: Tensor, at: Tensor) -> Tensor:
    """Blocks that run again decide as they did first."""

    def turned(y: Tensor) -> Tensor:
        if y.sum() > at:
            y = y * 2
        for i in range(2):
            y = y.cos() if y.amax() > at * i else y.tanh()
        return y

    def both(y: Tensor) -> Tensor:
        return ftp.remat(turned)(y * 1.5).sin() if at > 1 else turned(-y)

    return checkpoint(both, x @ w, use_reentrant=False).square().sum()


FUNCTIONS = [_early_exit, _unsafe, _writes, _rows, _known, _after_cond, _clips, _in_blocks]


@pytest.mark.cases_by_default(4)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_equal_to_one_device_in_every_way(fn: Callable[..., Tensor]):
    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), certify=True)
    for at in map(torch.tensor, (-3.0, 0.1, 0.6, 1.5, 9.0)):
        at = at.double()
        w = W.clone().requires_grad_()
        expected = fn(w, X, at)
        (grad,) = torch.autograd.grad(expected, w)
        value, found = step(W, X, at)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, grad, rtol=1e-11, atol=1e-11)
    assert not step.lower(W, X, torch.tensor(0.0, dtype=torch.float64)).assumptions


def test_ops_before_a_decision_run_once_and_those_of_a_way_only_in_it():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    lowered = ftp.spmd(_early_exit, mesh, (P("tp"), P(), P()), P()).lower(
        W, X, torch.tensor(0.1, dtype=torch.float64)
    )
    ops = [str(node.target) for node in lowered.graph.graph.nodes]
    assert sum("aten.tanh" in op for op in ops) == 4
    depths = [len(n.meta["branch"]) for n in lowered.graph.graph.nodes if "tanh" in str(n.target)]
    assert depths == [0, 1, 2, 3]


def test_an_assumption_of_one_way_is_checked_there_alone():
    def loss(w, x, at):
        y = x @ w
        if at > 0:
            assert (y < at).all()
            y = 2 * y
        return y.sum()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P("tp"), check_inputs=True)
    high, low = (torch.tensor(n, dtype=torch.float64) for n in (9.0, -9.0))
    assert len(step.lower(W, X, high).assumptions) == 1
    for at in (high, low):
        torch.testing.assert_close(step(W, X, at)[0], loss(W, X, at))
    with pytest.raises(InputError, match="does not hold"):
        step(W, X, high / 90)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_way_that_raises_is_assumed_not_to_be_taken(is_first: bool):
    def loss(w, x, at):
        h = x @ w
        for _ in range(2):
            if (h.mean() > at) == is_first:
                found = h
                break
            h = h * 2
        else:
            raise RuntimeError("not found")
        if at > 8:
            return missing(found)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        return found.square().sum()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P("tp"), check_inputs=True)
    low, high = (torch.tensor(n, dtype=torch.float64) for n in (-9.0, 7.0))
    good, bad = (low, high) if is_first else (high, low)
    torch.testing.assert_close(step(W, X, good)[0], loss(W, X, good))
    claims = step.lower(W, X, good).assumptions
    assert len(claims) == 2 and all("else the function raises" in claim for claim in claims)
    with pytest.raises(InputError, match="does not hold"):
        step(W, X, bad)


def test_a_function_that_raises_in_all_ways_raises_its_own_error():
    def loss(w, x, at):
        if at > 0:
            raise KeyError("one")
        x = x * 2
        if at < -1:
            return absent * 2  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        raise ValueError("two")

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    with pytest.raises((ValueError, NameError)):
        step(W, X, torch.tensor(0.0, dtype=torch.float64))


def _endless(x):
    while x.sum() > 100:
        x = x / 2
    return x


def _two_shapes(x):
    return x[:1] if x.sum() > 0 else x


def _two_structures(x):
    return (x, x) if x.sum() > 0 else x


def _two_numbers(x):
    return x, 1 if x.sum() > 0 else 2


def _in_vmap(x):
    return torch.vmap(lambda row: row if row.sum() > 0 else -row)(x)


def _in_remat(x):
    def of_a_write(x):
        n = x.sum()
        y = x if n > 0 else x.sin()
        n.zero_()
        return y

    return torch.func.grad(lambda x: ftp.remat(of_a_write)(x).sum())(x)


def _other_when_run_again(x, calls=[]):  # noqa: B006
    calls.append(1)
    return x if x.sum() > len(calls) else -x


REFUSED = {
    _endless: r"in more than 32 ways at .*while x.sum\(\) > 100(.|\n)*ftp.static.while_loop",
    _two_shapes: r"It gives float64\[1, 4\] where the condition is true and float64\[6, 4\] where",
    _two_structures: r"Give results of one structure",
    _two_numbers: r"It gives 1 where the condition is true and 2 where it is not, as result 1",
    _in_vmap: r"needs a tensor's value",
    _in_remat: r"needs a tensor's value",
    _other_when_run_again: r"computes another one when it is run again",
}


@pytest.mark.parametrize("fn", REFUSED)
def test_what_is_refused(fn: Callable[[Tensor], Any]):
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P(), P(), strict=True)
    with pytest.raises(TraceError, match=REFUSED[fn]) as error:
        step(X)
    assert "test_paths.py" in str(error.value)


def test_a_number_is_one_beside_tensors_and_in_messages():
    def fn(x):
        n = x.sum().item()
        print(f"{n:.3f}")
        return n * x.half(), x.long() * n, n / 3 + 2**n, abs(-n), n == None  # noqa: E711

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P())(X)
    for a, b in zip(found, fn(X), strict=True):
        if isinstance(b, Tensor):
            assert a.dtype == b.dtype
        torch.testing.assert_close(
            torch.as_tensor(a), torch.as_tensor(b, dtype=torch.as_tensor(a).dtype)
        )


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.tensor([x.sum(), 1.0]),
        lambda x: torch.tensor([x.sum().float(), x[0, 0].item()]),
        lambda x: torch.tensor([[x.sum().item(), 2], [x[0, 0], True]], dtype=torch.float32),
        lambda x: torch.tensor((x.sum().long(), (x > 0).sum().item())),
        lambda x: torch.tensor([x.sum() > 0, True]),
        lambda x: torch.tensor(x.sum().item()),
        lambda x: torch.as_tensor(list(x[0])),
        lambda x: torch.asarray([x.sum(), x.mean().item()]),
        lambda x: x.float().new_tensor([x.sum(), 2]),
    ],
)
def test_a_tensor_of_numbers_of_the_program(made):
    """It has torch's dtype, and no gradient."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mesh = ftp.simulated_mesh((2,), ("tp",))

    def loss(x):
        return (made(x) * x.sum()).double().sum()

    found, want = ftp.spmd(made, mesh, P(None, "tp"), P())(x), made(x)
    assert found.dtype == want.dtype
    torch.testing.assert_close(found, want)
    grads, value = torch.func.grad_and_value(lambda x: (want * x.sum()).double().sum())(x)
    found_value, found_grads = ftp.shard(loss, mesh, P(None, "tp"))(x)
    torch.testing.assert_close(found_value, value)
    torch.testing.assert_close(found_grads, grads)


def test_a_ragged_list_of_numbers_is_refused():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    with pytest.raises(TraceError):
        ftp.spmd(lambda x: torch.tensor([[x.sum(), 1], [2]]), mesh, P(), P())(torch.ones(2))


def _named(n):
    text = f"v{n}"
    other = text
    return 2 if other == "v3" else 3


def _text_of(n):
    return f"v{n}"


def _lines_of(values):
    return [f"{name}: {value:.2f}" for name, value in values.items()]


def _matched(n):
    match f"v{n}":
        case "v3":
            return 2
    return 3


def _iterated(n):
    total = 0
    for letter in f"{n}":
        total += ord(letter)
    return total


def _looped(n):
    total = 0
    for text in [f"v{n}", "v4"]:
        total += text == "v3"
    return total


TEXTS: dict[str, Any] = {
    "named": _named,
    "compared": lambda n: 2 if f"v{n}" == "v3" else 3,
    "looked up": lambda n: {"v3": 2}.get(f"v{n}", 3),
    "key": lambda n: {"v3": 2, f"v{n}": 3}["v3"],
    "measured": lambda n: len(f"{n:05d}") + len(str(n)),
    "method": lambda n: 2 if f"{n}".isdigit() else 3,
    "returned": lambda n: 2 if _text_of(n) == "v3" else 3,
    "returned twice": lambda n: 2 if (lambda: _text_of(n))() in ("v3", "v4") else 3,
    "in a returned one": lambda n: 2 if "3" in _text_of(n) else 3,
    "matched": _matched,
    "iterated": _iterated,
    "padded": lambda n: 2 if f"{n}".rjust(3) == "  3" else 3,
    "replaced": lambda n: len(f"{n}".strip().replace("3", "")),
    "joined": lambda n: 2 if (lambda: "".join([f"v{n}"]))() == "v3" else 3,
    "of a tuple": lambda n: 2 if (lambda: "v%s" % (n,))() == "v3" else 3,  # noqa: UP031
    "listed": lambda n: 2 if [f"v{n}"][0] == "v3" else 3,
    "of a loop": _looped,
    "variable": lambda n: (lambda text: len(text) + (text == "3"))(f"{n}"),
}


@pytest.mark.parametrize("use", TEXTS.values(), ids=TEXTS)
def test_a_text_that_code_decides_by_is_of_the_number(use: Any):
    """It was that of "a value of the program", and the result another one."""
    mesh = ftp.simulated_mesh((2,), ("tp",))
    k = torch.tensor([3, 1])
    step = ftp.spmd(lambda x, k: x * use(k.max().item()), mesh, (P("tp"), P("tp")), P())
    with pytest.warns(ReadWarning):
        torch.testing.assert_close(step(X, k), X * use(3))


@pytest.mark.parametrize("use", [v for k, v in TEXTS.items() if k != "measured"])
def test_a_text_of_a_tensor_is_for_messages(use: Any):
    step = ftp.spmd(lambda x, k: x * use(k.max()), ftp.simulated_mesh((2,), ("tp",)), P(), P())
    with pytest.raises(TraceError, match="needs a tensor's value"):
        step(X, torch.tensor([3, 1]))


@pytest.mark.parametrize(
    "use",
    [
        lambda x: len(str(x)),
        lambda x: 2 if repr(x.sum()) == "tensor(3.)" else 3,
        lambda x: 2 if "3" in f"{x}" else 3,
        lambda x: 2 if "%s" % (x,) == "3" else 3,  # noqa: UP031
        lambda x: 2 if _text_of(x) == "v3" else 3,
    ],
)
def test_no_code_decides_by_the_text_of_a_whole_tensor(use):
    step = ftp.spmd(lambda x: x * use(x), ftp.simulated_mesh((2,), ("tp",)), P(), P())
    with pytest.raises(TraceError, match="needs a tensor's value"):
        step(X)


def test_messages_hold_texts_of_values():
    told: list[str] = []

    def check(is_right: bool, message: str):
        assert is_right, message

    def fn(x):
        n = x.sum()
        told.append(f"{n:.3f} " + str(n.item()))
        check(True, f"sum {n} of {n.item()}")
        error = ValueError(f"sum {n.item():.2f}")
        text = f"sum {n}"
        text += f" of {n.item():.2f} {x}"
        told.append(text)
        told.append(_text_of(n))
        for line in [f"sum {n}", *_lines_of({"sum": n})]:
            told.append(line)
        rows = [("sum", f"{n:.2f}")]
        for name, value in rows:
            told.append(name + value)
        told.append(f"{n}".rjust(10) + f"{n:.2f}".strip().replace("e", "E"))
        return x if text else error

    torch.testing.assert_close(ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P())(X), X)
    assert told[0] == "a value of the program a value of the program"


def test_a_bar_shows_texts_of_values():
    """tqdm shortens the texts that it is given."""
    bar = pytest.importorskip("tqdm").tqdm(disable=True)

    def fn(x):
        bar.set_postfix(loss=x.sum().item(), sum=f"{x.sum():.3f}")
        bar.set_description(f"sum {x.sum().item():.2f}")
        return x

    torch.testing.assert_close(ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P())(X), X)


def test_the_error_of_a_list_names_what_may_be_done():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    with pytest.raises(TraceError, match=re.escape("keep numbers as tensors")):
        ftp.spmd(lambda x: x.reshape(x[0].long().tolist()), mesh, P(), P(), strict=True)(X)


def test_an_assumption_of_one_way_says_so():
    def fn(x):
        assert x.sum() < 100
        if x[0, 0] > 0:
            assert x[0, 1] < 3
            return x * 2
        return -x

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P(), check_inputs=True)
    always, sometimes = step.lower(X).assumptions
    assert always.endswith("x.sum() < 100 is True")
    assert re.search(r"x\[0, 1\] < 3 is True, where the condition at .* is true$", sometimes)
    x = X.clone()
    x[0, :2] = torch.tensor([-1.0, 9.0])
    torch.testing.assert_close(step(x), -x)
    x[0, 0] = 1
    with pytest.raises(ftp.errors.InputError, match="where the condition at"):
        step(x)


def test_an_identity_of_a_bool_that_is_read_is_warned_of():
    def fn(x):
        is_large = (x.sum() > 0).item()
        return x if is_large is True else -x

    with pytest.warns(UserWarning, match=r"is_large is True(.|\n)*write if b"):
        ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P())(X)


def _of_every_kind(x, at):
    n, m, b = at.item(), (x > at).sum().item(), (at > 0).item()
    return {
        "beside a mask": torch.where(x > 0, n, x),  # was rounded to float32
        "bools add up": b + b + True + sum([n > 0, n > -9]),
        "a bool is an int": (-b, ~b, b << 2, isinstance(b, bool) * x, (b & True) | (n > 9)),
        "bits": (m & 5, m >> 1, 1 << (m % 4), 3 ^ m, +m, ~m, *divmod(m, 5), *divmod(n, -0.7)),
        "a power": 2 ** (m - 10) * x,
        "numpy": (np.float64(2) * n, n - np.float64(2)),
    }


@pytest.mark.filterwarnings("ignore:Bitwise inversion")  # of a bool: Python 3.12 and later
def test_numbers_count_as_those_of_python():
    step = ftp.spmd(_of_every_kind, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P()), P())
    for at in torch.tensor([-3.0, 0.1, 1.7], dtype=torch.float64):
        found = flatten(step(X, at))[0]
        for a, b in zip(found, flatten(_of_every_kind(X, at))[0], strict=True):
            torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_a_place_may_be_beyond_the_range_of_the_dtype(dtype):
    def fn(x, at):
        n = at.item()
        x = x.clone()
        x[n - 1] = 7
        return x[n], x[None][:, n], x.narrow(0, n, 3), x[n - 1 : n + 1].long().sum()

    given = torch.arange(40000).to(dtype), torch.tensor(39000)
    found = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P()), P())(*given)
    expected = fn(*given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda x, n: x if f"{n:.1f}" == "0.6" else -x, "needs a tensor's value"),
        (lambda x, n: {f"{n}": 1}[f"{n}"] * x, "needs a tensor's value"),
        (lambda x, n: np.float32(2) * n * x, "beside numpy's float32"),
        (lambda x, n: torch.from_numpy(np.ones(4) * n) * x, "beside numpy's ndarray"),
        (lambda x, n: torch.FloatTensor([n]) * x, "asked for its value"),
        (lambda x, n: x if n.is_integer() else -x, "asked for its value"),
    ],
)
def test_a_number_has_no_value_while_it_is_traced(use: Any, message: str):
    step = ftp.spmd(lambda x: use(x, x.sum().item()), ftp.simulated_mesh((2,), ("tp",)), P(), P())
    with pytest.raises(TraceError, match=message):
        step(X)


def test_tensors_of_two_shapes_are_not_equal():
    """A kernel of points and other points, as of Gaussian processes."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        distance = (a[:, None] - b).square().sum(-1)
        return distance if torch.equal(a, b) or a.equal(b) else distance.neg().exp()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = x @ w
        return kernel(y, y[:2]).sum() + kernel(y, x).sum() + kernel(x, x).sum()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"), batch_specs=P("tp"))
    for w in (W, torch.eye(4, dtype=W.dtype)):
        grads, value = torch.func.grad_and_value(loss)(w, X)
        torch.testing.assert_close(step(w, X), (value, grads))
    with pytest.raises(TraceError, match="shape"):
        ftp.spmd(lambda x: x.sum() if torch.allclose(x, x[:2]) else x, step.mesh, P(), P())(X)


def test_runs_that_make_constants_and_write_to_them():
    """Metrics by thresholds, and by a table that is filled."""

    def score(x: Tensor) -> Tensor:
        at = torch.linspace(0, 1, 5)
        share = (x[..., None] >= at).double().mean((0, 1))
        pairs = torch.zeros(2, 2, dtype=x.dtype)
        pairs[1, 1] = x.sum()
        pairs[0, 1] = share.sum() - pairs[1, 1]
        pairs[0, 0] = 3 - pairs[0, 1] - pairs[1, 1]
        if torch.isnan(share / share).any():
            share = share + 1
        if pairs.diagonal().sum() == pairs.sum() or pairs.sum() > 3:
            return pairs.square().sum()
        return (share * pairs.sum()).mean() + pairs[0, 1]

    step = ftp.spmd(score, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    for x in (X, -X, X * 0):
        torch.testing.assert_close(step(x), score(x))


@pytest.mark.filterwarnings("ignore:.*:ftp.errors.ReadWarning")
def test_masks_without_dims():
    """Scores of which some are undefined, each a number of its own."""

    def scores(x: Tensor) -> tuple[Tensor, ...]:
        total = x.sum()
        valid, score = total > 0, torch.ones((), dtype=x.dtype)
        score[valid] = 1 - x.square().sum()[valid] / 2
        score[~valid] = 0.0
        rows, grown = x.clone(), x.clone()
        rows[valid] = 3.0
        grown[~valid] = x * 2
        return score, rows, grown, x[valid], x[torch.tensor(True)].sum()

    step = ftp.spmd(scores, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    for x in (X, -X):
        for _ in range(2):
            torch.testing.assert_close(step(x), scores(x))


def test_whether_a_value_is_in_a_tensor():
    def loss(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        y = x @ w
        if 0 not in ids or torch.tensor(5) in ids:
            y = y.tanh()
        weights = [i for i in (1, 2) if i in ids]
        return y.square().mean() * sum(weights) if 2 in ids and weights else y.sum()

    step = ftp.shard(
        loss, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"), batch_specs=(P("tp"), P("tp"))
    )
    for ids in ([0, 1, 2, 3], [4, 4, 4, 4], [0, 5, 2, 0], [1, 2, 3, 1], [0, 0, 0, 0]):
        at = torch.tensor(ids)
        grads, value = torch.func.grad_and_value(loss)(W, X, at)
        torch.testing.assert_close(step(W, X, at), (value, grads))


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")])
def test_decisions_in_layers_that_run_again(spec: P):
    """Both ways read a reshard that is made after the value, and before the gradient, is chosen."""

    def layer(_: Tensor, h: Tensor) -> Tensor:
        return (h.sin() @ h if h.sum() > 0 else h.cos()) * 0.3 + h

    def loss(w: Tensor) -> Tensor:
        return ftp.scan(layer, torch.zeros(3), w.tanh(), remat="nothing").square().sum()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), spec, certify=True)
    for w in (W, -W):
        grad, expected = torch.func.grad_and_value(loss)(w)
        value, found = step(w)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, grad, rtol=1e-11, atol=1e-11)


def test_a_decision_by_a_curvature():
    """torch skips products of the zero tangents that the first run of a trace makes."""

    def loss(w: Tensor, x: Tensor, d: Tensor) -> Tensor:
        grad = torch.func.grad(lambda w: (2 * x @ w).sin().sum())
        product = torch.func.jvp(grad, (w,), (d,))[1]
        return ((w + d) if (d * product).sum() > 0 else (w - product)).square().sum()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P("tp"), certify=True)
    d = W.sin()
    for w in (W, -W):  # of curvatures of two signs
        grad, expected = torch.func.grad_and_value(loss)(w, X, d)
        value, found = step(w, X, d)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, grad, rtol=1e-11, atol=1e-11)
