"""Layers that repeat: planned once, the plan stamped on all of them."""
