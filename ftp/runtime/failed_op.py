"""The op of a rank's graph that raised an error, found in the error's traceback."""

import itertools
import linecache
from collections.abc import Sequence
from types import CodeType

from torch import fx

from ftp.ops.written import writes
from ftp.passes.aliasing import families
from ftp.runtime.gloo_calls import arrived
from ftp.torch_internals.op_types import OpOverload


def begun(error: BaseException, preparing: CodeType) -> list[fx.Node] | None:
    """The nodes of a rank's graph that ran or began before the error; None if unknown.

    Args:
        preparing: the function that compiles the graph; if it raised the error, nothing has run.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is preparing:
            return []
        traceback = traceback.tb_next
    node = failing(error, is_inner=False)
    if node is None:
        return None
    return [*itertools.takewhile(lambda other: other is not node, node.graph.nodes), node]


def written_by(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes of a graph whose memory these nodes of it may write to."""
    root = families(nodes[0].graph)
    written: set[fx.Node] = set()
    for node in nodes:
        is_known = (
            node.op != "call_function"
            or isinstance(node.target, OpOverload)
            or node.target in (getattr, arrived)
            or node.meta.get("direct")
        )
        written |= {root[x] for x in (writes(node) if is_known else node.all_input_nodes)}
    return {node for node, first in root.items() if first in written}


def failing(error: BaseException, *, is_inner: bool = True) -> fx.Node | None:
    """The node of a rank's graph that raised the error; None if the graph was compiled. For a node
    in a branch of a cond: the node if ``is_inner``, else the cond.
    """
    traceback, node = error.__traceback__, None
    while traceback is not None and (is_inner or node is None):
        frame = traceback.tb_frame
        module = frame.f_locals.get("self")
        if "eval_with_key" in frame.f_code.co_filename and isinstance(module, fx.GraphModule):
            line = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
            name = line.split("=")[0].strip()
            node = next((n for n in module.graph.nodes if n.name == name), None)
        traceback = traceback.tb_next
    return node


def describe_op(error: BaseException) -> str:
    node = failing(error)
    if node is None:
        return ""
    return f"{node.target}{f' at {source}' if (source := node.meta.get('source')) else ''}"
