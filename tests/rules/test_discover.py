"""Ops without a rule: what trials find, what is never tried, and that only what is proven is
used.
"""

import json
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import DiscoveryWarning, PlanningError, ReplicationWarning
from ftp.rules.call import Call
from ftp.rules.proof import discover as discovery
from ftp.rules.proof.case import call_of
from ftp.rules.proof.discover import discover, signature
from ftp.rules.proof.findings import TrialFinding, cache_file, load, save
from ftp.rules.proof.sandbox import Ended, apart

aten = torch.ops.aten


@torch.library.custom_op("ftp_tests::scaled_rows", mutates_args=())
def scaled_rows(x: Tensor, w: Tensor) -> Tensor:
    return x.softmax(-1) @ w


@scaled_rows.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[1])


@torch.library.custom_op("ftp_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("ftp_tests::aborts", mutates_args=())
def aborts(x: Tensor) -> Tensor:
    os.abort()


@torch.library.custom_op("ftp_tests::whole", mutates_args=())
def whole(x: Tensor) -> Tensor:
    return x - x.mean() + x.std()


@whole.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("ftp_tests::writes", mutates_args=("x",))
def writes(x: Tensor) -> Tensor:
    x.add_(1)
    return x.clone()


@torch.library.custom_op("ftp_tests::writes_unsaid", mutates_args=())
def writes_unsaid(x: Tensor) -> Tensor:
    x.add_(1)
    return x.clone()


@torch.library.custom_op("ftp_tests::far_out", mutates_args=())
def far_out(x: Tensor) -> Tensor:
    """Of all of ``x``, though it is zero wherever trials look."""
    return (x > 1e3) * x.mean()


@torch.library.custom_op("ftp_tests::even_only", mutates_args=())
def even_only(x: Tensor) -> Tensor:
    """Pointwise where the first dim has an even number of rows."""
    return x.exp() if x.shape[0] % 2 == 0 else x.exp() - x.sum()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FTP_CACHE", str(tmp_path))
    monkeypatch.setattr(discovery, "_known", {})
    monkeypatch.setattr(discovery, "_timeouts", 0)


def call(op, *args, results: tuple[Tensor, ...] | None = None) -> Call:
    made = op(*args) if results is None else results
    return call_of(op, args, {}, made if isinstance(made, tuple) else (made,))


def floats(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("op", "args", "rule", "linear"),
    [
        (aten.mm.default, (floats(16, 32), floats(32, 5)), "a c, c b -> a b {c}", ((0,), (1,))),
        pytest.param(
            aten._softmax.default,
            (floats(16, 32), 1, False),
            "a [b] -> a [c]",
            (),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            aten.amax.default,
            (floats(16, 32), [0]),
            "[b] a -> a",
            (),
            marks=pytest.mark.slow,
        ),
        (aten.cumsum.default, (floats(16, 32), 0), "[b] a -> [c] a", ((0,),)),
        pytest.param(
            aten.add.Tensor,
            (floats(9, 4), floats(9, 4)),
            "a b, a b -> a b",
            ((0, 1),),
            marks=pytest.mark.slow,
        ),
        (aten.renorm.default, (floats(16, 32), 2, 0, 0.3), "a [b] -> a [c]", ()),
        (
            torch.ops.ftp_tests.scaled_rows.default,
            (floats(4, 8, 3), floats(3, 9)),
            "a b [d], [e] c -> a b c",
            ((1,),),
        ),
    ],
)
def test_what_is_found(op, args, rule, linear):
    found = discover(call(op, *args))
    assert (found.rule, found.linear) == (rule, linear)
    assert found.cases > 5
    line = found.line(op)
    assert line.startswith(f"ftp.rule(torch.ops.{op}, {rule!r}")
    first, discovery._known = found, {}
    cache_file(signature(call(op, *args))).unlink()
    assert discover(call(op, *args)) == first, "the same on every rank, whatever it has cached"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: call(aten.nonzero.default, floats(4)), "depends on values in shape, or on random"),
        (lambda: call(aten.bernoulli.default, torch.rand(4)), "random numbers"),
        (lambda: call(aten.view.default, floats(4, 3), [12]), "changes or aliases"),
        (lambda: call(torch.ops.ftp_tests.writes.default, floats(4)), "changes or aliases"),
        (lambda: call(torch.ops.ftp_tests.noisy.default, floats(4, 3)), "gives the same twice"),
        (
            lambda: call(torch.ops.ftp_tests.writes_unsaid.default, floats(4, 3)),
            "gives the same twice",
        ),
        (lambda: call(torch.ops.ftp_tests.far_out.default, floats(4, 3)), "not only zeros"),
        (lambda: call(torch.ops.ftp_tests.whole.default, floats(4, 3)), "no placement holds"),
        (
            lambda: call(torch.ops.ftp_tests.aborts.default, floats(4), results=(floats(4),)),
            "ended early: signal 6",
        ),
    ],
)
def test_what_is_never_used(made, reason):
    found = discover(made())
    assert not found.rule
    assert reason in found.reason


def test_what_holds_on_some_sizes_only_is_not_proven():
    found = discover(call(torch.ops.ftp_tests.even_only.default, floats(4, 6)))
    assert not found.rule, found


def test_an_op_in_a_program_is_divided():
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    step = ftp.spmd(
        lambda x, w: torch.ops.ftp_tests.scaled_rows(x, w),
        ftp.simulated_mesh((2,), ("dp",)),
        (P("dp"), P()),
        P("dp"),
    )
    with pytest.warns(
        DiscoveryWarning, match="found by trial, is proven on 15 generated calls, and is used"
    ) as caught:
        got, collectives = step(x, w), step.lower(x, w).collectives
    torch.testing.assert_close(got, scaled_rows(x, w))
    assert (
        "ftp.rule(torch.ops.ftp_tests.scaled_rows.default, 'a [c], [d] b -> a b', linear=[(1,)])"
        in str(caught[0].message)
    )
    assert "test_discover.py" in str(caught[0].message)
    assert collectives == ()


def test_an_op_without_placements_is_replicated():
    x = torch.randn(5, 3, dtype=torch.float64)
    step = ftp.spmd(torch.ops.ftp_tests.whole, ftp.simulated_mesh((2,), ("dp",)), P("dp"), P("dp"))
    with pytest.warns(
        ReplicationWarning,
        match="None was found by trial: no placement holds on all generated calls",
    ) as caught:
        got = step(x)
    torch.testing.assert_close(got, whole(x))
    assert "ftp.rule(torch.ops.ftp_tests.whole.default, '[a] [b] -> [c] [d]')" in str(
        caught[0].message
    )


def test_strict_names_what_was_found():
    step = ftp.spmd(
        lambda x, w: torch.ops.ftp_tests.scaled_rows(x, w),
        ftp.simulated_mesh((2,), ("dp",)),
        (P("dp"), P()),
        strict=True,
    )
    with pytest.raises(
        PlanningError,
        match=r"has no sharding rule\. It is called at .*\n"
        r"  State one, such as this one proven on 15",
    ):
        step(floats(5, 3), floats(3, 4))


def test_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FTP_DISCOVERY", "0")
    monkeypatch.setattr(discovery, "apart", lambda *_: pytest.fail("nothing is to be tried"))
    assert discover(call(aten.mm.default, floats(2, 3), floats(3, 4))) == TrialFinding(
        reason="FTP_DISCOVERY is 0"
    )


def test_more_dims_than_letters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FTP_DISCOVERY", "0")
    step = ftp.spmd(
        lambda *xs: torch.ops.aten._foreach_exp(xs), ftp.simulated_mesh((2,), ("dp",)), strict=True
    )
    with pytest.raises(PlanningError, match=r"\[y\] \[z\], \[aa\] \[ab\] -> \[ac\] \[ad\], "):
        step(*(floats(2, 2) for _ in range(14)))


def test_the_cache_is_by_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = discover(call(aten.mm.default, floats(16, 32), floats(32, 5)))
    (written,) = (tmp_path / "discovery").iterdir()
    assert torch.__version__ in json.loads(written.read_text())["key"]
    monkeypatch.setattr(discovery, "_known", {})
    monkeypatch.setattr(discovery, "_search", lambda *_: pytest.fail("it is in the cache"))
    assert discover(call(aten.mm.default, floats(64, 128), floats(128, 7))) == found, (
        "other sizes are the same form"
    )
    assert signature(call(aten.mm.default, floats(4, 4), floats(4, 4))) != signature(
        call(aten.mm.default, floats(4, 3), floats(3, 4))
    )
    written.write_text("{")
    monkeypatch.undo()
    monkeypatch.setattr(discovery, "_known", {})
    monkeypatch.setenv("FTP_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="is ignored: JSONDecodeError"):
        assert discover(call(aten.mm.default, floats(16, 32), floats(32, 5))) == found
    assert json.loads(written.read_text())["finding"]["rule"] == found.rule


@pytest.mark.parametrize(
    ("op", "args", "planted", "linear", "right"),
    [
        (torch.ops.ftp_tests.whole.default, (floats(4, 3),), "a b -> a b", (), ""),
        (aten._softmax.default, (floats(16, 32), 1, False), "a b -> a b", (), "a [b] -> a [c]"),
        (
            aten._softmax.default,
            (floats(16, 32), 1, False),
            "a [b] -> a [c]",
            ((0,),),
            "a [b] -> a [c]",
        ),
        (
            aten._softmax.default,
            (floats(16, 32), 1, False),
            "a b, c -> d",
            ((7,),),
            "a [b] -> a [c]",
        ),
    ],
)
def test_what_is_cached_is_proven_before_it_is_used(op, args, planted, linear, right):
    """The code behind an op may have changed under its name, or the file."""
    made = call(op, *args)
    save(signature(made), TrialFinding(planted, linear, cases=15))
    found = discover(made)
    assert (found.rule, found.linear) == (right, ())
    assert load(signature(made)) == found


def test_a_finding_that_others_can_write_is_passed_over():
    made = call(aten._softmax.default, floats(16, 32), 1, False)
    save(signature(made), TrialFinding(reason="planted"))
    cache_file(signature(made)).chmod(0o666)
    with pytest.warns(
        UserWarning,
        match=r"is ignored: PermissionError: .* can be written by others \(mode 666\)",
    ):
        assert discover(made).rule == "a [b] -> a [c]"
    assert cache_file(signature(made)).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FTP_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert discover(call(aten.mm.default, floats(16, 32), floats(32, 5))).rule


def test_a_child_that_hangs():
    started = time.monotonic()
    assert apart(lambda: time.sleep(60), cpu_seconds=5, seconds=0.2) == Ended(
        True, "more than 0.2 s"
    )

    def spins() -> None:
        while True:
            pass

    assert apart(spins, cpu_seconds=1, seconds=60) == Ended(True, "more than 1 s of processor time")
    assert time.monotonic() - started < 30


def test_a_child_that_fails():
    assert apart(lambda: 1 / 0, cpu_seconds=5, seconds=30) == Ended(
        False, "ZeroDivisionError: division by zero"
    )
    assert apart(lambda: os.abort(), cpu_seconds=5, seconds=30) == Ended(False, "signal 6")


def test_trials_that_run_too_long_are_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(discovery, "apart", lambda *_: Ended(True, "more than 45 s"))
    for args in ((floats(2, 3), floats(3, 4)), (floats(3, 3), floats(3, 3))):
        assert (
            discover(call(aten.mm.default, *args)).reason == "the trial ended early: more than 45 s"
        )
    assert (
        discover(call(aten.exp.default, floats(2))).reason == "trials of 2 other ops ran too long"
    )
    assert not any((tmp_path / "discovery").iterdir()), (
        "a busy machine is no reason to give an op up for good"
    )
