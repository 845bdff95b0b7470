"""Shape, strides, dtype and storage of every value of a rank's graph under eager kernels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from ftp.dataclass import dataclass
from ftp.ops.meta_results import FakeOf, is_plain, meta_result
from ftp.ops.written import is_in_place, written_arguments
from ftp.partitioning.partition import WAIT
from ftp.torch_internals.fake_tensors import FakeTensorMode
from ftp.torch_internals.modes import disable_current_modes
from ftp.torch_internals.op_types import OpOverload
from ftp.torch_internals.process_groups import load_python_kernels


class LocalTensor(NamedTuple):
    """A local tensor; tensors of one ``storage`` share memory, which takes ``storage_nbytes``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    storage_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, each counted once."""
        if 0 not in self.stride:
            return math.prod(self.shape) * self.dtype.itemsize
        count = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride or not size else 1
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class LocalShapes:
    """The tensors, storages and numbers of a rank's graph.

    Attributes:
        values: per node the tensors of its result (of a tuple in order).
        makers: per storage the node that allocates it.
        numbers: the numbers that nodes compute from the rank's offsets.
        calls: per node that was called in this process, what equal calls share: the same object.
    """

    values: Mapping[fx.Node, tuple[LocalTensor, ...]]
    makers: Mapping[int, fx.Node]
    numbers: Mapping[fx.Node, int] = field(default_factory=dict)
    calls: Mapping[fx.Node, object] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """The tensors among the graph's inputs."""
        return [node for node in self.values if node.op == "placeholder"]


def local_shapes(
    graph: fx.Graph,
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    offsets: Sequence[int],
    device: str,
    before: LocalShapes | None = None,
) -> LocalShapes:
    """Follow shapes and memory through a rank's graph; nothing is allocated.

    Args:
        inputs: shape and dtype of each local input tensor; contiguous.
        offsets: the ints that follow them.
        device: the type of device whose kernels will run.
        before: of the graph before ops were made to write in place; other ops on the same
            operands give the same results.
    """
    return _Shapes(device, before or LocalShapes({}, {})).follow(graph, inputs, offsets)


def annotate(shapes: LocalShapes, device: str) -> None:
    """Give every node whose result is one tensor a fake tensor of its shape, strides and dtype in
    ``meta["val"]``, as passes expect.
    """
    fake, known = FakeOf(FakeTensorMode()), {}
    for node, values in shapes.values.items():
        if len(values) != 1:
            continue
        held = values[0]
        key = held.shape, held.stride, held.dtype
        if key not in known:
            known[key] = fake.strided(*key, torch.device(device))
        node.meta["val"] = known[key]


class _Shapes:
    """Follows a graph op by op under a fake tensor mode; ``known`` caches results by call."""

    def __init__(self, device: str, before: LocalShapes):
        load_python_kernels()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake = FakeOf(self.mode)
        self.device = torch.device(device)
        self.before = before
        self.calls = dict(before.calls)
        self.changed: set[fx.Node] = set()  # nodes with another result than before
        # Memory that nodes filled before, and that they write their results to now.
        self.moved: dict[int, tuple[int, int]] = {}
        self.storages = max(before.makers, default=0)
        self.known: dict[Any, tuple[tuple[Any, ...], ...]] = {}
        self.of_torch = _KNOWN.setdefault(self.device, {})
        if len(self.of_torch) > MOST_KNOWN:
            self.of_torch.clear()

    def follow(
        self,
        graph: fx.Graph,
        inputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
        offsets: Sequence[int],
    ) -> LocalShapes:
        values: dict[fx.Node, tuple[LocalTensor, ...]] = {}
        makers: dict[int, fx.Node] = {}
        numbers: dict[fx.Node, int] = {}
        feed, rest = iter(inputs), iter(offsets)
        for node in graph.nodes:
            if node.op == "placeholder":
                given = next(feed, None)
                if given is None:
                    numbers[node] = next(rest)
                    continue
                held = self.before.values.get(node) or (
                    self._fresh(given[0], _contiguous(given[0]), given[1]),
                )
            elif node.op == "output":
                break
            elif (held := self._as_before(node)) is None:
                if _is_arithmetic(node, numbers):
                    numbers[node] = _computed(node, numbers)
                    continue
                held = self._found(node, values, numbers)
            values[node] = held
            for one in held:
                makers.setdefault(one.storage, node)
        return LocalShapes(values, makers, numbers, self.calls)

    def _as_before(self, node: fx.Node) -> tuple[LocalTensor, ...] | None:
        """The result that a node had before, in the memory where it is now; None if it is to be
        found anew.
        """
        known, moved = self.before.values.get(node), self.moved
        if known is None or written_arguments(node.target):
            return None
        if not self.changed.isdisjoint(node.all_input_nodes):
            return None
        if moved.keys().isdisjoint([h.storage for h in known]):
            return known
        return tuple(
            [LocalTensor(*h[:3], *moved[h.storage]) if h.storage in moved else h for h in known]
        )

    def _found(
        self,
        node: fx.Node,
        values: Mapping[fx.Node, tuple[LocalTensor, ...]],
        numbers: Mapping[fx.Node, int],
    ) -> tuple[LocalTensor, ...]:
        if getattr(node.target, "__name__", "") == "getitem":
            held = (values[node.args[0]][node.args[1]],)  # type: ignore[index]
        elif node.target is WAIT or is_in_place(node.target):
            held = values[node.args[0]]  # type: ignore[index]
        else:
            held = self._call(node, values, numbers)
        if self.before.values:
            self._note_change(node, held)
        return held

    def _note_change(self, node: fx.Node, held: tuple[LocalTensor, ...]) -> None:
        """Note a result that is not the one before: the same in other memory, or another."""
        if is_in_place(node.target):
            self.calls.pop(node, None)
            one, now = self.before.values.get(node, held)[0], held[0]
            if one[:3] == now[:3] and self.before.makers.get(one.storage) is node:
                self.moved[one.storage] = now[3:]
                return
        self.changed.add(node)

    def _fresh(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        nbytes: int | None = None,
    ) -> LocalTensor:
        self.storages += 1
        if nbytes is None:
            nbytes = _extent(shape, stride) * dtype.itemsize
        return LocalTensor(shape, stride, dtype, self.storages, nbytes)

    def _call(
        self,
        node: fx.Node,
        values: Mapping[fx.Node, tuple[LocalTensor, ...]],
        numbers: Mapping[fx.Node, int],
    ) -> tuple[LocalTensor, ...]:
        # For a functional op it does not matter which operands share memory: without it, repeated
        # layers share an entry.
        call = _DescribedCall(values, numbers)
        # In the order of `resolved`, as the operands are numbered by it.
        key = node.target, call.described(node.args), call.described(node.kwargs)
        operands = call.operands
        known = self.of_torch if call.is_plain and _is_torch_op(node.target) else self.known
        found = known.get(key)
        if found is None:
            args, kwargs = call.resolved(node)
            found = known[key] = self._run(node.target, args, kwargs, operands)
        self.calls[node] = found
        made = []
        for shape, stride, dtype, alias, nbytes in found:
            if alias is None:
                made.append(self._fresh(shape, stride, dtype, nbytes))
            else:
                made.append(
                    LocalTensor(
                        shape,
                        stride,
                        dtype,
                        operands[alias].storage,
                        operands[alias].storage_nbytes,
                    )
                )
        return tuple(made)

    def _run(
        self, target: Any, args: Any, kwargs: Any, operands: Sequence[LocalTensor]
    ) -> tuple[tuple[Any, ...], ...]:
        with disable_current_modes(), torch.no_grad(), self.mode:
            try:
                fakes, out = self._made(target, args, kwargs, operands, self.device)
            except (RuntimeError, AssertionError):
                # Some fake kernels, as of convolutions along one dim and bilinear upsampling, call
                # what fails on a GPU's tensors in a build of torch without CUDA.
                if self.device.type != "cuda" or torch.backends.cuda.is_built():
                    raise
                fakes, out = self._made(target, args, kwargs, operands, torch.device("cpu"))
        storages = {f.untyped_storage()._cdata: at for at, f in reversed(list(enumerate(fakes)))}
        found = []
        for one in out if isinstance(out, list | tuple) else (out,):
            if not isinstance(one, torch.Tensor):
                found.append(((), (), torch.int64, None, 0))
                continue
            shape, stride = tuple(map(int, one.shape)), tuple(map(int, one.stride()))
            storage = one.untyped_storage()
            found.append(
                (shape, stride, one.dtype, storages.get(storage._cdata), int(storage.nbytes()))
            )
        return tuple(found)

    def _made(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        operands: Sequence[LocalTensor],
        device: torch.device,
    ) -> tuple[Sequence[torch.Tensor], Any]:
        """Fake operands, and what the call makes of them."""
        fakes = [self.fake.strided(h.shape, h.stride, h.dtype, device) for h in operands]
        left = iter(fakes)
        given = map_aggregate((args, kwargs), lambda a: next(left) if a is _OPERAND else a)
        args, kwargs = given  # type: ignore[misc]
        is_simple = isinstance(target, OpOverload) and is_plain(target)
        out = meta_result(target, args, kwargs) if is_simple else None
        return fakes, target(*args, **kwargs) if out is None else out


class _DescribedCall:
    """Describes a call's arguments by what its result depends on, and collects its operands.

    Attributes:
        is_plain: whether arguments that differ have descriptions that differ, in all programs.
    """

    def __init__(
        self,
        values: Mapping[fx.Node, tuple[LocalTensor, ...]],
        numbers: Mapping[fx.Node, int],
    ):
        self.values, self.numbers = values, numbers
        self.operands: list[LocalTensor] = []
        self.first: dict[fx.Node, int] = {}  # x * x reads less than x * y
        self.is_plain = True

    def described(self, argument: Any) -> Any:
        kind = type(argument)
        if kind is fx.Node:
            if argument in self.numbers:
                return self.numbers[argument]
            held = self.values[argument][0]
            self.operands.append(held)
            first = self.first.setdefault(argument, len(self.first))
            return (*held[:3], first)
        if kind in _PLAIN:
            # 1, 1.0 and True are equal, as are 0.0 and -0.0
            return argument if kind is int else (kind, repr(argument))
        if isinstance(argument, (list, tuple)):
            if _INT.issuperset(map(type, argument)):
                return tuple(argument)
            return tuple([self.described(one) for one in argument])
        if isinstance(argument, dict):
            return tuple([(key, self.described(one)) for key, one in argument.items()])
        if kind is slice:
            return self.described((argument.start, argument.stop, argument.step))
        self.is_plain = False
        return kind, repr(argument)

    def resolved(self, node: fx.Node) -> Any:
        """The arguments with numbers, and ``_OPERAND`` in place of each operand."""
        return map_aggregate(
            (node.args, dict(node.kwargs)),
            lambda x: self.numbers.get(x, _OPERAND) if isinstance(x, fx.Node) else x,
        )


_INT = {int}
_OPERAND = "an operand"  # in place of the next operand's node

# Results of torch's own ops and collectives by device and key: equal in all programs of a process,
# such as the many that a search plans.
_KNOWN: dict[torch.device, dict[Any, tuple[tuple[Any, ...], ...]]] = {}
MOST_KNOWN = 20_000
_PLAIN = {
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip


def _is_torch_op(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace in ("aten", "_c10d_functional")


def known_numbers(nodes: Iterable[fx.Node], inputs: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """The numbers among a graph's inputs, and those computed from them."""
    known = dict(inputs)
    for node in nodes:
        if _is_arithmetic(node, known):
            known[node] = _computed(node, known)
    return known


def _is_arithmetic(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    """Whether a node computes a number from known numbers, such as a rank's offsets."""
    return (
        getattr(node.target, "__module__", "") in ("_operator", "builtins", "math")
        and bool(node.all_input_nodes)
        and all(x in known for x in node.all_input_nodes)
    )


def _computed(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    target: Any = node.target
    return target(*map_arg(node.args, known.__getitem__))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
