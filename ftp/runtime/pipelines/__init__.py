"""Run a pipeline: each rank its stages' subgraphs in order, and messages between stages."""
