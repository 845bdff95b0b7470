"""A module as a pure function: same numbers as the module, and the module left as it was, byte
for byte.
"""

# Modules of these tests have attributes whose types pyright does not see.
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import copy
import functools
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functionalize as functionalize_aten
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import ftp
import ftp.functional.module_constraints
from ftp.errors import InputError, ReadWarning, SpecError, StaleCaptureWarning, TraceError
from ftp.functional.functionalize import functionalize
from ftp.functional.module_constraints import Constraint
from ftp.sharding.plan import plan
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import P


class Mlp(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x, *, shift=0.0):
        return self.down(F.relu(self.up(x))) * self.scale + shift


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        x = self.emb(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))


def trace(fn, *args):
    loss = lambda *a: fn(*a).square().sum()  # noqa: E731
    joint = functionalize_aten(grad_and_value(loss), remove="mutations")
    return make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


RUNS = {
    "eager": lambda fn, *args: fn(*args),
    "grad": lambda fn, *args: grad_and_value(lambda *a: fn(*a).sum())(*args),
    "trace": trace,
}


def gradients(model, *args):
    out = model(*args)
    named = dict(model.named_parameters())
    return out, dict(
        zip(named, torch.autograd.grad(out.square().sum(), list(named.values())), strict=True)
    )


def state_of(model):
    """Everything of the model that could change, as bytes and identities."""
    tensors = [
        (name, id(t), t._version, t.detach().numpy().tobytes())
        for name, t in (*model.named_parameters(), *model.named_buffers())
    ]
    attributes = [
        (
            id(m),
            id(vars(m)),
            [
                (k, id(v), list(v.items()) if isinstance(v, dict) and k != "_parameters" else None)
                for k, v in vars(m).items()
            ],
        )
        for m in model.modules()
    ]
    return repr(tensors), repr(attributes), pickle.dumps(model.state_dict())


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Mlp, torch.randn(3, 4)),
        (Tied, torch.tensor([[1, 2, 6]])),
        (lambda: Cnn().eval(), torch.randn(2, 2, 5, 5)),
    ],
    ids=["mlp", "tied", "cnn"],
)
def test_values_and_gradients_are_the_models_and_it_traces(make, x):
    model = make()
    before = state_of(model)
    fn, params = functionalize(model)
    assert not any(p.requires_grad or type(p) is not torch.Tensor for p in params.values())
    grads, loss = grad_and_value(lambda p: fn(p, x).square().sum())(params)
    traced_grads, traced_loss = trace(fn, params, x)(params, x)
    assert state_of(model) == before
    out, expected = gradients(model, x)
    assert torch.equal(fn(params, x), out)
    torch.testing.assert_close(loss, out.square().sum())
    torch.testing.assert_close(traced_loss, loss)
    assert list(grads) == list(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad)
        torch.testing.assert_close(traced_grads[name], grad)


def test_params_share_memory_and_values_come_from_the_call():
    model = Mlp()
    fn, params = functionalize(model)
    assert list(params) == ["up.weight", "up.bias", "down.weight"]
    assert params["up.weight"].data_ptr() == model.up.weight.data_ptr()
    assert not fn({path: torch.zeros_like(p) for path, p in params.items()}, torch.ones(4)).any()
    torch.testing.assert_close(fn(params, torch.ones(4), shift=1.0), model(torch.ones(4)) + 1)


def test_a_tied_weight_is_there_once_and_answers_to_each_path():
    fn, params = functionalize(Tied())
    assert "emb.weight" in params
    assert "head.weight" not in params
    for tree in (params, dict(params), {"model": params}):
        specs = plan(tree, {"**.head.weight": P("tp")})
        assert P("tp") in flatten(specs)[0]
    with pytest.raises(SpecError) as error:
        plan(params, {"emb.weight": P("tp"), "head.weight": P(None, "tp")})
    assert str(error.value) == (
        "patterns 'emb.weight' and 'head.weight' disagree for params['emb.weight'], a tied weight"
        " with paths 'emb.weight', 'head.weight':"
        " P('tp') and P(None, 'tp'). Give both the same value, or narrow one."
    )
    with pytest.raises(
        InputError,
        match=r"params\['head.weight'\] is tied to 'emb.weight' and must be given under that path"
        r" only\.",
    ):
        fn({**params, "head.weight": params["emb.weight"]}, torch.tensor([1]))


def test_frozen_parameters_are_constants():
    model = Mlp()
    model.up.requires_grad_(False)
    fn, params = functionalize(model)
    assert list(params) == ["down.weight"]
    torch.testing.assert_close(fn(params, torch.ones(4)), model(torch.ones(4)))
    assert not fn(params, torch.ones(4)).requires_grad


def test_meta_stays_meta():
    with torch.device("meta"):
        model = Tied()
    fn, params = functionalize(model)
    assert {p.device.type for p in params.values()} == {"meta"}
    assert fn(params, torch.zeros(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, 7)


def test_what_happens_to_the_model_later_does_not_reach_fn():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    fn, params = functionalize(model)
    params = {path: p.clone() for path, p in params.items()}
    expected = model(torch.ones(4)).detach()
    model.train()
    model[0] = nn.Identity()
    model.register_forward_hook(lambda *_: torch.zeros(1))
    model.to("meta")
    assert torch.equal(fn(params, torch.ones(4)), expected)
    assert model.training


def test_train_mode_is_fixed_too():
    model = nn.Dropout(0.5)
    fn, params = functionalize(model)
    model.eval()
    assert (fn(params, torch.ones(64), rng=torch.zeros(2, dtype=torch.int64)) == 0).any()


def test_hooks_of_the_model_run_and_stay():
    model, seen = Mlp(), []
    model.register_forward_pre_hook(lambda m, args: seen.append("pre") or (args[0] * 2,))
    model.up.register_forward_hook(lambda m, args, out: seen.append("post") or out + 1)
    before = state_of(model)
    fn, params = functionalize(model)
    out = fn(params, torch.ones(4))
    assert seen == ["pre", "post"]
    assert torch.equal(out, model(torch.ones(4)))
    assert state_of(model) == before


def test_hooks_of_parameters_see_the_gradient_as_on_one_device():
    """Once, and all of it: clamping part by part would give something else."""
    torch.manual_seed(0)
    model, seen, x = Mlp().double(), [], torch.randn(5, 4).double()
    model.up.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    model.up.weight.register_hook(lambda g: seen.append(g.shape))
    model.down.weight.register_hook(lambda g: g * 5)
    fn, params = functionalize(model)

    def loss(p, x):
        return fn(p, x).square().mean() + fn(p, 2 * x).square().mean() + p["up.weight"].sum()

    total = model(x).square().mean() + model(2 * x).square().mean() + model.up.weight.sum()
    expected = torch.autograd.grad(total, dict(model.named_parameters()).values())
    mesh = ftp.simulated_mesh((2,), ("tp",))
    specs = plan(params, {"up.*": P("tp"), "down.weight": P(None, "tp")})
    for take in (torch.func.grad(loss), lambda p, x: ftp.shard(loss, mesh, specs)(p, x)[1]):
        seen.clear()
        for got, due in zip(take(params, x).values(), expected, strict=True):
            torch.testing.assert_close(got, due)
        assert seen == [(8, 4)]
    own = {path: p.requires_grad_() for path, p in params.items()}
    got = torch.autograd.grad(fn(own, x).square().mean(), list(own.values()))
    due = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for a, b in zip(got, due, strict=True):
        torch.testing.assert_close(a, b)
    assert not own["up.weight"]._backward_hooks


def test_hooks_on_gradients_that_cannot_run_are_refused():
    model, x = Mlp(), torch.ones(4)
    model.down.register_full_backward_hook(lambda module, grads, out: None)
    model.up.bias.register_post_accumulate_grad_hook(lambda p: None)
    fn, params = functionalize(model)
    assert torch.equal(fn(params, x), model(x))
    with pytest.raises(TraceError) as error:
        torch.func.grad(lambda p: fn(p, x).sum())(params)
    instead = (
        "which torch.func does not run. Remove the hook; x.register_hook in the function runs, and"
        " a step returns its gradients,"
        " for the caller to change."
    )
    assert str(error.value) == (
        "Mlp: parameter 'up.bias' has a hook for its accumulated gradient"
        f" (register_post_accumulate_grad_hook), {instead}\n"
        "Mlp: module 'down' (Linear) has a backward hook (register_full_backward_hook and its"
        f" kin), {instead}"
    )


def test_references_from_closures_lists_and_attributes_see_the_parameters_of_the_call():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3, bias=False)
            self.apply_inner = lambda x: self.inner(x)
            self.method = self.inner.forward
            self.weights = [self.inner.weight]

        def forward(self, x):
            return self.apply_inner(x) + self.method(x) + x @ self.weights[0].T

    fn, params = functionalize(Odd())
    grad, _ = grad_and_value(lambda p: fn(p, torch.ones(3)).sum())(params)
    torch.testing.assert_close(grad["inner.weight"], torch.full((3, 3), 3.0))


def test_recurrent_modules_see_the_parameters_of_the_call():
    model = nn.LSTM(3, 4)
    before = state_of(model)
    fn, params = functionalize(model)
    out, _ = fn({path: torch.zeros_like(p) for path, p in params.items()}, torch.ones(2, 3))
    assert not out.any()
    assert state_of(model) == before


def test_what_the_module_stores_while_it_runs_does_not_stay():
    class Storing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            self.last = self.inner(x)
            self.inner.register_forward_hook(lambda *_: None)
            self.eval()
            return self.last

    model = Storing()
    before = state_of(model)
    fn, params = functionalize(model)
    trace(fn, params, torch.ones(2))
    assert state_of(model) == before
    assert not hasattr(model, "last")


def test_the_model_is_restored_when_it_raises():
    class Raising(Mlp):
        def forward(self, x):
            raise ValueError("no")

    model = Raising()
    before = state_of(model)
    fn, params = functionalize(model, constraints={"up": P("tp")})
    with pytest.raises(ValueError, match="no"):
        fn(params, torch.ones(4))
    assert state_of(model) == before


def test_fn_nests_in_itself_and_in_transforms():
    fn, params = functionalize(Mlp())
    x = torch.randn(3, 4)
    torch.testing.assert_close(vmap(fn, (None, 0))(params, x), fn(params, x))
    inner = {}
    model = Mlp()
    model.up.register_forward_hook(
        lambda m, a, out: (
            out + (inner["fn"](inner["params"], torch.ones(4)).sum() if inner.pop("go", 0) else 0)
        )
    )
    inner["fn"], inner["params"] = functionalize(model)
    plain = inner["fn"](inner["params"], torch.ones(4))
    inner["go"] = 1
    nested = inner["fn"]({p: v.clone() for p, v in inner["params"].items()}, torch.ones(4))
    assert not torch.equal(plain, nested)
    assert torch.equal(plain, inner["fn"](inner["params"], torch.ones(4)))


def test_buffers_come_back_updated():
    model, x = Cnn(), torch.randn(4, 2, 5, 5)
    model.conv.bias.requires_grad_(False)
    before = state_of(model)
    fn, params, buffers = functionalize(model, buffers=True)
    assert list(params) == ["conv.weight", "norm.weight", "norm.bias"]
    assert list(buffers) == [
        "conv.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    given = {path: b.clone() for path, b in buffers.items()}
    out, new = fn(params, buffers, x)

    def loss(p, b):
        out, new = fn(p, b, x)
        return out.sum(), new

    joint = functionalize_aten(grad_and_value(loss, has_aux=True), remove="mutations")
    graph = make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(params, buffers)
    assert not [
        n
        for n in graph.graph.nodes
        if getattr(n.target, "_schema", None) and n.target._schema.is_mutable
    ]
    _, (_, traced) = graph(params, buffers)
    assert state_of(model) == before
    for path in buffers:
        assert torch.equal(buffers[path], given[path])
        torch.testing.assert_close(traced[path], new[path])
    expected = copy.deepcopy(model)
    torch.testing.assert_close(out, expected(x))
    for path, buffer in expected.named_buffers():
        torch.testing.assert_close(new[path], buffer)
    _, newer = fn(params, new, x)
    assert newer["norm.num_batches_tracked"] == 2


class Counting(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        if self.how == "add_":
            self.count.add_(1)
        elif self.how == "+=":
            self.count += 1
        elif self.how == "setitem":
            self.count[0] = 1
        elif self.how == "view":
            self.count.view(3, 1)[0].fill_(2)
        elif self.how == "out":
            torch.add(self.count, 1, out=self.count)
        elif self.how == "assign":
            self.count = self.count + 1
        elif self.how == "foreach":
            torch._foreach_add_([self.count], 1)
        return self.linear(x) + self.count


@pytest.mark.parametrize("how", ["add_", "+=", "setitem", "view", "out", "assign", "foreach"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_changed_buffer_is_an_error_unless_it_is_returned(how, run):
    model = Counting(how)
    before = state_of(model)
    fn, params = functionalize(model)
    with pytest.raises(TraceError) as error:
        run(fn, params, torch.ones(3))
    does = "replaces" if how == "assign" else "modifies"
    which = "buffer 'count'"
    if how == "view" and run is not RUNS["eager"]:
        does, which = "modifies a", "buffer (through a view)"
    assert str(error.value) == (
        f"Counting {does} {which} while it runs, but buffers are constants of fn."
        " With fn, params, buffers = functionalize(model, buffers=True) it comes back updated; in"
        " eval mode most modules leave it alone."
    )
    assert state_of(model) == before
    fn, params, buffers = functionalize(model, buffers=True)
    run(lambda *a: fn(*a)[0], params, buffers, torch.ones(3))
    _, new = fn(params, buffers, torch.ones(3))
    assert new["count"].any()
    assert not buffers["count"].any()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_batch_norm_in_train_mode_needs_buffers(run):
    model = Cnn()
    before = state_of(model)
    fn, params = functionalize(model)
    with pytest.raises(
        TraceError,
        match=r"buffer 'norm.num_batches_tracked' .* functionalize\(model, buffers=True\)",
    ):
        run(fn, params, torch.randn(2, 2, 5, 5))
    model.norm.num_batches_tracked = None
    before = state_of(model)
    fn, params = functionalize(model)
    with pytest.raises(TraceError, match=r"buffer 'norm.running_mean'"):
        run(fn, params, torch.randn(2, 2, 5, 5))
    assert state_of(model) == before


def test_a_changed_parameter_or_attribute_is_an_error():
    class Changing(nn.Module):
        def __init__(self, what):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.cache = torch.zeros(2)
            self.what = what

        def forward(self, x):
            with torch.no_grad():
                (self.linear.bias if self.what == "parameter" else self.cache).zero_()
            return self.linear(x)

    fn, params = functionalize(Changing("parameter"))
    with pytest.raises(
        TraceError,
        match=r"Changing modifies parameter 'linear.bias' in place while it runs; fn is pure",
    ):
        fn(params, torch.ones(2))
    fn, params = functionalize(Changing("attribute"))
    with pytest.raises(
        TraceError, match=r"modifies attribute 'cache' while it runs; fn is pure\. Make it a buffer"
    ):
        fn(params, torch.ones(2))


class Holding(nn.Module):
    """A model that holds memory of its parameter and buffer in a second place."""

    def __init__(self, where):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("scale", torch.ones(3))
        self.view = self.weight[:2]
        self.half = self.scale[:2]
        self.nested = {"weights": [self.weight]}
        self.applied = functools.partial(F.linear, weight=self.weight)
        self.where = where

    def forward(self, x):
        if self.where == "view":
            return x @ self.view.T
        if self.where == "buffer":
            return x @ self.weight[:, :2] * self.half
        return x @ self.nested["weights"][0] if self.where == "nested" else self.applied(x)


@pytest.mark.parametrize(
    ("where", "path"),
    [("view", "weight"), ("nested", "weight"), ("partial", "weight"), ("buffer", "scale")],
)
def test_a_second_place_that_keeps_an_argument_of_the_call_is_an_error(where, path):
    fn, params, buffers = functionalize(Holding(where), buffers=True)
    new = {name: 2 * p for name, p in params.items()}, {"scale": buffers["scale"].clone()}
    with pytest.raises(
        TraceError, match=rf"Holding reads '{path}' from a tensor that shares its memory"
    ):
        fn(*new, torch.ones(1, 3))


def test_a_second_place_of_constants_may_be_read_and_of_the_models_own_values():
    for_buffer, params = functionalize(Holding("buffer"))
    assert for_buffer({"weight": 2 * params["weight"]}, torch.ones(1, 3)).tolist() == [[6.0, 6.0]]
    for_view, params = functionalize(Holding("view"))
    with torch.no_grad():
        assert for_view(params, torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    with pytest.raises(TraceError, match=r"Holding reads attribute 'view', which .* its __init__"):
        for_view(params, torch.ones(1, 3))


class Stateful(nn.Module):
    """A model with state that is no buffer at first."""

    def __init__(self, what):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("late", None)
        self.mean = torch.zeros(3)
        self.seen = {"mean": self.mean}
        self.calls = 0
        self.cache = self.table = self.output = None
        self.is_ready = False
        self.register_buffer("scale", torch.ones(()))
        self.what = what

    def forward(self, x):
        y = x * self.weight
        if self.what == "attribute":
            self.mean = 0.9 * self.mean + 0.1 * y.detach()
        elif self.what == "converted":
            self.mean = self.mean.to(torch.float64)
            self.mean = self.mean + y.detach()
        elif self.what == "item":
            self.seen["mean"] = self.seen["mean"] + y.detach()
        elif self.what == "buffer":
            self.late = y.detach() if self.late is None else self.late + y.detach()
        elif self.what == "none":
            y = y if self.cache is None else y + self.cache
            self.cache = y.detach()
        elif self.what == "missing":
            self.last = y.detach() + getattr(self, "last", 0)
        elif self.what == "number":
            self.calls += 1
        elif self.what == "flag":
            self.is_ready = True
        elif self.what == "sum":
            self.calls = self.calls + y.detach().sum()
        elif self.what == "stored":
            self.output = y
            y = self.output * 1
        elif self.what == "table":
            if self.table is None:
                self.table = torch.arange(3, dtype=x.dtype).to(x) / self.scale
            y = y + 0 * self.table
        else:
            self.mean = self.mean.to(torch.float64)
        return y


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("attribute", "Stateful replaces attribute 'mean' while it runs; fn is pure"),
        ("converted", "Stateful replaces attribute 'mean' while it runs; fn is pure"),
        ("item", r"Stateful replaces attribute \"seen\['mean'\]\" while it runs; fn is pure"),
        ("buffer", "Stateful makes buffer 'late' while it runs: the next call would not have it"),
        ("none", "Stateful fills attribute 'cache' while it runs; fn is pure"),
        ("missing", "Stateful fills attribute 'last' while it runs; fn is pure"),
    ],
)
def test_state_that_would_be_lost_between_calls_is_an_error(what, message):
    fn, params, buffers = functionalize(Stateful(what), buffers=True)
    with pytest.raises(TraceError, match=message):
        fn(params, buffers, torch.ones(3))


def test_a_buffer_that_a_call_makes_is_an_error_that_says_how_to_have_it():
    """x-transformers' ALiBi makes its table of biases in the first call."""
    model = Stateful("buffer")
    fn, params = functionalize(model)
    with pytest.raises(TraceError, match=r"Stateful makes buffer 'late' .* Call the model once"):
        fn(params, torch.ones(3))


def test_numbers_that_a_model_counts_are_warned_of():
    fn, params = functionalize(Stateful("number"))
    with pytest.warns(StaleCaptureWarning, match="changes attribute 'calls' from 0 to 1"):
        fn(params, torch.ones(3))
    fn, params = functionalize(Stateful("flag"))
    with pytest.warns(StaleCaptureWarning, match="'is_ready' from False to True"):
        fn(params, torch.ones(3))


def test_a_number_that_becomes_a_tensor_is_warned_of_in_a_trace():
    """As the longest sequence so far, which Llama's dynamic RoPE keeps."""
    fn, params = functionalize(Stateful("sum"))
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), (P(), P()), P())
    with pytest.warns(StaleCaptureWarning, match=r"'calls' from 0 to a tensor of shape \(\)"):
        step(params, torch.ones(3))


@pytest.mark.parametrize("what", ["conversion", "stored", "table"])
def test_attributes_that_carry_no_state_are_left_to_the_model(what: str):
    model = nn.Sequential(Stateful(what), Stateful(what))
    fn, params = functionalize(model)
    assert fn(params, torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    assert not hasattr(Stateful, "table")


class Rotary(nn.Module):
    """Moves its table to where the input is, as Llama's first code and many others do."""

    def __init__(self, converted, is_buffer):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.converted = converted
        if is_buffer:
            self.register_buffer("table", torch.arange(3.0))
        else:
            self.table = torch.arange(3.0)

    def forward(self, x):
        self.table = self.converted(self.table, x)
        return (x * self.weight * self.table).sum()


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize(
    "converted",
    [
        lambda table, x: table.to(x.device),
        lambda table, x: table.to(device=x.device, dtype=x.dtype),
        lambda table, x: table.type_as(x),
        lambda table, _: table.float(),
    ],
)
def test_a_conversion_with_nothing_to_do_changes_no_state(converted, is_buffer):
    fn, params = functionalize(Rotary(converted, is_buffer))
    x = torch.tensor([1.0, 2.0, 3.0])
    for run in (fn, make_fx(lambda p, x: fn(p, x))(params, x)):
        assert run(params, x) == 8
    assert torch.func.grad(fn)(params, x)["weight"].tolist() == [0, 2, 6]


def test_a_module_moved_to_where_it_is_is_not_changed():
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2, bias=False)

        def forward(self, x):
            self.inner.weight.data = self.inner.weight.data.to(x.dtype)
            return self.inner.to(device=x.device, dtype=x.dtype)(x).sum()

    fn, params = functionalize(Moving())
    x = torch.tensor([1.0, 2.0, 3.0])
    assert torch.func.grad(fn)(params, x)["inner.weight"].tolist() == [[1, 2, 3]] * 2
    with pytest.raises(TraceError, match=r"Moving modifies parameter 'inner.weight' in place"):
        fn(params, x.double())


def test_a_table_moved_to_another_device_is_no_state_unless_it_is_written():
    on_meta = {"weight": torch.ones(3, device="meta")}, torch.ones(3, device="meta")
    fn, _ = functionalize(Rotary(lambda table, x: table.to(x.device), False))
    assert fn(*on_meta).shape == ()
    for written in (
        lambda table, x: table.to(x.device).add_(1),
        lambda table, x: table.to(x.device)[:2].add_(1)._base,
        lambda table, x: table.half().to(x.device).float(),
    ):
        fn, _ = functionalize(Rotary(written, False))
        with pytest.raises(TraceError, match="Rotary replaces attribute 'table' while it runs"):
            fn(*on_meta)


class Following(nn.Module):
    """A target that follows the online layer, as in BYOL and DQN."""

    def __init__(self, how):
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how

    def follow(self, p, q):
        if self.how == "no_grad":
            with torch.no_grad():
                q.lerp_(p, 0.25)
        elif self.how == "data":
            q.data.mul_(0.75).add_(p.data, alpha=0.25)
        elif self.how == "assigned data":
            q.data = 0.75 * q.data + 0.25 * p.data
        elif self.how == "detach":
            q.detach().copy_(0.75 * q + 0.25 * p)

    def forward(self, x):
        for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
            self.follow(p, q)
        return self.online(x) - self.target(x).detach()


@pytest.mark.parametrize("how", ["no_grad", "data", "assigned data", "detach"])
def test_a_frozen_target_that_follows_comes_back_updated(how):
    model, x = Following(how).double(), torch.randn(3, 4, dtype=torch.float64)
    fn, params = functionalize(model)
    before = state_of(model)
    with pytest.raises(TraceError, match=r"parameter 'target.weight' in place .*If no gradient"):
        fn(params, x)
    model.target.requires_grad_(False)
    fn, params = functionalize(model)
    with pytest.raises(TraceError, match=r"frozen parameter 'target.weight' .* buffers=True\)"):
        fn(params, x)
    assert state_of(model) == before
    fn, params, buffers = functionalize(model, buffers=True)

    def loss(params, buffers, x):
        out, buffers = fn(params, buffers, x)
        return out.square().sum(), buffers

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P("tp"), has_aux=True)
    (value, new), grads = step(params, buffers, x)
    plain, updated = loss(params, buffers, x)
    assert state_of(model) == before
    out = model(x)
    torch.testing.assert_close(plain, out.square().sum())
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(new, dict(model.target.named_parameters(prefix="target")))
    torch.testing.assert_close(updated, new)
    expected = torch.autograd.grad(out.square().sum(), list(model.online.parameters()))
    torch.testing.assert_close(list(grads.values()), list(expected))


def test_parameters_may_be_frozen_for_a_part_of_a_call():
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 4), nn.LSTM(4, 4)

        def forward(self, x):
            loss = (self.critic(x)[0] - x).square().sum()
            weight = self.critic.weight_ih_l0
            for p in self.critic.parameters():
                p.requires_grad = False
            loss = loss - self.critic(self.actor(x))[0].sum()
            loss = loss + F.linear(self.actor(x), weight).exp().sum() + weight.square().sum()
            self.critic.requires_grad_(True)
            return loss + self.critic(x)[0].square().sum()

    model, x = Critic().double(), torch.randn(3, 4, dtype=torch.float64)
    fn, params = functionalize(model)
    before = state_of(model)
    step = ftp.shard(lambda p, x: fn(p, x), ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    value, grads = step(params, x)
    assert state_of(model) == before
    loss = model(x)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(value, loss.detach())
    torch.testing.assert_close(list(grads.values()), list(expected))
    fn, params = functionalize(model, remat={"critic": "products"})
    with pytest.raises(TraceError, match="modifies parameter 'critic"):
        fn(params, x)


@pytest.fixture
def pins(monkeypatch):
    """What was pinned to which spec, in order; pinning doubles the value, so that a result shows
    where it happened.
    """
    seen = []

    def constrain(x, spec, axes=None, grad=True):
        seen.append((tuple(x.shape), spec))
        return x * 2

    monkeypatch.setattr(ftp.functional.module_constraints, "constrain", constrain)
    return seen


def test_a_constraint_pins_the_output_of_each_module_that_its_pattern_names(pins):
    model = Tied()
    before = state_of(model)
    fn, params = functionalize(model, constraints={"blocks.*": P("dp", "tp", None), "": P("dp")})
    fn(params, torch.tensor([[1, 2]]))
    assert pins == [((1, 2, 4), P("dp", "tp")), ((1, 2, 4), P("dp", "tp")), ((1, 2, 7), P("dp"))]
    assert state_of(model) == before


def test_constraints_apply_to_inputs_keywords_and_tuples(pins):
    class Pair(nn.Module):
        def forward(self, x, n, *, mask=None, other=None):
            return x + mask, n, x

    model = Pair()
    model.register_forward_pre_hook(lambda m, args: (args[0] + 1, args[1]))
    model.register_forward_hook(lambda m, args, out: (out[0] + 100, *out[1:]))
    constraint = Constraint(
        inputs=(P("dp"), None),
        kwargs={"mask": P("tp"), "other": None},
        outputs=(P(), None, P("tp")),
    )
    fn, params = functionalize(model, constraints={"": constraint})
    out = fn(params, torch.ones(1), "n", mask=torch.ones(1), other=3)
    assert [spec for _, spec in pins] == [P("dp"), P("tp"), P(), P("tp")]
    assert out == (torch.tensor([212.0]), "n", torch.tensor([8.0]))


def test_the_constraint_op_is_in_the_graph():
    fn, params = functionalize(Mlp(), constraints={"up": P("dp", "tp")})
    x = torch.randn(2, 4)
    torch.testing.assert_close(fn(params, x), functionalize(Mlp())[0]({**params}, x))
    grads, _ = grad_and_value(lambda p: fn(p, x).sum())(params)
    assert grads.keys() == params.keys()


def error_of(call, kind):
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def test_errors_of_constraints():
    block = "module 'blocks.0' (Mlp), constrained by 'blocks.0'"
    assert error_of(lambda: functionalize(Tied(), constraints={"block.*": P("dp")}), SpecError) == (
        "pattern 'block.*' matches no path of the modules; the nearest are 'blocks.0',"
        " 'blocks.0.up', 'blocks'."
    )
    assert error_of(
        lambda: functionalize(Tied(), constraints={"blocks.*": P("dp"), "*.0": P("tp")}),
        SpecError,
    ) == (
        "patterns 'blocks.*' and '*.0' disagree for module 'blocks.0': P('dp') and P('tp')."
        " Give both the same value, or narrow one."
    )
    wrong: Any = {"head": "dp"}
    assert error_of(lambda: functionalize(Tied(), constraints=wrong), SpecError) == (
        "constraints['head'] is 'dp', a str; it must be a P (of the output) or an ftp.Constraint."
    )
    for constraint, kind, message in [
        (
            Constraint(inputs=(P(), P())),
            InputError,
            f"{block}: the constraint has 2 inputs, but it is called with 1 arguments.",
        ),
        (
            Constraint(kwargs={"shift": P()}),
            InputError,
            f"{block}: the constraint names 'shift', but it is called with no keywords.",
        ),
        (
            Constraint(outputs=(P(), None)),
            InputError,
            f"{block}: the constraint has a tuple of outputs, but it returns a Tensor.",
        ),
        (
            P(None, None, "tp"),
            SpecError,
            f"{block}: P(None, None, 'tp') has 3 entries, but its output has 2 dims, shape (1, 4).",
        ),
    ]:
        fn, params = functionalize(Tied(), constraints={"blocks.0": constraint})
        assert error_of(lambda: fn(params, torch.tensor([1])), kind) == message  # noqa: B023
    fn, params = functionalize(Tied(), constraints={"blocks": P("dp")})
    assert error_of(lambda: fn(params, torch.tensor([1])), InputError) == (
        "module 'blocks' (ModuleList), constrained by 'blocks', was not called, so it pins"
        " nothing. Name the module around it."
    )
    assert error_of(lambda: Constraint(inputs=P("dp")), SpecError) == (  # pyright: ignore
        "Constraint(inputs=P('dp')): it must be a tuple of P or None, as (P('dp'),)."
    )


def test_a_pair_of_outputs_needs_a_pair_of_specs():
    fn, params = functionalize(nn.LSTM(2, 2), constraints={"": P("dp")})
    assert error_of(lambda: fn(params, torch.ones(1, 2)), InputError) == (
        "module '' (LSTM), constrained by '': its output is a tuple; P('dp') can pin a tensor only."
        " Give ftp.Constraint(outputs=...) a spec or None for each."
    )


def test_errors_of_the_call():
    fn, params = functionalize(Mlp())
    x = torch.ones(4)
    message = error_of(lambda: fn(params, x, shfit=1.0), InputError)
    assert message.startswith("Mlp does not take the keyword 'shfit': ")
    assert error_of(
        lambda: fn({"up.weight": params["up.weight"], "up.bais": x, "up.bias": 3}, x), InputError
    ) == (
        "params of Mlp lack 'down.weight'.\n"
        "params['up.bais'] is no parameter of Mlp; the nearest are 'up.bias', 'up.weight',"
        " 'down.weight'.\n"
        "params['up.bias'] is 3, an int; it must be a tensor."
    )
    assert (
        error_of(lambda: fn(x), InputError)
        == "Mlp takes params as a dict {path: tensor}, as functionalize returned it, not a Tensor."
    )
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fn(params)


def test_errors_of_the_model():
    assert error_of(lambda: functionalize(lambda x: x), InputError).startswith(
        "functionalize takes an nn.Module, not <function"
    )  # pyright: ignore
    assert error_of(lambda: functionalize(nn.Sequential(nn.LazyLinear(3))), InputError) == (
        "0.weight, 0.bias have no shape yet (lazy modules). Call the model once before"
        " functionalize."
    )
    with pytest.warns(match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert "ScriptModule" in error_of(lambda: functionalize(nn.Sequential(scripted)), InputError)
    compiled = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))  # pyright: ignore
    assert "module '0' is made by torch.compile" in error_of(
        lambda: functionalize(compiled), InputError
    )


def test_a_compiled_module_is_the_module_that_was_compiled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x, mesh = torch.randn(5, 4), ftp.simulated_mesh((2,), ("tp",))

    def step(model: Any) -> Any:
        fn, params = functionalize(model)
        return ftp.shard(lambda p, x: fn(p, x).square().sum(), mesh, P())(params, x)

    right = step(model)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(step(compiled), right, rtol=0, atol=0)
    model.compile(backend="eager")  # in place
    model[0].compile(backend="eager")
    torch.testing.assert_close(step(model), right, rtol=0, atol=0)


def test_taps_read_and_replace_whole_activations():
    """Taps of a sharded model see what one device's hooks see, and steer it alike."""
    model = nn.Sequential(Mlp(), nn.Tanh(), Mlp()).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    steer = torch.randn(4, dtype=torch.float64)
    seen: dict[str, torch.Tensor] = {}
    taps = {
        "*.up": lambda path, out: seen.update({path: out}),
        "0": lambda out: out + steer,
    }
    fn, params = functionalize(model, taps=taps)

    def loss(params, x):
        seen.clear()
        return fn(params, x).square().mean(), dict(seen)

    mesh = ftp.simulated_mesh((3,), ("tp",))
    specs = ftp.plan(params, {"*.up.*": P("tp"), "*.down.weight": P(None, "tp")})
    (value, read), grads = ftp.shard(loss, mesh, specs, has_aux=True)(params, x)
    kept = {}
    for name in ("0.up", "2.up"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: kept.update({name: out})
        )
    model[0].register_forward_hook(lambda module, args, out: out + steer)
    expected = model(x).square().mean()
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    assert float((value - expected.detach()).abs()) < 1e-12 and read.keys() == kept.keys()
    for name in kept:
        torch.testing.assert_close(read[name], kept[name], rtol=1e-12, atol=1e-12)
    for (name, _), grad in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(grads[name], grad, rtol=1e-11, atol=1e-12)


def test_errors_of_taps():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2)
    wrong: Any = {"0": 3}
    assert "taps['0'] is 3, an int; it must be a function" in error_of(
        lambda: functionalize(model, taps=wrong), SpecError
    )
    assert "takes 3 arguments" in error_of(
        lambda: functionalize(model, taps={"0": lambda a, b, c: a}), SpecError
    )
    fn, params = functionalize(model, taps={"0": lambda out: out[:, :1]})
    assert "shape (1, 1) in place of one of shape (1, 2)" in error_of(
        lambda: fn(params, x), TraceError
    )
    idle = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    idle.forward = lambda x: idle["used"](x)
    fn, params = functionalize(idle, taps={"idle": lambda out: None})
    assert "module 'idle' (Linear), tapped by 'idle', was not called" in error_of(
        lambda: fn(params, x), InputError
    )


def test_a_write_to_a_buffer_in_whose_memory_another_lies_is_an_error():
    """As two values, the other would not change."""

    class Overlapping(nn.Module):
        def __init__(self, writes: bool):
            super().__init__()
            both = torch.arange(6.0)
            self.register_buffer("a", both[:4])
            self.register_buffer("b", both[2:])
            self.writes = writes

        def forward(self, x):
            if self.writes:
                self.a.add_(x)
            return x.sum() + self.b.sum()

    fn, params, buffers = functionalize(Overlapping(False), buffers=True)
    assert fn(params, buffers, torch.ones(4))[0] == 18
    fn, params, buffers = functionalize(Overlapping(True), buffers=True)
    with pytest.raises(TraceError, match="modifies 'a', in whose memory 'b' lies, in place"):
        fn(params, buffers, torch.ones(4))


def test_a_model_that_calls_compiled_functions():
    doubled = torch.compile(lambda x: 2 * F.silu(x), backend="eager", fullgraph=True)

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 6)

        def forward(self, x):
            return doubled(self.up(x))

    model, x = Gated(), torch.randn(3, 4)
    fn, params = functionalize(model)
    expected = 2 * F.silu(model.up(x)).detach()
    torch.testing.assert_close(fn(params, x), expected)
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), (P(), P()))
    torch.testing.assert_close(step(params, x), expected)


def test_models_in_threads_leave_the_compiler_as_it_was():
    """One call begins before another and ends before it."""
    graphs = []

    def counted(gm, _):
        graphs.append(gm)
        return gm.forward

    doubled = torch.compile(lambda x: 2 * x, backend=counted)
    x = torch.ones(2)
    inside, outside = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            inside.set()
            assert outside.wait(20)
            return self.scale * x

    class Starts(Waits):
        def forward(self, x):
            thread.start()
            assert inside.wait(20)
            return self.scale * x

    (starts, params), (waits, _) = functionalize(Starts()), functionalize(Waits())
    thread = threading.Thread(target=waits, args=(params, x))
    starts(params, x)
    outside.set()
    thread.join()
    doubled(x)
    assert len(graphs) == 1


def test_models_that_share_a_module_in_threads():
    """A second call begins within the first one, with other parameters of the shared module."""
    begun, results = threading.Event(), []

    class Starts(nn.Linear):
        def forward(self, x):
            if not thread.ident:
                thread.start()
                begun.wait(0.2)
            return super().forward(x)

    class Begins(nn.Sequential):
        def forward(self, x):
            begun.set()
            return super().forward(x)

    model = Starts(2, 2)
    (first, params), (second, others) = functionalize(model), functionalize(Begins(model))
    others = {path: torch.zeros_like(p) for path, p in others.items()}
    x = torch.randn(3, 2)
    thread = threading.Thread(target=lambda: results.append(second(others, x)))
    expected = nn.functional.linear(x, *params.values())
    torch.testing.assert_close(first(params, x), expected)
    thread.join()
    assert not results[0].any()


def test_cumulative_averages_have_one_program():
    """As torch.optim.swa_utils.update_bn sets them; a count that is read is warned of."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, momentum=None))
    expected = copy.deepcopy(model)
    fn, params, buffers = functionalize(model, buffers=True)
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), (P(), P(), P("dp")))
    for i in range(3):
        x = torch.randn(4, 2, 5) + i
        out, buffers = step(params, buffers, x)
        torch.testing.assert_close(out, expected(x))
        torch.testing.assert_close(buffers, dict(expected.named_buffers()))


def test_cumulative_averages_that_are_not_kept():
    model = nn.BatchNorm1d(3, momentum=None)
    model.running_mean = model.running_var = None
    expected, (fn, params, buffers) = copy.deepcopy(model), functionalize(model, buffers=True)
    x = torch.randn(4, 3)
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("dp",)), (P(), P(), P("dp")))
    with pytest.warns(ReadWarning):  # torch reads the count
        out, _ = step(params, buffers, x)
    torch.testing.assert_close(out, expected(x))


def test_a_model_is_read_after_a_call_of_another_thread():
    begun = threading.Event()

    class Slow(nn.Linear):
        def forward(self, x):
            begun.set()
            thread.join(0.2)
            return super().forward(x)

    model, read = Slow(2, 2), []
    fn, params = functionalize(model)
    thread = threading.Thread(target=lambda: read.append(begun.wait() and functionalize(model)[1]))
    thread.start()
    fn({path: torch.zeros_like(p) for path, p in params.items()}, torch.randn(3, 2))
    thread.join()
    torch.testing.assert_close(read[0], params)
