"""nn.Module -> a pure function of its parameters, and those parameters as a tree."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ftp.errors import InputError, TraceError, raise_all
from ftp.functional.attributes import join
from ftp.functional.backward_code import surrounding_backward_code
from ftp.functional.contents import contents_of, restored
from ftp.functional.gradient_hooks import gradient_hooks
from ftp.functional.module_constraints import Constraint, pins_of
from ftp.functional.module_program import (
    ModuleProgram,
    installed,
    parameter_names,
    remat_modules,
    run,
    snapshots,
)
from ftp.functional.purity import ChangesFrozen, impure
from ftp.functional.remat import Again, Policy, surrounded
from ftp.functional.slots import Slot, WrapperSlot, slot_of_wrapper
from ftp.functional.taps import taps_of
from ftp.random.distributions import check_key
from ftp.random.draws import Draws, DrawsNoMore, surrounding_key
from ftp.sharding.dtensor_placements import is_dtensor
from ftp.sharding.patterns import nearest
from ftp.sharding.pytree import abbreviated, kind_of, remember_tied
from ftp.sharding.spec import P
from ftp.torch_internals.modes import is_wrapper
from ftp.torch_internals.storages import Storages, overlaps


def functionalize(
    model: nn.Module,
    *,
    constraints: Mapping[str, P | Constraint] | None = None,
    remat: Mapping[str, Policy] | None = None,
    taps: Mapping[str, Callable[..., Any]] | None = None,
    buffers: bool = False,
) -> Any:
    """Turn a model into a pure function of its parameters.

    The model itself is not changed, and ``fn`` keeps the submodules, hooks and train or eval mode
    that it has at this call. Hooks on parameters (``Tensor.register_hook``) run; backward hooks on
    modules are an error if a gradient is taken. ``fn`` keeps the model alive: ``model.to("meta")``
    frees its weights. Calls from several threads run one after another.

    Args:
        model: any module; on the meta device its tensors stay there.
        constraints: ``{pattern: P or Constraint}`` over module paths, patterns as in ``ftp.plan``;
            "" is the model. A ``P`` constrains the output.
        remat: ``{pattern: policy}`` over module paths: recompute these modules in the backward
            pass, as ``ftp.remat`` does. What such a module sets, on itself and elsewhere in the
            model, stays for the rest of the call.
        taps: ``{pattern: function}`` over module paths. The function takes a module's output, or
            its path and its output, as global tensors under any sharding; its result replaces the
            output, None keeps it. To read activations, store them in a dict and return the dict
            from the same call (``has_aux=True``).
        buffers: make buffers and frozen parameters an argument and a result, not constants.

    Returns:
        ``(fn, params)``. ``params`` is ``{path: tensor}``, the parameters that require a gradient,
        detached, in the model's memory; a tied weight is listed once, under its first path. Call
        ``fn(params, *args, rng=None, **kwargs)``; dropout and other random ops draw from ``rng``,
        an ``ftp.random`` key. Buffers and frozen parameters are constants of ``fn``.

        With ``buffers=True``: ``(fn, params, buffers)``, where ``buffers`` is ``{path: tensor}`` of
        buffers and frozen parameters. ``fn(params, buffers, *args)`` returns ``(out, buffers)``,
        as the model updated them: running statistics, a target network that averages weights.

    Raises:
        SpecError: a pattern that matches no module; two patterns that disagree for one module,
            neither the more specific.
        InputError: not a module; a ScriptModule, lazy or DTensor model; a compiled submodule; an
            unknown policy. At a call: a module with a constraint or a tap that is not called.

    >>> fn, params = functionalize(torch.nn.Linear(2, 1, bias=False))
    >>> params.keys()
    dict_keys(['weight'])
    >>> fn({"weight": torch.ones(1, 2)}, torch.ones(3, 2)).flatten()
    tensor([2., 2., 2.])
    >>> fn, params, buffers = functionalize(torch.nn.BatchNorm1d(3), buffers=True)
    >>> out, buffers = fn(params, buffers, torch.randn(4, 3))
    >>> buffers["num_batches_tracked"]
    tensor(1)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    >>> fn, params = functionalize(model, taps={"0": lambda x: torch.zeros_like(x)})
    >>> fn(params, torch.ones(1, 2)).tolist()
    [[0.0, 0.0]]
    """
    model = _uncompiled(model)
    _check_model(model)
    locks = _locks(model)
    with _alone(locks):
        tied = paths_of_tensors(model)
        params: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        stand_ins: dict[int, Any] = {}
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            if buffers and is_wrapper(type(tensor)):
                stand_ins[id(tensor)] = slot_of_wrapper(path, tensor, state)
                continue
            plain = (params if trained else state)[path] = tensor.detach()
            stand_ins[id(tensor)] = Slot(path) if trained or buffers else plain
            if len(tied[id(tensor)]) > 1:
                remember_tied(plain, tied[id(tensor)])
        frozen = frozenset(state.keys() - dict(model.named_buffers()).keys())
        constants = {} if buffers else state
        of_constants = Storages(constants)
        program = ModuleProgram(
            name=type(model).__name__,
            model=model,
            modules=tuple(snapshots(model, stand_ins)),
            pins=pins_of(model, constraints or {}),
            taps=taps_of(model, taps or {}),
            blocks=(),
            other_names={alias: paths[0] for paths in tied.values() for alias in paths[1:]},
            constants={id(t): _describe(path, frozen) for path, t in state.items()},
            memory=Storages(
                {
                    path: x
                    for path, x in {**params, **state}.items()
                    if path not in constants and of_constants.name(x) is None
                }
            ),
            hooks=gradient_hooks(model),
        )
        overlapping = overlaps({**params, **state}) if buffers else {}
        mutable = frozenset(state) - frozen - overlapping.keys() if buffers else frozenset()
        program = replace(program, blocks=remat_modules(program, remat or {}, mutable))
        fn = (
            partial(_call_with_buffers, program, tuple(params), tuple(state), frozen, overlapping)
            if buffers
            else partial(_call, program, tuple(params))
        )

    def pure(
        params: Mapping[str, Tensor], *args: Any, rng: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if rng is not None:
            check_key(rng, f"{program.name}(..., rng=)")
        elif any(m.module.training for m in program.modules):
            rng = surrounding_key(program.name)
        with (
            _alone(locks),
            Draws(rng, program.name) as draws,
            surrounded(partial(_as_now, program, draws)),
            _of_call(locks, draws),
        ):
            return fn(draws, params, *args, **kwargs)

    pure.__name__ = pure.__qualname__ = program.name
    return (pure, params, state) if buffers else (pure, params)


_locks_of_modules: Any = WeakIdKeyDictionary()  # {module: (number, lock)}
_made_locks, _making = count(), RLock()


def _locks(model: nn.Module) -> list[Any]:
    """The locks that a call of a model takes, as it swaps the attributes of the model's modules.
    Models that share modules share locks, and take them in one order.
    """
    with _making:
        new = next(_made_locks), RLock()
        found = {_locks_of_modules.setdefault(m, new) for m in model.modules()}
    return [lock for _, lock in sorted(found, key=lambda made: made[0])]


@contextmanager
def _alone(locks: Sequence[Any]) -> Iterator[None]:
    """No other thread reads the model's modules, or swaps their attributes, within the block."""
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


@contextmanager
def _of_call(locks: Sequence[Any], draws: Draws) -> Iterator[None]:
    """A call within the block; code that autograd runs later has the modules to itself, and does
    not draw in them.
    """
    is_running = True

    @contextmanager
    def later() -> Iterator[None]:
        # A call that is running holds the locks, and waits for this thread.
        with _alone(() if is_running else locks), DrawsNoMore(draws):
            yield

    with surrounding_backward_code(later):
        try:
            yield
        finally:
            is_running = False


def _as_now(program: ModuleProgram, draws: Draws) -> Again:
    """A context that gives modules the values that they hold now, and the draws that are next."""
    contents = contents_of(tuple(m.module for m in program.modules))
    counts, path = dict(draws.counts), list(draws.path)

    @contextmanager
    def again() -> Iterator[None]:
        drawn = draws.counts, draws.path
        draws.counts, draws.path = dict(counts), list(path)
        try:
            with restored(contents), draws:
                yield
        finally:
            draws.counts, draws.path = drawn

    return again


def paths_of_tensors(model: nn.Module) -> dict[int, list[str]]:
    """The paths of each parameter and buffer, by its id."""
    found: dict[int, list[str]] = {}
    for path, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        found.setdefault(id(tensor), []).append(path)
    return found


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given."""
    while isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        inner = model._modules["_orig_mod"]
        assert inner is not None
        model = inner
    return model


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"functionalize takes an nn.Module, not {abbreviated(model)}, {kind_of(model)}. A pure"
            " function needs none of it."
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"module {path!r} is a ScriptModule, whose parameters cannot be replaced. Give the"
                " module before torch.jit."
            )
        if "_orig_mod" in module._modules:
            raise InputError(
                f"module {path!r} is made by torch.compile. Have it as it was before that in the"
                " model, or compiled in place, module.compile(), and give compile=True to"
                " ftp.shard."
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
    for path, p in model.named_parameters():
        if p.requires_grad and is_wrapper(type(p)):
            raise InputError(
                f"parameter {path!r} is a {type(p).__name__}, a tensor that holds others, of which"
                " no gradient is taken. Freeze it, parameter.requires_grad_(False), or give the"
                " model before it was converted."
            )
    lazy = [path for path, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)]
    if lazy:
        raise InputError(
            f"{', '.join(lazy)} have no shape yet (lazy modules). Call the model once before"
            " functionalize."
        )


def _describe(path: str, frozen: frozenset[str]) -> str:
    return f"frozen parameter {path!r}" if path in frozen else f"buffer {path!r}"


def _call(
    program: ModuleProgram,
    params: tuple[str, ...],
    draws: Draws,
    values: Mapping[str, Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    _check_paths(program, "params", values, params)
    values = program.hooks.with_hooks(program.name, values, (args, kwargs))
    with installed(program, values):
        program.hooks.register(values)
        out = run(
            program,
            draws,
            values,
            parameter_names(values) | program.constants,
            frozenset(),
            args,
            kwargs,
        )
        for m in program.modules:
            for name, constant in m.attributes["_buffers"].items():
                if m.module._buffers.get(name) is not constant:
                    path = join(m.path, name)
                    raise TraceError(
                        _made(program.name, path)
                        if constant is None
                        else impure(program.name, f"buffer {path!r}", "replaces")
                    )
    return out


def _call_with_buffers(
    program: ModuleProgram,
    params: tuple[str, ...],
    state: tuple[str, ...],
    frozen: frozenset[str],
    overlapping: Mapping[str, str],
    draws: Draws,
    values: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, dict[str, Tensor]]:
    _check_paths(program, "params", values, params)
    _check_paths(program, "buffers", buffers, state)
    values = program.hooks.with_hooks(program.name, values, (args, kwargs))
    run = partial(_updating, program, draws, values, buffers, state, overlapping, args, kwargs)
    drawn = dict(draws.counts), list(draws.path)
    try:
        return run(frozen)  # which are not copied
    except ChangesFrozen:
        draws.counts, draws.path = drawn
        return run(frozenset())


def _updating(
    program: ModuleProgram,
    draws: Draws,
    values: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    state: tuple[str, ...],
    overlapping: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frozen: frozenset[str],
) -> tuple[Any, dict[str, Tensor]]:
    """Run the model with clones of its buffers that are not ``frozen``, as it may write to them."""
    clones = {path: buffers[path].clone() for path in state if path not in frozen}
    new = {path: clones.get(path, buffers[path]) for path in state}
    constants = parameter_names(values) | {
        id(buffers[path]): _describe(path, frozen) for path in frozen
    }
    constants |= {
        id(clones[path]): f"{path!r}, in whose memory {other!r} lies,"
        for path, other in overlapping.items()
        if path in clones
    }
    with installed(program, {**values, **new}):
        program.hooks.register(values)
        out = run(
            program,
            draws,
            {**values, **new},
            constants,
            frozenset(id(x) for path, x in clones.items() if path not in overlapping),
            args,
            kwargs,
        )
        for m in program.modules:
            held = m.attributes["_buffers"]
            for name in {**held, **m.module._buffers}:
                value = m.module._buffers.get(name)
                if (path := join(m.path, name)) in clones:
                    if not isinstance(value, Tensor):
                        raise TraceError(
                            f"{program.name} makes buffer {path!r} {value!r}; it must stay a"
                            " tensor to come back updated."
                        )
                    new[path] = value
                elif isinstance(slot := held.get(name), WrapperSlot) and slot.path == path:
                    if type(value) is not type(slot.wrapper):
                        raise TraceError(
                            f"{program.name} makes buffer {path!r} {kind_of(value)}; it must stay a"
                            f" {type(slot.wrapper).__name__} to come back updated."
                        )
                    new |= slot.parts(value)
                elif value is not None and held.get(name) is None:
                    raise TraceError(_made(program.name, path))
    return out, new


def _made(model: str, path: str) -> str:
    return (
        f"{model} makes buffer {path!r} while it runs: the next call would not have it. Call the"
        " model once before functionalize, so that it does."
    )


def _check_paths(
    program: ModuleProgram, where: str, given: Mapping[str, Tensor], expected: Sequence[str]
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
    raise_all(InputError, failures)
