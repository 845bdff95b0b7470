"""Certificates: every program is proven right, and no change to one that changes a result is."""

import hashlib
import importlib.util
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from programs import AXES, Drawn, programs
from test_programs import QUICK
from torch import fx
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.__main__ import main
from ftp.attest import certificate_of, certify
from ftp.certificate import Certificate, Ranks, load_certificate
from ftp.checker import MOVEMENTS, check
from ftp.divergence import compare
from ftp.errors import CertificateError
from ftp.lowered import Lowered
from ftp.numbering import check_traced
from ftp.partition import LocalProgram
from ftp.program import Program, groups_of, join_parts, shard_of
from ftp.simulate import COLLECTIVES, simulate
from ftp.tree import flatten

c10d = torch.ops._c10d_functional
KINDS = ("drop", "again", "max", "axis", "early", "retype", "operand", "result", "unmoved")
OTHER_SHAPES = ("early", "retype", "operand", "result", "unmoved")  # native kernels may crash on what these give them
FEW = settings(QUICK, max_examples=20)
MANY = settings(QUICK, max_examples=1500)


def lower(drawn: Drawn, *, gradients: bool) -> tuple[Lowered, list[torch.Tensor]]:
    mesh = ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)])
    options: Any = {"data_axes": drawn.data_axes, "reshard_after_forward": drawn.reshard_after_forward}
    specs = tuple(i.spec for i in drawn.inputs)
    if not gradients:
        return ftp.spmd(drawn.function, mesh, specs, drawn.out_specs, **options).lower(*drawn.values), drawn.values
    count = sum(i.is_parameter for i in drawn.inputs)

    def loss(params, *batch):
        return drawn.function(*params, *batch)[0]

    step = ftp.shard(loss, mesh, specs[:count], batch_specs=specs[count:], **options)
    return step.lower(tuple(drawn.values[:count]), *drawn.values[count:]), drawn.values


def example(name: str) -> Any:
    """A file of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().parents[1] / f"examples/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Mutant:
    """The ranks' graphs and offsets with one thing changed."""

    what: str
    graphs: list[fx.Graph]
    at: dict[tuple[int, ...], tuple[int, tuple[int, ...]]]


def fresh(certificate: Certificate, what: str) -> Mutant:
    graphs = []
    for graph in certificate.ranks.graphs:
        new = fx.Graph()
        new.output(new.graph_copy(graph, {}))
        graphs.append(new)
    return Mutant(what, graphs, dict(certificate.ranks.at))


def issued(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in COLLECTIVES]


def mutants(certificate: Certificate, seed: int, most: int) -> Iterator[Mutant]:
    """Changes to the collectives and offsets, of all ranks or of one graph only; up to ``most`` of them."""
    count = len(issued(certificate.ranks.graphs[0]))
    graphs = len(certificate.ranks.graphs)
    axes = list(certificate.groups)
    jobs: list[Any] = [("swap", i, one) for i in range(count - 1) for one in range(-1, graphs)]
    for i in range(count):
        jobs += [(kind, i, one) for kind in KINDS for one in {-1, graphs - 1}]
    jobs += [("offset", c, k) for c, (_, offsets) in certificate.ranks.at.items() for k in range(len(offsets))]
    random.Random(seed).shuffle(jobs)
    for kind, i, one in jobs[:most]:
        mutant = fresh(certificate, f"{kind} {i} {one}")
        if kind == "offset":
            graph, offsets = mutant.at[i]
            mutant.at[i] = (graph, (*offsets[:one], offsets[one] + (1 if offsets[one] == 0 else -1), *offsets[one + 1 :]))
            yield mutant
            continue
        if all(change(g, kind, i, axes) for g in (mutant.graphs if one < 0 else mutant.graphs[one : one + 1])):
            yield mutant


def change(graph: fx.Graph, kind: str, i: int, axes: Sequence[str]) -> bool:
    """Changes collective ``i``; whether there was something to change."""
    node = issued(graph)[i]
    (wait,) = node.users
    x: Any = node.args[0]
    match kind:
        case "drop":
            wait.replace_all_uses_with(x)
            graph.erase_node(wait)
            graph.erase_node(node)
        case "again":
            with graph.inserting_after(wait):
                second = graph.node_copy(node, lambda n: wait if n is x else n)
                with graph.inserting_after(second):
                    last = graph.call_function(c10d.wait_tensor.default, (second,))
            wait.replace_all_uses_with(last, delete_user_cb=lambda u: u is not second)
        case "max":
            if "sum" not in node.args:
                return False
            node.args = tuple("max" if a == "sum" else a for a in node.args)
        case "axis":
            other = next((a for a in axes if a != node.args[-1]), None)
            if other is None:
                return False
            node.args = (*node.args[:-1], other)
            node.meta = {**node.meta, "axis": other.removeprefix("sim:")}
        case "early":  # what it would move, one step too early
            if not isinstance(x, fx.Node) or x.op != "call_function" or not x.args or not isinstance(x.args[0], fx.Node):
                return False
            node.args = (x.args[0], *node.args[1:])
        case "retype":
            op = next((a for a in node.args if a in ("sum", "max")), "sum")
            target: Any = c10d.all_gather_into_tensor.default if node.target is c10d.all_reduce.default else c10d.all_reduce.default
            node.target, node.args = target, (x, 2 if target is not c10d.all_reduce.default else op, node.args[-1])
        case "operand":  # what another one moves
            before = [n.args[0] for n in issued(graph)[:i] if n.args[0] is not x]
            if not before:
                return False
            node.args = (before[-1], *node.args[1:])
        case "result":  # what another one gives
            before = [next(iter(n.users)) for n in issued(graph)[:i]]
            if not before:
                return False
            wait.replace_all_uses_with(before[-1])
        case "unmoved":  # a step between two ops is left out
            steps = [n for n in graph.nodes if n.target in MOVEMENTS and isinstance(n.args[0], fx.Node)]
            if not steps:
                return False
            step = steps[7 * i % len(steps)]
            step.replace_all_uses_with(step.args[0])
            graph.erase_node(step)
        case "swap":
            after = issued(graph)[i + 1]
            before = list(graph.nodes)
            between = before[before.index(node) + 1 : before.index(after)]
            needed = {after}
            for n in reversed(between):
                if any(u in needed for u in n.users):
                    needed.add(n)
            if wait in needed:
                return False
            for n in [n for n in between if n in needed] + [after]:
                node.prepend(n)
    return True


def run(program: Program, mutant: Mutant, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    coordinates, axes = program.mesh.coordinates(), program.mesh.axes
    locals_, programs = [], []
    for c in coordinates:
        graph, offsets = mutant.at[tuple(c[a] for a in axes)]
        programs.append(LocalProgram(fx.GraphModule({}, mutant.graphs[graph]), (), ()))
        shards = [shard_of(x, spec, axes, c) for x, spec in zip(inputs, program.in_specs, strict=True)]
        locals_.append([*shards, *program.constants, *offsets])
    outputs = simulate(programs, locals_, groups_of(program.mesh))
    # Every rank's part counts: a replicated result that differs between ranks is wrong on some.
    found = []
    for i, (spec, shape) in enumerate(zip(program.out_specs, program.out_shapes, strict=True)):
        found.append(join_parts([rank[i] for rank in outputs], spec, shape, axes, coordinates))
        found += [rank[i] for rank in outputs]
    return found


def is_changed(program: Program, mutant: Mutant, inputs: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    try:
        found = run(program, mutant, inputs)
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError):
        return True
    return not all(a.shape == b.shape and torch.allclose(a, b, 1e-9, 1e-9, equal_nan=True) for a, b in zip(found, right, strict=True))


def check_mutants(lowered: Lowered, inputs: Sequence[torch.Tensor], seed: int, most: int) -> tuple[int, int, int]:
    """Mutants that change a result, those that change none, and how many of these are refused; not all that are refused are run."""
    program = lowered._program
    certificate = certificate_of(program)
    right = run(program, fresh(certificate, "none"), inputs)
    changed = same = over = 0
    for mutant in mutants(certificate, seed, most):
        try:
            check(replace(certificate, ranks=Ranks(tuple(mutant.graphs), mutant.at)))
            is_refused = False
        except CertificateError:
            is_refused = True
        if is_refused and mutant.what.startswith(OTHER_SHAPES):
            continue
        if is_changed(program, mutant, inputs, right):
            changed += 1
            assert is_refused, f"{mutant.what} changes a result and is certified"
        else:
            same += 1
            over += is_refused
    return changed, same, over


@FEW
@given(programs(gradients=False))
def test_programs(drawn: Drawn):
    lowered, values = lower(drawn, gradients=False)
    certify(lowered)
    check_mutants(lowered, values, 0, 6)


@FEW
@given(programs(gradients=True))
def test_gradients(drawn: Drawn):
    lowered, values = lower(drawn, gradients=True)
    certify(lowered)
    check_mutants(lowered, values, 0, 6)


@pytest.mark.slow
@MANY
@given(programs(gradients=True))
def test_many(drawn: Drawn):
    lowered, values = lower(drawn, gradients=True)
    certify(lowered)
    check_mutants(lowered, values, 1, 12)


def mlp(mesh: Any = None, **options: Any) -> tuple[ftp.Step, dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(7, 7, dtype=torch.float64, generator=generator) for name in ("up", "down")}

    def loss(params, x):
        return (torch.relu(x @ params["up"]) @ params["down"]).square().mean()

    mesh = mesh or ftp.simulated_mesh((2, 2), ("dp", "tp"))
    specs = {"up": P("dp", "tp"), "down": P("tp", "dp")}
    step = ftp.shard(loss, mesh, specs, batch_specs=P("dp"), **options)
    return step, params, torch.randn(5, 7, dtype=torch.float64, generator=generator)


def test_every_mutant_of_a_model():
    """All changes to one program: at least one collective of each kind, and offsets."""
    step, params, x = mlp()
    lowered = step.lower(params, x)
    assert {c.op for c in lowered.collectives} == {"all_gather", "all_reduce", "reduce_scatter"}
    changed, _, _ = check_mutants(lowered, [params["down"], params["up"], x], 0, 10_000)
    assert changed > 50


def check_step(program: Any, arguments: tuple[Any, ...], seed: int, most: int) -> int:
    """How many mutants of a program change a result; all of them are refused, and the program is not."""
    lowered = program.lower(*arguments)
    certify(lowered)
    leaves, _ = flatten(arguments)
    changed, _, _ = check_mutants(lowered, [leaves[i] for i in lowered._program.tensor_leaves], seed, most)
    return changed


def update_of(loss_fn: Any, params: Any, specs: Any, batch_spec: P, mesh: Any, **options: Any) -> tuple[Any, Any]:
    """A step with AdamW's fused update and clipping, and its state."""
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2)

    def update(params, state, batch):
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
        grads, _ = ftp.optim.clip_by_global_norm(grads, 1.0)
        return *opt.update(grads, state, params), loss

    step = ftp.spmd(update, mesh, (specs, specs, batch_spec), (specs, specs, P()), donate=(0, 1), **options)
    return step, opt.init(params)


def test_context_parallelism():
    mesh, spec = ftp.simulated_mesh((2, 2), ("dp", "cp")), P("dp", None, "cp")
    params = {name: torch.randn(2, 2, 4, 4, dtype=torch.float64) for name in "qk"}

    def loss(params, v):
        return F.scaled_dot_product_attention(params["q"], params["k"], v, is_causal=True).square().sum()

    step = ftp.shard(loss, mesh, spec, batch_specs=spec)
    assert check_step(step, (params, torch.randn(2, 2, 4, 4, dtype=torch.float64)), 0, 12) > 3


def test_sequence_parallelism_and_zero():
    cfg = models.LlamaConfig(vocab=6, dim=4, layers=1, heads=2, hidden=6)
    fn, params = ftp.functionalize(models.build(cfg, dtype=torch.float64), constraints=models.sequence_parallel())
    specs = ftp.plan(params, models.specs(models.cuts(cfg), tp="tp", zero="dp"))
    step = ftp.shard(models.lm_loss(fn), ftp.simulated_mesh((2, 2), ("dp", "tp")), specs, batch_specs=P("dp"))
    assert check_step(step, (params, models.lm_batch(cfg, 2, 4)), 0, 6) > 1


def test_a_scan_with_its_update_and_gathers_ahead():
    params = {name: torch.randn(3, 4, 4, dtype=torch.float64) for name in ("up", "down")}
    specs = {"up": P(None, "dp", "tp"), "down": P(None, "tp", "dp")}

    def loss(params, x):
        return ftp.scan(lambda p, x: x + torch.tanh(x @ p["up"]) @ p["down"], params, x).square().mean()

    step, state = update_of(loss, params, specs, P("dp"), ftp.simulated_mesh((2, 2), ("dp", "tp")), prefetch=1 << 30)
    assert check_step(step, (params, state, torch.randn(4, 4, dtype=torch.float64)), 0, 8) > 2


def test_the_examples():
    toy = example("toy_mlp")
    fn, params = ftp.functionalize(toy.ToyModel().double())
    batch = torch.rand(5, 10, dtype=torch.float64), torch.rand(5, 5, dtype=torch.float64)

    def loss(params, batch):
        return (fn(params, batch[0]) - batch[1]).var()

    step = ftp.shard(loss, ftp.simulated_mesh((2, 3), ("dp", "tp")), ftp.plan(params, toy.SPECS), batch_specs=P("dp"))
    assert check_step(step, (params, batch), 0, 20) > 10


@pytest.mark.slow
def test_the_decoder_of_the_examples():
    gpt = example("train_gpt")
    fn, params = ftp.functionalize(gpt.GPT(8, 2, 2, 6, 0.1).double())
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-3)
    specs = ftp.plan(params, gpt.SPECS)
    state = {"params": params, "opt": opt.init(params), "step": torch.tensor(3), "key": ftp.random.key(0)}
    state_specs = {"params": specs, "opt": specs, "step": P(), "key": P()}
    step = ftp.spmd(
        gpt.make_train_step(fn, opt, lambda step: step * 1e-3, 1.0),
        ftp.simulated_mesh((2, 2), ("dp", "tp")),
        (state_specs, P("dp"), P("dp")),
        (state_specs, P()),
        donate=(0,),
    )
    batch = torch.randint(0, 256, (4, 6)), torch.randint(0, 256, (4, 6))
    assert check_step(step, (state, batch, torch.zeros(2)), 0, 60) > 20


def test_on_request():
    step, params, x = mlp(certify=True)
    loss, _ = step(params, x)
    torch.testing.assert_close(loss, (torch.relu(x @ params["up"]) @ params["down"]).square().mean())


def test_ranks_with_equal_parts_and_other_lengths_on_the_way():
    """Of 3 elements cut in 2 and then in 2, the first and the third rank hold one each, out of 2 and out of 1."""
    mesh = ftp.simulated_mesh((2, 2), ("a", "b"))
    x, index = torch.randn(3, dtype=torch.float64), torch.tensor([2, 0, 1, 1])
    certify(ftp.spmd(lambda x, i: x.gather(0, i), mesh, (P(("a", "b")), P()), P()).lower(x, index))


def test_per_rank_code_is_refused():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    double = ftp.local(lambda x: 2 * x, mesh, (P("tp"),), P("tp"))
    with pytest.raises(CertificateError, match="per-rank code"):
        certify(ftp.spmd(lambda x: double(x), mesh, (P("tp"),)).lower(torch.ones(4)))


def test_large_meshes_by_their_corners():
    step, params, x = mlp(ftp.AbstractMesh((16, 8), ("dp", "tp")))
    assert len(certify(step.lower(params, x)).ranks.at) == 128


def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    step, params, x = mlp()
    path = tmp_path / "mlp.json"
    certificate = certify(step.lower(params, x))
    certificate.save(path)
    check(load_certificate(path))
    assert main(["certify", str(path)]) == 0
    assert "7 collectives, 4 ranks on (dp 2, tp 2)" in capsys.readouterr().out


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
    path.write_text(f'{head}"sha256":"{hashlib.sha256(body.encode()).hexdigest()}","program":{body}}}')
    assert main(["certify", str(path)]) == 1
    assert "is sum, not max" in capsys.readouterr().err
    path.write_text("{}")
    with pytest.raises(CertificateError, match="is no certificate"):
        load_certificate(path)


def test_a_program_that_is_not_the_traced_one():
    step, params, x = mlp()
    program = step.lower(params, x)._program
    other = ftp.shard(lambda p, x: (torch.tanh(x @ p["up"]) @ p["down"]).square().mean(), step.mesh, P(), batch_specs=P())
    with pytest.raises(CertificateError, match="is not what the traced program returns"):
        check_traced(other.lower(params, x)._program.traced, certificate_of(program))


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
    shards = [[shard_of(t, s, mesh.axes, c) for t, s in zip(inputs, program.in_specs, strict=True)] for c in mesh.coordinates()]
    changed = replace(certificate, ranks=Ranks(tuple(mutant.graphs), mutant.at))
    found = compare(changed, inputs, shards, groups_of(mesh), None, None)
    assert found is not None and found.name == "pow_1" and found.error > 1e-3 and "square" in found.source


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[1] / "docs/certify.md"
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, str(page), "exec"), scope)
    check(load_certificate("mlp.json"))
