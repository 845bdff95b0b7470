"""The subgraphs that the ranks of a program compile, of all ranks in one process."""

from collections.abc import Collection, Sequence
from typing import Any

from ftp.passes.transport import as_backends_take, keeping_nan
from ftp.rules.call import Meta
from ftp.runtime.compile import subgraphs_of
from ftp.runtime.process_groups import faster
from ftp.runtime.program import Program
from ftp.runtime.saved_code import save_code
from ftp.runtime.split_at_collectives import Subgraph


def code_of_ranks(program: Program, metas: Sequence[Meta]) -> tuple[dict[str, Any], bytes]:
    """See `save_code`, of every rank. Ranks of equal graphs have the same code, unless it holds
    their offsets.

    Args:
        metas: of the inputs, global.
    """
    subgraphs: dict[str, Subgraph] = {}
    known = dict(program.by_onednn)

    def choose(matmuls: Collection[str]) -> list[str]:
        found = faster(matmuls, known)
        known.update({p: p in found for p in matmuls})
        return found

    done: set[Any] = set()
    for coordinate in program.mesh.coordinates():
        local = program.local(coordinate)
        kind = local.gm, *local.offsets_at(coordinate)
        if done.isdisjoint((local.gm, kind)):
            graph = keeping_nan(as_backends_take(local.gm.graph))
            given = program.fake_inputs(metas, coordinate)
            _, found, _ = subgraphs_of(graph, given, program.donated, choose)
            subgraphs |= {subgraph.key(): subgraph for subgraph in found}
            done.add(kind if any(subgraph.numbers for subgraph in found) else local.gm)
    return save_code(subgraphs, known)
