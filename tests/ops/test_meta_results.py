"""Results from metadata have the shapes, strides and dtypes that torch's fake tensors find."""

import pytest
import torch
from torch.utils import _pytree as pytree

from ftp.ops import meta_results
from ftp.ops.fused_optimizer import ADAMW
from ftp.ops.meta_results import is_plain, meta_result
from ftp.torch_internals.fake_tensors import FakeTensorMode

aten = torch.ops.aten
X, ROWS = torch.randn(4, 6), torch.arange(4)
ADAMW_OPTIONS = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False,
    "maximize": False,
}  # fmt: skip
CALLS = {
    "embedding_dense_backward": (aten.embedding_dense_backward.default, (X, ROWS, 9, -1, False)),
    "empty_like": (aten.empty_like.default, (X.t(),)),
    "empty_like contiguous": (
        aten.empty_like.default, (X.t(),), {"memory_format": torch.contiguous_format},
    ),
    "empty_like of gaps": (aten.empty_like.default, (X[:, ::2],)),
    "fill_": (aten.fill_.Scalar, (X.clone(), 2.0)),
    "new_full": (aten.new_full.default, (X, [3, 2], 1.0), {"dtype": torch.float64}),
    "nll_loss_backward": (
        aten.nll_loss_backward.default,
        (torch.tensor(1.0), X, ROWS, None, 1, -100, torch.tensor(4.0)),
    ),
    "ones_like": (aten.ones_like.default, (X.t(),), {"dtype": torch.int64}),
    "ones_like of an expanded": (aten.ones_like.default, (X[:, :1].expand(4, 6),)),
    "scatter_add": (aten.scatter_add.default, (X, 1, ROWS[:, None], X)),
    "scatter_add of a transposed": (aten.scatter_add.default, (X.t(), 0, ROWS[None], X.t())),
    "split_with_sizes": (aten.split_with_sizes.default, (X, [1, 3], 0)),
    "zeros_like": (aten.zeros_like.default, (X.t(),), {"pin_memory": False}),
    "fused_adamw": (ADAMW, ([X, X, X.t(), X, torch.tensor(1.0)],), ADAMW_OPTIONS),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_fake_tensors(name: str) -> None:
    func, args, *rest = CALLS[name]
    assert is_plain(func)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, mode.from_tensor, (args, rest[0] if rest else {})
        )
        found, expected = meta_result(func, args, kwargs), func(*args, **kwargs)
    found, expected = ([x] if isinstance(x, torch.Tensor) else x for x in (found, expected))
    assert [(x.shape, x.stride(), x.dtype, x.storage_offset()) for x in found] == [
        (x.shape, x.stride(), x.dtype, x.storage_offset()) for x in expected
    ]


@pytest.mark.parametrize("func", sorted(meta_results._OF_ONE_LAYOUT, key=str), ids=str)
def test_elementwise_results_of_operands_of_one_layout(func) -> None:
    """They are those of the kernels for meta tensors, which are asked about other operands only."""
    whole = torch.rand(2, 3, dtype=torch.float64)
    odd = torch.rand(8)[:4].as_strided((1, 4), (7, 1))  # contiguous, of another stride
    taken = [whole, whole.half(), whole.bfloat16(), torch.rand(()), torch.rand(1, 4)]
    others = [whole.t(), odd, whole[:, :1].expand(2, 3), (whole * 9).long(), whole > 0.5, whole[:0]]
    for x, is_taken in [*((x, True) for x in taken), *((x, False) for x in others)]:
        count = sum("Tensor" in str(a.type) for a in func._schema.arguments)
        numbers = (
            func._schema.arguments[count : count + 1] if "Scalar" in func._overloadname else ()
        )
        seconds = [x, x.t().contiguous().t(), x.float(), x[None]] if count == 2 else [None]
        for second in seconds:
            given = [x, *([second] if count == 2 else []), *(2.0 for _ in numbers)]
            try:
                func(*given)
            except RuntimeError:  # neg of bools
                continue
            with FakeTensorMode() as mode:
                args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given]
                found, want = meta_result(func, args, {}), func(*args)
                is_known = meta_results._of_one_layout(args) is not None
            if found is not None:
                assert (found.shape, found.stride(), found.dtype) == (
                    want.shape, want.stride(), want.dtype,
                )  # fmt: skip
            is_alike = second is None or (second.shape, second.stride(), second.dtype) == (
                x.shape, x.stride(), x.dtype,
            )  # fmt: skip
            assert is_known == (is_taken and is_alike), (given, is_known)


def test_an_update_is_contiguous() -> None:
    """As its kernel takes operands, whose order in memory it does not read."""
    given = [X.t(), X.t(), X.t(), X.t(), torch.tensor(1.0)]
    with FakeTensorMode() as mode:
        found = meta_result(ADAMW, ([mode.from_tensor(x) for x in given],), ADAMW_OPTIONS)
    assert [x.stride() for x in found] == [x.stride() for x in ADAMW(given, **ADAMW_OPTIONS)]
