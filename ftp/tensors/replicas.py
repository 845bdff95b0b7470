"""``check_replicas``: digests of replicated tensors, compared by a few small all-reduces. If some
differ, ranks exchange more to find which.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ftp.distributed.calls import Calls, calls
from ftp.errors import ReplicaError, join_failures
from ftp.sharding.mesh import AnyMesh, Mesh, mesh_device, resolve
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.global_shapes import own
from ftp.tensors.sharded_tree import flatten_with_specs

_CHUNK = 1 << 16  # elements, so that a chunk's integers stay in a core's cache
_ONE_COPY = "Give the ranks that share a value one copy: ftp.device_put(tree, mesh, specs, src=0)."
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(
    tree: Any, mesh: AnyMesh | None = None, specs: Any = None, *, step: int | None = None
) -> None:
    """Raise on every rank if replicas differ: copies of a value that ranks should hold equal.

    Ranks compare a 64-bit digest of each shard along the axes that do not cut the tensor. Each
    shard is read once, and 16 bytes per tensor are sent along each axis. All ranks of the mesh call
    it together; without processes there is nothing to compare.

    Args:
        tree: this rank's shards; leaves that are no tensors are ignored.
        mesh: default that of ``ftp.use_mesh``.
        specs: a spec tree, a prefix of one, or one ``P`` for all; default ``P()``.
        step: the number of the step, for the message.

    Raises:
        ReplicaError: each leaf that differs, the ranks whose copy is not that of most, the step.
        SpecError: specs that do not fit the tree.

    >>> import ftp
    >>> check_replicas({"w": torch.ones(4)}, ftp.simulated_mesh((2,), ("dp",)), step=100)
    """
    m = resolve(mesh)
    given = flatten_with_specs(tree, m, specs)
    if m.kind != "process" or m.size() == 1:
        return
    record = calls(m)
    listed = ", ".join(map(str, given.specs))
    with record.running(f"check_replicas of {len(given.leaves)} leaves of specs {listed}"):
        when = "" if step is None else f" at step {step}"
        compare_copies(given.values, given.specs, given.names, m, record, when)


def compare_copies(
    leaves: Sequence[Any],
    specs: Sequence[PartitionSpec],
    names: Sequence[str],
    mesh: Mesh,
    record: Calls,
    when: str = "",
) -> None:
    """`check_replicas` of leaves, within a call that all ranks have begun."""
    chosen = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.device.type != "meta"
    ]
    if mesh.kind != "process" or mesh.size() == 1 or dist.get_backend() == "fake" or not chosen:
        return
    assert mesh.torch is not None
    # Some tensors may be on the host, which NCCL does not take.
    mine = torch.stack([digest(leaves[i]).to(mesh_device(mesh)) for i in chosen])
    differs = torch.zeros(1, dtype=torch.int64, device=mine.device)
    for axis in mesh.axis_names:
        shared = [k for k, i in enumerate(chosen) if axis not in own(specs[i])]
        if shared and mesh.axes[axis] > 1:
            # If all ranks agree, the maxima of a number and of its complement are complements.
            both = torch.stack([mine[shared], ~mine[shared]])
            dist.all_reduce(both, dist.ReduceOp.MAX, mesh.torch.get_group(axis))
            differs |= (both[0] != ~both[1]).any()
    for axis in mesh.axis_names:
        dist.all_reduce(differs, dist.ReduceOp.MAX, mesh.torch.get_group(axis))
    if not differs.item():
        return
    everyone = [json.loads(text) for text in record.exchange("digests", json.dumps(mine.tolist()))]
    found = dict(zip(mesh.ranks, everyone, strict=True))
    failures = []
    for k, i in enumerate(chosen):
        failures += _odd_ranks(
            {rank: d[k] for rank, d in found.items()}, specs[i], names[i], mesh, when
        )
    _raise(failures, _ONE_COPY)


def check_samples(
    everyone: Sequence[Sequence[Any]],
    specs: Sequence[PartitionSpec],
    names: Sequence[str],
    mesh: Mesh,
    when: str,
    mend: str = "Where ranks draw a value, seed them alike: torch.manual_seed.",
) -> None:
    """Raise on every rank if samples of replicas are far apart, as those of weights that each rank
    drew from its own seed. Copies that differ by rounding pass.

    Args:
        everyone: `describe_held` of each leaf, for each rank.
        mend: what else to do.
    """
    failures = []
    for i, (spec, name) in enumerate(zip(specs, names, strict=True)):
        samples = [leaves[i].get("sample") for leaves in everyone if isinstance(leaves[i], dict)]
        if len(samples) == mesh.size() and None not in samples and any(kinds := _kinds(samples)):
            found = dict(zip(mesh.ranks, kinds, strict=True))
            failures += _odd_ranks(found, spec, name, mesh, when)
    if failures:
        _raise(failures, _ONE_COPY, mend)


def _kinds(samples: Sequence[Sequence[float]]) -> list[int]:
    """A number for each sample: the first one that is alike."""
    firsts: list[Sequence[float]] = []
    kinds = []
    for x in samples:
        at = next((k for k, y in enumerate(firsts) if x == y or _are_alike(y, x)), len(firsts))
        firsts += [x] * (at == len(firsts))
        kinds.append(at)
    return kinds


def _are_alike(x: Sequence[float], y: Sequence[float]) -> bool:
    scale = max((abs(v) for v in (*x, *y) if math.isfinite(v)), default=0.0)
    return len(x) == len(y) and all(
        a == b or a != a or b != b or abs(a - b) <= scale / 20 for a, b in zip(x, y, strict=True)
    )


def _raise(failures: Sequence[str], *mends: str) -> NoReturn:
    raise ReplicaError(join_failures([*failures, *mends]))


def digest(x: Tensor) -> Tensor:
    """A 64-bit digest of a tensor's dtype, shape and bytes in order, as a 0-d tensor on its device.
    Tensors of one shape that differ in one element never have equal digests.

    >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
    tensor(False)
    """
    kind = hashlib.sha256(f"{x.dtype}{list(x.shape)}".encode()).digest()[:8]
    x = x.detach()
    x = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).contiguous().reshape(-1)
    integers = x.view(_INTEGERS[x.element_size()])
    of_kind = int.from_bytes(kind, "little", signed=True)
    total = torch.full((), of_kind, dtype=torch.int64, device=x.device)
    for chunk, start in enumerate(range(0, integers.numel(), _CHUNK)):
        part = integers[start : start + _CHUNK].long()
        total += (part * _weights(str(x.device))[: part.numel()]).sum() * _odd(chunk)
    return total


@lru_cache(maxsize=8)
def _weights(device: str) -> Tensor:
    """Pseudorandom odd numbers: a change of one element changes the sum modulo 2^64."""
    return torch.tensor([_odd(i) for i in range(_CHUNK)], dtype=torch.int64, device=device)


def _odd(i: int) -> int:
    """The finalizer of SplitMix64, made odd, as a signed number. Source: Steele, Lea and Flood
    (2014).
    """
    z = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z = (z ^ z >> 31) | 1
    return z - 2**64 if z >= 2**63 else z


def _odd_ranks(
    digests: Mapping[int, int], spec: PartitionSpec, name: str, mesh: Mesh, when: str
) -> list[str]:
    """A message for each group of ranks that should hold equal copies of a tensor and do not."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, at in zip(mesh.ranks, mesh.coordinates(), strict=True):
        groups.setdefault(tuple(at[axis] for axis in own(spec)), []).append(rank)
    failures = []
    for ranks in groups.values():
        held = [digests[rank] for rank in ranks]
        if held.count(held[0]) == len(held):
            continue
        most = max(held, key=lambda d: (held.count(d), -held.index(d)))
        odd = [rank for rank, d in zip(ranks, held, strict=True) if d != most]
        if odd:
            like = [rank for rank in ranks if rank not in odd]
            where = f", of spec {spec}," if spec else ""
            failures.append(
                f"{name}{where} is not the same{when} on ranks that share it: {_listed(odd)}"
                f" differ{'s' * (len(odd) == 1)}"
                f" from {_listed(like)}."
            )
    return failures


def _listed(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
