"""``python -m ftp report``: the report of a program from a file's function or a transformers
config, on a mesh that need not exist.
"""

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from ftp.api.shard import shard
from ftp.errors import ReportError
from ftp.functional.functionalize import functionalize
from ftp.plans import from_hf
from ftp.report.lowered import Lowered
from ftp.report.visualize import program_page
from ftp.sharding.mesh import AbstractMesh
from ftp.sharding.spec import P

CONTRACT = (
    "The function takes the mesh and returns a Lowered, or a tuple (loss_fn, params, specs,"
    " batch[, batch_specs]), batch a tuple of the"
    " arguments of loss_fn after params."
)


def parse_mesh(
    text: str, device_type: str = "cpu", ranks_per_host: int | None = None
) -> AbstractMesh:
    """
    >>> parse_mesh("dp=64,tp=8").axes
    {'dp': 64, 'tp': 8}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdigit() or int(size) < 1 or name in axes:
            raise ReportError(
                f"--mesh {text!r}: {part.strip()!r} is no axis. Give distinct name=size pairs, as"
                " in --mesh dp=64,tp=8."
            )
        axes[name] = int(size)
    ranks = math.prod(axes.values())
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ReportError(f"--ranks-per-host {ranks_per_host}: give at least 1.")
    hosts = [f"host {rank // ranks_per_host}" for rank in range(ranks)] if ranks_per_host else None
    return AbstractMesh(tuple(axes.values()), tuple(axes), device_type=device_type, hosts=hosts)


def function_of(target: str, contract: str) -> Callable[..., Any]:
    """The function ``FILE:FUNCTION``; ``contract``: its arguments and result, for messages."""
    file, _, name = target.rpartition(":")
    if not file or not name:
        raise ReportError(f"{target!r} is no FILE:FUNCTION, such as train.py:report. {contract}")
    function = getattr(_module(file), name, None)
    if not callable(function):
        raise ReportError(f"{file} has no function {name!r}. {contract}")
    return function


def of_file(target: str, mesh: AbstractMesh, hardware: str | None = None) -> Lowered:
    """The program of ``FILE:FUNCTION``. The file is run, as ``python FILE`` would import it."""
    made = function_of(target, CONTRACT)(mesh)
    if isinstance(made, Lowered):
        return made
    if not isinstance(made, tuple) or len(made) not in (4, 5):
        raise ReportError(f"{target} returned {type(made).__name__}. {CONTRACT}")
    loss_fn, params, specs, batch, *rest = made
    if not isinstance(batch, tuple):
        raise ReportError(f"{target} returned a batch of {type(batch).__name__}. {CONTRACT}")
    batch_specs = rest[0] if rest else P()
    step = shard(loss_fn, mesh, specs, batch_specs=batch_specs, hardware=hardware)
    return step.lower(params, *batch)


def of_config(
    path: str,
    mesh: AbstractMesh,
    *,
    batch: int,
    seq: int,
    hardware: str | None = None,
) -> Lowered:
    """The train step (loss and gradients) of a causal language model of transformers, from its
    config.json; nothing is allocated.

    Axes have their meaning by name: ``tp`` cuts the weights by the model's own plan; ``dp`` and
    ``fsdp`` cut the batch; ``fsdp`` also cuts the parameters, along a dim that ``tp`` does not.
    """
    try:
        from transformers import (  # pyright: ignore[reportMissingImports]
            AutoConfig,
            AutoModelForCausalLM,
        )
    except ImportError as e:
        raise ReportError(
            "--hf needs transformers, which is not installed. Install it: pip install"
            " 'transformers>=5'."
        ) from e
    unknown = set(mesh.axes) - {"dp", "fsdp", "tp"}
    if unknown:
        raise ReportError(f"--hf knows the axes dp, fsdp and tp, not {', '.join(sorted(unknown))}.")
    try:
        config = AutoConfig.for_model(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise ReportError(f"{path} cannot be read as a config of transformers: {e}") from e
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    specs, constraints = (
        from_hf(model)
        if "tp" in mesh.axes
        else ({name: P() for name, _ in model.named_parameters()}, {})
    )
    fn, params = functionalize(model, constraints=constraints)
    cut = {
        path: _with_fsdp(specs.get(path, P()), leaf.shape, mesh.axes)
        for path, leaf in params.items()
    }

    def loss_fn(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = fn(params, tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    data = tuple(axis for axis in ("dp", "fsdp") if axis in mesh.axes)
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    step = shard(loss_fn, mesh, cut, batch_specs=P(data) if data else P(), hardware=hardware)
    return step.lower(params, tokens, tokens)


def _with_fsdp(spec: P, shape: torch.Size, axes: Mapping[str, int]) -> P:
    """The spec with ``fsdp`` on the first uncut dim that divides, if any."""
    if "fsdp" not in axes:
        return spec
    for dim, size in enumerate(shape):
        if not spec.cuts(dim) and size % axes["fsdp"] == 0:
            entries = [*spec, *[None] * (len(shape) - len(spec))]
            entries[dim] = "fsdp"
            return P(*entries)
    return spec


def as_dict(lowered: Lowered, hardware: str | None = None) -> dict[str, Any]:
    """The report for other programs."""
    mesh = lowered._program.mesh
    return {
        "mesh": dict(mesh.axes),
        "ranks": math.prod(mesh.axes.values()),
        "collectives": lowered.collectives.to_dict(),
        "memory": lowered.memory.to_dict(),
        "cost": lowered.cost(hardware).to_dict(),
        "lint": [finding.to_dict() for finding in lowered.lint],
    }


def report(
    lowered: Lowered, *, hardware: str | None, html: str | None, as_json: bool, program: bool
) -> None:
    """Print a report, and write the page if one is asked for."""
    if as_json:
        print(json.dumps(as_dict(lowered, hardware), indent=1))
    else:
        print(
            lowered
            if program
            else f"program on {lowered._program.mesh}: {len(lowered.plan.graph.nodes)} ops;"
            " --program shows them"
        )
        _show(lowered.collectives)
        print(lowered.memory.report())
        print(lowered.cost(hardware).report())
        for finding in lowered.lint:
            print(finding)
    if html is not None:
        Path(html).write_text(program_page(lowered, hardware=hardware), encoding="utf-8")
        print(f"written: {html}", file=sys.stderr)


def _show(table: Any) -> None:
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console().print(table)
            return
    print(table)


def _module(file: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        raise ReportError(
            f"There is no file {file!r}. Give FILE:FUNCTION, such as train.py:report."
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ReportError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
