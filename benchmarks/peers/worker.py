"""One rank of one peer: builds its step, then runs it as told, a line of JSON in and a line out.

Everything that the peer itself prints goes to the standard error stream.
"""

import importlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

FLOOR = "floor"  # no train step: the least that a step must take
PEERS = {  # name -> file, options
    FLOOR: ("floor", {}),
    "plain": ("plain", {"compiled": False}),
    "plain compiled": ("plain", {"compiled": True}),
    "DTensor": ("dtensor", {"compiled": False}),
    "DTensor compiled": ("dtensor", {"compiled": True}),
    "Megatron": ("megatron", {"compiled": False}),
    "Megatron compiled": ("megatron", {"compiled": True}),
    "P4": ("one_graph", {}),
    "ftp": ("ours", {"compiled": False}),
    "ftp compiled": ("ours", {"compiled": True}),
    "ftp in memory": ("ours", {"compiled": False, "memory": True}),
    "ftp without buckets": ("ours", {"compiled": False, "bucket": False}),
    "ftp compiled in memory": ("ours", {"compiled": True, "memory": True}),
}
JAX = ("JAX", "JAX over gloo")  # in jax_worker.py
ALONE = ("plain", "plain compiled", "JAX")  # one process each


def serve(spec: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = time.perf_counter(), time.process_time()
    peer = _Peer(spec)
    imported = time.perf_counter() - start[0]
    for line in sys.stdin:
        asked = json.loads(line)
        if "first" in asked:
            at = time.perf_counter()
            step = peer.build()
            losses = [peer.value(step(peer.batch(0)))]
            answer = {"imports": imported, "first": time.perf_counter() - at}
            losses += [peer.value(step(peer.batch(i))) for i in range(1, asked["first"])]
            answer |= {"losses": losses, **peer.count(step)}
        else:
            cpu, seconds = time.process_time(), []
            for i in range(asked["run"]):
                data = peer.batch(i)
                at = time.perf_counter()
                peer.wait(step(data))
                seconds.append(time.perf_counter() - at)
            answer = {"seconds": seconds, "cpu": (time.process_time() - cpu) / max(1, asked["run"])}
            answer["peak_mib"] = _peak_mib()
        answers.write(json.dumps(answer) + "\n")


class _Peer:
    def __init__(self, spec: dict[str, Any]):
        import torch
        import torch.distributed as dist

        from peers import workloads

        torch.set_num_threads(1)
        self.work, self.workloads = workloads.WORKLOADS[spec["workload"]], workloads
        self.file, self.options = PEERS[spec["peer"]]
        if spec["peer"] not in ALONE:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{spec['meet']}",
                rank=spec["rank"],
                world_size=spec["ranks"],
            )
        self.batches = [workloads.batch(self.work, i) for i in range(workloads.BATCHES)]
        self.module = importlib.import_module(f"peers.{self.file}")

    def build(self):
        return self.module.build(self.work, **self.options)

    def batch(self, i: int) -> Any:
        return self.batches[i % len(self.batches)]

    def value(self, loss: Any) -> float:
        return float(loss)

    def wait(self, loss: Any) -> None:
        float(loss)

    def count(self, step: Any) -> dict[str, Any]:
        """Collectives of one step, and the bytes that a rank puts into them, as torch's profiler
        sees them begin.
        """
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            step(self.batch(0))
        found: Counter[str] = Counter()
        nbytes = 0
        for event in seen.events() or ():
            if event.name.startswith("gloo:") or event.name.endswith("_in_memory"):
                found[event.name.split(":")[-1]] += 1
                shapes = event.input_shapes or [[0]]
                nbytes += 4 * sum(_product(shape) for shape in shapes if isinstance(shape, list))
        return {"collectives": sum(found.values()), "kinds": dict(found), "bytes": nbytes}


def _peak_mib() -> float | None:
    """The most memory that the process has held; getrusage also counts what its parent held when
    it was forked.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)


def _product(shape: list[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
