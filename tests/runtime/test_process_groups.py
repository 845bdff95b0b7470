"""Graphs bound to process groups."""

import pytest
import torch

import ftp
from ftp import P
from ftp.partitioning.collectives import OVER_GLOO
from ftp.passes.aliasing import ALL_GATHER, ALL_REDUCE
from ftp.passes.copy_elimination import copied
from ftp.runtime import process_groups
from ftp.runtime.process_groups import for_backends


def test_a_graph_is_copied_once_for_its_backends(monkeypatch: pytest.MonkeyPatch):
    """A graph that reports read stays as it is; the caller's own copy is changed in place."""
    monkeypatch.setattr(process_groups, "is_over_gloo", lambda *_: True)
    mesh = ftp.AbstractMesh((2,), ("tp",))
    step = ftp.spmd(lambda x: (x.sum(0), x * 2), mesh, P("tp"), (P(), P()))
    given = step.lower(torch.ones(4, 2))._program.local().gm.graph
    cpu = torch.device("cpu")

    def collectives(graph: torch.fx.Graph) -> list[tuple[object, object]]:
        kinds = (ALL_REDUCE, ALL_GATHER, OVER_GLOO)
        return [(n.target, n.meta.get("direct")) for n in graph.nodes if n.target in kinds]

    unchanged = [(ALL_REDUCE, None), (ALL_GATHER, None)]
    changed = [(ALL_REDUCE, True), (OVER_GLOO, True)]
    assert sorted(collectives(given), key=str) == sorted(unchanged, key=str)
    made = for_backends(given, cpu, host=True)
    assert made is not given and sorted(collectives(made), key=str) == sorted(changed, key=str)
    assert sorted(collectives(given), key=str) == sorted(unchanged, key=str)
    own, _ = copied(given)
    assert for_backends(own, cpu, host=True, is_own=True) is own
    assert sorted(collectives(own), key=str) == sorted(changed, key=str)
    monkeypatch.setattr(process_groups, "is_over_gloo", lambda *_: False)
    assert for_backends(given, cpu, host=True) is given
