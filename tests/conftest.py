"""What all tests share.

- Rules found by trial are kept apart from the user's own cache.
- One hypothesis profile, without a deadline: machines that run the tests differ in speed.
- Each test draws torch's random numbers from a seed of its own, so that its values depend neither
  on the tests before it nor on the process that runs it. FTP_TEST_SEED=1 draws other values.
- ``--slow-slice=N/M`` runs a part of the slow tests, see tests/support/slow_slice.py.
"""

import os
import tempfile
import zlib
from typing import Any

import pytest
import slow_slice
import torch
from hypothesis import settings

os.environ.setdefault("FTP_CACHE", tempfile.mkdtemp(prefix="ftp-cache-"))
settings.register_profile("ftp", deadline=None)
settings.load_profile("ftp")


@pytest.fixture(autouse=True)
def seed_of_this_test(request: Any) -> None:
    name = f"{os.environ.get('FTP_TEST_SEED', '')}{request.node.nodeid}"
    torch.manual_seed(zlib.crc32(name.encode()))


def pytest_addoption(parser: Any) -> None:
    slow_slice.add_options(parser)


def pytest_configure(config: Any) -> None:
    if text := config.getoption("--slow-slice"):
        limit = config.getoption("--slow-limit")
        config.pluginmanager.register(slow_slice.SlowSlice(text, limit), "slow-slice")
