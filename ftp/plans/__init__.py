"""Plans that people already have, read as specs and constraints: PyTorch's styles, and what stands beside them."""
