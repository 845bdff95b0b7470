"""torch.optim's classes as pure functions over trees of parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.errors import InputError, raise_all
from ftp.optim.base import (
    Optimizer,
    aligned,
    check_gradients,
    check_tensors,
    distinct_paths,
    matched_patterns,
)
from ftp.optim.by_owner import check_matrices
from ftp.optim.owned_muon import check_owned, owned_step
from ftp.optim.slots import Slots
from ftp.optim.torch_class import TorchClass
from ftp.sharding.pytree import flatten, leaf_names
from ftp.sharding.spec import P
from ftp.tensors.placement import Placement, placement, placement_of, remember


def from_torch(
    cls: type[torch.optim.Optimizer],
    *,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    owned: bool | Sequence[str] = False,
    **options: Any,
) -> Optimizer:
    """Make a torch.optim class an ``Optimizer`` of pure functions, by torch's own formulas.

    Args:
        cls: AdamW, Adam, SGD, RMSprop, Adagrad, NAdam, RAdam, Adadelta, Adamax, ASGD, Rprop, Muon,
            Adafactor, or your own class if its ``step`` is tensor code and all its state is in
            ``self.state[param]``.
        groups: ``{path pattern: options}``, patterns as in ``ftp.plan``: options of the parameters
            that a pattern matches, such as another rate or no weight decay.
        owned: for Muon in a sharded program: one rank orthogonalizes each whole matrix (see
            ``by_owner``), and everything else stays sharded like the parameters. Leaves of more
            than two dims are stacks of matrices. A list names the mesh axes whose ranks own
            matrices.
        options: of ``cls``. ``lr`` may be a schedule, a function of the number of updates done so
            far (see ``ftp.optim.schedules``). ``fused=True`` uses torch's fused kernels (AdamW,
            Adam, SGD and Adagrad), the fastest without compilation. ``foreach`` has no effect.

    Raises:
        InputError: LBFGS or SparseAdam; options that ``cls`` refuses; ``owned`` for another class
            than Muon; your own class with other state. From ``init`` and ``update``: a pattern that
            matches no parameter, or trees that do not fit.

    >>> opt = from_torch(torch.optim.AdamW, lr=0.1, groups={"*.bias": {"weight_decay": 0.0}})
    >>> params = {"up.weight": torch.ones(2, 3), "up.bias": torch.ones(2)}
    >>> state = opt.init(params)
    >>> sorted(state["up.weight"])
    ['exp_avg', 'exp_avg_sq', 'step']
    >>> grads = {"up.weight": torch.ones(2, 3), "up.bias": torch.ones(2)}
    >>> params, state = opt.update(grads, state, params)
    >>> params["up.bias"]
    tensor([0.9000, 0.9000])
    """
    _check_class(cls)
    for pattern, given in (groups or {}).items():
        if not isinstance(given, Mapping):
            raise InputError(
                f"groups has {given!r} for {pattern!r}; give a dict of options, as"
                " {'weight_decay': 0.0}."
            )
    if owned:
        check_owned(cls, owned)
    chosen = _TorchOptimizer(cls, options, groups or {}, owned)
    return Optimizer(chosen.init, chosen.update)


_REFUSED = {
    "LBFGS": "it evaluates the loss several times in one step, through a closure, and stops by"
    " values",
    "SparseAdam": "it takes sparse gradients, and a program's tensors are dense; Adam does the"
    " same on dense ones",
}


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise InputError(
            f"from_torch takes a torch.optim class, such as torch.optim.AdamW, not {cls!r}."
        )
    for kind in cls.__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _REFUSED:
            raise InputError(
                f"torch.optim.{kind.__name__} cannot be made pure: {_REFUSED[kind.__name__]}."
            )


class _TorchOptimizer:
    """A torch.optim class on trees of parameters, with options for groups of parameters."""

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        groups: Mapping[str, Mapping[str, Any]],
        owned: bool | Sequence[str],
    ):
        self.name, self.owned, self.patterns = cls.__name__, owned, list(groups)
        self.groups = [
            TorchClass(cls, {**options, **given}, bool(owned)) for given in ({}, *groups.values())
        ]

    def init(self, params: Any) -> Any:
        leaves, treedef = flatten(params)
        groups = self._groups(params)
        names = leaf_names(params, "params")
        check_tensors(leaves, names)
        if self.owned:
            check_matrices(leaves, names)
        first: dict[Any, Slots | None] = {}
        with torch.no_grad():
            slots = [
                self._first_of(leaf, group, first)
                for leaf, group in zip(leaves, groups, strict=True)
            ]
        cut = [name for name, found in zip(names, slots, strict=True) if found is None]
        if cut:
            raise InputError(
                f"{', '.join(cut)}: {self.name} cannot make its global state from shards of placed"
                " tensors. Make the state before ftp.device_put, on the meta device if need be, or"
                " with ftp.spmd(opt.init, mesh, (specs,), specs)(params)."
            )
        return treedef.unflatten(slots)

    def _first_of(self, param: Tensor, group: int, known: dict[Any, Slots | None]) -> Slots | None:
        """The first state of a parameter, or of its shard; None if it cannot be made from a shard.

        Args:
            known: states made so far; parameters of equal shape have equal states.
        """
        placed = placement_of(param)
        of = placed if placed is not None and placed.mesh.kind == "process" else None
        of_group = self.groups[group]
        key = group, param.shape, param.stride(), param.dtype, param.device, of
        if key in known and of_group.is_value_independent(param):
            first = known[key]
            found = first and Slots({k: v.clone() for k, v in first.items()}, first.like)
        elif of is None:
            found = known[key] = of_group.first_slots(param.detach())
        else:
            found = known[key] = _of_shard(param, of, of_group)
        if found is not None and of is not None:
            for slot, value in found.items():
                is_like = slot in found.like
                spec, shape = (of.spec, of.shape) if is_like else (P(), tuple(value.shape))
                remember(value, placement(of.mesh, spec, shape))
        return found

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(params)
        grad_leaves, given = aligned(treedef, grads, "grads"), aligned(treedef, state, "state")
        groups = self._groups(params)
        check_gradients(grad_leaves, leaves, leaf_names(params, "grads"))
        if self.owned and leaves:
            check_matrices(leaves, leaf_names(params, "params"))
        slots = self._slots(given, params, groups)
        if self.owned and leaves:
            new = owned_step(
                [self.groups[group].run for group in groups],
                grad_leaves,
                slots,
                leaves,
                distinct_paths(params),
                None if self.owned is True else self.owned,
            )
            state = _as(given, [s for _, s in new])
            return treedef.unflatten([x for x, _ in new]), treedef.unflatten(state)
        new_leaves, new_slots = list(leaves), list(slots)
        for group, of_group in enumerate(self.groups):
            mine = [i for i, g in enumerate(groups) if g == group]
            if not mine:
                continue
            own_grads, own_leaves = ([of[i] for i in mine] for of in (grad_leaves, leaves))
            new = of_group.updated(own_grads, [slots[i] for i in mine], own_leaves)
            for i, (leaf, kept) in zip(mine, new, strict=True):
                new_leaves[i], new_slots[i] = leaf, kept
        return treedef.unflatten(new_leaves), treedef.unflatten(_as(given, new_slots))

    def _slots(self, given: Sequence[Any], params: Any, groups: Sequence[int]) -> list[Slots]:
        """The state of each parameter; a dict of tensors, as torch's optimizers hold it, is one.

        Raises:
            InputError: a state of other names than the optimizer's.
        """
        found, failures = [], []
        leaves, paths = flatten(params)[0], leaf_names(params, "state")
        for slots, leaf, group, path in zip(given, leaves, groups, paths, strict=True):
            if not isinstance(slots, Slots):
                first = self.groups[group].first_slots(leaf.detach())
                has = (
                    sorted(map(str, slots)) if isinstance(slots, Mapping) else type(slots).__name__
                )
                if has != sorted(first):
                    failures.append(f"{path} is {has}; {self.name} keeps {sorted(first)}.")
                    continue
                slots = Slots(slots, first.like)
            found.append(slots)
        raise_all(InputError, failures)
        return found

    def _groups(self, params: Any) -> list[int]:
        """Per parameter the index of its group; group 0 is for parameters without a pattern."""
        own = matched_patterns({p: i for i, p in enumerate(self.patterns, 1)}, params)
        return [match[1] if match else 0 for match in own]


def _as(given: Sequence[Any], new: Sequence[Slots]) -> list[Any]:
    """New states in the containers of the given ones, which a step takes again."""
    return [
        slots if isinstance(was, Slots) else dict(slots)
        for was, slots in zip(given, new, strict=True)
    ]


def _of_shard(shard: Tensor, known: Placement, of_group: TorchClass) -> Slots | None:
    """The state of a shard of a placed parameter. None if the state depends on the parameter's
    values, or its shape does not follow from the shard's.
    """
    if not of_group.is_value_independent(shard):
        return None
    whole = of_group.first_slots(torch.empty(known.shape, dtype=shard.dtype, device="meta"))
    here = of_group.first_slots(shard.detach())
    if any(
        here[slot].shape != value.shape for slot, value in whole.items() if slot not in whole.like
    ):
        return None
    return Slots(dict(here), whole.like)
