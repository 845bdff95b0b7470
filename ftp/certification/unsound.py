"""Errors inside the checker."""


class Unsound(Exception):
    """A tensor does not hold the elements that it should; the message says why."""


class Refused(Unsound):
    """An error whose message is complete but for the rank, which the checker adds."""
