"""Every registered rule, proven: local op on the shards, joined, equals the op on the whole."""

import pytest
import torch
from strategies import samples
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

import ftp.rules  # noqa: F401
from ftp.decompositions import DECOMPOSITIONS
from ftp.errors import RuleError
from ftp.registry import RULES, BoundRule, Call, Meta, lookup, make, rule
from ftp.testing import check_rule

aten = torch.ops.aten
STAND_INS = {aten._fused_rms_norm_backward.default: DECOMPOSITIONS[aten._fused_rms_norm_backward.default]}
ELSEWHERE = {
    getattr(aten, f"_scaled_dot_product_{kind}_attention{way}").default
    for kind in ("flash", "efficient", "cudnn")
    for way in ("", "_backward")
}
PROVABLE = sorted(set(RULES) - ELSEWHERE, key=str)


@pytest.mark.parametrize("op", PROVABLE, ids=str)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom", "ignore:.*beta", "ignore:.*deprecated")
def test_rule_holds(op: OpOverload):
    cases = samples(op)
    assert cases, f"{op} has no samples in tests/strategies.py"
    check_rule(op, cases, kernel=STAND_INS.get(op))


@pytest.mark.parametrize("op", sorted(DECOMPOSITIONS, key=str), ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_decomposition_equals_the_op(op: OpOverload, dtype: torch.dtype):
    if op in STAND_INS:
        pytest.skip("no kernel on this device")
    for args, kwargs in samples(op):
        args, kwargs = _cast(args, dtype), _cast(kwargs, dtype)
        expected, made = op(*args, **kwargs), DECOMPOSITIONS[op](*args, **kwargs)
        close = {"rtol": 1e-7, "atol": 1e-7} if dtype is torch.float64 else {"rtol": 3e-2, "atol": 3e-2}
        torch.testing.assert_close(made, expected, **close, equal_nan=True, check_stride=False)


def _cast(tree, dtype):
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, list | tuple):
        return type(tree)(_cast(t, dtype) for t in tree)
    if isinstance(tree, dict):
        return {k: _cast(t, dtype) for k, t in tree.items()}
    return dtype if tree is torch.float64 else tree


def test_rms_norm_backward_is_the_gradient():
    x, w = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64, requires_grad=True)
    y, rstd = DECOMPOSITIONS[aten._fused_rms_norm.default](x, [5], w, 1e-5)
    grad = torch.randn(4, 5, dtype=torch.float64)
    expected = torch.autograd.grad(y, (x, w), grad)
    made = DECOMPOSITIONS[aten._fused_rms_norm_backward.default](grad, x.detach(), [5], rstd.detach(), w.detach(), [True, True])
    torch.testing.assert_close(made, expected)


def bound(op: OpOverload, *args, **kwargs) -> BoundRule:
    results = op(*args, **kwargs)
    results = results if isinstance(results, tuple) else (results,)
    metas = tuple(Meta(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else Meta((), torch.int64) for r in results)
    found = lookup(Call(op, tuple(_metas(args)), _metas(kwargs), metas))
    assert found is not None
    return found


def _metas(tree):
    if isinstance(tree, torch.Tensor):
        return Meta(tuple(tree.shape), tree.dtype)
    if isinstance(tree, list | tuple):
        return type(tree)(map(_metas, tree))
    return {k: _metas(t) for k, t in tree.items()} if isinstance(tree, dict) else tree


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_kernels_of_other_devices_are_cut_by_batch_and_heads(kind: str):
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    with FakeTensorMode():
        q = torch.empty(2, 4, 64, 16, dtype=torch.float16, device="cuda")
        extra = () if kind == "flash" else (None, True)
        results = forward(q, q, q, *extra, 0.0, True)
        free = bound(forward, q, q, q, *extra, 0.0, True)
        assert _free(free) == {"b", "h"}
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
                args = (out, q, q, q, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, *last)
        assert _free(bound(backward, *args)) == {"b", "h"}


def _free(rule: BoundRule) -> set[str]:
    return {f for dims in (*rule.operands, *rule.results) for dim in dims for f in dim} - rule.whole


@pytest.mark.parametrize(
    ("op", "text", "linear", "args", "message"),
    [
        (aten.mm.default, "m k, k n -> m n", [], (torch.ones(4, 5).double(), torch.ones(5, 3).double()), "cut k of 5 in 2"),
        (aten.exp.default, "a -> a", [(0,)], (torch.ones(4).double(),), "operands 0 as sums over 2"),
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
    with pytest.raises(RuleError, match=r"op overload such as torch.ops.aten.mm.default, not .*OpOverloadPacket"):
        rule(aten.mm, "m k, k n -> m n {k}")


def test_a_rule_that_does_not_fit_says_so(monkeypatch):
    monkeypatch.setitem(RULES, aten.exp.default, make("a b -> a b"))
    with pytest.raises(RuleError, match=r"gives a tensor of shape \(3,\) 2 dims"):
        check_rule(aten.exp.default, [((torch.ones(3),), {})])
