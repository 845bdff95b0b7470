"""Certificates: every program is proven right, and no change to one that changes a result is."""

import hashlib
import importlib.util
import inspect
import itertools
import math
import operator
import re
import tracemalloc
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from few_or_many import few_or_many, slow_after
from hypothesis import strategies as st
from mutants import Mutant, change, check_mutants, delayed, fresh, issued
from programs import AXES, Drawn, programs
from torch import fx, nn
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.__main__ import main
from ftp.api.certify import certificate_of, certify
from ftp.certification.axis_collectives import Contribution, gather_axis, reduce_axis
from ftp.certification.certificate import Certificate
from ftp.certification.certificate_file import load_certificate
from ftp.certification.checker import check
from ftp.certification.data_movement import MOVEMENTS
from ftp.certification.element_map import (
    DimPart,
    MeshAxis,
    element_map,
    is_same,
    pad_dim,
    reshape,
    zeros_like,
)
from ftp.certification.positions import whole
from ftp.certification.ranks import Ranks
from ftp.certification.unsound import Unsound
from ftp.certification.value_numbering import check_traced
from ftp.errors import CertificateError
from ftp.partitioning.local_program import LocalProgram
from ftp.report.lowered import Lowered
from ftp.rules.own import RULES
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.program import Program, shard_of
from ftp.runtime.simulate import simulate
from ftp.sharding.pytree import flatten
from ftp.testing.divergence import compare

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
PASSES = ({}, {"bucket": True}, {"chunks": 2}, {"bucket": True, "chunks": 2, "prefetch": 1 << 30})


def lower(
    drawn: Drawn, passes: Mapping[str, Any], *, gradients: bool
) -> tuple[Lowered, list[torch.Tensor]]:
    mesh = ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)])
    options: Any = {
        "data_axes": drawn.data_axes,
        "reshard_after_forward": drawn.reshard_after_forward,
        **passes,
    }
    specs = tuple(i.spec for i in drawn.inputs)
    if not gradients:
        return ftp.spmd(drawn.function, mesh, specs, drawn.out_specs, **options).lower(
            *drawn.values
        ), drawn.values
    count = sum(i.is_parameter for i in drawn.inputs)

    def loss(params, *batch):
        return drawn.function(*params, *batch)[0]

    step = ftp.shard(loss, mesh, specs[:count], batch_specs=specs[count:], **options)
    return step.lower(tuple(drawn.values[:count]), *drawn.values[count:]), drawn.values


def example(name: str) -> Any:
    """A file of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).resolve().parents[2] / f"examples/{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranks_that_wait_in_different_orders_are_no_change():
    def rank_graph(waits: Sequence[int], is_overwritten: bool = False) -> fx.Graph:
        graph = fx.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        sent = []
        for operand in (x, y):
            node = graph.call_function(c10d.all_gather_into_tensor.default, (operand, 2, "tp"))
            node.meta["axis"] = "tp"
            sent.append(node)
        if is_overwritten:
            graph.call_function(aten.mul_.Tensor, (x, 3))
        found: dict[int, fx.Node] = {}
        for i in waits:
            found[i] = graph.call_function(c10d.wait_tensor.default, (sent[i],))
        graph.output((found[0], found[1]))
        return graph

    def results(*graphs: fx.Graph):
        modules = [fx.GraphModule({}, delayed(graph)) for graph in graphs]
        programs = [LocalProgram(m, (), ()) for m in modules]
        locals_ = [[torch.tensor([r + 1.0]), torch.tensor([r + 3.0])] for r in range(2)]
        return simulate(programs, locals_, {"tp": [(0, 1)]})

    for outputs in results(rank_graph((0, 1)), rank_graph((1, 0))):
        assert [o.tolist() for o in outputs] == [[1, 2], [3, 4]]
    for outputs in results(rank_graph((0, 1)), rank_graph((1, 0), is_overwritten=True)):
        assert [o.tolist() for o in outputs] == [[1, 6], [3, 4]]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.constant_pad_nd.default, ([0, 0, 0, 0, 0, 1], 0.0)),
        (aten.constant_pad_nd.default, ([1], 0.0)),
        (aten.slice.Tensor, (2, 0, 1)),
        (aten.select.int, (1, 3)),
        (aten.select.int, (2, 0)),
        (aten.permute.default, ([0],)),
        (aten.permute.default, ([0, 0],)),
    ],
    ids=str,
)
def test_data_movement_that_torch_refuses(target: Any, args: tuple[Any, ...]):
    """A program with it raises on the ranks that run it."""
    with pytest.raises((RuntimeError, IndexError)):
        target(torch.ones(2, 3), *args)
    with pytest.raises(Unsound):
        MOVEMENTS[target](element_map("x", [DimPart(whole(1, 0, n), n) for n in (2, 3)]), *args)


@few_or_many(programs(gradients=False), st.sampled_from(PASSES), few=8, many=400)
def test_programs(drawn: Drawn, passes: Mapping[str, Any]):
    lowered, values = lower(drawn, passes, gradients=False)
    require_own_programs(lowered._program, certify(lowered))
    check_mutants(lowered, values, 0, 4)


@few_or_many(programs(gradients=True), st.sampled_from(PASSES), few=3, many=1500)
def test_gradients(drawn: Drawn, passes: Mapping[str, Any]):
    lowered, values = lower(drawn, passes, gradients=True)
    require_own_programs(lowered._program, certify(lowered))
    check_mutants(lowered, values, 1, 12)


def require_own_programs(program: Program, certificate: Certificate) -> None:
    """Each rank of a certificate runs the graph and the offsets that the rank would run."""
    graphs: dict[Any, int] = {}
    at = {}
    for coordinate in program.mesh.coordinates():
        local = program.local(coordinate)
        graph = graphs.setdefault(local.gm, len(graphs))
        at[tuple(coordinate.values())] = graph, tuple(local.offsets_at(coordinate))
    assert at == certificate.ranks.at


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_ranks_where_axes_cut_in_another_order_than_the_meshs(shape: Any, axes: Any):
    """The planner folds axes in the order in which they cut."""
    step = ftp.spmd(lambda x: x @ x, ftp.simulated_mesh(shape, ("a", "b")), (P(axes),))
    for size in (1, 5, 7):
        lowered = step.lower(torch.ones(size, dtype=torch.float64))
        require_own_programs(lowered._program, certify(lowered))


def test_ranks_that_hold_no_elements():
    """Of six rows in chunks of two the fourth rank of ``a`` holds none."""

    def program(x: torch.Tensor) -> torch.Tensor:
        ramp = torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)
        return ftp.constrain(x + ramp, P(("a", "b")))

    mesh = ftp.simulated_mesh((4, 2), ("a", "b"))
    step = ftp.spmd(program, mesh, (P("a"),), data_axes=())
    for shape in ((6, 6, 6), (6, 7), (1, 6)):
        certify(step.lower(torch.ones(shape, dtype=torch.float64)))


def mlp(
    mesh: Any = None, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[ftp.Step, dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(7, 7, dtype=torch.float64, generator=generator).to(dtype)
        for name in ("up", "down")
    }

    def loss(params, x):
        return (torch.relu(x @ params["up"]) @ params["down"]).square().mean()

    mesh = mesh or ftp.simulated_mesh((2, 2), ("dp", "tp"))
    specs = {"up": P("dp", "tp"), "down": P("tp", "dp")}
    step = ftp.shard(loss, mesh, specs, batch_specs=P("dp"), **options)
    return step, params, torch.randn(5, 7, dtype=torch.float64, generator=generator).to(dtype)


@pytest.mark.parametrize("most", [15, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_mutant_of_a_model(most: int):
    """Some changes to one program, and all: at least one collective of each kind, and
    offsets.
    """
    step, params, x = mlp()
    lowered = step.lower(params, x)
    assert {c.op for c in lowered.collectives} == {"all_gather", "all_reduce", "reduce_scatter"}
    changed, _, _ = check_mutants(lowered, [params["down"], params["up"], x], 0, most)
    assert changed > most // 5 if most < 1000 else changed > 50


def check_step(program: Any, arguments: tuple[Any, ...], seed: int, most: int) -> int:
    """How many mutants of a program change a result; all of them are refused, and the program is
    not.
    """
    lowered = program.lower(*arguments)
    certify(lowered)
    leaves, _ = flatten(arguments)
    changed, _, _ = check_mutants(
        lowered, [leaves[i] for i in lowered._program.tensor_leaves], seed, most
    )
    return changed


def update_of(
    loss_fn: Any, params: Any, specs: Any, batch_spec: P, mesh: Any, **options: Any
) -> tuple[Any, Any]:
    """A step with AdamW's fused update and clipping, and its state."""
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2)

    def update(params, state, batch):
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
        grads, _ = ftp.optim.clip_by_global_norm(grads, 1.0)
        return *opt.update(grads, state, params), loss

    step = ftp.spmd(
        update, mesh, (specs, specs, batch_spec), (specs, specs, P()), donate=(0, 1), **options
    )
    return step, opt.init(params)


def test_context_parallelism():
    mesh, spec = ftp.simulated_mesh((2, 2), ("dp", "cp")), P("dp", None, "cp")
    params = {name: torch.randn(2, 2, 4, 4, dtype=torch.float64) for name in "qk"}

    def loss(params, v):
        return (
            F.scaled_dot_product_attention(params["q"], params["k"], v, is_causal=True)
            .square()
            .sum()
        )

    step = ftp.shard(loss, mesh, spec, batch_specs=spec)
    assert check_step(step, (params, torch.randn(2, 2, 4, 4, dtype=torch.float64)), 0, 12) > 3


@pytest.mark.slow
def test_sequence_parallelism_and_zero():
    cfg = models.LlamaConfig(vocab=6, dim=4, layers=1, heads=2, hidden=6)
    fn, params = ftp.functionalize(
        models.build(cfg, dtype=torch.float64), constraints=models.sequence_parallel()
    )
    specs = ftp.plan(params, models.specs(models.cuts(cfg), tp="tp", zero="dp"))
    step = ftp.shard(
        models.lm_loss(fn), ftp.simulated_mesh((2, 2), ("dp", "tp")), specs, batch_specs=P("dp")
    )
    assert check_step(step, (params, models.lm_batch(cfg, 2, 4)), 0, 12) > 1


@pytest.mark.slow
def test_a_scan_with_its_update_and_gathers_ahead():
    params = {name: torch.randn(3, 4, 4, dtype=torch.float64) for name in ("up", "down")}
    specs = {"up": P(None, "dp", "tp"), "down": P(None, "tp", "dp")}

    def loss(params, x):
        return (
            ftp.scan(lambda p, x: x + torch.tanh(x @ p["up"]) @ p["down"], params, x)
            .square()
            .mean()
        )

    step, state = update_of(
        loss,
        params,
        specs,
        P("dp"),
        ftp.simulated_mesh((2, 2), ("dp", "tp")),
        prefetch=1 << 30,
        bucket=False,
    )
    assert check_step(step, (params, state, torch.randn(4, 4, dtype=torch.float64)), 0, 8) > 2


@pytest.mark.slow
def test_draws_on_a_cut_batch():
    """The numbers that say where a rank's part begins are no memory that could be shared."""
    fn, params = ftp.functionalize(
        torch.nn.TransformerEncoderLayer(
            4, 2, 8, dropout=0.3, batch_first=True, dtype=torch.float64
        ).train()
    )

    def loss(params, x, key):
        return fn(params, x, rng=key).square().mean()

    specs = ftp.plan(params, {"linear1.*": P("tp"), "linear2.weight": P(None, "tp")})
    step = ftp.shard(
        loss, ftp.simulated_mesh((2, 2), ("dp", "tp")), specs, batch_specs=(P("dp"), P())
    )
    assert (
        check_step(
            step, (params, torch.randn(4, 3, 4, dtype=torch.float64), ftp.random.key(0)), 0, 6
        )
        > 1
    )


@pytest.mark.slow
def test_the_examples():
    toy = example("toy_mlp")
    fn, params = ftp.functionalize(toy.ToyModel().double())
    batch = torch.rand(5, 10, dtype=torch.float64), torch.rand(5, 5, dtype=torch.float64)

    def loss(params, batch):
        return (fn(params, batch[0]) - batch[1]).var()

    step = ftp.shard(
        loss,
        ftp.simulated_mesh((2, 3), ("dp", "tp")),
        ftp.plan(params, toy.SPECS),
        batch_specs=P("dp"),
    )
    assert check_step(step, (params, batch), 0, 30) > 5


@pytest.mark.slow
def test_the_decoder_of_the_examples():
    gpt = example("train_gpt")
    fn, params = ftp.functionalize(gpt.GPT(8, 2, 2, 6, 0.1).double())
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-3)
    specs = ftp.plan(params, gpt.SPECS)
    state = {
        "params": params,
        "opt": opt.init(params),
        "step": torch.tensor(3),
        "key": ftp.random.key(0),
    }
    state_specs = {"params": specs, "opt": specs, "step": P(), "key": P()}
    step = ftp.spmd(
        gpt.make_train_step(fn, opt, lambda step: step * 1e-3, 1.0),
        ftp.simulated_mesh((2, 2), ("dp", "tp")),
        (state_specs, P("dp"), P("dp")),
        (state_specs, P()),
        donate=(0,),
    )
    batch = torch.randint(0, 256, (4, 6)), torch.randint(0, 256, (4, 6))
    changed = check_step(step, (state, batch, torch.zeros(2)), 0, 60)
    assert changed > 10  # of the kinds that are run; buckets leave few collectives


def test_on_request():
    step, params, x = mlp(certify=True)
    loss, _ = step(params, x)
    torch.testing.assert_close(
        loss, (torch.relu(x @ params["up"]) @ params["down"]).square().mean()
    )


def test_ranks_with_equal_parts_and_other_lengths_on_the_way():
    """Of 3 elements cut in 2 and then in 2, the first and the third rank hold one each, out of 2
    and out of 1.
    """
    mesh = ftp.simulated_mesh((2, 2), ("a", "b"))
    x, index = torch.randn(3, dtype=torch.float64), torch.tensor([2, 0, 1, 1])
    certify(ftp.spmd(lambda x, i: x.gather(0, i), mesh, (P(("a", "b")), P()), P()).lower(x, index))


def test_what_is_sent_and_not_read_must_run():
    """Ranks whose part is empty read nothing of what they gather; the others wait for them."""
    at = torch.arange(8).remainder(3).reshape(2, 1, 4, 1)
    mesh = ftp.simulated_mesh((2, 4), ("a", "b"))
    step = ftp.spmd(lambda x: x.gather(3, at).sum(), mesh, (P("a", None, None, "b"),), P())
    x = torch.randn(5, 3, 5, 3, dtype=torch.float64)
    lowered = step.lower(x)
    certificate = certify(lowered)
    moved = [
        graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
        for graph in certificate.ranks.graphs
    ]
    assert any(moved)
    for node in itertools.chain(*moved):
        pad: Any = node.args[1]
        node.args = (node.args[0], [*pad, *pad], *node.args[2:])
        with pytest.raises(CertificateError, match="padded by"):
            check(certificate)
        node.args = (node.args[0], pad, *node.args[2:])


def test_statistics_of_channels_that_a_rank_has_none_of():
    """The third rank sends zeros of padding for each statistic."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).double()
    fn, params, buffers = ftp.functionalize(model, buffers=True)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    specs = {path: P("tp") if value.ndim == 4 else P() for path, value in params.items()}
    step = ftp.spmd(fn, ftp.simulated_mesh((3,), ("tp",)), (specs, P(), P()), certify=True)
    results, after = step(params, buffers, x)
    expected = model(x)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(after, dict(model.named_buffers()))
    axis = MeshAxis("tp", 0, 2)
    held = element_map("a", [DimPart(whole(1, 0, 2), 2)])
    other = replace(held, value="b")
    with pytest.raises(Unsound, match="parts of different values"):
        gather_axis([Contribution((0,), held), Contribution((1,), other)], axis)


def test_a_dim_made_of_a_scalar_is_gathered_beside_an_empty_part():
    def program(x, at):
        row = (x + x).unsqueeze(0)
        return torch.einsum("p,a->", row[at % 1], ftp.constrain(row, P("a")))

    mesh = ftp.simulated_mesh((2,), ("a",))
    x, at = torch.tensor(1.5, dtype=torch.float64), torch.tensor([3])
    step = ftp.spmd(program, mesh, (P(), P("a")), P(), certify=True)
    assert step(x, at) == program(x, at) == 9


@pytest.mark.slow
def test_a_bucket_of_which_a_rank_has_empty_parts():
    """The gradients of a layer with one output, cut over tp, are empty on the second rank."""
    params = {
        "bias": torch.randn(1, dtype=torch.float64),
        "weight": torch.randn(1, 3, dtype=torch.float64),
    }
    step = ftp.shard(
        lambda p, x: F.binary_cross_entropy(
            F.linear(x, p["weight"], p["bias"]).sigmoid().squeeze(1), x[:, 0].sigmoid()
        ),
        ftp.simulated_mesh((2, 2), ("dp", "tp")),
        {"bias": P(), "weight": P("tp")},
        batch_specs=P("dp"),
        bucket=True,
    )
    x = torch.randn(4, 3, dtype=torch.float64)
    lowered = step.lower(params, x)
    certificate = certify(lowered)
    sizes = [
        n.args[1]
        for graph in certificate.ranks.graphs
        for n in graph.nodes
        if n.target is aten.split_with_sizes.default
    ]
    assert any(0 in found for found in sizes)
    changed, _, _ = check_mutants(lowered, [*params.values(), x], 0, 30)
    assert changed > 5


def test_copies_of_a_scalar_are_gathered():
    """And zeros among them are not taken for it."""
    along = MeshAxis("tp", 0, 2)
    scalar = element_map("x.0", [])
    copies = [Contribution((at,), reshape(scalar, (1,))) for at in range(2)]
    found = gather_axis(copies, along)
    assert (found.value, found.shape, found.is_zero) == ("x.0", (2,), False)
    with pytest.raises(Unsound, match="zeros are moved with copies of a scalar"):
        gather_axis([copies[0], replace(copies[1], held=zeros_like(copies[1].held))], along)


def test_a_sum_over_an_axis_of_one_rank_is_complete():
    mesh = ftp.simulated_mesh((1, 2), ("dp", "tp"))
    pending, x = P(None, "tp", unreduced=("dp",)), torch.randn(4, 4)
    for out in (pending, P()):
        step = ftp.spmd(lambda a, b: a * b.sin(), mesh, (pending, P("dp")), out, certify=True)
        torch.testing.assert_close(step(x, x), x * x.sin())


def test_parts_beside_zeros_are_joined_by_a_sum_alone():
    """An average or a product of them is not their join."""
    along = MeshAxis("tp", 0, 2)
    held = [
        Contribution((at,), pad_dim(element_map("x.0", [DimPart(taken, 2)]), 0, 2 * at, 2 - 2 * at))
        for at, taken in enumerate(whole(2, 1, 4).taken(1, range(a, a + 2)) for a in (0, 2))
    ]
    assert is_same(
        reduce_axis(held, along, "sum"), element_map("x.0", [DimPart(whole(2, 1, 4), 4)])
    )
    for op in ("avg", "product", "band"):
        with pytest.raises(Unsound, match=f"a {op} is taken over tp"):
            reduce_axis(held, along, op)


def test_a_part_that_a_split_does_not_have():
    step, params, x = mlp(bucket=True)
    certificate = certify(step.lower(params, x))
    (items, *_) = certificate.ranks.graphs[0].find_nodes(
        op="call_function", target=operator.getitem
    )
    items.args = (items.args[0], 99)
    with pytest.raises(CertificateError, match="part 99 is taken of"):
        check(certificate)


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.contiguous.default, (), {}),
        (aten.new_full.default, ([], 1), {"dtype": torch.float64}),
    ],
    ids=str,
)
def test_an_offset_that_is_used_as_a_tensor(target: Any, args: Any, kwargs: Any):
    """The ranks raise, though the number that they would fill with is the right one."""
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(lambda x, i: (x[i], x.new_full((), 1)), mesh, (P("tp"), P()), P())
    x = torch.randn(4, dtype=torch.float64)
    certificate = certify(step.lower(x, torch.arange(4)))
    for graph in certificate.ranks.graphs:
        *_, offset = graph.find_nodes(op="placeholder")
        output: Any = graph.output_node()
        with graph.inserting_before(output):
            made = graph.call_function(target, (offset, *args), kwargs)
        output.args = ((output.args[0][0], made),)
    with pytest.raises(CertificateError, match="an offset is used as a tensor"):
        check(certificate)


@pytest.mark.parametrize("out", [P("tp"), P()], ids=str)
def test_an_empty_part_of_another_dtype(out: P):
    """A rank without elements that leaves out a cast: what it pads and sends is of another size."""
    mesh = ftp.simulated_mesh((3,), ("tp",))
    step = ftp.spmd(lambda x: x.float().flip(1), mesh, (P("tp"),), out)
    certificate = certify(step.lower(torch.randn(4, 2, dtype=torch.float64)))
    *_, last = certificate.ranks.graphs
    (cast,) = last.find_nodes(op="call_function", target=aten._to_copy.default)
    cast.replace_all_uses_with(cast.args[0])
    last.erase_node(cast)
    with pytest.raises(CertificateError, match="float64; expected is another dtype"):
        check(certificate)


def test_a_form_with_writes_that_does_not_run():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(lambda x, i: x.index_copy(0, i, x[:2] + 1), mesh, (P("tp"), P()))
    x, index = torch.randn(4, 3, dtype=torch.float64), torch.tensor([3, 0])
    certificate = certify(step.lower(x, index))
    for graph in certificate.ranks.graphs:
        (padded,) = (n for n in graph.nodes if n.target is aten.constant_pad_nd.default)
        padded.args = (graph.find_nodes(op="placeholder")[1], *padded.args[1:])
    with pytest.raises(CertificateError, match="does not run"):
        check(certificate)


@pytest.mark.slow
def test_blocks_of_rows_of_a_product_without_terms():
    """Of 3 rows of a batch over 4 ranks, the last has none: its blocks of the weight's gradient are
    zeros.
    """
    weight = torch.randn(2, 5, dtype=torch.float64)
    step = ftp.shard(
        lambda p, x: (x @ p.T).tanh().sum(),
        ftp.simulated_mesh((4,), ("dp",)),
        P(None, "dp"),
        batch_specs=P("dp"),
        chunks=2,
    )
    x = torch.randn(3, 5, dtype=torch.float64)
    lowered = step.lower(weight, x)
    assert [r.op for r in lowered.collectives].count("reduce_scatter") == 2
    certify(lowered)
    changed, _, _ = check_mutants(lowered, [weight, x], 0, 30)
    assert changed > 5


def per_rank() -> tuple[Lowered, list[torch.Tensor]]:
    """A step with per-rank code, of which one result is not used, and its inputs."""
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))

    def own(x, up, down):
        return ftp.axis.all_reduce(torch.tanh(x @ up) @ down, "tp"), x.sum(0)

    layer = ftp.local(own, mesh, (P("dp"), P(None, "tp"), P("tp")), (P("dp"), P("dp")))
    params = {name: torch.randn(4, 4, dtype=torch.float64) for name in ("down", "first", "up")}
    specs = {"down": P("tp"), "first": P("dp"), "up": P(None, "tp")}
    x = torch.randn(6, 4, dtype=torch.float64)
    step = ftp.shard(
        lambda p, x: layer(x @ p["first"], p["up"], p["down"])[0].square().mean(),
        mesh,
        specs,
        batch_specs=P("dp"),
    )
    return step.lower(params, x), [*params.values(), x]


@pytest.mark.slow
def test_mutants_around_per_rank_code():
    """What the code is given, and what is made of what it gives."""
    lowered, inputs = per_rank()
    own = {o.name for o in certificate_of(lowered._program).operations if o.ports is not None}
    changed, _, _ = check_mutants(lowered, inputs, 0, 60, without=own)
    assert changed > 5


@pytest.mark.slow
def test_mutants_of_per_rank_code():
    lowered, inputs = per_rank()
    changed, _, _ = check_mutants(lowered, inputs, 1, 60)
    assert changed > 15


@pytest.mark.slow
def test_arguments_with_the_names_of_values():
    """A name given by the user stands for his argument; whatever else is called so gets another
    name.
    """
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    scale = torch.rand(5, dtype=torch.float64)
    own = ftp.local(lambda x, y: (x + y, x * y), mesh, (P("dp"), P("dp")), (P("dp"), P("dp")))
    params, x = (
        {"w": torch.randn(7, 5, dtype=torch.float64)},
        torch.randn(4, 3, 5, dtype=torch.float64),
    )

    def loss(params, x):
        y = torch.nn.functional.linear(x * scale, params["w"]).softmax(-1)
        return own(y, y)[1].square().mean()

    def lower(name: str) -> Lowered:
        loss.__signature__ = inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in ("params", name)]
        )
        return ftp.shard(loss, mesh, {"w": P("tp")}, batch_specs=P("dp"), bucket=True).lower(
            params, x
        )

    want = lower("x").plan.graph.nodes
    # A constant, a reshard, per-rank code, and ops at the start and the end.
    names = {node.kind: node.name for node in want if node.name.isidentifier()}
    assert names["local"].startswith("local") and "all_reduce" in names["reshard"]
    for name in {*names.values(), "constant_0", "local", "t"}:
        lowered = lower(name)
        certificate = certify(lowered)
        assert [o.name for o in certificate.operations if o.target is None][1] == name
        shown = re.findall(r"^ +(?:>> )?(%\S+):", lowered.text(fold=False), re.M)
        assert len(shown) == len(set(shown)) == len(want)
        shards = [[*parts, scale] for parts in _parts(lowered, [params["w"], x])]
        assert (
            compare(
                certificate,
                [params["w"], x, scale],
                shards,
                groups_of(lowered._program.mesh),
                None,
                None,
            )
            is None
        )
    changed, _, _ = check_mutants(
        lower("local"), [params["w"], x], 0, 20, without={"local_1", "local_2", "local_1_1"}
    )
    assert changed > 5


def _parts(lowered: Lowered, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    mesh, specs = lowered._program.mesh, lowered._program.in_specs
    return [
        [shard_of(t, s, mesh.axes, c) for t, s in zip(inputs, specs, strict=True)]
        for c in mesh.coordinates()
    ]


def test_names_that_two_values_share():
    """No program passes for another by the names of its values: neither one that is right nor
    one that is wrong is certified.
    """
    step, params, x = mlp()
    certificate = certify(step.lower(params, x))
    for a, b in itertools.permutations(certificate.operations, 2):
        operations = tuple(replace(o, name=b.name) if o is a else o for o in certificate.operations)
        with pytest.raises(
            CertificateError, match=f"several values are called {re.escape(b.name)}:"
        ):
            check(replace(certificate, operations=operations))


@torch.library.custom_op("tests_certify::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum(-1, keepdim=True)


halved.register_fake(torch.empty_like)


def test_a_rule_that_the_program_registered_is_assumed():
    """It is wrong here: the certificate is of the rule, and says so."""
    mesh, op = ftp.simulated_mesh((2,), ("tp",)), torch.ops.tests_certify.halved.default
    ftp.pointwise(op)
    try:
        lowered = ftp.lower(halved, mesh, P("tp"), torch.ones(4, 6))
        (assumed,) = certify(lowered).assumptions
    finally:
        del RULES[op]
    assert assumed.startswith("tests_certify.halved.default at ")
    assert assumed.endswith("is as the rule says that was registered for it")


def test_a_rule_in_place_of_ftps_is_assumed():
    """Wrong as well: tanh of a sum is not the sum of the terms' tanh."""
    mesh, op = ftp.simulated_mesh((2,), ("tp",)), torch.ops.aten.tanh.default
    own = RULES[op]
    x, w = torch.ones(4, 6), torch.ones(6, 4)

    def program() -> ftp.Lowered:
        return ftp.lower(
            lambda x, w: (x @ w).tanh().sum(), mesh, (P(None, "tp"), P("tp")), x, w, out_specs=P()
        )

    try:
        ftp.pointwise(op, linear=[(0,)])
        (assumed,) = certify(program()).assumptions
    finally:
        RULES[op] = own
    assert assumed.startswith("aten.tanh.default at ")
    assert assumed.endswith("is as the rule says that was registered for it")
    assert certify(program()).assumptions == []


def test_rules_found_by_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Such a rule is listed as assumed, and what is made of it is checked."""
    monkeypatch.delitem(RULES, torch.ops.aten._int_mm.default)

    def loss(params, q):
        return (torch.ops.aten._int_mm(q, q).double() * params["a"]).square().mean()

    q, params = (
        torch.randint(-9, 9, (32, 32), dtype=torch.int8),
        {"a": torch.randn(32, 32, dtype=torch.float64)},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ftp.errors.DiscoveryWarning)
        lowered = ftp.shard(
            loss, ftp.simulated_mesh((2,), ("tp",)), P("tp"), batch_specs=P("tp"), certify=True
        ).lower(params, q)
        certificate = certify(lowered)
    (assumed,) = certificate.assumptions
    assert assumed.startswith("aten._int_mm.default at ") and "test_certify.py:" in assumed
    assert assumed.endswith("as trials on small tensors found")
    assert "[" in assumed and "-> " in assumed
    certificate.save(tmp_path / "found.json")
    assert main(["certify", str(tmp_path / "found.json")]) == 0
    assert f"assumes: {assumed}" in capsys.readouterr().out
    changed, _, _ = check_mutants(lowered, [params["a"], q], 0, 40)
    assert changed > 5
    without = tuple(replace(o, found="", linear=()) for o in certificate.operations)
    with pytest.raises(CertificateError, match=r"_int_mm .* which its rule .* keeps whole"):
        check(replace(certificate, operations=without))


def test_a_thousand_ranks():
    """All of them: those of one program at once."""
    step, params, x = mlp(ftp.AbstractMesh((64, 32), ("dp", "tp")), bucket=True)
    certificate = certify(step.lower(params, x))
    assert certificate.ranks.shape == (64, 32)
    with pytest.raises(CertificateError, match=r"on one of the ranks at \(dp [0-9, ]*\.\.\., tp "):
        check(elsewhere(certificate, (3, 3)))


def many_ranks(shape: tuple[int, ...]) -> Program:
    """A program on (pod, dp, fsdp, tp) whose weights are cut unevenly over fsdp and tp."""

    def loss(params, x):
        return (torch.relu(x @ params["up"]) @ params["down"]).square().mean()

    mesh = ftp.AbstractMesh(shape, ("pod", "dp", "fsdp", "tp"))
    specs = {"up": P("fsdp", "tp"), "down": P("tp", "fsdp")}
    rows = P(("pod", "dp", "fsdp"))
    step = ftp.shard(loss, mesh, specs, batch_specs=rows)
    params = {"up": torch.empty(99, 43, device="meta"), "down": torch.empty(43, 99, device="meta")}
    x = torch.empty(2 * math.prod(shape[:3]), 99, device="meta")
    return step.lower(params, x)._program


@pytest.mark.slow
def test_a_certificate_takes_no_more_for_more_ranks():
    """128 times the ranks, in the same memory."""
    peaks = []
    for shape in ((2, 8, 8, 8), (2, 8, 8, 8), (16, 128, 8, 8)):  # the first call fills caches
        program = many_ranks(shape)
        program.local()
        tracemalloc.start()
        certificate = certificate_of(program)
        check(certificate)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.5 * peaks[1], peaks


def test_one_rank_of_many_that_runs_what_another_runs():
    certificate = certificate_of(many_ranks((16, 128, 8, 8)))
    check(certificate)
    ranks, at = certificate.ranks, (5, 77, 3, 3)
    assert len(ranks.graphs) > 1 and any(ranks.offsets)
    number = np.broadcast_to(ranks.number, ranks.shape).copy()
    number[at] = (number[at] + 1) % len(ranks.graphs)
    with pytest.raises(CertificateError):
        check(replace(certificate, ranks=replace(ranks, number=number)))
    graph = ranks.graph_at(at)
    for i, values in enumerate(ranks.offsets[graph][:2]):
        changed = np.broadcast_to(values, ranks.shape).copy()
        changed[at] += 1
        mine = (*ranks.offsets[graph][:i], changed, *ranks.offsets[graph][i + 1 :])
        given = (*ranks.offsets[:graph], mine, *ranks.offsets[graph + 1 :])
        with pytest.raises(CertificateError):
            check(replace(certificate, ranks=replace(ranks, offsets=given)))


def test_ranks_that_do_not_fit_the_mesh():
    step, params, x = mlp()
    certificate = certify(step.lower(params, x))
    ranks = certificate.ranks
    for wrong in (
        replace(ranks, number=np.full((1, 1), 7)),
        replace(ranks, number=np.zeros((3, 1), dtype=np.int64)),
        replace(ranks, shape=(4, 1)),
        replace(ranks, offsets=()),
    ):
        with pytest.raises(CertificateError, match="the certificate has"):
            check(replace(certificate, ranks=wrong))


def test_the_rank_is_named():
    step, params, x = mlp(ftp.AbstractMesh((2, 7), ("dp", "tp")))
    with pytest.raises(CertificateError, match=r"on the rank at \(dp 1, tp 3\)"):
        check(elsewhere(certify(step.lower(params, x)), (1, 3)))


def elsewhere(certificate: Certificate, coordinate: tuple[int, ...]) -> Certificate:
    """With one rank's parts beginning elsewhere."""
    graph, offsets = certificate.ranks.at[coordinate]
    at = {**certificate.ranks.at, coordinate: (graph, tuple(i + 1 for i in offsets))}
    return replace(certificate, ranks=Ranks.of(certificate.ranks.graphs, at))


def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    step, params, x = mlp()
    path = tmp_path / "mlp.json"
    certificate = certify(step.lower(params, x))
    certificate.save(path)
    check(load_certificate(path))
    assert main(["certify", str(path)]) == 0
    assert "5 collectives, 4 ranks on (dp 2, tp 2)" in capsys.readouterr().out


def test_altered_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    step, params, x = mlp()
    path = tmp_path / "mlp.json"
    certify(step.lower(params, x)).save(path)
    text = path.read_text()
    path.write_text(text.replace('"sum"', '"max"', 1))
    with pytest.raises(CertificateError, match="was altered"):
        load_certificate(path)
    # With its digest renewed, the check itself finds it.
    body = text[text.index('"program":') + len('"program":') : -1].replace('"sum"', '"max"')
    head = text[: text.index('"sha256":')]
    path.write_text(
        f'{head}"sha256":"{hashlib.sha256(body.encode()).hexdigest()}","program":{body}}}'
    )
    assert main(["certify", str(path)]) == 1
    assert "is sum, not max" in capsys.readouterr().err
    path.write_text("{}")
    with pytest.raises(CertificateError, match="is no certificate"):
        load_certificate(path)


def test_a_program_that_is_not_the_traced_one():
    step, params, x = mlp()
    program = step.lower(params, x)._program
    other = ftp.shard(
        lambda p, x: (torch.tanh(x @ p["up"]) @ p["down"]).square().mean(),
        step.mesh,
        P(),
        batch_specs=P(),
    )
    with pytest.raises(CertificateError, match="is not what the traced program returns"):
        check_traced(other.lower(params, x)._program.traced.graph, certificate_of(program))


def test_no_divergence():
    step, params, x = mlp()
    assert ftp.first_divergence(step, params, x) is None


def test_first_divergence():
    """The first op that reads what a changed collective gives."""
    step, params, x = mlp()
    program = step.lower(params, x)._program
    certificate = certificate_of(program)
    mutant = fresh(certificate, "drop 0")
    ops = [c.op for c in program.local().collectives]
    for graph in mutant.graphs:
        assert change(graph, "drop", ops.index("all_reduce"), [])
    inputs = [params["down"], params["up"], x]
    mesh = program.mesh
    shards = [
        [shard_of(t, s, mesh.axes, c) for t, s in zip(inputs, program.in_specs, strict=True)]
        for c in mesh.coordinates()
    ]
    changed = replace(certificate, ranks=Ranks.of(mutant.graphs, mutant.at))
    found = compare(changed, inputs, shards, groups_of(mesh), None, None)
    assert (
        found is not None
        and found.name == "pow_1"
        and found.error > 1e-3
        and "square" in found.source
    )


def diverging(mutant: Mutant, step: Any, arguments: Sequence[Any]) -> Any:
    program = step.lower(*arguments)._program
    inputs = flatten(arguments)[0]
    shards = [
        [shard_of(t, s, step.mesh.axes, c) for t, s in zip(inputs, program.in_specs, strict=True)]
        for c in step.mesh.coordinates()
    ]
    changed = replace(certificate_of(program), ranks=Ranks.of(mutant.graphs, mutant.at))
    return compare(changed, inputs, shards, groups_of(program.mesh), None, None)


@pytest.mark.parametrize("dtype", slow_after(1, [torch.bfloat16, torch.float32]), ids=str)
def test_a_fault_is_found_in_every_dtype(dtype: torch.dtype):
    """A collective dropped or done twice, a part taken elsewhere: named at the same line as in
    double precision.
    """
    named = []
    for of in (torch.float64, dtype):
        step, params, x = mlp(dtype=of)
        certificate = certificate_of(step.lower(params, x)._program)
        graph = certificate.ranks.graphs[0]
        kinds = [
            (kind, i)
            for i, c in enumerate(issued(graph))
            if c.target is c10d.all_reduce.default
            for kind in ("drop", "again")
        ]
        found = []
        for kind, i in (*kinds, ("shift", 0), ("shift", 1)):
            mutant = fresh(certificate, f"{kind} {i}")
            assert all(change(g, kind, i, []) for g in mutant.graphs)
            divergence = diverging(mutant, step, (params, x))
            assert divergence is not None, mutant.what
            found.append((mutant.what, divergence.source))
        named.append(found)
    for (what, double), (_, narrow) in zip(*named, strict=True):
        assert narrow in (double, ""), what  # the gradient's seed, ones_like(loss), has no line


@pytest.mark.parametrize(
    "dtype", slow_after(1, [torch.bfloat16, torch.float32, torch.float16]), ids=str
)
def test_rounding_is_no_divergence(dtype: torch.dtype):
    """Long sums, in the order that each machine's kernels and the ranks take, and what branches
    on them.
    """
    mesh, generator = ftp.simulated_mesh((4,), ("tp",)), torch.Generator().manual_seed(0)
    w = (torch.randn(65536, 3, generator=generator) / 256).to(dtype)
    x = torch.randn(4, 65536, generator=generator).to(dtype)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ params["w"])
        z = torch.where(y > y.mean(), y, torch.nn.functional.layer_norm(y, (3,)))
        return z.softmax(-1).square().mean() + x.abs().sum() / x.numel() + (x * x).mean(1).std()

    for w_spec, x_spec in ((P("tp"), P(None, "tp")), (P(), P("tp"))):
        step = ftp.shard(loss, mesh, {"w": w_spec}, batch_specs=x_spec)
        assert ftp.first_divergence(step, {"w": w}, x) is None


def test_zeros_of_another_dtype_are_not_gathered_with_a_value():
    """A rank without elements that leaves out a cast in front of a gather."""
    mesh = ftp.AbstractMesh((4,), ("tp",))
    step = ftp.spmd(lambda x: (x * 2).to(torch.bfloat16), mesh, (P("tp"),), P())
    certificate = certify(step.lower(torch.ones(3, 4)))
    last = certificate.ranks.graphs[-1]
    (cast,) = last.find_nodes(op="call_function", target=aten._to_copy.default)
    cast.replace_all_uses_with(cast.args[0])
    last.erase_node(cast)
    with pytest.raises(CertificateError, match="ranks send tensors of different dtypes"):
        check(certificate)


@pytest.mark.parametrize("name", ["certify", "scale"])
def test_the_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[2] / f"docs/{name}.md"
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, str(page), "exec"), scope)
    if name == "certify":
        check(load_certificate("mlp.json"))


def test_an_op_and_the_decomposition_of_an_equal_one():
    """Of two equal ops the planner leaves one whole, where its user says so."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        v = x.tanh()
        return ftp.constrain(v, P(None)).softmax(0) + v.softmax(0).sum(0)

    mesh = ftp.AbstractMesh((2,), ("tp",))
    lowered = ftp.spmd(fn, mesh, (P("tp"),), P()).lower(torch.ones(4))
    certify(lowered)
