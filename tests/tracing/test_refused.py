"""docs/refused.md: each form gives the error that the page quotes; what stands instead runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._higher_order_ops import while_loop
from torch.nn import functional as F

import ftp
from ftp import P

PAGE = Path(__file__).resolve().parents[2] / "docs/refused.md"
ROWS = re.findall(r"^\| `(.+?)` \| \"(.+?)\" \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "ftp": ftp,
    "while_loop": while_loop,
    "MEAN": torch.zeros(4, dtype=torch.float64),
    "SPARSE": torch.eye(6, dtype=torch.float64).to_sparse(),
    "DENSE": torch.eye(6, dtype=torch.float64),
    "MODULE": torch.nn.Linear(4, 4),
}


def arguments() -> tuple[torch.Tensor, ...]:
    """``w``, ``x``, ``m`` and ``k``."""
    x = torch.linspace(-2, 3, 24, dtype=torch.float64).sin().reshape(6, 4)
    k = torch.tensor([1, 0, 2, 3, 0, 0])
    return x[:4].clone(), x, k > 0, k


def function(source: str) -> Any:
    return eval(f"lambda w, x, m, k: {source}", dict(NAMES))


def sharded(source: str, *, strict: bool = False) -> Any:
    mesh = ftp.simulated_mesh((2,), ("tp",))
    specs = (P(None, "tp"), P("tp"), P(), P("tp"))
    return ftp.spmd(function(source), mesh, specs, strict=strict)(*arguments())


@pytest.mark.parametrize(("source", "text", "instead"), ROWS, ids=[row[0] for row in ROWS])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_refusal(source: str, text: str, instead: str):
    with pytest.raises(ftp.FtpError, match=re.escape(text)):
        sharded(source, strict=True)
    if found := re.fullmatch("`(.+?)`(, or a key)?", instead):
        expected = function(found[1])(*arguments())
        torch.testing.assert_close(sharded(found[1]), expected)
    else:
        assert instead.startswith("a key: ")


def reduced(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def summed(x: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    assert world is not None
    return funcol.all_reduce(x, "sum", world) * 1


@pytest.mark.parametrize("fn", [reduced, summed])
@pytest.mark.parametrize("of_a_rank", [False, True])
@pytest.mark.filterwarnings("ignore::ftp.errors.StaleCaptureWarning")
def test_collectives_of_torch_are_refused_where_there_is_a_process_group(fn: Any, of_a_rank: bool):
    """They were errors of ftp's own graph; one had a rule by trial, in a world of one rank."""
    mesh = ftp.simulated_mesh((2,), ("tp",))
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ftp.errors.TraceError, match=r"test_refused.*is a collective. In place"):
            ftp.spmd(ftp.local(fn, mesh, P("tp"), P("tp")) if of_a_rank else fn, mesh, P("tp"))(
                torch.ones(4, 2)
            )
    finally:
        dist.destroy_process_group()


@torch.library.custom_op("tests_refused::doubled", mutates_args=("out",))
def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(2 * x)


def test_a_custom_op_that_writes_is_refused_with_its_line():
    """torch's functionalization said that the operator's output has alias annotations."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        doubled(x, out)
        return out + x

    mesh = ftp.simulated_mesh((2,), ("tp",))
    with pytest.raises(
        ftp.errors.TraceError,
        match=r"doubled.default writes to an operand at .*doubled\(x, out\), and .* mutates_args=",
    ):
        ftp.spmd(fn, mesh, P("tp"))(torch.ones(4))


def test_every_row_is_run():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(ROWS) > 25
