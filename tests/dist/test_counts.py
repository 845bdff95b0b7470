"""What a report says of collectives is what gloo is asked for when the step runs: as many of
each kind, and of the same bytes.
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after
from launch import launch
from torch.profiler import ProfilerActivity, profile

import ftp
from ftp import P

pytestmark = pytest.mark.dist

# What issues a collective, and what gloo then does; a reduce-scatter is an all-reduce of the whole
# inside it.
_ISSUED = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
}
_MOVED = {
    "all_reduce": "gloo:all_reduce",
    "all_gather": "gloo:all_gather",
    "reduce_scatter": "gloo:all_reduce",
    "all_to_all": "gloo:all_to_all",
}
_BYTES = {"float": 4, "double": 8, "int": 4, "long int": 8, "c10::BFloat16": 2}
_PROGRAMS: dict[str, Any] = {
    "mlp tp": ("mlp", {"tp": "tp"}, P(), None),
    "mlp dp": ("mlp", {}, P("n"), None),
    "llama tp": ("llama", {"tp": "n"}, P(), None),
    "llama sp": ("llama", {"tp": "n"}, P(), "sp"),
    "llama dp": ("llama", {}, P("n"), None),
    "llama zero-3": ("llama", {"zero": "n"}, P("n"), None),
    "llama cp": ("llama", {}, P(None, "n"), None),
}
# On axes a and b of two ranks each: specs of parameters on a, b or both, those of the batch, and
# what the step is asked for.
_BOTH = P(("a", "b"))
_ON_TWO_AXES: dict[str, Any] = {
    "zero-3 over both, merged": (_BOTH, _BOTH, None, {"bucket": True}),
    "zero-3 over both, an axis at a time": (_BOTH, _BOTH, None, {"bucket": False}),
    "dp over both, packed": (P(), _BOTH, None, {"bucket": True}),
    "zero-3 on b, dp on a": (P("b"), _BOTH, None, {"bucket": True}),
    "tp on b, zero-3 on a": ("tp", P("a"), None, {"bucket": True}),
    "sp on b in chunks, dp on a": ("tp", P("a"), "sp", {"bucket": True, "chunks": 2}),
}


def _program(name, mesh):
    import models  # type: ignore[import-not-found]

    kind, cut, rows, pins = _PROGRAMS[name]
    if kind == "mlp":
        cfg = models.MLPConfig(layers=2, dim=7, hidden=9)
        batch = models.class_batch(cfg, 6)
        cut = dict.fromkeys(cut, "n")
    else:
        cfg = models.LlamaConfig(vocab=33, heads=3, dim=12, hidden=10, layers=2)
        batch = models.lm_batch(cfg, batch=4, seq=6)
    fn, full = ftp.functionalize(
        models.build(cfg), constraints=models.sequence_parallel(tp="n") if pins else None
    )
    specs = ftp.plan(full, models.specs(models.cuts(cfg), **cut))  # type: ignore[arg-type]
    step = ftp.shard(models.loss(cfg, fn), mesh, specs, batch_specs=rows)
    return step, ftp.device_put(full, mesh, specs), ftp.device_put(batch, mesh, rows)


def _program_on_two_axes(name, mesh):
    import models  # type: ignore[import-not-found]

    params, rows, pins, options = _ON_TWO_AXES[name]
    cfg = models.LlamaConfig(vocab=33, heads=4, dim=16, hidden=10, layers=2)
    fn, full = ftp.functionalize(
        models.build(cfg), constraints=models.sequence_parallel(tp="b", dp="a") if pins else None
    )
    cuts = models.cuts(cfg)
    zero = None if pins else "a"
    patterns: Any = (
        models.specs(cuts, tp="b", zero=zero) if params == "tp" else dict.fromkeys(cuts, params)
    )
    specs = ftp.plan(full, patterns)
    batch = models.lm_batch(cfg, batch=8, seq=6)
    step = ftp.shard(models.loss(cfg, fn), mesh, specs, batch_specs=rows, **options)
    return step, ftp.device_put(full, mesh, specs), ftp.device_put(batch, mesh, rows)


def _counted(axes, programs, made):
    mesh = ftp.make_mesh(tuple(axes.values()), tuple(axes), device_type="cpu")
    found = {}
    for name in programs:
        step, params, batch = made(name, mesh)
        step(params, batch)  # agreement and first calls
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            step(params, batch)
        events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
        issued = Counter(_ISSUED[e.name()] for e in events if e.name() in _ISSUED)
        moved = Counter()
        for event in events:
            if event.name().startswith("gloo:"):
                (shape, *_), (dtype, *_) = event.shapes(), event.dtypes()
                moved[event.name(), torch.Size(shape).numel() * _BYTES[dtype]] += 1
        said = step.lower(params, batch).collectives
        n = {c.axes: math.prod(axes[a] for a in c.axes) for c in said}
        sizes = Counter(
            (_MOVED[c.op], c.nbytes // n[c.axes] if c.op == "all_gather" else c.nbytes)
            for c in said
        )
        found[name] = (dict(issued), dict(Counter(c.op for c in said)), dict(moved), dict(sizes))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _equal_counts(ranks, programs):
    assert [r.exit for r in ranks] == [0] * len(ranks), [r.error or r.stderr[-2000:] for r in ranks]
    for rank in ranks:
        assert set(rank.value) == set(programs)
        for name, (issued, said, moved, sizes) in rank.value.items():
            assert issued == said, name
            assert moved == sizes, name
    return {kind for issued, *_ in ranks[0].value.values() for kind in issued}


@pytest.mark.parametrize(
    "names",
    slow_after(
        1, [["mlp dp", "llama sp"], [n for n in _PROGRAMS if n not in ("mlp dp", "llama sp")]]
    ),
)
def test_counts_and_bytes_are_those_of_gloo(names: list[str]):
    kinds = _equal_counts(launch(_counted, 2, {"n": 2}, names, _program, timeout=120), names)
    assert {"all_reduce", "all_gather", "reduce_scatter"} <= kinds


@pytest.mark.slow
def test_counts_and_bytes_of_merged_axes_packs_and_chunks():
    ranks = launch(
        _counted, 4, {"a": 2, "b": 2}, list(_ON_TWO_AXES), _program_on_two_axes, timeout=240
    )
    assert {"all_reduce", "all_gather", "reduce_scatter"} <= _equal_counts(ranks, _ON_TWO_AXES)
