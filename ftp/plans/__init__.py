"""Plans that people already have, read as specs and constraints: PyTorch's styles, and what stands beside them."""

from ftp.plans.parallelize import from_parallelize_plan, merge

__all__ = ["from_parallelize_plan", "merge"]
