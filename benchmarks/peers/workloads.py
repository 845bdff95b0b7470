"""The three train steps that are timed: a toy MLP and two Llama-style decoders, with their data; no
torch.distributed in here.

Every peer starts from the weights of `module` and sees the batches of `batch`, so that losses can
be compared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import models  # type: ignore[import-not-found]
import torch
from torch import Tensor, nn
from torch.nn import functional as F

RATE = 1e-3  # of AdamW; its other options are torch's own
BATCHES = 4  # distinct ones, in turn


@dataclass(frozen=True)
class Workload:
    """``rows`` is (batch,) of the MLP and (batch, seq) of a decoder; ``collectives`` is what one
    step takes at the least.
    """

    name: str
    cfg: models.LlamaConfig | None
    rows: tuple[int, ...]
    collectives: int

    @property
    def nbytes(self) -> int:
        """What the program by hand sends: activations of every block twice, forward and backward,
        those of the embedding and of the head, and three numbers a token for the loss.
        """
        if self.cfg is None:
            return 4 * self.rows[0] * 5
        return 4 * math.prod(self.rows) * ((2 + 4 * self.cfg.layers) * self.cfg.dim + 3)


WORKLOADS = {
    "W1": Workload("W1", None, (20,), 1),
    "W2": Workload(
        "W2", models.LlamaConfig(vocab=4096, dim=256, layers=4, heads=8, hidden=704), (4, 128), 20
    ),
    "W3": Workload(
        "W3",
        models.LlamaConfig(vocab=16384, dim=768, layers=6, heads=12, hidden=2048),
        (2, 256),
        28,
    ),
}


class Toy(nn.Module):
    """The model of PyTorch's tensor parallel tutorial."""

    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(F.relu(self.net1(x)))


def module(work: Workload) -> nn.Module:
    if work.cfg is not None:
        return models.build(work.cfg)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Toy()


def batch(work: Workload, index: int) -> tuple[Tensor, Tensor]:
    if work.cfg is not None:
        return models.lm_batch(work.cfg, *work.rows, seed=index)
    generator = torch.Generator().manual_seed(index)
    return torch.randn(*work.rows, 10, generator=generator), torch.randn(
        *work.rows, 5, generator=generator
    )


def loss_of(work: Workload) -> Callable[[Tensor, Tensor], Tensor]:
    """From the model's output and the targets."""
    if work.cfg is None:
        return F.mse_loss
    return lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def as_arrays(work: Workload) -> dict[str, Any]:
    """Weights (``p.<name>``) and batches (``x0``, ``y0``, ...) as numpy arrays, for peers
    without torch.
    """
    found: dict[str, Any] = {
        f"p.{name}": p.detach().numpy() for name, p in module(work).named_parameters()
    }
    for i in range(BATCHES):
        found |= {f"{kind}{i}": t.numpy() for kind, t in zip("xy", batch(work, i), strict=True)}
    return found


def reference(work: Workload, steps: int) -> list[float]:
    """The losses of the first steps on one device, in float64."""
    model, loss_fn = module(work).double(), loss_of(work)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for i in range(steps):
        x, y = (t.double() if t.is_floating_point() else t for t in batch(work, i % BATCHES))
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


Step = Callable[[Any], Any]
"""Takes a batch, changes the weights that the peer keeps, returns the loss."""
