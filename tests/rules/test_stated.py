"""Rules as users state them: what is wrong is refused where it is stated."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ftp
from ftp.errors import RuleError
from ftp.rules.own import RULES, along_dim, einsum, pointwise, reduction, rule

MM, TANH = torch.ops.aten.mm.default, torch.ops.aten.tanh.default
WRONG_RULES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: rule(MM, "m k -> m {k}"),
        "Operands: 1 in the rule 'm k -> m {k}', 2 of aten.mm.default",
    ),
    (
        lambda: rule(MM, "m k, k n -> m n, m"),
        "Results: 2 in the rule 'm k, k n -> m n, m', 1 of aten.mm.default",
    ),
    (lambda: rule(MM, "m k, k n -> m j {k}"), "has j in a result and in no operand"),
    (lambda: rule(MM, "m k, k n -> m n {k}", linear=[(2,)]), "linear=[(2,)] names operands"),
    (lambda: rule(MM, "m k, k n -> m n {k}", linear=[0]), "linear=[0]: give groups of operands"),
    (lambda: rule(MM, "m k, k n -> m n {k:avg}"), "ranks' results are reduced by sum, max, min"),
    (lambda: einsum(MM), "Give ops, and last the text of their rule"),
    (lambda: along_dim(), "Give ops, and last the text of their rule"),
    (lambda: pointwise(TANH, linear=0), "linear=0: give groups of operands"),
    (lambda: reduction(torch.ops.aten.sum.default, op="mean"), "op='mean': ranks' results are"),
]


@pytest.mark.parametrize(("state", "text"), WRONG_RULES)
def test_a_wrong_rule_is_refused_where_it_is_stated(state: Callable[[], Any], text: str):
    before = dict(RULES)
    with pytest.raises(RuleError, match=re.escape(text)):
        state()
    assert before == RULES


def test_a_function_that_gives_no_rule(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RULES, TANH, RULES[TANH])
    rule(TANH)(lambda call: 3)
    with pytest.raises(RuleError, match=r"the rule of aten\.tanh\.default, gives 3; it must"):
        ftp.lower(torch.tanh, ftp.AbstractMesh((2,), ("tp",)), ftp.P("tp"), torch.ones(4))
