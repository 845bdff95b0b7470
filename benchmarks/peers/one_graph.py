"""Megatron by hand, the whole step with AdamW traced to one graph and compiled by inductor: "P4",
which the others are measured by.

Inductor's code is called directly, without the guards of torch.compile and without AOTAutograd's
wrapper; weights are written in place.
"""

import torch
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from peers import megatron
from peers.workloads import RATE, Step, Workload, batch

BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01  # torch's defaults of AdamW


def build(work: Workload) -> Step:
    megatron.Reduce.run = staticmethod(megatron.all_reduce)
    model = megatron.model_of(work)
    names = [name for name, _ in model.named_parameters()]
    params = [p.detach() for p in model.parameters()]
    state = [torch.zeros_like(p) for p in params for _ in range(2)]
    count = torch.zeros(())
    n = len(params)

    def train_step(*flat):
        weights, moments, count, inputs = flat[:n], flat[n : 3 * n], flat[3 * n], flat[3 * n + 1 :]
        leaves = [w.detach().requires_grad_() for w in weights]
        with torch.enable_grad():
            loss = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), inputs)
            grads = torch.autograd.grad(loss, leaves)
        count = count + 1
        first, second = 1 - BETAS[0] ** count, (1 - BETAS[1] ** count).sqrt()
        new_weights, new_moments = [], []
        for w, g, m, v in zip(weights, grads, moments[::2], moments[1::2], strict=True):
            m, v = m.lerp(g, 1 - BETAS[0]), v * BETAS[1] + g * g * (1 - BETAS[1])
            new_weights.append(
                w * (1 - RATE * DECAY) - RATE / first * m / (v.sqrt() / second + EPS)
            )
            new_moments += [m, v]
        return (*new_weights, *new_moments, count, loss.detach())

    flat = [*params, *state, count]
    given = [*flat, *batch(work, 0)]
    traced = make_fx(train_step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    with torch.no_grad():
        pure = functionalize(traced, remove="mutations_and_views")
        gm = make_fx(
            pure,
            decomposition_table=select_decomp_table(),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*given)
    run = compile_in_place(gm, len(flat))

    def step(batch):
        return run([*flat, *batch])[0]

    return step


def compile_in_place(gm: torch.fx.GraphModule, written: int):
    """Inductor's code for a graph whose first outputs are new values of its first inputs,
    written there; it returns the rest.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    output = gm.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    with gm.graph.inserting_before(output):
        for old, new in zip(inputs[:written], results[:written], strict=True):
            gm.graph.call_function(torch.ops.aten.copy_.default, (old, new))
    output.args = (tuple(results[written:]),)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    fake = [node.meta["val"] for node in inputs]
    with tracing(TracingContext(fake[0].fake_mode)):
        return compile_fx_inner(gm, fake, is_inference=True)
