"""``Pipeline``: the axis that holds the stages, their schedule, and the stage of each parameter."""

import math
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from ftp.dataclass import dataclass
from ftp.errors import InputError, MeshError, ScheduleError, SpecError, join_failures
from ftp.pipeline.schedule import SCHEDULES, Action, Actions, check_work, simulate
from ftp.pipeline.stacked import is_stack
from ftp.sharding.mesh import AnyMesh, Mesh, resolve
from ftp.sharding.patterns import dotted, match_patterns
from ftp.sharding.pytree import broadcast_specs, flatten, leaf_names, leaf_paths, tied_paths
from ftp.sharding.spec import P, PartitionSpec, Stage, staged


@dataclass(frozen=True)
class Pipeline:
    """Pipeline parallelism over one mesh axis: stages of the model on its ranks, and the order in
    which they run microbatches.

    Args:
        axis: the mesh axis. Stage ``s`` is on its rank ``s % n``, for ``n`` ranks.
        microbatches: the number of microbatches of a step. Microbatch ``i`` is rows ``i``, ``i +
            microbatches``, ... of every batch tensor; loss and gradients are their means, as
            ``ftp.optim.accumulate`` has it.
        schedule: "1f1b", "gpipe", "interleaved", "zero_bubble"; or a list of actions for each rank
            of the axis.
        stages: per stage the patterns of its parameters, over paths as ``ftp.plan`` takes them;
            None cuts the parameters, in the order of the tree, into stages of equal cost, between
            layers.
        chunks: stages a rank; "gpipe", "interleaved" and lists of actions take more than one.

    Raises:
        ScheduleError: an unknown schedule, or one that does not take these microbatches or chunks.
        SpecError: ``stages`` that are no lists of patterns.

    >>> import ftp, torch
    >>> mesh = ftp.simulated_mesh((2,), ("pp",))
    >>> params = {"layers": [{"w": torch.ones(4, 4)} for _ in range(2)]}
    >>> pipe = Pipeline("pp", microbatches=2)
    >>> specs = pipe.place(params, ftp.P(), mesh)
    >>> specs["layers"][1]["w"]
    P(stage('pp', 1))
    >>> def loss_fn(params, x):
    ...     for layer in params["layers"]:
    ...         x = x @ layer["w"]
    ...     return x.mean()
    >>> step = ftp.shard(loss_fn, mesh, specs, pipeline=pipe)
    >>> loss, grads = step(params, torch.ones(4, 4))
    >>> float(loss)
    16.0

    Source: Huang et al., "GPipe" (2018); Narayanan et al. (2021) for "1f1b" and "interleaved"; Qi
    et al. (2023) for "zero_bubble".
    """

    axis: str
    microbatches: int
    schedule: str | Actions = "1f1b"
    stages: Sequence[Sequence[str]] | None = None
    chunks: int = 1

    def __post_init__(self):
        if not isinstance(self.axis, str):
            raise InputError(f"axis is {self.axis!r}; it must be the name of a mesh axis.")
        for name, count in (("microbatches", self.microbatches), ("chunks", self.chunks)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ScheduleError(f"{name} is {count!r}; it must be a number, at least 1.")
        if isinstance(self.schedule, str):
            if self.schedule not in SCHEDULES:
                raise ScheduleError(
                    f"schedule is {self.schedule!r}. Give one of"
                    f" {', '.join(map(repr, sorted(SCHEDULES)))}, or a list of ftp.Action for each"
                    " rank."
                )
            if self.chunks > 1 and self.schedule not in ("gpipe", "interleaved"):
                raise ScheduleError(
                    f"schedule={self.schedule!r} runs one stage a rank, not chunks={self.chunks}."
                    ' Give schedule="interleaved".'
                )
        else:
            _as_actions(self.schedule)
        if self.stages is not None and not _are_patterns(self.stages):
            raise SpecError(
                f"stages is {self.stages!r}; it must be a list of patterns for each stage, as"
                " [['emb', 'layers.0.**'], ['layers.1.**', 'head']]."
            )

    def mesh_of(self, mesh: AnyMesh | None) -> Mesh:
        """The mesh as a value.

        Raises:
            MeshError: a mesh without the axis.
        """
        found = resolve(mesh)
        if self.axis not in found.axes:
            raise MeshError(
                f"The pipeline is over axis {self.axis!r}, but the mesh is {found}. Name one of its"
                " axes, or make a mesh with that axis."
            )
        return found

    def count(self, mesh: Mesh) -> int:
        """The number of stages."""
        return mesh.axes[self.axis] * self.chunks

    def check_stacks(self, ranks: int) -> None:
        """Raise if the axis cannot cut stacks of layers.

        Raises:
            SpecError: a rank with several stages, whose layers do not follow each other.
        """
        if self.chunks > 1:
            raise SpecError(
                f"A stack of layers of spec P({self.axis!r}) gives each of {ranks} ranks layers"
                f" that follow each other, and chunks={self.chunks} gives it {self.chunks} stages"
                " that do not. Give chunks=1, or a parameter for each layer."
            )

    def actions(self, ranks: int) -> list[list[Action]]:
        """Each rank's actions, in order; they do all work once, and end.

        Raises:
            ScheduleError: lists that miss or repeat work, or on which ranks wait for ever.

        >>> [" ".join(map(str, own)) for own in Pipeline("pp", microbatches=2).actions(2)]
        ['F0.0 F0.1 B0.0 B0.1', 'F1.0 B1.0 F1.1 B1.1']
        """
        if isinstance(self.schedule, str):
            made = SCHEDULES[self.schedule](ranks, self.microbatches, self.chunks)
        else:
            made = _as_actions(self.schedule)
            if len(made) != ranks:
                raise ScheduleError(
                    f"The schedule has lists for {len(made)} ranks, but axis {self.axis!r} has"
                    f" {ranks}."
                )
        check_work(made, ranks * self.chunks, self.microbatches)
        simulate(made, ranks * self.chunks, lambda action: 1.0)
        return made

    def place(self, params: Any, specs: Any = None, mesh: AnyMesh | None = None) -> Any:
        """The specs with a stage for every parameter: a rank of the axis holds the parameters of
        its stages, and empty tensors in place of the others.

        A parameter that several stages read, as an embedding that is also the head, belongs to the
        first of them; a step sends it to the others, and their gradients back, once.

        Args:
            params: tree of parameters (real, fake or meta), of global shapes. Where ``stages`` is
                None their order says which layer comes first: that of a dict's keys as they were
                inserted.
            specs: a spec tree for the other axes, a prefix of one, or one ``P``. A stack of layers
                that ``ftp.scan`` runs has the pipeline's axis alone on dim 0, ``P("pp", None,
                "tp")``: each rank holds some of its layers. Of the other parameters those before
                the first stack are then on the first stage and all else on the last one, where
                ``stages`` does not say otherwise.
            mesh: default that of ``ftp.use_mesh``.

        Returns:
            The spec tree, for ``shard(..., pipeline=)``, ``device_put``, ``device_get``, ``save``,
            ``load``, ``reshard`` and ``init_params``. A 0-d parameter is on every rank.

        Raises:
            MeshError: a mesh without the axis.
            SpecError: specs that use the axis; ``stages`` that match nothing, leave a parameter out
                or disagree; fewer layers than stages.
        """
        m = self.mesh_of(mesh)
        leaves, treedef = flatten(params)
        given = broadcast_specs(P() if specs is None else specs, params, "specs")
        names, paths = leaf_names(params, "params"), leaf_paths(params)
        stacks = [is_stack(spec, self.axis) for spec in given]
        if any(stacks):
            self.check_stacks(m.axes[self.axis])
        taken = [
            f"{name} has spec {spec}, which cuts a dim over {self.axis!r}, the axis of the"
            " pipeline. Leave it out; place() gives the stage. A stack of layers, that ftp.scan"
            f" runs, has {self.axis!r} alone on dim 0."
            for name, spec, cut in zip(names, given, stacks, strict=True)
            if self.axis in spec.axes and not cut
        ]
        taken += [
            f"{name} has spec {spec} and shape {tuple(leaf.shape)}: a stack of {leaf.shape[0]}"
            f" layers for {self.count(m)} stages. Give fewer ranks."
            for leaf, name, spec, cut in zip(leaves, names, given, stacks, strict=True)
            if cut and leaf.shape[0] < self.count(m)
        ]
        if taken:
            raise SpecError(join_failures(taken))
        stages = self.count(m)
        single = [i for i, cut in enumerate(stacks) if not cut]
        if self.stages is not None:
            of_single = [paths[i] for i in single], [names[i] for i in single]
            found = dict(
                zip(single, _by_pattern(self.stages, *of_single, stages, any(stacks)), strict=True)
            )
        elif any(stacks):
            found = _around_stacks(params, stacks, stages)
        else:
            found = dict(enumerate(_by_cost(params, leaves, stages)))
        return treedef.unflatten(
            spec if cut else _at_stage(spec, self.axis, found[i], getattr(leaf, "ndim", 0))
            for i, (leaf, spec, cut) in enumerate(zip(leaves, given, stacks, strict=True))
        )

    def stages_of(
        self, specs: Sequence[PartitionSpec], names: Sequence[str], ranks: int
    ) -> list[int | None]:
        """The stage of each parameter; None of one that is on every rank.

        Raises:
            SpecError: specs that cut a dim over the axis, or give a stage of another one; specs
                for more or fewer stages than ``ranks`` have.
        """
        count, failures = ranks * self.chunks, []
        entries = list(map(staged, specs))
        found = [entry and entry.stage for entry in entries]
        for spec, name, entry in zip(specs, names, entries, strict=True):
            if (self.axis in spec.axes) if entry is None else entry.axis != self.axis:
                failures.append(
                    f"{name} has spec {spec}, which gives no stage of the pipeline over"
                    f" {self.axis!r}. Make the specs with pipeline.place(params, specs, mesh)."
                )
            elif entry is not None and entry.stage >= count:
                failures.append(
                    f"{name} has spec {spec}, but the pipeline has {count} stages on {ranks} ranks"
                    f" of {self.axis!r}: the spec is of another mesh or pipeline. Make the specs"
                    " with pipeline.place(params, specs, mesh)."
                )
        idle = [k for k in range(count) if k not in found]
        if idle and not failures and any(stage is not None for stage in found):
            failures.append(
                f"No parameter is at stage {idle[0]} of the pipeline's {count} stages on {ranks}"
                f" ranks of {self.axis!r}: the specs are of another mesh or pipeline. Make them"
                " with pipeline.place(params, specs, mesh)."
            )
        if failures:
            raise SpecError(join_failures(failures))
        return found


def _are_patterns(stages: Any) -> bool:
    return isinstance(stages, list | tuple) and all(
        isinstance(own, list | tuple) and all(isinstance(pattern, str) for pattern in own)
        for own in stages
    )


def _as_actions(schedule: Any) -> list[list[Action]]:
    try:
        return [[Action(*action) for action in own] for own in schedule]
    except TypeError:
        raise ScheduleError(
            f"schedule is {schedule!r}; it must be a name, or for each rank a list of"
            " ftp.Action(kind, stage, microbatch)."
        ) from None


def _at_stage(spec: PartitionSpec, axis: str, stage: int, ndim: int) -> PartitionSpec:
    if not ndim:
        return spec
    spec = spec.at_rank(ndim)
    return P((Stage(axis, stage=stage), *spec.parts(0)), *spec.entries[1:])


def _by_pattern(
    stages: Sequence[Sequence[str]],
    paths: Sequence[Any],
    names: Sequence[str],
    count: int,
    may_be_empty: bool,
) -> list[int]:
    if len(stages) != count:
        raise SpecError(
            f"stages has {len(stages)} lists of patterns; the pipeline has {count} stages."
        )
    failures: list[str] = []
    patterns: dict[str, int] = {}
    for stage, own in enumerate(stages):
        for pattern in own:
            if patterns.setdefault(pattern, stage) != stage:
                failures.append(
                    f"stages gives {pattern!r} to stage {patterns[pattern]} and to stage {stage}."
                )
    found = match_patterns(patterns, [(path,) for path in paths], names, "the parameters", failures)
    failures += [
        f"{name} matches no pattern of stages."
        for name, m in zip(names, found, strict=True)
        if not m
    ]
    held = {match[1] for match in found if match}
    if not may_be_empty:
        failures += [f"stages[{k}] is given no parameter." for k in range(count) if k not in held]
    if failures:
        raise SpecError(join_failures(failures))
    return [match[1] for match in found if match]


def _around_stacks(params: Any, stacks: Sequence[bool], count: int) -> dict[int, int]:
    """Put parameters before the first stack on the first stage, and all others on the last one."""
    order = _in_order(params)
    first = next(at for at, i in enumerate(order) if stacks[i])
    return {i: 0 if at < first else count - 1 for at, i in enumerate(order) if not stacks[i]}


def _by_cost(params: Any, leaves: Sequence[Any], count: int) -> list[int]:
    """Stages of equal cost, cut between layers.

    A layer's cost is the number of its elements: for each token a matmul does two flops an element.
    Tables before the first numbered layer are looked up, and cost nothing there; one that is the
    head too costs what the head does, in the last stage.
    """
    paths = leaf_paths(params)
    by_layer = groupby(_in_order(params), key=lambda i: _layer(paths[i]))
    groups = [(layer, list(own)) for layer, own in by_layer]
    numbered = [bool(layer) for layer, _ in groups]
    first = numbered.index(True) if any(numbered) else 0
    layers = sum(numbered)
    if layers < count:
        raise SpecError(
            f"The parameters have {layers} numbered layers for {count} stages. Give fewer ranks or"
            " chunks, or say with stages=[[pattern, ...], ...] what each stage holds."
        )
    costs = [
        0 if at < first else sum(math.prod(leaves[i].shape) for i in own)
        for at, (_, own) in enumerate(groups)
    ]
    # Parameters before the first layer and after the last one join the adjacent layer's stage.
    ends = [at for at, is_layer in enumerate(numbered) if is_layer]
    spans = [
        (0 if k == 0 else at, len(groups) if k == layers - 1 else ends[k + 1])
        for k, at in enumerate(ends)
    ]
    of_layers = [sum(costs[a:b]) for a, b in spans]
    tables = {i for _, own in groups[:first] for i in own}
    of_layers[-1] += sum(math.prod(leaves[i].shape) for i in _tied_heads(leaves, paths, tables))
    bounds = _even(of_layers, count)
    stage_of = [0] * len(leaves)
    for stage, (a, b) in enumerate(bounds):
        for k in range(a, b):
            for _, own in groups[slice(*spans[k])]:
                for i in own:
                    stage_of[i] = stage
    return stage_of


def _tied_heads(
    leaves: Sequence[Any], paths: Sequence[tuple[str, ...]], tables: Collection[int]
) -> list[int]:
    """The embedding tables that are also the head: tied weights with a path outside of layers and
    tables.

    "transformer.wte.weight" is, by its other path "lm_head.weight"; "shared.weight" is not, if
    the other ones are "encoder.embed_tokens.weight" and "decoder.embed_tokens.weight".
    """
    known = [tied_paths(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
    elements = zip(*(path for own in known for path in own), strict=False)
    depth = next((at for at, found in enumerate(elements) if len(set(found)) > 1), 0)
    taken = {path[: depth + 1] for i, path in enumerate(paths) if _layer(path) or i in tables}
    return [i for i in sorted(tables) if any(p[: depth + 1] not in taken for p in known[i])]


def _in_order(params: Any) -> list[int]:
    """The leaves in the order of their containers: of a dict as it was filled, not sorted."""
    leaves, treedef = flatten(params)
    numbers = treedef.unflatten(range(len(leaves)))

    def walk(given: Any, numbered: Any) -> list[int]:
        if isinstance(given, dict):
            return [i for key in given for i in walk(given[key], numbered[key])]
        if type(given) in (list, tuple):
            return [i for a, b in zip(given, numbered, strict=True) for i in walk(a, b)]
        return flatten(numbered)[0]

    return walk(params, numbers)


def _layer(path: Sequence[str]) -> str:
    """The numbered layer of a path, the outermost; "" outside of layers."""
    at = next((i for i, element in enumerate(path) if element.isdecimal()), None)
    return "" if at is None else dotted(tuple(path[: at + 1]))


def _even(costs: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Bounds of ``count`` runs, none empty, whose largest cost is least.

    >>> _even([1, 1, 1, 3], 2)
    [(0, 3), (3, 4)]
    """
    n = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = {(0, 0): (0.0, 0)}  # (runs, layers): the largest cost, and where the last run begins
    for runs in range(1, count + 1):
        for end in range(runs, n + 1):
            options = [
                (max(best[runs - 1, start][0], total[end] - total[start]), -start)
                for start in range(runs - 1, end)
                if (runs - 1, start) in best
            ]
            cost, start = min(options)
            best[runs, end] = cost, -start
    bounds, end = [], n
    for runs in range(count, 0, -1):
        start = best[runs, end][1]
        bounds.append((start, end))
        end = start
    return bounds[::-1]
