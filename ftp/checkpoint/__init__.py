"""Checkpoints: saved by all ranks, complete or not at all, loaded on any mesh."""
