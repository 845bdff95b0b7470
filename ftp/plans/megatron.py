"""Plans of Megatron-LM models, from the attributes on their parameters."""

from typing import Any

from torch import Tensor, nn

from ftp.errors import SpecError, raise_all
from ftp.functional.functionalize import functionalize, paths_of_tensors
from ftp.functional.module_constraints import Constraint
from ftp.plans.labelled_specs import LabelAndSpec, labelled_specs
from ftp.plans.model_config import cut_at
from ftp.sharding.pytree import Specs, kind_of
from ftp.sharding.spec import P, units

ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


def from_megatron(model: nn.Module, *, axis: str = "tp") -> tuple[Specs, dict[str, Constraint]]:
    """Read a tensor-parallel plan from the attributes that Megatron-LM sets on parameters.

    It reads ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``. A parameter
    without them, or not tensor parallel, is replicated: norms, biases of row-parallel layers. The
    stride is the number of packs: 2 for gate and up projection in one weight. If ``model.config``
    has the number of heads, fused q, k, v are sharded between groups of heads, and the output
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
    found: dict[str, LabelAndSpec] = {}
    names, config = paths_of_tensors(model), getattr(model, "config", None)
    for path, parameter in model.named_parameters():
        given = _spec(path, parameter, axis, config, failures)
        found.update(dict.fromkeys(names[id(parameter)], given))
    if found and not any(hasattr(p, name) for p in model.parameters() for name in ATTRIBUTES):
        failures.append(
            f"no parameter of {type(model).__name__} has any of {', '.join(ATTRIBUTES)}: it holds"
            " no layers of Megatron. Write its specs with ftp.plan."
        )
    raise_all(SpecError, failures)
    return labelled_specs(params, found), {}


def _spec(
    path: str, parameter: Tensor, axis: str, config: Any, failures: list[str]
) -> LabelAndSpec:
    given = {name: getattr(parameter, name) for name in ATTRIBUTES if hasattr(parameter, name)}
    if not given:
        return "no attributes: replicated", P()
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
        return "tensor_model_parallel=False", P()
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
        return label, cut_at(dim, axis if unit == stride == 1 else units(axis, unit, pack=stride))
    return "", P()


def _unit(path: str, size: int, config: Any) -> int:
    """The unit of the sharded dim, in elements: a group of heads in fused q, k, v, a head in the
    output projection, else 1.
    """
    *blocks, layer, _ = ("", *path.split("."))
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_query_groups", None) or heads
    counts = {"linear_qkv": groups, "query_key_value": groups, "linear_proj": heads, "dense": heads}
    count, is_attention = counts.get(layer), any("attention" in block for block in blocks)
    return size // count if is_attention and count and size % count == 0 else 1
