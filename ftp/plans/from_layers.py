"""Specs of a model without a plan, from the names and shapes of its layers and the numbers of heads
in its config.

The first layers of a block are sharded by columns, its last by rows, attention between heads;
norms, positions, routers and low-rank projections are replicated. The specs decide only what is
communicated: results equal one device's with any specs.
"""

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ftp.errors import PlanWarning
from ftp.functional.functionalize import paths_of_tensors
from ftp.plans.labelled_specs import LabelAndSpec, labelled_specs
from ftp.plans.model_config import config_of, cut_at, value_of
from ftp.sharding.pytree import Specs
from ftp.sharding.spec import Entry, P, units

_MOST_PACKS = 4  # more are other tensors whose sizes add up by chance
FEW = 0.9  # of parameters or work; below it a PlanWarning says so

_ROW = re.compile(
    r"(o|w?o|o_proj|out_proj|out_lin|proj_out|c_proj|down_proj|fc2|w2|lin2|linear2|fc_out"
    r"|dense_4h_to_h|ffn_output|linear_out|pwconv2|out|output|output_linear)"
)
_COLUMN = re.compile(
    r"(c_fc|fc1|fc_in|w1|w3|lin1|linear1|ffn|dense_h_to_4h|pwconv1|gate_proj|up_proj|gate_up_proj"
    r"|in_proj|linear_[xy]|receptance|input_linear|wi|wi_\d|intermediate)"
)
_TOKENS = re.compile(r"embed_tokens|token_embeddings?|word_embeddings|wte|tok_embeddings")
_WHOLE = re.compile(r"(gate|router|shared_expert_gate|\w*_a_proj\w*)")
_FUSED = ("Wqkv", "c_attn", "qkv", "qkv_proj")
_IN_ATTENTION = re.compile(r"(attn|attention).*\.|\.([qkvo]|qkv)_proj$", re.IGNORECASE)


def specs_from_layers(model: nn.Module, axis: str, vocabulary: bool) -> dict[str, LabelAndSpec]:
    """The specs of parameters to shard, by each of their paths.

    Args:
        vocabulary: shard embeddings of tokens, found by their names, along the vocabulary.
    """
    found: dict[str, LabelAndSpec] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        name = path.rpartition(".")[2]
        if vocabulary and isinstance(module, nn.Embedding) and _TOKENS.fullmatch(name):
            found[f"{path}.weight"] = ("its layer: vocabulary", P(axis))
        if not any(element.isdigit() for element in path.split(".")):
            continue  # outside of the layers
        holder = _holder(model, path)
        if isinstance(module, nn.Linear) or _is_transposed(module):
            found |= _of_linear(path, module, holder, model, axis)
        elif isinstance(module, nn.MultiheadAttention):
            found |= _of_torch_attention(path, module, axis)
        elif hasattr(module, "A_log"):
            found |= _of_state_space(path, module, axis)
        found |= _of_stacks(path, module, model, axis)
    return found


def cut_shares(
    model: nn.Module, specs: Mapping[str, P], but: Collection[str] = ()
) -> tuple[float, float]:
    """The share of a model's parameters that is sharded, and the share of its matmuls' work for one
    token; of experts, the work of those that a token chooses. Parameters in ``but`` do not count.
    """
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    sizes = {path: p.numel() for path, p in trained.items() if path not in but}
    work = {path: _work(model, path) for path in sizes}
    return _share(sizes, specs), _share(work, specs)


def completed(
    model: nn.Module,
    params: Any,
    specs: Specs,
    axis: str,
    vocabulary: bool,
    ends: Collection[str],
) -> Specs:
    """Specs with those that the layers suggest for parameters that no style names."""
    built, names = specs_from_layers(model, axis, vocabulary), paths_of_tensors(model)
    found: dict[str, LabelAndSpec] = {}
    for path, row in zip(sorted(params), specs.rows.values(), strict=True):
        paths = names[id(model.get_parameter(path))]
        is_open = not row.spec and row.given_by.startswith("no ") and not set(ends) & set(paths)
        own = next((built[p] for p in paths if p in built), None) if is_open else None
        found[path] = own or (row.given_by, row.spec)
    return labelled_specs(params, found)


def with_shares(model: nn.Module, specs: Specs, but: Collection[str]) -> Specs:
    """The specs with a note of the shares that they cut; warns where these are small. Parameters in
    ``but``, which the user wants replicated, do not count for the warning.
    """
    parameters, work = cut_shares(model, specs)
    note = f"cut: {parameters:.0%} of the parameters, {work:.0%} of the matmuls' work"
    if min(cut_shares(model, specs, but)) < FEW:
        warnings.warn(
            f"from_hf leaves much of {type(model).__name__} whole on every rank; {note}."
            " print(specs) lists what; plan={pattern: style} adds to it, or change the specs.",
            PlanWarning,
            stacklevel=3,
        )
    return Specs(specs, specs.rows, note)


def _share(of: Mapping[str, float], specs: Mapping[str, P]) -> float:
    total = sum(of.values())
    return sum(n for path, n in of.items() if specs.get(path)) / total if total else 1.0


def _work(model: nn.Module, path: str) -> float:
    parameter = model.get_parameter(path)
    module = _holder(model, path)
    if isinstance(module, nn.Embedding):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        is_head = getattr(head, "weight", None) is parameter
        return float(parameter.numel()) if is_head else 0.0
    name = path.rpartition(".")[2]
    if parameter.ndim < 2 or "bias" in name or "norm" in name or "embed" in name:
        return 0.0
    if _is_stack(parameter, module):
        chosen = value_of(config_of(model, path), "num_experts_per_tok", "moe_top_k", "top_k")
        return parameter.numel() * min((chosen or 1) / parameter.shape[0], 1.0)
    return float(parameter.numel())


def _holder(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path.rpartition(".")[0])


def _is_transposed(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is (in, out)."""
    weight = getattr(module, "weight", None)
    return hasattr(module, "nf") and weight is not None and weight.ndim == 2


def _of_linear(
    path: str, module: Any, holder: nn.Module, model: nn.Module, axis: str
) -> dict[str, LabelAndSpec]:
    side = _side(path, *_sizes(module))
    if side is None:
        return {}
    dim = int(_is_transposed(module) == (side == "columns"))
    entry = _entry(path, module.weight.shape[dim], holder, model, axis)
    found = {f"{path}.weight": (f"its layer: {side}", cut_at(dim, entry))}
    if side == "columns" and module.bias is not None:
        found[f"{path}.bias"] = (f"its layer: {side}", P(entry))
    return found


def _sizes(module: Any) -> tuple[int, int]:
    """A linear layer's inputs and outputs."""
    size_in, size_out = module.weight.shape[:: 1 if _is_transposed(module) else -1]
    return size_in, size_out


def _packs(path: str, size: int, holder: nn.Module) -> int:
    """The number of tensors of equal size that a layer returns side by side, such as a gate and
    what it multiplies: layers behind it that are sharded by rows take one of them each, and a layer
    that is sharded by rows itself takes all.
    """
    before, _, own = path.rpartition(".")
    names = [name for name, _ in holder.named_children()]
    from_it_on = [(n, holder.get_submodule(n)) for n in names[names.index(own) :]]
    sizes = [
        (f"{before}.{name}", *_sizes(module))
        for name, module in from_it_on
        if isinstance(module, nn.Linear) or _is_transposed(module)
    ]
    taken = {inputs for at, inputs, outputs in sizes if _side(at, inputs, outputs) == "rows"}
    inner = taken.pop() if len(taken) == 1 else size
    return size // inner if size % inner == 0 and size <= _MOST_PACKS * inner else 1


def _side(path: str, size_in: int, size_out: int) -> str | None:
    """How a layer is sharded: "columns" if it opens a block, "rows" if it closes one, else None."""
    before, _, name = path.rpartition(".")
    last = before.rpartition(".")[2]
    attention = bool(_IN_ATTENTION.search(path))
    if _WHOLE.fullmatch(name):
        return None
    if name == "dense":
        if last == "intermediate":
            return "columns"
        return "rows" if attention or last == "output" else None
    if _ROW.fullmatch(name) or (name == "proj" and attention):
        return "rows"
    if _COLUMN.fullmatch(name) or attention:
        return "columns"
    return "columns" if size_out > size_in else "rows" if size_in > size_out else None


def _entry(path: str, size: int, holder: nn.Module, model: nn.Module, axis: str) -> Entry:
    """How a dim of a layer is cut: whole heads in attention, packs where layers are fused."""
    name = path.rpartition(".")[2]
    config = config_of(model, path)
    if not _IN_ATTENTION.search(path) and "linear_" not in name:
        packs = _packs(path, size, holder)
        return axis if packs == 1 else units(axis, pack=packs)
    heads = _count(holder, "num_heads", "num_attention_heads", "n_heads", "n_head") or _count(
        config, "num_attention_heads", "n_head", "n_heads", "num_heads"
    )
    groups = _count(config, "num_key_value_heads", "num_kv_heads") or heads
    if not heads or not groups:
        return axis
    if name in _FUSED and size % (3 * heads) == 0:
        return units(axis, size // (3 * heads), pack=3)
    for count in (groups, heads) if name.startswith(("k", "v")) else (heads, groups):
        if size % count == 0:
            return units(axis, size // count)
    return axis


def _count(of: Any, *names: str) -> int | None:
    found = value_of(of, *names) if of is not None else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _of_torch_attention(
    path: str, module: nn.MultiheadAttention, axis: str
) -> dict[str, LabelAndSpec]:
    cut = "its layer: columns", P(units(axis, module.head_dim, pack=3))
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return {f"{path}.{name}": cut for name in ("in_proj_weight", "in_proj_bias") if name in own}


def _of_state_space(path: str, module: nn.Module, axis: str) -> dict[str, LabelAndSpec]:
    """Channels of Mamba's recurrence, each with a state of its own, and its convolution."""
    found: dict[str, LabelAndSpec] = {}
    inner = getattr(module, "intermediate_size", None)
    for name, parameter in module.named_parameters():
        holder = module.get_submodule(name.rpartition(".")[0])
        is_depthwise = isinstance(holder, nn.Conv1d) and holder.groups == holder.out_channels
        is_channel = "." not in name and parameter.shape[0] == inner
        if is_depthwise or is_channel:
            found[f"{path}.{name}"] = ("its layer: channels", P(axis))
    return found


def _is_stack(parameter: Any, module: nn.Module) -> bool:
    """Whether a parameter is one matrix for each expert."""
    return parameter.ndim == 3 and not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _of_stacks(
    path: str, module: nn.Module, model: nn.Module, axis: str
) -> dict[str, LabelAndSpec]:
    """Experts, each sharded as an MLP; layers with one matrix per head, between heads."""
    own = dict(module.named_parameters(recurse=False))
    found: dict[str, LabelAndSpec] = {}
    config = config_of(model, path)
    hidden = value_of(config, "hidden_size", "d_model", "n_embd")
    heads = _count(config, "num_attention_heads", "n_head")
    element = path.rpartition(".")[2]
    for name, parameter in own.items():
        if not _is_stack(parameter, module):
            continue
        said = name if name != "weight" else element
        opens = bool(re.match(r"(gate|up|w1|w3|input)", said)) and "bias" not in said
        closes = bool(re.match(r"(down|w2|output)", said)) and "bias" not in said
        if "gate_weight" in said and parameter.shape[0] == heads:
            found[f"{path}.{name}"] = ("its layer: heads", P(axis))
        elif opens or closes:
            dim = _inner_dim(module, parameter, hidden, closes)
            is_fused = said.startswith(("gate_up", "input"))
            apart = getattr(module, "is_concatenated", True)
            entry = (units(axis, pack=2) if apart else units(axis, 2)) if is_fused else axis
            found[f"{path}.{name}"] = ("its layer: each expert", cut_at(dim, entry))
            bias = f"{name}_bias"
            if opens and bias in own:
                found[f"{path}.{bias}"] = ("its layer: each expert", cut_at(1, entry))
    for name, parameter in own.items():  # biases of layers with one matrix per head
        weight = name.replace("_bias", "_weight")
        if weight != name and f"{path}.{weight}" in found and parameter.shape[0] == heads:
            found[f"{path}.{name}"] = ("its layer: heads", P(axis))
    return found


def _inner_dim(module: nn.Module, parameter: Any, hidden: Any, closes: bool) -> int:
    """The dim of stacked matrices, 1 or 2, that is the experts' inner width, not the model's."""
    transposed = getattr(module, "is_transposed", None)  # (expert, in, out)
    if transposed is None:
        wide = [d for d in (1, 2) if parameter.shape[d] != hidden]
        if len(wide) == 1:
            return wide[0]
        transposed = False
    return 2 if bool(transposed) != closes else 1
