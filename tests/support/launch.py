"""Runs a function or a snippet on n gloo processes that can hang, die or print without harm to
the tests.
"""

import atexit
import contextlib
import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What tests and a first step import. Nothing runs before the fork: autograd's threads would not
# survive it.
IMPORTED = [
    "hypothesis",
    "hypothesis.strategies",
    "pytest",
    "torch",
    "torch._inductor.compiler_bisector",
    "torch.distributed.device_mesh",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.flop_counter",
    "ftp.api.certify",
    "ftp.api.shard",
]


@dataclass(frozen=True)
class Rank:
    """How one process went: ``exit`` is None if it was killed at the timeout, negative for a
    signal.
    """

    exit: int | None
    stdout: str
    stderr: str
    value: Any = None
    error: str | None = None  # the exception as "TypeName: message"
    seconds: float = 0.0


def launch(
    job: Callable[..., Any] | str,
    n: int,
    *args: Any,
    timeout: float = 240.0,
    env: dict[str, str] | None = None,
) -> list[Rank]:
    """Runs ``job`` in n processes, with RANK and the like in their environment, and says how each
    went.

    A function is called with ``args`` and its result comes back as ``value``, pickled; a string is
    run as source. The processes are forked from one that has imported torch and ftp already, so a
    launch takes a fraction of a second. What still runs at the timeout is killed; the stacks of its
    threads are at the end of its ``stderr``.
    """
    context = _context()
    source = job if isinstance(job, str) else (inspect.getfile(job), job.__qualname__)
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **(env or {}),
        }
        processes = [
            context.Process(
                target=_main,
                args=(
                    source,
                    args,
                    {"RANK": str(r), "LOCAL_RANK": str(r), **common},
                    f"{folder}/{r}",
                ),
                daemon=True,
            )
            for r in range(n)
        ]
        start = time.monotonic()
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, start + timeout - time.monotonic()))
        alive = [process.is_alive() for process in processes]
        if any(alive):
            _write_stacks([process for process, late in zip(processes, alive, strict=True) if late])
        for process in processes:
            process.kill()
            process.join()
        return [
            _read(f"{folder}/{r}", None if late else process.exitcode)
            for r, (process, late) in enumerate(zip(processes, alive, strict=True))
        ]


def free_port() -> int:
    """A port for a store that is made later.

    It lies below the range from which Linux gives connections their ports (32768 and above):
    those of other tests cannot take it in the meantime.
    """
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    # The server reads the number of threads when it imports torch, at the first launch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return context


def _write_stacks(processes: list[Any]) -> None:
    """Lets each process write the stacks of its threads to its stderr. One that has not come as far
    as ``_main`` ends by the signal.
    """
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)


def _main(source: Any, args: tuple, env: dict[str, str], stem: str) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{stem}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.environ.update(env)
    start, code, value, error = time.monotonic(), 0, None, None
    try:
        value = _run(source, args)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException as e:
        code, error = 1, f"{type(e).__name__}: {e}"
        traceback.print_exc()
    Path(f"{stem}.result").write_bytes(pickle.dumps((value, error, time.monotonic() - start)))
    # Processes of this kind end without the functions registered for the end; programs of users run
    # them.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _run(source: Any, args: tuple) -> Any:
    if isinstance(source, str):
        exec(compile(source, "<launched>", "exec"), {"__name__": "__main__"})
        return None
    path, name = source
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part)
    return function(*args)


def _read(stem: str, code: int | None) -> Rank:
    texts = [
        Path(f"{stem}.{name}").read_text(errors="replace")
        if os.path.exists(f"{stem}.{name}")
        else "(the process did not come as far as the function that it was to run)"
        for name in ("out", "err")
    ]
    value, error, seconds = None, None, 0.0
    with contextlib.suppress(FileNotFoundError, EOFError):
        value, error, seconds = pickle.loads(Path(f"{stem}.result").read_bytes())
    return Rank(code, texts[0], texts[1], value, error, seconds)
