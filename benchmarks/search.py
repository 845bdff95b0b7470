"""CPU seconds of ``ftp.search`` by depth, free and within a limit that binds.

    python benchmarks/search.py --json

A small language model on a mesh of dp 2 and tp 2; the limit is ``SHARE`` of what the plan without
one holds. Each depth is a process of its own, on meta tensors: nothing is allocated.
"""

import time
from typing import Any

import torch
from record import command_line, options, run_case, save, show
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P

LAYERS = (2, 12, 32)
SHARE = 0.84
VOCAB, WIDTH, HEADS = 512, 128, 4
SECONDS = 3600


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.attn, self.n2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LanguageModel(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    with torch.device("meta"):
        fn, params = ftp.functionalize(LanguageModel(case["layers"]))
        tokens = torch.empty(16, 32, dtype=torch.int64)

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(fn(p, x).flatten(0, 1), y.flatten())

    def found(memory: int | None) -> tuple[Any, float]:
        start = time.process_time()
        mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
        result = ftp.search(
            loss, params, mesh, P("dp"), tokens, tokens, memory=memory, hardware="cpu"
        )
        return result, time.process_time() - start

    free, free_s = found(None)
    limit = int(SHARE * free.memory)
    tight, tight_s = found(limit)
    return {
        "layers": case["layers"],
        "free CPU s": free_s,
        "CPU s": tight_s,
        "limit MiB": limit / 2**20,
        "MiB": tight.memory / 2**20,
        "step ms": tight.cost * 1e3,
        "planned ms": tight.planned * 1e3,
        "bound ms": tight.bound * 1e3,
        "gap ms": max(tight.gap.values()) * 1e3,
        "bucket": tight.bucket,
    }


def main() -> None:
    given = options(command_line(__doc__, "search"), measure)
    rows = [run_case(__file__, {"layers": n}, SECONDS) for n in LAYERS]
    show(rows, list(rows[-1]))
    if given.json:
        save("search", {"rows": rows})


if __name__ == "__main__":
    main()
