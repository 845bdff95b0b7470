"""A certificate's single-device program and its shards, in a domain of numbers."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any

import torch

from ftp.certification.cells import Cell
from ftp.certification.certificate import Certificate, Operation, Ref, Spec
from ftp.certification.element_map import MeshAxis
from ftp.certification.expected_parts import ExpectedParts
from ftp.certification.ranks import MeshIndex
from ftp.errors import CertificateError
from ftp.rules.call import replaced


class ReferenceFailed(CertificateError):
    """An op of the single-device program refuses its operands."""


def run_reference(
    domain: Any, operations: Sequence[Operation], inputs: Sequence[Any], watch: Any = None
) -> dict[Ref, Any]:
    """Every value of the single-device program.

    Args:
        watch: is called with each op and its results: ``watch(op, results)``.
    """
    values: dict[Ref, Any] = {}
    given = iter(inputs)
    for op in operations:
        if op.target is None:
            values[Ref(op.name)] = next(given)
            continue
        args = replaced(tuple(op.args), Ref, values.__getitem__)
        kwargs = replaced(dict(op.kwargs), Ref, values.__getitem__)
        try:
            found = domain.call(op.target, args, kwargs, [m.dtype for m in op.results])
        except (IndexError, RuntimeError) as e:
            said = str(e).splitlines()[0]
            raise ReferenceFailed(
                f"{op.source or op.name}: in the reference {op.target} raises"
                f" {type(e).__name__}: {said}"
            ) from e
        if not any(r.alias_info is not None for r in op.target._schema.returns):
            found = domain.laid_out(found, op.strides)
        for i, x in enumerate(found if isinstance(found, list | tuple) else [found]):
            values[Ref(op.name, i)] = x
        if watch is not None:
            watch(op, found)
    return values


def coordinates(certificate: Certificate) -> list[MeshIndex]:
    return list(product(*map(range, certificate.axes.values())))


def positions(
    size: int, cuts: Sequence[tuple[str, int, Any]], axes: Mapping[str, int], at: Mapping[str, int]
) -> torch.Tensor:
    """The positions that a rank holds along a dim."""
    along = {name: MeshAxis(name, dim, n) for dim, (name, n) in enumerate(axes.items())}
    cell = Cell(0, tuple((at[name],) for name in axes))
    part = ExpectedParts(along, ()).cut(size, cuts, cell)
    return torch.from_numpy(part.positions())


def shard(domain: Any, x: Any, spec: Spec, axes: Mapping[str, int], at: Mapping[str, int]) -> Any:
    """A copy of the shard that a rank holds of a whole tensor."""
    for dim, cuts in enumerate(spec):
        if cuts:
            index = positions(x.shape[dim], cuts, axes, at)
            x = domain.move(lambda t, dim=dim, index=index: t.index_select(dim, index), x)
    return domain.separate(x)


def shards(
    domain: Any,
    x: Any,
    spec: Spec,
    unreduced: Sequence[str],
    certificate: Certificate,
    key: int,
) -> list[Any]:
    """Each rank's tensor of a global one; for a pending sum, random terms that add up to it."""
    axes = certificate.axes
    whole: dict[tuple[int, ...], Any] = {(): x}
    for axis in unreduced:
        split: dict[tuple[int, ...], Any] = {}
        for before, value in whole.items():
            rest = value
            for i in range(axes[axis] - 1):
                drawn_key = hash((key, axis, before, i)) & ((1 << 40) - 1)
                term = domain.draw(value.shape, drawn_key, domain.dtype(value))
                split[*before, i] = term
                rest = domain.subtract(rest, term)
            split[*before, axes[axis] - 1] = rest
        whole = split
    found = []
    for coordinate in coordinates(certificate):
        at = dict(zip(axes, coordinate, strict=True))
        term = whole[tuple(at[a] for a in unreduced)]
        found.append(shard(domain, term, spec, axes, at))
    return found


def total(
    domain: Any, parts: Sequence[Any], unreduced: Sequence[str], certificate: Certificate, rank: int
) -> Any:
    """The sum over the axes of ``unreduced`` of the tensors of a rank and its peers."""
    every = coordinates(certificate)
    fixed = [i for i, axis in enumerate(certificate.axes) if axis not in unreduced]
    group = [r for r, c in enumerate(every) if all(c[i] == every[rank][i] for i in fixed)]
    return reduce(domain.add, [parts[r] for r in group])


def ranks_of(certificate: Certificate) -> int:
    return math.prod(certificate.axes.values())
