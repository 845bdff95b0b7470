"""Python that depends on values: branches, guards, and numbers read from tensors."""
