"""Offsets as tensors: values and dtypes are those of ops that read numbers."""

from typing import Any

import pytest
import torch
from torch import fx

from ftp.passes.buffer_reuse import with_values
from ftp.passes.offset_tensors import with_offset_tensors

aten = torch.ops.aten
OFFSET = 5


def rewritten(target: Any, x: torch.Tensor | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Results of one op that reads an offset, as a number and after the pass; the graph after it.

    Args:
        args: "offset" and "stop" stand for numbers among the inputs.
    """
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("x", "offset", "stop")}
    if x is None:
        graph.erase_node(nodes.pop("x"))
    given = [*([] if x is None else [x]), OFFSET, OFFSET + 2]
    numbers = dict(zip((nodes["offset"], nodes["stop"]), given[-2:], strict=True))
    operands = () if x is None else (nodes["x"],)
    called = [nodes[a] if isinstance(a, str) else a for a in args]
    graph.output((graph.call_function(target, (*operands, *called), kwargs),))
    due = fx.GraphModule({}, graph)(*given)[0]
    graph = with_values(fx.GraphModule({}, graph), given).graph
    held = with_offset_tensors(graph, numbers)
    graph.lint()
    return due, fx.GraphModule({}, graph)(*given, *held)[0], graph


def reads_a_number(graph: fx.Graph) -> bool:
    return any(node.users for node in graph.nodes if node.name in ("offset", "stop"))


DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (0,), (1,), ()], ids=str)
def test_arithmetic(shape: tuple[int, ...], dtype: torch.dtype):
    # torch subtracts from no bool.
    target = aten.add.Scalar if dtype == torch.bool else aten.sub.Scalar
    x = torch.arange(6)[: torch.Size(shape).numel()].view(shape).to(dtype)
    due, found, graph = rewritten(target, x, "offset")
    torch.testing.assert_close(found, due, rtol=0, atol=0)
    # A tensor without dims would make another dtype of int32; floats are no indices.
    is_number = due.is_floating_point() or (not shape and dtype in (torch.int32, torch.uint8))
    assert reads_a_number(graph) is is_number


def test_other_forms_of_arithmetic_keep_the_number():
    for args in (("offset", 2), (3, "offset")):
        due, found, graph = rewritten(aten.add.Scalar, torch.arange(3), *args)
        assert torch.equal(found, due) and reads_a_number(graph)
    due, found, graph = rewritten(aten.mul.Scalar, torch.arange(3), "offset")
    assert torch.equal(found, due) and reads_a_number(graph)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_an_offset(dtype: torch.dtype):
    for target, args in ((aten.full.default, ([], "offset")), (aten.scalar_tensor.default, ())):
        due, found, graph = rewritten(target, None, *(args or ("offset",)), dtype=dtype)
        torch.testing.assert_close(found, due, rtol=0, atol=0)
        assert not reads_a_number(graph)
    due, found, graph = rewritten(aten.full.default, None, [2], "offset", dtype=dtype)
    assert torch.equal(found, due) and reads_a_number(graph)


def test_a_result_is_not_the_offset_itself():
    """A caller may write to it."""
    _, _, graph = rewritten(aten.scalar_tensor.default, None, "offset", dtype=torch.int64)
    held = torch.tensor(OFFSET)
    fx.GraphModule({}, graph)(OFFSET, OFFSET + 2, held)[0].add_(1)
    assert held == OFFSET


def test_slices():
    x = torch.arange(40.0).view(8, 5)
    for form, is_number in ((x, True), (x[:1].expand(8, 5), False)):
        due, found, graph = rewritten(aten.slice.Tensor, form, 0, "offset", "stop")
        assert torch.equal(found, due) and reads_a_number(graph) is is_number
    due, found, graph = rewritten(aten.slice.Tensor, x[:1].expand(8, 5), 0, "offset", "stop", 2)
    assert torch.equal(found, due) and reads_a_number(graph), "with a step it stays"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_compiled_code_reads_the_tensor(dtype: torch.dtype):
    """Code that was compiled for one rank's offset gives the other ranks' results."""
    from ftp.runtime.compile import compiled

    x = torch.arange(37).to(dtype)
    graph = fx.Graph()
    given, offset = graph.placeholder("x"), graph.placeholder("offset")
    at = graph.call_function(aten.sub.Scalar, (given, offset))
    first = graph.call_function(aten.scalar_tensor.default, (offset,), {"dtype": torch.int64})
    held = graph.call_function(
        aten.bitwise_and.Tensor,
        (
            graph.call_function(aten.ge.Scalar, (at, 0)),
            graph.call_function(aten.eq.Scalar, (first, 0)),
        ),
    )
    graph.output((at, held, first))
    for start in (0, 1, 9):
        run = compiled(graph, [x, start], (), lambda matmuls: ())
        due = list(fx.GraphModule({}, graph)(x, start))
        for _ in range(2):
            found = run([x, start])
            torch.testing.assert_close(found, due, rtol=0, atol=0)
            found[2].add_(1)  # a caller may write to a result
