"""Users' styles: functions ``(path, module) -> (specs, constraints)``, whose paths start at the
model or at the module.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ftp.errors import SpecError
from ftp.functional.module_constraints import Constraint
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import P


def read_user_style(
    style: Callable[..., Any], path: str, module: nn.Module
) -> tuple[dict[str, P], dict[str, Constraint]]:
    """Call a style and check its specs and constraints; returns both by path from ``module``.

    Raises:
        SpecError: a function of other arguments, another result, or unknown paths.
    """
    given_by = f"{getattr(style, '__name__', type(style).__name__)}({path!r}, ...)"
    specs, constraints = _called(style, path, module, given_by)
    found: dict[str, P] = {}
    parameters = dict(module.named_parameters())
    for key, spec in specs.items():
        name = _resolved(key, path, list(parameters), given_by)
        if not isinstance(spec, P):
            raise SpecError(f"{given_by} gives {spec!r}, {kind_of(spec)}, for {key!r}.")
        ndim = parameters[name].ndim
        if len(spec) > ndim:
            raise SpecError(
                f"{given_by} gives {spec}, of {len(spec)} entries, for {key!r}, whose shape"
                f" {tuple(parameters[name].shape)} has {ndim} dims. Give at most {ndim}."
            )
        found[name] = spec
    around: dict[str, Constraint] = {}
    modules = [name for name, _ in module.named_modules()]
    for key, constraint in constraints.items():
        name = _resolved(key, path, modules, given_by)
        if not isinstance(constraint, P | Constraint):
            raise SpecError(f"{given_by} gives {constraint!r}, {kind_of(constraint)}, for {key!r}.")
        around[name] = Constraint(outputs=constraint) if isinstance(constraint, P) else constraint
    return found, around


def _called(
    style: Callable[..., Any], path: str, module: nn.Module, given_by: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        inspect.signature(style).bind(path, module)
    except TypeError as e:
        label = getattr(style, "__name__", type(style).__name__)
        raise SpecError(
            f"{label}{inspect.signature(style)} must take (path, module), as every style: {e}."
        ) from None
    except ValueError:  # it has no signature
        pass
    given = style(path, module)
    if not isinstance(given, tuple) or len(given) != 2:
        raise SpecError(
            f"{given_by} gives {given!r}; a style gives a pair of specs and constraints."
        )
    specs, constraints = given[0] or {}, given[1] or {}
    if isinstance(constraints, P | Constraint):
        constraints = {"": constraints}
    if not isinstance(specs, Mapping) or not isinstance(constraints, Mapping):
        raise SpecError(
            f"{given_by} gives {kind_of(specs)} and {kind_of(constraints)}; it must be a dict"
            " {parameter's path: P} and a Constraint or a dict {module's path: Constraint}."
        )
    return specs, constraints


def _resolved(key: object, path: str, names: Sequence[str], given_by: str) -> str:
    """The path among ``names``, from the module, of a path ``key`` from the model or the module."""
    text = str(key)
    from_model = "" if text == path else text.removeprefix(f"{path}.")
    options = [name for name in dict.fromkeys((from_model, text)) if name in names]
    if len(options) != 1:
        why = "is two paths of it" if options else "is no path of it"
        raise SpecError(
            f"{given_by} names {key!r}, which {why}. It has {', '.join(map(repr, names[:6]))}."
        )
    return options[0]
