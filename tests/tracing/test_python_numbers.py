"""What Python code makes of a dynamic size is what it makes of the number."""

import copy
import fractions
import functools
import json
import math
import numbers
import operator
import struct

import numpy as np
import pytest
import torch
from few_or_many import slow_after

import ftp
from ftp import P

pytestmark = pytest.mark.filterwarnings("ignore:dynamic_shapes. every size:UserWarning")
MESH = ftp.simulated_mesh((2,), ("tp",))
DIMS = {1: torch.export.Dim("S", min=1, max=512)}


def _matched(n):
    match n:
        case 9:
            return 5
        case int():
            return 2
        case _:
            return 3


@functools.lru_cache
def _cached(n):
    return n + 1


def _by_class(n):
    return 2 if isinstance(n, int) else 3


TEXTS = {
    "str": lambda n: len(str(n)),
    "repr": lambda n: len(repr((n, n))),
    "shape": lambda n, x: len(str(x.shape)),
    "f-string": lambda n: int(f"{n}{n + 1}"),
    "spec": lambda n: len(f"{n:5d}") + int(f"{n:03d}"),
    "format": lambda n: int("{}{:d}".format(n, n)),  # noqa: UP032
    "%d": lambda n: int("%d" % n),  # noqa: UP031
    "%s": lambda n: int("%s" % n),  # noqa: UP031
    "join": lambda n: len("".join(map(str, range(2))) + str(n // 2)),
    "float": lambda n: float(f"{n / 4}") + float(f"{n / 4:.2f}") + len(str(n / 3)),
    "bool": lambda n: len(str(n > 9)) + len(f"{n > 9}"),
    "json": lambda n: len(json.dumps({"n": n})) + len(json.dumps([str(n)])),
    "bytes": lambda n: sum(str(n).encode()),
    "hash of text": lambda n: hash(str(n)) % 7,
    "key of text": lambda n: {"9": 2.0, "12": 3.0}.get(f"{n}", 4.0),
    "bin": lambda n: len(bin(n)) + len(hex(n)) + n.bit_length(),
}
CLASSES = {
    "type": lambda n: 2 if type(n) is int and type(n / 2) is float else 3,
    "type of a range": lambda n: 2 if type(range(0, n, 2)) is range else 3,
    "isinstance": _by_class,
    "isinstance of several": lambda n: 2 if isinstance(n, (str, int)) else 3,
    "isinstance of a float": lambda n: 2 if isinstance(n / 2, float) else 3,
    "isinstance of a bool": lambda n: 2 if isinstance(n > 3, bool) else 3,
    "a number": lambda n: 2 if isinstance(n, numbers.Integral) else 3,
    "__class__": lambda n: 2 if n.__class__ is int else 3,
    "match": _matched,
    "isscalar": lambda n: 2 if np.isscalar(n) else 3,
}
KEYS = {
    "hash": lambda n: hash(n) % 7,
    "dict": lambda n: {9: 2.0, 12: 3.0}.get(n, 4.0),
    "set": lambda n: 2 if n in {6, 12} else 3,
    "list": lambda n: 2 if n in [6, 12] else 3,
    "range": lambda n: 2 if n in range(8, 20) else 3,
    "table": lambda n: list(range(200))[n] + sum(range(n)),
    "cache": _cached,
    "a range": lambda n: sum(range(n)) + sum(range(2, n, 5)) + sum(range(n, 0, -7)),
    "parts of a range": lambda n: range(n)[n // 2] + range(0, n, 4)[-1] + len(range(n)[1:]),
    "in a range": lambda n: 2 if n - 1 in range(0, n, 2) else 3,
    "range of floats": lambda n: sum(float(i) for i in reversed(range(0, n, 3))) + float(n),
    "repeat": lambda n: len("ab" * n) + len([0] * n),
}
NUMBERS = {
    "int64": lambda n: int(np.int64(n) * 2),
    "prod": lambda n, x: int(np.array(x.shape).prod()),
    "np.prod": lambda n, x: int(np.prod(x.shape)),
    "zeros": lambda n: np.zeros((n, 2)).size,
    "linspace": lambda n: float(np.linspace(0, 1, n).sum()),
    "np.log": lambda n: float(np.log(n)),
    "ceil": lambda n: math.ceil(n / 4) + math.floor(n / 4) + math.trunc(n / 4) + round(n / 4),
    "int of int": lambda n: int(n) + int(n // 2) + int(n > 3) + int("7") + int("a", 16),
    "float": lambda n: float(n) + float(n / 3) + float(n > 4) + float("1.5"),
    "int": lambda n: int(n / 3) + int(n * 0.7) + round(n * 0.3, 1),
    "functions": lambda n: math.sqrt(n) + math.log10(n) + math.pow(n, 0.5) + math.cos(n),
    "integers": lambda n: math.gcd(n, 12) + math.isqrt(n) + math.comb(n, 2) + math.lcm(n, 6),
    "floats": lambda n: math.hypot(n, 1) + math.fsum([n, 0.5]) + math.copysign(1, n),
    "divmod": lambda n: sum(divmod(n, 4)) + sum(divmod(n, 2.5)),
    "pow": lambda n: pow(n, 2, 7) + n**2 + n**-1 + 2 ** (n % 5),
    "bits": lambda n: (n ^ 5) + (n | 1) + (n & 6) + (n << 1) + (n >> 1) + ~n,
    "complex": lambda n: abs(complex(n, 1)) + n.real + n.numerator,
    "most": lambda n: max(n, 8) + min(n, 10) + sum([n, 1]) + abs(n - 9) + sorted([n, 8, 30])[1],
    "index": lambda n: operator.index(n) + struct.unpack("i", struct.pack("i", n))[0],
    "fraction": lambda n: float(fractions.Fraction(n, 7)),
    "ratio": lambda n: n.as_integer_ratio()[0] / 3,
    "copy": lambda n: copy.copy(n) + copy.deepcopy(n),
    "truth": lambda n: (not n) + bool(n - 9) + (n and 2) + (1 if n == 9.0 else 4),
    "floor": lambda n: n // 2.0 + n % 2.5 + -n // 4 + -n % 4,
}
FORMS = {**TEXTS, **CLASSES, **KEYS, **NUMBERS}
_TAKES_X = ("shape", "prod", "np.prod")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("names", "as_int"), slow_after(1, [(True, False), (True, True), (False, False), (False, True)])
)
def test_a_size_is_the_number_that_it_is(form, names, as_int):
    def loss(w, x):
        n = int(x.shape[1]) if as_int else x.shape[1]
        number = FORMS[form](n, x) if form in _TAKES_X else FORMS[form](n)
        return (x @ w).sin().sum() * number

    step = ftp.shard(loss, MESH, P(None, "tp"), dynamic_shapes=DIMS if names else None)
    w = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    for size in (9, 12, 6, 103, 1, 9):
        x = torch.linspace(-2, 3, 8 * size, dtype=torch.float64).reshape(2, size, 4)
        leaf = w.clone().requires_grad_()
        expected = loss(leaf, x)
        value, grad = step(w, x)
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(grad, torch.autograd.grad(expected, leaf)[0])


def test_a_class_is_asked_for_at_all_sizes_by_one_trace():
    def loss(w, x):
        n = x.shape[1]
        assert isinstance(n, int) and isinstance(n, torch.SymInt | int)
        return (x @ w).sum() * n

    step = ftp.shard(loss, MESH, P(None, "tp"), dynamic_shapes=DIMS)
    w = torch.eye(4, dtype=torch.float64)
    for size in (9, 12, 6):
        x = torch.ones(2, size, 4, dtype=torch.float64)
        assert step(w, x)[0] == loss(w, x)
    assert step.shapes.traces == 1 and not step.shapes.one_by_one
    assert "__class__" not in vars(torch.SymInt)


def test_the_derivative_of_a_product_with_a_complex_number():
    """Autograd multiplies by the conjugate of the number."""
    x = torch.linspace(-1, 1, 15, dtype=torch.complex128).view(5, 3)
    step = ftp.shard(
        lambda x: (x * (1 + 2j)).imag.sin().sum(), ftp.simulated_mesh((3,), ("tp",)), P("tp")
    )
    expected = torch.func.grad(lambda x: (x * (1 + 2j)).imag.sin().sum())(x)
    torch.testing.assert_close(step(x)[1], expected)
