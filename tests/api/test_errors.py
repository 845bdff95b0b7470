"""Bad input: the messages, in full where they are typical; and what looks like bad input but
must work.
"""

import copy
import functools
import gc
import pickle

import numpy as np
import optree
import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

import ftp
from ftp import P

MESH = ftp.simulated_mesh((2, 2), ("dp", "tp"))
PARAMS = {"w": torch.randn(4, 6), "b": torch.randn(6)}
SPECS = {"w": P(None, "tp"), "b": P("tp")}
X = torch.randn(5, 4)


def loss_fn(params, x):
    return (x @ params["w"] + params["b"]).square().mean()


def scaled_loss(params, x, *, scale=1.0):
    return scale * loss_fn(params, x)


LINE = (
    f"tests/api/test_errors.py:{loss_fn.__code__.co_firstlineno + 1}"
    '  return (x @ params["w"] + params["b"]).square().mean()'
)


def exported():
    return torch.export.export(torch.nn.Linear(6, 4), (X[:, :1].expand(5, 6),))


def step(loss=loss_fn, specs=None, **options):
    return ftp.shard(loss, MESH, P() if specs is None else specs, **options)


def message(call, *args, kind=ftp.FtpError, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return f"{type(caught.value).__name__}: {caught.value}"


def fresh():
    return {name: value.clone() for name, value in PARAMS.items()}


def held(width=4):
    return torch.randn(5, width)


# Specs and meshes.

IN_FULL = {
    "unknown axis": (
        lambda: step(specs={"w": P("pp"), "b": P()})(PARAMS, X),
        "SpecError: params['w'] has spec P('pp'), but the mesh has no axis 'pp'; its axes are 'dp'"
        " (size 2), 'tp' (size 2).",
    ),
    "unknown axis of a batch": (
        lambda: step(batch_specs=P("pp"))(PARAMS, X),
        "SpecError: x has spec P('pp'), but the mesh has no axis 'pp'; its axes are 'dp' (size 2),"
        " 'tp' (size 2).",
    ),
    "axis twice": (
        lambda: P("tp", "tp"),
        "SpecError: P('tp', 'tp') uses mesh axis 'tp' for dim 0 and again for dim 1. Try P('tp',"
        " None).",
    ),
    "axis twice, among others": (
        lambda: P(..., ftp.units("tp", 4), ("dp", "tp"), "dp"),
        "SpecError: P(..., units('tp', 4), ('dp', 'tp'), 'dp') uses mesh axis 'tp' for dim 1 and"
        " again for dim 2."
        " Try P(..., units('tp', 4), 'dp', None).",
    ),
    "axis twice in one dim": (
        lambda: P(("tp", "tp")),
        "SpecError: P(('tp', 'tp')) uses mesh axis 'tp' for dim 0 and again for dim 0. Try"
        " P('tp').",
    ),
    "axis of no mesh": (
        lambda: ftp.AbstractMesh((2, 2), ("dp", "tp"))["pp"],
        "MeshError: The mesh has no axis 'pp'; its axes are (dp 2, tp 2).",
    ),
    "axes of a mesh in another order": (
        lambda: MESH["tp", "dp"],
        "MeshError: mesh[('tp', 'dp')]: name axes of (dp 2, tp 2) once each, in this order.",
    ),
    "a bool for a rank": (
        lambda: ftp.device_put(PARAMS, MESH, src=True),
        "MeshError: src=True, a bool, is no rank of the mesh (dp 2, tp 2) on cpu, which holds"
        " ranks 0 to 3.",
    ),
    "a float for a rank": (
        lambda: ftp.shard_exported(exported(), MESH, {}, rank=1.0),  # type: ignore[arg-type]
        "MeshError: rank=1.0, a float, is no rank of the mesh (dp 2, tp 2) on cpu, which holds"
        " ranks 0 to 3.",
    ),
    "a bool for a rank of generators": (
        lambda: ftp.random.megatron_compat(0, MESH).generators(rank=True),
        "MeshError: rank=True, a bool, is no rank of the axis, which holds ranks 0 to 1.",
    ),
    "a rank beyond the last": (
        lambda: ftp.shard_exported(exported(), MESH, {}, rank=4),
        "MeshError: rank=4 is no rank of the mesh (dp 2, tp 2) on cpu, which holds ranks 0 to 3.",
    ),
    "spec too long": (
        lambda: step(specs={"w": P(), "b": P(None, "tp")})(PARAMS, X),
        "SpecError: params['b'] has spec P(None, 'tp') of 2 entries, but its shape (6,) has 1"
        " dims. Give at most 1 entry.",
    ),
    "key without a spec": (
        lambda: step(specs={"w": P()})(PARAMS, X),
        "SpecError: no spec is given for params['b']. Give one; P() replicates.",
    ),
    "specs for another number of arguments": (
        lambda: step(lambda p, x, y: loss_fn(p, x), batch_specs=(P(), P(), P()))(PARAMS, X, X),
        "SpecError: batch_specs has 3 entries for 2 arguments (x, y). Give one for each, or one P"
        " for all.",
    ),
    "static leaf with a spec": (
        lambda: step(lambda p, x, n: loss_fn(p, x) * n, batch_specs=(P(), P("dp")))(PARAMS, X, 3),
        "SpecError: n has spec P('dp'), but is 3, an int; only a tensor can be cut. Give P().",
    ),
    "static result with a spec": (
        lambda: ftp.spmd(lambda x: (x, 3), MESH, P(), (P(), P("tp")))(X),
        "SpecError: the result[1] has spec P('tp'), but is 3, an int; only a tensor can be cut."
        " Give P().",
    ),
    "result's spec": (
        lambda: ftp.spmd(lambda x: {"y": x}, MESH, P(), P("pp"))(X),
        "SpecError: the result['y'] has spec P('pp'), but the mesh has no axis 'pp'; its axes are"
        " 'dp' (size 2), 'tp' (size 2).",
    ),
    "data axes as text": (
        lambda: step(data_axes="dp"),
        "SpecError: data_axes is 'dp'; give a tuple: ('dp',).",
    ),
    "an array with a spec": (
        lambda: ftp.device_put({"w": np.ones((4, 2))}, MESH, P("dp")),
        "SpecError: tree['w'] has spec P('dp'), but is a numpy array of shape (4, 2); only a tensor"
        " can be cut. Give torch.from_numpy(array).",
    ),
    "data axes": (
        lambda: step(data_axes=("pp",)),
        "SpecError: data_axes names 'pp', but the mesh has axes 'dp', 'tp'.",
    ),
    "donate, not positions": (
        lambda: step(donate=0),
        "InputError: donate is 0; give positions of arguments, as (0,).",
    ),
    "donate, a name": (
        lambda: step(donate="params"),
        "InputError: donate is 'params'; give positions of arguments, as (0,).",
    ),
    "patterns, not a dict": (
        lambda: ftp.functionalize(torch.nn.Linear(2, 2), remat=("layers.*",)),
        "SpecError: ('layers.*',) is no dict of patterns for the modules, as {'layers.*': ...}.",
    ),
    "pattern that matches nothing": (
        lambda: ftp.plan(PARAMS, {"head.*": P("tp")}),
        "SpecError: pattern 'head.*' matches no path of params; the nearest are 'w', 'b'.",
    ),
    "patterns that disagree": (
        lambda: ftp.plan(PARAMS, {"[wv]": P("tp"), "[wu]": P()}),
        "SpecError: patterns '[wv]' and '[wu]' disagree for params['w']: P('tp') and P(). Give both"
        " the same value, or narrow one.",
    ),
    "no mesh": (
        lambda: ftp.shard(loss_fn),
        "MeshError: No mesh is given. Pass one, as ftp.make_mesh((2, 4), ('dp', 'tp')), or call"
        " inside `with ftp.use_mesh(mesh):`.",
    ),
    "abstract mesh": (
        lambda: ftp.shard(loss_fn, ftp.AbstractMesh((4,), ("tp",)))(PARAMS, X),
        "MeshError: The mesh (tp 4) on cpu is abstract: it plans programs and runs none. Read the"
        " program with step.lower(...), or make the"
        " step on ftp.make_mesh(...) or ftp.simulated_mesh(...).",
    ),
    "unexpected keyword": (
        lambda: step()(PARAMS, x=X),
        "InputError: The step does not take the keyword 'x'; its arguments are positional. Call"
        " step(params, x).",
    ),
    "a keyword that the loss does not take": (
        lambda: step()(PARAMS, X, foo=1),
        "InputError: The step takes no argument 'foo': loss_fn takes (params, x), by position."
        " Call step(params, x).",
    ),
    "an argument twice": (
        lambda: step()(PARAMS, X, x=X),
        "InputError: The step takes no argument 'x': loss_fn takes (params, x), by position, and"
        " 'x' was given already. Call"
        " step(params, x).",
    ),
    "a keyword that the loss takes by name alone": (
        lambda: step(scaled_loss)(PARAMS, X, scale=2.0),
        "InputError: The step takes no keyword 'scale', though scaled_loss does: its arguments are"
        " positional, (params, x). Make the step"
        " of functools.partial(scaled_loss, scale=...).",
    ),
    "no batch": (
        lambda: step()(PARAMS, None),
        f"InputError: x is None, and the function raises a TypeError at {LINE}: unsupported"
        " operand type(s) for @: 'NoneType' and"
        " 'Tensor'. If None is why: Give a tensor, or let the function ask whether it is None.",
    ),
    "too few arguments": (
        lambda: step()(PARAMS),
        "InputError: loss_fn(params, x) does not take the 1 arguments of the step, (params):"
        " missing a required argument: 'x'.",
    ),
    "too many arguments": (
        lambda: step()(PARAMS, X, X),
        "InputError: loss_fn(params, x) does not take the 3 arguments of the step, (params, x,"
        " args[2]): too many positional arguments.",
    ),
    "integer leaf": (
        lambda: step()(PARAMS | {"n": torch.arange(3)}, X),
        "InputError: params['n'] is torch.int64: it has no gradient. Make it a buffer or a batch"
        " argument, or a floating-point tensor.",
    ),
    "string leaf": (
        lambda: step()(PARAMS | {"n": "adam"}, X),
        "InputError: params['n'] is 'adam', a str: it has no gradient. Close over it, or pass it"
        " as a batch argument.",
    ),
    "numpy leaf": (
        lambda: step()(PARAMS, X.numpy()),
        "InputError: x is a numpy array of shape (5, 4). Give a tensor: torch.from_numpy(array).",
    ),
    "meta leaf": (
        lambda: step()({"w": PARAMS["w"], "b": torch.empty(6, device="meta")}, X),
        "InputError: params['b'] is on the meta device and has no values. step.lower takes it; to"
        " run the step, load real ones.",
    ),
    "function": (
        lambda: ftp.shard(3, MESH),  # pyright: ignore[reportArgumentType]
        "InputError: loss_fn is 3, an int; give a pure function (params, *batch) -> scalar.",
    ),
}


@pytest.mark.parametrize("case", IN_FULL)
def test_message_in_full(case):
    call, expected = IN_FULL[case]
    assert message(call) == expected


def test_a_none_that_the_function_asks_for_is_fine():
    masked = step(lambda p, x, mask: loss_fn(p, x if mask is None else x * mask))
    torch.testing.assert_close(masked(PARAMS, X, None)[0], loss_fn(PARAMS, X))
    found = message(step(lambda p, b, other: b["x"].sum()), PARAMS, {"x": None}, None)
    assert found.startswith(
        "InputError: b['x'] and other are None, which the function uses as something else at"
        " tests/api/test_errors.py:"
    )


@pytest.mark.parametrize("make", [ftp.simulated_mesh, ftp.AbstractMesh])
def test_some_axes_of_a_mesh(make):
    mesh = make((2, 3, 4), ("dp", "cp", "tp"), device_type="cpu")
    assert mesh["tp"] == make((4,), ("tp",), device_type="cpu") and type(mesh["tp"]) is type(mesh)
    assert mesh["dp", "tp"] == make((2, 4), ("dp", "tp"), device_type="cpu")
    assert mesh["dp", "cp", "tp"] == mesh


def test_an_unsupported_device_type_comes_with_the_supported_ones():
    for make in (ftp.simulated_mesh, ftp.make_mesh, ftp.AbstractMesh):
        text = message(make, (2,), ("tp",), device_type="xla")
        assert "device type 'xla' is not supported. Supported are 'cpu', 'cuda'" in text


def test_every_wrong_leaf_is_reported_at_once():
    text = message(step(specs=P(None, None, "pp")), PARAMS, X)
    assert text.count("params['b']") == text.count("params['w']") == 2


# What a function does.


def uses_float(p, x):
    return loss_fn(p, x) * float(x.sum())


def repeats(p, x):
    return loss_fn(p, x) * len(range(int(x.sum())))


def asks_numpy(p, x):
    return loss_fn(p, x) * float(x.numpy().sum())


def asks_list(p, x):
    return loss_fn(p, x) * x.repeat(x[0].long().tolist()).sum()


@pytest.mark.parametrize("loss", [uses_float, repeats, asks_numpy, asks_list])
def test_a_value_that_is_not_there_is_an_error_with_the_line(loss):
    text = message(step(loss, strict=True), PARAMS, X)
    line = {
        uses_float: "float(x.sum())",
        repeats: "int(x.sum())",
        asks_numpy: "x.numpy()",
        asks_list: "tolist()",
    }[loss]
    assert text.startswith(
        "TraceError: The function needs a tensor's value (if, while, bool(), float(), int(),"
        " .item(), .tolist(), .numpy())"
    )
    assert "test_errors.py:" in text and line in text and "torch.where" in text


def finds(p, x):
    return x.argmax(-1).bincount().sum() * p["w"].sum()


def test_a_shape_that_depends_on_values_is_an_error_with_the_line():
    text = message(step(finds, strict=True), PARAMS, X)
    assert text.startswith(
        "TraceError: aten.bincount.default gives a shape that depends on values at "
    )
    assert "test_errors.py:" in text and "torch.where(mask, x, 0)" in text


def writes_a_batch(p, x):
    x += 1
    return loss_fn(p, x)


def writes_a_view(p, x):
    x[0].zero_()
    return loss_fn(p, x)


def writes_a_parameter(p, x):
    p["w"].mul_(2)
    return loss_fn(p, x)


@pytest.mark.parametrize("loss", [writes_a_batch, writes_a_view, writes_a_parameter])
def test_inputs_are_never_written(loss):
    params, x = fresh(), X.clone()
    text = message(step(loss), params, x)
    assert (
        text.startswith("TraceError: ")
        and "in place" in text
        and "test_errors.py:" in text
        and "x = x.clone()" in text
    )
    assert loss is writes_a_parameter or "x is changed in place at" in text
    assert torch.equal(x, X) and torch.equal(params["w"], PARAMS["w"])


def test_captured_tensors_are_never_written():
    captured = torch.zeros(4)
    for make in (step, lambda fn: ftp.spmd(lambda x: fn(PARAMS, x), MESH)):
        message(
            make(lambda p, x: (captured.add_(1), loss_fn(p, x))[1]),
            *((PARAMS, X) if make is step else (X,)),
        )
    assert not captured.any()


def test_a_copy_may_be_written():
    def doubles(p, x):
        x = x.clone()
        x *= 2
        return loss_fn(p, x)

    torch.testing.assert_close(
        step(doubles, SPECS, batch_specs=P("dp"))(PARAMS, X)[0], loss_fn(PARAMS, 2 * X)
    )


NO_LOSS = {
    "of shape (5, 6)": (lambda p, x: x @ p["w"], {}),
    "a tuple of 2": (lambda p, x: (loss_fn(p, x), x), {}),
    "not a Tensor": (loss_fn, {"has_aux": True}),
    "a dict": (lambda p, x: {"loss": loss_fn(p, x)}, {}),
    "a NoneType": (lambda p, x: None, {}),
    "torch.int64": (lambda p, x: x.argmax(), {}),
    "torch.complex64": (lambda p, x: loss_fn(p, x) * 1j, {}),
}


@pytest.mark.parametrize("what", NO_LOSS)
def test_what_is_no_loss(what):
    loss, options = NO_LOSS[what]
    text = message(step(loss, **options), PARAMS, X)
    assert text.startswith("InputError: ") and what in text and "test_errors.py:" in text
    assert ("has_aux=True" in text) == ("tuple" in what or what == "not a Tensor")


def test_random_ops_would_differ_from_rank_to_rank():
    for loss in (
        lambda p, x: loss_fn(p, F.dropout(x, 0.5)),
        lambda p, x: loss_fn(p, x + torch.randn(5, 4)),
    ):
        text = message(step(loss), PARAMS, X)
        assert (
            "draws random numbers at " in text
            and "test_errors.py:" in text
            and "model.eval()" in text
        )
    torch.testing.assert_close(
        step(lambda p, x: loss_fn(p, F.dropout(x, 0.5, training=False)))(PARAMS, X)[0],
        loss_fn(PARAMS, X),
    )


UNTRACEABLE = {
    "calls requires_grad_()": (
        lambda p, x: torch.func.grad(lambda x: loss_fn(p, x.clone().requires_grad_()))(x).sum(),
        "torch.func.grad",
    ),
    "saved tensor hooks": (
        lambda p, x: torch.func.grad(
            lambda x: torch.utils.checkpoint.checkpoint(loss_fn, p, x, use_reentrant=False)
        )(x).sum(),
        "Recompute a block with ftp.remat(block)(*args)",
    ),
    "makes a tensor of layout sparse_coo": (
        lambda p, x: loss_fn(p, x.to_sparse().to_dense()),
        "Keep tensors strided",
    ),
}


@pytest.mark.parametrize("what", UNTRACEABLE)
def test_what_cannot_be_traced_says_what_to_write(what):
    loss, advice = UNTRACEABLE[what]
    text = message(step(loss), PARAMS, X, kind=ftp.errors.TraceError)
    assert what in text and advice in text and "test_errors.py:" in text


def test_a_tensor_that_an_earlier_trace_left_behind():
    kept = []

    def keeps(p, x):
        kept.append(x @ p["w"])
        kept.append(x * 2)
        return kept[-2].sum()

    step(keeps)(PARAMS, X)
    for tensor in kept[:2]:
        for call in (
            lambda t=tensor: step(lambda p, x: t.sum() * p["w"].sum())(PARAMS, X),
            lambda t=tensor: ftp.spmd(lambda x: x.sum() + t, MESH)(X),
        ):
            text = message(call)
            assert (
                text.startswith("TraceError: ")
                and "an earlier trace left behind" in text
                and "has_aux=True" in text
            )
        assert "x belongs to a trace" in message(
            ftp.spmd(lambda x: x + 1, MESH), tensor, kind=ftp.errors.InputError
        )


DTYPES = {
    "mm": lambda p, x: (x.bfloat16() @ p["w"]).sum(),
    "bmm": lambda p, x: (x[None].bfloat16() @ p["w"][None]).sum(),
    "linear": lambda p, x: F.linear(x.double(), p["w"].T, p["b"]).sum(),
    "bias": lambda p, x: F.linear(x, p["w"].T, p["b"].double()).sum(),
    "convolution": lambda p, x: F.conv1d(
        x[None].double(), p["w"].T[:, None, :1].expand(6, 5, 1)
    ).sum(),
    "layer norm": lambda p, x: F.layer_norm(x.double(), (4,), p["w"][:, 0], p["w"][:, 1]).sum(),
    "attention": lambda p, x: F.scaled_dot_product_attention(
        x[None, None], x[None, None].double(), x[None, None].double()
    ).sum(),
    "scatter": lambda p, x: x.scatter(1, torch.zeros(5, 1).long(), p["w"][:1].double()).sum(),
    "embedding": lambda p, x: F.embedding(x, p["w"]).sum(),
}


@pytest.mark.parametrize("op", DTYPES)
def test_dtypes_that_torch_would_refuse(op):
    with pytest.raises((RuntimeError, TypeError)):
        DTYPES[op](PARAMS, X)
    text = message(step(DTYPES[op]), PARAMS, X, kind=ftp.errors.TraceError)
    assert "dtypes" in text and "test_errors.py:" in text and ".to(dtype)" in text


def test_dtypes_that_torch_promotes_are_fine():
    loss = step(lambda p, x: loss_fn(p, x).double() + x.bfloat16().sum(), SPECS)(PARAMS, X)[0]
    assert loss.dtype == torch.float64


# Containers and leaves.


class Box:
    def __init__(self, w):
        self.w = w


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


@pytest.mark.parametrize(
    "make", [Box, Slots, lambda w: frozenset([w]), lambda w: Box({"deep": [w]})]
)
def test_a_container_that_is_not_registered_is_never_baked_in(make):
    text = message(step(lambda p, box: p["w"].sum()), PARAMS, make(X), kind=ftp.errors.InputError)
    assert (
        text.startswith("InputError: box is a")
        and "which optree does not know" in text
        and "Register" in text
    )
    message(step(lambda p, x: p.w.sum()), make(X), X)


def test_a_result_in_a_container_that_is_not_registered():
    text = message(ftp.spmd(lambda x: {"out": Box(x)}, MESH), X)
    assert "the result['out'] is a Box, which optree does not know" in text


def _generator(x):
    yield x


async def _async_generator(x):
    yield x


def test_results_that_are_computed_after_the_trace():
    def closed(x):
        y = x + 1
        return {"later": lambda: y.sum()}

    made = (
        _generator,
        _async_generator,
        lambda x: zip(x, x, strict=True),
        lambda x: {1: x}.values(),
    )
    for fn in made:
        assert "gives its items after the trace" in message(ftp.spmd(fn, MESH), X)
    for fn in (closed, lambda x: (x * 2).sum, lambda x: functools.partial(torch.add, x * 2)):
        assert "that holds tensors of the trace" in message(ftp.spmd(fn, MESH), X)
    assert ftp.spmd(lambda x: (x, torch.tanh), MESH)(X)[1] is torch.tanh


def test_arguments_that_give_their_items_once():
    assert "batch is a list_iterator" in message(
        step(lambda p, batch: next(batch) @ p["w"]), PARAMS, iter([X])
    )


def test_modules_and_sets_are_no_arguments():
    linear = torch.nn.Linear(4, 6)
    assert (
        "params is a module, Linear. Give its parameters: fn, params = ftp.functionalize(module)."
        in message(step(), linear, X)
    )
    assert "loss_fn is a module, Linear" in message(ftp.shard, linear, MESH)
    assert (
        "neither a tensor, nor a container that optree knows, nor a hashable static value"
        in message(step(), PARAMS, {1, 2})
    )
    assert "torch.from_numpy" in message(step(), {"w": np.ones((4, 6)), "b": PARAMS["b"]}, X)
    assert "sparse matrices in COO or CSR" in message(step(), PARAMS, X[None].to_sparse())


def test_a_registered_container_is_seen_through():
    @optree.dataclasses.dataclass(namespace="ftp")  # pyright: ignore[reportPrivateImportUsage]
    class Params:
        w: torch.Tensor
        b: torch.Tensor

    sharded = step(lambda p, x: loss_fn({"w": p.w, "b": p.b}, x), Params(SPECS["w"], SPECS["b"]))
    for params in (Params(**PARAMS), Params(**{k: 2 * v for k, v in PARAMS.items()})):
        loss, grads = sharded(params, X)
        assert isinstance(grads, Params)
        torch.testing.assert_close(loss, loss_fn({"w": params.w, "b": params.b}, X))


def test_a_step_is_copied_as_functions_are_and_not_pickled():
    sharded = step()
    held = copy.deepcopy({"step": sharded, "n": [1]})
    assert held["step"] is copy.copy(sharded) is sharded
    assert message(pickle.dumps, sharded, kind=TypeError) == (
        "TypeError: A step cannot be pickled: its programs are of this process' mesh. Give a"
        " process that you start the function and the specs, and call ftp.shard or ftp.spmd there."
    )


# Placement and donation.


def test_a_tensor_that_is_placed_otherwise():
    placed = ftp.device_put(PARAMS, MESH, {"w": P("tp"), "b": P("tp")})
    assert message(step(specs=SPECS), placed, X) == (
        "PlacementError: params['w'] is placed with spec P('tp'), but P(None, 'tp') is asked for."
        " Reshard it with ftp.reshard(tree, mesh, P('tp'), P(None, 'tp'))."
    )
    other = ftp.simulated_mesh((4,), ("tp",))
    assert message(ftp.shard(lambda p, x: p.sum(), other), placed["b"], X) == (
        "PlacementError: params is placed on the simulated mesh (dp 2, tp 2) on cpu, not on the"
        " simulated mesh (tp 4) on cpu."
        " Take it off with ftp.device_get and place it with ftp.device_put."
    )
    assert "ftp.reshard" in message(ftp.device_put, placed, MESH, P())
    params, x = ftp.device_put(PARAMS, MESH, SPECS), ftp.device_put(X, MESH, P("dp"))
    for specs, of_batch in ((P("model"), P("dp")), (SPECS, P("model"))):
        said = message(step(specs=specs, batch_specs=of_batch), params, x)
        assert said.startswith("SpecError: ") and "the mesh has no axis 'model'" in said
    assert "has no axis 'model'" in message(ftp.reshard, placed, MESH, P("tp"), P("model"))
    moved = ftp.reshard(placed, MESH, P("tp"), SPECS)
    torch.testing.assert_close(step(specs=SPECS)(moved, X)[0], loss_fn(PARAMS, X))


def test_a_program_that_is_known_checks_placements_again():
    sharded = step(specs=SPECS, batch_specs=P("dp"))
    for params in (PARAMS, ftp.device_put(PARAMS, MESH, SPECS), fresh()):
        loss, grads = sharded(params, X)
    assert "P() is asked for" in message(step(), grads, X)
    assert "params['w'] is placed with spec P('tp')" in message(
        sharded, ftp.device_put(PARAMS, MESH, {"w": P("tp"), "b": P("tp")}), X
    )
    torch.testing.assert_close(sharded(PARAMS, X)[0], loss)


def test_donated_tensors_are_not_used_again():
    update = ftp.spmd(
        lambda p, x: {k: v + x.sum() for k, v in p.items()}, MESH, (SPECS, P()), SPECS, donate=(0,)
    )
    params = fresh()
    new = update(params, X)
    expected = (
        "DonationError: params['b'] was donated, as p of an earlier call, which may have reused"
        " its memory."
        " Use what that call returned, or do not donate it."
        "\nparams['w'] was donated, as p of an earlier call, which may have reused its memory."
        " Use what that call returned, or do not donate it."
    )
    assert message(step(specs=SPECS), params, X) == expected
    for call in (
        lambda: update(params, X),
        lambda: ftp.device_get(params, MESH, SPECS),
        lambda: ftp.device_put(params, MESH, SPECS),
        lambda: ftp.reshard(params, MESH, SPECS, P()),
        lambda: step(specs=SPECS).lower(params, X),
    ):
        assert "donated" in message(call, kind=ftp.errors.DonationError)
    update(update(new, X), X)


def test_one_tensor_donated_twice():
    both = ftp.spmd(lambda x, y: (x + 1, y + 1), MESH, donate=(0, 1))
    both(torch.ones(3), torch.ones(3))
    x = torch.ones(3)
    expected = (
        "DonationError: x and y are the same tensor. It is donated, and its memory would be reused"
        " twice. Clone one of them."
    )
    assert message(both, x, x) == expected
    assert message(ftp.spmd(lambda x, y: (x + 1, y + 1), MESH, donate=(1,)), x, x) == expected
    assert "donate names argument 2, but the step is called with 2 arguments" in message(
        ftp.spmd(lambda x, y: x, MESH, donate=(2,)), x, x
    )
    both(x, x.clone())


def test_a_donated_tensor_shares_memory():
    """Its memory was written to, and the other tensor read what was written."""
    step = ftp.spmd(lambda p, x: {k: v * 2 + x.sum() for k, v in p.items()}, MESH, donate=(0,))
    w, x = torch.ones(6), torch.ones(3)
    expected = (
        "DonationError: p['a'] and p['b'] share memory. It is donated, and its memory would be"
        " reused twice. Clone one of them."
    )
    assert message(step, {"a": w, "b": w.detach()}, x) == expected
    assert message(step, {"a": w, "b": w[5:]}, x) == expected
    assert message(step, {"a": w[::2], "b": w[1:]}, x) == expected
    assert message(step, {"a": w}, w.view(2, 3)) == expected.replace("p['b']", "x")
    for params in ({"a": w[:3], "b": w[3:]}, {"a": w[::2]}, {"a": w.detach(), "b": w[:0]}):
        step(params, torch.ones(3).expand(2, 3))


def test_a_donated_tensor_is_captured_too():
    """On one rank, whose program wrote to the tensor that the function captures."""
    w, x = torch.arange(4.0), torch.ones(4)
    mesh = ftp.simulated_mesh(1, "tp")
    step = ftp.spmd(lambda p, x: ({"w": p["w"] * 2}, x + w[1:].sum()), mesh, donate=(0,))
    expected = (
        "DonationError: p['w'] shares memory with a tensor of shape (4,) that the function"
        " captures. It is donated, and the program reads the other at each call. Clone one of them."
    )
    assert message(step, {"w": w}, x) == expected
    params, found = step({"w": w.clone()}, x)
    assert torch.equal(step(params, x)[1], found)
    assert message(step, {"w": w}, x) == expected
    assert torch.equal(w, torch.arange(4.0))


def test_a_donated_tensor_that_passes_through_may_be_donated_again():
    same = ftp.spmd(lambda p: p, MESH, SPECS, SPECS, donate=(0,))
    params = fresh()
    torch.testing.assert_close(same(same(params)), PARAMS)
    message(same, params)


def test_what_is_known_of_a_tensor_dies_with_it():
    from ftp.tensors import placement

    before = len(placement._known)
    for _ in range(3):
        step(specs=SPECS)(fresh(), held())
    gc.collect()
    assert len(placement._known) <= before


# What make_fx gets silently wrong.


def test_one_tensor_as_two_leaves_is_two_inputs():
    add = ftp.spmd(lambda x, y: x + 2 * y, MESH)
    x = torch.ones(3)
    add(x, x)
    torch.testing.assert_close(add(x, 2 * x), 5 * x)
    product = ftp.shard(
        lambda p, x: (x @ p["a"] @ p["b"]).sum(), MESH, {"a": P(None, "tp"), "b": P("tp")}
    )
    w = torch.randn(4, 4)
    _, grads = product({"a": w, "b": w}, X)
    expected = torch.func.grad(lambda p, x: (x @ p["a"] @ p["b"]).sum())({"a": w, "b": w}, X)
    torch.testing.assert_close(grads, expected)


def test_another_shape_dtype_or_static_value_is_another_program():
    sharded = step(
        lambda p, x, n, mode: loss_fn(p, x) * n if mode == "scaled" else loss_fn(p, x),
        SPECS,
        batch_specs=(P("dp"), P(), P()),
    )
    double = {k: v.double() for k, v in PARAMS.items()}
    for args in [
        (PARAMS, X, 2, "scaled"),
        (PARAMS, X[:3], 2, "scaled"),
        (double, X.double(), 2.5, "scaled"),
        (PARAMS, X, True, "plain"),
    ]:
        expected = loss_fn(args[0], args[1]) * (args[2] if args[3] == "scaled" else 1)
        torch.testing.assert_close(sharded(*args)[0], expected)


def test_defaults_and_extra_arguments():
    def loss(p, x, scale=2.0, *more):
        return loss_fn(p, x) * scale + sum(m.sum() for m in more)

    torch.testing.assert_close(step(loss)(PARAMS, X)[0], 2 * loss_fn(PARAMS, X))
    torch.testing.assert_close(
        step(loss, batch_specs=(P("dp"), P(), P("dp")))(PARAMS, X, 3.0, X)[0],
        3 * loss_fn(PARAMS, X) + X.sum(),
    )


def test_results_share_no_memory_with_arguments_or_each_other():
    out = ftp.spmd(
        lambda x: (x, x.view(-1), x[0], x, torch.zeros_like(x), torch.zeros_like(x)), MESH
    )(X)
    assert len({t.untyped_storage().data_ptr() for t in (X, *out)}) == 7
    _, grads = step(lambda p, x: p["w"].sum())(PARAMS, X)
    grads["w"].mul_(2)
    torch.testing.assert_close(grads["w"], torch.full((4, 6), 2.0))


@pytest.mark.parametrize("spec", [P(), P("dp")], ids=str)
def test_other_views_and_per_rank_code_share_no_memory(spec: P):
    def kept(x):
        """Per-rank code that returns its operand, a view of it, and one value twice."""
        return ftp.local(
            lambda x: (x, x.view(-1), *(2 * x,) * 2), in_specs=(spec,), out_specs=(spec,) * 4
        )(x)

    mesh, x = ftp.simulated_mesh((1,), ("dp",)), torch.randn(4, 6)
    found = ftp.spmd(lambda x: (x.diagonal(), x.unfold(1, 3, 1), *kept(x)), mesh, spec)(x)
    expected = (x.diagonal(), x.unfold(1, 3, 1), x, x.view(-1), 2 * x, 2 * x)
    torch.testing.assert_close(found, expected)
    assert len({t.untyped_storage().data_ptr() for t in (x, *found)}) == 7
    assert found[1].is_contiguous()


# What must just work.


def test_parameters_that_require_a_gradient_are_values():
    params = {k: torch.nn.Parameter(v.clone()) for k, v in PARAMS.items()}
    loss, grads = step(specs=SPECS, batch_specs=P("dp"))(params, X)
    assert (
        not loss.requires_grad
        and not grads["w"].requires_grad
        and all(p.grad is None for p in params.values())
    )
    assert not ftp.spmd(lambda p: p, MESH, SPECS)(params)["w"].requires_grad


@pytest.mark.parametrize(
    "loss", [lambda p, x: (x @ p["w"]).sum(), lambda p, x: x.sum(), lambda p, x: torch.tensor(3.0)]
)
def test_parameters_that_the_loss_does_not_see_have_zero_gradients(loss):
    value, grads = step(loss, SPECS, batch_specs=P("dp"))(PARAMS, X)
    torch.testing.assert_close(value, loss(PARAMS, X))
    assert grads["b"].shape == (6,) and not grads["b"].any()


@pytest.mark.parametrize("params", [{}, None, [], {"a": None}])
def test_trees_without_parameters(params):
    assert step(lambda p, x: x.sum(), batch_specs=P("dp"))(params, X)[1] == params


def test_aux_is_replicated_and_keeps_its_static_leaves():
    loss = step(
        lambda p, x: (loss_fn(p, x), {"h": x @ p["w"], "n": 3, "no": None}),
        SPECS,
        batch_specs=P("dp"),
        has_aux=True,
    )
    (value, aux), _ = loss(PARAMS, X)
    torch.testing.assert_close((value, aux["h"]), (loss_fn(PARAMS, X), X @ PARAMS["w"]))
    assert aux["n"] == 3 and aux["no"] is None
    assert loss.lower(PARAMS, X).out_specs[0][1]["h"] == P()


@pytest.mark.parametrize("specs", [{"x": P("dp"), "y": P()}, ({"x": P("dp"), "y": P()},), P()])
def test_specs_of_one_batch_argument(specs):
    loss = step(lambda p, b: loss_fn(p, b["x"]) * b["y"].mean(), SPECS, batch_specs=specs)
    torch.testing.assert_close(loss(PARAMS, {"x": X, "y": torch.ones(3)})[0], loss_fn(PARAMS, X))


def test_strided_and_inference_tensors():
    flat = ftp.spmd(lambda x: x.view(-1) * 2, MESH)
    with torch.inference_mode():
        made = X + 0
    for x in (X, X.T.contiguous().T, made, X[:1].expand(5, 4)):
        torch.testing.assert_close(flat(x), x.reshape(-1) * 2)


def test_a_training_loop_plans_once():
    sharded = step(specs=SPECS, batch_specs=P("dp"))
    params = ftp.device_put(PARAMS, MESH, SPECS)
    for _ in range(3):
        _, grads = sharded(params, X)
        params = {k: params[k] - 0.1 * grads[k] for k in params}
    assert len({id(planned) for planned in sharded._cache.programs.values()}) == 1


@pytest.mark.parametrize("cut", [P(), P("tp"), P(None, "tp")])
def test_ids_out_of_range(cut: P):
    """With the vocabulary cut no kernel sees them; as given, and reshaped on the way."""
    mesh, hidden = ftp.simulated_mesh((2,), ("tp",)), torch.randn(3, 11)

    def embed(p, ids):
        return (
            torch.nn.functional.embedding(ids.reshape(-1), p["w"]).sum()
            + p["w"].index_select(0, ids).sum()
        )

    def classify(p, labels):
        return torch.nn.functional.cross_entropy(hidden @ p["w"], labels)

    params = {"w": torch.randn(11, 11)}
    for loss, good, bad, name, value in (
        (embed, [0, 10], [0, -1], "ids", -1),
        (embed, [3, 3], [3, 11], "ids", 11),
        (classify, [0, -100, 10], [0, -100, 12], "labels", 12),
    ):
        step = ftp.shard(loss, mesh, {"w": cut}, check_inputs=True)
        torch.testing.assert_close(
            step(params, torch.tensor(good))[0], loss(params, torch.tensor(good))
        )
        with pytest.raises(
            ftp.errors.InputError,
            match=rf"{name} holds {value}, which is not in \[0, 11\), where it indexes at"
            r" .*_errors",
        ):
            step(params, torch.tensor(bad))


def test_selected_ids_out_of_range():
    """Ids that reach the index by ops which select or rearrange them, and those which do not."""
    mesh, table = ftp.simulated_mesh((2,), ("tp",)), torch.arange(21.0).view(7, 3)

    def shifted(w, ids):  # the last label is ignored, as a language model's is
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        logits = torch.nn.functional.embedding(ids[:, :-1], w) @ w.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    def padded(w, ids):
        return w[torch.nn.functional.pad(ids[0].flip(0), (1, 0), value=6)].sum()

    def joined(w, ids):
        first, _ = ids.unbind(0)
        rows = torch.stack([first, torch.zeros_like(first)]).to(torch.int64)
        return w[torch.cat([rows, rows.tril()], 1)].sum()

    def hot(w, ids):
        return (torch.nn.functional.one_hot(ids[:, ::2], 7).to(w.dtype) @ w).sum()

    def compared(w, ids):  # a comparison of the user's, which takes any id
        return ((ids[..., None] == torch.arange(7)).to(torch.int64).to(w.dtype) @ w).sum()

    def computed(w, ids):
        return torch.nn.functional.embedding(ids % 7, w).sum()

    def chosen(w, ids):
        return w.mT[:2][torch.arange(2), ids[:, 1]].sum()

    everywhere = {(row, column) for row in range(2) for column in range(4)}
    first_row = {(0, column) for column in range(4)}
    for fn, reached in (
        (shifted, everywhere),
        (padded, first_row),
        (joined, first_row),
        (chosen, {(0, 1), (1, 1)}),
        (hot, {(row, column) for row in range(2) for column in (0, 2)}),
        (compared, set()),
        (computed, set()),
    ):
        step = ftp.spmd(fn, mesh, (P("tp"), P()), P(), check_inputs=True)
        good = torch.tensor([[6, 0, 3, 1], [2, 2, 5, 6]])
        torch.testing.assert_close(step(table, good), fn(table, good))
        for place in everywhere:
            bad = good.clone()
            bad[place] = 7
            if place in reached:
                said = r"ids holds 7, which is not in \[-?[07], 7\), where it indexes at .*_errors"
                with pytest.raises(ftp.errors.InputError, match=said):
                    step(table, bad)
            else:
                step(table, bad)
        good[:, 1] -= 7
        if fn is chosen:  # counted from the end
            torch.testing.assert_close(step(table, good), fn(table, good))


def test_ids_are_followed_once_per_program(monkeypatch):
    from ftp.runtime import program

    walks, walk = [], program.index_bounds
    monkeypatch.setattr(program, "index_bounds", lambda graph: walks.append(1) or walk(graph))
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(lambda w, ids: w[ids], mesh, (P("tp"), P()), P(), check_inputs=True)
    for _ in range(3):
        step(torch.ones(4, 2), torch.tensor([0, 3]))
    assert len(walks) == 1
