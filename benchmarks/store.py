"""What a TCPStore takes: questions a second, and how soon a ring reaches watching threads.

docs/faults.md has the arithmetic of large worlds.

    python benchmarks/store.py [--json]

The store is in a process of its own; clients ask it through connections of their own, as ranks do.
"""

import argparse
import multiprocessing
import threading
import time
from datetime import timedelta
from typing import Any

import record
from torch.distributed import TCPStore

SECONDS = 3.0
CLIENTS = (1, 2, 4, 8)
WAITING = (100, 400)
WORLD = 16_384  # ranks whose bells are rung


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
    here.send(None)
    server.join()
    if options.json:
        record.save("store", {"questions": asked, "rings": rung})


if __name__ == "__main__":
    main()
