"""A torch.optim class as a pure function of gradients, state and parameters."""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.errors import InputError
from ftp.optim.slots import Slots
from ftp.optim.traceable_step import (
    CAPTURABLE,
    cloned_together,
    is_without_writes,
    traceable_step,
)
from ftp.torch_internals import deferred_compiler
from ftp.torch_internals.functorch import is_batchedtensor, is_functorch_wrapped_tensor

deferred_compiler.defer()

_IMPURE = (
    "{name} is not a function of its state per parameter: its step {step} on a small matrix"
    " differs from a step that starts from self.state[param] alone. Keep all state there as tensors"
    " and numbers, not in param_groups or attributes, with initial values from which the first step"
    " is like all others."
)


class TorchClass:
    """A torch.optim class with options. A step runs it on clones of the parameters and their state.

    Args:
        owned: whether a leaf of more than two dims is a stack of matrices, as for Muon.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], options: Mapping[str, Any], owned: bool):
        self.cls, self.owned, self.options = cls, owned, dict(options)
        taken = inspect.signature(cls).parameters
        # `differentiable` formulas avoid .item(); without `foreach` ops take one tensor and have
        # rules.
        self.forced = {
            k: v for k, v in {"differentiable": True, "foreach": False}.items() if k in taken
        }
        if issubclass(cls, CAPTURABLE):
            # Their formulas without it branch on values, or write through a mask.
            self.forced["capturable"] = True
        if "foreach" in taken:  # the same numbers either way
            self.options.pop("foreach", None)
        for key in {"capturable": 0, **self.forced}:
            if self.options.get(key):
                raise InputError(
                    f"{cls.__name__}({key}=True) has no meaning in a program; leave it out."
                )
        self._of_meta: dict[Any, Slots] = {}
        self.prototype = self._make(torch.zeros(1, 1))
        # Whether the class counts its steps itself.
        self.owns_step = not issubclass(cls, torch.optim.SGD | torch.optim.Muon)
        if not cls.__module__.startswith("torch.optim"):
            self._try_out()

    def _try_out(self) -> None:
        """Take three steps of a user's class on a small matrix, both by ``step()`` and as a pure
        function.

        Raises:
            InputError: the results differ: the class has state outside of ``self.state[param]``.
        """
        start = torch.tensor(
            [[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]], device="cpu", dtype=torch.float64
        )
        if get_proxy_mode() is not None or type(start) is not Tensor:
            return
        rate: Any = self.options.get("lr")
        theirs, ours = start.clone(), start
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            try:
                self.owns_step = "step" in self._recorded(start)
                opt, slots = self._make(theirs), self.first_slots(ours)
                for step in range(3):
                    grad = start.roll(step, 1) * (step + 1)
                    theirs.grad = grad.clone()
                    if callable(rate):
                        now: Any = rate(torch.tensor(float(step)))
                        opt.param_groups[0]["lr"] = float(now)
                    torch.manual_seed(step)
                    opt.step()
                    torch.manual_seed(step)
                    ((ours, slots),) = self.updated([grad], [slots], [ours])
                    if not _moves_alike(theirs - start, ours - start):
                        raise InputError(_IMPURE.format(name=self.cls.__name__, step=step + 1))
            except InputError:
                raise
            except Exception:
                return  # it cannot be tried here, such as a class for GPUs only

    def _make(self, param: Tensor, *, is_unfused: bool = False) -> torch.optim.Optimizer:
        options = {k: v for k, v in self.options.items() if not (is_unfused and k == "fused")}
        if callable(rate := options.get("lr")):
            options["lr"] = torch.as_tensor(rate(torch.zeros(()))).item()
        options |= {} if options.get("fused") else self.forced
        make: Any = self.cls
        try:
            return make([param], **options)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"torch.optim.{self.cls.__name__} refuses its options: {error}"
            ) from None

    def is_value_independent(self, param: Tensor) -> bool:
        """Whether the first state depends only on the parameter's shape, as for torch's classes.

        In a trace each parameter makes a state of its own: a shared one would have one sharding.
        """
        is_known = self.cls.__module__.startswith("torch.optim") or param.device.type == "meta"
        return (
            is_known
            and type(param) in (Tensor, torch.nn.Parameter)
            and not is_functorch_wrapped_tensor(param)
        )

    def first_slots(self, param: Tensor) -> Slots:
        """The state before the first step: the value of each slot when a step first reads it. That
        of a meta tensor is found once; specs, and the states of shards, ask for its shapes.
        """
        if not param.is_meta or not self.is_value_independent(param):
            return self._first_slots(param)
        key = param.shape, param.stride(), param.dtype
        if key not in self._of_meta:
            self._of_meta[key] = self._first_slots(param)
        found = self._of_meta[key]
        return Slots({slot: value.clone() for slot, value in found.items()}, found.like)

    def _first_slots(self, param: Tensor) -> Slots:
        if self.owned and param.ndim > 2:  # a stack of matrices; Muon's momentum starts at zero
            of_one = self.first_slots(param.new_zeros(param.shape[-2:]))
            return Slots(
                {k: v.new_zeros(param.shape) if k in of_one.like else v for k, v in of_one.items()},
                of_one.like,
            )
        try:
            first = self._recorded(param)
        except RuntimeError:
            if not param.is_meta:
                raise
            # A step that decides by values, which meta tensors lack.
            first = self._recorded(torch.zeros_like(param, device="cpu"))
        if "step" not in first and (callable(self.options.get("lr")) or self._is_dampened()):
            first["step"] = torch.zeros(())
        # A scalar's moments have a counter's shape, so the names are those of a vector's moments.
        of_vector = () if param.ndim else self.first_slots(param.new_zeros(2)).like
        found, like = {}, []
        for name, value in first.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = torch.tensor(float(value))
            if not isinstance(value, Tensor):
                continue
            if name in of_vector or (param.ndim and value.shape == param.shape):
                like.append(name)
                found[name] = value.to(param.device)
            else:
                found[name] = value.to(param.device, self._slot_dtype(value, param.device))
        return Slots(found, like)

    def _recorded(self, param: Tensor) -> dict[str, Any]:
        """The value of each slot of the class when a step first reads it, recorded in a step with a
        zero gradient.
        """
        # SGD's first momentum is the first gradient. A momentum of zero gives the same update,
        # unless dampened (see ``updated``).
        mine = torch.zeros_like(param) if issubclass(self.cls, torch.optim.SGD) else param.clone()
        opt = self._make(mine, is_unfused=True)
        first: dict[str, Any] = {}
        for values in opt.state.values():
            first.update(_cloned(values))
        recording: Any = defaultdict(lambda: _RecordedState(first))
        opt.state = recording
        if first:
            dict.update(opt.state[mine], _cloned(first))
        mine.grad = torch.zeros_like(mine)
        # A class of the user's may make state on the default device.
        with mine.device if mine.is_meta else nullcontext():
            traceable_step(opt)
        return first

    def _slot_dtype(self, value: Tensor, device: torch.device) -> torch.dtype:
        """The dtype of a slot of another shape than the parameter's. Step counters are in float64,
        so that schedules compute in it, or in float32 for torch's fused kernels.
        """
        if value.ndim or not value.dtype.is_floating_point or device.type == "mps":
            return value.dtype
        return torch.float32 if self.options.get("fused") else torch.float64

    def updated(
        self, grads: Sequence[Tensor], slots: Sequence[Slots], params: Sequence[Tensor]
    ) -> list[tuple[Tensor, Slots]]:
        """Per parameter its new value and state."""
        dampened = self.run(grads, slots, params)
        if not self._is_dampened():
            return dampened
        # At step 0 SGD's momentum is the undampened gradient.
        bare = [
            Slots({k: v for k, v in s.items() if k != "momentum_buffer"}, s.like) for s in slots
        ]
        first = self.run(grads, bare, params)
        return [
            _select(s["step"] == 0, a, b) for s, a, b in zip(slots, first, dampened, strict=True)
        ]

    def run(
        self, grads: Sequence[Tensor], slots: Sequence[Slots], params: Sequence[Tensor]
    ) -> list[tuple[Tensor, Slots]]:
        """One step on clones: per parameter its new value and state."""
        clones = [one["param"] for one in cloned_together([{"param": p} for p in params])]
        for clone, grad in zip(clones, grads, strict=True):
            clone.grad = grad.to(clone.dtype)
        opt = self._set_up(clones, slots)
        before = [dict(opt.state[clone]) for clone in clones]
        new = traceable_step(opt)
        return [
            (param, self._kept(mine, was, opt.state[clone]))
            for param, clone, mine, was in zip(new, clones, slots, before, strict=True)
        ]

    def _set_up(self, clones: list[Tensor], slots: Sequence[Slots]) -> torch.optim.Optimizer:
        """An optimizer of the clones, with their state and the rate of this step."""
        opt = object.__new__(self.cls)  # copy.copy would lose attributes
        vars(opt).update(vars(self.prototype))
        rate = self.options.get("lr")
        options = {"lr": rate(_widened(slots[0].get("step")))} if callable(rate) else {}
        fused = bool(self.options.get("fused"))
        # torch.vmap does not see into a fused kernel.
        unfused = fused and any(map(is_batchedtensor, clones))
        if unfused:
            options |= {**self.forced, "fused": False}
        if issubclass(self.cls, torch.optim.Adam) and (unfused or not fused):
            options |= _safe_at_zero(**{**self.prototype.param_groups[0], **options})
        opt.param_groups = [{**self.prototype.param_groups[0], **options, "params": clones}]
        opt.state = defaultdict(dict, zip(clones, map(dict, slots), strict=True))
        if is_without_writes(opt):
            return opt
        for clone, state in zip(clones, cloned_together(slots), strict=True):
            if unfused and "step" in state:
                state["step"] = _widened(state["step"])
            opt.state[clone] = state
        return opt

    def _kept(self, old: Slots, before: Mapping[str, Any], now: Mapping[str, Any]) -> Slots:
        """A parameter's state after a step, in the dtypes of ``old``."""
        kept = {
            name: now[name]
            for name in {**old, **dict.fromkeys(old.like)}
            if isinstance(now.get(name), Tensor)
        }
        step = old.get("step")
        if step is not None and kept["step"] is before["step"] and not self.owns_step:
            kept["step"] = step + 1
        return Slots(
            {name: v.to(old[name].dtype) if name in old else v for name, v in kept.items()},
            old.like,
        )

    def _is_dampened(self) -> bool:
        options = self.options
        return (
            issubclass(self.cls, torch.optim.SGD)
            and bool(options.get("momentum"))
            and bool(options.get("dampening"))
        )


def _moves_alike(theirs: Tensor, ours: Tensor) -> bool:
    """Whether two changes of a parameter are equal, however small the rate makes them."""
    largest = float(theirs.nan_to_num().abs().max())
    return torch.allclose(theirs, ours, rtol=0, atol=1e-4 * largest, equal_nan=True)


class _RecordedState(dict):
    """State of one parameter that records the first value of each slot."""

    def __init__(self, first: dict[str, Any]):
        super().__init__()
        self.first = first

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.first:
            self.first[name] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def _cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def _safe_at_zero(lr: float | Tensor, eps: float, **_: Any) -> dict[str, Any]:
    """A rate and an epsilon with which a rate of zero changes nothing. Adam's formula in tensors
    divides the denominator by the rate, so that without a gradient it would be 0 / 0; with these it
    is infinite.
    """
    if not isinstance(lr, Tensor):
        return {} if lr else {"lr": _NO_RATE, "eps": torch.inf}
    is_zero = lr == 0
    if lr.dtype not in (torch.float32, torch.float64):
        lr = lr.float()  # 16 bits hold neither rate nor epsilon
    all_eps = _widened(torch.full_like(lr, 1.0)) * eps
    return {"lr": lr.masked_fill(is_zero, _NO_RATE), "eps": all_eps.masked_fill(is_zero, torch.inf)}


_NO_RATE = 1e-30  # whose products with roots of moments are numbers in float32


def _widened(number: Any) -> Any:
    """A step counter, or another number, in float64 where the device has it."""
    return number if number.device.type == "mps" else number.double()


def _select(
    condition: Tensor, a: tuple[Tensor, Slots], b: tuple[Tensor, Slots]
) -> tuple[Tensor, Slots]:
    slots = {name: torch.where(condition, a[1][name], value) for name, value in b[1].items()}
    return torch.where(condition, a[0], b[0]), Slots(slots, b[1].like)
