"""The tracer: one functional graph, equal to the function, and an error for everything that
cannot be one.
"""

# optree's types say nothing of what is in a tree.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import copy
import gc
import sys
import types
from collections import Counter
from dataclasses import dataclass

import optree
import pytest
import torch
from models import Llama, LlamaConfig
from torch import nn
from torch.nn import functional as F

import ftp
from ftp.errors import InputError, TraceError
from ftp.ops.constrain import constrain
from ftp.rules.call import Meta
from ftp.sharding.pytree import flatten, leaf_names
from ftp.sharding.spec import P
from ftp.source import raised_line
from ftp.torch_internals import deferred_compiler
from ftp.tracing.decompose import decompose
from ftp.tracing.gradient import grad_and_value
from ftp.tracing.trace import trace

aten = torch.ops.aten


def traced(fn, *args, names=("params", "x", "y"), device="cpu"):
    leaves, tree = flatten(args)
    paths = [path for name, arg in zip(names, args, strict=False) for path in leaf_names(arg, name)]
    return trace(fn, leaves, tree, device, names=paths)


def run(t, *args):
    with torch.no_grad():
        outputs = t.gm(
            *[leaf for leaf in flatten(args)[0] if isinstance(leaf, torch.Tensor)], *t.constants
        )
    return t.out_tree.unflatten(
        [
            leaf if static else outputs[leaf]
            for leaf, static in zip(t.out_leaves, t.is_static, strict=True)
        ]
    )


def same(fn, *args):
    t = traced(fn, *args)
    torch.testing.assert_close(run(t, *args), fn(*args))
    return t


def ops(t):
    return Counter(n.target for n in t.gm.graph.nodes if n.op == "call_function")


def inputs(t):
    return [n.name for n in t.gm.graph.nodes if n.op == "placeholder"]


def sources(t):
    return {n.target: n.meta["source"] for n in t.gm.graph.nodes if n.op == "call_function"}


def loss_of(model):
    def loss(params, x):
        logits = torch.func.functional_call(model, params, (x,))
        return F.cross_entropy(logits.flatten(0, 1), x.flatten())

    return loss


def parameters(model):
    return {k: v.detach() for k, v in model.named_parameters()}


# What a trace is.


def test_llama():
    model, x = Llama(LlamaConfig(layers=2)), torch.randint(0, 32, (2, 8))
    params = parameters(model)
    t = same(grad_and_value(loss_of(model)), params, x)
    targets = ops(t)
    assert all(not op._schema.is_mutable for op in targets if isinstance(op, torch._ops.OpOverload))
    assert not targets.keys() & {
        aten.detach.default,
        aten.alias.default,
        aten.mean.dim,
        aten._unsafe_view.default,
        aten.empty_like.default,
    }
    assert targets[aten.embedding_dense_backward.default] == targets[aten._log_softmax.default] == 1
    assert all(
        "val" in n.meta and "source" in n.meta for n in t.gm.graph.nodes if n.op == "call_function"
    )
    assert [
        n.name for n in t.gm.graph.nodes if n.op == "call_function" and not n.meta["source"]
    ] == ["ones_like"]
    assert sources(t)[aten.embedding_dense_backward.default] == sources(t)[aten.embedding.default]
    assert sources(t)[aten.silu.default].endswith("return self.w2(F.silu(self.w1(x)) * self.w3(x))")


def test_a_power_of_one_is_its_operand():
    """The derivative of a square has one: an activation that is copied by each norm."""

    def loss(x, n):
        return torch.func.grad(lambda x: x.square().mean() + (x**2).sum())(x), (n**1.0).sum()

    t = same(loss, torch.randn(4, 3), torch.arange(3))
    powers = [n for n in t.gm.graph.nodes if n.target is aten.pow.Tensor_Scalar]
    assert [n.args[1] for n in powers] == [1.0], "of integers, whose power is a float"


def test_inputs_are_named_by_path():
    t = same(
        lambda params, x: params["mlp"]["up"] @ x, {"mlp": {"up": torch.ones(2, 3)}}, torch.ones(3)
    )
    assert inputs(t) == ["params_mlp_up", "x"]


def test_meta_and_required_gradients_and_strides_do_not_matter():
    w = torch.ones(3, 2, requires_grad=True).t()
    for leaf in (w, w.detach().to("meta")):
        t = traced(lambda params, x: params @ x, leaf, torch.ones(3, 4))
        assert next(iter(t.gm.graph.nodes)).meta["val"].is_contiguous()
        assert next(iter(t.gm.graph.nodes)).meta["val"].device.type == "cpu"
        torch.testing.assert_close(run(t, w, torch.ones(3, 4)), w.detach() @ torch.ones(3, 4))


def test_large_inputs_take_no_memory():
    x = torch.empty(1 << 20, 1 << 20, device="meta")
    t = traced(grad_and_value(lambda params, x: (x @ params).mean()), x, x)
    assert ops(t)[aten.mm.default] == 2


def test_one_tensor_as_two_leaves_is_two_inputs():
    w = torch.ones(2)
    t = traced(lambda a, b: a + 2 * b, w, w)
    assert run(t, torch.tensor([1.0, 1.0]), torch.tensor([10.0, 20.0])).tolist() == [21, 41]


def test_static_leaves():
    t = traced(
        lambda params, n, s: {"y": params * n, "n": n, "s": s, "none": None},
        torch.ones(2),
        3,
        "text",
    )
    assert run(t, torch.ones(2), 3, "text")["y"].tolist() == [3, 3]
    assert t.is_static == (True, True, False)
    assert t.out_leaves == (3, "text", 0)


def test_no_inputs_and_outputs_that_are_inputs():
    assert run(traced(lambda: torch.arange(3))).tolist() == [0, 1, 2]
    assert run(traced(lambda x: (x, x.detach()), torch.ones(2)), torch.ones(2))[1].tolist() == [
        1,
        1,
    ]


def test_custom_containers():
    @dataclass
    class Pair:
        a: torch.Tensor
        b: torch.Tensor

    optree.register_pytree_node(
        Pair, lambda p: ((p.a, p.b), None, ("a", "b")), lambda _, c: Pair(*c), namespace="ftp"
    )
    t = traced(lambda p: Pair(p.b, p.a * 2), Pair(torch.ones(2), torch.zeros(3)))
    out = run(t, Pair(torch.ones(2), torch.zeros(3)))
    assert (out.a.tolist(), out.b.tolist()) == ([0, 0, 0], [2, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.mean(),
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.var(0),
        lambda x: x.std(),
        lambda x: x.var(correction=0),
        lambda x: torch.addmm(x[0], x, x.T @ x, beta=0.5, alpha=2),
        lambda x: F.linear(x, x, x[:, 0]),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.gelu(x),
        lambda x: F.silu(x),
    ],
)
def test_fewer_primitives(fn, dtype):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    f = grad_and_value(lambda x: (fn(x).float() ** 2).sum())
    t = traced(f, x)
    for ours, theirs in zip(
        run(t, x), f(x), strict=True
    ):  # primitives round in between: bfloat16 has eight bits, of the largest element
        tolerance = (
            {"atol": 0.02 * float(theirs.abs().max()), "rtol": 0.02}
            if dtype is torch.bfloat16
            else {}
        )
        torch.testing.assert_close(ours, theirs, **tolerance)
    fused = () if dtype is torch.bfloat16 else ("addmm",)  # which rounds once there
    assert not any(op in str(o) for o in ops(t) for op in (*fused, "mean", "var", "std"))


def test_constraints_are_kept_in_both_directions():
    t = traced(
        grad_and_value(lambda w, x: constrain(x @ w, P("dp", "tp")).square().sum()),
        torch.ones(3, 4),
        torch.ones(2, 3),
    )
    nodes = [n for n in t.gm.graph.nodes if n.target is torch.ops.ftp.constrain.default]
    assert [n.args[1] for n in nodes] == ["P('dp', 'tp')"] * 2
    assert nodes[0].meta["source"] == nodes[1].meta["source"] != ""


def test_autograd_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone().mul_(2)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g.clone().mul_(2)

    same(grad_and_value(lambda w: Double.apply(w).square().sum()), torch.arange(3.0))


# Gradients.


def test_aux():
    f = grad_and_value(
        lambda p, x: ((p["a"] * x).sum(), {"n": 3, "y": p["a"] + 1, "x": x}), has_aux=True
    )
    t = same(f, {"a": torch.ones(2), "b": torch.ones(3)}, torch.ones(2))
    assert ops(t)[aten.zeros_like.default] == 1


def test_no_dependence_gives_zeros():
    (loss, grads) = run(
        traced(grad_and_value(lambda p, x: x.sum()), torch.ones(2), torch.ones(3)),
        torch.ones(2),
        torch.ones(3),
    )
    assert (loss.item(), grads.tolist()) == (3, [0, 0])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": torch.ones(2, dtype=torch.int64)}, "params['n'] is torch.int64: it has no gradient"),
        ({"n": torch.ones(2, dtype=torch.bool)}, "params['n'] is torch.bool"),
        ({"n": [3]}, "params['n'][0] is 3, an int: it has no gradient"),
        ({"n": "text"}, "params['n'] is 'text', a str"),
    ],
)
def test_leaves_without_gradient(params, message):
    with pytest.raises(InputError) as error:
        traced(grad_and_value(lambda p: p["w"].sum()), {**params, "w": torch.ones(2)})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("loss", "has_aux", "message"),
    [
        (
            lambda p: p,
            False,
            "returns a tensor of shape (2,); a gradient needs a scalar, of shape (). Reduce it"
            " with .mean() or .sum()",
        ),
        (
            lambda p: (p.sum(), p),
            False,
            "returns a tuple of 2. Return the loss alone, or (loss, aux) with has_aux=True.",
        ),
        (lambda p: 3.0, False, "returns a float, not a tensor"),
        (lambda p: p.sum(), True, "must return a pair (loss, aux), not a Tensor"),
        (lambda p: p.sum().long(), False, "returns torch.int64; a gradient needs a real"),
    ],
)
def test_losses(loss, has_aux, message):
    with pytest.raises(InputError) as error:
        traced(grad_and_value(loss, has_aux=has_aux), torch.ones(2))
    assert message in str(error.value)
    assert "test_trace.py:" in str(error.value)


# Captured tensors.


def test_captured_tensors_are_inputs_once_each():
    a, b = torch.arange(3.0), torch.ones(3, requires_grad=True)
    t = same(lambda x: (x * a + b * a, a), torch.ones(3))
    assert inputs(t) == ["params", "constant_0", "constant_1"]
    assert [c.tolist() for c in t.constants] == [[0, 1, 2], [1, 1, 1]]
    assert not t.constants[1].requires_grad


def test_captured_under_grad_and_vmap():
    a = torch.arange(3.0)
    t = same(lambda x: torch.vmap(torch.func.grad(lambda x: (x * a).sum()))(x), torch.ones(4, 3))
    assert len(t.constants) == 1


def test_constants_that_are_not_used_go():
    a = torch.ones(3)
    assert traced(lambda x: (x * 2, x * a)[0], torch.ones(3)).constants == ()


def test_numbers_made_inside_are_no_inputs():
    t = same(
        lambda x: x * torch.tensor(3.0) + torch.tensor([True]) + torch.tensor([1, 2]), torch.ones(2)
    )
    assert len(t.constants) == 1
    assert ops(t)[aten.full.default] == 2
    same(lambda x: x * float(torch.tensor(3.0)), torch.ones(2))


def test_values_of_captured_tensors_are_known():
    scale = torch.tensor(3.0)
    same(lambda x: x * scale.item(), torch.ones(2))


def test_meta_model():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    t = traced(
        lambda p, x: torch.func.functional_call(model, p, (x,)),
        dict(model.named_parameters()),
        torch.ones(2, 3),
    )
    assert all(
        n.meta["val"].device.type == "cpu"
        for n in t.gm.graph.nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    )
    assert len(t.constants) == 2
    position = torch.arange(3.0, device="meta")
    same_device = traced(
        lambda x: x * position * torch.arange(3, device=position.device), torch.ones(3)
    )
    assert all(str(n.kwargs.get("device", "cpu")) == "cpu" for n in same_device.gm.graph.nodes)


def test_a_device_that_this_machine_lacks():
    q = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.bfloat16)

    def loss(w, q):
        o = F.scaled_dot_product_attention(q @ w, q, q, is_causal=True)
        return (o + torch.arange(16, device=o.device)).float().sum()

    t = traced(
        grad_and_value(loss),
        torch.empty(16, 16, device="meta", dtype=torch.bfloat16),
        q,
        device="cuda",
    )
    assert any("_scaled_dot_product" in str(op) for op in ops(t))
    devices = [n.kwargs["device"] for n in t.gm.graph.nodes if n.kwargs.get("device") is not None]
    assert devices
    assert set(devices) == {torch.device("cuda")}


# In-place ops.


def test_in_place_ops_on_new_values():
    def fn(x):
        y = x * 2
        y.add_(1).mul_(x)
        z = torch.empty_like(x).fill_(3.0)
        w = torch.zeros(2, 3)
        w.copy_(x)
        w += z
        return y, w, y + z.zero_()

    assert "copy" not in str(ops(same(fn, torch.randn(2, 3))))


def test_in_place_ops_keep_their_dtype():
    def fn(x):
        y = x.clone().add_(torch.ones(3, dtype=torch.float64))
        z = torch.ones(3, dtype=torch.float64).mul_(x)
        return y, z, x.clone().gt_(0.5)

    t = same(fn, torch.rand(3))
    assert [n.meta["val"].dtype for n in next(reversed(t.gm.graph.nodes)).args[0]] == [
        torch.float32,
        torch.float64,
        torch.float32,
    ]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.mul_(0.5),
        lambda x, y: x.mul_(y),
        lambda x, y: x.addcmul_(x, y),
        lambda x, y: x.logit_(),
        lambda x, y: x.ldexp_(x),
        lambda x, y: x.polygamma_(2),
        lambda x, y: y.add_(1j),
        lambda x, y: y.sub_(y * 1j),
        lambda x, y: (x > 0).mul_(2),
    ],
)
def test_a_result_that_an_in_place_op_cannot_hold_is_refused_as_in_torch(fn):
    x, y = torch.ones(3, dtype=torch.int64), torch.ones(3)
    with pytest.raises(RuntimeError, match="can't be cast"):
        fn(x.clone(), y.clone())
    with pytest.raises(TraceError, match=r"to a tensor of dtype .* at .*test_trace\.py:"):
        traced(lambda x, y: fn(x.clone(), y.clone()), x, y)


def test_deep_copies_are_no_part_of_what_they_copy():
    def fn(x):
        kept = {"x": x, "again": [x, x * 2]}
        copied = copy.deepcopy(kept)
        copied["x"].mul_(3)
        return kept, copied

    same(fn, torch.randn(2, 3))


def test_deep_copies_of_views_of_one_tensor_are_refused():
    with pytest.raises(TraceError, match=r"test_trace\.py:(.|\n)*copy\.deepcopy of several views"):
        traced(lambda x: copy.deepcopy([x, x[0]]), torch.randn(2, 3))


def test_an_in_place_op_whose_namesake_takes_something_else():
    x = torch.randn(2, 3, dtype=torch.float64)
    same(lambda x: torch.exp(x).pow_(3), x)
    same(lambda x: torch.func.grad(lambda x: torch.linalg.vector_norm(x, 6))(x), x)


def test_in_place_ops_on_views():
    def fn(x):
        y = torch.zeros(4, 3)
        y[:2] = x
        y[:, 1] += 5
        y.view(-1)[3:5].mul_(2)
        return y.t(), y[0]

    t = same(fn, torch.randn(2, 3))
    assert any("y[:, 1] += 5" in s for s in sources(t).values())
    same(grad_and_value(lambda x: (fn(x)[0] ** 2).sum()), torch.randn(2, 3))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.t().mul_(2),
        lambda x: x[0].zero_(),
        lambda x: torch.relu_(x.view(-1)),
    ],
)
def test_inputs_are_not_written(write):
    def fn(params, x):
        write(x["deep"])
        return params * x["deep"].sum()

    for f in (fn, grad_and_value(lambda p, x: fn(p, x).sum())):
        with pytest.raises(TraceError) as error:
            traced(f, torch.ones(2), {"deep": torch.ones(2, 2)})
        assert str(error.value).startswith(
            "x['deep'] is changed in place at test_trace.py:"
        ) or "tests/tracing/test_trace.py:" in str(error.value)
        assert "x = x.clone()" in str(error.value)


def test_parameters_and_captured_tensors_are_not_written():
    a = torch.ones(2)
    for f in (
        grad_and_value(lambda p: p.add_(1).sum()),
        grad_and_value(lambda p: (a.add_(1) * p).sum()),
        lambda p: p * a.add_(1),
    ):
        with pytest.raises(
            TraceError, match=r"changed in place|changes an input or a captured tensor in place"
        ):
            traced(f, torch.ones(2))
    assert a.tolist() == [1, 1]


# What cannot be traced.


INTEGERS, POSITIVE = (
    torch.tensor([[2, 0, 3], [1, 1, 0]]),
    torch.tensor([[0.5, 2.0, 1.0], [1e-9, 3.0, 0.0]], dtype=torch.float64),
)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.one_hot(INTEGERS, 4) * x.sum(),
        lambda x: F.gaussian_nll_loss(x, x.exp(), POSITIVE * x.cos().square(), eps=1e-3),
        lambda x: F.gaussian_nll_loss(
            x, x.exp(), POSITIVE[0].expand(2, 3)[:, 0], full=True, reduction="none"
        ),
        lambda x: F.gaussian_nll_loss(x, x.exp(), 2.0, reduction="sum"),
        lambda x: torch.cov(x),
        lambda x: x[0].cov(correction=0),
        lambda x: x.cov(fweights=INTEGERS[0]),
        lambda x: torch.cov(x, fweights=INTEGERS[1], aweights=POSITIVE[0]),
        lambda x: torch.cov(x, aweights=POSITIVE[0], correction=0),
        lambda x: torch.corrcoef(torch.stack([x[0], x[1] * x[0], x[1]])),
        lambda x: x[0].corrcoef(),
    ],
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_values_that_are_only_checked(fn):
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    same(fn, x)
    same(grad_and_value(lambda p, x: fn(p["x"]).sin().sum()), {"x": x}, x)


def test_batch_norm_of_other_devices_is_the_one_that_all_have():
    x, w, b, mean, var = (
        torch.randn(4, 3, 5),
        torch.rand(3),
        torch.rand(3),
        torch.zeros(3),
        torch.ones(3),
    )

    def loss(kernel, p, mean, var):
        return (
            kernel(p["x"], p["w"], p["b"], mean.clone(), var.clone(), True, 0.1, 1e-5)[0]
            .sin()
            .sum()
        )

    params = {"x": x, "w": w, "b": b}
    made = traced(
        grad_and_value(lambda *args: loss(torch.cudnn_batch_norm, *args)), params, mean, var
    )
    torch.testing.assert_close(
        run(made, params, mean, var),
        grad_and_value(lambda *args: loss(torch.native_batch_norm, *args))(params, mean, var),
    )


def test_operators_of_functions():
    def strict(x):
        return torch.ops.higher_order.strict_mode(torch.sin, (x,))

    with pytest.raises(
        TraceError,
        match=r"takes functions, which a trace cannot see into"
        r" at(.|\n)*test_trace.py(.|\n)*Call the function itself",
    ):
        traced(grad_and_value(lambda x: strict(x).sum()), torch.ones(3))


@pytest.mark.parametrize(
    ("fn", "advice"),
    [
        (lambda x: torch.linalg.lstsq(x.T, x.T, driver="gelsd")[0], "torch.linalg.pinv"),
        (lambda x: x[0].long().bincount(), "torch.where"),
    ],
)
def test_shapes_that_depend_on_values(fn, advice):
    with pytest.raises(
        TraceError, match=r"gives a shape that depends on values at(.|\n)*test_trace.py"
    ) as error:
        traced(fn, torch.ones(2, 3))
    assert advice in str(error.value)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * float(x.sum()),
        lambda x: x * int(x.sum()),
        lambda x: x.repeat(x[0].long().tolist()),
        lambda x: x.numpy(),
        lambda x: torch.vmap(lambda r: r if r.sum() > 0 else -r)(x),
        lambda x: torch.tensor_split(x, x[0].detach().long())[0],
    ],
)
def test_values_are_not_known(fn):
    for f in (fn, grad_and_value(lambda x: fn(x).sum())):
        with pytest.raises(TraceError) as error:
            traced(f, torch.ones(2, 2))
        assert "needs a tensor's value" in str(error.value)
        assert "test_trace.py:" in str(error.value)
        assert "torch.where" in str(error.value)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x),
        lambda x: torch.rand_like(x),
        lambda x: torch.bernoulli(x),
        lambda x: x + torch.randn(2),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.multinomial(x, 1),
        lambda x: x[torch.randperm(2)],
        lambda x: torch.empty_like(x).uniform_(),
    ],
)
def test_random_ops(fn):
    with pytest.raises(TraceError) as error:
        traced(fn, torch.ones(2))
    assert "draws random numbers at" in str(error.value)
    assert "rng=key" in str(error.value)
    assert "model.eval()" in str(error.value)


def test_attention_without_dropout_is_not_random():
    q = torch.randn(1, 2, 4, 8)
    same(grad_and_value(lambda q: F.scaled_dot_product_attention(q, q, q).sum()), q)
    same(lambda x: F.dropout(x, training=False), q)


def i64(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x @ y,
        lambda x, y: torch.bmm(x[None], y[None]),
        lambda x, y: F.linear(x, y),
        lambda x, y: F.linear(x, x, y[0]),
        lambda x, y: torch.einsum("ij,kj->ik", x, y),
        lambda x, y: F.conv1d(x[None], y[None]),
        lambda x, y: x @ y[0],
        lambda x, y: torch.addmm(x[0], y, y),
        lambda x, y: x.index_add(0, i64(3), y),
        lambda x, y: x.index_put((i64(3),), y),
        lambda x, y: F.binary_cross_entropy(x, y),
        lambda x, y: F.nll_loss(x, i64(3), y[0]),
    ],
)
def test_mixed_dtypes_that_torch_refuses(fn):
    x, y = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        fn(x, y)
    with pytest.raises((TraceError, RuntimeError)) as error:
        traced(fn, x, y)
    if isinstance(error.value, TraceError):
        assert (
            "float32 and bfloat16" in str(error.value)
            or "bfloat16 and" in str(error.value)
            or "and bfloat16" in str(error.value)
        )
        assert "test_trace.py:" in str(error.value)


@pytest.mark.parametrize("fn", [lambda x: x.max(), lambda x: x.min()], ids=["max", "min"])
@pytest.mark.parametrize("spec", [P(), P("tp"), P(None, "tp")])
def test_an_extremum_of_no_elements_is_an_error_as_in_torch(fn, spec):
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), spec, P())
    with pytest.raises(TraceError, match=r"shape \(0, 4\) at .* no elements"):
        step(torch.ones(0, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_a_norm_of_weights_keep_their_dtype(dtype):
    def loss(p):
        weight = torch._weight_norm(p["v"], p["g"], 0)  # pyright: ignore[reportPrivateImportUsage]
        return weight.float().square().sum()

    params = {"v": torch.randn(4, 3, dtype=dtype), "g": torch.ones(4, 1, dtype=dtype)}
    _, grads = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P())(params)
    leaves = {k: x.clone().requires_grad_() for k, x in params.items()}
    wanted = torch.autograd.grad(loss(leaves), list(leaves.values()))
    torch.testing.assert_close(list(grads.values()), list(wanted), rtol=2e-2, atol=2e-2)


def test_a_trace_that_needs_torchs_compiler_is_made_again_as_it_was_asked_for(monkeypatch):
    is_loaded = []

    def fn(x):
        return 2 * x if is_loaded else torch.of_the_compiler

    monkeypatch.setattr(deferred_compiler, "is_deferred", lambda: not is_loaded)
    monkeypatch.setattr(deferred_compiler, "load", lambda: is_loaded.append(True))
    leaves, tree = flatten((torch.ones(2, 3),))
    traced = trace(fn, leaves, tree, "cpu", names=["x"], shapes=[(5, 3)])
    assert traced.out_shapes == [(5, 3)]


def test_what_an_earlier_trace_left_behind():
    left = []
    for outer in (lambda f: f, lambda f: grad_and_value(lambda x: f(x).sum())):
        left.clear()
        traced(outer(lambda x: (left.append(x * 2), x)[1]), torch.ones(2))
        for f in (
            lambda x: x + left[0],
            lambda x: (x, left[0]),
            grad_and_value(lambda x: (x * left[0]).sum()),
        ):
            with pytest.raises(
                TraceError, match="a tensor that an earlier trace left behind: it has no values"
            ):
                traced(f, torch.ones(2))


class Box:
    def __init__(self, x):
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    "kind",
    [
        Box,
        Slotted,
        lambda x: Box([x]),
        lambda x: {"set": frozenset([x])},
        lambda x: Box({"deep": {"er": x}}),
    ],
)
def test_containers_that_optree_does_not_know(kind):
    x = torch.ones(2)
    with pytest.raises(InputError, match=r"which optree does not know, and holds tensors"):
        traced(lambda p: x, kind(x))
    with pytest.raises(
        TraceError, match=r"result.* is a .* which optree does not know, and holds tensors"
    ):
        traced(lambda p: kind(p), x)


def test_leaves_that_are_no_values():
    with pytest.raises(
        InputError,
        match=r"params is a module, Linear. Give its parameters: fn, params = ftp.functionalize",
    ):
        traced(lambda m: m, nn.Linear(2, 2))
    with pytest.raises(
        InputError,
        match=r"params\['a'\] is a set, neither a tensor, .* nor a hashable static value",
    ):
        traced(lambda m: 1, {"a": {1}})
    with pytest.raises(InputError, match=r"x is a torch.sparse_coo tensor"):
        traced(lambda m, x: m, torch.ones(2), torch.ones(2).to_sparse())


def test_ordinary_mistakes_stay_as_they_are():
    with pytest.raises(RuntimeError, match="broadcast") as error:
        traced(lambda x, y: x + y, torch.ones(2), torch.ones(3))
    assert "lambda x, y: x + y" in raised_line(error.value)
    (note,) = error.value.__notes__
    assert note.startswith("Raised while ftp traced the function, on whole tensors, at ")
    assert "lambda x, y: x + y" in note
    with pytest.raises(TypeError, match="unexpected keyword"):
        traced(
            lambda x: torch.func.functional_call(nn.ReLU(), {}, (x,), {"wrong": 1}), torch.ones(2)
        )


def test_transformers_masks_are_told(monkeypatch):
    masking = types.ModuleType("transformers.masking_utils")
    masking.is_tracing = is_tracing = lambda x=None: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)
    traced(lambda x: x if masking.is_tracing(x) else x.item(), torch.ones(2))
    assert masking.is_tracing is is_tracing


# Decompositions on demand.


def test_decompose():
    x = torch.randn(3, 4)
    gm = decompose(aten._log_softmax.default, [Meta((3, 4)), 1, False], {})
    assert gm is not None
    torch.testing.assert_close(gm(x)[0], F.log_softmax(x, 1))
    assert decompose(aten.mm.default, [Meta((3, 4)), Meta((4, 5))], {}) is None
    gm = decompose(
        aten.add.Tensor,
        [Meta((3, 4)), Meta((3, 4))],
        {"alpha": 2},
        by=lambda a, b, alpha: (a.clone().add_(b * alpha), None),
    )
    assert gm is not None
    assert [n.op for n in gm.graph.nodes].count("placeholder") == 2
    assert gm(x, x)[1] is None
    torch.testing.assert_close(gm(x, x)[0], 3 * x)


def write_row(h):
    h[0] = 2 * h[0]


def write_columns(h):
    h[:, 1:].mul_(3)


def write_diagonal_of_transposed(h):
    h.T[1] += 2 * h.T[0]


def write_through_a_view(h):
    h.view(2, 2, 3)[1, :, 2].copy_(h[:2, 0])


def write_through_conjugates(h):
    z = torch.complex(2 * h, (h * 1).cos())
    z.conj()[1:].mul_(1 + 2j)
    z.mH[0].copy_(z[:, 1].exp())
    real = torch.view_as_real(z)
    z.conj().mul_(1 + 0.5j)
    z.add_(0.5)
    h.copy_(real.prod(-1) + z.real.sin())


WRITES = [
    write_through_conjugates, write_row, write_columns, write_diagonal_of_transposed,
    write_through_a_view,
]  # fmt: skip


@pytest.mark.cases_by_default(6)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")], ids=str)
def test_writes_to_views_have_gradients(write, spec):
    def loss(w, x):
        h = (w * x).clone()
        write(h)
        return h.square().sum()

    w, x = (
        torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )
    leaf = w.clone().requires_grad_()
    expected = loss(leaf, x)
    expected.backward()
    value, grad = ftp.shard(loss, ftp.simulated_mesh((2,), ("a",)), spec, certify=True)(w, x)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, leaf.grad)


@pytest.mark.slow
def test_a_longer_trace_leaves_no_more_garbage():
    def left_by(depth):
        def loss(w, x):
            for _ in range(depth):
                x = (x @ w).relu()
            return x.sum()

        gc.collect()
        gc.disable()
        try:
            kept = traced(loss, torch.ones(4, 4), torch.ones(2, 4))
            return gc.collect(), kept
        finally:
            gc.enable()

    left_by(1)
    (few, _), (many, _) = left_by(2), left_by(30)
    assert many <= few + 20, (few, many)
