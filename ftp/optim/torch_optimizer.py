"""torch.optim's classes as pure functions, by torch's own formulas.

Above 450 lines: one class, whose parts set up, try out and read the state of a torch optimizer.
"""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.errors import InputError
from ftp.optim.base import (
    Optimizer,
    aligned,
    check_gradients,
    check_tensors,
    distinct_paths,
    matched_patterns,
)
from ftp.optim.by_owner import check_matrices
from ftp.optim.owned_muon import check_owned, owned_step
from ftp.optim.slots import Slots
from ftp.optim.traceable_step import CAPTURABLE, traceable_step
from ftp.sharding.pytree import flatten, leaf_names
from ftp.sharding.spec import P
from ftp.tensors.placement import Placement, placement, placement_of, remember
from ftp.torch_internals import deferred_compiler
from ftp.torch_internals.functorch import is_batchedtensor, is_functorch_wrapped_tensor

deferred_compiler.defer()


def from_torch(
    cls: type[torch.optim.Optimizer],
    *,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    owned: bool | Sequence[str] = False,
    **options: Any,
) -> Optimizer:
    """Make a torch.optim class an ``Optimizer`` of pure functions, by torch's own formulas.

    Args:
        cls: AdamW, Adam, SGD, RMSprop, Adagrad, NAdam, RAdam, Adadelta, Adamax, ASGD, Rprop, Muon,
            Adafactor, or your own class if its ``step`` is tensor code and all its state is in
            ``self.state[param]``.
        groups: ``{path pattern: options}``, patterns as in ``ftp.plan``: options of the parameters
            that a pattern matches, such as another rate or no weight decay.
        owned: for Muon: in a sharded program each whole matrix is orthogonalized by one rank (see
            ``by_owner``); everything else stays sharded like the parameters.
            Leaves of more than two dims are stacks of matrices. A list names the mesh axes whose
            ranks own matrices.
        options: of ``cls``. ``lr`` may be a schedule, a function of the number of updates done so
            far (see ``ftp.optim.schedules``). ``fused=True`` uses torch's fused kernels (AdamW,
            Adam, SGD and Adagrad), the fastest without compilation. ``foreach`` has no effect.

    Raises:
        InputError: LBFGS or SparseAdam; options that ``cls`` refuses; ``owned`` of another class
            than Muon; your own class with state elsewhere; from ``init`` and ``update``,
            a pattern that matches no parameter, or trees that do not fit.

    >>> opt = from_torch(torch.optim.AdamW, lr=0.1, groups={"*.bias": {"weight_decay": 0.0}})
    >>> params = {"up.weight": torch.ones(2, 3), "up.bias": torch.ones(2)}
    >>> state = opt.init(params)
    >>> sorted(state["up.weight"])
    ['exp_avg', 'exp_avg_sq', 'step']
    >>> grads = {"up.weight": torch.ones(2, 3), "up.bias": torch.ones(2)}
    >>> params, state = opt.update(grads, state, params)
    >>> params["up.bias"]
    tensor([0.9000, 0.9000])
    """
    _check_class(cls)
    if owned:
        check_owned(cls, owned)
    chosen = _TorchOptimizer(
        cls,
        [
            ("", options),
            *((pattern, {**options, **given}) for pattern, given in (groups or {}).items()),
        ],
        owned,
    )
    return Optimizer(chosen.init, chosen.update)


_REFUSED = {
    "LBFGS": "it evaluates the loss several times in one step, through a closure, and stops by"
    " values",
    "SparseAdam": "it takes sparse gradients, and a program's tensors are dense; Adam does the"
    " same on dense ones",
}


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise InputError(
            f"from_torch takes a torch.optim class, such as torch.optim.AdamW, not {cls!r}."
        )
    for kind in cls.__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _REFUSED:
            raise InputError(
                f"torch.optim.{kind.__name__} cannot be made pure: {_REFUSED[kind.__name__]}."
            )


_IMPURE = (
    "{name} is not a function of its state per parameter: its step {step} on a small matrix"
    " differs from a step that starts from self.state[param] alone. Keep all state there as tensors"
    " and numbers, not in param_groups or attributes, with initial values from which the first step"
    " is like all others."
)


class _TorchOptimizer:
    """Runs a torch.optim class on clones of the parameters, with the state set beforehand."""

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        groups: Sequence[tuple[str, Mapping[str, Any]]],
        owned: bool | Sequence[str] = False,
    ):
        self.cls, self.owned = cls, owned
        self.patterns = [pattern for pattern, _ in groups]
        self.options = [dict(options) for _, options in groups]
        taken = inspect.signature(cls).parameters
        # `differentiable` formulas do without .item(); without `foreach` each op is on one tensor,
        # and has a rule.
        self.forced = {
            k: v for k, v in {"differentiable": True, "foreach": False}.items() if k in taken
        }
        if issubclass(cls, CAPTURABLE):
            # Their other formulas branch on values, or write through a mask.
            self.forced["capturable"] = True
        if "foreach" in taken:  # the same numbers either way
            self.options = [
                {k: v for k, v in given.items() if k != "foreach"} for given in self.options
            ]
        for key in {"capturable": 0, **self.forced}:
            if any(options.get(key) for options in self.options):
                raise InputError(
                    f"{cls.__name__}({key}=True) has no meaning in a program; leave it out."
                )
        self.prototypes = [self._make(options, torch.zeros(1, 1)) for options in self.options]
        # Whether the class counts its steps itself.
        self.owns_step = not issubclass(cls, torch.optim.SGD | torch.optim.Muon)
        if not cls.__module__.startswith("torch.optim"):
            for group in range(len(self.options)):
                self._try_out(group)

    def _try_out(self, group: int) -> None:
        """Take three steps of somebody's own class on a small matrix, by itself and as pure
        functions.

        Raises:
            InputError: the results differ: the class needs more than its state of each parameter.
        """
        start = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]], device="cpu")
        if get_proxy_mode() is not None or type(start) is not Tensor:
            return
        rate: Any = self.options[group].get("lr")
        theirs, ours = start.clone(), start
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            try:
                self.owns_step = "step" in self._recorded(start, group)
                opt, slots = self._make(self.options[group], theirs), self._first_slots(ours, group)
                for step in range(3):
                    grad = start.roll(step, 1) * (step + 1)
                    theirs.grad = grad.clone()
                    if callable(rate):
                        now: Any = rate(torch.tensor(float(step)))
                        opt.param_groups[0]["lr"] = float(now)
                    torch.manual_seed(step)
                    opt.step()
                    torch.manual_seed(step)
                    ((ours, slots),) = self._updated(group, [grad], [slots], [ours])
                    if not torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4, equal_nan=True):
                        raise InputError(_IMPURE.format(name=self.cls.__name__, step=step + 1))
            except InputError:
                raise
            except Exception:
                return  # it cannot be tried here, such as a class for GPUs alone

    def _make(self, options: Mapping[str, Any], param: Tensor) -> torch.optim.Optimizer:
        rate = options.get("lr")
        plain = (
            {**options, "lr": torch.as_tensor(rate(torch.zeros(()))).item()}
            if callable(rate)
            else options
        )
        make: Any = self.cls
        try:
            return make([param], **(plain if plain.get("fused") else {**plain, **self.forced}))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"torch.optim.{self.cls.__name__} refuses its options: {error}"
            ) from None

    def init(self, params: Any) -> Any:
        leaves, treedef = flatten(params)
        groups = self._groups(params)
        names = leaf_names(params, "params")
        check_tensors(leaves, names)
        if self.owned:
            check_matrices(leaves, names)
        first: dict[Any, Slots | None] = {}
        with torch.no_grad():
            slots = [
                self._first_of(leaf, group, first)
                for leaf, group in zip(leaves, groups, strict=True)
            ]
        cut = [name for name, found in zip(names, slots, strict=True) if found is None]
        if cut:
            raise InputError(
                f"{', '.join(cut)}: from shards of placed tensors {self.cls.__name__} cannot"
                " make its global state. Make the state before ftp.device_put, on the meta device"
                " if need be, or with ftp.spmd(opt.init, mesh, (specs,), specs)(params)."
            )
        return treedef.unflatten(slots)

    def _first_of(self, param: Tensor, group: int, known: dict[Any, Slots | None]) -> Slots | None:
        """The first state of a parameter; for a shard, its shard; None if unknown.

        Args:
            known: states made so far; parameters of equal shape have equal ones.
        """
        placed = placement_of(param)
        of = placed if placed is not None and placed.mesh.kind == "process" else None
        key = group, param.shape, param.stride(), param.dtype, param.device, of
        if key in known and self._is_value_independent(param):
            first = known[key]
            found = first and Slots({k: v.clone() for k, v in first.items()}, first.like)
        elif of is None:
            found = known[key] = self._first_slots(param.detach(), group)
        else:
            found = known[key] = self._of_shard(param, of, group)
        if found is not None and of is not None:
            for slot, value in found.items():
                is_like = slot in found.like
                spec, shape = (of.spec, of.shape) if is_like else (P(), tuple(value.shape))
                remember(value, placement(of.mesh, spec, shape))
        return found

    def _of_shard(self, shard: Tensor, known: Placement, group: int) -> Slots | None:
        """The state of a shard of a placed parameter; None if it depends on values, or its shape
        does not follow from the shard's.
        """
        if not self._is_value_independent(shard):
            return None
        whole = self._first_slots(torch.empty(known.shape, dtype=shard.dtype, device="meta"), group)
        here = self._first_slots(shard.detach(), group)
        if any(
            here[slot].shape != value.shape
            for slot, value in whole.items()
            if slot not in whole.like
        ):
            return None
        return Slots(dict(here), whole.like)

    def _is_value_independent(self, param: Tensor) -> bool:
        """Whether the first state depends only on the parameter's shape, as with torch's classes.

        In a trace each parameter makes its own: a shared one would be sharded for all of them.
        """
        is_known = self.cls.__module__.startswith("torch.optim") or param.device.type == "meta"
        return (
            is_known
            and type(param) in (Tensor, torch.nn.Parameter)
            and not is_functorch_wrapped_tensor(param)
        )

    def _first_slots(self, param: Tensor, group: int) -> Slots:
        """The state before the first step: the value that each slot has when a step first reads it.

        A step with a zero gradient is run, and the first value of each slot recorded.
        """
        if self.owned and param.ndim > 2:  # a stack of matrices; Muon's momentum starts at zero
            of_one = self._first_slots(param.new_zeros(param.shape[-2:]), group)
            return Slots(
                {k: v.new_zeros(param.shape) if k in of_one.like else v for k, v in of_one.items()},
                of_one.like,
            )
        first = self._recorded(param, group)
        if "step" not in first and self._counts(group):
            first["step"] = torch.zeros(())
        # A scalar's moments have the shape of a counter: a vector's tell which they are.
        of_vector = () if param.ndim else self._first_slots(param.new_zeros(2), group).like
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
                found[name] = value.to(param.device, self._slot_dtype(value, param.device, group))
        return Slots(found, like)

    def _recorded(self, param: Tensor, group: int) -> dict[str, Any]:
        """The value that each slot of the class has when a step first reads it."""
        # SGD's first momentum is its first gradient. Zero gives the same update, unless dampened
        # (see ``_updated``).
        mine = torch.zeros_like(param) if issubclass(self.cls, torch.optim.SGD) else param.clone()
        opt = self._make({k: v for k, v in self.options[group].items() if k != "fused"}, mine)
        first: dict[str, Any] = {}
        for values in opt.state.values():
            first.update(_cloned(values))
        recording: Any = defaultdict(lambda: _RecordedState(first))
        opt.state = recording
        if first:
            dict.update(opt.state[mine], _cloned(first))
        mine.grad = torch.zeros_like(mine)
        traceable_step(opt)
        return first

    def _slot_dtype(self, value: Tensor, device: torch.device, group: int) -> torch.dtype:
        """The dtype of a slot of another shape than the parameter's: step counters in float64, so
        that a schedule computes its rate in it; torch's fused kernels read float32.
        """
        if value.ndim or not value.dtype.is_floating_point or device.type == "mps":
            return value.dtype
        return torch.float32 if self.options[group].get("fused") else torch.float64

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(params)
        grad_leaves, slots = aligned(treedef, grads, "grads"), aligned(treedef, state, "state")
        groups = self._groups(params)
        check_gradients(grad_leaves, leaves, leaf_names(params, "grads"))
        if self.owned and leaves:
            check_matrices(leaves, leaf_names(params, "params"))
            new = owned_step(
                [partial(self._run, group) for group in groups],
                grad_leaves,
                slots,
                leaves,
                distinct_paths(params),
                None if self.owned is True else self.owned,
            )
            return treedef.unflatten([x for x, _ in new]), treedef.unflatten([s for _, s in new])
        new_leaves, new_slots = list(leaves), list(slots)
        for group in range(len(self.options)):
            mine = [i for i, g in enumerate(groups) if g == group]
            if not mine:
                continue
            own_grads, own_slots, own_leaves = (
                [of[i] for i in mine] for of in (grad_leaves, slots, leaves)
            )
            new = self._updated(group, own_grads, own_slots, own_leaves)
            for i, (leaf, kept) in zip(mine, new, strict=True):
                new_leaves[i], new_slots[i] = leaf, kept
        return treedef.unflatten(new_leaves), treedef.unflatten(new_slots)

    def _updated(
        self, group: int, grads: Sequence[Tensor], slots: Sequence[Slots], params: Sequence[Tensor]
    ) -> list[tuple[Tensor, Slots]]:
        """Per parameter its new value and state."""
        dampened = self._run(group, grads, slots, params)
        if not self._is_dampened(group):
            return dampened
        # At step 0 SGD's momentum is the gradient itself, not dampened.
        bare = [
            Slots({k: v for k, v in s.items() if k != "momentum_buffer"}, s.like) for s in slots
        ]
        first = self._run(group, grads, bare, params)
        return [
            _select(s["step"] == 0, a, b) for s, a, b in zip(slots, first, dampened, strict=True)
        ]

    def _run(
        self, group: int, grads: Sequence[Tensor], slots: Sequence[Slots], params: Sequence[Tensor]
    ) -> list[tuple[Tensor, Slots]]:
        """One step on clones: per parameter its new value and state."""
        clones = [param.clone() for param in params]
        for clone, grad in zip(clones, grads, strict=True):
            clone.grad = grad.to(clone.dtype)
        opt = self._set_up(group, clones, slots)
        before = [dict(opt.state[clone]) for clone in clones]
        traceable_step(opt)
        return [
            (clone, self._kept(mine, was, opt.state[clone]))
            for clone, mine, was in zip(clones, slots, before, strict=True)
        ]

    def _set_up(
        self, group: int, clones: list[Tensor], slots: Sequence[Slots]
    ) -> torch.optim.Optimizer:
        """An optimizer of the clones, with their state and the rate of this step."""
        prototype = self.prototypes[group]
        opt = object.__new__(self.cls)  # a copy by torch's means lacks attributes
        vars(opt).update(vars(prototype))
        rate = self.options[group].get("lr")
        options = {"lr": rate(_widened(slots[0].get("step")))} if callable(rate) else {}
        # torch.vmap does not see into a kernel.
        unfused = bool(self.options[group].get("fused")) and any(map(is_batchedtensor, clones))
        if unfused:
            options |= {**self.forced, "fused": False}
        opt.param_groups = [{**prototype.param_groups[0], **options, "params": clones}]
        opt.state = defaultdict(dict)
        for clone, mine in zip(clones, slots, strict=True):
            opt.state[clone] = {
                name: _widened(v).clone() if unfused and name == "step" else v.clone()
                for name, v in mine.items()
            }
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

    def _groups(self, params: Any) -> list[int]:
        own = matched_patterns({p: i for i, p in enumerate(self.patterns) if i}, params)
        return [match[1] if match else 0 for match in own]

    def _counts(self, group: int) -> bool:
        return callable(self.options[group].get("lr")) or self._is_dampened(group)

    def _is_dampened(self, group: int) -> bool:
        options = self.options[group]
        return (
            issubclass(self.cls, torch.optim.SGD)
            and bool(options.get("momentum"))
            and bool(options.get("dampening"))
        )


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


def _widened(step: Any) -> Any:
    """A step counter in float64 where the device has it."""
    return step if step.device.type == "mps" else step.double()


def _select(
    condition: Tensor, a: tuple[Tensor, Slots], b: tuple[Tensor, Slots]
) -> tuple[Tensor, Slots]:
    slots = {name: torch.where(condition, a[1][name], value) for name, value in b[1].items()}
    return torch.where(condition, a[0], b[0]), Slots(slots, b[1].like)
