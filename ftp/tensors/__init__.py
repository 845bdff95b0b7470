"""Placed tensors: full tensors to shards and back, what is known of each, global shapes."""
