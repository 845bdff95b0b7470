"""A certificate: a program, the ranks' graphs, and a claimed layout for every op."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from torch import fx

from ftp.certification.ranks import Ranks
from ftp.dataclass import dataclass
from ftp.dynamic_int import Sizes
from ftp.per_rank.planned import LEAVE, collective_axis
from ftp.rules.call import Meta, tensors
from ftp.torch_internals.op_types import OpOverload

# Per dim its cuts, major to minor: axis, elements of a unit, packs (a count or sizes) or "zigzag".
Spec = tuple[tuple[tuple[str, int, Any], ...], ...]


PROVEN = ("aten", "ftp", "prims")  # namespaces of the ops whose rules ftp's own tests prove


@dataclass(frozen=True)
class Ref:
    """A result of an operation, by the operation's name."""

    name: str
    index: int = 0

    @property
    def key(self) -> str:
        return f"{self.name}.{self.index}"


@dataclass(frozen=True)
class Claim:
    """A claimed cut of a factor over an axis: the factor is viewed as ``[outer, extent, inner]``,
    and the extent is cut.

    A size is an int, or ``[const, [[size, axis, n, is_zigzag], ...]]``: ``const`` times the lengths
    of local chunks. In a zigzag the extent is 2n chunks, and rank r holds chunks r and 2n-1-r.
    """

    axis: str
    factor: str
    outer: Any
    extent: Any
    inner: Any
    zigzag: bool = False


@dataclass(frozen=True)
class Ports:
    """In and out specs that the user states for per-rank code (``ftp.local``).

    Attributes:
        results: per result its spec, and the axes over which it is a pending sum.
    """

    operands: tuple[Spec, ...]
    results: tuple[tuple[Spec, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Operation:
    """An op or an input of the single-device program.

    Attributes:
        target: the op; None for an input.
        claims: how the op's factors are cut, outer axis first.
        partial: ``{axis: operands}``: the operands that are pending sums over the axis together.
        spec: for an input, its spec.
        ports: for per-rank code, its specs.
        found: for an op without a rule, the rule that trials on small tensors found; ``linear``
            holds that rule's groups of operands.
        strides: for a recorded op, the strides of its results.
        body: for per-rank code, its graph.
        formulas: in a program of dynamic sizes, the op with formulas of sizes in place of numbers;
            None where the claims are for the rule that the numbers give.
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
    """Per input and per output, the axes over which the ranks' tensors are a pending sum."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Recorded:
    """What a proof about recorded rank programs needs besides the programs.

    Attributes:
        names: the outputs' names.
        integers: by position, the elements that the user gave for integer inputs.
        every_routing: whether the proof covers every outcome of the reference's choice.
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
        outputs: its results, each with its spec.
        unreduced: the axes of pending sums in inputs and outputs.
        ranks: the ranks' programs.
        donated: positions of inputs whose memory the ranks may write to.
        recorded: for rank programs that ftp did not write; else None.
        trusted: assumptions about per-rank code (``ftp.local``), each an op's name and a kind:
            "code", the ranks run the code as written; "specs", results are equal on the ranks where
            its out specs say so.
        sizes: for a program with formulas of dynamic sizes, these; else None.

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
    recorded: Recorded | None = None
    trusted: tuple[tuple[str, str], ...] = ()
    sizes: Sizes | None = None

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.axes.items())
        taken = "".join(f"\n  assumed: {assumption}" for assumption in self.assumptions)
        return (
            f"certificate of {len(self.operations)} values and ops on ({mesh}),"
            f" {math.prod(self.axes.values())} ranks{taken}"
        )

    @property
    def misfit(self) -> str:
        """Why the programs are not those of the mesh's ranks; "" if they are."""
        ranks, why = self.ranks, self.ranks.misfit
        if not why and ranks.shape != tuple(self.axes.values()):
            why = f"ranks of shape {ranks.shape}"
        return why and f"the certificate has {why}, on a mesh of {dict(self.axes)}"

    @property
    def assumptions(self) -> list[str]:
        """The assumptions of the certificate, a line each:

        - per-rank code: the ranks run it as written; results are equal where its out specs say so;
          a collective over one of several axes does what its name says;
        - the rule of an op, where trials on small tensors found it, or where the program
          registered it, for an op of its own or in place of ftp's (`ftp.testing.check_rule` proves
          that one);
        - for a program that ftp did not write: an order of compared numbers that was not drawn, as
          of a router's choice, gives the same result as the orders that were.

        >>> import torch, ftp
        >>> mesh, spec = ftp.AbstractMesh((2,), ("tp",)), ftp.P("tp")
        >>> total = ftp.local(lambda x: ftp.axis.all_reduce(x.sum(), "tp"), mesh, spec, ftp.P())
        >>> lowered = ftp.lower(lambda x: total(x), mesh, spec, torch.ones(4))
        >>> ftp.certify(lowered).assumptions
        []
        """
        return list(dict.fromkeys(self._assumptions()))

    def _assumptions(self) -> Iterator[str]:
        from ftp.rules.own import is_overridden  # a start without a certificate loads no rules

        if self.recorded is not None:
            from ftp.certification.lockstep.check import sampled  # it imports this file

            yield from sampled(self)
        for o in self.operations:
            where = f"at {o.source or 'an unknown line'}"
            if (o.name, "code") in self.trusted:
                yield f"{o.name} {where} is run on each rank as it is written"
            if (o.name, "specs") in self.trusted and o.ports is not None:
                results = ", ".join(_written(*result) for result in o.ports.results)
                yield f"{o.name} {where} returns {results}"
            if (o.name, "specs") in self.trusted and o.target is LEAVE:
                _, region, _, axes, _, _, pending = o.args
                equal = ", ".join(axis for axis in region if axis not in (*axes, *pending))
                yield f"{o.name} {where} is equal on all ranks along {equal}"
            if (axis := collective_axis(o.target, o.args)) is not None:
                name = str(o.target).split(".")[1]
                yield f"{name} over {axis} in per-rank code {where} does what it says"
            if o.found:
                linear = f", linear in operands {', '.join(map(str, o.linear))}" if o.linear else ""
                yield f"{o.target} {where} is {o.found}{linear}, as trials on small tensors found"
            elif isinstance(o.target, OpOverload) and (
                o.target.namespace not in PROVEN or is_overridden(o.target)
            ):
                yield f"{o.target} {where} is as the rule says that was registered for it"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate as JSON with its SHA-256; ``python -m ftp certify FILE`` checks
        it again.
        """
        from ftp.certification.certificate_file import write_certificate  # it imports this file

        write_certificate(self, path)


def _written(spec: Spec, pending: Sequence[str]) -> str:
    dims = [[repr(axis) for axis, _, _ in dim] for dim in spec]
    entries = [
        "None" if not dim else dim[0] if len(dim) == 1 else f"({', '.join(dim)})" for dim in dims
    ]
    tail = f", a pending sum over {', '.join(pending)}" if pending else ""
    return f"P({', '.join(entries)}){tail}"
