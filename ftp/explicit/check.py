"""The check of explicit mode: an error with all lines that a program lacks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from ftp.errors import ExplicitError, FtpError
from ftp.explicit.asked import unasked
from ftp.explicit.missing import Missing, lines_of, readable
from ftp.explicit.suggest import Probed, suggest
from ftp.partitioning.collectives import Collective
from ftp.planning.graph import Node, Value
from ftp.report.disagreement import spec_of
from ftp.report.memory import in_bytes
from ftp.runtime.program import Program
from ftp.sharding.spec import PartitionSpec


def check_explicit(
    program: Program,
    out_specs: Sequence[PartitionSpec | None],
    probed: Callable[[], Probed],
) -> None:
    """Raise if a program has collectives that no line asks for.

    Args:
        out_specs: per output the spec that was given, or None.
        probed: traces the function again, with probes.

    Raises:
        ExplicitError: with the lines that ask for it.
    """
    reshards: Sequence[Node] = unasked(program.plan, out_specs)
    if not reshards:
        return
    found, open_, sends = list[Missing](), "", _Sent(program)
    try:
        trace = probed()
        suggestion = suggest(program.plan, trace)
    except (FtpError, RuntimeError, TypeError) as e:  # the function does not accept probes
        open_ = f"could not be tried: {type(e).__name__}: {next(iter(str(e).splitlines()), '')}"
    else:
        sends = _Sent(replace(program, plan=suggestion.plan))
        reshards = suggestion.without
        found += lines_of(suggestion.wanted, trace.ndims, sends)
        if reshards:
            open_ = f"were not tried: no place in the source is known for {len(reshards)} of them"
        elif not suggestion.is_proven:
            open_ = "were tried, and with them the step sends something else"
    raise _error([*found, *(_general(reshard, sends) for reshard in reshards)], open_)


def _error(found: Sequence[Missing], open_: str) -> ExplicitError:
    """The error of the missing lines; ``open_``: why they are not proven to suffice, or ""."""
    total = in_bytes(sum(m.nbytes for m in found))
    count = f"{len(found)} line{'s ask' if len(found) > 1 else ' asks'} for"
    head = (
        f"explicit=True, and the program sends what nobody asked for, {total} a rank. {count} it:"
    )
    end = (
        "With them the step sends exactly what it sends without explicit=True."
        if not open_
        else f"They {open_}. They say how the plan lays out the values; others may be needed."
    )
    error = ExplicitError("\n".join([head, *(f"  {m}" for m in found), end]))
    error.missing = tuple(found)
    return error


class _Sent:
    """From names of reshards to the collectives that they issue, in words, and the bytes sent."""

    def __init__(self, program: Program):
        self._records = defaultdict[str, list[Collective]](list)
        program = program.with_options(bucket=False, chunks=1)
        for node in program.local().gm.graph.nodes:
            if "collective" in node.meta:
                self._records[node.meta.get("origin", "")].append(node.meta["collective"])
        self._nodes = {node.name: node for node in program.plan.graph.nodes}
        self._users = program.plan.graph.users

    def __call__(self, names: Sequence[str]) -> tuple[tuple[str, ...], int]:
        records = [record for name in names for record in self._of(name)]
        words = Counter(f"{r.op} over {', '.join(r.axes)}" for r in records)
        nbytes = sum(record.wire_nbytes for record in records)
        return tuple(f"{n} {w}" if n > 1 else w for w, n in words.items()), nbytes

    def _of(self, name: str) -> list[Collective]:
        """The records of a reshard; a merged reshard has those of the next one."""
        if name in self._records or name not in self._nodes:
            return self._records.get(name, [])
        after = [u for u, _ in self._users.get(Value(self._nodes[name]), ()) if u.kind == "reshard"]
        return self._of(after[0].name) if after else []


def _general(reshard: Node, sends: _Sent) -> Missing:
    value = reshard.operands[0]
    words, nbytes = sends([reshard.name])
    spec = readable(spec_of(Value(reshard)), value.meta.ndim)
    source = str(value.node.source or reshard.source) or f"%{value.node.name}"
    line = f"x = ftp.constrain(x, {spec})"
    return Missing(source, line, nbytes, f"where x is %{value.node.name}, made there", words)
