"""nn.Module -> a pure function of its parameters, and those parameters as a tree."""

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ftp.errors import InputError, TraceError, join_failures
from ftp.functional import remat as recompute
from ftp.functional.gradient_hooks import GradientHooks, gradient_hooks
from ftp.functional.module_constraints import (
    Constraint,
    Pin,
    change_outputs,
    named_modules,
    pin_inputs,
    pin_outputs,
    pins_of,
)
from ftp.functional.remat import Policy, policy_problem
from ftp.random.distributions import check_key
from ftp.random.torch_functions import Draws
from ftp.sharding.dtensor_placements import is_dtensor
from ftp.sharding.pytree import kind_of, nearest, remember_tied
from ftp.sharding.spec import P


def functionalize(
    model: nn.Module,
    *,
    constraints: Mapping[str, P | Constraint] | None = None,
    remat: Mapping[str, Policy] | None = None,
    buffers: bool = False,
) -> Any:
    """The model as ``(fn, params)``: a pure ``fn(params, *args, rng=None, **kwargs)`` and the
    parameters that require a gradient.

    ``params`` is ``{path: tensor}``, detached tensors that share the model's memory. A tied weight
    is there once, under its first path. Buffers and frozen parameters are constants of ``fn``. The
    model is left as it is and ``fn`` does not see what is done to it later: its submodules, hooks,
    train or eval are those of this call. Hooks of parameters (``Tensor.register_hook``) run as on
    one device; backward hooks of modules are refused where a gradient is taken. ``fn`` keeps the
    model alive; ``model.to("meta")`` frees its weights. What the model draws at random, dropout
    above all, comes from ``rng``, an ``ftp.random`` key, and from nothing else.

    Args:
        model: any module; on the meta device it stays there.
        constraints: ``{pattern: P or Constraint}`` over module paths, as in ``plan``; "" is the
            model itself. A ``P`` pins the output.
        remat: ``{pattern: policy}`` over module paths: what these modules compute is computed again
            for the backward pass, as ``ftp.remat`` says. What such a module leaves on itself, other
            than buffers, is not seen outside of it.
        buffers: return ``(fn, params, buffers)`` with ``fn(params, buffers, *args) -> (out,
            new_buffers)``: buffers and frozen parameters by path, the buffers updated where the
            model updates them.

    Raises:
        SpecError: a constraint or policy that names no module, or two that disagree for one.
        InputError: what is no module, or one that cannot be called with other parameters; an
            unknown policy.

    >>> fn, params = functionalize(torch.nn.Linear(2, 1, bias=False))
    >>> params.keys()
    dict_keys(['weight'])
    >>> fn({"weight": torch.ones(1, 2)}, torch.ones(3, 2)).flatten()
    tensor([2., 2., 2.])
    """
    _check_model(model)
    tied: dict[int, list[str]] = {}
    for path, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        tied.setdefault(id(tensor), []).append(path)
    params: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    stand_ins: dict[int, Any] = {}
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        plain = (params if trained else state)[path] = tensor.detach()
        stand_ins[id(tensor)] = _Slot(path) if trained or buffers else plain
        if len(tied[id(tensor)]) > 1:
            remember_tied(plain, tied[id(tensor)])
    frozen = frozenset(path for path, p in model.named_parameters() if not p.requires_grad)
    program = _Program(
        name=type(model).__name__,
        model=model,
        modules=tuple(_snapshot(path, module, stand_ins) for path, module in model.named_modules()),
        pins=pins_of(model, constraints or {}),
        blocks=(),
        other_names={alias: paths[0] for paths in tied.values() for alias in paths[1:]},
        constants={id(t): _describe(path, frozen) for path, t in state.items()},
        hooks=gradient_hooks(model),
    )
    program = replace(
        program,
        blocks=_blocks(program, remat or {}, frozenset(state) - frozen if buffers else frozenset()),
    )
    fn = (
        partial(_call_with_buffers, program, tuple(params), tuple(state), frozen)
        if buffers
        else partial(_call, program, tuple(params))
    )

    def pure(
        params: Mapping[str, Tensor], *args: Any, rng: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if rng is not None:
            check_key(rng, f"{program.name}(..., rng=)")
        with Draws(rng, program.name) as draws:
            return fn(draws, params, *args, **kwargs)

    pure.__name__ = pure.__qualname__ = program.name
    return (pure, params, state) if buffers else (pure, params)


@dataclass(frozen=True)
class _Slot:
    """Stands where a module holds a tensor that each call brings."""

    path: str


@dataclass(frozen=True)
class _Module:
    path: str
    module: nn.Module
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _Program:
    name: str
    model: nn.Module
    modules: tuple[_Module, ...]
    pins: tuple[Pin, ...]
    blocks: "tuple[_Block, ...]"
    other_names: dict[str, str]
    constants: dict[int, str]
    hooks: GradientHooks


@dataclass(frozen=True, eq=False)
class _Block:
    """A module that is computed again for the backward pass.

    Attributes:
        program: the module alone, as the model is when it is called.
        slots: the paths of the tensors that a call brings and that the module holds.
        mutable: those among them that it may write to.
    """

    pattern: str
    path: str
    module: nn.Module
    policy: Policy
    program: _Program
    slots: tuple[str, ...]
    mutable: frozenset[str]

    does = "recomputes"
    instead = "the modules in it that are"

    @property
    def where(self) -> str:
        return (
            f"module {self.path!r} ({type(self.module).__name__}), recomputed by {self.pattern!r}"
        )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"functionalize takes an nn.Module, not {model!r}, {kind_of(model)}. A pure function"
            " needs none of it."
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"module {path!r} is a ScriptModule, whose parameters cannot be replaced. Give the"
                " module before torch.jit."
            )
        if "_orig_mod" in module._modules:
            raise InputError(
                f"module {path!r} holds one made by torch.compile. Give the module before that,"
                " and compile=True to ftp.shard."
            )
    if cut := [f"parameter {path!r}" for path, p in model.named_parameters() if is_dtensor(p)]:
        raise InputError(
            f"{', '.join(cut[:4])}{f' and {len(cut) - 4} more' if len(cut) > 4 else ''} of"
            f" {type(model).__name__} are DTensors, as"
            " parallelize_module, fully_shard and distribute_module make them, with hooks of"
            " theirs on modules. Give the model before"
            " that, its plan to ftp.from_parallelize_plan, and to the step its shards,"
            " ftp.from_dtensor(dict(model.named_parameters()))."
        )
    lazy = [path for path, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)]
    if lazy:
        raise InputError(
            f"{', '.join(lazy)} have no shape yet (lazy modules). Call the model once before"
            " functionalize."
        )


def _describe(path: str, frozen: frozenset[str]) -> str:
    return f"frozen parameter {path!r}" if path in frozen else f"buffer {path!r}"


_CONTAINERS = (dict, OrderedDict, list, tuple, set)


def _replace(value: Any, new: Callable[[Any], Any]) -> Any:
    """``new`` of an attribute or of what a plain container in it holds, as ``_parameters`` does;
    a container is copied.
    """
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return kind((key, new(item)) for key, item in value.items())
    return kind(map(new, value)) if kind in _CONTAINERS else new(value)


def _items(value: Any) -> Sequence[Any]:
    """What ``_replace`` looks at."""
    kind = type(value)
    return (
        tuple(value.values())
        if kind is dict or kind is OrderedDict
        else tuple(value)
        if kind in _CONTAINERS
        else (value,)
    )


def _snapshot(path: str, module: nn.Module, stand_ins: dict[int, Any]) -> _Module:
    attributes = {
        name: _replace(value, lambda v: stand_ins.get(id(v), v))
        for name, value in module.__dict__.items()
    }
    attributes["_compiled_call_impl"] = None
    return _Module(path, module, attributes)


@contextmanager
def _installed(program: _Program, values: Mapping[str, Tensor]) -> Iterator[None]:
    """While it lasts each module has attributes of its own, copied from the snapshot: nothing
    that happens reaches the user's.
    """
    saved = [(m.module, m.module.__dict__) for m in program.modules]
    try:
        for m in program.modules:
            fresh = {
                name: _replace(value, lambda v: values[v.path] if type(v) is _Slot else v)
                for name, value in m.attributes.items()
            }
            object.__setattr__(m.module, "__dict__", fresh)
        yield
    finally:
        for module, attributes in saved:
            object.__setattr__(module, "__dict__", attributes)


def _call(
    program: _Program,
    params: tuple[str, ...],
    draws: Draws,
    values: Mapping[str, Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    _check_paths(program, "params", values, params)
    values = program.hooks.registered(program.name, values, (args, kwargs))
    with _installed(program, values):
        out = _run(
            program,
            draws,
            values,
            _parameter_names(values) | program.constants,
            frozenset(),
            args,
            kwargs,
        )
        for m in program.modules:
            for name, constant in m.attributes["_buffers"].items():
                if m.module._buffers.get(name) is not constant:
                    raise TraceError(
                        _impure(program, f"buffer {_join(m.path, name)!r}", "replaces")
                    )
    return out


def _call_with_buffers(
    program: _Program,
    params: tuple[str, ...],
    state: tuple[str, ...],
    frozen: frozenset[str],
    draws: Draws,
    values: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, dict[str, Tensor]]:
    _check_paths(program, "params", values, params)
    _check_paths(program, "buffers", buffers, state)
    values = program.hooks.registered(program.name, values, (args, kwargs))
    # The module may write to a clone; a large frozen weight must not cost a copy.
    clones = {path: buffers[path].clone() for path in state if path not in frozen}
    new = {path: clones.get(path, buffers[path]) for path in state}
    constants = _parameter_names(values) | {
        id(buffers[path]): _describe(path, frozen) for path in frozen
    }
    with _installed(program, {**values, **new}):
        out = _run(
            program,
            draws,
            {**values, **new},
            constants,
            frozenset(map(id, clones.values())),
            args,
            kwargs,
        )
        for m in program.modules:
            for name in m.attributes["_buffers"]:
                if (path := _join(m.path, name)) in clones:
                    value = m.module._buffers.get(name)
                    if not isinstance(value, Tensor):
                        raise TraceError(
                            f"{program.name} makes buffer {path!r} {value!r}; it must stay a"
                            " tensor to come back updated."
                        )
                    new[path] = value
    return out, new


def _check_paths(
    program: _Program, where: str, given: Mapping[str, Tensor], expected: Sequence[str]
) -> None:
    if not isinstance(given, Mapping):
        raise InputError(
            f"{program.name} takes {where} as a dict {{path: tensor}}, as functionalize returned"
            f" it, not {kind_of(given)}."
        )
    known = frozenset(expected)
    failures = [
        f"{where} of {program.name} lack {path!r}." for path in expected if path not in given
    ]
    for path, value in given.items():
        if path in program.other_names:
            failures.append(
                f"{where}[{path!r}] is tied to {program.other_names[path]!r} and must be given"
                " under that path only."
            )
        elif path not in known:
            close = (
                f"; the nearest are {', '.join(map(repr, nearest(path, expected)))}"
                if expected
                else ""
            )
            failures.append(
                f"{where}[{path!r}] is no {'parameter' if where == 'params' else 'buffer'} of"
                f" {program.name}{close}."
            )
        elif not isinstance(value, Tensor):
            failures.append(
                f"{where}[{path!r}] is {value!r}, {kind_of(value)}; it must be a tensor."
            )
    if failures:
        raise InputError(join_failures(failures))


def _parameter_names(values: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(tensor): f"parameter {path!r}" for path, tensor in values.items()}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _run(
    program: _Program,
    draws: Draws,
    values: Mapping[str, Tensor],
    names: dict[int, str],
    mutable: frozenset[int],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    ran: set[str] = set()
    change_outputs((m.path, m.module) for m in program.modules)
    out = _run_part(program, program.model, draws, values, names, mutable, ran, args, kwargs)
    placed: tuple[Pin | _Block, ...] = (*program.pins, *program.blocks)
    reached = {(type(given), given.pattern) for given in placed if given.path in ran}
    idle = [
        f"{given.where}, was not called, so it {given.does} nothing. Name {given.instead}."
        for given in placed
        if (type(given), given.pattern) not in reached
    ]
    if idle:
        raise InputError(join_failures(idle))
    return out


def _run_part(
    program: _Program,
    call: Callable[..., Any],
    draws: Draws,
    values: Mapping[str, Tensor],
    names: dict[int, str],
    mutable: frozenset[int],
    ran: set[str],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """``call``, a module of the program or its forward, while what the program adds to its
    modules is in place.
    """
    # Hooks turn fused kernels of eval mode off.
    if draws.key is not None or any(m.module.training for m in program.modules):
        for m in program.modules:
            m.module.register_forward_pre_hook(partial(_enter, draws, m.path), prepend=True)
            m.module.register_forward_hook(partial(_leave, draws), always_call=True)
    for pin in program.pins:
        pin.module.register_forward_pre_hook(partial(pin_inputs, pin, ran), with_kwargs=True)
        pin.module.register_forward_hook(partial(pin_outputs, pin))
    for block in program.blocks:
        if not any(block in outer.program.blocks for outer in program.blocks):
            block.module.forward = partial(_recomputed, block, draws, values, ran)
    held = {
        id(tensor): (tensor, name)
        for tensor, name in _held_tensors(program, names)
        if id(tensor) not in mutable
    }
    versions = {key: _version(tensor) for key, (tensor, _) in held.items()}
    try:
        with _Guard(program, {key: name for key, (_, name) in held.items()}):
            out = call(*args, **kwargs)
    except TypeError as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unexpected and unexpected[1] in kwargs:
            raise InputError(
                f"{program.name} does not take the keyword {unexpected[1]!r}: {error}."
            ) from error
        raise
    except RuntimeError as error:
        if "would mutate a captured Tensor" in str(error):
            raise TraceError(_impure(program, "buffer (through a view)", "modifies a")) from error
        if share := _share(str(error)):
            raise TraceError(
                f"{program.name}: {error}\n  The tensor has {share} times the elements that its"
                " new shape holds, as where a model was"
                f" edited for {share} ranks to view to its local head count. Model code sees"
                " global shapes here: give it the global count."
            ) from error
        raise
    for key, (tensor, name) in held.items():
        if _version(tensor) != versions[key]:
            raise TraceError(_impure(program, name, "modifies"))
    return out


def _recomputed(
    block: "_Block",
    draws: Draws,
    values: Mapping[str, Tensor],
    ran: set[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The module's forward, with what it reads as arguments: it runs again when all that is here
    is over.
    """
    ran.add(block.path)
    counts, first = dict(draws.counts), []

    def forward(
        key: Tensor | None, given: dict[str, Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor]]:
        part = block.program
        clones = {path: given[path].clone() for path in block.mutable}
        own = {**given, **clones}
        with (
            Draws(key, part.name, path=block.path, counts=dict(counts)) as again,
            _installed(part, own),
        ):
            mutable = frozenset(map(id, clones.values()))
            out = _run_part(
                part,
                block.module.forward,
                again,
                own,
                _parameter_names(given) | part.constants,
                mutable,
                ran,
                args,
                kwargs,
            )
            new = {**clones, **_buffers_of(part)}
        if not first:
            draws.counts.update(again.counts)
        first.append(True)
        return out, new

    live = {**{path: values[path] for path in block.slots}, **_buffers_of(block.program)}
    forward.__name__ = f"module {block.path!r}"
    out, new = recompute.remat(forward, block.policy)(draws.key, live, args, kwargs)
    for m in block.program.modules:
        for name, slot in m.attributes["_buffers"].items():
            if type(slot) is _Slot and slot.path in new:
                value = new[slot.path]
                # Statistics of norms have no gradient in torch, which refuses one that a block's
                # result might have.
                m.module._buffers[name] = (
                    value.detach()
                    if isinstance(m.module, nn.modules.batchnorm._NormBase)
                    else value
                )
    return out


def _buffers_of(program: _Program) -> dict[str, Any]:
    """What the modules hold now where a call brings a buffer."""
    return {
        slot.path: m.module._buffers[name]
        for m in program.modules
        for name, slot in m.attributes["_buffers"].items()
        if type(slot) is _Slot
    }


def _enter(draws: Draws, path: str, module: nn.Module, args: tuple) -> None:
    draws.path.append(path)


def _leave(draws: Draws, module: nn.Module, args: tuple, out: Any) -> None:
    draws.path.pop()


def _share(error: str) -> int | None:
    """How many times too large the tensor of a failed view or reshape is, where it is a whole
    number.
    """
    found = re.search(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)", error)
    times, rest = (
        divmod(int(found[2]), math.prod(map(int, found[1].split(","))))
        if found and "0" not in found[1].split(", ")
        else (0, 0)
    )
    return times if times > 1 and not rest else None


def _held_tensors(program: _Program, names: dict[int, str]) -> Iterator[tuple[Tensor, str]]:
    """The tensors that the modules hold, each with what to call it; one that is a plain
    attribute is a constant too.
    """
    for m in program.modules:
        for attribute, value in m.module.__dict__.items():
            for key, tensor in (
                value.items() if type(value) in (dict, OrderedDict) else [(attribute, value)]
            ):
                if isinstance(tensor, Tensor):
                    yield tensor, names.get(id(tensor), f"attribute {_join(m.path, str(key))!r}")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _impure(program: _Program, name: str, does: str) -> str:
    if name.startswith("buffer"):
        todo = (
            "With fn, params, buffers = functionalize(model, buffers=True) it comes back"
            " updated; in eval mode most modules leave it alone."
        )
        return (
            f"{program.name} {does} {name} while it runs, but buffers are constants of fn. {todo}"
        )
    if name.startswith("attribute"):
        return (
            f"{program.name} {does} {name} while it runs; fn is pure. Make it a buffer and use"
            " functionalize(model, buffers=True)."
        )
    return (
        f"{program.name} {does} {name} in place while it runs; fn is pure and leaves its inputs"
        " as they are."
    )


class _Guard(TorchFunctionMode):
    """Refuses ops that would write to the tensors in ``names`` {id: what it is}, before they run.

    Versions are compared afterwards too, but batch_norm does not count its updates of running
    statistics, and under torch.func's transforms a write to a captured tensor is an error that does
    not name it.
    """

    def __init__(self, program: _Program, names: dict[int, str]):
        super().__init__()
        self.program = program
        self.names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            base = tensor if id(tensor) in self.names or not tensor._is_view() else tensor._base
            if id(base) in self.names:
                raise TraceError(_impure(self.program, self.names[id(base)], "modifies"))
        return func(*args, **kwargs)


_INPLACE_DUNDERS = re.compile(
    r"__(i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift|matmul)|setitem|set)__"
)


def _written(func: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a torch function is about to write to, as far as its name and arguments
    tell.
    """
    name = getattr(func, "__name__", "")
    out = kwargs.get("out")
    targets = list(out) if isinstance(out, tuple | list) else [out]
    if (
        (name.endswith("_") and not name.endswith("__"))
        or _INPLACE_DUNDERS.fullmatch(name)
        or kwargs.get("inplace") is True
    ):
        first = args[0] if args else kwargs.get("input")
        targets += first if isinstance(first, tuple | list) else [first]
    elif name in ("batch_norm", "instance_norm") and (
        args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
    ):
        at = 1 if func in (F.batch_norm, F.instance_norm) else 3
        targets += [*args[at : at + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [t for t in targets if isinstance(t, Tensor)]


def _blocks(
    program: _Program, policies: Mapping[str, Policy], mutable: frozenset[str]
) -> tuple[_Block, ...]:
    found = named_modules(
        program.model,
        policies,
        lambda pattern, policy: policy_problem(policy, f"remat[{pattern!r}]"),
    )
    blocks: list[_Block] = []
    for module, path, pattern, policy in reversed(found):  # what is inside of others first
        inside = frozenset(module.modules())
        modules = tuple(m for m in program.modules if m.module in inside)
        held = (v for m in modules for value in m.attributes.values() for v in _items(value))
        slots = tuple(dict.fromkeys(v.path for v in held if type(v) is _Slot))
        part = replace(
            program,
            model=module,
            modules=modules,
            pins=tuple(
                pin for pin in program.pins if pin.module in inside and pin.module is not module
            ),
            blocks=tuple(b for b in blocks if b.module in inside),
        )
        blocks.append(_Block(pattern, path, module, policy, part, slots, mutable & set(slots)))
    return tuple(blocks)
