"""Proofs about rank programs that ftp did not write: record what each rank runs, run all of them on
residues, and say where they part from the single-device program.
"""
