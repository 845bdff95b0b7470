"""PyTorch's own operator database under random shardings: values and gradients against one device.

A worker writes a line before and after each case, so that a native crash or a hang costs its parent
one case.
"""

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounding import room
from torch import Tensor
from torch.utils import _pytree as pytree

import ftp
from ftp import P
from ftp.errors import ReplicationWarning
from ftp.tracing.selected_rows.selected import Selected

MESHES = {"2": ((2,), ("x",)), "3": ((3,), ("x",)), "2x2": ((2, 2), ("x", "y"))}
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
LOW = {torch.float32: torch.float64, torch.complex64: torch.complex128}
SECONDS = 60  # for one case; a native loop is ended by the parent after twice that
LARGEST = 50_000  # elements; larger samples prove nothing more
UNDEFINED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
)  # values mean nothing


@dataclass(frozen=True)
class Outcome:
    """What became of one case: right, on a copy, refused, assumed, wrong, crashed or skipped.

    On a copy: refused, as it changes an argument in place, and right where the function works on
    copies of its arguments and returns them, as the error says. Assumed: a warning says what is
    assumed of the arguments' values, which the sample breaks; refused with ``check_inputs=True``.
    """

    op: str
    sample: int
    mesh: str
    status: str
    message: str = ""
    specs: str = ""
    replicated: tuple[str, ...] = ()
    seconds: float = 0.0


@cache
def database() -> dict[str, Any]:
    """PyTorch's operator database, by name.

    Its samples do not look for a `TestCase` that draws them, and seed the CPU's generators alone:
    both would walk the stack for each of them, and read source files to do so.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db

    common_utils.extract_test_fn = lambda: None
    common_utils.set_rng_seed = _seed
    return {f"{o.name}.{o.variant_test_name}" if o.variant_test_name else o.name: o for o in op_db}


def _seed(seed: int | None = None) -> None:
    from torch.testing._internal import common_utils

    seed = common_utils.SEED if seed is None else seed
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def op_names() -> list[str]:
    return [
        n
        for n in database()
        if n.split(".")[0].removeprefix("_refs.") not in UNDEFINED
        and "sparse" not in n
        and "quantized" not in n
    ]


@cache
def samples(name: str, count: int) -> tuple[tuple[int, Any], ...]:
    """A few samples of an op, spread over what the database has."""
    info = database()[name]
    supported = info.supported_dtypes("cpu")
    dtype = next((d for d in DTYPES if d in supported), None)
    if dtype is None:
        return ()
    torch.manual_seed(0)
    random.seed(0)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, sample in enumerate(islice(_given(info, dtype), 24)):
            leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
            sizes = [
                t.numel() for t in leaves if isinstance(t, Tensor) and t.layout is torch.strided
            ]
            strided = all(t.layout is torch.strided for t in leaves if isinstance(t, Tensor))
            if sizes and strided and max(sizes) <= LARGEST:
                found.append((i, sample))
    step = max(len(found) / count, 1.0)
    return tuple(found[int(k * step)] for k in range(min(count, len(found))))


def _given(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    try:
        yield from info.sample_inputs("cpu", dtype, requires_grad=False)
    except Exception as error:  # some need libraries that are not here
        print(f"no more samples of {info.name}: {error}", file=sys.stderr)


def run_case(name: str, index: int, sample: Any, mesh_name: str, seed: int = 0) -> Outcome:
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status, message, specs = _run_case(name, index, sample, mesh_name, seed)
        if status == "refused" and " is changed in place" in message:
            again = _run_case(name, index, sample, mesh_name, seed, on_copies=True)
            if again[0] != "refused":
                status, message, specs = again
                status = "on a copy" if status == "right" else status
        if status == "wrong" and any(
            "check_inputs=True checks it" in str(w.message) for w in caught
        ):
            again = _run_case(name, index, sample, mesh_name, seed, is_checked=True)
            status = "assumed" if again[0] == "refused" else status
    marked = {
        str(w.message).split(" ", 1)[0]
        for w in caught
        if issubclass(w.category, ReplicationWarning)
    }
    return Outcome(
        name,
        index,
        mesh_name,
        status,
        message,
        specs,
        tuple(sorted(marked)),
        round(time.perf_counter() - started, 2),
    )


def _run_case(
    name: str,
    index: int,
    sample: Any,
    mesh_name: str,
    seed: int,
    on_copies: bool = False,
    is_checked: bool = False,
) -> tuple[str, str, str]:
    leaves, tree = pytree.tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i].detach().clone() for i in at]
    info = database()[name]

    def apply(*values: Tensor) -> list[Tensor]:
        filled = list(leaves)
        copies = [value.clone() for value in values] if on_copies else []
        for i, value in zip(at, copies or values, strict=True):
            filled[i] = value
        given, args, kwargs = pytree.tree_unflatten(filled, tree)
        found = pytree.tree_leaves(info.op(given, *args, **kwargs))
        return [*(t for t in found if isinstance(t, Tensor | Selected)), *copies]

    try:
        torch.manual_seed(0)
        plain = apply(*(t.clone() for t in tensors))
        torch.manual_seed(1)
        again = apply(*(t.clone() for t in tensors))
    except Exception as error:
        return "skipped", f"plain torch: {type(error).__name__}", ""
    if any(_difference(a, b, b) for a, b in zip(plain, again, strict=False)):
        return "skipped", "random", ""
    if not plain or any(t.layout is not torch.strided for t in plain):
        return "skipped", "no tensor results", ""
    fn, arguments = apply, tensors
    if info.supports_autograd and any(t.is_floating_point() for t in plain):
        weighted = _with_gradient(apply, tensors, plain)
        weights = [_weights(t) for t in plain if t.is_floating_point()]
        try:
            plain = weighted(*(t.clone() for t in (*tensors, *weights)))
            fn, arguments = weighted, [*tensors, *weights]
        except Exception:  # no gradient of this sample on one device: values alone
            pass
    draw = random.Random(f"{name} {index} {mesh_name} {seed}")
    shape, axes = MESHES[mesh_name]
    specs = tuple(draw_spec(draw, t, axes) for t in arguments)
    said = ", ".join(f"{tuple(t.shape)}:{s!r}" for t, s in zip(arguments, specs, strict=True))
    out_specs = None if draw.random() < 0.5 else P()
    try:
        mesh = ftp.simulated_mesh(shape, axes)
        step = ftp.spmd(fn, mesh, specs, out_specs, check_inputs=is_checked)
        made = step(*(t.clone() for t in arguments))
    except ftp.FtpError as error:
        if "draws random numbers" in str(error):
            return "skipped", "random", ""
        return "refused", f"{type(error).__name__}: {error}", said
    except TimeoutError:
        return "hung", f"more than {SECONDS} s", said
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}", said
    if len(made) != len(plain):
        return "wrong", f"{len(made)} results, not {len(plain)}", said
    exact = plain
    if any(t.dtype in LOW for t in plain):
        with contextlib.suppress(RuntimeError):  # the op takes no float64: rounding alone counts
            exact = fn(*(t.clone().to(LOW.get(t.dtype, t.dtype)) for t in arguments))
    for i, (got, expected, true) in enumerate(zip(made, plain, exact, strict=True)):
        if found := _difference(got, expected, true):
            return "wrong", f"result {i} of {len(plain)}: {found}", said
    return "right", "", said


def _with_gradient(apply: Any, tensors: Sequence[Tensor], plain: Sequence[Tensor]) -> Any:
    """Results and gradients of the sum of results times weights; the weights are arguments after
    the op's own.
    """
    at = [i for i, t in enumerate(tensors) if t.is_floating_point()]

    def weighted(*values: Tensor) -> list[Tensor]:
        given, weights = list(values[: len(tensors)]), values[len(tensors) :]

        def loss(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            filled = list(given)
            for i, leaf in zip(at, leaves, strict=True):
                filled[i] = leaf
            out = apply(*filled)
            terms = [
                (t * w).sum()
                for t, w in zip((t for t in out if t.is_floating_point()), weights, strict=True)
            ]
            return reduce(torch.add, terms), out

        grads, out = torch.func.grad(loss, argnums=tuple(range(len(at))), has_aux=True)(
            *(given[i] for i in at)
        )
        return [*out, *grads]

    return weighted


def _weights(t: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, max(t.numel(), 1), dtype=t.dtype)[: t.numel()].reshape(t.shape)


def draw_spec(draw: random.Random, t: Tensor, axes: Sequence[str]) -> P:
    """Each axis cuts one dim, or none."""
    entries: list[list[str]] = [[] for _ in range(t.ndim)]
    for axis in axes:
        if t.ndim and draw.random() < 0.75:
            entries[draw.randrange(t.ndim)].append(axis)
    return P(*(tuple(e) if len(e) > 1 else e[0] if e else None for e in entries))


def _difference(got: Tensor, expected: Tensor, exact: Tensor) -> str:
    """How ``got`` differs from plain torch's result; ``exact`` is that of float64."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{tuple(got.shape)} {got.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    rounded = (0.0, room(expected.detach(), exact.detach())) if expected.dtype in LOW else None
    try:
        rtol, atol = rounded or (1e-7, 1e-8)
        torch.testing.assert_close(
            got.resolve_conj().resolve_neg(),
            expected.detach(),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            check_stride=False,
        )
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def cases(
    names: Iterable[str], count: int, every_mesh: bool
) -> Iterator[tuple[str, int, Any, str]]:
    """Every sample on every mesh, or each on the next mesh."""
    meshes = list(MESHES)
    turn = 0
    for name in names:
        for index, sample in samples(name, count):
            for mesh in meshes if every_mesh else [meshes[turn % len(meshes)]]:
                yield name, index, sample, mesh
            turn += 1


def sweep(
    names: Sequence[str], out: Path, count: int, every_mesh: bool, seconds: float = 3600.0
) -> list[Outcome]:
    """Run cases in child processes, another one after each native crash or hang."""
    out.unlink(missing_ok=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        command = [
            sys.executable,
            __file__,
            "--out",
            str(out),
            "--count",
            str(count),
            *(["--every-mesh"] if every_mesh else []),
            *names,
        ]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        last, since = -1, time.monotonic()
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            size = out.stat().st_size if out.exists() else 0
            if size != last:
                last, since = size, time.monotonic()
            elif time.monotonic() - since > 2 * SECONDS:
                break
        killed = child.poll() is None
        if killed:
            child.kill()
            child.wait()
        if child.returncode == 0:
            break
        with out.open("a") as f:
            f.write(
                json.dumps({"ended": "hung" if killed else "crashed", "code": child.returncode})
                + "\n"
            )
    return read(out)


def read(out: Path) -> list[Outcome]:
    """The outcomes in a worker's file; a case begun and not finished is what ended the worker."""
    found: list[Outcome] = []
    begun: dict[str, Any] | None = None
    for line in out.read_text().splitlines() if out.exists() else ():
        record = json.loads(line)
        if "begin" in record:
            begun = record["begin"]
        elif "ended" in record:
            if begun is not None:
                found.append(
                    Outcome(**begun, status=record["ended"], message=f"exit code {record['code']}")
                )
            begun = None
        else:
            found.append(Outcome(**{**record, "replicated": tuple(record["replicated"])}))
            begun = None
    return found


def summary(outcomes: Iterable[Outcome]) -> Counter[str]:
    return Counter(o.status for o in outcomes)


def _alarm(*_: Any) -> None:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2, help="samples per op")
    parser.add_argument("--every-mesh", action="store_true")
    parser.add_argument("--part", default="0/1", help="such as 0/2: the first of two parts")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    names = options.names or op_names()[part::parts]
    done = {(o.op, o.sample, o.mesh) for o in read(options.out)}
    signal.signal(signal.SIGALRM, _alarm)
    with options.out.open("a", buffering=1) as f:
        for name, index, sample, mesh in cases(names, options.count, options.every_mesh):
            if (name, index, mesh) in done:
                continue
            f.write(json.dumps({"begin": {"op": name, "sample": index, "mesh": mesh}}) + "\n")
            signal.alarm(SECONDS)
            try:
                outcome = run_case(name, index, sample, mesh)
            except TimeoutError:
                outcome = Outcome(name, index, mesh, "hung", f"more than {SECONDS} s")
            except Exception as error:
                outcome = Outcome(
                    name,
                    index,
                    mesh,
                    "crashed",
                    f"in the sweep itself: {type(error).__name__}: {error}",
                )
            signal.alarm(0)
            f.write(json.dumps(asdict(outcome)) + "\n")


if __name__ == "__main__":
    main()
