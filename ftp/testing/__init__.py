"""Tests for users' programs and rules: proofs of rules, hypothesis strategies, and comparison of
programs with one device.

>>> import torch
>>> from ftp.testing import check_rule
>>> cuts = check_rule(torch.ops.aten.sin.default, [((torch.randn(3, 4),), {})])
>>> cuts[0]
'~0 ~1 -> ~0 ~1: cut ~0 of 3 in 2'

See ``docs/testing.md``. Functions that draw examples need hypothesis, which is imported when first
used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftp.rules.proof.prove import check_rule
from ftp.testing.one_device import assert_equal_to_one_device

if TYPE_CHECKING:
    from ftp.testing.strategies import meshes, op_inputs, shapes, spec_trees, specs, tensors

__all__ = [
    "assert_equal_to_one_device",
    "check_rule",
    "meshes",
    "op_inputs",
    "shapes",
    "spec_trees",
    "specs",
    "tensors",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("ftp.testing.strategies"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
