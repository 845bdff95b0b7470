"""Philox4x32-10: random 32-bit words as a function of a key and a position, and the two ops that
``ftp.random`` is built on.

The stream of a key (k, t), two int64, is the words w_0, w_1, ...: w_n is lane n % 4 of
Philox4x32-10 with key k and counter (n // 4, t), low words first. ``random_bits`` reads any strided
part of it, so that the cost of a shard is proportional to its size. On a CPU the words come from
philox.c if it can be compiled; else, as on other devices, from integer ops on tensors.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), and its
library Random123.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftp.ops.define import define, register_fake
from ftp.ops.native import compiled

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
ROUNDS = 10
# Blocks made at a time on a CPU, to fit a core's cache.
CHUNK = 1 << 17
# Counters from here on make keys; no stream uses them.
KEYS = 1 << 62

Word = Any  # an int or an int64 tensor holding one in its lower half


def block(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """The four words of one counter, or of each in a tensor of counters.

    >>> [hex(w) for w in block((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        k0, k1 = ((k + i * w) & MASK for k, w in zip(key, WEYL, strict=True))
        (high0, low0), (high1, low1) = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _product(word: Word, factor: int) -> tuple[Word, Word]:
    """High and low word of the product, computed by halves: a compiler may turn this into C++,
    where signed overflow is undefined.
    """
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def bits_by_index(key: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """``random_bits``, one element at a time: four times the work, but a compiler fuses it into one
    loop.
    """
    at = torch.zeros((), dtype=torch.int64, device=key.device) + offset
    for d, (n, step) in enumerate(zip(size, stride, strict=True)):
        # The mask changes no value; without it inductor's Triton code multiplies in int32.
        along = (torch.arange(n, device=key.device) & (KEYS - 1)) * step
        at = at + along.view(-1, *(1,) * (len(size) - 1 - d))
    k, t = (half.reshape((*key.shape[:-1], *(1,) * at.ndim)) for half in key.unbind(-1))
    w0, w1, w2, w3 = block(
        (at >> 2 & MASK, at >> 34, t & MASK, t >> 32 & MASK), (k & MASK, k >> 32 & MASK)
    )
    lane = at & 3
    word = torch.where(lane < 2, torch.where(lane == 0, w0, w1), torch.where(lane == 2, w2, w3))
    return (word - (word >> 31 << 32)).to(torch.int32)


def keys_by_counter(key: Tensor, counter: Tensor) -> Tensor:
    """``random_keys`` as tensor operations."""
    k, t = key.unbind(-1)
    w0, w1, w2, w3 = block(
        (counter & MASK, counter >> 32 & MASK, t & MASK, t >> 32 & MASK), (k & MASK, k >> 32 & MASK)
    )
    return torch.stack(torch.broadcast_tensors(w0 | w1 << 32, w2 | w3 << 32), -1)


def drawn_below(bits: Tensor, p: float) -> Tensor:
    """True with probability ``p``, from random bits."""
    below = round(p * 2**32)
    return bits <= below - (1 << 31) - 1 if below else torch.zeros_like(bits, dtype=torch.bool)


def kept_scale(p: float) -> float:
    """The factor by which dropout with probability ``p`` scales the elements that it keeps."""
    return 1 / (1 - p) if p < 1 else 0.0


random_bits = define(
    "random_bits(Tensor key, SymInt[] size, SymInt[] stride, SymInt offset) -> Tensor"
)
random_keys = define("random_keys(Tensor key, Tensor counter) -> Tensor")
AS_TENSOR_OPS = {random_bits: bits_by_index, random_keys: keys_by_counter}


@register_fake("ftp::random_bits")
def _fake_bits(key: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return key.new_empty([*key.shape[:-1], *size], dtype=torch.int32)


@register_fake("ftp::random_keys")
def _fake_keys(key: Tensor, counter: Tensor) -> Tensor:
    return key.new_empty([*torch.broadcast_shapes(key.shape[:-1], counter.shape), 2])


@torch.library.impl("ftp::random_bits", "CompositeExplicitAutograd")
def _bits(key: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    shape = (*key.shape[:-1], *size)
    keys = key.reshape(-1, 2)
    if 0 in shape:
        return key.new_empty(shape, dtype=torch.int32)
    rows, run = _runs(size, stride)
    if key.device.type == "cpu" and (native := _native()) is not None:
        return _read_natively(native, keys, shape, rows, run, offset)
    bases = torch.full((1,), offset, dtype=torch.int64, device=key.device)
    for n, step in rows:
        bases = (bases.unsqueeze(1) + torch.arange(n, device=key.device) * step).flatten()
    # The first and last block of a run have extra words. Runs may begin at different lanes.
    same = all(step % 4 == 0 for _, step in rows)
    first = offset & 3 if same else 3
    blocks = (first + run + 3) // 4
    counters = ((bases >> 2).unsqueeze(1) + torch.arange(blocks, device=key.device)).flatten()
    words = _blocks(keys, counters).view(len(keys), len(bases), 4 * blocks)
    if same:
        return (
            words[..., first : first + run]
            .reshape(shape)
            .clone(memory_format=torch.contiguous_format)
        )
    at = ((bases & 3).unsqueeze(1) + torch.arange(run, device=key.device)).expand(len(keys), -1, -1)
    return words.gather(2, at).view(shape)


@cache
def _native() -> ctypes.CDLL | None:
    library = compiled(Path(__file__).with_name("philox.c"), "ftp_random_bits", "ftp_random_block")
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.ftp_random_bits.argtypes = [
            *[number] * 3,
            ctypes.c_int,
            pointer,
            pointer,
            number,
            pointer,
        ]
        library.ftp_random_block.argtypes = [*[number] * 3, pointer]
        library.ftp_random_bits.restype = library.ftp_random_block.restype = None
    return library


def _read_natively(
    native: ctypes.CDLL,
    keys: Tensor,
    shape: Sequence[int],
    rows: list[tuple[int, int]],
    run: int,
    offset: int,
) -> Tensor:
    out = torch.empty(shape, dtype=torch.int32)
    numbers = ctypes.c_int64 * len(rows)
    sizes, strides = numbers(*(n for n, _ in rows)), numbers(*(step for _, step in rows))
    address, nbytes = out.data_ptr(), 4 * out.numel() // len(keys)
    for k, t in keys.tolist():
        native.ftp_random_bits(k, t, offset, len(rows), sizes, strides, run, address)
        address += nbytes
    return out


def _runs(size: Sequence[int], stride: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """The dims over runs of adjacent words, each with its stride, and the length of a run."""
    dims: list[tuple[int, int]] = []
    for n, step in zip(size, stride, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * step:
            dims[-1] = dims[-1][0] * n, step
        else:
            dims.append((n, step))
    run = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    return dims, run


def _blocks(keys: Tensor, counters: Tensor) -> Tensor:
    """The words of every counter under every key, int32 of shape (keys, 4 * counters)."""
    out = keys.new_empty(len(keys), len(counters), 2)
    chunk = CHUNK if keys.device.type == "cpu" else max(len(counters), 1)
    together = max(1, chunk // max(len(counters), 1)) if keys.device.type == "cpu" else len(keys)
    for key_at in range(0, len(keys), together):
        some = keys[key_at : key_at + together]
        if together == 1 and keys.device.type == "cpu":
            k, t = some[0].tolist()
        else:
            k, t = some[:, :1], some[:, 1:]
        for at in range(0, len(counters), chunk):
            c = counters[at : at + chunk]
            _write(out[key_at : key_at + together, at : at + chunk], c, k, t)
    return out.view(torch.int32).flatten(1)


def _write(out: Tensor, counter: Tensor, k: Any, t: Any) -> None:
    """Philox in place on int64 lanes. Words that are only xored may have garbage in their upper
    half until the end.
    """
    shape = out.shape[:-1]
    c0 = (counter & MASK).expand(shape).clone()
    c1 = (counter >> 32).expand(shape).clone()
    c2 = torch.zeros_like(c0).add_(t & MASK)
    c3 = torch.zeros_like(c0).add_(t >> 32 & MASK)
    high = torch.empty_like(c0)
    for i in range(ROUNDS):
        k0, k1 = (
            (half + i * w) & MASK for half, w in zip((k & MASK, k >> 32 & MASK), WEYL, strict=True)
        )
        c0.mul_(MULTIPLIERS[0])
        c2.mul_(MULTIPLIERS[1])
        c1.bitwise_xor_(torch.bitwise_right_shift(c2, 32, out=high)).bitwise_xor_(k0).bitwise_and_(
            MASK
        )
        c3.bitwise_xor_(torch.bitwise_right_shift(c0, 32, out=high)).bitwise_xor_(k1).bitwise_and_(
            MASK
        )
        c0, c1, c2, c3 = c1, c2, c3, c0
    # A pair of words is one int64, lower word first in memory.
    torch.bitwise_or(c0, c1.bitwise_left_shift_(32), out=out[..., 0])
    torch.bitwise_or(c2, c3.bitwise_left_shift_(32), out=out[..., 1])


@torch.library.impl("ftp::random_keys", "CompositeExplicitAutograd")
def _keys(key: Tensor, counter: Tensor) -> Tensor:
    if (
        key.ndim == 1
        and counter.ndim == 0
        and key.device.type == "cpu"
        and counter.device.type == "cpu"
    ):
        k, t = key.tolist()
        n = int(counter)
        if (native := _native()) is not None:
            out = torch.empty(2, dtype=torch.int64)
            native.ftp_random_block(k, t, n, out.data_ptr())
            return out
        w = block((n & MASK, n >> 32 & MASK, t & MASK, t >> 32 & MASK), (k & MASK, k >> 32 & MASK))
        return torch.tensor([_signed(w[0] | w[1] << 32), _signed(w[2] | w[3] << 32)])
    return keys_by_counter(key, counter)


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def _bits_batched(
    info: Any, in_dims: Any, key: Tensor, size: Any, stride: Any, offset: int
) -> tuple[Tensor, int]:
    return random_bits(key.movedim(in_dims[0], 0), size, stride, offset), 0


def _keys_batched(
    info: Any, in_dims: tuple[int | None, int | None], key: Tensor, counter: Tensor
) -> tuple[Tensor, int]:
    key_dim, dim = in_dims
    ndim = max(key.ndim - 1 - (key_dim is not None), counter.ndim - (dim is not None))
    if key_dim is not None:
        key = key.movedim(key_dim, 0)
        key = key.reshape(len(key), *(1,) * (ndim + 2 - key.ndim), *key.shape[1:])
    if dim is not None:
        counter = counter.movedim(dim, 0)
        counter = counter.reshape(
            len(counter), *(1,) * (ndim + 1 - counter.ndim), *counter.shape[1:]
        )
    return random_keys(key, counter), 0


torch.library.register_vmap("ftp::random_bits", _bits_batched)
torch.library.register_vmap("ftp::random_keys", _keys_batched)


def contiguous_strides(size: Sequence[int]) -> list[int]:
    """
    >>> contiguous_strides((2, 3, 4))
    [12, 4, 1]
    """
    return [math.prod(size[d + 1 :]) for d in range(len(size))]
