"""Passes over a rank's graph: each takes a graph and returns one that computes the same values.

A pass that changes which collectives are issued, or in what order, decides from the plan, which is
equal on all ranks.
"""
