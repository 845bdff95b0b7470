"""Run a step of a torch.optim optimizer in tensor code that reads no value, so that a trace can
record it.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from ftp.ops.fused_optimizer import fused_kernels, update_of, written
from ftp.torch_internals.fake_tensors import FakeTensor
from ftp.torch_internals.functorch import is_functorch_wrapped_tensor
from ftp.torch_internals.optimizers import unprofiled_step
from ftp.tracing.repeated_steps import RepeatedSteps, steps_of_trace
from ftp.tracing.replacements.replaced import replaced

# Classes whose formulas read no values only with capturable=True.
CAPTURABLE = (torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop)


def traceable_step(opt: torch.optim.Optimizer) -> list[Tensor]:
    """``opt.step()``, with 0-d tensors for its numbers; the new parameters."""
    (group,) = opt.param_groups
    if type(opt) is torch.optim.Adafactor:
        _adafactor(opt)
        return group["params"]
    if is_without_writes(opt):
        return _step_without_writes(opt)
    is_fused = bool(group.get("fused"))
    steps = None if is_fused or not _is_by_parameter(opt) else steps_of_trace()
    mode = _FusedByParameter() if is_fused else _TensorScalars()
    with mode, _capturable_on_every_device(type(opt)), _math_of_tensors():
        if steps is not None:
            return _step_by_parameter(opt, steps)
        opt.step()
    return group["params"]


def _is_by_parameter(opt: torch.optim.Optimizer) -> bool:
    """Whether a step of several parameters is a step of each, in their order, of one trace."""
    is_torchs = type(opt).__module__.startswith("torch.optim.") and unprofiled_step(type(opt))
    return bool(is_torchs) and all(type(x) is FakeTensor for x in _tensors(opt))


def _tensors(opt: torch.optim.Optimizer) -> list[Any]:
    """Parameters, gradients and their state."""
    tensors = [x for p in opt.param_groups[0]["params"] for x in (p, p.grad)]
    return [*tensors, *(x for state in opt.state.values() for x in state.values())]


def is_without_writes(opt: torch.optim.Optimizer) -> bool:
    """Whether a step by fused kernels is recorded by its results alone: in a trace, of a class of
    torch's, whose tensors are all different and outside of autograd, which sees the copies.
    """
    if not (opt.param_groups[0].get("fused") and _is_by_parameter(opt)):
        return False
    tensors = _tensors(opt)
    is_plain = not any(x.requires_grad for x in tensors)
    return is_plain and len({*map(id, tensors)}) == len(tensors)


def _step_without_writes(opt: torch.optim.Optimizer) -> list[Tensor]:
    """A step that writes to no tensor: parameters and state become the kernels' results."""
    new = {id(x): x for x in _tensors(opt)}
    with _FusedByParameter(new):
        unprofiled_step(type(opt))(opt)
    for state in opt.state.values():
        state.update({name: new.get(id(x), x) for name, x in state.items()})
    return [new.get(id(param), param) for param in opt.param_groups[0]["params"]]


def _step_by_parameter(opt: torch.optim.Optimizer, steps: RepeatedSteps) -> list[Tensor]:
    (group,), step = opt.param_groups, unprofiled_step(type(opt))
    options = [value for value in group.values() if isinstance(value, Tensor)]
    new_params = []
    for param in group["params"]:
        state = opt.state[param]

        def of_one(param: Tensor = param) -> Mapping[str, Tensor]:
            opt.param_groups = [{**group, "params": [param]}]
            step(opt)
            return {"param": param, **opt.state[param]}

        given = [param, param.grad, *state.values(), *options]
        new = dict(steps.take(tuple(state), given, of_one))
        new_params.append(new.pop("param", param))
        state.update(new)
    opt.param_groups = [group]
    return new_params


def cloned_together(groups: Sequence[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Clones of the tensors of each group; a trace records them like a step of one parameter."""
    are_fake = all(type(x) is FakeTensor for group in groups for x in group.values())
    steps = steps_of_trace() if are_fake else None
    for group in groups:

        def clones(group: Mapping[str, Tensor] = group) -> dict[str, Tensor]:
            return {name: x.clone() for name, x in group.items()}

        yield (
            clones()
            if steps is None
            else dict(steps.take(("clones", *group), list(group.values()), clones))
        )


class _TensorScalars(TorchFunctionMode):
    """Let formulas for Python numbers take 0-d tensors: ``item()`` returns the tensor, and
    ``alpha=`` and ``value=`` may be tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.item and args[0].ndim == 0:
            return args[0]
        for name in ("alpha", "value"):
            if isinstance(kwargs.get(name), Tensor):
                args = (args[0], args[1].to(args[0].dtype) * kwargs.pop(name), *args[2:])
        if func in _RETURNING and is_functorch_wrapped_tensor(args[0]):
            return args[0].copy_(_RETURNING[func](*args, **kwargs))
        return func(*args, **kwargs)


@contextmanager
def _math_of_tensors() -> Iterator[None]:
    """In a trace, let Python's math take 0-d tensors, as in ``math.sqrt(1 - beta2**step)``."""
    if get_proxy_mode() is None:
        yield
        return
    with replaced(math, {name: _of_tensors(name) for name in _MATH}):
        yield


_MATH = ("ceil", "cos", "exp", "floor", "isfinite", "log", "log2", "pow", "sin", "sqrt", "tanh")


def _of_tensors(name: str) -> Callable[..., Any]:
    plain, of_tensors = getattr(math, name), getattr(torch, name)

    def of(*args: Any) -> Any:
        if not any(isinstance(x, Tensor) for x in args):
            return plain(*args)
        args = tuple(x.detach().double() if isinstance(x, Tensor) else x for x in args)
        if name == "log" and len(args) == 2:
            return of_tensors(args[0]) / of(args[1])
        return of_tensors(*args)

    return of


# In-place ops that torch.vmap would run in a loop over the batch, and their out-of-place forms.
_RETURNING: dict[Any, Callable[..., Tensor]] = {
    Tensor.addcdiv_: torch.addcdiv,
    Tensor.addcmul_: torch.addcmul,
    Tensor.clamp_: torch.clamp,
    Tensor.lerp_: torch.lerp,
}


class _FusedByParameter(TorchFunctionMode):
    """Replace each call of a fused kernel on lists by one op per parameter.

    Args:
        new: by the ids of tensors, what replaces each. Results for others are written to them.
    """

    def __init__(self, new: dict[int, Tensor] | None = None):
        super().__init__()
        self._new = new or {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "_foreach_add_":
            return None  # the op increments the step counter
        if name not in fused_kernels():
            return func(*args, **kwargs)
        options = {k: v for k, v in kwargs.items() if k not in ("grad_scale", "found_inf")}
        if isinstance(rate := options["lr"], Tensor) and rate.device.type != "cpu":
            options["lr"] = rate.float()  # GPU kernels read float32
        for row in zip(*filter(None, args), strict=True):
            results = update_of(name, options["lr"])(list(row), **options)
            for old, new in zip(written(row), results, strict=True):
                if id(old) in self._new:
                    # A kernel's results are contiguous.
                    self._new[id(old)] = new if old.is_contiguous() else old.clone().copy_(new)
                else:
                    old.copy_(new)
        return None


@contextmanager
def _capturable_on_every_device(cls: type) -> Iterator[None]:
    """Allow ``capturable=True`` on every device; torch allows it only where it has CUDA graphs."""
    names = {kind.__module__ for kind in cls.__mro__ if kind in CAPTURABLE}
    modules: list[Any] = [sys.modules[name] for name in names]
    saved = [module._get_capturable_supported_devices for module in modules]
    every = ["cpu", "cuda", "meta", "mps", "xpu"]
    try:
        for module in modules:
            module._get_capturable_supported_devices = lambda *args, **kwargs: every
        yield
    finally:
        for module, function in zip(modules, saved, strict=True):
            module._get_capturable_supported_devices = function


def _adafactor(opt: torch.optim.Optimizer) -> None:
    """A step of ``torch.optim.Adafactor`` by its formulas; torch's code reads values."""
    (group,) = opt.param_groups
    for param in group["params"]:
        grad = -param.grad if group["maximize"] else param.grad
        state = opt.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            if grad.dim() > 1:
                state["row_var"] = grad.new_zeros(*grad.shape[:-1], 1)
                state["col_var"] = grad.new_zeros(*grad.shape[:-2], 1, grad.shape[-1])
            else:
                state["variance"] = torch.zeros_like(grad)
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
        state["step"] = step = state["step"] + 1
        new = (step ** group["beta2_decay"]).to(param.dtype)
        lr = group["lr"]
        rate = step**-0.5
        rate = torch.minimum(rate, lr) if isinstance(lr, Tensor) else torch.clamp(rate, max=lr)
        rate = torch.clamp(param.square().mean().sqrt(), min=eps2) * rate
        if group["weight_decay"] != 0:
            param.mul_(1 - lr * group["weight_decay"])
        if grad.dim() > 1:
            row, col = state["row_var"], state["col_var"]
            state["row_var"] = row = row + (grad.square().mean(-1, keepdim=True) - row) * new
            state["col_var"] = col = col + (grad.square().mean(-2, keepdim=True) - col) * new
            variance = row * col / row.mean(-2, keepdim=True).clamp(min=eps1)
        else:
            old = state["variance"]
            state["variance"] = variance = old + (grad.square() - old) * new
        update = variance.clamp(min=eps1 * eps1).rsqrt() * grad
        clipped = torch.clamp(update.square().mean().sqrt() / group["d"], min=1.0)
        param.sub_(update * (rate / clipped))
