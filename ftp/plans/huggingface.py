"""Plans of transformers' models, read from the model's attributes; transformers is not imported."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ftp.errors import SpecError, raise_all
from ftp.functional.functionalize import functionalize, paths_of_tensors
from ftp.functional.module_constraints import Constraint
from ftp.plans import models
from ftp.plans.expert_axis import ExpertAxis
from ftp.plans.from_layers import FEW, completed, cut_shares, with_shares
from ftp.plans.labelled_specs import LabelAndSpec, labelled_specs
from ftp.plans.model_config import config_of, cut_at, head_dim_of, value_of
from ftp.sharding.patterns import matches, nearest
from ftp.sharding.plan import plan as plan_specs
from ftp.sharding.pytree import Specs, kind_of
from ftp.sharding.spec import Entry, P, units

# Styles by the dim that they shard. Those that also split inputs or gather outputs need no more:
# the planner places these collectives.
COLUMN = {"colwise", "colwise_gather_output", "colwise_rep", "local_colwise"}
ROW = {"rowwise", "rowwise_split_input", "rowwise_rep", "local_rowwise"}
PACKED_COLUMN = {"packed_colwise", "local_packed_colwise"}
PACKED_ROW = {"packed_rowwise", "local_packed_rowwise"}
VOCABULARY, FEATURES = {"embedding_rowwise", "vocab_parallel_rowwise"}, {"embedding_colwise"}
EXPERTS = {"grouped_gemm"}
# Replicated. The effect of these styles on activations and gradients follows from the program.
WHOLE = {
    "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts",
    "moe_identity_expert", "local_params", "ep_dispatch_experts", "ep_router", "gather", "local",
    "isolated",
}  # fmt: skip
SEQUENCE = {"sequence_parallel"}

# Models for which transformers has no plan.
OURS: dict[str, Callable[..., models.Patterns]] = {
    "bert": models.bert,
    "gpt2": models.gpt2,
    "t5": models.t5,
    "vit": models.vit,
}


def from_hf(
    model: nn.Module,
    *,
    axis: str | None = "tp",
    plan: Mapping[str, str] | None = None,
    experts: str = "columns",
    vocab_parallel: bool = True,
    expert_axis: str | None = None,
    token_axes: Sequence[str] | None = None,
    expert_capacity: float | None = None,
) -> tuple[Specs, dict[str, Constraint]]:
    """Read the tensor-parallel plan of a transformers 5 model as specs and constraints.

    Attention is sharded between heads, as the config counts them; with fewer key heads than ranks,
    ranks share them. Fused q, k, v and fused gate, up are packs. BERT, GPT-2, T5 and ViT have no
    plan in transformers and get those of ``ftp.plans``. If a model has no plan, or one that leaves
    more than a tenth of its parameters or of its matmuls' work whole, the names and shapes of the
    model's layers decide the specs of parameters that the plan does not name. The printed table
    ends with the shares that are cut; below nine tenths a ``PlanWarning`` says so.

    Args:
        model: runs as it is: ``ftp.functionalize(model, constraints=constraints)``.
        axis: the mesh axis to shard over; None shards experts only.
        plan: ``{path pattern: style name}``, entries that replace the model's own.
        experts: "columns" shards each expert as an MLP; "whole" gives each rank some of the
            experts, by the model's expert plan.
        vocab_parallel: shard the input embedding and the output head along the vocabulary; False
            replicates both.
        expert_axis: the mesh axis whose ranks own whole experts: a data axis, another axis, or
            ``axis`` itself. Tokens are sent to the ranks that own their experts and come back; no
            weight of an expert is communicated. On another axis than ``axis``, each expert is
            sharded over ``axis`` besides, as ``experts`` and ``plan`` say.
        token_axes: the mesh axes that shard the tokens around experts, from major to minor;
            default ``expert_axis``. Name the other data axes too.
        expert_capacity: the rows that a rank's experts have room for, as a multiple of those of an
            equal load; more raise an InputError on all ranks before a row is sent. Default room for
            all rows: nothing raises, and nothing is ever dropped.

    Returns:
        ``(specs, constraints)``: ``{path: P}`` for every parameter of ``ftp.functionalize(model)``,
        which prints as a table, and ``{module path: Constraint}``.

    Raises:
        SpecError: a model without a plan and without layers; unknown styles, all by name; an entry
            of ``plan`` that matches no module and no parameter.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    ...         self.tp_plan = {"up": "colwise", "down": "rowwise"}
    >>> specs, constraints = from_hf(Model())
    >>> print(specs)
    path         spec           shape   given by
    down.bias    P()            (4,)    'down': rowwise
    down.weight  P(None, 'tp')  (4, 8)  'down': rowwise
    up.bias      P('tp')        (8,)    'up': colwise
    up.weight    P('tp')        (8, 4)  'up': colwise
    cut: 95% of the parameters, 100% of the matmuls' work

    Source: transformers, ``distributed/tensor_parallel.py`` and ``distributed/expert_parallel.py``.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"from_hf takes a model, not {model!r}, {kind_of(model)}.")
    if experts not in ("columns", "whole"):
        raise SpecError(
            f"from_hf(experts={experts!r}): it is 'columns', each expert cut, or 'whole', each"
            " rank some of them."
        )
    placed = _placed(expert_axis, token_axes, expert_capacity)
    _, params = functionalize(model)
    if axis is None:
        if placed is None:
            raise SpecError("from_hf(axis=None) shards nothing without expert_axis=.")
        specs = plan_specs(params, lambda path, leaf: placed.spec(model, path, leaf, P()))
        return specs, placed.constraints(model)
    own = _own_plan(model, experts)
    styles = {**own, **(plan or {})}
    if styles or placed or getattr(getattr(model, "config", None), "model_type", "") not in OURS:
        reader = _HuggingFaceStyles(model, axis, styles, vocab_parallel)
        reader.check(own)
        specs, constraints = reader.specs(params), reader.constraints()
    else:
        specs, constraints = _ours(model, params, axis, vocab_parallel), {}
    if plan is None and (not own or min(cut_shares(model, specs, but=_ends_of(model))) < FEW):
        specs = completed(model, params, specs, axis, vocab_parallel, _ends_of(model))
    if placed is None and not any(specs.values()):
        raise SpecError(
            f"{type(model).__name__} has no tensor-parallel plan: no tp_plan, and no"
            " base_model_tp_plan in its config. Nor has it layers to build one from. Give one as"
            " plan={'layers.*.mlp.up_proj': 'colwise', ...}, or put one together for ftp.plan from"
            " ftp.plans.attention, mlp and vocabulary."
        )
    if placed is not None:
        specs = _on_expert_axis(model, params, specs, placed)
        constraints = {**constraints, **placed.constraints(model)}
    return with_shares(model, specs, () if vocab_parallel else _ends_of(model)), constraints


def _on_expert_axis(model: nn.Module, params: Any, specs: Specs, placed: ExpertAxis) -> Specs:
    """The specs with experts on their axis besides."""
    names, given = paths_of_tensors(model), dict[str, LabelAndSpec]()
    for path, row in zip(sorted(params), specs.rows.values(), strict=True):
        parameter = model.get_parameter(path)
        spec = placed.spec(model, names[id(parameter)][0], parameter, row.spec)
        is_placed = spec != row.spec
        given[path] = (
            f"expert_axis={placed.axis!r}; {row.given_by}" if is_placed else row.given_by,
            spec,
        )
    return labelled_specs(params, given)


def _placed(
    axis: str | None, token_axes: Sequence[str] | None, capacity: float | None
) -> ExpertAxis | None:
    if axis is None:
        if token_axes is not None or capacity is not None:
            raise SpecError("from_hf: token_axes and expert_capacity need expert_axis=.")
        return None
    axes = (axis,) if token_axes is None else tuple(token_axes)
    if axis not in axes:
        raise SpecError(
            f"from_hf(expert_axis={axis!r}, token_axes={axes!r}): tokens are sent along {axis!r},"
            " so token_axes must name it too."
        )
    if capacity is not None and capacity < 1:
        raise SpecError(f"from_hf(expert_capacity={capacity}): an equal load needs 1.")
    return ExpertAxis(axis, axes, capacity)


def _own_plan(model: nn.Module, experts: str) -> dict[str, str]:
    """The model's plan with paths from the model; paths of its config's start at the base model."""
    config = getattr(model, "config", None)
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and isinstance(getattr(model, base, None), nn.Module) else ""

    def plan(kind: str) -> dict[str, str]:
        return getattr(model, f"{kind}_plan", None) or getattr(model, f"_{kind}_plan", None) or {}

    def base_plan(kind: str) -> dict[str, str]:
        found = getattr(config, f"base_model_{kind}_plan", None) or {}
        return {f"{prefix}{k}": v for k, v in found.items()}

    found = plan("tp")
    if not any(key.startswith(prefix) for key in found):
        found = {**base_plan("tp"), **found}
    if experts != "whole":
        return dict(found)
    of_experts = plan("ep") or base_plan("ep")
    if not of_experts:
        raise SpecError(
            f"from_hf(experts='whole'): {type(model).__name__} has no plan for its experts."
            " Cut them by columns."
        )
    return {**found, **of_experts}


def _ours(model: nn.Module, params: Any, axis: str, vocab_parallel: bool) -> Specs:
    config: Any = model.config
    patterns = OURS[config.model_type](config, axis=axis)
    paths = [tuple(path.split(".")) for path in _paths(model)]
    ends = [] if vocab_parallel else [tuple(path.split(".")) for path in _ends_of(model)]
    kept = {
        pattern: spec
        for pattern, spec in patterns.items()
        if any(matches(pattern, path) for path in paths)
        and not any(matches(pattern, end) for end in ends)
    }
    return plan_specs(params, kept)


def _paths(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_parameters(remove_duplicate=False)]


def _ends_of(model: nn.Module) -> set[str]:
    """The paths of the parameters of the input embedding and the output head."""
    found = set[str]()
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            end = getattr(model, getter)()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(end, nn.Embedding | nn.Linear):
            found |= {
                f"{path}.{name}"
                for path, module in model.named_modules(remove_duplicate=False)
                if module is end
                for name, _ in end.named_parameters(recurse=False)
            }
    return found


class _HuggingFaceStyles:
    """Finds a parameter's style as transformers does: its own entry, else its module's."""

    def __init__(
        self,
        model: nn.Module,
        axis: str,
        styles: Mapping[str, str],
        vocab_parallel: bool,
    ):
        self.model, self.axis, self.styles = model, axis, styles
        self.vocab_parallel, self.ends = vocab_parallel, _ends_of(model)

    def check(self, own: Mapping[str, str]) -> None:
        failures = []
        known = COLUMN | ROW | PACKED_COLUMN | PACKED_ROW | VOCABULARY | FEATURES
        known |= EXPERTS | WHOLE | SEQUENCE
        modules = [path for path, _ in self.model.named_modules()]
        for key, style in self.styles.items():
            if style not in known:
                close = nearest(str(style), sorted(known), 2)
                failures.append(
                    f"{key!r} has style {style!r}, which ftp does not know; the nearest are"
                    f" {', '.join(map(repr, close))}. Replace it with one of those in plan={{...}},"
                    " or write specs for ftp.plan."
                )
            # A model's own plan also names parts that only some of its configs have.
            if key not in own and not any(
                matches(key, tuple(p.split("."))) for p in (*_paths(self.model), *modules)
            ):
                failures.append(
                    f"plan[{key!r}] names no module and no parameter; the nearest are"
                    f" {', '.join(map(repr, nearest(key, modules)))}."
                )
        raise_all(SpecError, failures)

    def style_of(self, path: str) -> tuple[str, str] | None:
        """The entry that names a path; the user's entries come last and win."""
        path_elements = tuple(path.split("."))
        entries = reversed(list(self.styles.items()))
        return next((entry for entry in entries if matches(entry[0], path_elements)), None)

    def specs(self, params: Mapping[str, Any]) -> Specs:
        names, given = paths_of_tensors(self.model), dict[str, LabelAndSpec]()
        for parameter in self.model.parameters():
            paths = names[id(parameter)]
            found = [f for path in paths if (f := self.spec_of(path, parameter)) is not None]
            # A tied weight is sharded if one of its names is.
            chosen = next(
                (f for f in found if f[1]), found[0] if found else ("no style: replicated", P())
            )
            given.update(dict.fromkeys(paths, chosen))
        return labelled_specs(params, given)

    def spec_of(self, path: str, parameter: nn.Parameter) -> LabelAndSpec | None:
        if path in self.ends:
            if self.vocab_parallel:
                return "vocab_parallel", P(self.axis)
            return "vocab_parallel=False", P()
        holder, _, name = path.rpartition(".")
        found = self.style_of(path) or self.style_of(holder)
        if found is None:
            return None
        key, style = found
        module = self.model.get_submodule(holder)
        last = parameter.ndim - 1
        first = max(last - 1, 0)
        label = f"{key!r}: {style}"
        if style in EXPERTS | VOCABULARY or (isinstance(module, nn.Embedding) and style in ROW):
            return label, P(self.axis)
        if style in FEATURES:
            return label, P(None, self.axis)
        if style in COLUMN:
            return label, cut_at(first, self.column(path, parameter.shape[first]))
        if style in PACKED_COLUMN:
            return label, cut_at(first, units(self.axis, pack=2))
        if style in PACKED_ROW and name != "bias":
            return label, cut_at(last, units(self.axis, pack=2))
        if style in ROW and name != "bias":
            return label, cut_at(last, self.heads(path, parameter.shape[last]))
        return label, P()

    def column(self, path: str, size: int) -> Entry:
        """The spec entry of a column-wise output dim: packs if fused, heads in attention."""
        name = path.split(".")[-2]
        if "gate_up" in name and size % 2 == 0:
            return units(self.axis, pack=2)
        if name == "qkv_proj":
            config = config_of(self.model, path)
            heads, groups, dim = (
                value_of(config, k)
                for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
            )
            groups, dim = groups or heads, dim or (head_dim_of(config) if heads else None)
            if heads and dim and (heads + 2 * groups) * dim == size:
                return units(
                    self.axis,
                    dim,
                    pack=3 if heads == groups else (heads * dim, groups * dim, groups * dim),
                )
        return self.heads(path, size)

    def heads(self, path: str, size: int) -> Entry:
        """The spec entry of a dim of ``size``: in units of heads inside attention, else plain."""
        *_, holder, name, _ = ("", "", *path.split("."))
        if "attn" not in holder.lower() and "attention" not in holder.lower():
            return self.axis
        config = config_of(self.model, path)
        parent = self.model.get_submodule(path.rsplit(".", 2)[0])
        heads = value_of(config, "num_attention_heads", "n_head")
        unit = None
        if name.startswith(("k_proj", "v_proj")):
            unit = getattr(parent, "head_dim", None) or value_of(config, "head_dim")
            heads = value_of(config, "num_key_value_heads") or heads
        if not isinstance(unit, int):
            unit = size // heads if heads and size % heads == 0 else None
        return units(self.axis, unit) if unit and size % unit == 0 else self.axis

    def constraints(self) -> dict[str, Constraint]:
        """Shard the tokens of (batch, tokens, dim) around sequence-parallel modules."""
        tokens = P(None, self.axis)
        return {
            path: Constraint(inputs=(tokens, ...), outputs=tokens, axes=self.axis)
            for path, _ in self.model.named_modules()
            if (entry := self.style_of(path)) is not None and entry[1] in SEQUENCE
        }
