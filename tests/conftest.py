"""What all tests share.

- Rules found by trial are kept apart from the user's own cache.
- One hypothesis profile, without a deadline: machines that run the tests differ in speed.
- A test's values depend neither on the tests before it nor on the process that runs it: torch's
  random numbers come from a seed of its own, hypothesis draws the same examples each time.
  FTP_TEST_SEED=n draws others, with n = 1 others than with n = 2.
- The garbage collector looks at young objects seldom, after every 100th test at all but those that
  were there after the 100th before.
- Of a test marked ``cases_by_default(n)``, n cases run by default, the others among the slow tests.
- ``--slow-slice=N/M`` runs a part of the slow tests, see tests/support/slow_slice.py.
"""

import gc
import itertools
import os
import tempfile
import zlib
from typing import Any

import cases_by_default
import pytest
import slow_slice
import torch
from hypothesis import settings

os.environ.setdefault("FTP_CACHE", tempfile.mkdtemp(prefix="ftp-cache-"))
SEED = os.environ.get("FTP_TEST_SEED", "")
settings.register_profile("ftp", deadline=None, derandomize=not SEED)
settings.load_profile("ftp")


@pytest.fixture(autouse=True)
def seed_of_this_test(request: Any) -> None:
    torch.manual_seed(zlib.crc32(f"{SEED}{request.node.nodeid}".encode()))


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(items: list[Any]) -> None:
    cases_by_default.mark_cases(items)


def pytest_collection_finish(session: Any) -> None:
    gc.collect()
    gc.freeze()  # what was imported stays: no later collection looks at it
    gc.set_threshold(500_000, 20, 100)


_since_collection = itertools.count(1)


def pytest_runtest_teardown() -> None:
    if next(_since_collection) % 100 == 0:
        gc.collect()
        gc.freeze()


def pytest_addoption(parser: Any) -> None:
    slow_slice.add_options(parser)


def pytest_configure(config: Any) -> None:
    if SEED and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = SEED
    if text := config.getoption("--slow-slice"):
        limit = config.getoption("--slow-limit")
        config.pluginmanager.register(slow_slice.SlowSlice(text, limit), "slow-slice")
