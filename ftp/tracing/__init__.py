"""Pass 1, trace: a pure function to one functional aten graph, forward and backward."""
