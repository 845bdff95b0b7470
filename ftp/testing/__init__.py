"""Tests of people's own programs and rules: proofs of rules, strategies for hypothesis, and programs against one device."""

from ftp.prover import check_rule

__all__ = ["check_rule"]
