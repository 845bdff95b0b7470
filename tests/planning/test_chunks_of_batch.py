"""Losses and layers over chunks of the batch under data parallelism: each rank computes its share
of each chunk, and what is cut into chunks is exchanged.
"""

import pytest
import torch
from few_or_many import slow_after
from plan_reshards import unbucketed
from torch.nn.functional import cross_entropy

import ftp
from ftp import P

WIDTH, VOCAB, LENGTH = 16, 64, 12


def of_logits(p, x, y):
    logits = torch.tanh(x @ p["u"]) @ p["head"]
    chunks = zip(logits.flatten(0, 1).chunk(8), y.flatten().chunk(8), strict=True)
    return sum(cross_entropy(a, b, reduction="sum") for a, b in chunks) / y.numel()


def of_slices(p, x, y):
    """Means, of which each is over its own targets that are not ignored."""
    h, y, total = torch.tanh(x @ p["u"]).flatten(0, 1), y.flatten(), 0.0
    rows = h.shape[0] // 4
    for i in range(0, h.shape[0], rows):
        total = total + cross_entropy(h[i : i + rows] @ p["head"], y[i : i + rows])
    return total / 4


def of_rows(p, x, y):
    h = torch.tanh(x @ p["u"])
    rows = zip(h, y, strict=True)
    return sum(cross_entropy(a @ p["head"], b, reduction="sum") for a, b in rows) / y.numel()


def of_microbatches(p, x, y):
    total, rows = 0.0, x.shape[0] // 2
    for i in range(2):
        h = torch.tanh(x[i * rows : (i + 1) * rows] @ p["u"]) @ p["head"]
        total = total + cross_entropy(h.flatten(0, 1), y[i * rows : (i + 1) * rows].flatten())
    return total / 2


def sent(lowered, of):
    return [(c.op, c.nbytes) for c in unbucketed(lowered).collectives if c.op in of]


@pytest.mark.cases_by_default(3)
@pytest.mark.parametrize("loss", [of_logits, of_slices, of_microbatches, of_rows])
@pytest.mark.parametrize(("batch", "n"), slow_after(2, [(8, 4), (8, 3), (16, 4), (8, 2)]))
def test_each_rank_computes_its_share_of_each_chunk(loss, batch, n):
    torch.manual_seed(0)
    shapes = {"u": (WIDTH, WIDTH), "head": (WIDTH, VOCAB)}
    params = {name: torch.randn(s, dtype=torch.float64) / 4 for name, s in shapes.items()}
    x = torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64)
    y = torch.randint(VOCAB, (batch, LENGTH))
    y[torch.rand(y.shape) < 0.3] = -100
    step = ftp.shard(
        loss, ftp.simulated_mesh((n,), ("dp",)), P(), batch_specs=P("dp"), certify=True
    )
    lowered = step.lower(params, x, y)
    assert lowered.work == 1.0 and lowered.plan.kept_rules == {"dp": True}
    grads, value = torch.func.grad_and_value(loss)(params, x, y)
    torch.testing.assert_close(step(params, x, y), (value, grads), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_on_two_axes():
    torch.manual_seed(0)
    params = {
        "u": torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4,
        "head": torch.randn(WIDTH, VOCAB, dtype=torch.float64) / 4,
    }
    x = torch.randn(8, LENGTH, WIDTH, dtype=torch.float64)
    y = torch.randint(VOCAB, (8, LENGTH))
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    specs = {"u": P(None, "tp"), "head": P(None, "tp")}
    for loss in (of_logits, of_slices, of_microbatches):
        for data in (P("dp"), P("dp", "tp")):
            step = ftp.shard(loss, mesh, specs, batch_specs=data, certify=True)
            grads, value = torch.func.grad_and_value(loss)(params, x, y)
            torch.testing.assert_close(step(params, x, y), (value, grads), rtol=1e-12, atol=1e-12)


def test_figures_of_a_loss_over_chunks():
    """On 8 ranks, 16,384 tokens in 8 chunks: after the head, a gather of 2,097,152,000 bytes of
    logits; before it, 7.85 times one device's matmuls and a gather of 67,108,864 bytes.
    """

    def meta(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def over_chunks(after_head):
        def loss(p, h, y):
            h, y, total = torch.relu(h @ p["w"]).flatten(0, 1), y.flatten(), 0.0
            chunks = h @ p["head"] if after_head else h
            for a, b in zip(chunks.chunk(8), y.chunk(8), strict=True):
                logits = a if after_head else a @ p["head"]
                total = total + cross_entropy(logits, b, reduction="sum")
            return total / y.numel()

        return loss

    params = {"w": meta(1024, 1024), "head": meta(1024, 32000)}
    batch = meta(8, 2048, 1024), meta(8, 2048, dtype=torch.int64)
    mesh = ftp.AbstractMesh((8,), ("dp",), device_type="cuda")
    for after_head in (True, False):
        step = ftp.shard(over_chunks(after_head), mesh, P(), batch_specs=P("dp"))
        lowered = step.lower(params, *batch)
        assert lowered.work == 1.0
        assert sent(lowered, ("all_gather", "reduce_scatter")) == []
        hidden, targets = (x.numel() * x.element_size() // 8 for x in batch)
        assert sent(lowered, ("all_to_all",)) == [("all_to_all", hidden), ("all_to_all", targets)]
        reduced = [nbytes for _, nbytes in sent(lowered, ("all_reduce",)) if nbytes > 4]
        assert reduced == [params["head"].nbytes, params["w"].nbytes]
