"""Losses, gradients and collectives of small models on simulated meshes, over ways to cut them."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from few_or_many import slow_after, slow_unless
from models import (
    CNNConfig,
    Config,
    GPT2Config,
    LlamaConfig,
    MLPConfig,
    build,
    class_batch,
    cuts,
    lm_batch,
    loss,
    reference,
    sequence_parallel,
    specs,
)
from plan_reshards import unbucketed
from rounding import room
from torch.fx import _lazy_graph_module

import ftp
from ftp import P
from ftp.errors import DonationError

TOLERANCE = 1e-12  # in float64


@dataclass(frozen=True)
class Scheme:
    """A mesh of ``n`` ranks an axis, and the axes that cut the weights as Megatron and as ZeRO
    do, the batch and its sequence.
    """

    axes: tuple[str, ...]
    batch_specs: P = P()
    tp: str | None = None
    zero: str | None = None
    order: Any = "free"
    sp: bool = False

    @property
    def needs_tokens(self) -> bool:
        return self.sp or "cp" in self.axes

    def constraints(self) -> dict[str, P] | None:
        return (
            sequence_parallel(tp="tp", dp="dp" if "dp" in self.axes else None) if self.sp else None
        )


TP, DP, CP, BOTH = ("tp",), ("dp",), ("cp",), ("dp", "tp")
ORDERS = ("free", "tp zero", "zero tp")
SCHEMES: dict[str, Scheme] = {
    "tp": Scheme(TP, tp="tp"),
    "sp": Scheme(TP, tp="tp", sp=True),
    "dp": Scheme(DP, P("dp")),
    "zero": Scheme(DP, P("dp"), zero="dp"),
    "cp": Scheme(CP, P(None, "cp")),
    "cp+zero": Scheme(CP, P(None, "cp"), zero="cp"),
    "dp×tp": Scheme(BOTH, P("dp"), tp="tp"),
    "dp×sp": Scheme(BOTH, P("dp"), tp="tp", sp=True),
    **{
        f"zero×tp, {order}": Scheme(BOTH, P("dp"), tp="tp", zero="dp", order=order)
        for order in ORDERS
    },
    **{
        f"zero×sp, {order}": Scheme(BOTH, P("dp"), tp="tp", zero="dp", order=order, sp=True)
        for order in ORDERS
    },
}
MODELS: dict[str, Config] = {
    "llama": LlamaConfig(),
    "llama, gqa": LlamaConfig(layers=1, kv_heads=2),
    "gpt2": GPT2Config(layers=1),
    "gpt2, fused": GPT2Config(layers=1, qkv="fused"),
    "gpt2, interleaved": GPT2Config(layers=1, qkv="interleaved"),
    "gpt2, tied": GPT2Config(layers=1, tied=True),
    "cnn": CNNConfig(blocks=1),
    "mlp": MLPConfig(),
}


def is_lm(cfg: Config) -> bool:
    return isinstance(cfg, LlamaConfig | GPT2Config)


def batch_of(cfg: Config, batch: int = 4, seq: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return lm_batch(cfg, batch, seq) if is_lm(cfg) else class_batch(cfg, batch, dtype=torch.float64)


def check(
    cfg: Config,
    scheme: Scheme,
    shape: tuple[int, ...],
    batch: Any,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    """The sharded step's loss and gradients are those of plain torch on one device."""
    model = build(cfg, dtype=dtype)
    fn, params = ftp.functionalize(model, constraints=scheme.constraints())
    plain, _ = ftp.functionalize(model)
    plan = ftp.plan(params, specs(cuts(cfg), tp=scheme.tp, zero=scheme.zero, order=scheme.order))
    step = ftp.shard(
        loss(cfg, fn, **options),
        ftp.simulated_mesh(shape, scheme.axes),
        plan,
        batch_specs=scheme.batch_specs,
        certify=True,
    )
    value, grads = step(params, batch)
    expected, expected_grads = reference(loss(cfg, plain, **options), params, batch)
    assert value.dtype == dtype and grads.keys() == expected_grads.keys()
    if dtype is torch.float64:
        largest = max(float(g.abs().max()) for g in expected_grads.values())
        allowed = {
            name: TOLERANCE * max(float(grad.abs().max()), 1e-3 * largest)
            for name, grad in expected_grads.items()
        }
        allowed[""] = TOLERANCE * abs(float(expected))
    else:
        wide, exact_params = ftp.functionalize(build(cfg, dtype=torch.float64))
        exact_params = {name: params[name].double() for name in exact_params}
        exact, exact_grads = reference(loss(cfg, wide, **options), exact_params, batch)
        allowed = {name: room(grad, exact_grads[name]) for name, grad in expected_grads.items()}
        allowed[""] = room(expected, exact)
    assert abs(float(value - expected)) <= allowed[""]
    for name, grad in expected_grads.items():
        assert grads[name].shape == grad.shape and grads[name].dtype == grad.dtype, name
        error = float((grads[name] - grad).abs().max())
        assert error <= allowed[name], f"gradient of {name} is off by {error:.1e}"


def ids_of(pairs: Iterable[tuple[str, ...]]) -> list[str]:
    return [" | ".join(p) for p in pairs]


CASES = [
    (model, scheme)
    for model, cfg in MODELS.items()
    for scheme, s in SCHEMES.items()
    if is_lm(cfg) or not s.needs_tokens
]


def is_typical(model: str, scheme: str) -> bool:
    """Each scheme on one model, each model under one scheme of two axes."""
    of_all = "zero×sp, zero tp" if is_lm(MODELS[model]) else "zero×tp, tp zero"
    return model == "llama, gqa" or scheme == of_all


@pytest.mark.cases_by_default(5)
@pytest.mark.parametrize(("model", "scheme"), slow_unless(is_typical, CASES), ids=ids_of(CASES))
def test_numbers(model: str, scheme: str):
    s = SCHEMES[scheme]
    check(MODELS[model], s, (2,) * len(s.axes), batch_of(MODELS[model]))


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    "scheme", slow_unless(lambda scheme: scheme in ("tp", "cp+zero", "zero×sp, free"), SCHEMES)
)
def test_numbers_in_float32(scheme: str):
    s = SCHEMES[scheme]
    check(
        MODELS["llama, gqa"], s, (2,) * len(s.axes), batch_of(MODELS["llama, gqa"]), torch.float32
    )


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(("n", "m"), slow_after(2, [(4, 2), (1, 8), (2, 4), (8, 1)]))
def test_numbers_on_eight_ranks(n: int, m: int):
    cfg = LlamaConfig(layers=1, heads=8)
    check(cfg, SCHEMES["zero×sp, free"], (n, m), batch_of(cfg))


WEIGHTS = torch.linspace(0.5, 2.0, 32, dtype=torch.float64)
LOSSES: dict[str, dict[str, Any]] = {
    "ignore_index": {},
    "another ignore_index": {"ignore_index": 3},
    "label smoothing": {"label_smoothing": 0.1},
    "class weights": {"weight": WEIGHTS},
    "sum": {"reduction": "sum"},
    "everything": {"label_smoothing": 0.1, "weight": WEIGHTS},
    "everything, sum": {"label_smoothing": 0.1, "weight": WEIGHTS, "reduction": "sum"},
}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("options", "scheme"),
    slow_unless(
        lambda options, scheme: options == "everything",
        itertools.product(LOSSES, ["tp", "dp", "cp", "zero×sp, tp zero"]),
    ),
)
def test_cross_entropy(options: str, scheme: str):
    cfg, s = LlamaConfig(layers=1), SCHEMES[scheme]
    tokens, targets = lm_batch(cfg, ignored=0.3)
    targets = targets.where(targets >= 0, LOSSES[options].get("ignore_index", -100))
    check(cfg, s, (4,) if len(s.axes) == 1 else (2, 2), (tokens, targets), **LOSSES[options])


UNEVEN: dict[str, tuple[Config, tuple[int, int]]] = {
    "odd vocabulary": (LlamaConfig(vocab=53, layers=1), (4, 8)),
    "three heads": (LlamaConfig(dim=12, heads=3, layers=1), (4, 8)),
    "three heads, gpt2": (GPT2Config(dim=12, heads=3, layers=1), (4, 8)),
    "three heads, fused": (GPT2Config(dim=12, heads=3, layers=1, qkv="fused"), (4, 8)),
    "batch of five": (LlamaConfig(layers=1), (5, 7)),
    "batch of one": (LlamaConfig(layers=1), (1, 3)),
    "odd hidden": (LlamaConfig(hidden=13, layers=1), (4, 8)),
    "odd everything": (GPT2Config(vocab=35, dim=15, heads=3, layers=1, tied=True), (3, 5)),
    "odd image": (CNNConfig(channels=5, blocks=1, classes=3, size=7), (3, 0)),
    "odd features": (MLPConfig(dim=7, hidden=9, layers=1, classes=5), (5, 0)),
}
UNEVEN_CASES = [
    (model, scheme, shape)
    for model, (cfg, _) in UNEVEN.items()
    for scheme, shape in [
        ("tp", (2,)),
        ("tp", (4,)),
        ("sp", (4,)),
        ("dp", (2,)),
        ("zero", (4,)),
        ("cp", (4,)),
        ("zero×tp, free", (2, 2)),
    ]
    if is_lm(cfg) or not SCHEMES[scheme].needs_tokens
]


def is_most_uneven(model: str, scheme: str, shape: tuple[int, ...]) -> bool:
    """The model of which all is odd under each scheme, the others on two axes."""
    return model == "odd everything" or scheme == "zero×tp, free"


@pytest.mark.cases_by_default(3)
@pytest.mark.parametrize(
    ("model", "scheme", "shape"),
    slow_unless(is_most_uneven, UNEVEN_CASES),
    ids=[f"{m} | {s} | {n}" for m, s, n in UNEVEN_CASES],
)
def test_uneven(model: str, scheme: str, shape: tuple[int, ...]):
    cfg, (batch, seq) = UNEVEN[model]
    check(cfg, SCHEMES[scheme], shape, batch_of(cfg, batch, seq))


def test_ranks_without_a_part_issue_what_the_others_issue():
    x, weight = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 3, 3)
    step = ftp.spmd(torch.conv2d, ftp.simulated_mesh((4,), ("dp",)), (P("dp"), P("dp")))
    assert [c.op for c in step.lower(x, weight).collectives] == ["all_gather"]
    torch.testing.assert_close(step(x, weight), torch.conv2d(x, weight))


def test_moved_parts_are_contiguous():
    """Attention's kernel gives wrong values for heads whose last dim is strided."""
    x = torch.randn(2, 2, 2, 2, dtype=torch.float64)

    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    step = ftp.spmd(
        attend, ftp.simulated_mesh((2,), ("tp",)), (P(None, None, None, "tp"),), P(None, "tp")
    )
    torch.testing.assert_close(step(x), attend(x))


def test_moved_parts_are_not_viewed_again():
    """Each gather of an even shard took five calls beside the collective, a slice three."""
    mesh = ftp.simulated_mesh((2,), ("tp",))
    for shape in ((4,), (4, 6)):
        for here, there, ops in (P("tp"), P(), ["all_gather"]), (P(), P("tp"), []):
            lowered = ftp.spmd(torch.sin, mesh, (here,), there).lower(torch.randn(shape))
            assert [c.op for c in lowered.collectives] == ops
            names = [node.name for node in lowered.graph.graph.nodes]
            assert not [name for name in names if "reshape" in name], lowered.graph


# Collectives, counted.

# And (batch, seq); in the last the embedding's gradient is smaller than that of what it returns.
SIZES = {
    "small": (LlamaConfig(vocab=640, dim=16, heads=4, hidden=24), (8, 20)),
    "wide": (LlamaConfig(vocab=4096, dim=512, heads=8, hidden=1024), (8, 120)),
    "many tokens": (LlamaConfig(vocab=256, dim=512, heads=8, hidden=1024), (8, 120)),
}
COUNTED = [
    *((size, layers) for size in ("small", "wide") for layers in (1, 2, 3)),
    ("many tokens", 2),
]
counted = pytest.mark.parametrize(
    ("size", "layers"),
    slow_unless(lambda *case: case == ("many tokens", 2), COUNTED),
    ids=[f"{size}, {layers} layers" for size, layers in COUNTED],
)


@dataclass(frozen=True)
class Counted:
    """What a step of ``layers`` layers issues over one axis, sorted by what it moves.

    Attributes:
        activations, weights: per op, of values of (tokens, ...) and of a parameter's shape.
        vectors: all-reduces of gradients of 1-d parameters.
        small: all-reduces of at most a number per token.
        other: what is none of these.
    """

    layers: int
    weights_2d: int
    weights_1d: int
    stands_in: bool
    activations: Counter[str]
    weights: Counter[str]
    vectors: Counter[str]
    small: int
    other: tuple[Any, ...]


def issued(scheme: Scheme, size: str, layers: int, **options: Any) -> dict[str, Counted]:
    """Per mesh axis what the step of a Llama-style decoder issues."""
    base, tokens = SIZES[size]
    cfg = replace(base, layers=layers)
    fn, params = ftp.functionalize(build(cfg, device="meta"), constraints=scheme.constraints())
    plan = ftp.plan(params, specs(cuts(cfg), tp=scheme.tp, zero=scheme.zero, order=scheme.order))
    mesh = ftp.AbstractMesh((4,) if len(scheme.axes) == 1 else (2, 2), scheme.axes)
    step = ftp.shard(loss(cfg, fn), mesh, plan, batch_specs=scheme.batch_specs, **options)
    collectives = unbucketed(step.lower(params, lm_batch(cfg, *tokens))).collectives
    return {
        axis: _count(
            [c for c in collectives if c.axes == (axis,)], params, math.prod(tokens), layers
        )
        for axis in scheme.axes
    }


def _count(
    collectives: Iterable[ftp.Collective],
    params: Mapping[str, torch.Tensor],
    tokens: int,
    layers: int,
) -> Counted:
    shapes = {tuple(s) for p in params.values() for s in (p.shape, p.shape[::-1])}
    assert tokens not in {s[0] for s in shapes}, "a weight must not look like an activation"
    activations, weights, vectors, small, other = Counter(), Counter(), Counter(), 0, []
    for c in collectives:
        shape = tuple(s for s in c.global_shape if s != 1)
        if shape in shapes:
            (weights if len(shape) > 1 else vectors)[c.op] += 1
        elif math.prod(shape) > tokens and math.prod(shape) % tokens == 0:
            activations[c.op] += 1
        elif c.op == "all_reduce" and math.prod(shape) <= tokens:
            small += 1
        else:
            other.append(c)
    matrices = sum(p.ndim > 1 for p in params.values())
    stands_in = params["emb.weight"].shape[0] < tokens
    return Counted(
        layers,
        matrices,
        len(params) - matrices,
        stands_in,
        activations,
        weights,
        vectors,
        small,
        tuple(other),
    )


def is_tp(found: Counted) -> None:
    stand_ins = found.weights["reduce_scatter"]
    assert (
        found.activations["all_reduce"] + found.activations["reduce_scatter"] + stand_ins
        == 2 + 4 * found.layers
    )
    assert found.activations.total() + found.weights.total() == 2 + 4 * found.layers
    assert stand_ins <= found.stands_in
    assert found.vectors["all_reduce"] == found.vectors.total()
    assert found.small + found.vectors.total() <= 4 and not found.other


def is_sp(found: Counted) -> None:
    """Where the embedding's gradient is cheaper to reduce-scatter than what it is computed from
    is to gather, it may be. Then what the embedding gives may also be summed whole, for the first
    norm, whose gradient goes on as partial sums.
    """
    stand_ins, whole = found.weights["reduce_scatter"], found.activations["all_reduce"]
    assert whole <= stand_ins
    assert found.activations == Counter(
        all_reduce=whole,
        reduce_scatter=2 + 4 * found.layers - 2 * whole,
        all_gather=2 + 4 * found.layers - stand_ins - whole,
    )
    assert stand_ins == found.weights.total() <= found.stands_in
    assert found.vectors["all_reduce"] == found.vectors.total() <= found.weights_1d
    assert found.small <= 4 and not found.other


def is_dp(found: Counted) -> None:
    assert found.weights == Counter(all_reduce=found.weights_2d)
    assert found.vectors == Counter(all_reduce=found.weights_1d)
    assert found.small <= 2 and not found.activations and not found.other


def is_zero(found: Counted, *, again: bool = True) -> None:
    """With few tokens rows of the embedding's table move, to the tokens and back, and ids: not the
    table.
    """
    rows = len(found.other)
    if rows:
        assert [c.dtype for c in found.other] == [torch.int64]
        assert found.activations in (Counter(all_gather=1, reduce_scatter=1), Counter(all_to_all=2))
    twice, gathered = 2 if again else 1, found.weights_2d - rows
    assert found.weights == Counter(
        all_gather=twice * gathered - (again and not rows), reduce_scatter=gathered
    ), "backward needs all but the embedding"
    assert found.vectors == Counter(
        all_gather=twice * found.weights_1d, reduce_scatter=found.weights_1d
    )
    assert found.small <= 2 and (rows or not found.activations)


def is_cp(found: Counted) -> None:
    assert found.activations == Counter(
        all_gather=2 * found.layers, reduce_scatter=2 * found.layers
    )
    is_dp(replace(found, activations=Counter()))


def is_cp_zero(found: Counted) -> None:
    """With few tokens the first layer's attention is by heads: its weights stay where they are, and
    so does its norm's; columns of the embedding's table are exchanged, and all ids gathered.
    """
    if found.other:
        kept, vectors = found.weights_2d - 4, found.weights_1d - 1
        assert found.activations == Counter(
            all_to_all=8 * found.layers - 4, all_gather=2, reduce_scatter=1
        )
        assert found.weights == Counter(all_to_all=1, all_gather=2 * kept, reduce_scatter=kept)
        assert found.vectors == Counter(all_gather=2 * vectors, reduce_scatter=vectors)
        assert found.small <= 3 and [c.dtype for c in found.other] == [torch.int64]
        return
    gathered = Counter(all_gather=2 * found.layers, reduce_scatter=2 * found.layers)
    assert found.activations in (gathered, Counter(all_to_all=8 * found.layers))
    is_zero(replace(found, activations=Counter()))


@pytest.mark.cases_by_default(4)
@counted
@pytest.mark.parametrize("scheme", SCHEMES)
def test_collectives(scheme: str, size: str, layers: int):
    rows: dict[str, Callable[[Counted], None]] = {
        "tp": is_tp,
        "sp": is_sp,
        "dp": is_dp,
        "zero": is_zero,
        "cp": is_cp,
        "cp+zero": is_cp_zero,
    }
    s = SCHEMES[scheme]
    found = issued(s, size, layers)
    for axis, row in zip(s.axes, scheme.split(",")[0].split("×"), strict=True):
        rows[row](found[axis])


@counted
def test_collectives_of_zero_with_one_gather_a_weight(size: str, layers: int):
    is_zero(issued(SCHEMES["zero"], size, layers, reshard_after_forward=False)["dp"], again=False)


def test_threads_may_share_a_step_of_a_simulated_mesh():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(lambda w, x: (x @ w).tanh().sum(), mesh, (P(None, "tp"), P()), P())
    w, wrong = torch.ones(4, 6, dtype=torch.float64), []

    def work(k):
        x = torch.full((3 + k, 4), 0.1 * (k + 1), dtype=torch.float64)
        wrong.extend(k for _ in range(30) if abs(step(w, x) - (x @ w).tanh().sum()) > 1e-12)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert not wrong
    assert not _lazy_graph_module._use_lazy_graph_module_flag  # of the process, not of a thread


_interrupts: list[int] = []


@torch.library.custom_op("test_shard::interrupted", mutates_args=())
def interrupted(x: torch.Tensor) -> torch.Tensor:
    """The place in a step at which Ctrl-C comes."""
    if _interrupts:
        raise KeyboardInterrupt
    return x.clone()


interrupted.register_fake(torch.empty_like)
ftp.pointwise(torch.ops.test_shard.interrupted.default, linear=[(0,)])


@pytest.mark.parametrize("is_late", [False, True])
def test_donated_state_is_whole_after_an_interrupt_or_known_not_to_be(is_late):
    mesh = ftp.simulated_mesh((1,), ("dp",))

    def update(w, x):
        pulled = w * x.sum() if is_late else interrupted(w * x.sum())
        new = w - 0.1 * pulled
        return new, (interrupted(new * 2) if is_late else new * 2).sum()

    step = ftp.spmd(update, mesh, (P(), P()), (P(), P()), donate=(0,))
    w, x = ftp.device_put((torch.ones(4), torch.ones(4)), mesh)
    _interrupts.clear()
    w, _ = step(w, x)
    before = w.clone()
    _interrupts.append(1)
    with pytest.raises(KeyboardInterrupt):
        step(w, x)
    _interrupts.clear()
    if is_late:
        assert not torch.equal(w, before)
        with pytest.raises(DonationError, match="w was donated"):
            step(w, x)
    else:
        assert torch.equal(w, before)
        step(w, x)


@pytest.mark.parametrize("axes", [("dp",), ("dp", "tp")])
def test_rereading_the_last_dim_of_a_rank_without_rows(axes: tuple[str, ...]):
    """The whole tensor is dense along its last dim, whatever a rank's part is: pairs of it are
    complex numbers, and its bits are integers.
    """

    def loss(w, x):
        y = x.permute(0, 2, 1)
        y = y + torch.einsum("bct,co->bot", y, w)
        y = y.permute(0, 2, 1)
        bits = y.detach().view(torch.int32)[..., 1::2]
        z = torch.view_as_complex(y)
        return (z * z.conj() * (bits[..., 0] % 7)).real.square().mean()

    w, x = (torch.linspace(-2, 3, n, dtype=torch.float64).sin() for n in (4, 40))
    w, x = w.view(2, 2), x.view(4, 5, 2)
    mesh = ftp.simulated_mesh((3, 2)[: len(axes)], axes)  # the last rows have no elements
    found = ftp.shard(loss, mesh, P(axes[1:] or None), batch_specs=P("dp"), certify=True)(w, x)
    expected = torch.func.grad_and_value(loss)(w, x)
    torch.testing.assert_close(found, expected[::-1], rtol=1e-12, atol=1e-14)
