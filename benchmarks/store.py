"""What a TCPStore takes: questions a second, how soon a ring reaches watching threads, and how long
many ranks take to agree on a program.

docs/faults.md has the arithmetic of large worlds.

    python benchmarks/store.py [--json]

The store is in a process of its own; clients ask it through connections of their own, as ranks do.
The ranks that agree are threads of one process. Each has all that a rank has for it: a `Calls`, two
connections, a thread that asks and one that watches.
"""

import argparse
import multiprocessing
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

import record
import torch.distributed as dist
from torch.distributed import TCPStore

from ftp.distributed import agreement, channel, store
from ftp.distributed.calls import Calls
from ftp.sharding.mesh import Mesh
from ftp.sharding.process_group import current_world

SECONDS = 3.0
CLIENTS = (1, 2, 4, 8)
WAITING = (100, 400)
WORLD = 16_384  # ranks whose bells are rung
AGREEING = (16, 64, 256)
CALLS = 5
TIMEOUT = 300.0  # seconds that a rank waits for the others


def _client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


def _serve(pipe: Any) -> None:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    pipe.send(store.port)
    pipe.recv()


def _ask(port: int, begun: Any, counts: Any) -> None:
    store = _client(port)
    begun.wait()
    end, n = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        store.check(["ftp/agreement/0/0/0123abcd/12/verdict"])
        n += 1
    counts.put(n)


def questions(port: int, clients: int) -> dict[str, Any]:
    """Clients that ask as fast as they are answered."""
    context = multiprocessing.get_context("fork")
    begun, counts = context.Barrier(clients), context.Queue()
    processes = [context.Process(target=_ask, args=(port, begun, counts)) for _ in range(clients)]
    for process in processes:
        process.start()
    total = sum(counts.get() for _ in processes)
    for process in processes:
        process.join()
    return {"clients": clients, "questions a second": round(total / SECONDS)}


def rings(port: int, waiting: int) -> dict[str, Any]:
    """Threads that wait at keys of their own, which are set by one question together with those
    of all other ranks.
    """
    late: list[float] = []

    def wait(rank: int, store: TCPStore) -> None:
        store.wait([f"{waiting}/bell/{rank}"], timedelta(seconds=60))
        late.append(time.monotonic())

    threads = [threading.Thread(target=wait, args=(rank, _client(port))) for rank in range(waiting)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    store: Any = _client(port)
    keys = [f"{waiting}/bell/{rank}" for rank in range(WORLD)]
    begun = time.monotonic()
    store.multi_set(keys, [""] * WORLD)
    set_after = time.monotonic() - begun
    for thread in threads:
        thread.join()
    return {
        "waiting": waiting,
        "keys": WORLD,
        "set, ms": round(set_after * 1e3, 1),
        "last awake, ms": round((max(late) - begun) * 1e3, 1),
    }


def agreements(port: int) -> list[dict[str, Any]]:
    """Ranks that have connected, and agree on ``CALLS`` programs in turn."""
    timeout = timedelta(seconds=TIMEOUT)
    own = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=own, rank=0, world_size=1)
    channel.host = lambda: None  # no watching of 255 processes
    agreement.thread_name = lambda: "main"  # as in processes, where a rank's calls have one thread
    asked, ask = [0], store.Connection.ask

    def counted(connection: Any, question: Any, seconds: float) -> Any:
        asked[0] += 1
        return ask(connection, question, seconds)

    store.Connection.ask = counted
    try:
        return [_agree(ranks, asked) for ranks in AGREEING]
    finally:
        dist.destroy_process_group()


def _agree(ranks: int, asked: list[int]) -> dict[str, Any]:
    everybody, world = tuple(range(ranks)), current_world()
    begun: list[float] = []
    ended: list[list[float]] = [[] for _ in range(CALLS)]
    counts: list[int] = []

    def all_here() -> None:
        counts.append(asked[0])
        begun.append(time.monotonic())

    together = threading.Barrier(ranks, all_here)

    def run(rank: int) -> None:
        mesh = Mesh((ranks,), ("dp",), "cpu", "process", everybody, rank, world, ("dp",))
        calls = Calls(mesh)
        calls._channel.store(TIMEOUT).check("key")  # connects
        for call, times in enumerate(ended, 1):
            together.wait()
            calls.agree(call, {"library version": "1", "program": f"{call:064x}"}, TIMEOUT)
            times.append(time.monotonic())
            calls.call = call

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = [max(times) - start for times, start in zip(ended, begun, strict=True)]
    return {
        "ranks": ranks,
        "median, s": round(statistics.median(seconds), 2),
        "longest, s": round(max(seconds), 2),
        "questions a rank": round((asked[0] - counts[0]) / CALLS / ranks, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(there,))
    server.start()
    port = here.recv()
    asked = [questions(port, clients) for clients in CLIENTS]
    record.show(asked, ("clients", "questions a second"))
    rung = [rings(port, waiting) for waiting in WAITING]
    record.show(rung, ("waiting", "keys", "set, ms", "last awake, ms"))
    agreed = agreements(port)
    record.show(agreed, tuple(agreed[0]))
    here.send(None)
    server.join()
    if options.json:
        record.save("store", {"questions": asked, "rings": rung, "agreements": agreed})


if __name__ == "__main__":
    main()
