"""What cuts an exported program: path patterns or PyTorch's styles to a spec for each tensor of its state, inputs and outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ftp.constrain import entries_over
from ftp.errors import SpecError, join_failures
from ftp.mesh import Mesh
from ftp.plans.styles import shard_spec
from ftp.spec import P, check_spec
from ftp.tree import broadcast_specs, flatten, kind_of, leaf_names, match_patterns

if TYPE_CHECKING:
    from torch.export import ExportedProgram

aten = torch.ops.aten


@dataclass(frozen=True)
class Pin:
    """Where the input (``slot`` 0) or the output (``slot`` 1) of every call of a module lives."""

    module: str
    slot: int
    spec: P
    axis: str


def state_specs(
    program: "ExportedProgram", state: Mapping[str, torch.Tensor], mesh: Mesh, given: Any, axis: str | None
) -> tuple[dict[str, P], list[Pin]]:
    """A spec for every tensor of ``state`` {path: tensor}, and what the styles pin.

    Args:
        given: ``{path pattern: P}``, ``{module-path pattern: style}``, both in one dict, or None.
        axis: the mesh axis that styles cut over.

    Raises:
        SpecError: all that does not fit, at once.
    """
    if given is not None and not isinstance(given, Mapping):
        hint = f" For one spec everywhere give {{'**': {given}}}." if isinstance(given, P) else ""
        raise SpecError(f"styles_or_specs is {given!r}, {kind_of(given)}; give {{path pattern: P or style}}.{hint}")
    failures: list[str] = []
    patterns = {k: v for k, v in (given or {}).items() if isinstance(v, P)}
    styles = {k: v for k, v in (given or {}).items() if not isinstance(v, P)}
    paths = list(state)
    tied = tied_paths(state)
    answers = [tuple(tuple(name.split(".")) for name in tied[path]) for path in paths]
    found = match_patterns(patterns, answers, paths, "the program's state", failures)
    by_path = {path: (repr(match[0]), match[1]) for path, match in zip(paths, found, strict=True) if match is not None}
    pins: list[Pin] = []
    if styles:
        axis = _style_axis(mesh, axis)
        modules = _modules(program, paths)
        read = match_patterns(
            styles, [(tuple(m.split(".")) if m else (),) for m in modules], list(modules), "the program's modules", failures, _check_style
        )
        for module, match in zip(modules, read, strict=True):
            if match is None:
                continue
            specs = _of_style(program, module, match[1], axis, state, pins, failures)
            for path, spec in ((name, spec) for own, spec in specs.items() for name in tied[own]):
                if path in by_path and by_path[path][1] != spec:
                    failures.append(
                        f"{by_path[path][0]} and the style at {match[0]!r} disagree for {path}: {by_path[path][1]} and {spec}. Keep one."
                    )
                by_path[path] = (repr(match[0]), spec)
    for path, (_, spec) in by_path.items():
        failures += check_spec(spec, tuple(state[path].shape), mesh.axes, path)
    if failures:
        raise SpecError(join_failures(failures))
    return {path: by_path[path][1] if path in by_path else P() for path in paths}, pins


def tied_paths(state: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Per path every path of the same tensor, its own first; a graph reads a tied weight under one of them."""
    by_memory: dict[Any, list[str]] = {}
    for path, value in state.items():
        by_memory.setdefault(memory_of(value), []).append(path)
    return {path: [path, *(p for p in by_memory[memory_of(value)] if p != path)] for path, value in state.items()}


def memory_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one: the same elements of the same memory."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def argument_specs(program: "ExportedProgram", mesh: Mesh, given: Any) -> list[P]:
    """A spec per flat user input, from one ``P``, a tuple for the positional arguments, or a dict {argument: specs}."""
    signature = program.module_call_graph[0].signature
    assert signature is not None
    args, kwargs = _numbered(signature.in_spec)
    names = [*(signature.forward_arg_names or [f"args[{i}]" for i in range(len(args))])][: len(args)]
    arguments = {**dict(zip(names, args, strict=True)), **kwargs}
    specs = [P()] * signature.in_spec.num_leaves
    if isinstance(given, tuple):
        if len(given) != len(args):
            raise SpecError(
                f"in_specs has {len(given)} entries for {len(args)} positional arguments ({', '.join(names)}). Give one for each."
            )
        given = dict(zip(names, given, strict=True))
    elif isinstance(given, P):
        given = dict.fromkeys(arguments, given)
    elif not isinstance(given, Mapping):
        raise SpecError(f"in_specs is {given!r}, {kind_of(given)}; give a P, a tuple of specs, or a dict {{argument: specs}}.")
    if unknown := [name for name in given if name not in arguments]:
        raise SpecError(f"in_specs names {', '.join(map(repr, unknown))}; the program's arguments are {', '.join(map(repr, arguments))}.")
    for name, spec in given.items():
        _spread(spec, arguments[name], name, specs)
    return specs


def result_specs(program: "ExportedProgram", given: Any) -> list[P | None]:
    """A spec per flat user output; None where propagation is to choose."""
    signature = program.module_call_graph[0].signature
    assert signature is not None
    n = signature.out_spec.num_leaves
    if given is None:
        return [None] * n
    specs = [P()] * n
    _spread(given, _numbered(signature.out_spec), "the result", specs)
    return [*specs]


def names_of_leaves(program: "ExportedProgram", results: bool) -> list[str]:
    """What each flat user input, or output, is called in messages."""
    signature = program.module_call_graph[0].signature
    assert signature is not None
    spec = signature.out_spec if results else signature.in_spec
    names = [""] * spec.num_leaves
    tree = _numbered(spec)
    arguments = [("the result", tree)]
    if not results:
        known = signature.forward_arg_names or []
        arguments = [(known[i] if i < len(known) else f"args[{i}]", arg) for i, arg in enumerate(tree[0])] + list(tree[1].items())
    for root, arg in arguments:
        for index, name in zip(flatten(arg)[0], leaf_names(arg, root), strict=True):
            if isinstance(index, torch.Tensor):
                names[int(index)] = name
    return [name or f"leaf {i}" for i, name in enumerate(names)]


def _numbered(spec: pytree.TreeSpec) -> Any:
    """The tree with a tensor at each leaf that holds the leaf's number."""
    return pytree.tree_unflatten([torch.tensor(i) for i in range(spec.num_leaves)], spec)


def _spread(spec: Any, tree: Any, name: str, specs: list[P]) -> None:
    """Writes the specs of a prefix tree to the places that the leaves of ``tree`` number."""
    if isinstance(spec, P):
        for at in pytree.tree_leaves(tree):
            specs[int(at)] = spec
        return
    for at, one in zip(flatten(tree)[0], broadcast_specs(spec, tree, name), strict=True):
        specs[int(at)] = one


# Styles.


def _style_axis(mesh: Mesh, axis: str | None) -> str:
    if axis is None and (len(mesh.axes) == 1 or "tp" in mesh.axes):
        return "tp" if "tp" in mesh.axes else mesh.axis_names[0]
    if axis is None or axis not in mesh.axes:
        given = "styles cut over one axis" if axis is None else f"axis={axis!r} is no axis"
        raise SpecError(f"The mesh is {mesh}: {given}. Name one of {', '.join(map(repr, mesh.axes))} as axis=.")
    return axis


def _modules(program: "ExportedProgram", paths: Sequence[str]) -> dict[str, str]:
    """The path of every module that runs or holds state, and its class' name where the graph tells it."""
    found: dict[str, str] = {}
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            found[path.split("@")[0]] = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    for path in paths:
        while "." in path:
            path = path.rpartition(".")[0]
            found.setdefault(path, "")
    return found


def _check_style(pattern: str, style: Any) -> str | None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    kind = style if isinstance(style, type) else type(style)
    if kind in (ColwiseParallel, RowwiseParallel):
        return None
    return (
        f"{pattern!r} has {style!r}, {kind_of(style)}; an exported program takes a P for a path of its state, or ColwiseParallel or"
        " RowwiseParallel, as a class or an instance, for a module's path."
    )


def _of_style(
    program: "ExportedProgram",
    module: str,
    style: Any,
    axis: str,
    state: Mapping[str, torch.Tensor],
    pins: list[Pin],
    failures: list[str],
) -> dict[str, P]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    kind = style if isinstance(style, type) else type(style)
    label = f"{kind.__name__} at {module!r}"
    weight, bias = (f"{module}.{name}" if module else name for name in ("weight", "bias"))
    if weight not in state:
        held = [path for path in state if path.startswith(f"{module}." if module else "")]
        failures.append(
            f"{label}: {weight!r} is missing from the program's state, which holds {', '.join(map(repr, held)) or 'nothing'} there."
        )
        return {}
    reader = _reader(program, module, weight)
    if reader is None:
        failures.append(f"{label}: {weight!r} is read by no linear layer or embedding. Give its spec: {{{weight!r}: P(...)}}.")
        return {}
    is_columns = kind is ColwiseParallel
    if reader == "linear":
        specs = {weight: P(axis, None) if is_columns else P(None, axis), bias: P(axis) if is_columns else P()}
    else:
        specs = {weight: P(None, axis) if is_columns else P(axis, None)}
    if not isinstance(style, type):
        fresh = kind()
        if not is_columns and reader == "embedding":
            fresh = RowwiseParallel(input_layouts=style.input_layouts[0])  # torch's own default cuts nothing that a lookup has
        for slot, name in enumerate(("input_layouts", "output_layouts")):
            given = getattr(style, name)
            if given != getattr(fresh, name):
                _pin(program, module, slot, given, axis, label, name, pins, failures)
    return {path: spec for path, spec in specs.items() if path in state}


def _pin(
    program: "ExportedProgram",
    module: str,
    slot: int,
    layouts: Sequence[Any],
    axis: str,
    label: str,
    name: str,
    pins: list[Pin],
    failures: list[str],
) -> None:
    from torch.distributed.tensor import Replicate, Shard

    layout = layouts[0] if len(layouts) == 1 else layouts
    if type(layout) not in (Replicate, Shard):
        failures.append(f"{label} has {name} {layout}; only Shard(dim) and Replicate() say where a value lies.")
        return
    spec = shard_spec(layout.dim, axis) if isinstance(layout, Shard) else P()
    for node in boundary(program, module, slot):
        ndim = node.meta["val"].ndim
        if entries_over(spec, ndim):
            failures.append(f"{label} has {name} {layout}, but the value has {ndim} dims.")
            return
    pins.append(Pin(module, slot, spec, axis))


def boundary(program: "ExportedProgram", module: str, slot: int) -> list[fx.Node]:
    """What every call of ``module`` reads first (``slot`` 0) or gives last (``slot`` 1)."""
    inputs = set(program.graph_signature.user_inputs)
    calls: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        for key, (path, _) in stack.items():
            if path.split("@")[0] == module and node.op == "call_function":
                calls.setdefault(key, []).append(node)
    found = []
    for nodes in calls.values():
        if slot:
            found.append(nodes[-1])
            continue
        read = [n for node in nodes for n in node.all_input_nodes if n not in nodes]
        found += [n for n in read if n.op != "placeholder" or n.name in inputs][:1]
    return found


_LINEAR = {aten.linear.default: 1, aten.addmm.default: 2, aten.mm.default: 1, aten.matmul.default: 1, aten.bmm.default: 1}
# A linear layer's weight is broadcast along the batch where the layer decomposes into a batched product.
_VIEWS = {
    aten._to_copy.default,
    aten.detach.default,
    aten.expand.default,
    aten.numpy_T.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def _reader(program: "ExportedProgram", module: str, weight: str) -> str | None:
    """Whether a linear layer or an embedding reads a weight."""
    signature = program.graph_signature
    held = {**program.state_dict, **program.constants}
    # A tied weight is read under one of its names.
    names = {
        name
        for name, path in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items()
        if isinstance(held.get(path), torch.Tensor) and memory_of(held[path]) == memory_of(held[weight])  # type: ignore[arg-type]
    }
    readers = [found for node in program.graph.nodes if node.name in names for found in _readers(node)]
    kinds = {kind for kind, at in readers if at == module} or {kind for kind, _ in readers}
    return kinds.pop() if len(kinds) == 1 else None


def _readers(node: fx.Node) -> list[tuple[str, str]]:
    """What reads a weight, through views of it, and in which module."""
    found = []
    for user in node.users:
        stack = list((user.meta.get("nn_module_stack") or {}).values())
        module = stack[-1][0].split("@")[0] if stack else ""
        if user.target in _VIEWS:
            found += _readers(user)
        elif user.target is aten.embedding.default and user.args[0] is node:
            found.append(("embedding", module))
        elif user.target in _LINEAR and user.args[_LINEAR[user.target]] is node:  # type: ignore[index]
            found.append(("linear", module))
    return found
