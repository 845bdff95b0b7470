"""Results from metadata have the shapes, strides and dtypes that torch's fake tensors find."""

import pytest
import torch
from torch.utils import _pytree as pytree

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


def test_an_update_is_contiguous() -> None:
    """As its kernel takes operands, whose order in memory it does not read."""
    given = [X.t(), X.t(), X.t(), X.t(), torch.tensor(1.0)]
    with FakeTensorMode() as mode:
        found = meta_result(ADAMW, ([mode.from_tensor(x) for x in given],), ADAMW_OPTIONS)
    assert [x.stride() for x in found] == [x.stride() for x in ADAMW(given, **ADAMW_OPTIONS)]
