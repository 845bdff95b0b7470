"""PyTorch's styles on the modules of an exported program: specs of its state, and where the
values at a module's boundary live.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ftp.errors import SpecError
from ftp.exported.module_calls import Call, calls_of, modules_of, reader_of
from ftp.functional.module_constraints import Constraint, Pins
from ftp.ops.constrain import entries_over
from ftp.plans.styles import read_style, shard_spec
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import P

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True, eq=False)
class Pin:
    """Where a value that a call of a module reads, or one that it gives, lives over ``axis``:
    specs that hold one after the other.
    """

    call: Call
    node: fx.Node
    is_read: bool
    specs: tuple[P, ...]
    axis: str


LAYERS = ("ColwiseParallel", "RowwiseParallel")
AROUND = (
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "PrepareModuleInputOutput",
)


def check_style(pattern: str, style: Any) -> str | None:
    """What is wrong with the value of a plan that is no spec."""
    import torch.distributed.tensor.parallel as torch_styles

    kind = style if isinstance(style, type) else type(style)
    known = {getattr(torch_styles, name): name for name in LAYERS + AROUND}
    if kind not in known:
        base = next((known[b] for b in kind.__mro__ if b in known), None)
        why = (
            f" It is a subclass of {base}, and what it changes of that is unknown." if base else ""
        )
        return (
            f"{pattern!r} has {style!r}, {kind_of(style)}; an exported program takes a P for a"
            " path of its state, or for a module's path"
            f" one of torch's {', '.join(known.values())}.{why}"
        )
    if style is kind and known[kind].startswith("Prepare"):
        return (
            f"{pattern!r} has the class {known[kind]}, which says nothing without its layouts."
            " Give an instance."
        )
    return None


@dataclass
class StyleReader:
    """What the styles of a plan say of one functional program."""

    program: "ExportedProgram"
    state: Mapping[str, torch.Tensor]
    axis: str
    failures: list[str]
    signatures: Sequence[Any] = ()
    pins: list[Pin] = field(default_factory=list)

    @cached_property
    def modules(self) -> dict[str, str]:
        return modules_of(self.program, list(self.state))

    @cached_property
    def calls(self) -> dict[str, list[Call]]:
        return calls_of(self.program, self.signatures)

    def read(self, module: str, style: Any) -> dict[str, P]:
        """The specs of the module's state; what the style pins is added to ``pins``."""
        kind = style if isinstance(style, type) else type(style)
        label = f"{kind.__name__} at {module!r}"
        if kind.__name__ in LAYERS:
            return self._layer(module, style, kind, label)
        try:
            part = read_style(style() if style is kind else style, module, nn.Identity(), self.axis)
        except SpecError as error:
            self.failures.append(f"{label}: {str(error).removeprefix(f'{kind.__name__}: ')}")
            return {}
        if constraint := part.constraints.get(""):
            self._pin_all(module, constraint, label)
        prefix = f"{module}." if module else ""
        return (
            {path: P() for path in self.state if path.startswith(prefix)}
            if kind.__name__ == "SequenceParallel"
            else {}
        )

    def _layer(self, module: str, style: Any, kind: type, label: str) -> dict[str, P]:
        """A linear layer or an embedding."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        weight, bias = (f"{module}.{name}" if module else name for name in ("weight", "bias"))
        if weight not in self.state:
            held = [path for path in self.state if path.startswith(f"{module}." if module else "")]
            self.failures.append(
                f"{label}: {weight!r} is missing from the program's state, which holds"
                f" {', '.join(map(repr, held)) or 'nothing'} there."
            )
            return {}
        reader = reader_of(self.program, module, weight)
        if reader is None:
            self.failures.append(
                f"{label}: {weight!r} is read by no linear layer or embedding. Give its spec:"
                f" {{{weight!r}: P(...)}}."
            )
            return {}
        is_columns = kind is ColwiseParallel
        if reader == "linear":
            specs = {
                weight: P(self.axis, None) if is_columns else P(None, self.axis),
                bias: P(self.axis) if is_columns else P(),
            }
        else:
            specs = {weight: P(None, self.axis) if is_columns else P(self.axis, None)}
        if style is not kind:
            fresh = kind()
            if not is_columns and reader == "embedding":
                fresh = RowwiseParallel(
                    input_layouts=style.input_layouts[0]
                )  # torch's own default cuts nothing that a lookup has
            inputs, outputs = (
                None
                if getattr(style, name) == getattr(fresh, name)
                or (name == "output_layouts" and not is_columns and _is_pending(style))
                else self._layout(getattr(style, name), label, name)
                for name in ("input_layouts", "output_layouts")
            )
            if inputs is not None or outputs is not None:
                self._pin_all(
                    module, Constraint(inputs=(inputs, ...), outputs=outputs, axes=self.axis), label
                )
        return {path: spec for path, spec in specs.items() if path in self.state}

    def _layout(self, layouts: Sequence[Any], label: str, name: str) -> P | None:
        from torch.distributed.tensor import Replicate, Shard

        layout = layouts[0] if len(layouts) == 1 else layouts
        if type(layout) not in (Replicate, Shard):
            self.failures.append(
                f"{label} has {name} {layout}; only Shard(dim) and Replicate() say where a value"
                " lies."
            )
            return None
        return shard_spec(layout.dim, self.axis) if isinstance(layout, Shard) else P()

    def _pin_all(self, module: str, constraint: Constraint, label: str) -> None:
        """Pins what the constraint says, at every call of the module."""
        for call in self.calls.get(module, []):
            signature = call.signature
            args = signature.args if signature else None
            self._pin_each(call, constraint.inputs or (), args, call.reads, "input", label)
            if isinstance(constraint.outputs, Mapping):
                self.failures.append(
                    f"{label} speaks of outputs by name, and the graph only tells their order."
                    " Give a tuple of layouts."
                )
                return
            given = (
                constraint.outputs
                if isinstance(constraint.outputs, tuple)
                else (constraint.outputs,)
            )
            self._pin_each(
                call, given, signature.results if signature else None, call.gives, "output", label
            )
            for name, entry in (constraint.kwargs or {}).items():
                if signature is None:
                    self.failures.append(
                        f"{label} speaks of the keyword {name!r}, which the graph does not tell."
                        f" {_keep(module)}"
                    )
                elif name not in signature.kwargs:
                    self.failures.append(
                        f"{label} names the keyword {name!r}; the call has"
                        f" {_listed(signature.kwargs)}."
                    )
                else:
                    self._pin(call, signature.kwargs[name], entry, f"keyword {name!r}", label)

    def _pin_each(
        self,
        call: Call,
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
            # Without a signature one value alone has a name: the first, where it is the only one
            # that the graph shows.
            if any(entry is not None for entry in stated[1:]) or len(seen) != 1:
                shown = ", ".join(n.name for n in seen) or "none"
                verb = "reads" if side == "input" else "gives"
                self.failures.append(
                    f"{label} speaks of {side}s by position, and the graph only tells that the"
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
            self._pin(call, node, entry, f"{side} {at}", label)

    def _pin(self, call: Call, node: fx.Node | None, entry: Pins, what: str, label: str) -> None:
        specs = tuple(
            s for s in (entry if isinstance(entry, tuple) else (entry,)) if isinstance(s, P)
        )
        if not specs:
            return
        if node is None:
            self.failures.append(
                f"{label} speaks of {what}, which is no tensor that the module's ops read or give."
            )
            return
        ndim = node.meta["val"].ndim
        if over := [spec for spec in specs if entries_over(spec, ndim)]:
            self.failures.append(
                f"{label} says {over[0]} of {what}, but the value has {ndim} dims."
            )
            return
        self.pins.append(Pin(call, node, what.startswith(("input", "keyword")), specs, self.axis))


def _is_pending(style: Any) -> bool:
    """Whether a row-wise layer's output is left a pending sum, which the planner reduces where
    that costs least.
    """
    return all(layout.is_partial() for layout in style.output_layouts)


def _keep(module: str) -> str:
    return (
        f"Export with preserve_module_call_signature=({module!r},), or leave this out: it only"
        " says where values go."
    )


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"
