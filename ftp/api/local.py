"""``ftp.local`` with the kernel that runs it on simulated ranks outside of a step."""

import ftp.api.reshard  # noqa: F401  registers the kernel
from ftp.per_rank.local import local

__all__ = ["local"]
