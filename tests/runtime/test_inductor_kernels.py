"""Kernels of inductor as ftp compiles them."""

from typing import Any

import pytest
import torch
from torch import fx

from ftp.runtime import inductor_kernels
from ftp.runtime.compile import compiled
from ftp.runtime.inductor_kernels import with_numbers_read_once

aten = torch.ops.aten
KERNEL = """#include <x.h>
extern "C"  void  kernel(const int64_t* in_ptr0,
                       const int64_t* in_ptr1,
                       float* out_ptr0)
{
    auto tmp0 = in_ptr0[static_cast<int64_t>(0L)];
    out_ptr0[static_cast<int64_t>(x0)] = tmp0 + in_ptr1[static_cast<int64_t>(x0)];
}
"""


def test_a_number_is_read_before_the_loops():
    found = with_numbers_read_once(KERNEL)
    assert found == KERNEL.replace(
        "auto tmp0 = in_ptr0[static_cast<int64_t>(0L)]", "auto tmp0 = in_ptr0_0"
    ).replace("\n{", "\n{\n    const int64_t in_ptr0_0 = in_ptr0 ? *in_ptr0 : 0;")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float* out_ptr0", "int64_t* out_ptr0"),  # may be the memory of the number
        ("tmp0 + ", "tmp0 + in_ptr0[static_cast<int64_t>(x0)] + "),
        ("const int64_t* in_ptr0", "const int32_t* in_ptr0"),
        ("kernel(", "other("),
    ],
)
def test_other_kernels_stay(old: str, new: str):
    source = KERNEL.replace(old, new)
    assert source != KERNEL
    assert with_numbers_read_once(source) == source


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's, as it is imported
def test_a_mask_reads_its_offset_once(monkeypatch: pytest.MonkeyPatch):
    """A read in the loop takes a tenth of the kernel's time."""
    sources: list[str] = []
    load = inductor_kernels._load

    def noted(kernels: Any) -> Any:
        sources.extend(kernel.source for kernel in kernels)
        return load(kernels)

    monkeypatch.setattr(inductor_kernels, "_load", noted)
    graph = fx.Graph()
    x, offset = graph.placeholder("x"), graph.placeholder("offset")
    rows, columns = (graph.call_function(aten.arange.default, (n,)) for n in (3, 5))
    at = graph.call_function(aten.add.Scalar, (rows, offset))
    column = graph.call_function(aten.unsqueeze.default, (at, 1))
    held = graph.call_function(aten.ge.Tensor, (column, columns))
    graph.output((graph.call_function(aten.where.ScalarOther, (held, x, 0.0)),))
    given = torch.ones(3, 5), 1
    run = compiled(graph, given, (), lambda matmuls: ())
    assert torch.equal(run(given)[0], torch.ones(3, 5).tril(1))
    (source,) = sources
    assert "const int64_t in_ptr0_0 = " in source and source.count("in_ptr0[") == 0
