"""Placements: the mesh, spec and global shape that ftp remembers for a tensor; donations."""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ftp.dataclass import dataclass
from ftp.errors import DonationError, PlacementError, raise_all
from ftp.sharding.mesh import Mesh
from ftp.sharding.process_group import releases
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True, eq=False)
class Placement:
    """The sharding of a tensor that ftp made. Equal placements are one object."""

    mesh: Mesh
    spec: PartitionSpec
    shape: tuple[int, ...]


_placements: weakref.WeakValueDictionary[Any, Placement] = weakref.WeakValueDictionary()


def placement(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> Placement:
    found = _placements.get((mesh, spec, shape))
    if found is None:
        found = _placements.setdefault((mesh, spec, shape), Placement(mesh, spec, shape))
    return found


@dataclass(frozen=True, eq=False)
class Donated:
    """The fact that a call may reuse a tensor's memory: ``by`` names the argument."""

    by: str


class _TensorRef(weakref.ref):
    """A weak reference that knows the id its tensor had."""

    __slots__ = ("key",)
    key: int


Fact = Placement | Donated

# Keyed by identity, with weak references. torch's WeakTensorKeyDictionary takes ten times as long.
_known: dict[int, tuple[_TensorRef, Fact, int | None]] = {}


def _forget(ref: _TensorRef) -> None:
    if (entry := _known.get(ref.key)) is not None and entry[0] is ref:
        del _known[ref.key]


class Returned:
    """Tensors that one call returned, remembered together: this takes a third of the time of
    remembering each.

    Attributes:
        facts: the fact of each tensor: the object that `returned` was given as long as nothing has
            changed, None once the tensors are remembered one by one.
        ids: of the tensors; one that has ended may have left its id to another.
        call: the call's number on its mesh.
    """

    __slots__ = ("_at", "call", "facts", "ids", "refs")

    def __init__(self, tensors: Sequence[torch.Tensor], facts: Sequence[Fact], call: int):
        self.call = call
        self.refs = list(map(weakref.ref, tensors))
        self.ids = set(map(id, tensors))
        self._at: dict[int, int] | None = None  # made when a tensor is first found
        self.facts: Sequence[Fact] | None = facts

    def find(self, tensor: torch.Tensor) -> int | None:
        if id(tensor) not in self.ids:
            return None
        if self._at is None:
            self._at = {id(x): i for i, ref in enumerate(self.refs) if (x := ref()) is not None}
        at = self._at.get(id(tensor))
        return at if at is not None and self.refs[at]() is tensor else None


_LATEST = 8  # last calls whose tensors are remembered together, for a few steps that take turns
_latest: tuple[Returned, ...] = ()
_noting = threading.Lock()


def returned(tensors: Sequence[torch.Tensor], facts: Sequence[Fact], call: int) -> Returned:
    """Remember a fact for each of these new tensors while it lives, and the number of the call that
    made them.
    """
    global _latest
    made = Returned(tensors, facts, call)
    with _noting:
        old = _latest[: 1 - _LATEST]
        _latest = (*_latest[1 - _LATEST :], made)
    _separate(old)
    return made


def _separate(old: Sequence[Returned]) -> None:
    """Remember one by one what was remembered together."""
    for one in old:
        known, one.facts = one.facts, None
        for ref, fact in zip(one.refs, known or (), strict=True):
            if (tensor := ref()) is not None:
                remember(tensor, fact, one.call)


def _release() -> None:
    global _latest
    with _noting:
        old, _latest = _latest, ()
    _separate(old)


releases.append(_release)


def remember(tensor: torch.Tensor, fact: Fact, call: int | None = None) -> torch.Tensor:
    """Remember ``fact`` while the tensor lives, and the number of the call that made it."""
    key = id(tensor)
    for latest in _latest:
        if (at := latest.find(tensor)) is not None and latest.facts is not None:
            latest.facts = [*latest.facts[:at], fact, *latest.facts[at + 1 :]]
            return tensor
    if (entry := _known.get(key)) is not None and entry[0]() is tensor:
        _known[key] = (entry[0], fact, entry[2])
        return tensor
    ref = _TensorRef(tensor, _forget)
    ref.key = key
    _known[key] = (ref, fact, call)
    return tensor


def placed(
    tensor: torch.Tensor, like: Any, mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]
) -> torch.Tensor:
    """A new ``tensor`` as the shard of a tensor of global ``shape``: its placement is remembered,
    and it is a Parameter, or a leaf that requires a gradient, if ``like`` is.
    """
    tensor = leaf_like(tensor, like) if isinstance(like, torch.Tensor) else tensor
    return remember(tensor, placement(mesh, spec, shape))


def leaf_like(tensor: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """A new tensor that requires a gradient if ``old`` does, and is a Parameter if ``old`` is."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(tensor, old.requires_grad)
    return tensor.requires_grad_() if old.requires_grad else tensor


def known_of(tensor: torch.Tensor) -> Fact | None:
    key = id(tensor)
    entry = _known.get(key)
    if entry is not None and entry[0]() is tensor:
        return entry[1]
    for latest in _latest:
        facts = latest.facts if key in latest.ids else None  # a step asks for each of a batch
        if facts is not None and (at := latest.find(tensor)) is not None:
            return facts[at]
    return None


def call_of(tensor: torch.Tensor) -> int | None:
    """The number, on its mesh, of the step's call that made a tensor; None for other tensors."""
    entry = _known.get(id(tensor))
    if entry is not None and entry[0]() is tensor:
        return entry[2]
    calls = (one.call for one in _latest if one.find(tensor) is not None and one.facts is not None)
    return next(calls, None)


def placement_of(leaf: Any) -> Placement | None:
    fact = known_of(leaf)
    return fact if isinstance(fact, Placement) else None


def check_alive(leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Raises for tensors that were donated to an earlier call."""
    facts = [known_of(leaf) for leaf in leaves]
    failures = [
        f"{name} was donated, as {fact.by} of an earlier call, which may have reused its memory."
        " Use what that call returned, or do not donate it."
        for fact, name in zip(facts, names, strict=True)
        if isinstance(fact, Donated)
    ]
    raise_all(DonationError, failures)


def check_placed(
    leaves: Sequence[Any], specs: Sequence[PartitionSpec], names: Sequence[str], mesh: Mesh
) -> None:
    """Raises for tensors placed on another mesh, or with another spec, whose axes the mesh has."""
    failures = []
    for leaf, spec, name in zip(leaves, specs, names, strict=True):
        known = placement_of(leaf)
        if known is None:
            continue
        if known.mesh != mesh:
            failures.append(
                f"{name} is placed on the {known.mesh.kind} mesh {known.mesh}, not on the"
                f" {mesh.kind} mesh {mesh}."
                " Take it off with ftp.device_get and place it with ftp.device_put."
            )
        elif known.spec != spec and mesh.axes.keys() >= {*spec.axes, *spec.unreduced}:
            failures.append(
                f"{name} is placed with spec {known.spec}, but {spec} is asked for."
                f" Reshard it with ftp.reshard(tree, mesh, {known.spec}, {spec})."
            )
    raise_all(PlacementError, failures)
