"""Inductor's Triton code for a GPU that is not there, and what its kernels compute, an op at a time
on a CPU.

Nothing of it takes Triton or a driver: the code is text, and integers are as wide here as in
Triton.
"""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ftp.ops.philox import AS_TENSOR_OPS

_H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=141 * 2**30,
)


def triton_code(run: Callable[..., Any], *example: Tensor) -> str:
    """The module that inductor writes for ``run`` on a GPU."""
    from torch._dynamo import device_interface
    from torch._guards import TracingContext, tracing
    from torch._inductor import config, scheduler  # noqa: F401  (whose names are replaced below)
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    class Faked(device_interface.CudaInterface):
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: _H200)
        get_compute_capability = staticmethod(lambda device=None: 90)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

    real = device_interface.get_interface_for_device
    with ExitStack() as stack:
        enter = stack.enter_context
        for module in [
            m
            for m in sys.modules.values()
            if m.__name__.startswith("torch.") and vars(m).get(real.__name__) is real
        ]:
            enter(
                mock.patch.object(
                    module,
                    real.__name__,
                    lambda device: Faked if torch.device(device).type == "cuda" else real(device),
                )
            )
        enter(mock.patch("torch.cuda.is_available", return_value=True))
        enter(mock.patch("torch.cuda.get_device_properties", return_value=_H200))
        enter(mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)))
        enter(mock.patch("torch.cuda._lazy_init"))
        enter(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value=""))
        enter(mock.patch("torch._inductor.scheduler.has_triton", return_value=True))
        mode = enter(FakeTensorMode())
        fake = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")
            for x in example
        ]
        gm = make_fx(
            run, decomposition_table={**select_decomp_table(), **AS_TENSOR_OPS}, tracing_mode="real"
        )(*fake)
        enter(torch.no_grad())
        enter(tracing(TracingContext(mode)))
        enter(config.patch({"triton.cudagraphs": False}))
        lowering = GraphLowering(gm, example_inputs=fake, is_inference=True)
        enter(V.set_debug_handler(DebugContext()))
        enter(V.set_graph_handler(lowering))
        lowering.run(*fake)
        return str(lowering.codegen()[0].value)


def run_kernel(code: str, operands: Sequence[Tensor], result: Tensor) -> Tensor:
    """Runs the only kernel of the code, all programs as one, on memory in the order of its
    pointers; returns ``result``, written to.
    """
    (kernel,) = re.findall(r"@triton\.jit\n(def .*?)'''", code, re.DOTALL)
    (signature,) = re.findall(r"def \w+\((.*)\):", kernel)
    names = [name.split(":")[0].strip() for name in signature.split(",")]
    pointers = [_Pointer(x) for x in (*operands, result)]
    assert len(pointers) == sum(
        name.endswith("numel") is False and name != "XBLOCK" for name in names
    ), signature
    scope: dict[str, Any] = {"tl": _language(), "triton": SimpleNamespace(jit=lambda f: f)}
    exec(kernel, scope)
    scope[kernel.split("(")[0].removeprefix("def ")](
        *pointers, result.numel(), XBLOCK=result.numel()
    )
    return result


class _Pointer:
    def __init__(self, memory: Tensor, at: Any = 0):
        self.memory, self.at = memory.view(-1), at

    def __add__(self, at: Any) -> "_Pointer":
        return _Pointer(self.memory, at)


class _Block:
    """A block of numbers; a number of Python's beside it is an int32 if it fits, else an int64."""

    def __init__(self, x: Tensor):
        self.x = x

    def to(self, dtype: torch.dtype) -> "_Block":
        return _Block(self.x.to(dtype))

    def __getitem__(self, at: Any) -> "_Block":
        return _Block(self.x[at])


def _tensor(x: Any) -> Tensor:
    if isinstance(x, _Block):
        return x.x
    return torch.tensor([x], dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64)


for name in [
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
]:
    dunder = f"__{name}__"
    setattr(_Block, dunder, lambda a, b, at=dunder: _Block(getattr(_tensor(a), at)(_tensor(b))))
    if name in ("add", "sub", "mul", "and", "or", "xor"):
        setattr(
            _Block,
            f"__r{name}__",
            lambda a, b, at=dunder: _Block(getattr(_tensor(b), at)(_tensor(a))),
        )


def _language() -> SimpleNamespace:
    def store(pointer: _Pointer, value: _Block, mask: Any = None) -> None:
        pointer.memory[_tensor(pointer.at).long()] = value.x

    return SimpleNamespace(
        constexpr=int,
        int1=torch.bool,
        int32=torch.int32,
        int64=torch.int64,
        program_id=lambda axis: 0,
        arange=lambda start, stop: _Block(torch.arange(start, stop, dtype=torch.int32)),
        full=lambda shape, value, dtype: _Block(torch.full(tuple(shape), value, dtype=dtype)),
        broadcast_to=lambda x, shape: _Block(x.x.expand(tuple(shape))),
        where=lambda which, a, b: _Block(torch.where(which.x, _tensor(a), _tensor(b))),
        load=lambda pointer, mask=None, **how: _Block(pointer.memory[_tensor(pointer.at).long()]),
        store=store,
    )
