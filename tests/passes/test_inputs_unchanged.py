"""Passes are values in, values out: none changes the graph that it is given."""

import functools
import importlib
import inspect
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dropless import FORMS, drawn
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, specs
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import ftp
import ftp.passes
import ftp.planning
from ftp import P
from ftp.passes import transport
from ftp.passes.buffer_reuse import with_values
from ftp.planning.graph import Graph, Rewrite
from ftp.runtime.compile import eager
from ftp.runtime.lowering import for_inductor, ordered

GRAPHS = (Graph, fx.Graph)


def passes() -> dict[str, Callable[..., Any]]:
    """The functions of ftp.planning and ftp.passes whose first argument and result are graphs."""
    found = {}
    for package in (ftp.planning, ftp.passes):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            for name, fn in vars(module).items():
                if inspect.isfunction(fn) and fn.__module__ == module.__name__ and name[0] != "_":
                    types = list(inspect.get_annotations(fn, eval_str=True).values())
                    if types and types[0] in GRAPHS and types[-1] in (*GRAPHS, Rewrite):
                        found[name] = fn
    return {name: fn for name, fn in found.items() if name != "unchanged"}


def printed(graph: Graph | fx.Graph) -> str:
    """All of a graph: nodes with their operands, cuts and metas."""
    if isinstance(graph, Graph):
        return "\n".join([*(repr(vars(node)) for node in graph.nodes), repr(graph.outputs)])
    return "\n".join(
        f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {list(n.users)} {n.meta}"
        for n in graph.nodes
    )


def train_step(**options: Any) -> ftp.Lowered:
    """A Llama with two recomputed layers, fused AdamW, over two mesh axes."""
    cfg = LlamaConfig(vocab=67, layers=2)
    fn, params = ftp.functionalize(build(cfg))
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
    loss = ftp.remat(lm_loss(fn))

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads, value = torch.func.grad_and_value(loss)(params, batch)
        return *opt.update(grads, state, params), value

    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    of_params = ftp.plan(params, specs(cuts(cfg), tp="tp", zero="dp"))
    of_state = opt.specs(params, of_params)
    placed = (of_params, of_state, P("dp"))
    return ftp.spmd(step, mesh, placed, (of_params, of_state, P()), donate=(0, 1), **options).lower(
        params, opt.init(params), lm_batch(cfg, 4, 6)
    )


def choosing() -> ftp.Lowered:
    """A branch, attention per rank of which one result is used, and an op in primitives."""
    mesh = ftp.simulated_mesh((2,), ("tp",))
    both = ftp.local(lambda x: (x * 2, x + 1), mesh, (P("tp"),), (P("tp"), P("tp")))

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, _ = both(torch.softmax(x @ w, -1))
        taken = torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y.exp(), (y,))
        return taken.sum(0)

    step = ftp.spmd(fn, mesh, (P(), P(None, "tp")), P())
    return step.lower(torch.ones(4, 6), torch.ones(6, 6))


def over_slow_links() -> ftp.Lowered:
    """Sums over a fast and a slow link, of dtypes that no backend sums or pads."""
    links = {"a": ftp.Link(1e-9, 1e12), "b": ftp.Link(1e-8, 1e7)}
    mesh = ftp.simulated_mesh((2, 2), ("a", "b"))

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"]).square().sum() + params["scale"].float().sum()

    def step(params: Any, x: torch.Tensor) -> Any:
        grads, value = torch.func.grad_and_value(fn)(
            {**params, "scale": params["scale"].float()}, x
        )
        return value, grads, params["scale"]

    given = {"w": torch.ones(4, 8), "scale": torch.ones(5).to(torch.float8_e8m0fnu)}
    of = {"w": P(), "scale": P("a")}
    return ftp.spmd(
        step, mesh, (of, P(("a", "b"))), (P(), P(), P()), hardware=ftp.Hardware(links=links)
    ).lower(given, torch.ones(8, 4))


def sending_tokens() -> ftp.Lowered:
    """Experts whose tokens travel, and the gradient of their activation."""
    params, x = drawn(4, 4, None, 0)
    layer = ftp.plans.send_tokens(lambda p, x: FORMS["torchtitan_form"](p, x, 2), "ep")
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    mesh = ftp.simulated_mesh(2, "ep")
    step = ftp.shard(lambda p, x: layer(p, x).square().sum(), mesh, specs, batch_specs=P("ep"))
    return step.lower(params, x)


def scanning() -> ftp.Lowered:
    """A scan from the end of a cut dim."""
    mesh, cut = ftp.simulated_mesh((2,), ("s",)), P("s")
    step = ftp.spmd(lambda x: x.flip(0).cumsum(0).flip(0), mesh, cut, cut)
    return step.lower(torch.ones(64, 64))


@pytest.mark.slow
def test_no_pass_changes_the_graph_that_it_is_given(monkeypatch: pytest.MonkeyPatch):
    called: Counter[str] = Counter()
    listed = passes()

    def checked(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(graph: Any, *args: Any, **kwargs: Any) -> Any:
            before = printed(graph)
            made = fn(graph, *args, **kwargs)
            assert printed(graph) == before, f"{name} changes its input"
            called[name] += (made[0] if isinstance(made, tuple) else made) is not graph
            return made

        return run

    for name, fn in listed.items():
        wrapper = checked(name, fn)
        for module in [m for key, m in sys.modules.items() if key.split(".")[0] == "ftp"]:
            for attribute, value in list(vars(module).items()):
                if value is fn:
                    monkeypatch.setattr(module, attribute, wrapper)

    programs = [
        train_step(bucket=True, reduce_dtype=torch.bfloat16, chunks=2),
        train_step(async_tp=True, bucket=False),
        choosing(),
        over_slow_links(),
        sending_tokens(),
        scanning(),
    ]
    for lowered in programs:
        local = lowered._program.local()
        leaves = [*lowered._local_inputs, *local.offsets_at(lowered._coordinate)]
        with FakeTensorMode():
            given = [x if isinstance(x, int) else torch.empty(x[0], dtype=x[1]) for x in leaves]
        donated = lowered._program.donated
        graph = with_values(fx.GraphModule({}, ordered(local.gm.graph)), given).graph
        for_inductor(graph, donated, lambda products: products)
        for change in (
            transport.as_backends_take,
            transport.keeping_nan,
            transport.pads_as_kernels_take,
        ):
            change(local.gm.graph)
        eager(local.gm.graph, given, donated)
    never = sorted(set(listed) - set(called))
    assert not never, f"no program of this test goes through {never}"
