"""Styles and helpers that torch.distributed.tensor.parallel had in older versions.

A helper constrains a tensor to one or two specs in order. It reshards a tensor that is global in
model code; declare inputs that arrive sharded by ``batch_specs``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from ftp.dataclass import dataclass
from ftp.errors import InputError, SpecError
from ftp.functional.module_constraints import Constraint
from ftp.ops.constrain import constrain
from ftp.plans.mesh_axis import axis_of
from ftp.plans.styles import Style, StyleSpecs, constrained, shard_spec, summed_whole, then
from ftp.sharding.mesh import AnyMesh
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import P, units


@dataclass(frozen=True)
class Layouts:
    """A helper: a named constraint of one tensor to layouts in order.

    Called with a tensor, it constrains the tensor; without one, it returns the helper for another
    ``dim`` or mesh.

    Attributes:
        steps: the layouts: a sharded dim, "dim" for the attribute of that name, None for
            replicated.

    >>> make_input_shard_1d(dim=1).specs("tp")
    (P(None, 'tp'),)
    >>> make_input_reshard_replicate.specs("tp")
    (P('tp'), P())
    """

    name: str
    side: Literal["input", "output"]
    steps: tuple[Literal["dim"] | int | None, ...]
    dim: int = 0
    axis: str | None = None

    def __call__(
        self, tensor: Any = None, device_mesh: AnyMesh | None = None, dim: int | None = None
    ) -> Any:
        """The constrained tensor; without one, the helper for ``dim`` and ``device_mesh``'s axis.

        Raises:
            InputError: not a tensor.
            MeshError: a mesh that is not 1-D.
            SpecError: a ``dim`` that is not an int, or given to a helper without one.
        """
        if dim is not None and (
            not isinstance(dim, int) or isinstance(dim, bool) or "dim" not in self.steps
        ):
            takes = "dim= is an int" if "dim" in self.steps else "it takes no dim="
            raise SpecError(f"{self.name}(dim={dim!r}): {takes}.")
        made = replace(
            self,
            dim=self.dim if dim is None else dim,
            axis=self.axis if device_mesh is None else axis_of(device_mesh),
        )
        if tensor is None:
            return made
        if not isinstance(tensor, Tensor):
            raise InputError(f"{self.name} takes a tensor, not {tensor!r}, {kind_of(tensor)}.")
        axis = made.axis or "tp"
        for spec in made.specs(axis):
            tensor = constrain(tensor, spec, axes=axis, grad=False)
        return tensor

    def specs(self, axis: str) -> tuple[P, ...]:
        """The specs over a mesh axis, in order; empty if the helper does nothing."""
        dims = [self.dim if step == "dim" else step for step in self.steps]
        return tuple(
            P() if dim is None else shard_spec(dim, axis)
            for dim in dims
            if not isinstance(dim, str)
        )


make_input_replicate_1d = Layouts("make_input_replicate_1d", "input", (None,))
make_input_shard_1d = Layouts("make_input_shard_1d", "input", ("dim",))
make_input_shard_1d_last_dim = Layouts("make_input_shard_1d_last_dim", "input", (-1,))
make_input_reshard_replicate = Layouts("make_input_reshard_replicate", "input", (0, None))
make_output_replicate_1d = Layouts("make_output_replicate_1d", "output", (None,))
make_output_tensor = Layouts("make_output_tensor", "output", (None,))
make_output_shard_1d = Layouts("make_output_shard_1d", "output", ("dim",))
make_output_reshard_tensor = Layouts("make_output_reshard_tensor", "output", (0,))
make_sharded_output_tensor = Layouts("make_sharded_output_tensor", "output", ())

INPUT_HELPERS = (
    make_input_replicate_1d,
    make_input_shard_1d,
    make_input_shard_1d_last_dim,
    make_input_reshard_replicate,
)
OUTPUT_HELPERS = (
    make_output_replicate_1d,
    make_output_tensor,
    make_output_shard_1d,
    make_output_reshard_tensor,
    make_sharded_output_tensor,
)


@dataclass(frozen=True)
class OlderStyle(Style):
    """A style with a helper for its input and one for its output."""

    _prepare_input: Layouts
    _prepare_output: Layouts

    def __post_init__(self):
        for name, value, helpers in (
            ("_prepare_input", self._prepare_input, INPUT_HELPERS),
            ("_prepare_output", self._prepare_output, OUTPUT_HELPERS),
        ):
            if not isinstance(value, Layouts) or value.side != helpers[0].side:
                known = ", ".join(h.name for h in helpers)
                given = value.name if isinstance(value, Layouts) else f"{value!r}, {kind_of(value)}"
                raise SpecError(
                    f"{type(self).__name__}({name}={given}): it must be one of {known}."
                )

    def _first(self, axis: str, n: int = 1) -> dict[str, Any]:
        entry = then(*self._prepare_input.specs(axis))
        return {} if entry is None else {"inputs": (*(entry,) * n, ...)}

    def _last(self, axis: str) -> dict[str, Any]:
        entry = then(*self._prepare_output.specs(axis))
        return {"outputs": (entry,) if isinstance(entry, tuple) else entry}

    def _check_layer(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise SpecError(
                f"the older {type(self).__name__} shards nn.Linear and nn.Embedding, not"
                f" {kind_of(module)}."
            )


@dataclass(frozen=True)
class PairwiseParallel(OlderStyle):
    """Pairs of linear layers, the first column-wise, the second row-wise; attention by heads.

    For a module whose children include an even number of ``nn.Linear``; ``nn.MultiheadAttention``;
    ``nn.Transformer``, its encoder, decoder and layers.

    Args:
        _prepare_input: helper for the first layer's input; default replicated.
        _prepare_output: helper for the last layer's output; default replicated.

    Raises:
        SpecError: not a helper; when read, an odd number of linear layers, or none.

    >>> from ftp import from_parallelize_plan
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> specs, constraints = from_parallelize_plan(mlp, PairwiseParallel())
    >>> specs["0.weight"], specs["2.weight"]
    (P('tp'), P(None, 'tp'))
    """

    _prepare_input: Layouts = make_input_replicate_1d
    _prepare_output: Layouts = make_output_tensor

    def read(self, module: nn.Module, axis: str) -> StyleSpecs:
        return _joined(self._parts(module, axis))

    def _parts(self, module: nn.Module, axis: str) -> Iterator[tuple[str, StyleSpecs]]:
        if isinstance(module, nn.MultiheadAttention):
            yield "", _attention(module, axis)
            entry = self._last(axis)["outputs"]
            outputs = (*(entry if isinstance(entry, tuple) else (entry,)), ...)
            yield "", constrained(axis, **self._first(axis, 3), outputs=outputs)
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            for name, child in module.named_children():
                if isinstance(child, nn.MultiheadAttention):
                    yield name, _attention(child, axis)
            yield from _pair("linear1", module.linear1, "linear2", axis)
            yield "", constrained(axis, **self._first(axis), **self._last(axis))
        elif isinstance(module, nn.Transformer | nn.TransformerEncoder | nn.TransformerDecoder):
            for name, child in module.named_modules():
                if isinstance(child, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                    yield name, replace(self.read(child, axis), constraints={})
            first = self._first(axis, 2 if isinstance(module, nn.Transformer) else 1)
            yield "", constrained(axis, **first, **self._last(axis))
        else:
            yield from self._mlp(module, axis)

    def _mlp(self, module: nn.Module, axis: str) -> Iterator[tuple[str, StyleSpecs]]:
        layers = [
            (name, child) for name, child in module.named_children() if isinstance(child, nn.Linear)
        ]
        if not layers:
            raise SpecError(
                f"{type(self).__name__} pairs the nn.Linear among a module's children;"
                f" {kind_of(module)} has none."
            )
        if len(layers) % 2:
            raise SpecError(
                f"{type(self).__name__} pairs linear layers, and {layers[-1][0]!r} of"
                f" {', '.join(repr(name) for name, _ in layers)} is left over. Style it by itself,"
                " or style the pairs one by one."
            )
        for (up, first), (down, _) in zip(layers[::2], layers[1::2], strict=True):
            yield from _pair(up, first, down, axis)
        yield layers[0][0], constrained(axis, **self._first(axis))
        (name, layer), last = layers[-1], constrained(axis, **self._last(axis))
        has_bias = layer.bias is not None and bool(last.constraints)
        yield name, summed_whole(last) if has_bias else last


@dataclass(frozen=True)
class PairwiseSequenceParallel(PairwiseParallel):
    """torch's older ``SequenceParallel``: pairs with the sequence, dim 0, sharded around them: the
    input is gathered, the output reduce-scattered.

    >>> from ftp import from_parallelize_plan
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> from_parallelize_plan(mlp, PairwiseSequenceParallel())[1]["2"].outputs
    ((Gradient(spec=P()), P('tp')),)
    """

    _prepare_input: Layouts = make_input_reshard_replicate
    _prepare_output: Layouts = make_output_reshard_tensor


@dataclass(frozen=True)
class ColwiseParallel(OlderStyle):
    """The older column-wise style, with helpers in place of layouts."""

    _prepare_input: Layouts = make_input_replicate_1d
    _prepare_output: Layouts = make_sharded_output_tensor

    def read(self, module: nn.Module, axis: str) -> StyleSpecs:
        self._check_layer(module)
        cut = P(None, axis) if isinstance(module, nn.Embedding) else P(axis)
        outputs = (
            self._last(axis) if self._prepare_output.steps else {"outputs": shard_spec(-1, axis)}
        )
        return StyleSpecs(
            {name: cut for name, _ in module.named_parameters()},
            constrained(axis, **self._first(axis), **outputs).constraints,
        )


@dataclass(frozen=True)
class RowwiseParallel(OlderStyle):
    """The older row-wise style, with helpers in place of layouts."""

    _prepare_input: Layouts = make_input_shard_1d_last_dim
    _prepare_output: Layouts = make_output_tensor

    def read(self, module: nn.Module, axis: str) -> StyleSpecs:
        self._check_layer(module)
        is_table = isinstance(module, nn.Embedding)
        # An embedding's indices are never sharded: the input helper is for linear layers.
        around = self._last(axis) if is_table else self._first(axis) | self._last(axis)
        part = StyleSpecs(
            {"weight": P(axis) if is_table else P(None, axis)},
            constrained(axis, **around).constraints,
        )
        return summed_whole(part) if not is_table and module.bias is not None else part


def _pair(up: str, first: nn.Linear, down: str, axis: str) -> Iterator[tuple[str, StyleSpecs]]:
    yield up, StyleSpecs({name: P(axis) for name, _ in first.named_parameters()})
    yield down, StyleSpecs({"weight": P(None, axis)})


def _attention(module: nn.MultiheadAttention, axis: str) -> StyleSpecs:
    """Shard packed q, k, v by heads, and the output projection row-wise by heads."""
    heads = {
        "in_proj_weight": P(units(axis, module.head_dim, pack=3)),
        "in_proj_bias": P(units(axis, module.head_dim, pack=3)),
        **{f"{x}_proj_weight": P(units(axis, module.head_dim)) for x in "qkv"},
        "out_proj.weight": P(None, units(axis, module.head_dim)),
    }
    own = dict(module.named_parameters())
    return StyleSpecs({name: spec for name, spec in heads.items() if name in own})


def _joined(parts: Iterator[tuple[str, StyleSpecs]]) -> StyleSpecs:
    specs: dict[str, P] = {}
    constraints: dict[str, Constraint] = {}
    for prefix, part in parts:
        specs.update(_below(prefix, part.specs))
        for name, constraint in _below(prefix, part.constraints).items():
            known = constraints.get(name)
            constraints[name] = (
                constraint if known is None else replace(known, outputs=constraint.outputs)
            )
    return StyleSpecs(specs, constraints)


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{prefix}.{name}" if prefix and name else prefix or name: value
        for name, value in values.items()
    }
