"""What all tests share.

- Rules found by trial are kept apart from the user's own cache.
- One hypothesis profile, without a deadline: machines that run the tests differ in speed.
- ``--slow-slice=N/M`` runs a part of the slow tests, see tests/support/slow_slice.py.
"""

import os
import tempfile
from typing import Any

import slow_slice
from hypothesis import settings

os.environ.setdefault("FTP_CACHE", tempfile.mkdtemp(prefix="ftp-cache-"))
settings.register_profile("ftp", deadline=None)
settings.load_profile("ftp")


def pytest_addoption(parser: Any) -> None:
    slow_slice.add_options(parser)


def pytest_configure(config: Any) -> None:
    if text := config.getoption("--slow-slice"):
        limit = config.getoption("--slow-limit")
        config.pluginmanager.register(slow_slice.SlowSlice(text, limit), "slow-slice")
