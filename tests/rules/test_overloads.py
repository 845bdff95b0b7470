"""Ops that a torch lacks: their rules are skipped, and they can be listed."""

import runpy
import sys

import pytest
import torch

from ftp.errors import RuleError
from ftp.rules import own, registry
from ftp.rules.decompositions.registry import DECOMPOSITIONS, decomposition
from ftp.rules.forms import batched, pointwise
from ftp.rules.overloads import MISSING, MissingOp, Namespace
from ftp.rules.own import RULES, rule


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Torch's ops as a torch without ``aten.mm`` and ``aten.add.Tensor`` has them."""

    class Older:
        add = type(
            "Packet", (), {"overloads": lambda _: ["Scalar"], "Scalar": torch.ops.aten.add.Scalar}
        )()

        def __getattr__(self, name: str):
            if name == "mm":
                raise AttributeError(name)
            return getattr(torch.ops.aten, name)

    monkeypatch.setattr(torch.ops, "older", Older(), raising=False)
    return Namespace("older")


def test_an_op_that_torch_has_is_its_own(older: Namespace):
    assert older.bmm.default is torch.ops.aten.bmm.default
    assert older.add.Scalar is torch.ops.aten.add.Scalar


def test_rules_of_missing_ops_are_skipped(older: Namespace):
    before = dict(RULES)
    rule(older.mm.default, "m k, k n -> m n {k}")
    pointwise(older.add.Tensor, linear=[(0, 1)])
    batched(older.mm.default, core=2)
    rule(older.mm.default)(lambda call: "m [k], [k] n -> m n")
    decomposition(older.mm.default)(lambda x, y: (x.unsqueeze(-1) * y).sum(-2))
    assert before == RULES
    assert not any(isinstance(op, MissingOp) for op in (*RULES, *DECOMPOSITIONS))


def test_missing_ops_are_listed(older: Namespace):
    assert older.mm.default == MissingOp("older.mm.default")
    assert older.add.Tensor == MissingOp("older.add.Tensor")
    assert older.mm.overloads() == []
    assert {"older.mm.default", "older.add.Tensor"} <= MISSING


def test_a_text_alone_is_an_error():
    with pytest.raises(RuleError, match="names at least one op"):
        rule("m k, k n -> m n {k}")


def test_a_file_of_rules_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch):
    """The error names the file, the line and the reason."""

    def lacking(*ops: object) -> None:
        raise AttributeError("no such op")

    monkeypatch.setattr(registry, "rule", lacking)
    monkeypatch.delitem(sys.modules, "ftp.rules.conv")
    text = (
        r"ftp's own rules cannot be loaded: .*conv.py:\d+, `@rule\(aten.convolution.default\)`,"
        " raised AttributeError: no such op. Install"
    )
    with pytest.raises(RuleError, match=text):
        runpy.run_path(own.__file__)
