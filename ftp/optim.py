"""torch.optim's optimizers as pure functions, and what goes with them in a train step: clipping, averages, accumulation.

A torch.optim class is driven on clones of the parameters with the state set beforehand, so that its formulas are torch's own.
"""

import copy
import functools
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from ftp import schedules as schedules
from ftp.errors import InputError, SpecError, join_failures
from ftp.fused import fused_kernels, update_of, written
from ftp.placement import Placement, placement, placement_of, remember
from ftp.slots import Slots
from ftp.spec import P
from ftp.tree import broadcast_specs, dotted, flatten, kind_of, leaf_names, leaf_paths, match_patterns


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions.

    Attributes:
        init: ``params -> state``, a tree as ``params`` is with the ``Slots`` ``{slot: tensor}`` of each parameter as its leaves; of placed
            shards, this rank's part of it.
        update: ``(grads, state, params) -> (params, state)``.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]

    def specs(self, params: Any, specs: Any, patterns: Mapping[str, P] | None = None) -> Any:
        """The spec tree of the state: a slot shaped as its parameter takes the parameter's spec, others are replicated.

        Args:
            params: the parameters, or meta tensors of their shapes.
            specs: their spec tree, or a prefix of one.
            patterns: ``{pattern: P}`` over paths of the state such as ``"**.exp_avg*"``, for slots with a spec of their own.

        Raises:
            SpecError: specs that do not fit ``params``, a pattern that matches no slot, patterns that disagree.

        >>> opt = from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> opt.specs({"w": torch.ones(4, 2)}, P("tp"), {"**.momentum_buffer": P("dp")})
        {'w': {'momentum_buffer': P('dp')}}
        """
        leaves, treedef = flatten(params)
        given = broadcast_specs(specs, params, "params")
        meta = treedef.unflatten([torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in leaves])
        slots: Any = treedef.flatten_up_to(self.init(meta))
        found = treedef.unflatten(
            [Slots(dict(zip(sorted(s), s.covered(spec, P()), strict=True)), s.like) for s, spec in zip(slots, given, strict=True)]
        )
        failures: list[str] = []
        names, paths = leaf_names(found, "state"), leaf_paths(found)
        own = match_patterns(patterns or {}, [(path,) for path in paths], names, "state", failures, _check_spec)
        if failures:
            raise SpecError(join_failures(failures))
        flat, state_tree = flatten(found)
        return state_tree.unflatten([match[1] if match else spec for match, spec in zip(own, flat, strict=True)])


def from_torch(cls: type[torch.optim.Optimizer], *, groups: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> Optimizer:
    """A torch.optim class as pure functions of ``(grads, state, params)``, by its own formulas.

    Args:
        cls: AdamW, Adam, SGD, RMSprop, Adagrad, NAdam, RAdam, Adadelta, Adamax, ASGD, Rprop, Muon or Adafactor, or a class of your own
            whose ``step`` is tensor code.
        groups: ``{path pattern: options}`` for the parameters that a pattern names, as in ``ftp.plan``: other rates, no weight decay.
        options: as ``cls`` takes them. ``lr`` may be a schedule, a function of the number of updates done so far in tensor code
            (see ``ftp.optim.schedules``). ``fused=True`` takes torch's fused kernels, where ``cls`` has them (AdamW, Adam, SGD and
            Adagrad): the fastest without compilation; parameters that are ready together are updated in one call. ``foreach``
            changes nothing.

    Raises:
        InputError: a class that cannot be pure, options that it refuses, a pattern that matches no parameter.

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
    chosen = _Torch(cls, [("", options), *((pattern, {**options, **given}) for pattern, given in (groups or {}).items())])
    return Optimizer(chosen.init, chosen.update)


def by_path(patterns: Mapping[str, Optimizer | None]) -> Optimizer:
    """Another optimizer for the parameters of each pattern; ``None`` leaves them as they are, without state.

    Raises:
        InputError: a parameter that no pattern names, a pattern that matches nothing, patterns that disagree.

    >>> sgd = from_torch(torch.optim.SGD, lr=0.5)
    >>> opt = by_path({"head.*": sgd, "body.*": None})
    >>> params = {"head.w": torch.ones(1), "body.w": torch.ones(1)}
    >>> opt.update(params, opt.init(params), params)[0]
    {'head.w': tensor([0.5000]), 'body.w': tensor([1.])}
    """

    def parts(params: Any) -> tuple[list[Any], Any, list[tuple[Optimizer | None, list[int], list[str]]]]:
        leaves, treedef = flatten(params)
        matched = _matched(patterns, params)
        missing = [name for name, match in zip(leaf_names(params, "params"), matched, strict=True) if match is None]
        if missing:
            raise InputError(
                join_failures(f"{name} has no optimizer: no pattern names it. Give None to leave it as it is." for name in missing)
            )
        paths = [dotted(path) for path in leaf_paths(params)]
        indices: dict[str, list[int]] = {pattern: [] for pattern in patterns}
        for i, match in enumerate(matched):
            assert match is not None
            indices[match[0]].append(i)
        return leaves, treedef, [(patterns[p], mine, [paths[i] for i in mine]) for p, mine in indices.items()]

    def init(params: Any) -> Any:
        leaves, treedef, chosen = parts(params)
        found = [Slots({})] * len(leaves)
        for opt, mine, paths in chosen:
            if opt is not None and mine:
                state = opt.init({path: leaves[i] for path, i in zip(paths, mine, strict=True)})
                for path, i in zip(paths, mine, strict=True):
                    found[i] = state[path]
        return treedef.unflatten(found)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef, chosen = parts(params)
        grad_leaves, slots = _aligned(treedef, grads, "grads"), _aligned(treedef, state, "state")
        for opt, mine, paths in chosen:
            if opt is not None and mine:
                named = [{path: of[i] for path, i in zip(paths, mine, strict=True)} for of in (grad_leaves, slots, leaves)]
                new, new_state = opt.update(*named)
                for path, i in zip(paths, mine, strict=True):
                    leaves[i], slots[i] = new[path], new_state[path]
        return treedef.unflatten(leaves), treedef.unflatten(slots)

    return Optimizer(init, update)


def global_norm(tree: Any) -> Tensor:
    """The norm of all leaves taken as one vector, each element counted once however it is cut.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    if not flatten(tree)[0]:
        raise InputError("global_norm is given a tree without tensors.")
    # A sum of sums: where leaves are cut it stays pending to the end, and one number is reduced.
    return _total(tree, lambda leaf: leaf.abs().square().sum()).sqrt()


def _total(tree: Any, term: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of a term for each leaf: one over the layers, and one over what is in none, so that layers are planned as one."""
    leaves, order = flatten(tree)[0], _by_layer(tree)
    parts = [[term(leaves[i]) for i, in_layer in order.items() if in_layer is which] for which in (True, False)]
    return functools.reduce(torch.add, [functools.reduce(torch.add, part) for part in parts if part])


def _by_layer(tree: Any) -> dict[int, bool]:
    """The places of the leaves, those of layer 2 before those of layer 10, and whether each is in a layer."""
    names = [_natural(".".join(map(str, path))) for path in leaf_paths(tree)]
    return {i: len(names[i]) > 1 for i in sorted(range(len(names)), key=names.__getitem__)}


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]


def clip_by_global_norm(grads: Any, max_norm: float | Tensor, *, eps: float = 1e-6) -> tuple[Any, Tensor]:
    """``(grads, norm)``: gradients scaled so that their global norm is at most ``max_norm``, and the norm before.

    >>> clipped, norm = clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
    >>> clipped["w"], norm
    (tensor([0.6000, 0.8000]), tensor(5.))

    Source: ``torch.nn.utils.clip_grad_norm_``.
    """
    leaves, treedef = flatten(grads)
    norm = global_norm(grads)
    scale = torch.clamp(max_norm / (norm + eps), max=1.0)
    scaled = {i: leaves[i] * scale.to(leaves[i].dtype) for i in _by_layer(grads)}
    return treedef.unflatten([scaled[i] for i in range(len(leaves))]), norm


def count_nonfinite(tree: Any, *, by_leaf: bool = False) -> Any:
    """How many elements of all leaves are NaN or infinite; in a program one number is reduced, and all ranks get the same.

    Args:
        by_leaf: a tree of counts instead, one for each leaf, of each of which a number is reduced: it says which leaf it is.

    >>> tree = {"w": torch.tensor([1.0, float("nan")]), "b": torch.tensor(float("inf"))}
    >>> count_nonfinite(tree)
    tensor(2)
    >>> count_nonfinite(tree, by_leaf=True)
    {'w': tensor(1), 'b': tensor(1)}
    """
    leaves, treedef = flatten(tree)
    if not leaves:
        raise InputError("count_nonfinite is given a tree without tensors.")
    if by_leaf:
        return treedef.unflatten([_nonfinite(leaf) for leaf in leaves])
    return _total(tree, _nonfinite)


def _nonfinite(leaf: Tensor) -> Tensor:
    return leaf.isfinite().logical_not().sum()


def select(condition: Tensor, tree: Any, otherwise: Any) -> Any:
    """``tree`` where the 0-d ``condition`` holds, ``otherwise`` where not: an update that is skipped leaves everything as it was.

    >>> bad = count_nonfinite(torch.tensor([float("nan")]))
    >>> select(bad == 0, {"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])})
    {'w': tensor([1.])}
    """
    leaves, treedef = flatten(tree)
    old = _aligned(treedef, otherwise, "otherwise", "tree")
    return treedef.unflatten([torch.where(condition, a, b) for a, b in zip(leaves, old, strict=True)])


def ema(average: Any, params: Any, decay: float | Tensor) -> Any:
    """The exponential moving average after another step: ``decay * average + (1 - decay) * params``.

    >>> ema({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.5)
    {'w': tensor([2.])}
    """
    leaves, treedef = flatten(average)
    new = _aligned(treedef, params, "params")
    return treedef.unflatten([a * decay + p.to(a.dtype) * (1 - decay) for a, p in zip(leaves, new, strict=True)])


def accumulate(grad_fn: Callable[..., tuple[Any, Any]], n: int) -> Callable[..., tuple[Any, Any]]:
    """``grad_fn`` over ``n`` microbatches, one after another, and the mean of what it returns.

    Microbatch ``i`` holds rows ``i``, ``i + n``, ... of every batch tensor, so that a batch cut over ranks stays where it is; gradients
    are pending sums until the last one is added, and are reduced once.

    Args:
        grad_fn: ``(params, *batch) -> (grads, value)`` of means over the batch, as ``torch.func.grad_and_value`` makes it; any tree of
            floating-point tensors will do.
        n: how many; the first dim of every batch tensor must divide by it.

    >>> grad_fn = torch.func.grad_and_value(lambda w, x: (w * x).mean())
    >>> accumulate(grad_fn, 2)(torch.tensor(1.0), torch.arange(4.0))
    (tensor(1.5000), tensor(1.5000))
    """
    if n < 1:
        raise InputError(f"accumulate needs at least one microbatch, not {n}.")

    def fn(params: Any, *batch: Any) -> Any:
        leaves, treedef = flatten(batch)
        uneven = [
            f"{name} has shape {tuple(leaf.shape)}: its first dim must divide into {n} microbatches."
            for leaf, name in zip(leaves, leaf_names(batch, "batch"), strict=True)
            if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] % n)
        ]
        if uneven:
            raise InputError(join_failures(uneven))
        total: list[Tensor] = []
        tree = None
        for i in range(n):
            rows = [leaf.unflatten(0, (-1, n)).select(1, i) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            out, tree = flatten(grad_fn(params, *treedef.unflatten(rows)))
            total = [a + b for a, b in zip(total, out, strict=True)] if total else out
        assert tree is not None
        return tree.unflatten([x / n for x in total])

    return fn


def _check_spec(pattern: str, spec: object) -> str | None:
    return None if isinstance(spec, P) else f"patterns[{pattern!r}] is {spec!r}, {kind_of(spec)}; it must be a P."


_REFUSED = {
    "LBFGS": "it evaluates the loss several times in one step, through a closure, and stops by values",
    "SparseAdam": "it takes sparse gradients, and a program's tensors are dense; Adam does the same on dense ones",
}


def _check_class(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise InputError(f"from_torch takes a torch.optim class, such as torch.optim.AdamW, not {cls!r}.")
    for kind in cls.__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _REFUSED:
            raise InputError(f"torch.optim.{kind.__name__} cannot be made pure: {_REFUSED[kind.__name__]}.")


def _matched(patterns: Mapping[str, Any], params: Any) -> list[tuple[str, Any] | None]:
    failures: list[str] = []
    answers = [(path,) for path in leaf_paths(params)]
    found = match_patterns(patterns, answers, leaf_names(params, "params"), "params", failures)
    if failures:
        raise InputError(join_failures(failures))
    return found


def _aligned(treedef: Any, tree: Any, name: str, like: str = "params") -> list[Any]:
    """What ``tree`` holds at each leaf of ``treedef``."""
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        raise InputError(f"{name} is not a tree as {like} is: {error}") from None


_CAPTURABLE = (torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop)


class _Torch:
    """Drives a torch.optim class on clones."""

    def __init__(self, cls: type[torch.optim.Optimizer], groups: Sequence[tuple[str, Mapping[str, Any]]]):
        self.cls = cls
        self.patterns = [pattern for pattern, _ in groups]
        self.options = [dict(options) for _, options in groups]
        taken = inspect.signature(cls).parameters
        # Formulas for autograd are formulas without .item(); one tensor after another are ops that have rules.
        self.forced = {k: v for k, v in {"differentiable": True, "foreach": False}.items() if k in taken}
        if issubclass(cls, _CAPTURABLE):
            self.forced["capturable"] = True  # their other formulas branch on values, or write where a mask says
        if "foreach" in taken:  # the same numbers either way
            self.options = [{k: v for k, v in given.items() if k != "foreach"} for given in self.options]
        for key in {"capturable": 0, **self.forced}:
            if any(options.get(key) for options in self.options):
                raise InputError(f"{cls.__name__}({key}=True) has no meaning in a program; leave it out.")
        self.prototypes = [self._make(options, torch.zeros(1, 1)) for options in self.options]

    def _make(self, options: Mapping[str, Any], param: Tensor) -> torch.optim.Optimizer:
        rate = options.get("lr")
        plain = {**options, "lr": torch.as_tensor(rate(torch.zeros(()))).item()} if callable(rate) else options
        make: Any = self.cls
        try:
            return make([param], **(plain if plain.get("fused") else {**plain, **self.forced}))
        except (TypeError, ValueError) as error:
            raise InputError(f"torch.optim.{self.cls.__name__} refuses its options: {error}") from None

    def init(self, params: Any) -> Any:
        leaves, treedef = flatten(params)
        groups = self._groups(params)
        names = leaf_names(params, "params")
        _check_tensors(leaves, names)
        slots, cut = [], []
        made: dict[Any, Slots | None] = {}
        with torch.no_grad():
            for leaf, group, name in zip(leaves, groups, names, strict=True):
                known = placement_of(leaf)
                of = known if known is not None and known.mesh.kind == "process" else None
                key = group, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, of
                if key not in made or not self._starts_alike(leaf):
                    made[key] = found = self._first_slots(leaf.detach(), group) if of is None else self._of_shard(leaf, of, group)
                else:
                    first = made[key]
                    found = first and Slots({slot: value.clone() for slot, value in first.items()}, first.like)
                if found is None:
                    cut.append(name)
                elif of is not None:
                    for slot, value in found.items():
                        spec = of.spec if slot in found.like else P()
                        remember(value, placement(of.mesh, spec, of.shape if slot in found.like else tuple(value.shape)))
                slots.append(found)
        if cut:
            raise InputError(
                f"{', '.join(cut)}: shards of placed tensors, of which {self.cls.__name__} cannot tell the whole ones' state. Make it"
                " before ftp.device_put, on the meta device if need be, or with ftp.spmd(opt.init, mesh, (specs,), specs)(params)."
            )
        return treedef.unflatten(slots)

    def _of_shard(self, shard: Tensor, known: Placement, group: int) -> Slots | None:
        """This rank's part of the state of a placed parameter; None where the state may be of another shape, or look at values."""
        if not self._starts_alike(shard):
            return None
        whole = self._first_slots(torch.empty(known.shape, dtype=shard.dtype, device="meta"), group)
        here = self._first_slots(shard.detach(), group)
        if any(here[slot].shape != value.shape for slot, value in whole.items() if slot not in whole.like):
            return None
        return Slots(dict(here), whole.like)

    def _starts_alike(self, param: Tensor) -> bool:
        """Whether the first state is that of any parameter of this shape: no class of torch's looks at values.

        In a trace it is made for each, as one would be cut with the other.
        """
        is_known = self.cls.__module__.startswith("torch.optim") or param.device.type == "meta"
        return is_known and type(param) in (Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(param)

    def _first_slots(self, param: Tensor, group: int) -> Slots:
        """The state before the first step: what a step's formulas find when they first look."""
        # SGD takes its first gradient for the momentum; a zero one is as good, but for dampening (see ``update``).
        mine = torch.zeros_like(param) if issubclass(self.cls, torch.optim.SGD) else param.clone()
        first: dict[str, Any] = {}
        opt = self._make({k: v for k, v in self.options[group].items() if k != "fused"}, mine)
        for values in opt.state.values():
            first.update({name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()})
        opt.state = defaultdict(lambda: _Recording(first))  # pyright: ignore[reportAttributeAccessIssue]
        if first:
            dict.update(opt.state[mine], {name: value.clone() if isinstance(value, Tensor) else value for name, value in first.items()})
        mine.grad = torch.zeros_like(mine)
        self._step(opt)
        if "step" not in first and self._counts(group):
            first["step"] = torch.zeros(())
        found = {}
        for name, value in first.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = torch.tensor(float(value))
            if isinstance(value, Tensor):
                counter = value.ndim == 0 and value.dtype.is_floating_point and param.device.type != "mps"
                wide = torch.float32 if self.options[group].get("fused") else torch.float64  # torch's kernels read float32
                found[name] = value.to(device=param.device, dtype=wide if counter else value.dtype)
        return Slots(found, [name for name, value in found.items() if value.shape == param.shape and param.ndim])

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(params)
        grad_leaves, slots = _aligned(treedef, grads, "grads"), _aligned(treedef, state, "state")
        groups = self._groups(params)
        _check_gradients(grad_leaves, leaves, leaf_names(params, "grads"))
        new_leaves, new_slots = list(leaves), list(slots)
        for group in range(len(self.options)):
            mine = [i for i, g in enumerate(groups) if g == group]
            if not mine:
                continue
            given = [[of[i] for i in mine] for of in (grad_leaves, slots, leaves)]
            new = self._run(group, *given)
            if self._is_dampened(group):
                bare = [Slots({k: v for k, v in s.items() if k != "momentum_buffer"}, s.like) for s in given[1]]
                new = [
                    _select(s["step"] == 0, a, b) for s, a, b in zip(given[1], self._run(group, given[0], bare, given[2]), new, strict=True)
                ]
            for i, (leaf, kept) in zip(mine, new, strict=True):
                new_leaves[i], new_slots[i] = leaf, kept
        return treedef.unflatten(new_leaves), treedef.unflatten(new_slots)

    def _run(self, group: int, grads: Sequence[Tensor], slots: Sequence[Slots], params: Sequence[Tensor]) -> list[tuple[Tensor, Slots]]:
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
            opt.state[clone] = {name: _widened(v).clone() if unfused and name == "step" else v.clone() for name, v in mine.items()}
        before = [dict(opt.state[clone]) for clone in clones]
        self._step(opt)
        out = []
        for clone, mine, was, step in zip(clones, slots, before, steps, strict=True):
            now = opt.state[clone]
            kept = {name: now[name] for name in {**mine, **dict.fromkeys(mine.like)} if isinstance(now.get(name), Tensor)}
            if step is not None and kept["step"] is was["step"] and not self._owns_step(group):
                kept["step"] = step + 1
            kept = {name: value.to(mine[name].dtype) if name in mine else value for name, value in kept.items()}
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
        own = _matched({p: i for i, p in enumerate(self.patterns) if i}, params)
        return [match[1] if match else 0 for match in own]

    def _owns_step(self, group: int) -> bool:
        """Whether the optimizer counts its steps by itself."""
        return not issubclass(self.cls, torch.optim.SGD | torch.optim.Muon)

    def _counts(self, group: int) -> bool:
        return callable(self.options[group].get("lr")) or self._is_dampened(group)

    def _is_dampened(self, group: int) -> bool:
        options = self.options[group]
        return issubclass(self.cls, torch.optim.SGD) and bool(options.get("momentum")) and bool(options.get("dampening"))


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
    """Formulas written for numbers, on 0-d tensors: no value is asked for, and a scale may be a tensor."""

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


# In-place ops that torch.vmap takes apart, replica by replica, in their forms that return the new value.
_RETURNING: dict[Any, Callable[..., Tensor]] = {
    Tensor.addcdiv_: torch.addcdiv,
    Tensor.addcmul_: torch.addcmul,
    Tensor.clamp_: torch.clamp,
    Tensor.lerp_: torch.lerp,
}


def _widened(step: Any) -> Any:
    """A counter in float64, so that a schedule computes its rate in it; where there is none, as it is."""
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
            for old, new in zip(written(row), update_of(name, options["lr"])(list(row), **options), strict=True):
                old.copy_(new)
        return None


@contextmanager
def _captured_anywhere(cls: type) -> Iterator[None]:
    """Formulas meant for graphs of a GPU's kernels serve on every device, where nothing is captured."""
    names = {kind.__module__ for kind in cls.__mro__ if kind in _CAPTURABLE}
    modules: list[Any] = [sys.modules[name] for name in names]
    saved = [module._get_capturable_supported_devices for module in modules]
    try:
        for module in modules:
            module._get_capturable_supported_devices = lambda *args, **kwargs: ["cpu", "cuda", "meta", "mps", "xpu"]
        yield
    finally:
        for module, function in zip(modules, saved, strict=True):
            module._get_capturable_supported_devices = function


def _adafactor(opt: torch.optim.Optimizer) -> None:
    """A step of ``torch.optim.Adafactor``, whose own asks for values: the same formulas, with tensors for numbers."""
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
        rate = torch.clamp(step**-0.5, max=group["lr"]) if not isinstance(group["lr"], Tensor) else torch.minimum(step**-0.5, group["lr"])
        rate = torch.clamp(param.square().mean().sqrt(), min=eps2) * rate
        if group["weight_decay"] != 0:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        if grad.dim() > 1:
            row, col = state["row_var"], state["col_var"]
            state["row_var"] = row = row + (grad.square().mean(-1, keepdim=True) - row) * new
            state["col_var"] = col = col + (grad.square().mean(-2, keepdim=True) - col) * new
            variance = row * col / row.mean(-2, keepdim=True).clamp(min=eps1)
        else:
            state["variance"] = variance = state["variance"] + (grad.square() - state["variance"]) * new
        update = variance.clamp(min=eps1 * eps1).rsqrt() * grad
        param.sub_(update * (rate / torch.clamp(update.square().mean().sqrt() / group["d"], min=1.0)))


def _select(condition: Tensor, a: tuple[Tensor, Slots], b: tuple[Tensor, Slots]) -> tuple[Tensor, Slots]:
    slots = {name: torch.where(condition, a[1][name], value) for name, value in b[1].items()}
    return torch.where(condition, a[0], b[0]), Slots(slots, b[1].like)


def _check_tensors(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = [
        f"{name} is {leaf!r}, {kind_of(leaf)}: it has no state."
        for leaf, name in zip(leaves, names, strict=True)
        if not isinstance(leaf, Tensor)
    ]
    if failures:
        raise InputError(join_failures(failures))


def _check_gradients(grads: Sequence[Any], params: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for grad, param, name in zip(grads, params, names, strict=True):
        if not isinstance(grad, Tensor):
            failures.append(f"{name} is {grad!r}, {kind_of(grad)}; it must be a gradient, a tensor of shape {tuple(param.shape)}.")
        elif grad.shape != param.shape:
            failures.append(f"{name} has shape {tuple(grad.shape)}, its parameter {tuple(param.shape)}.")
    if failures:
        raise InputError(join_failures(failures))
