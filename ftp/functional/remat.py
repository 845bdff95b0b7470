"""``remat``: recompute a block's intermediate values in the backward pass, not keep them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import InputError
from ftp.functional.block_call import BlockCall
from ftp.functional.block_values import no_numbering
from ftp.functional.captures import (
    ReadsState,
    is_transforming,
    is_within_one_gradient,
    on_top,
)
from ftp.functional.differentiable import (
    is_differentiable,
    of_some,
    pulled_by_autograd,
    save_inputs,
)
from ftp.functional.modes_of_blocks import entered, present_modes
from ftp.sharding.pytree import kind_of
from ftp.torch_internals.autograd_state import forward_mode_allowed, is_any_autocast_enabled
from ftp.torch_internals.functorch import unwrap_if_dead

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
        fn: function of trees of tensors. Tensors that it finds, and sets, in variables,
            attributes, lists and dicts have gradients too.
        policy: the results that a sharded program keeps: ``"nothing"``; ``"products"``, those of
            matmuls, convolutions and attention; ``"collectives"``, so that none is repeated; or a
            function of the aten op that returns True to keep its result. Outside of a sharded
            program nothing is kept.

    Returns:
        A function with ``fn``'s arguments and results.

    Raises:
        InputError: not a function; an unknown policy; when called, a tensor that requires a
            gradient and that is captured in another way.

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
        return recomputed(fn, policy, args, kwargs, fn)

    return wrapped


def policy_problem(policy: Any, where: str) -> str | None:
    """The error message for a policy, which it calls ``where``; None if the policy is valid."""
    if callable(policy) or policy in POLICIES:
        return None
    return (
        f"{where} is {policy!r}; it must be one of {', '.join(map(repr, POLICIES))}, or a"
        " function of an aten op."
    )


_regions: list[Region] = []


def current_region() -> Region | None:
    """The recomputation that is running."""
    return _regions[-1] if _regions else None


def recomputing(policy: Policy) -> AbstractContextManager[None]:
    """Within the block ops repeat those of the forward pass."""
    return on_top(_regions, Region(policy))


# Code that torch runs again in the backward pass (torch.utils.checkpoint) runs after the
# surrounding contexts have ended: a module has its own parameters again, and there is no key for
# draws.
Again = Callable[[], AbstractContextManager[None]]
_surroundings: list[Callable[[], Again]] = []


def surrounded(remember: Callable[[], Again]) -> AbstractContextManager[None]:
    """Within the block, code that will run again calls ``remember``, which returns a context that
    restores the present surroundings.
    """
    return on_top(_surroundings, remember)


def _modes_of_blocks() -> Again:
    """A context that enters again the ``ModeOfBlocks`` modes, and ``torch.autocast``, that are
    active now.
    """
    modes, casts = present_modes(), autocast_now()

    @contextmanager
    def again() -> Iterator[None]:
        with entered(modes), ExitStack() as stack:
            for device, then, now in zip(CASTING, casts, autocast_now(), strict=True):
                if now != then:
                    on = then is not None
                    stack.enter_context(torch.autocast(device, then, on, cache_enabled=False))
            yield

    return again


CASTING = ("cpu", "cuda")  # device types
_NOT_CASTING = (None,) * len(CASTING)


def autocast_now() -> tuple[torch.dtype | None, ...]:
    """Per device type the dtype to which ``torch.autocast`` casts; None where it is off."""
    if not is_any_autocast_enabled():  # as most calls of a step find it
        return _NOT_CASTING
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in CASTING
    )


def run_again() -> Again:
    """A context in which code that is running now can be run again later."""
    around, modes = [remember() for remember in _surroundings], _modes_of_blocks()

    @contextmanager
    def again() -> Iterator[None]:
        with recomputing("nothing"), modes(), ExitStack() as stack:
            for enter in around:
                stack.enter_context(enter())
            yield

    return again


@dataclass(frozen=True, eq=False)
class _RematBlock:
    call: BlockCall
    policy: Policy
    modes: Again


def recomputed(
    fn: Callable[..., Any],
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    root: Any,
    *,
    reads: Sequence[Tensor] = (),
    replaces: Sequence[Tensor] = (),
) -> Any:
    """Call ``fn``, and compute what is in it again in the backward pass. Tensors of the state that
    ``root`` refers to, which it reads, are arguments too, and what it sets there are results.

    Args:
        reads: tensors of the state that it is known to read.
        replaces: those that it may write to, in place of which the state gets other tensors.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    call = BlockCall(fn, name, args, kwargs, root, present_modes())
    call.reads(*reads)
    call.replaces(*replaces)
    block = _RematBlock(call, policy, _modes_of_blocks())
    while True:
        try:
            with no_numbering():
                applied: Any = _Remat.apply(block, *call.inputs)
        except ReadsState as found:
            if found.call is not call:
                raise
            call.learn(found)
        else:
            return call.finish(applied)


class _Remat(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(block: _RematBlock, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not is_transforming():  # the block may ask autograd for gradients of its own
            tensors = tuple(x.detach() for x in tensors)
        with block.modes(), torch.enable_grad(), forward_mode_allowed():
            results = block.call.run(*tensors)
        return results if is_transforming() else tuple(x.detach() for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.block, *tensors = inputs
        save_inputs(ctx, tensors, output)
        still = [output[i] for i in ctx.block.call.without_gradient]
        if not is_transforming():  # a state without a gradient stays one
            ctx.mark_non_differentiable(*(x for x in output if not is_differentiable(x)), *still)
        elif still and is_within_one_gradient():  # others take derivatives under no_grad too
            ctx.mark_non_differentiable(*still)

    @staticmethod
    @no_numbering()
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors, block = _alive(ctx.saved_tensors), ctx.block
        at = [
            i for i, x in enumerate(tensors) if is_differentiable(x) and ctx.needs_input_grad[i + 1]
        ]
        given = [tensors[i] for i in at]
        pairs = zip(_alive(grads), ctx.has_gradient, strict=True)
        of_results = tuple(grad for grad, has in pairs if has)
        pulled = _pulled if is_transforming() else _pulled_by_autograd
        found = pulled(block, of_some(block.call.run_again, tensors, at), given, of_results)
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
            pushed: Any = torch.func.jvp(of_some(block.call.run_again, tensors, at), *given)[1]
        found = iter(pushed)
        return tuple(next(found) if has else None for has in ctx.has_gradient)


Function = Callable[..., tuple[Tensor, ...]]


def _pulled(
    block: _RematBlock, fn: Function, given: Sequence[Tensor], grads: tuple[Tensor, ...]
) -> Sequence[Tensor | None]:
    """The gradients of ``given``, from those of the results of ``fn``."""
    with recomputing(block.policy), block.modes():
        pull: Any = torch.func.vjp(fn, *given)[1]
    return pull(grads)


def _pulled_by_autograd(
    block: _RematBlock, fn: Function, given: Sequence[Tensor], grads: tuple[Tensor, ...]
) -> Sequence[Tensor | None]:
    """The same outside of torch.func, which does not take all that torch.autograd takes."""

    def run(*own: Tensor) -> tuple[Tensor, ...]:
        with recomputing(block.policy), block.modes():
            return fn(*own)

    return pulled_by_autograd(run, given, grads, again=torch.is_grad_enabled())


def _alive(tensors: Sequence[Any]) -> list[Any]:
    """Unwrap tensors of transforms that have ended: an inner block's backward pass runs after the
    outer block's recomputation.
    """
    return [unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in tensors]
