"""A program of many sizes: a rank's graph is prepared once for all sizes that it serves."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import ftp
from ftp import P
from ftp.runtime import sized_program


def attention(q: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()


def test_attention_between_parts_of_a_sequence_is_prepared_for_all_sizes(monkeypatch):
    made, for_eager = [], sized_program.for_eager
    monkeypatch.setattr(
        sized_program, "for_eager", lambda *args: made.append(args) or for_eager(*args)
    )
    mesh, spec = ftp.simulated_mesh((2,), ("cp",)), P(None, None, "cp")
    dims = {2: torch.export.Dim("S", min=2)}
    step = ftp.spmd(
        torch.func.grad_and_value(attention), mesh, spec, certify=True, dynamic_shapes=dims
    )
    for size in (7, 9, 13, 21):
        q = torch.randn(2, 2, size, 4, dtype=torch.float64)
        torch.testing.assert_close(step(q), torch.func.grad_and_value(attention)(q))
    assert len(made) == 2 and not step.shapes.one_by_one  # the longer shard, and the shorter one
