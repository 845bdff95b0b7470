"""Placed tensors: full tensors to shards and back, placements, global shapes."""
