"""Schedules: the order of actions on each rank of a pipeline, whether all ranks finish, and the
time that it takes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from ftp.dataclass import dataclass
from ftp.errors import ScheduleError

Kind = Literal["F", "I", "W", "B"]


class Action(NamedTuple):
    """One action of a pipeline: a kind, a stage and a microbatch.

    Args:
        kind: "F", the forward pass; "B", the backward pass; or its two halves: "I", the gradients
            that the stage before waits for, and "W", those of the parameters.
        stage: from 0.
        microbatch: from 0.

    >>> Action("F", 1, 0)
    Action(kind='F', stage=1, microbatch=0)

    Source: Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism" (2023), for "I" and "W".
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Actions = Sequence[Sequence[Action]]  # one list a rank of the pipeline's axis
Duration = Callable[[Action], float]  # seconds
_T = TypeVar("_T")


def run_in_order(steps: Sequence[Sequence[_T]], run: Callable[[int, _T], bool]) -> list[int]:
    """Run each rank's steps in order, until all have run or every rank waits; return how many steps
    each rank has run.

    Args:
        run: runs a step of a rank; returns False where it must wait for other ranks.
    """
    at = [0] * len(steps)
    progressed = True
    while progressed:
        progressed = False
        for rank, own in enumerate(steps):
            while at[rank] < len(own) and run(rank, own[at[rank]]):
                at[rank] += 1
                progressed = True
    return at


def needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """The actions that an action waits for. Of each tuple a schedule has one action."""
    kind, stage, microbatch = action
    if kind == "F":
        return [(Action("F", stage - 1, microbatch),)] if stage else []
    if kind == "W":
        return [(Action("I", stage, microbatch),)]
    own: list[tuple[Action, ...]] = [(Action("F", stage, microbatch),)]
    after = stage + 1
    later = (Action("I", after, microbatch), Action("B", after, microbatch))
    return [*own, later] if after < stages else own


def gpipe(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """All forward passes, then all backward passes.

    Source: Huang et al., "GPipe" (2018).
    """
    every = range(microbatches)
    stages = [[rank + ranks * chunk for chunk in range(chunks)] for rank in range(ranks)]
    return [
        [
            *(Action("F", stage, i) for stage in own for i in every),
            *(Action("B", stage, i) for stage in reversed(own) for i in every),
        ]
        for own in stages
    ]


def one_f_one_b(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """A rank runs forward passes until the first gradient can come, then one backward pass after
    each forward pass: at most as many microbatches are held as there are stages after it.

    Source: Narayanan et al., "PipeDream" (2019); Fan et al., "DAPPLE" (2020).
    """
    made = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - 1 - rank)
        own = [Action("F", rank, i) for i in range(ahead)]
        for i in range(ahead, microbatches):
            own += [Action("F", rank, i), Action("B", rank, i - ahead)]
        own += [Action("B", rank, i) for i in range(microbatches - ahead, microbatches)]
        made.append(own)
    return made


def interleaved(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """1F1B where each rank holds ``chunks`` stages: the bubble is that many times smaller.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM" (2021).
    """
    if microbatches % ranks:
        raise ScheduleError(
            f'schedule="interleaved" runs microbatches in groups of {ranks}, one for each rank of'
            f" the axis, and {microbatches} microbatches are no whole number of groups. Give a"
            f" multiple of {ranks}."
        )
    total = microbatches * chunks

    def at(step: int) -> tuple[int, int]:
        group, within = divmod(step, ranks * chunks)
        return within // ranks, group * ranks + within % ranks

    made = []
    for rank in range(ranks):
        forward = [Action("F", chunk * ranks + rank, i) for chunk, i in map(at, range(total))]
        backward = [
            Action("B", (chunks - 1 - chunk) * ranks + rank, i)
            for chunk, i in map(at, range(total))
        ]
        ahead = min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
        own = forward[:ahead]
        for i in range(ahead, total):
            own += [forward[i], backward[i - ahead]]
        made.append([*own, *backward[total - ahead :]])
    return made


def zero_bubble(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """1F1B with parameters' gradients as separate actions, run while a rank would otherwise wait: a
    third of 1F1B's idle time is left, and each rank holds as many microbatches as 1F1B's first.

    Source: Qi et al. (2023), the handcrafted schedule ZB-H1.
    """
    made = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - 1 - rank)
        own = [Action("F", rank, i) for i in range(ahead)]
        inner = outer = 0  # how many "I" and "W" there are so far
        while inner < microbatches:
            if ahead < microbatches:
                own.append(Action("F", rank, ahead))
                ahead += 1
                waits = rank  # the later the rank, the earlier its gradients are waited for
            else:
                waits = 0
            own.append(Action("I", rank, inner))
            inner += 1
            if inner - outer > waits:
                own.append(Action("W", rank, outer))
                outer += 1
        made.append([*own, *(Action("W", rank, i) for i in range(outer, microbatches))])
    return made


SCHEDULES: Mapping[str, Callable[[int, int, int], list[list[Action]]]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def check_work(actions: Actions, stages: int, microbatches: int) -> None:
    """Raise unless every stage runs each microbatch forward and backward once, on its rank.

    Raises:
        ScheduleError: every action that is missing, repeated, unknown or on another rank.
    """
    ranks, failures = len(actions), []
    count: Counter[Action] = Counter()
    for rank, own in enumerate(actions):
        for action in own:
            kind, stage, i = action
            is_known = kind in ("F", "I", "W", "B")
            if not is_known or stage not in range(stages) or i not in range(microbatches):
                failures.append(
                    f"{action!r} is no action of {stages} stages and {microbatches} microbatches."
                )
                continue
            if stage % ranks != rank:
                failures.append(
                    f"{action!r} is in the list of rank {rank}, but stage {stage} is on rank"
                    f" {stage % ranks}."
                )
            count[action] += 1
    failures += [f"{action!r} is in the lists {n} times." for action, n in count.items() if n > 1]
    for stage in range(stages):
        for i in range(microbatches):
            halves = [Action("I", stage, i) in count, Action("W", stage, i) in count]
            if Action("F", stage, i) not in count:
                failures.append(f"{Action('F', stage, i)!r} is missing.")
            if (Action("B", stage, i) in count) + all(halves) != 1 or any(halves) != all(halves):
                failures.append(
                    f"The backward pass of stage {stage} for microbatch {i} must be"
                    f" {Action('B', stage, i)!r}, or both {Action('I', stage, i)!r} and"
                    f" {Action('W', stage, i)!r}."
                )
    if failures:
        more = [f"and {len(failures) - 8} more."] if len(failures) > 8 else []
        raise ScheduleError("\n".join([*failures[:8], *more]))


@dataclass(frozen=True)
class TimedAction:
    """An action with the time in which it runs, seconds from the start of the step."""

    action: Action
    rank: int
    start: float
    end: float


def simulate(actions: Actions, stages: int, duration: Duration) -> list[TimedAction]:
    """The time of each action, if a rank starts each action as soon as the actions that it needs
    have ended.

    Raises:
        ScheduleError: ranks wait for each other forever; the message has the action that each waits
            for.

    >>> made = gpipe(2, 1, 1)
    >>> [(str(t.action), t.start) for t in simulate(made, 2, lambda action: 1.0)]
    [('F0.0', 0.0), ('F1.0', 1.0), ('B1.0', 2.0), ('B0.0', 3.0)]
    """
    ends: dict[Action, float] = {}
    clock = [0.0] * len(actions)
    found: list[TimedAction] = []

    def run(rank: int, action: Action) -> bool:
        if _awaited(action, stages, ends):
            return False
        needed = (one for choice in needs(action, stages) for one in choice if one in ends)
        start = max([clock[rank], *(ends[one] for one in needed)])
        clock[rank] = ends[action] = start + duration(action)
        found.append(TimedAction(action, rank, start, clock[rank]))
        return True

    reached = run_in_order(actions, run)
    waiting = [
        f"rank {rank} cannot begin {own[i]!r}, for which it needs"
        f" {' and '.join(' or '.join(map(repr, c)) for c in _awaited(own[i], stages, ends))}"
        for rank, (own, i) in enumerate(zip(actions, reached, strict=True))
        if i < len(own)
    ]
    if waiting:
        raise ScheduleError(f"The ranks wait for one another: {'; '.join(waiting)}.")
    return sorted(found, key=lambda t: (t.start, t.rank))


def _awaited(action: Action, stages: int, ends: Mapping[Action, float]) -> list[tuple[Action, ...]]:
    """The needs of an action that have not ended."""
    return [choice for choice in needs(action, stages) if not any(one in ends for one in choice)]


def bubble(timed: Sequence[TimedAction], ranks: int) -> float:
    """The share of all ranks' time in which they are idle."""
    total = max((t.end for t in timed), default=0.0) * ranks
    return 1 - sum(t.end - t.start for t in timed) / total if total else 0.0


def held_microbatches(own: Sequence[Action]) -> int:
    """The most microbatches of which a rank holds activations at once, over its stages."""
    held = most = 0
    for kind, *_ in own:
        held += {"F": 1, "I": 0, "W": -1, "B": -1}[kind]
        most = max(most, held)
    return most
