"""Exported programs: every rank's program, run together, equals the module on one device."""

import copy
import io
import re
import warnings
from pathlib import Path

import optree
import pytest
import titan  # type: ignore[import-not-found]
import torch
from few_or_many import slow_after
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils import _pytree as pytree

import ftp
from ftp import P, plans
from ftp.exported import simulate
from ftp.sharding.local_pieces import local_pieces
from ftp.sharding.mesh import resolve
from ftp.sharding.patterns import matches

TP = ftp.simulated_mesh((3,), ("tp",))
GRID = ftp.simulated_mesh((2, 2), ("dp", "tp"))


def export(model, args, kwargs=None, decomposed=False, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own deprecated functions
        program = torch.export.export(model, args, kwargs or {}, **options)
        return program.run_decompositions() if decomposed else program


def programs(program, mesh, specs, **options):
    return [ftp.shard_exported(program, mesh, specs, rank=r, **options) for r in range(mesh.size())]


def ops(program):
    return [
        str(n.target)
        for n in program.graph.nodes
        if "_c10d_functional" in str(n.target) and "wait" not in str(n.target)
    ]


def shard_of(tensor, spec, axes, coordinate):
    """A shard of one piece."""
    pieces = local_pieces(spec, tensor.shape, axes, coordinate)
    return tensor[tuple(slice(*piece) for [piece] in pieces)]


def equals_one_device(model, args, kwargs, mesh, specs, decomposed=False, calls=1, **options):
    """Runs the module and all ranks' programs, and compares results and state; gives the
    programs.
    """
    program = export(model, args, kwargs, decomposed)
    before = (
        str(program.graph),
        str(program.graph_signature),
        {k: (v.clone(), v) for k, v in program.state_dict.items()},
    )
    made = programs(program, mesh, specs, **options)
    given = [(*args, kwargs) if kwargs else args] * mesh.size()
    reference = copy.deepcopy(model)
    for _ in range(calls):
        with torch.no_grad():
            expected = reference(*args, **kwargs)
        for rank in simulate(made, mesh, given):
            assert pytree.tree_structure(rank) == pytree.tree_structure(expected)
            for a, b in zip(pytree.tree_leaves(rank), pytree.tree_leaves(expected), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12) if isinstance(
                    b, torch.Tensor
                ) else None
                assert isinstance(b, torch.Tensor) or a == b
    state = {**reference.state_dict()}
    for path, spec in (specs or {}).items():
        if isinstance(spec, P) and path in state:
            coordinates = resolve(mesh).coordinates()
            for one, at in zip(made, coordinates, strict=True):
                shard = shard_of(state[path], spec, mesh.axes, at).detach()
                torch.testing.assert_close(one.state_dict[path], shard, check_stride=False)
    for one in made:
        assert_sound(one, program)
        for path in state:
            if not any(
                matches(pattern, tuple(path.split("."))) or not isinstance(s, P)
                for pattern, s in specs.items()
            ):
                torch.testing.assert_close(
                    one.state_dict[path].detach(), state[path], rtol=1e-12, atol=1e-12
                )
    assert (str(program.graph), str(program.graph_signature)) == before[:2]
    for path, (old, same) in before[2].items():
        assert program.state_dict[path] is same and torch.equal(old, same)
    return made


def assert_sound(made, program):
    """Valid, with the original's signature, and a value and a module stack at every node."""
    made.validate()
    made.graph.lint()
    assert [(s.kind, s.arg, s.target) for s in made.graph_signature.input_specs] == [
        (s.kind, s.arg, s.target) for s in program.graph_signature.input_specs
    ]
    assert [(s.kind, s.target) for s in made.graph_signature.output_specs] == [
        (s.kind, s.target) for s in program.graph_signature.output_specs
    ]
    assert made.call_spec == program.call_spec
    for path, value in program.state_dict.items():
        assert (
            type(made.state_dict[path]) is type(value)
            and made.state_dict[path].requires_grad == value.requires_grad
        )
    for node in made.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta and node.meta["nn_module_stack"], node


class Mlp(nn.Module):
    def __init__(self, dim=4, hidden=7):
        super().__init__()
        self.net1 = nn.Linear(dim, hidden)
        self.net2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


@torch.library.custom_op("ftp_test_exported::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0).values + x


@odd.register_fake
def _(x):
    return torch.empty_like(x)


MEGATRON = {"net1.weight": P("tp"), "net1.bias": P("tp"), "net2.weight": P(None, "tp")}


class Everything(nn.Module):
    """Tied and shared layers, buffers of all kinds, constants, numbers, keywords, containers."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(4, 6)
        self.bn = nn.BatchNorm1d(6)
        self.net2 = nn.Linear(6, 4)
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.arange(4.0), persistent=False)
        self.shift = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.net2.weight.requires_grad_(False)

    def forward(self, x, pair, times, *, y=None):
        self.count.add_(1)  # type: ignore[operator]
        h = self.bn(self.net1(x)).relu_() + self.net1(x)
        a, b = torch.chunk(self.net2(h) * self.scale + self.shift, 2, -1)
        if y is not None:
            a = a + y
        top, at = torch.topk(torch.cat([a, b, *pair], -1), 2)
        token = self.emb(torch.tensor([0, 3])).sum()
        return {
            "a": a * times,
            "b": [b, x],
            "n": 3,
            "none": None,
            "h": self.head(a.repeat(1, 2)) + token,
            "top": (top, at),
            "t": x.T,
        }


def everything():
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    return (
        Everything().double(),
        (x.double(), [x[:, :1].double(), x[:, 1:2].double()], 2),
        {"y": x[:, 2:].double()},
    )


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("mesh", [TP, GRID], ids=str)
def test_everything_at_once_equals_one_device(mesh, decomposed):
    model, args, kwargs = everything()
    specs = {
        **MEGATRON,
        "bn.weight": P("tp"),
        "bn.bias": P("tp"),
        "bn.running_mean": P("tp"),
        "bn.running_var": P("tp"),
        "emb.weight": P("tp"),
        "head.weight": P("tp"),
        "shift": P("tp"),
        "scale": P(None),
    }
    equals_one_device(model, args, kwargs, mesh, specs, decomposed, calls=2)


# What styles and specs give.


def x(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    "given",
    [
        {"net1": ColwiseParallel, "net2": RowwiseParallel},
        {"net1": ColwiseParallel(), "net2": RowwiseParallel()},
        MEGATRON,
        {"net1": ColwiseParallel(), "net2.weight": P(None, "tp")},
    ],
    ids=["classes", "instances", "specs", "both"],
)
def test_a_column_and_a_row_need_one_all_reduce(given):
    for made, rows in zip(
        equals_one_device(Mlp().double(), (x(5, 4),), {}, TP, given), (3, 3, 1), strict=True
    ):
        assert ops(made) == ["_c10d_functional.all_reduce.default"]
        assert {path: tuple(value.shape) for path, value in made.state_dict.items()} == {
            "net1.weight": (rows, 4),
            "net1.bias": (rows,),
            "net2.weight": (4, rows),
            "net2.bias": (4,),
        }
        issued = next(n for n in made.graph.nodes if "all_reduce" in str(n.target))
        assert [path for path, _ in issued.meta["nn_module_stack"].values()] == ["", "net2"]
        assert "return self.net2(torch.relu(self.net1(x)))" in issued.meta["stack_trace"]


def test_a_row_whose_sum_is_left_pending():
    given = {"net1": ColwiseParallel(), "net2": RowwiseParallel(output_layouts=Partial())}
    for made in equals_one_device(Mlp().double(), (x(5, 4),), {}, TP, given):
        assert ops(made) == ["_c10d_functional.all_reduce.default"]


def test_every_layer_is_known_by_its_module_and_line():
    """Of equal layers too, of which each op but the first layer's was traced before."""
    program = export(nn.Sequential(*(Mlp() for _ in range(4))).double(), (x(5, 4),))
    made = ftp.shard_exported(
        program, TP, {"*.net1": ColwiseParallel, "*.net2": RowwiseParallel}, rank=0
    )

    def module(node):
        return [path for path, _ in node.meta["nn_module_stack"].values()]

    issued = [node for node in made.graph.nodes if "all_reduce" in str(node.target)]
    assert [module(node) for node in issued] == [["", str(i), f"{i}.net2"] for i in range(4)]
    for node in made.graph.nodes:
        if node.op == "call_function":
            assert module(node)[1:2] and node.meta["stack_trace"], node
    assert {m for node in made.graph.nodes if "relu" in node.name for m in module(node)[1:]} == {
        str(i) for i in range(4)
    }


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("decomposed", slow_after(1, [True, False]))
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {
                "net1": ColwiseParallel(input_layouts=Shard(0)),
                "net2": RowwiseParallel(output_layouts=Shard(1)),
            },
            ["gather", "scatter", "gather"],
        ),
        ({"net1": ColwiseParallel(output_layouts=Replicate())}, ["gather"]),
    ],
)
def test_layouts_of_styles_are_met(given, expected, decomposed):
    made, *_ = equals_one_device(Mlp().double(), (x(5, 3, 4),), {}, TP, given, decomposed)
    if decomposed:
        equals_one_device(Mlp().double(), (x(5, 3, 4),), {}, GRID, given)
    found = [op.removeprefix("_c10d_functional.") for op in ops(made)]
    assert [
        {"all_gather_into_tensor.default": "gather", "reduce_scatter_tensor.default": "scatter"}[op]
        for op in found
    ] == expected


def test_a_style_finds_a_layer_whose_input_is_strided():
    """There a linear layer decomposes into a batched product of its weight, broadcast."""

    class Strided(Mlp):
        def forward(self, x):
            return self.net2(torch.relu(self.net1(x.transpose(0, 1))).transpose(0, 1))

    given = {"net1": ColwiseParallel, "net2": RowwiseParallel}
    made, *_ = equals_one_device(Strided().double(), (x(5, 3, 4),), {}, TP, given, decomposed=True)
    assert ops(made) == ["_c10d_functional.all_reduce.default"]


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.out = nn.Linear(6, 8, bias=False)

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1])
        h = self.table(tokens) + self.table(at)
        return self.out(nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True))


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_embeddings(style):
    given = {"table": style, "out": ColwiseParallel}
    made, *_ = equals_one_device(
        Lookup().double(), (torch.arange(10).reshape(2, 5) % 8,), {}, TP, given
    )
    assert tuple(made.state_dict["table.weight"].shape) == (
        (8, 2) if style is ColwiseParallel else (3, 6)
    )


def test_a_tied_weight_stays_tied():
    model = Everything().double()
    made = ftp.shard_exported(
        export(model, *everything()[1:]), TP, {"emb": RowwiseParallel}, rank=2
    )
    assert made.state_dict["emb.weight"] is made.state_dict["head.weight"]
    assert made.state_dict["emb.weight"].shape == (1, 4)


@pytest.mark.slow
def test_layers_that_keep_activations_whole():
    encoder = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).double().eval()
    specs = {
        "self_attn.in_proj_weight": P("tp"),
        "linear1.*": P("tp"),
        "linear2.weight": P(None, "tp"),
    }
    equals_one_device(encoder, (x(2, 5, 12),), {}, TP, specs)
    convolution = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)
    ).double()
    made, *_ = equals_one_device(
        convolution, (x(2, 3, 6, 6),), {}, TP, {"0.*": P("tp"), "1.[wbr]*[!d]": P("tp")}
    )
    assert ops(made) == ["_c10d_functional.all_reduce.default"]


def test_consumers_share_one_gather():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 6)

        def forward(self, x):
            h = self.a(x)
            return h.cumsum(-1), h.sort(-1), h

    made, *_ = equals_one_device(Shared().double(), (x(3, 4),), {}, TP, {"a": ColwiseParallel})
    assert ops(made) == ["_c10d_functional.all_gather_into_tensor.default"]


def test_inputs_and_outputs_as_specs_say():
    model, whole = Mlp().double(), x(5, 4)
    program = export(model, (whole,))
    coordinates = resolve(GRID).coordinates()

    def part(tensor, spec, at):
        return shard_of(tensor, spec, {"dp": 2, "tp": 2}, at)

    for in_specs, cut, out in (
        (P("dp"), P("dp"), P("dp")),
        ((P("dp"),), P("dp"), P("dp", "tp")),
        ({"x": P(("dp", "tp"))}, P(("dp", "tp")), P("tp")),
    ):
        made = programs(program, GRID, MEGATRON, in_specs=in_specs, out_specs=out)
        results = simulate(made, GRID, [(part(whole, cut, at),) for at in coordinates])
        for one, result, at in zip(made, results, coordinates, strict=True):
            torch.testing.assert_close(result, part(model(whole), out, at).detach())
            assert one.example_inputs is not None and torch.equal(
                one.example_inputs[0][0], part(whole, cut, at)
            )
            assert_sound(one, program)
    (made, *_) = programs(program, GRID, MEGATRON, in_specs=P("dp"), out_specs=None)
    assert ops(made) == ["_c10d_functional.all_reduce.default"]


def test_collectives_that_an_op_issues_itself(monkeypatch):
    """Attention in a ring, over both axes."""
    cut = P(None, None, ("dp", "tp"))
    hardware = ftp.Hardware(flops=1e3, ring_step=0.0)
    monkeypatch.setattr("ftp.exported.shard.hardware_on", lambda *_, **__: hardware)

    class Attention(torch.nn.Module):
        def forward(self, q):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 7, 4, dtype=torch.float64)
    made = programs(export(Attention(), (q,)), GRID, {}, in_specs=(cut,), out_specs=cut)
    assert "attention_ring" in str(made[0].graph)
    coordinates = resolve(GRID).coordinates()
    shards = [(shard_of(q, cut, GRID.axes, at),) for at in coordinates]
    expected = Attention()(q)
    for found, at in zip(simulate(made, GRID, shards), coordinates, strict=True):
        right = shard_of(expected, cut, GRID.axes, at)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_scopes_without_gradients_and_with_other_dtypes_are_inlined():
    class Scopes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 6)

        def forward(self, x):
            with torch.no_grad():
                h = self.a(x)
            with torch.autocast("cpu", torch.bfloat16):
                return self.a(x).double() + h

    for decomposed in (False, True):
        equals_one_device(Scopes().double(), (x(3, 4),), {}, TP, {"a": ColwiseParallel}, decomposed)


def test_inputs_that_change_in_place():
    class Grows(nn.Module):
        def forward(self, a, b):
            a.add_(b)
            return a * b

    for decomposed in (False, True):
        made = programs(
            export(Grows(), (torch.ones(3), torch.ones(3)), decomposed=decomposed),
            TP,
            {},
            in_specs={"a": P("tp"), "b": P("tp")},
            out_specs=P("tp"),
        )
        given = [(torch.full((1,), float(rank)), torch.full((1,), 2.0)) for rank in range(3)]
        assert [float(r) for r in simulate(made, TP, given)] == [4.0, 6.0, 8.0]
        assert [float(a) for a, _ in given] == [2.0, 3.0, 4.0]


def test_saved_and_loaded():
    model = Mlp().double()
    for decomposed in (False, True):
        made = programs(export(model, (x(3, 4),), decomposed=decomposed), TP, MEGATRON)
        loaded = []
        for one in made:
            file = io.BytesIO()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.export.save(one, file)
                file.seek(0)
                loaded.append(torch.export.load(file))
        for result in simulate(loaded, TP, [(x(3, 4),)] * 3):
            torch.testing.assert_close(result, model(x(3, 4)).detach())
        issued = next(n for n in loaded[0].graph.nodes if "all_reduce" in str(n.target))
        assert "net2" in str(issued.meta["nn_module_stack"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert ops(loaded[0].run_decompositions()) == ["_c10d_functional.all_reduce.default"]
            torch.export.unflatten(loaded[0])


def test_no_weights_are_needed():
    with torch.device("meta"):
        model = Lookup()
    program = export(model, (torch.zeros(2, 5, dtype=torch.long, device="meta"),))
    mesh = ftp.AbstractMesh((4, 2), ("dp", "tp"), device_type="cuda")
    made = ftp.shard_exported(
        program, mesh, {"table": RowwiseParallel, "out": ColwiseParallel}, rank=5
    )
    assert made.state_dict["table.weight"].is_meta and made.state_dict["table.weight"].shape == (
        4,
        6,
    )
    vals = [n.meta["val"] for n in made.graph.nodes if n.op == "call_function"]
    assert {x.device.type for x in optree.tree_leaves(vals)} == {"meta"}


def test_a_module_called_twice_and_strict_export():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(self.a(x))

    equals_one_device(
        Twice().double(), (x(3, 4),), {}, TP, {"a": ColwiseParallel(output_layouts=Replicate())}
    )
    made = ftp.shard_exported(
        export(Mlp(), (torch.ones(3, 4),), strict=True),
        TP,
        {"net1": ColwiseParallel, "net2": RowwiseParallel},
    )
    issued = next(n for n in made.graph.nodes if "all_reduce" in str(n.target))
    assert [path for path, _ in issued.meta["nn_module_stack"].values()] == ["", "net2"]


def test_an_op_without_a_rule_is_replicated_with_a_warning(monkeypatch):
    monkeypatch.setenv("FTP_DISCOVERY", "0")

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return odd(self.a(x))

    program = export(Odd().double(), (x(4, 4),))
    with pytest.warns(
        ftp.errors.ReplicationWarning, match=r"test_exported.py:\d+  return odd\(self.a\(x\)\)"
    ):
        equals_one_device(Odd().double(), (x(4, 4),), {}, TP, {"a": ColwiseParallel})
    with pytest.raises(ftp.errors.PlanningError, match="has no sharding rule"):
        ftp.shard_exported(program, TP, {"a": ColwiseParallel}, strict=True)


# What is around a module.


@pytest.mark.parametrize("sequence", slow_after(1, [True, False]))
def test_the_whole_plan_of_a_llama(sequence):
    """torchtitan's; the exporter is told to keep the signature of the modules whose inputs are
    named by position.
    """
    cfg = titan.Config(layers=1)
    torch.manual_seed(0)
    model, (tokens, _) = titan.Transformer(cfg).double(), titan.batch(cfg)
    given = titan.plan(sequence, False)
    program = export(model, (tokens,), preserve_module_call_signature=("layers.0.attention",))
    mesh = ftp.simulated_mesh(2, "tp")
    made = programs(program, mesh, given)
    for result in simulate(made, mesh, [(tokens,)] * 2):
        torch.testing.assert_close(result, model(tokens).detach(), rtol=1e-12, atol=1e-12)
    # The embedding's and two blocks' sums, and the logits.
    moves = (
        ["all_reduce"] * 3
        if not sequence
        else ["reduce_scatter_tensor", "all_gather_into_tensor"] * 3
    )
    found = [op.removeprefix("_c10d_functional.").removesuffix(".default") for op in ops(made[0])]
    assert found == [*moves, "all_gather_into_tensor"]
    with pytest.raises(
        ftp.FtpError,
        match=r"the module reads .*, .* Export with"
        r" preserve_module_call_signature=\('layers.0.attention',\)",
    ):
        ftp.shard_exported(export(model, (tokens,)), mesh, given)


class Inner(nn.Module):
    def forward(self, x, y, *, scale):
        return x.cumsum(0) * scale, y + 1


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        a, b = self.inner(x, x * 2, scale=x + 3)
        c, d = self.inner(b, a, scale=x)
        return a + b + c + d + x


SPLIT, WHOLE = Shard(0), Replicate()


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("style", "gathers"),
    [
        (PrepareModuleInput(input_layouts=(SPLIT, None), desired_input_layouts=(WHOLE, None)), 2),
        (PrepareModuleInput(input_layouts=(None, SPLIT), desired_input_layouts=(None, WHOLE)), 2),
        (
            PrepareModuleInput(
                input_kwarg_layouts={"scale": SPLIT}, desired_input_kwarg_layouts={"scale": WHOLE}
            ),
            2,
        ),
        (
            PrepareModuleOutput(
                output_layouts=(SPLIT, SPLIT), desired_output_layouts=(WHOLE, WHOLE)
            ),
            4,
        ),
        (
            PrepareModuleInputOutput(
                input_layouts=(SPLIT, None),
                desired_input_layouts=(WHOLE, None),
                output_layouts=(SPLIT, None),
                desired_output_layouts=(WHOLE, None),
            ),
            4,
        ),
    ],
)
def test_layouts_around_a_module_that_is_called_twice(style, gathers):
    program = export(Outer(), (x(3, 2),), preserve_module_call_signature=("inner",))
    made = programs(program, TP, {"inner": style})
    for result in simulate(made, TP, [(x(3, 2),)] * 3):
        torch.testing.assert_close(result, Outer()(x(3, 2)), rtol=1e-12, atol=1e-12)
    assert ops(made[0]) == ["_c10d_functional.all_gather_into_tensor.default"] * gathers
    for one in made:
        one.graph.lint()
        one.validate()


@pytest.mark.parametrize(
    ("style", "message"),
    [
        (
            PrepareModuleInput(input_layouts=SPLIT, desired_input_layouts=WHOLE),
            "has 1 inputs, but the module has 2",
        ),
        (
            PrepareModuleOutput(output_layouts=(SPLIT,) * 3, desired_output_layouts=(WHOLE,) * 3),
            "has 3 outputs, but the module has 2",
        ),
        (
            PrepareModuleInput(
                input_kwarg_layouts={"scales": SPLIT}, desired_input_kwarg_layouts={"scales": WHOLE}
            ),
            "names the keyword 'scales'; the call has 'scale'",
        ),
    ],
)
def test_layouts_of_another_length(style, message):
    program = export(Outer(), (x(3, 2),), preserve_module_call_signature=("inner",))
    with pytest.raises(ftp.errors.SpecError, match=message):
        ftp.shard_exported(program, TP, {"inner": style})


# Random ops.


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4)

    def forward(self, x, *, scale):
        h = nn.functional.dropout(self.dropout(self.up(x)), 0.3)
        noise = (
            torch.rand_like(x)
            + torch.empty(4, dtype=x.dtype).uniform_(1, 2)
            + torch.randint(0, 9, (5, 4))
        )
        return self.down(h) * scale + noise + x.new_zeros(5, 4).bernoulli_(0.3)


@pytest.mark.parametrize("decomposed", slow_after(1, [False, True]))
def test_random_ops_draw_from_a_key_what_one_device_draws(decomposed):
    model, key = Draws().double(), ftp.random.key(3)
    fn, params = ftp.functionalize(model)
    program = export(model, (x(5, 4),), {"scale": x(4)}, decomposed)
    made = programs(program, GRID, {"up": ColwiseParallel, "down": RowwiseParallel}, rng=True)
    assert ops(made[0]) == ["_c10d_functional.all_reduce.default"]
    for at in (key, ftp.random.key(4)):
        expected = fn(params, x(5, 4), scale=x(4), rng=at).detach()
        for result in simulate(made, GRID, [(x(5, 4), {"scale": x(4), "rng": at})] * 4):
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    (alone,) = programs(program, ftp.simulated_mesh(1, "tp"), {}, rng=True)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(alone, file)
        file.seek(0)
        loaded = torch.export.load(file)
    torch.testing.assert_close(
        loaded.module()(x(5, 4), scale=x(4), rng=key), fn(params, x(5, 4), scale=x(4), rng=key)
    )


def test_what_cannot_be_drawn_from_a_key():
    class Poisson(nn.Module):
        def forward(self, x):
            return torch.poisson(x)

    class Taken(nn.Module):
        def forward(self, rng):
            return torch.rand_like(rng)

    with pytest.raises(
        ftp.errors.InputError,
        match=r"aten.poisson.default at .*return torch.poisson\(x\).* cannot be drawn from a key",
    ):
        ftp.shard_exported(export(Poisson(), (torch.ones(3),)), TP, {}, rng=True)
    with pytest.raises(ftp.errors.InputError, match="has an argument 'rng' of its own"):
        ftp.shard_exported(export(Taken(), (torch.ones(3),)), TP, {}, rng=True)


# What is refused.


class Float8ColwiseParallel(ColwiseParallel):
    pass


class Refused(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        if self.what == "cond":
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        if self.what == "item":
            return x * x.sum().item()
        if self.what == "nonzero":
            return x.nonzero()
        return torch.rand_like(x)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cond", "cond at .*torch.cond.* is a higher-order op, which has no sharding rule"),
        ("item", r"aten.item.default at .*x.sum\(\).item\(\) reads a tensor's value"),
        (
            "nonzero",
            r"aten.nonzero.default at .*x.nonzero\(\) gives a shape that depends on values",
        ),
        (
            "rand",
            r"aten.rand_like.default draws random numbers at .*return torch.rand_like\(x\), and"
            r" different ones on each rank",
        ),
    ],
)
def test_what_cannot_be_one_program_is_refused_with_its_line(what, message):
    with pytest.raises(ftp.errors.InputError, match=message):
        ftp.shard_exported(export(Refused(what), (torch.ones(3),)), TP, {})


def test_dropout_without_a_key_is_refused():
    program = export(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (torch.ones(3, 4),))
    with pytest.raises(
        ftp.errors.InputError,
        match=r"aten.dropout.default draws random numbers .*\(module '1'\).* export model.eval\(\)",
    ):
        ftp.shard_exported(program, TP, {})


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            {"net3.weight": P("tp")},
            {},
            "pattern 'net3.weight' matches no path of the program's state; the nearest are"
            " 'net2.weight'",
        ),
        (
            {"net3": ColwiseParallel},
            {},
            "pattern 'net3' matches no path of the program's modules; the nearest are 'net2'",
        ),
        (None, {}, r"styles_or_specs is None, a NoneType; .* \{\} replicates everything"),
        (
            {"net1": plans.PairwiseParallel()},
            {},
            "'net1' has PairwiseParallel.*or for a module's path one of torch's ColwiseParallel",
        ),
        (
            {"net1": Float8ColwiseParallel},
            {},
            "It is a subclass of ColwiseParallel, whose changes are unknown",
        ),
        (
            {"net1": PrepareModuleOutput},
            {},
            "the class PrepareModuleOutput, which means nothing without its layouts",
        ),
        (
            {"net1": SequenceParallel(sequence_dim=2)},
            {},
            r"at 'net1' says P\(None, None, 'tp'\) of input 0, but .* 2 dims",
        ),
        (
            {
                "net1": PrepareModuleOutput(
                    output_layouts=Partial(), desired_output_layouts=Partial()
                )
            },
            {},
            "desired_output_layouts.*Partial",
        ),
        (
            {"": ColwiseParallel},
            {},
            "ColwiseParallel at '': 'weight' is missing from the program's state, which holds"
            " 'net1.weight'",
        ),
        (P("tp"), {}, r"For one spec everywhere give \{'\*\*': P\('tp'\)\}"),
        (
            {"net1.weight": P("tp"), "net1": RowwiseParallel},
            {},
            r"disagree for net1.weight: P\('tp'\) and P\(None, 'tp'\)",
        ),
        (
            {"net1.weight": P("pp")},
            {},
            r"net1.weight has spec P\('pp'\), but the mesh has no axis 'pp'",
        ),
        ({}, {"rank": 7}, "rank=7 is no rank of the mesh"),
        ({}, {"in_specs": {"z": P("tp")}}, "in_specs names 'z'; the program's arguments are 'x'"),
        ({}, {"in_specs": P(None, None, "tp")}, "x has spec .* of 3 entries"),
        ({}, {"out_specs": [P("tp")]}, "the specs go deeper than the tree: the result is a leaf"),
        ({"net1": ColwiseParallel}, {"axis": "pp"}, "axis='pp' is no axis"),
    ],
)
def test_what_does_not_fit_is_named(given, options, message):
    with pytest.raises(ftp.FtpError, match=message):
        ftp.shard_exported(export(Mlp(), (torch.ones(3, 4),)), TP, given, **options)


def test_missing_weights_are_named():
    program = export(Mlp(), (torch.ones(3, 4),))
    del program.state_dict["net1.weight"], program.state_dict["net2.bias"]
    with pytest.raises(
        ftp.errors.InputError,
        match=r"'net1.weight' is missing from the program's state dict.\n'net2.bias' is missing",
    ):
        ftp.shard_exported(program, TP, {})


def test_programs_on_another_device_and_other_things_are_refused():
    with pytest.raises(
        ftp.errors.SpecError, match=r"The program is on cpu, the mesh on cuda.*move_to_device_pass"
    ):
        ftp.shard_exported(
            export(Mlp(), (torch.ones(3, 4),)),
            ftp.AbstractMesh((2,), ("tp",), device_type="cuda"),
            {},
        )
    with pytest.raises(ftp.errors.InputError, match="takes an ExportedProgram, not Mlp"):
        ftp.shard_exported(Mlp(), TP, {})  # type: ignore[arg-type]


def test_the_page_runs(capsys):
    page = Path(__file__).resolve().parents[2] / "docs/exported.md"
    names: dict[str, object] = {}
    for example in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S):
        exec(example, names)
    assert capsys.readouterr().out == "torch.Size([16, 8])\n"


def test_a_program_that_was_exported_with_one_tensor_as_two_arguments_is_refused():
    """torch.export makes it read one of them alone."""

    class Two(torch.nn.Linear):
        def forward(self, input, other):
            return super().forward(input) - other

    x, mesh = torch.ones(2, 4), ftp.simulated_mesh(2, "tp")
    specs = {"weight": P("tp"), "bias": P("tp")}
    with pytest.raises(ftp.errors.InputError, match="inputs input and other were one tensor when"):
        ftp.shard_exported(torch.export.export(Two(4, 4), (x, x)), mesh, specs, rank=0)
    ftp.shard_exported(torch.export.export(Two(4, 4), (x, x.clone())), mesh, specs, rank=0)
