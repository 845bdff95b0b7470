"""``reduce_dtype=torch.bfloat16``: gradients' terms sent in bfloat16, sums in float32."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import launch
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, specs

import ftp
from ftp import P
from ftp.errors import InputError

BF16 = torch.bfloat16


def linear(params, x):
    """A sum whose gradient is that of ``x`` over the batch, on each rank of its rows."""
    return (x * params["w"]).sum()


def terms(x, ranks):
    """Each rank's term of the gradient, for ``torch.chunk``'s rows."""
    rows = list(x.chunk(ranks))
    rows += [x[:0]] * (ranks - len(rows))
    return [r.sum(0) for r in rows]


@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([(2,), (3,), (2, 2)]),
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from([torch.float32, torch.float64, BF16]),
    st.booleans(),
    st.booleans(),
)
def test_sums_are_those_of_rounded_terms(shape, rows, columns, dtype, is_zero, bucket):
    """Bit for bit: each term rounded once, added in float32 in the ranks' order; an all-reduce
    rounds the sum.
    """
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    names = ("dp", "tp")[: len(shape)]
    mesh = ftp.simulated_mesh(shape, names)
    step = ftp.shard(
        linear,
        mesh,
        {"w": P("dp") if is_zero else P()},
        batch_specs=P("dp"),
        bucket=bucket,
        reduce_dtype=BF16,
    )
    w = {"w": torch.ones(columns, dtype=dtype)}
    _, grads = step(w, x)
    wide = torch.promote_types(torch.float32, dtype)
    total = torch.stack([t.to(BF16).to(wide) for t in terms(x, shape[0])]).sum(0)
    lowered = step.lower(w, x)
    ops = [c.op for c in lowered.collectives if c.dtype == BF16 and c.op != "all_reduce"]
    assert "all_to_all" in ops
    total = total if is_zero else total.to(BF16)
    assert torch.equal(grads["w"], total.to(dtype))


def lowered_llama(cut, batch_specs, shape=(2, 2), **options):
    cfg = LlamaConfig(layers=1)
    fn, params = ftp.functionalize(build(cfg, device="meta"))
    mesh = ftp.AbstractMesh(shape, ("dp", "tp"))
    spec_of = ftp.plan(params, specs(cuts(cfg), **cut))
    step = ftp.shard(lm_loss(fn), mesh, spec_of, batch_specs=batch_specs, **options)
    return step.lower(params, lm_batch(cfg)), params


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("bucket", [False, True])
def test_gradients_alone_are_narrowed_and_bytes_are_half(bucket):
    for cut in ({"tp": "tp"}, {"tp": "tp", "zero": "dp"}):
        wide, params = lowered_llama(cut, P("dp"), bucket=bucket)
        narrow, _ = lowered_llama(cut, P("dp"), bucket=bucket, reduce_dtype=BF16)
        assert all(c.dtype == torch.float32 for c in wide.collectives)
        kept = [c for c in narrow.collectives if c.dtype == torch.float32]
        sent = [c for c in narrow.collectives if c.dtype == BF16]
        # Sums of activations over tp, of the loss and its count stay as they are.
        assert {c.op for c in sent} <= {"all_to_all", "all_gather"} and sent
        reducing = [c for c in wide.collectives if c.op in ("all_reduce", "reduce_scatter")]
        left = [c for c in kept if c.op in ("all_reduce", "reduce_scatter")]
        assert all(c.op == "all_reduce" for c in left)
        assert all("dp" not in c.axes or c.global_shape in ((), (2,)) for c in left)
        narrowed = [c for c in sent if c.op == "all_to_all"]
        if not bucket:
            assert len(narrowed) == len(reducing) - len(left)
            assert len([c for c in narrowed if c.axes == ("dp",)]) == len(params)
        # Half the bytes but for padding to a whole number of parts.
        before = wide.collectives.wire_nbytes - sum(c.wire_nbytes for c in kept)
        after = sum(c.wire_nbytes for c in sent)
        assert before / 2 <= after <= before / 2 + 8 * len(sent)


def test_numbers_out_of_place_are_refused():
    mesh = ftp.AbstractMesh((2,), ("dp",))
    for wrong in (torch.float32, torch.float16, "bfloat16", torch.int32):
        with pytest.raises(InputError, match=r"reduce_dtype is .* give torch.bfloat16"):
            ftp.shard(linear, mesh, P(), reduce_dtype=wrong)
    with pytest.raises(InputError, match="certify=True and reduce_dtype"):
        ftp.shard(linear, mesh, P(), reduce_dtype=BF16, certify=True)


def train(kind: str, compiled: bool = False):
    """A train step of a decoder, on processes or simulated: the loss, and gradients in full."""
    cfg = LlamaConfig(layers=1)
    torch.manual_seed(0)
    fn, params = ftp.functionalize(build(cfg))
    shape, names = (2,), ("dp",)
    mesh = (
        ftp.make_mesh(shape, names, device_type="cpu")
        if kind == "process"
        else ftp.simulated_mesh(shape, names)
    )
    spec_of = ftp.plan(params, specs(cuts(cfg), zero="dp") | {"norm.weight": P()})
    step = ftp.shard(
        lm_loss(fn), mesh, spec_of, batch_specs=P("dp"), reduce_dtype=BF16, compile=compiled
    )
    batch = ftp.device_put(lm_batch(cfg), mesh, P("dp"))
    loss, grads = step(ftp.device_put(params, mesh, spec_of), batch)
    found = {k: v.numpy() for k, v in ftp.device_get(grads, mesh, spec_of).items()}
    return float(loss), found


@pytest.mark.dist
def test_processes_sum_as_the_simulator_does():
    loss, grads = train("simulated")
    for rank in launch(train, 2, "process"):
        assert rank.error is None, rank
        assert rank.value[0] == pytest.approx(loss, rel=1e-6)
        for name, grad in grads.items():
            assert abs(rank.value[1][name] - grad).max() <= 2**-8 * max(1e-3, abs(grad).max()), name
