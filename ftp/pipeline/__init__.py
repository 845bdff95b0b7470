"""Pipeline parallelism: a placement of parameters on stages, and a schedule of actions, both data.

See ``docs/pipelines.md``.
"""
