"""Plans stored in ftp's cache for the next start and for other ranks of the host: one rank plans,
under a hash of everything that a plan depends on. Ranks of other hosts get the plan by message.

Each rank traces its own function, which is part of the hash. The plan and the ranks' graphs are
stored.
"""

import contextlib
import hashlib
import json
import marshal
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ftp.distributed.handed_out import HandedOut
from ftp.errors import FtpError
from ftp.ops.constrain import CONSTRAIN
from ftp.ops.native import cache_folder, read_own, trim
from ftp.partitioning.local_program import LocalProgram
from ftp.per_rank.program import LOCAL, program_of
from ftp.planning.cost import Hardware
from ftp.planning.machine import describe_hardware
from ftp.program_files.container import Container, pack, read_file, write_file
from ftp.program_files.graphs import write_traced
from ftp.program_files.kept_executed import executed_path, keep_executed, read_executed
from ftp.program_files.plain import Writer
from ftp.program_files.saved import (
    LoadedProgram,
    computed_section,
    decoding,
    plan_section,
    ranks_section,
    versions,
)
from ftp.rules.decompositions import OWN_DECOMPOSITIONS
from ftp.rules.decompositions.registry import DECOMPOSITIONS
from ftp.runtime.compile import Run, executed, running
from ftp.runtime.options import Options
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import PartitionSpec
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.trace import Traced
from ftp.turns import turn
from ftp.version import own_code

KEEP = "FTP_PLANS"  # "0": never; "1": for simulated meshes too
LIMIT = 128 * 2**20  # bytes of all plans
_PATIENCE = 60.0  # seconds that a rank waits for another rank of its host to plan
_DISTINCT = 4  # most distinct rank programs that one rank makes for all
_MANY = 256  # number of ranks from which each stores its own program


def is_storing(mesh: Mesh) -> bool:
    """Whether plans for a mesh are stored."""
    asked = os.environ.get(KEEP, "1" if mesh.kind == "process" else "0")
    return asked != "0" and mesh.kind != "abstract"


def key_of(
    mesh: Mesh,
    traced: Traced,
    names: Sequence[str],
    is_state: Sequence[bool],
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec | None],
    options: Options,
    hardware: Hardware,
) -> str:
    """A hash of everything that a plan depends on; "" if each program needs a plan of its own."""
    if options.strict or options.certify or options.explicit:
        return ""
    graph = traced.gm.graph
    # The rules are loaded where a plan is made, or where a user states one.
    is_known = "ftp.rules.own" not in sys.modules and DECOMPOSITIONS == OWN_DECOMPOSITIONS
    if not (is_known or _is_of_own_rules(graph)):
        return ""
    writer, regions = Writer(), {}
    try:
        # The results of calls have no other layouts where the inputs and the calls are the same.
        body = write_traced(writer, graph, kept=("source", "phase"))
        inputs = [writer.of(n.meta["val"]) for n in graph.find_nodes(op="placeholder")]
        places = []
        for node in graph.nodes:
            region = node.meta.get("region")
            if region is not None:
                if not isinstance(region.policy, str):
                    return ""
                places.append((node.name, regions.setdefault(region, len(regions)), region.policy))
    except FtpError:
        return ""
    content = [
        versions(), own_code(), mesh.shape, mesh.axis_names, mesh.device_type, mesh.is_ascending,
        mesh.kind == "simulated", mesh.ranks, mesh.hosts, body, inputs, writer.pool, places,
        list(names), list(is_state), repr(list(in_specs)), repr(list(out_specs)),
        repr(_without_hardware(options)), describe_hardware(hardware),
        [str(c.dtype) for c in traced.constants], str(torch.get_default_dtype()),
    ]  # fmt: skip
    text = marshal.dumps(content, 0)  # equal in all processes, and five times as fast as JSON
    return hashlib.sha256(text).hexdigest()[:32]


def _without_hardware(options: Options) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != "hardware"}


def _is_of_own_rules(graph: fx.Graph) -> bool:
    """Whether all ops use ftp's own rules and decompositions, none of them overridden: a program
    with a user's rule is planned at every start.
    """
    from ftp.rules.own import OWN_RULES, RULES

    for table, own in ((RULES, OWN_RULES), (DECOMPOSITIONS, OWN_DECOMPOSITIONS)):
        given = [op for op, entry in table.items() if own.get(op) is not entry]
        if any(op in own or op.namespace in ("aten", "prims") for op in given):
            return False
    of_axes = [op for op in RULES if op.namespace == "ftp"]  # some come with per-rank code
    known = {CONSTRAIN, *of_axes, *OWN_RULES, *OWN_DECOMPOSITIONS}
    called = [n for n in graph.nodes if isinstance(n.target, OpOverload)]
    codes = [program_of(str(n.args[1])) for n in called if n.target is LOCAL]
    return all(n.target in known or n.target is LOCAL for n in called) and all(
        _is_of_own_rules(code.gm.graph) for code in codes if code.is_planned
    )


def kept_or_planned(
    key: str,
    mesh: Mesh,
    traced: Traced,
    facts: Mapping[str, Any],
    make: Callable[[], Program],
    handed_out: HandedOut | None = None,
) -> Program:
    """The stored program of a key; else planned by ``make``, while other ranks of the host wait,
    and stored for them.

    Args:
        facts: attributes of the program that this rank knows without a plan.
        handed_out: how the first rank's plan reaches one rank of each other host.
    """
    if not key:
        return make()
    folder = cache_folder("plans")
    for_all, own = folder / f"{key}.ftp", folder / f"{key}-{mesh.rank}.ftp"
    at = mesh.ranks.index(mesh.rank) if mesh.hosts else 0
    # Hosts may share the folder, and must not wait there for each other.
    host = hashlib.sha256(mesh.hosts[at].encode()).hexdigest()[:8] if mesh.hosts else ""

    def kept() -> Program | None:
        found = (_found(path, mesh, traced, facts) for path in (for_all, own))
        return next((program for program in found if program is not None), None)

    def sent() -> Program | None:
        if handed_out is None or mesh.hosts[at] == mesh.hosts[0]:
            return None
        content = handed_out.take()
        # Another key means another function: the ranks' agreement reports the difference.
        if content.startswith(key.encode()):
            with contextlib.suppress(FtpError, OSError):
                write_file(for_all, content[len(key) :])
                trim(folder, LIMIT)
        return kept()

    def planned() -> Program:
        program = make()
        # A plan that cannot be written, as on a full disk, is made again at the next start.
        with contextlib.suppress(FtpError, OSError):
            if not program.trial_rules:
                content, is_for_all = _content(program)
                write_file(for_all if is_for_all else own, content)
                trim(folder, LIMIT)
        return program

    # Files are written whole, so ranks read them side by side.
    before, program = (_file_at(for_all), _file_at(own)), kept()
    if program is None and not _is_of_own_rules(traced.gm.graph):
        return make()
    if program is None:
        lock = folder / f"{key}{host}.lock"
        with _one_at_a_time(lock, lambda: (_file_at(for_all), _file_at(own)) != before):
            program = kept() or sent() or planned()
    if handed_out is not None and handed_out.gives:
        with contextlib.suppress(OSError):
            handed_out.give(key.encode() + read_own(for_all))
    return program


def _file_at(path: Path) -> int | None:
    """The number of the file at a path; another file that takes its place has another one."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _content(program: Program) -> tuple[bytes, bool]:
    mesh = program.mesh
    most = mesh.size() if mesh.kind == "simulated" else _DISTINCT if mesh.size() <= _MANY else 1
    ranks = ranks_section(program, most)
    sections = {
        "call": computed_section(program),
        "ranks": json.dumps(ranks, separators=(",", ":")).encode(),
        "plan": plan_section(program.plan),
    }
    return pack({**versions(), "key": "plan"}, sections), -1 not in ranks["of_rank"]


def _found(
    path: Path, mesh: Mesh, traced: Traced, facts: Mapping[str, Any]
) -> "KeptProgram | None":
    """The program of a file of the cache; None if there is no file, or it is of another version or
    another rank.
    """
    if not path.exists():
        return None
    try:
        container = read_file(path)
        with decoding(container):
            program = KeptProgram(container, mesh, traced, facts)
            for coordinate in mesh.coordinates() if mesh.kind == "simulated" else (None,):
                if not program.holds(coordinate):
                    return None
                program.local(coordinate)
    except FtpError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used last
    return program


class KeptProgram(LoadedProgram):
    """The stored plan of a function that this process has traced."""

    def __init__(self, container: Container, mesh: Mesh, traced: Traced, facts: Mapping[str, Any]):
        super().__init__(container, mesh, facts, traced.constants)
        self.out_tree, self._own_trace = traced.out_tree, traced.gm
        self._ranks_digest = hashlib.sha256(container.sections["ranks"]).hexdigest()

    def _eager(self, program: LocalProgram, given: Sequence[Any]) -> Run:
        """As `Program`; the graph is one that another rank of the host has prepared, if any has."""
        about = [self._ranks_digest, self._number(None)]
        path = executed_path(about, program, given, self)
        if path is None:
            return super()._eager(program, given)
        with turn():
            graph = read_executed(path, self.mesh)
            if graph is None:
                graph = executed(self._bound(program), given, self.donated)
                keep_executed(path, graph, self.mesh)
                trim(path.parent, LIMIT)
            return running(graph, self.donated, host=self._has_host)

    @property
    def traced(self) -> fx.GraphModule:
        return self._own_trace


@contextlib.contextmanager
def _one_at_a_time(path: Path, is_needless: Callable[[], bool]) -> Iterator[None]:
    """A lock among the ranks of a host. The kernel frees it when a rank ends; a rank that waits
    continues without it once ``is_needless``, and after ``_PATIENCE`` seconds.
    """
    try:
        import fcntl

        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < _PATIENCE:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if is_needless():
                    break
                time.sleep(min(0.05, max(0.005, waited / 16)))
        yield
    finally:
        os.close(handle)
