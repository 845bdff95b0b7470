"""Measured memory of attention along a cut sequence, beside what a report says: ``python
attention_memory_run.py LENGTH RANKS`` prints a line of JSON for each program.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from memory_run import measured
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ftp
from ftp import P
from ftp.random.draws import Draws

HARDWARE = {
    "ring": ftp.Hardware(flops=1e3, ring_step=0.0),
    "gather": ftp.Hardware(ring_step=1.0),
}
"""On which a plan takes either form."""


def programs(length: int) -> dict[str, Callable[..., Tensor]]:
    """Attention of each kind; no part of the one long document sees nothing, so that what is
    computed does not depend on values.
    """
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 1000), None, None, length, length, "cpu"
    )
    ends = torch.tensor([0, length], dtype=torch.int32)

    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def window(q, k, v):
        return flex_attention(q, k, v, block_mask=mask)

    def alibi(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i) * 0.1)

    def dropped(q, k, v):
        with Draws(ftp.random.key(0), "attention"):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)

    def packed(q, k, v):
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        out = varlen_attn(*rows, ends, None, length, length, window_size=(-1, 0))
        return out.transpose(0, 1).unsqueeze(0)  # type: ignore[union-attr]

    return {
        "causal": causal,
        "window": window,
        "alibi": alibi,
        "dropped": dropped,
        "packed": packed,
    }


def gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    out, vjp = torch.func.vjp(attend, q, k, v)
    return out, *vjp(g)


def main(length: int, ranks: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh, cut = ftp.make_mesh((ranks,), ("cp",)), P(None, None, ftp.zigzag("cp"))
    half = ("causal", "packed")  # also in half precision, whose sums are wider
    for name, attend in programs(length).items():
        for dtype in (torch.float32, torch.bfloat16) if name in half else (torch.float32,):
            x = torch.empty(1, 2, length, 64, dtype=dtype, device="meta")
            for form, hardware in HARDWARE.items():

                def run(q, k, v, g, attend=attend):
                    return gradients(attend, q, k, v, g)

                step = ftp.spmd(run, mesh, (cut,) * 4, (cut,) * 4, hardware=hardware)
                lowered = step.lower(*[x] * 4)
                kinds = ("parameters", "optimizer", "batch", "constants")
                inputs = sum(lowered.memory.totals.get(kind, 0) for kind in kinds)
                row = {
                    "name": f"{name}, {dtype}, {form}",
                    "ops": sorted({record.op for record in lowered.collectives}),
                    "predicted": int(lowered.memory) - inputs,
                    "measured": measured(lowered),
                }
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
