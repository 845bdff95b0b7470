"""Compute grouped matmuls of one rank's code on the ranks that own the experts: rows are sent there
and back.

The code runs as written, with whole weights, and the function mode ``RowsTravel`` intercepts its
calls. For each tensor with experts or rows as dim 0 it keeps a second tensor, the owner's form: the
rank's own experts, or the rows that were sent to them. Grouped matmuls run on owners' forms. Other
functions that act on each row or expert alone run on both; tensors with one value per row, such as
the router's weights, are sent to the owners for it. A tensor that nothing reads is dead code, with
the gather of weights or the sending of rows that makes it. Equal rows are sent once.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftp.axis import all_gather
from ftp.dataclass import dataclass
from ftp.ops.written import written
from ftp.per_rank.dispatch import Route, route_of
from ftp.rules.bind import rule_of
from ftp.rules.call import Call, Meta, replaced
from ftp.source import user_line
from ftp.torch_internals.functorch import unwrapped
from ftp.torch_internals.modes import TorchDispatchMode
from ftp.torch_internals.pytree import tree_leaves, tree_map
from ftp.tracing.same_values import holds_same

aten = torch.ops.aten
GROUPED = (torch._grouped_mm, F.grouped_mm)  # type: ignore[attr-defined]


@dataclass
class _Owned:
    """The owner's form ``owned`` of a tensor ``whole`` of the code.

    Attributes:
        of: "experts", or for rows the ends of the groups by which they were sent.
        parameters: the expert weights that it is computed from.
    """

    whole: Tensor
    owned: Tensor
    of: Literal["experts"] | Tensor
    parameters: frozenset[str] = frozenset()


class RowsTravel(TorchFunctionMode):
    """Function mode: within it, grouped matmuls send their rows to the ranks of ``axis`` that own
    the experts, and receive the results.

    Args:
        n, capacity: as of ``route_of``.

    Attributes:
        used: the parameters that grouped matmuls take as experts.
        read: ``{parameter: line and function}`` of other reads of an expert weight, for which it is
            gathered.
    """

    def __init__(self, axis: str, n: int, capacity: float | None):
        super().__init__()
        self.axis, self.n, self.capacity = axis, n, capacity
        self.used: set[str] = set()
        self.read: dict[str, str] = {}
        self._owned: dict[int, _Owned] = {}  # by the id of the whole tensor, which it keeps alive
        self._routes: list[tuple[Tensor, int, Route]] = []
        self._alike: dict[int, Tensor] = {}
        self._is_looking = False
        self._calls = _OpsOfCall()

    def whole(self, name: str, part: Tensor, count: int) -> Tensor:
        """The whole weight of ``count`` experts for the code, from this rank's experts."""
        whole = all_gather(part, self.axis)[:count]
        self._owned[id(whole)] = _Owned(whole, part, "experts", frozenset({name}))
        return whole

    def alike(self, x: Any) -> None:
        """Note a tensor that is equal on all ranks, such as a parameter of no expert."""
        if isinstance(x, Tensor):
            self._alike[id(x)] = x

    def candidate(self, name: str, weight: Tensor) -> None:
        """Note a whole weight that may turn out to be an expert weight."""
        self._is_looking = True
        self._owned[id(weight)] = _Owned(weight, weight, "experts", frozenset({name}))

    def __enter__(self) -> Any:
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in GROUPED and (made := self._grouped(*args, **kwargs)) is not None:
            return made
        self._calls.clear()
        made = func(*args, **kwargs)
        self._forget_written()
        self._follow(func, args, kwargs, made)
        return made

    def _of(self, x: Any) -> _Owned | None:
        return self._owned.get(id(x)) if isinstance(x, Tensor) else None

    def _forget_written(self) -> None:
        """Drop owners' forms of whole tensors that were written to, directly or by a view."""
        if self._calls.written:
            self._owned = {
                at: o
                for at, o in self._owned.items()
                if _storage(o.whole) not in self._calls.written
                and _storage(o.owned) not in self._calls.written
            }

    def _follow(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Compute the owner's forms of a call's results, or note that it reads whole weights."""
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = [o for x in taken if (o := self._of(x)) is not None]
        results = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if not given or not results:
            return
        first, found = given[0], []
        # Tensors with this rank's values, not those of the rows' owner.
        others = [x for x in taken if self._of(x) is None and id(x) not in self._alike]
        if (
            all(o.of is first.of for o in given)
            and (not others or isinstance(first.of, Tensor))
            and self._calls.keep_dim_0([*(o.whole for o in given), *others], results)
        ):
            found = self._on_owners(func, args, kwargs, first.of, others)
        names = frozenset().union(*(o.parameters for o in given))
        if len(found) == len(results) and all(
            a.shape[1:] == b.shape[1:] and b.shape[0] == first.owned.shape[0]
            for a, b in zip(results, found, strict=True)
        ):
            for whole, part in zip(results, found, strict=True):
                self._owned[id(whole)] = _Owned(whole, part, first.of, names)
        else:
            for name in names:
                self.read.setdefault(name, f"{getattr(func, '__name__', func)} at {user_line()}")

    def _on_owners(
        self, func: Any, args: Any, kwargs: Any, of: Any, others: Sequence[Tensor]
    ) -> list[Tensor]:
        """The call's results on the owner's forms; none if it states the number of rows or experts.
        Rows of ``others`` are sent for it.
        """
        is_shared = isinstance(of, Tensor) and any(
            isinstance(x, Tensor) and id(x) in self._alike and x.is_floating_point()
            for x in tree_leaves((args, kwargs))
        )

        def own(x: Any) -> Any:
            known = self._of(x)
            if known is None and any(x is other for other in others):
                known = self._sent(x, of)
            if known is None:
                return x
            return self._filled(known.owned, of) if is_shared else known.owned

        try:
            made = tree_leaves(func(*tree_map(own, args), **tree_map(own, kwargs)))
        except (RuntimeError, ValueError, IndexError):
            return []
        found = [x for x in made if isinstance(x, Tensor)]
        return [self._filled(x, of) for x in found] if is_shared else found

    def _grouped(
        self,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """The matmul on the owner's forms, brought back; None if it is not of experts."""
        weight = self._of(b)
        if weight is None or isinstance(weight.of, Tensor):
            return None
        if a.ndim != 2 or offs is None or bias is not None:
            return None
        self.used |= weight.parameters
        if self._is_looking:
            return F.grouped_mm(a, b, offs=offs, out_dtype=out_dtype)
        offs, to = self._route(offs, a.shape[0])
        rows = self._of(a)
        if rows is None or rows.of is not offs:
            rows = self._sent(a, offs)
        made = F.grouped_mm(rows.owned, weight.owned, offs=to.ends, out_dtype=out_dtype)
        whole = to.bring_back(made)
        self._owned[id(whole)] = _Owned(whole, made, offs)
        return whole

    def _sent(self, x: Tensor, offs: Any) -> _Owned:
        """The owner's form of this rank's rows; that of equal rows, if there is one."""
        for known in self._owned.values():
            is_like = known.of is offs and known.whole.requires_grad == x.requires_grad
            if is_like and holds_same(known.whole, x):
                return known
        _, to = self._route(offs, x.shape[0])
        made = self._owned[id(x)] = _Owned(x, to.send(x), offs)
        return made

    def _filled(self, x: Tensor, offs: Any) -> Tensor:
        """Arrived rows, with numbers at which functions are smooth in place of rows that did not
        arrive. The gradient of a tensor that all rows share sums over those too, and 0 / 0 there
        would make it NaN. A True that is sent with each row tells which arrived.
        """
        if not x.is_floating_point():
            return x
        whole = next(o.whole for o in self._owned.values() if o.of is offs)
        ones = torch.ones(whole.shape[0], dtype=torch.bool, device=x.device)
        has = self._sent(ones, offs).owned.view(-1, *(1,) * (x.ndim - 1))
        spare = torch.linspace(0.25, 0.75, x[0].numel(), dtype=x.dtype, device=x.device)
        return torch.where(has, x, spare.view(x.shape[1:]))

    def _route(self, offs: Tensor, rows: int) -> tuple[Tensor, Route]:
        """The route of rows whose groups end at ``offs``, and the tensor of these ends that it was
        first made for: ranks exchange counts once.
        """
        for ends, count, known in self._routes:
            if count == rows and holds_same(ends, offs):
                return ends, known
        # A group whose end is before the end of the group before it has no rows.
        ends = offs.detach().to(torch.int64).clamp(0, rows).cummax(0).values
        of_expert = F.pad(ends, (1, 0)).diff()
        made = route_of(of_expert, rows, self.axis, self.n, self.capacity)
        self._routes.append((offs, rows, made))
        return offs, made


_BY_POSITION = (aten.tril.default, aten.triu.default)  # a row's result depends on its position


def _storage(x: Tensor) -> int:
    return unwrapped(x).untyped_storage()._cdata


class _OpsOfCall(TorchDispatchMode):
    """The ops that a call runs."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.made: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, made))
        return made

    @property
    def written(self) -> set[int]:
        """The memory that was written to."""
        return {
            _storage(x)
            for func, args, kwargs, _ in self.made
            for x in tree_leaves(written(func, args, kwargs))
            if isinstance(x, Tensor)
        }

    def keep_dim_0(self, given: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        """Whether each slice of the results along dim 0 is computed from the same slice of each of
        ``given``, and from no other tensor's slices.
        """
        kept = {id(unwrapped(x)) for x in given}
        for func, args, kwargs, made in self.made:
            taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if not any(id(x) in kept for x in taken):
                continue
            gives = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
            if func._schema.is_mutable or func in _BY_POSITION:
                return False
            if gives and _along_dim_0(func, args, kwargs, [id(x) in kept for x in taken], gives):
                kept |= {id(x) for x in gives}
        return all(id(unwrapped(x)) in kept for x in results)


def _along_dim_0(
    func: Any, args: Any, kwargs: Any, is_kept: Sequence[bool], gives: Sequence[Tensor]
) -> bool:
    """Whether the op's rule gives dim 0 of the kept operands and of the results one factor, and
    no other dim this factor.
    """
    rule = rule_of(Call(func, *replaced((args, kwargs, tuple(gives)), Tensor, Meta.of)))
    if rule is None:
        return False
    alike = list(itertools.compress(rule.operands, is_kept))
    others = list(itertools.compress(rule.operands, map(operator.not_, is_kept)))
    if not alike[0] or len(alike[0][0]) != 1:
        return False
    (factor,) = alike[0][0]
    return (
        factor not in rule.whole
        and not any(factor in pending for pending in rule.pending)
        and all(
            dims and dims[0] == (factor,) and all(factor not in d for d in dims[1:])
            for dims in (*alike, *rule.results)
        )
        and not any(factor in d for dims in others for d in dims)
    )
