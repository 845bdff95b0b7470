"""A certificate: a program, the ranks' graphs, and a claimed layout for every op."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ftp.certification.ranks import Ranks
from ftp.per_rank.planned import LEAVE, collective_axis
from ftp.rules.call import Meta, tensors

Spec = tuple[
    tuple[tuple[str, int, Any], ...], ...
]  # per dim, major to minor: axis, elements of a unit, packs (a count or sizes) or "zigzag"


@dataclass(frozen=True)
class Ref:
    """A result of an operation."""

    name: str
    index: int = 0

    @property
    def key(self) -> str:
        return f"{self.name}.{self.index}"


@dataclass(frozen=True)
class Claim:
    """A claimed cut of a factor over an axis, the factor viewed as ``[outer, extent, inner]``.

    A size is an int, or ``[const, [[size, axis, n, is_zigzag], ...]]``. In a zigzag the extent is
    2n chunks, of which rank r holds chunks r and 2n-1-r.
    """

    axis: str
    factor: str
    outer: Any
    extent: Any
    inner: Any
    zigzag: bool = False


@dataclass(frozen=True)
class Ports:
    """Specs of the operands and results of per-rank code (``ftp.local``), as its user states them.

    Attributes:
        operands: their specs.
        results: their specs, and the axes over which the ranks' values are terms of a sum.
    """

    operands: tuple[Spec, ...]
    results: tuple[tuple[Spec, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Operation:
    """A line of the single-device program; ``target`` is None for an input.

    Attributes:
        claims: how its factors are cut, outer axis first.
        partial: ``{axis: operands}`` that are pending sums together.
        spec: for an input, its spec.
        ports: for per-rank code, its specs.
        body: for per-rank code, the code.
        found: a rule that trials found, for an op without a stated one; ``linear`` are its
            groups of operands.
        strides: of the results of a recorded op.
        formulas: in a program of dynamic sizes the op with formulas in place of numbers, which are
            their values at the sizes at hand; None where the claims are those of the numbers' rule.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Meta, ...]
    claims: tuple[Claim, ...] = ()
    partial: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    spec: Spec = ()
    source: str = ""
    ports: Ports | None = None
    found: str = ""
    linear: tuple[tuple[int, ...], ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    body: fx.Graph | None = None
    formulas: "Operation | None" = None

    @property
    def operands(self) -> list[Ref]:
        return list(tensors((self.args, dict(self.kwargs)), Ref))

    def __str__(self) -> str:
        return f"{self.name} ({self.source})" if self.source else self.name


@dataclass(frozen=True)
class Unreduced:
    """The axes over which each input and each output is a pending sum of the ranks' tensors."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Recorded:
    """The data that a proof about recorded rank programs needs in addition to the programs.

    Attributes:
        names: of the outputs.
        integers: of inputs that are no floats, by position: the elements as they were given.
        every_routing: whether it is a proof for every outcome of the reference's choice.
    """

    names: tuple[str, ...]
    integers: Mapping[int, tuple[int, ...]]
    every_routing: bool = False


@dataclass(frozen=True, repr=False)
class Certificate:
    """A program with its proof: the single-device program, the ranks' graphs, the specs, and the
    claimed cuts of every op. ``check`` needs nothing else.

    Attributes:
        axes: ``{name: size}`` of the mesh.
        groups: the axes of each process group that the ranks' graphs name.
        operations: the single-device program.
        outputs: what it returns, each with its spec.
        unreduced: the sums that are pending in inputs and outputs.
        ranks: the ranks' programs.
        donated: positions of inputs whose memory the ranks may write to.
        recorded: of ranks' programs that ftp did not write; None for those that it wrote.
        trusted: what is taken as true of per-rank code (``ftp.local``): the op, and "code", that
            the ranks run it as it is written, or "specs", that results are equal where its specs
            say so.

    >>> import torch, ftp
    >>> mesh = ftp.AbstractMesh((2,), ("tp",))
    >>> ftp.certify(ftp.lower(torch.exp, mesh, ftp.P("tp"), torch.ones(4)))
    certificate of 2 values and ops on (tp 2), 2 ranks
    """

    axes: Mapping[str, int]
    groups: Mapping[str, tuple[str, ...]]
    operations: tuple[Operation, ...]
    outputs: tuple[tuple[Ref, Spec], ...]
    unreduced: Unreduced
    ranks: Ranks
    donated: tuple[int, ...] = ()
    recorded: "Recorded | None" = None
    trusted: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.axes.items())
        taken = "".join(f"\n  assumed: {assumption}" for assumption in self.assumptions)
        return (
            f"certificate of {len(self.operations)} values and ops on ({mesh}),"
            f" {math.prod(self.axes.values())} ranks{taken}"
        )

    @property
    def assumptions(self) -> list[str]:
        """What the certificate assumes: the parts of per-rank code that are not proven, which are
        that the ranks run it as written and that results are equal where its out specs say so; that
        the collectives of code over some axes alone do what they say; rules that trials found; and,
        of a program that ftp did not write, that orders of compared numbers which were not drawn,
        such as a router's choice, give what the drawn ones gave.

        >>> import torch, ftp
        >>> mesh, spec = ftp.AbstractMesh((2,), ("tp",)), ftp.P("tp")
        >>> total = ftp.local(lambda x: ftp.axis.all_reduce(x.sum(), "tp"), mesh, spec, ftp.P())
        >>> lowered = ftp.lower(lambda x: total(x), mesh, spec, torch.ones(4))
        >>> ftp.certify(lowered).assumptions
        []
        """
        found = {}
        if self.recorded is not None:
            from ftp.certification.lockstep.check import sampled  # imports this file

            found |= dict.fromkeys(sampled(self))
        for o in self.operations:
            where = f"at {o.source or 'an unknown line'}"
            if (o.name, "code") in self.trusted:
                found[f"{o.name} {where} is run on each rank as it is written"] = None
            if (o.name, "specs") in self.trusted and o.ports is not None:
                found[
                    f"{o.name} {where} returns"
                    f" {', '.join(_written(*result) for result in o.ports.results)}"
                ] = None
            if (o.name, "specs") in self.trusted and o.target is LEAVE:
                found[f"{o.name} {where} is equal on all ranks along {_claimed_equal(o)}"] = None
            if (axis := collective_axis(o.target, o.args)) is not None:
                name = str(o.target).split(".")[1]
                found[f"{name} over {axis} in per-rank code {where} does what it says"] = None
            if o.found:
                linear = f", linear in operands {', '.join(map(str, o.linear))}" if o.linear else ""
                found[
                    f"{o.target} {where} is {o.found}{linear}, as trials on small tensors found"
                ] = None
        return list(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate as JSON with its SHA-256; ``python -m ftp certify FILE`` checks
        it again.
        """
        from ftp.certification.certificate_file import write_certificate  # which reads this file

        write_certificate(self, path)


def _claimed_equal(left: Operation) -> str:
    """The axes along which per-rank code claims that a value is equal on all ranks."""
    _, region, _, axes, _, _, pending = left.args
    return ", ".join(axis for axis in region if axis not in (*axes, *pending))


def _written(spec: Spec, pending: Sequence[str]) -> str:
    dims = [[repr(axis) for axis, _, _ in dim] for dim in spec]
    entries = [
        "None" if not dim else dim[0] if len(dim) == 1 else f"({', '.join(dim)})" for dim in dims
    ]
    return f"P({', '.join(entries)})" + (
        f", a pending sum over {', '.join(pending)}" if pending else ""
    )
