"""A function on simulated meshes against the same function run by plain torch on one device."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ftp.api.shard import spmd
from ftp.sharding.arguments import argument_names, argument_specs
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import flatten, leaf_names
from ftp.sharding.spec import PartitionSpec


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
    """Check that ``fn`` gives on simulated meshes, its arguments cut in any way, what it gives on
    one device; its gradients too.

    Meshes and specs are drawn by hypothesis, the same ones in every run, and a failure is reduced
    to a small one.

    Args:
        fn: a pure function, as ``ftp.spmd`` takes it.
        args: its arguments: trees of tensors. In float64 a small error is a real one.
        meshes: meshes to draw from: a list of them, or a strategy; default
            ``ftp.testing.meshes()``.
        in_specs: as ``ftp.spmd`` takes them; default drawn for each tensor. Their axes must be the
            meshes'.
        gradients: also compare the gradients of the floating results with respect to the floating
            tensors, where there are any.
        examples: how many meshes and specs.
        rtol, atol: default 1e-9 and 1e-9 for double precision, 1e-4 and 1e-5 for single, 3e-2 and
            1e-2 below; ``atol`` is in units of the largest value of the leaf that is compared.

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

    args = tuple(args)
    program, names, expected = _with_gradients(fn, args, gradients)
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
        got = spmd(program, mesh, given_specs, out_specs)(*_cloned(args))
        rows = zip(names, flatten(got)[0], expected, strict=True)
        wrong = [
            line
            for name, value, plain in rows
            if (line := _difference(name, value, plain, rtol, atol))
        ]
        if wrong:
            raise AssertionError("\n".join([*_said(fn, mesh, given_specs, args), *wrong]))

    assert leaves, "there are no arguments"
    check()


def _with_gradients(
    fn: Callable[..., Any], args: tuple[Any, ...], gradients: bool
) -> tuple[Callable[..., Any], list[str], list[Any]]:
    """A function that returns the leaves of what ``fn`` does, then gradients; what its results
    are called; and plain torch's.
    """
    leaves, form = flatten(args)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]

    def filled(values: Sequence[Tensor]) -> Any:
        given = list(leaves)
        for i, value in zip(at, values, strict=True):
            given[i] = value
        return form.unflatten(given)

    variables = [leaves[i].detach().clone().requires_grad_(gradients) for i in at]
    made = fn(*filled(variables))
    out = flatten(made)[0]
    names = leaf_names(made, "result")
    plain = [x.detach() if isinstance(x, Tensor) else x for x in out]
    summed = [i for i, x in enumerate(out) if isinstance(x, Tensor) and x.requires_grad]
    if not (gradients and summed):
        return (lambda *given: flatten(fn(*given))[0]), names, plain
    weights = {
        i: torch.linspace(0.5, 1.5, max(out[i].numel(), 1), dtype=out[i].dtype)[
            : out[i].numel()
        ].view(out[i].shape)
        for i in summed
    }

    def total(values: Sequence[Any]) -> Tensor:
        return reduce(
            torch.add, [(values[i] * weights[i].to(values[i].device)).sum() for i in summed]
        )

    grads = torch.autograd.grad(total(out), variables, allow_unused=True, materialize_grads=True)
    called = leaf_names(args, "args")

    def program(*given: Any) -> list[Any]:
        flat, _ = flatten(given)

        def loss(*values: Tensor) -> tuple[Tensor, list[Any]]:
            filled_in = list(flat)
            for i, value in zip(at, values, strict=True):
                filled_in[i] = value
            out = flatten(fn(*form.unflatten(filled_in)))[0]
            return total(out), out

        found, out = torch.func.grad(loss, argnums=tuple(range(len(at))), has_aux=True)(
            *(flat[i] for i in at)
        )
        return [*out, *found]

    return program, [*names, *(f"the gradient of {called[i]}" for i in at)], [*plain, *grads]


def _difference(name: str, got: Any, expected: Any, rtol: float | None, atol: float | None) -> str:
    """One line that says how a leaf differs; empty where it does not."""
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
    relative, absolute = _TOLERANCES.get(expected.dtype, (3e-2, 1e-2))
    relative, absolute = relative if rtol is None else rtol, absolute if atol is None else atol
    finite = expected.abs()[expected.isfinite()]
    scale = max(1.0, float(finite.max()) if finite.numel() else 0.0)
    if torch.allclose(got, expected, rtol=relative, atol=absolute * scale, equal_nan=True):
        return ""
    error = (got - expected).abs().nan_to_num(nan=torch.inf)
    at = int(error.reshape(-1).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), expected.shape))
    here, there = got.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
    return (
        f"  {name}: max error {float(error.max()):.3g}, at {index}: {here:.6g}, on one device"
        f" {there:.6g}"
    )


_TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.complex128: (1e-9, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
}


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
