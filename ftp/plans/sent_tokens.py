"""Run a layer of experts written for one device with its experts on the ranks of a mesh axis:
tokens are sent to the ranks that own their experts.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ftp.dynamic_int import is_dynamic
from ftp.errors import InputError, MeshError, PlanWarning, SpecError
from ftp.functional.module_constraints import Constraint
from ftp.ops.assume import assume
from ftp.ops.fill_up import filled_up
from ftp.per_rank.grouped_rows import RowsTravel
from ftp.per_rank.local import local
from ftp.per_rank.sizes import at_hand, meta, shape_of
from ftp.per_rank.token_mixing import mixing_op
from ftp.per_rank.token_trial import TokenTrial, asked_number, eps_of, mixed_by
from ftp.per_rank.trace_locally import showing_range, traced_locally
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import flatten, leaf_names
from ftp.sharding.spec import P
from ftp.source import at_line


def send_tokens(
    layer: Callable[..., Any],
    axis: str,
    *,
    token_axes: Sequence[str] | None = None,
    capacity: float | None = None,
    mesh: AnyMesh | None = None,
) -> Callable[..., Any]:
    """Run a dropless layer of experts with each expert on one rank of ``axis``: tokens are sent to
    the ranks that own their experts, and no weight of an expert is communicated.

    The layer is one-device code that sorts rows by expert, multiplies them by ``F.grouped_mm`` (or
    ``torch._grouped_mm``) with stacked weights, and brings them back to their tokens in any way.
    The weights that grouped matmuls read are the experts' weights. Each rank runs the layer on its
    own tokens; rows are sent to the owners of their experts before the first grouped matmul, stay
    there through every op that acts on each row by itself, and return before any other op. Expert
    weights that another op reads are gathered, and a ``PlanWarning`` names them.

    The layer must treat each token by itself, as dropless layers do: compute losses and statistics
    over all tokens outside of it. The trace checks that, by the layer's ops and then by runs on a
    few random tokens, together and in two parts. It refuses experts that choose their tokens, a
    capacity, norms over tokens, and rows that do not come back to their tokens.
    ``lowered.assumptions`` lists what these runs cannot show; ``check_inputs=True`` runs the layer
    on all tokens too and raises an InputError if results differ.

    Args:
        layer: takes a tree of parameters, tokens (tokens, ...) or (batch, sequence, ...), and trees
            of tensors beside them, such as positions, masks, or chosen experts and their weights;
            returns a tensor of the tokens' shape.
        axis: the mesh axis whose ranks own whole experts: equally many each; if the axis does not
            divide their number, the last ranks own fewer, or none.
        token_axes: the mesh axes that shard dim 0 of the tokens, from major to minor; default
            ``axis``.
        capacity: the rows that a rank has room for, as a multiple of those of an equal load; more
            raise an InputError on all ranks before a row is sent. Default room for all rows.
        mesh: default the surrounding step's or ``ftp.use_mesh``'s.

    Returns:
        A function of the layer's arguments, global ones, for ``ftp.shard`` and ``ftp.spmd``.
        Tensors beside the tokens have the same dim 0, are sharded like them, and get gradients.

    Raises:
        InputError: a tensor beside the tokens has another number of rows.
        SpecError: no grouped matmul reads a parameter, or parameters of different numbers of
            experts; a result that is not of the tokens' shape; a token's result depends on other
            tokens.

    >>> import ftp
    >>> import torch.nn.functional as F
    >>> def layer(p, x):
    ...     expert = (x @ p["router"]).argmax(-1)
    ...     ends = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
    ...     order = expert.argsort(stable=True)
    ...     made = F.grouped_mm(x[order], p["experts"], offs=ends)
    ...     return torch.zeros_like(x).index_copy(0, order, made)
    >>> params = {"router": torch.randn(8, 4), "experts": torch.randn(4, 8, 8)}
    >>> moe = ftp.plans.send_tokens(layer, "ep")
    >>> specs = {"router": ftp.P(), "experts": ftp.P("ep")}
    >>> step = ftp.shard(
    ...     lambda p, x: moe(p, x).square().mean(), ftp.simulated_mesh(2, "ep"), specs,
    ...     batch_specs=ftp.P("ep"),
    ... )
    >>> program = step.lower(params, torch.randn(6, 8))
    >>> [tuple(c.shape) for c in program.collectives if c.worst_nbytes]  # 3 rows a rank
    [(3, 8), (3, 8), (3, 8)]
    """
    axes = (axis,) if token_axes is None else tuple(token_axes)
    if axis not in axes:
        raise SpecError(
            f"send_tokens(axis={axis!r}, token_axes={axes!r}): tokens are sent along {axis!r}, so"
            " token_axes must name it too."
        )
    if capacity is not None and capacity < 1:
        raise SpecError(f"send_tokens(capacity={capacity}): an equal load needs 1.")

    def call(params: Any, x: Tensor, *beside: Any) -> Any:
        over = resolve(mesh)
        if lacking := [a for a in axes if a not in over.axes]:
            raise MeshError(
                f"{at_line()}send_tokens has token_axes={axes!r}, but the mesh {over} has no axis"
                f" {lacking[0]!r}."
            )
        leaves, tree = flatten(params)
        names = leaf_names(params, "params")
        others, tree_of_others = flatten(beside)
        _check_beside(x, others, leaf_names(beside, "beside"))
        shown = [showing_range(t) for t in others]

        def run(leaves: Sequence[Any], x: Tensor, others: Sequence[Any]) -> Any:
            others = [show(t) for show, t in zip(shown, others, strict=True)]
            return layer(tree.unflatten(leaves), x, *tree_of_others.unflatten(others))

        n, shards = over.axes[axis], math.prod(over.axes[a] for a in axes)
        if not x.shape[0]:
            raise SpecError(f"{at_line()}send_tokens: there are no tokens.")
        _note_questions(run, x, others, leaves)
        missing = -x.shape[0] % shards
        filled, *filled_others = (_with_copies(t, missing) for t in (x, *others))
        counts = None if is_dynamic(shape_of(x)[0]) else (x.shape[0], filled.shape[0] // shards)
        count, experts, eps = _experts_of(
            run, leaves, names, filled, filled_others, axis, n, axes, counts
        )

        def of_rank(x: Tensor, others: Sequence[Any], *leaves: Any) -> Tensor:
            sees = RowsTravel(axis, n, capacity)
            given = list(leaves)
            for i, name in enumerate(names):
                if name in experts:
                    given[i] = sees.whole(name, leaves[i], count)
                else:
                    sees.alike(leaves[i])
            with sees:
                made = run(given, x, others)
            if not isinstance(made, Tensor) or made.shape != x.shape:
                said = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise SpecError(
                    f"{at_line()}send_tokens: the layer takes tokens of shape {tuple(x.shape)} and"
                    f" returns {said}. It returns one tensor of the tokens' shape; compute"
                    " losses and statistics outside of it."
                )
            _warn_of_gathers(sees, axis, count)
            return made

        rows = P(axes)
        of_others = [rows if isinstance(t, Tensor) else P() for t in others]
        specs = tuple(P(axis) if name in experts else P() for name in names)
        parts = [
            filled_up(leaf, axis, n) if name in experts else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
        sent = local(of_rank, mesh, (rows, of_others, *specs), rows, axes=axes)
        made = sent(filled, filled_others, *parts)[: x.shape[0]]

        def is_that_of_all_tokens() -> Tensor:
            values, beside = (
                [t.detach() if isinstance(t, Tensor) else t for t in given]
                for given in (leaves, others)
            )
            return _is_close(made.detach(), run(values, x.detach(), beside), eps)

        assume(
            is_that_of_all_tokens,
            "a token's result does not depend on other tokens, in the layer given to send_tokens",
        )
        return made

    return call


def on_expert_axis(
    axis: str, *, token_axes: Sequence[str] | None = None, capacity: float | None = None
) -> Constraint:
    """A constraint on a module of experts that sends its tokens, as ``send_tokens`` does for a
    function; for ``ftp.functionalize(model, constraints={path: on_expert_axis("ep")})``.

    The module takes tokens, and tensors beside them such as chosen experts and their weights, and
    returns a tensor of the tokens' shape. Other arguments are those of ``send_tokens``. Without a
    mesh, or where the mesh lacks the axes, the module runs as it is.

    >>> on_expert_axis("ep", capacity=0.5)
    Traceback (most recent call last):
    ftp.errors.SpecError: send_tokens(capacity=0.5): an equal load needs 1.
    """

    def forward(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            over = resolve(None)
        except MeshError:
            return own(*args, **kwargs)
        given = [*args, *kwargs.values()]
        if not given or not isinstance(given[0], Tensor):
            said = type(given[0]).__name__ if given else "nothing"
            raise InputError(
                f"{at_line()}on_expert_axis({axis!r}) takes a module whose first argument is the"
                f" tokens; {type(module).__name__} is called with {said}."
            )
        at = {
            f"{path}.{name}" if path else name: (part, name)
            for path, part in module.named_modules()
            for name, p in part._parameters.items()
            if p is not None
        }
        unnamed, names = len(args), tuple(kwargs)
        values = {path: part._parameters[name] for path, (part, name) in at.items()}

        def layer(params: Mapping[str, Tensor], *given: Any) -> Any:
            named = dict(zip(names, given[unnamed:], strict=True))
            with _holding(at, params):
                return own(*given[:unnamed], **named)

        sent = send_tokens(layer, axis, token_axes=token_axes, capacity=capacity, mesh=over)
        return sent(values, *given)

    send_tokens(forward, axis, token_axes=token_axes, capacity=capacity)  # for its errors
    return Constraint(forward=forward)


@contextmanager
def _holding(at: Mapping[str, tuple[nn.Module, str]], values: Mapping[str, Any]) -> Iterator[None]:
    """Set parameters to other values within the block; ``at`` has the module and name of each."""
    old = {path: module._parameters[name] for path, (module, name) in at.items()}
    for path, (module, name) in at.items():
        module._parameters[name] = values[path]
    try:
        yield
    finally:
        for path, (module, name) in at.items():
            module._parameters[name] = old[path]


def _check_beside(x: Tensor, others: Sequence[Any], names: Sequence[str]) -> None:
    for name, t in zip(names, others, strict=True):
        if isinstance(t, Tensor) and t.shape[:1] != x.shape[:1]:
            raise InputError(
                f"{at_line()}send_tokens: {name} of shape {tuple(t.shape)} is beside tokens of"
                f" shape {tuple(x.shape)}, which are cut on dim 0: its dim 0 must have size"
                f" {x.shape[0]} too. Expand it, or pass it with the parameters."
            )


def _warn_of_gathers(sees: RowsTravel, axis: str, count: int) -> None:
    for name, where in sees.read.items():
        warnings.warn(
            f"send_tokens: the {count} experts of {name} are gathered over {axis!r} on every rank:"
            f" {where} reads them otherwise than as the matrices of a grouped matmul.",
            PlanWarning,
            stacklevel=2,
        )


def _with_copies(t: Any, missing: int) -> Any:
    """Copies of the first token after the others; their results are dropped."""
    if not missing or not isinstance(t, Tensor):
        return t
    return torch.cat([t, t[:1].expand(missing, *t.shape[1:])])


def _note_questions(
    run: Callable[..., Any], x: Tensor, others: Sequence[Any], leaves: Sequence[Any]
) -> None:
    """Make what the layer asks of the number of all tokens a condition of the trace, where it is
    dynamic: ranks have fewer, and the layer is tried with others.
    """
    if any(map(is_dynamic, shape_of(x))):
        names = [f"input {i}" for i in range(1 + len(others) + len(leaves))]
        traced_locally(
            lambda x, others, *given: run(given, x, others),
            {},
            (x, others, *leaves),
            x.device.type,
            names,
        )


def _experts_of(
    run: Callable[..., Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    x: Tensor,
    others: Sequence[Any],
    axis: str,
    n: int,
    token_axes: tuple[str, ...],
    of_tokens: tuple[int, int] | None,
) -> tuple[int, set[str], float]:
    """The number of experts, the parameters that grouped matmuls read, and the rounding error of
    the least precise dtype.

    Args:
        of_tokens: the number of tokens, and that of a rank's; None if they are dynamic.
    """
    sees, device_type = RowsTravel(axis, n, None), x.device.type
    dynamic = [d for d, size in enumerate(shape_of(x)) if is_dynamic(size)]
    # Where sizes are dynamic, the layer's ops are those at the sizes at hand.
    x, *others = map(at_hand, (x, *others))
    leaves = [*map(at_hand, leaves)]

    def look(x: Tensor, others: Sequence[Any], *given: Any) -> Any:
        for name, leaf in zip(names, given, strict=True):
            if isinstance(leaf, Tensor) and leaf.ndim >= 2:
                sees.candidate(name, leaf)
        with sees:
            return run(given, x, others)

    sizes = dict.fromkeys(token_axes, 1)
    tensors = [t for t in (x, *others, *leaves) if isinstance(t, Tensor)]
    tokens = _prime_above(max(n for t in tensors for n in t.shape))

    def traced_with(shape: Sequence[int]) -> Any:
        of_others = [
            meta(_beside_of(shape, t.shape, x.shape), t.dtype) if isinstance(t, Tensor) else t
            for t in others
        ]
        given = [meta(shape, x.dtype), of_others, *leaves]
        said = ["x", *(f"beside {i}" for i in range(len(others))), *names]
        return traced_locally(look, sizes, given, device_type, said)

    seen = (tokens, *x.shape[1:])
    traced = traced_with(seen)
    shapes = {
        name: leaf.shape for name, leaf in zip(names, leaves, strict=True) if name in sees.used
    }
    if not shapes:
        raise SpecError(
            f"{at_line()}send_tokens: no grouped matmul of the layer reads one of its parameters"
            f" ({', '.join(names)}), so that no token can be sent to an expert: the layer must"
            " call F.grouped_mm with rows that are sorted by expert, offs= and stacked weights"
            " (experts, in, out), which may be transposed or converted before. Experts in a loop,"
            " or taken by index for each row, are read whole: leave them out of send_tokens. The"
            " planner then gathers their weights or sums their activations, whichever is cheaper."
        )
    counts = {shape[0] for shape in shapes.values()}
    if len(counts) > 1:
        held = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise SpecError(
            f"{at_line()}send_tokens: grouped matmuls read {held}, whose numbers of experts"
            " differ. Send the tokens of each mixture by itself."
        )
    (experts,) = counts
    if traced.out_shapes == [seen]:
        travel = 1 + sum(isinstance(t, Tensor) for t in others)
        if (mixing := mixing_op(traced.gm, tokens, travel)) is not None:
            at = mixing.meta.get("source") or "an unknown line"
            _refuse_mixed(f"by {mixing.target} at {at}")
        trial = TokenTrial(tokens, x.shape, travel, experts, dynamic)
        if (off := mixed_by(traced, trial, traced_with)) is not None:
            _refuse_mixed(
                "or on its position: the layer's results for a few random tokens differ by"
                f" {off:.1g} of the largest from its results for two parts of these tokens"
            )
        if of_tokens is not None:
            whole, own = [traced_with((each, *x.shape[1:])) for each in of_tokens]
            if (at := asked_number(trial, of_tokens, whole, own, traced_with)) is not None:
                _refuse_mixed(
                    f"by their number, which the layer asks for at {at}: it computes something else"
                    f" for all {of_tokens[0]} than for the {of_tokens[1]} of a rank"
                )
    return experts, set(shapes), eps_of(traced.gm)


def _refuse_mixed(how: str) -> None:
    raise SpecError(
        f"{at_line()}send_tokens: a token's result depends on other tokens, {how}. Each rank runs"
        " the layer on its own tokens, so its numbers would not be one device's. Let the layer"
        " treat each token by itself and keep losses, statistics and random draws outside (what is"
        " computed there for each token may be given beside the tokens), or leave it out of"
        " send_tokens: its experts are then planned as any other weights."
    )


def _is_close(made: Tensor, expected: Tensor, eps: float) -> Tensor:
    """Whether two results differ by rounding only; NaNs count as equal."""
    off = (made - expected).abs().amax()
    return ~(off > eps**0.5 * expected.abs().amax())


def _prime_above(n: int) -> int:
    """
    >>> [_prime_above(n) for n in (0, 7, 100)]
    [2, 11, 101]
    """
    return next(
        p for p in itertools.count(max(n, 1) + 1) if all(p % d for d in range(2, math.isqrt(p) + 1))
    )


def _beside_of(shape: Sequence[int], own: Sequence[int], x: Sequence[int]) -> list[int]:
    """The shape ``own`` of a tensor beside tokens of shape ``x``, for tokens of ``shape``. Its
    leading dims that equal those of ``x`` (the last dim of ``x`` aside) become those of ``shape``.

    >>> _beside_of((5, 3, 8), (2, 7, 4), (2, 7, 8)), _beside_of((5, 3, 8), (2, 1, 7), (2, 7, 8))
    ([5, 3, 4], [5, 1, 7])
    """
    dims = max(len(x) - 1, 1)
    same = next((i for i in range(dims) if i == len(own) or own[i] != x[i]), dims)
    return [*shape[:same], *own[same:]]
