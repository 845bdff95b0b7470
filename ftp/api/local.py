"""``ftp.local`` with the kernel that runs it on simulated ranks outside of a step."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from ftp.api.shard import spmd
from ftp.per_rank.local import local
from ftp.per_rank.program import LOCAL, program_of
from ftp.sharding.mesh import SimulatedMesh
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import disable_current_modes

__all__ = ["local"]


@torch.library.impl("ftp::local", "CompositeExplicitAutograd")
def _on_simulated_ranks(xs: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    """Run per-rank code on whole tensors outside of a step, as a step that runs only this code."""
    run = _simulated_program(program, xs[0].device.type)
    with torch.no_grad():
        return [x.clone() for x in run([x.detach() for x in xs])]


@lru_cache(maxsize=1024)
def _simulated_program(
    key: str, device_type: str
) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """The program of all simulated ranks that run this code."""
    program = program_of(key)
    axes = program.axes
    mesh = SimulatedMesh(tuple(axes.values()), tuple(axes), device_type)
    metas = [
        torch.empty(p.global_shape(axes), dtype=p.dtype, device="meta") for p in program.operands
    ]
    step = spmd(
        lambda *xs: LOCAL(list(xs), key),
        mesh,
        tuple(p.spec for p in program.operands),
        [p.spec for p in program.results],
    )
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        return step.lower(*metas)._program.run
