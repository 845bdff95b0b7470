"""What a failed direct call has written to."""

import torch

from ftp.passes.aliasing import ALL_REDUCE, WAIT
from ftp.rules.local_op import RankGraph
from ftp.runtime.failed_op import written_by
from ftp.runtime.gloo_calls import call_directly

aten = torch.ops.aten


def test_a_failed_collective_has_written_to_no_donated_input():
    def graph(target, *args):
        graph = RankGraph()
        x = graph.placeholder("x")
        sent = graph.call_function(target, (x, *args))
        sent.meta |= {"direct": True, "collective": _Sum}
        arrived = graph.call_function(WAIT, (sent,))
        graph.output(graph.call_function(aten.mul_.Tensor, (arrived, 2)))
        call_directly(graph)
        return [node.name for node in written_by(list(graph.nodes)[:4]) if node.op == "placeholder"]

    assert graph(torch.ops.ftp.all_gather_over_gloo.default, 2, "0") == []
    assert graph(ALL_REDUCE, "sum", "0") == []


class _Sum:
    dtype = torch.float32
