"""Whether two tensors of a trace hold the same values, because the same ops made them of the same
tensors, such as a mask that is written twice.
"""

import operator

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from ftp.tracing.captured_tensors import is_batched, node_of
from ftp.tracing.known_values import are_written
from ftp.tracing.op_facts import op_facts


def holds_same(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` are seen to hold the same values."""
    x, y = node_of(a), node_of(b)
    if x is None or y is None or is_batched(a) or is_batched(b):
        return a is b
    pairs: dict[tuple[fx.Node, fx.Node], None] = {}
    stack = [(x, y)]
    while stack:
        pair = stack.pop()
        if pair in pairs:
            continue
        pairs[pair] = None
        if pair[0] is not pair[1]:
            if not _is_same_call(*pair):
                return False
            stack += zip(pair[0].all_input_nodes, pair[1].all_input_nodes, strict=True)
    return not are_written({node for pair in pairs for node in pair}, x.graph)


def _is_same_call(x: fx.Node, y: fx.Node) -> bool:
    """Whether two nodes call one op with equal arguments, up to the nodes that they read."""
    if x.op != "call_function" or y.op != x.op or x.target is not y.target:
        return False
    if x.target is not operator.getitem:
        assert isinstance(x.target, OpOverload), x.target
        if x.target._schema.is_mutable or op_facts(x.target).is_random:
            return False
    return _arguments(x) == _arguments(y)


def _arguments(node: fx.Node) -> str:
    """A node's arguments, with the number of each node that it reads in the place of the node."""
    numbers = {n: i for i, n in enumerate(node.all_input_nodes)}
    given = (node.args, node.kwargs)
    return repr(map_arg(given, lambda n: f"%{numbers[n]}"))  # type: ignore[arg-type]
