"""Run a layer on a few random tokens to see whether a token's result depends on other tokens, where
the rules of its ops do not tell.

The layer runs with random parameters on all tokens, and on two parts of them; the results are
compared. The tokens are all different, all the same, or of two kinds, so that some expert gets
more rows than a capacity allows. Large parameters are not allocated: a matrix of rank one stands
for each.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ftp.dataclass import dataclass
from ftp.errors import FtpError
from ftp.ops.grouped_mm import GROUPED_MM
from ftp.ops.mapped_arguments import evaluated
from ftp.per_rank.token_counts import differs, elements
from ftp.torch_internals.fake_tensors import FakeTensor
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import DisableTorchFunction, disable_current_modes
from ftp.tracing.trace import Traced

aten = torch.ops.aten
_FEWEST = 13  # tokens of a part: no small period of positions divides it
_POSITIONS = 3  # of a sequence, in place of all, if the layer takes any number
_ALLOCATED = 1 << 20  # elements of a parameter
_SMALL, _LARGEST = 1 << 21, 1 << 26  # elements of all values of one run
_known: dict[Any, float | None] = {}


@dataclass(frozen=True)
class TokenTrial:
    """The facts about a layer that is tried.

    Attributes:
        count: the tokens of its trace, as for ``mixing_op``.
        shape: of the tokens that it is called with.
        inputs: how many of its first inputs have the tokens as dim 0: the tokens, then tensors
            beside them, such as weights of the router.
        below: the bound of random integers beside the tokens, such as the number of experts.
        dynamic: the dims that have other sizes in later calls, which this trial is for too.
    """

    count: int
    shape: Sequence[int]
    inputs: int = 1
    below: int = 1
    dynamic: Sequence[int] = ()

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The largest shapes of tokens to try, the first choice first."""
        own = tuple(map(int, self.shape))
        return [tuple(_SMALL if d in self.dynamic else n for d, n in enumerate(own)), own]


def mixed_by(
    first: Traced, trial: TokenTrial, traced: Callable[[Sequence[int]], Traced]
) -> float | None:
    """The difference between a layer's results for all tokens and for parts of them, over the
    largest result; None if it is rounding, or if the layer does not run here. Equal layers of a
    model are tried once.

    Args:
        first: the layer's trace on ``trial.count`` tokens.
        traced: traces the layer on tokens of another shape.
    """
    inputs = [n.meta["val"] for n in first.gm.graph.nodes if n.op == "placeholder"]
    if any(map(_has_values, first.constants)):  # the program's text does not hold their values
        return _tried(first, trial, traced)
    shapes = tuple((tuple(x.shape), x.dtype) for x in inputs)
    key = first.gm.code, *trial.shapes, trial.inputs, trial.below, shapes
    if key not in _known:
        if len(_known) == 1024:
            _known.clear()
        _known[key] = _tried(first, trial, traced)
    return _known[key]


def asked_number(
    trial: TokenTrial,
    counts: tuple[int, int],
    whole: Traced,
    own: Traced,
    traced: Callable[[Sequence[int]], Traced],
) -> str | None:
    """The line where a layer computes something else for all tokens than for a rank's; None if its
    ops are the same, or if its results for a rank's are, on drawn tokens.

    Args:
        counts: the numbers of all tokens and of a rank's, of which ``whole`` and ``own`` are the
            traces.
    """
    at = differs(whole, counts[0], own, counts[1])
    if at is None or counts[0] == counts[1]:
        return None
    rest = counts[0] - counts[1]
    if rest < 1 or elements(whole) > _LARGEST:
        return at
    try:
        off = _difference([whole, own, traced((rest, *trial.shape[1:]))], trial)
    except (FtpError, RuntimeError, ValueError, TypeError, IndexError):
        return at
    return None if off is None else at


def _tried(
    first: Traced, trial: TokenTrial, traced: Callable[[Sequence[int]], Traced]
) -> float | None:
    tried = (shape for most in trial.shapes for shape in _shapes(first, trial.count, most))
    for rows, *inner in dict.fromkeys(tried):
        odd = max(rows // 2 - (rows // 2 + 1) % 2, 1)
        try:
            found = {n: traced((n, *inner)) for n in dict.fromkeys((rows, odd, rows - odd))}
            return _difference([found[n] for n in (rows, odd, rows - odd)], trial)
        except (FtpError, RuntimeError, ValueError, TypeError, IndexError):
            continue  # the layer is for its own sizes, or an op does not run on drawn values
    return None


def _shapes(first: Traced, count: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Shapes of tokens to try, with fewer positions of a sequence and then with all. As far as
    memory allows, they have more tokens than any number that the layer compares or computes its
    integers with, such as a capacity.
    """
    numbers, each = [0], 0.0
    for node in first.gm.graph.nodes:
        if node.op != "call_function":
            continue
        made = [x for x in _leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        each += sum(x.numel() for x in made if x.numel() % count == 0) / count
        if not any(x.is_floating_point() for x in made):
            given = [x for x in _leaves((node.args, node.kwargs)) if type(x) in (int, float)]
            numbers += [int(n) for n in given if 0 < n < _LARGEST and n % count]
    rows, *inner = shape
    each /= max(math.prod(inner[:-1]), 1)  # per position
    wanted = max(n for n in numbers if n * each <= _SMALL)
    at_most = max(2, rows)
    if inner[:-1]:
        many = min(2 * _FEWEST, at_most)
        *outer, positions = (min(n, _POSITIONS) for n in inner[:-1])
        needed = -(-(wanted + 2) // (many * math.prod(outer)))
        if needed <= inner[-2]:
            yield many, *outer, max(positions, needed), inner[-1]
    many = min(max(2 * _FEWEST, wanted + 2), at_most)
    if many * math.prod(inner[:-1]) * each <= _LARGEST:
        yield many, *inner


def _difference(parts: Sequence[Traced], trial: TokenTrial) -> float | None:
    """The largest difference, if at least two of four draws differ: rounding alone may change one
    draw in which scores tie.
    """
    eps = max(eps_of(part.gm) for part in parts)
    found: list[float] = []
    for seed in range(4):
        if len(found) == 2 or (seed == 2 and not found):
            break
        # Hide the surrounding trace and transforms: these tensors have values.
        with (
            disable_current_modes(),
            temporarily_clear_interpreter_stack(),
            DisableTorchFunction(),
            torch.no_grad(),
        ):
            off = _difference_of_draw(parts, trial, seed)
        if off > eps**0.5:
            found.append(off)
    return max(found) if len(found) == 2 else None


def _difference_of_draw(parts: Sequence[Traced], trial: TokenTrial, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    graph = parts[0].gm.graph
    inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    like, *beside = inputs[: trial.inputs]
    leaves = inputs[trial.inputs : len(inputs) - len(parts[0].constants)]
    # Scores may have a bias: the experts that tokens choose differ if it is the same for all.
    spread = 0.5 * (seed % 2)
    given = [_drawn(x, generator, spread) for x in leaves]
    # Tensors that the layer captures have no values if they are the surrounding trace's.
    captured = [
        x.detach().cpu() if _has_values(x) else _drawn(x, generator, spread)
        for x in parts[0].constants
    ]
    tokens = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
    travel = [tokens, *(_drawn_beside(x, generator, trial.below) for x in beside)]
    sizes = [part.out_shapes[0][0] for part in parts[1:]]
    dims = max(tokens.ndim - 1, 1)
    count = math.prod(tokens.shape[:dims])
    is_one = torch.rand(count, generator=generator) < 0.5
    two = torch.where(is_one, 0, count - 1)
    alike = [torch.full((count,), one) for one in (0, count // 2, count - 1)]
    off = 0.0
    for at in (torch.arange(count), two, *alike):
        taken = [_at(x, at, tokens.shape[:dims]) for x in travel]
        pieces = zip(*(x.split(sizes) for x in taken), strict=True)
        whole, *of_parts = (
            _run(part, [*(x.clone() for x in piece), *given, *captured])
            for part, piece in zip(parts, (taken, *pieces), strict=True)
        )
        apart = (whole - torch.cat(of_parts)).nan_to_num(0, 0, 0).abs().amax()
        largest = whole.nan_to_num(0, 0, 0).abs().amax()
        off = max(off, float(apart / largest) if largest else 0.0)
    return off


def _at(x: Tensor, at: Tensor, tokens: Sequence[int]) -> Tensor:
    """``x`` with token i's elements replaced by those of token ``at[i]``; unchanged if its first
    dims are not those of the tokens.
    """
    dims = len(tokens)
    return x.flatten(0, dims - 1)[at].view_as(x) if x.shape[:dims] == tokens else x


def _drawn_beside(like: Tensor, generator: torch.Generator, below: int) -> Tensor:
    """Weights and masks are positive; integers may be experts."""
    made = torch.rand(like.shape, generator=generator, dtype=torch.float64)
    if like.dtype is torch.bool:
        return made < 0.5
    return (made if like.is_floating_point() else made * below).to(like.dtype)


def _drawn(like: Tensor, generator: torch.Generator, spread: float) -> Tensor:
    if like.numel() > _ALLOCATED:
        return torch.empty(like.shape, dtype=like.dtype, device="meta")
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    made = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    if like.ndim < 2:  # scales and biases
        return (1 + spread * made.abs()).to(like.dtype)
    return (2 * made / max(like.shape[-2], 1) ** 0.5).to(like.dtype)


def _run(traced: Traced, given: Sequence[Tensor]) -> Tensor:
    return evaluated(traced.gm.graph, given, _called)[0].to(torch.float64)


def _has_values(x: Tensor) -> bool:
    return not (x.is_meta or isinstance(x, FakeTensor))


def _called(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    target: Any = node.target
    given: Any = (node.args, node.kwargs)
    given = map_aggregate(given, lambda x: values[x] if isinstance(x, fx.Node) else _on_cpu(x))
    args, kwargs = given
    if len({x.is_meta for x in _leaves(given) if isinstance(x, Tensor)}) < 2:
        return target(*args, **kwargs)
    added: Any = 0
    if target is aten.addmm.default and len(args) == 3 and not kwargs and not args[0].is_meta:
        added, *args = args
    elif target not in (aten.mm.default, GROUPED_MM):
        raise ValueError("an op reads elements of a parameter that is not allocated")
    x, weight, *ends = args[:3]
    if x.is_meta or not weight.is_meta or x.ndim != 2:
        raise ValueError("the matmul does not multiply tokens by a parameter")
    return (added + _by_rank_one(node.meta["val"], x, *ends)).to(node.meta["val"].dtype)


def _on_cpu(x: Any) -> Any:
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _by_rank_one(like: Tensor, x: Tensor, ends: Tensor | None = None) -> Tensor:
    """The matmul of rows with a matrix of rank one, or with that of each row's group."""
    rows, width = x.shape
    made = (x.double() @ _vector(width) / width**0.5)[:, None] * _vector(like.shape[-1] + 1)[1:]
    if ends is not None:
        groups = len(ends)
        group = torch.searchsorted(ends.long().cummax(0).values, torch.arange(rows), right=True)
        made = made * torch.where(group < groups, 1 + group / groups, 0)[:, None]
    return made


def _vector(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, generator=generator, dtype=torch.float64)


def eps_of(gm: fx.GraphModule) -> float:
    """The rounding of the least precise dtype that a program computes in."""
    values = [x for node in gm.graph.nodes for x in _leaves(node.meta.get("val"))]
    dtypes = {x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(tree, found.append)
    return found
