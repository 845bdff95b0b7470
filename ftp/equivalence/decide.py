"""Decide about recorded programs: proven, different on inputs found by simulation, or neither."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.certification.certificate import Certificate
from ftp.certification.lockstep.check import (
    WrongOutput,
    compare,
    depth_of,
    describe,
    difference,
    inputs_for,
)
from ftp.certification.lockstep.reals import Reals, wide
from ftp.certification.lockstep.run import OpFailed, RunError
from ftp.certification.residues.domain import KNOWN
from ftp.certification.residues.value import Blind
from ftp.certification.residues.words import words
from ftp.equivalence.blame import blame
from ftp.equivalence.draws import drawn_error, random_line
from ftp.errors import CertificateError, Undecided, join_failures

SIMULATIONS, SCALED_SIMULATIONS = 4, 60
SMALLEST_SCALE = -8  # exponent of 2
SEED = "gradient_"  # names of the results' gradients among the inputs


def decide(certificate: Certificate) -> None:
    """Return if the certificate's programs are proven equal.

    Raises:
        CertificateError: they differ; with inputs that show it.
        TraceError: an output depends on random numbers that a program draws.
        Undecided: neither a proof nor a difference is found.
    """
    blind = ""
    try:
        found = difference(certificate)
        if found is None:
            return
    except RunError as e:
        raise _stuck(e) from None
    except Blind as e:
        blind, found = str(e), None
    line = random_line(certificate)
    if line is not None:
        raise drawn_error(line)
    told = simulate(certificate)
    if told is None:
        raise _undecided(certificate, blind, found)
    seen, inputs = told
    raise _different(certificate, seen, inputs)


def _stuck(e: RunError) -> CertificateError:
    error = CertificateError(str(e))
    error.rank, error.line = e.rank, e.line
    return error


def _different(
    certificate: Certificate, seen: WrongOutput, inputs: Sequence[Tensor]
) -> CertificateError:
    recorded = certificate.recorded
    assert recorded is not None
    where = blame(certificate, seen)
    error = CertificateError(
        join_failures(
            [
                f"{describe(certificate, seen)}",
                f"  {where.line}: {where.why}" if where.line else f"  {where.why}",
                f"  It differs by {seen.why.split(' by ')[-1]}" if " by " in seen.why else "",
            ]
        ).rstrip("\n")
    )
    error.output = recorded.names[seen.output]
    given = [o.name for o in certificate.operations if o.target is None]
    whole = [x for x, name in zip(inputs, given, strict=True) if not name.startswith(SEED)]
    error.rank, error.line, error.inputs = seen.rank, where.line, tuple(whole)
    return error


def _undecided(certificate: Certificate, blind: str, found: WrongOutput | None) -> Undecided:
    recorded = certificate.recorded
    assert recorded is not None
    ops = opaque_ops(certificate)
    if blind:
        ops = tuple(dict.fromkeys((blind, *ops)))
    what = ""
    if found is not None:
        where = "".join(found.why.rstrip(".").partition(" where ")[1:])
        what = f" {recorded.names[found.output]} on rank {found.rank}{where}"
    listed = ", ".join(ops) if ops else "none: the two formulas differ in the order of comparisons"
    error = Undecided(
        f"Neither a proof nor a difference was found{' for' + what if what else ''}:"
        f" {_simulations(certificate)} simulations agree. The proof cannot see through: {listed}."
    )
    error.ops = ops
    return error


def opaque_ops(certificate: Certificate) -> tuple[str, ...]:
    """The ops that a proof knows little about: functions without algebra, rounding, order."""
    found: dict[str, None] = {}
    targets = [o.target for o in certificate.operations if o.target is not None]
    targets += [
        n.target for g in certificate.ranks.graphs for n in g.nodes if n.op == "call_function"
    ]
    for target in targets:
        schema = getattr(target, "_schema", None)
        if schema is None or schema.name.startswith("ftp_rank::"):
            continue
        name = schema.name.split("::")[1]
        base = name.removesuffix("_") if name.endswith("_") else name
        is_known = base in KNOWN or base in _PLAIN or base.startswith(("empty", "new_empty"))
        if base in _FREE or not is_known:
            found[str(target)] = None
    return tuple(found)


_FREE = words(
    """
    _to_copy erf cos sin ceil floor round fmod remainder relu maximum minimum clamp amax
    amin max min abs sign gt ge lt le eq ne topk sort argmax argmin threshold_backward where
    pow
    """
)
_PLAIN = words(
    """
    full ones zeros arange scalar_tensor eye linspace tensor logical_and logical_or
    bitwise_and bitwise_or bitwise_not bitwise_xor any all one_hot nonzero
    """
)


# Simulation.


def simulate(certificate: Certificate) -> tuple[WrongOutput, list[Any]] | None:
    """The first difference on random inputs in float64, with the inputs; None if none is found."""
    tolerance = 3e-2 if _is_low(certificate) else 1e-8
    for draw in range(_simulations(certificate)):
        domain = Reals(draw + 1)
        inputs = inputs_for(domain, certificate, draw)
        if draw >= SIMULATIONS:
            inputs = _scaled(inputs, draw)
        margins: list[float] = []

        def is_close(_: Any, a: Tensor, b: Tensor, margins: list[float] = margins) -> bool:
            return _is_close(a, b, tolerance, margins)

        try:
            with torch.random.fork_rng(devices=[]):
                found = compare(domain, certificate, inputs, is_same=is_close)
        except OpFailed:
            continue  # the program does not take an input of the range
        except CertificateError:
            raise
        except Exception:
            continue
        if found is not None:
            by = f" by {margins[-1]:.3g}." if margins else ""
            why = found.why.rstrip(".") + (f":{by}" if by else ".")
            return WrongOutput(found.output, found.rank, why.replace(": by", ", by")), inputs
    return None


def _simulations(certificate: Certificate) -> int:
    return SIMULATIONS + SCALED_SIMULATIONS * depth_of(certificate).is_ordered


def _scaled(inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Inputs of different sizes: one that is larger than the rest, such as a bias of a router's
    scores, may else decide every comparison.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for x in inputs:
        by = torch.randint(SMALLEST_SCALE, 1, (), generator=generator)
        found.append(x * 2.0 ** int(by) if x.is_floating_point() else x)
    return found


def _is_close(a: Tensor, b: Tensor, tolerance: float, margins: list[float]) -> bool:
    if not a.is_floating_point() or not b.is_floating_point():
        return a.dtype == b.dtype and bool((a == b).all())
    if wide(a.dtype) != wide(b.dtype):
        return False
    a, b = a.to(torch.float64), b.to(torch.float64)
    if not b.numel():
        return True
    if not bool((a.isfinite() == b.isfinite()).all()):
        margins.append(float("nan"))
        return False
    apart = (a - b)[b.isfinite()].abs()
    scale = max(float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0, 1e-3)
    if not apart.numel() or float(apart.max()) <= tolerance * scale:
        return True
    margins.append(float(apart.max()))
    return False


def _is_low(certificate: Certificate) -> bool:
    """Whether the reference computes in few digits."""
    low = (torch.bfloat16, torch.float16)
    return any(m.dtype in low for o in certificate.operations for m in o.results)
