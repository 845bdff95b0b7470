"""Models as pure functions: functionalize, constraints on modules, remat, scan."""
