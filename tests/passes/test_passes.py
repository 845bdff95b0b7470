"""Passes over a rank's graph change no value: simulated before and after, on random programs and
on train steps.
"""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from few_or_many import few_or_many, slow_unless
from launch import launch
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, sequence_parallel, specs
from programs import AXES, Drawn, programs
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ftp
from ftp import P
from ftp.ops.fused_optimizer import UPDATES
from ftp.passes import onednn_matmuls
from ftp.passes.aliasing import families
from ftp.passes.bucket_collectives import choose_buckets
from ftp.passes.buffer_reuse import reuse_memory_in, with_values
from ftp.passes.copy_elimination import copied, drop_copies
from ftp.passes.fuse_optimizer_updates import merge_updates
from ftp.passes.schedule import schedule_in
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.program import Program, join_parts, shard_of
from ftp.runtime.simulate import simulate
from ftp.sharding.pytree import flatten
from tests.api.test_programs import compare

C10D = torch.ops._c10d_functional
ADAMW = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2)
FUSED = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
Pass = Callable[[fx.Graph], fx.Graph]


def run(
    program: Program,
    leaves: Sequence[torch.Tensor],
    passes: Sequence[Pass],
    donated: Sequence[int] | None = None,
) -> tuple[Any, list]:
    """The program's outputs after some passes, whole, and the rank's inputs as the run left
    them.
    """
    coordinates, axes = program.mesh.coordinates(), program.mesh.axes
    locals_, inputs = [], []
    for coordinate in coordinates:
        local = program.local(coordinate)
        shards = [
            shard_of(x, spec, axes, coordinate).clone()
            for x, spec in zip(leaves, program.in_specs, strict=True)
        ]
        inputs.append([*shards, *program.constants, *local.offsets_at(coordinate)])
        graph = local.gm.graph
        for change in passes:
            graph = change(graph)
        if donated is not None:
            graph, _ = copied(with_values(fx.GraphModule({}, graph), inputs[-1]).graph)
            reuse_memory_in(graph, donated)
            graph = merge_updates(graph, donated)
            assert not written_in_flight(graph)
        locals_.append(replace(local, gm=fx.GraphModule({}, graph)))
    outputs = simulate(locals_, inputs, groups_of(program.mesh))
    whole = [
        join_parts([rank[i] for rank in outputs], spec, shape, axes, coordinates)
        for i, (spec, shape) in enumerate(zip(program.out_specs, program.out_shapes, strict=True))
    ]
    issued = {
        tuple((n.target, *n.args[1:]) for n in p.gm.graph.nodes if "collective" in n.meta)
        for p in locals_
    }
    assert len({tuple(str(call[0]) for call in calls) for calls in issued}) == 1, (
        "all ranks issue the same collectives"
    )
    return whole, inputs


def written_in_flight(graph: fx.Graph) -> list[fx.Node]:
    """What writes to memory that a collective is still reading; a simulated one has read it at
    once.
    """
    family, read, found = families(graph), {}, []
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            writes = [
                v
                for a, v in zip(schema.arguments, node.args, strict=False)
                if a.alias_info and a.alias_info.is_write
            ]
            written = {
                family[x] for v in writes for x in (v if isinstance(v, list | tuple) else [v])
            }
            found += [node] if not written.isdisjoint(read.values()) else []
        if (
            "collective" in node.meta and node.target is not C10D.all_reduce.default
        ):  # that one works on a copy
            read[node] = family[node.args[0]]
        elif node.target is C10D.wait_tensor.default:
            read.pop(node.args[0], None)
    return found


def scheduled(graph: fx.Graph) -> fx.Graph:
    made, _ = copied(graph)
    schedule_in(made)
    return made


PASSES = [
    drop_copies,
    scheduled,
]  # after `prefetch` and `bucket_collectives_in`, which a program does itself


@few_or_many(programs(gradients=False), few=12, many=400)
def test_random_programs_keep_their_values(drawn: Drawn):
    mesh = ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)])
    options: dict[str, Any] = {
        "data_axes": drawn.data_axes,
        "reshard_after_forward": drawn.reshard_after_forward,
    }
    step = ftp.spmd(
        drawn.function, mesh, tuple(i.spec for i in drawn.inputs), drawn.out_specs, **options
    )
    program = step.lower(*drawn.values)._program
    expected = list(drawn.function(*drawn.values))
    outputs = [
        expected[leaf]
        for leaf, static in zip(program.out_leaves, program.is_static, strict=True)
        if not static
    ]
    for donated in ((), range(len(drawn.values))):
        found, inputs = run(
            program.with_options(bucket=bool(donated)), drawn.values, PASSES, donated
        )
        compare(
            [
                found[leaf]
                for leaf, static in zip(program.out_leaves, program.is_static, strict=True)
                if not static
            ],
            outputs,
        )
        if not donated:
            for x, spec, shards in zip(
                drawn.values, program.in_specs, zip(*inputs, strict=False), strict=False
            ):
                for coordinate, shard in zip(mesh_of(program), shards, strict=True):
                    assert torch.equal(shard, shard_of(x, spec, program.mesh.axes, coordinate)), (
                        "an input that is kept was written to"
                    )


def mesh_of(program: Program) -> list[dict[str, int]]:
    return list(program.mesh.coordinates())


# Train steps.

PLANS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, str], P]] = {
    "tp": ((2,), ("tp",), {"tp": "tp"}, P()),
    "dp": ((2,), ("dp",), {}, P("dp")),
    "zero": ((2,), ("dp",), {"zero": "dp"}, P("dp")),
    "zero×tp": ((2, 2), ("dp", "tp"), {"tp": "tp", "zero": "dp"}, P("dp")),
    "tp of three": ((3,), ("tp",), {"tp": "tp"}, P()),
}


def train_step(loss_fn: Any, params: Any, state: Any, batch: Any, opt: Any = ADAMW) -> Any:
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    params, state = opt.update(grads, state, params)
    return params, state, loss


def lowered(
    plan: str, layers: int = 1, opt: Any = ADAMW, **options: Any
) -> tuple[ftp.Lowered, list[torch.Tensor], list[torch.Tensor]]:
    """A train step's program, its inputs, and the outputs on one device."""
    shape, axes, weights, batch_specs = PLANS[plan]
    cfg = LlamaConfig(vocab=67, layers=layers)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64))
    step, args = (
        partial(train_step, lm_loss(fn), opt=opt),
        (params, opt.init(params), lm_batch(cfg, 4, 6)),
    )
    of_params = ftp.plan(params, specs(cuts(cfg), **weights))  # type: ignore[arg-type]
    of_state = opt.specs(params, of_params)
    mesh = ftp.simulated_mesh(shape, axes)
    out_specs = (of_params, of_state, P())
    made = ftp.spmd(
        step, mesh, (of_params, of_state, batch_specs), out_specs, donate=(0, 1), **options
    ).lower(*args)
    leaves = [flatten(tree)[0] for tree in (args, step(*args))]
    return made, leaves[0], leaves[1]


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("plan", "name"),
    slow_unless(
        lambda plan, name: (name == "fused") == (plan in ("zero×tp", "tp of three")),
        itertools.product(PLANS, ["formulas", "fused"]),
    ),
)
def test_train_steps_keep_their_values_and_write_in_place(plan: str, name: str):
    opt = FUSED if name == "fused" else ADAMW
    made, leaves, expected = lowered(plan, opt=opt)
    assert len(made._program.donated) == len(leaves) - 2
    for bucket in (False, True):
        program = made._program.with_options(bucket=bucket)
        found, inputs = run(program, leaves, PASSES, program.donated)
        compare([found[leaf] for leaf in program.out_leaves], expected)
        for at, (shards, spec) in enumerate(
            zip(zip(*inputs, strict=False), program.in_specs, strict=False)
        ):
            before = [shard_of(leaves[at], spec, program.mesh.axes, c) for c in mesh_of(program)]
            assert all(map(torch.equal, shards, before)) == (at not in program.donated), (
                program.plan.graph.inputs[at].name
            )


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("layers", [1, 3])
def test_sums_of_the_loss_take_two_collectives(layers: int):
    plain = lowered("tp", layers, bucket=False)[0]
    assert len(plain.collectives) == 2 + 4 * layers + 3
    packed = lowered("tp", layers, bucket=True)[0]
    assert len(packed.collectives) == 2 + 4 * layers + 2
    assert sum("collective" in node.meta for node in packed.graph.graph.nodes) == len(
        packed.collectives
    )


def test_gradients_of_data_parallelism_are_few_collectives():
    plain, packed = (lowered("dp", bucket=b)[0].collectives for b in (False, True))
    assert len(plain) > 10
    assert len(packed) <= 2
    assert sum(c.nbytes for c in packed) == sum(c.nbytes for c in plain)


def test_packed_steps_equal_one_device():
    cfg = LlamaConfig(vocab=67, layers=1)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64))
    of_params = ftp.plan(params, specs(cuts(cfg), tp="tp"))
    step = ftp.shard(
        lm_loss(fn), ftp.simulated_mesh((3,), ("tp",)), of_params, bucket=True, certify=True
    )
    grads, loss = torch.func.grad_and_value(lm_loss(fn))(params, lm_batch(cfg))
    compare(step(params, lm_batch(cfg)), (loss, grads))


MERGED: dict[str, tuple[tuple[str, ...], str | None, P, dict[str, int]]] = {
    "zero over dp × cp": (
        ("dp", "cp"),
        None,
        P("dp", "cp"),
        {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 1},
    ),
    "the other way round": (("cp", "dp"), None, P("dp", "cp"), {"all_reduce": 1}),
    "sequence parallelism": (("dp", "tp"), "tp", P("dp"), {"all_reduce": 5}),
}


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("name", MERGED)
def test_reshards_over_several_axes_are_one(name: str):
    axes, tp, batch_spec, counts = MERGED[name]
    cfg = LlamaConfig(vocab=16, layers=1)
    fn, params = ftp.functionalize(
        build(cfg, dtype=torch.float64), constraints=sequence_parallel(dp="dp") if tp else None
    )
    of_params = ftp.plan(
        params,
        {
            k: v if tp else P(axes, *list(v)[1:])
            for k, v in specs(cuts(cfg), tp=tp, zero=None if tp else "dp").items()
        },
    )
    batch = lm_batch(cfg, 4, 8)
    step = ftp.shard(
        lm_loss(fn),
        ftp.simulated_mesh((2, 2), sorted(axes, key=("dp", "cp", "tp").index)),
        of_params,
        batch_specs=batch_spec,
        bucket=True,
    )
    grads, loss = torch.func.grad_and_value(lm_loss(fn))(params, batch)
    compare(step(params, batch), (loss, grads))
    made = step.lower(params, batch)
    plain = with_options(made, bucket=False).collectives
    found = Counter(c.op for c in made.collectives)
    assert {op: found[op] for op in counts} == counts
    assert any(len(c.axes) == 2 for c in made.collectives) and all(len(c.axes) == 1 for c in plain)
    assert sum(c.wire_nbytes for c in made.collectives) <= sum(c.wire_nbytes for c in plain)


def with_options(made: ftp.Lowered, **options: Any) -> ftp.Lowered:
    return ftp.Lowered(made._program.with_options(**options))


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("plan", ["zero", "zero×tp"])
def test_gathers_run_ahead_within_their_limit_and_are_packed(plan: str):
    plain = lowered(plan, 2, prefetch=0, bucket=False)[0]
    packed = with_options(plain, bucket=True, prefetch=None).collectives
    for op in ("all_gather", "reduce_scatter"):
        before, after = ([c for c in found if c.op == op] for found in (plain.collectives, packed))
        assert len(after) <= 4 < len(before) / 3
        assert sum(c.nbytes for c in after) == sum(c.nbytes for c in before)
    gathers = [c.nbytes for c in plain.collectives if c.op == "all_gather"]
    peaks = []
    for limit in (2000, None, sum(gathers) // 2):
        made = with_options(plain, prefetch=limit)
        peaks.append(int(made.memory) - int(plain.memory))
        assert peaks[-1] <= (max(gathers) if limit is None else limit)
        assert sorted(c.op for c in made.collectives) == sorted(c.op for c in plain.collectives)
    assert peaks[-1] > sum(gathers) / 4, "the whole model is gathered if the limit allows it"


def test_a_gather_is_under_way_while_the_one_before_is_read():
    def gathers_at_products(made: ftp.Lowered) -> list[int]:
        """Per matmul of the forward pass how many gathers have started that none has waited
        for.
        """
        open_, found = set(), []
        for node in made._executed[0].nodes:
            if node.meta.get("is_ahead"):
                open_.add(node)
            elif node.target is C10D.wait_tensor.default:
                open_ -= set(node.all_input_nodes)
            elif node.target is torch.ops.aten.mm.default:
                found.append(len(open_))
            elif node.target is C10D.all_reduce.default:
                return found
        raise AssertionError("there is no loss")

    made = lowered("zero", 2, bucket=False)[0]
    assert not any(gathers_at_products(with_options(made, prefetch=0)))
    assert sum(map(bool, gathers_at_products(made))) > 10


def test_a_gather_that_runs_ahead_leaves_constants_in_their_order():
    def columns_and_rows(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return w[[0, 1]], w[[1, 0]], w[:, [0, 1]], w

    w = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    step = ftp.spmd(columns_and_rows, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P())
    compare(step(w), columns_and_rows(w))


@pytest.mark.parametrize("prefetch", [-1, 1.5, True, "all"])
def test_prefetch_is_a_number_of_bytes(prefetch: Any):
    with pytest.raises(ftp.FtpError, match="a number of bytes"):
        ftp.shard(
            lambda p, x: (p * x).sum(), ftp.AbstractMesh((2,), ("dp",)), P(), prefetch=prefetch
        )


@pytest.mark.parametrize("limit", [8, 100, 3000, 10**6])
def test_buckets_keep_to_their_sizes(limit: int):
    graph = lowered("dp")[0].plan.graph
    sizes = {
        n.name: math.prod(n.results[0].shape) * n.results[0].dtype.itemsize
        for n in graph.nodes
        if n.kind == "reshard"
    }
    of_one, together = (
        choose_buckets(graph, member_bytes=limit).groups,
        choose_buckets(graph, bucket_bytes=limit).groups,
    )
    assert all(sizes[name] <= limit for name in itertools.chain(*of_one))
    assert all(sum(sizes[name] for name in group) <= limit for group in together)
    assert sum(map(len, of_one)) == sum(size <= limit for size in sizes.values())


def test_products_for_weights_stand_between_a_start_and_its_wait():
    made, _, _ = lowered("tp", 2)
    graph = scheduled(drop_copies(made.graph.graph))
    nodes = list(graph.nodes)
    assert [n.meta["origin"] for n in nodes if "collective" in n.meta] == [
        n.meta["origin"] for n in made.graph.graph.nodes if "collective" in n.meta
    ]
    position = {node: at for at, node in enumerate(nodes)}
    covered = 0
    for node in nodes:
        if node.target is C10D.all_reduce.default:
            (wait,) = node.users
            covered += any(
                n.target is torch.ops.aten.mm.default
                for n in nodes[position[node] : position[wait]]
            )
    assert covered >= 2 * 2
    first_update = next(
        at for at, n in enumerate(nodes) if n.target is torch.ops.aten.addcdiv.default
    )
    assert first_update < position[[n for n in nodes if "collective" in n.meta][-1]], (
        "weights are updated before the last collective"
    )


def test_what_is_read_later_is_not_written():
    def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = a + b
        d = c * 2
        view = c.t()
        return d, view.sum(), (a * 3).exp(), b.expand(2, 2, 2) * 1

    graph = fx.GraphModule({}, make_fx(f)(torch.ones(2, 2), torch.ones(2, 2)).graph)
    given = [torch.randn(2, 2, dtype=torch.float64) for _ in range(2)]
    for donated in ((), (0,), (0, 1)):
        changed, _ = copied(with_values(graph, given).graph)
        reuse_memory_in(changed, donated)
        mine = [x.clone() for x in given]
        torch.testing.assert_close(fx.GraphModule({}, changed)(*mine), f(*given))
        for i, x in enumerate(given):
            assert i in donated or torch.equal(mine[i], x)
        assert any(str(node.target).endswith("exp_.default") for node in changed.nodes)


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_what_a_collective_still_reads_is_not_written(collective: str):
    """It reads its operand until it is waited for; an all-reduce works on a copy."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.exp.default, (x,))
    if collective == "all_gather":
        sent = graph.call_function(C10D.all_gather_into_tensor.default, (y, 2, "sim:tp"))
    else:
        sent = graph.call_function(C10D.all_reduce.default, (y, "sum", "sim:tp"))
    beside = graph.call_function(torch.ops.aten.neg.default, (y,))
    arrived = graph.call_function(C10D.wait_tensor.default, (sent,))
    graph.output((beside, arrived))
    with FakeTensorMode():
        for node in graph.nodes:
            if node.op != "output":
                node.meta["val"] = torch.empty(
                    8 if node in (sent, arrived) and collective == "all_gather" else 4
                )
    reuse_memory_in(graph)
    assert not written_in_flight(graph)
    targets = [str(node.target) for node in graph.nodes]
    assert ("aten.neg.default" if collective == "all_gather" else "aten.neg_.default") in targets


def test_updates_that_are_ready_together_are_one_call():
    made, leaves, _ = lowered("tp", 2, FUSED)
    graph = scheduled(drop_copies(made.graph.graph))
    inputs = [*leaves, *made._program.constants, *made._program.local().offsets_at({"tp": 0})]
    shards = [
        shard_of(x, s, {"tp": 2}, {"tp": 0})
        for x, s in zip(leaves, made._program.in_specs, strict=True)
    ]
    graph = with_values(fx.GraphModule({}, graph), [*shards, *inputs[len(shards) :]]).graph
    parameters = sum(node.target in UPDATES for node in graph.nodes)
    merged = list(merge_updates(graph, made._program.donated).nodes)
    updates = [node for node in merged if node.target is torch.ops.aten._fused_adamw_.default]
    assert sum(len(node.args[0]) for node in updates) == parameters  # type: ignore[arg-type]
    assert len(updates) < parameters / 2
    assert not any(
        node.target is torch.ops.aten.clone.default and node.args[0].op == "placeholder"
        for node in merged
    )  # type: ignore[union-attr]
    last = [at for at, node in enumerate(merged) if "collective" in node.meta][-1]
    assert merged.index(updates[0]) < last, "weights are updated before the last collective"


def test_an_update_of_what_is_kept_writes_to_a_copy():
    def f(w: torch.Tensor, m: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = {
            "weight_decay": 0.0,
            "momentum": 0.9,
            "lr": 0.1,
            "dampening": 0.0,
            "nesterov": False,
            "maximize": False,
        }
        sgd = partial(torch.ops.ftp.fused_sgd.default, **options, is_first_step=False)
        new, moment = sgd([w, g.t(), m])
        flipped, _ = sgd([w.t(), g, m])  # no longer in the order of its memory
        return new, moment, flipped, w * 2, m * 2

    given = [torch.randn(2, 2, dtype=torch.float64) for _ in range(3)]
    graph = with_values(fx.GraphModule({}, make_fx(f)(*given).graph), given).graph
    for donated in ((), (0,), (0, 1)):
        mine = [x.clone() for x in given]
        torch.testing.assert_close(
            fx.GraphModule({}, merge_updates(graph, donated))(*mine), f(*given)
        )
        assert all(map(torch.equal, mine, given)), "both are read afterwards"


def test_a_gradient_is_read_before_another_update_writes_it():
    """Updates of other options are other calls, which come later or earlier than the updates did;
    rows of one call may run side by side.
    """

    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, g: torch.Tensor):
        options = dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0)
        options |= dict.fromkeys(("nesterov", "maximize", "is_first_step"), False)
        given = [(a, g, 0.1), (b, c, 0.2), (c, g, 0.1), (d, b, 0.1)]
        sgd = torch.ops.ftp.fused_sgd.default
        return tuple(sgd([x, grad], **options, lr=lr)[0] for x, grad, lr in given)

    given = [torch.randn(2, 2, dtype=torch.float64) for _ in range(5)]
    graph = with_values(fx.GraphModule({}, make_fx(f)(*given).graph), given).graph
    merged = merge_updates(graph, (0, 1, 2, 3))
    calls = [n for n in merged.nodes if n.target is torch.ops.aten._fused_sgd_.default]
    assert [len(call.args[0]) for call in calls] == [3, 1]  # type: ignore[arg-type]
    written = [x for call in calls for x in call.args[0]]  # type: ignore[union-attr]
    assert {n.name for n in written if n.op == "placeholder"} == {"a_1", "d_1"}
    expected = f(*given)
    torch.testing.assert_close(fx.GraphModule({}, merged)(*given), expected, rtol=0, atol=0)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(("ranks", "bucket"), [(2, True), (3, False)])
def test_matmuls_beside_reshards_are_chunked(ranks: int, bucket: bool):
    cfg = LlamaConfig(vocab=67, layers=1)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64), constraints=sequence_parallel())
    of_params, batch = ftp.plan(params, specs(cuts(cfg), tp="tp")), lm_batch(cfg, 4, 8)
    step = ftp.shard(
        lm_loss(fn), ftp.simulated_mesh((ranks,), ("tp",)), of_params, chunks=2, bucket=bucket
    )
    grads, loss = torch.func.grad_and_value(lm_loss(fn))(params, batch)
    compare(step(params, batch), (loss, grads))
    chunked = step.lower(params, batch)
    whole = with_options(chunked, chunks=1)
    for op in ("all_gather", "reduce_scatter"):
        before, after = ([c for c in found.collectives if c.op == op] for found in (whole, chunked))
        assert len(before) + 2 <= len(after) <= 2 * len(before)
        assert sum(c.nbytes for c in after) == sum(c.nbytes for c in before)
    nodes = list(chunked._executed[0].nodes)
    under_way, covered = set(), 0
    for node in nodes:
        if node.target in (C10D.all_gather_into_tensor.default, C10D.reduce_scatter_tensor.default):
            under_way.add(node)
        under_way -= set(node.all_input_nodes) if node.target is C10D.wait_tensor.default else set()
        covered += node.target is torch.ops.aten.mm.default and bool(under_way)
    assert covered >= 6, "matmuls are computed while a chunk is under way"


def test_chunks_that_do_not_divide_the_batch_are_left_out():
    cfg = LlamaConfig(vocab=67, layers=1)
    fn, params = ftp.functionalize(build(cfg, device="meta"), constraints=sequence_parallel())
    of_params, batch = ftp.plan(params, specs(cuts(cfg), tp="tp")), lm_batch(cfg, 3, 8)
    made = ftp.shard(lm_loss(fn), ftp.AbstractMesh((2,), ("tp",)), of_params, chunks=2).lower(
        params, batch
    )
    assert len(made.collectives) == len(with_options(made, chunks=1).collectives)
    with pytest.raises(ftp.FtpError, match="a number of chunks"):
        ftp.shard(lm_loss(fn), ftp.AbstractMesh((2,), ("tp",)), of_params, chunks=0)


@pytest.mark.parametrize("shape", [(5, 4), (4, 5), (1, 5)])
def test_a_dtype_without_zero_is_padded(shape: tuple[int, int]):
    x = torch.arange(math.prod(shape), dtype=torch.uint8).view(torch.float8_e8m0fnu).view(shape)
    mesh, specs = ftp.simulated_mesh((3,), ("tp",)), (P("tp"), P(None, "tp"), P())
    for held, due in itertools.permutations(specs, 2):
        found = ftp.spmd(lambda x: x[:], mesh, held, due)(x)
        assert found.dtype is x.dtype and torch.equal(found.view(torch.uint8), x.view(torch.uint8))


# On processes.


def _trained(options: dict[str, Any], n: int) -> tuple[float, bool]:
    mesh = ftp.make_mesh((int(os.environ["WORLD_SIZE"]),), ("tp",), device_type="cpu")
    cfg = LlamaConfig(vocab=67, heads=3, dim=12, hidden=10, layers=1)
    fn, full = ftp.functionalize(build(cfg, dtype=torch.float64))
    opt = FUSED if options.pop("fused", False) else ADAMW
    step = partial(train_step, lm_loss(fn), opt=opt)
    of_params = ftp.plan(full, specs(cuts(cfg), tp="tp"))
    of_state = opt.specs(full, of_params)
    run = ftp.spmd(
        step,
        mesh,
        (of_params, of_state, P()),
        (of_params, of_state, P()),
        donate=(0, 1),
        bucket=True,
        **options,
    )
    alone: Any = full, opt.init(full)
    cut: Any = ftp.device_put(full, mesh, of_params), ftp.device_put(opt.init(full), mesh, of_state)
    error, in_place = 0.0, True
    for i in range(n):
        batch = lm_batch(cfg, 4, 6, seed=i)
        *alone, expected = step(alone[0], alone[1], batch)
        before = cut[0]["head.weight"].data_ptr()
        *cut, loss = run(cut[0], cut[1], batch)
        in_place &= cut[0]["head.weight"].data_ptr() == before
        error = max(error, abs(float(loss - expected)))
    whole = ftp.device_get(cut[0], mesh, of_params)
    error = max(error, *(float((whole[k] - v).abs().max()) for k, v in alone[0].items()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return error, in_place


def _check_trained(options: dict[str, Any], timeout: float) -> None:
    ranks = launch(_trained, 2, options, 3, timeout=timeout)
    assert [r.exit for r in ranks] == [0, 0], [r.error or r.stderr[-2000:] for r in ranks]
    for rank in ranks:
        assert rank.value[0] < 1e-9
        assert rank.value[1], "a donated weight is updated where it lies"


@pytest.mark.dist
def test_steps_in_place_equal_one_device():
    _check_trained({"fused": True}, 90)


def _gathered_over_both_axes() -> tuple[float, list[tuple[str, ...]]]:
    mesh = ftp.make_mesh((2, 2), ("dp", "cp"), device_type="cpu")
    numbers = torch.arange(24, dtype=torch.float64)
    w, x = numbers.reshape(8, 3), numbers.reshape(4, 2, 3)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ p.T).square().sum() for p in params]).sum()

    full = (w, w + 1)
    step = ftp.shard(loss_fn, mesh, P(("dp", "cp")), batch_specs=P("dp", "cp"), bucket=True)
    params, batch = (
        ftp.device_put(full, mesh, P(("dp", "cp"))),
        ftp.device_put(x, mesh, P("dp", "cp")),
    )
    axes = [c.axes for c in step.lower(params, batch).collectives]
    loss, grads = step(params, batch)
    expected, value = torch.func.grad_and_value(loss_fn)(full, x)
    whole = ftp.device_get(grads, mesh, P(("dp", "cp")))
    error = max(
        float((loss - value).abs() / value),
        *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(whole, expected, strict=True)),
    )
    ftp.destroy_process_group()
    return error, axes


@pytest.mark.dist
def test_collectives_over_several_axes_run_on_processes():
    ranks = launch(_gathered_over_both_axes, 4, timeout=90)
    assert [r.exit for r in ranks] == [0] * 4, [r.error or r.stderr[-2000:] for r in ranks]
    for rank in ranks:
        assert rank.value[0] < 1e-12
        assert set(rank.value[1]) == {("dp", "cp")} and len(rank.value[1]) == 3


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_compiled_steps_equal_one_device(fused: bool):
    _check_trained({"compile": True, "fused": fused}, 300)


# Matmuls.


def test_products_by_onednn_equal_one_device_and_are_timed_once(tmp_path, monkeypatch):
    gen = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(shape, generator=gen) for shape in ((128, 96), (128, 128), (7, 96)))

    def fn(x, w, v):
        return x.t() @ w, w @ x, v @ x.t()

    graph = make_fx(fn)(x, w, v).graph
    found = onednn_matmuls.matmuls(graph)
    assert len(found) == 2  # the third is small
    other = onednn_matmuls.by_onednn(graph, found)
    done = ["onednn" in str(n.target) for n in other.nodes if "mm" in str(n.target)]
    assert sorted(done) == [False, True, True]
    exact = fn(x.double(), w.double(), v.double())
    sizes = fn(x.double().abs(), w.double().abs(), v.double().abs())
    eps = torch.finfo(torch.float32).eps
    for got, expected, size in zip(
        fx.GraphModule({}, other)(x, w, v), exact, sizes, strict=True
    ):  # at most a rounding for each of the 128 terms, in any order
        assert got.shape == expected.shape
        assert ((got.double() - expected).abs() <= 128 * eps * size).all()
    chosen = onednn_matmuls.measured(found, tmp_path)
    assert set(chosen) <= set(found)
    monkeypatch.setattr(onednn_matmuls, "_is_faster", None)  # would raise
    assert onednn_matmuls.measured(found, tmp_path) == chosen


def test_products_are_chosen_where_nothing_can_be_kept(tmp_path, monkeypatch):
    wanted = ["[[128, 96, 96, 1], [96, 128, 128, 1]]"]
    monkeypatch.setattr(onednn_matmuls, "_is_faster", lambda matmul: True)
    (tmp_path / "file").write_text("")
    assert (
        onednn_matmuls.measured(wanted, tmp_path / "file") == wanted
    )  # no folder can be made there
    (tmp_path / "matmuls.json").write_text("{")
    assert onednn_matmuls.measured(wanted, tmp_path) == wanted
