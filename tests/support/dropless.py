"""A mixture of experts as a loop over experts, and what it takes."""

from typing import Any

import torch
import torch.nn.functional as F

DIM, HIDDEN = 4, 6


def routed(p: Any, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's ``k`` experts and their weights."""
    weights, experts = ((x @ p["router"]).softmax(-1) + p["favour"]).topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), experts


def loop(p: Any, x: torch.Tensor, k: int) -> torch.Tensor:
    """The reference: each expert on all tokens, weighted by what the router gives it."""
    weights, experts = routed(p, x, k)
    out = torch.zeros_like(x)
    for e in range(p["up"].shape[0]):
        made = F.silu(x @ p["up"][e]) @ p["down"][e]
        out = out + made * (weights * (experts == e)).sum(-1, keepdim=True)
    return out


def drawn(experts: int, tokens: int, favoured: int | None, seed: int) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    favour = torch.zeros(experts, dtype=torch.float64)
    if favoured is not None:
        favour[favoured] = 10.0
    params = {
        "router": randn(DIM, experts),
        "up": randn(experts, DIM, HIDDEN),
        "down": randn(experts, HIDDEN, DIM),
        "favour": favour,
    }
    return params, randn(tokens, DIM)
