"""``init_params``: a model's own initialization as a pure function of a key; each rank computes its
shards.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ftp.api.shard import spmd
from ftp.api.step import Step
from ftp.errors import InputError, raise_all
from ftp.ops.written import written
from ftp.random.distributions import check_key
from ftp.random.draws import Draws
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.patterns import match_patterns
from ftp.sharding.pytree import abbreviated, broadcast_specs, kind_of
from ftp.sharding.spec import PartitionSpec
from ftp.torch_internals.modes import TorchDispatchMode
from ftp.torch_internals.pytree import tree_leaves

Initializer = Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]
RESETS = ("reset_parameters", "_reset_parameters")


def init_params(
    model: nn.Module,
    key: Tensor,
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    init: Mapping[str, Initializer] | None = None,
    buffers: bool = False,
    buffer_specs: Any = PartitionSpec(),
) -> Any:
    """Draw a model's parameters from ``key`` by its modules' own ``reset_parameters``. Each rank
    computes its shards alone.

    The numbers do not depend on mesh and specs. Each module draws from the key folded with its path
    (docs/random.md); a tied tensor is drawn under its first path. A module is reset after its
    submodules.

    Args:
        model: best made under ``torch.device("meta")``; it is not changed.
        key: an ``ftp.random`` key, of shape (2,), the same on all ranks.
        mesh: default that of ``ftp.use_mesh``.
        specs: spec tree of the parameters, as ``ftp.plan`` makes it, or a prefix of one.
        init: ``{pattern: fn(key, shape, dtype)}`` over paths of parameters and buffers, to replace
            ``reset_parameters`` where a module has none, or for another distribution.
        buffers: return ``(params, buffers)``, as ``functionalize(model, buffers=True)`` does, with
            buffers and frozen parameters.
        buffer_specs: spec tree of these.

    Returns:
        ``{path: tensor}`` of the parameters that require a gradient, placed with ``specs``.

    Raises:
        InputError: all parameters that have no initialization; patterns that match nothing.

    >>> import ftp
    >>> with torch.device("meta"):
    ...     model = nn.Linear(4, 6)
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> params = init_params(model, ftp.random.key(0), mesh, ftp.P("tp"))
    >>> params["weight"].shape, bool((params["weight"].abs() <= 0.5).all())
    (torch.Size([6, 4]), True)
    """
    return initializer(
        model, key, mesh, specs, init=init, buffers=buffers, buffer_specs=buffer_specs
    )(key)


def initializer(
    model: nn.Module,
    key: Tensor,
    mesh: AnyMesh | None,
    specs: Any,
    *,
    init: Mapping[str, Initializer] | None,
    buffers: bool,
    buffer_specs: Any,
) -> Step:
    """The program that ``init_params`` runs, a function of the key."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"init_params takes an nn.Module, not {abbreviated(model)}, {kind_of(model)}."
        )
    check_key(key, "init_params")
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    if lazy := [path for path, t in tensors.items() if is_lazy(t)]:
        raise InputError(
            f"{', '.join(lazy)} have no shape yet (lazy modules). Give in_features and the like"
            " where the model is made."
        )
    trained = [
        path for path, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad
    ]
    others = [path for path in tensors if path not in set(trained)] if buffers else []
    given = _overrides(tensors, init or {})
    # A buffer keeps its values; one on meta has none.
    known = {
        path: t.detach()
        for path, t in tensors.items()
        if not isinstance(t, nn.Parameter) and t.device.type != "meta"
    }
    written = _written(model, tensors)
    _check_covered(model, tensors, written | given.keys() | known.keys(), [*trained, *others])
    kept = {path: t for path, t in known.items() if path not in written and path not in given}

    def drawn(key: Tensor) -> Any:
        found = {**_drawn(model, tensors, given, key), **kept}
        params = {path: found[path] for path in trained}
        return (params, {path: found[path] for path in others}) if buffers else params

    def by_path(specs: Any, paths: list[str], what: str) -> dict[str, PartitionSpec]:
        given = broadcast_specs(specs, {path: tensors[path] for path in paths}, what)
        return dict(zip(sorted(paths), given, strict=True))

    out_specs: Any = by_path(PartitionSpec() if specs is None else specs, trained, "params")
    if buffers:
        out_specs = out_specs, by_path(buffer_specs, others, "buffers")
    return spmd(drawn, resolve(mesh), PartitionSpec(), out_specs)


def _overrides(
    tensors: Mapping[str, Tensor], init: Mapping[str, Initializer]
) -> dict[str, Initializer]:
    failures: list[str] = []

    def check(pattern: str, value: Any) -> str | None:
        if callable(value):
            return None
        what = f"init[{pattern!r}] is {value!r}, {kind_of(value)}"
        return f"{what}; it must be a function (key, shape, dtype)."

    answers = [(tuple(path.split(".")),) for path in tensors]
    found = match_patterns(init, answers, list(tensors), "the parameters", failures, check)
    raise_all(InputError, failures)
    return {path: match[1] for path, match in zip(tensors, found, strict=True) if match}


def _drawn(
    model: nn.Module, tensors: Mapping[str, Tensor], given: Mapping[str, Initializer], key: Tensor
) -> dict[str, Tensor]:
    """Every tensor of the model, by path."""
    name = type(model).__name__
    with Draws(key, name) as draws, torch.no_grad():
        with _fresh(model, tensors, key.device) as fresh:
            for path, module in reversed(list(model.named_modules())):
                for reset in RESETS:
                    if callable(getattr(module, reset, None)):
                        with draws.at(path):
                            getattr(module, reset)()
                        break
        for path, initializer in given.items():
            shape, dtype = tuple(tensors[path].shape), tensors[path].dtype
            with draws.at(path):
                made = initializer(draws.next_key(f"init of {path!r}"), shape, dtype)
            is_tensor = isinstance(made, Tensor)
            if not is_tensor or (made.dtype, tuple(made.shape)) != (dtype, shape):
                what = f"{made.dtype} of shape {tuple(made.shape)}" if is_tensor else repr(made)
                raise InputError(
                    f"init of {path!r} returns {what}; the parameter is {dtype} of shape {shape}."
                )
            fresh[path] = made
    return fresh


@contextmanager
def _fresh(
    model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Give the model's modules new tensors within the block; yields these by path. At the end of
    the block the dict gets the tensors that the modules hold then, and the model is restored.
    """
    paths = {id(t): path for path, t in tensors.items()}
    fresh: dict[str, Tensor] = {}
    saved = [(module, module.__dict__) for _, module in model.named_modules()]
    try:
        for prefix, module in model.named_modules():
            own = dict(module.__dict__)
            for kind in ("_parameters", "_buffers"):
                own[kind] = dict(own[kind])
                for name, tensor in own[kind].items():
                    if tensor is not None:
                        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                        own[kind][name] = made
                        path = f"{prefix}.{name}" if prefix else name
                        # A tied tensor is read only under its first path.
                        if paths[id(tensor)] == path:
                            fresh[path] = made
            object.__setattr__(module, "__dict__", own)
        yield fresh
        for prefix, module in model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                path = f"{prefix}.{name}" if prefix else name
                if path in fresh and tensor is not None:
                    fresh[path] = tensor
    finally:
        for module, own in saved:
            object.__setattr__(module, "__dict__", own)


def _written(model: nn.Module, tensors: Mapping[str, Tensor]) -> set[str]:
    """The paths of tensors that some reset writes to."""
    with _Writes() as writes:
        fresh = _drawn(model, tensors, {}, torch.zeros(2, dtype=torch.int64, device="meta"))
    return {path for path, t in fresh.items() if t.untyped_storage()._cdata in writes.storages}


def _check_covered(
    model: nn.Module, tensors: Mapping[str, Tensor], covered: set[str], wanted: list[str]
) -> None:
    """Raises for tensors without an initialization."""
    modules = dict(model.named_modules())
    failures = []
    for path in wanted:
        if path in covered:
            continue
        prefix, _, name = path.rpartition(".")
        module = modules[prefix]
        has = next((reset for reset in RESETS if callable(getattr(module, reset, None))), None)
        where = f"{'module ' + repr(prefix) if prefix else 'the model'} ({type(module).__name__})"
        why = f"{has} of {where} does not write it" if has else f"{where} has no reset_parameters"
        what = "parameter" if isinstance(tensors[path], nn.Parameter) else "buffer"
        failures.append(
            f"{what} {path!r} has no initialization: {why}. Write one that fills self.{name} in"
            f" place, or give init={{{path!r}: lambda key, shape, dtype: ...}}, such as 0.02 *"
            " ftp.random.normal(key, shape, dtype)."
        )
    raise_all(InputError, failures)


class _Writes(TorchDispatchMode):
    """Collects the storages that ops write to; views and ``.data`` share their tensor's."""

    def __init__(self):
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        values = tree_leaves(written(func, args, kwargs or {}))
        self.storages |= {x.untyped_storage()._cdata for x in values if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))
