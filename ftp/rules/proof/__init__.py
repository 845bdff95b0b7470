"""Proofs of rules by trial: local op on the shards, joined, equals the op on the whole."""
