"""Compare a function on simulated meshes with the function run by plain torch on one device."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ftp.api.shard import spmd
from ftp.api.step import Step
from ftp.errors import InputError
from ftp.sharding.arguments import argument_names, argument_specs
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import abbreviated, flatten, leaf_names
from ftp.sharding.spec import PartitionSpec
from ftp.testing.divergence import OF_DEVICE, OF_DTYPE, first_divergence


def assert_equal_to_one_device(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    meshes: Any = None,
    in_specs: Any = None,
    gradients: bool = True,
    examples: int = 20,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check that ``fn`` and its gradients are equal on simulated meshes, with arguments cut in any
    way, and on one device.

    Meshes and specs are drawn by hypothesis, the same ones in every run; a failure is reduced to a
    small example.

    Args:
        fn: a pure function, as ``ftp.spmd`` takes it.
        args: its arguments: trees of tensors. Prefer float64, in which small errors are real ones.
        meshes: meshes to draw from: a list of them, or a strategy; default
            ``ftp.testing.meshes()``.
        in_specs: as ``ftp.spmd`` takes them; default drawn for each tensor. Their axes must be the
            meshes'.
        gradients: also compare the gradients of floating-point results with respect to
            floating-point tensors, if there are any.
        examples: number of meshes and specs to draw.
        rtol, atol: bounds; ``atol`` is in units of the largest value of the compared leaf. Default:
            1e-9 in double precision; below it, see Notes.

    Notes:
        Below double precision no fixed bound holds on every machine, as kernels sum in different
        orders. A leaf is right if it differs from plain torch by a few roundings of its largest
        value, or by 16 times plain torch's own error against float64. If it differs more, as long
        sums that cancel can, every op must be right by itself up to rounding
        (``ftp.first_divergence``), and the program right in float64 (if ``fn`` takes it).

    Raises:
        AssertionError: naming mesh, specs, the leaf that differs, and its largest error.

    >>> from ftp.testing import assert_equal_to_one_device
    >>> x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    >>> assert_equal_to_one_device(lambda x, w: torch.softmax(x @ w, -1), (x, w), examples=3)
    """
    try:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import strategies as st
    except ImportError as error:
        raise ImportError(
            "ftp.testing.assert_equal_to_one_device needs hypothesis: pip install hypothesis"
        ) from error
    from ftp.testing.strategies import meshes as any_mesh
    from ftp.testing.strategies import spec_trees

    if not callable(fn) or not isinstance(args, tuple | list):
        raise InputError(
            "assert_equal_to_one_device takes a function and a tuple of its arguments, not"
            f" {abbreviated(fn)} and {abbreviated(args)}."
        )
    args = tuple(args)
    names, expected = _plain(fn, args, gradients)
    is_rounded = rtol is None and atol is None and _is_below_double(args)
    exact = _in_double(fn, args, gradients) if is_rounded else None
    program = _program(fn, args, gradients)
    leaves, _ = flatten(args)
    drawn_from = (
        any_mesh()
        if meshes is None
        else meshes
        if isinstance(meshes, st.SearchStrategy)
        else st.sampled_from(list(meshes))
    )

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mesh = data.draw(drawn_from, label="mesh")
        given_specs = (
            data.draw(spec_trees(args, mesh), label="in_specs") if in_specs is None else in_specs
        )
        out_specs = PartitionSpec() if data.draw(st.booleans()) else None
        step = spmd(program, mesh, given_specs, out_specs)
        got = flatten(step(*_cloned(args)))[0]
        wrong = _differences(names, got, expected, exact, rtol, atol)
        faults = wrong
        if wrong and is_rounded:
            faults = _faults(fn, args, gradients, step, (given_specs, out_specs), exact)
        if faults:
            lines = dict.fromkeys([*wrong, *faults])
            raise AssertionError("\n".join([*_said(fn, mesh, given_specs, args), *lines]))

    assert leaves, "there are no arguments"
    check()


def _plain(
    fn: Callable[..., Any], args: tuple[Any, ...], gradients: bool
) -> tuple[list[str], list[Any]]:
    """The names of ``fn``'s results and gradients, and their values by plain torch."""
    leaves, _ = flatten(args)
    at = _floating(leaves)
    variables = [leaves[i].detach().clone().requires_grad_(gradients) for i in at]
    made = fn(*_filled(args, at, variables))
    out = flatten(made)[0]
    names = leaf_names(made, "result")
    values = [x.detach() if isinstance(x, Tensor) else x for x in out]
    summed = [x for x in out if isinstance(x, Tensor) and x.requires_grad]
    if not (gradients and summed):
        return names, values
    total = _weighted(summed, _weights(summed))
    grads = torch.autograd.grad(total, variables, allow_unused=True, materialize_grads=True)
    called = leaf_names(args, "args")
    return [*names, *(f"the gradient of {called[i]}" for i in at)], [*values, *grads]


def _program(
    fn: Callable[..., Any], args: tuple[Any, ...], gradients: bool
) -> Callable[..., list[Any]]:
    """A function that returns the leaves of ``fn``'s result, then the gradients."""
    at = _floating(flatten(args)[0])
    summed, weights = [], []
    if gradients:
        variables = [flatten(args)[0][i].detach().clone().requires_grad_() for i in at]
        out = flatten(fn(*_filled(args, at, variables)))[0]
        summed = [i for i, x in enumerate(out) if isinstance(x, Tensor) and x.requires_grad]
        weights = _weights([out[i] for i in summed])
    if not summed:
        return lambda *given: flatten(fn(*given))[0]

    def program(*given: Any) -> list[Any]:
        def loss(*values: Tensor) -> tuple[Tensor, list[Any]]:
            out = flatten(fn(*_filled(given, at, values)))[0]
            return _weighted([out[i] for i in summed], weights), out

        flat, _ = flatten(given)
        found, out = torch.func.grad(loss, argnums=tuple(range(len(at))), has_aux=True)(
            *(flat[i] for i in at)
        )
        return [*out, *found]

    return program


def _floating(leaves: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]


def _filled(args: tuple[Any, ...], at: Sequence[int], values: Sequence[Tensor]) -> Any:
    leaves, form = flatten(args)
    leaves = list(leaves)
    for i, value in zip(at, values, strict=True):
        leaves[i] = value
    return form.unflatten(leaves)


def _weights(out: Sequence[Tensor]) -> list[Tensor]:
    """Weights of each result's elements, which differ and are exact in every dtype."""
    eighths = [torch.arange(x.numel(), device=x.device) % 9 + 4 for x in out]
    return [(n / 8).to(x.dtype).view(x.shape) for n, x in zip(eighths, out, strict=True)]


def _weighted(out: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, [(x * w).sum() for x, w in zip(out, weights, strict=True)])


def _doubled(args: Any) -> Any:
    leaves, _ = flatten(args)
    at = _floating(leaves)
    return _filled(args, at, [leaves[i].double() for i in at])


def _is_below_double(args: Any) -> bool:
    leaves, _ = flatten(args)
    return any(leaves[i].dtype is not torch.float64 for i in _floating(leaves))


def _in_double(
    fn: Callable[..., Any], args: tuple[Any, ...], gradients: bool
) -> Sequence[Any] | None:
    """Plain torch's results and gradients in float64; None where ``fn`` takes no float64."""
    try:
        return _plain(fn, _doubled(args), gradients)[1]
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _differences(
    names: Sequence[str],
    got: Sequence[Any],
    expected: Sequence[Any],
    exact: Sequence[Any] | None,
    rtol: float | None,
    atol: float | None,
) -> list[str]:
    """A line for each leaf that differs."""
    references = [None] * len(expected) if exact is None else exact
    rows = zip(names, got, expected, references, strict=True)
    return [line for row in rows if (line := _difference(*row, rtol, atol))]


def _difference(
    name: str, got: Any, expected: Any, exact: Any, rtol: float | None, atol: float | None
) -> str:
    """One line about how a leaf differs; empty if it does not."""
    if not isinstance(expected, Tensor):
        return "" if got == expected else f"  {name}: {got!r}, on one device {expected!r}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"  {name}: {tuple(got.shape)} {got.dtype}, on one device {tuple(expected.shape)}"
            f" {expected.dtype}"
        )
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = int((got != expected).sum())
        return f"  {name}: {wrong} of {expected.numel()} values differ" if wrong else ""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    here, there = got.to(wide), expected.to(wide)
    scale = _largest(there)
    if rtol is not None or atol is not None:
        room = (atol or 0.0) * max(1.0, scale) + (rtol or 0.0) * there.abs()
    elif expected.dtype == wide:
        room = 1e-9 * max(1.0, scale) + 1e-9 * there.abs()
    else:
        true = exact.to(wide) if isinstance(exact, Tensor) else there
        own = _largest(there - true)
        room = OF_DTYPE * torch.finfo(expected.dtype).eps * _largest(true) + OF_DEVICE * own
    error = (here - there).abs()
    is_same = (here == there) | (here.isnan() & there.isnan())
    error = torch.where(is_same, 0.0, error).nan_to_num(nan=torch.inf)
    if bool((error <= room).all()):
        return ""
    at = int(error.reshape(-1).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), expected.shape))
    mine, theirs = got.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
    return (
        f"  {name}: max error {float(error.max()):.3g}, at {index}: {mine:.6g}, on one device"
        f" {theirs:.6g}"
    )


def _largest(x: Tensor) -> float:
    finite = x.abs()[x.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _faults(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    gradients: bool,
    step: Step,
    specs: tuple[Any, Any],
    exact: Sequence[Any] | None,
) -> list[str]:
    """Errors that rounding does not explain: an op that is wrong by itself, a program that is wrong
    in float64.
    """
    found = first_divergence(step, *args)
    if found is not None:
        rank = ", ".join(f"{axis}={i}" for axis, i in found.rank.items())
        return [f"  {found.name} on the rank at {rank}: {found.why}, in {found.source}"]
    if exact is None:
        return []
    wide = _doubled(args)
    got = flatten(spmd(_program(fn, wide, gradients), step.mesh, *specs)(*wide))[0]
    names = _plain(fn, wide, gradients)[0]
    lines = _differences(names, got, exact, exact, None, None)
    return [f"{line}, in float64" for line in lines]


def _said(fn: Any, mesh: AnyMesh, in_specs: Any, args: tuple[Any, ...]) -> list[str]:
    axes = ", ".join(f"{axis}={n}" for axis, n in resolve(mesh).axes.items())
    lines = [
        f"{getattr(fn, '__name__', fn)} differs from one device on a mesh of {axes}, with specs"
    ]
    specs = argument_specs(in_specs, args, argument_names(fn), "in_specs")
    for name, leaf, spec in zip(leaf_names(args, "args"), flatten(args)[0], specs, strict=True):
        if isinstance(leaf, Tensor):
            lines.append(f"  {name} {tuple(leaf.shape)}: {spec!r}")
    return [*lines, "in"]


def _cloned(tree: Any) -> Any:
    leaves, form = flatten(tree)
    return form.unflatten([x.detach().clone() if isinstance(x, Tensor) else x for x in leaves])
