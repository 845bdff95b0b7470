"""Subgraphs of a rank's graph: run one by one they give what the graph gives, and repeated layers
are equal subgraphs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from few_or_many import slow_after
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, specs
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import ftp
from ftp import P
from ftp.ops.fused_optimizer import UPDATES
from ftp.passes.buffer_reuse import with_values
from ftp.passes.inline_small_ops import MATMUL, UPDATE, small_matmuls, small_updates
from ftp.runtime.compile import compiled, subgraphs_of
from ftp.runtime.inductor_kernels import compiled_together
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.program import Program, join_parts, shard_of
from ftp.runtime.simulate import simulate
from ftp.runtime.split_at_collectives import Subgraph, split, with_subgraphs
from ftp.sharding.pytree import flatten
from tests.passes.test_passes import ADAMW, FUSED, PLANS, compare, lowered


def interpreted(subgraph: Subgraph) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What a compiled subgraph does, by the ops themselves."""
    gm = fx.GraphModule({}, subgraph.graph)

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        results = gm(*inputs)
        for value, (_, old) in zip(results[len(subgraph.outputs) :], subgraph.writes, strict=True):
            inputs[subgraph.inputs.index(old)].copy_(value)
        return results[: len(subgraph.outputs)]

    return run


def in_pieces(
    program: Program, leaves: Sequence[torch.Tensor], coordinate: Mapping[str, int]
) -> tuple[list[Subgraph], fx.Graph, list[Any]]:
    """The pieces of a rank's graph, the graph, and its inputs."""
    local = program.local(coordinate)
    shards = [
        shard_of(x, spec, program.mesh.axes, coordinate).clone()
        for x, spec in zip(leaves, program.in_specs, strict=True)
    ]
    inputs = [*shards, *program.constants, *local.offsets_at(coordinate)]
    graph, subgraphs, held = subgraphs_of(
        local.gm.graph, inputs, program.donated, lambda matmuls: ()
    )
    return subgraphs, graph, [*inputs, *held]


def by_pieces(
    program: Program, leaves: Sequence[torch.Tensor]
) -> tuple[list[list[Subgraph]], list[torch.Tensor]]:
    """The pieces of each rank's graph, and what the ranks compute by them."""
    axes, coordinates = program.mesh.axes, program.mesh.coordinates()
    pieces, locals_, inputs = [], [], []
    for coordinate in coordinates:
        subgraphs, graph, given = in_pieces(program, leaves, coordinate)
        called = with_subgraphs(graph, subgraphs, list(map(interpreted, subgraphs)))
        locals_.append(replace(program.local(coordinate), gm=fx.GraphModule({}, called)))
        pieces.append(subgraphs)
        inputs.append(given)
    before = [[given[i].data_ptr() for i in program.donated[:1]] for given in inputs]
    outputs = simulate(locals_, inputs, groups_of(program.mesh))
    after = [[rank[i].data_ptr() for i in program.donated[:1]] for rank in outputs]
    assert after == before, "a donated weight is updated where it lies"
    whole = [
        join_parts([rank[i] for rank in outputs], spec, shape, axes, coordinates)
        for i, (spec, shape) in enumerate(zip(program.out_specs, program.out_shapes, strict=True))
    ]
    return pieces, [whole[leaf] for leaf in program.out_leaves]


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("plan", ["tp", "zero×tp"])
@pytest.mark.parametrize("opt", slow_after(1, [ADAMW, FUSED]), ids=["formulas", "fused"])
def test_pieces_give_what_the_graph_gives(plan: str, opt: Any):
    assert plan in PLANS
    made, leaves, expected = lowered(plan, opt=opt)
    compare(by_pieces(made._program, leaves)[1], expected)


def test_repeated_layers_are_equal_pieces():
    counts = []
    for layers in (2, 3):
        made, leaves, _ = lowered("tp", layers, FUSED)
        subgraphs, *_ = in_pieces(made._program, leaves, {"tp": 0})
        counts.append((len(subgraphs), len({subgraph.key() for subgraph in subgraphs})))
    assert counts[1][0] > counts[0][0]
    assert counts[1][1] == counts[0][1], "more layers, no more to compile"


GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(8, 6, dtype=torch.float64, generator=GENERATOR)


def decoder() -> tuple[Callable[..., torch.Tensor], Any, Any]:
    cfg = LlamaConfig(layers=1, hidden=32)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64))
    return lm_loss(fn), params, lm_batch(cfg)


def with_masks(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Masks of positions, and dropout."""
    at = torch.arange(len(x), dtype=torch.float64)
    kept = ftp.random.dropout(ftp.random.key(3), x @ w, 0.25)
    scores = (kept @ x.t()).tril() + torch.eye(len(x), dtype=torch.float64)
    return (scores.softmax(-1) @ x * (at / 3)[:, None]).square().mean()


@pytest.mark.parametrize("case", ["vocabulary", "positions", "zigzag", "masks"])
def test_ranks_of_equal_shapes_share_their_pieces(case: str):
    """Where a rank's shards begin is no part of its pieces."""
    fn, params, batch = (with_masks, X[:6], X) if case == "masks" else decoder()
    mesh = ftp.simulated_mesh((2 if case == "zigzag" else 4,), ("x",))
    weights = specs(cuts(LlamaConfig()), tp="x")
    of_params = ftp.plan(params, weights) if case == "vocabulary" else P()
    data = {"zigzag": P(None, ftp.zigzag("x")), "positions": P(None, "x"), "masks": P("x")}
    made = (
        ftp.shard(fn, mesh, of_params, batch_specs=data.get(case, P()))
        .lower(params, batch)
        ._program
    )
    grads, value = torch.func.grad_and_value(fn)(params, batch)
    pieces, outputs = by_pieces(made, flatten((params, batch))[0])
    compare(outputs, flatten((value, grads))[0])
    keys = [tuple(subgraph.key() for subgraph in rank) for rank in pieces]
    locals_ = [made.local(at) for at in made.mesh.coordinates()]
    assert all(local.offsets for local in locals_)
    graphs = {id(local.gm) for local in locals_}
    assert len({*keys}) == len(graphs) == (2 if case == "vocabulary" else 1)
    # One rank adds the residual stream to its part of the sum over ranks.
    assert len({key for rank in keys for key in rank}) == len({*keys[0]}) + len(graphs) - 1
    assert not any(subgraph.numbers for rank in pieces for subgraph in rank)


def test_a_slice_of_a_value_keeps_its_start():
    """A view at an offset that a kernel does not know would not be as fast."""
    mesh = ftp.simulated_mesh((2,), ("tp",))
    made = ftp.spmd(lambda x: x.exp() * 2, mesh, P(), P("tp")).lower(X)._program
    pieces, outputs = by_pieces(made, [X])
    compare(outputs, [X.exp() * 2])
    assert len({subgraph.key() for rank in pieces for subgraph in rank}) == 2
    assert all(subgraph.numbers for rank in pieces for subgraph in rank)


def test_an_input_that_a_later_piece_reads_is_not_written():
    reduce, wait = (
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
    )
    for reads_later in (True, False):
        graph = fx.Graph()
        w, g = graph.placeholder("w"), graph.placeholder("g")
        view = graph.call_function(torch.ops.aten.t.default, (w,))
        new = graph.call_function(torch.ops.aten.sub.Tensor, (w, g))
        total = graph.call_function(wait, (graph.call_function(reduce, (g, "sum", "a group")),))
        later = graph.call_function(torch.ops.aten.mul.Tensor, (total, view if reads_later else g))
        graph.output((new, later))
        for node, value in zip(graph.nodes, [torch.ones(2, 2)] * 8, strict=False):
            node.meta["val"] = value.t() if node is view else value
        first, second = split(graph, {}, {new: w})
        assert bool(first.writes) is not reads_later
        assert (w in second.inputs) is reads_later and view not in second.inputs


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's, as it is imported
@pytest.mark.slow
def test_kernels_of_several_graphs_are_one_library():
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    from ftp.runtime.compile import _compiled

    values = [torch.randn(8, 8) for _ in range(2)]
    made = []
    with pytest.MonkeyPatch.context() as patch:
        loaded: list[str] = []
        load = CppPythonBindingsCodeCache.load_async.__func__  # type: ignore[attr-defined]
        patch.setattr(
            CppPythonBindingsCodeCache,
            "load_async",
            classmethod(lambda cls, code, *a, **k: loaded.append(code) or load(cls, code, *a, **k)),
        )
        with compiled_together():
            for op in (torch.ops.aten.exp.default, torch.ops.aten.sin.default):
                graph = fx.Graph()
                x, y = graph.placeholder("x"), graph.placeholder("y")
                graph.output(
                    (
                        graph.call_function(
                            torch.ops.aten.add.Tensor, (graph.call_function(op, (x,)), y)
                        ),
                    )
                )
                for node in (x, y):
                    node.meta["val"] = values[0]
                added = next(iter(x.users)).users
                subgraph = Subgraph(list(graph.nodes)[2:4], graph, [x, y], list(added))
                made.append(_compiled(subgraph))
    assert len(loaded) == 1
    for run, op in zip(made, (torch.exp, torch.sin), strict=True):
        torch.testing.assert_close(run(list(values))[0], op(values[0]) + values[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's, as it is imported
def test_random_bits_that_are_compiled_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch):
    """As they are on a GPU; on a CPU they stand alone."""
    monkeypatch.setattr("ftp.runtime.split_at_collectives.is_drawn_by_itself", lambda node: False)
    x, key = torch.randn(6, 8), ftp.random.key(3)

    def f(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return ftp.random.dropout(ftp.random.fold_in(key, 5), x, 0.25) * 2

    due = f(x, key)
    monkeypatch.setattr("ftp.ops.philox._read_natively", None)
    program = (
        ftp.spmd(f, ftp.simulated_mesh((2,), ("dp",)), (ftp.P("dp"), ftp.P()), ftp.P("dp"))
        .lower(x, key)
        ._program
    )
    local = program.local({"dp": 1})
    given = [x[3:], key, *program.constants, *local.offsets_at({"dp": 1})]
    run = compiled(local.gm.graph, given, (), lambda matmuls: ())
    torch.testing.assert_close(run(given)[0], due[3:], rtol=0, atol=0)


# Small matmuls and updates.


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.0, "maximize": True}, {"betas": (0.5, 0.9), "eps": 1e-3}],
    ids=str,
)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_small_updates_are_what_the_kernel_does(name: str, options: dict[str, Any]):
    opt = ftp.optim.from_torch(
        getattr(torch.optim, name), **{"lr": 1e-2, "weight_decay": 0.1, "fused": True, **options}
    )
    params = {
        "small": torch.randn(UPDATE, dtype=torch.float64),
        "large": torch.randn(UPDATE + 1, dtype=torch.float64),
    }
    made = ftp.spmd(opt.update, ftp.simulated_mesh((1,), ("tp",)))
    expected: Any = params, opt.init(params)
    given = optree.tree_map(torch.clone, expected, namespace="ftp")
    for _ in range(3):
        grads = {name: torch.randn_like(p) for name, p in params.items()}
        leaves = flatten((grads, given[1], given[0]))[0]
        graph = small_updates(
            with_values(made.lower(grads, given[1], given[0]).graph, leaves).graph
        )
        assert sum(node.target in UPDATES for node in graph.nodes) == 1, "the large one is left"
        found = fx.GraphModule({}, graph)(*leaves)
        new_params, state = opt.update(grads, expected[1], expected[0])
        expected = new_params, state
        compare(found, flatten(expected)[0])
        given = optree.tree_unflatten(optree.tree_structure(expected, namespace="ftp"), found)


@pytest.mark.parametrize("more", [0, 1])
def test_small_products_are_loops(more: int):
    a, b, bias = (
        torch.randn(8, 16).double(),
        torch.randn(MATMUL // 128 + more, 16).double().t(),
        torch.randn(1).double(),
    )
    traced = make_fx(
        lambda a, b, bias: (a @ b, torch.addmm(bias, a, b)), decomposition_table=small_matmuls()
    )(a, b, bias)
    compare(traced(a, b, bias), [a @ b, torch.addmm(bias, a, b)])
    matmuls = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default} & {
        node.target for node in traced.graph.nodes
    }
    assert len(matmuls) == 2 * more
