"""Plans of parallelize_module, one per style, argument and older helper, each with what torch is
given for the same thing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import titan  # type: ignore[import-not-found]
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from ftp import plans


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x * gate)))


class Net(nn.Module):
    """tokens (batch, seq) -> logits (batch, seq, vocab), with a keyword argument and a norm on
    the way.
    """

    def __init__(self, vocab: int = 32, dim: int = 16, hidden: int = 24):
        super().__init__()
        self.emb, self.norm, self.mlp, self.head = (
            nn.Embedding(vocab, dim),
            nn.LayerNorm(dim),
            Mlp(dim, hidden),
            nn.Linear(dim, vocab),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.emb(tokens))
        return self.head(self.mlp(x, gate=torch.sigmoid(x)))


@dataclass(frozen=True)
class Case:
    """``torch_plan`` is what ``parallelize_module`` is given, where that is not the plan itself."""

    name: str
    plan: dict[str, Any]
    torch_plan: dict[str, Any] | None = None
    build: Callable[[], nn.Module] = Net
    loss_parallel: bool = False


WHOLE, ROWS = Replicate(), Shard(1)
PAIR = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
SEQUENCE = {
    "emb": RowwiseParallel(input_layouts=WHOLE, output_layouts=ROWS),
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(
        input_layouts=ROWS,
        desired_input_layouts=WHOLE,
        input_kwarg_layouts={"gate": ROWS},
        desired_input_kwarg_layouts={"gate": WHOLE},
    ),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=ROWS),
    "head": ColwiseParallel(input_layouts=ROWS, output_layouts=WHOLE),
}
LATE = {
    "mlp": PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=ROWS),
    "head": ColwiseParallel(input_layouts=ROWS, output_layouts=WHOLE),
}
BOTH = SEQUENCE | {
    "mlp": PrepareModuleInputOutput(
        input_layouts=(ROWS,),
        desired_input_layouts=(WHOLE,),
        input_kwarg_layouts={"gate": ROWS},
        desired_input_kwarg_layouts={"gate": WHOLE},
        output_layouts=(ROWS,),
        desired_output_layouts=(WHOLE,),
    ),
    "head": ColwiseParallel(output_layouts=WHOLE),
}


class Stack(nn.Module):
    """A pair of layers between two of an even size, so that a plan may cut what enters and
    leaves the pair.
    """

    def __init__(self, dim: int = 16, hidden: int = 24):
        super().__init__()
        self.emb, self.mlp, self.head = (
            nn.Embedding(32, dim),
            nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim)),
            nn.Linear(dim, 32),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mlp(self.emb(tokens)))


def older(prepare_input: Any, prepare_output: Any) -> dict[str, Any]:
    """The embedding's rows before the pair and the head's columns behind it, so that each helper
    has something to do.
    """
    return {"mlp": plans.PairwiseParallel(prepare_input, prepare_output)}


def around(first: Any, last: Any) -> dict[str, Any]:
    """The same pair in today's styles."""
    return {
        "mlp.0": ColwiseParallel(input_layouts=first),
        "mlp.2": RowwiseParallel(output_layouts=last),
    }


def enters(layout: Any) -> dict[str, Any]:
    return {"emb": RowwiseParallel(input_layouts=WHOLE, output_layouts=layout)}


def leaves(layout: Any) -> dict[str, Any]:
    return {"head": ColwiseParallel(input_layouts=layout, output_layouts=WHOLE)}


OLDER = [
    Case(
        "PairwiseParallel(make_input_replicate_1d, make_output_tensor)",
        {"mlp": plans.PairwiseParallel()},
        around(WHOLE, WHOLE),
        Stack,
    ),
    Case(
        "PairwiseSequenceParallel(make_input_reshard_replicate, make_output_reshard_tensor)",
        {"mlp": plans.PairwiseSequenceParallel(), **enters(Shard(0)), **leaves(Shard(0))},
        around(Shard(0), Shard(0)) | enters(Shard(0)) | leaves(Shard(0)),
        Stack,
    ),
    Case(
        "make_input_shard_1d(dim=2), make_output_shard_1d(dim=1)",
        {
            "mlp.0": plans.older.ColwiseParallel(),
            "mlp.2": plans.older.RowwiseParallel(
                plans.make_input_shard_1d(dim=2), plans.make_output_shard_1d(dim=1)
            ),
            **leaves(ROWS),
        },
        around(WHOLE, ROWS) | leaves(ROWS),
        Stack,
    ),
    Case(
        "make_sharded_output_tensor, make_input_shard_1d_last_dim, make_output_replicate_1d",
        {
            "mlp.0": plans.older.ColwiseParallel(
                plans.make_input_replicate_1d, plans.make_sharded_output_tensor
            ),
            "mlp.2": plans.older.RowwiseParallel(
                plans.make_input_shard_1d_last_dim, plans.make_output_replicate_1d
            ),
        },
        around(WHOLE, WHOLE),
        Stack,
    ),
    Case(
        "make_output_reshard_tensor",
        older(plans.make_input_replicate_1d, plans.make_output_reshard_tensor) | leaves(Shard(0)),
        around(WHOLE, Shard(0)) | leaves(Shard(0)),
        Stack,
    ),
]
STYLES = [
    Case("ColwiseParallel, RowwiseParallel", PAIR),
    Case(
        "ColwiseParallel(output_layouts=Replicate())",
        {"head": ColwiseParallel(output_layouts=WHOLE)},
    ),
    Case(
        "RowwiseParallel(input_layouts=Replicate())", {"head": RowwiseParallel(input_layouts=WHOLE)}
    ),
    Case("RowwiseParallel of an embedding", {"emb": RowwiseParallel(input_layouts=WHOLE)}),
    Case("ColwiseParallel of an embedding", {"emb": ColwiseParallel(output_layouts=WHOLE)}),
    Case("SequenceParallel, PrepareModuleInput", SEQUENCE),
    Case("PrepareModuleOutput", PAIR | LATE),
    Case("PrepareModuleInputOutput", BOTH),
    Case(
        "use_local_output=False",
        PAIR
        | {
            "mlp.down": RowwiseParallel(use_local_output=False),
            "head": ColwiseParallel(output_layouts=WHOLE),
        },
    ),
]
TORCHTITAN = [
    Case(
        "torchtitan's"
        f" Llama{', sequence parallel' if sequence else ''}{', loss parallel' if loss else ''}",
        titan.plan(sequence, loss),
        build=lambda: titan.Transformer(titan.Config(layers=1)),
        loss_parallel=loss,
    )
    for sequence in (False, True)
    for loss in (False, True)
]
CASES = STYLES + OLDER + TORCHTITAN
