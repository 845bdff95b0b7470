"""Run a model with other tensors: swap its modules' attributes for one call, then restore them."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ftp.errors import FtpError, InputError, TraceError, raise_all
from ftp.functional import remat as recompute
from ftp.functional.assigned import (
    CONTAINERS,
    OWN_BY_CALL,
    assign,
    assigned_before,
    assigned_since,
    attributes_now,
    items_of,
)
from ftp.functional.attributes import attributes_of, join
from ftp.functional.closures import contents_of, own_attributes, restored
from ftp.functional.gradient_hooks import GradientHooks
from ftp.functional.lost_state import KeptAttributes, check_state
from ftp.functional.matched_modules import MatchedModule, matched_modules
from ftp.functional.module_constraints import (
    ConstrainedModule,
    change_outputs,
    pin_inputs,
    pin_outputs,
)
from ftp.functional.purity import WriteGuard, impure
from ftp.functional.remat import Policy, policy_problem
from ftp.functional.taps import Tap, tapped
from ftp.random.draws import Draws
from ftp.torch_internals.error_texts import Meaning, meaning_of, times_too_large
from ftp.torch_internals.functorch import unwrapped
from ftp.torch_internals.storages import Storages, version


@dataclass(frozen=True)
class Slot:
    """Placeholder in a module's attributes for a tensor that is an argument of the call."""

    path: str


@dataclass(frozen=True)
class ModuleState:
    """A module with a snapshot of its attributes, its argument tensors replaced by slots."""

    path: str
    module: nn.Module
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ModuleProgram:
    """A model as ``functionalize`` read it.

    Attributes:
        other_names: ``{path: first path}`` of tied tensors.
        constants: ``{id: name in messages}`` of buffers and frozen parameters.
        memory: of the tensors of the model that are arguments of the call.
    """

    name: str
    model: nn.Module
    modules: tuple[ModuleState, ...]
    pins: tuple[ConstrainedModule, ...]
    taps: tuple[Tap, ...]
    blocks: "tuple[RematModule, ...]"
    other_names: dict[str, str]
    constants: dict[int, str]
    memory: Storages
    hooks: GradientHooks


@dataclass(frozen=True, eq=False)
class RematModule(MatchedModule):
    """A module that is recomputed in the backward pass.

    Attributes:
        program: the module's own program.
        slots: paths of the argument tensors that the module holds.
        mutable: the slots that it may write to.
    """

    policy: Policy
    program: ModuleProgram
    slots: tuple[str, ...]
    mutable: frozenset[str]

    done = "recomputed"
    does = "recomputes"
    instead = "the modules in it that are"


def _replace(value: Any, new: Callable[[Any], Any]) -> Any:
    """Apply ``new`` to an attribute, or to each item of a copy of a plain container."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return kind((key, new(item)) for key, item in value.items())
    return kind(map(new, value)) if kind in CONTAINERS else new(value)


class _Copies:
    """Copies of modules' attributes. Modules that share a container share its copy."""

    def __init__(self, new: Callable[[Any], Any]) -> None:
        self._new, self._made = new, dict[int, tuple[Any, Any]]()

    def of(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {name: self._copy(value) for name, value in attributes.items()}

    def _copy(self, value: Any) -> Any:
        if type(value) not in CONTAINERS:
            return self._new(value)
        if id(value) not in self._made:
            self._made[id(value)] = value, _replace(value, self._new)
        return self._made[id(value)][1]


def snapshots(model: nn.Module, stand_ins: dict[int, Any]) -> Iterator[ModuleState]:
    copies = _Copies(lambda v: stand_ins.get(id(v), v))
    for path, module in model.named_modules():
        attributes = copies.of(module.__dict__)
        attributes["_compiled_call_impl"] = None
        if isinstance(module, nn.RNNBase):  # packs its weights in place, on a GPU
            attributes["flatten_parameters"] = _leave_parameters
        yield ModuleState(path, module, attributes)


def _leave_parameters() -> None:
    pass


def installed(program: ModuleProgram, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Within the block each module has a copy of its snapshot, with ``values`` in the slots."""
    copies = _Copies(lambda v: values[v.path] if type(v) is Slot else v)
    return with_attributes([(m.module, copies.of(m.attributes)) for m in program.modules])


@contextmanager
def with_attributes(new: Sequence[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    """Within the block modules have other attributes."""
    saved = [(module, module.__dict__) for module, _ in new]
    try:
        for module, attributes in new:
            object.__setattr__(module, "__dict__", attributes)
        yield
    finally:
        for module, attributes in saved:
            object.__setattr__(module, "__dict__", attributes)


def run(
    program: ModuleProgram,
    draws: Draws,
    values: Mapping[str, Tensor],
    names: dict[int, str],
    mutable: frozenset[int],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    ran: set[str] = set()
    change_outputs((m.path, m.module) for m in program.modules)
    out = _call_hooked(program, program.model, draws, values, names, mutable, ran, args, kwargs)
    placed: tuple[MatchedModule, ...] = (*program.pins, *program.taps, *program.blocks)
    reached = {(type(given), given.pattern) for given in placed if given.path in ran}
    idle = [
        f"{given.where}, was not called, so it {given.does} nothing. Name {given.instead}."
        for given in placed
        if (type(given), given.pattern) not in reached
    ]
    raise_all(InputError, idle)
    return out


def _call_hooked(
    program: ModuleProgram,
    call: Callable[..., Any],
    draws: Draws,
    values: Mapping[str, Tensor],
    names: dict[int, str],
    mutable: frozenset[int],
    ran: set[str],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call a module, or its forward, with the program's hooks for random draws, taps, constraints
    and remat registered.
    """
    _register_hooks(program, draws, values, ran)
    modules = [(m.path, m.module) for m in program.modules]
    attributes = {held.path: held for held in attributes_of(modules)}
    held = {
        id(tensor): (tensor, names.get(id(tensor), f"attribute {path!r}"))
        for path, tensor, *_ in (*_registered(program), *attributes.values())
        if isinstance(tensor, Tensor) and id(tensor) not in mutable
    }
    versions = {key: version(tensor) for key, (tensor, _) in held.items()}
    names = {key: name for key, (_, name) in held.items()}
    # A block of remat takes parameters from ``values``, which no swap reaches.
    swap = None if program.blocks else partial(_swap, program)
    guard = WriteGuard(program.name, names, swap, _memory_in_model(program, values))
    trained = {key for key, name in names.items() if name.startswith("parameter")}
    kept = KeptAttributes(
        modules,
        (x for _, x in _registered(program) if isinstance(x, Tensor) and id(x) not in trained),
    )
    try:
        with guard, kept:
            out = call(*args, **kwargs)
    except (TypeError, RuntimeError) as error:
        if (explained := _explained(program.name, call, kwargs, error)) is None:
            raise
        raise explained from error
    for key, (tensor, name) in held.items():
        if version(tensor) != versions[key]:
            raise TraceError(impure(program.name, name, "modifies"))
    check_state(program.name, modules, attributes, guard.read, kept)
    return out


def _register_hooks(
    program: ModuleProgram, draws: Draws, values: Mapping[str, Tensor], ran: set[str]
) -> None:
    # In eval mode without a key register no hooks: they would turn fused kernels off.
    if draws.key is not None or any(m.module.training for m in program.modules):
        for m in program.modules:
            m.module.register_forward_pre_hook(partial(_enter, draws, m.path), prepend=True)
            m.module.register_forward_hook(partial(_leave, draws), always_call=True)
    for tap in program.taps:
        tap.module.register_forward_hook(partial(tapped, tap, ran))
    for pin in program.pins:
        if pin.constraint.forward is not None:
            pin.module.forward = partial(pin.constraint.forward, pin.module, pin.module.forward)
        pin.module.register_forward_pre_hook(partial(pin_inputs, pin, ran), with_kwargs=True)
        pin.module.register_forward_hook(partial(pin_outputs, pin))
    for block in program.blocks:
        if not any(block in outer.program.blocks for outer in program.blocks):
            block.module.forward = partial(_recomputed, block, draws, values, ran)


def _explained(
    name: str, call: Callable[..., Any], kwargs: dict[str, Any], error: Exception
) -> FtpError | None:
    """The error to raise for an error of a module's call; None for one that says enough."""
    if isinstance(error, TypeError):
        if not (unknown := " or ".join(map(repr, _unknown_keywords(call, kwargs)))):
            return None
        return InputError(f"{name} does not take the keyword {unknown}: {error}.")
    if meaning_of(error) is Meaning.MUTATES_CAPTURED:
        return TraceError(impure(name, "buffer (through a view)", "modifies a"))
    if share := times_too_large(error):
        return TraceError(
            f"{name}: {error}\n  The tensor has {share} times the elements that its new shape"
            f" holds, as where a model was edited for {share} ranks to view to its local head"
            " count. Model code sees global shapes here: give it the global count."
        )
    return None


def _memory_in_model(
    program: ModuleProgram, values: Mapping[str, Tensor]
) -> Callable[[Tensor], str | None]:
    """A function that names the argument whose memory, in the model, a tensor shares; it answers
    None where the call is given that memory.
    """
    given = {program.memory.name(unwrapped(x)) for x in values.values()}

    def name(x: Tensor) -> str | None:
        path = program.memory.name(x)
        return None if path in given else path

    return name


def _unknown_keywords(call: Callable[..., Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The keywords for which a module's forward, or a function, has no parameter."""
    forward = type(call).forward if isinstance(call, nn.Module) else call
    try:
        parameters = inspect.signature(forward).parameters
    except ValueError:  # a builtin
        return []
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in kwargs if name not in parameters]


def _recomputed(
    block: "RematModule",
    draws: Draws,
    values: Mapping[str, Tensor],
    ran: set[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the module's forward as a pure function under ``remat``: the backward pass runs it again
    after this call has ended.
    """
    ran.add(block.path)
    counts, first = dict(draws.counts), []
    live = {**{path: values[path] for path in block.slots}, **_buffers_of(block.program)}
    own = ((m.path, m.module, m.attributes) for m in block.program.modules)
    live |= assigned_before(own, live.values())
    part = _as_set_by_now(block.program, live)
    contents = contents_of([own_attributes(m.attributes) for m in part.modules])

    def forward(
        key: Tensor | None, given: dict[str, Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor], dict[str, dict[str, Any]]]:
        clones = {path: given[path].clone() for path in block.mutable}
        own = {**given, **clones}
        with (
            restored(contents),
            Draws(key, part.name, path=block.path, counts=dict(counts)) as again,
            installed(part, own),
        ):
            mutable = frozenset(map(id, clones.values()))
            before = [attributes_now(m.module) for m in part.modules]
            out = _call_hooked(
                part,
                block.module.forward,
                again,
                own,
                parameter_names(given) | part.constants,
                mutable,
                ran,
                args,
                kwargs,
            )
            new = {**clones, **_buffers_of(part)}
            assigned = assigned_since(
                (m.path, m.module, b) for m, b in zip(part.modules, before, strict=True)
            )
        if not first:
            draws.counts.update(again.counts)
        first.append(True)
        return out, new, assigned

    forward.__name__ = f"module {block.path!r}"
    out, new, assigned = recompute.remat(forward, block.policy)(draws.key, live, args, kwargs)
    for m in block.program.modules:
        assign(m.module, assigned.get(m.path, {}))
        for name, slot in m.attributes["_buffers"].items():
            if type(slot) is Slot and slot.path in new:
                value = new[slot.path]
                # torch refuses running statistics that may have a gradient; remat's results may.
                m.module._buffers[name] = (
                    value.detach()
                    if isinstance(m.module, nn.modules.batchnorm._NormBase)
                    else value
                )
    return out


def _as_set_by_now(program: ModuleProgram, live: Mapping[str, Any]) -> ModuleProgram:
    """A block's program with the attributes that the model has set by now, tensors of ``live`` by
    their slots.
    """
    slots = {id(x): Slot(path) for path, x in live.items() if x is not None}
    copies = _Copies(lambda v: slots.get(id(v), v))

    def now(m: ModuleState) -> ModuleState:
        kept = {name: v for name, v in m.attributes.items() if name in OWN_BY_CALL}
        own = {name: v for name, v in m.module.__dict__.items() if name not in OWN_BY_CALL}
        return ModuleState(m.path, m.module, copies.of(own) | kept)

    return replace(program, modules=tuple(map(now, program.modules)))


def _buffers_of(program: ModuleProgram) -> dict[str, Any]:
    """The buffers in the slots, as the modules hold them now."""
    return {
        slot.path: m.module._buffers[name]
        for m in program.modules
        for name, slot in m.attributes["_buffers"].items()
        if type(slot) is Slot
    }


def _enter(draws: Draws, path: str, module: nn.Module, args: tuple) -> None:
    draws.path.append(path)


def _leave(draws: Draws, module: nn.Module, args: tuple, out: Any) -> None:
    draws.path.pop()


def _registered(program: ModuleProgram) -> Iterator[tuple[str, Any]]:
    """The modules' parameters and buffers, by path."""
    for m in program.modules:
        for kind in ("_parameters", "_buffers"):
            for name, value in m.module.__dict__[kind].items():
                yield join(m.path, name), value


def _swap(program: ModuleProgram, old: Tensor, new: Tensor) -> None:
    """Put ``new`` in the place of ``old`` in all modules."""
    for m in program.modules:
        for name, value in m.module.__dict__.items():
            if any(item is old for item in items_of(value)):
                m.module.__dict__[name] = _replace(value, lambda v: new if v is old else v)


def remat_modules(
    program: ModuleProgram, policies: Mapping[str, Policy], mutable: frozenset[str]
) -> tuple[RematModule, ...]:
    found = matched_modules(
        program.model,
        policies,
        lambda pattern, policy: policy_problem(policy, f"remat[{pattern!r}]"),
    )
    blocks: list[RematModule] = []
    for pattern, path, module, policy in reversed(found):  # inner modules first
        inside = frozenset(module.modules())
        inner = inside - {module}
        modules = tuple(m for m in program.modules if m.module in inside)
        held = (v for m in modules for value in m.attributes.values() for v in items_of(value))
        slots = tuple(dict.fromkeys(v.path for v in held if type(v) is Slot))
        part = replace(
            program,
            model=module,
            modules=modules,
            pins=tuple(pin for pin in program.pins if pin.module in inner),
            taps=tuple(tap for tap in program.taps if tap.module in inner),
            blocks=tuple(b for b in blocks if b.module in inside),
        )
        blocks.append(RematModule(pattern, path, module, policy, part, slots, mutable & set(slots)))
    return tuple(blocks)


def parameter_names(values: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(tensor): f"parameter {path!r}" for path, tensor in values.items()}
