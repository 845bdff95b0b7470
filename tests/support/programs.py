"""Random programs, as source text that runs plain and sharded: what ``test_programs.py`` draws."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from ftp import P, constrain, units
from ftp.testing.strategies import MESHES as MESHES
from ftp.testing.strategies import specs as specs_of_axes

Shape = tuple[int, ...]
LARGEST = 400  # elements of a value
AXES = ("a", "b")


def ramp(x: torch.Tensor) -> torch.Tensor:
    """A constant of ``x``'s shape with no two elements alike, against ties."""
    return (torch.arange(x.numel(), dtype=x.dtype, device=x.device).sqrt() * 0.3).reshape(x.shape)


def positions(*shape: int, below: int) -> torch.Tensor:
    """Indices below ``below``, all over the place."""
    return (torch.arange(math.prod(shape)) * 7 + 3).remainder(below).reshape(shape)


NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "constrain": constrain,
    "P": P,
    "units": units,
    "ramp": ramp,
    "positions": positions,
}


@dataclass(frozen=True)
class Input:
    name: str
    shape: Shape
    spec: P
    is_index: bool = False
    is_parameter: bool = False

    def value(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.is_index:
            return torch.randint(0, 6, self.shape, generator=generator)
        return torch.randn(self.shape, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class Drawn:
    """A program with what it is given: ``repr`` is all that is needed to run it again."""

    mesh: Shape
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    returned: tuple[str, ...]
    out_specs: tuple[P, ...] | None
    data_axes: tuple[str, ...] | None
    reshard_after_forward: bool

    @property
    def source(self) -> str:
        head = f"def program({', '.join(i.name for i in self.inputs)}):"
        return "\n    ".join(
            [head, *live(self.lines, self.returned), f"return {', '.join(self.returned)},"]
        )

    @property
    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        names = dict(NAMES)
        exec(self.source, names)
        return names["program"]

    @property
    def values(self) -> list[torch.Tensor]:
        return [given.value(seed) for seed, given in enumerate(self.inputs)]

    def __repr__(self) -> str:
        inputs = [
            f"  {i.name}: {'parameter' if i.is_parameter else 'index' if i.is_index else 'data'}"
            f" {i.shape} {i.spec}"
            for i in self.inputs
        ]
        options = (
            f"out_specs={self.out_specs}, data_axes={self.data_axes},"
            f" reshard_after_forward={self.reshard_after_forward}"
        )
        return "\n".join(
            ["", f"mesh {self.mesh} {AXES[: len(self.mesh)]}, {options}", *inputs, self.source, ""]
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def live(lines: Sequence[str], returned: Sequence[str]) -> list[str]:
    wanted, kept = set(returned), []
    for line in reversed(lines):
        name, expression = line.split(" = ", 1)
        if name in wanted:
            wanted |= set(re.findall(r"\b[vxi]\d+\b", expression))
            kept.append(line)
    return kept[::-1]


def specs(shape: Shape, mesh: Shape) -> st.SearchStrategy[P]:
    return specs_of_axes(shape, dict(zip(AXES, mesh, strict=False)))


class Env:
    """The values so far, on meta: what the next instruction may take."""

    def __init__(self, draw: st.DrawFn, mesh: Shape):
        self.draw, self.mesh = draw, mesh
        self.values: dict[str, torch.Tensor] = {}
        self.indices: list[str] = []
        self.floats: list[str] = []
        self.lines: list[str] = []

    def give(self, name: str, value: torch.Tensor) -> None:
        self.values[name] = value
        (self.floats if value.is_floating_point() else self.indices).append(name)

    def pick(
        self, fits: Callable[[torch.Tensor], bool] = lambda _: True, *, index: bool = False
    ) -> str | None:
        """A value that fits; late ones when nothing shrinks."""
        found = [n for n in (self.indices if index else self.floats) if fits(self.values[n])]
        return self.draw(st.sampled_from(found)) if found else None

    def shape(self, name: str) -> Shape:
        return tuple(self.values[name].shape)

    def dim(self, name: str) -> int:
        return self.draw(st.integers(0, self.values[name].ndim - 1))

    def choose(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def up_to(self, high: int, low: int = 0) -> int:
        return self.draw(st.integers(low, high))

    def run(self, expression: str) -> torch.Tensor | None:
        try:
            value = eval(expression, NAMES | self.values)
        except (RuntimeError, IndexError, ValueError):
            return None
        small = isinstance(value, torch.Tensor) and 0 < value.numel() <= LARGEST and value.ndim <= 5
        return value if small else None

    def add(self, expression: str) -> None:
        value = self.run(expression)
        if value is not None and value.is_floating_point():
            name = f"v{len(self.lines)}"
            self.lines.append(f"{name} = {expression}")
            self.give(name, value)


Instruction = Callable[[Env], str | None]


def has_dims(least: int) -> Callable[[torch.Tensor], bool]:
    return lambda t: t.ndim >= least


def unary(e: Env) -> str:
    x = e.pick()
    return e.choose(
        f"{x}.tanh()",
        f"{x}.sin().exp()",
        f"{x}.relu()",
        f"F.gelu({x})",
        f"-{x}",
        f"{x} * 0.5",
        f"{x}.sigmoid()",
        f"({x} + 2) / 3",
        f"{x}.square()",
    )


def binary(e: Env) -> str | None:
    x = e.pick()
    y = e.pick(lambda t: broadcasts(t.shape, e.shape(x)))  # type: ignore[arg-type]
    return e.choose(
        f"{x} + {y}",
        f"{x} * {y}",
        f"{x} - {y}",
        f"{x} / ({y}.square() + 1)",
        f"torch.add({x}, {y}, alpha=2)",
        f"torch.where({x} + ramp({x}) > 0.2, {x}, {y})",
    )


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(p == q or 1 in (p, q) for p, q in zip(reversed(a), reversed(b), strict=False))


def matmul(e: Env) -> str | None:
    x = e.pick(has_dims(1))
    if x is None:
        return None
    y = e.pick(
        lambda t: (
            t.ndim >= 1
            and t.shape[max(t.ndim - 2, 0)] == e.shape(x)[-1]
            and broadcasts(t.shape[:-2], e.shape(x)[:-2])
        )
    )
    if y is not None:
        return f"{x} @ {y}"
    return f"{x} @ {x}.mT" if len(e.shape(x)) > 1 else None


def linear(e: Env) -> str | None:
    w = e.pick(lambda t: t.ndim == 2)
    if w is None:
        return None
    x = e.pick(lambda t: t.ndim >= 1 and t.shape[-1] == e.shape(w)[1])
    b = e.pick(lambda t: tuple(t.shape) == e.shape(w)[:1])
    return x and (f"F.linear({x}, {w}, {b})" if b else f"F.linear({x}, {w})")


def einsum(e: Env) -> str | None:
    x, y = e.pick(has_dims(1)), e.pick(has_dims(1))
    if x is None or y is None or len(e.shape(x)) + len(e.shape(y)) > 7:
        return None
    first = "pqrstu"[: len(e.shape(x))]
    free, second = list("abcdef"), ""
    for size in e.shape(y):
        shared = [
            letter
            for letter, s in zip(first, e.shape(x), strict=True)
            if s == size and letter not in second
        ]
        second += e.choose(*shared, free[0])
        free = [f for f in free if f not in second]
    letters = sorted(set(first + second))
    out = e.draw(st.permutations(letters))[: e.up_to(min(4, len(letters)))]
    return f"torch.einsum('{first},{second}->{''.join(out)}', {x}, {y})"


def merge(e: Env) -> str | None:
    x = e.pick(has_dims(2))
    if x is None:
        return None
    at = e.up_to(len(e.shape(x)) - 2)
    return f"{x}.flatten({at}, {e.up_to(len(e.shape(x)) - 1, at + 1)})"


def split(e: Env) -> str | None:
    x = e.pick(lambda t: any(s > 1 for s in t.shape))
    if x is None:
        return None
    d = e.choose(*(d for d, s in enumerate(e.shape(x)) if s > 1))
    size = e.shape(x)[d]
    inner = e.choose(*(k for k in range(1, size + 1) if size % k == 0))
    return f"{x}.unflatten({d}, ({size // inner}, {inner}))"


def reshape(e: Env) -> str | None:
    x = e.pick(has_dims(1))
    if x is None:
        return None
    left, shape = math.prod(e.shape(x)), []
    for _ in range(e.up_to(3)):
        shape.append(e.choose(*(k for k in range(1, left + 1) if left % k == 0)))
        left //= shape[-1]
    return f"{x}.reshape({(*shape, left)})"


def reorder(e: Env) -> str | None:
    x = e.pick(has_dims(2))
    if x is None:
        return None
    n = len(e.shape(x))
    dims = tuple(e.draw(st.permutations(range(n))))
    return e.choose(
        f"{x}.transpose({e.dim(x)}, {e.dim(x)})",
        f"{x}.permute({dims})",
        f"{x}.permute({dims}).contiguous()",
    )


def stretch(e: Env) -> str:
    x = e.pick()
    assert x is not None
    shape, at = e.shape(x), e.up_to(len(e.shape(x)))
    wide = (*[-1] * at, e.up_to(4, 1), *[-1] * (len(shape) - at))
    return e.choose(f"{x}.unsqueeze({at})", f"{x}.unsqueeze({at}).expand({wide})", f"{x}.squeeze()")


def expand(e: Env) -> str | None:
    x = e.pick(lambda t: 1 in t.shape)
    if x is None:
        return None
    sizes = tuple(e.up_to(4, 1) if s == 1 else e.choose(s, -1) for s in e.shape(x))
    return e.choose(
        f"{x}.expand({sizes})",
        f"{x}.squeeze({e.choose(*(d for d, s in enumerate(e.shape(x)) if s == 1))})",
    )


def join(e: Env) -> str | None:
    x = e.pick()
    assert x is not None
    y = e.pick(lambda t: tuple(t.shape) == e.shape(x))
    if e.shape(x) == () or e.draw(st.booleans()):
        return f"torch.stack([{x}, {y}], {e.up_to(len(e.shape(x)))})"
    d = e.dim(x)
    y = e.pick(
        lambda t: (
            t.ndim == len(e.shape(x))
            and all(
                a == b for i, (a, b) in enumerate(zip(t.shape, e.shape(x), strict=True)) if i != d
            )
        )
    )
    return e.choose(f"torch.cat([{x}, {y}], {d})", f"torch.cat([{y}, {x}, {x}], {d})")


def part(e: Env) -> str | None:
    x = e.pick(has_dims(1))
    if x is None:
        return None
    d = e.dim(x)
    size = e.shape(x)[d]
    start = e.up_to(size - 1)
    colons = ":, " * d
    return e.choose(
        f"{x}.select({d}, {start})",
        f"{x}[{colons}{start}:{e.up_to(size, start + 1)}]",
        f"{x}[{colons}{start}::{e.up_to(3, 1)}]",
        f"{x}.chunk({e.up_to(3, 1)}, {d})[0]",
        f"{x}.chunk({e.up_to(3, 1)}, {d})[-1]",
        f"{x}.flip({d})",
        f"{x}.roll({start}, {d})",
        f"torch.cat({x}.split({e.up_to(size, 1)}, {d})[::-1], {d})",
    )


def reduce(e: Env) -> str | None:
    x = e.pick()
    assert x is not None
    if e.shape(x) == ():
        return f"{x}.sum()"
    dims = tuple(sorted(e.draw(st.sets(st.integers(0, len(e.shape(x)) - 1), min_size=1))))
    keep = e.draw(st.booleans())
    return e.choose(
        f"{x}.sum({dims}, {keep})",
        f"{x}.mean({dims}, {keep})",
        f"({x} + ramp({x})).amax({dims}, {keep})",
        f"({x} + ramp({x})).amin({dims}, {keep})",
        f"torch.logsumexp({x}, {dims}, {keep})",
        f"{x}.sum()",
        f"{x}.mean()",
    )


def along(e: Env) -> str | None:
    x = e.pick(has_dims(1))
    if x is None:
        return None
    d, d2 = e.dim(x), e.dim(x)
    return e.choose(
        f"{x}.softmax({d})",
        f"{x}.log_softmax({d})",
        f"{x}.cumsum({d})",
        f"F.layer_norm({x}, {e.shape(x)[d:]}, eps=0.1)",
        f"{x}.softmax({d}) * {x}.sum({d2}, True)",
    )


def norm(e: Env) -> str | None:
    w = e.pick(lambda t: 1 <= t.ndim <= 2)
    if w is None:
        return None
    n = len(e.shape(w))
    x = e.pick(lambda t: tuple(t.shape[-n:]) == e.shape(w))
    b = e.pick(lambda t: tuple(t.shape) == e.shape(w))
    return e.choose(
        f"F.layer_norm({x}, {e.shape(w)}, {w}, {b}, eps=0.1)",
        f"F.rms_norm({x}, {e.shape(w)}, {w}, eps=0.1)",
        f"F.layer_norm({x}, {e.shape(w)}, {w}, eps=0.1)",
    )


def triangle(e: Env) -> str | None:
    x = e.pick(has_dims(2))
    return x and e.choose(f"{x}.tril({e.up_to(1, -1)})", f"{x}.triu({e.up_to(1, -1)})")


def lookup(e: Env) -> str | None:
    i, x = e.pick(index=True), e.pick(has_dims(1))
    if i is None or x is None:
        return None
    d = e.dim(x)
    n = e.shape(x)[d]
    options = [f"{x}[{i} % {e.shape(x)[0]}]"]
    if len(e.shape(x)) == 2:
        options += [f"F.embedding({i} % {e.shape(x)[0]}, {x})"] * 2
    if len(e.shape(i)) == 1:
        options.append(f"{x}.index_select({d}, {i} % {n})")
    if len(e.shape(i)) == len(e.shape(x)) and all(
        a <= b for k, (a, b) in enumerate(zip(e.shape(i), e.shape(x), strict=True)) if k != d
    ):
        options += [f"{x}.gather({d}, {i} % {n})"] * 2
    if broadcasts(e.shape(i), e.shape(x)):
        options += [f"{x}.masked_fill({i} % 2 == 0, 0.5)", f"torch.where({i} < 3, {x}, {x}.sin())"]
    return e.choose(*options)


def gather(e: Env) -> str | None:
    x = e.pick(has_dims(1))
    if x is None:
        return None
    d = e.dim(x)
    shape = tuple(e.up_to(4, 1) if k == d else e.up_to(s, 1) for k, s in enumerate(e.shape(x)))
    return f"{x}.gather({d}, positions(*{shape}, below={e.shape(x)[d]}))"


def attention(e: Env) -> str | None:
    q = e.pick(lambda t: t.ndim in (3, 4) and t.shape[-1] > 1)
    if q is None:
        return None
    shape = e.shape(q)
    k, v = (e.pick(lambda t: tuple(t.shape) == shape) for _ in range(2))
    return f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={e.draw(st.booleans())})"


def convolution(e: Env) -> str | None:
    x = e.pick(lambda t: t.ndim == 4)
    w = x and e.pick(lambda t: t.ndim == 4 and t.shape[1] == e.shape(x)[1])
    return w and f"F.conv2d({x}, {w}, padding={e.up_to(3, 1)}, stride={e.up_to(2, 1)})"


def scatter(e: Env) -> str | None:
    i, x = e.pick(lambda t: t.ndim == 1, index=True), e.pick(has_dims(1))
    if i is None or x is None:
        return None
    d = e.dim(x)
    index = f"{i} % {e.shape(x)[d]}"
    return e.choose(
        f"{x}.index_add({d}, {index}, {x}.index_select({d}, {index}))",
        f"{x}.index_fill({d}, {index}, 0.5)",
    )


def pin(e: Env) -> str | None:
    x = e.pick()
    assert x is not None
    return f"constrain({x}, {e.draw(specs(e.shape(x), e.mesh))})"


INSTRUCTIONS: list[Instruction] = [
    unary, binary, matmul, linear, einsum, merge, split, reshape, reorder, stretch, expand, join,
    part, reduce, along, norm, triangle, lookup, gather, attention, convolution, scatter, pin,
    binary, matmul, lookup, reduce, along,
]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, *, gradients: bool, longest: int = 8) -> Drawn:
    """Any program, its inputs and a mesh, with specs for all of them.

    Args:
        gradients: the program is a loss: parameters come first, and it returns a scalar.
    """
    mesh = draw(st.sampled_from(MESHES))
    size = st.integers(1, 6)
    env, inputs = Env(draw, mesh), []
    sizes = draw(st.lists(size, min_size=1, max_size=3))  # shared, so that operands fit
    for k in range(draw(st.integers(1, 4))):
        is_index = k > 0 and draw(st.integers(0, 3)) == 3
        shape = tuple(
            draw(
                st.lists(
                    st.sampled_from(sizes),
                    min_size=1 if is_index else 0,
                    max_size=2 if is_index else 4,
                )
            )
        )
        is_parameter = gradients and not is_index and (k == 0 or draw(st.booleans()))
        name = f"{'i' if is_index else 'x'}{k}"
        inputs.append(Input(name, shape, draw(specs(shape, mesh)), is_index, is_parameter))
        env.give(
            name,
            torch.empty(shape, dtype=torch.int64 if is_index else torch.float64, device="meta"),
        )
    for _ in range(draw(st.integers(1, longest))):
        expression = draw(st.sampled_from(INSTRUCTIONS))(env)
        if expression is not None:
            env.add(expression)
    last = env.floats[::-1]
    returned = tuple(dict.fromkeys(last[:1] + (draw(st.lists(st.sampled_from(last), max_size=2)))))
    out_specs = None
    if gradients:
        terms = " + ".join(f"(ramp({name}) * {name}).sum()" for name in returned)
        env.lines.append(f"v{len(env.lines)} = {terms}")
        returned = (f"v{len(env.lines) - 1}",)
    elif draw(st.booleans()):
        out_specs = tuple(draw(specs(env.shape(name), mesh)) for name in returned)
    axes = AXES[: len(mesh)]
    data_axes = draw(st.sampled_from([None, None, (), *((a,) for a in axes), axes]))
    inputs.sort(key=lambda i: not i.is_parameter)
    return Drawn(
        mesh, tuple(inputs), tuple(env.lines), returned, out_specs, data_axes, draw(st.booleans())
    )
