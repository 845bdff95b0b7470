"""Programs that people run, each in a compact form of our own: what it computes with its
parameters, a batch, and where its parameters are cut.

Their families are in ``public_language.py``, ``public_vision.py``, ``public_science.py``,
``public_structure.py``, ``public_methods.py``, ``public_signals.py``, ``public_recent.py``,
``public_values.py``, ``public_unseen.py`` and ``public_solvers.py``. All are float64 and small, of
sizes that few meshes divide.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from real_models import float64
from torch import Tensor, nn

import ftp
from ftp import P


@dataclass(frozen=True)
class Program:
    """``loss(params, *batch)`` is a scalar.

    Attributes:
        cuts: path patterns to specs over "tp"; what they do not name is cut on its first dim, but
            for vectors.
        batch_specs: of the batch on a mesh that has "dp".
    """

    loss: Callable[..., Tensor]
    params: dict[str, Tensor]
    batch: tuple[Any, ...]
    cuts: Mapping[str, P] = field(default_factory=dict)
    batch_specs: Any = P("dp")


def of_model(
    model: nn.Module,
    loss: Callable[..., Tensor],
    *batch: Any,
    cuts: Mapping[str, P] | None = None,
    batch_specs: Any = P("dp"),
) -> Program:
    """A program of a module; ``loss(call, *batch)``, where ``call`` is the module."""
    fn, params = ftp.functionalize(float64(model))

    def of_params(params: Any, *batch: Any) -> Tensor:
        return loss(lambda *args, **kwargs: fn(params, *args, **kwargs), *batch)

    params = {path: p.detach() for path, p in params.items()}
    return Program(of_params, params, batch, cuts or {}, batch_specs)


def specs_of(program: Program, axis: str) -> Any:
    """Where the parameters live on a mesh: its own cuts over "tp", or every parameter on its first
    dim over "dp", as ZeRO-3 has it.
    """
    if axis == "dp":
        return {path: P("dp") if p.ndim else P() for path, p in program.params.items()}
    named = ftp.plan(program.params, program.cuts) if program.cuts else {}
    return {
        path: named[path] if named and named[path] else P("tp") if p.ndim > 1 else P()
        for path, p in program.params.items()
    }


def reference(program: Program) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by plain torch on one device."""
    given = {path: p.clone().requires_grad_() for path, p in program.params.items()}
    loss = program.loss(given, *program.batch)
    found = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    return loss.detach(), {
        path: torch.zeros_like(p) if g is None else g
        for (path, p), g in zip(program.params.items(), found, strict=True)
    }
