"""Constraints on inputs and outputs of a model's modules, applied by hooks as the model runs."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from types import EllipsisType
from typing import Any, Literal, cast

from torch import Tensor, nn

from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.errors import InputError, SpecError
from ftp.functional.matched_modules import MatchedModule, matched_modules
from ftp.ops.constrain import Gradient, constrain, constrain_gradient, entries_over, misnamed
from ftp.sharding.patterns import listed
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import P

Pins = P | tuple[P | Gradient, ...] | None
"""Constraint on one tensor: a spec; several specs, applied in order; None for no constraint."""


@dataclass(frozen=True)
class Constraint:
    """Specs of a module's inputs and outputs, for ``ftp.functionalize(constraints=...)``.

    Each tensor has an entry: a ``P``; a tuple of them, applied in order, such as ``(P("tp"), P())``
    for an input that arrives sharded and is then gathered; or None for no constraint.

    Args:
        inputs: an entry for each positional argument of the module's forward; a trailing ``...``
            stands for None for the rest.
        kwargs: ``{name: entry}`` of keyword arguments.
        outputs: the entry of the output tensor; a tuple with an entry for each tensor of a returned
            tuple or dict; or ``{key: entry}`` for a returned dict.
        axes: the mesh axes that the specs fix, as in ``ftp.constrain``; default all. Over other
            axes the planner chooses.
        grad: True gives gradients the layouts of their values, False leaves them to the planner.
            "dtensor" is as in DTensor: an output's gradient has the output's layout; the gradient
            of an input with two specs has the first; others are left to the planner.
        forward: called in place of the module's forward, as ``forward(module, own, *args,
            **kwargs)``, where ``own`` is the module's.

    Raises:
        SpecError: an entry of another type; a spec that names an axis outside of ``axes``.

    >>> Constraint(inputs=(P("dp", "tp", None),), outputs=(P("dp"), None)).outputs
    (P('dp'), None)
    >>> Constraint(inputs=((P(None, "tp"), P()), ...), axes="tp").axes
    ('tp',)
    """

    inputs: "tuple[Pins | EllipsisType, ...] | None" = None
    kwargs: Mapping[str, Pins] | None = None
    outputs: "P | tuple[Pins | EllipsisType, ...] | Mapping[str, Pins] | None" = None
    axes: str | Sequence[str] | None = None
    grad: bool | Literal["dtensor"] = True
    forward: Callable[..., Any] | None = None

    def __post_init__(self):
        if self.axes is not None:
            object.__setattr__(
                self, "axes", (self.axes,) if isinstance(self.axes, str) else tuple(self.axes)
            )
        if not isinstance(self.inputs, tuple | None):
            hint = f", as ({self.inputs},)" if isinstance(self.inputs, P) else ""
            raise SpecError(
                f"Constraint(inputs={self.inputs!r}): it must be a tuple of P or None{hint}."
            )
        by_name = self.outputs if isinstance(self.outputs, Mapping) else {}
        for field, value, kind in (
            ("inputs", self.inputs, "a tuple of P or None"),
            ("outputs", None if by_name else self.outputs, "a P or a tuple of P or None"),
        ):
            entries = value if isinstance(value, tuple) else (value,)
            is_open = isinstance(value, tuple) and bool(value) and value[-1] is ...
            for entry in entries[:-1] if is_open else entries:
                if not _is_entry(entry):
                    raise SpecError(
                        f"Constraint({field}={value!r}): it must be {kind}; {entry!r} is"
                        f" {kind_of(entry)}."
                    )
        for field, named in (("kwargs", self.kwargs or {}), ("outputs", by_name)):
            for name, entry in named.items():
                if not _is_entry(entry):
                    raise SpecError(
                        f"Constraint({field}={{{name!r}: {entry!r}}}): the spec must be a P or"
                        " None."
                    )
        if self.grad not in (True, False, "dtensor"):
            raise SpecError(f"Constraint(grad={self.grad!r}): it must be True, False or 'dtensor'.")
        for spec in self.specs():
            if problem := misnamed(spec, cast("tuple[str, ...] | None", self.axes)):
                raise SpecError(f"Constraint: {problem}")

    def specs(self) -> tuple[P, ...]:
        """All specs of all entries.

        >>> Constraint(inputs=((P("tp"), P()), None), outputs=P("tp")).specs()
        (P('tp'), P(), P('tp'))
        """
        if isinstance(self.outputs, Mapping):
            outputs: tuple[Any, ...] = tuple(self.outputs.values())
        else:
            outputs = self.outputs if isinstance(self.outputs, tuple) else (self.outputs,)
        entries = (*(self.inputs or ()), *(self.kwargs or {}).values(), *outputs)
        chains = [_chain(entry) for entry in entries if entry is not ...]
        return tuple(
            spec.spec if isinstance(spec, Gradient) else spec for chain in chains for spec in chain
        )


def _is_entry(entry: object) -> bool:
    if isinstance(entry, tuple) and entry:
        return all(isinstance(s, P | Gradient) for s in entry)
    return isinstance(entry, P | None)


def _chain(entry: Pins) -> tuple[P | Gradient, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry is not None else ()


Change = Callable[[str, Any, bool], Any]
_change: ContextVar[Change | None] = ContextVar("change", default=None)


def outputs_through(change: Change) -> AbstractContextManager[Any]:
    """Within the block, replace the output of a numbered module, such as ``layers.3``, by
    ``change(path, output, False)``; the first of a tuple, if it is a tensor, by ``change(path,
    tensor, True)``.
    """
    return set_within(_change, change)


def change_outputs(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Register the hooks of ``outputs_through`` for one call."""
    if (change := _change.get()) is None:
        return
    for path, module in modules:
        if path.rpartition(".")[2].isdigit():
            module.register_forward_hook(partial(_changed, change, path))


def _changed(change: Change, path: str, module: nn.Module, args: tuple, out: Any) -> Any:
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        return _like(out, [change(path, out[0], True), *out[1:]])
    return change(path, out, False)


def _like(out: Any, values: list[Any]) -> Any:
    """A tuple, named tuple or list of the type of ``out``."""
    return type(out)(*values) if hasattr(out, "_fields") else type(out)(values)


@dataclass(frozen=True, eq=False)
class ConstrainedModule(MatchedModule):
    """A module with its constraint."""

    constraint: Constraint

    done = "constrained"
    does = "pins"


def pins_of(
    model: nn.Module, constraints: Mapping[str, P | Constraint]
) -> tuple[ConstrainedModule, ...]:
    return tuple(
        ConstrainedModule(
            pattern, path, module, Constraint(outputs=given) if isinstance(given, P) else given
        )
        for pattern, path, module, given in matched_modules(model, constraints, _check_constraint)
    )


def _check_constraint(pattern: str, value: object) -> str | None:
    if isinstance(value, P | Constraint):
        return None
    return (
        f"constraints[{pattern!r}] is {value!r}, {kind_of(value)}; it must be a P (of the"
        " output) or an ftp.Constraint."
    )


def pin_inputs(
    pin: ConstrainedModule, ran: set[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    ran.add(pin.path)
    given, by_name = pin.constraint.inputs, pin.constraint.kwargs or {}
    if given is not None:
        keywords = f" and the keywords {', '.join(map(repr, kwargs))}" if kwargs else ""
        called = f"it is called with {len(args)} arguments{keywords}"
        entries = _fitted(given, len(args), pin, "inputs", called)
        args = tuple(
            _pinned(value, entry, pin, f"input {i}")
            for i, (value, entry) in enumerate(zip(args, entries, strict=True))
        )
    if missing := [name for name in by_name if name not in kwargs]:
        called = f"the keywords {', '.join(map(repr, kwargs))}" if kwargs else "no keywords"
        raise InputError(
            f"{pin.where}: the constraint names {', '.join(map(repr, missing))}, but it is called"
            f" with {called}."
        )
    return args, kwargs | {
        name: _pinned(kwargs[name], entry, pin, f"keyword {name!r}")
        for name, entry in by_name.items()
    }


def pin_outputs(pin: ConstrainedModule, module: nn.Module, args: tuple, out: Any) -> Any:
    given = pin.constraint.outputs
    if isinstance(out, Mapping) and (isinstance(given, Mapping | tuple) or len(out) == 1):
        return _pinned_by_key(out, (given,) if isinstance(given, P) else given, pin)
    if isinstance(given, Mapping):
        raise InputError(
            f"{pin.where}: the constraint names outputs, {listed(given)}, but it returns"
            f" {kind_of(out)}."
        )
    if not isinstance(given, tuple):
        return _pinned(out, given, pin, "its output")
    if isinstance(out, Tensor) and len(given) == 1:
        (entry,) = _fitted(given, 1, pin, "outputs", "")
        return _pinned(out, entry, pin, "its output")
    if not isinstance(out, tuple | list):
        raise InputError(
            f"{pin.where}: the constraint has a tuple of outputs, but it returns {kind_of(out)}."
        )
    entries = _fitted(given, len(out), pin, "outputs", f"it returns {len(out)}")
    new = [
        _pinned(value, entry, pin, f"output {i}")
        for i, (value, entry) in enumerate(zip(out, entries, strict=True))
    ]
    return _like(out, new)


def _pinned_by_key(
    out: Mapping[str, Any], given: Mapping[str, Pins] | tuple | None, pin: ConstrainedModule
) -> Any:
    """A copy of a dict of outputs, of transformers' kinds too."""
    if given is None:
        return out
    if isinstance(given, tuple):
        returned = f"it returns {kind_of(out)} of {len(out)}"
        given = dict(zip(out, _fitted(given, len(out), pin, "outputs", returned), strict=True))
    if strange := [key for key in given if key not in out]:
        raise InputError(
            f"{pin.where}: the constraint names output {strange[0]!r}; it returns {listed(out)}."
        )
    new: Any = copy.copy(out)
    for key, entry in given.items():
        new[key] = _pinned(out[key], entry, pin, f"output {key!r}")
    return new


def _fitted(
    entries: tuple, n: int, pin: ConstrainedModule, field: str, but: str
) -> tuple[Pins, ...]:
    """An entry for each of ``n`` values."""
    is_open = entries[-1:] == (...,)
    given = len(entries) - is_open
    if given > n or (given < n and not is_open):
        raise InputError(f"{pin.where}: the constraint has {given} {field}, but {but}.")
    return (*entries[:given], *(None,) * (n - given))


def _pinned(value: Any, entry: Pins, pin: ConstrainedModule, what: str) -> Any:
    chain = _chain(entry)
    for at, given in enumerate(chain):
        spec = given.spec if isinstance(given, Gradient) else given
        if not isinstance(value, Tensor):
            several = (
                " Give ftp.Constraint(outputs=...) a spec or None for each."
                if isinstance(value, tuple | list | dict)
                else ""
            )
            raise InputError(
                f"{pin.where}: {what} is {kind_of(value)}; {spec} can pin a tensor only.{several}"
            )
        if entries_over(spec, value.ndim):
            raise SpecError(
                f"{pin.where}: {spec} has {len(spec)} entries, but {what} has {value.ndim} dims,"
                f" shape {tuple(value.shape)}."
            )
        if isinstance(given, Gradient):
            value = constrain_gradient(value, spec, axes=pin.constraint.axes)
            continue
        grad = pin.constraint.grad
        is_output = "output" in what
        value = constrain(
            value,
            spec,
            axes=pin.constraint.axes,
            grad=is_output or at < len(chain) - 1 if grad == "dtensor" else grad,
        )
    return value
