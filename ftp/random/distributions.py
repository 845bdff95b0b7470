"""Random numbers from keys: functions of a key and an element's global position, so that no mesh or
spec changes them.

docs/random.md defines every number. Each function draws from the stream of its key (see
`ftp.ops.philox`): a key is for one draw; ``split`` and ``fold_in`` make more keys. All functions
are plain tensor code around two ops, and run eagerly, sharded, compiled and under torch.func.
"""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import InputError, MeshError
from ftp.ops.philox import (
    AS_TENSOR_OPS,
    KEYS,
    MASK,
    contiguous_strides,
    drawn_below,
    kept_scale,
    random_bits,
    random_keys,
)
from ftp.sharding.mesh import AnyMesh, check_rank, resolve
from ftp.sharding.pytree import kind_of

ShapeLike = int | Sequence[int]
_FOLDS = 1 << 61  # fold_in's counters come after split's

DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Of each dtype that is drawn, the binary digits of its significand."""


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """The key of a seed: an int64 tensor of shape (2,).

    Args:
        seed: any integer of 64 bits, signed.

    >>> key(0)
    tensor([0, 0])
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(1 << 63) <= seed < 1 << 63:
        raise InputError(f"key takes an integer seed of 64 bits, not {seed!r}, {kind_of(seed)}.")
    return torch.tensor([seed, 0], dtype=torch.int64, device=device)


def split(key: Tensor, n: int = 2) -> Tensor:
    """``n`` new keys, of shape (n, 2); the first keys do not depend on ``n``.

    >>> a, b = split(key(0))
    >>> bool((a == b).any())
    False
    """
    check_key(key, "split")
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < _FOLDS:
        raise InputError(
            f"split takes how many keys to make, an integer from 0 on, not {n!r}, {kind_of(n)}."
        )
    return _keys(key, torch.arange(KEYS, KEYS + n, device=key.device))


def fold_in(key: Tensor, i: int | Tensor) -> Tensor:
    """A new key for ``i``, such as the number of a step, a layer or a sample.

    Args:
        i: an integer from 0 to 2**61 - 1, or a 0-d integer tensor (of which those bits count).

    >>> bool((fold_in(key(0), 1) == fold_in(key(0), torch.tensor(1))).all())
    True
    """
    check_key(key, "fold_in")
    if isinstance(i, Tensor):
        if i.ndim or i.dtype.is_floating_point or i.dtype.is_complex:
            raise InputError(
                "fold_in takes an integer or a 0-d integer tensor, not one of shape"
                f" {tuple(i.shape)} and {i.dtype}."
            )
        return _keys(key, (i.to(torch.int64) & (_FOLDS - 1)) + (KEYS + _FOLDS))
    if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < _FOLDS:
        raise InputError(
            f"fold_in takes an integer from 0 to 2**61 - 1 or a 0-d integer tensor, not {i!r},"
            f" {kind_of(i)}."
        )
    return _keys(key, torch.full((), KEYS + _FOLDS + i, dtype=torch.int64, device=key.device))


def is_key(key: Any) -> bool:
    """Whether a value has the form of a key."""
    return isinstance(key, Tensor) and key.dtype is torch.int64 and tuple(key.shape) == (2,)


def check_key(key: Tensor, name: str) -> None:
    """Check that an argument is a key.

    Raises:
        InputError: it is no key; the message names ``name``, the function or argument.
    """
    if is_key(key):
        return
    given, several = kind_of(key), ""
    if isinstance(key, Tensor):
        given = f"{key.dtype} of shape {tuple(key.shape)}"
        if key.dtype is torch.int64 and key.shape[-1:] == (2,):
            several = " Take one of the keys, or torch.vmap over them."
        elif key.dtype is torch.int64 and key.shape == (1,):
            several = (
                " It may be a microbatch of a key: give ftp.optim.accumulate keys of"
                " ftp.random.split(key, n), and take keys[0]."
            )
    raise InputError(
        f"{name} takes a key, an int64 tensor of shape (2,) as ftp.random.key(seed) makes, not"
        f" {given}.{several}"
    )


def bits(key: Tensor, shape: ShapeLike = ()) -> Tensor:
    """32 random bits per element, as int32 of ``shape`` (an int or ints; default 0-d).

    Raises:
        InputError: no key of shape (2,), or a shape of other than ints from 0 on.

    >>> bits(key(0), 2)
    tensor([1713891541, -513161843], dtype=torch.int32)
    """
    return _bits(key, shape, "bits")


def uniform(
    key: Tensor,
    shape: ShapeLike = (),
    dtype: torch.dtype | None = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Uniform in [low, high), from as many random bits as the dtype's precision: 53, 24, 11 or 8.

    Args:
        shape: of the result, an int or ints; default 0-d.
        dtype: a floating-point dtype; default torch's.

    Raises:
        InputError: no key, shape or floating-point dtype.

    >>> uniform(key(0), (3,))
    tensor([0.3990, 0.8805, 0.7357])
    """
    dtype = _floating(dtype, "uniform")
    digits = DIGITS[dtype]
    if dtype is torch.float64:
        bits = _long(key, shape, "uniform") >> (64 - digits)
    else:
        bits = _bits(key, shape, "uniform") >> (32 - digits)
    unit = (bits & ((1 << digits) - 1)).to(dtype) * 2.0**-digits
    return unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low


def normal(key: Tensor, shape: ShapeLike = (), dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal numbers of ``shape`` (default 0-d) and a floating-point ``dtype`` (default
    torch's).

    Raises:
        InputError: no key, shape or floating-point dtype.

    >>> normal(key(0), (3,)).dtype
    torch.float32

    Source: Box and Muller (1958); only the cosine, so that an element is a function of its
    words.
    """
    dtype = _floating(dtype, "normal")
    if dtype is torch.float64:
        words = _bits(key, (*_sizes(shape, "normal"), 4), "normal").to(torch.int64) & MASK
        radius = ((words[..., 0] | words[..., 1] << 32) >> 11 & ((1 << 53) - 1)) + 1
        angle = (words[..., 2] | words[..., 3] << 32) >> 11 & ((1 << 53) - 1)
        scale, working = 2.0**-53, torch.float64
    else:
        words = _bits(key, (*_sizes(shape, "normal"), 2), "normal").to(torch.int64) & MASK
        radius, angle = words[..., 0] + 1, words[..., 1] >> 8 << 8
        scale, working = 2.0**-32, torch.float32
    r = (radius.to(working) * scale).log().mul(-2.0).sqrt()
    return (r * (angle.to(working) * (scale * 2 * math.pi)).cos()).to(dtype)


def truncated_normal(
    key: Tensor, lower: float, upper: float, shape: ShapeLike = (), dtype: torch.dtype | None = None
) -> Tensor:
    """Standard normal numbers given that they lie in [lower, upper], as of ``normal``.

    Raises:
        InputError: ``lower`` not below ``upper``; no key, shape or floating-point dtype.

    >>> float(truncated_normal(key(0), -1.0, 1.0, (1000,)).abs().max()) <= 1.0
    True
    """
    dtype = _floating(dtype, "truncated_normal")
    if not lower < upper:
        raise InputError(f"truncated_normal takes lower < upper, not {lower!r} and {upper!r}.")
    working = torch.float64 if dtype is torch.float64 else torch.float32
    low, high = math.erf(lower / math.sqrt(2)), math.erf(upper / math.sqrt(2))
    drawn = (
        _open_uniform(key, shape, working, "truncated_normal") * (high - low) + low
    ).erfinv() * math.sqrt(2)
    return drawn.clamp(lower, upper).to(dtype)


def exponential(key: Tensor, shape: ShapeLike = (), dtype: torch.dtype | None = None) -> Tensor:
    """Exponential numbers of rate one, of ``shape`` and ``dtype`` as of ``normal``.

    Raises:
        InputError: no key, shape or floating-point dtype.

    >>> bool((exponential(key(0), (100,)) > 0).all())
    True
    """
    dtype = _floating(dtype, "exponential")
    working = torch.float64 if dtype is torch.float64 else torch.float32
    return (-_open_uniform(key, shape, working, "exponential").log()).to(dtype)


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: ShapeLike | None = None) -> Tensor:
    """True with probability ``p``, to 2**-32.

    Args:
        p: a number or a tensor that broadcasts to ``shape``.
        shape: default that of ``p``.

    >>> bernoulli(key(0), 0.5, 4)
    tensor([False,  True,  True,  True])
    """
    if isinstance(p, Tensor):
        sizes = tuple(p.shape) if shape is None else _sizes(shape, "bernoulli")
        drawn = _bits(key, sizes, "bernoulli").to(torch.int64) + (1 << 31)
        return drawn < (p.to(torch.float64) * 2.0**32).round().to(torch.int64)
    _check_probability(p, "bernoulli")
    return drawn_below(_bits(key, () if shape is None else shape, "bernoulli"), p)


def dropout(key: Tensor, x: Tensor, p: float = 0.5) -> Tensor:
    """``x`` with each element zero with probability ``p``, the others divided by ``1 - p``.

    Raises:
        InputError: no key, integers, or a ``p`` outside [0, 1].

    >>> dropout(key(0), torch.ones(4), 0.5)
    tensor([2., 0., 0., 0.])
    """
    _check_probability(p, "dropout")
    check_key(key, "dropout")
    if not (x.is_floating_point() or x.is_complex()):
        raise InputError(f"dropout divides by 1 - p, which {x.dtype} cannot hold. Give floats.")
    if p == 0:
        return x
    return x.masked_fill(bernoulli(key, p, tuple(x.shape)), 0) * kept_scale(p)


def randint(
    key: Tensor, low: int, high: int, shape: ShapeLike = (), dtype: torch.dtype = torch.int64
) -> Tensor:
    """Integers of ``shape`` from ``low`` to ``high - 1``, uniform up to ``(high - low) / 2**63``.

    Raises:
        InputError: ``low`` not below ``high``; no integers, or beyond ``dtype``; no key or shape.

    >>> randint(key(0), 0, 10, (4,))
    tensor([1, 0, 8, 1])
    """
    if isinstance(low, float) or isinstance(high, float) or not low < high:
        raise InputError(f"randint takes integers low < high, not {low!r} and {high!r}.")
    if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        limits = torch.iinfo(dtype)
        if low < limits.min or high - 1 > limits.max:
            raise InputError(
                f"randint draws from {low!r} to {high - 1!r}, beyond {dtype}, {limits.min} to"
                f" {limits.max}."
            )
    return ((_long(key, shape, "randint") & ((1 << 63) - 1)) % (high - low) + low).to(dtype)


def permutation(key: Tensor, n: int | Tensor) -> Tensor:
    """The numbers below ``n`` in random order, int64 of shape (n,), or a tensor's rows.

    Raises:
        InputError: no key.

    >>> sorted(permutation(key(0), 4).tolist())
    [0, 1, 2, 3]
    """
    if isinstance(n, Tensor):
        return n.index_select(0, permutation(key, n.shape[0]))
    return _long(key, (n,), "permutation").argsort(stable=True)


def categorical(
    key: Tensor, logits: Tensor, shape: ShapeLike | None = None, *, dim: int = -1
) -> Tensor:
    """An index along ``dim`` with the probabilities ``softmax(logits, dim)``.

    Args:
        shape: of the result; it ends with the logits' other dims, which it is by default.

    >>> categorical(key(0), torch.tensor([-torch.inf, 0.0, -torch.inf]), (3,))
    tensor([1, 1, 1])

    Source: Gumbel (1954): the index of the largest of the logits, each with a Gumbel draw added.
    """
    if not -logits.ndim <= dim < logits.ndim:
        raise InputError(
            f"categorical has dim={dim}, but its logits have shape {tuple(logits.shape)}."
        )
    logits = logits.movedim(dim, -1)
    batch = tuple(logits.shape[:-1])
    sizes = batch if shape is None else _sizes(shape, "categorical")
    if sizes[len(sizes) - len(batch) :] != batch:
        raise InputError(
            f"categorical takes a shape that ends with the logits' other dims {batch}, not {sizes}."
        )
    working = torch.float64 if logits.dtype is torch.float64 else torch.float32
    gumbel = -(-_open_uniform(key, (*sizes, logits.shape[-1]), working, "categorical").log()).log()
    return (logits.to(working) + gumbel).argmax(-1)


@dataclass(frozen=True)
class MegatronStreams:
    """Megatron-LM's two streams.

    Attributes:
        default: the key for draws in which ranks must agree, of shape (2,).
        model_parallel: the keys for draws in which ranks must differ, of shape (n, 2), a row per
            rank: cut by ``P(axis)``.
        rank: this process' position on the axis; None without processes.
    """

    default: Tensor
    model_parallel: Tensor
    rank: int | None

    def generators(
        self, device: torch.device | str = "cpu", *, rank: int | None = None
    ) -> tuple[torch.Generator, torch.Generator]:
        """torch's generators of the same two seeds, which give the numbers of a Megatron run on
        that device.

        Args:
            rank: the rank of the generators; default this process'.
        """
        at = (
            self.rank
            if rank is None
            else check_rank(rank, range(len(self.model_parallel)), "rank", "the axis")
        )
        if at is None:
            raise InputError(
                f"generators takes a rank from 0 to {len(self.model_parallel) - 1} where there are"
                " no processes."
            )
        seeds = int(self.default[0]), int(self.model_parallel[at, 0])
        first, second = (torch.Generator(device).manual_seed(seed) for seed in seeds)
        return first, second


def megatron_compat(seed: int, mesh: AnyMesh | None = None, axis: str = "tp") -> MegatronStreams:
    """The streams of Megatron-LM's seeds: ``seed`` for draws in which ranks must agree, ``seed +
    2718 + rank`` for draws in which they must differ.

    Nothing else in ftp draws per rank: use the streams within ``ftp.local``, or to compare with a
    Megatron run.

    Args:
        axis: the tensor-parallel axis, along which ranks are counted.

    >>> import ftp
    >>> streams = megatron_compat(1234, ftp.simulated_mesh((2,), ("tp",)))
    >>> streams.default, streams.model_parallel
    (tensor([1234,    0]), tensor([[3952,    0],
            [3953,    0]]))

    Source: Megatron-LM, ``megatron/core/tensor_parallel/random.py``,
    ``model_parallel_cuda_manual_seed``.
    """
    m = resolve(mesh)
    if axis not in m.axes:
        raise MeshError(
            f"megatron_compat counts ranks along axis {axis!r}; the mesh has"
            f" {', '.join(map(repr, m.axes))}."
        )
    key(seed)
    seeds = [[seed + 2718 + rank, 0] for rank in range(m.axes[axis])]
    return MegatronStreams(
        torch.tensor([seed, 0]), torch.tensor(seeds), (m.coordinate or {}).get(axis)
    )


def _sizes(shape: Any, name: str) -> tuple[int, ...]:
    try:
        sizes = tuple(shape)
    except TypeError:
        sizes = (shape,)
    if any(isinstance(n, float | str | None) or n < 0 for n in sizes):
        raise InputError(f"{name} takes a shape of sizes from 0 on, not {shape!r}.")
    return sizes


def _check_probability(p: Any, name: str) -> None:
    if isinstance(p, str) or not 0 <= p <= 1:
        raise InputError(f"{name} takes a probability from 0 to 1, not p={p!r}.")


def _floating(dtype: torch.dtype | None, name: str) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DIGITS:
        raise InputError(f"{name} draws float64, float32, bfloat16 or float16, not {dtype}.")
    return dtype


def _bits(key: Tensor, shape: ShapeLike, name: str) -> Tensor:
    check_key(key, name)
    sizes = _sizes(shape, name)
    op = AS_TENSOR_OPS[random_bits] if torch.compiler.is_compiling() else random_bits
    return op(key, sizes, contiguous_strides(sizes), 0)


def _keys(key: Tensor, counter: Tensor) -> Tensor:
    op = AS_TENSOR_OPS[random_keys] if torch.compiler.is_compiling() else random_keys
    return op(key, counter)


def _long(key: Tensor, shape: ShapeLike, name: str) -> Tensor:
    """64 random bits per element: two adjacent words, the lower half first."""
    words = _bits(key, (*_sizes(shape, name), 2), name).to(torch.int64)
    return words[..., 0] & MASK | words[..., 1] << 32


def _open_uniform(key: Tensor, shape: ShapeLike, dtype: torch.dtype, name: str) -> Tensor:
    """Uniform in (0, 1), halfway between multiples of 2**-52 or 2**-23, so that logarithms are
    finite.
    """
    if dtype is torch.float64:
        return (_long(key, shape, name) >> 12 & ((1 << 52) - 1)).to(dtype) * 2.0**-52 + 2.0**-53
    return (_bits(key, shape, name) >> 9 & ((1 << 23) - 1)).to(dtype) * 2.0**-23 + 2.0**-24
