"""Explicit mode: find the collectives that the program does not ask for, and the lines that do."""
