"""Errors inside the checker: a step that is not sound."""


class Unsound(Exception):
    """A step after which a tensor no longer holds what it should; the message says why."""


class Refused(Unsound):
    """A complete message: the checker adds the rank and nothing else."""
