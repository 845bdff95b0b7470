"""Search: the plan of least estimated time within a memory limit, over the parameters' layouts."""
