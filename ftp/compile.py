"""From one rank's graph to what runs it: eager code of fx, or inductor's without what torch.compile puts around it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from ftp.passes import drop_copies, merge_updates, reuse_memory, schedule, with_values
from ftp.passes.memory import in_place
from ftp.passes.products import Choose, by_onednn, products

aten = torch.ops.aten
Run = Callable[[Sequence[Any]], Sequence[torch.Tensor]]


def eager(graph: fx.Graph, inputs: Sequence[Any], donated: Sequence[int]) -> Run:
    """Runs the nodes one after another, donated weights written in place; ``inputs`` are such as it will be given."""
    inputs = _dense(inputs, donated)
    gm = with_values(fx.GraphModule({}, schedule(drop_copies(graph))), inputs)
    forward = fx.GraphModule({}, merge_updates(reuse_memory(gm.graph, donated), donated)).forward
    return lambda given: forward(*_dense(given, donated))


def _dense(given: Sequence[Any], at: Sequence[int]) -> list[Any]:
    """The inputs at these positions contiguous: an expanded tensor cannot be written to."""
    found = list(given)
    for i in at:
        found[i] = found[i].contiguous()
    return found


def compiled(graph: fx.Graph, inputs: Sequence[Any], donated: Sequence[int], choose: Choose) -> Run:
    """Inductor's code for the whole graph, called directly: no guards, for a step has checked its arguments, and no wrappers.

    An output that an elementwise chain makes of a donated input is written to that input's memory. Integers among the inputs, the
    offsets of this rank's parts, become constants of the code. ``choose`` says which of the graph's products oneDNN does.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
    inputs = _dense(inputs, tensors)

    def on_tensors(*given: torch.Tensor) -> Any:
        full = list(inputs)
        for i, x in zip(tensors, given, strict=True):
            full[i] = x
        return module(*full)

    module = fx.GraphModule({}, schedule(drop_copies(graph)))
    pairs = _written(module.graph, set(donated), inputs)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(inputs[i].detach(), static_shapes=True) for i in tensors]
        gm = make_fx(on_tensors, decomposition_table=select_decomp_table(), tracing_mode="real")(*fake)
    output = gm.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    with gm.graph.inserting_before(output):
        for result, i in pairs.items():
            gm.graph.call_function(aten.copy_.default, (placeholders[tensors.index(i)], results[result]))
    kept = [i for i in range(len(results)) if i not in pairs]
    output.args = (tuple(results[i] for i in kept),)
    gm.graph.eliminate_dead_code()
    gm = fx.GraphModule(gm, by_onednn(gm.graph, choose(products(gm.graph))))
    with torch.no_grad(), tracing(TracingContext(mode)):
        code: Any = compile_fx_inner(gm, fake, is_inference=True)
    count = len(results)

    def run(given: Sequence[Any]) -> Sequence[torch.Tensor]:
        given = _dense(given, tensors)  # the strides that the code is made for
        flat = [given[i] for i in tensors]
        found: list[Any] = [None] * count
        for result, i in pairs.items():
            found[result] = given[i].detach()
        for i, x in zip(kept, code(flat), strict=True):
            found[i] = x
        return found

    return run


def _written(graph: fx.Graph, donated: set[int], inputs: Sequence[Any]) -> dict[int, int]:
    """Output -> the donated input that it is made of by elementwise ops on its first operands; each input once."""
    position = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    found: dict[int, int] = {}
    for at, node in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        while isinstance(node, fx.Node) and in_place(node) is not None and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        i = position.get(node, -1)
        if i in donated and i not in found.values() and node is not graph.output_node().args[0][at]:  # type: ignore[index]
            found[at] = i
    return found
