"""Turn formulas of dynamic sizes into inputs of a rank's graph, so that it serves all sizes."""

from collections.abc import Sequence

from torch import fx
from torch.fx.node import map_aggregate

from ftp.dynamic_float import DynamicFloat, is_formula
from ftp.dynamic_int import DynamicInt
from ftp.passes.copy_elimination import copied


def number_inputs(
    graph: fx.Graph, beside: Sequence[DynamicInt] = ()
) -> tuple[fx.Graph, tuple[DynamicInt | DynamicFloat, ...]]:
    """Replace each formula in the nodes' arguments, and each of ``beside``, by a number input after
    the graph's other inputs. Returns the new graph, and the formulas in the order of these inputs.
    """
    new, _ = copied(graph)
    last, made = None, dict[DynamicInt | DynamicFloat, fx.Node]()
    for node in new.nodes:
        if node.op == "placeholder":
            last = node

    def number(x: object) -> object:
        nonlocal last
        if not is_formula(x):
            return x
        if x not in made:
            before = new.inserting_before(next(iter(new.nodes)))
            with before if last is None else new.inserting_after(last):
                last = made[x] = new.placeholder(f"size_{len(made)}")  # type: ignore[index]
        return made[x]  # type: ignore[index]

    for x in beside:
        number(x)
    for node in list(new.nodes):
        args, kwargs = map_aggregate((node.args, dict(node.kwargs)), number)  # type: ignore[misc]
        node._update_args_kwargs(args, kwargs)
    return new, tuple(made)
