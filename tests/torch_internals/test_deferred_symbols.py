"""sympy and torch's module of symbolic sizes are loaded where a size is symbolic; what stands for
them answers as they do.
"""

import pytest
from own_process import check  # type: ignore[import-not-found]

A_STEP = """
import sys, torch, ftp
from ftp import P
from ftp.torch_internals.deferred_symbols import SHAPES

def loaded():
    names = "sympy.core", "torch.utils._sympy", "torch.distributed.tensor"
    return [name for name in names if name in sys.modules]

mesh = ftp.simulated_mesh((2,), ("tp",))
model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 6), torch.nn.SiLU())
fn, params = ftp.functionalize(model)
specs = ftp.plan(params, {"0.*": P(), "1.*": P("tp")})

def loss(params, x):
    heads = fn(params, x).unflatten(-1, (2, 3)).transpose(2, 3).flatten(2)
    return torch.nn.functional.cross_entropy(heads.flatten(0, 1), x.flatten())

x = torch.arange(6).view(2, 3)
step = ftp.shard(loss, mesh, specs, batch_specs=P())
found, expected = step(params, x)[0], loss(params, x)
print(torch.allclose(found, expected), loaded(), type(sys.modules[SHAPES]).__name__)

# A function that was kept, asked about a symbolic size.
from torch.fx.experimental.symbolic_shapes import sym_eq
print(sym_eq((2, 3), torch.Size((2, 3))), sym_eq([2], [3]), loaded())
dims = {1: torch.export.Dim("S", max=64)}
sizes = ftp.shard(loss, mesh, specs, batch_specs=P(), dynamic_shapes=dims)
values = [torch.arange(2 * n).view(2, n) % 4 for n in (3, 5, 7)]
is_right = all(torch.allclose(sizes(params, v)[0], loss(params, v)) for v in values)
print(is_right)
print(loaded()[:2], type(sys.modules[SHAPES]).__name__)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch._subclasses.fake_tensor import FakeTensorMode
mode = FakeTensorMode(shape_env=ShapeEnv())
context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
size = mode.from_tensor(torch.ones(5), symbolic_context=context).shape[0]
print(type(sym_eq(size, 4)).__name__)
"""

SYMPY = """
import sys, torch
from ftp.torch_internals import deferred_compiler
deferred_compiler.defer()
print("sympy.core" in sys.modules)
import {what}
print({expression}, type(sys.modules["sympy"]).__name__)
"""

THREADS = """
import importlib, sys, threading, torch
from ftp.torch_internals import deferred_compiler
deferred_compiler.defer()
asked = {
    "sympy": "Symbol",
    "torch.fx.experimental.symbolic_shapes": "ShapeEnv",
    "torch.utils._sympy.functions": "FloorDiv",
    "torch.utils._sympy.value_ranges": "ValueRanges",
}
sys.setswitchinterval(1e-5)
together, failed = threading.Barrier(4 * len(asked)), []

def ask(module, name):
    together.wait()
    try:
        getattr(importlib.import_module(module), name)
    except Exception as error:
        failed.append(error)

threads = [threading.Thread(target=ask, args=one) for _ in range(4) for one in asked.items()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
print(failed, any(thread.is_alive() for thread in threads))
"""

ANSWERS = """
import torch
from ftp.torch_internals import deferred_symbols
deferred_symbols.defer()
answers = dict(deferred_symbols._ANSWERS)
import sympy
sympy.S, torch.fx.experimental.symbolic_shapes.ShapeEnv
own = torch.fx.experimental.symbolic_shapes
bools, ints, tensor = [True, False], [0, 1, 7], torch.ones(2, 3)
calls = {
    **dict.fromkeys(("_iterate_exprs", "_iterate_nodes"), [*ints, (1, 2), tensor, None]),
    **dict.fromkeys(("expect_true", "statically_known_true", "guard_or_false"), bools),
    **dict.fromkeys(("guard_or_true", "guard_size_oblivious"), bools),
    **dict.fromkeys(("free_unbacked_symbols", "has_free_symbols"), [*ints, (1, 2), tensor]),
    "has_free_unbacked_symbols": [*ints, (1, 2), tensor],
    "guard_int": ints,
    "guard_scalar": [*ints, *bools, 0.5],
    "guarding_hint_or_throw": ints,
    "has_guarding_hint": [*ints, 0.5],
    "is_nested_int": ints,
    "is_symbolic": [*ints, 0.5, True],
}
pairs = {
    **dict.fromkeys(("sym_and", "sym_or"), [(a, b) for a in bools for b in bools]),
    "sym_eq": [(1, 1), (1, 2), ((1, 2), (1, 2)), ((1, 2), (1,)), (torch.Size((3,)), [3])],
}
def said(answer, given):
    found = answer(*given)
    return list(found) if hasattr(found, "__next__") else found
asked = {**{name: [(x,) for x in xs] for name, xs in calls.items()}, **pairs}
print(sorted(asked) == sorted(answers))
print(
    all(
        said(answers[name], given) == said(getattr(own, name), given)
        for name, all_given in asked.items()
        for given in all_given
    )
)
"""


def test_a_step_of_plain_sizes_loads_neither_sympy_nor_dtensor():
    expected = [
        "True [] _StandIn",
        "True False []",
        "True",
        "['sympy.core', 'torch.utils._sympy'] module",
        "SymBool",
    ]
    check(A_STEP, expected)


@pytest.mark.slow
def test_sympy_is_there_for_others():
    check(SYMPY.format(what="sympy", expression="sympy.Symbol('x') + 1"), ["False", "x + 1 module"])
    version = SYMPY.format(what="sympy", expression="bool(sympy.__version__)")
    check(version, ["False", "True module"])
    inside = SYMPY.format(what="sympy.core.symbol as s", expression="s.Symbol('x') * 2")
    check(inside, ["False", "2*x module"])


def test_threads_that_ask_at_once_wait_for_each_other():
    check(THREADS, ["[] False"])


def test_answers_about_plain_numbers_are_those_of_torch():
    check(ANSWERS, ["True", "True"])
