"""Prove recorded rank programs for every routing: every outcome of the one choice that the
reference makes, such as a router's ``topk`` of each token.

The order of the numbers that the choice compares is given rather than drawn, one order for each
outcome. Runs differ only in that order, so several run as a batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, permutations, product
from typing import Any

import torch
from torch import Tensor

from ftp.certification.certificate import Certificate, Ref
from ftp.certification.residues.domain import FACTORIES, UNINITIALISED, Residues
from ftp.certification.residues.field import Field, Ranking
from ftp.certification.residues.value import Blind, Degenerate, Planes, order, same
from ftp.certification.residues.words import words
from ftp.dataclass import dataclass
from ftp.errors import CertificateError, SpecError
from ftp.torch_internals.functorch import unwrapped

CHOICES = words("topk argmax argmin max min sort argsort")
MOST = 1 << 16  # routings that are run, at most
LARGEST = 1 << 24  # elements of a batch of runs, at most
Routing = tuple[tuple[int, ...], ...]  # the numbers that each row chooses, in order


@dataclass(frozen=True)
class ReferenceChoice:
    """A choice among the numbers of each row along a dim.

    Attributes:
        count: how many numbers each row chooses, in order.
        shape: of the numbers, with the dim last.
    """

    source: str
    dim: int
    count: int
    is_largest: bool
    shape: tuple[int, ...]

    @property
    def outcomes(self) -> int:
        """Number of routings."""
        return math.perm(self.shape[-1], self.count) ** math.prod(self.shape[:-1])

    def routings(self) -> Iterator[Routing]:
        of_row = list(permutations(range(self.shape[-1]), self.count))
        return product(of_row, repeat=math.prod(self.shape[:-1]))

    def keys(self, routings: Sequence[Routing], keys: Tensor) -> Tensor:
        """Per routing the ``keys`` (rows, size), permuted within rows so that the choice gives the
        routing.
        """
        chosen = torch.tensor(routings).view(len(routings), keys.shape[0], self.count)
        size = keys.shape[1]
        place = torch.full((*chosen.shape[:2], size), self.count)
        place = place.scatter(2, chosen, torch.arange(self.count).expand_as(chosen))
        at = place.argsort(dim=2, stable=True).argsort(dim=2)  # each number's place when sorted
        ranked = keys.sort(dim=1, descending=self.is_largest).values
        return ranked.expand(len(routings), *ranked.shape).gather(2, at)


def choice_of(
    name: str, shape: Sequence[int], args: Sequence[Any], kwargs: Any
) -> ReferenceChoice | None:
    """The choice that an op makes among numbers of a shape; None if it compares all numbers."""
    given = dict(kwargs)
    at = 2 if name == "topk" else 1
    dim = given.get("dim", args[at] if len(args) > at else None)
    count, is_largest = 1, name in ("argmax", "max")
    if name == "topk":
        count = given.get("k", args[1] if len(args) > 1 else None)
        is_largest = given.get("largest", args[3] if len(args) > 3 else True)
        dim = -1 if dim is None else dim
    if name in ("sort", "argsort"):
        is_largest = bool(given.get("descending", args[2] if len(args) > 2 else False))
        dim = -1 if not isinstance(dim, int) or isinstance(dim, bool) else dim
    if not isinstance(dim, int) or not shape:
        return None
    dim %= len(shape)
    rows = (*shape[:dim], *shape[dim + 1 :], shape[dim])
    taken: Any = shape[dim] if name in ("sort", "argsort") else count
    return ReferenceChoice("", dim, int(taken), bool(is_largest), tuple(map(int, rows)))


def choices_of(certificate: Certificate) -> list[ReferenceChoice | None]:
    """The reference's choices among floating-point numbers; None for an op that compares all."""
    metas = {Ref(o.name, i): m for o in certificate.operations for i, m in enumerate(o.results)}
    found = []
    for op in certificate.operations:
        schema = getattr(op.target, "_schema", None)
        name = "" if schema is None else schema.name.split("::")[1]
        if name not in CHOICES or not op.operands:
            continue
        meta = metas[op.operands[0]]
        if meta.dtype.is_floating_point:
            made = choice_of(name, meta.shape, op.args, op.kwargs)
            found.append(None if made is None else replace(made, source=op.source))
    return found


def the_choice(certificate: Certificate) -> ReferenceChoice:
    """The one choice of the reference.

    Raises:
        SpecError: it makes none or several, or has more outcomes than can be run.
    """
    found = choices_of(certificate)
    if len(found) != 1 or (choice := found[0]) is None:
        lines = "".join(f"\n  {c.source}" for c in found if c is not None)
        raise SpecError(
            "every_routing=True is for a reference that chooses once, as one router does by topk or"
            f" argmax along a dim; this one chooses {len(found)} times.{lines}"
        )
    if choice.outcomes > MOST:
        rows = math.prod(choice.shape[:-1])
        per_row = math.perm(choice.shape[-1], choice.count)
        fits = int(math.log(MOST, per_row)) if per_row > 1 else rows
        raise SpecError(
            f"{choice.source}: every_routing=True would run {per_row:,} ** {rows} routings, and at"
            f" most {MOST:,} can be run: {rows} tokens choose {choice.count} of {choice.shape[-1]}."
            f" Give {fits} tokens."
        )
    return choice


# Runs.


class _Steered(Residues):
    """Runs ops; choices compare numbers in the order of the field's ranking.

    Attributes:
        seen: the numbers that choices compared.
        zero: a batched zero. Added to fresh memory, it gives each run of a batch memory of its own.
    """

    def __init__(self, field: Field, zero: Tensor | None = None):
        super().__init__(field)
        self.zero = zero
        self.seen: list[Planes] = []

    def call(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtypes: Sequence[Any]
    ) -> Any:
        name = target._schema.name.split("::")[1]
        if name in CHOICES:
            self.seen += [x for x in args if isinstance(x, Planes)]
        found = super().call(target, args, kwargs, dtypes)
        return self._own(found) if name in FACTORIES or name in UNINITIALISED else found

    def _own(self, x: Any) -> Any:
        """``x`` with memory for each run of the batch."""
        if self.zero is None:
            return x
        if isinstance(x, Planes):
            return Planes([self._own(p) for p in x.planes], x.window, x.dtype, x.root_of)
        return x | (self.zero != 0) if x.dtype is torch.bool else x + self.zero.to(x.dtype)

    def empty_strided(self, like: Tensor, stride: Sequence[int]) -> Tensor:
        return self._own(super().empty_strided(like, stride))

    def storage(self, x: Any) -> int:
        held = x.planes[0] if isinstance(x, Planes) else x
        return unwrapped(held).untyped_storage()._cdata

    def compares_others(self) -> list[Tensor]:
        """Per choice, whether it compared numbers that are not in the ranking."""
        f = self.field
        assert f.ranking is not None
        return [(~f.ranking.holds(x.planes[f.order_level])).any() for x in self.seen]


_RIGHT, _SPOILT, _OTHERS = -1, -2, -3  # results of a run; else the number of a wrong result


class EveryRouting:
    """One draw of numbers, run for every routing.

    Args:
        choose: runs the reference on a domain.
        run: runs both programs on a domain; per output and rank, whether it is right.
    """

    def __init__(
        self,
        certificate: Certificate,
        field: Field,
        choose: Callable[[Any], Any],
        run: Callable[[Any], list[Tensor]],
    ):
        self.choice, self.field, self.run = the_choice(certificate), field, run
        self.residues, self.keys = self._numbers(choose)
        self.batch = max(1, min(MOST, LARGEST // _elements(certificate, field)))

    def _numbers(self, choose: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
        """The numbers that the choice compares, (rows, size), and their keys."""
        domain = _Steered(self.field)
        choose(domain)
        x = domain.seen[0]
        level = self.field.order_level
        found, keys = x.planes[level], order(self.field, x)
        rows = [t.movedim(self.choice.dim, -1) for t in (found, keys)]
        found, keys = (t.reshape(-1, self.choice.shape[-1]) for t in rows)
        if len(found.unique()) < found.numel():
            raise Degenerate
        return found, keys

    def wrong(
        self, routings: Sequence[Routing]
    ) -> tuple[tuple[int, Routing] | None, list[Routing]]:
        """The number of a wrong result with its routing, or None; and the routings whose runs were
        degenerate.
        """
        todo, spoilt = iter(routings), []
        while some := list(islice(todo, self.batch)):
            for code, routing in zip(self._codes(some), some, strict=True):
                if code >= 0:
                    return (code, routing), []
                if code == _OTHERS:
                    raise Blind("a choice among numbers that the reference does not compare")
                if code == _SPOILT:
                    spoilt.append(routing)
        return None, spoilt

    def _codes(self, routings: Sequence[Routing]) -> list[int]:
        keys = self.choice.keys(routings, self.keys).flatten(1)
        sorted_residues, at = self.residues.flatten().sort()

        def codes(keys: Tensor) -> Tensor:
            suspects: list[Tensor] = []
            ranking = Ranking(sorted_residues, keys)
            field = replace(self.field, ranking=ranking, suspects=suspects)
            domain = _Steered(field, keys[0] * 0)
            right = torch.stack(self.run(domain))
            code = torch.where(right.all(), _RIGHT, right.to(torch.int64).argmin())
            if others := domain.compares_others():
                code = torch.where((code == _RIGHT) & torch.stack(others).any(), _OTHERS, code)
            return torch.where(torch.stack(suspects).any(), _SPOILT, code) if suspects else code

        keys = keys[:, at]
        try:
            return torch.func.vmap(codes, randomness="same")(keys).tolist()
        except (CertificateError, RuntimeError, IndexError):
            return [int(codes(k)) for k in keys]  # an op takes no batch, or fails in one run


def _elements(certificate: Certificate, field: Field) -> int:
    """Number of elements of all values of a run."""
    of_ranks = [
        math.prod(shape)
        for at, _ in certificate.ranks.at.values()
        for n in certificate.ranks.graphs[at].nodes
        for shape in n.meta.get("shape", ())
    ]
    of_reference = [math.prod(m.shape) for o in certificate.operations for m in o.results]
    return max(1, sum(map(int, of_ranks + of_reference))) * field.planes


def is_right(domain: Any, a: Any, b: Any) -> Tensor:
    if isinstance(a, Planes) and isinstance(b, Planes) and a.dtype == b.dtype:
        return same(domain.field, a, b).all()
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype:
        return (a == b).all()
    return torch.tensor(False)
