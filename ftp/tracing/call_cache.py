"""Cache of traced calls: an op called again with equal arguments replays the nodes that its first
call recorded. Most ops of a deep model repeat ops of its first layer.

Tracing one op costs half a millisecond, most of it to find the shape of its result. A call with the
same op, shapes and numbers records the same nodes, so they are copied, and the fake tensors of the
results are made from the recorded metadata.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import _ProxyTensor
from torch.fx.proxy import Proxy

from ftp.dataclass import dataclass
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.meta_results import META, FakeOf, is_plain, meta_result
from ftp.ops.written import is_in_place
from ftp.rules.call import replaced
from ftp.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from ftp.torch_internals.graph_nodes import new_node
from ftp.torch_internals.modes import DisableTorchDispatch
from ftp.torch_internals.op_types import OpOverload


@dataclass(frozen=True)
class _NodeAt:
    """A node among those of the call's tensors and, after them, the call's own."""

    at: int


CALLED = "called"  # in a node's metadata: the op that named it, if another one has replaced it


@dataclass(frozen=True)
class _Val:
    """Metadata of a tensor; ``shares`` is the place of the one whose memory it views, if any."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    shares: _NodeAt | None


@dataclass(frozen=True)
class _Record:
    """One node of a call: target, arguments and result. ``val`` is None for several results, which
    getitem nodes after it take apart.
    """

    target: Any
    name: str
    args: Any
    kwargs: Any
    val: _Val | None


@dataclass(frozen=True)
class _KnownCall:
    """The nodes of a call, and its result with placeholders for tensors. After a call ``in_place``
    the first input is represented by the call's last node.
    """

    records: tuple[_Record, ...]
    result: Any
    in_place: bool


class TracedCall(NamedTuple):
    """One call: ``key``, all that its nodes depend on; ``given``, its tensors; ``inputs``, their
    nodes at the time of the call.
    """

    key: Any
    given: list[FakeTensor]
    inputs: list[fx.Node]
    in_place: bool


class Recall:
    """The calls of one trace.

    Args:
        mode: of the fake tensors that the trace is on.
        outer: those of the surrounding trace, to share them: layers that are traced apart, as
            experts' per-rank code, repeat each other's.
    """

    def __init__(self, mode: FakeTensorMode, outer: "Recall | None" = None):
        self.fake = FakeOf(mode)
        self._known: dict[Any, _KnownCall | None] = {} if outer is None else outer._known

    def call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tracer: Any
    ) -> TracedCall | None:
        """The call, or None for a call that is never replayed; ``func``: an op, or what with the
        arguments' shapes decides the nodes.
        """
        in_place = isinstance(func, OpOverload) and func._schema.is_mutable
        if in_place and not is_in_place(func):
            return None
        found: list[Any] = [func, torch.get_default_dtype()]
        given: list[FakeTensor] = []
        if not _describe(args, found, given) or (kwargs and not _describe(kwargs, found, given)):
            return None
        inputs = []
        for tensor in given:
            known = tracer.tensor_tracker.get(tensor)
            if known is None or known.constant is not None:
                return None
            inputs.append(known.proxy.node)
        return TracedCall(tuple(found), given, inputs, in_place)

    def again(self, call: TracedCall, tracer: Any) -> Any:
        """Replay a call: add its nodes to the tracer's graph and return its result; None where the
        call is not cached.
        """
        known = self._known.get(call.key)
        if known is None:
            return None
        graph, given = tracer.graph, len(call.given)
        nodes: list[fx.Node] = [*call.inputs]
        tensors: list[FakeTensor | None] = [*call.given]
        if known.in_place and nodes[0].meta.get("val") is tensors[0]:
            nodes[0].meta["val"] = self.alias(call.given[0])  # a later op may reshape it

        def node_of(place: _NodeAt) -> fx.Node:
            return nodes[place.at]

        with DisableTorchDispatch():
            for record in known.records:
                args = replaced(record.args, _NodeAt, node_of)
                kwargs = record.kwargs and replaced(record.kwargs, _NodeAt, node_of)
                node = new_node(graph, "call_function", record.target, args, kwargs, record.name)
                nodes.append(node)
                tensor = None
                if (val := record.val) is not None:
                    source = None if val.shares is None else tensors[val.shares.at]
                    tensor = node.meta["val"] = self._tensor(val, source)
                    track(call.given[0] if known.in_place else tensor, node, tracer)
                tensors.append(tensor)
        if known.in_place:
            return call.given[0]
        for i, record in enumerate(known.records, given):
            if record.val is None:
                parts = {
                    r.args[1]: tensors[j]
                    for j, r in enumerate(known.records, given)
                    if r.args and r.args[0] == _NodeAt(i)
                }
                nodes[i].meta["val"] = tuple(map(parts.get, range(max(parts, default=-1) + 1)))
        return replaced(known.result, _NodeAt, lambda place: tensors[place.at])

    def alias(self, x: FakeTensor) -> FakeTensor:
        """A tensor of the same memory, which keeps its shape where ops change ``x``'s in place."""
        with DisableTorchDispatch():
            at = int(x.storage_offset())
            own = _Val(tuple(x.shape), x.stride(), at, x.dtype, x.fake_device, None)
            return self._tensor(own, x)

    def _tensor(self, val: _Val, source: FakeTensor | None) -> FakeTensor:
        if source is None:
            plain = torch.empty_strided(val.shape, val.stride, dtype=val.dtype, device=META)
        else:
            plain = torch.empty(0, dtype=val.dtype, device=META)
            plain.set_(source.untyped_storage(), val.offset, val.shape, val.stride)
        return self.fake(plain, val.device)

    def foresee(self, call: TracedCall, args: Any, kwargs: Any, tracer: Any) -> None:
        """Cache a first call whose result can be computed without tracing it."""
        func = call.key[0]
        if call.key in self._known or not is_plain(func):
            return
        result = meta_result(func, args, kwargs)
        parts = list(result) if isinstance(result, tuple | list) else [result]
        if not all(isinstance(part, Tensor) for part in parts):
            return
        places: dict[int, Any] = {}
        stores: dict[int, Any] = {}
        for i, tensor in enumerate(call.given):
            places.setdefault(id(tensor), _NodeAt(i))
            stores.setdefault(tensor.untyped_storage()._cdata, _NodeAt(i))
        device = call.given[0].fake_device
        vals = [_val(part, stores, device) for part in parts]
        if None in vals:
            return
        name = tracer.graph._target_to_str(func.overloadpacket.__name__)
        given, named = (
            replaced(x, FakeTensor, lambda tensor: places[id(tensor)])
            for x in (tuple(args), dict(kwargs))
        )
        first = _NodeAt(len(call.given))
        if isinstance(result, Tensor):
            made = None if call.in_place else first
            records = (_Record(func, name, given, named, vals[0]),)
            known = _KnownCall(records, made, call.in_place)
        else:
            taken = [_Record(getitem, "getitem", (first, i), {}, val) for i, val in enumerate(vals)]
            made = type(result)(_NodeAt(first.at + 1 + i) for i in range(len(parts)))
            known = _KnownCall((_Record(func, name, given, named, None), *taken), made, False)
        self._known[call.key] = known

    def learn(self, call: TracedCall, result: Any, nodes: Sequence[fx.Node], tracer: Any) -> None:
        """Remember the nodes that a call was recorded as."""
        if call.key not in self._known:
            self._known[call.key] = _known(call, result, nodes, tracer)


def track(tensor: FakeTensor, node: fx.Node, tracer: Any) -> None:
    """Let ops on a tensor read a node."""
    tracer.tensor_tracker[tensor] = _ProxyTensor(Proxy(node, tracer), None)


_PLAIN = {int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def _describe(tree: Any, found: list[Any], given: list[FakeTensor]) -> bool:
    """Add the key of a call's arguments to ``found`` and its tensors to ``given``; False where an
    argument is of another kind.
    """
    kind = type(tree)
    if kind is FakeTensor:
        if tree.requires_grad or tree.is_conj() or tree.is_neg():
            return False
        if tree._has_symbolic_sizes_strides:
            return False
        first = len(given)
        for i, other in enumerate(given):
            if other is tree:
                first = i
                break
        found.append(
            (first, tree.shape, tree.stride(), tree.storage_offset(), tree.dtype, tree.fake_device)
        )
        given.append(tree)
        return True
    if kind in (list, tuple, dict):
        found.append((kind, tuple(tree) if kind is dict else len(tree)))
        members = tree.values() if kind is dict else tree
        return False not in [_describe(t, found, given) for t in members]
    if kind is float:  # 0.0 equals -0.0
        found.append(tree.hex())
        return True
    found.append((kind, tree))
    return kind in _PLAIN


def _known(
    call: TracedCall, result: Any, nodes: Sequence[fx.Node], tracer: Any
) -> _KnownCall | None:
    """A call's recorded nodes in terms of its inputs; None where they refer to anything else."""
    places: dict[fx.Node, Any] = {}
    stores: dict[int, Any] = {}
    for i, (tensor, node) in enumerate(zip(call.given, call.inputs, strict=True)):
        places.setdefault(node, _NodeAt(i))
        stores.setdefault(tensor.untyped_storage()._cdata, _NodeAt(i))
    records: list[_Record] = []
    for i, node in enumerate(nodes, len(call.given)):
        if any(n not in places for n in node.all_input_nodes):
            return None
        record = _record(node, i, places, stores, tracer)
        is_mutable = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        if record is None or (is_mutable and not call.in_place):
            return None
        records.append(record)
        places[node] = _NodeAt(i)
    if call.in_place:
        first = tracer.tensor_tracker[call.given[0]]
        is_all = (
            result is call.given[0]
            and len(records) == 1
            and first.constant is None
            and first.proxy.node is nodes[0]
            and records[0].val is not None
        )
        return _KnownCall(tuple(records), None, True) if is_all else None
    own = dict(enumerate(records, len(call.given)))
    made = _made_leaves(result, own, places, tracer.tensor_tracker)
    if not made or not _are_unpacked(own, nodes):
        return None
    return _KnownCall(tuple(records), replaced(result, Tensor, lambda x: made[id(x)]), False)


def _record(
    node: fx.Node,
    i: int,
    places: Mapping[fx.Node, Any],
    stores: dict[int, Any],
    tracer: Any,
) -> _Record | None:
    """The record of the ``i``-th node of a call; None for a node that cannot be replayed."""
    if node.op != "call_function":
        return None
    val = node.meta.get("val")
    taken = None
    if type(val) is FakeTensor:
        if (taken := _val(val, stores, val.fake_device)) is None:
            return None
        stores.setdefault(val.untyped_storage()._cdata, _NodeAt(i))
    elif not isinstance(val, tuple | list) or not all(
        v is None or type(v) is FakeTensor for v in val
    ):
        return None
    args, kwargs = mapped_arguments(node, places.__getitem__)
    target: Any = node.target
    called = node.meta.get(CALLED, target)
    called = called.overloadpacket if isinstance(called, OpOverload) else called
    name = tracer.graph._target_to_str(called.__name__)
    return _Record(target, name, args, kwargs, taken)


def _made_leaves(
    result: Any, records: Mapping[int, _Record], places: Mapping[fx.Node, Any], tracker: Any
) -> dict[int, _NodeAt] | None:
    """The place of each tensor of a call's result, by the tensor's id; None where a tensor is of no
    record.
    """
    made = {}
    for leaf in _leaves(result):
        is_tracked = type(leaf) is FakeTensor and leaf in tracker
        if not is_tracked or tracker[leaf].constant is not None:
            return None
        place = places.get(tracker[leaf].proxy.node)
        record = None if place is None else records.get(place.at)
        if record is None or record.val is None:
            return None
        made[id(leaf)] = place
    return made


def _are_unpacked(records: Mapping[int, _Record], nodes: Sequence[fx.Node]) -> bool:
    """Whether each result of an op with several results has a node of its own."""
    for (i, record), node in zip(records.items(), nodes, strict=True):
        if record.val is not None:
            continue
        vals = node.meta["val"]
        unpacked = {
            r.args[1]
            for r in records.values()
            if r.args and r.args[0] == _NodeAt(i) and r.val is not None
        }
        if unpacked != {k for k, val in enumerate(vals) if val is not None}:
            return False
        if unpacked and len(vals) != max(unpacked) + 1:
            return False
    return True


def _val(val: Tensor, stores: Mapping[int, Any], device: torch.device) -> _Val | None:
    if val.is_conj() or val.is_neg() or val.is_sparse or val.layout is not torch.strided:
        return None
    shares = stores.get(val.untyped_storage()._cdata)
    if shares is None and val.storage_offset():
        return None
    offset = int(val.storage_offset())
    return _Val(tuple(val.shape), val.stride(), offset, val.dtype, device, shares)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list):
        for t in tree:
            yield from _leaves(t)
    elif tree is not None:
        yield tree
