"""torch.optim's classes as pure functions."""

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from ftp.errors import InputError, join_failures
from ftp.ops.fused_optimizer import fused_kernels, update_of, written
from ftp.optim.base import Optimizer, check_gradients, check_tensors
from ftp.optim.slots import Slots
from ftp.sharding.pytree import flatten, leaf_names, leaf_paths, match_patterns
from ftp.sharding.spec import P
from ftp.tensors.placement import Placement, placement, placement_of, remember


def from_torch(
    cls: type[torch.optim.Optimizer],
    *,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Optimizer:
    """A torch.optim class as pure functions of ``(grads, state, params)``, by its own formulas.

    Args:
        cls: AdamW, Adam, SGD, RMSprop, Adagrad, NAdam, RAdam, Adadelta, Adamax, ASGD, Rprop, Muon
            or Adafactor, or a class of your own whose ``step`` is tensor code.
        groups: ``{path pattern: options}`` for the parameters that a pattern names, as in
            ``ftp.plan``: other rates, no weight decay.
        options: as ``cls`` takes them. ``lr`` may be a schedule, a function of the number of
            updates done so far in tensor code (see ``ftp.optim.schedules``). ``fused=True`` takes
            torch's fused kernels, where ``cls`` has them (AdamW, Adam, SGD and Adagrad): the
            fastest without compilation; parameters that are ready together are updated in one call.
            ``foreach`` changes nothing.

    Raises:
        InputError: a class that cannot be pure, options that it refuses, a pattern that matches no
            parameter.

    >>> opt = from_torch(torch.optim.AdamW, lr=0.1, groups={"*.bias": {"weight_decay": 0.0}})
    >>> params = {"up.weight": torch.ones(2, 3), "up.bias": torch.ones(2)}
    >>> state = opt.init(params)
    >>> sorted(state["up.weight"])
    ['exp_avg', 'exp_avg_sq', 'step']
    >>> params, state = opt.update({"up.weight": torch.ones(2, 3), "up.bias": torch.ones(2)}, state, params)
    >>> params["up.bias"]
    tensor([0.9000, 0.9000])
    """
    _check_class(cls)
    chosen = _Torch(
        cls,
        [
            ("", options),
            *((pattern, {**options, **given}) for pattern, given in (groups or {}).items()),
        ],
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


def matched_patterns(patterns: Mapping[str, Any], params: Any) -> list[tuple[str, Any] | None]:
    failures: list[str] = []
    answers = [(path,) for path in leaf_paths(params)]
    found = match_patterns(patterns, answers, leaf_names(params, "params"), "params", failures)
    if failures:
        raise InputError(join_failures(failures))
    return found


def aligned(treedef: Any, tree: Any, name: str, like: str = "params") -> list[Any]:
    """What ``tree`` holds at each leaf of ``treedef``."""
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        raise InputError(f"{name} is not a tree as {like} is: {error}") from None


_CAPTURABLE = (torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop)


class _Torch:
    """Drives a torch.optim class on clones."""

    def __init__(
        self, cls: type[torch.optim.Optimizer], groups: Sequence[tuple[str, Mapping[str, Any]]]
    ):
        self.cls = cls
        self.patterns = [pattern for pattern, _ in groups]
        self.options = [dict(options) for _, options in groups]
        taken = inspect.signature(cls).parameters
        # Formulas for autograd are formulas without .item(); one tensor after another are ops that
        # have rules.
        self.forced = {
            k: v for k, v in {"differentiable": True, "foreach": False}.items() if k in taken
        }
        if issubclass(cls, _CAPTURABLE):
            self.forced["capturable"] = (
                True  # their other formulas branch on values, or write where a mask says
            )
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
        slots, cut = [], []
        made: dict[Any, Slots | None] = {}
        with torch.no_grad():
            for leaf, group, name in zip(leaves, groups, names, strict=True):
                known = placement_of(leaf)
                of = known if known is not None and known.mesh.kind == "process" else None
                key = group, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, of
                if key not in made or not self._starts_alike(leaf):
                    made[key] = found = (
                        self._first_slots(leaf.detach(), group)
                        if of is None
                        else self._of_shard(leaf, of, group)
                    )
                else:
                    first = made[key]
                    found = first and Slots(
                        {slot: value.clone() for slot, value in first.items()}, first.like
                    )
                if found is None:
                    cut.append(name)
                elif of is not None:
                    for slot, value in found.items():
                        spec = of.spec if slot in found.like else P()
                        remember(
                            value,
                            placement(
                                of.mesh,
                                spec,
                                of.shape if slot in found.like else tuple(value.shape),
                            ),
                        )
                slots.append(found)
        if cut:
            raise InputError(
                f"{', '.join(cut)}: shards of placed tensors, of which {self.cls.__name__} cannot"
                " tell the whole ones' state. Make it"
                " before ftp.device_put, on the meta device if need be, or with ftp.spmd(opt.init,"
                " mesh, (specs,), specs)(params)."
            )
        return treedef.unflatten(slots)

    def _of_shard(self, shard: Tensor, known: Placement, group: int) -> Slots | None:
        """This rank's part of the state of a placed parameter; None where the state may be of
        another shape, or look at values.
        """
        if not self._starts_alike(shard):
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

    def _starts_alike(self, param: Tensor) -> bool:
        """Whether the first state is that of any parameter of this shape: no class of torch's looks
        at values.

        In a trace it is made for each, as one would be cut with the other.
        """
        is_known = self.cls.__module__.startswith("torch.optim") or param.device.type == "meta"
        return (
            is_known
            and type(param) in (Tensor, torch.nn.Parameter)
            and not is_functorch_wrapped_tensor(param)
        )

    def _first_slots(self, param: Tensor, group: int) -> Slots:
        """The state before the first step: what a step's formulas find when they first look."""
        # SGD takes its first gradient for the momentum; a zero one is as good, but for dampening
        # (see ``update``).
        mine = torch.zeros_like(param) if issubclass(self.cls, torch.optim.SGD) else param.clone()
        first: dict[str, Any] = {}
        opt = self._make({k: v for k, v in self.options[group].items() if k != "fused"}, mine)
        for values in opt.state.values():
            first.update(
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in values.items()
                }
            )
        opt.state = defaultdict(lambda: _Recording(first))  # pyright: ignore[reportAttributeAccessIssue]
        if first:
            dict.update(
                opt.state[mine],
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in first.items()
                },
            )
        mine.grad = torch.zeros_like(mine)
        self._step(opt)
        if "step" not in first and self._counts(group):
            first["step"] = torch.zeros(())
        found = {}
        for name, value in first.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = torch.tensor(float(value))
            if isinstance(value, Tensor):
                counter = (
                    value.ndim == 0 and value.dtype.is_floating_point and param.device.type != "mps"
                )
                wide = (
                    torch.float32 if self.options[group].get("fused") else torch.float64
                )  # torch's kernels read float32
                found[name] = value.to(device=param.device, dtype=wide if counter else value.dtype)
        return Slots(
            found,
            [name for name, value in found.items() if value.shape == param.shape and param.ndim],
        )

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(params)
        grad_leaves, slots = aligned(treedef, grads, "grads"), aligned(treedef, state, "state")
        groups = self._groups(params)
        check_gradients(grad_leaves, leaves, leaf_names(params, "grads"))
        new_leaves, new_slots = list(leaves), list(slots)
        for group in range(len(self.options)):
            mine = [i for i, g in enumerate(groups) if g == group]
            if not mine:
                continue
            given = [[of[i] for i in mine] for of in (grad_leaves, slots, leaves)]
            new = self._run(group, *given)
            if self._is_dampened(group):
                bare = [
                    Slots({k: v for k, v in s.items() if k != "momentum_buffer"}, s.like)
                    for s in given[1]
                ]
                new = [
                    _select(s["step"] == 0, a, b)
                    for s, a, b in zip(
                        given[1], self._run(group, given[0], bare, given[2]), new, strict=True
                    )
                ]
            for i, (leaf, kept) in zip(mine, new, strict=True):
                new_leaves[i], new_slots[i] = leaf, kept
        return treedef.unflatten(new_leaves), treedef.unflatten(new_slots)

    def _run(
        self, group: int, grads: Sequence[Tensor], slots: Sequence[Slots], params: Sequence[Tensor]
    ) -> list[tuple[Tensor, Slots]]:
        prototype = self.prototypes[group]
        opt = copy.copy(prototype)
        clones = [param.clone() for param in params]
        for clone, grad in zip(clones, grads, strict=True):
            clone.grad = grad.to(clone.dtype)
        steps = [s.get("step") for s in slots]
        rate = self.options[group].get("lr")
        options = {"lr": rate(_widened(steps[0]))} if callable(rate) else {}
        if unfused := bool(self.options[group].get("fused")) and any(map(is_batchedtensor, params)):
            options |= {**self.forced, "fused": False}  # torch.vmap does not see into a kernel
        opt.param_groups = [{**prototype.param_groups[0], **options, "params": clones}]
        opt.state = defaultdict(dict)
        for clone, mine in zip(clones, slots, strict=True):
            opt.state[clone] = {
                name: _widened(v).clone() if unfused and name == "step" else v.clone()
                for name, v in mine.items()
            }
        before = [dict(opt.state[clone]) for clone in clones]
        self._step(opt)
        out = []
        for clone, mine, was, step in zip(clones, slots, before, steps, strict=True):
            now = opt.state[clone]
            kept = {
                name: now[name]
                for name in {**mine, **dict.fromkeys(mine.like)}
                if isinstance(now.get(name), Tensor)
            }
            if step is not None and kept["step"] is was["step"] and not self._owns_step(group):
                kept["step"] = step + 1
            kept = {
                name: value.to(mine[name].dtype) if name in mine else value
                for name, value in kept.items()
            }
            out.append((clone, Slots(kept, mine.like)))
        return out

    def _step(self, opt: torch.optim.Optimizer) -> None:
        if self.cls is torch.optim.Adafactor:
            _adafactor(opt)
            return
        fused = opt.param_groups[0].get("fused")
        with _OneByOne() if fused else _TensorScalars(), _captured_anywhere(self.cls):
            opt.step()

    def _groups(self, params: Any) -> list[int]:
        own = matched_patterns({p: i for i, p in enumerate(self.patterns) if i}, params)
        return [match[1] if match else 0 for match in own]

    def _owns_step(self, group: int) -> bool:
        """Whether the optimizer counts its steps by itself."""
        return not issubclass(self.cls, torch.optim.SGD | torch.optim.Muon)

    def _counts(self, group: int) -> bool:
        return callable(self.options[group].get("lr")) or self._is_dampened(group)

    def _is_dampened(self, group: int) -> bool:
        options = self.options[group]
        return (
            issubclass(self.cls, torch.optim.SGD)
            and bool(options.get("momentum"))
            and bool(options.get("dampening"))
        )


class _Recording(dict):
    """An optimizer's state of one parameter that notes what each slot first held."""

    def __init__(self, first: dict[str, Any]):
        super().__init__()
        self.first = first

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.first:
            self.first[name] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(name, value)


class _TensorScalars(TorchFunctionMode):
    """Formulas written for numbers, on 0-d tensors: no value is asked for, and a scale may be a
    tensor.
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


# In-place ops that torch.vmap takes apart, replica by replica, in their forms that return the new
# value.
_RETURNING: dict[Any, Callable[..., Tensor]] = {
    Tensor.addcdiv_: torch.addcdiv,
    Tensor.addcmul_: torch.addcmul,
    Tensor.clamp_: torch.clamp,
    Tensor.lerp_: torch.lerp,
}


def _widened(step: Any) -> Any:
    """A counter in float64, so that a schedule computes its rate in it; where there is none, as
    it is.
    """
    return step if step.device.type == "mps" else step.double()


class _OneByOne(TorchFunctionMode):
    """Calls of torch's fused kernels, on lists, as an op a parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "_foreach_add_":
            return None  # steps are counted up by the op
        if name not in fused_kernels():
            return func(*args, **kwargs)
        options = {k: v for k, v in kwargs.items() if k not in ("grad_scale", "found_inf")}
        if isinstance(rate := options["lr"], Tensor) and rate.device.type != "cpu":
            options["lr"] = rate.float()  # as those kernels read it
        for row in zip(*filter(None, args), strict=True):
            for old, new in zip(
                written(row), update_of(name, options["lr"])(list(row), **options), strict=True
            ):
                old.copy_(new)
        return None


@contextmanager
def _captured_anywhere(cls: type) -> Iterator[None]:
    """Formulas meant for graphs of a GPU's kernels serve on every device, where nothing is
    captured.
    """
    names = {kind.__module__ for kind in cls.__mro__ if kind in _CAPTURABLE}
    modules: list[Any] = [sys.modules[name] for name in names]
    saved = [module._get_capturable_supported_devices for module in modules]
    try:
        for module in modules:
            module._get_capturable_supported_devices = lambda *args, **kwargs: [
                "cpu",
                "cuda",
                "meta",
                "mps",
                "xpu",
            ]
        yield
    finally:
        for module, function in zip(modules, saved, strict=True):
            module._get_capturable_supported_devices = function


def _adafactor(opt: torch.optim.Optimizer) -> None:
    """A step of ``torch.optim.Adafactor``, whose own asks for values: the same formulas, with
    tensors for numbers.
    """
    (group,) = opt.param_groups
    for param in group["params"]:
        grad = -param.grad if group["maximize"] else param.grad
        state = opt.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            if grad.dim() > 1:
                state["row_var"], state["col_var"] = (
                    grad.new_zeros(*grad.shape[:-1], 1),
                    grad.new_zeros(*grad.shape[:-2], 1, grad.shape[-1]),
                )
            else:
                state["variance"] = torch.zeros_like(grad)
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
        state["step"] = step = state["step"] + 1
        new = (step ** group["beta2_decay"]).to(param.dtype)
        rate = (
            torch.clamp(step**-0.5, max=group["lr"])
            if not isinstance(group["lr"], Tensor)
            else torch.minimum(step**-0.5, group["lr"])
        )
        rate = torch.clamp(param.square().mean().sqrt(), min=eps2) * rate
        if group["weight_decay"] != 0:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        if grad.dim() > 1:
            row, col = state["row_var"], state["col_var"]
            state["row_var"] = row = row + (grad.square().mean(-1, keepdim=True) - row) * new
            state["col_var"] = col = col + (grad.square().mean(-2, keepdim=True) - col) * new
            variance = row * col / row.mean(-2, keepdim=True).clamp(min=eps1)
        else:
            state["variance"] = variance = (
                state["variance"] + (grad.square() - state["variance"]) * new
            )
        update = variance.clamp(min=eps1 * eps1).rsqrt() * grad
        param.sub_(
            update * (rate / torch.clamp(update.square().mean().sqrt() / group["d"], min=1.0))
        )


def _select(
    condition: Tensor, a: tuple[Tensor, Slots], b: tuple[Tensor, Slots]
) -> tuple[Tensor, Slots]:
    slots = {name: torch.where(condition, a[1][name], value) for name, value in b[1].items()}
    return torch.where(condition, a[0], b[0]), Slots(slots, b[1].like)
