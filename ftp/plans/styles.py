"""Reader of torch.distributed.tensor.parallel's styles: specs of parameters and constraints of
activations. ``plans.parallelize_module`` and ``exported.styles`` both use it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from typing import Any, cast

from torch import nn

from ftp.dataclass import dataclass
from ftp.errors import SpecError
from ftp.functional.module_constraints import Constraint, Pins
from ftp.ops.constrain import Gradient
from ftp.plans.user_style import read_user_style
from ftp.sharding.pytree import kind_of
from ftp.sharding.spec import P


@dataclass(frozen=True)
class StyleSpecs:
    """Specs of parameters and constraints of modules, by path below the styled module."""

    specs: Mapping[str, P] = field(default_factory=dict)
    constraints: Mapping[str, Constraint] = field(default_factory=dict)


class Style:
    """A style that comes with ftp."""

    def read(self, module: nn.Module, axis: str) -> StyleSpecs:
        raise NotImplementedError


ReadStyle = Callable[[Any, nn.Module, str], StyleSpecs]


@cache
def torch_styles() -> Mapping[type, ReadStyle]:
    """torch's styles that ftp reads, with their readers ``(style, module, axis) -> StyleSpecs``."""
    # Takes 0.2 s, which `import ftp` does not need.
    import torch.distributed.tensor.parallel as parallel

    return {
        parallel.ColwiseParallel: _colwise,
        parallel.RowwiseParallel: _rowwise,
        parallel.SequenceParallel: _sequence,
        parallel.PrepareModuleInput: lambda s, _, axis: constrained(axis, **_inputs(s, axis)),
        parallel.PrepareModuleOutput: lambda s, _, axis: constrained(
            axis, outputs=_outputs(s, axis)
        ),
        parallel.PrepareModuleInputOutput: lambda s, _, axis: constrained(
            axis,
            **_inputs(s.prepare_module_input, axis),
            outputs=_outputs(s.prepare_module_output, axis),
        ),
    }


def base_style(kind: type) -> str | None:
    """The name of the style of torch's that a class derives from."""
    return next((base.__name__ for base in kind.__mro__ if base in torch_styles()), None)


def read_style(style: object, path: str, module: nn.Module, axis: str) -> StyleSpecs:
    """The specs and constraints that ``style`` gives ``module``, at ``path`` of the model.

    Raises:
        SpecError: not a style, or a subclass of one of torch's; a style that cannot shard the
            module; a layout that no spec expresses.
    """
    from torch.distributed.tensor.parallel import ParallelStyle

    readers = torch_styles()
    name = type(style).__name__
    if type(style) in readers:
        try:
            return readers[type(style)](style, module, axis)
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None
    if isinstance(style, Style):
        return style.read(module, axis)
    if isinstance(style, type):
        raise SpecError(f"{style.__name__} is a class; give an instance, {style.__name__}().")
    if callable(style):
        return StyleSpecs(*read_user_style(style, path, module))
    if isinstance(style, ParallelStyle):
        base = base_style(type(style))
        derived = (
            f"a subclass of {base} whose changes are unknown" if base else "no style that is known"
        )
        raise SpecError(
            f"{name} is {derived}. Give its meaning as a function (path, module) -> (specs,"
            f" constraints), or use {base or 'one of ' + ', '.join(r.__name__ for r in readers)} if"
            " it does the same."
        )
    hint = " Join the two paths by '.'." if isinstance(style, Mapping) else ""
    raise SpecError(
        f"{style!r} is {kind_of(style)}; it must be a style, such as ColwiseParallel().{hint}"
    )


def constrained(axis: str, **constraint: Any) -> StyleSpecs:
    """A constraint of the module itself, with gradients laid out as DTensor does."""
    made = Constraint(**constraint, axes=axis, grad="dtensor")
    return StyleSpecs(constraints={"": made} if made.specs() else {})


def shard_spec(dim: int, axis: str) -> P:
    """The spec of a tensor of any rank that is sharded on ``dim``.

    >>> shard_spec(1, "tp"), shard_spec(-1, "tp")
    (P(None, 'tp'), P(..., 'tp'))
    """
    return P(*(None,) * dim, axis) if dim >= 0 else P(..., axis, *(None,) * (-dim - 1))


def then(*pins: Pins) -> Pins:
    """Chain entries into one; repeated specs are listed once.

    >>> then(P("tp"), None, P("tp"), P())
    (P('tp'), P())
    """
    chain: list[P | Gradient] = []
    for entry in pins:
        for spec in entry if isinstance(entry, tuple) else (entry,):
            if spec is not None and (not chain or chain[-1] != spec):
                chain.append(spec)
    return tuple(chain) if len(chain) > 1 else cast("P", chain[0]) if chain else None


def combine(first: Constraint, second: Constraint) -> Constraint:
    """Both constraints on one module, the first before the second.

    >>> first = Constraint(inputs=(P("tp"), ...))
    >>> combine(first, Constraint(inputs=(P(), None), outputs=P())).inputs
    ((P('tp'), P()), None)
    """
    if first == second:
        return first
    if (first.axes, first.grad) != (second.axes, second.grad):
        raise SpecError(f"{first} and {second} name different axes. State both as one Constraint.")
    given: tuple[Any, Any] = first.outputs, second.outputs
    if any(isinstance(o, Mapping) for o in given):
        outputs: Any = _by_name(*given)
    else:
        outputs = _zipped(*(o if isinstance(o, tuple) or o is None else (o,) for o in given))
        if outputs is not None and len(outputs) == 1 and not isinstance(outputs[0], tuple):
            outputs = outputs[0]
    return replace(
        first,
        inputs=_zipped(first.inputs, second.inputs),
        kwargs=_by_name(first.kwargs or None, second.kwargs or None),
        outputs=outputs,
    )


def _by_name(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return first if second is None else second
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        raise SpecError(
            f"{first} and {second} name outputs by name and by position. State both as one"
            " Constraint."
        )
    return {name: then(first.get(name), second.get(name)) for name in {**first, **second}}


def _zipped(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return first if second is None else second
    longest = max(len(entries) - (entries[-1:] == (...,)) for entries in (first, second))
    columns = []
    for entries in (first, second):
        if entries[-1:] == (...,):
            columns.append((*entries[:-1], *(None,) * (longest - len(entries) + 1)))
        elif len(entries) == longest:
            columns.append(entries)
        else:
            raise SpecError(
                f"{first} and {second} are of different lengths, for the same arguments. Give both"
                " one length."
            )
    is_open = all(entries[-1:] == (...,) for entries in (first, second))
    return (*map(then, *columns), *((...,) if is_open else ()))


def _colwise(style: Any, module: nn.Module, axis: str) -> StyleSpecs:
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise _cannot_shard(module)
    spec = P(axis) if isinstance(module, nn.Linear) else P(None, axis)
    return StyleSpecs(
        {name: spec for name, _ in module.named_parameters()}, _around(style, P(), axis)
    )


def _rowwise(style: Any, module: nn.Module, axis: str) -> StyleSpecs:
    if isinstance(module, nn.Linear):
        part = StyleSpecs(
            {"weight": P(None, axis)}, _around(style, shard_spec(-1, axis), axis, is_summed=True)
        )
        return summed_whole(part) if module.bias is not None else part
    if isinstance(module, nn.Embedding):
        return StyleSpecs(
            {name: P(axis) for name, _ in module.named_parameters()},
            _around(style, P(), axis, is_summed=True),
        )
    raise _cannot_shard(module)


def summed_whole(part: StyleSpecs) -> StyleSpecs:
    """Gather the gradient of the output of a row-wise layer with a bias, as DTensor does: the
    weight's gradient needs that anyway, and the bias' gradient then needs no reduction.
    """
    constraint = part.constraints[""]
    if not isinstance(constraint.outputs, P) or not constraint.outputs:
        return part
    return replace(
        part, constraints={"": replace(constraint, outputs=((Gradient(P()), constraint.outputs),))}
    )


def _cannot_shard(module: nn.Module) -> SpecError:
    what = kind_of(module)
    if isinstance(module, nn.MultiheadAttention):
        return SpecError(
            f"it shards nn.Linear and nn.Embedding, not {what}. ftp.plans.PairwiseParallel() cuts"
            " its heads."
        )
    inner = [n for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Embedding)]
    names = f"{', '.join(map(repr, inner[:4]))}{' and others' if len(inner) > 4 else ''}"
    hint = f" Style what is in it: {names}." if inner else ""
    return SpecError(f"it shards nn.Linear and nn.Embedding, not {what}.{hint}")


def _around(
    style: Any, desired: P, axis: str, *, is_summed: bool = False
) -> Mapping[str, Constraint]:
    """Constraints on the first input and the output of a column- or row-wise layer.

    Args:
        is_summed: the output is a pending sum, which ``Partial()`` leaves to the planner to reduce.
    """
    (arrives,), (gives,) = style.input_layouts, style.output_layouts
    inputs = (then(_declared(arrives, axis), desired), ...)
    read = _declared if is_summed else _layout
    return constrained(axis, inputs=inputs, outputs=read(gives, axis, "output_layouts")).constraints


def _sequence(style: Any, module: nn.Module, axis: str) -> StyleSpecs:
    (layout,) = style.sequence_sharding
    spec = _layout(layout, axis, "sequence_dim")
    return constrained(axis, inputs=(spec, ...), outputs=spec)


def _inputs(style: Any, axis: str) -> dict[str, Any]:
    given, desired = style.input_layouts, style.desired_input_layouts
    inputs = None if given is None else _chained(given, desired, axis, "input_layouts")
    kwargs = {
        name: _entry(
            layout,
            style.desired_input_kwarg_layouts.get(name),
            axis,
            f"input_kwarg_layouts[{name!r}]",
        )
        for name, layout in style.input_kwarg_layouts.items()
    }
    stray = [name for name in style.desired_input_kwarg_layouts if name not in kwargs]
    if stray:
        raise SpecError(
            f"desired_input_kwarg_layouts names {stray[0]!r}, which input_kwarg_layouts does not."
        )
    return {
        "inputs": inputs,
        "kwargs": {name: entry for name, entry in kwargs.items() if entry is not None} or None,
    }


def _outputs(style: Any, axis: str) -> Any:
    if isinstance(style.output_layouts, Mapping):  # of a dict that the module returns
        desired = style.desired_output_layouts
        return {
            name: _entry(
                layout,
                desired[name] if isinstance(desired, Mapping) else desired[i],
                axis,
                f"output_layouts[{name!r}]",
            )
            for i, (name, layout) in enumerate(style.output_layouts.items())
        }
    entries = _chained(style.output_layouts, style.desired_output_layouts, axis, "output_layouts")
    is_one = len(entries) == 1 and not isinstance(entries[0], tuple) and entries[0] is not ...
    return entries[0] if is_one else entries


def _chained(
    given: Sequence[Any], desired: Sequence[Any], axis: str, where: str
) -> tuple[Any, ...]:
    """An entry per value: its declared layout, then the desired one. A trailing ``...`` stays."""
    is_open = given[-1:] == (...,)
    if is_open != (desired[-1:] == (...,)) or len(given) != len(desired):
        raise SpecError(
            f"{where}={tuple(given)!r} and desired_{where}={tuple(desired)!r} must be of one"
            " length."
        )
    pairs = list(zip(given, desired, strict=True))[: len(given) - is_open]
    return (
        *(_entry(layout, to, axis, f"{where}[{i}]") for i, (layout, to) in enumerate(pairs)),
        *((...,) if is_open else ()),
    )


def _entry(layout: Any, desired: Any, axis: str, where: str) -> Pins:
    if layout is None:
        return None
    return then(
        _declared(layout, axis, where),
        None if desired is None else _layout(desired, axis, f"desired_{where}"),
    )


def _declared(layout: Any, axis: str, where: str = "input_layouts") -> P | None:
    """The spec of a declared layout; None for ``Partial``, as model code here sees the sum."""
    from torch.distributed.tensor import Partial

    return None if isinstance(layout, Partial) else _layout(layout, axis, where)


def _layout(layout: Any, axis: str, where: str) -> P:
    from torch.distributed.tensor import Replicate, Shard

    if type(layout) is Replicate:
        return P()
    if type(layout) is Shard:
        return shard_spec(layout.dim, axis)
    raise SpecError(
        f"{where}: {layout!r} is {kind_of(layout)}; a layout is Replicate(), Shard(dim), or None"
        " to leave a value alone."
    )
