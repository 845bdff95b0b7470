"""Packed documents along a sequence that several ranks share, against one device.

    python examples/long_context.py                          # a simulated mesh (dp 2, cp 2)
    torchrun --nproc-per-node=4 examples/long_context.py     # the same file on four processes

Each row of a batch is files of Python's standard library one after another, as bytes. A token sees
the tokens before it of its own file. The rows are cut over ``dp``, and along the sequence over
``cp`` in zigzag: positions, the mask and the labels need no change. Prints the loss of every step,
sharded and on one device, and fails if they differ.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ftp
from ftp import P, zigzag

BYTES = 256
IGNORED = -100  # the label of a file's last byte


def packed(rows, tokens):
    """Bytes of files, the file that each is of, and the byte after each: (rows, tokens)."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = (file.read_bytes()[: tokens // 2] for file in files)
    data, document, labels = [], [], []
    for number, text in enumerate(texts):
        data += text
        document += [number] * len(text)
        labels += [*text[1:], IGNORED] if text else []
        if len(data) >= rows * tokens:
            break
    made = (torch.tensor(x[: rows * tokens]).view(rows, tokens) for x in (data, document, labels))
    return tuple(made)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x, blocks):
        batch, tokens, dim = x.shape
        q, k, v = (
            y.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = flex_attention(q, k, v, block_mask=blocks)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, dim, heads, layers, tokens):
        super().__init__()
        self.byte, self.position = nn.Embedding(BYTES, dim), nn.Embedding(tokens, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, BYTES)

    def forward(self, data, document):
        rows, tokens = data.shape

        def same_file(row, head, query, key):
            return (query >= key) & (document[row, query] == document[row, key])

        blocks = create_block_mask(same_file, rows, None, tokens, tokens, device=data.device)
        x = self.byte(data) + self.position(torch.arange(tokens, device=data.device))
        for block in self.blocks:
            x = block(x, blocks)
        return self.head(x)


def train(step, params, batch, steps, lr):
    """Losses of ``steps`` steps. AdamW is element-wise, so torch's own works on shards."""
    optimizer = torch.optim.AdamW(params.values(), lr=lr)
    losses = []
    for _ in range(steps):
        loss, grads = step(params, *batch)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--cp", type=int, default=2)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    fn, params = ftp.functionalize(Model(args.dim, args.heads, args.layers, args.tokens))
    batch = packed(args.rows, args.tokens)

    def loss_fn(params, data, document, labels):
        logits = fn(params, data, document)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    mesh = ftp.make_mesh((args.dp, args.cp), ("dp", "cp"), device_type="cpu")
    cut = P("dp", zigzag("cp"))
    step = ftp.shard(loss_fn, mesh, P(), batch_specs=cut, certify=True)
    # torch's flex_attention has no backward pass on a CPU; a program of one rank does.
    alone = ftp.shard(loss_fn, ftp.simulated_mesh((1,), ("one",)), P())
    copies = {name: p.detach().clone() for name, p in params.items()}
    expected = train(alone, copies, batch, args.steps, args.lr)
    placed = ftp.device_put(params, mesh, P())
    losses = train(step, placed, ftp.device_put(batch, mesh, cut), args.steps, args.lr)

    if int(os.environ.get("RANK", 0)) == 0:
        print(f"step   one device   dp {args.dp}, cp {args.cp}")
        for i, (one, sharded) in enumerate(zip(expected, losses, strict=True)):
            print(f"{i:4d}   {one:10.7f}   {sharded:10.7f}")
    torch.testing.assert_close(losses, expected, rtol=1e-8, atol=1e-8)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
