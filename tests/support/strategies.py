"""What tests draw from: rule texts, and arguments of every op that has a rule."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from ftp.ops.map_slices import interned
from ftp.ops.score_programs import as_program
from ftp.rules.notation import BATCH, Notation

aten = torch.ops.aten
Sample = tuple[tuple[Any, ...], dict[str, Any]]

FACTORS = ["a", "b", "c", "d", "k", "n1", "~0", "~x"]


@st.composite
def notations(draw: st.DrawFn) -> Notation:
    """Any rule that can be written."""
    dim = st.one_of(st.just((BATCH,)), st.lists(st.sampled_from(FACTORS), max_size=3).map(tuple))
    tensor = (
        st.lists(dim, max_size=4).filter(lambda dims: sum(BATCH in d for d in dims) <= 1).map(tuple)
    )
    operands, results = (
        tuple(draw(st.lists(tensor, max_size=3))),
        tuple(draw(st.lists(tensor, min_size=1, max_size=3))),
    )
    named = sorted({f for dims in (*operands, *results) for d in dims for f in d})
    some = st.lists(st.sampled_from(named), unique=True, max_size=3) if named else st.just([])
    pending = tuple(
        tuple((f, draw(st.sampled_from(["sum", "max", "min"]))) for f in draw(some))
        for _ in results
    )
    return Notation(operands, results, frozenset(draw(some)), pending)


def x(*shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    """Floats in which most functions are defined."""
    return torch.rand(shape, dtype=torch.float64) * (high - low) + low


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def ints(*shape: int, high: int = 8, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape)


def int8(*shape: int) -> Tensor:
    return ints(*shape, low=-9, high=9).to(torch.int8)


def float8(*shape: int) -> Tensor:
    """Small integers, whose products have exact sums."""
    return ints(*shape, low=-3, high=4).to(torch.float8_e4m3fn)


def halves(*shape: int) -> Tensor:
    """Powers of two, by which products stay exact."""
    return 0.5 ** ints(*shape, high=3).float()


def bools(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def s(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


# Arguments that are no tensors, by name, for ops without samples of their own.
BY_NAME: dict[str, Any] = {
    "alpha": 2,
    "approximate": "none",
    "beta": 2.0,
    "bit_width": 3,
    "dim": 1,
    "dims": [1],
    "eps": 0.2,
    "exponent": 3,
    "input_scale": 1.5,
    "is_result": False,
    "keepdim": True,
    "lambd": 0.5,
    "max": 0.6,
    "min": 0.3,
    "max_val": 0.5,
    "min_val": 0.2,
    "n": 2,
    "negative_slope": 0.1,
    "other": 2,
    "p": 1,
    "scale": 1.25,
    "self": 3,
    "self_is_result": False,
    "threshold": 0.4,
    "value": 2,
    "weight": 0.3,
    "diagonal": 1,
    "rounding_mode": "floor",
    "dtype": torch.float32,
    "fill_value": 2.5,
    "boundaries": None,
    "decimals": 1,
    "upper": 1,
    "lower": 0,
    "nan": 0.0,
    "posinf": 1.0,
    "neginf": 0.0,
}
INTEGRAL = ("bitwise", "gcd", "lcm", "shift__")


def generic(op: OpOverload) -> list[Sample]:
    """Samples from the schema: equal shapes, broadcasting ones, a vector, a scalar."""
    make: Callable[..., Tensor] = (
        (lambda *shape: ints(*shape, low=1)) if any(i in str(op) for i in INTEGRAL) else x
    )
    if "bitwise_not" in str(op):
        make = lambda *shape: ints(*shape)  # noqa: E731
    tensors = [a for a in op._schema.arguments if str(a.type) == "Tensor"]
    shapes = [
        [(5, 4)] * len(tensors),
        [(3,)] * len(tensors),
        [()] * len(tensors),
        [(1, 0, 2)] * len(tensors),
    ]
    if len(tensors) > 1 and "backward" not in str(op):
        shapes += [
            [(5, 1, 4), (3, 4), (3, 1)][: len(tensors)],
            [(1,), (3, 1), (3, 2)][: len(tensors)],
        ]
    out = []
    for case in shapes:
        given, args, kwargs = iter(case), [], {}
        for a in op._schema.arguments:
            if str(a.type) == "Tensor":
                args.append(make(*next(given)))
            elif a.kwarg_only:
                if a.name in ("rounding_mode",):
                    kwargs[a.name] = BY_NAME[a.name]
            elif a.has_default_value() and a.name not in ("min", "max", "lambd"):
                break
            else:
                args.append(BY_NAME[a.name])
        out.append((tuple(args), kwargs))
    return out


def _softmax_like(*_: Any) -> list[Sample]:
    return [s(normal(4, 5, 2), d, False) for d in (0, 1, -1)] + [
        s(normal(3), 0, False),
        s(normal(()) if False else normal(), 0, False),
    ]


def _convolutions() -> list[tuple[Tensor, Tensor, Tensor | None, list[Any]]]:
    plain = [[1, 1], [1, 1], [1, 1], False, [0, 0]]
    up = [[2, 2], [1, 1], [1, 1], True, [1, 1]]
    return [
        (normal(3, 4, 5, 6), normal(5, 4, 3, 2), normal(5), [*plain, 1]),
        (normal(2, 4, 5, 4), normal(6, 2, 3, 3), None, [*plain, 2]),
        (normal(2, 3, 5, 4), normal(6, 1, 3, 3), normal(6), [*plain, 3]),
        (normal(2, 3, 4, 4), normal(3, 5, 3, 3), normal(5), [*up, 1]),
        (normal(2, 4, 4, 4), normal(4, 3, 3, 3), None, [*up, 2]),
        (normal(2, 3, 7), normal(4, 3, 2), normal(4), [[1], [0], [2], False, [0], 1]),
    ]


def _attention(backward: bool) -> list[Sample]:
    cases: list[tuple[tuple[Tensor, Tensor, Tensor], bool, Tensor | None]] = [
        ((normal(2, 3, 5, 4), normal(2, 3, 6, 4), normal(2, 3, 6, 4)), False, None),
        ((normal(2, 3, 5, 4), normal(2, 3, 5, 4), normal(2, 3, 5, 4)), True, None),
        ((normal(1, 2, 6, 4), normal(1, 2, 6, 4), normal(1, 2, 6, 4)), True, None),
        ((normal(2, 3, 4, 4), normal(2, 3, 5, 4), normal(2, 3, 5, 4)), False, normal(2, 1, 4, 5)),
        ((normal(2, 3, 4, 4), normal(2, 3, 5, 4), normal(2, 3, 5, 4)), False, normal(1, 3, 1, 5)),
        ((normal(2, 3, 4, 4), normal(2, 3, 5, 4), normal(2, 3, 5, 4)), False, normal(4, 5)),
    ]
    cases.append(((normal(2, 6, 4, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 4)), False, None))
    cases.append(((normal(2, 6, 4, 4), normal(2, 2, 4, 4), normal(2, 2, 4, 4)), True, None))
    out = []
    for (q, k, v), causal, mask in cases:
        kwargs = {} if mask is None else {"attn_mask": mask}
        if not backward:
            out.append(s(q, k, v, 0.0, causal, **kwargs))
            continue
        y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **kwargs)
        out.append(s(normal(*y.shape), q, k, v, y, lse, 0.0, causal, **kwargs))
    return out


def _varlen(backward: bool) -> list[Sample]:
    """Attention within packed documents: windows, fewer heads of keys, tokens of no document."""
    out, op = [], torch.ops.ftp.scaled_dot_product_attention_varlen.default
    for heads, ends, of_keys, window in (
        (2, [0, 3, 3, 6], [0, 3, 3, 6], (-1, 0)),
        (4, [0, 2, 5], [0, 4, 6], (2, 1)),
    ):
        q, k, v = normal(1, 4, 6, 2), normal(1, heads, 7, 2), normal(1, heads, 7, 3)
        given = torch.tensor(ends), torch.tensor(of_keys), [], [], *window, 0.7, False
        if not backward:
            out.append(s(q, k, v, *given))
            continue
        y, lse = op(q, k, v, *given)
        out.append(s(normal(*y.shape), q, k, v, y, lse, *given))
    return out


def _flex(backward: bool) -> list[Sample]:
    """Scores through functions: a bias of each pair, a table of heads, listed blocks, fewer heads
    of keys."""
    op = torch.ops.ftp.scaled_dot_product_attention_flex.default
    out = []
    for heads, size in ((2, 6), (4, 5)):
        q, k, v = normal(2, 4, size, 2), normal(2, heads, 6, 2), normal(2, heads, 6, 3)
        bias, slope = normal(2, 4, size, 6), normal(4)
        document = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2]])
        sizes = (2, 4, size, 6), torch.float64, torch.device("cpu")
        score = lambda s, b, h, q, k, x=bias, y=slope: s * y[h] + x[b, h, q, k]  # noqa: E731
        mask = lambda b, h, q, k, x=document: (q >= k) | (x[b, q] == x[b, k])  # noqa: E731
        of_score, of_mask = as_program(score, False, *sizes), as_program(mask, True, *sizes)
        tables = [torch.tensor([[[2, 1, 2]]]), torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]])]
        rest = [], [], [], [], [2, 2], 0.7, of_score[0], of_mask[0], "", 0.0, []
        given = tables, of_score[1], of_mask[1], [], *rest
        if not backward:
            out.append(s(q, k, v, *given))
            continue
        y, lse, _ = op(q, k, v, *given)
        out.append(s(normal(*y.shape), q, k, v, lse, normal(*lse.shape), *given, [True, True]))
    return out


def _layer_norm_backward() -> list[Sample]:
    out = []
    for shape, inner, mask in (
        ((4, 3, 5), [5], [True, True, True]),
        ((4, 3, 5), [3, 5], [True, True, False]),
        ((4, 5), [5], [True, False, False]),
    ):
        a, w, b = normal(*shape), normal(*inner), normal(*inner)
        _, mean, rstd = aten.native_layer_norm(a, inner, w, b, 1e-5)
        out.append(s(normal(*shape), a, inner, mean, rstd, w, b, mask))
    a = normal(4, 5)
    _, mean, rstd = aten.native_layer_norm(a, [5], None, None, 1e-5)
    return [*out, s(normal(4, 5), a, [5], mean, rstd, None, None, [True, False, False])]


def _rms_norm_backward() -> list[Sample]:
    a, w = normal(4, 3, 5), normal(5)
    _, rstd = aten._fused_rms_norm(a, [5], w, 1e-5)
    return [
        s(normal(4, 3, 5), a, [5], rstd, w, [True, True]),
        s(normal(4, 3, 5), a, [5], rstd, w, [True, False]),
    ]


def _weight_norm(backward: bool) -> list[Sample]:
    out = []
    for shape, dim in (((4, 3, 5), 0), ((4, 3, 5), 2), ((3, 5), 0), ((5,), 0)):
        v = normal(*shape)
        g = normal(*(size if i == dim else 1 for i, size in enumerate(shape)))
        _, norms = aten._weight_norm_interface(v, g, dim)
        out.append(s(normal(*shape), v, g, norms, dim) if backward else s(v, g, dim))
    return out


def _group_norm_backward() -> list[Sample]:
    out = []
    for a, groups in ((normal(3, 6, 2, 2), 3), (normal(2, 4, 5), 2)):
        n, c, hxw = a.shape[0], a.shape[1], a[0, 0].numel()
        w = normal(c)
        _, mean, rstd = aten.native_group_norm(a, w, None, n, c, hxw, groups, 1e-5)
        out.append(s(normal(*a.shape), a, mean, rstd, w, n, c, hxw, groups, [True, True, True]))
    return out


def _nll(backward: bool, two_d: bool) -> list[Sample]:
    out = []
    forward = aten.nll_loss2d_forward if two_d else aten.nll_loss_forward
    shapes = [((3, 5, 2, 2), (3, 2, 2))] if two_d else [((4, 5), (4,)), ((5,), ())]
    for full, batch in shapes:
        for reduction in (0, 1, 2):
            for weight in (None, x(5)):
                a, target = normal(*full).log_softmax(min(1, len(full) - 1)), ints(*batch, high=5)
                if target.ndim and reduction:
                    target.view(-1)[0] = -100
                y, total = forward(a, target, weight, reduction, -100)
                out.append(
                    s(x(*y.shape), a, target, weight, reduction, -100, total)
                    if backward
                    else s(a, target, weight, reduction, -100)
                )
    return out


def _softmax_backward() -> list[Sample]:
    return [s(normal(4, 5, 2), x(4, 5, 2), d, torch.float64) for d in (0, 1, -1)]


def _pooled(dims: int, backward: str = "") -> list[Sample]:
    image = normal(2, 3, *(5, 6, 4)[:dims])
    unbatched = normal(3, *(5, 6, 4)[:dims])
    if backward == "avg":
        pool = getattr(aten, f"avg_pool{dims}d")
        return [
            s(
                normal(*pool(i, [2] * dims, [2] * dims).shape),
                i,
                [2] * dims,
                [2] * dims,
                [0] * dims,
                False,
                True,
                None,
            )
            for i in (image, unbatched)
        ]
    if backward == "max":
        pool = getattr(aten, f"max_pool{dims}d_with_indices")
        made = [(i, *pool(i, [2] * dims, [2] * dims)) for i in (image, unbatched)]
        return [
            s(normal(*y.shape), i, [2] * dims, [2] * dims, [0] * dims, [1] * dims, False, at)
            for i, y, at in made
        ]
    return [s(image, [2] * dims, [2] * dims), s(unbatched, [3] * dims, [1] * dims, [1] * dims)]


def _resized(dims: int, *rest: Any) -> list[Sample]:
    return [s(normal(2, 3, *(4, 3, 5)[:dims]), [6, 5, 7][:dims], *rest)]


def _resized_vec(dims: int, *rest: Any) -> list[Sample]:
    return [
        s(normal(2, 3, *(4, 3, 5)[:dims]), [6, 5, 7][:dims], *rest, None),
        s(normal(2, 3, *(4, 3, 5)[:dims]), None, *rest, [2.0] * dims),
    ]


def _resized_backward(dims: int, *rest: Any) -> list[Sample]:
    return [s(normal(2, 3, *[6, 5, 7][:dims]), [6, 5, 7][:dims], [2, 3, *(4, 3, 5)[:dims]], *rest)]


def _padded(dims: int) -> list[Sample]:
    return [s(normal(2, 3, *(4, 3, 5)[:dims]), [1, 1, 1, 0, 0, 1][: 2 * dims])]


def _padded_backward(dims: int) -> list[Sample]:
    pad = [1, 1, 1, 0, 0, 1][: 2 * dims]
    image = normal(2, 3, *(4, 3, 5)[:dims])
    return [s(normal(*aten.constant_pad_nd(image, pad).shape), image, pad)]


def _indexed(accumulate: bool | None = None) -> list[Sample]:
    """For ``index`` (None) or ``index_put``."""
    cases: list[tuple[tuple[int, ...], list[Any], tuple[int, ...]]] = [
        ((7, 3), [torch.randperm(7)[:4]], (4, 3)),
        ((7, 3), [torch.randperm(7)[:6].reshape(2, 3) - 7], (2, 3, 3)),
        ((4, 7, 3), [None, torch.randperm(7)[:4]], (4, 4, 3)),
        ((5, 7, 3), [torch.tensor([[0], [4]]), torch.randperm(7)[:3]], (2, 3, 3)),
        ((5, 4, 3), [torch.tensor([1, 3]), None, torch.tensor([0, 2])], (2, 4)),
        ((2, 5, 4), [None, torch.tensor([1, 4, 0]), torch.tensor([0, 2, -1])], (2, 3)),
    ]
    if accumulate is None:
        return [s(normal(*shape), index) for shape, index, _ in cases] + [
            s(normal(7, 3), [torch.tensor([3, 3, 0])])
        ]
    puts = [s(normal(*shape), index, normal(*values), accumulate) for shape, index, values in cases]
    puts.append(s(normal(7, 3), [torch.tensor([1, 6, 3])], normal(1), accumulate))
    puts.append(s(normal(5, 3), [bools(5, 3)], normal(), accumulate))
    puts.append(s(normal(4, 5, 3), [None, bools(5)], normal(1), accumulate))
    puts.append(
        s(normal(5, 3), [torch.tensor([True, False, True, False, False])], normal(2, 3), accumulate)
    )
    puts.append(s(normal(7, 3), [torch.tensor([1, 6, 3])], normal(3, 1), accumulate))
    puts.append(s(normal(7, 3), [torch.tensor([1, 6, 3])], normal(), accumulate))
    return [
        *puts,
        *([s(normal(7, 3), [torch.tensor([3, 3, 0])], normal(3, 3), True)] if accumulate else []),
    ]


VIEWS = [
    ((4, 6), [24]),
    ((24,), [2, 3, 4]),
    ((6, 4), [2, 3, 4]),
    ((4, 6), [6, 4]),
    ((2, 3, 4), [6, 4]),
    ((5, 1, 3), [15]),
    ((3, 4), [3, 1, 4]),
    ((0, 3), [3, 0]),
    ((1,), []),
    ((6, 8), [4, 12]),
]
COPIES = {"view_copy", "_unsafe_view", "reshape", "view", "_reshape_copy"}


NORMS = (0.0, 1.0, 1.5, 2.0, 3.0, math.inf)


def _segments(backward: bool) -> list[Sample]:
    """Segments of rows, one of them empty, and of the second dim, by lengths and by offsets."""
    reduce_segments: Any = torch.ops.aten.segment_reduce.default
    of_rows = [{"lengths": torch.tensor([2, 0, 3])}, {"offsets": torch.tensor([0, 2, 2, 5])}]
    of_columns = [
        {"lengths": torch.tensor([[2, 3], [4, 1]])},
        {"offsets": torch.tensor([[0, 2, 5], [0, 4, 5]])},
    ]
    cases = [
        (normal(5, 4), how, {**bounds, "axis": 0, "initial": initial})
        for how in ("sum", "mean", "max", "min", "prod")
        for bounds in of_rows
        for initial in (None, 1.0)
    ]
    cases += [
        (normal(2, 5, 3), how, {**bounds, "axis": 1})
        for how in ("sum", "max")
        for bounds in of_columns
    ]
    if not backward:
        return [s(a, how, **options) for a, how, options in cases]
    made = [(reduce_segments(a, how, **options), a, how, options) for a, how, options in cases]
    return [s(torch.randn_like(y), y, a, how, **options) for y, a, how, options in made]


def _alike(
    *names: str, samples: Callable[[], list[Sample]]
) -> dict[str, Callable[[], list[Sample]]]:
    return dict.fromkeys(names, samples)


def _mapped_slices() -> list[Sample]:
    """Of a function of a slice of each of two stacks and of what all slices share."""
    row, other, shared = normal(3, 2), normal(2), normal(2, 4)
    gm = make_fx(lambda a, b, c: ((a * b) @ c, a.sum(0)), tracing_mode="fake")(row, other, shared)
    key = interned(gm, [row, other, shared]).key
    return [s([normal(n, 3, 2), normal(n, 2)], [shared], key) for n in (5, 1)]


SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    # products
    "mm.default": lambda: [s(normal(4, 5), normal(5, 3)), s(normal(2, 1), normal(1, 3))],
    "bmm.default": lambda: [s(normal(3, 4, 5), normal(3, 5, 2))],
    "mv.default": lambda: [s(normal(4, 5), normal(5))],
    **_alike("dot.default", "vdot.default", samples=lambda: [s(normal(5), normal(5))]),
    "addmm.default": lambda: [
        s(normal(3), normal(4, 5), normal(5, 3)),
        s(normal(4, 3), normal(4, 5), normal(5, 3), beta=2, alpha=3),
        s(normal(4, 1), normal(4, 5), normal(5, 3)),
    ],
    "addmv.default": lambda: [s(normal(4), normal(4, 5), normal(5))],
    "baddbmm.default": lambda: [
        s(normal(4, 3), normal(2, 4, 5), normal(2, 5, 3), beta=2),
        s(normal(2, 1, 3), normal(2, 4, 5), normal(2, 5, 3)),
    ],
    "_int_mm.default": lambda: [s(int8(4, 6), int8(6, 5)), s(int8(1, 3), int8(3, 1))],
    "_scaled_mm.default": lambda: [
        s(float8(4, 6), float8(6, 5), a, b, *rest)
        for a, b, *rest in (
            (halves(), halves(), None, None, torch.float32),
            (halves(4, 1), halves(1, 5), None, None, torch.float32),
            (halves(4, 1), halves(1, 5), halves(5).bfloat16(), None, torch.bfloat16),
            (halves(1), halves(1, 1), None, halves()),
        )
    ],
    "_scaled_mm_v2.default": lambda: [
        s(float8(4, 6), float8(6, 5), [a], [way], [], [b], [way], [], None, torch.float32)
        for way, a, b in ((0, halves(), halves()), (1, halves(4, 1), halves(1, 5)))
    ],
    "grouped_mm.default": lambda: [
        s(normal(6, 5), normal(3, 5, 4), torch.tensor([2, 2, 5], dtype=torch.int32)),
        s(normal(2, 4, 3), normal(3, 7), torch.tensor([4, 7], dtype=torch.int32)),
        s(normal(4, 6), normal(6, 5), torch.tensor([1, 6, 6])),
        s(normal(6, 4), normal(2, 4, 3), torch.tensor([5, 3])),
    ],
    # pointwise
    "acosh.default": lambda: [s(x(4, 3, low=1.1, high=3))],
    "bitwise_not.default": lambda: [s(ints(4, 3))],
    "where.self": lambda: [
        s(bools(4, 3), x(4, 3), x(4, 3)),
        s(bools(3), x(4, 1), x()),
        s(bools(), x(3), x(3)),
    ],
    "where.ScalarOther": lambda: [s(bools(4, 3), x(4, 3), 0), s(bools(4, 3), x(3), 2.0)],
    "where.ScalarSelf": lambda: [s(bools(4, 3), 0, x(4, 3)), s(bools(4, 3), 2.0, x(3))],
    "masked_fill.Scalar": lambda: [s(x(4, 3), bools(4, 3), 0), s(x(4, 3), bools(3), 2.0)],
    "masked_fill.Tensor": lambda: [s(x(4, 3), bools(4, 3), x())],
    "_to_copy.default": lambda: [
        ({0: (x(4, 3),)}[0], {"dtype": torch.float64}),
        s(ints(4, 3), dtype=torch.float64),
        s(x(3, low=0, high=9), dtype=torch.int64),
    ],
    "convert_element_type.default": lambda: [s(x(4, 3), torch.float64), s(ints(4), torch.float64)],
    "log_sigmoid_forward.default": lambda: [s(normal(4, 3))],
    "clamp.Tensor": lambda: [s(x(4, 3), x(4, 3), x(3)), s(x(4, 3), None, x(3))],
    "clamp.default": lambda: [s(x(4, 3), 0.2, 0.7), s(x(4, 3), None, 0.7)],
    "frexp.Tensor": lambda: [s(x(4, 3))],
    "fake_quantize_per_tensor_affine_cachemask.default": lambda: [s(x(4, 3), 0.1, 2, -4, 3)],
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": lambda: [
        s(x(4, 3), x(1), torch.tensor([2], dtype=torch.int32), torch.tensor([on]), -4, 3)
        for on in (0, 1)
    ],
    "fake_quantize_per_channel_affine_cachemask.default": lambda: [
        s(x(4, 3), x(n).float(), torch.arange(n, dtype=torch.int32), axis, -4, 5)
        for axis, n in ((0, 4), (1, 3))
    ],
    "copy.default": lambda: [s(x(4, 3), x(4, 3)), s(x(4, 3), x(3))],
    "fill.Tensor": lambda: [s(x(4, 3), x())],
    "complex.default": lambda: [s(x(4, 3), x(4, 3))],
    **_alike(
        "real.default",
        "imag.default",
        "_conj.default",
        "view_as_real.default",
        "view_as_real_copy.default",
        "_neg_view.default",
        samples=lambda: [s(normal(4, 3, dtype=torch.complex128))],
    ),
    **_alike(
        "view_as_complex.default",
        "view_as_complex_copy.default",
        samples=lambda: [s(normal(4, 3, 2))],
    ),
    "polygamma.default": lambda: [s(1, x(4, 3))],
    "mvlgamma.default": lambda: [s(x(4, 3, low=2, high=3), 2)],
    "round.decimals": lambda: [s(x(4, 3), decimals=1)],
    "native_dropout_backward.default": lambda: [s(x(4, 3), bools(4, 3), 2.0)],
    "div.Tensor_mode": lambda: [
        s(x(4, 3), x(3), rounding_mode=m) for m in ("floor", "trunc", None)
    ],
    "div.Scalar_mode": lambda: [s(x(4, 3), 0.3, rounding_mode="floor")],
    "lerp.Tensor": lambda: [s(x(4, 3), x(4, 3), x(3)), s(x(4, 1), x(3), x())],
    "add.Tensor": lambda: [
        *generic(aten.add.Tensor),
        s(x(4, 3), x(4, 3), alpha=3),
        s(ints(4, 3), ints(3)),
        s(bools(4), bools(4)),
    ],
    "mul.Tensor": lambda: [
        *generic(aten.mul.Tensor),
        s(ints(4, 3), ints(3)),
        s(normal(3, dtype=torch.complex128), normal(3)),
    ],
    # reductions
    **_alike(
        "sum.default",
        "count_nonzero.default",
        "nansum.default",
        "mean.default",
        "prod.default",
        "std.default",
        "var.default",
        "var_mean.default",
        "all.default",
        "any.default",
        "max.default",
        "min.default",
        "median.default",
        "nanmedian.default",
        "norm.Scalar",
        samples=lambda: [s(normal(4, 3)), s(normal(5)), s(normal())],
    ),
    **_alike(
        "sum.dim_IntList",
        "mean.dim",
        "amax.default",
        "amin.default",
        "logsumexp.default",
        samples=lambda: [
            s(normal(4, 3, 2), [0, 2]),
            s(normal(4, 3), [-1], True),
            s(normal(5), [0]),
        ],
    ),
    **_alike("count_nonzero.dim_IntList", samples=lambda: [s(ints(4, 3, 2, high=2), [0, 2])]),
    **_alike(
        "all.dims",
        "any.dims",
        samples=lambda: [s(bools(4, 3, 2), [0, 2]), s(bools(4, 3), None, True)],
    ),
    **_alike("all.dim", "any.dim", samples=lambda: [s(bools(4, 3, 2), 1), s(bools(4, 3), 0, True)]),
    **_alike(
        "prod.dim_int",
        "max.dim",
        "min.dim",
        "argmax.default",
        "argmin.default",
        "median.dim",
        "nanmedian.dim",
        "mode.default",
        samples=lambda: [s(normal(4, 3, 2), 1), s(normal(4, 3), 0, True), s(normal(5), 0)],
    ),
    "kthvalue.default": lambda: [s(normal(4, 3, 2), 2, 1)],
    "aminmax.default": lambda: [s(normal(4, 3), dim=1), s(normal(4, 3))],
    **_alike(
        "var.correction",
        "std.correction",
        "var_mean.correction",
        "std_mean.correction",
        samples=lambda: [
            s(normal(4, 3, 2), [1], correction=1, keepdim=True),
            s(normal(4, 3), None, correction=0),
        ],
    ),
    **_alike(
        "var.dim",
        "std.dim",
        "var_mean.dim",
        samples=lambda: [s(normal(4, 3, 2), [1], True, True), s(normal(4, 3), [0], False)],
    ),
    "linalg_vector_norm.default": lambda: [
        s(normal(4, 3), p, d, k)
        for p, d, k in (
            (2, None, False),
            (1, [1], True),
            (float("inf"), [0], False),
            (3, [0, 1], False),
        )
    ],
    "norm.ScalarOpt_dim": lambda: [s(normal(4, 3), 2, [1], True)],
    # views
    **_alike(
        "view.default",
        "_unsafe_view.default",
        "reshape.default",
        "_reshape_copy.default",
        "view_copy.default",
        samples=lambda: [s(normal(*a), b) for a, b in VIEWS],
    ),
    "_reshape_alias.default": lambda: [s(normal(4, 6), [24], [1])],
    **_alike(
        "t.default", "t_copy.default", samples=lambda: [s(normal(4, 3)), s(normal(3)), s(normal())]
    ),
    **_alike("adjoint.default", "mT.default", samples=lambda: [s(normal(2, 4, 3))]),
    **_alike(
        "transpose.int",
        "transpose_copy.int",
        samples=lambda: [s(normal(2, 4, 3), 0, -1), s(normal(), 0, 0)],
    ),
    **_alike(
        "permute.default", "permute_copy.default", samples=lambda: [s(normal(2, 4, 3), [2, 0, -2])]
    ),
    **_alike(
        "expand.default",
        "expand_copy.default",
        samples=lambda: [s(normal(4, 1), [2, -1, 3]), s(normal(), [3]), s(normal(4, 3), [4, 3])],
    ),
    **_alike(
        "unsqueeze.default",
        "unsqueeze_copy.default",
        samples=lambda: [s(normal(4, 3), 1), s(normal(4, 3), -1), s(normal(), 0)],
    ),
    **_alike(
        "squeeze.default", "squeeze_copy.default", samples=lambda: [s(normal(4, 1, 2)), s(normal())]
    ),
    **_alike(
        "squeeze.dim",
        "squeeze_copy.dim",
        samples=lambda: [s(normal(4, 1, 2), 1), s(normal(2, 1), 0)],
    ),
    **_alike("squeeze.dims", "squeeze_copy.dims", samples=lambda: [s(normal(4, 1, 2), [0, 1])]),
    **_alike(
        "slice.Tensor",
        "slice_copy.Tensor",
        samples=lambda: (
            [
                s(normal(6, 4), 0, a, b, step)
                for a, b, step in (
                    (0, 9223372036854775807, 1),
                    (0, 3, 1),
                    (2, 4, 1),
                    (-3, 9, 1),
                    (1, 4, 1),
                    (0, 6, 2),
                    (4, 2, 1),
                )
            ]
            + [s(normal(4, 6), 1, 3, 6), s(normal(2, 12), 1, 4, 12)]
        ),
    ),
    "slice_backward.default": lambda: [
        s(normal(n, 4), [6, 4], 0, a, b, step)
        for n, a, b, step in (
            (6, 0, 9223372036854775807, 1),
            (3, 0, 3, 1),
            (2, 2, 4, 1),
            (3, 1, 4, 1),
            (3, 0, 6, 2),
            (4, 2, 6, 1),
        )
    ],
    **_alike(
        "split.Tensor",
        "split_copy.Tensor",
        "unsafe_split.Tensor",
        samples=lambda: [
            s(normal(6, 4), 3),
            s(normal(6, 4), 4),
            s(normal(2, 6), 2, 1),
            s(normal(4, 3), 4),
            s(normal(10, 2), 4),
        ],
    ),
    **_alike(
        "split_with_sizes.default",
        "split_with_sizes_copy.default",
        "unsafe_split_with_sizes.default",
        samples=lambda: [
            s(normal(6, 4), [3, 3]),
            s(normal(6, 4), [1, 5]),
            s(normal(2, 6), [2, 2, 2], 1),
            s(normal(2, 12), [4, 8], 1),
        ],
    ),
    "cat.default": lambda: [
        s([normal(4, 3), normal(4, 3)]),
        s([normal(4, 3), normal(4, 2)], 1),
        s([normal(4, 3), normal(4, 3)], -1),
        s([normal(0), normal(4, 3)], 1),
        s([normal(4, 3)], 0),
        s([normal(2, 3), normal(4, 3), normal(2, 3)]),
    ],
    "stack.default": lambda: [s([normal(4, 3), normal(4, 3)]), s([normal(4, 3), normal(4, 3)], -1)],
    **_alike(
        "unbind.int", "unbind_copy.int", samples=lambda: [s(normal(4, 3)), s(normal(4, 3), 1)]
    ),
    **_alike(
        "select.int",
        "select_copy.int",
        samples=lambda: [s(normal(4, 3), 0, 2), s(normal(4, 6), 1, -1), s(normal(5), 0, 0)],
    ),
    "select_backward.default": lambda: [
        s(normal(3), [4, 3], 0, 2),
        s(normal(4), [4, 6], 1, -1),
        s(normal(), [5], 0, 0),
    ],
    "flip.default": lambda: [s(normal(4, 3), [0]), s(normal(4, 3, 2), [0, -1])],
    "roll.default": lambda: [s(normal(4, 3), [1], [0]), s(normal(4, 3), [1])],
    "constant_pad_nd.default": lambda: [
        s(normal(4, 3, 2), [1, 0]),
        s(normal(4, 3, 2), [0, 0, 1, 2], 3.0),
        s(normal(4, 5), [-1, -1]),
    ],
    "repeat.default": lambda: [s(normal(4, 3), [2, 1]), s(normal(3), [2, 3]), s(normal(), [3])],
    **_alike(
        "diagonal.default",
        "diagonal_copy.default",
        samples=lambda: [s(normal(4, 3)), s(normal(4, 3, 5), 1, 0, 2)],
    ),
    "diagonal_backward.default": lambda: [
        s(normal(3), [4, 3], 0, 0, 1),
        s(normal(3, 4), [4, 3, 5], 1, 0, 2),
    ],
    **_alike(
        "unfold.default",
        "unfold_copy.default",
        samples=lambda: [s(normal(4, 7), 1, 3, 2), s(normal(7, 4), 0, 2, 1), s(normal(), 0, 1, 1)],
    ),
    "block_diag.default": lambda: [s([normal(2, 3), normal(4, 2)]), s([normal(3), normal(2, 2)])],
    "renorm.default": lambda: [s(normal(4, 6), 2, 0, 0.3), s(normal(3, 4, 2), 1, 1, 0.5)],
    "pixel_shuffle.default": lambda: [s(normal(2, 8, 3, 2), 2), s(normal(12, 2, 2), 2)],
    "pixel_unshuffle.default": lambda: [s(normal(2, 2, 6, 4), 2), s(normal(3, 4, 4), 2)],
    "channel_shuffle.default": lambda: [s(normal(2, 6, 3), 2), s(normal(2, 8, 3, 2), 4)],
    "narrow_copy.default": lambda: [s(normal(4, 6), 1, 2, 3)],
    "diag_embed.default": lambda: [
        s(normal(3)),
        s(normal(2, 3), 1),
        s(normal(2, 3), -2, 0, 2),
        s(normal(2, 3), 1, 2, 0),
    ],
    "trace.default": lambda: [s(normal(3, 4))],
    "rot90.default": lambda: [s(normal(3, 4, 2), k, [0, 2]) for k in range(-1, 4)],
    "addbmm.default": lambda: [
        s(normal(3, 2), normal(4, 3, 5), normal(4, 5, 2)),
        s(normal(2), normal(4, 3, 5), normal(4, 5, 2), beta=2, alpha=3),
    ],
    "addr.default": lambda: [
        s(normal(3, 2), normal(3), normal(2)),
        s(normal(2), normal(3), normal(2), beta=2, alpha=3),
    ],
    "_unsafe_masked_index.default": lambda: [
        s(normal(4, 6), bools(5, 1), [ints(5, 1, low=-2), ints(3, low=-1)], 2.0)
    ],
    "_unsafe_masked_index_put_accumulate.default": lambda: [
        s(normal(4, 6), bools(5, 3), [ints(5, 1, low=-2), ints(3, low=-1)], normal(5, 3))
    ],
    **_alike(
        "max_unpool2d.default",
        samples=lambda: [
            s(normal(2, 3, 2, 2), torch.tensor([[0, 3], [9, 14]]).expand(2, 3, 2, 2), [4, 4])
        ],
    ),
    "max_unpool3d.default": lambda: [
        s(
            normal(2, 3, 1, 2, 2),
            torch.tensor([[[0, 3], [9, 14]]]).expand(2, 3, 1, 2, 2),
            [1, 4, 4],
            [1, 2, 2],
            [0, 0, 0],
        )
    ],
    "affine_grid_generator.default": lambda: [
        s(normal(4, 2, 3), [4, 3, 5, 2], False),
        s(normal(2, 3, 4), [2, 1, 3, 2, 4], True),
    ],
    "grid_sampler_2d.default": lambda: [s(normal(2, 3, 4, 5), normal(2, 6, 4, 2), 0, 0, False)],
    "grid_sampler_3d.default": lambda: [
        s(normal(2, 3, 4, 5, 2), normal(2, 6, 4, 2, 3), 0, 1, True)
    ],
    "grid_sampler_2d_backward.default": lambda: [
        s(normal(2, 3, 6, 4), normal(2, 3, 4, 5), normal(2, 6, 4, 2), 0, 0, False, [True, True]),
        s(normal(2, 3, 6, 4), normal(2, 3, 4, 5), normal(2, 6, 4, 2), 0, 0, False, [False, True]),
    ],
    "grid_sampler_3d_backward.default": lambda: [
        s(
            normal(2, 3, 6, 4, 2),
            normal(2, 3, 4, 5, 2),
            normal(2, 6, 4, 2, 3),
            0,
            0,
            False,
            [True, True],
        )
    ],
    "unfold_backward.default": lambda: [
        s(normal(4, 3, 3), [4, 7], 1, 3, 2),
        s(normal(1), [], 0, 1, 1),
    ],
    "view.dtype": lambda: [s(normal(4, 3), torch.int64), s(normal(4, 3), torch.int32)],
    **_alike(
        "tril.default",
        "triu.default",
        samples=lambda: [s(normal(4, 5)), s(normal(2, 6, 4), -1), s(normal(4, 4), 1)],
    ),
    "slice_scatter.default": lambda: [s(normal(6, 4), normal(2, 4), 0, 1, 3)],
    "select_scatter.default": lambda: [s(normal(6, 4), normal(4), 0, 2)],
    "diagonal_scatter.default": lambda: [s(normal(5, 4), normal(4))],
    "glu.default": lambda: [s(normal(4, 6)), s(normal(6, 4, 2), 0)],
    "glu_backward.default": lambda: [
        s(normal(4, 3), normal(4, 6), -1),
        s(normal(3, 4), normal(6, 4), 0),
    ],
    "_prelu_kernel.default": lambda: [s(normal(4, 5, 3), normal(1, 5, 1))],
    "_prelu_kernel_backward.default": lambda: [
        s(normal(4, 5, 3), normal(4, 5, 3), normal(1, 5, 1))
    ],
    "isin.Tensor_Tensor": lambda: [s(ints(4, 5), ints(3))],
    **_alike(
        "mse_loss.default",
        "huber_loss.default",
        "smooth_l1_loss.default",
        "soft_margin_loss.default",
        samples=lambda: [s(normal(4, 5), normal(4, 5), r) for r in (0, 1, 2)],
    ),
    "binary_cross_entropy_with_logits.default": lambda: [
        s(normal(4, 5), x(4, 5), w, p, r)
        for r in (0, 1, 2)
        for w, p in ((None, x(5)), (x(4, 1), None))
    ],
    "binary_cross_entropy.default": lambda: [
        s(x(4, 5), x(4, 5), w, r) for r in (0, 1, 2) for w in (None, x(5))
    ],
    "multi_margin_loss.default": lambda: (
        [
            s(normal(4, 3), ints(4, high=3), p, 1.0, w, r)
            for p, w, r in ((1, None, 0), (2, x(3), 1), (1, x(3), 2))
        ]
        + [s(normal(3), ints(high=3), 1, 1.0, None, 1)]
    ),
    "multi_margin_loss_backward.default": lambda: (
        [
            s(x(*g), normal(4, 3), ints(4, high=3), p, 1.0, w, r)
            for g, p, w, r in (((4,), 1, None, 0), ((), 2, x(3), 1), ((), 1, x(3), 2))
        ]
        + [s(x(), normal(3), ints(high=3), 1, 1.0, None, 1)]
    ),
    "multilabel_margin_loss_forward.default": lambda: [
        *(s(normal(4, 3), ints(4, 3, low=-1, high=3), r) for r in (0, 1, 2)),
        s(normal(3), ints(3, low=-1, high=3), 1),
    ],
    "multilabel_margin_loss_backward.default": lambda: [
        s(x(*g), a, t, r, torch.ops.aten.multilabel_margin_loss_forward(a, t, r)[1])
        for g, a, t, r in (
            ((4,), normal(4, 3), ints(4, 3, low=-1, high=3), 0),
            ((), normal(4, 3), ints(4, 3, low=-1, high=3), 1),
            ((), normal(4, 3), ints(4, 3, low=-1, high=3), 2),
            ((), normal(3), ints(3, low=-1, high=3), 1),
        )
    ],
    "rrelu_with_noise_functional.default": lambda: [s(normal(4, 5), x(4, 5))],
    "rrelu_with_noise_backward.default": lambda: [
        s(normal(4, 5), normal(4, 5), x(4, 5), 0.1, 0.3, training, False)
        for training in (True, False)
    ],
    "_trilinear.default": lambda: [
        s(normal(4, 3), normal(2, 3, 5), normal(4, 5), [1, 3], [0], [1, 2], [2, 3]),
        s(normal(4, 2), normal(2, 3, 5), normal(4, 5), [2, 3], [0], [1, 2], [1, 3]),
        s(normal(4, 3), normal(4, 2), normal(4, 5), [1, 3], [2, 3], [1, 2], [0], 0),
    ],
    **_alike(
        "mse_loss_backward.default",
        "soft_margin_loss_backward.default",
        samples=lambda: [
            s(x(*g), normal(4, 5), normal(4, 5), r) for r, g in ((0, (4, 5)), (1, ()), (2, ()))
        ],
    ),
    **_alike(
        "huber_loss_backward.default",
        "smooth_l1_loss_backward.default",
        samples=lambda: [
            s(x(*g), normal(4, 5), normal(4, 5), r, 1.0) for r, g in ((0, (4, 5)), (1, ()), (2, ()))
        ],
    ),
    "binary_cross_entropy_backward.default": lambda: [
        s(x(*g), x(4, 5), x(4, 5), w, r)
        for r, g in ((0, (4, 5)), (1, ()), (2, ()))
        for w in (None, x(4, 5))
    ],
    # scans
    **_alike(
        "cumsum.default",
        "cumprod.default",
        "logcumsumexp.default",
        "cummax.default",
        "cummin.default",
        "ftp.reverse_cumsum.default",
        "ftp.reverse_logcumsumexp.default",
        samples=lambda: [s(normal(4, 5), 0), s(normal(4, 5, 2), -1), s(normal(5), 0)],
    ),
    **_alike(
        "sort.default",
        "argsort.default",
        samples=lambda: [s(normal(4, 5), 0), s(normal(4, 5), -1, True)],
    ),
    **_alike(
        "sort.stable", "argsort.stable", samples=lambda: [s(normal(4, 5), stable=True, dim=0)]
    ),
    "topk.default": lambda: [s(normal(4, 5), 2), s(normal(4, 5), 3, 0, False)],
    # index
    "embedding.default": lambda: [
        s(normal(7, 3), ints(2, 3, high=7)),
        s(normal(6, 3), ints(4, high=6), 1),
        s(normal(2, 3), ints(high=2)),
    ],
    "embedding_dense_backward.default": lambda: (
        [
            s(normal(2, 3, 4), ints(2, 3, high=7), 7, pad, freq)
            for pad, freq in ((-1, False), (2, False), (2, True), (-1, True))
        ]
        + [s(normal(6, 2), torch.arange(6), 6, 0, False)]
    ),
    "gather.default": lambda: [
        s(normal(4, 6, 3), 1, ints(4, 5, 3, high=6)),
        s(normal(4, 6, 3), -1, ints(4, 2, 3, high=3)),
        s(normal(6), 0, ints(4, high=6)),
        s(normal(), 0, ints(high=1)),
    ],
    "scatter_add.default": lambda: [
        s(normal(4, 6, 3), 1, ints(4, 5, 3, high=6), normal(4, 5, 3)),
        s(normal(4, 6), 0, ints(3, 6, high=4), normal(3, 6)),
        s(normal(4, 6), 1, ints(4, 3, high=6), normal(4, 5)),
    ],
    "scatter.src": lambda: [
        s(
            normal(4, 6, 3),
            1,
            torch.stack([torch.randperm(6)[:5]] * 4)[:, :, None].repeat(1, 1, 3),
            normal(4, 5, 3),
        ),
        s(normal(6), 0, torch.randperm(6)[:4], normal(4)),
    ],
    "scatter.value": lambda: [s(normal(4, 6, 3), 1, ints(4, 5, 3, high=6), v) for v in (0, 2.5)],
    "scatter.reduce": lambda: [s(normal(4, 6), 1, ints(4, 3, high=6), normal(4, 3), reduce="add")],
    "scatter.value_reduce": lambda: [s(normal(4, 6), 1, ints(4, 3, high=6), 2.0, reduce="add")],
    "scatter_reduce.two": lambda: [s(normal(4, 6), 1, ints(4, 3, high=6), normal(4, 3), "amax")],
    "index_select.default": lambda: [
        s(normal(4, 6, 3), 1, ints(5, high=6)),
        s(normal(5), 0, ints(3, high=5)),
        s(normal(4, 6), 0, ints(high=4)),
    ],
    "index_add.default": lambda: [
        s(normal(4, 6, 3), 1, ints(5, high=6), normal(4, 5, 3)),
        s(normal(5), 0, ints(3, high=5), normal(3), alpha=2),
    ],
    "index_copy.default": lambda: [s(normal(4, 6), 1, torch.randperm(6)[:3], normal(4, 3))],
    "index_fill.int_Scalar": lambda: [s(normal(4, 6), 1, ints(3, high=6), 2.0)],
    "index_reduce.default": lambda: [s(normal(4, 6), 1, ints(3, high=6), normal(4, 3), "prod")],
    **_alike("index.Tensor", "_unsafe_index.Tensor", samples=_indexed),
    **_alike(
        "index_put.default",
        "_unsafe_index_put.default",
        samples=lambda: [*_indexed(True), *_indexed(False)],
    ),
    "ftp.choose.default": lambda: [
        s(torch.tensor(side), normal(4, 3), normal(4, 3), 0) for side in (True, False)
    ],
    "ftp.map_slices.default": _mapped_slices,
    "ftp.windows.default": lambda: [
        s(normal(7, 3), 0, 2, -1, 4, 6),
        s(normal(2, 6), 1, 3, 0, 2, 2),
    ],
    "ftp.join_windows.default": lambda: [
        s(normal(2, 4, 3), 0, 7),
        s(normal(3, 2, 2), 1, 6),
    ],
    "ftp.repeat_each.default": lambda: [s(normal(3, 2), 4, 0), s(normal(2, 3, 2), 2, 1)],
    "ftp.sum_each.default": lambda: [s(normal(12, 2), 4, 0), s(normal(2, 6, 2), 2, 1)],
    "ftp.stack.default": lambda: [s([normal(4, 3) for _ in range(3)])],
    "unstack.default": lambda: [s(normal(3, 5, 4)), s(normal(2))],
    "nonzero_static.default": lambda: [
        s(ints(4, 3, high=2), size=5),
        s(ints(4, high=2), size=2, fill_value=7),
    ],
    "take.default": lambda: [s(normal(4, 3), ints(5, high=12))],
    "put.default": lambda: [s(normal(4, 3), ints(5, high=12), normal(5), True)],
    "masked_scatter.default": lambda: [s(normal(4, 3), bools(4, 3), normal(12))],
    "masked_scatter_backward.default": lambda: [s(normal(4, 3), bools(4, 3), [12])],
    "bincount.default": lambda: [s(ints(6, high=5))],
    "histc.default": lambda: [s(x(4, 3), 4, 0, 1), s(normal(9), 3)],
    "searchsorted.Tensor": lambda: [
        s(normal(6).sort().values, normal(4, 3)),
        s(normal(4, 6).sort(-1).values, normal(4, 3)),
    ],
    "bucketize.Tensor": lambda: [s(normal(4, 3), normal(6).sort().values)],
    # norms
    **_alike("_softmax.default", "_log_softmax.default", samples=_softmax_like),
    "_safe_softmax.default": lambda: [
        s(normal(4, 5, 2), 1),
        s(torch.full((3, 4), float("-inf"), dtype=torch.float64), -1),
    ],
    **_alike(
        "_softmax_backward_data.default",
        "_log_softmax_backward_data.default",
        samples=_softmax_backward,
    ),
    "native_layer_norm.default": lambda: [
        s(normal(4, 3, 5), [5], normal(5), normal(5), 1e-5),
        s(normal(4, 3, 5), [3, 5], normal(3, 5), None, 1e-5),
        s(normal(4, 5), [5], None, None, 1e-5),
    ],
    "native_layer_norm_backward.default": _layer_norm_backward,
    "_fused_rms_norm.default": lambda: [
        s(normal(4, 3, 5), [5], normal(5), 1e-5),
        s(normal(4, 3, 5), [3, 5], None, None),
    ],
    "_fused_rms_norm_backward.default": _rms_norm_backward,
    "native_group_norm.default": lambda: [
        s(normal(3, 6, 2, 2), normal(6), normal(6), 3, 6, 4, 3, 1e-5),
        s(normal(2, 4, 5), None, None, 2, 4, 5, 2, 1e-5),
    ],
    "native_group_norm_backward.default": _group_norm_backward,
    "_weight_norm_interface.default": lambda: _weight_norm(False),
    "_weight_norm_interface_backward.default": lambda: _weight_norm(True),
    "nll_loss_forward.default": lambda: _nll(False, False),
    "nll_loss_backward.default": lambda: _nll(True, False),
    "nll_loss2d_forward.default": lambda: _nll(False, True),
    "nll_loss2d_backward.default": lambda: _nll(True, True),
    **_alike(
        "native_batch_norm.default",
        "_native_batch_norm_legit_functional.default",
        samples=lambda: [
            s(normal(4, 3, 2, 2), normal(3), normal(3), normal(3), x(3), t, 0.1, 1e-5)
            for t in (True, False)
        ],
    ),
    "_embedding_bag.default": lambda: [
        s(x(7, 3), *_bags(), False, mode, False, None, False, 3) for mode in (1, 2)
    ],
    "_embedding_bag_forward_only.default": lambda: [
        s(x(7, 3), *_bags(), False, mode, False, None, False, 3) for mode in (1, 2)
    ],
    "_embedding_bag_backward.default": lambda: [
        s(
            x(4, 3),
            *_bags(),
            *aten._embedding_bag.default(x(7, 3), *_bags(), False, mode)[1:],
            7,
            False,
            mode,
            False,
            None,
            3,
        )
        for mode in (1, 2)
    ],
    "_embedding_bag_per_sample_weights_backward.default": lambda: [
        s(x(4, 3), x(7, 3), *_bags(), aten._embedding_bag.default(x(7, 3), *_bags())[1], 0, 3)
    ],
    "moments.default": lambda: [s(normal(4, 3, 2), [0, 2]), s(normal(3, 5), [1])],
    "_native_batch_norm_legit.no_stats": lambda: [
        s(normal(4, 3, 2), normal(3), None, True, 0.1, 1e-5)
    ],
    "_native_batch_norm_legit_no_training.default": lambda: [
        s(normal(4, 3, 2), normal(3), normal(3), normal(3), x(3), 0.1, 1e-5)
    ],
    "native_batch_norm_backward.default": lambda: [
        s(
            normal(4, 3, 2, 2),
            normal(4, 3, 2, 2),
            normal(3),
            normal(3),
            x(3),
            normal(3) if t else normal(0),
            x(3) if t else normal(0),
            t,
            1e-5,
            [True, True, True],
        )
        for t in (True, False)
    ],
    # matrices
    **_alike(
        "_linalg_det.default",
        "_linalg_slogdet.default",
        "linalg_inv_ex.default",
        "linalg_lu.default",
        "linalg_lu_factor_ex.default",
        "linalg_qr.default",
        "geqrf.default",
        "linalg_matrix_exp.default",
        "_linalg_svd.default",
        samples=lambda: [s(normal(4, 3, 3)), s(normal(3, 3))],
    ),
    "linalg_eig.default": lambda: [
        s(
            torch.eye(3, dtype=torch.float64) * torch.arange(1.0, 4.0, dtype=torch.float64)
            + 0.1 * normal(4, 3, 3)
        )
    ],
    **_alike(
        "_linalg_eigh.default",
        "cholesky.default",
        "linalg_cholesky_ex.default",
        "cholesky_inverse.default",
        "linalg_ldl_factor_ex.default",
        samples=lambda: [
            s((lambda a: a @ a.mT + torch.eye(3, dtype=torch.float64))(normal(4, 3, 3)))
        ],
    ),
    "linalg_householder_product.default": lambda: [s(normal(4, 3, 3), normal(4, 3))],
    "linalg_solve_triangular.default": lambda: [
        s(normal(4, 3, 3).triu() + torch.eye(3), normal(4, 3, 2), upper=True),
        s(normal(3, 3).triu() + torch.eye(3), normal(4, 3, 2), upper=True),
    ],
    "triangular_solve.default": lambda: [s(normal(4, 3, 2), normal(4, 3, 3).triu() + torch.eye(3))],
    "cholesky_solve.default": lambda: [s(normal(4, 3, 2), normal(4, 3, 3).tril() + torch.eye(3))],
    "_linalg_solve_ex.default": lambda: [
        s(normal(4, 3, 3), normal(4, 3, 2)),
        s(normal(4, 3, 3), normal(4, 3)),
    ],
    "lstsq.default": lambda: [
        s(normal(4, 5, 3), normal(4, 5, 2), None, "gelsy"),
        s(normal(4, 5, 3), normal(4, 5, 2), None, "gels"),
        s(normal(4, 3, 3), normal(4, 3), None, "gelsd"),
    ],
    "linalg_lu_solve.default": lambda: [
        s(*torch.linalg.lu_factor(normal(4, 3, 3)), normal(4, 3, 2))
    ],
    "linalg_ldl_solve.default": lambda: [
        s(
            *torch.linalg.ldl_factor(
                (lambda a: a @ a.mT + torch.eye(3, dtype=torch.float64))(normal(4, 3, 3))
            ),
            normal(4, 3, 2),
        )
    ],
    "lu_unpack.default": lambda: [
        s(*torch.linalg.lu_factor(normal(4, 3, 3))),
        s(*torch.linalg.lu_factor(normal(4, 3, 3)), True, False),
    ],
    "linalg_pinv.atol_rtol_tensor": lambda: [
        s(normal(4, 3, 2)),
        s(normal(4, 3, 3), rtol=torch.tensor(0.1, dtype=torch.float64)),
    ],
    "_fft_c2c.default": lambda: [s(normal(4, 5, dtype=torch.complex128), [1], 0, True)],
    "_fft_r2c.default": lambda: [
        s(normal(4, 5), [1], 0, True),
        s(normal(4, 5, 3), [0, 1], 0, True),
    ],
    "_fft_c2r.default": lambda: [s(normal(4, 3, dtype=torch.complex128), [1], 0, 5)],
    "linalg_cross.default": lambda: [s(normal(4, 3), normal(4, 3)), s(normal(1, 3), normal(4, 3))],
    "_pdist_forward.default": lambda: [s(normal(5, 3), p) for p in NORMS],
    "_pdist_backward.default": lambda: [
        s(normal(10), a := normal(5, 3), p, torch.pdist(a, p)) for p in NORMS
    ],
    "segment_reduce.default": lambda: _segments(backward=False),
    "_segment_reduce_backward.default": lambda: _segments(backward=True),
    "_cdist_forward.default": lambda: [
        s(normal(4, 3, 2), normal(4, 5, 2), 2.0, None),
        s(normal(3, 2), normal(28, 2), 2.0, None),
    ],
    "_euclidean_dist.default": lambda: [
        s(normal(4, 3, 2), normal(4, 5, 2)),
        s(normal(3, 2), normal(1, 5, 2)),
    ],
    "_cdist_backward.default": lambda: [
        s(normal(4, 3, 5), a := normal(4, 3, 2), b := normal(4, 5, 2), 2.0, torch.cdist(a, b))
    ],
    # attention
    "_scaled_dot_product_flash_attention_for_cpu.default": lambda: _attention(False),
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": lambda: _attention(True),
    "ftp.scaled_dot_product_attention_varlen.default": lambda: _varlen(False),
    "ftp.scaled_dot_product_attention_varlen_backward.default": lambda: _varlen(True),
    "ftp.scaled_dot_product_attention_flex.default": lambda: _flex(False),
    "ftp.scaled_dot_product_attention_flex_backward.default": lambda: _flex(True),
    # factories
    **_alike(
        "zeros.default",
        "ones.default",
        "empty.memory_format",
        samples=lambda: [s([4, 3], dtype=torch.float64), s([], dtype=torch.float64)],
    ),
    "full.default": lambda: [s([4, 3], 2.5, dtype=torch.float64)],
    "empty_strided.default": lambda: [s([4, 3], [1, 4], dtype=torch.float64)],
    "empty_permuted.default": lambda: [s([4, 3], [1, 0], dtype=torch.float64)],
    **_alike(
        "new_zeros.default",
        "new_ones.default",
        "new_empty.default",
        samples=lambda: [s(normal(4, 2), [4, 3]), s(normal(4, 2), [4, 2]), s(normal(2), [])],
    ),
    "new_full.default": lambda: [s(normal(4, 2), [4, 3], 2.5)],
    "new_empty_strided.default": lambda: [s(normal(4, 2), [4, 3], [1, 4])],
    "full_like.default": lambda: [s(normal(4, 2), 2.5)],
    "scalar_tensor.default": lambda: [s(2.5, dtype=torch.float64)],
    **{
        f"{kind}_window.{overload}": lambda rest=rest: [s(6, *rest, dtype=torch.float64)]
        for kind in ("bartlett", "blackman", "hamming", "hann", "kaiser")
        for overload, rest in (
            ("default", ()),
            ("periodic", (False,)),
            ("beta", (True, 9.0)),
            ("periodic_alpha", (True, 0.5)),
            ("periodic_alpha_beta", (True, 0.5, 0.4)),
        )
    },
    "arange.default": lambda: [s(7), s(6), s(5.5, dtype=torch.float64)],
    "arange.start": lambda: [s(2, 9), s(0.5, 6.0, dtype=torch.float64)],
    "arange.start_step": lambda: [s(2, 13, 2), s(9, 1, -2), s(0.5, 6.0, 0.5, dtype=torch.float64)],
    "ctc_loss.default": lambda: [
        s(*_ctc()[:4], 0, False),
        s(*_ctc()[:4], 1, True),
        s(*_ctc(one_row=True)[:4], 0, False),
    ],
    "ctc_loss_backward.default": lambda: [
        s(normal(3), *_ctc(), 0, False),
        s(normal(3), *_ctc(one_row=True), 0, True),
    ],
    "random_bits.default": lambda: [
        s(ints(2, high=1 << 40), [5, 4], [4, 1], 0),
        s(ints(3, 2, high=1 << 40), [7, 3], [12, 3], 2),
        s(ints(2, high=1 << 40), [6], [1], 1),
        s(ints(2, 3, 2, high=1 << 40), [], [], 5),
    ],
    "random_keys.default": lambda: [
        s(ints(2, high=1 << 40), ints(5, high=9)),
        s(ints(4, 2, high=1 << 40), ints(high=9)),
        s(ints(3, 1, 2, high=1 << 40), ints(3, 4, high=9)),
    ],
    "eye.default": lambda: [s(4, dtype=torch.float64)],
    "eye.m": lambda: [s(4, 6, dtype=torch.float64)],
    **_alike(
        "linspace.default", "logspace.default", samples=lambda: [s(0, 1, 5, dtype=torch.float64)]
    ),
    **_alike(
        "linspace.Tensor_Tensor",
        "logspace.Tensor_Tensor",
        samples=lambda: [s(x(), x(), 5, dtype=torch.float64)],
    ),
    **_alike(
        "linspace.Tensor_Scalar",
        "logspace.Tensor_Scalar",
        samples=lambda: [s(x(), 2, 5, dtype=torch.float64)],
    ),
    **_alike(
        "linspace.Scalar_Tensor",
        "logspace.Scalar_Tensor",
        samples=lambda: [s(0, x(), 5, dtype=torch.float64)],
    ),
    "repeat_interleave.Tensor": lambda: [s(torch.tensor([2, 0, 3, 1]), output_size=6)],
    **_alike("tril_indices.default", "triu_indices.default", samples=lambda: [s(4, 3)]),
    **_alike("fft_fftfreq.default", "fft_rfftfreq.default", samples=lambda: [s(5, 0.5)]),
    # convolutions
    "convolution.default": lambda: [s(i, w, b, *rest) for i, w, b, rest in _convolutions()],
    "convolution_backward.default": lambda: [
        s(
            normal(*aten.convolution(i, w, b, *rest).shape),
            i,
            w,
            None if b is None else list(b.shape),
            *rest,
            [True, True, b is not None],
        )
        for i, w, b, rest in _convolutions()
    ],
    **{f"max_pool{d}d_with_indices.default": (lambda d=d: _pooled(d)) for d in (2, 3)},
    **{f"avg_pool{d}d.default": (lambda d=d: _pooled(d)) for d in (2, 3)},
    **{
        f"max_pool{d}d_with_indices_backward.default": (lambda d=d: _pooled(d, "max"))
        for d in (2, 3)
    },
    **{f"avg_pool{d}d_backward.default": (lambda d=d: _pooled(d, "avg")) for d in (2, 3)},
    **{
        f"{name}{d}d.default": (lambda d=d: [s(normal(2, 3, *(5, 6, 4)[:d]), [2] * d)])
        for d in (2, 3)
        for name in ("_adaptive_avg_pool", "adaptive_max_pool")
    },
    **{
        f"_adaptive_avg_pool{d}d_backward.default": (
            lambda d=d: [s(normal(2, 3, *[2] * d), normal(2, 3, *(5, 6, 4)[:d]))]
        )
        for d in (2, 3)
    },
    **{
        f"adaptive_max_pool{d}d_backward.default": (
            lambda d=d: [
                s(
                    normal(2, 3, *[2] * d),
                    i := normal(2, 3, *(5, 6, 4)[:d]),
                    getattr(aten, f"adaptive_max_pool{d}d")(i, [2] * d)[1],
                )
            ]
        )
        for d in (2, 3)
    },
    **{
        f"{name}{d}d.default": (lambda d=d: _resized(d))
        for d in (1, 2, 3)
        for name in ("upsample_nearest", "_upsample_nearest_exact")
    },
    **{
        f"{name}{d}d.vec": (lambda d=d: _resized_vec(d))
        for d in (1, 2, 3)
        for name in ("upsample_nearest", "_upsample_nearest_exact")
    },
    **{
        f"{name}{d}d_backward.default": (lambda d=d: _resized_backward(d))
        for d in (1, 2, 3)
        for name in ("upsample_nearest", "_upsample_nearest_exact")
    },
    **{
        f"{name}.default": (lambda d=d: _resized(d, False))
        for name, d in (
            ("upsample_linear1d", 1),
            ("upsample_bilinear2d", 2),
            ("upsample_bicubic2d", 2),
            ("_upsample_bilinear2d_aa", 2),
            ("_upsample_bicubic2d_aa", 2),
            ("upsample_trilinear3d", 3),
        )
    },
    **{
        f"{name}.vec": (lambda d=d: _resized_vec(d, False))
        for name, d in (
            ("upsample_linear1d", 1),
            ("upsample_bilinear2d", 2),
            ("upsample_bicubic2d", 2),
            ("upsample_trilinear3d", 3),
        )
    },
    **{
        f"{name}_backward.default": (lambda d=d: _resized_backward(d, False))
        for name, d in (
            ("upsample_linear1d", 1),
            ("upsample_bilinear2d", 2),
            ("upsample_bicubic2d", 2),
            ("_upsample_bilinear2d_aa", 2),
            ("_upsample_bicubic2d_aa", 2),
            ("upsample_trilinear3d", 3),
        )
    },
    **{
        f"{name}_pad{d}d.default": (lambda d=d: _padded(d))
        for d in (1, 2, 3)
        for name in ("reflection", "replication")
    },
    **{
        f"{name}_pad{d}d_backward.default": (lambda d=d: _padded_backward(d))
        for d in (1, 2, 3)
        for name in ("reflection", "replication")
    },
    "im2col.default": lambda: [s(normal(2, 3, 4, 5), [2, 2], [1, 1], [0, 0], [1, 1])],
    "col2im.default": lambda: [s(normal(2, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1])],
}


def _update(op: OpOverload) -> list[Sample]:
    """An optimizer's fused update of one parameter, with all its columns and without the one
    that may be missing.
    """
    from ftp.ops.fused_optimizer import UPDATES

    update = UPDATES[op]
    numbers = {
        "lr": 0.1,
        "lr_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-6,
        "momentum": 0.9,
        "dampening": 0.1,
    }
    names = [a.name for a in op._schema.arguments if a.kwarg_only]
    found = []
    for every in (True, False) if update.optional is not None else (True,):
        row = [normal(5, 4).abs() for _ in range(update.columns - update.counts - (not every))]
        row += [torch.tensor(3.0)] if update.counts else []
        options: dict[str, Any] = {n: numbers.get(n, False) for n in names}
        if "amsgrad" in names:
            options["amsgrad"] = every
        if "momentum" in names and not every:
            options |= {"momentum": 0.0, "dampening": 0.0}
        if op._overloadname == "tensor_lr":
            options["lr"] = torch.tensor(0.1)
        found.append(s(row, **options))
    return found


def samples(op: OpOverload) -> list[Sample]:
    """Small arguments of an op, the same in every run."""
    torch.manual_seed(0)
    if str(op).startswith("ftp.fused_"):
        return _update(op)
    name = str(op).split(".", 1)[1] if str(op).count(".") == 2 else str(op)
    name = str(op) if str(op) in SAMPLES else name
    return SAMPLES[name]() if name in SAMPLES else generic(op)


def _ctc(one_row: bool = False) -> tuple[torch.Tensor, ...]:
    log_probs, targets = normal(7, 3, 5).log_softmax(-1), ints(3, 3, low=1, high=5)
    lengths = torch.tensor([7, 5, 6]), torch.tensor([3, 1, 2])
    if one_row:
        targets = targets.flatten()[:6]
    return (
        log_probs,
        targets,
        *lengths,
        *torch.ops.ftp.ctc_loss.default(log_probs, targets, *lengths, 0, False),
    )


def _bags() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0, 2, 3, 3, 5, 6]), torch.tensor([0, 2, 2, 4])
