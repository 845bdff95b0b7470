"""Tensors that a function given to ``torch.cond`` captures: found, and replaced by operands."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from ftp.errors import TraceError
from ftp.source import at_line
from ftp.torch_internals.functorch import (
    get_unwrapped,
    is_batched,
    is_functorch_wrapped_tensor,
    unwrapped,
)
from ftp.torch_internals.modes import DisableTorchFunction


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def nodes_so_far() -> frozenset[fx.Node]:
    return frozenset(_tracer().graph.nodes)


def node_of(x: Tensor) -> fx.Node | None:
    """The node of a tensor, inside all wrappers of torch.func; None where nothing is recorded."""
    if get_proxy_mode() is None:
        return None
    with DisableTorchFunction():
        held = _tracer().tensor_tracker.get(unwrapped(x))
    return None if held is None else held.proxy.node


Function: Any = torch.autograd.Function


class _Replacing(TorchFunctionMode):
    """A mode in which functions get other tensors in place of those that were made before a cond.

    Args:
        before: the nodes before the cond.
    """

    def __init__(self, before: frozenset[fx.Node]) -> None:
        super().__init__()
        self._before = before

    def replaced(self, node: fx.Node, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __enter__(self) -> Any:
        # A mode does not see the arguments of an autograd.Function: patch its way in.
        self._original = original = vars(Function)["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            call = original.__get__(None, cls)
            return call(*self._swapped(args), **self._swapped(kwargs))

        Function.apply = classmethod(apply)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Function.apply = self._original
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._swapped(args), **self._swapped(kwargs or {}))

    def _swapped(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            with DisableTorchFunction():
                is_transformed = x.requires_grad or is_functorch_wrapped_tensor(x)
                if not is_transformed or (node := node_of(x)) not in self._before:
                    return x
                assert node is not None
                return self.replaced(node, x)
        if type(x) in (list, tuple):
            return type(x)(map(self._swapped, x))
        return {k: self._swapped(v) for k, v in x.items()} if type(x) is dict else x


class CapturedFinder(_Replacing):
    """Finds the tensors that a branch captures, and detaches them. If a result still has a
    gradient, the branch used a captured tensor in a way that this mode does not see.
    """

    def __init__(self, before: frozenset[fx.Node], found: dict[fx.Node, Tensor]) -> None:
        super().__init__(before)
        self._found = found
        self._detached: dict[fx.Node, Tensor] = {}

    def replaced(self, node: fx.Node, x: Tensor) -> Tensor:
        self._found.setdefault(node, x)
        if node not in self._detached:
            self._detached[node] = plain(x)
        return self._detached[node]

    def check(self, results: Sequence[Any]) -> None:
        for x in results:
            if isinstance(x, Tensor) and _has_gradient(x) and node_of(x) not in self._before:
                raise TraceError(
                    f"{at_line()}A branch of torch.cond uses a captured tensor in a way in which"
                    " no gradient would flow. Make it an operand: torch.cond(predicate, true_fn,"
                    " false_fn, (x, weight))."
                )


class Swapped(_Replacing):
    """Gives a branch its operands in place of the tensors that it captures."""

    def __init__(self, before: frozenset[fx.Node], given: Mapping[fx.Node, Tensor]) -> None:
        super().__init__(before)
        self._given = given

    def replaced(self, node: fx.Node, x: Tensor) -> Tensor:
        if node not in self._given:
            raise TraceError(
                f"{at_line()}A branch of torch.cond captures other tensors when it is traced again."
                " Make them operands: torch.cond(predicate, true_fn, false_fn, (x, weight))."
            )
        return self._given[node]


def plain(x: Tensor) -> Tensor:
    """The tensor without gradients, and without wrappers of torch.func unless one of them maps over
    it.
    """
    return (x if is_batched(x) else unwrapped(x)).detach()


def _has_gradient(x: Tensor) -> bool:
    with DisableTorchFunction():
        if is_batched(x):
            return x.requires_grad
        while not x.requires_grad and is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        return x.requires_grad
