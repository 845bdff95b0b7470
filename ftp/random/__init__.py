"""Random numbers from keys: a draw depends on the key and an element's global position, not on the
mesh.

>>> from ftp import random
>>> key = random.key(0)
>>> bool((random.normal(key, (4,)) == random.normal(key, (4,))).all())
True

See ``docs/random.md``.
"""

from ftp.random.distributions import (
    MegatronStreams,
    bernoulli,
    bits,
    categorical,
    dropout,
    exponential,
    fold_in,
    key,
    megatron_compat,
    normal,
    permutation,
    randint,
    split,
    truncated_normal,
    uniform,
)

__all__ = [
    "MegatronStreams",
    "bernoulli",
    "bits",
    "categorical",
    "dropout",
    "exponential",
    "fold_in",
    "key",
    "megatron_compat",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]
