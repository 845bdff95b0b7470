"""Plans of Megatron-LM models, from the attributes on their parameters."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ftp.errors import SpecError, raise_all
from ftp.functional.functionalize import functionalize
from ftp.functional.module_constraints import Constraint
from ftp.sharding.plan import plan as plan_specs
from ftp.sharding.pytree import Specs, kind_of
from ftp.sharding.spec import P, units

ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


def from_megatron(model: nn.Module, *, axis: str = "tp") -> tuple[Specs, dict[str, Constraint]]:
    """Read a tensor-parallel plan from the attributes that Megatron-LM sets on parameters.

    It reads ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``. A parameter
    without them, or not tensor parallel, is replicated: norms, biases of row-parallel layers. The
    stride is the number of packs: 2 for gate and up projection in one weight. Where
    ``model.config`` counts heads, fused q, k, v are sharded between groups of heads, and the output
    projection between heads.

    Args:
        model: built for a tensor-parallel size of 1, so that parameters are whole.
        axis: the mesh axis to shard over.

    Returns:
        ``(specs, {})``: ``{path: P}`` for every parameter of ``ftp.functionalize(model)``, which
        prints as a table; there are no constraints.

    Raises:
        SpecError: attributes that are missing, of another type, or contradict each other or the
            parameter's shape, all by path; a model without any of them.

    >>> layer = nn.Linear(4, 8, bias=False)
    >>> layer.weight.tensor_model_parallel = True
    >>> layer.weight.partition_dim, layer.weight.partition_stride = 0, 2
    >>> from_megatron(layer)[0]["weight"]
    P(units('tp', 1, pack=2))

    Source: Megatron-LM, ``megatron/core/tensor_parallel/layers.py``,
    ``set_tensor_model_parallel_attributes``.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"from_megatron takes a model, not {model!r}, {kind_of(model)}.")
    _, params = functionalize(model)
    failures: list[str] = []
    found: dict[str, tuple[str, P]] = {}
    names: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(path)
    for path, parameter in model.named_parameters():
        spec, label = _spec(path, parameter, axis, getattr(model, "config", None), failures)
        found.update(dict.fromkeys(names[id(parameter)], (label, spec)))
    if found and not any(hasattr(p, name) for p in model.parameters() for name in ATTRIBUTES):
        failures.append(
            f"no parameter of {type(model).__name__} has any of {', '.join(ATTRIBUTES)}: it holds"
            " no layers of Megatron."
            " Write its specs with ftp.plan."
        )
    raise_all(SpecError, failures)
    specs = plan_specs(params, lambda path, leaf: found[path][1])
    rows = {
        name: replace(row, given_by=found[path][0])
        for path, (name, row) in zip(sorted(params), specs.rows.items(), strict=True)
    }
    return Specs(specs, rows), {}


def _spec(
    path: str, parameter: Tensor, axis: str, config: Any, failures: list[str]
) -> tuple[P, str]:
    given = {name: getattr(parameter, name) for name in ATTRIBUTES if hasattr(parameter, name)}
    if not given:
        return P(), "no attributes: replicated"
    where = (
        f"parameter {path!r} of shape {tuple(parameter.shape)} has"
        f" {', '.join(f'{k}={v!r}' for k, v in given.items())}"
    )
    is_parallel = given.get("tensor_model_parallel")
    dim, stride = given.get("partition_dim"), given.get("partition_stride", 1)
    if "tensor_model_parallel" not in given or not isinstance(is_parallel, bool):
        failures.append(f"{where}; tensor_model_parallel must say True or False.")
    elif not is_parallel:
        if dim not in (None, -1):
            failures.append(
                f"{where}: a dim to cut, but not tensor parallel. Set tensor_model_parallel=True,"
                " or partition_dim=-1."
            )
        return P(), "tensor_model_parallel=False"
    elif not isinstance(dim, int) or isinstance(dim, bool):
        failures.append(f"{where}, but no partition_dim, the dim that is cut. Set it.")
    elif not 0 <= dim < parameter.ndim:
        failures.append(f"{where}: there is no dim {dim}. Set one of 0 to {parameter.ndim - 1}.")
    elif not isinstance(stride, int) or stride < 1:
        failures.append(f"{where}; partition_stride must be a positive int.")
    elif parameter.shape[dim] % stride:
        failures.append(f"{where}: dim {dim} is not {stride} packs of one size.")
    else:
        label = f"partition_dim={dim}" + (f", partition_stride={stride}" if stride > 1 else "")
        unit = _unit(path, parameter.shape[dim], config) if stride == 1 else 1
        return P(
            *(None,) * dim, axis if unit == stride == 1 else units(axis, unit, pack=stride)
        ), label
    return P(), ""


def _unit(path: str, size: int, config: Any) -> int:
    """The unit of the sharded dim, in elements: a group of heads in fused q, k, v, a head in the
    output projection, else 1.
    """
    parts = path.split(".")
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_query_groups", None) or heads
    count = {
        "linear_qkv": groups,
        "query_key_value": groups,
        "linear_proj": heads,
        "dense": heads,
    }.get(parts[-2] if len(parts) > 1 else "")
    is_attention = any("attention" in part for part in parts[:-2])
    return size // count if is_attention and count and size % count == 0 else 1
