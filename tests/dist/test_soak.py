"""The soak runs, for a short while; `python tests/dist/soak.py --minutes 60` is the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_a_short_soak():
    script = Path(__file__).with_name("soak.py")
    ended = subprocess.run(
        [sys.executable, script, "--minutes", "1", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert "nothing lost, nothing wrong, no hang" in ended.stdout
