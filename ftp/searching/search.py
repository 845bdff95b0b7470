"""``search``: specs for parameters, and constraints, found by the planner's own networks with
the parameters' layouts left open.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ftp.errors import InputError, PlanningError
from ftp.paused_gc import collection_paused
from ftp.planning.from_fx import constraints
from ftp.planning.machine import GivenHardware, hardware_on
from ftp.report.lowered import Lowered
from ftp.searching.axis_networks import planned_seconds
from ftp.searching.candidates import Candidate, Searching, Spare
from ftp.searching.compare import alternatives, bound, choice_of, common_name, gaps, paid
from ftp.searching.explore import explore, fit, improved
from ftp.searching.marks import constraints_along
from ftp.searching.result import Found, Rival
from ftp.sharding.arguments import argument_names, argument_specs, check_signature
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import check_specs, flatten, kind_of, leaf_names
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.placement import placement_of

LOWERED = 6  # plans at most that are lowered in full, until one fits


def search(
    loss_fn: Callable[..., Any],
    params: Any,
    mesh: AnyMesh | None,
    batch_specs: Any,
    *batch: Any,
    memory: float | None = None,
    hardware: GivenHardware = None,
    data_axes: Sequence[str] | None = None,
) -> Found:
    """Specs for the parameters of a loss, by least estimated time within ``memory`` bytes a rank.

    The parameters' layouts are open variables of the network that plans programs, one mesh axis
    after another, in every order of the axes. Parameters with as many dims whose paths differ only
    in numbers get one spec; on axes that do not cut the batch, the values that norms scale stay
    whole. Each byte of memory has a price in seconds, raised until the program fits. The outputs of
    a functionalized model's blocks (``layers.3``) may be cut too, as in sequence parallelism,
    unless the program constrains them itself.

    Args:
        loss_fn: ``loss_fn(params, *batch)``, a scalar, for one device.
        params: the parameters, real or meta.
        batch_specs, batch: specs of the batch arguments, as in ``shard``, and the arguments, real
            or meta. Or, in place of the specs, the batch itself, placed by ``device_put`` (possibly
            on meta), which has shapes and specs.
        memory: bytes that ``lowered.memory`` may not exceed; None sets no limit.
        hardware: as in ``shard``: the hardware that plans are made for, such as ``"h100"``.
        data_axes: as in ``shard``; parameters cut on these are gathered where they are used.

    Returns:
        A ``Found``: ``shard(found.loss_fn, mesh, found.specs(params), batch_specs=...,
        hardware=found.hardware, bucket=found.bucket)`` is the program; ``print(found)`` shows the
        costs of other plans.
        ``found.bucket`` is False only if nothing tried fits with buckets, which hold copies.

    Raises:
        PlanningError: nothing found fits in ``memory``. InputError: specs without the shapes
            of a batch; a ``memory`` that is no number.

    >>> import ftp
    >>> meta = torch.device("meta")
    >>> params = {
    ...     "up": torch.empty(1024, 4096, device=meta), "down": torch.empty(4096, 1024, device=meta)
    ... }
    >>> def loss_fn(p, x):
    ...     return torch.relu(x @ p["up"] @ p["down"]).sum()
    >>> mesh, x = ftp.AbstractMesh((4,), ("tp",)), torch.empty(64, 1024, device=meta)
    >>> found = search(loss_fn, params, mesh, ftp.P(), x)
    >>> found.patterns
    {'down': P('tp', None), 'up': P(None, 'tp')}

    Source: Everett (1963), Generalized Lagrange multiplier method.
    """
    m = resolve(mesh)
    if memory is not None and not isinstance(memory, Real):
        raise InputError(
            f"memory is {memory!r}; it must be a number of bytes a rank, such as 80 * 2**30, or"
            " None for no limit."
        )
    if not batch:
        batch_specs, batch = _placed_batch(batch_specs, len(argument_names(loss_fn)) - 1)
    check_signature(loss_fn, (params, *batch), "the search, params and each of the batch")
    given = argument_specs(batch_specs, batch, argument_names(loss_fn)[1:], "batch_specs")
    check_specs(given, flatten(batch)[0], leaf_names(batch, "batch"), m.axes)
    on_data = (
        tuple(dict.fromkeys(axis for spec in given for axis in spec.axes))
        if data_axes is None
        else tuple(data_axes)
    )
    task = Searching(
        loss_fn,
        _meta(params),
        _meta(batch),
        batch_specs,
        given,
        m,
        on_data,
        hardware_on(m, hardware),
        None if memory is None else int(memory),
    )
    explore(task)
    for _ in range(LOWERED):
        candidates = task.promising() or task.spared()
        if not candidates and task.refused:
            fit(task)
            candidates = task.fitting()
        if not candidates:
            break
        best = improved(task, candidates[0])
        if (found := _lowered(task, best)) is not None:
            return found
    least = min(c.estimate.nbytes for c in task.tried.values())
    raise PlanningError(
        f"No plan found fits in {memory:,} bytes a rank; the smallest takes {least:,}. Cut the"
        " batch over more"
        " ranks, recompute blocks (ftp.remat), or give more ranks."
    )


def _placed_batch(batch: Any, count: int) -> tuple[Any, tuple[Any, ...]]:
    """Specs and arguments of a batch of placed tensors, for a loss that takes ``count`` of them."""
    arguments = batch if count != 1 and isinstance(batch, tuple) else (batch,)
    leaves, treedef = flatten(arguments)
    places = [placement_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
    wrong = [
        f"{name} is {leaf if isinstance(leaf, PartitionSpec) else kind_of(leaf)}"
        for leaf, place, name in zip(leaves, places, leaf_names(arguments, "batch"), strict=True)
        if place is None and (isinstance(leaf, Tensor | PartitionSpec))
    ]
    if wrong or not any(places):
        raise InputError(
            "search needs the shapes of a batch beside its specs, and"
            f" {wrong[0] if wrong else 'there is no tensor'}."
            " Give the arguments after the specs, search(loss_fn, params, mesh, P('dp'), batch),"
            " or in their place a batch that knows its"
            " specs: ftp.device_put(batch, mesh, P('dp')), where meta tensors will do."
        )
    return treedef.unflatten(
        [PartitionSpec() if place is None else place.spec for place in places]
    ), arguments


def _meta(tree: Any) -> Any:
    leaves, treedef = flatten(tree)
    return treedef.unflatten(
        [
            torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
            for x in leaves
        ]
    )


@collection_paused()
def _lowered(task: Searching, best: Candidate) -> Found | None:
    """The candidate, lowered in full; None if it does not fit after all: estimates of repeated
    layers leave out the copies in buckets.
    """
    spare = task.spare
    if spare is not None and not task.bucket and spare.candidate.key == best.key:
        program = spare.program
    else:
        program = task.whole(best.patterns, best.along, task.bucket)
    if task.memory is not None and (nbytes := int(program.memory)) > task.memory:
        task.refuse(best, nbytes)
        if task.bucket and spare is None:
            plain = Lowered(program._program.with_options(bucket=False))
            if int(plain.memory) <= task.memory:
                task.spare = Spare(best, plain, float(program.cost()) / best.estimate.seconds)
        return None
    if task.bucket and spare is not None and spare.program.cost() < program.cost():
        return _lowered(task, task.spared()[0])
    choice = choice_of(task, best.patterns)
    solved = best.solved or task.solve(best.along, best.order, best.price, choice)
    price = paid(task, best, planned_seconds(solved, task.hardware))
    if price != best.price:
        solved = task.solve(best.along, best.order, price, choice)
    best = replace(best, price=price)
    pins = [f"{pin} at {node.source}" for node, pin in constraints(task.net.graph).items()]
    return Found(
        patterns=best.patterns,
        constraints=constraints_along(best.along, task.returned),
        pins=pins,
        lowered=program,
        loss_fn=task.loss(best.along),
        bucket=task.bucket,
        hardware=task.hardware,
        limit=task.memory,
        price=best.price.seconds,
        rivals=_rivals(task),
        planned=planned_seconds(solved, task.hardware),
        _gaps=partial(gaps, task, best, solved),
        _bound=partial(bound, task, best.price),
        _alternatives=partial(alternatives, task, best, solved),
    )


def _rivals(task: Searching) -> dict[str, Rival]:
    """The best plan of each kind that was tried: the fastest that fits, else that with least
    memory.
    """
    found: dict[str, Rival] = {}
    for one in sorted(
        task.tried.values(),
        key=lambda c: (not task.fits(c), c.estimate.seconds if task.fits(c) else c.estimate.nbytes),
    ):
        seconds, nbytes = one.estimate.seconds, one.estimate.nbytes
        found.setdefault(
            common_name(task, one), Rival(seconds, nbytes, task.fits(one), dict(one.patterns))
        )
    return found
