"""Nothing is resharded that need not be: exact collectives of programs that once sent more."""

import math

import pytest
import torch
from few_or_many import slow_after
from plan_reshards import unbucketed

import ftp
from ftp import P
from ftp.planning import reachable_cuts, strategies
from ftp.planning.reachable_cuts import Cut
from ftp.rules.op_kinds import is_matmul


def ops(lowered):
    return [c.op for c in unbucketed(lowered).collectives]


def test_a_loss_that_is_not_returned_is_not_reduced():
    def grad(w, x):
        return torch.func.grad(lambda w: (x @ w).square().sum())(w)

    w, x = torch.randn(6, 8, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    cut = P(None, "tp")
    step = ftp.spmd(grad, ftp.simulated_mesh((2,), ("tp",)), (cut, P()), cut)
    assert ops(step.lower(w, x)) == []
    torch.testing.assert_close(step(w, x), grad(w, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("source", "width"),
    [((2, 3), 3), ((4, 3), 3), ((2, 5), 3), ((2, 3), 4)],
    ids=["every value is added", "not every row", "not every column", "beside empty columns"],
)
def test_a_sum_of_scattered_values_is_that_of_the_values_where_all_are_added(source, width):
    """Its proof takes both for equal too; the softmax has a decomposition, which runs the pass."""
    index = torch.tensor([[0, 1, 2], [1, 0, 3]])

    def fn(source, y):
        onto = torch.zeros(5, width, dtype=torch.float64)
        return onto.scatter_add(0, index, source).sum(0) + torch.log_softmax(y, 0).sum()

    given = torch.randn(source, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(fn, mesh, (P(), P("tp")), P(), certify=True)
    torch.testing.assert_close(step(*given), fn(*given), rtol=1e-12, atol=1e-12)


def test_equal_layers_of_a_sequential_are_planned_as_one():
    def layer():
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).double()

    layers = torch.nn.Sequential(*(layer() for _ in range(12)))
    fn, params = ftp.functionalize(layers)
    mesh, x = ftp.simulated_mesh((2,), ("tp",)), torch.randn(2, 8, dtype=torch.float64)

    def loss(p, x):
        return fn(p, x).square().mean()

    step = ftp.shard(loss, mesh, ftp.plan(params, {"*.0.weight": P("tp")}))
    assert step.lower(params, x).plan.alike == 7  # all but those at both ends
    grads, value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-12, atol=1e-12)


def test_pooling_of_a_permuted_tensor_keeps_the_batch_cut():
    def loss(w, x):
        pooled = torch.nn.functional.adaptive_avg_pool2d((x @ w).permute(0, 3, 1, 2), 1)
        return pooled.flatten(1).square().mean()

    w = torch.randn(8, 8, dtype=torch.float64)
    x = torch.randn(4, 5, 5, 8, dtype=torch.float64)
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P("dp"))
    assert ops(step.lower(w, x)) == ["all_reduce"] * 2
    grad, value = torch.func.grad_and_value(loss)(w, x)
    torch.testing.assert_close(step(w, x), (value, grad), rtol=1e-12, atol=1e-12)


def gathers(lowered):
    return [
        (str(c.dtype)[6:], c.nbytes)
        for c in unbucketed(lowered).collectives
        if c.op == "all_gather"
    ]


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROWS, WIDE = 96, 11  # 11 rows do not divide by 2, nor by 3


def through_bfloat16(p, x):
    return x @ p["w"].to(BF16).to(x.dtype)


def stored_in_bfloat16(p, x):
    return x @ p["w"].to(x.dtype)


def through_fp8(p, x):
    return x @ ((p["w"] / p["s"]).to(FP8).to(x.dtype) * p["s"])


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("layer", "dtype", "expected"),
    [
        (through_bfloat16, torch.float64, [("bfloat16", 2)]),
        (stored_in_bfloat16, BF16, [("bfloat16", 2)]),
        (through_fp8, torch.float64, [("float8_e4m3fn", 1), ("float64", 8)]),
    ],
)
def test_zero3_gathers_weights_where_they_are_narrowest(layer, dtype, expected, n):
    def loss(p, x):
        for name in ("first", "last"):
            x = torch.tanh(layer(p[name], x))
        return x.square().mean()

    torch.manual_seed(0)
    params = {
        name: {
            "w": torch.randn(WIDE, WIDE, dtype=torch.float64).to(dtype),
            "s": torch.rand(WIDE, 1, dtype=torch.float64) + 0.5,
        }
        for name in ("first", "last")
    }
    x = torch.randn(ROWS, WIDE, dtype=torch.float64)
    mesh = ftp.simulated_mesh((n,), ("dp",))
    # Without latency, which decides at this size: gathering codes and scales is two collectives.
    fast = ftp.Hardware(links={"dp": ftp.Link(latency=0.0, bandwidth=1e9)})
    step = ftp.shard(loss, mesh, P("dp"), batch_specs=P("dp"), hardware=fast)
    rows = -(-WIDE // n) * n  # as many on every rank
    sizes = {1: rows * WIDE, 2: 2 * rows * WIDE, 8: 8 * rows}
    assert set(gathers(step.lower(params, x))) == {(name, sizes[size]) for name, size in expected}
    grads, value = torch.func.grad_and_value(loss)(params, x)
    got, got_grads = step(params, x)
    torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2  # sums of bfloat16 gradients
    torch.testing.assert_close(got_grads, grads, rtol=tolerance, atol=tolerance)


def test_codes_of_frozen_weights_are_gathered_not_the_weights():
    """QLoRA: two codes of four bits in a byte, a table of 16 numbers, a scale a block."""

    def loss(p, frozen, table, x):
        codes = frozen["codes"]
        pairs = torch.stack([table[(codes >> 4).int()], table[(codes & 15).int()]], -1)
        w = (pairs.reshape(-1, 16) * frozen["scales"]).reshape(x.shape[-1], -1)
        return (x @ w + x @ p["a"] @ p["b"]).square().mean()

    torch.manual_seed(0)
    params = {
        "a": torch.randn(32, 2, dtype=torch.float64),
        "b": torch.randn(2, 64, dtype=torch.float64),
    }
    frozen = {
        "codes": torch.randint(256, (32 * 32,), dtype=torch.uint8),
        "scales": torch.rand(128, 1, dtype=torch.float64),
    }
    batch = frozen, torch.randn(16, dtype=torch.float64), torch.randn(64, 32, dtype=torch.float64)
    step = ftp.shard(
        loss,
        ftp.simulated_mesh((2,), ("dp",)),
        P("dp"),
        batch_specs=(P("dp"), P(), P("dp")),
        data_axes=("dp",),
    )
    found = set(gathers(step.lower(params, *batch)))
    assert found == {("uint8", 1024), ("float64", 1024), ("float64", 512)}
    grads, value = torch.func.grad_and_value(loss)(params, *batch)
    torch.testing.assert_close(step(params, *batch), (value, grads), rtol=1e-12, atol=1e-12)


def test_figures_of_weights_that_are_widened():
    """8 ranks: 4,194,304 bytes of a float32 weight were gathered."""

    def meta(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def cast(p, x):
        return (x @ p["w"].to(BF16).float()).square().mean()

    mesh, x = ftp.AbstractMesh((8,), ("dp",), device_type="cuda"), meta(8192, 1024)
    step = ftp.shard(cast, mesh, P("dp"), batch_specs=P("dp"), data_axes=("dp",))
    assert gathers(step.lower({"w": meta(1024, 1024)}, x))[:1] == [("bfloat16", 2097152)]

    def lora(p, frozen, scale, x):
        w = frozen.to(BF16) * scale.to(BF16)
        return (x @ w + x @ p["a"] @ p["b"]).float().square().mean()

    adapters = {"a": meta(1024, 16, dtype=BF16), "b": meta(16, 1024, dtype=BF16)}
    frozen = meta(1024, 1024, dtype=torch.int8), meta(1024, 1, dtype=torch.float32)
    step = ftp.shard(lora, mesh, P("dp"), batch_specs=P("dp"), data_axes=("dp",))
    moved = gathers(step.lower(adapters, *frozen, x.to(BF16)))
    assert ("int8", 1048576) in moved and ("bfloat16", 2097152) not in moved


def products_cut(lowered):
    """How many matmuls a rank computes a part of, and how many there are."""
    matmuls = [n for n in lowered.plan.graph.nodes if n.kind == "op" and is_matmul(n.target)]
    return sum(bool(n.cuts) for n in matmuls), len(matmuls)


@pytest.mark.parametrize("n", [2, 3])
def test_tokens_that_are_sliced_in_the_loss_are_cut_again(n):
    """Inputs and targets as slices of one tensor: no matmul was cut under context parallelism."""

    def lm(p, x, y):
        h = torch.nn.functional.embedding(x, p["e"])
        h = h + torch.tanh(h @ p["u"]) @ p["d"]
        logits = h @ p["e"].T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def sliced(p, z):
        return lm(p, z[:, :-1], z[:, 1:])

    torch.manual_seed(0)
    params = {
        name: torch.randn(shape, dtype=torch.float64)
        for name, shape in {"e": (29, 8), "u": (8, 32), "d": (32, 8)}.items()
    }
    z = torch.randint(29, (2, 14))
    step = ftp.shard(sliced, ftp.simulated_mesh((n,), ("cp",)), P(), batch_specs=P(None, "cp"))
    lowered = step.lower(params, z)
    cut, count = products_cut(lowered)
    assert cut == count > 6
    assert gathers(lowered) == [("int64", 8 * 2 * n * -(-14 // n))]  # the tokens, padded
    grads, value = torch.func.grad_and_value(sliced)(params, z)
    torch.testing.assert_close(step(params, z), (value, grads), rtol=1e-12, atol=1e-12)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("n", slow_after(2, [3, 4, 2, 5]))
def test_a_slice_from_0_keeps_chunks_that_start_alike(n):
    """``logits[:, :-1]`` gathered the logits."""

    def lm(p, z):
        h = torch.nn.functional.embedding(z, p["e"])
        logits = (h + torch.tanh(h @ p["u"]) @ p["d"]) @ p["e"].T
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), z[:, 1:].flatten())

    torch.manual_seed(0)
    shapes = {"e": (29, 8), "u": (8, 32), "d": (32, 8)}
    params = {k: torch.randn(shape, dtype=torch.float64) for k, shape in shapes.items()}
    mesh, gradients = ftp.simulated_mesh((n,), ("cp",)), 8 * (29 * 8 + 2 * 8 * 32)
    alike = []
    for length in (n + 2, 2 * n, 3 * n + 1):
        z = torch.randint(29, (2, length))
        step = ftp.shard(lm, mesh, P(), batch_specs=P(None, "cp"), certify=True)
        lowered = step.lower(params, z)
        if -(-length // n) == -(-(length - 1) // n):
            alike.append(length)
            assert [(c.op, c.nbytes) for c in lowered.collectives] == [
                ("all_gather", 8 * 2 * n * -(-length // n)),  # the tokens, for the targets
                ("all_reduce", 16),  # the loss and its count
                ("all_reduce", gradients),
            ]
        grads, value = torch.func.grad_and_value(lm)(params, z)
        torch.testing.assert_close(step(params, z), (value, grads), rtol=1e-12, atol=1e-12)
    assert 2 * n in alike and len(alike) < 3


@pytest.mark.parametrize("n", slow_after(1, [3, 2, 5]))
def test_slices_from_0_and_their_gradients_on_uneven_chunks(n):
    cut, mesh = P(None, "cp"), ftp.simulated_mesh((n,), ("cp",))
    for length in (n + 1, 2 * n, 3 * n - 1):
        x = torch.randn(3, length, 2, dtype=torch.float64)
        for kept in (length - 2, length - 1):

            def sliced(x, kept=kept):
                return x[:, :kept] ** 3

            def gradient(x, kept=kept):
                return torch.func.grad(lambda x: (x[:, :kept] ** 3).sum())(x)

            is_alike = -(-kept // n) == -(-length // n) and math.gcd(kept, length) == 1 < kept
            for fn in (sliced, gradient):
                step = ftp.spmd(fn, mesh, (cut,), cut, certify=True)
                if is_alike:
                    assert not step.lower(x).collectives
                torch.testing.assert_close(step(x), fn(x), rtol=1e-12, atol=1e-12)


def test_a_certificate_refuses_chunks_that_do_not_start_alike(monkeypatch):
    def always(node, cut, n):
        pairs = [pair for pair in node.rule.together if cut.factor in pair]
        return (Cut(pairs[0][0]), Cut(pairs[0][1])) if pairs else None

    for module in (reachable_cuts, strategies):
        monkeypatch.setattr(module, "cut_together", always)
    mesh, cut = ftp.simulated_mesh((2,), ("cp",)), P(None, "cp")
    x = torch.randn(3, 13, dtype=torch.float64)
    step = ftp.spmd(lambda x: x[:, :12].sin(), mesh, (cut,), cut, certify=True)
    with pytest.raises(ftp.errors.CertificateError, match="claimed to be cut along x"):
        step(x)


@pytest.mark.slow
def test_figures_of_tokens_that_are_sliced_in_the_loss():
    """No matmul was cut, and a rank held 4,403 MiB where 965 are due."""
    nn, width, vocab, tokens = torch.nn.functional, 1024, 32000, 4096

    def lm(p, x, y):
        h = nn.embedding(x, p["e"])
        for i in range(2):
            n = nn.rms_norm(h, h.shape[-1:])
            q, k, v = [(n @ p[f"{w}{i}"]).unflatten(-1, (-1, 64)).transpose(1, 2) for w in "qkv"]
            out = nn.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + out.transpose(1, 2).flatten(2) @ p[f"o{i}"]
            h = h + nn.gelu(nn.rms_norm(h, h.shape[-1:]) @ p[f"u{i}"]) @ p[f"d{i}"]
        return nn.cross_entropy((h @ p["h"].T).flatten(0, 1), y.flatten())

    def sliced(p, z):
        return lm(p, z[:, :-1], z[:, 1:])

    shapes = {"e": (vocab, width), "h": (vocab, width)}
    for i in range(2):
        shapes |= {f"{w}{i}": (width, width) for w in "qkvo"}
        shapes |= {f"u{i}": (width, 4 * width), f"d{i}": (4 * width, width)}
    params = {k: torch.empty(s, device="meta") for k, s in shapes.items()}
    x = torch.empty(2, tokens, dtype=torch.int64, device="meta")
    z = torch.empty(2, tokens + 1, dtype=torch.int64, device="meta")
    mesh = ftp.AbstractMesh((8,), ("cp",), device_type="cuda")
    found = {}
    for loss, batch in ((lm, (x, x)), (sliced, (z,))):
        lowered = ftp.shard(loss, mesh, P(), batch_specs=P(None, "cp")).lower(params, *batch)
        cut, count = products_cut(lowered)
        assert cut == count and lowered.work == 1.0
        found[loss] = int(lowered.memory)
    assert found[lm] <= found[sliced] <= found[lm] + z.nbytes < 1000 << 20


def test_batch_norm_under_zero3_moves_weights_and_statistics_alone():
    def loss(p, x):
        x = torch.nn.functional.conv2d(x, p["c"])
        x = torch.nn.functional.batch_norm(x, None, None, p["w"], p["b"], training=True)
        return torch.relu(x).square().mean()

    torch.manual_seed(0)
    params = {
        "c": torch.randn(6, 3, 3, 3, dtype=torch.float64),
        "w": torch.randn(6, dtype=torch.float64),
        "b": torch.randn(6, dtype=torch.float64),
    }
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), P("dp"), batch_specs=P("dp"))
    lowered = step.lower(params, x)
    assert lowered.plan.kept_rules == {"dp": True}
    members = [m for c in lowered.collectives for m in c.members]
    assert members and all(m.nbytes <= params["c"].nbytes for m in members)
    grads, value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", [2, 3])
def test_few_examples_of_wide_layers_stay_under_zero3(n):
    """Gathered as sums of padded shards, they would take less time than the weights do."""

    def loss(p, x):
        for up, b, down, c in zip(p["up"], p["b"], p["down"], p["c"], strict=True):
            x = x + torch.relu(x @ up + b) @ down + c
        return (x @ p["head"]).square().mean()

    torch.manual_seed(0)

    def weights(*shape):
        return torch.randn(shape, dtype=torch.float64) / 16

    params = {
        "up": [weights(128, 512) for _ in range(3)],
        "b": [weights(512) for _ in range(3)],
        "down": [weights(512, 128) for _ in range(3)],
        "c": [weights(128) for _ in range(3)],
        "head": weights(128, 5),
    }
    shapes = [w.shape for name in ("up", "b", "down", "c") for w in params[name]]
    shapes.append(params["head"].shape)
    x = torch.randn(4, 128, dtype=torch.float64)
    step = ftp.shard(loss, ftp.simulated_mesh((n,), ("dp",)), P("dp"), batch_specs=P("dp"))
    found = unbucketed(step.lower(params, x)).collectives
    moved = {op: [c.global_shape for c in found if c.op == op] for op in {c.op for c in found}}
    sizes = sorted(shape.numel() for shape in shapes)
    assert sorted(map(math.prod, moved.pop("reduce_scatter"))) == sizes
    assert set(map(math.prod, moved.pop("all_gather"))) == set(sizes)
    assert moved == {"all_reduce": [()]}  # the loss
    grads, value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-11, atol=1e-11)


def test_a_table_that_is_read_in_two_dtypes_is_gathered_once():
    """A tied head in a narrower dtype casts the copy that the lookup gathered."""

    def loss(p, ids):
        h = torch.tanh(torch.nn.functional.embedding(ids, p["table"]))
        return (h.float() @ p["table"].float().T).logsumexp(-1).mean()

    params = {"table": torch.randn(12, 8, dtype=torch.float64)}
    ids = torch.randint(12, (8, 64))
    mesh = ftp.simulated_mesh((4,), ("dp",))
    step = ftp.shard(loss, mesh, P("dp"), batch_specs=P("dp"), reshard_after_forward=False)
    assert ops(step.lower(params, ids)).count("all_gather") == 1
    grads, value = torch.func.grad_and_value(loss)(params, ids)
    torch.testing.assert_close(step(params, ids), (value, grads), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [2, 4])
def test_rows_of_the_batch_in_another_order_are_no_gradients(n):
    """Each rank computes its share of what is computed from them."""

    def loss(p, x):
        return (torch.relu(x[torch.arange(len(x) - 1, -1, -1)] @ p["a"]) @ p["b"]).square().mean()

    with torch.device("meta"):
        params, x = {"a": torch.empty(64, 256), "b": torch.empty(256, 64)}, torch.empty(4096, 64)
    mesh = ftp.AbstractMesh((n,), ("dp",))
    made = ftp.shard(loss, mesh, P("dp"), batch_specs=P("dp")).lower(params, x)
    assert made.work == 1.0


def test_statistics_of_the_batch_are_not_cut_as_the_parameters_are():
    def loss(p, x):
        h = torch.nn.functional.conv2d(x, p["kernel"], padding=1)
        h = torch.nn.functional.batch_norm(h, None, None, p["scale"], p["shift"], training=True)
        return (h.relu().mean((2, 3)) @ p["head"]).square().mean()

    shapes = {"kernel": (16, 3, 3, 3), "scale": (16,), "shift": (16,), "head": (16, 10)}
    with torch.device("meta"):
        params, x = {k: torch.empty(s) for k, s in shapes.items()}, torch.empty(16, 3, 16, 16)
    mesh, batch = ftp.AbstractMesh((2, 2), ("rep", "dp")), P(("rep", "dp"))
    made = ftp.shard(loss, mesh, P("dp"), batch_specs=batch).lower(params, x)
    moments = [c.op for c in unbucketed(made).collectives if c.dtype == torch.float64]
    assert set(moments) == {"all_reduce"}


@pytest.mark.parametrize(("axis", "dtype"), [("tp", BF16), ("dp", torch.float32)])
def test_sums_of_activations_are_reduced_in_their_dtype_and_gradients_in_a_wider_one(axis, dtype):
    """A norm of a row-parallel product computes in float32, as those after Gemma's projections."""

    def loss(p, x):
        return torch.nn.functional.rms_norm((x @ p["w"]).float(), (16,)).sum()

    def wide(p, x):
        return p["w"].square().sum(), torch.func.grad(loss)(p, x)["w"].float()

    x, w = torch.ones(64, 8, dtype=BF16), {"w": torch.ones(8, 16, dtype=BF16)}
    mesh = ftp.AbstractMesh((2,), (axis,))
    if axis == "tp":
        lowered = ftp.shard(loss, mesh, {"w": P("tp")}, batch_specs=P()).lower(w, x)
    else:
        lowered = ftp.spmd(wide, mesh, ({"w": P()}, P("dp")), (P(), P())).lower(w, x)
    assert {c.dtype for c in lowered.collectives if len(c.shape) == 2} == {dtype}
