"""What a program is said to need before it runs: memory, collectives, time, and what is odd
about it. Nothing here decides anything.
"""
