"""Programs in processes of their own, for what depends on the modules that are loaded.

The processes are forked from one that has imported torch and nothing else, so a program takes a
second or two less than in a Python of its own.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVER = """
import atexit, json, os, sys, traceback, types, torch

def run(ask):
    for stream, name in enumerate(("/dev/null", ask["out"], ask["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
    os.chdir(ask["folder"])
    os.environ.clear()
    os.environ.update(ask["env"])
    code, sys.argv = 0, ask["argv"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = ask["argv"][0]
    sys.path[0] = ask["path"]
    try:
        exec(compile(ask["program"], ask["argv"][0], "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else end.code is not None
    except BaseException:
        code = 1
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if not child:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run(
    program: str, *, folder: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The program's exit code, and what it printed."""
    return _asked(program, ["-c"], "", folder, env)


def run_file(
    path: Path, *arguments: str, folder: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As ``run``, of a file with arguments."""
    return _asked(path.read_text(), [str(path), *arguments], str(path.parent), folder, env)


def check(program: str, expected: list[str]) -> None:
    """The program, run in a process of its own, prints the expected lines."""
    found = run(program)
    assert found.stdout.splitlines() == expected, found.stderr[-3000:]


@functools.cache
def _server() -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SERVER]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, env=env, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)  # closes its input, which ends it
    return server


def _asked(
    program: str, argv: list[str], path: str, folder: Path, env: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as scratch:
        names = {name: f"{scratch}/{name}" for name in ("out", "err")}
        ask: dict[str, Any] = {"program": program, "argv": argv, "path": path, **names}
        ask |= {"folder": str(folder), "env": dict(os.environ if env is None else env)}
        server.stdin.write(json.dumps(ask) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (Path(name).read_text() for name in names.values())
    return subprocess.CompletedProcess(argv, code, out, err)
