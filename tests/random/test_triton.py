"""What inductor writes for GPUs, generated for one that is not there and run an op at a time on
a CPU.
"""

import pytest
import torch
from triton_code import run_kernel, triton_code  # type: ignore[import-not-found]

from ftp import random
from ftp.ops import philox

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning"
)  # inductor's, as it is imported
KEY = random.key(2024)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((4, 8), (1 << 30, 1), 7), ((3, 8), (1 << 32, 3), 1 << 33)],
    ids=["sums beyond int32", "strides beyond int32"],
)
def test_bits_far_apart(size: tuple[int, ...], stride: tuple[int, ...], offset: int):
    """Inductor counts a small block in int32: positions in the stream, which are further apart,
    must not be made of its counters.
    """
    code = triton_code(lambda key: philox.random_bits(key, size, stride, offset), KEY)
    found = run_kernel(code, [KEY], torch.zeros(size, dtype=torch.int32))
    assert torch.equal(found, philox.random_bits(KEY, size, stride, offset))
