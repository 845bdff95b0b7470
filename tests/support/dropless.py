"""A mixture of experts as a loop over experts, as programs write it, and what it takes."""

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


# Dropless layers as programs write them.


def transformers_form(p: Any, x: torch.Tensor, k: int) -> torch.Tensor:
    weights, experts = routed(p, x, k)
    ids, order = torch.sort(experts.reshape(-1))
    count = p["up"].shape[0]
    offs = torch.histc(ids.float(), count, 0, count - 1).cumsum(0, dtype=torch.int32)
    y = F.silu(torch._grouped_mm(x[order // k], p["up"], offs=offs))
    y = torch._grouped_mm(y, p["down"], offs=offs) * weights.reshape(-1)[order][:, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return y[inverse].view(-1, k, DIM).sum(1)


def torchtitan_form(p: Any, x: torch.Tensor, k: int) -> torch.Tensor:
    weights, experts = routed(p, x, k)
    order = experts.flatten().argsort(stable=True)
    offs = F.one_hot(experts, p["up"].shape[0]).sum((0, 1)).cumsum(0).to(torch.int32)
    rows = (order // k)[:, None].expand(-1, DIM)
    y = F.silu(F.grouped_mm(x.gather(0, rows), p["up"], offs=offs))
    y = F.grouped_mm(y, p["down"], offs=offs) * weights.flatten()[order][:, None]
    return torch.zeros_like(x).scatter_add(0, rows, y)


def megatron_form(p: Any, x: torch.Tensor, k: int) -> torch.Tensor:
    """A routing map, token indices by ``masked`` sort, and index_add."""
    weights, experts = routed(p, x, k)
    chosen = torch.zeros(len(x), p["up"].shape[0], dtype=torch.bool).scatter(1, experts, True)
    gates = torch.zeros_like(chosen, dtype=x.dtype).scatter(1, experts, weights)
    by_expert = chosen.t().flatten()
    places = by_expert.to(torch.int64).argsort(descending=True, stable=True)[: len(x) * k]
    tokens = places % len(x)
    offs = chosen.sum(0).cumsum(0).to(torch.int32)
    y = torch._grouped_mm(x.index_select(0, tokens), p["up"], offs=offs)
    y = torch._grouped_mm(F.silu(y), p["down"], offs=offs)
    y = y * gates.t().flatten()[places][:, None]
    return torch.zeros_like(x).index_add(0, tokens, y)


FORMS = {f.__name__: f for f in (transformers_form, torchtitan_form, megatron_form)}
