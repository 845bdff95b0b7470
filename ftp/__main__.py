"""``python -m ftp``: the table of ops (``ops``), a program before it runs (``report``), the check
of a certificate (``certify``), and the proof of a program written per rank (``prove``).
"""

import argparse
import gc
import inspect
import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ftp.certification.certificate import Certificate
from ftp.certification.certificate_file import load_certificate
from ftp.certification.checker import check
from ftp.certification.collective_semantics import collective_count
from ftp.cli import CONTRACT, function_of, of_config, of_file, parse_mesh, report
from ftp.dataclass import dataclass
from ftp.equivalence.equivalent import equivalent
from ftp.errors import FtpError, ReportError, Undecided
from ftp.paused_gc import collection_paused
from ftp.planning.machine import PRESETS
from ftp.rules.bind import lookup
from ftp.rules.call import Call, Meta
from ftp.rules.decompositions.registry import DECOMPOSITIONS
from ftp.rules.own import RULES
from ftp.rules.proof.findings import cached_findings
from ftp.rules.rule import Rule
from ftp.torch_internals.op_types import OpOverload

SIZES = (2, 3, 5, 7)
PROVED = (
    "The function takes nothing and returns the certificate of ftp.equivalent, or a tuple of that"
    " function's arguments, or a dict of them by name, with 'args' for those of the programs."
)


@dataclass(frozen=True)
class OpRow:
    """An op, the factors of a small call of it, and the source of its sharding.

    Attributes:
        source: rule, decomposition, both, discovered (found by trial on this machine), or
            replicated.
        proven: whether the rule was proven, or the decomposition compared with the op, by the tests
            with this version of torch. A discovered rule is proven before it is used.
    """

    op: str
    rule: str
    source: str
    proven: bool


def rows(pattern: str = "") -> list[OpRow]:
    """Every op with a rule or a decomposition, rules found by trial, and the core ops that every
    rank computes whole.

    >>> for row in rows("aten.mm.default"):
    ...     print(row.rule, "|", row.source)
    m k, k n -> m n {k} | rule
    """
    core = {op for op in _overloads() if torch.Tag.core in op.tags}
    proven = proven_ops()
    stated = {str(op) for op in (*RULES, *DECOMPOSITIONS)}
    found = {op: finding for op, finding in cached_findings().items() if op not in stated}
    table = [
        OpRow(str(op), rule_text(op), _source(op), str(op) in proven)
        for op in (set(RULES) | set(DECOMPOSITIONS) | core)
        if pattern in str(op) and str(op) not in found
    ]
    table += [
        OpRow(op, f"{finding.rule}, found by trial", "discovered", True)
        for op, finding in found.items()
        if pattern in op
    ]
    return sorted(table, key=lambda row: row.op)


def proven_ops() -> frozenset[str]:
    """The ops that the tests proved with this version of torch; empty if they ran with another one.

    >>> "aten.mm.default" in proven_ops()
    True
    """
    record = json.loads((Path(__file__).parent / "rules/proof/proven.json").read_text())
    same = record["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    return frozenset(record["proven"] if same else ())


def rule_text(op: OpOverload) -> str:
    """The notation of an op's rule. If it depends on the call: of a small call with dims of size 2,
    3, 5 and 7.

    >>> rule_text(torch.ops.aten.transpose.int)
    'i j k -> j i k, such as for (2, 3, 5)'
    """
    entry = RULES.get(op)
    if entry is None:
        return ""
    if isinstance(entry, Rule):
        return str(entry)
    for call in _small_calls(op):
        try:
            found = lookup(call)
        except (FtpError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
            continue
        if found is not None:
            return (
                f"{_lettered(str(found))}, such as for"
                f" {', '.join(str(m.shape) for m in call.operands) or 'no operands'}"
            )
    return "depends on the call"


def _source(op: OpOverload) -> str:
    known = [
        name for name, table in (("rule", RULES), ("decomposition", DECOMPOSITIONS)) if op in table
    ]
    return ", ".join(known) or "replicated"


def _lettered(text: str) -> str:
    """Numbered batch factors as letters: ``~0`` is i."""
    for number, letter in enumerate("ijklpq"):
        text = text.replace(f"~{number}", letter)
    return text


def _overloads() -> Iterator[OpOverload]:
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if hasattr(packet, "overloads"):
            yield from (getattr(packet, overload) for overload in packet.overloads())


def _small_calls(op: OpOverload) -> Iterator[Call]:
    """Calls with guessed arguments that the op takes."""
    required = [a for a in op._schema.arguments if not a.has_default_value()]
    kinds = [str(a.type) for a in required]
    for ndim in (3, 2, 1, 4):
        shape = SIZES[:ndim]
        choices = [
            _guesses(kind, shape, first=kind not in kinds[:i]) for i, kind in enumerate(kinds)
        ]
        for values in itertools.islice(itertools.product(*choices), 64):
            given = {a.name: v for a, v in zip(required, values, strict=True)}
            args = tuple(given[a.name] for a in required if not a.kwarg_only)
            kwargs = {a.name: given[a.name] for a in required if a.kwarg_only}
            try:
                made = op(*args, **kwargs)
            except Exception:  # the op does not take these arguments
                continue
            results = tuple(made) if isinstance(made, list | tuple) else (made,)
            if all(isinstance(r, torch.Tensor) for r in results):
                yield Call(
                    op,
                    _metas(args),
                    dict(zip(kwargs, _metas(tuple(kwargs.values())), strict=True)),
                    _metas(results),
                )


def _guesses(kind: str, shape: tuple[int, ...], first: bool) -> Sequence[object]:
    """Values of one argument, likely ones first; a second number differs from the first."""
    match kind:
        case "Tensor":
            floats = torch.empty(shape, device="meta")
            return [
                floats,
                torch.empty(shape, dtype=torch.int64, device="meta"),
                floats.to(torch.bool),
            ]
        case "Optional[Tensor]":
            return [None]
        case "List[Tensor]":
            return [[torch.empty(shape, device="meta")] * 2]
        case "int":
            return [1, 0] if first else [0, 1]
        case "List[int]":
            return [list(shape), [1], [0], [1, 2, 0], [2, 2], [1] * len(shape)]
        case "bool":
            return [False]
        case "float" | "number":
            return [1.0, 1]
        case _:
            return [None]


def _metas(values: Iterable[object]) -> tuple:
    def meta(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return Meta.of(value)
        return [meta(v) for v in value] if isinstance(value, list) else value

    return tuple(meta(v) for v in values)


def _print(table: Sequence[OpRow]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(getattr(row, field)) for row in table) for field in ("op", "source")]
        for row in table:
            print(
                f"{row.op:{widths[0]}}  {row.source:{widths[1]}} "
                f" {'proven' if row.proven else '      '}  {row.rule}"
            )
        return
    shown = Table("op", "rule", "source", "proven", box=None, header_style="bold")
    for row in table:
        shown.add_row(
            *(
                text.replace("[", "\\[")
                for text in (row.op, row.rule, row.source, "yes" if row.proven else "no")
            )
        )
    console = Console()
    console.print(shown) if console.is_terminal else Console(width=200).print(shown)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ftp", description="Read and prove ftp's programs and rules."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser(
        "ops", help="the table of ops: sharding rule, where it comes from, and whether it is proven"
    )
    ops.add_argument("pattern", nargs="?", default="", help="only ops whose name has this in it")
    ops.add_argument("--json", action="store_true", help="as JSON, for other programs")
    proof = commands.add_parser(
        "certify", help="check a certificate that ftp.certify(lowered).save(FILE) wrote"
    )
    proof.add_argument("file", help="path of the certificate")
    prove = commands.add_parser(
        "prove", help="prove that a program written per rank computes what a single-device one does"
    )
    prove.add_argument("target", metavar="FILE:FUNCTION", help=PROVED)
    prove.add_argument("--save", metavar="OUT.json", help="write the certificate")
    program = commands.add_parser(
        "report",
        help="a program before it runs: collectives, memory, cost and what is odd, on any mesh",
    )
    program.add_argument("target", nargs="?", metavar="FILE:FUNCTION", help=CONTRACT)
    program.add_argument(
        "--hf",
        metavar="CONFIG.json",
        help="a causal language model of transformers instead, as its config describes it",
    )
    program.add_argument("--mesh", required=True, help="axes and sizes, as dp=64,tp=8")
    program.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="the type of device whose kernels will run; default that of --hardware, else cpu",
    )
    program.add_argument(
        "--hardware",
        choices=sorted(PRESETS),
        help="the machine that the plan and its cost are for; default that of --device",
    )
    program.add_argument(
        "--ranks-per-host",
        type=int,
        help="consecutive ranks that share a host; default all. Other axes pay the network's link",
    )
    program.add_argument(
        "--batch", type=int, default=8, help="with --hf: sequences in the whole batch"
    )
    program.add_argument("--seq", type=int, default=2048, help="with --hf: tokens in a sequence")
    program.add_argument("--html", metavar="OUT.html", help="write one self-contained page")
    program.add_argument("--json", action="store_true", help="as JSON, for other programs")
    program.add_argument("--program", action="store_true", help="show every op too")
    options = parser.parse_args(argv)
    if options.command == "certify":
        return _certify(options.file)
    if options.command == "report":
        with collection_paused():
            return _report(options)
    if options.command == "prove":
        return _prove(options.target, options.save)
    table = rows(options.pattern)
    if not table:
        print(f"No op's name has {options.pattern!r} in it.", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(row) for row in table], indent=1))
        return 0
    _print(table)
    counts = Counter(row.source for row in table).most_common()
    print(
        f"{', '.join(f'{n} {source}' for source, n in counts)}; {sum(row.proven for row in table)}"
        f" of {len(table)} proven"
    )
    return 0


def _report(options: argparse.Namespace) -> int:
    try:
        if (options.target is None) == (options.hf is None):
            raise ReportError("Give either FILE:FUNCTION or --hf CONFIG.json.")
        hardware = options.hardware
        device = options.device or ("cpu" if hardware in (None, "cpu") else "cuda")
        mesh = parse_mesh(options.mesh, device, options.ranks_per_host)
        if options.hf:
            lowered = of_config(
                options.hf, mesh, batch=options.batch, seq=options.seq, hardware=hardware
            )
        else:
            lowered = of_file(options.target, mesh, hardware)
        report(
            lowered,
            hardware=hardware,
            html=options.html,
            as_json=options.json,
            program=options.program,
        )
    except BrokenPipeError:
        raise
    except (FtpError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


def _certify(file: str) -> int:
    try:
        certificate = check(load_certificate(file))
    except (FtpError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    collectives = collective_count(certificate.ranks.graphs[0])
    mesh = ", ".join(f"{name} {size}" for name, size in certificate.axes.items())
    print(
        f"certified: {len(certificate.operations)} values, {collectives} collectives,"
        f" {math.prod(certificate.ranks.shape)} ranks on ({mesh})"
    )
    for assumption in certificate.assumptions:
        print(f"assumes: {assumption}")
    return 0


def _prove(target: str, save: str | None) -> int:
    try:
        function = function_of(target, PROVED)
        if required := _required(function):
            raise ReportError(f"{target} takes {', '.join(required)}. {PROVED}")
        made = function()
        certificate = made if isinstance(made, Certificate) else _equivalent(target, made)
        if save:
            certificate.save(save)
    except (FtpError, OSError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 2 if isinstance(e, Undecided) else 1
    print(f"proven: {certificate}")
    return 0


def _required(function: Callable[..., Any]) -> list[str]:
    """The parameters without defaults."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = inspect.signature(function).parameters.values()
    return [p.name for p in given if p.kind in named and p.default is p.empty]


def _equivalent(target: str, made: Any) -> Certificate:
    arguments, options = (made, {}) if isinstance(made, tuple | list) else ((), made)
    if not isinstance(options, dict) or (not arguments and "reference" not in options):
        raise ReportError(f"{target} returned {type(made).__name__}. {PROVED}")
    given = tuple(options.get("args", ()))
    named = ("reference", "rank_program", "mesh", "in_specs", "out_specs")
    first = tuple(options[name] for name in named) if options else ()
    switches = {name: bool(options.get(name, False)) for name in ("grad", "every_routing")}
    return equivalent(*first, *given, *arguments, **switches)


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; nothing may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    gc.freeze()  # the collections at exit would visit all that the command has made
    sys.exit(code)
