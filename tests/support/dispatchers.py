"""Dispatchers of dropless experts written by hand, right and with faults."""

from typing import Any

import torch
import torch.nn.functional as F
from dropless import routed

import ftp

EXPERTS, RANKS = 4, 2


def own_experts(rows: torch.Tensor, own: torch.Tensor, parts: Any) -> torch.Tensor:
    up, down = parts
    order = own.argsort(stable=True)
    offs = (own[:, None] <= torch.arange(up.shape[0])).sum(0).to(torch.int32)
    y = F.grouped_mm(F.silu(F.grouped_mm(rows[order], up, offs=offs)), down, offs=offs)
    return torch.zeros_like(rows).index_copy(0, order, y)


def by_hand(k: int, mutant: str = "") -> Any:
    """A dispatcher by ``ftp.axis.all_to_all``, of four experts on two ranks."""

    def program(p: Any, x: torch.Tensor) -> torch.Tensor:
        favour = p["favour"] * (RANKS if mutant == "bias once per rank" else 1)
        weights, experts = routed({**p, "favour": favour}, x, k)
        if mutant == "router gradient":
            weights = weights.detach()
        slots = experts.flatten()
        owner = slots % RANKS if mutant == "owner" else slots // (EXPERTS // RANKS)
        if mutant == "next owner":
            owner = (owner + 1) % RANKS
        order = (owner if mutant == "order" else slots).argsort(stable=True)
        counts = F.one_hot(owner, RANKS).sum(0)
        of_expert = F.one_hot(slots, EXPERTS).sum(0)
        sent = x[order // k]
        if mutant == "dropped":  # the last row sent
            sent = F.pad(sent[:-1], (0, 0, 0, 1))
        rows = ftp.axis.all_to_all(sent, "ep", send_counts=counts)
        arrived = ftp.axis.all_to_all(of_expert, "ep")
        at = torch.arange(len(rows))
        place = torch.searchsorted(arrived.cumsum(0), at, right=True)
        own = torch.where(place < EXPERTS, place % (EXPERTS // RANKS), EXPERTS // RANKS)
        if mutant == "next expert":
            own = torch.where(own < 2, 1 - own, own)
        made = own_experts(rows, own, [p["up"], p["down"]])
        back = counts if mutant == "counts" else ftp.axis.all_to_all(counts, "ep")
        if mutant == "another step":  # the first batch's routing was equal on all ranks
            back = torch.full_like(back, len(slots) // RANKS)
        returned = ftp.axis.all_to_all(made, "ep", send_counts=back, bound=len(slots))
        returned = returned * weights.flatten()[order][:, None]
        if mutant == "return order":
            returned = returned.flip(0)
        if mutant == "summed twice":
            returned = returned + returned
        if mutant == "rows of the first range":
            returned = torch.where((slots[order] < 2)[:, None], returned, 0)
        wrong = {"token": torch.arange(len(slots)), "inverse": order.argsort()}
        token = wrong.get(mutant, order) // k
        return torch.zeros_like(x).index_add(0, token, returned)

    return program
