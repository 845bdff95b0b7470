"""A program's plan without buckets, for tests that count what the planner reshards."""

import ftp


def unbucketed(lowered: ftp.Lowered) -> ftp.Lowered:
    """The same plan with a collective for each reshard."""
    return ftp.Lowered(lowered._program.with_options(bucket=False))
