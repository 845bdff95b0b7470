"""Values computed from inputs of the program that are small enough to be whole on every rank: a
trace computes the values that the function reads by plain ops, as far as it has come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.ops.constrain import CONSTRAIN
from ftp.ops.philox import random_bits, random_keys
from ftp.ops.stack import STACK, UNSTACK
from ftp.torch_internals.modes import DisableTorchFunction
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.captured_values import CapturedValues
from ftp.tracing.data_dependent.known_values import computed, computing
from ftp.tracing.data_dependent.values_read import ValuesRead, frozen
from ftp.tracing.recorder import Recorder

if TYPE_CHECKING:
    from ftp.tracing.trace import Traced

_MOST = 2**20  # elements of one tensor
_MOST_IN_ALL = 2**24
_READ = object()
_OURS = {CONSTRAIN, STACK, UNSTACK, random_bits, random_keys}


@dataclass(frozen=True)
class WholeInputs:
    """Inputs of the program that are whole on every rank.

    Attributes:
        tensors: by their places among the program's inputs.
        after: how many values the function reads that programs have computed already.
    """

    tensors: Mapping[int, Tensor]
    after: int = 0

    @property
    def device(self) -> str:
        return next((str(x.device) for x in self.tensors.values()), "cpu")

    def given(self, held: Tensor | int) -> Tensor:
        """The values of an input, or a copy of a tensor's."""
        if isinstance(held, int):
            return self.tensors[held]
        return held.detach().clone().to(self.device)


def small_inputs(shapes: Sequence[Tensor]) -> tuple[int, ...]:
    """The places of inputs that may be whole on every rank."""
    found, left = [], _MOST_IN_ALL
    for i, x in enumerate(shapes):
        if x.numel() <= min(_MOST, left):
            found.append(i)
            left -= x.numel()
    return tuple(found)


class InputValues(CapturedValues):
    """As `CapturedValues`, and of small inputs.

    Args:
        small: the places of those inputs.
        before: the places of those that were whole when the function was traced before.
        whole: the values of some of them.
    """

    most = _MOST

    def __init__(
        self,
        recorder: Recorder,
        small: Sequence[int],
        before: Sequence[int],
        whole: WholeInputs | None,
    ):
        super().__init__(recorder)
        self.small, self.whole, self._before = tuple(small), whole, tuple(before)
        self.after = 0 if whole is None else whole.after
        self.device = "cpu" if whole is None else whole.device
        self._given = frozenset(() if whole is None else whole.tensors)
        self.begin()

    def begin(self) -> None:
        """Begin a run of the function."""
        self._of.clear()
        self._last_writes.clear()
        self._copied, self._copies = fx.Graph(), dict[fx.Node, fx.Node]()
        self._steps: list[tuple[fx.Node, Any]] = []
        self._left = _MOST_IN_ALL

    def inputs_of(self, x: Tensor) -> tuple[int, ...]:
        """The places of small inputs that a value can be computed from, if these are whole; none
        where it cannot, or where they are whole already.
        """
        if (node := self.known_node(x)) is None:
            return ()
        missing, elements = self._missing(node)
        places = self._given.union(self._before, map(_place, missing)) - {-1}
        is_new = elements <= self._left and places != self._given
        return tuple(sorted(places)) if is_new else ()

    def read_next(self, x: Tensor) -> Any:
        """The value of the tensor that the function reads next; None if it is not known."""
        if self.whole is None or (node := self.known_node(x)) is None:
            return None
        missing, elements = self._missing(node)
        if elements > self._left or not self._given.issuperset({*map(_place, missing)} - {-1}):
            return None
        self._left -= elements
        with computing():
            value = frozen(self._computed(node).tolist())
        self._steps.append((self._copies[node], _READ))
        return value

    def _missing(self, node: fx.Node) -> tuple[list[fx.Node], int]:
        """The ops that are left to do for a node, and the elements of their results."""
        with DisableTorchFunction():
            missing = self.needed(node)
            return missing, sum(map(_elements, missing))

    def _compute(self, node: fx.Node) -> None:
        given = self._held(node) if self.is_given(node) else None
        copy = self._copies[node] = (
            self._copied.node_copy(node, self._copies.__getitem__)
            if given is None
            else self._copied.create_node("placeholder", node.name)
        )
        copy.meta = {"val": node.meta.get("val")}
        self._steps.append((copy, given))
        super()._compute(node)

    def is_given(self, node: fx.Node) -> bool:
        return super().is_given(node) or _place(node) in self.small

    def given(self, node: fx.Node) -> Any:
        assert self.whole is not None
        return self.whole.given(self._held(node))

    def _held(self, node: fx.Node) -> Tensor | int:
        """The captured tensor or literal that a node stands for; of an input its place."""
        if (place := _place(node)) >= 0:
            return place
        captured = self.captured(node)
        return getattr(self._root, str(node.target)) if captured is None else captured

    def is_computable(self, node: fx.Node) -> bool:
        return not node.meta.get("branch") and super().is_computable(node)

    def is_known_op(self, target: OpOverload) -> bool:
        return target in _OURS or super().is_known_op(target)

    def program(self, reads: ValuesRead) -> "ReadProgram":
        """The ops that compute the values of ``reads``, but those that programs have computed."""
        return ReadProgram(reads, reads.values[self.after :], tuple(self._steps))


@dataclass(frozen=True, eq=False)
class ReadProgram:
    """The ops that compute the values which a function reads, in order.

    Attributes:
        expected: the values, of which the first ones of ``reads`` may be missing.
        steps: nodes, each with None if it is an op; with the place of the input or the captured
            tensor that it stands for; or with `_READ` where the function reads its value.
    """

    reads: ValuesRead
    expected: tuple[Any, ...]
    steps: tuple[tuple[fx.Node, Any], ...]

    def run(self, whole: WholeInputs) -> list[Any]:
        """The values that the function reads, up to the first one that differs from the expected
        ones: what follows may be another one's way.
        """
        values, env = list[Any](), dict[fx.Node, Any]()
        with computing():
            for node, given in self.steps:
                if given is None:
                    env[node] = computed(node, env, whole.device)
                elif given is _READ:
                    values.append(frozen(env[node].tolist()))
                    if values[-1] != self.expected[len(values) - 1]:
                        break
                else:
                    env[node] = whole.given(given)
        return values


def _place(node: fx.Node) -> int:
    """The place of a placeholder among the program's inputs; -1 for other nodes."""
    if node.op != "placeholder" or "ftp_constant" in node.meta:
        return -1
    return int(str(node.target).removeprefix("arg").partition("_")[0])


def _elements(node: fx.Node) -> int:
    val = node.meta.get("val")
    return sum(
        x.numel() for x in (val if isinstance(val, list | tuple) else (val,)) if x is not None
    )


def asking_whole(traced: "Traced") -> "Traced":
    """The trace of a function that returns its small inputs, in place of the value that it reads
    first.
    """
    assert traced.asked is not None
    graph = fx.Graph()
    inputs = []
    placeholders = traced.gm.graph.find_nodes(op="placeholder")
    for node in placeholders[: len(placeholders) - len(traced.constants)]:
        inputs.append(graph.node_copy(node))
    graph.output(tuple(inputs[i] for i in traced.asked.inputs))
    return replace(traced, gm=fx.GraphModule(torch.nn.Module(), graph), constants=())
