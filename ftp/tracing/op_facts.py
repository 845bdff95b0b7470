"""Facts about single ops that the recorder asks for: dtypes, randomness, values read in gradients,
and the ops that are always decomposed.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ftp.dataclass import dataclass
from ftp.rules.decompositions.registry import DECOMPOSITIONS, HALF
from ftp.rules.overloads import aten
from ftp.torch_internals.autograd_state import current_autograd_node
from ftp.torch_internals.op_types import OpOverload


@dataclass(frozen=True)
class OpFacts:
    """The facts that the recorder checks of an op, which hold for all arguments."""

    is_random: bool
    of_one_dtype: bool
    needs_elements: bool
    promotes: bool
    writes_values: bool
    reads_value: bool
    is_lift: bool
    is_mutable: bool
    is_collective: bool


@functools.cache
def op_facts(func: OpOverload) -> OpFacts:
    return OpFacts(
        torch.Tag.nondeterministic_seeded in func.tags,
        func in ONE_DTYPE,
        func in (aten.max.default, aten.min.default),
        func in PROMOTING,
        func in (aten.index_put.default, aten.index_put_.default),
        func in (aten._local_scalar_dense.default, aten.allclose.default),
        func in _LIFTS,
        func._schema.is_mutable,
        func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"),
    )


def _unless_half(by: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition, except in half precision, where a fused matmul and sum rounds once and its
    parts round twice.
    """
    return lambda x, *args, **kwargs: NotImplemented if x.dtype in HALF else by(x, *args, **kwargs)


# Ops that are always decomposed, at no loss of a kernel: a matmul and a sum, a sum and a division.
_MATMULS = (aten.addmm, aten.addmv, aten.baddbmm)
ALWAYS = {
    op: _unless_half(DECOMPOSITIONS[op]) if packet in _MATMULS else DECOMPOSITIONS[op]
    for packet in (*_MATMULS, aten.mean, aten.std, aten.std_mean, aten.var, aten.var_mean)
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if op in DECOMPOSITIONS
}
# On a CPU its kernel of float16 gives norms in float32, unlike its shape function.
_WEIGHT_NORM = aten._weight_norm_interface.default
ALWAYS[_WEIGHT_NORM] = lambda v, g, dim=0: (
    DECOMPOSITIONS[_WEIGHT_NORM](v, g, dim) if g.dtype is torch.float16 else NotImplemented
)
# On a CPU its kernel divides the gradient of an id by another id's frequency.
_OF_BAGS = aten._embedding_bag_backward.default
ALWAYS[_OF_BAGS] = lambda *args: DECOMPOSITIONS[_OF_BAGS](*args) if args[7] else NotImplemented


_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default)


# Operands that kernels require to have one dtype, while shape functions take any.
ONE_DTYPE: dict[OpOverload, tuple[int, ...]] = {
    aten._cdist_forward.default: (0, 1),
    aten._prelu_kernel.default: (0, 1),
    aten._softmax_backward_data.default: (0, 1),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.addbmm.default: (0, 1, 2),
    aten.addmm.default: (0, 1, 2),
    aten.addmv.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.binary_cross_entropy.default: (0, 1, 2),
    aten.bmm.default: (0, 1),
    aten.complex.default: (0, 1),
    aten.convolution.default: (0, 1, 2),
    aten.dot.default: (0, 1),
    aten.grid_sampler_2d.default: (0, 1),
    aten.grid_sampler_3d.default: (0, 1),
    aten.heaviside.default: (0, 1),
    aten.index_add.default: (0, 3),
    aten.index_copy.default: (0, 3),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
    aten.mm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_layer_norm.default: (0, 2, 3),
    aten.nll_loss_forward.default: (0, 2),
    aten.polar.default: (0, 1),
    aten.vdot.default: (0, 1),
}


# Ops in place whose kernels refuse a result that the tensor's dtype cannot hold, while shape
# functions cast it: their operands, or numbers like them.
PROMOTING: dict[OpOverload, Callable[..., Sequence[Any]]] = {
    aten.add_.Tensor: lambda other, *_: (other,),
    aten.sub_.Tensor: lambda other, *_: (other,),
    aten.mul_.Tensor: lambda other, *_: (other,),
    aten.mul_.Scalar: lambda other, *_: (other,),
    aten.addcmul_.default: lambda first, second, *_: (first, second),
    aten.addcdiv_.default: lambda first, second, *_: (first, second),
    aten.ldexp_.default: lambda *_: (1.0,),
    aten.logit_.default: lambda *_: (1.0,),
}


# Autograd nodes (torch 2.13) whose formulas read values to raise an error: for a second derivative
# at zeros, or for a gradient that does not exist as the loss depends on singular vectors' phase.
_CHECKING = (
    "IndexReduceBackward0", "LinalgEigBackward0", "LinalgEighBackward0", "LinalgSvdBackward0",
    "ScatterReduceBackward0",
)  # fmt: skip


def checks_in_gradient() -> bool:
    """Whether the value is asked for in such a formula. The answer ``True`` keeps the gradient and
    refuses the second derivative.
    """
    node = current_autograd_node()
    return node is not None and node.name() in _CHECKING


def is_deterministic(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op that torch tags as random draws nothing: attention and recurrent kernels
    without dropout.
    """
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in ("dropout_p", "dropout", "p") and value == 0:
            return True
        if argument.name in ("train", "training") and value is False:
            return True
    return False
