"""One plan for many shapes: every size is what one device computes, by one trace and few plans."""

import math

import pytest
import torch
from few_or_many import slow_after, slow_unless
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pages import run_examples
from torch.fx.node import map_aggregate
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.api import definition, families, family_programs
from ftp.errors import ExplicitError, InputError
from ftp.planning import prepare
from ftp.runtime import lowering, process_groups, sized_program
from ftp.tracing import trace as trace_module

MOST = 512
DIMS = {1: torch.export.Dim("S", min=1, max=MOST)}
SPECS = {"emb": P(None, "tp"), "up": P(None, "tp"), "down": P("tp"), "head": P(None, "tp")}


def loss_fn(params, batch):
    """Means, positions, reshapes and an attention over the dynamic dim."""
    tokens, targets = batch
    size = tokens.shape[1]
    x = params["emb"][tokens] + torch.arange(size, dtype=torch.float64)[:, None] / size
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
    x = F.layer_norm(x - x.mean(1, keepdim=True), (8,))
    x = x + F.gelu(x @ params["up"]) @ params["down"]
    return F.cross_entropy((x @ params["head"]).flatten(0, 1), targets.flatten())


def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {"emb": (12, 8), "up": (8, 16), "down": (16, 8), "head": (8, 12)}
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


def batch(size):
    generator = torch.Generator().manual_seed(size)
    return tuple(torch.randint(0, 12, (2, size), generator=generator) for _ in range(2))


def on(mesh: dict[str, int]):
    return ftp.simulated_mesh(tuple(mesh.values()), tuple(mesh))


def without(axis: str):
    return {k: P(*(None if a == axis else a for a in spec)) for k, spec in SPECS.items()}


LAYOUTS = {
    "tp": (on({"tp": 2}), SPECS, P()),
    "context": (on({"cp": 3}), P(), P(None, "cp")),
    "both": (on({"cp": 2, "tp": 2}), SPECS, P(None, "cp")),
    "context on the weights' axis": (on({"tp": 3}), SPECS, P(None, "tp")),
}
STEPS = {
    name: ftp.shard(loss_fn, mesh, specs, batch_specs=spec, dynamic_shapes=DIMS)
    for name, (mesh, specs, spec) in LAYOUTS.items()
}


def check(step, size):
    loss, grads = step(weights(), batch(size))
    want_grads, want = torch.func.grad_and_value(loss_fn)(weights(), batch(size))
    assert abs(float(loss - want)) < 1e-12
    for name, grad in grads.items():
        assert (grad - want_grads[name]).abs().max() < 1e-12, name


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("tp", "both"), LAYOUTS))
@settings(max_examples=4)
@given(size=st.integers(1, 48))
@example(size=1)
@example(size=4)
@example(size=MOST)
def test_a_size_is_what_one_device_computes(name, size):
    step = STEPS[name]
    check(step, size)
    assert step.shapes.traces == 1 and step.shapes.plans <= 3 and not step.shapes.one_by_one


@pytest.mark.parametrize("spec", slow_after(1, [P(None, "cp"), P()]), ids=str)
def test_chunks_of_a_padded_sequence(spec):
    """As Mamba-2 has them: padded to a multiple of the chunk's length, viewed as chunks, and cut
    back; with labels that are shifted, in a program that writes in place.
    """

    def loss(params, x):
        size = x.shape[1]
        padding = (4 - size % 4) % 4
        chunks = F.pad(x @ params["w"], (0, 0, 0, padding)).reshape(2, -1, 4, 3)
        states = chunks.sum(2)
        before = torch.cat([torch.zeros_like(states), states], 1).cumsum(1)[:, : chunks.shape[1]]
        y = (chunks.cumsum(2) + before[:, :, None]).reshape(2, -1, 3)
        if padding > 0:
            y = y[:, :size]
        labels = F.pad(x.sum(-1), (0, 1), value=-1.0)
        labels[:, :1] = 0
        return (y.sum(-1) - labels[:, 1:]).square().mean()

    step = ftp.shard(loss, on({"cp": 2}), batch_specs=spec, dynamic_shapes=DIMS)
    params = {"w": torch.randn(3, 3, dtype=torch.float64)}
    for size in (8, 6, 12, 10, 20, 14):
        x = torch.randn(2, size, 3, dtype=torch.float64)
        value, grads = step(params, x)
        want_grads, want = torch.func.grad_and_value(loss)(params, x)
        torch.testing.assert_close((value, grads["w"]), (want, want_grads["w"]))
    assert step.shapes.traces == 2 and step.shapes.plans <= 4 and not step.shapes.one_by_one


DRAWN = {
    "dropout": lambda x: F.dropout(x, 0.3, True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(x.shape[0], 4, dtype=x.dtype),
    "randint": lambda x: x * torch.randint(0, 7, (x.shape[0], 4)),
    "randperm": lambda x: x[torch.randperm(x.shape[0])] * torch.arange(4),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "multinomial": lambda x: x[:, :2] * torch.multinomial(torch.softmax(x.detach(), -1), 2),
    "normal_": lambda x: x * torch.empty_like(x).normal_(),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x[None, None]] * 3, dropout_p=0.2, is_causal=True
    ),
}


@pytest.mark.parametrize(
    "name", slow_unless(lambda name: name in ("dropout", "randperm", "attention"), DRAWN)
)
@pytest.mark.parametrize("spec", slow_after(1, [P("cp"), P()]), ids=str)
def test_draws_of_all_sizes(name, spec):
    class Drawing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x):
            return DRAWN[name](x * self.w)

    fn, params = ftp.functionalize(Drawing().train())

    def loss(params, x, key):
        return fn(params, x, rng=key).square().sum()

    dims = ({0: torch.export.Dim("N", min=2)}, None)
    step = ftp.shard(loss, on({"cp": 2}), batch_specs=(spec, P()), dynamic_shapes=dims)
    for size in (4, 6, 7, 9):
        given = torch.randn(size, 4, dtype=torch.float64), ftp.random.key(size)
        value, grads = step(params, *given)
        want_grads, want = torch.func.grad_and_value(loss)(params, *given)
        torch.testing.assert_close((value, grads["w"]), (want, want_grads["w"]))
    assert step.shapes.traces == 1 and not step.shapes.one_by_one


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_sizes(name):
    mesh, specs, spec = LAYOUTS[name]
    step = ftp.shard(loss_fn, mesh, specs, batch_specs=spec, dynamic_shapes=DIMS)
    for size in range(1, MOST + 1):
        check(step, size)
    assert step.shapes.traces == 1 and step.shapes.plans <= 3


def graph_at(program, coordinate):
    """A rank's graph at one size, as text: its int inputs are written as their values."""
    local = program.local(coordinate)
    numbers = iter(local.offsets_at(coordinate))
    lines, known = [], {}
    placeholders = [node for node in local.gm.graph.nodes if node.op == "placeholder"]
    ints = placeholders[len(program.plan.graph.inputs) :]
    for at, node in enumerate(local.gm.graph.nodes):
        known[node] = f"%{at}"
        if node in ints:
            known[node] = next(numbers)
        elif node.op == "call_function":
            args = map_aggregate(
                (node.args, dict(node.kwargs)), lambda x: known.get(x, x) if x.__hash__ else x
            )
            lines.append((str(node.target), str(args)))
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp", "both"])
def test_a_graph_is_that_of_a_plan_made_at_the_size(name):
    """Node by node, with the values of sizes and offsets."""
    mesh, specs, spec = LAYOUTS[name]

    def programs(*sizes):
        step = ftp.shard(loss_fn, mesh, specs, batch_specs=spec, dynamic_shapes=DIMS)
        for size in sizes:
            step(weights(), batch(size))
        return step._last[0].program if step._last else None

    for first, second in ((6, 10), (7, 11)):
        one, other = programs(first, second), programs(second)
        assert one is not None
        for coordinate in one.mesh.coordinates():
            mine, its = graph_at(one, coordinate), graph_at(other, coordinate)
            assert [t for t, _ in mine] == [t for t, _ in its]
            for (target, a), (_, b) in zip(mine, its, strict=True):
                assert _numbers(a) == _numbers(b), target


def _numbers(text: str) -> str:
    """Without the numbers of nodes, as inputs may be more."""
    return "".join(
        "%" if part.startswith("%") else part for part in text.replace(",", " ,").split(" ")
    )


def test_new_sizes_plan_nothing(monkeypatch):
    made = []
    trace, plan = definition.trace, prepare.plan_prepared
    monkeypatch.setattr(definition, "trace", lambda *a, **k: made.append("trace") or trace(*a, **k))
    monkeypatch.setattr(
        prepare, "plan_prepared", lambda *a, **k: made.append("plan") or plan(*a, **k)
    )
    step = ftp.shard(loss_fn, on({"tp": 2}), SPECS, dynamic_shapes=DIMS)
    for size in (9, 4, 16, 1, 9, 12):
        check(step, size)
    assert made == ["trace", "plan"]


def test_a_train_step():
    train_step(on({"dp": 2}))


def train_step(mesh, **options):
    """``spmd``: an optimizer's state, donated, and two dims that change."""
    dims = {1: torch.export.Dim("S", max=64), 0: torch.export.Dim("B", min=1, max=16)}
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2)

    def train(params, state, tokens, targets):
        grads, loss = torch.func.grad_and_value(loss_fn)(params, (tokens, targets))
        params, state = opt.update(grads, state, params)
        return params, state, loss

    step = ftp.spmd(
        train,
        mesh,
        (P(), P(), P("dp"), P("dp")),
        donate=(0, 1),
        dynamic_shapes=(None, None, dims, dims),
        **options,
    )
    params, state = weights(), opt.init(weights())
    want, want_state = weights(), opt.init(weights())
    for rows, size in ((4, 6), (3, 6), (4, 9), (5, 7), (2, 2)):
        generator = torch.Generator().manual_seed(size)
        given = [torch.randint(0, 12, (rows, size), generator=generator) for _ in range(2)]
        params, state, loss = step(params, state, *given)
        want, want_state, want_loss = train(want, want_state, *given)
        assert abs(float(loss - want_loss)) < 1e-12
        for name in params:
            assert (params[name] - want[name]).abs().max() < 1e-11, name
    assert step.shapes.traces == 1 and step.shapes.plans <= 3


def test_a_function_that_asks_for_a_size_is_traced_for_each_answer():
    def loss(params, x):
        return (x @ params["w"]).square().mean() * (2 if x.shape[1] > 8 else 3)

    step = ftp.shard(loss, on({"tp": 2}), {"w": P(None, "tp")}, dynamic_shapes=DIMS)
    params = {"w": torch.randn(3, 4, dtype=torch.float64)}
    for size in (5, 9, 8, 30, 1):
        x = torch.randn(2, size, 3, dtype=torch.float64)
        assert torch.allclose(step(params, x)[0], loss(params, x), rtol=1e-12)
    assert step.shapes.traces == 2 and not step.shapes.one_by_one


def next_tokens(params, tokens):
    """Labels shifted by one, and a mask from ones."""
    size = tokens.shape[1]
    x = params["emb"][tokens[:, :-1]] @ params["up"]
    scores = x @ x.transpose(1, 2)
    mask = torch.tril(torch.ones(size - 1, size - 1))
    x = scores.masked_fill(mask == 0, float("-inf")).softmax(-1) @ x @ params["down"]
    return F.cross_entropy(
        (x @ params["head"]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )


def padded_blocks(params, tokens):
    x = params["emb"][tokens] @ params["up"]
    x = F.pad(x, (0, 0, 0, -tokens.shape[1] % 4)).unflatten(1, (-1, 4)).mean(2)
    return x.square().mean()


def chunks(params, tokens):
    x = params["emb"][tokens] @ params["up"]
    return sum(part.square().mean() for part in x.chunk(2, 1))


def halves(params, tokens):
    """The half of a size that the axis divides is divided again."""
    x, size = params["emb"][tokens] @ params["up"], tokens.shape[1]
    return x[:, : size // 2].square().sum() + x[:, size // 2 :].exp().sum()


def statistics(params, tokens):
    """A variance, whose gradient is scaled by a float of the size, and a root of the size."""
    x = params["emb"][tokens] @ params["up"]
    x = (x - x.mean((0, 1))) / (x.var((0, 1), unbiased=False) + 1e-5).sqrt()
    return (x**3).sum() / tokens.shape[1] ** 0.5


def functions_of_the_size(params, tokens):
    """As of attention whose scale depends on how many keys there are."""
    size = tokens.shape[1]
    x = params["emb"][tokens] @ params["up"] * (math.log(size + 1, 2) / math.sqrt(size))
    return x.square().mean() * math.log2(size + 3) + math.exp(-size)


def one_size_apart(params, tokens):
    x = params["emb"][tokens] @ params["up"]
    return x.square().mean() * (2 if tokens.shape[1] == 7 else 3)


def pooled(params, tokens):
    x = (params["emb"][tokens] @ params["up"]).transpose(1, 2)
    with torch.no_grad():
        scale = F.max_pool1d(x, tokens.shape[1]).mean() + F.max_pool1d(x, 2, padding=1).sum()
    return F.max_pool1d(x, 3, 1, 1).square().mean() * scale


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    "fn",
    [
        halves, next_tokens, padded_blocks, chunks, statistics, functions_of_the_size,
        one_size_apart, pooled,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.parametrize("name", slow_after(1, ["context", "tp"]))
def test_sizes_as_people_use_them(fn, name):
    mesh, specs, spec = LAYOUTS[name]
    step = ftp.shard(fn, mesh, specs, batch_specs=spec, dynamic_shapes=DIMS)
    for size in (6, 7, 9, 2, 16, 1):
        loss, grads = step(weights(), batch(size)[0])
        want_grads, want = torch.func.grad_and_value(fn)(weights(), batch(size)[0])
        assert torch.allclose(loss, want, rtol=1e-10, equal_nan=True)
        for key, grad in grads.items():
            assert torch.allclose(grad, want_grads[key], rtol=1e-9, atol=1e-11, equal_nan=True), key
    assert step.shapes.traces == 1 and not step.shapes.one_by_one
    both = fn in (halves, next_tokens)  # S divides or not, and so does its half, or S - 1
    assert step.shapes.plans <= (4 if both else 3)


def test_microbatches_of_a_batch_whose_two_dims_change():
    """Of 2·B rows the quarter ``2·B // 4`` is ``B // 2``: one size, written in two ways, was taken
    for a dim that is expanded, so that a rank read another one's rows.
    """

    def fn(table, tokens):
        part = tokens.unflatten(0, (4, -1))[1]
        return F.cross_entropy(table[part].flatten(0, 1), part.flatten())

    dims = (None, {0: torch.export.Dim("B"), 1: torch.export.Dim("S")})
    step = ftp.spmd(fn, on({"cp": 2}), (P(), P(None, "cp")), P(), dynamic_shapes=dims)
    table = torch.randn(12, 12, dtype=torch.float64)
    for shape in ((8, 5), (8, 12), (12, 8)):
        tokens = torch.randint(0, 12, shape)
        assert torch.allclose(step(table, tokens), fn(table, tokens), rtol=1e-12)
    assert step.shapes.traces == 1 and not step.shapes.one_by_one


@pytest.mark.parametrize("name", slow_after(1, ["context", "tp", "both"]))
def test_dims_that_change_are_found_at_the_third_shapes(name):
    mesh, specs, spec = LAYOUTS[name]
    step = ftp.shard(loss_fn, mesh, specs, batch_specs=spec)
    for size in (6, 7, 6):
        check(step, size)
    assert step.shapes.traces == 0
    for size in (9, 2, 16, 1, 7, 33):
        check(step, size)
    assert step.shapes.traces == 1 and step.shapes.plans <= 3 and not step.shapes.one_by_one


def test_dims_of_one_size_so_far_may_differ_later():
    def loss(params, x, y):
        return (x @ params["w"]).square().mean() + (y @ params["w"]).sum()

    step = ftp.shard(loss, on({"dp": 2}), batch_specs=P("dp"))
    params = {"w": torch.randn(3, 4, dtype=torch.float64)}
    for sizes in ((4, 4), (5, 5), (8, 8), (6, 6), (6, 7), (2, 9), (1, 3)):
        x, y = (torch.randn(size, 3, dtype=torch.float64) for size in sizes)
        loss_of, grads = step(params, x, y)
        want_grads, want = torch.func.grad_and_value(loss)(params, x, y)
        torch.testing.assert_close((loss_of, grads), (want, want_grads), rtol=1e-12, atol=1e-12)
    assert step.shapes.traces == 2  # of one size, and of two


@pytest.mark.parametrize(
    "options",
    slow_after(1, [{"dynamic_shapes": {}}, {"dynamic_shapes": {}, "certify": True}]),
    ids=str,
)
def test_no_dims_are_found_where_none_are_to_change(options):
    step = ftp.shard(statistics, on({"cp": 2}), batch_specs=P(None, "cp"), **options)
    for size in (4, 5, 6, 7):
        step(weights(), batch(size)[0])
    assert step.shapes == families.ShapeCounts(0, 0)


@pytest.mark.parametrize("name", slow_after(1, ["both", "context"]))
def test_inputs_are_checked_at_all_sizes(name):
    mesh, specs, spec = LAYOUTS[name]
    options = {"batch_specs": spec, "dynamic_shapes": DIMS, "check_inputs": True}
    step = ftp.shard(loss_fn, mesh, specs, **options)
    for size in (6, 7, 9):
        check(step, size)
        tokens, targets = batch(size)
        targets[1, size - 1] = 12
        with pytest.raises(InputError, match=r"holds 12, which is not in \[0, 12\)"):
            step(weights(), (tokens, targets))
    assert step.shapes.traces == 1 and not step.shapes.one_by_one


def test_explicit_mode_plans_once():
    def asked(params, x):
        x = x @ params["up"]
        x = ftp.constrain(x.relu() @ params["down"], P())
        return x.square().mean()

    def unasked(params, x):
        return (x @ params["up"]).relu().sum(-1).square().mean()

    specs = {"up": P(None, "tp"), "down": P("tp")}
    params = {"up": torch.randn(4, 8), "down": torch.randn(8, 4)}
    options = {"explicit": True, "dynamic_shapes": DIMS}
    step = ftp.shard(asked, on({"tp": 2}), specs, **options)
    for size in (6, 7, 9):
        step(params, torch.randn(2, size, 4))
    assert step.shapes == families.ShapeCounts(1, 1)
    step = ftp.shard(unasked, on({"tp": 2}), specs, **options)
    with pytest.raises(ExplicitError, match=r"ftp\.constrain"):
        step(params, torch.randn(2, 6, 4))


def test_sizes_that_cannot_be_symbolic_are_planned_one_by_one_without_a_warning():
    def loss(params, tokens):
        x = params["emb"][tokens] @ params["up"]
        return sum(x[:, i].square().mean() / (i + 1) for i in range(tokens.shape[1]))

    mesh, specs, spec = LAYOUTS["tp"]
    step = ftp.shard(loss, mesh, specs, batch_specs=spec)
    for size in (2, 3, 4, 1, 5):
        want = loss(weights(), batch(size)[0])
        assert torch.allclose(step(weights(), batch(size)[0])[0], want, rtol=1e-12)
    (reason,) = step.shapes.one_by_one
    assert "range(tokens.shape[1])" in reason


def test_a_part_of_size_one_of_which_dims_go():
    """Of a part of size one some of torch's code knows that it is one, and other code does not."""

    def loss(params, x):
        part = x[0, : x.shape[1] // 4] @ params
        return part.squeeze().cumsum(0).square().sum()

    step = ftp.shard(loss, on({"tp": 2}), P(), batch_specs=P(), dynamic_shapes=DIMS)
    params = torch.eye(4, dtype=torch.float64)
    for size in (6, 12, 5, 16):
        x = torch.ones(2, size, 4, dtype=torch.float64)
        (value, grads), want = step(params, x), torch.func.grad_and_value(loss)(params, x)
        torch.testing.assert_close((grads, value), want)
    assert step.shapes == families.ShapeCounts(1, 1)


def test_a_question_that_a_reshape_has_asked_before():
    """torch answers the function's question by what strides made it ask, and asks nothing new."""

    def loss(params, x):
        y = (x @ params).transpose(0, 1).reshape(-1, 4).square().sum()
        return 2 * y if x.shape[1] == 1 else y

    step = ftp.shard(loss, on({"tp": 2}), P(), batch_specs=P(), dynamic_shapes=DIMS)
    params = torch.eye(4, dtype=torch.float64)
    for size in (6, 7, 1):
        x = torch.ones(2, size, 4, dtype=torch.float64)
        assert step(params, x)[0] == loss(params, x)
    assert step.shapes == families.ShapeCounts(1, 1)


def test_a_slice_up_to_a_size_less_one():
    """Of a size that may be zero torch does not know the slice's length."""

    def loss(params, x):
        return (x[:, : x.shape[1] - 1] @ params).square().sum()

    step = ftp.shard(loss, on({"tp": 2}), P(), batch_specs=P())
    params = torch.eye(4, dtype=torch.float64) + 1
    for size in (8, 12, 7, 1, 5):
        x = torch.randn(2, size, 4, dtype=torch.float64)
        assert torch.allclose(step(params, x)[0], loss(params, x), rtol=1e-12)
    assert step.shapes.traces and not step.shapes.one_by_one


def as_text(n):
    """A plain number: every size, or range of sizes with one number, is traced for itself."""
    return int(str(n))


def capacity(params, x):
    """Rows up to a capacity, as of a mixture of experts."""
    rows = x.flatten(0, 1)
    weight, at = (rows @ params)[:, 0].topk(as_text(int(1.25 * rows.shape[0] / 3)))
    return (rows[at] * weight[:, None]).square().sum()


def window(params, x):
    """A window of the root of the length, and another line for long ones."""
    width, at = as_text(int(x.shape[1] ** 0.5)), torch.arange(x.shape[1])
    mask = (at[:, None] - at).abs() <= width
    y = F.scaled_dot_product_attention(x @ params, x, x, attn_mask=mask)
    return y[:, width:].square().sum() if width < 5 else y[:, -width].sum()


def rounded_capacity(params, x):
    rows = x.flatten(0, 1)
    weight, at = (rows @ params)[:, 0].topk(math.ceil(1.25 * rows.shape[0] / 3))
    return (rows[at] * weight[:, None]).square().sum()


def rounded_window(params, x):
    width, at = math.floor(x.shape[1] ** 0.5), torch.arange(x.shape[1])
    mask = (at[:, None] - at).abs() <= width
    y = F.scaled_dot_product_attention(x @ params, x, x, attn_mask=mask)
    return y[:, width:].square().sum()


def rounded_shares(params, x):
    y = (x @ params)[:, : math.trunc(x.shape[1] * (1 - 0.25))]
    z = torch.cat([y, x.new_zeros(2, round(0.3 * x.shape[1]), 4)], 1)
    return z.cumsum(1).square().mean()


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("options", [{}, {"certify": True}, {"compile": True}], ids=str)
@pytest.mark.parametrize("name", ["both", "context", "tp"])
@pytest.mark.parametrize("fn", [rounded_capacity, rounded_window, rounded_shares])
def test_floats_that_code_rounds(fn, name, options):
    spec = P() if name == "tp" else P(None, "cp")
    step = ftp.shard(fn, LAYOUTS[name][0], P(), batch_specs=spec, dynamic_shapes=DIMS, **options)
    generator, params = torch.Generator().manual_seed(0), torch.eye(4, dtype=torch.float64) + 1
    for size in [8, 12, 7, 9, 16, 21, 10, 24, 14, 40, 3, 2, 18, 30, 27, 33, 22]:
        x = torch.randn(2, size, 4, generator=generator, dtype=torch.float64)
        loss, grad = step(params, x)
        want_grad, want = torch.func.grad_and_value(fn)(params, x)
        assert torch.allclose(loss, want, rtol=1e-12)
        assert torch.allclose(grad, want_grad, rtol=1e-11)
    assert step.shapes.traces == 1 and not step.shapes.one_by_one


def falls_short(params, x):
    """The first sizes equal the number that is read, later ones do not."""
    n = as_text(x.shape[1])
    return (x[:, : n - (n > 12)] @ params).square().mean()


@pytest.mark.parametrize("name", slow_after(1, ["context", "tp"]))
@pytest.mark.parametrize("fn", slow_after(1, [capacity, window, falls_short]))
def test_numbers_that_code_reads_from_sizes(fn, name, monkeypatch):
    """Each size is recorded, and planned with others whose recordings are alike; a root that is
    read as a number holds for a range of sizes, which has a trace of its own.
    """
    planned, build = [], prepare.plan_prepared
    monkeypatch.setattr(
        prepare, "plan_prepared", lambda *a, **k: planned.append(a) or build(*a, **k)
    )
    spec = P(None, "cp") if name == "context" else P()
    step = ftp.shard(fn, LAYOUTS[name][0], P(), batch_specs=spec)
    generator, params = torch.Generator().manual_seed(0), torch.eye(4, dtype=torch.float64) + 1
    sizes = [8, 12, 7, 9, 16, 21, 10, 24, 14, 40, 3, 2, 18, 30, 27, 33, 22]
    for size in sizes:
        x = torch.randn(2, size, 4, generator=generator, dtype=torch.float64)
        loss, grad = step(params, x)
        want_grad, want = torch.func.grad_and_value(fn)(params, x)
        assert torch.allclose(loss, want, rtol=1e-12)
        assert torch.allclose(grad, want_grad, rtol=1e-12)
    if fn is window and name == "tp":
        assert step.shapes == families.ShapeCounts(5, 5)
        return
    assert step.shapes.one_by_one and 1 <= step.shapes.plans < len(planned) < len(sizes)
    assert "return int(str(n))" in step.shapes.one_by_one[0]


def test_a_size_whose_recording_a_plan_serves_is_traced_no_further(monkeypatch):
    made, functional_form = [], trace_module.functional_form
    monkeypatch.setattr(
        trace_module, "functional_form", lambda *a: made.append(a) or functional_form(*a)
    )
    step = ftp.shard(capacity, LAYOUTS["tp"][0], P(), batch_specs=P())
    params, passes = torch.eye(4, dtype=torch.float64) + 1, []
    for size in (8, 12, 7, 9, 16, 21, 10, 24, 14, 40, 3, 18, 30, 27, 33, 22):
        x = torch.arange(8.0 * size, dtype=torch.float64).view(2, size, 4) / size
        made.clear()
        loss, grad = step(params, x)
        want_grad, want = torch.func.grad_and_value(capacity)(params, x)
        assert torch.allclose(loss, want, rtol=1e-12)
        assert torch.allclose(grad, want_grad, rtol=1e-12)
        passes.append(len(made))
    assert passes[0] and passes[-1] == 0 and passes.count(0) >= 8


def test_plans_are_kept_for_the_values_used_last(monkeypatch):
    made, trace = [], family_programs.traced_for
    counted = lambda *args, **kwargs: made.append(args) or trace(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(family_programs, "traced_for", counted)

    def total(x, scale):
        return x.square().sum() * scale

    dims = (DIMS, None)
    step = ftp.spmd(total, on({"cp": 2}), (P(None, "cp"), P()), dynamic_shapes=dims, programs=2)
    traced = []
    for size, scale in ((4, 1.0), (6, 2.0), (8, 1.0), (4, 3.0), (9, 1.0), (3, 2.0)):
        x = torch.ones(2, size, dtype=torch.float64)
        assert float(step(x, scale)) == 2 * size * scale
        traced.append(len(made))
    assert traced == [1, 2, 2, 3, 3, 4]  # 3.0 drops 2.0, which is traced again
    assert step.shapes.traces == 2


def test_shapes_are_remembered_for_the_values_seen_last():
    step = ftp.spmd(lambda x, scale: x.sum() * scale, on({"cp": 2}), P(None), programs=2)
    for scale in (1.0, 2.0, 3.0, 4.0):
        assert float(step(torch.ones(3), scale)) == 3 * scale
    assert len(step._dynamic._seen._shapes) == 2
    for size in (3, 5, 7, 9):
        assert float(step(torch.ones(size), 4.0)) == 4 * size
    assert step.shapes.traces == 1
    for scale in (5.0, 6.0):  # drop what was found for 4.0
        step(torch.ones(3), scale)
    assert not step._dynamic._seen._found


def test_linear_layers_with_a_bias():
    """torch's own asks for sizes as numbers under a gradient of torch.func."""

    def loss(params, tokens):
        x = F.linear(F.embedding(tokens[:, :-1], params["emb"]), params["head"], params["bias"])
        return x.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()

    dims, specs = {0: torch.export.Dim("B")}, {"emb": P("tp"), "head": P(), "bias": P()}
    step = ftp.shard(loss, on({"tp": 2}), specs, dynamic_shapes=dims)
    params = {"emb": torch.randn(12, 6), "head": torch.randn(12, 6), "bias": torch.randn(12)}
    for size in (12, 7, 24, 5):
        tokens = (torch.arange(5 * size) % 12).view(size, 5)
        want = loss(params, tokens)
        assert torch.allclose(step(params, tokens)[0], want, rtol=1e-5)
    assert step.shapes.traces == 1 and not step.shapes.one_by_one


def test_a_slice_that_may_end_before_the_size():
    """Positions cut from a buffer, as in BERT, and a window of the last ones: which end counts is a
    condition.
    """
    positions = torch.arange(16)

    def loss(params, x):
        at = F.embedding(positions[: x.shape[1]], params["emb"])
        return (x + at).square().mean() + x[:, -6:].sum()

    step = ftp.shard(loss, on({"dp": 2}), batch_specs=P("dp"))
    params = {"emb": torch.randn(16, 3, dtype=torch.float64)}
    for size in (4, 7, 12, 5, 16, 9, 6):
        x = torch.randn(3, size, 3, dtype=torch.float64)
        want_grads, want = torch.func.grad_and_value(loss)(params, x)
        torch.testing.assert_close(step(params, x), (want, want_grads), rtol=1e-12, atol=1e-12)
    assert step.shapes.traces == 2 and not step.shapes.one_by_one  # below 6, and from there


def with_compilations(monkeypatch):
    """A list with an entry for each rank's graph that is compiled from now on."""
    made, compiled = [], sized_program.compiled
    monkeypatch.setattr(
        sized_program, "compiled", lambda *a, **k: made.append("compiled") or compiled(*a, **k)
    )
    return made


@pytest.mark.slow
def test_compiled_once(monkeypatch):
    """Sizes of one are constants of the code, which makes a second program of them."""
    made = with_compilations(monkeypatch)
    step = ftp.shard(loss_fn, on({"tp": 1}), dynamic_shapes=DIMS, compile=True)
    for size in (7, 9, 2, 16, 3, MOST):
        check(step, size)
    assert made == ["compiled"]
    check(step, 1)
    for size in range(1, 40):
        check(step, size)
    assert len(made) == 2 and not step.shapes.one_by_one


@pytest.mark.parametrize(
    "fn", slow_after(1, [statistics, next_tokens, padded_blocks, chunks]), ids=lambda f: f.__name__
)
def test_compiled_as_people_use_sizes(fn, monkeypatch):
    made = with_compilations(monkeypatch)
    step = ftp.shard(fn, on({"tp": 1}), dynamic_shapes=DIMS, compile=True)
    for size in (6, 7, 9, 2, 16, 1, 33, 12, 4):
        loss, grads = step(weights(), batch(size)[0])
        want_grads, want = torch.func.grad_and_value(fn)(weights(), batch(size)[0])
        assert torch.allclose(loss, want, rtol=1e-10, equal_nan=True)
        for key, grad in grads.items():
            assert torch.allclose(grad, want_grads[key], rtol=1e-9, atol=1e-11, equal_nan=True), key
    assert len(made) <= (5 if fn is padded_blocks else 3) and not step.shapes.one_by_one


@pytest.mark.slow
def test_a_compiled_train_step(monkeypatch):
    """Donated state is written in place, and two dims change."""
    made = with_compilations(monkeypatch)
    train_step(on({"dp": 1}), compile=True)
    assert made == ["compiled"]


@pytest.mark.parametrize("slow", slow_unless(lambda slow: slow in (0, 64), [0, 64, 128, 256]))
def test_onednn_is_chosen_where_it_is_faster_at_half_and_twice_the_size(slow, monkeypatch):
    """A choice for the first size alone took up to 1.17 of the time at others."""
    chosen, by_onednn = [], lowering.by_onednn
    monkeypatch.setattr(
        lowering, "by_onednn", lambda graph, found: chosen.extend(found) or by_onednn(graph, found)
    )
    monkeypatch.setattr(
        process_groups, "measured", lambda found, _: [m for m in found if f"[{slow}," not in m]
    )
    dims = {1: torch.export.Dim("S", max=MOST)}
    step = ftp.shard(
        lambda w, x: (x @ w).relu().square().sum(), on({"tp": 1}), dynamic_shapes=dims, compile=True
    )
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(96, 200, generator=generator)
    for size in (64, 40):  # 128 rows first
        x = torch.randn(2, size, 96, generator=generator)
        got, want = step(w, x)[1], 2 * x.flatten(0, 1).T @ (x.flatten(0, 1) @ w).relu()
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-2)
    assert len(chosen) == (0 if slow else 2)
    assert not step.shapes.one_by_one


def test_what_cannot_be_compiled_for_many_sizes_is_compiled_for_each(monkeypatch):
    compiled = sized_program.compiled

    def refused(graph, inputs, *rest, **options):
        if any(isinstance(x, torch.SymInt) for x in inputs):
            raise ValueError("no symbols here")
        return compiled(graph, inputs, *rest, **options)

    monkeypatch.setattr(sized_program, "compiled", refused)
    step = ftp.shard(chunks, on({"tp": 1}), dynamic_shapes=DIMS, compile=True)
    sizes = iter((6, 7, 6))

    def check():
        tokens = batch(next(sizes))[0]
        assert abs(float(step(weights(), tokens)[0] - chunks(weights(), tokens))) < 1e-12

    with pytest.warns(UserWarning, match="every size of S is compiled for itself: ValueError: no"):
        check()
    check()
    check()
    assert step.shapes.one_by_one == ("ValueError: no symbols here",)
    assert step.shapes.traces == step.shapes.plans == 1


def test_plans_serve_after_a_size_that_fits_none():
    """A loop over the size beyond a limit: sizes below it keep their plan."""

    def loss(params, x):
        if x.shape[1] < 8:
            return (x @ params["w"]).square().mean()
        return sum((x[:, i] @ params["w"]).square().mean() for i in range(x.shape[1]))

    step = ftp.shard(loss, on({"tp": 2}), {"w": P(None, "tp")}, dynamic_shapes=DIMS)
    params = {"w": torch.randn(3, 4, dtype=torch.float64)}

    def check(size):
        x = torch.randn(2, size, 3, dtype=torch.float64)
        assert torch.allclose(step(params, x)[0], loss(params, x), rtol=1e-12)

    check(5)
    check(9)
    with pytest.warns(UserWarning, match="for which there is no plan yet"):
        check(10)
    check(6)
    assert step.shapes.traces == step.shapes.plans == 1


def test_a_size_that_is_a_number_of_the_function_is_named():
    def loss(params, x):
        total = torch.zeros((), dtype=x.dtype)
        for i in range(x.shape[1]):
            total = total + (x[:, i] @ params["w"]).square().mean()
        return total

    step = ftp.shard(loss, on({"tp": 2}), {"w": P(None, "tp")}, dynamic_shapes=DIMS)
    params = {"w": torch.randn(3, 4, dtype=torch.float64)}
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"for i in range\(x.shape\[1\]\)"):
        step(params, x)
    for size in (6, 5, 1):
        x = torch.randn(2, size, 3, dtype=torch.float64)
        assert torch.allclose(step(params, x)[0], loss(params, x), rtol=1e-12)
    assert len(step.shapes.one_by_one) == 1


def test_a_dim_of_size_one_that_goes_is_a_program_of_its_own():
    def loss(params, x):
        return (x @ params["w"]).squeeze().square().mean()

    step = ftp.shard(loss, on({"tp": 2}), {"w": P(None, "tp")}, dynamic_shapes=DIMS)
    params = {"w": torch.randn(3, 4, dtype=torch.float64)}
    for size in (5, 1, 7):
        x = torch.randn(2, size, 3, dtype=torch.float64)
        assert torch.allclose(step(params, x)[0], loss(params, x), rtol=1e-12)
    assert step.shapes.traces == 1 and not step.shapes.one_by_one


@pytest.mark.parametrize("sizes", [(5, 0, 7), (0, 5)], ids=str)
def test_a_function_that_asks_whether_a_size_is_zero(sizes):
    def loss(params, x):
        if x.shape[1] == 0:
            return params["w"].sum()
        return (x @ params["w"]).square().sum()

    dims = {1: torch.export.Dim("S", max=MOST)}
    step = ftp.shard(loss, on({"cp": 2}), batch_specs=P(None, "cp"), dynamic_shapes=dims)
    params = {"w": torch.randn(3, 4, dtype=torch.float64)}
    for size in sizes:
        x = torch.randn(2, size, 3, dtype=torch.float64)
        assert torch.allclose(step(params, x)[0], loss(params, x), rtol=1e-12)


def test_sizes_that_do_not_fit():
    step = ftp.shard(
        loss_fn, on({"tp": 2}), SPECS, dynamic_shapes={1: torch.export.Dim("S", min=2, max=16)}
    )
    with pytest.raises(InputError) as e:
        step(weights(), batch(17))
    assert str(e.value) == (
        "dim 1 of batch[0] has size 17, outside Dim('S', min=2, max=16) of dynamic_shapes. Pad or"
        " cut it, or widen the range.\n"
        "dim 1 of batch[1] has size 17, outside Dim('S', min=2, max=16) of dynamic_shapes. Pad or"
        " cut it, or widen the range."
    )
    step(weights(), batch(5))
    for size in (1, 17):
        with pytest.raises(InputError, match=f"has size {size}, outside Dim"):
            step(weights(), batch(size))
        with pytest.raises(InputError, match=f"has size {size}, outside Dim"):
            step.lower(weights(), batch(size))
    tokens, targets = batch(5)
    with pytest.raises(
        InputError, match=r"dim 1 of batch\[1\] has size 4, but dim 1 of batch\[0\]"
    ):
        step(weights(), (tokens, targets[:, :4].contiguous()))


@pytest.mark.parametrize(
    ("dims", "error", "said"),
    [
        (3, InputError, "dynamic_shapes is 3. Give a prefix tree"),
        ({1: "S"}, InputError, "gives 'S' for a dim. Give a torch.export.Dim"),
        ({4: torch.export.Dim("S")}, InputError, "names dim 4 of batch[0], which has 2 dims"),
        (({1: torch.export.Dim("S")},) * 3, InputError, "no entry for 0"),
        (
            ({1: torch.export.Dim("S", max=4)}, {1: torch.export.Dim("S", max=5)}),
            InputError,
            "one name with two different limits",
        ),
    ],
)
def test_dims_that_do_not_fit(dims, error, said):
    with pytest.raises(error) as e:
        ftp.shard(loss_fn, on({"tp": 2}), SPECS, dynamic_shapes=dims)(weights(), batch(3))
    assert said in str(e.value), e.value


def test_the_page():
    run_examples("shapes.md")


def test_gathers_over_two_axes_are_merged_at_all_sizes():
    """The pass that merges them asked for a size as a number: each multiple had a plan."""
    spec, dims = P(("dp", "cp")), ({0: torch.export.Dim("S", max=64)},)
    mesh = on({"dp": 2, "cp": 3})
    step = ftp.spmd(lambda x: x.sort(0, True).values, mesh, spec, spec, dynamic_shapes=dims)
    for size in (18, 60, 6, 24):
        x = torch.arange(size * 2.0).reshape(size, 2)
        assert torch.equal(step(x), x.sort(0, True).values)
    assert step.shapes.plans == 1
    (gather,) = step.lower(x).collectives
    assert gather.op == "all_gather" and gather.axes == ("dp", "cp")
