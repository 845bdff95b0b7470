"""Code of a rank's graph runs the graph as fx's own code does."""

import gc
import operator
import weakref
from typing import Any

import pytest
import torch
from torch import fx

import ftp
from ftp.runtime.direct_code import forward_of
from ftp.runtime.failed_op import failing

aten = torch.ops.aten


def graph_of_all_arguments() -> fx.Graph:
    """A graph whose calls have arguments of every kind."""
    graph = fx.Graph()
    x, y = graph.placeholder("_0"), graph.placeholder("y")
    full = graph.call_function(aten.full.default, ([2, 3], float("inf")), {"dtype": torch.float64})
    parts = graph.call_function(aten.split.Tensor, (x, 2))
    first = graph.call_function(operator.getitem, (parts, 0))
    place: Any = (slice(0, 2, None), ..., None)
    rows = graph.call_function(operator.getitem, (x, place))
    joined = graph.call_function(aten.cat.default, ([first, y], 0))
    data = graph.call_function(getattr, (joined, "data"))
    graph.call_function(aten.neg.default, (x,))  # which nothing reads
    summed = graph.call_function(aten.sum.dim_IntList, (data, [0], True), {"dtype": None})
    number = graph.call_function(operator.floordiv, (7, 2))
    scaled = graph.call_function(aten.mul.Scalar, (summed, number))
    same = graph.call_function(
        aten.clone.default, (scaled,), {"memory_format": torch.contiguous_format}
    )
    graph.output((full, rows, same, x, None, [scaled, {"k": -0.0}]))
    return graph


@pytest.mark.parametrize("empties", [False, True])
def test_results_are_those_of_fx(empties: bool) -> None:
    given = [torch.randn(4, 3), torch.randn(2, 3)]
    expected = fx.GraphModule({}, graph_of_all_arguments())(*given)
    run, taken = forward_of(graph_of_all_arguments(), empties=empties), list(given)
    found = run(taken) if empties else run(*taken)
    assert repr(found) == repr(expected)
    assert len(taken) == (0 if empties else 2)


def test_values_are_freed_after_their_last_use() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def made(x: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(new := x + 1))
        return new

    def counted(x: torch.Tensor) -> int:
        return sum(ref() is not None for ref in alive)

    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(made, (x,))
    second = graph.call_function(made, (first,))
    graph.call_function(made, (x,))
    count = graph.call_function(counted, (x,))
    graph.output((count, second))
    gc.collect()
    assert forward_of(graph)(torch.ones(2))[0] == 1


def test_the_failed_node_is_found() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    good = graph.call_function(aten.neg.default, (x,))
    bad = graph.call_function(aten.mm.default, (good, good))
    graph.output((bad,))
    with pytest.raises(RuntimeError) as caught:
        forward_of(graph)(torch.ones(2, 3))
    assert failing(caught.value) is bad


def test_graphs_with_attributes_run_by_the_code_of_fx() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x", default_value=3)
    graph.output((graph.call_function(operator.add, (x, 1)),))
    assert forward_of(graph)() == (4,)


def test_an_attribute_with_a_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(getattr, (x, "no_such", 3)))
    assert forward_of(graph)(torch.ones(1)) == 3


@pytest.mark.parametrize("compile", [False, True])
def test_inputs_are_named_as_in_code(compile: bool) -> None:
    def fn(torch: torch.Tensor, _0: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
        return torch * 2 + _0 - self.exp()

    given = [torch.randn(4) for _ in range(3)]
    step = ftp.spmd(fn, ftp.simulated_mesh(1, "tp"), (ftp.P(),) * 3, compile=compile)
    torch.testing.assert_close(step(*given), fn(*given))
