"""Steps on gloo processes equal one device; ranks that differ all fail, and soon."""

import itertools
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist


def _mesh(shape=None, names=("tp",)):
    return ftp.make_mesh(shape or (int(os.environ["WORLD_SIZE"]),), names, device_type="cpu")


def _end():
    dist.barrier()
    dist.destroy_process_group()


def _values(ranks):
    assert [r.exit for r in ranks] == [0] * len(ranks), [r.error or r.stderr[-2000:] for r in ranks]
    return [r.value for r in ranks]


def _errors(ranks, within=15.0):
    assert all(r.error for r in ranks), ranks
    assert max(r.seconds for r in ranks) < within, [r.seconds for r in ranks]
    return [r.error for r in ranks]


# Numbers.

NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
)
DTYPES = (*DTYPES, "uint32", "uint64", "bool", "complex32", *NARROW)
FLOATS = DTYPES[:4]


def _extrema(x):
    """Of infinite values and NaN, some of one rank alone."""
    x = torch.where(x == 6, torch.inf, torch.where(x == 2, -torch.inf, x - 3))
    x = torch.cat([x, x.where(x != -3, torch.nan)], 1)
    return {"top": x.amax(0).nan_to_num(9), "least": x.amin(0).nan_to_num(9)}


def _every_dtype():
    """What differs from one device, bit for bit."""
    warnings.simplefilter("ignore")  # torch's, of ComplexHalf
    mesh, ids = _mesh(), torch.tensor([5, 0, 3, 3])
    xs = {name: (torch.arange(6 * 5).reshape(6, 5) % 7).to(getattr(torch, name)) for name in DTYPES}

    def fn(xs, ys, zs):
        moved = {
            name: {"gather": x[:], "all_to_all": ys[name][:], "lookup": zs[name][ids]}
            for name, x in xs.items()
        }
        for name in ("int16", "int8", "uint8"):  # sums that overflow
            moved[name] |= {
                "sum": (xs[name] * 99).sum(0, dtype=xs[name].dtype),
                "max": (xs[name] * 99).amax(0),
            }
        for name in FLOATS:
            moved[name] |= _extrema(xs[name])
        moved["bool"]["any"] = xs["bool"].any(0)
        return moved

    want = fn(xs, xs, xs)
    specs = {"all_to_all": P(None, "tp"), "lookup": P("tp")}
    out = {name: {kind: specs.get(kind, P()) for kind in kinds} for name, kinds in want.items()}
    step, placed = ftp.spmd(fn, mesh, P("tp"), out), ftp.device_put((xs, xs, xs), mesh, P("tp"))
    issued = {(c.op, c.dtype) for c in step.lower(*placed).collectives}
    got = ftp.device_get(step(*placed), mesh, out)
    _end()
    wrong = [
        f"{name}, {kind}: {got[name][kind]}, not {due}"
        for name, kinds in want.items()
        for kind, due in kinds.items()
        if got[name][kind].dtype != due.dtype
        or not torch.equal(got[name][kind].view(torch.uint8), due.contiguous().view(torch.uint8))
    ]
    return wrong, issued


def _short_shards():
    """What differs from one device, or raises, of ops that act along a dim, with dims cut so that
    ranks hold short and empty shards.
    """
    mesh, wrong = _mesh(), []
    ops = {
        "amax": lambda x, d: x.amax(d),
        "argmax": lambda x, d: x.argmax(d),
        "max": lambda x, d: x.max(d).values,
        "norm inf": lambda x, d: torch.norm(x, float("inf"), d),
        "norm 2": lambda x, d: torch.linalg.vector_norm(x, 2, d),
        "cumsum": lambda x, d: x.cumsum(d),
        "cumprod": lambda x, d: x.cumprod(d),
        "logcumsumexp": lambda x, d: x.logcumsumexp(d),
        "sort": lambda x, d: x.sort(d).values,
        "topk": lambda x, d: x.topk(1, d).values,
        "fft": lambda x, d: torch.fft.fft(x, dim=d).abs(),
        "softmax": lambda x, d: x.softmax(d),
        "prod": lambda x, d: x.prod(d),
        "var": lambda x, d: x.var(d, correction=0),
        "logsumexp": lambda x, d: x.logsumexp(d),
        "median": lambda x, d: x.median(d).values,
    }
    for rows, dim in itertools.product((4, 1), (-1, -2)):
        x = torch.rand(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        due = {name: op(x, dim) for name, op in ops.items()}
        for spec in (P("tp"), P(None, "tp")):
            step = ftp.spmd(
                lambda x, dim=dim: {name: op(x, dim) for name, op in ops.items()}, mesh, spec, P()
            )
            got = step(ftp.device_put(x, mesh, spec))
            wrong += [
                f"{name} of {rows} x 4 along {dim}, {spec}"
                for name in ops
                if not torch.allclose(got[name], due[name], rtol=1e-12, atol=1e-12)
            ]
    _end()
    return wrong


@pytest.mark.parametrize("ranks", slow_after(1, [3, 2]))
def test_empty_and_short_shards_raise_on_no_rank(ranks):
    for wrong in _values(launch(_short_shards, ranks, timeout=240)):
        assert not wrong, "\n".join(wrong)


def _ids_out_of_range():
    mesh, w = _mesh(), torch.randn(5, 2)
    step = ftp.shard(
        lambda p, ids: torch.nn.functional.embedding(ids, p).sum(),
        mesh,
        P("tp"),
        batch_specs=P("tp"),
        check_inputs=True,
    )
    placed = ftp.device_put(w, mesh, P("tp"))
    ids = torch.tensor([4, 0]) if mesh.get_local_rank("tp") == 0 else torch.tensor([1, 5])
    try:
        step(placed, ids)
    except ftp.errors.InputError as error:
        return str(error)
    finally:
        _end()


def test_ids_out_of_range_fail_all_ranks():
    for said in _values(launch(_ids_out_of_range, 2)):
        assert "ids holds 5, which is not in [0, 5), where it indexes" in said
        assert "on rank 1" in said


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("shm", ["0", "1"])
def test_collectives_of_every_dtype(shm):
    for wrong, issued in _values(launch(_every_dtype, 2, env={"FTP_SHM": shm})):
        assert not wrong, "\n".join(wrong)
        for name in DTYPES:
            assert {
                ("all_gather", getattr(torch, name)),
                ("all_to_all", getattr(torch, name)),
            } < issued
        assert {
            ("all_reduce", torch.int16),
            ("reduce_scatter", torch.int16),
            ("reduce_scatter", torch.complex64),
        } < issued


def _conjugates():
    """What differs from one device of lazy conjugates, and of the imaginary parts of them, that
    ranks send.
    """
    generator = torch.Generator().manual_seed(0)
    mesh, x = _mesh(), torch.randn(2, 4, dtype=torch.complex128, generator=generator)
    wrong, cuts = [], (P(), P("tp"), P(None, "tp"))
    for old, new in itertools.product(cuts, cuts):
        for part in (torch.conj, lambda x: x.conj().imag, lambda x: x[:, 0].conj().imag[:, None]):
            placed = ftp.device_put(x, mesh, old)
            got = ftp.device_get(ftp.spmd(part, mesh, old, new)(placed), mesh, new)
            if not torch.equal(got, part(x)):
                wrong.append(f"{old} to {new}: {got}, not {part(x)}")
    _end()
    return wrong


@pytest.mark.parametrize("shm", slow_after(1, ["0", "1"]))
def test_conjugates_are_sent_as_they_read(shm):
    for wrong in _values(launch(_conjugates, 2, env={"FTP_SHM": shm})):
        assert not wrong, "\n".join(wrong)


def _llama(shape, names, batch_spec, batch, options, compile):
    import models  # type: ignore[import-not-found]

    mesh = _mesh(shape, names)
    cfg = models.LlamaConfig(vocab=33, heads=3, dim=12, hidden=10, layers=2)
    fn, full = ftp.functionalize(models.build(cfg, dtype=torch.float64))
    loss_fn = models.lm_loss(fn)
    specs = ftp.plan(full, models.specs(models.cuts(cfg), **options))
    step = ftp.shard(loss_fn, mesh, specs, batch_specs=batch_spec, compile=compile)
    data = models.lm_batch(cfg, batch=batch, seq=6, ignored=0.2)
    params = ftp.device_put(full, mesh, specs)
    local = ftp.device_put(data, mesh, batch_spec)
    expected_loss, expected = models.reference(loss_fn, full, data)
    errors = []
    for _ in range(2):
        loss, grads = step(params, local)
        grads = ftp.device_get(grads, mesh, specs)
        errors.append(float((loss - expected_loss).abs()))
        largest = max(float(g.abs().max()) for g in expected.values())
        errors += [
            float((grads[k] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * largest)
            for k, g in expected.items()
        ]
    _end()
    return max(errors)


def test_a_llama_under_tensor_parallelism_equals_one_device():
    for error in _values(launch(_llama, 2, None, ("tp",), P(), 4, {"tp": "tp"}, False)):
        assert error < 1e-12


def test_uneven_sizes_over_two_axes_equal_one_device():
    options = {"tp": "tp", "zero": "dp"}
    for error in _values(launch(_llama, 4, (2, 2), ("dp", "tp"), P("dp"), 5, options, False)):
        assert error < 1e-12


@pytest.mark.slow
def test_compiled_programs_equal_one_device():
    for error in _values(launch(_llama, 2, None, ("tp",), P(), 4, {"tp": "tp"}, True, timeout=200)):
        assert error < 1e-12


# Placement.


def _loss(params, x):
    return (x @ params["w"]).square().sum()


def _placement():
    mesh = _mesh((2, 2), ("dp", "tp"))
    rank = dist.get_rank()
    spec = P("tp", "dp")
    bad = []
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        full = (torch.arange(35).reshape(5, 7) % 3).to(dtype)
        mine = full if rank == 1 else torch.zeros_like(full)
        placed = ftp.device_put(
            {"w": mine, "zero": mine[0, 0], "none": mine[:0]},
            mesh,
            {"w": spec, "zero": P(), "none": P("dp")},
            src=1,
        )
        back = ftp.device_get(placed, mesh, {"w": spec, "zero": P(), "none": P("dp")})
        at = ftp.local_slice(mesh, spec, full.shape)
        moved = ftp.reshard(placed["w"], mesh, spec, P(("dp", "tp")))
        bad += [
            str(dtype)
            for a, b in (
                (back["w"], full),
                (back["zero"], full[0, 0]),
                (back["none"], full[:0]),
                (placed["w"], full[at]),
            )
            if not torch.equal(a, b) or a.dtype != b.dtype
        ]
        bad += [f"reshard {dtype}"] * (
            not torch.equal(ftp.device_get(moved, mesh, P(("dp", "tp"))), full)
        )
    _end()
    return bad


def test_placement_on_processes():
    assert _values(launch(_placement, 4)) == [[]] * 4


def _unknown():
    """Plain tensors are taken as shards, uneven ones too; a loop whose parameters are new
    tensors plans once.
    """
    mesh = _mesh()
    full = torch.arange(15.0).reshape(5, 3)
    w = full[ftp.local_slice(mesh, P("tp"), (5, 3))].clone()
    x = torch.ones(4, 5)
    step = ftp.shard(_loss, mesh, {"w": P("tp")})
    losses = []
    for _ in range(3):
        loss, grads = step({"w": w}, x)
        losses.append(float(loss))
        w = w - 0.01 * grads["w"]
    programs = len({id(p) for p in step._cache.programs.values()})
    _end()
    return losses, programs, tuple(grads["w"].shape)


def _unknown_on_one_device():
    w, losses = torch.arange(15.0).reshape(5, 3), []
    for _ in range(3):
        grads, loss = torch.func.grad_and_value(_loss)({"w": w}, torch.ones(4, 5))
        losses.append(float(loss))
        w = w - 0.01 * grads["w"]
    return losses


def test_unknown_tensors_are_shards():
    values = _values(launch(_unknown, 2))
    assert [programs for _, programs, _ in values] == [1, 1]
    assert [shape for *_, shape in values] == [(3, 3), (2, 3)]
    for losses, *_ in values:
        assert losses == pytest.approx(_unknown_on_one_device())


# Ranks that differ.


def _full_tensors():
    mesh = _mesh()
    ftp.shard(_loss, mesh, {"w": P("tp")})(
        {"w": torch.arange(12.0).reshape(4, 3)}, torch.ones(2, 8)
    )


def test_full_tensors_where_shards_are_due():
    for error in _errors(launch(_full_tensors, 2)):
        assert error == (
            "MismatchError: params['w'] has the same contents on all ranks, of shape (4, 3),"
            " though its spec P('tp') cuts it: it looks like"
            " a full tensor where a shard is due. Place it with ftp.device_put(tree, mesh, specs)."
        )


def _other_shapes():
    mesh = _mesh()
    rank = dist.get_rank()
    ftp.shard(_loss, mesh, {"w": P()})({"w": torch.ones(4, 3)}, torch.ones(2 + rank, 4))


def test_other_batch_shapes():
    for error in _errors(launch(_other_shapes, 2)):
        assert error == (
            "MismatchError: x, of spec P(), is not the shards of one tensor: rank 0 holds (2, 4),"
            " rank 1 (3, 4)."
            " Of a global (2, 4), rank 1 should hold (2, 4). Give each rank the part of one batch"
            " that ftp.local_slice(mesh, spec, shape)"
            " says; drop or pad a short last batch."
        )


def _other_program():
    mesh = _mesh()
    rank = dist.get_rank()
    loss = (lambda p, x: _loss(p, x)) if rank == 0 else (lambda p, x: _loss(p, x) * 2)
    with pytest.raises(ftp.errors.MismatchError) as raised:
        ftp.shard(loss, mesh, {"w": P()})({"w": torch.ones(4, 3)}, torch.ones(2, 4))
    # Where the programs first differ, not their fingerprints.
    assert raised.value.facet == "program" and "mul" in str(raised.value)
    raise raised.value


def _other_static():
    mesh = _mesh()
    ftp.shard(lambda p, x, n: _loss(p, x) * n, mesh)(
        {"w": torch.ones(4, 3)}, torch.ones(2, 4), 3 + dist.get_rank()
    )


def _other_dtype():
    mesh = _mesh()
    dtype = torch.float64 if dist.get_rank() else torch.float32
    ftp.shard(_loss, mesh)({"w": torch.ones(4, 3, dtype=dtype)}, torch.ones(2, 4, dtype=dtype))


DIFFERENCES = {
    _other_program: "Ranks disagree on the program of call 1: rank 1 differs from rank 0, so no"
    " rank runs it.",
    _other_static: "n is 3, an int on rank 0, but 4, an int on rank 1. Give all ranks one value.",
    _other_dtype: "params['w'] is float32 on rank 0, but float64 on rank 1.",
}


@pytest.mark.parametrize("job", DIFFERENCES, ids=lambda job: job.__name__)
def test_ranks_that_differ(job):
    for error in _errors(launch(job, 2)):
        assert error.startswith("MismatchError: ") and DIFFERENCES[job] in error


def _one_sided(kind):
    """After two good calls rank 1 makes one that is wrong for it alone."""
    mesh = _mesh()
    rank = dist.get_rank()
    step = ftp.shard(_loss, mesh, {"w": P("tp")})
    params = ftp.device_put({"w": torch.arange(12.0).reshape(4, 3)}, mesh, {"w": P("tp")})
    x = torch.ones(2, 4)
    for _ in range(2):
        step(params, x)
    if rank == 1 and kind == "placed":
        params = {
            "w": ftp.tensors.placement.remember(
                params["w"].clone(),
                ftp.tensors.placement.placement(step.mesh, P(None, "tp"), (2, 6)),
            )
        }
    if rank == 1 and kind == "donated":
        ftp.tensors.placement.remember(params["w"], ftp.tensors.placement.Donated("p"))
    if rank == 1 and kind == "numpy":
        x = x.numpy()
    if rank == 1 and kind == "longer":
        params, x = {"w": params["w"].clone()}, torch.ones(3, 4)
    start = time.monotonic()
    try:
        step(params, x)
    except ftp.FtpError as e:
        return str(e), time.monotonic() - start


ONE_SIDED = {
    "placed": "params['w'] is placed with spec P(None, 'tp')",
    "donated": "params['w'] was donated, as p of an earlier call",
    "numpy": "x is a numpy array of shape (2, 4)",
    "longer": "Rank 1 changes its program at call 3, which takes x float32[3, 4], but rank 0",
}


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_failure_of_one_rank_reaches_the_others(kind):
    first, second = launch(_one_sided, 2, kind)
    assert ONE_SIDED[kind] in second.value[0]
    assert (
        "rank 0 goes on with the program of its last call" in first.value[0]
        or ONE_SIDED[kind] in first.value[0]
    )
    assert max(first.value[1], second.value[1]) < 10


def _one_sided_first():
    mesh = _mesh()
    loss = (lambda p, x: _loss(p, x) * float(x.sum())) if dist.get_rank() == 1 else _loss
    ftp.shard(loss, mesh)({"w": torch.ones(4, 3)}, torch.ones(2, 4))


def test_a_rank_that_cannot_plan():
    first, second = _errors(launch(_one_sided_first, 2))
    assert second.startswith("TraceError: The function needs a tensor's value")
    assert (
        first.startswith("MismatchError: Rank 1 failed to plan call 1")
        and "float(x.sum())" in first
    )


def _interrupted_plan():
    mesh, said = _mesh(), []

    def loss(p, x):
        if dist.get_rank() == 1 and not said:
            raise KeyboardInterrupt
        return _loss(p, x)

    step = ftp.shard(loss, mesh)
    for _ in range(3):
        try:
            said.append(float(step({"w": torch.ones(4, 3)}, torch.ones(2, 4))[0]))
        except (KeyboardInterrupt, ftp.FtpError) as e:
            said.append(f"{type(e).__name__}: {e}")
    _end()
    return said


def test_ctrl_c_on_a_rank_that_plans():
    first, second = _values(launch(_interrupted_plan, 2))
    assert first[0] == (
        "MismatchError: Rank 1 failed to plan call 1, so no rank runs it. Its error:\n"
        "  KeyboardInterrupt"
    )
    assert second[0] == "KeyboardInterrupt: " and first[1:] == second[1:] == [first[1]] * 2


def _benign():
    """One rank's copy of its shard is a tensor that nobody placed; it serves as well."""
    mesh = _mesh()
    step = ftp.shard(_loss, mesh, {"w": P("tp")})
    params = ftp.device_put({"w": torch.arange(12.0).reshape(4, 3)}, mesh, {"w": P("tp")})
    x = torch.ones(2, 4)
    losses = [float(step(params, x)[0])]
    if dist.get_rank() == 1:
        params = {"w": params["w"].clone()}
    losses.append(float(step(params, x)[0]))
    _end()
    return losses


def test_a_copy_of_a_placed_tensor_serves():
    for first, second in _values(launch(_benign, 2)):
        assert first == second


def _one_sided_placement(kind):
    mesh = _mesh()
    rank = dist.get_rank()
    x = ftp.device_put(torch.arange(6.0), mesh, P("tp"))
    start = time.monotonic()
    try:
        if kind == "get":
            ftp.device_get(x, mesh, P("tp") if rank == 0 else P())
        elif kind == "put":
            ftp.device_put(torch.arange(6.0), mesh, P("tp") if rank == 0 else P("pp"), src=0)
        else:
            ftp.reshard(x, mesh, P("tp") if rank == 0 else P(), P(None))
    except ftp.FtpError as e:
        return str(e), time.monotonic() - start


@pytest.mark.parametrize("kind", ["get", "put", "reshard"])
def test_placement_that_fails_on_one_rank_fails_on_all(kind):
    first, second = (r.value for r in launch(_one_sided_placement, 2, kind))
    assert (
        "no axis 'pp'" if kind == "put" else "is placed with spec P('tp'), but P() is asked for"
    ) in second[0]
    assert "Rank 1 failed to plan" in first[0]
    assert max(first[1], second[1]) < 10


def _one_sided_get(was_gathered):
    """Rank 1 holds a shard that nobody placed, and names no specs."""
    mesh, said = _mesh(), []
    x = ftp.device_put(torch.arange(6.0), mesh, P("tp"))
    if was_gathered:
        ftp.device_get(x, mesh)
    start = time.monotonic()
    for _ in range(3):
        try:
            ftp.device_get(x if dist.get_rank() == 0 else x.clone(), mesh)
        except ftp.errors.MismatchError as e:
            said.append(str(e))
    return said, time.monotonic() - start


@pytest.mark.parametrize("was_gathered", [False, True])
def test_a_shard_that_one_rank_has_not_placed_is_an_error_on_all(was_gathered):
    for rank in launch(_one_sided_get, 2, was_gathered):
        said, seconds = rank.value
        assert len(said) == 3 and seconds < 10
        told = "Rank 1 changes its program" if was_gathered else "device_get, none placed,"
        assert all("ank 1" in text and told in text for text in said), said
        assert ("The mesh has failed, and takes no more calls." in said[2]) == was_gathered


def _other_sources():
    """One rank gives values, the other a tensor of the same spec of which other bytes are sent."""
    mesh, rank = _mesh(), dist.get_rank()
    x, said = torch.arange(6.0), []
    for other in (torch.empty(6, device="meta"), torch.zeros(8), ftp.device_put(x, mesh, P("tp"))):
        try:
            ftp.device_put(x if rank == 0 else other, mesh, P("tp"), src=0)
        except ftp.errors.MismatchError as e:
            said.append(str(e))
    return said


def test_sources_that_differ_between_ranks_are_an_error_on_all():
    for said in (r.value for r in launch(_other_sources, 2)):
        kinds = ("meta float32[6]", "float32[8]", "placed float32[6]")
        assert len(said) == 3
        assert all(f"{kind} P('tp')" in text for kind, text in zip(kinds, said, strict=True))


def _outside():
    _mesh()
    from torch.distributed.device_mesh import DeviceMesh

    step = ftp.shard(_loss, DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)))
    result = None
    try:
        result = float(step({"w": torch.ones(4, 3)}, torch.ones(2, 4))[0])
    except ftp.FtpError as e:
        result = f"{type(e).__name__}: {e}"
    _end()
    return result


def test_a_rank_outside_of_the_mesh():
    *inside, outside = _values(launch(_outside, 3))
    assert inside == [96.0, 96.0]
    assert outside.startswith(
        "MeshError: Rank 2 is not on the mesh (tp 2) on cpu, which holds ranks"
    )


def _wrong_world():
    _mesh((4,))


def test_a_mesh_that_is_not_the_size_of_the_world():
    for error in _errors(launch(_wrong_world, 2)):
        assert error.startswith("MeshError: The mesh (tp 4) takes 4 ranks, but the world has 2.")


def _unreduced():
    mesh = _mesh((2,), ("dp",))
    g, w, x = (
        torch.Generator().manual_seed(3),
        torch.ones(3, 2),
        torch.randn(4, 3, generator=torch.Generator().manual_seed(3)),
    )
    pending = P(unreduced=("dp",))
    whole = torch.randn(3, 2, generator=g)
    placed = ftp.device_put(whole, mesh, pending)
    gradients = ftp.spmd(
        lambda w, x: torch.func.grad(lambda w: (x @ w).square().sum())(w),
        mesh,
        (P(), P("dp")),
        pending,
    )
    add = ftp.spmd(lambda a, b: a + b, mesh, (pending, pending), P())
    found = gradients(ftp.device_put(w, mesh, P()), ftp.device_put(x, mesh, P("dp")))
    return add(found, placed), ftp.device_get(found, mesh, pending), 2 * x.T @ x @ w, whole


def test_what_is_not_reduced_yet_goes_out_and_in():
    for rank in launch(_unreduced, 2):
        total, own, wanted, whole = rank.value
        torch.testing.assert_close(total, wanted + whole)
        torch.testing.assert_close(own, wanted)
