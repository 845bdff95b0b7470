"""All-reduces among many ranks by parts that are sent to all at once, or at the first rank."""

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from ftp.runtime.gloo_calls import (
    _MANY,
    _SMALL,
    goes_by_parts,
    reduce_at_first,
    reduce_by_parts,
)


class _Work:
    def __init__(self, arrive):
        self.wait = arrive


class _Group:
    """One rank of a process group, of threads that meet."""

    options = SimpleNamespace(_timeout=60)

    def __init__(self, number, sent, meet, boxes):
        self._number, self._sent, self._meet, self._boxes = number, sent, meet, boxes
        self.messages = 0

    def rank(self):
        return self._number

    def _get_backend(self, device):
        assert device.type == "cpu"
        return self

    def send(self, tensors, rank, tag):
        self.messages += 1
        self._boxes[self._number, rank, tag].put(tensors[0].clone())
        return _Work(lambda timeout: None)

    def recv(self, tensors, rank, tag):
        box = self._boxes[rank, self._number, tag]
        return _Work(lambda timeout: tensors[0].copy_(box.get(timeout=timeout)))

    def size(self):
        return len(self._sent)

    def alltoall_base(self, output, given, output_sizes, given_sizes):
        assert output.shape == given.shape and not output_sizes and not given_sizes
        self.messages += self.size() - 1

        def arrive():
            self._sent[self._number] = given
            self._meet.wait()
            output.copy_(torch.stack([of[self._number] for of in self._sent]))
            self._meet.wait()

        return _Work(arrive)


@pytest.mark.parametrize("reduce_many", [reduce_by_parts, reduce_at_first])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (64, 33), (10_007,)])
def test_all_reduces(reduce_many, op, dtype, shape):
    n, generator = _MANY + 1, torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64) * 100
    x = x.round().to(dtype) if not dtype.is_floating_point else x.to(dtype)
    sent, meet = [None] * n, threading.Barrier(n, timeout=60)
    boxes = defaultdict(queue.SimpleQueue)
    groups = [_Group(rank, sent, meet, boxes) for rank in range(n)]

    def reduced(rank):
        y = x[rank].clone()
        assert goes_by_parts(y, op, n)
        reduce_many(y, op, groups[rank])
        return y

    with ThreadPoolExecutor(n) as pool:
        results = list(pool.map(reduced, range(n)))
    assert all(torch.equal(y, results[0]) for y in results), "replicas are equal bit for bit"
    wide = x.double()
    want = {"sum": wide.sum(0), "max": wide.amax(0), "min": wide.amin(0)}[op]
    assert torch.allclose(results[0].double(), want, rtol=1e-6, atol=1e-4)
    if reduce_many is reduce_at_first:
        assert [g.messages for g in groups] == [n - 1, *[1] * (n - 1)]
    else:
        is_tiny = x[0].numel() < 100
        assert {g.messages for g in groups} == {(n - 1) * (1 if is_tiny else 2)}


def test_a_ring_where_ranks_are_few_values_large_or_of_other_kinds():
    x = torch.ones(4)
    assert goes_by_parts(x, "sum", _MANY) and not goes_by_parts(x, "sum", _MANY - 1)
    assert not goes_by_parts(x[:0], "sum", _MANY)
    assert not goes_by_parts(torch.ones(_SMALL // 4 + 1), "sum", _MANY)
    assert not goes_by_parts(x.to(torch.bfloat16), "sum", _MANY)
    assert not goes_by_parts(x, "product", _MANY)
