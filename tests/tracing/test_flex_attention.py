"""flex_attention and varlen_attn under cuts of batch, heads and sequence, against dense masks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import strategies as st
from rings import forget_steps
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.nn.attention.varlen import varlen_attn

import ftp
from ftp import P, zigzag
from ftp.certification.checker import check as check_certificate
from ftp.errors import CertificateError, InputError, TraceError
from ftp.ops.score_functions import letters
from ftp.ops.sends import Send

# Computing takes so long that every transfer hides behind it.
SLOW = ftp.Hardware(flops=1e3, ring_step=0.0)
MESHES = [
    ((2,), P(None, None, "cp")),
    ((3,), P(None, None, zigzag("cp"))),
    ((5,), P(None, None, "cp")),
    ((2, 2), P(None, "tp", "cp")),
    ((2, 2), P("tp", None, zigzag("cp"))),
    ((2, 2), P(None, None, (zigzag("cp"), "tp"))),
]


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ftp.ops.ring_pieces.SHORTEST", 2)
    forget_steps(monkeypatch)


def mesh_of(shape: tuple[int, ...]) -> Any:
    return ftp.simulated_mesh(shape, ("cp", "tp")[: len(shape)])


def dense(q: Tensor, k: Tensor, v: Tensor, mod: Callable[[Tensor], Tensor], sees: Tensor) -> Tensor:
    """A dense masked softmax; rows that see nothing are zero."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = mod(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]))
    scores = scores.masked_fill(~sees, -math.inf)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


def with_gradients(fn: Callable[..., Tensor]) -> Callable[..., Any]:
    def run(*args: Tensor) -> Any:
        *given, grad = args
        out, vjp = torch.func.vjp(fn, *given)
        return out, *vjp(grad)

    return run


def check(
    mesh: Any, fn: Any, expected: Any, specs: Any, out_specs: Any, args: Any, *, is_ring: bool
) -> Any:
    step = ftp.spmd(
        with_gradients(fn),
        mesh,
        (*specs, out_specs[0]),
        tuple(out_specs),
        certify=True,
        hardware=SLOW if is_ring else None,
    )
    rings = [c for c in step.lower(*args).collectives if c.op == "ring"]
    if is_ring:
        assert len(rings) == 2
    else:  # where the cut falls between documents a ring sends nothing, and a gather does
        assert not any(c.wire_nbytes for c in rings)
    found, right = step(*args), with_gradients(expected)(*args)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    return step


@few_or_many(st.data(), few=2, many=12)
def test_flex_attention(data: Any):
    shape, cut = data.draw(st.sampled_from(MESHES))
    size = data.draw(st.integers(3, 11))
    of_keys = data.draw(st.sampled_from([2, 4]))
    kind = data.draw(st.sampled_from(["documents", "window", "prefix", "none"]))
    score = data.draw(st.sampled_from(["alibi", "soft cap", "learned", "none"]))
    number = data.draw(st.integers(1, 4))
    is_ring = data.draw(st.booleans())
    torch.manual_seed(size)
    document = torch.sort(torch.randint(0, number, (2, size))).values
    at = torch.arange(size)
    before = at[:, None] >= at[None]
    mask, sees = {
        "documents": (
            lambda b, h, q, k: (q >= k) & (document[b, q] == document[b, k]),
            (before & (document[:, :, None] == document[:, None]))[:, None],
        ),
        "window": (lambda b, h, q, k: (q - k).abs() < number, (at[:, None] - at).abs() < number),
        "prefix": (lambda b, h, q, k: (q >= k) | (k < number), before | (at < number)),
        "none": (None, torch.ones(size, size, dtype=torch.bool)),
    }[kind]
    slope = torch.linspace(0.1, 0.4, 4, dtype=torch.float64)
    away = (at[None] - at[:, None]).to(torch.float64)

    def mods(bias: Tensor) -> Any:
        return {
            "alibi": (
                lambda s, b, h, q, k: s + slope[h] * (k - q),
                lambda s: s + slope[:, None, None] * away,
            ),
            "soft cap": (
                lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
                lambda s: 2 * torch.tanh(s / 2),
            ),
            "learned": (
                lambda s, b, h, q, k: s * bias[h],
                lambda s: s * bias[:, None, None],
            ),
            "none": (None, lambda s: s),
        }[score]

    blocks = None
    if mask is not None:
        batch = 2 if kind == "documents" else None
        blocks = create_block_mask(mask, batch, None, size, size, "cpu", BLOCK_SIZE=2)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=mods(bias)[0], block_mask=blocks, enable_gqa=True)

    make = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    args = make(2, 4, size, 3), *(make(2, of_keys, size, 3) for _ in "kv"), make(4)
    check(
        mesh_of(shape),
        attend,
        lambda q, k, v, bias: dense(q, k, v, mods(bias)[1], sees),
        (cut, cut, cut, P()),
        (cut, cut, cut, cut, P()),
        (*args, make(2, 4, size, 3)),
        is_ring=is_ring,
    )


@pytest.mark.parametrize(
    ("shape", "cut", "is_ring"),
    [(*MESHES[0], False), *((*MESHES[i], True) for i in (1, 2, 5))],
)
def test_varlen_attention(shape: Any, cut: P, is_ring: bool):
    """Documents, of which one is empty, a window, fewer heads of keys, and tokens after the last
    document."""
    ends = torch.tensor([0, 4, 4, 9, 11], dtype=torch.int32)
    document = torch.bucketize(torch.arange(12), ends[1:], right=True)
    back = torch.arange(12)[:, None] - torch.arange(12)[None]
    sees = (document[:, None] == document[None]) & (back >= 0) & (back <= 3)
    sees[11] = False
    cut = P(cut[2])

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Any:
        return varlen_attn(q, k, v, ends, None, 5, 5, window_size=(3, 0), enable_gqa=True)

    def expected(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return dense(q, k, v, lambda s: s, sees)[0].transpose(0, 1)

    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(12, h, 4, dtype=torch.float64) for h in (4, 2, 2, 4))
    step = ftp.spmd(
        lambda q, k, v, e, g: with_gradients(lambda *x: attend(*x, e))(q, k, v, g),
        mesh_of(shape),
        (cut, cut, cut, P(), cut),
        (cut,) * 4,
        certify=True,
        hardware=SLOW if is_ring else None,
    )
    moved = [c.op for c in step.lower(q, k, v, ends, grad).collectives]
    assert moved.count("ring") == (2 if is_ring else 0)
    right = with_gradients(lambda *x: expected(*x, ends))(q, k, v, grad)
    for one, other in zip(step(q, k, v, ends, grad), right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_documents_hold_no_scores():
    """Linear in the tokens, forward and backward."""
    mesh, cut = ftp.AbstractMesh((4,), ("cp",), device_type="cpu"), P("cp")
    times = []

    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, ends: Tensor) -> Any:
        def run(*x: Tensor) -> Tensor:
            return varlen_attn(*x, ends, None, len(q), len(q), window_size=(-1, 0))

        return with_gradients(run)(q, k, v, grad)

    for tokens in (1 << 14, 1 << 17):
        x = torch.empty(tokens, 2, 64, dtype=torch.bfloat16, device="meta")
        ends = torch.empty(9, dtype=torch.int32, device="meta")
        lowered = ftp.lower(attend, mesh, (*(cut,) * 4, P()), x, x, x, x, ends, out_specs=cut)
        times.append(int(lowered.memory) / tokens)
    assert times[1] <= 1.01 * times[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_documents_under_transforms():
    """Forward-mode, the gradient's directional derivative, and a batch of heads' scales."""
    ends = torch.tensor([0, 3, 8])
    document = torch.bucketize(torch.arange(8), ends[1:], right=True)
    sees = (document[:, None] == document) & torch.ones(8, 8, dtype=torch.bool).tril()
    torch.manual_seed(0)
    q, k, v, t = (torch.randn(8, 2, 4, dtype=torch.float64) for _ in range(4))

    def by_kernel(*x: Tensor) -> Tensor:
        return varlen_attn(*x, ends, None, 5, 5, window_size=(-1, 0)).square().sum()

    def by_scores(*x: Tensor) -> Tensor:
        out = dense(*(y.transpose(0, 1)[None] for y in x), lambda s: s, sees)
        return out.square().sum()

    def derivatives(of: Callable[..., Tensor]) -> Callable[..., Any]:
        def run(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
            along = lambda x: of(x, k, v)  # noqa: E731
            first = torch.func.jvp(along, (q,), (t,))[1]
            second = torch.func.jvp(torch.func.grad(along), (q,), (t,))[1]
            return first, second, torch.vmap(lambda s: of(q * s, k, v))(q.new_tensor([1.0, 2.0]))

        return run

    found = ftp.spmd(derivatives(by_kernel), mesh_of((2,)), P("cp"), (P(), P("cp"), P()))(
        q, k, v, t
    )
    for one, right in zip(found, derivatives(by_scores)(q, k, v, t), strict=True):
        torch.testing.assert_close(one, right, rtol=0, atol=1e-10)


def test_queries_of_a_document_stand_at_its_end():
    """As in the kernel: with fewer queries than keys, the last of both stand beside each other."""
    queries, keys = torch.tensor([0, 2, 3]), torch.tensor([0, 5, 9])
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 1, 4, dtype=torch.float64) for n in (3, 9, 9))
    sees = torch.zeros(3, 9, dtype=torch.bool)
    sees[0, :4], sees[1, :5], sees[2, 5:9] = True, True, True
    parts = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = dense(*parts, lambda s: s, sees)[0].transpose(0, 1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, queries, keys, 2, 5, window_size=(-1, 0))

    found = ftp.spmd(run, mesh_of((2,)), P("cp"), P("cp"))(q, k, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_listed_blocks_and_log_sum_exps():
    """Blocks of keys that are not listed are not seen, whatever the mask says; those listed as
    full are."""
    count = torch.tensor([[[1, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    full = torch.tensor([[[0, 1]]], dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(
        count, index, full, index.flip(-1), BLOCK_SIZE=4, mask_mod=lambda b, h, q, k: q >= k
    )
    at = torch.arange(8)
    sees = (at[:, None] >= at) & (at[:, None] // 4 == at // 4)
    sees[4:, :4] = True

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, aux = flex_attention(q, k, v, block_mask=blocks, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    cut = P(None, None, "cp")
    found = ftp.spmd(attend, mesh_of((2,)), cut, (cut,) * 2, certify=True)(q, k, v)
    scores = (q @ k.transpose(-2, -1) / 2).masked_fill(~sees, -math.inf)
    expected = dense(q, k, v, lambda s: s, sees), scores.logsumexp(-1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_functions_of_scores_hold_no_scores():
    """Linear in the tokens, forward and backward, with a gradient of what the function captures."""
    mesh, cut = ftp.AbstractMesh((4,), ("cp",), device_type="cpu"), P(None, None, "cp")
    times = []
    for tokens in (1 << 14, 1 << 17):

        def attend(q: Tensor, k: Tensor, v: Tensor, document: Tensor, slope: Tensor) -> Any:
            def score(s: Tensor, b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
                same = document[b, at_q] == document[b, at_k]
                return torch.where(same, s * slope[h], -math.inf)

            return flex_attention(q, k, v, score_mod=score)

        def run(q: Tensor, document: Tensor, slope: Tensor) -> Any:
            out, vjp = torch.func.vjp(lambda q, s: attend(q, q, q, document, s), q, slope)
            return vjp(out)

        q = torch.empty(1, 2, tokens, 64, dtype=torch.bfloat16, device="meta")
        document = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        slope = torch.empty(2, device="meta")
        specs = (cut, P(None, "cp"), P())
        lowered = ftp.lower(run, mesh, specs, q, document, slope, out_specs=(cut, P()))
        times.append(int(lowered.memory) / tokens)
    assert times[1] <= 1.01 * times[0]


@pytest.mark.parametrize(("tile", "is_ring"), [(3, False), (1024, False), (3, True)])
def test_captured_tensors_are_cut_as_the_scores_are(monkeypatch: Any, tile: int, is_ring: bool):
    """Documents of each row of a batch, a bias of each pair and a scalar that require a gradient,
    log-sum-exps with one, tiles of a few queries, and a bias that is gathered nowhere."""
    monkeypatch.setattr("ftp.ops.attention.TILE", tile)
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])

    def attend(q: Tensor, k: Tensor, bias: Tensor, by: Tensor, document: Tensor) -> Any:
        def score(s: Tensor, b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
            same = (document[b, at_q] == document[b, at_k]) & (at_q >= at_k)
            return torch.where(same, by * s + bias[b, h, at_q, at_k], -math.inf)

        aux = AuxRequest(lse=True)
        out, made = flex_attention(q, k, k, score_mod=score, return_aux=aux, enable_gqa=True)
        return out, made.lse

    def expected(q: Tensor, k: Tensor, bias: Tensor, by: Tensor, document: Tensor) -> Any:
        sees = document[:, None, :, None] == document[:, None, None]
        sees = sees & torch.ones(7, 7, dtype=torch.bool).tril()
        k = k.repeat_interleave(2, 1)
        scores = (by * (q @ k.mT) / 2 + bias).masked_fill(~sees, -math.inf)
        return scores.softmax(-1) @ k, scores.logsumexp(-1)

    def run(attend: Any) -> Any:
        def both(q: Tensor, k: Tensor, bias: Tensor, by: Tensor, document: Tensor) -> Any:
            out, vjp = torch.func.vjp(lambda *x: attend(*x, document), q, k, bias, by)
            return *out, *vjp((out[0].sin(), out[1].cos()))

        return both

    torch.manual_seed(0)
    make = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    args = make(2, 4, 7, 4), make(2, 2, 7, 4), make(2, 4, 7, 7), make(()), document
    right = run(expected)(*args)
    cut = P("dp", None, "cp")
    specs = (cut, cut, cut, P(), P("dp", "cp"))
    outs = (cut, cut, cut, cut, cut, P())
    mesh = ftp.simulated_mesh((2, 3), ("dp", "cp"))
    hardware = SLOW if is_ring else None
    step = ftp.spmd(run(attend), mesh, specs, outs, certify=True, hardware=hardware)
    for one, other in zip(step(*args), right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    moved = [(c.op, tuple(c.global_shape)) for c in step.lower(*args).collectives]
    assert not any(shape == (2, 4, 7, 7) for _, shape in moved)
    assert moved.count(("all_gather", (2, 7))) == 1  # over cp: the documents of keys
    assert [op for op, _ in moved].count("ring") == 2 * is_ring


def test_memory_of_rings():
    """At most 1.5 times that of q, k, v, the result and their gradients, at 262,144 tokens."""
    mesh, size = ftp.AbstractMesh((8,), ("cp",), device_type="cpu"), 1 << 18
    cut = P(None, None, zigzag("cp"))
    rows = torch.arange(size // 128, dtype=torch.int32)
    index = (rows[:, None] - torch.arange(len(rows), dtype=torch.int32)).clamp_min(0)
    blocks = BlockMask.from_kv_blocks(
        (rows + 1).clamp_max(9)[None, None],
        index[None, None],
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, k: (q >= k) & (q - k <= 1000),
        seq_lengths=(size, size),
    )
    x = torch.empty(1, 8, size, 128, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(65, dtype=torch.int32, device="meta")

    def packed(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, ends: Tensor) -> Any:
        run = lambda *x: varlen_attn(*x, ends, None, size, size, window_size=(-1, 0))  # noqa: E731
        return with_gradients(run)(q, k, v, grad)

    def listed(*x: Tensor) -> Any:
        return with_gradients(lambda *x: flex_attention(*x, block_mask=blocks))(*x)

    row, along = x[0].transpose(0, 1), P(zigzag("cp"))
    for run, specs, args in (
        (packed, (*(along,) * 4, P()), (row, row, row, row, ends)),
        (listed, (cut,) * 4, (x,) * 4),
    ):
        lowered = ftp.lower(run, mesh, specs, *args, out_specs=specs[:4])
        assert [c.op for c in lowered.collectives] == ["ring"] * 2
        assert int(lowered.memory) <= 1.5 * (8 * x.numel() * 2 / 8)


def moved_by(monkeypatch: pytest.MonkeyPatch, step: Any, args: Any) -> tuple[Any, int]:
    """A step's results, and the bytes that its rings send over all ranks."""
    total = 0

    def counted(places: int, tensor: Tensor | None, *rest: Any) -> Send:
        nonlocal total
        total += 0 if tensor is None else tensor.nbytes
        return Send(places, tensor, *rest)

    monkeypatch.setattr("ftp.ops.key_ring.Send", counted)
    return step(*args), total


def keys_needed(sees: Tensor, entry: Any, n: int) -> list[list[int]]:
    """How many of each owner's keys each rank's queries see."""
    chunks = torch.arange(len(sees)).chunk(n if entry == "cp" else 2 * n)
    held = [
        chunks[r] if entry == "cp" else torch.cat([chunks[r], chunks[2 * n - 1 - r]])
        for r in range(n)
    ]
    return [
        [int(sees[held[r]].any(0)[held[o]].sum()) if o != r else 0 for o in range(n)]
        for r in range(n)
    ]


@pytest.mark.parametrize("entry", ["cp", zigzag("cp")])
def test_what_a_known_mask_rules_out_is_not_sent(monkeypatch: Any, entry: Any):
    """Of blocks that are listed, and of a window over documents whose ends are values, each rank
    is sent the keys that its queries see, and no others."""
    document, at, cut = torch.arange(48) // 14, torch.arange(48), P(None, None, entry)
    blocks = create_block_mask(
        lambda b, h, q, k: (q >= k) & (document[q] == document[k]) | (k < 3),
        None, None, 48, 48, "cpu", BLOCK_SIZE=4,
    )  # fmt: skip
    ends = torch.tensor([0, 14, 28, 42, 48], dtype=torch.int32)
    back = at[:, None] - at

    def listed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = (x[0].transpose(0, 1) for x in (q, k, v))
        out = varlen_attn(*x, ends, None, 14, 14, window_size=(5, 0), enable_gqa=True)
        return out.transpose(0, 1)[None]

    torch.manual_seed(0)
    args = [torch.randn(1, h, 48, 4, dtype=torch.float64) for h in (4, 2, 2, 4)]
    of_key = 2 * 2 * 4 * 8  # bytes of a key and its value
    dense_blocks = blocks.to_dense()[0, 0].bool().repeat_interleave(4, 0).repeat_interleave(4, 1)
    same = document[:, None] == document
    for run, sees, moves in (
        (listed, (back >= 0) & same | (at < 3), dense_blocks),
        (windowed, (back >= 0) & (back <= 5) & same, (back >= 0) & (back <= 5)),
    ):
        step = ftp.spmd(
            with_gradients(run), mesh_of((4,)), (cut,) * 4, (cut,) * 4, certify=True, hardware=SLOW
        )
        needed = keys_needed(moves, entry, 4)
        sent = [sum(row[o] for row in needed) for o in range(4)]
        received = [sum(row) for row in needed]
        both = [a + b for a, b in zip(sent, received, strict=True)]
        rings = [c for c in step.lower(*args).collectives if c.op == "ring"]
        assert [c.wire_nbytes for c in rings] == [max(sent) * of_key, max(both) * of_key]
        found, total = moved_by(monkeypatch, step, args)
        assert total == 3 * sum(sent) * of_key < 3 * 3 * 48 * of_key
        right = with_gradients(lambda *x, sees=sees: dense(*x, lambda s: s, sees))(*args)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_mask_that_is_changed_after_the_trace_is_refused():
    sees = lambda b, h, q, k: (q >= k) & (q - k < 3)  # noqa: E731
    blocks = create_block_mask(sees, None, None, 12, 12, "cpu", BLOCK_SIZE=2)
    cut, x = P(None, None, "cp"), torch.randn(1, 1, 12, 4)
    run = lambda x: flex_attention(x, x, x, block_mask=blocks)  # noqa: E731
    step = ftp.spmd(run, mesh_of((2,)), cut, cut, hardware=SLOW)
    step(x)
    blocks.kv_num_blocks.fill_(6)
    blocks.kv_indices.copy_(torch.arange(6))
    with pytest.raises(InputError, match="changed after the step was traced"):
        step(x)


def test_wrong_rings_of_functions_are_refused():
    mesh, cut = mesh_of((3,)), P(None, None, "cp")

    def run(*x: Tensor) -> Any:
        score = lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf)  # noqa: E731
        return with_gradients(lambda *x: flex_attention(*x, score_mod=score))(*x)

    x = torch.randn(1, 2, 12, 4, dtype=torch.float64)
    step = ftp.spmd(run, mesh, (cut,) * 4, (cut,) * 4, hardware=SLOW)
    certificate = ftp.certify(step.lower(x, x, x, x))
    graph, _ = certificate.ranks.at[(1,)]
    rings = [n for n in certificate.ranks.graphs[graph].nodes if "ring" in str(n.target)]
    assert len(rings) == 2
    for node in rings:
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        right = node.args
        for name, wrong in {
            "columns": [12, 3, 1, 1, 1, 0, 0, 1],  # as if keys were in zigzag
            "rows": [1, 12, 1, 1, 0, 4],  # all ranks as the first
            "scale": 0.3,
            "score": "",
        }.items():
            node.args = tuple(
                wrong if of == name else x for of, x in zip(names, right, strict=True)
            )
            with pytest.raises(CertificateError):
                check_certificate(certificate)
        node.args = right
    check_certificate(certificate)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_of_scores_under_transforms():
    """Forward mode, the gradient's directional derivative along all inputs, a batch, a
    constant table, and tensors that a function makes."""
    table = torch.tensor([0.5, 2.0], dtype=torch.float64)

    def attend(q: Tensor, k: Tensor, slope: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
            near = torch.tensor([1.0, 3.0], dtype=torch.float64)[h]
            return torch.tanh(s * slope[h]) * near * table[1] + table[0]

        return flex_attention(q, k, k, score_mod=score).square().sum()

    def expected(q: Tensor, k: Tensor, slope: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT / 2 * slope[:, None, None])
        scores = scores * torch.tensor([1.0, 3.0], dtype=torch.float64)[:, None, None] * 2 + 0.5
        return (scores.softmax(-1) @ k).square().sum()

    def derivatives(of: Callable[..., Tensor]) -> Callable[..., Any]:
        def run(q: Tensor, k: Tensor, slope: Tensor, *along: Tensor) -> Any:
            first = torch.func.jvp(of, (q, k, slope), along)[1]
            grad = torch.func.grad(of, (0, 1, 2))
            second = torch.func.jvp(grad, (q, k, slope), along)[1]
            third = torch.func.grad(lambda q, s: sum(x.square().sum() for x in grad(q, k, s)))
            times = torch.vmap(lambda x: of(q * x, k, slope))(q.new_tensor([1.0, 2.0]))
            return first, *second, third(q, slope), times

        return run

    torch.manual_seed(0)
    make = lambda: [*torch.randn(2, 1, 2, 5, 4, dtype=torch.float64), slope.clone()]  # noqa: E731
    slope = torch.tensor([0.3, 0.7], dtype=torch.float64)
    args, cut = [*make(), *make()], P(None, None, "cp")
    found = ftp.spmd(
        derivatives(attend), mesh_of((2,)), (cut, cut, P(), cut, cut, P()), (P(),) + (P(),) * 5
    )(*args)
    for one, right in zip(found, derivatives(expected)(*args), strict=True):
        torch.testing.assert_close(one, right, rtol=0, atol=1e-10)


def test_a_saved_program_has_its_functions(tmp_path: Any, monkeypatch: Any):
    """As a process loads it that has traced nothing."""
    cut, mesh = P(None, None, "cp"), mesh_of((2,))
    torch.manual_seed(0)
    q, slope = torch.randn(1, 2, 6, 4, dtype=torch.float64), torch.rand(2, dtype=torch.float64)

    def run(q: Tensor, slope: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
            return s * slope[h] * torch.tensor([1.0, 2.0], dtype=torch.float64)[h]

        return flex_attention(q, q, q, score_mod=score)

    lowered = ftp.spmd(run, mesh, (cut, P()), cut, hardware=SLOW).lower(q, slope)
    assert [c.op for c in lowered.collectives] == ["ring"]
    lowered.save(tmp_path / "program")
    monkeypatch.setattr("ftp.ops.map_slices._programs", {})
    letters.cache_clear()
    found = ftp.load_program(tmp_path / "program", mesh)(q, slope)
    by = (slope * torch.tensor([1.0, 2.0]))[:, None, None]
    expected = (q @ q.mT / 2 * by).softmax(-1) @ q
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


PAGES = P(None, None, "tp")


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("axes", "cut", "pages", "table_cut", "moved"),
    [
        (("tp",), P(None, "tp"), PAGES, P(), []),
        (("dp",), P("dp"), P(), P(), []),
        (("dp", "tp"), P("dp", "tp"), PAGES, P(), []),
        (("dp",), P("dp"), P(), P("dp"), ["all_gather"]),
        (("dp",), P(), P("dp"), P(), ["all_reduce"]),
    ],
    ids=["heads", "queries", "both", "table", "pages"],
)
@pytest.mark.parametrize(
    "window", [pytest.param((-1, 0), marks=pytest.mark.slow), (4, 0), (-1, -1)]
)
def test_a_paged_cache(axes: Any, cut: P, pages: P, table_cut: P, moved: list[str], window: Any):
    """Pages in any order, sequences of several new tokens, unused tokens that are NaN, and entries
    of no page.
    """
    torch.manual_seed(0)
    size, used = 4, torch.tensor([9, 1, 12, 5], dtype=torch.int32)
    ends = torch.tensor([0, 1, 2, 5, 6], dtype=torch.int32)
    q = torch.randn(6, 4, 2, dtype=torch.float64)
    pools = [torch.full((14, size, 2, 2), math.nan, dtype=torch.float64) for _ in range(2)]
    table, expected = torch.randperm(14)[:12].reshape(4, 3).to(torch.int32), []
    for n, count in enumerate(used.tolist()):
        keys, values = (torch.randn(count, 2, 2, dtype=torch.float64) for _ in range(2))
        for pool, x in zip(pools, (keys, values), strict=True):
            for page, part in zip(table[n].tolist(), x.split(size), strict=False):
                pool[page, : len(part)] = part
        table[n, -(-count // size) :] = -1
        rows = q[ends[n] : ends[n + 1]]
        ahead = torch.arange(count) - (torch.arange(count - len(rows), count)[:, None])
        left, right = window
        sees = ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
        near = (x.transpose(0, 1)[None] for x in (rows, keys, values))
        expected.append(dense(*near, lambda s: s, sees)[0].transpose(0, 1))

    def decode(q, k, v, table, used, ends):
        return varlen_attn(
            *(q, k, v, ends, None, 3, 12),
            window_size=window,
            enable_gqa=True,
            seqused_k=used,
            block_table=table,
        )

    mesh = ftp.simulated_mesh((2,) * len(axes), axes)
    specs = cut, pages, pages, table_cut, P(), P()
    step = ftp.spmd(decode, mesh, specs, cut, certify=True)
    args = q, *pools, table, used, ends
    assert [c.op for c in step.lower(*args).collectives] == moved
    torch.testing.assert_close(step(*args), torch.cat(expected), rtol=0, atol=1e-10)


def test_a_cache_of_slots():
    """`seqused_k` without pages: of each sequence's keys the first ones are used."""
    torch.manual_seed(0)
    ends, slots = torch.tensor([0, 1, 3]), torch.tensor([0, 5, 12])
    used = torch.tensor([4, 7])
    q, k, v = (torch.randn(n, 2, 2, dtype=torch.float64) for n in (3, 12, 12))
    k[4], v[4] = math.nan, math.nan

    def decode(q, k, v, ends, slots, used):
        return varlen_attn(q, k, v, ends, slots, 2, 7, window_size=(-1, 0), seqused_k=used)

    expected = []
    for rows, keys in ((slice(0, 1), slice(0, 4)), (slice(1, 3), slice(5, 12))):
        near = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        count = near[1].shape[2]
        sees = torch.ones(near[0].shape[2], count, dtype=torch.bool).tril(count - len(q[rows]))
        expected.append(dense(*near, lambda s: s, sees)[0].transpose(0, 1))
    args = q, k, v, ends, slots, used
    for cut in (P(None, "cp"), P("cp")):
        step = ftp.spmd(decode, mesh_of((2,)), (cut,) * 3 + (P(),) * 3, cut, certify=True)
        torch.testing.assert_close(step(*args), torch.cat(expected), rtol=0, atol=1e-10)


def test_pages_without_their_lengths_are_refused():
    q, ends = torch.ones(4, 1, 2), torch.tensor([0, 4], dtype=torch.int32)
    pool, table = torch.ones(2, 4, 1, 2), torch.zeros(1, 1, dtype=torch.int32)
    run = lambda q, x: varlen_attn(q, x, x, ends, None, 4, 4, block_table=table)  # noqa: E731
    with pytest.raises(TraceError, match="seqused_k"):
        ftp.lower(run, mesh_of((2,)), (P("cp"), P()), q, pool)


def test_the_functions_are_torch_s_own_again():
    module = torch.nn.attention.flex_attention
    before = module.flex_attention_hop, torch.ops.torch_attn._varlen_attn
    q = torch.ones(1, 1, 4, 2)
    ftp.lower(lambda q: flex_attention(q, q, q), mesh_of((2,)), P(), q)
    assert (module.flex_attention_hop, torch.ops.torch_attn._varlen_attn) == before
