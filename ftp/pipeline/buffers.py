"""The most messages that are in flight between the ranks of a pipeline, at any speed of the ranks,
and a check that buffers of this size suffice.

Actions are partially ordered: each comes before the next action of its rank, and before the action
that reads its message. A message is in flight from the end of the action that sends it to the start
of the action that reads it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ftp.errors import ScheduleError
from ftp.pipeline.schedule import Action, Actions, run_in_order

RankPair = tuple[int, int]  # from rank, to rank of the pipeline's axis


class Message(NamedTuple):
    """A message from one action to another action on another rank."""

    sender: Action
    reader: Action
    channel: RankPair


def messages(actions: Actions, stages: int) -> list[Message]:
    """The messages between ranks, each sender's in its order."""
    ranks = len(actions)
    readers = {a: a for own in actions for a in own}
    readers |= {a._replace(kind="B"): a for own in actions for a in own if a.kind == "I"}
    found = []
    for rank, own in enumerate(actions):
        for action in own:
            step = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            to = action.stage + step
            if not step or not 0 <= to < stages or to % ranks == rank:
                continue
            kind = "F" if action.kind == "F" else "B"
            reader = readers[Action(kind, to, action.microbatch)]
            found.append(Message(action, reader, (rank, to % ranks)))
    return found


def arrivals(actions: Actions, stages: int) -> dict[Action, list[Action]]:
    """Per action that reads a message, the readers of all messages that its rank requests then. A
    sender's messages arrive in order, so the rank first requests the sender's earlier messages that
    it has not yet requested, then the action's own.

    >>> from ftp.pipeline.schedule import gpipe
    >>> first, second = gpipe(2, 2, 1)
    >>> found = arrivals([first, [second[1], second[0], *second[2:]]], 2)
    >>> [str(action) for action in found[Action("F", 1, 1)]], found[Action("F", 1, 0)]
    (['F1.0', 'F1.1'], [])
    """
    sent = messages(actions, stages)
    by_reader = {m.reader: m for m in sent}
    left: dict[RankPair, list[Action]] = {}
    for message in reversed(sent):
        left.setdefault(message.channel, []).append(message.reader)
    found = {}
    for action in (action for own in actions for action in own if action in by_reader):
        coming, asked = left[by_reader[action].channel], []
        while action in coming:
            asked.append(coming.pop())
        found[action] = asked
    return found


def most_on_their_way(actions: Actions, stages: int) -> dict[RankPair, int]:
    """Per pair of ranks the most messages that are in flight at once, at any speed of the ranks.

    Every message must be read by an action, as `simulate` checks.

    >>> from ftp.pipeline.schedule import gpipe, one_f_one_b
    >>> most_on_their_way(gpipe(2, 4, 1), 2), most_on_their_way(one_f_one_b(2, 4, 1), 2)
    ({(0, 1): 4, (1, 0): 4}, {(0, 1): 2, (1, 0): 2})
    """
    sent = messages(actions, stages)
    before = _before(actions, sent)
    place = {a: (rank, at) for rank, own in enumerate(actions) for at, a in enumerate(own)}
    most: dict[RankPair, int] = {}
    of: dict[RankPair, list[Message]] = {}
    for message in sent:
        earlier = of.setdefault(message.channel, [])
        earlier.append(message)
        known = before[message.sender]
        waiting = 0
        for m in earlier:
            rank, at = place[m.reader]
            waiting += at >= known[rank]  # its reader need not start before this is sent
        most[message.channel] = max(most.get(message.channel, 0), waiting)
    return most


def _before(actions: Actions, sent: list[Message]) -> dict[Action, list[int]]:
    """Per action, the number of each rank's actions up to it, itself included."""
    senders = {m.reader: m.sender for m in sent}
    found: dict[Action, list[int]] = {}
    last = [[0] * len(actions) for _ in actions]  # of each rank's last action

    def run(rank: int, action: Action) -> bool:
        known = last[rank]
        if (sender := senders.get(action)) is not None:
            if sender not in found:
                return False
            known = list(map(max, known, found[sender]))
        last[rank] = found[action] = [n + (r == rank) for r, n in enumerate(known)]
        return True

    run_in_order(actions, run)
    return found


def known_read(actions: Actions, stages: int) -> dict[Action, list[Action]]:
    """Per action, the actions of its rank whose messages are known to be read when it starts, at
    any speed of the ranks, because it waits for results of their readers; each is listed once.

    >>> from ftp.pipeline.schedule import gpipe
    >>> known_read(gpipe(2, 2, 1), 2)[Action("B", 0, 0)]
    [Action(kind='F', stage=0, microbatch=0), Action(kind='F', stage=0, microbatch=1)]
    """
    sent = messages(actions, stages)
    before = _before(actions, sent)
    place = {a: (rank, at) for rank, own in enumerate(actions) for at, a in enumerate(own)}
    found: dict[Action, list[Action]] = {}
    for rank, own in enumerate(actions):
        left = [m for m in sent if place[m.sender][0] == rank]
        for action in own:
            known = before[action]
            read = [m for m in left if place[m.reader][1] < known[place[m.reader][0]]]
            left = [m for m in left if m not in read]
            found[action] = [m.sender for m in read]
    return found


def check_buffers(actions: Actions, stages: int, room: Mapping[RankPair, int]) -> None:
    """Raise unless all ranks finish if messages wait in a buffer per pair of ranks, and the sender
    to a full buffer waits until the other rank starts to read.

    Args:
        room: per pair of ranks, the number of messages that its buffer holds.

    Raises:
        ScheduleError: ranks wait for each other forever; the message has the action of each.

    >>> cross = [[Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)],
    ...          [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)]]
    >>> check_buffers(cross, 2, {(0, 1): 1, (1, 0): 1})
    """
    sent = messages(actions, stages)
    out = {m.sender: m for m in sent}
    into = {m.reader: m for m in sent}
    full: Counter[RankPair] = Counter()
    posted: set[Message] = set()

    def run(_: int, step: Action | Message) -> bool:
        if isinstance(step, Message):
            if full[step.channel] >= room[step.channel]:
                return False
            full[step.channel] += 1
            posted.add(step)
        elif (awaited := into.get(step)) is not None:
            if awaited not in posted:
                return False
            posted.remove(awaited)
            full[awaited.channel] -= 1
        return True

    steps: list[list[Action | Message]] = [
        [step for action in own for step in (action, out.get(action)) if step is not None]
        for own in actions
    ]
    waiting = [
        (rank, own[i])
        for rank, (own, i) in enumerate(zip(steps, run_in_order(steps, run), strict=True))
        if i < len(own)
    ]
    stuck = [
        f"rank {rank} waits to send the results of {step.sender!r}"
        if isinstance(step, Message)
        else f"rank {rank} waits for what {step!r} reads"
        for rank, step in waiting
    ]
    if stuck:
        raise ScheduleError(f"With buffers of {dict(room)} messages {'; '.join(stuck)}.")
