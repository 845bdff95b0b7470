"""Explicit mode: which collectives of a plan the program asks for, and the line for each other."""
