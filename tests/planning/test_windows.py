"""Dims in which neighbours meet, cut over an axis: slices, padding, rolls, convolutions, pooling,
upsampling. They run on windows and exchange halos; their numbers are those of one device.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import run_examples
from torch import Tensor, nn
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.ops.windows import HALO, JOIN_WINDOWS, WINDOWS, Windows, exchange_of
from ftp.planning import axis_by_axis, planner
from ftp.rules.windows import SCANS, WINDOWED, FarApart, by_windows

aten = torch.ops.aten


@given(
    st.integers(0, 20), st.integers(1, 6), st.integers(-5, 5), st.integers(0, 7), st.integers(1, 9)
)
def test_ranks_get_their_windows(whole: int, n: int, start: int, step: int, size: int):
    """Of every dtype that a tensor may have; and no rank sends or receives more than is said."""
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int16):
        x = torch.arange(2.0 * whole * 3).reshape(2, whole, 3).to(dtype)
        expected = torch.stack(
            [
                torch.stack(
                    [x[:, i] if 0 <= i < whole else x.new_zeros(2, 3) for i in range(a, a + size)],
                    1,
                )
                for a in range(start, start + n * step, step or 1)[: n if step else 0]
            ]
            if step
            else [WINDOWS(x, 1, 1, start, 1, size)[0]] * n
        )
        assert torch.equal(WINDOWS(x, 1, n, start, step, size), expected)
        windows = Windows(whole, n, start, step, size)
        parts = [x[:, a:b] for a, b in map(windows.held, range(n))]
        got = HALO.by_rank([(part, 1, n, start, step, size, whole, "") for part in parts])
        assert torch.equal(torch.cat(got), expected)
    moved = [[windows.part(i, j)[1] if i != j else 0 for j in range(n)] for i in range(n)]
    assert exchange_of(windows).most == max(
        *map(sum, moved), *map(sum, zip(*moved, strict=True)), 0
    )


# Ops on windows, against the op.


def _numbers(draw: Any, least: int, most: int, ndim: int) -> list[int]:
    return [draw(st.integers(least, most)) for _ in range(ndim)]


def _of_convolution(draw: Any, ndim: int) -> list[Any]:
    groups, transposed = draw(st.integers(1, 2)), draw(st.booleans())
    kernel, stride = _numbers(draw, 1, 4, ndim), _numbers(draw, 1, 3, ndim)
    x = torch.randn(2, 2 * groups, *_numbers(draw, 4, 13, ndim))
    weight = torch.randn((2 if transposed else 3) * groups, 3 if transposed else 2, *kernel)
    more = [draw(st.integers(0, s - 1)) if transposed else 0 for s in stride]
    how = stride, _numbers(draw, 0, 3, ndim), _numbers(draw, 1, 2, ndim), transposed, more, groups
    y = aten.convolution.default
    back = lambda out: (torch.randn_like(out), x, weight, [3 * groups], *how, [True] * 3)  # noqa: E731
    return [
        (y, (x, weight, torch.randn(3 * groups), *how)),
        (aten.convolution_backward.default, back),
    ]


def _of_pooling(draw: Any, ndim: int) -> list[Any]:
    kernel, stride = _numbers(draw, 1, 3, ndim), _numbers(draw, 1, 3, ndim)
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    batch = [2] * draw(st.integers(0, 1))
    x, ceil_mode = torch.randn(*batch, 3, *_numbers(draw, 4, 11, ndim)), draw(st.booleans())
    if draw(st.booleans()):
        how = kernel, stride, padding, _numbers(draw, 1, 2, ndim), ceil_mode
        op = "max_pool2d_with_indices" if ndim == 2 else "max_pool3d_with_indices"
        back = lambda out: (torch.randn_like(out[0]), x, *how, out[1])  # noqa: E731
    else:
        divisor = draw(st.sampled_from([None, 3]))
        how = kernel, stride, padding, ceil_mode, draw(st.booleans()), divisor
        op = "avg_pool2d" if ndim == 2 else "avg_pool3d"
        back = lambda out: (torch.randn_like(out), x, *how)  # noqa: E731
    ops = getattr(aten, op).default, getattr(aten, f"{op}_backward").default
    return [(ops[0], (x, *how)), (ops[1], back)]


def _of_upsampling(draw: Any, ndim: int) -> list[Any]:
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[ndim]
    mode = draw(st.sampled_from(["nearest", "nearest_exact", *smooth]))
    name = ("_" if mode == "nearest_exact" else "") + f"upsample_{mode}{ndim}d"
    x, times = torch.randn(2, 3, *_numbers(draw, 2, 9, ndim)), _numbers(draw, 1, 3, ndim)
    sizes = [a * b for a, b in zip(x.shape[2:], times, strict=True)]
    align = [draw(st.sampled_from([False, False, True]))] if mode in smooth else []
    back = lambda out: (torch.randn_like(out), sizes, list(x.shape), *align)  # noqa: E731
    packet = getattr(aten, name)
    return [
        (packet.default, (x, sizes, *align)),
        (packet.vec, (x, None, *align, list(map(float, times)))),
        (getattr(aten, f"{name}_backward").default, back),
    ]


def _of_movement(draw: Any, ndim: int) -> list[Any]:
    x, dim = torch.randn(*_numbers(draw, 3, 9, ndim + 1)), draw(st.integers(0, ndim))
    size = x.shape[dim]
    (start, end), step = sorted(_numbers(draw, 0, size, 2)), draw(st.integers(1, 3))
    part = torch.randn(*x.shape[:dim], end - start, *x.shape[dim + 1 :])
    grad = part.narrow(dim, 0, -(-(end - start) // step))
    more = [torch.randn_like(x.narrow(dim, 0, k)) for k in _numbers(draw, 0, 3, 2)]
    few = torch.randn(2, 40).movedim(1, dim % 2), dim % 2, *sorted(_numbers(draw, 0, 40, 2))
    pad = _numbers(draw, -1, 3, 2 * draw(st.integers(1, ndim + 1)))
    rolls = _numbers(draw, -9, 9, 2), [dim, (dim + 1) % (ndim + 1)]
    return [
        (aten.slice.Tensor, (x, dim, start, end, step)),
        (aten.slice_backward.default, (grad, list(x.shape), dim, start, end, step)),
        (aten.slice.Tensor, few),
        (
            aten.slice_backward.default,
            lambda out: (torch.randn_like(out), list(few[0].shape), *few[1:], 1),
        ),
        (aten.slice_scatter.default, (x, part, dim, start, end)),
        (aten.cat.default, ([more[0], x, more[1]], dim)),
        (aten.constant_pad_nd.default, (x, pad)),
        (aten.roll.default, (x, *rolls)),
        (aten.flip.default, (x, rolls[1])),
    ]


def _of_padding(draw: Any, ndim: int) -> list[Any]:
    batch = [2] * draw(st.integers(0, 1))
    x, pad = torch.randn(*batch, 3, *_numbers(draw, 4, 11, ndim)), _numbers(draw, 0, 3, 2 * ndim)
    name = draw(st.sampled_from(["reflection", "replication"])) + f"_pad{ndim}d"
    back = lambda out: (torch.randn_like(out), x, pad)  # noqa: E731
    ops = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    return [(ops[0], (x, pad)), (ops[1], back)]


OF: dict[str, tuple[Callable[..., list[Any]], int, int]] = {
    "convolution": (_of_convolution, 1, 2),
    "pooling": (_of_pooling, 2, 3),
    "upsampling": (_of_upsampling, 1, 3),
    "movement": (_of_movement, 1, 2),
    "padding": (_of_padding, 1, 3),
}


@pytest.mark.parametrize("kind", OF)
def test_ops_on_windows(kind: str):
    make, least, most = OF[kind]
    seen, done = set(), 0

    @settings(max_examples=60)
    @given(st.data())
    def check(data: st.DataObject):
        nonlocal done
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        ndim = data.draw(st.integers(least, most))
        n, made = data.draw(st.integers(1, 5)), None
        for op, given_args in make(data.draw, ndim):
            args: Any = given_args(made) if callable(given_args) else given_args
            dim = data.draw(st.integers(0, ndim + 1))
            try:
                made = op(*args)
            except RuntimeError:  # torch refuses such sizes
                return
            try:
                found = by_windows(op, n, dim)(*args)
            except FarApart:
                continue
            seen.add(op)
            done += 1
            torch.testing.assert_close(found, made, rtol=1e-9, atol=1e-9, equal_nan=True)

    try:
        check()
    finally:
        torch.set_default_dtype(torch.float32)
    assert done > 20 and seen


def test_every_op_on_windows_is_drawn():
    drawn = ("convolution", "pool2d", "pool3d", "upsample", "slice", "_pad", "roll", "flip", "cat")
    ops = WINDOWED.keys() - SCANS  # scans: test_scans.py
    assert not [op for op in ops if not any(name in str(op) for name in drawn)]


# Whole programs.


def check(
    fn: Callable[..., Any], params: Any, x: Tensor, spec: P, axes: dict[str, int], **options: Any
) -> ftp.Lowered:
    """Loss and gradients against one device; returns the certified program."""
    mesh = ftp.simulated_mesh(tuple(axes.values()), tuple(axes))
    step = ftp.shard(fn, mesh, P(), batch_specs=spec, certify=True, **options)
    batch = ftp.device_put(x, mesh, spec)
    loss, grads = step(params, batch)
    expected, of_one = torch.func.grad_and_value(fn)(params, x)[::-1]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, of_one)
    return step.lower(params, batch)


def moved(lowered: ftp.Lowered) -> dict[str, int]:
    found: dict[str, int] = {}
    for c in lowered.collectives:
        found[c.op] = found.get(c.op, 0) + c.wire_nbytes
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_convolution_sends_its_halo(n: int):
    """Rows of 3 channels and 8 columns in float64, one to each neighbour, forward and backward."""
    x, w = torch.randn(2, 3, 24, 8).double(), torch.randn(5, 3, 3, 3).double()
    lowered = check(
        lambda p, x: F.conv2d(x, p, padding=1).square().mean(), w, x, P(None, None, "h"), {"h": n}
    )
    row = 2 * 3 * 8 * 8
    sides = 1 if n == 2 else 2  # a rank at an end has one neighbour
    assert moved(lowered)["halo_exchange"] == sides * row  # kept for the weight's gradient
    assert {c.op for c in lowered.collectives} == {"halo_exchange", "all_reduce"}


@pytest.mark.parametrize(("mode", "beside"), [("bilinear", 1), ("bicubic", 2)])
def test_upsampling_sends_the_rows_beside(mode: str, beside: int):
    """Images of 3 channels and 8 columns in float64, and their gradients of twice the size."""
    x, w = torch.randn(2, 3, 24, 8).double(), torch.randn(3, 3, 1, 1).double()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return F.interpolate(F.conv2d(x, w), scale_factor=2, mode=mode).square().mean()

    lowered = check(loss, w, x, P(None, None, "h"), {"h": 2})
    row = 2 * 3 * 8 * 8
    assert moved(lowered)["halo_exchange"] == beside * row + 2 * beside * 2 * row
    assert {c.op for c in lowered.collectives} == {"halo_exchange", "all_reduce"}


def test_pools_in_ceil_mode_send_nothing_where_strides_divide():
    x, w = torch.randn(2, 3, 16, 8).double(), torch.randn(3, 3, 1, 1).double()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.conv2d(x, w), 2, ceil_mode=True)
        return F.avg_pool2d(y, 2, ceil_mode=True, count_include_pad=False).square().mean()

    lowered = check(loss, w, x, P(None, None, "h"), {"h": 2})
    assert {c.op for c in lowered.collectives} == {"all_reduce"}


def _heat(u: Tensor, k: Tensor) -> Tensor:
    inner = u[:, 1:-1]
    return F.pad(inner + k * (u[:, 2:] + u[:, :-2] - 2 * inner), (1, 1))


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token shift": lambda x, k: k * F.pad(x[:, :-1], (1, 0)) + x,
    "differences": lambda x, k: (k * x)[:, 1:] - x[:, :-1],
    "periodic": lambda x, k: k * (torch.roll(x, 1, 1) + torch.roll(x, -2, 1)),
    "heat": lambda x, k: _heat(_heat(x, k), k),
    "a first token": lambda x, k: torch.cat([k.expand(2, 1), x], 1)[:, 1:] * x,
    "shift by cat": lambda x, k: torch.cat([x[:, :1] * 0, k * x[:, :-1]], 1) + x,
    "every second": lambda x, k: k * x[:, ::2],
    "periodic convolution": lambda x, k: F.conv1d(
        F.pad(x[:, None], (2, 1), mode="circular"), k.expand(1, 1, 4)
    ),
    "mirrored convolution": lambda x, k: F.conv1d(
        F.pad(x[:, None], (2, 1), mode="reflect"), k.expand(1, 1, 4)
    ),
    "causal": lambda x, k: F.conv1d(x[:, None], k.expand(1, 1, 4), padding=3)[..., : x.shape[1]],
    "down, up": lambda x, k: F.conv_transpose1d(
        F.conv1d(x[:, None], k.expand(1, 1, 3), stride=2, padding=1), k.expand(1, 1, 4), None, 2, 1
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n.endswith("convolution") else n for n in PROGRAMS],
)
@pytest.mark.parametrize(("size", "n"), [(16, 2), (23, 3)])
def test_programs_along_a_sequence(name: str, size: int, n: int):
    torch.manual_seed(size)
    x, k = torch.randn(2, size).double(), torch.randn(1).double()
    fn = PROGRAMS[name]
    check(lambda k, x: fn(x, k).square().mean(), k, x, P(None, "s"), {"s": n})


@pytest.mark.parametrize("shift", [1, -2])
def test_a_roll_keeps_the_sign_of_zero(shift: int):
    x = torch.zeros(8, 3).copysign(torch.tensor([1.0, -1, -1, 1, -1, 1, 1, -1])[:, None])
    roll = lambda x: torch.roll(x, shift, 0)  # noqa: E731
    step = ftp.spmd(roll, ftp.simulated_mesh((2,), ("s",)), P("s"), P("s"), certify=True)
    assert {c.op for c in step.lower(x).collectives} == {"halo_exchange"}
    assert torch.equal(step(x).signbit(), roll(x).signbit())


@pytest.mark.parametrize("size", [64, 21])  # of 21, ranks have two each, one, and none
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "first", "joined"])
def test_looked_up_elements_keep_the_sign_of_zero(mode: str, size: int):
    def fn(x: Tensor) -> Tensor:
        if mode == "first":
            return x[:1] * 1
        return torch.cat([x[:1], x]) if mode == "joined" else F.pad(x[None], (1, 1), mode=mode)[0]

    mesh, out = ftp.simulated_mesh((16,), ("s",)), P() if mode == "first" else P("s")
    step = ftp.spmd(fn, mesh, P("s"), out, certify=True)
    x = torch.full((size,), -0.0)
    assert torch.equal(ftp.device_get(step(x), mesh, out).signbit(), fn(x).signbit())


def test_an_empty_tensor_decides_the_dtype_of_joined_ones():
    fn = lambda x: torch.cat([x.new_zeros(0, dtype=torch.float64), x, x.new_zeros(1)])  # noqa: E731
    step = ftp.spmd(fn, ftp.simulated_mesh((4,), ("s",)), P("s"), P("s"), certify=True)
    x = torch.randn(64, dtype=torch.float32)
    torch.testing.assert_close(step(x), fn(x))


def test_programs_that_gather_without_windows_are_planned_once(monkeypatch: pytest.MonkeyPatch):
    made = []
    make = planner._make_plan  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(planner, "_make_plan", lambda *a, **k: made.append(1) or make(*a, **k))
    for fn, n in (
        (lambda ids, x: torch.cat([ids[:, :1], ids[:, :-1]], 1), 1),  # integers are gathered
        (lambda ids, x: torch.cat([x, x * 2], 1).sin(), 1),  # as are halves
        (lambda ids, x: torch.cat([x[:, :1] * 0, x[:, :-1]], 1), 3),  # as constraints break
    ):
        made.clear()
        given = torch.ones(2, 64, dtype=torch.int64), torch.ones(2, 64)
        mesh = ftp.AbstractMesh((4,), ("s",))
        ftp.lower(fn, mesh, P(None, "s"), *given, out_specs=P(None, "s"))
        assert len(made) == n


def test_windows_of_a_chain_are_found_at_once(monkeypatch: pytest.MonkeyPatch):
    """However deep it is: each rewrite and each closure passes over the whole graph."""
    rewrites: list[int] = []

    def counted(*given: Any) -> Any:
        rewrites[-1] += 1
        return in_windows(*given)

    in_windows = axis_by_axis.in_windows
    monkeypatch.setattr(axis_by_axis, "in_windows", counted)
    for depth in (2, 8):
        rewrites.append(0)
        model = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(depth)))
        fn, params = ftp.functionalize(model)
        loss = lambda params, x, fn=fn: fn(params, x).square().sum()  # noqa: E731
        mesh = ftp.simulated_mesh((2,), ("h",))
        step = ftp.shard(loss, mesh, P(), batch_specs=P(None, None, "h"))
        halos = step.lower(params, torch.randn(2, 2, 16, 4)).collectives
        assert len(halos) >= 2 * depth - 1
    assert rewrites[0] == rewrites[1]


def test_plans_with_windows_and_without_share_what_has_none(monkeypatch: pytest.MonkeyPatch):
    """A sort along the batch breaks a constraint, so all plans are made, of one graph."""

    def loss(p: Tensor, x: Tensor) -> Tensor:
        ranked = (x @ p).softmax(-1).square().sum(-1).sort(0).values
        return (ranked * torch.arange(16.0)).sum()

    made, solved = [], []
    make, solve = planner._make_plan, axis_by_axis.solve  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(planner, "_make_plan", lambda *a, **k: made.append(1) or make(*a, **k))
    monkeypatch.setattr(axis_by_axis, "solve", lambda p: solved.append(p.axis) or solve(p))
    mesh = ftp.AbstractMesh((4, 2), ("dp", "tp"))
    step = ftp.shard(loss, mesh, P(None, "tp"), batch_specs=P("dp"))
    plan = step.lower(torch.ones(8, 8), torch.ones(16, 8)).plan
    assert not plan.kept_rules["dp"] and len(made) == 3
    assert sorted(solved) == ["dp", "dp", "tp", "tp"]  # in both orders of the axes, once


@pytest.mark.slow
@settings(max_examples=60)
@given(st.sampled_from(sorted(PROGRAMS)), st.integers(4, 33), st.integers(2, 5))
def test_many_programs_along_a_sequence(name: str, size: int, n: int):
    test_programs_along_a_sequence(name, size, n)


def test_a_pyramid_exchanges_halos_alone():
    torch.manual_seed(0)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 3, 2, 1)
        return (F.interpolate(y, scale_factor=2) - x).square().mean()

    x, w = torch.randn(2, 3, 16, 8).double(), torch.randn(3, 3, 3, 3).double()
    lowered = check(loss, w, x, P(None, None, "h"), {"h": 2})
    assert {c.op for c in lowered.collectives} == {"halo_exchange", "all_reduce"}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
        self.norm, self.up = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 2, 2)
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x).relu()
        b = F.avg_pool2d(self.norm(self.inner(F.max_pool2d(a, 3, 1, 1))), 2)
        b = self.up(F.interpolate(b, scale_factor=2))
        return self.out(torch.cat([a, b], 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (P(None, None, "h"), {"h": 2}),
        (P("dp", None, None, "w"), {"dp": 2, "w": 2}),
        (P(None, None, "h", "w"), {"h": 2, "w": 2}),
    ],
    ids=str,
)
def test_a_unet_exchanges_halos_alone(spec: P, axes: dict[str, int]):
    torch.manual_seed(0)
    fn, params = ftp.functionalize(UNet().double())
    x = torch.randn(2, 3, 16, 16).double()
    lowered = check(lambda p, x: fn(p, x).square().mean(), params, x, spec, axes)
    assert {c.op for c in lowered.collectives} == {"halo_exchange", "all_reduce"}
    whole = 2 * 4 * 16 * 16 * 8  # bytes of one activation, which a gather would move
    assert moved(lowered)["halo_exchange"] < whole


SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "first token": lambda x: x[:, :1],
    "last tokens": lambda x: x[:, -3:],
    "between": lambda x: x[:, 2000:2002],
    "a token before": lambda x: torch.cat([x.new_ones(2, 1, 8), x], 1),
    "shift": lambda x: torch.cat([x[:, :1] * 0, x[:, :-1]], 1),
    "every second": lambda x: x[:, 1::2],
    "reflect": lambda x: F.pad(x.mT, (3, 3), mode="reflect"),
    "replicate": lambda x: F.pad(x[:, None], (1, 1, 2, 2), mode="replicate"),
    "circular": lambda x: F.pad(x.mT, (2, 1), mode="circular"),
}


@pytest.mark.parametrize("name", SMALL)
def test_few_elements_move(name: str):
    """Loss and gradient send less than ten elements of 8 float32 features, on 4 ranks."""
    mesh, cut = ftp.AbstractMesh((4,), ("s",)), P(None, "s")
    grad = torch.func.grad_and_value(lambda x: SMALL[name](x).square().sum())
    lowered = ftp.spmd(grad, mesh, cut, (cut, P())).lower(torch.empty(2, 4096, 8, device="meta"))
    assert sum(moved(lowered).values()) < 4 * 10 * 2 * 8 * 4
    ftp.certify(lowered)


def test_merged_patches_exchange_nothing():
    """The four neighbours of each patch, as in Swin."""
    mesh, cut = ftp.AbstractMesh((4,), ("h",)), P(None, "h")
    merge = lambda x: torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)  # noqa: E731
    lowered = ftp.lower(merge, mesh, cut, torch.ones(2, 64, 8, 4), out_specs=cut)
    assert sum(c.wire_nbytes for c in lowered.collectives) <= 2 * 1 * 8 * 4 * 4
    ftp.certify(lowered)


def test_halos_wider_than_chunks_are_gathered():
    x, w = torch.randn(2, 1, 16).double(), torch.randn(1, 1, 11).double()
    lowered = check(
        lambda w, x: F.conv1d(x, w, padding=5).square().sum(), w, x, P(None, None, "s"), {"s": 4}
    )
    assert "halo_exchange" not in moved(lowered)


def test_a_dim_without_windows_leaves_another_ones():
    """Padding over two axes of equal size, of which one's chunks are narrower than its halos."""
    mesh, rows = ftp.AbstractMesh((2, 2), ("h", "w")), P(None, None, "h", "w")
    pad = lambda x: F.pad(x, (4, 4, 2, 1))  # noqa: E731
    lowered = ftp.lower(pad, mesh, rows, torch.ones(2, 3, 64, 4), out_specs=rows)
    assert {(c.op, c.axes) for c in lowered.collectives} == {
        ("halo_exchange", ("h",)),
        ("all_gather", ("w",)),
    }


@pytest.mark.parametrize(("size", "op"), [(16, "all_gather"), (2**24, "halo_exchange")])
def test_the_cheaper_of_halos_and_a_gather(size: int, op: str):
    """Ten exchanges of one element take longer than a gather of 16 elements."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = x @ w
        for _ in range(5):
            y = torch.roll(y, 1, 1) * y
        return y.sum()

    w, x = torch.empty(8, size, device="meta"), torch.empty(2, 8, device="meta")
    step = ftp.shard(loss, ftp.AbstractMesh((4,), ("tp",)), P(None, "tp"), batch_specs=P())
    found = {c.op for c in step.lower(w, x).collectives}
    assert found - {"all_reduce"} == {op}


def test_elements_that_no_result_reads_may_be_infinite():
    x, w = torch.randn(1, 2, 8).double(), torch.randn(3, 2, 3).double()
    x[..., -1] = torch.inf
    fn = lambda w, x: F.conv1d(x, w, stride=2).square().sum()  # noqa: E731
    lowered = check(fn, w, x, P(None, None, "s"), {"s": 2})
    assert "halo_exchange" in moved(lowered)


@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("axes", [{"h": 2}, {"h": 2, "w": 2}], ids=str)
def test_one_result_of_max_pooling(axes: dict[str, int], result: int):
    """The certified program makes no other one."""
    mesh, cut = ftp.simulated_mesh(tuple(axes.values()), tuple(axes)), P(None, None, *axes)
    pool = lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[result]  # noqa: E731
    x = torch.randn(2, 3, 12, 16)
    found = ftp.spmd(pool, mesh, cut, cut, certify=True)(ftp.device_put(x, mesh, cut))
    assert torch.equal(ftp.device_get(found, mesh, cut), pool(x))


def test_a_saved_program_exchanges_halos(tmp_path: Path):
    mesh, cut = ftp.simulated_mesh((2,), ("s",)), P(None, "s")
    fn = lambda x: F.pad(x[:, :-1], (1, 0)) * x  # noqa: E731
    x = torch.randn(2, 8)
    ftp.spmd(fn, mesh, cut, cut).lower(x).save(tmp_path / "program")
    found = ftp.load_program(tmp_path / "program", mesh)(ftp.device_put(x, mesh, cut))
    torch.testing.assert_close(ftp.device_get(found, mesh, cut), fn(x))


def test_wrong_halos_are_refused():
    """A certificate of a program whose windows begin one element too late."""
    mesh = ftp.AbstractMesh((2,), ("s",))
    step = ftp.spmd(lambda x: F.pad(x[:, :-1], (1, 0)), mesh, P(None, "s"), P(None, "s"))
    lowered = step.lower(torch.ones(2, 8))
    (node,) = (n for n in lowered.graph.graph.nodes if n.target is HALO.target)
    node.args = (*node.args[:3], node.args[3] + 1, *node.args[4:])
    with pytest.raises(ftp.errors.CertificateError, match="not the local form"):
        ftp.certify(lowered)


def test_windows_join_to_their_dim():
    x = torch.randn(3, 10)
    assert torch.equal(JOIN_WINDOWS(WINDOWS(x, 1, 3, 0, 4, 4), 1, 10), x)


def test_page():
    run_examples("halos.md")


def test_single_numbers_and_empty_dims():
    x, w, how = torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3), ([1], [1], [1], False, [0], 1)
    made = by_windows(aten.convolution.default, 2, 2)(x, w, None, *how)
    torch.testing.assert_close(made, aten.convolution.default(x, w, None, *how))
    back = torch.randn_like(made), x, w, None, *how, [True, True, False]
    made = by_windows(aten.convolution_backward.default, 2, 3)(*back)
    torch.testing.assert_close(made, aten.convolution_backward.default(*back))
    with pytest.raises(FarApart):
        by_windows(aten.roll.default, 2, 0)(torch.ones(0, 2), [1], [0])
