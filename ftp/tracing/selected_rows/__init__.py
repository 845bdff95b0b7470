"""Rows that a mask or an index selects: their number is a value, a program's shapes are fixed."""
