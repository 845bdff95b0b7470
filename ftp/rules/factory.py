"""Rules of ops that make tensors from sizes: every rank makes its shard."""

import torch
from torch import fx

from ftp.rules.forms import like, whole
from ftp.rules.local_forms import with_shape
from ftp.rules.local_op import LocalOp
from ftp.rules.overloads import aten
from ftp.rules.registry import rule

WINDOWS = (
    aten.bartlett_window, aten.blackman_window, aten.hamming_window, aten.hann_window,
    aten.kaiser_window,
)  # fmt: skip


def _without_strides(op: LocalOp) -> fx.Node:
    """The op without its strides: a shard has others."""
    dtype = op.call.results[0].dtype
    return op.emit(aten.empty.memory_format, op.shape(), dtype=dtype, device=op.device)


def _new_without_strides(op: LocalOp) -> fx.Node:
    return op.emit(aten.new_empty.default, op.args[0], op.shape(), **op.kwargs)


def _arange_of_part(op: LocalOp) -> fx.Node:
    """The range at the global positions of this rank's shard."""
    if not op.is_cut():
        return op.default()
    names = [a.name for a in op.target._schema.arguments]
    start = op.call.arg("start") if "start" in names else 0
    step = op.call.arg("step") if "step" in names else 1
    at, dtype = op.positions("i"), op.call.results[0].dtype
    if dtype.is_floating_point:
        at = op.emit(aten._to_copy.default, at, dtype=torch.float64)
    else:  # as the kernel truncates them
        start, step = (int(v) if isinstance(v, float) else v for v in (start, step))
    if step != 1:
        at = op.emit(aten.mul.Scalar, at, step)
    if start != 0:
        at = op.emit(aten.add.Scalar, at, start)
    return op.emit(aten._to_copy.default, at, dtype=dtype)


def _eye_of_part(op: LocalOp) -> fx.Node:
    if not op.is_cut():
        return op.default()
    rows, columns = op.positions("m"), op.positions("n")
    same = op.emit(aten.eq.Tensor, columns, op.emit(aten.unsqueeze.default, rows, 1))
    return op.emit(aten._to_copy.default, same, dtype=op.call.results[0].dtype)


rule(
    aten.empty.memory_format, aten.full.default, aten.ones.default, aten.zeros.default, "-> ...",
    local=with_shape(0),
)  # fmt: skip
rule(aten.empty_strided.default, aten.empty_permuted.default, "-> ...", local=_without_strides)
rule(aten.scalar_tensor.default, "-> ()")

like(aten.new_empty.default, aten.new_ones.default, local=with_shape(1))
like(aten.new_empty_strided.default, local=_new_without_strides)
like(aten.new_full.default, local=with_shape(1), linear=[(0,)], if_zero="fill_value")
like(aten.new_zeros.default, local=with_shape(1), linear=[(0,)])

rule(aten.arange.default, aten.arange.start, aten.arange.start_step, "-> i", local=_arange_of_part)
rule(aten.eye.default, aten.eye.m, "-> m n", local=_eye_of_part)

for _op in (aten.linspace, aten.logspace):
    whole(_op.default, _op.Tensor_Tensor, _op.Tensor_Scalar, _op.Scalar_Tensor)
whole(aten.tril_indices.default, aten.triu_indices.default)
# Windows and frequencies are short, like a spectrum's frame, and stay whole.
whole(aten.fft_fftfreq.default, aten.fft_rfftfreq.default)
whole(*(getattr(w, name) for w in WINDOWS for name in w.overloads() if not name.endswith("out")))
