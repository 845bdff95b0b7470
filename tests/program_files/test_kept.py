"""Plans that are kept: found for the same program only, and right whatever the cache holds."""

import os
import tempfile
from pathlib import Path
from typing import Any

import own_process  # type: ignore[import-not-found]
import pytest
import torch
from few_or_many import few_or_many
from programs import AXES, Drawn, programs

import ftp
from ftp import P
from ftp.errors import PlanningError
from ftp.program_files import kept
from ftp.program_files.kept import KEEP, KeptProgram
from ftp.rules.own import OWN_RULES, RULES
from ftp.sharding.pytree import flatten

TP = ftp.simulated_mesh((2,), ("tp",))
W, X = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plans' folder of a cache of the test's own; plans of simulated meshes are kept too, and
    no rule is a user's, as those that doctests register.
    """
    for op in [op for op in RULES if op.namespace in ("aten", "prims") and op not in OWN_RULES]:
        monkeypatch.delitem(RULES, op)
    for op, entry in OWN_RULES.items():
        monkeypatch.setitem(RULES, op, entry)
    monkeypatch.setenv("FTP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(KEEP, "1")
    return tmp_path / "cache" / "plans"


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(flatten(a)[0], flatten(b)[0], strict=True))


def run(step: ftp.Step, *args: Any) -> tuple[Any, bool]:
    """What a step returns, and whether its plan was found."""
    result = step(*args)
    (planned,) = step._cache.programs.values()
    return result, isinstance(planned.program, KeptProgram)


def plans(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ftp"))


def check(make: Any, args: tuple[Any, ...]) -> None:
    """A second step finds the first one's plan, and gives its bits; so does a donating one."""
    first, _ = run(make(), *args)
    second, is_found = run(make(), *args)
    assert is_found and same(first, second)


def step_of(drawn: Drawn, gradients: bool) -> ftp.Step:
    mesh = ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)])
    specs = tuple(i.spec for i in drawn.inputs)
    shared = {
        "data_axes": drawn.data_axes,
        "reshard_after_forward": drawn.reshard_after_forward,
    }
    if not gradients:
        return ftp.spmd(drawn.function, mesh, specs, drawn.out_specs, **shared)
    count = sum(i.is_parameter for i in drawn.inputs)
    return ftp.shard(
        lambda params, *batch: drawn.function(*params, *batch)[0],
        mesh,
        specs[:count],
        batch_specs=specs[count:],
        **shared,
    )


@few_or_many(programs(gradients=False, longest=14), few=1, many=150)
def test_values(folder: Path, drawn: Drawn):
    check(lambda: step_of(drawn, False), tuple(drawn.values))


@pytest.mark.slow
@few_or_many(programs(gradients=True, longest=14), few=10, many=150)
def test_gradients(folder: Path, drawn: Drawn):
    count = sum(i.is_parameter for i in drawn.inputs)
    args = (tuple(drawn.values[:count]), *drawn.values[count:])
    check(lambda: step_of(drawn, True), args)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).square().sum()


def test_only_the_same_program_is_found(folder: Path):
    def found(fn: Any = loss, spec: P = P(None, "tp"), x: torch.Tensor = X, **options: Any) -> bool:
        step = ftp.shard(fn, TP, {"w": spec}, **options)
        (value, grads), is_found = run(step, {"w": W.to(x.dtype)}, x)
        expected, due = torch.func.grad_and_value(fn)({"w": W.to(x.dtype)}, x)
        torch.testing.assert_close(value, due, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-5)
        return is_found

    offset, scale = torch.ones(4, dtype=torch.float64), [2.0]

    def captured(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"] + offset).sum() * scale[0]

    def of_region(policy: Any) -> Any:
        return lambda p, x: ftp.remat(lambda w, x: (x @ w).sin(), policy)(p["w"], x).sum()

    assert not found() and found()
    assert not found(spec=P("tp")) and not found(spec=P())
    assert not found(x=X[:1]) and not found(x=X.float())
    assert not found(prefetch=0) and not found(hardware="h200") and not found(data_axes=("tp",))
    assert not found(fn=lambda p, x: (x @ p["w"]).square().sum() * 2)
    assert not found(captured) and found(captured)
    offset = offset * 3  # values of captured tensors are this process' own
    assert found(captured)
    scale[0] = 3.0
    assert not found(captured)
    assert not found(of_region("nothing")) and not found(of_region("products"))
    assert found(of_region("nothing"))
    assert not found(of_region(lambda op: False)) and not found(of_region(lambda op: False))
    assert not found(strict=True) and not found(strict=True)
    assert not found(certify=True) and not found(certify=True)
    assert found()


def test_a_program_with_a_rule_of_the_users_is_not_kept(folder: Path):
    mm, own = torch.ops.aten.mm.default, dict(RULES)
    try:
        ftp.einsum(mm, "m k, k n -> m n")
        for _ in range(2):
            assert not run(ftp.shard(loss, TP, {"w": P()}), {"w": W}, X)[1]
        assert not plans(folder)
    finally:
        RULES[mm] = own[mm]


def test_a_rule_that_a_user_registers_before_the_first_step_is_the_users():
    code = """
import ftp, torch
mm = torch.ops.aten.mm.default
ftp.einsum(mm, "m k, k n -> m n")
step = ftp.shard(lambda w, x: (x @ w).sum(), ftp.simulated_mesh((2,), ("tp",)), ftp.P("tp"))
step(torch.ones(2, 2), torch.ones(2, 2))
"""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "FTP_CACHE": cache, KEEP: "1"}
        assert own_process.run(code, env=env).returncode == 0
        assert not list(Path(cache).glob("plans/*.ftp"))


def test_what_is_wrong_with_a_file_costs_a_plan(folder: Path):
    def found() -> bool:
        (value, _), is_found = run(ftp.shard(loss, TP, {"w": P(None, "tp")}), {"w": W}, X)
        assert torch.allclose(value, loss({"w": W}, X))
        return is_found

    assert not found()
    (path,) = plans(folder)
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-1], whole[:200] + b"?" + whole[201:], b"other"):
        path.write_bytes(content)
        assert not found()
        assert path.read_bytes() == whole and found()
    path.chmod(0o622)
    assert not found() and found()
    if not os.geteuid():
        os.chown(path, 4242, -1)
        assert not found()


def test_ranks_read_a_plan_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """While another rank of the host holds the lock: a rank asks for it only to plan, and waits no
    longer than until the plan is there.
    """
    fcntl = pytest.importorskip("fcntl")
    asked, flock = [], fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *given: (asked.append(1), flock(*given)))

    def found() -> bool:
        return run(ftp.shard(loss, TP, {"w": P(None, "tp")}), {"w": W}, X)[1]

    assert not found() and len(asked) == 1
    (path,) = plans(folder)
    (lock,) = folder.glob("*.lock")
    whole = path.read_bytes()
    with lock.open() as held:
        flock(held, fcntl.LOCK_EX)
        assert found() and len(asked) == 1
        for there in (lambda: None, lambda: path.write_bytes(b"damaged")):
            path.unlink()
            there()

            def plan_of_another_rank(_: float) -> None:
                path.with_suffix(".draft").write_bytes(whole)
                path.with_suffix(".draft").rename(path)

            with monkeypatch.context() as patched:
                patched.setattr(kept.time, "sleep", plan_of_another_rank)
                assert found()
    assert len(asked) == 1 + 2 * 2


def test_the_switch(folder: Path, monkeypatch: pytest.MonkeyPatch):
    step = ftp.shard(loss, TP, {"w": P(None, "tp")})
    monkeypatch.setenv(KEEP, "0")
    assert not run(step, {"w": W}, X)[1] and not plans(folder)
    monkeypatch.delenv(KEEP)  # simulated meshes are planned at every start
    assert not run(ftp.shard(loss, TP, {"w": P(None, "tp")}), {"w": W}, X)[1]
    assert not plans(folder)


def test_the_plans_used_last_stay(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def found(size: int) -> bool:
        return run(ftp.spmd(lambda x: x.sin().sum(), TP, P("tp")), torch.ones(size))[1]

    assert not found(4)
    (first,) = plans(folder)
    monkeypatch.setattr(kept, "LIMIT", 5 * first.stat().st_size // 2)
    os.utime(first, (1, 1))
    assert not found(6) and found(4)
    second = next(p for p in plans(folder) if p != first)
    os.utime(second, (2, 2))
    assert not found(8)
    assert first in plans(folder) and second not in plans(folder)
    assert found(4) and found(8) and not found(6)


def test_errors_of_the_planner_are_its_own(folder: Path):
    step = ftp.spmd(lambda x: ftp.constrain(x, P("dp")), TP, P("tp"))
    with pytest.raises(ftp.errors.SpecError, match="dp"):
        step(torch.ones(4))
    assert not plans(folder)
    with pytest.raises((PlanningError, ftp.FtpError)):
        step(torch.ones(4))


FOUND = """
import sys, torch, ftp
from ftp import P
mesh = ftp.simulated_mesh((2,), ("tp",))
opt = ftp.optim.from_torch(torch.optim.AdamW, fused=True)
ftp.functionalize(torch.nn.Linear(4, 4))
params = {"w": torch.randn(4, 4)}
state, x = opt.init(params), torch.randn(3, 4)

def train(params, state, x):
    grads, loss = torch.func.grad_and_value(lambda p: (x @ p["w"]).sin().mean())(params)
    return (*opt.update(grads, state, params), loss)

specs = {"w": P("tp")}, opt.specs(params, {"w": P("tp")}), P()
ftp.spmd(train, mesh, specs, specs)(params, state, x)
asked = ("planning.planner", "partitioning.partition", "passes.bucket_collectives", "api.families",
         "runtime.pipelines", "certification", "report")
print(*(name for name in asked if "ftp." + name in sys.modules))
"""


def test_a_step_whose_plan_is_found_loads_no_planner(tmp_path: Path) -> None:
    env = {**os.environ, "FTP_CACHE": str(tmp_path), KEEP: "1"}
    first, second = (own_process.run(FOUND, env=env) for _ in range(2))
    made = "planning.planner partitioning.partition passes.bucket_collectives"
    assert (first.stdout.strip(), second.stdout.strip()) == (made, ""), second.stderr


TWO_RANKS = """
import os, sys, torch, ftp
from ftp import P
rank = int(not os.fork())
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEET']}", rank=rank, world_size=2
)
mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
x = torch.arange(24.0, dtype=torch.float64).view(4, 6)
FUNCTIONS = {  # by the collective that each needs
    "all_reduce": (lambda x: x.square().sum(), P("tp"), P()),
    "all_gather": (lambda x: x.square(), P("tp"), P()),
    "reduce_scatter": (lambda x: x @ x.T, P(None, "tp"), P("tp")),
}
for name, (fn, given, asked) in FUNCTIONS.items():
    step = ftp.spmd(fn, mesh, given, asked)
    found = step(ftp.device_put(x, mesh, given))
    is_loaded = "torch.distributed._functional_collectives" in sys.modules
    assert torch.equal(ftp.device_get(found, mesh, asked), fn(x)), name
    (planned,) = step._cache.programs.values()
    if not rank:
        print(name, type(planned.program).__name__, is_loaded)
sys.stdout.flush()
torch.distributed.barrier()
if rank:
    os._exit(0)
assert not os.wait()[1]
"""


@pytest.mark.slow
def test_a_plan_that_is_found_loads_no_fake_results_of_collectives(tmp_path: Path) -> None:
    """Those of gathers, of a module of torch; a prepared graph does without."""
    for at in range(2):
        env = {**os.environ, "FTP_CACHE": str(tmp_path), "MEET": str(tmp_path / f"meet {at}")}
        found = own_process.run(TWO_RANKS, env=env)
    assert found.stdout.splitlines() == [
        "all_reduce KeptProgram False",
        "all_gather KeptProgram False",
        "reduce_scatter KeptProgram False",
    ], found.stderr
