"""Proof by values: programs run on residues modulo primes, where equal formulas give equal numbers
and unequal ones almost never do.
"""
