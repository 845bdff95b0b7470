"""The specs of an exported program's state, inputs and outputs, from path patterns and styles."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ftp.errors import SpecError, raise_all
from ftp.exported.module_calls import call_signature, memory_of
from ftp.exported.styles import ConstrainedValue, StyleReader, check_style
from ftp.sharding.check_spec import check_spec
from ftp.sharding.mesh import Mesh
from ftp.sharding.patterns import match_patterns
from ftp.sharding.pytree import broadcast_specs, flatten, kind_of, leaf_names
from ftp.sharding.spec import P
from ftp.torch_internals import pytree

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.exported_program import ModuleCallSignature


def state_specs(
    program: "ExportedProgram",
    state: Mapping[str, torch.Tensor],
    mesh: Mesh,
    given: Any,
    axis: str | None,
    signatures: "Sequence[tuple[str, ModuleCallSignature]]",
) -> tuple[dict[str, P], list[ConstrainedValue]]:
    """A spec for every tensor of ``state`` {path: tensor}, and the styles' constraints on values.

    Args:
        given: ``{path pattern: P}``, ``{module-path pattern: style}``, or both in one dict.
        axis: the mesh axis that styles shard over.
        signatures: of module calls, as for ``calls_of``.

    Raises:
        SpecError: a list of everything that does not fit.
    """
    if not isinstance(given, Mapping):
        hint = f" For one spec everywhere give {{'**': {given}}}." if isinstance(given, P) else ""
        hint = " {} replicates everything." if given is None else hint
        raise SpecError(
            f"styles_or_specs is {given!r}, {kind_of(given)}; give {{path pattern: P or"
            f" style}}.{hint}"
        )
    failures: list[str] = []
    patterns = {k: v for k, v in given.items() if isinstance(v, P)}
    styles = {k: v for k, v in given.items() if not isinstance(v, P)}
    paths = list(state)
    tied = tied_paths(state)
    answers = [tuple(tuple(name.split(".")) for name in tied[path]) for path in paths]
    found = match_patterns(patterns, answers, paths, "the program's state", failures)
    by_path = {
        path: (repr(match[0]), match[1])
        for path, match in zip(paths, found, strict=True)
        if match is not None
    }
    pins: list[ConstrainedValue] = []
    if styles:
        reader = StyleReader(program, state, _style_axis(mesh, axis), failures, signatures)
        modules = reader.modules
        read = match_patterns(
            styles,
            [(tuple(m.split(".")) if m else (),) for m in modules],
            list(modules),
            "the program's modules",
            failures,
            check_style,
        )
        for module, match in zip(modules, read, strict=True):
            if match is None:
                continue
            specs = reader.read(module, match[1])
            for path, spec in ((name, spec) for own, spec in specs.items() for name in tied[own]):
                if path in by_path and by_path[path][1] != spec:
                    failures.append(
                        f"{by_path[path][0]} and the style at {match[0]!r} disagree for {path}:"
                        f" {by_path[path][1]} and {spec}. Keep one."
                    )
                by_path[path] = (repr(match[0]), spec)
        pins = reader.pins
    for path, (_, spec) in by_path.items():
        failures += check_spec(spec, tuple(state[path].shape), mesh.axes, path)
    raise_all(SpecError, failures)
    return {path: by_path[path][1] if path in by_path else P() for path in paths}, pins


def _style_axis(mesh: Mesh, axis: str | None) -> str:
    if axis is None and (len(mesh.axes) == 1 or "tp" in mesh.axes):
        return "tp" if "tp" in mesh.axes else mesh.axis_names[0]
    if axis is None or axis not in mesh.axes:
        given = "styles cut over one axis" if axis is None else f"axis={axis!r} is no axis"
        raise SpecError(
            f"The mesh is {mesh}: {given}. Name one of {', '.join(map(repr, mesh.axes))} as axis=."
        )
    return axis


def tied_paths(state: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Per path, all paths of its tensor, the path itself first."""
    by_memory: dict[Any, list[str]] = {}
    for path, value in state.items():
        by_memory.setdefault(memory_of(value), []).append(path)
    return {
        path: [path, *(p for p in by_memory[memory_of(value)] if p != path)]
        for path, value in state.items()
    }


def argument_specs(program: "ExportedProgram", given: Any) -> list[P]:
    """A spec per flat user input, from ``in_specs``."""
    signature = call_signature(program)
    args, kwargs = _numbered(signature.in_spec)
    names = list(signature.forward_arg_names or (f"args[{i}]" for i in range(len(args))))
    names = names[: len(args)]
    arguments = {**dict(zip(names, args, strict=True)), **kwargs}
    specs = [P()] * signature.in_spec.num_leaves
    if isinstance(given, tuple):
        if len(given) != len(args):
            raise SpecError(
                f"in_specs has {len(given)} entries for {len(args)} positional arguments"
                f" ({', '.join(names)}). Give one for each."
            )
        given = dict(zip(names, given, strict=True))
    elif isinstance(given, P):
        given = dict.fromkeys(arguments, given)
    elif not isinstance(given, Mapping):
        raise SpecError(
            f"in_specs is {given!r}, {kind_of(given)}; give a P, a tuple of specs, or a dict"
            f" {{argument: specs}}."
        )
    if unknown := [name for name in given if name not in arguments]:
        raise SpecError(
            f"in_specs names {', '.join(map(repr, unknown))}; the program's arguments are"
            f" {', '.join(map(repr, arguments))}."
        )
    for name, spec in given.items():
        _spread(spec, arguments[name], name, specs)
    return specs


def result_specs(program: "ExportedProgram", given: Any) -> list[P | None]:
    """A spec per flat user output; None where the planner chooses."""
    out_spec = call_signature(program).out_spec
    if given is None:
        return [None] * out_spec.num_leaves
    specs = [P()] * out_spec.num_leaves
    _spread(given, _numbered(out_spec), "the result", specs)
    return [*specs]


def names_of_leaves(program: "ExportedProgram", results: bool) -> list[str]:
    """The name of each flat user input, or output, for messages."""
    signature = call_signature(program)
    spec = signature.out_spec if results else signature.in_spec
    names = [""] * spec.num_leaves
    tree = _numbered(spec)
    arguments = [("the result", tree)]
    if not results:
        known = signature.forward_arg_names or []
        arguments = [
            (known[i] if i < len(known) else f"args[{i}]", arg) for i, arg in enumerate(tree[0])
        ] + list(tree[1].items())
    for root, arg in arguments:
        for index, name in zip(flatten(arg)[0], leaf_names(arg, root), strict=True):
            if isinstance(index, torch.Tensor):
                names[int(index)] = name
    return [name or f"leaf {i}" for i, name in enumerate(names)]


def _numbered(spec: pytree.TreeSpec) -> Any:
    """The tree, with each leaf's number, a 0-d tensor, as the leaf."""
    return pytree.tree_unflatten([torch.tensor(i) for i in range(spec.num_leaves)], spec)


def _spread(spec: Any, tree: Any, name: str, specs: list[P]) -> None:
    """Write a prefix tree of specs to ``specs``, at the numbers that are ``tree``'s leaves."""
    if isinstance(spec, P):
        for at in pytree.tree_leaves(tree):
            specs[int(at)] = spec
        return
    for at, one in zip(flatten(tree)[0], broadcast_specs(spec, tree, name), strict=True):
        specs[int(at)] = one
