"""Plans of torch's parallelize_module as specs and constraints."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ftp.dataclass import dataclass
from ftp.errors import SpecError, raise_all
from ftp.functional.functionalize import functionalize
from ftp.functional.module_constraints import Constraint
from ftp.plans.labelled_specs import LabelAndSpec, labelled_specs
from ftp.plans.mesh_axis import choose_axis
from ftp.plans.styles import combine, read_style
from ftp.sharding.mesh import AnyMesh
from ftp.sharding.patterns import match_patterns, matches, narrows, nearest
from ftp.sharding.pytree import SpecRow, Specs, kind_of
from ftp.sharding.spec import P

StylePlan = tuple[Mapping[str, P], Mapping[str, Constraint]]


def from_parallelize_plan(
    model: nn.Module,
    plan: Any,
    *,
    mesh: AnyMesh | None = None,
    axis: str | None = None,
    tp_mesh_dim: int | None = None,
    buffers: bool = False,
) -> Any:
    """Read a plan of torch's ``parallelize_module(model, mesh, plan)`` as specs and constraints.

    Constraints are about the plan's axis only; over other axes the planner chooses.

    Args:
        model: is not changed.
        plan: one style for the model, or ``{pattern: style or P}``. A pattern is a whole module
            path as in ``ftp.plan``: ``*`` matches one element or a part of one, ``**`` any number
            of elements (in torch one); "" is the model. A style is torch's, one of ``ftp.plans``,
            or your function ``(path, module) -> (specs, constraints)``, with paths from the model
            or from the module. The pattern of a ``P`` is of parameter paths, as in ``ftp.plan``;
            where a style speaks of the parameter too, the more specific pattern wins.
        mesh: a 1-D mesh, whose axis to shard over; or any mesh, with ``axis``.
        axis: the mesh axis to shard over; default "tp".
        tp_mesh_dim: position of the axis in ``mesh``, as in older versions of torch; deprecated.
        buffers: return specs of buffers and frozen parameters too, for ``functionalize(model,
            buffers=True)``. Otherwise they are constants, replicated.

    Returns:
        ``(specs, constraints)``: ``{path: P}`` for every parameter of ``ftp.functionalize(model)``,
        which prints as a table, ``P()`` where no style matches; and ``{module path: Constraint}``.
        With ``buffers`` a third, ``{path: P}`` of the buffers.

    Raises:
        SpecError: all at once: a pattern that matches no module, with the nearest one; not a plan
            or not a style; a subclass of a style; a style that cannot shard its module; two styles
            that disagree for one parameter.
        MeshError: a mesh of several axes without ``axis``.

    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    >>> specs, constraints = from_parallelize_plan(model, plan)
    >>> print(specs)
    path      spec           shape   given by
    0.bias    P('tp')        (8,)    '0': ColwiseParallel
    0.weight  P('tp')        (8, 4)  '0': ColwiseParallel
    2.bias    P()            (4,)    no style: replicated
    2.weight  P(None, 'tp')  (4, 8)  '2': RowwiseParallel
    >>> constraints["2"].inputs, constraints["2"].outputs
    ((P(..., 'tp'), Ellipsis), P())
    >>> fn, params = functionalize(model, constraints=constraints)

    Source: PyTorch, ``torch/distributed/tensor/parallel/api.py``, with whole paths always, and
    errors where it warns or is silent.
    """
    axis = choose_axis(mesh, axis, tp_mesh_dim)
    _, params, state = functionalize(model, buffers=True)
    reader = _PlanCollector(model, axis)
    entries = _entries(plan)
    for pattern, style in entries.items():
        if not isinstance(style, P):
            for path in reader.matched(pattern):
                reader.read(pattern, style, path)
    reader.read_specs({key: spec for key, spec in entries.items() if isinstance(spec, P)})
    raise_all(SpecError, list(dict.fromkeys(reader.failures)))
    listed = [
        labelled_specs(leaves, reader.specs, "no style: replicated")
        for leaves in ((params, state) if buffers else (params,))
    ]
    return (listed[0], reader.constraints, *listed[1:])


def merge(plans: Mapping[str, StylePlan]) -> tuple[Specs, dict[str, Constraint]]:
    """Merge plans of submodules into one plan of the model.

    A parameter that one plan shards and another replicates is sharded. Constraints on one module
    apply in order.

    Args:
        plans: ``{path of the submodule: (specs, constraints)}``; "" is the model's own plan.

    Returns:
        ``(specs, constraints)`` of the model.

    Raises:
        SpecError: two plans that shard one parameter differently; a parameter that the model's own
            plan lacks; not a plan.

    >>> from torch.distributed.tensor.parallel import ColwiseParallel
    >>> block = nn.ModuleDict({"up": nn.Linear(2, 4, bias=False)})
    >>> model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    >>> root = from_parallelize_plan(model, {})
    >>> part = from_parallelize_plan(block, {"up": ColwiseParallel()})
    >>> specs, constraints = merge({"": root, "layers.0": part})
    >>> specs["layers.0.up.weight"], list(constraints)
    (P('tp'), ['layers.0.up'])
    """
    failures: list[str] = []
    specs: dict[str, P] = {}
    rows: dict[str, SpecRow] = {}
    constraints: dict[str, Constraint] = {}
    if not isinstance(plans, Mapping):
        raise SpecError(
            f"merge takes a dict {{prefix: (specs, constraints)}}, not {kind_of(plans)}."
        )
    root: Any = plans.get("")
    # A plan of the model that is written by hand may not list all parameters.
    known = list(root[0]) if _is_plan(root) and isinstance(root[0], Specs) else []
    for prefix, given in plans.items():
        if problem := _unmergeable(prefix, given, known):
            failures.append(problem)
            continue
        for key, spec in given[0].items():
            path = _join(prefix, key)
            if specs.get(path) and spec and specs[path] != spec:
                failures.append(
                    f"plans[{prefix!r}] gives {spec} for {path!r}, and one before it gives"
                    f" {specs[path]}."
                )
            if spec or path not in specs:
                specs[path] = spec
                row = getattr(given[0], "rows", {}).get(f"params[{key!r}]")
                if row is not None:
                    rows[f"params[{path!r}]"] = row
        for key, constraint in given[1].items():
            _add(constraints, _join(prefix, key), constraint, failures)
    raise_all(SpecError, failures)
    return Specs(specs, rows), constraints


def _unmergeable(prefix: object, given: Any, known: Sequence[str]) -> str | None:
    """The fault of an entry of ``merge``, as text; None if there is none."""
    if not isinstance(prefix, str):
        return f"{prefix!r} is no prefix; a prefix is the path of a module, '' for the model."
    if not _is_plan(given):
        return (
            f"plans[{prefix!r}] is {kind_of(given)}; it must be the pair that"
            " from_parallelize_plan gives."
        )
    paths = [_join(prefix, key) for key in given[0]]
    stranger = next((path for path in paths if path not in known), None) if known else None
    if stranger is None:
        return None
    return (
        f"plans[{prefix!r}] speaks of {stranger!r}, which is no path of plans[''], the model's"
        f" own; the nearest is {nearest(stranger, list(known), 1)[0]!r}. The key is the path of"
        " the module that the plan was made from."
    )


def _add(
    constraints: dict[str, Constraint], path: str, constraint: Constraint, failures: list[str]
) -> None:
    """Combine a constraint with an earlier one on the same module."""
    try:
        known = constraints.get(path)
        constraints[path] = constraint if known is None else combine(known, constraint)
    except SpecError as error:
        failures.append(f"module {path!r}: {error}")


def _is_plan(given: Any) -> bool:
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and all(isinstance(part, Mapping) for part in given)
    )


def _entries(plan: Any) -> Mapping[str, Any]:
    if isinstance(plan, Mapping):
        return plan
    if plan is None:
        raise SpecError(
            "The plan is None. Give a style or a dict {pattern: style}; {} replicates everything."
        )
    is_mesh = hasattr(plan, "mesh_dim_names") or hasattr(plan, "axis_names")
    if is_mesh or isinstance(plan, str | Sequence):
        hint = " A mesh is given as mesh=." if is_mesh else ""
        raise SpecError(
            f"The plan is {plan!r}, {kind_of(plan)}; it must be a style or a dict {{pattern:"
            f" style}}.{hint}"
        )
    return {"": plan}


@dataclass
class _PlanCollector:
    """Collects specs, constraints and failures entry by entry."""

    model: nn.Module
    axis: str
    specs: dict[str, LabelAndSpec] = field(default_factory=dict)
    styled: dict[str, str] = field(default_factory=dict)  # per parameter with a style, the pattern
    constraints: dict[str, Constraint] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        first: dict[int, str] = {}
        for path, module in self.modules.items():
            first.setdefault(id(module), path)
        self.first = {path: first[id(module)] for path, module in self.modules.items()}
        names = {id(p): path for path, p in self.model.named_parameters()}
        self.parameters = {
            path: names[id(p)] for path, p in self.model.named_parameters(remove_duplicate=False)
        }

    def matched(self, pattern: Any) -> list[str]:
        """The modules that a pattern matches, each once."""
        if not isinstance(pattern, str):
            self.failures.append(
                f"{pattern!r} is no pattern; a pattern is a str of path elements joined by '.'."
            )
            return []
        if pattern == "":
            return [""]
        tokens = pattern.split(".")
        if "" in tokens:
            whole = ".".join(t for t in tokens if t)
            hint = f" Try {whole!r}." if whole and self._find(whole.split(".")) else ""
            self.failures.append(f"pattern {pattern!r} has an empty element.{hint}")
            return []
        found = self._find(tokens)
        if not found:
            self.failures.append(
                f"pattern {pattern!r} matches no module; {self._nearest(pattern, tokens)}"
            )
        return list(dict.fromkeys(self.first[path] for path in found))

    def _find(self, tokens: Sequence[str]) -> list[str]:
        return [path for path in self.modules if matches(".".join(tokens), _elements(path))]

    def _nearest(self, pattern: str, tokens: Sequence[str]) -> str:
        """A hint: a pattern that matches and differs in one element, or the nearest paths."""
        paths = [path.split(".") for path in self.modules if path]
        if not paths:
            return "the model has none below it."
        best: tuple[float, str] | None = None
        for i, token in enumerate(tokens):
            others = [
                p
                for p in paths
                if len(p) == len(tokens)
                and all(j == i or fnmatchcase(p[j], t) for j, t in enumerate(tokens))
            ]
            for name in dict.fromkeys(p[i] for p in others):
                likeness = difflib.SequenceMatcher(None, token, name).ratio()
                if likeness > (best[0] if best else 0.4):
                    best = likeness, ".".join((*tokens[:i], name, *tokens[i + 1 :]))
        if best:
            n = len(self._find(best[1].split(".")))
            return f"did you mean {best[1]!r}, which matches {n}?"
        wider = dict.fromkeys(
            ".".join(["*" if e.isdigit() else e for e in p[: -len(tokens)]] + list(tokens))
            for p in paths
            if matches(".".join(tokens), tuple(p[-len(tokens) :]))
        )
        if wider:
            return f"did you mean {', '.join(map(repr, wider))}? A pattern is a whole path."
        holder, _, last = pattern.rpartition(".")
        for path in self._find(tokens[:-1]) if holder else ():
            if last in self.modules[path]._parameters:
                return (
                    f"a plan styles modules, and {last!r} is a parameter of {path!r}. Style"
                    f" {holder!r}."
                )
        close = nearest(pattern, [".".join(p) for p in paths])
        return f"the nearest are {', '.join(map(repr, close))}."

    def read(self, pattern: str, style: object, path: str) -> None:
        module = self.modules[path]
        where = f"{pattern!r}" if pattern == path else f"{pattern!r}, module {path!r}"
        try:
            part = read_style(style, path, module, self.axis)
        except SpecError as error:
            self.failures.append(f"plan[{where}]: {error}")
            return
        label = f"{pattern!r}: {getattr(style, '__name__', type(style).__name__)}"
        for name, spec in part.specs.items():
            own = self.parameters[_join(path, name)]
            by, known = self.specs.get(own, (label, spec))
            if known != spec:
                self._disagree(own, by, known, label, spec)
            else:
                self.specs[own] = label, spec
                self.styled[own] = f"{pattern}.**" if pattern else "**"
        parent = self.modules.get(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention) and module is parent.out_proj:
            return  # never called: its parent reads its weight
        for name, constraint in part.constraints.items():
            _add(self.constraints, self.first[_join(path, name)], constraint, self.failures)

    def read_specs(self, given: Mapping[str, P]) -> None:
        """Specs of parameters that the styles of modules do not give."""
        paths: dict[str, list[str]] = {}
        buffers = ((name, name) for name, _ in self.model.named_buffers())
        for path, own in (*self.parameters.items(), *buffers):
            paths.setdefault(own, []).append(path)
        answers = [tuple(_elements(path) for path in names) for names in paths.values()]
        of_modules = [
            pattern
            for pattern in given
            if isinstance(pattern, str)
            and self._find(pattern.split("."))
            and not any(matches(pattern, path) for names in answers for path in names)
        ]
        self.failures += [
            f"plan[{pattern!r}] is {given[pattern]}, but {pattern!r} matches modules, and a P is a"
            f" parameter's. Try {f'{pattern}.*'!r}, or give a style."
            for pattern in of_modules
        ]
        rest = {pattern: spec for pattern, spec in given.items() if pattern not in of_modules}
        found = match_patterns(rest, answers, list(paths), "the parameters", self.failures)
        for own, match in zip(paths, found, strict=True):
            if match is None:
                continue
            pattern, spec = match
            by, known = self.specs.get(own, ("", spec))
            if own in self.styled and known != spec:
                if narrows(self.styled[own], pattern):
                    continue
                if not narrows(pattern, self.styled[own]):
                    self._disagree(own, by, known, repr(pattern), spec)
            self.specs[own] = repr(pattern), spec

    def _disagree(self, parameter: str, by: str, known: P, label: str, spec: P) -> None:
        self.failures.append(
            f"{by} gives {known} for parameter {parameter!r}, and {label} gives {spec}. Give both"
            " the same, or narrow one."
        )


def _elements(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
