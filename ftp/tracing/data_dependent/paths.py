"""Paths: a function that branches on values, such as ``if error < 1e-6: break``, is run once for
each path through its branches. If there are many paths, ``if`` statements that only compute run
once, for both values of their condition (``joins.py``).

Every run records all of its ops. Then equal ops of several runs are merged, results are chosen like
those of ``torch.cond``, and ops that only one path reads become part of its branch. So gradients
are those of the path that is taken.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor, fx

from ftp.axis import is_inside
from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.errors import TraceError, raise_all
from ftp.functional.remat import Region, current_region
from ftp.ops.assume import Condition, is_listening
from ftp.ops.choose import CHOOSE, BranchPath, common, read_in
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.source import raised_by_user, user_line
from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import is_batched, unwrapped
from ftp.tracing.data_dependent.values_read import Level, is_reading, of_captured, read
from ftp.tracing.explain_errors import typed
from ftp.tracing.selected_rows.refused import needed_values_refused, value_error

if TYPE_CHECKING:
    from ftp.tracing.data_dependent.joins import Joins

MOST = 32  # paths of one function, and decisions on one path
MOST_UNJOINED = 8  # paths after which statements are joined
MOST_OF_CAPTURED = 4  # paths after which conditions of captured tensors are known

Outcomes = tuple[bool, ...]


@dataclass(frozen=True)
class Static:
    """A leaf of a result that is no tensor."""

    value: Any


@dataclass
class Ran:
    """The result of one run of a function.

    Attributes:
        tree, statics: the result's structure, and its leaves with None for each tensor.
        tensors: the result's tensors, then the program's other outputs.
        claims: a bool of each assumption; the bools are None where they are not checked.
    """

    tree: optree.PyTreeSpec
    statics: list[Static | None]
    tensors: list[Tensor]
    claims: dict[tuple[str, int], Tensor | None]


_current: ContextVar["Paths | None"] = ContextVar("ftp_paths", default=None)


class Rerun(BaseException):
    """Ends a run whose trace is useless; the function is run again, differently. The function's
    ``except Exception`` does not catch it; if the function does catch it, the run ends with another
    one.
    """

    def __init__(self) -> None:
        if (paths := _current.get()) is not None:
            paths.is_void = True


@dataclass
class Paths:
    """The paths through the function of one trace.

    Attributes:
        is_checked: whether assumptions are checked.
        is_same: whether two tensors hold the same values.
        asked: per sequence of outcomes, the condition that is read next: one tensor for each run.
        runs: how often the function was run.
        joins: the joined statements, if runs join statements.
        is_void: whether the run's trace is useless, see `Rerun`.
        has_integers: whether a run has used integers that may be read, or selected rows.
        knows_captured: whether conditions of captured tensors alone are taken as they are, rather
            than followed both ways.
    """

    can_fork: bool
    is_checked: bool
    new_joins: "Callable[[], Joins]"
    is_same: Callable[[Tensor, Tensor], bool]
    runs: int = 0
    asked: dict[Outcomes, list[Tensor]] = field(default_factory=dict)
    _lines: dict[Outcomes, str] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _ways: int = 0
    _given: Outcomes = ()
    _outcomes: Outcomes = ()
    _conds: int = 0
    _regions: dict[tuple[Outcomes, int], Region] = field(default_factory=dict)
    _begun: dict[Region, Region] = field(default_factory=dict)
    _most: int = 0
    joins: "Joins | None" = None
    is_void: bool = False
    has_integers: bool = False
    knows_captured: bool = False

    def of(self, run: Callable[[], Ran]) -> Ran:
        """Run the function along all its paths, and merge the results."""
        self._most = MOST_UNJOINED
        with suppress(Rerun):
            return self._of(run)
        if self.knows_captured:
            self._begin()
            with suppress(Rerun):
                return self._of(run)
        self._most, self.joins = MOST, self.new_joins()
        with suppress(Rerun, Exception):
            self._begin()
            return self._of(run)
        self.joins = None
        self._begin()
        return self._of(run)

    def _begin(self) -> None:
        for found in (self.asked, self._lines, self._numbers, self._regions):
            found.clear()
        self._ways, self.is_void = 0, False

    def _of(self, run: Callable[[], Ran], given: Outcomes = ()) -> Ran:
        """Run the function along all paths that begin with the ``given`` outcomes."""
        self._ways, self.runs = self._ways + 1, self.runs + 1
        self._given, self._outcomes, self._conds = given, (), 0
        self._begun = {}
        ran: Ran | None = None
        failure: Exception | None = None
        try:
            with (
                set_within(_current, self),
                needed_values_refused(),
                self.joins or nullcontext(),
            ):
                ran = run()
                if self.joins:
                    self.joins.outside.check(ran.tensors)
                if self.is_void:
                    raise Rerun
        except Exception as error:
            if self.is_void:
                raise Rerun from None
            if not raised_by_user(error):
                raise
            failure = error
        outcomes = self._outcomes
        for i in reversed(range(len(given), len(outcomes))):
            before = outcomes[:i]
            other: Ran | None = None
            try:
                other = self._of(run, (*before, not outcomes[i]))
            except Exception as error:
                if ran is None or not raised_by_user(error):
                    raise
            found = ran or other
            if found is not None and (ran is None or other is None):
                ran = self._only(before, found, outcomes[i] == (other is None))
            elif ran is not None and other is not None:
                ran = self._chosen(before, *((ran, other) if outcomes[i] else (other, ran)))
        if ran is None:
            assert failure is not None
            raise failure
        return ran

    def _only(self, before: Outcomes, ran: Ran, outcome: bool) -> Ran:
        """The result of the one ``outcome`` of a condition that the program assumes, because the
        function raises an error for the other.
        """
        predicate = self.asked[before][0]
        holds = None
        if self.is_checked:
            with torch.no_grad():
                holds = predicate if outcome else ~predicate
        claim = f"{self._lines[before]}: the condition is {outcome}; else the function raises"
        key = claim, sum(text == claim for text, _ in ran.claims)
        return replace(ran, claims={key: holds, **ran.claims})

    def decide(self, condition: Tensor, frame: FrameType | None) -> bool:
        """The outcome, on the path of this run, of a condition that ``frame`` reads."""
        before, line = self._outcomes, user_line()
        predicate = unwrapped(condition.detach().reshape(()) != 0)
        if self.knows_captured and (known := of_captured(predicate, Tensor.item)) is not None:
            return known
        if self.joins and (joined := self.joins.begin(predicate, frame)) is not None:
            return joined
        ways = max(self._ways, len(before))
        if MOST_OF_CAPTURED <= ways <= self._most < MOST and not self.knows_captured:
            conditions = (predicate, *(first for first, *_ in self.asked.values()))
            self.knows_captured = any(of_captured(c, bool) is not None for c in conditions)
            if self.knows_captured:
                raise Rerun
        if ways >= self._most:
            if self._most < MOST:
                raise Rerun
            error = value_error(
                f"The function decides by values in more than {MOST} ways at {line}: each is traced"
                " and planned. A loop that ends by a value is one op with"
                " ftp.static.while_loop(cond_fn, body_fn, carried, max_steps=n); write choices"
                " between results with torch.where."
            )
            error.needs_decisions = not self.has_integers
            raise error
        self.asked.setdefault(before, []).append(predicate)
        self._lines.setdefault(before, line)
        outcome = self._given[len(before)] if len(before) < len(self._given) else False
        self._outcomes = (*before, outcome)
        return outcome

    def again(self, condition: Tensor) -> bool | None:
        """The outcome that the run had for an equal condition; None if it had none."""
        predicate = unwrapped(condition.detach().reshape(()) != 0)
        for i, outcome in enumerate(self._outcomes):
            if self.is_same(self.asked[self._outcomes[:i]][-1], predicate):
                return outcome
        return None

    def has_decided(self) -> bool:
        """Whether the run has read the outcome of a condition."""
        return bool(self._outcomes) or (self.joins is not None and self.joins.is_open)

    def new_number(self) -> int:
        """The number of a new cond; the same one for the same cond of another run."""
        if self.joins and self.joins.is_open:
            raise Rerun  # a joined statement may read what only one branch computes
        self._conds += 1
        return self._number(self._outcomes, self._conds)

    def same_region(self, region: Region) -> Region:
        """The first of the equal recomputations that runs begin after the same outcomes."""
        if region not in self._begun:
            key = self._outcomes, len(self._begun)
            self._begun[region] = self._regions.setdefault(key, region)
        return self._begun[region]

    def _number(self, outcomes: Outcomes, cond: int = 0) -> int:
        return self._numbers.setdefault((outcomes, cond), len(self._numbers))

    def _chosen(self, before: Outcomes, if_true: Ran, if_false: Ran) -> Ran:
        line, predicate, number = self._lines[before], self.asked[before][0], self._number(before)
        _check_alike(line, if_true, if_false)

        def choose(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            if a is b:
                return a
            one = torch.ones((), dtype=torch.bool, device=predicate.device)
            with torch.no_grad():
                return CHOOSE(predicate, one if a is None else a, one if b is None else b, number)

        def named(claim: tuple[str, int]) -> tuple[str, int]:
            if claim in if_true.claims and claim in if_false.claims:
                return claim
            outcome = "true" if claim in if_true.claims else "false"
            return f"{claim[0]}, where the condition at {line} is {outcome}", claim[1]

        pairs = zip(if_true.tensors, if_false.tensors, strict=True)
        claims = dict.fromkeys([*if_true.claims, *if_false.claims])
        return replace(
            if_true,
            tensors=[choose(a, b) for a, b in pairs],
            claims={
                named(c): choose(if_true.claims.get(c), if_false.claims.get(c)) for c in claims
            },
        )


def decided(condition: Tensor, frame: FrameType | None) -> bool | None:
    """The bool of a condition that ``frame`` reads, on the path of this run. None where a function
    may not branch on values: in ``ftp.local``, under ``torch.vmap``, in a branch of ``torch.cond``,
    and in a recomputed block on another condition than in its first run.
    """
    paths = _current.get()
    if (
        paths is None
        or not (paths.can_fork and is_listening())
        or is_inside()
        or condition.numel() != 1
        or is_batched(condition)
        or not is_fake(unwrapped(condition))
    ):
        return None
    if is_reading(Level.DECISIONS):
        return read(condition.detach().reshape(()) != 0)
    return paths.decide(condition, frame) if current_region() is None else paths.again(condition)


def note_integers() -> None:
    """Note that the function uses integers that it may read, or rows that a mask selects."""
    if (paths := _current.get()) is not None:
        paths.has_integers = True


def where_taken(condition: Condition, claim: str) -> tuple[Condition, str]:
    """A claim as it holds outside of the statements that are being joined."""
    paths = _current.get()
    joins = None if paths is None else paths.joins
    return (condition, claim) if joins is None else joins.where_taken(condition, claim)


def new_number() -> int:
    """The number of a new cond of the trace."""
    paths = _current.get()
    assert paths is not None, "conds are traced in runs"
    return paths.new_number()


def same_region(region: Region | None) -> Region | None:
    """The region that stands for ``region`` in all runs of the trace."""
    paths = _current.get()
    return region if region is None or paths is None else paths.same_region(region)


def _check_alike(line: str, if_true: Ran, if_false: Ran) -> None:
    a, b = _described(if_true), _described(if_false)
    differing = [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    where = f"The function decides by a value at {line}. It gives"
    if if_true.tree != if_false.tree or len(a) != len(b):
        raise TraceError(
            f"{where} {if_true.tree} where the condition is true and {if_false.tree} where it is"
            " not. Give results of one structure."
        )
    raise_all(
        TraceError,
        (
            f"{where} {x} where the condition is true and {y} where it is not, as result {i}. Give"
            " tensors of equal shape and dtype, and equal static values."
            for i, x, y in differing
        ),
    )


def _described(ran: Ran) -> list[str]:
    made = map(typed, ran.tensors)
    return [next(made) if x is None else repr(x.value) for x in ran.statics] + list(made)


def merge_runs(gm: fx.GraphModule, constants: Sequence[Tensor], asked: Sequence[int]) -> None:
    """Merge the equal ops of several runs, and place each op in the branch that reads it.

    Args:
        constants: the captured tensors; those made in the function are made by each run.
        asked: of each decision, how many runs read its condition. They are the last outputs of the
            graph, which are dropped.
    """
    graph, first = gm.graph, {}
    made: list[tuple[fx.Node, Tensor]] = []
    for node in list(graph.nodes):
        if (number := node.meta.get("ftp_constant")) is not None:
            tensor = constants[number]
            same = next((n for n, other in made if _is_same(tensor, other)), None)
            if same is None:
                made.append((node, tensor))
        elif node.op == "call_function":
            if node.target is torch.ops.aten.detach.default:  # of what another run made anew
                same = node.args[0]
            elif node.target is CHOOSE and node.args[1] is node.args[2]:
                same = node.args[1]
            else:
                given = mapped_arguments(node, lambda n: f"%{n.name}")
                same = first.setdefault((node.target, str(given), node.meta.get("region")), node)
        else:
            same = node
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    output = graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    kept = len(returned) - sum(asked)
    at = kept
    for count in asked:
        if len(set(returned[at : at + count])) > 1:
            source = returned[at].meta.get("source", "")
            raise TraceError(
                f"The function decides by a value at {source}, and computes another one when it is"
                " run again to follow the other way. Decide by what the function's arguments alone"
                " determine, outside of recomputed blocks."
            )
        at += count
    output.args = (tuple(returned[:kept]),)
    reads: dict[fx.Node, list[BranchPath]] = {}
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node not in reads:
            graph.erase_node(node)
            continue
        branch = common(reads[node]) if node.op == "call_function" else ()
        node.meta["branch"] = branch
        for x in node.all_input_nodes:
            slots = [i for i, y in enumerate(node.args) if y is x] if node.target is CHOOSE else [0]
            found = (read_in(node.target, node.args, branch, slot) for slot in slots)
            reads.setdefault(x, []).extend(found)


def _is_same(a: Tensor, b: Tensor) -> bool:
    if a is b or is_fake(a) or is_fake(b):
        return a is b
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and torch.equal(a, b)
