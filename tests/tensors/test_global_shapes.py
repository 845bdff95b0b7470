"""Samples, by which ranks compare their copies."""

import torch

from ftp.tensors.global_shapes import sample


def test_a_sample_of_strided_memory_reads_few_elements():
    base = torch.arange(60.0).reshape(3, 4, 5)
    for x in (base.permute(2, 0, 1), base[:, ::2], torch.ones(2, 1).expand(2, 30)):
        assert sample(x) == sample(x.contiguous())
    # 4 TB if it were copied
    assert sample(torch.zeros(1).expand(10**12)) == [0.0] * 16


def test_packed_numbers_have_no_sample():
    assert sample(torch.empty(4, dtype=torch.float4_e2m1fn_x2)) is None
