"""Pass 5, run: one rank's graph, eager, compiled, recorded, in shared memory, or simulated."""
