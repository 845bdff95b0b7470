"""Exact minimum of a cost network by variable elimination; knows no tensors."""
