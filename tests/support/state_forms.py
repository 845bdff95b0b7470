"""Forms in which functions and models keep state in Python from one call to the next."""

import array
import contextvars
import functools
import itertools
import random
import sys
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ftp

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

Keep = Callable[[Any, Tensor], Tensor]
MODULE = types.ModuleType("module_with_state")
MODULE.__file__ = __file__
sys.modules[MODULE.__name__] = MODULE
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
TOTAL = 1.0


def one() -> Tensor:
    return torch.ones(4, dtype=torch.float64)


def table(n: int = 9) -> Tensor:
    return torch.arange(n, dtype=torch.float64).cos()[:, None]


@dataclass(slots=True)
class Slots:
    n: float = 1.0
    t: Tensor = field(default_factory=one)


@dataclass(frozen=True)
class Frozen:
    n: float = 1.0


class Key:
    pass


@functools.cache
def singleton(key: Any) -> Any:
    return SimpleNamespace(n=1.0, t=one(), log=[1.0])


def _halved_globally(y: Tensor) -> Tensor:
    global TOTAL
    TOTAL *= 0.5
    return y * TOTAL


def _global() -> Any:
    global TOTAL
    TOTAL = 1.0
    return _halved_globally


def _average(holder: Any, name: str = "t") -> Callable[[Tensor], Tensor]:
    """Reads a tensor, and replaces it by an average with what depends on the arguments."""

    def keep(y: Tensor) -> Tensor:
        before = getattr(holder, name)
        setattr(holder, name, before * 0.9 + y.detach().mean(0))
        return y * before

    return keep


def _decayed(holder: Any, name: str = "t") -> Callable[[Tensor], Tensor]:
    """As `_average`, of what does not depend on the arguments."""

    def keep(y: Tensor) -> Tensor:
        before = getattr(holder, name)
        setattr(holder, name, before * 0.9)
        return y * before

    return keep


def _halved(holder: Any, name: str = "n") -> Callable[[Tensor], Tensor]:
    def keep(y: Tensor) -> Tensor:
        setattr(holder, name, getattr(holder, name) * 0.5)
        return y * float(getattr(holder, name))

    return keep


def _scaled(draw: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    return lambda y: y * draw()


def _written(x: Any, read: Callable[[Any], Any], write: Callable[[Any], Any]) -> Any:
    def keep(y: Tensor) -> Tensor:
        out = y * read(x)
        write(x)
        return out

    return keep


def _function_with(**attributes: Any) -> Any:
    def holder() -> None:
        pass

    holder.__dict__.update(attributes)
    return holder


def _class_with(**attributes: Any) -> Any:
    return type("Holder", (), {"__module__": __name__, **attributes})


def _module_with(**attributes: Any) -> Any:
    vars(MODULE).update(attributes)

    def keep(y: Tensor) -> Tensor:
        before = MODULE.n
        MODULE.n = MODULE.n * 0.5
        return y * before

    return keep


def _thread_local(**attributes: Any) -> Any:
    held = threading.local()
    held.__dict__.update(attributes)
    return held


def _weak(start: Any, step: Callable[[Any, Tensor], Any]) -> Any:
    key, by_key = Key(), weakref.WeakKeyDictionary()
    by_key[key] = start

    def keep(y: Tensor) -> Tensor:
        before = by_key[key]
        by_key[key] = step(before, y)
        return y * before

    return keep


def _context(start: Any) -> Any:
    VARIABLE.set(start)

    def keep(y: Tensor) -> Tensor:
        before = VARIABLE.get()
        VARIABLE.set(before * 0.5)
        return y * before

    return keep


def _generator() -> Any:
    n = 1.0
    while True:
        yield n
        n *= 0.5


def _scheduler() -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(one())], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer._opt_called = True
    return _written(scheduler, lambda s: s.get_last_lr()[0], lambda s: s.step())


def _random_key() -> Any:
    held = SimpleNamespace(key=ftp.random.key(0))

    def keep(y: Tensor) -> Tensor:
        held.key, now = ftp.random.split(held.key, 2)
        return y * ftp.random.normal(now, (4,)).double()

    return keep


def _queue() -> Any:
    held = SimpleNamespace(rows=torch.arange(24, dtype=torch.float64).reshape(6, 4), at=0)

    def keep(y: Tensor) -> Tensor:
        row = held.rows[held.at]
        held.at = (held.at + 1) % 6
        return y * row

    return keep


def _flag(first: Any, later: Any) -> Any:
    held = SimpleNamespace(mode=first)

    def keep(y: Tensor) -> Tensor:
        is_first = held.mode == first
        held.mode = later
        return y * (1 if is_first else 2)

    return keep


def _partial() -> Any:
    return functools.partial(lambda log, y: (log.append(1.0), y * sum(log))[1], [])


def _property() -> Any:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        @property
        def n(self) -> int:
            self.calls += 1
            return self.calls

    counting = Counting()
    return lambda y: y * counting.n


def _as_parameter(y: Tensor, held: Any, step: Callable[[Tensor], Tensor]) -> Tensor:
    out = y * nn.Parameter(held.t, requires_grad=False)
    held.t = step(held.t)
    return out


def _holder(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


STATEFUL: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "average": lambda: _average(_holder(t=one())),
    "decayed": lambda: _decayed(_holder(t=one())),
    "by Parameter": lambda: (
        lambda held: lambda y: _as_parameter(y, held, lambda t: t * 0.9 + y.detach().mean(0))
    )(_holder(t=one())),
    "decayed, by Parameter": lambda: (
        lambda held: lambda y: _as_parameter(y, held, lambda t: t * 0.9)
    )(_holder(t=one())),
    "set_": lambda: _written(_holder(t=one()), lambda h: h.t * 1, lambda h: h.t.set_(h.t * 0.9)),
    "data": lambda: _written(
        _holder(t=one()), lambda h: h.t, lambda h: setattr(h.t, "data", h.t.data * 0.9)
    ),
    "in place": lambda: _written(one(), lambda t: t * 1, lambda t: t.mul_(0.9)),
    "numpy": lambda: _written(
        _holder(a=np.ones(4)),
        lambda h: torch.from_numpy(h.a),
        lambda h: setattr(h, "a", h.a * 0.9),
    ),
    "numpy in place": lambda: _written(
        np.ones(4), lambda a: torch.from_numpy(a).clone(), lambda a: a.__imul__(0.9)
    ),
    "numpy copied": lambda: _written(np.ones(4), torch.tensor, lambda a: a.__imul__(0.9)),
    "numpy number": lambda: _halved(_holder(n=np.float64(1))),
    "list": lambda: _written([1.0], sum, lambda log: log.append(1.0)),
    "length": lambda: _written(["a"], len, lambda log: log.append("a")),
    "list bound anew": lambda: _written(
        _holder(log=[1.0]), lambda h: sum(h.log), lambda h: setattr(h, "log", [*h.log, 1.0])
    ),
    "dict": lambda: _written({}, lambda d: d.get("n", 1), lambda d: d.update(n=2 * d.get("n", 1))),
    "counter": lambda: _written(Counter("a"), lambda c: c["a"], lambda c: c.update("a")),
    "set": lambda: _written({0}, len, lambda s: s.add(len(s))),
    "deque": lambda: _written(deque([1.0, 2.0, 3.0]), lambda q: q[0], lambda q: q.rotate(1)),
    "bytes": lambda: _written(
        bytearray(b"\1"), lambda b: b[0], lambda b: b.__setitem__(0, 2 * b[0])
    ),
    "array": lambda: _written(
        array.array("d", [1]), lambda a: a[0], lambda a: a.__setitem__(0, a[0] / 2)
    ),
    "complex": lambda: _written(
        _holder(z=1j), lambda h: h.z.real + 2, lambda h: setattr(h, "z", h.z * 1j)
    ),
    "flag": lambda: _flag(True, False),
    "text": lambda: _flag("warm", "hot"),
    "none": lambda: _flag(None, "set"),
    "frozen": lambda: _written(
        _holder(d=Frozen()), lambda h: h.d.n, lambda h: setattr(h, "d", replace(h.d, n=h.d.n / 2))
    ),
    "object bound anew": lambda: _written(
        _holder(d=Frozen()), lambda h: h.d.n, lambda h: setattr(h, "d", Slots(h.d.n / 2))
    ),
    "slots, number": lambda: _halved(Slots()),
    "slots": lambda: _average(Slots()),
    "slots, decayed": lambda: _decayed(Slots()),
    "class, number": lambda: _halved(_class_with(n=1.0)),
    "class": lambda: _average(_class_with(t=one())),
    "class, decayed": lambda: _decayed(_class_with(t=one())),
    "function, number": lambda: _halved(_function_with(n=1.0)),
    "function": lambda: _average(_function_with(t=one())),
    "module, number": lambda: _module_with(n=1.0),
    "module": lambda: _module_with(n=one()),
    "global": _global,
    "cached, number": lambda: (lambda key: lambda y: _halved(singleton(key))(y))(Key()),
    "cached": lambda: (lambda key: lambda y: _average(singleton(key))(y))(Key()),
    "cached, decayed": lambda: (lambda key: lambda y: _decayed(singleton(key))(y))(Key()),
    "weak, number": lambda: _weak(1.0, lambda n, y: n * 0.5),
    "weak": lambda: _weak(one(), lambda t, y: t + y.detach().mean(0)),
    "thread, number": lambda: _halved(_thread_local(n=1.0)),
    "thread": lambda: _average(_thread_local(t=one())),
    "context, number": lambda: _context(1.0),
    "context": lambda: _context(one()),
    "generator": lambda: _scaled(functools.partial(next, _generator())),
    "generator of a variable": lambda: (lambda g: lambda y: y * next(g))(_generator()),
    "count": lambda: (lambda g: lambda y: y * next(g))(itertools.count(1)),
    "cycle": lambda: (lambda g: lambda y: y * next(g))(itertools.cycle([1.0, 2.0])),
    "iterator": lambda: (lambda g: lambda y: y * next(g))(iter([1.0, *range(2, 20)])),
    "batches": lambda: (lambda g: lambda y: y * next(g))(iter([one() * i for i in range(12)])),
    "map": lambda: (lambda g: lambda y: y * next(g))(map(float, range(1, 20))),
    "random": lambda: (lambda r: lambda y: y * r.random())(random.Random(0)),
    "numpy random": lambda: (lambda r: lambda y: y * r.random())(np.random.default_rng(0)),
    "numpy random state": lambda: (lambda r: lambda y: y * r.rand())(np.random.RandomState(0)),
    "random key": _random_key,
    "scheduler": _scheduler,
    "queue": _queue,
    "partial": _partial,
    "property": _property,
}


def _once(held: Any, name: str, make: Callable[[], Any]) -> Any:
    if getattr(held, name, None) is None:
        setattr(held, name, make())
    return getattr(held, name)


def _by_key() -> Any:
    key, by_key = Key(), weakref.WeakKeyDictionary()

    def keep(y: Tensor) -> Tensor:
        if key not in by_key:
            by_key[key] = table()
        return y * by_key[key][: y.shape[0]]

    return keep


def _cached_table() -> Any:
    cached = functools.lru_cache(table)
    return lambda y: y * cached(y.shape[0])


def _kept_in(held: Any) -> Callable[[Tensor], Tensor]:
    return lambda y: y * _once(held, "t", table)[: y.shape[0]]


def _busy() -> Any:
    held = _holder(told=False, names=set(), calls=0, log=[], last=None, ids=itertools.count())

    def keep(y: Tensor) -> Tensor:
        held.told, held.last = True, f"call {next(held.ids)}"
        held.names.add("f")
        held.log.append(tuple(y.shape))
        return y * 2

    return keep


def _history() -> Any:
    log = []
    return lambda y: (log.append(y.detach().mean()), y * 2)[1]


def _numpy_table(held: Any) -> Any:
    make = functools.partial(np.cos, np.arange(9.0))
    return lambda y: y * torch.from_numpy(_once(held, "a", make))[: y.shape[0], None]


def _grown(make: Callable[[int], Tensor], rows: Callable[[Tensor, int], Tensor]) -> Any:
    held = _holder(t=None)

    def keep(y: Tensor) -> Tensor:
        if held.t is None or len(held.t) < y.shape[0]:
            held.t = make(y.shape[0])
        return y * rows(held.t, y.shape[0])

    return keep


def _line(n: int) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) / n)[:, None]


def _of_first(held: Any) -> Any:
    """Keeps a table that depends on the size of the first call."""
    return lambda y: y * _once(held, "t", lambda: _line(y.shape[0] + 4))[: y.shape[0]]


HARMLESS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "object": lambda: _kept_in(_holder()),
    "slots": lambda: _kept_in(Slots(t=None)),
    "class": lambda: _kept_in(_class_with()),
    "function": lambda: _kept_in(_function_with()),
    "thread": lambda: _kept_in(_thread_local()),
    "weak": _by_key,
    "cached": _cached_table,
    "numpy": lambda: _numpy_table(_holder()),
    "busy": _busy,
    "history": _history,
    "grown": lambda: _grown(table, lambda t, n: t[:n]),
    "grown, by size": lambda: _grown(_line, lambda t, n: t[:n]),
    "of the first size": lambda: _of_first(_holder()),
    "grown, at the end": lambda: _grown(table, lambda t, n: t[-n:]),
}
