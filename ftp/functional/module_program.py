"""Run a model with other tensors: swap its modules' attributes for one call, then restore them."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ftp.dataclass import dataclass
from ftp.errors import FtpError, InputError, TraceError, raise_all
from ftp.functional import remat as recompute
from ftp.functional.attributes import attributes_of, join
from ftp.functional.backward_code import surrounding_backward_code
from ftp.functional.carried_values import HOOKS, given_to, note_left
from ftp.functional.contents import own_attributes
from ftp.functional.gradient_hooks import GradientHooks
from ftp.functional.lost_state import KeptAttributes, check_state
from ftp.functional.matched_modules import MatchedModule, matched_modules
from ftp.functional.module_constraints import (
    ConstrainedModule,
    change_outputs,
    pin_inputs,
    pin_outputs,
)
from ftp.functional.purity import InModel, WriteGuard, impure
from ftp.functional.remat import Policy, policy_problem
from ftp.functional.slots import Slot, with_held
from ftp.functional.taps import Tap, tapped
from ftp.random.draws import Draws
from ftp.torch_internals.deferred_compiler import uncompiled
from ftp.torch_internals.error_texts import Meaning, meaning_of, times_too_large
from ftp.torch_internals.functorch import unwrapped
from ftp.torch_internals.storages import Storages, version


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
        modules: itself and those in it.
        mutable: paths of the buffers that the model may write to.
    """

    policy: Policy
    modules: tuple[ModuleState, ...]
    mutable: frozenset[str]

    done = "recomputed"
    does = "recomputes"
    instead = "the modules in it that are"


CONTAINERS = (dict, OrderedDict, list, tuple, set)


def items_of(value: Any) -> Collection[Any]:
    """The items of a plain container; of another attribute, itself."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return value.values()
    return value if kind in CONTAINERS else (value,)


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


@contextmanager
def installed(program: ModuleProgram, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block each module has a copy of its snapshot, with ``values`` in the slots."""
    copies = _Copies(lambda v: v.of(values) if isinstance(v, Slot) else v)
    begun = ((m.module, {**m.attributes, **dict(given_to(m.module))}) for m in program.modules)
    given = GivenAttributes([(module, copies.of(attributes)) for module, attributes in begun])
    with given.installed(), surrounding_backward_code(given.installed):
        yield


class GivenAttributes:
    """Attributes that modules have within a call, and again in code that autograd runs later, as
    the call left them. Dicts of hooks stay the same objects, with other contents: the handles by
    which code removes hooks refer to them.
    """

    def __init__(self, new: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
        self._new = new
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for module, attributes in new:
            for name in HOOKS:
                if (own := module.__dict__.get(name)) and name in attributes:
                    self._hooks.append((own, attributes[name]))
                    attributes[name] = own

    @contextmanager
    def installed(self) -> Iterator[None]:
        saved = [(module, module.__dict__) for module, _ in self._new]
        before = [(own, dict(own)) for own, _ in self._hooks]
        try:
            for own, contents in self._hooks:
                _fill(own, contents)
            for module, attributes in self._new:
                object.__setattr__(module, "__dict__", attributes)
            yield
        finally:
            self._hooks = [(own, dict(own)) for own, _ in self._hooks]
            for module, attributes in saved:
                object.__setattr__(module, "__dict__", attributes)
            for own, contents in before:
                _fill(own, contents)


def _fill(hooks: dict[int, Any], contents: Mapping[int, Any]) -> None:
    contents = dict(contents)
    hooks.clear()
    hooks.update(contents)


@dataclass
class ModelCall:
    """A call of a model.

    Attributes:
        draws: those of the code that runs now; blocks of remat have their own.
        ran: the paths of the modules with a tap, a constraint or remat that were called.
    """

    program: ModuleProgram
    draws: Draws
    ran: set[str]


def run(
    program: ModuleProgram,
    draws: Draws,
    values: Mapping[str, Tensor],
    names: dict[int, str],
    mutable: frozenset[int],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    call = ModelCall(program, draws, set())
    change_outputs((m.path, m.module) for m in program.modules)
    out = _call_hooked(call, values, names, mutable, args, kwargs)
    placed: tuple[MatchedModule, ...] = (*program.pins, *program.taps, *program.blocks)
    reached = {(type(given), given.pattern) for given in placed if given.path in call.ran}
    idle = [
        f"{given.where}, was not called, so it {given.does} nothing. Name {given.instead}."
        for given in placed
        if (type(given), given.pattern) not in reached
    ]
    raise_all(InputError, idle)
    return out


def _call_hooked(
    call: ModelCall,
    values: Mapping[str, Tensor],
    names: dict[int, str],
    mutable: frozenset[int],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call the model with the program's hooks for random draws, taps, constraints and remat
    registered.
    """
    program = call.program
    _register_hooks(call)
    first_hook = RemovableHandle.next_id
    modules = [(m.path, m.module) for m in program.modules]
    attributes = {held.path: held for held in attributes_of(modules)}
    held = {
        id(tensor): (tensor, names.get(id(tensor), f"attribute {path!r}"))
        for path, tensor, *_ in (*_registered(program), *attributes.values())
        if isinstance(tensor, Tensor) and id(tensor) not in mutable
    }
    versions = {key: version(tensor) for key, (tensor, _) in held.items()}
    names = {key: name for key, (_, name) in held.items()}
    # In a block of remat other tensors stand for the parameters.
    swap = None if program.blocks else partial(_swap, program)
    guard = WriteGuard(program.name, names, swap, _memory_in_model(program, values))
    guard.attributes = tuple(x for _, x, _ in attributes.values() if isinstance(x, Tensor))
    trained = {key for key, name in names.items() if name.startswith("parameter")}
    constants = [x for _, x in _registered(program) if id(x) not in trained]
    constants += [x for _, x, _ in attributes.values() if not getattr(x, "requires_grad", True)]
    kept = KeptAttributes(modules, (x for x in constants if isinstance(x, Tensor)))
    try:
        with guard, kept, uncompiled():
            out = program.model(*args, **kwargs)
    except (TypeError, RuntimeError) as error:
        if (explained := _explained(program.name, program.model, kwargs, error)) is None:
            raise
        raise explained from error
    for key, (tensor, name) in held.items():
        if version(tensor) != versions[key]:
            raise TraceError(impure(program.name, name, "modifies"))
    check_state(program.name, modules, attributes, guard, kept)
    note_left([(m.module, m.attributes) for m in program.modules], first_hook)
    return out


def _register_hooks(call: ModelCall) -> None:
    program = call.program
    # In eval mode without a key register no hooks: they would turn fused kernels off.
    if call.draws.key is not None or any(m.module.training for m in program.modules):
        for m in program.modules:
            m.module.register_forward_pre_hook(partial(_enter, call, m.path), prepend=True)
            m.module.register_forward_hook(partial(_leave, call), always_call=True)
    for tap in program.taps:
        tap.module.register_forward_hook(partial(tapped, tap, call.ran))
    for pin in program.pins:
        if pin.constraint.forward is not None:
            pin.module.forward = partial(pin.constraint.forward, pin.module, pin.module.forward)
        pin.module.register_forward_pre_hook(partial(pin_inputs, pin, call.ran), with_kwargs=True)
        pin.module.register_forward_hook(partial(pin_outputs, pin))
    for block in program.blocks:
        block.module.forward = partial(_recomputed, call, block, block.module.forward)


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


def _memory_in_model(program: ModuleProgram, values: Mapping[str, Tensor]) -> InModel:
    """A function that names the argument whose memory, in the model, a tensor shares; it answers
    None where the call is given that memory, unless a gradient with respect to the model's own
    tensor is asked for.
    """
    own = {id(x): x for x in map(unwrapped, values.values())}
    given = {program.memory.name(x) for x in own.values()}

    def name(x: Tensor, of_gradient: bool) -> str | None:
        is_own = of_gradient and isinstance(x, nn.Parameter) and id(x) not in own
        path = program.memory.name(x)
        return None if path in given and not is_own else path

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
    call: ModelCall,
    block: "RematModule",
    module_forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the module's forward under ``remat``: the backward pass runs it again after this call has
    ended.
    """
    call.ran.add(block.path)
    program, around = call.program, call.draws
    counts, drawn = dict(around.counts), dict[str, int]()

    def forward(key: Tensor | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        before = call.draws
        call.draws = again = Draws(key, around.name, path=block.path, counts=dict(counts))
        try:
            with again:
                return module_forward(*args, **kwargs)
        finally:
            call.draws = before
            drawn.update(again.counts)

    forward.__name__ = f"module {block.path!r}"
    former = {id(x) for m in block.modules for x in _items(m.attributes)}
    own = [x for m in block.modules for x in _items(m.module.__dict__)]
    try:
        return recompute.recomputed(
            forward,
            block.policy,
            (around.key, args, kwargs),
            {},
            (block.module, *(tap.fn for tap in program.taps)),
            reads=[x for x in own if isinstance(x, Tensor) and id(x) not in former],
            replaces=[x for *_, x in _buffers_written_by(block)],
        )
    finally:
        around.counts.update(drawn)
        for m, name, value in _buffers_written_by(block):
            # torch refuses running statistics that may have a gradient; remat's results may.
            if isinstance(m.module, nn.modules.batchnorm._NormBase):
                m.module._buffers[name] = value.detach()


def _items(attributes: dict[str, Any]) -> Iterator[Any]:
    """The attributes of a module, and the items of those that are containers."""
    for value in own_attributes(attributes).values():
        yield from items_of(value)


def _buffers_written_by(block: "RematModule") -> Iterator[tuple[ModuleState, str, Tensor]]:
    for m in block.modules:
        for name, slot in m.attributes["_buffers"].items():
            value = m.module._buffers.get(name)
            if type(slot) is Slot and slot.path in block.mutable and value is not None:
                yield m, name, value


def _enter(call: ModelCall, path: str, module: nn.Module, args: tuple) -> None:
    call.draws.path.append(path)


def _leave(call: ModelCall, module: nn.Module, args: tuple, out: Any) -> None:
    call.draws.path.pop()


def _registered(program: ModuleProgram) -> Iterator[tuple[str, Any]]:
    """The modules' parameters and buffers, and what those hold, by path."""
    for m in program.modules:
        for kind in ("_parameters", "_buffers"):
            for name, value in m.module.__dict__[kind].items():
                yield from with_held(join(m.path, name), value)


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
    for pattern, path, module, policy in found:
        inside = frozenset(module.modules())
        modules = tuple(m for m in program.modules if m.module in inside)
        blocks.append(RematModule(pattern, path, module, policy, modules, mutable))
    return tuple(blocks)


def parameter_names(values: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(tensor): f"parameter {path!r}" for path, tensor in values.items()}
