"""Check from a layer's ops whether it treats each token by itself.

The rules of the traced layer's ops say which dims hold tokens. An op that sums over, normalises or
sorts along a dim of tokens mixes tokens. A layer of experts does this with integers: it sorts and
counts the experts that tokens choose. Such sorts and counts may only decide where rows go.
Otherwise a token's result depends on other tokens, as with a mask of rows within a capacity, scores
of an expert's best tokens, or experts chosen by how many tokens chose them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.rules.bind import rule_of_node
from ftp.rules.call import operands_of, tensors
from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten
_POSITIONS = ("index", "indices", "offs")  # arguments that are positions, in torch's schemas
_SHAPES = {  # ops that read no value
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default,
    aten.full_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default,
    aten.new_full.default,
}  # fmt: skip
_PADS = {aten.cat.default, aten.constant_pad_nd.default}
_SORTS = {aten.sort.default, aten.sort.stable}
_MOVES = {aten.flip.default, aten.roll.default}  # assumed to be undone later


@dataclass(frozen=True)
class _Tokens:
    """The tokens that a value is computed from.

    Attributes:
        dims: the value's dims along which each position belongs to one token; empty: the value
            belongs to several tokens.
        is_numbers: whether it is computed from integers and bools only.
        mixed: the op that read several tokens.
        is_order: whether it holds only positions of several tokens, or their positions after a
            sort, and no counts of choices.
    """

    dims: frozenset[int]
    is_numbers: bool
    mixed: fx.Node | None = None
    is_order: bool = False


def mixing_op(gm: fx.GraphModule, count: int, inputs: int) -> fx.Node | None:
    """The op by which a token's result depends on other tokens; None if there is none.

    Assumes that sorted rows come back to their tokens, and that an op without a rule acts on each
    row by itself unless it is torch's.

    Args:
        gm: traced layer that returns one tensor.
        count: number of tokens: a prime above the sizes of all other dims, so that a dim of tokens
            is identified by its size.
        inputs: how many of the first inputs have the tokens as dim 0.
    """
    known: dict[fx.Node, list[_Tokens | None]] = {}
    for i, node in enumerate(gm.graph.nodes):
        if node.op == "placeholder":
            is_numbers = _is_whole(_values(node)[0])
            known[node] = [_Tokens(frozenset({0}), is_numbers) if i < inputs else None]
        elif node.op == "output":
            made = known[node.args[0][0]][0]
            return made.mixed if made is not None and not made.dims else None
        elif node.target is getitem:
            known[node] = [known[node.args[0]][node.args[1]]]
        else:
            results = iter(_Op(node, known, count).results())
            known[node] = [next(results) if isinstance(v, Tensor) else None for v in _values(node)]
    return None


def _values(node: fx.Node) -> list[Any]:
    val = node.meta.get("val")
    return list(val) if isinstance(val, list | tuple) else [val]


class _Op:
    """One call, with the tokens that its operands are computed from.

    Attributes:
        where: of operands that are positions of rows.
        what: of the other operands.
    """

    def __init__(self, node: fx.Node, known: dict[fx.Node, list[_Tokens | None]], count: int):
        self.node, self.count = node, count
        self.made = [x for x in _values(node) if isinstance(x, Tensor)]
        self.slots: list[tuple[fx.Node, _Tokens | None]] = [
            (x, known[x][0]) for x in operands_of(node)
        ]
        self.takes_positions = False
        places: set[fx.Node] = set()
        if isinstance(node.target, OpOverload):
            for i, argument in enumerate(node.target._schema.arguments):
                if argument.name in _POSITIONS:
                    given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                    places.update(tensors(given, fx.Node))
                    self.takes_positions = True
        self.where = [t for x, t in self.slots if t is not None and x in places]
        self.what = [t for x, t in self.slots if t is not None and x not in places]

    def results(self) -> list[_Tokens | None]:
        given = [*self.what, *self.where]
        if not given or self.node.target in _SHAPES:
            return [None] * len(self.made)
        for t in given:
            if not t.dims and not t.is_numbers:
                return self._all(t)
        if self.takes_positions:
            return self._all(self._moved())
        several = next((t for t in self.what if not t.dims), None)
        if several is not None:  # counts and places, read as values
            is_numbers = all(t.is_numbers for t in self.what)
            is_order = all(t.dims or t.is_order for t in self.what)
            if self.node.target in _SORTS and not is_order:
                return self._all(replace(several, is_numbers=False, mixed=self.node))
            return self._all(replace(several, is_order=is_order) if is_numbers else self._mixed())
        dims = frozenset[int]().union(*(t.dims for t in self.what))
        if self.node.target in _PADS | _MOVES:
            return self._all(_Tokens(dims, self._is_numbers()))
        if self.node.target in _SORTS and self._dim() in dims and self._is_numbers():
            return [_Tokens(dims, True), replace(self._mixed(), is_order=True)]
        if self.node.target is aten.slice.Tensor and self._dim() in dims:
            before = _values(self.slots[0][0])[0].shape[self._dim()]
            is_cut = before % self.count == 0 and self.made[0].shape[self._dim()] != before
            return self._all(self._mixed() if is_cut else self.what[0])
        return self._by_rule()

    def _moved(self) -> _Tokens:
        """The result of a gather, a scatter or a grouped matmul: its operand's rows at other
        positions.
        """
        dims = self._token_dims(self.made[0])
        is_numbers = self._is_numbers()
        if not self.what:  # the moved values belong to no token
            several = next((t for t in self.where if not t.dims), None)
            if several is not None or dims:
                return several or _Tokens(dims, is_numbers)
            return self._mixed()
        several = next((t for t in self.what if not t.dims), None)
        if several is not None:
            return several if is_numbers else self._mixed()
        return _Tokens(dims, is_numbers) if dims else self._mixed()

    def _by_rule(self) -> list[_Tokens | None]:
        rule = rule_of_node(self.node)
        if rule is None:
            if getattr(self.node.target, "namespace", "") in ("aten", "prims"):
                return self._all(self._mixed())
            return [_Tokens(self._token_dims(x) or frozenset({0}), False) for x in self.made]
        found: list[_Tokens | None] = []
        kinds = [isinstance(x, Tensor) for x in _values(self.node)]
        of_tensors = itertools.compress(rule.results, kinds)
        for x, dims in zip(self.made, of_tensors, strict=True):
            kept: set[int] = set()
            is_mixed = False
            for at, (_, t) in enumerate(self.slots):
                for d in t.dims if t is not None else ():
                    factors = rule.operands[at][d]
                    own = [f for f in factors if rule.sizes[f] % self.count == 0] or factors
                    to = {i for i, dim in enumerate(dims) if any(f in dim for f in own)}
                    is_mixed |= not to or any(f in rule.whole for f in own)
                    kept |= to
            # A matmul of tokens with tokens has two such factors: an element belongs to two tokens.
            factors = {f for d in kept for f in dims[d] if rule.sizes[f] % self.count == 0}
            is_numbers = _is_whole(x) or self._is_numbers()
            of_one = not is_mixed and len(factors) <= 1
            found.append(_Tokens(frozenset(kept), is_numbers) if of_one else self._mixed())
        return found

    def _token_dims(self, x: Tensor) -> frozenset[int]:
        sizes = list(enumerate(x.shape))
        found = [d for d, n in sizes if n and n % self.count == 0]
        return frozenset(found or [d for d, n in sizes if n > self.count])  # padded

    def _dim(self) -> int:
        args: Sequence[Any] = [a for a in self.node.args[1:] if not isinstance(a, fx.Node)]
        at: Any = self.node.kwargs.get("dim", next((a for a in args if type(a) is int), None))
        default = 0 if self.node.target is aten.slice.Tensor else -1
        return int(default if at is None else at) % max(self.made[0].ndim, 1)

    def _is_numbers(self) -> bool:
        return all(t.is_numbers for t in (self.what or self.where))

    def _mixed(self) -> _Tokens:
        return _Tokens(frozenset(), self._is_numbers(), self.node)

    def _all(self, t: _Tokens) -> list[_Tokens | None]:
        return [t for _ in self.made]


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())
