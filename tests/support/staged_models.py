"""Models of several layers for tests of pipelines, and their steps on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ftp.optim import accumulate

WIDTH, VOCABULARY = 8, 11


@dataclass(frozen=True)
class Model:
    """A language model of residual layers.

    Attributes:
        tied: whether the head is the embedding.
        skips: whether every layer reads the embedding too, which stages must pass along.
        scaled: whether there is a 0-d parameter.
        attends: whether every layer has causal attention.
        experts: of every layer, each token weighted over all of them.
    """

    layers: int
    tied: bool = False
    skips: bool = False
    scaled: bool = False
    attends: bool = False
    experts: int = 0

    def params(self) -> dict[str, Any]:
        g = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64) / 3

        made: dict[str, Any] = {"emb": draw(VOCABULARY, WIDTH)}
        if self.scaled:
            made["scale"] = draw() + 1
        made["layers"] = [
            {
                "norm": draw(WIDTH) + 1,
                "up": draw(WIDTH, 12),
                "bias": draw(12),
                "down": draw(12, WIDTH),
                **(
                    {"gate": draw(WIDTH, self.experts), "experts": draw(self.experts, WIDTH, WIDTH)}
                    if self.experts
                    else {}
                ),
            }
            for _ in range(self.layers)
        ]
        made["norm"] = draw(WIDTH) + 1
        if not self.tied:
            made["head"] = draw(VOCABULARY, WIDTH)
        return made

    def loss(self, params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        x = first = params["emb"][tokens]
        for layer in params["layers"]:
            n = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer["norm"]
            n = n + first if self.skips else n
            if self.attends:
                heads = n.unflatten(-1, (2, -1)).transpose(1, 2)
                found = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
                n = n + found.transpose(1, 2).flatten(2)
            if self.experts:
                each = torch.einsum("rtd,edf->retf", n, layer["experts"])
                n = n + torch.einsum("retf,rte->rtf", each, (n @ layer["gate"]).softmax(-1))
            x = x + F.gelu(n @ layer["up"] + layer["bias"]) @ layer["down"]
        x = F.layer_norm(x, (WIDTH,), params["norm"])
        x = x * params["scale"] if self.scaled else x
        logits = x @ params.get("head", params["emb"]).t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(1)
        made = torch.randint(VOCABULARY, (2, rows, 5), generator=g)
        return made[0], made[1]

    def on_one_device(self, microbatches: int, rows: int) -> tuple[Tensor, Any]:
        """Loss and gradients by plain torch."""
        grads, loss = accumulate(torch.func.grad_and_value(self.loss), microbatches)(
            self.params(), *self.batch(rows)
        )
        return loss, grads


def plan_of(params: Any, spec_of: Callable[[str], Any]) -> Any:
    """A spec for each parameter, from its last key."""
    layers = [{name: spec_of(name) for name in layer} for layer in params["layers"]]
    return {name: layers if name == "layers" else spec_of(name) for name in params}
