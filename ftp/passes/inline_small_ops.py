"""Inline small matmuls and updates as formulas, which inductor fuses: calling their kernels costs
more than their work.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ftp.ops.fused_optimizer import ADAM, ADAMW
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.meta_results import FakeOf
from ftp.passes.copy_elimination import copied
from ftp.torch_internals.deferred_symbols import keep_unused_numbers
from ftp.torch_internals.fake_tensors import FakeTensorMode

aten = torch.ops.aten
MATMUL = 1 << 12  # multiplications up to which a matmul is written as a formula
UPDATE = 1 << 10  # elements of a parameter up to which its update is written as a formula


def small_updates(graph: fx.Graph) -> fx.Graph:
    """The graph with ``ftp.fused_adam`` and ``fused_adamw`` of small parameters on CPUs written as
    formulas. It must come from `with_values`.
    """
    new, _ = copied(graph)
    for node in list(new.nodes):
        if node.target in _FORMULAS and _is_small(node):
            given = list(node.args[0])
            values = [x.meta["val"] for x in given]
            layout = tuple((tuple(v.shape), v.stride(), v.dtype) for v in values)
            formula = _traced(_FORMULAS[node.target], layout, tuple(sorted(node.kwargs.items())))
            env = dict(zip((n for n in formula.nodes if n.op == "placeholder"), given, strict=True))
            results: Sequence[fx.Node] = ()
            with new.inserting_before(node):
                for made in formula.nodes:
                    if made.op == "call_function":
                        env[made] = new.call_function(
                            made.target, *mapped_arguments(made, env.__getitem__)
                        )
                        env[made].meta.update({**node.meta, "val": made.meta["val"]})
                    elif made.op == "output":
                        results = [env[n] for n in made.args[0]]
            for item in list(node.users):
                item.replace_all_uses_with(results[item.args[1]])
                new.erase_node(item)
            new.erase_node(node)
    return new


def _is_small(node: fx.Node) -> bool:
    # Decided by the rank's shard: a replicated parameter has one size, so all ranks agree.
    first = node.args[0][0].meta["val"]  # type: ignore[index,union-attr]
    return (
        not first._has_symbolic_sizes_strides
        and first.numel() <= UPDATE
        and first.device.type == "cpu"
        and first.is_floating_point()
        and not node.kwargs["amsgrad"]
    )


@cache
def _traced(
    formula: Callable[..., Any], layout: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> fx.Graph:
    # Ops on fake tensors would load DTensor.
    given = [
        torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        for shape, stride, dtype in layout
    ]

    def run(*tensors: Tensor) -> list[Tensor]:
        keep_unused_numbers()
        return formula(*tensors, **dict(options))

    graph = make_fx(run, tracing_mode="real")(*given).graph
    fake, cpu = FakeOf(FakeTensorMode()), torch.device("cpu")
    for node in graph.nodes:
        if isinstance(meta := node.meta.get("val"), Tensor):
            node.meta["val"] = fake.like(meta, cpu)
    return graph


def _adam(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    is_decoupled: bool,
    **_: Any,
) -> list[Tensor]:
    """The formula of torch's kernel (``FusedAdamKernel.cpp``), with its corrections in float64."""
    step = step + 1
    count = step.double()
    grad = -grad if maximize else grad
    if weight_decay and is_decoupled:
        param = param * (1 - lr * weight_decay)
    elif weight_decay:
        grad = grad + param * weight_decay
    mean = aten.lerp.Scalar(mean, grad, 1 - beta1)
    square = square * beta2 + (1 - beta2) * grad * grad
    size = (lr / (1 - beta1**count)).to(param.dtype)
    correction = torch.sqrt(1 - beta2**count).to(param.dtype)
    param = param - size * mean / (torch.sqrt(square) / correction + eps)
    return [param, mean, square, step]


def _adamw(*tensors: Tensor, **options: Any) -> list[Tensor]:
    return _adam(*tensors, **options, is_decoupled=True)


def _adam_with_decay(*tensors: Tensor, **options: Any) -> list[Tensor]:
    return _adam(*tensors, **options, is_decoupled=False)


_FORMULAS: dict[Any, Callable[..., list[Tensor]]] = {
    ADAMW: _adamw,
    ADAM: _adam_with_decay,
}


def small_matmuls() -> dict[Any, Callable[..., Any]]:
    """Decompositions for small matmuls; a matmul with many multiplications returns NotImplemented
    and stays.
    """
    return {aten.mm.default: _mm, aten.addmm.default: _addmm}


def _mm(a: Tensor, b: Tensor) -> Any:
    sizes = *a.shape, b.shape[1]
    # One graph serves small and large sizes, so symbolic ones stay a matmul.
    if a.device.type != "cpu" or any(isinstance(n, torch.SymInt) for n in sizes):
        return NotImplemented
    if math.prod(sizes) > MATMUL:
        return NotImplemented
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    matmul = _mm(a, b) if beta == alpha == 1 else NotImplemented
    return matmul if matmul is NotImplemented else matmul + bias
