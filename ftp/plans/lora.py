"""Plans of LoRA adapters, from the specs of the adapted weights."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ftp.errors import SpecError, raise_all
from ftp.functional.functionalize import functionalize
from ftp.plans.labelled_specs import LabelAndSpec, labelled_specs
from ftp.sharding.patterns import match_patterns
from ftp.sharding.pytree import Specs, kind_of, tied_paths
from ftp.sharding.spec import P

_ADAPTER = re.compile(
    r"^(?P<module>.*?)\.?lora_(?P<embedding>embedding_)?(?P<factor>A|B|magnitude_vector)(\.|$)"
)


def lora(model: nn.Module, base: Mapping[str, P]) -> tuple[Specs, Specs]:
    """Derive the specs of LoRA adapters, named as peft names them, from the base model's specs.

    The adapted layer computes ``x W^T + x A^T B^T``. Where W (out, in) is sharded on its output
    dim, so is B (out, rank), and A (rank, in) is replicated; where W is sharded on its input dim,
    so is A, and B is replicated. The adapter then needs the layer's own collectives only.

    Args:
        model: the adapted model: peft's wrapper or the model in it.
        base: specs of the model before it was adapted, ``{path or pattern: P}``, as of
            ``ftp.from_hf``, ``ftp.plans`` or ``ftp.plan``.

    Returns:
        ``(specs, frozen)``: specs of the two trees of ``fn, params, buffers =
        ftp.functionalize(model, buffers=True)``. ``params`` are the adapters, and modules that
        peft trains whole; ``buffers`` are all other weights. The loss takes both and calls
        ``fn(params, buffers, *args)[0]``. In ``ftp.shard`` the buffers are a batch argument, so
        name the axes that shard the real batch: ``shard(loss, mesh, specs, batch_specs=(frozen,
        P("dp")), data_axes=("dp",))``.

    Raises:
        SpecError: an entry of ``base`` that matches no weight; an adapter whose layer has no
            weight.

    >>> class Adapted(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.base_layer = nn.Linear(4, 8, bias=False).requires_grad_(False)
    ...         self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
    ...         self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})
    >>> specs, frozen = lora(nn.ModuleDict({"up": Adapted()}), {"up.weight": P("tp", None)})
    >>> dict(specs)
    {'up.lora_A.default.weight': P(), 'up.lora_B.default.weight': P('tp')}
    >>> dict(frozen)
    {'up.base_layer.weight': P('tp', None)}

    Source: Hu et al. (2021), LoRA; peft, ``peft/tuners/lora/layer.py``.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"lora takes a model, not {model!r}, {kind_of(model)}.")
    _, params, buffers = functionalize(model, buffers=True)
    leaves = {**params, **buffers}
    plain = [path for path in leaves if not _ADAPTER.match(path)]
    failures: list[str] = []
    names = [f"weight {path!r}" for path in plain]
    found = match_patterns(
        base,
        [_answers(leaves[path], path) for path in plain],
        names,
        "the adapted model",
        failures,
        _check_value,
    )
    given: dict[str, LabelAndSpec] = {
        path: (repr(match[0]), match[1])
        for path, match in zip(plain, found, strict=True)
        if match is not None
    }
    weights = {
        _base_path(path).rpartition(".")[0]: path
        for path in plain
        if path.rpartition(".")[2] == "weight"
    }
    for path in leaves:
        adapter = _ADAPTER.match(path)
        if adapter is None:
            continue
        weight = weights.get(_base_path(adapter["module"]))
        if weight is None:
            failures.append(
                f"adapter {path!r} adapts {adapter['module']!r}, which has no weight"
                f" {adapter['module']}.base_layer.weight."
            )
        elif weight in given:
            pattern, spec = given[weight]
            given[path] = (pattern, _of_adapter(adapter, spec, model, leaves[path].ndim))
    raise_all(SpecError, failures)
    params, buffers = (
        labelled_specs(leaves, given, "no pattern: replicated") for leaves in (params, buffers)
    )
    return params, buffers


def _of_adapter(adapter: re.Match[str], spec: P, model: nn.Module, ndim: int) -> P:
    """The adapter's spec. A is (rank, in), B is (out, rank); an embedding's weight is (in, out)."""
    layer = model.get_submodule(adapter["module"])
    transposed = bool(adapter["embedding"]) or _is_transposed(layer)
    dim = int(transposed != (adapter["factor"] == "A"))
    entry = spec[dim] if dim < len(spec) else None
    if entry is None or (adapter["factor"] == "magnitude_vector" and ndim != 1):
        return P()
    return P(None, entry) if adapter["factor"] == "A" else P(entry)


def _is_transposed(layer: Any) -> bool:
    """Whether the layer's weight is (in, out), as GPT-2's in transformers."""
    if (given := getattr(layer, "fan_in_fan_out", None)) is not None:
        return bool(given)
    return type(getattr(layer, "base_layer", None)).__name__ == "Conv1D"


def _answers(leaf: Any, path: str) -> tuple[tuple[str, ...], ...]:
    """The paths by which patterns may name a weight: those before adaptation, and its own."""
    own = tied_paths(leaf, tuple(path.split(".")))
    return tuple(dict.fromkeys((*(tuple(_base_path(".".join(p)).split(".")) for p in own), *own)))


def _base_path(path: str) -> str:
    """A path as it was before peft wrapped the model and its layers.

    >>> _base_path("base_model.model.layers.0.up.base_layer.weight")
    'layers.0.up.weight'
    >>> _base_path("base_model.model.head.modules_to_save.default.weight")
    'head.weight'
    """
    parts = path.split(".")
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(
        part
        for before, part in zip(["", *parts], parts, strict=False)
        if part not in ("base_layer", "original_module", "modules_to_save")
        and before != "modules_to_save"
    )


def _check_value(pattern: str, spec: object) -> str | None:
    if isinstance(spec, P):
        return None
    return f"base[{pattern!r}] is {spec!r}, {kind_of(spec)}; it must be a P."
