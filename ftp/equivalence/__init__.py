"""Proofs about rank programs that ftp did not write: record each rank's program, run all of them on
residues, and find where they differ from the single-device program.
"""
