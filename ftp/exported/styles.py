"""torch's styles on the modules of an exported program: specs of its state, and constraints on the
modules' inputs and outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ftp.dataclass import dataclass
from ftp.errors import SpecError
from ftp.exported.module_calls import ModuleCall, calls_of, modules_of, reader_of
from ftp.functional.module_constraints import Constraint, Pins
from ftp.ops.constrain import entries_over
from ftp.plans.styles import base_style, read_style, torch_styles
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import P

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True, eq=False)
class ConstrainedValue:
    """A constraint on a value that a call of a module reads or returns.

    Attributes:
        is_read: whether the value is an input of the call, else it is an output.
        specs: applied in order, over ``axis`` only.
    """

    call: ModuleCall
    node: fx.Node
    is_read: bool
    specs: tuple[P, ...]
    axis: str


LAYERS = ("ColwiseParallel", "RowwiseParallel")


def check_style(pattern: str, style: Any) -> str | None:
    """The error message for an unknown style; None for a known one."""
    kind = style if isinstance(style, type) else type(style)
    known = [reader.__name__ for reader in torch_styles()]
    if kind not in torch_styles():
        base = base_style(kind)
        why = f" It is a subclass of {base}, whose changes are unknown." if base else ""
        return (
            f"{pattern!r} has {style!r}, {kind_of(style)}; an exported program takes a P for a"
            " path of its state, or for a module's path"
            f" one of torch's {', '.join(known)}.{why}"
        )
    if style is kind and kind.__name__.startswith("Prepare"):
        return (
            f"{pattern!r} has the class {kind.__name__}, which means nothing without its layouts."
            " Give an instance."
        )
    return None


@dataclass
class StyleReader:
    """Reads the styles of a plan for one functional program."""

    program: "ExportedProgram"
    state: Mapping[str, torch.Tensor]
    axis: str
    failures: list[str]
    signatures: Sequence[Any] = ()
    pins: list[ConstrainedValue] = field(default_factory=list)

    @cached_property
    def modules(self) -> dict[str, str]:
        return modules_of(self.program, list(self.state))

    @cached_property
    def calls(self) -> dict[str, list[ModuleCall]]:
        return calls_of(self.program, self.signatures)

    def read(self, module: str, style: Any) -> dict[str, P]:
        """The specs of the module's state. The style's constraints are added to ``pins``."""
        kind = style if isinstance(style, type) else type(style)
        label = f"{kind.__name__} at {module!r}"
        is_layer = kind.__name__ in LAYERS
        layer = self._layer(module, label) if is_layer else nn.Identity()
        if layer is None:
            return {}
        try:
            part = read_style(style() if style is kind else style, module, layer, self.axis)
        except SpecError as error:
            self.failures.append(f"{label}: {str(error).removeprefix(f'{kind.__name__}: ')}")
            return {}
        constraint = part.constraints.get("")
        if constraint and is_layer:
            default = read_style(kind(), module, layer, self.axis).constraints[""]
            constraint = _without_defaults(constraint, default)
        if constraint:
            self._pin_all(module, constraint, label)
        prefix = f"{module}." if module else ""
        if is_layer:
            return {f"{prefix}{name}": part.specs.get(name, P()) for name in _held(layer)}
        if kind.__name__ == "SequenceParallel":
            return {path: P() for path in self.state if path.startswith(prefix)}
        return {}

    def _layer(self, module: str, label: str) -> nn.Module | None:
        """A layer on meta of the same kind and with the same parameters as the one at ``module``;
        None after a failure.
        """
        weight, bias = (f"{module}.{name}" if module else name for name in ("weight", "bias"))
        if weight not in self.state:
            held = [path for path in self.state if path.startswith(f"{module}." if module else "")]
            self.failures.append(
                f"{label}: {weight!r} is missing from the program's state, which holds"
                f" {', '.join(map(repr, held)) or 'nothing'} there."
            )
            return None
        reader = reader_of(self.program, module, weight)
        if reader is None:
            self.failures.append(
                f"{label}: {weight!r} is read by no linear layer or embedding. Give its spec:"
                f" {{{weight!r}: P(...)}}."
            )
            return None
        if reader == "embedding":
            return nn.Embedding(1, 1, device="meta")
        return nn.Linear(1, 1, bias=bias in self.state, device="meta")

    def _pin_all(self, module: str, constraint: Constraint, label: str) -> None:
        """Add the constraint on the module's inputs and outputs to ``pins``, for every call."""
        for call in self.calls.get(module, []):
            signature, outputs = call.signature, constraint.outputs
            args, results = (signature.args, signature.results) if signature else (None, None)
            self._pin_each(call, constraint.inputs or (), args, call.reads, "input", label)
            if isinstance(outputs, Mapping):
                self.failures.append(
                    f"{label} names outputs, but the graph only has their order."
                    " Give a tuple of layouts."
                )
                return
            given = outputs if isinstance(outputs, tuple) else (outputs,)
            self._pin_each(call, given, results, call.gives, "output", label)
            for name, entry in (constraint.kwargs or {}).items():
                if signature is None:
                    self.failures.append(
                        f"{label} names the keyword {name!r}, which the graph does not have."
                        f" {_keep(module)}"
                    )
                elif name not in signature.kwargs:
                    self.failures.append(
                        f"{label} names the keyword {name!r}; the call has"
                        f" {_listed(signature.kwargs)}."
                    )
                else:
                    self._pin(call, signature.kwargs[name], entry, "keyword", repr(name), label)

    def _pin_each(
        self,
        call: ModuleCall,
        entries: Sequence[Pins | EllipsisType],
        signed: tuple[fx.Node | None, ...] | None,
        seen: tuple[fx.Node, ...],
        side: str,
        label: str,
    ) -> None:
        is_open = entries[-1:] == (...,)
        stated = [entry for entry in entries if entry is not ...]
        if all(entry is None for entry in stated):
            return
        if signed is None:
            # Without a signature the graph identifies one value: the first, if it is the only one.
            if any(entry is not None for entry in stated[1:]) or len(seen) != 1:
                shown = ", ".join(n.name for n in seen) or "none"
                verb = "reads" if side == "input" else "gives"
                self.failures.append(
                    f"{label} names {side}s by position, but the graph only tells that the"
                    f" module {verb} {shown}. {_keep(call.module)}"
                )
                return
            signed, is_open = seen, True
        if len(signed) < len(stated) or (len(signed) > len(stated) and not is_open):
            self.failures.append(
                f"{label} has {len(stated)} {side}s, but the module has {len(signed)}."
            )
            return
        for at, (node, entry) in enumerate(zip(signed, stated, strict=False)):
            self._pin(call, node, entry, side, str(at), label)

    def _pin(
        self, call: ModuleCall, node: fx.Node | None, entry: Pins, side: str, which: str, label: str
    ) -> None:
        entries = entry if isinstance(entry, tuple) else (entry,)
        specs = tuple(spec for spec in entries if isinstance(spec, P))
        if not specs:
            return
        if node is None:
            self.failures.append(
                f"{label} names {side} {which}, which is no tensor that the module's ops read or"
                " return."
            )
            return
        ndim = node.meta["val"].ndim
        if over := [spec for spec in specs if entries_over(spec, ndim)]:
            self.failures.append(
                f"{label} says {over[0]} of {side} {which}, but the value has {ndim} dims."
            )
            return
        self.pins.append(ConstrainedValue(call, node, side != "output", specs, self.axis))


def _held(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_parameters()]


def _without_defaults(constraint: Constraint, default: Constraint) -> Constraint | None:
    """The constraint without a style's default entries. The planner decides those, as a graph does
    not say which of several inputs a layer reads.
    """
    inputs = None if constraint.inputs == default.inputs else constraint.inputs
    outputs = None if constraint.outputs == default.outputs else constraint.outputs
    made = replace(constraint, inputs=inputs, outputs=outputs)
    return made if made.specs() else None


def _keep(module: str) -> str:
    return (
        f"Export with preserve_module_call_signature=({module!r},), or leave this out: it only"
        " fixes layouts of values."
    )


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"
