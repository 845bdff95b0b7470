"""Record what a program runs: each op that reaches the dispatcher, in-place writes and collectives
included, forward and backward, as a node of an fx graph.
"""

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakIdKeyDictionary

from ftp.certification.residues.domain import KNOWN
from ftp.equivalence.data_access import READS_VALUE, DataAccess
from ftp.errors import TraceError
from ftp.ops.exchange import LITERAL
from ftp.ops.grouped_mm import as_matmuls
from ftp.ops.tensor_lists import PREFIX, one_by_one
from ftp.ops.written import written
from ftp.source import is_users, user_line, user_lines
from ftp.torch_internals.autograd_state import current_autograd_node, get_sequence_nr
from ftp.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from ftp.torch_internals.modes import TorchDispatchMode, disable_current_modes
from ftp.torch_internals.op_types import decomposition_table
from ftp.torch_internals.pytree import tree_leaves, tree_map

aten = torch.ops.aten
_READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)
SHOWN = 3  # lines of a call
_CALLER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "equivalent.py")
_MOVES_IN_PLACE = ("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_")
LARGEST = 1 << 20  # elements of a constant tensor
LONGEST = 200_000  # nodes of a program


class ProgramRecorder(TorchDispatchMode):
    """Records a program on fake tensors.

    Args:
        fake: the mode of the program's tensors.
        exchanges: records collectives; None where there is one device.

    Attributes:
        graph: of what is recorded.
    """

    def __init__(self, fake: FakeTensorMode, exchanges: Any = None):
        super().__init__()
        self.fake, self.exchanges = fake, exchanges
        self.graph = fx.Graph()
        self.protected: dict[int, str] = {}
        # Weak: autograd makes another tensor of a view that somebody holds.
        self._nodes = WeakIdKeyDictionary()
        self._lines: dict[int, str] = {}
        self._literals: dict[int, tuple[Tensor, fx.Node]] = {}
        self.calls = 0

    # Tensors and nodes.

    def input(self, x: Tensor, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        self._note(node, x, "")
        self._nodes[x] = node
        return node

    def protect(self, x: Tensor, name: str) -> None:
        """Refuse writes to ``x``."""
        self.protected[x.untyped_storage()._cdata] = name

    def node_of(self, x: Tensor) -> fx.Node:
        found = self._nodes.get(x)
        return self._literal(x) if found is None else found

    def _literal(self, x: Tensor) -> fx.Node:
        """A constant tensor, by its elements."""
        if isinstance(x, FakeTensor):
            real = x.constant
            if real is None:
                raise TraceError(
                    f"{user_line()}\n  A tensor of shape {tuple(x.shape)} is used that comes from"
                    " outside of the program. Pass it as an argument."
                )
        else:
            real = x
        if id(x) not in self._literals:
            if real.numel() > LARGEST:
                raise TraceError(
                    f"{user_line()}\n  The program holds a constant tensor of shape"
                    f" {tuple(real.shape)}: pass it as an argument."
                )
            with disable_current_modes():
                values = real.detach().reshape(-1).tolist()
            if real.dtype is torch.bool:
                values = [int(v) for v in values]
            node = self.graph.call_function(LITERAL, (values, tuple(real.shape), real.dtype))
            self._note(node, x, user_line())
            self._literals[id(x)] = (x, node)
        return self._literals[id(x)][1]

    @staticmethod
    def _note(node: fx.Node, result: Any, line: str) -> None:
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        node.meta["source"] = line
        node.meta["dtypes"] = [str(t.dtype).removeprefix("torch.") for t in tensors]
        node.meta["shape"] = [list(t.shape) for t in tensors]
        node.meta["strides"] = [list(t.stride()) for t in tensors]

    def node(self, target: Any, args: Any, kwargs: Any, result: Any, line: str) -> fx.Node:
        """Record a call and bind its results."""
        if len(self.graph.nodes) >= LONGEST:
            raise TraceError(
                f"{user_line()}\n  The program has run {LONGEST:,} ops and goes on: a loop that"
                " waits for another rank never ends here, where each rank is followed by itself."
                " Wait with work.wait(); prove one layer of a very long program."
            )
        args, kwargs = tree_map(
            lambda x: self.node_of(x) if isinstance(x, Tensor) else x, (tuple(args), dict(kwargs))
        )
        kwargs = {k: None if k == "generator" else v for k, v in kwargs.items()}
        node = self.graph.call_function(target, args, kwargs)
        self._note(node, result, line)
        if isinstance(result, Tensor):
            self._nodes.setdefault(result, node)
        elif isinstance(result, list | tuple):
            for i, x in enumerate(result):
                if isinstance(x, Tensor):
                    item = self.graph.call_function(operator.getitem, (node, i))
                    self._note(item, x, line)
                    self._nodes.setdefault(x, item)
        return node

    # Calls.

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) and x.fake_mode is not self.fake for x in tensors):
            return func(*args, **kwargs)  # a shape is worked out elsewhere
        if any(type(x) not in (Tensor, FakeTensor, torch.nn.Parameter) for x in tensors):
            return NotImplemented
        if func.namespace == "prim":  # a tensor's device
            return func(*args, **kwargs)
        if func in _READS:
            self._refuse_read(func, tensors)
            return func(*args, **kwargs)
        if self.exchanges is not None and self.exchanges.handles(func):
            return self.exchanges.record(self, func, args, kwargs, self.line())
        if func.namespace in ("c10d", "_c10d_functional", "ftp") and self.exchanges is None:
            raise TraceError(f"{user_line()}\n  The single-device program calls {func}.")
        rewritten = self._rewritten(func, args, kwargs, tensors)
        if rewritten is not NotImplemented:
            return rewritten
        self._refuse_writes(func, args)
        result = func(*args, **kwargs)
        if func._schema.returns or func._schema.is_mutable:
            self.node(func, args, kwargs, result, self.line())
        return result

    def _rewritten(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        """The result of a call as calls of ops that proofs know; NotImplemented for an op that is
        recorded as it is.
        """
        if func is aten._grouped_mm.default and len(args) > 2:
            with self:
                return as_matmuls(*args, **kwargs)
        outs = [a.name for a in func._schema.arguments if a.is_out]
        if outs and func.namespace == "aten":
            return self._into(func, args, kwargs, outs)
        name = func._schema.name.split("::")[1]
        if name.startswith(PREFIX) and func.namespace == "aten":
            with self:
                return one_by_one(name.removeprefix(PREFIX), args, kwargs)
        if name in _MOVES_IN_PLACE:
            return self._moved_in_place(func, args, kwargs)
        is_known = name in KNOWN or (name.endswith("_") and name.removesuffix("_") in KNOWN)
        if is_known or not any(x.is_floating_point() for x in tensors):
            return NotImplemented
        by = decomposition_table.get(func)
        with self:
            return func.decompose(*args, **kwargs) if by is None else by(*args, **kwargs)

    def _into(self, func: Any, args: Any, kwargs: Mapping[str, Any], names: Sequence[str]) -> Any:
        """An op with ``out=``: its result is copied into these tensors."""
        outs = [kwargs[n] for n in names]
        leaves = [x for out in outs for x in tree_leaves(out)]
        for x in leaves:
            self.refuse_write(x, str(func))
        rest = {k: v for k, v in kwargs.items() if k not in names}
        with self:
            results = tree_leaves(func.overloadpacket(*args, **rest))
            for x, result in zip(leaves, results, strict=True):
                if x.shape != result.shape:
                    raise TraceError(
                        f"{user_line()}\n  out= is of shape {tuple(x.shape)}, the result of"
                        f" {func} of {tuple(result.shape)}. Give it the shape of the result."
                    )
                x.copy_(result)
        if not func._schema.returns:
            return None
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _moved_in_place(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A tensor that becomes a view of itself, as by ``squeeze_``."""
        self._refuse_writes(func, args)
        x, *rest = args
        name = func._schema.name.split("::")[1].removesuffix("_")
        with self:
            view = getattr(aten, name)(x, *rest, **kwargs)
        func(x, *rest, **kwargs)
        self.rebind(x, view)
        return x

    def rebind(self, x: Tensor, to: Tensor) -> None:
        """``x`` stands for what ``to`` stands for, memory included."""
        self._nodes[x] = self.node_of(to)

    def line(self) -> str:
        """The user's line and those that called it; in the backward pass of an op, the op's."""
        running = current_autograd_node()
        line = ", from ".join(user_lines(SHOWN, _CALLER))
        if running is None:
            self._lines.setdefault(get_sequence_nr() - 1, line)
            return line
        forward = self._lines.get(running._sequence_nr(), "")
        if not forward or not self._is_users_backward(running):
            return forward or line
        # The engine adds up gradients on nobody's line.
        return f"{line}, in the backward pass of {forward}" if line else forward

    @staticmethod
    def _is_users_backward(running: Any) -> bool:
        function = getattr(type(running), "_forward_cls", None)
        return function is not None and is_users(function.backward.__code__)

    @staticmethod
    def _refuse_read(func: Any, tensors: Sequence[Tensor]) -> None:
        if all(isinstance(x, FakeTensor) and x.constant is None for x in tensors):
            raise TraceError(
                f"{user_line()}\n  The program reads the value of a tensor ({func}), {READS_VALUE}"
            )

    def _refuse_writes(self, func: Any, args: Sequence[Any]) -> None:
        for x in tree_leaves(written(func, args, {})):
            self.refuse_write(x, str(func))

    def refuse_write(self, x: Tensor, what: str) -> None:
        name = self.protected.get(x.untyped_storage()._cdata) if isinstance(x, Tensor) else None
        if name is not None:
            raise TraceError(
                f"{user_line()}\n  The program writes to its input {name} ({what}): the caller's"
                " tensor would change. Work on a copy, as .clone() makes it."
            )


@contextmanager
def recording(exchanges: Any = None) -> Iterator[ProgramRecorder]:
    """Record within the block; attention is recorded as its formula."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = ProgramRecorder(fake, exchanges)
    with fake, sdpa_kernel(SDPBackend.MATH), recorder, DataAccess(recorder):
        yield recorder
