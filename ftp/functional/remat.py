"""``remat``: recompute a block's intermediate values in the backward pass, not keep them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftp.errors import InputError
from ftp.functional.closures import bound_now
from ftp.functional.differentiable import is_differentiable, of_some, save_inputs
from ftp.sharding.pytree import flatten, kind_of
from ftp.source import user_line
from ftp.torch_internals.functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_level,
    unwrap_if_dead,
)
from ftp.torch_internals.modes import get_current_function_mode_stack
from ftp.torch_internals.pytree import tree_leaves, tree_map_only

_T = TypeVar("_T")
Policy = str | Callable[[Any], bool]
POLICIES = ("nothing", "products", "collectives")


@dataclass(frozen=True, eq=False)
class Region:
    """One recomputation of a block. Its ops are not merged with the forward pass' equal ops, except
    those that ``policy`` keeps.
    """

    policy: Policy

    def keeps(self, target: Any, is_matmul: bool) -> bool:
        """Whether the forward pass' result of the op ``target`` is kept."""
        if callable(self.policy):
            return self.policy(target)
        return self.policy == "products" and is_matmul

    @property
    def keeps_collectives(self) -> bool:
        return self.policy == "collectives"


def remat(fn: Callable[..., Any], policy: Policy = "nothing") -> Callable[..., Any]:
    """Recompute the values inside ``fn`` in the backward pass: less memory, more arithmetic.

    Works under torch.func's transforms.

    Args:
        fn: pure function of trees of tensors. What has a gradient must be an argument: a captured
            tensor would get none.
        policy: the results that a sharded program keeps: ``"nothing"``; ``"products"``, those of
            matmuls, convolutions and attention; ``"collectives"``, so that none is repeated; or a
            function of the aten op that returns True to keep its result. Outside of a sharded
            program nothing is kept.

    Returns:
        A function with ``fn``'s arguments and results.

    Raises:
        InputError: not a function; an unknown policy; when called, a captured tensor that requires
            a gradient.

    >>> block = remat(lambda w, x: torch.relu(x @ w))
    >>> torch.func.grad(lambda w: block(w, torch.ones(1, 2)).sum())(torch.ones(2, 1))
    tensor([[1.],
            [1.]])

    Source: JAX, ``jax.checkpoint``.
    """
    if problem := policy_problem(policy, "policy"):
        raise InputError(problem)
    if not callable(fn):
        raise InputError(f"remat takes a function, not {fn!r}, {kind_of(fn)}.")

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        out: list[Any] = []
        transforms, modes, now = _transforms(), _modes_of_blocks(), bound_now(fn)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            filled = list(leaves)
            for i, tensor in zip(at, tensors, strict=True):
                filled[i] = tensor
            given, by_name = treedef.unflatten(filled)
            with _on_top(_outer_transforms, transforms):
                out[:] = flatten(now(*given, **by_name))
            own = set(map(id, tensors))
            # An argument that is returned unchanged would lose its place in autograd's graph.
            return tuple(
                x.view_as(x) if id(x) in own else x for x in out[0] if isinstance(x, Tensor)
            )

        name = getattr(fn, "__name__", type(fn).__name__)
        block = _RematBlock(run, policy, name, transforms, modes)
        applied: Any = _Remat.apply(block, *(leaves[i] for i in at))
        results = iter(applied)
        found, out_tree = out
        return out_tree.unflatten([next(results) if isinstance(x, Tensor) else x for x in found])

    return wrapped


def policy_problem(policy: Any, where: str) -> str | None:
    """The error message for a policy, which it calls ``where``; None if the policy is valid."""
    if callable(policy) or policy in POLICIES:
        return None
    return (
        f"{where} is {policy!r}; it must be one of {', '.join(map(repr, POLICIES))}, or a"
        " function of an aten op."
    )


@contextmanager
def _on_top(stack: list[_T], value: _T) -> Iterator[None]:
    """Within the block ``value`` is the last item of ``stack``. (A context variable would be unset
    in the threads in which torch runs backward passes.)
    """
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()


_regions: list[Region] = []


def current_region() -> Region | None:
    """The recomputation that is running."""
    return _regions[-1] if _regions else None


def recomputing(policy: Policy) -> AbstractContextManager[None]:
    """Within the block ops repeat those of the forward pass."""
    return _on_top(_regions, Region(policy))


# Code that torch runs again in the backward pass (torch.utils.checkpoint) runs after the
# surrounding contexts have ended: a module has its own parameters again, and there is no key for
# draws.
Again = Callable[[], AbstractContextManager[None]]
_surroundings: list[Callable[[], Again]] = []


def surrounded(remember: Callable[[], Again]) -> AbstractContextManager[None]:
    """Within the block, code that will run again calls ``remember``, which returns a context that
    restores the present surroundings.
    """
    return _on_top(_surroundings, remember)


class ModeOfBlocks(TorchFunctionMode):
    """A function mode that is also active inside blocks: torch runs autograd functions, and their
    backward passes, without the modes in which they are called. It is entered several times, so it
    keeps no state of where it was entered.
    """


def _modes_of_blocks() -> Again:
    """A context that enters again the ``ModeOfBlocks`` modes, and ``torch.autocast``, that are
    active now.
    """
    modes = [m for m in get_current_function_mode_stack() if isinstance(m, ModeOfBlocks)]
    casts = autocast_now()

    @contextmanager
    def again() -> Iterator[None]:
        entered = {id(mode) for mode in get_current_function_mode_stack()}
        with ExitStack() as stack:
            for mode in modes:
                if id(mode) not in entered:
                    stack.enter_context(mode)
            for device, then, now in zip(CASTING, casts, autocast_now(), strict=True):
                if now != then:
                    on = then is not None
                    stack.enter_context(torch.autocast(device, then, on, cache_enabled=False))
            yield

    return again


CASTING = ("cpu", "cuda")  # device types


def autocast_now() -> tuple[torch.dtype | None, ...]:
    """Per device type the dtype to which ``torch.autocast`` casts; None where it is off."""
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in CASTING
    )


def run_again() -> Again:
    """A context in which code that is running now can be run again later."""
    entered, modes = [remember() for remember in _surroundings], _modes_of_blocks()

    @contextmanager
    def again() -> Iterator[None]:
        with recomputing("nothing"), modes(), ExitStack() as stack:
            for enter in entered:
                stack.enter_context(enter())
            yield

    return again


Transforms = Mapping[int, TransformType | None]
_outer_transforms: list[Transforms] = [{}]


def _transforms() -> Transforms:
    """By level, the transforms inside which a block is called, also those that a surrounding block
    runs without; None for a level of two kinds.
    """
    found = dict(_outer_transforms[-1])
    for level, key in _running().items():
        found[level] = key if found.get(level, key) == key else None
    return found


@dataclass(frozen=True, eq=False)
class _RematBlock:
    run: Callable[..., tuple[Tensor, ...]]
    policy: Policy
    name: str
    transforms: Transforms
    modes: Again


class _Remat(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(block: _RematBlock, *tensors: Tensor) -> tuple[Tensor, ...]:
        with block.modes(), _CapturesCheck(block, tensors):
            return block.run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.block, *tensors = inputs
        save_inputs(ctx, tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors, block = _alive(ctx.saved_tensors), ctx.block
        at = [
            i for i, x in enumerate(tensors) if is_differentiable(x) and ctx.needs_input_grad[i + 1]
        ]
        with recomputing(block.policy), block.modes():
            of_at = of_some(block.run, tensors, at)
            pull: Any = torch.func.vjp(of_at, *(tensors[i] for i in at))[1]
        found = pull(
            tuple(grad for grad, has in zip(_alive(grads), ctx.has_gradient, strict=True) if has)
        )
        result: list[Any] = [None] * (1 + len(tensors))
        for i, grad in zip(at, found, strict=True):
            result[i + 1] = grad
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        tensors, block = _alive(ctx.saved_tensors), ctx.block
        at = [
            i
            for i, tangent in enumerate(tangents)
            if tangent is not None and is_differentiable(tensors[i])
        ]
        given = tuple(tensors[i] for i in at), tuple(tangents[i] for i in at)
        with recomputing(block.policy), block.modes():
            pushed: Any = torch.func.jvp(of_some(block.run, tensors, at), *given)[1]
        found = iter(pushed)
        return tuple(next(found) if has else None for has in ctx.has_gradient)


def _alive(tensors: Sequence[Any]) -> list[Any]:
    """Unwrap tensors of transforms that have ended: an inner block's backward pass runs after the
    outer block's recomputation.
    """
    return [unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in tensors]


class _CapturesCheck(TorchFunctionMode):
    """Refuse captured tensors that may have a gradient; unwrap others from the transforms from
    which the block's arguments were unwrapped.
    """

    def __init__(self, block: _RematBlock, own: Sequence[Tensor]):
        super().__init__()
        self.block, self.own = block, {id(x): x for x in own}
        self.running = _running()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _running() == self.running:
            args, kwargs = tree_map_only(Tensor, self._inner, (args, kwargs or {}))
        made = func(*args, **(kwargs or {}))
        if not self.running and not torch.is_grad_enabled():
            # A view requires a gradient where what it views does.
            views = (x for x in tree_leaves(made) if isinstance(x, Tensor) and x.requires_grad)
            self.own.update((id(x), x) for x in views)
        return made

    def _inner(self, x: Tensor) -> Tensor:
        """A tensor at the level at which the block runs."""
        while is_functorch_wrapped_tensor(x) and not self._is_at_hand(x):
            is_grad = self.block.transforms.get(maybe_get_level(x)) == TransformType.Grad
            if is_batchedtensor(x) or (is_differentiable(x) and (x.requires_grad or not is_grad)):
                self._refuse(x)
            x = get_unwrapped(x)
        if (
            not self.running
            and x.requires_grad
            and id(x) not in self.own
            and not torch.is_grad_enabled()
        ):
            self._refuse(x)
        return x

    def _is_at_hand(self, x: Tensor) -> bool:
        """Whether the transform that wrapped a tensor is running."""
        key = self.running.get(maybe_get_level(x))
        return key is not None and (key == TransformType.Vmap) == is_batchedtensor(x)

    def _refuse(self, x: Tensor) -> None:
        why = (
            "that it was not given, of which vmap maps elements"
            if is_batchedtensor(x)
            else "that it was not given, and a gradient is asked for, which would not flow"
        )
        raise InputError(
            f"remat({self.block.name}) uses a tensor of shape {tuple(x.shape)} at"
            f" {user_line() or 'an unknown line'} {why}. Pass it as an argument: block(params, x)."
        )


def _running() -> dict[int, TransformType]:
    """The transforms that run, by level."""
    return {one.level(): one.key() for one in get_interpreter_stack() or ()}
