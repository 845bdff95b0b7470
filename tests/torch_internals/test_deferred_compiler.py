"""torch's compiler is loaded where it is used, and works then as if it had been loaded before."""

import own_process  # type: ignore[import-not-found]
import pytest
from own_process import check  # type: ignore[import-not-found]

PROGRAM = """
import sys, torch, ftp
from ftp import P
from ftp.torch_internals import deferred_compiler

def is_loaded():
    return "torch._dynamo.convert_frame" in sys.modules

mesh = ftp.simulated_mesh((2,), ("tp",))
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 2))
fn, params = ftp.functionalize(model)
specs = ftp.plan(params, {"0.*": P("tp"), "2.weight": P(None, "tp"), "2.bias": P()})
opt = ftp.optim.from_torch(torch.optim.AdamW, fused=True)
state, x = opt.init(params), torch.randn(3, 4)

def train(params, state, x):
    # A constant of the trace: torch names it by a class of the compiler.
    def loss(params):
        return fn(params, x).square().mean() * torch.tensor(2.0)

    grads, loss = torch.func.grad_and_value(loss)(params)
    return (*opt.update(grads, state, params), loss)

of_state = opt.specs(params, specs)
step = ftp.spmd(train, mesh, (specs, of_state, P()), (specs, of_state, P()))
assert torch.allclose(step(params, state, x)[2], train(params, state, x)[2])
torch.nn.functional.scaled_dot_product_attention(*[torch.randn(1, 2, 3, 4)] * 3)
import torch._dynamo, torch._inductor.config
marked = torch.optim.Optimizer.add_param_group.__wrapped__
print(not is_loaded(), type(torch._dynamo).__name__, hasattr(marked, "__dynamo_disable"))

# The first use of the compiler is in the midst of a trace, under all of its modes.
def helped(x):
    return torch.vmap(torch.compile(lambda x: x.sin() + 1, backend="eager"))(x).sum()

y = torch.randn(4, dtype=torch.float64)
found, grad = ftp.shard(lambda p, x: helped(p * x), mesh, P("tp"), batch_specs=P("tp"))(y, y)
print(torch.allclose(found, (y * y).sin().sum() + 4), torch.allclose(grad, (y * y).cos() * y))
print(is_loaded(), type(torch._dynamo).__name__, torch._dynamo is sys.modules["torch._dynamo"])
from torch._dynamo.source import ConstantSource, is_from_source
print(ConstantSource.__module__, type(sys.modules["torch._dynamo.source"]).__name__)
# What was called in the meantime is kept out of compiled code all the same.
print(hasattr(marked, "__dynamo_disable"), deferred_compiler.is_deferred())
from torch._dynamo.testing import CompileCounter
from torch._inductor import standalone_compile
counter = CompileCounter()
compiled = torch.compile(lambda x: (x.cos() + 1).sum(), backend=counter, fullgraph=True)
is_right = torch.allclose(compiled(y), (y.cos() + 1).sum())
print(is_right, counter.frame_count, callable(standalone_compile))
deferred_compiler.defer()
print(type(torch._inductor).__name__)
"""


AT_ANOTHER_NAME = """
import sys, torch, ftp

mesh = ftp.simulated_mesh((2,), ("tp",))
y = torch.randn(4)
fn = lambda p, x: (p * x).sum() * torch.tensor(2.0)
ftp.shard(fn, mesh, ftp.P("tp"), batch_specs=ftp.P("tp"))(y, y)
assert "torch._dynamo.convert_frame" not in sys.modules
assert "torch._inductor.config" not in sys.modules
from torch._dynamo.source import ConstantSource, LocalSource
print(LocalSource("x").name, ConstantSource("x").name)
import torch._dynamo.source as source
print(source.ConstantSource.__module__, source.LocalSource is LocalSource)
"""

BISECTED = """
import sys, torch, ftp

mesh = ftp.simulated_mesh((2,), ("tp",))
y = torch.randn(4)
ftp.shard(lambda p, x: (p * x).mean(), mesh, ftp.P("tp"), batch_specs=ftp.P("tp"))(y, y)
print("torch._inductor.runtime" in sys.modules, "torch._dynamo.convert_frame" in sys.modules)
from torch._inductor.compiler_bisector import BACKENDS, CompilerBisector
print("torch._dynamo.convert_frame" in sys.modules, "inductor" in BACKENDS)
from torch._inductor.compiler_bisector import CompilerBisector
print(CompilerBisector.__module__, torch._inductor.compiler_bisector.BACKENDS is BACKENDS)
"""


def test_the_compiler_is_loaded_for_another_name_of_its_sources():
    check(AT_ANOTHER_NAME, ["L['x'] x", "torch._dynamo.source True"])
    check(BISECTED, ["False False", "True True", "torch._inductor.compiler_bisector True"])


OPTIONS = """
import sys, torch, ftp.tracing.recorder
from ftp.torch_internals.deferred_compiler import _InductorOptions
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer

def read_by_a_trace():
    return ProxyTorchDispatchMode(PythonKeyTracer(), "fake").emulate_precision_casts

print(read_by_a_trace(), "torch._inductor.config" in sys.modules)
import torch._inductor.config as config
own = _InductorOptions()
print(own.emulate_precision_casts is config.emulate_precision_casts)
print(own.trace.provenance_tracking_level == config.trace.provenance_tracking_level)
config.emulate_precision_casts = True
print(read_by_a_trace(), own.max_autotune is config.max_autotune)
"""


def test_a_trace_reads_inductors_options_without_their_module_and_as_they_are_set():
    check(OPTIONS, ["False False", "True", "True", "True True"])


IGNORED = """
import tokenize, torch
read, own = [], tokenize.tokenize
tokenize.tokenize = lambda given: (read.append(1), own(given))[1]
if {of_ftp}:
    import ftp
    ftp.spmd(torch.sum, ftp.simulated_mesh((2,), ("tp",)), ftp.P("tp"))(torch.ones(4))
import torch._dynamo.config as config, torch._functorch.config as other
print(bool(read))
print(config.get_hash().hex(), other.get_hash().hex())
"""


def test_a_trace_does_not_read_which_of_the_compilers_options_are_no_part_of_its_keys():
    found = [own_process.run(IGNORED.format(of_ftp=of_ftp)).stdout for of_ftp in (True, False)]
    (is_read, hashes), (is_read_by_torch, hashes_of_torch) = map(str.splitlines, found)
    assert (is_read, is_read_by_torch) == ("False", "True") and hashes == hashes_of_torch


@pytest.mark.slow
def test_the_compiler_is_loaded_at_its_first_use():
    expected = [
        "True _Deferred True",
        "True True",
        "True module True",
        "torch._dynamo.source module",
        "False False",
        "True 1 True",
        "module",
    ]
    check(PROGRAM, expected)
