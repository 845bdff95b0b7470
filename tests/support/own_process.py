"""Programs in processes of their own, for what depends on the modules that are loaded."""

import subprocess
import sys
from pathlib import Path


def check(program: str, expected: list[str]) -> None:
    """The program, run in a process of its own, prints the expected lines."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert found.stdout.splitlines() == expected, found.stderr[-3000:]
