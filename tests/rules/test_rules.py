"""Every registered rule, proven: local op on the shards, joined, equals the op on the whole."""

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import op_sweep
import pytest
import torch
from op_calls import (
    ELSEWHERE,
    FORMS,
    NAMESPACES,
    NOT_DRAWN,
    STAND_INS,
    Proof,
    prove_apart,
    prove_each_apart,
    prove_op,
    recorded,
    write,
)
from strategies import samples
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

import ftp
from ftp import P
from ftp.errors import RuleError
from ftp.ops.philox import random_bits
from ftp.ops.stack import UNSTACK
from ftp.ops.static_shape import ctc_loss
from ftp.rules import own
from ftp.rules.bind import lookup
from ftp.rules.call import Call, Meta, tensors
from ftp.rules.decompositions.registry import DECOMPOSITIONS
from ftp.rules.own import RULES
from ftp.rules.proof.sandbox import Ended, apart
from ftp.rules.registry import make, rule
from ftp.rules.rule import BoundRule, Rule
from ftp.testing import check_rule
from ftp.tracing.clean_graph import _dim_arguments, from_the_front

aten = torch.ops.aten
PROVABLE = sorted((op for op in set(RULES) - ELSEWHERE if op.namespace in NAMESPACES), key=str)


@pytest.mark.cases_by_default(110)
@pytest.mark.parametrize("op", PROVABLE, ids=str)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom", "ignore:.*beta", "ignore:.*deprecated")
def test_rule_holds(op: OpOverload):
    cases = samples(op)
    assert cases, f"{op} has no samples in tests/support/strategies.py"
    check_rule(op, cases, kernel=STAND_INS.get(op))


X = torch.linspace(-9, 9, 24, dtype=torch.float64).reshape(4, 6)
BYTES = torch.linspace(-100, 100, 24).to(torch.int8).reshape(4, 6)
OF_OTHER_DTYPES = [
    (aten.sum.dim_IntList, (X, [0]), {"dtype": torch.int64}),
    (aten.cumsum.default, (X, 0), {"dtype": torch.int64}),
    (aten.copy.default, (torch.zeros(4, 6, dtype=torch.int64), X), {}),
    (aten.sum.default, (BYTES,), {}),
    (aten.mul.Scalar, (BYTES, 0.5), {}),
    (aten._to_copy.default, (BYTES,), {"dtype": torch.int32}),
    (aten.add.Tensor, (BYTES, BYTES.int()), {}),
    (aten.avg_pool2d.default, (BYTES.long().reshape(1, 4, 6), [2, 2]), {}),
    (aten.upsample_bilinear2d.vec, (BYTES.byte().reshape(1, 1, 4, 6), [5, 7], False, None), {}),
    (aten.mse_loss.default, (torch.full((9,), 200).half(), torch.zeros(9).half()), {}),
    (aten.smooth_l1_loss.default, (torch.full((9,), 6e4).half(), torch.zeros(9).half()), {}),
    (aten.arange.start_step, (-1e6, 1e6, 100000.1), {"dtype": torch.float64}),
    (aten.histc.default, (X, 4, 1, 1), {}),
    (aten.arange.start_step, (-2.5, 9.5, 1.5), {"dtype": torch.int64}),
]
NONE = torch.empty(0, dtype=torch.int64)
ROWS = X[:0]
WITH_NOTHING = [
    (aten.index_add.default, (X, 0, NONE, ROWS), {}),
    (aten.scatter_add.default, (X, 0, ROWS.long(), ROWS), {}),
    (aten.index_put.default, (X, [NONE], ROWS, True), {}),
    (aten.any.dims, (X > 0, []), {}),
    (aten.all.dims, (X.byte(), [], True), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), OF_OTHER_DTYPES)
def test_rule_holds_beside_floats_of_one_dtype(op: OpOverload, args: tuple, kwargs: dict):
    """Sums that are rounded, wrap around or overflow, and numbers that need float64."""
    check_rule(op, [(args, kwargs)])


@pytest.mark.parametrize(("op", "args", "kwargs"), WITH_NOTHING)
def test_rule_holds_of_nothing(op: OpOverload, args: tuple, kwargs: dict):
    """Nothing to add to what there is, and no dims to reduce."""
    check_rule(op, [(args, kwargs)])


WITH_DIMS = [
    op for op in PROVABLE if _dim_arguments(op) and "_fft_" not in str(op)
]  # FFTs crash where dims are negative


@pytest.mark.cases_by_default(21)
@pytest.mark.parametrize("op", WITH_DIMS, ids=str)
def test_dims_are_counted_from_the_front(op: OpOverload):
    """Of calls that torch takes with their dims counted from the end; kernels may read beyond a
    shape, by chance.
    """
    torch.manual_seed(0)
    for args, kwargs in samples(op):
        front, named = from_the_front(op, tuple(args), kwargs, lambda x: x)
        whole = list(tensors((front, named, op(*front, **named)), torch.Tensor))
        most = max(1, *(x.ndim for x in whole))
        for shift in {max(x.ndim, 1) for x in whole}:
            back, again = _shifted(op, front, named, -shift)
            if min(_dims_of(op, back, again), default=0) < -most:
                continue
            try:
                results = op(*back, **again)
            except Exception:  # not its number of dims
                continue
            found, names = from_the_front(op, back, again, lambda x: x)
            assert all(d >= 0 for d in _dims_of(op, found, names))
            torch.testing.assert_close(op(*found, **names), results, equal_nan=True)


def _shifted(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], by: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def moved(dims: Any) -> Any:
        return (
            dims + by
            if isinstance(dims, int)
            else [d + by for d in dims]
            if dims is not None
            else None
        )

    at = {i for i, _ in _dim_arguments(op)}
    names = {name for _, name in _dim_arguments(op)}
    return tuple(moved(a) if i in at else a for i, a in enumerate(args)), {
        k: moved(v) if k in names else v for k, v in kwargs.items()
    }


def _dims_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _dim_arguments(op)]
    return [
        d for dims in given if dims is not None for d in ([dims] if isinstance(dims, int) else dims)
    ]


def test_kernels_get_no_dims_counted_from_the_end():
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.norm(x, torch.inf, -1),
            x.sum((-1, -2)),
            torch.stack([x, x], -1).softmax(-2),
            x.unsqueeze(-1).std(-2),
        ]

    x = torch.randn(4, 4, dtype=torch.float64)
    step = ftp.spmd(fn, ftp.simulated_mesh((3,), ("tp",)), (ftp.P("tp"),))
    torch.testing.assert_close(step(x), fn(x))
    nodes = [n for n in step.lower(x).graph.graph.nodes if n.op == "call_function"]
    assert all(
        d >= 0
        for n in nodes
        if isinstance(n.target, OpOverload)
        for d in _dims_of(n.target, n.args, n.kwargs)
    )


# The whole registry, decompositions too, on calls that hypothesis draws and that the operator
# database makes forward and backward.

PROVEN = Path(ftp.__file__).parent / "rules" / "proof" / "proven.json"
EVERY_OP = sorted({op for op in RULES if op.namespace in NAMESPACES} | set(DECOMPOSITIONS), key=str)


def database_calls(every: int, forms: int) -> dict[OpOverload, list]:
    return recorded(op_sweep.op_names()[::every], forms, count=2 * forms)


@pytest.mark.filterwarnings("ignore")
def test_rules_hold_on_other_calls():
    calls = database_calls(every=24, forms=1)
    proofs = prove_each_apart(EVERY_OP[::16], calls, draws=1)
    assert not failures(proofs)
    assert {op for op, p in proofs.items() if p.drawn + p.database == 0} <= ELSEWHERE | set(
        NOT_DRAWN
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rules_hold_on_many_calls(capsys: pytest.CaptureFixture[str]):
    calls = database_calls(every=1, forms=FORMS)
    proofs = {
        op: prove_apart(
            op, [*calls.get(op, []), *([] if op in ELSEWHERE else samples(op))], draws=6
        )
        for op in EVERY_OP
    }
    write(proofs, PROVEN)
    with capsys.disabled():
        cases, strategies = (
            sum(p.drawn + p.database for p in proofs.values()),
            sum(p.strategies for p in proofs.values()),
        )
        print(f"\n{len(proofs)} rules, {strategies} strategies on {cases} calls")
    assert not failures(proofs)
    assert {op for op, p in proofs.items() if p.drawn + p.database == 0} == ELSEWHERE


def failures(proofs: dict[OpOverload, Proof]) -> list[str]:
    return [f"{op}: {p.failure}" for op, p in proofs.items() if p.failure]


def test_the_proven_ops_have_rules():
    record = json.loads(PROVEN.read_text())
    assert set(record["proven"]) <= {str(op) for op in EVERY_OP}
    assert len(record["proven"]) > 0.95 * len(EVERY_OP)


def without_local(rule: Rule) -> Rule:
    return replace(rule, local=None)


def without_whole(rule: Rule) -> Rule:
    return replace(rule, notation=replace(rule.notation, whole=frozenset()))


def without_pending(rule: Rule) -> Rule:
    return replace(
        rule, notation=replace(rule.notation, pending=((),) * len(rule.notation.results))
    )


def with_maximum(rule: Rule) -> Rule:
    pending = tuple(tuple((f, "max") for f, _ in p) for p in rule.notation.pending)
    return replace(rule, notation=replace(rule.notation, pending=pending))


def all_linear(rule: Rule) -> Rule:
    return replace(rule, linear=tuple((i,) for i in range(len(rule.notation.operands))))


WRONG = [
    ("matmul", aten.bmm.default, without_pending),
    ("matmul", aten.mm.default, with_maximum),
    ("pointwise", aten.exp.default, all_linear),
    ("pointwise", aten.add.Tensor, all_linear),
    ("reduce", aten.sum.dim_IntList, with_maximum),
    ("reduce", aten.amax.default, all_linear),
    ("reduce", aten.argmax.default, without_whole),
    ("shape", aten.roll.default, without_whole),
    ("slices", aten.slice.Tensor, without_whole),
    ("slices", aten.cat.default, without_whole),
    ("index", aten.embedding.default, without_local),
    ("index", aten.gather.default, without_local),
    ("index", aten.scatter_add.default, without_local),
    ("index", aten.index_put.default, without_local),
    ("along_dim", aten.cumsum.default, without_whole),
    ("along_dim", aten.sort.default, without_whole),
    ("norm", aten._softmax.default, without_whole),
    ("norm", aten.native_layer_norm_backward.default, without_pending),
    ("norm", aten.native_group_norm.default, without_whole),
    ("attention", aten._scaled_dot_product_flash_attention_for_cpu.default, without_whole),
    (
        "attention",
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        without_pending,
    ),
    ("flex_attention", torch.ops.ftp.scaled_dot_product_attention_flex.default, without_local),
    (
        "flex_attention",
        torch.ops.ftp.scaled_dot_product_attention_flex_backward.default,
        without_pending,
    ),
    ("conv", aten.convolution.default, without_whole),
    ("conv", aten.convolution_backward.default, without_pending),
    ("conv", aten.avg_pool2d.default, without_whole),
    ("factory", aten.arange.default, without_local),
    ("factory", aten.eye.default, without_local),
    ("linalg", aten.linalg_inv_ex.default, without_whole),
    ("linalg", aten._fft_r2c.default, without_whole),
    ("shape", aten.tril.default, without_local),
    ("loss", ctc_loss, without_whole),
    ("low_precision", aten._scaled_mm.default, without_pending),
    ("ftp_ops", torch.ops.ftp.fused_adamw.default, all_linear),
    ("ftp_ops", UNSTACK, without_whole),
    ("ftp_ops", random_bits, without_local),
]


@pytest.mark.cases_by_default(7)
@pytest.mark.parametrize(
    ("family", "op", "mutate"), WRONG, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_a_wrong_rule_of_each_family_is_found(
    monkeypatch: pytest.MonkeyPatch, family: str, op: OpOverload, mutate: Callable[[Rule], Rule]
):
    entry = RULES[op]
    changed = []

    def mutated(call: Call) -> Rule | None:
        right = entry if isinstance(entry, Rule) else entry(call)
        right = make(right) if isinstance(right, str) else right
        if right is None:
            return None
        wrong = mutate(right)
        changed.append(wrong != right)
        return wrong

    def work() -> list:
        return [prove_op(op, samples(op), pairs=False)[2], any(changed)]

    monkeypatch.setitem(RULES, op, mutated)
    answer = apart(work, cpu_seconds=30, seconds=120)
    if isinstance(answer, Ended):
        # The kernel did not survive what the rule made of its operands, and the child says so.
        return
    failure, differs = answer
    assert differs, f"nothing of the rule of {op} is left out"
    assert "does not hold" in failure


def test_every_family_has_a_wrong_rule():
    families = {
        name.name.removeprefix("ftp.rules.")
        for line in ast.walk(ast.parse(Path(own.__file__).read_text()))
        if isinstance(line, ast.Import)
        for name in line.names
    }
    assert families == {family for family, _, _ in WRONG}


@pytest.mark.cases_by_default(26)
@pytest.mark.parametrize("op", sorted(DECOMPOSITIONS, key=str), ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_decomposition_equals_the_op(op: OpOverload, dtype: torch.dtype):
    if op in STAND_INS:
        pytest.skip("no kernel on this device")
    for args, kwargs in samples(op):
        args, kwargs = _cast(args, dtype), _cast(kwargs, dtype)
        if op is aten._weight_norm_interface_backward.default and dtype is torch.bfloat16:
            args = (*args[:3], args[3].float(), args[4])  # the forward's result is wider
        expected, made = op(*args, **kwargs), DECOMPOSITIONS[op](*args, **kwargs)
        close = 1e-7 if dtype is torch.float64 else 3e-2
        torch.testing.assert_close(
            made, expected, rtol=close, atol=close, equal_nan=True, check_stride=False
        )


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, list | tuple):
        return type(tree)(_cast(t, dtype) for t in tree)
    if isinstance(tree, dict):
        return {k: _cast(t, dtype) for k, t in tree.items()}
    return dtype if tree is torch.float64 else tree


AT = torch.tensor([0, 3, 4])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.tril(),
        lambda x: x.triu(1),
        torch.func.grad(lambda x: x[2].sum()),
        torch.func.grad(lambda x: x[AT].sum()),
        torch.func.grad(lambda x: x.gather(0, AT[:, None].expand(3, 5)).sum()),
        lambda x: x[2] * 0,
        lambda x: x[AT] * 0,
        lambda x: torch.zeros_like(x).index_add(0, AT, x[:3]),
        lambda x: (x * 0).index_add(0, AT, x[:3] * 0),
    ],
    ids=lambda _: "",
)
def test_zeros_have_the_sign_of_one_device(
    function: Callable[[torch.Tensor], torch.Tensor], dim: int
):
    x = torch.randn(5, 5, dtype=torch.float64)
    specs = P("x") if dim == 0 else P(None, "x")
    due = function(x)
    out_specs = specs if due.ndim == 2 else P()
    found = ftp.spmd(function, ftp.simulated_mesh((3,), ("x",)), specs, out_specs)(x)
    assert torch.equal(found, due)
    assert torch.equal(found.signbit(), due.signbit())


def test_rms_norm_backward_is_the_gradient():
    x, w = (
        torch.randn(4, 5, dtype=torch.float64, requires_grad=True),
        torch.randn(5, dtype=torch.float64, requires_grad=True),
    )
    y, rstd = DECOMPOSITIONS[aten._fused_rms_norm.default](x, [5], w, 1e-5)
    grad = torch.randn(4, 5, dtype=torch.float64)
    expected = torch.autograd.grad(y, (x, w), grad)
    made = DECOMPOSITIONS[aten._fused_rms_norm_backward.default](
        grad, x.detach(), [5], rstd.detach(), w.detach(), [True, True]
    )
    torch.testing.assert_close(made, expected)


def bound(op: OpOverload, *args, **kwargs) -> BoundRule:
    results = op(*args, **kwargs)
    results = results if isinstance(results, tuple) else (results,)
    metas = tuple(
        Meta(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else Meta((), torch.int64)
        for r in results
    )
    found = lookup(Call(op, tuple(_metas(args)), _metas(kwargs), metas))
    assert found is not None
    return found


def _metas(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return Meta(tuple(tree.shape), tree.dtype)
    if isinstance(tree, list | tuple):
        return type(tree)(map(_metas, tree))
    return {k: _metas(t) for k, t in tree.items()} if isinstance(tree, dict) else tree


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_kernels_of_other_devices_are_cut_by_batch_and_heads(kind: str):
    """And by queries, where the op of parts can stand in."""
    cut = {"b", "h", "s"}
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    with FakeTensorMode():
        q = torch.empty(2, 4, 64, 16, dtype=torch.float16, device="cuda")
        extra = () if kind == "flash" else (None, True)
        results = forward(q, q, q, *extra, 0.0, True)
        free = bound(forward, q, q, q, *extra, 0.0, True)
        assert _free(free) == cut
        out, lse, *rest = results
        last = (0.0, True)
        match kind:
            case "flash":
                cum_q, cum_k, max_q, max_k, seed, unused, _ = rest
                args = (out, q, q, q, out, lse, cum_q, cum_k, max_q, max_k, *last, seed, unused)
            case "efficient":
                args = (out, q, q, q, None, out, lse, *rest, 0.0, [True, True, True, False], True)
            case _:
                cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
                args = (
                    out,
                    q,
                    q,
                    q,
                    out,
                    lse,
                    seed,
                    offset,
                    None,
                    cum_q,
                    cum_k,
                    max_q,
                    max_k,
                    *last,
                )
        assert _free(bound(backward, *args)) == cut


def _free(rule: BoundRule) -> set[str]:
    return {f for dims in (*rule.operands, *rule.results) for dim in dims for f in dim} - rule.whole


@pytest.mark.parametrize(
    ("op", "text", "linear", "args", "message"),
    [
        (
            aten.mm.default,
            "m k, k n -> m n",
            [],
            (torch.ones(4, 5).double(), torch.ones(5, 3).double()),
            "cut k of 5 in 2",
        ),
        (
            aten.exp.default,
            "a -> a",
            [(0,)],
            (torch.ones(4).double(),),
            "operands 0 as sums over 2",
        ),
        (aten.cumsum.default, "a b -> a b", [], (torch.ones(4, 3).double(), 0), "cut a of 4 in 2"),
        (aten.sum.default, "a -> () {a:max}", [], (torch.ones(4).double(),), "cut a of 4 in 2"),
    ],
)  # fmt: skip
def test_wrong_rules_are_found(monkeypatch, op, text, linear, args, message):
    monkeypatch.setitem(RULES, op, make(text, linear=linear))
    with pytest.raises(RuleError) as error:
        check_rule(op, [(args, {})])
    assert message in str(error.value)
    assert str(op) in str(error.value)


def test_an_op_without_a_rule_is_named(monkeypatch):
    monkeypatch.delitem(RULES, aten.exp.default)
    with pytest.raises(RuleError, match=r"aten.exp.default has no sharding rule"):
        check_rule(aten.exp.default, [((torch.ones(3),), {})])


def test_rule_refuses_what_is_no_op():
    with pytest.raises(
        RuleError,
        match=r"op overload such as torch.ops.aten.mm.default, not .*Packet.*custom op",
    ):
        rule(aten.mm, "m k, k n -> m n {k}")  # pyright: ignore[reportArgumentType]


def test_a_rule_that_does_not_fit_says_so(monkeypatch):
    monkeypatch.setitem(RULES, aten.exp.default, make("a b -> a b"))
    with pytest.raises(RuleError, match=r"gives a tensor of shape \(3,\) 2 dims"):
        check_rule(aten.exp.default, [((torch.ones(3),), {})])
