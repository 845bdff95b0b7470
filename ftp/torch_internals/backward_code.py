"""Code that torch.autograd runs later, in a backward pass, changed where it is handed over: the
``backward`` of functions, hooks of nodes, which those of modules are too, and hooks that unpack
saved tensors. Read at torch 2.13.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import ref

from torch.autograd.function import BackwardCFunction, _HookMixin
from torch.autograd.graph import saved_tensors_hooks

from ftp.torch_internals.autograd_state import push_saved_tensors_default_hooks

ChangeOfCode = Callable[[Callable[..., Any]], Callable[..., Any]]


class BackwardCode:
    """Replaces methods of torch while any block of ``changed`` runs, on any thread.

    Args:
        change: gives the code to run in place of the code that is handed over.
        leaves: names of packages whose functions keep their own.
    """

    def __init__(self, change: ChangeOfCode, leaves: tuple[str, ...]) -> None:
        self._change, self._leaves = change, leaves
        self._lock, self._blocks = Lock(), 0
        self._old: list[tuple[Any, str, Any]] = []

    @contextmanager
    def changed(self) -> Iterator[None]:
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                self._replace()
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    self._put_back()

    def _replace(self) -> None:
        new = {
            (BackwardCFunction, "__init__"): lambda node: self._made(node),
            (saved_tensors_hooks, "__enter__"): lambda hooks: self._entered(hooks),
            (_HookMixin, "_register_hook"): staticmethod(self._registered),
        }
        for (owner, name), method in new.items():
            self._old.append((owner, name, inspect.getattr_static(owner, name)))
            setattr(owner, name, method)

    def _put_back(self) -> None:
        while self._old:
            setattr(*self._old.pop())

    def _made(self, node: Any) -> None:
        """A function is applied: change what ``node`` runs. It refers to itself weakly, so that the
        graph is freed at once.
        """
        if type(node)._forward_cls.__module__.startswith(self._leaves):
            return
        own = ref(node)

        def run(name: str) -> Callable[..., Any]:
            return lambda *grads: getattr(type(own()), name)(own(), *grads)

        plain = run("apply")
        if (changed := self._change(plain)) is not plain:
            node.apply, node.apply_boxed = changed, self._change(run("apply_boxed"))

    def _entered(self, hooks: saved_tensors_hooks) -> None:
        push_saved_tensors_default_hooks(hooks.pack_hook, self._change(hooks.unpack_hook))

    def _registered(self, hooks: Any, hook: Callable[..., Any]) -> Any:
        return _register(hooks, self._change(hook))


_register = _HookMixin._register_hook
