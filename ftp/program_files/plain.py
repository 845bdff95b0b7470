"""Values of a program as JSON, and back: a closed table of types, so that reading runs no code.

Scalars stand for themselves; anything else is a list whose first item is its kind. Values of the
table's classes, and tuples of sizes, are stored once in a pool and referred to by number.
"""

import builtins
import functools
import importlib
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import fx

from ftp.errors import ProgramFileError
from ftp.ops.constrain import Pin
from ftp.ops.windows import Exchange
from ftp.partitioning.collectives import Collective, Member
from ftp.partitioning.local_program import ShardOffset
from ftp.per_rank.program import Port
from ftp.planning.cost import Hardware, Link
from ftp.planning.graph import FactorCut, Reshard, Value
from ftp.planning.solver.minimize import Solution
from ftp.rules.call import Call, Meta
from ftp.runtime.options import Options
from ftp.sharding.layout import Chunk, Layout, Product
from ftp.sharding.spec import PartitionSpec, Stage, Units, Zigzag
from ftp.torch_internals.op_types import OpOverload

TUPLE, LIST, DICT, FROZENSET, FLOAT, COMPLEX, DTYPE, DEVICE, MESH_DEVICE, CONSTANT = range(10)
OP, FUNCTION, SLICE, REF, NODE, VALUE, GROUP, TENSOR, ELLIPSIS, SPEC = range(10, 20)

CLASSES: tuple[type, ...] = (
    Call, Chunk, Collective, Exchange, FactorCut, Hardware, Layout, Link, Member, Meta,
    ShardOffset, Options, Pin, Port, Product, Reshard, Solution, Stage, Units, Zigzag,
)  # fmt: skip
_COLLECTIONS = (tuple, list, dict, frozenset, slice, Mapping)  # dict first: it is asked for faster
_NUMBER = {cls: number for number, cls in enumerate(CLASSES)}
# Ops on Python numbers, such as a rank's offsets, and on tuples.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in
       ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem", "eq", "ne", "lt", "le", "gt",
        "ge")},
    **{name: getattr(builtins, name) for name in ("min", "max", "abs", "int")},
}  # fmt: skip
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_CONSTANTS = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.memory_format | torch.layout)
}


class Writer:
    """Turns values into plain data.

    Args:
        device: the mesh's device, which is written without its index.

    Attributes:
        pool: entries that are referred to.
        nodes: numbers of the nodes, of a rank's graph or a plan's, that have been written.

    >>> writer = Writer()
    >>> Reader([], None).of(writer.of((1, [2.5, None], torch.float32)))
    (1, [2.5, None], torch.float32)
    """

    def __init__(self, device: torch.device | None = None):
        self.pool: list[Any] = []
        self.device = device
        self.nodes: dict[Any, int] = {}
        self._known: dict[int, tuple[int, Any]] = {}  # by id, with the object to keep it alive

    def of(self, value: Any) -> Any:
        """Plain data of a value.

        Raises:
            ProgramFileError: a value of a type that is not in the table.
        """
        kind = type(value)
        if value is None or kind is bool or kind is int or isinstance(value, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else [FLOAT, repr(value)]
        if kind is complex:
            return [COMPLEX, self.of(value.real), self.of(value.imag)]
        if kind is fx.Node:
            return [NODE, self.nodes[value]]
        if kind is OpOverload:
            return [OP, value.name()]
        if kind in _NUMBER:
            return self.once(value, lambda: self._fields(value))
        if isinstance(value, _COLLECTIONS):
            data = self._collection(value)
        else:
            data = self._torch_value(value)
        if data is not None:
            return data
        if value is ...:
            return [ELLIPSIS]
        if callable(value) and value in _NAMES:
            return [FUNCTION, _NAMES[value]]
        raise ProgramFileError(
            f"A program with {_described(value)} cannot be saved: only tensors' shapes, numbers,"
            " text and ops of torch.ops can. Plan it where it runs."
        )

    def _collection(self, value: Any) -> list[Any] | None:
        kind = type(value)
        if kind is tuple or kind is torch.Size:
            return [TUPLE, *map(self.of, value)]
        if isinstance(value, list):  # fx has its own
            return [LIST, *map(self.of, value)]
        if kind is Value:
            return [VALUE, self.nodes[value.node], value.index]
        if isinstance(value, Mapping):
            return [DICT, *(self.of(x) for item in value.items() for x in item)]
        if kind is frozenset:
            return [FROZENSET, *map(self.of, sorted(value))]
        if kind is slice:
            return [SLICE, self.of(value.start), self.of(value.stop), self.of(value.step)]
        return None

    def _torch_value(self, value: Any) -> list[Any] | None:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        kind = type(value)
        if kind is torch.dtype:
            return [DTYPE, str(value).removeprefix("torch.")]
        if kind is PartitionSpec:
            return [SPEC, [self.of(e) for e in value.entries], list(value.unreduced)]
        if kind is torch.device:
            is_of_mesh = self.device is not None and value.type == self.device.type
            return [MESH_DEVICE] if is_of_mesh else [DEVICE, str(value)]
        if kind is torch.memory_format or kind is torch.layout:
            return [CONSTANT, str(value)]
        return None

    def _tensor(self, value: torch.Tensor) -> list[Any] | None:
        """Plain data of a tensor's shape, strides and dtype; None for symbolic ones."""
        sizes = list(value.shape)
        if not all(type(n) is int for n in sizes):
            return None
        return [TENSOR, sizes, list(map(int, value.stride())), self.of(value.dtype)]

    def once(self, value: Any, write: Callable[[], Any]) -> Any:
        """A reference to the pool's entry for an object; ``write`` makes the entry once."""
        known = self._known.get(id(value))
        if known is None:
            data = write()
            known = self._known[id(value)] = len(self.pool), value
            self.pool.append(data)
        return [REF, known[0]]

    def _fields(self, value: Any) -> list[Any]:
        given = [getattr(value, name) for name in names_of(type(value))]
        return [_NUMBER[type(value)], *map(self.of, given)]


def names_of(cls: type) -> tuple[str, ...]:
    """The fields of a class of the table."""
    if is_dataclass(cls):
        return tuple(f.name for f in fields(cls))
    return cls._fields


class Reader:
    """Turns plain data into values; data outside the table are an error.

    Args:
        pool: of the `Writer`.
        device: the mesh's.

    Attributes:
        nodes: those made so far, of a rank's graph or a plan's.
    """

    def __init__(self, pool: list[Any], device: torch.device | None):
        self.device = device
        self.nodes: list[Any] = []
        self._data = pool
        self._made: list[Any] = []
        self._tensors: dict[Any, torch.Tensor] = {}

    def of(self, data: Any) -> Any:
        """The value of data that a `Writer` made."""
        if type(data) is not list:
            return data
        tag = data[0]
        if tag == TUPLE:
            return tuple(map(self.of, data[1:]))
        if tag == LIST:
            return list(map(self.of, data[1:]))
        if tag == NODE:
            return self.nodes[data[1]]
        if tag == REF:
            return self.at(data[1])
        return _READ[tag](self, data)

    def at(self, number: int) -> Any:
        """An entry of the pool; entries refer to earlier ones only."""
        while len(self._made) <= number:
            entry = self._data[len(self._made)]
            self._made.append(self.entry(entry))
        return self._made[number]

    def entry(self, data: list[Any]) -> Any:
        """The value of an entry of the pool."""
        cls = CLASSES[data[0]]
        given = dict(zip(names_of(cls), map(self.of, data[1:]), strict=True))
        return cls(**given)

    def _dict(self, data: list[Any]) -> dict[Any, Any]:
        flat = [self.of(x) for x in data[1:]]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def _tensor(self, data: list[Any]) -> torch.Tensor:
        key = tuple(data[1]), tuple(data[2]), data[3][1]
        if key not in self._tensors:
            self._tensors[key] = torch.empty_strided(
                key[0], key[1], dtype=_dtype(data[3]), device="meta"
            )
        return self._tensors[key]

    def _mesh_device(self, data: list[Any]) -> torch.device:
        assert self.device is not None
        return self.device


def _dtype(data: list[Any]) -> torch.dtype:
    found = getattr(torch, data[1], None)
    if not isinstance(found, torch.dtype):
        raise ProgramFileError(f"The program has the dtype {data[1]}, which this torch lacks.")
    return found


@functools.cache
def _op(full: str) -> OpOverload:
    namespace, _, name = full.partition("::")
    name, _, overload = name.partition(".")
    found = _registered(namespace, name, overload or "default")
    if found is None and namespace == "ftp":
        importlib.import_module("ftp.rules.own")  # with the modules of all of ftp's ops
        found = _registered(namespace, name, overload or "default")
    if not isinstance(found, OpOverload):
        raise ProgramFileError(
            f"The program calls {full}, which is not registered here: import the module that"
            " defines it before ftp.load_program."
        )
    if any(a.name == "filename" for a in found._schema.arguments):
        raise ProgramFileError(f"The program calls {full}, which opens files: it is refused.")
    return found


def _registered(namespace: str, name: str, overload: str) -> Any:
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        return None


_READ: Mapping[int, Callable[[Reader, list[Any]], Any]] = {
    DICT: Reader._dict,
    FROZENSET: lambda reader, data: frozenset(map(reader.of, data[1:])),
    FLOAT: lambda reader, data: float(data[1]),
    COMPLEX: lambda reader, data: complex(reader.of(data[1]), reader.of(data[2])),
    DTYPE: lambda reader, data: _dtype(data),
    DEVICE: lambda reader, data: torch.device(data[1]),
    MESH_DEVICE: Reader._mesh_device,
    CONSTANT: lambda reader, data: _CONSTANTS[data[1]],
    OP: lambda reader, data: _op(data[1]),
    VALUE: lambda reader, data: Value(reader.nodes[data[1]], data[2]),
    FUNCTION: lambda reader, data: _FUNCTIONS[data[1]],
    SLICE: lambda reader, data: slice(*map(reader.of, data[1:])),
    TENSOR: Reader._tensor,
    ELLIPSIS: lambda reader, data: ...,
    SPEC: lambda reader, data: PartitionSpec(*map(reader.of, data[1]), unreduced=data[2]),
}


def _described(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{name or repr(value)[:80]}, of type {type(value).__name__},"
