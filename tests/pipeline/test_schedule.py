"""Schedules do all work once, end, and wait no longer than their papers say."""

import graphlib
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp.errors import ScheduleError, SpecError
from ftp.pipeline import buffers
from ftp.pipeline.schedule import (
    SCHEDULES,
    Action,
    bubble,
    check_work,
    held_microbatches,
    needs,
    simulate,
)

DRAWN = st.tuples(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 9), st.integers(1, 3)
)


def of(name: str, ranks: int, microbatches: int, chunks: int):
    if name == "interleaved":
        microbatches *= ranks
    if name in ("1f1b", "zero_bubble"):
        chunks = 1
    return SCHEDULES[name](ranks, microbatches, chunks), microbatches, chunks


@given(DRAWN, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_a_message_that_is_known_to_be_read_has_been(drawn, random):
    """At any speed of the ranks its reader started before; in the end it is known of a forward
    pass' messages at least, whose gradients came back.
    """
    name, ranks, count, chunks = drawn
    actions, count, chunks = of(name, ranks, count, chunks)
    stages = ranks * chunks
    seconds = {action: random.uniform(0.1, 9.0) for own in actions for action in own}
    start = {t.action: t.start for t in simulate(actions, stages, seconds.__getitem__)}
    reader = {m.sender: m.reader for m in buffers.messages(actions, stages)}
    known = buffers.known_read(actions, stages)
    found = [sender for senders in known.values() for sender in senders]
    assert len(set(found)) == len(found)
    assert {sender for sender in reader if sender.kind == "F"} <= set(found) <= reader.keys()
    for action, senders in known.items():
        for sender in senders:
            assert sender.stage % ranks == action.stage % ranks
            assert start[reader[sender]] <= start[action]


@given(DRAWN)
@settings(max_examples=60)
def test_all_work_is_done_once_and_ends(drawn):
    name, ranks, count, chunks = drawn
    actions, microbatches, chunks = of(name, ranks, count, chunks)
    check_work(actions, ranks * chunks, microbatches)
    timed = simulate(actions, ranks * chunks, lambda action: 1.0)
    assert len(timed) == sum(map(len, actions))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 5)])
def test_bubbles_are_those_of_the_papers(ranks, microbatches):
    def seconds(action):
        return {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}[action.kind]

    def of_schedule(name, chunks=1, count=microbatches):
        actions = SCHEDULES[name](ranks, count, chunks)
        return bubble(simulate(actions, ranks * chunks, seconds), ranks)

    ideal = (ranks - 1) / (microbatches + ranks - 1)
    assert of_schedule("gpipe") == pytest.approx(ideal)
    assert of_schedule("1f1b") == pytest.approx(ideal)
    count = ranks * microbatches
    inter = of_schedule("interleaved", 2, count)
    assert inter == pytest.approx((ranks - 1) / (2 * count + ranks - 1))
    # ZB-H1: a third of 1F1B's wait is left (section 2.2 of the paper, F = I = W).
    waits = (ranks - 1) * 1.0
    assert of_schedule("zero_bubble") <= waits / (3 * microbatches + waits) + 1e-9


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 2)])
def test_one_f_one_b_holds_a_microbatch_a_stage(ranks, microbatches):
    held = [held_microbatches(own) for own in SCHEDULES["1f1b"](ranks, microbatches, 1)]
    assert held == [min(ranks - r, microbatches) for r in range(ranks)]
    held = [held_microbatches(own) for own in SCHEDULES["zero_bubble"](ranks, microbatches, 1)]
    assert max(held) <= min(ranks, microbatches)
    held = [held_microbatches(own) for own in SCHEDULES["gpipe"](ranks, microbatches, 1)]
    assert held == [microbatches] * ranks


@given(DRAWN, st.data())
@settings(max_examples=60)
def test_a_dropped_or_doubled_action_is_refused(drawn, data):
    name, ranks, count, chunks = drawn
    actions, microbatches, chunks = of(name, ranks, count, chunks)
    rank = data.draw(st.integers(0, ranks - 1))
    at = data.draw(st.integers(0, len(actions[rank]) - 1))
    if data.draw(st.booleans()):
        actions[rank].insert(at, actions[rank][at])
    else:
        del actions[rank][at]
    with pytest.raises(ScheduleError, match=r"missing|times|must be"):
        check_work(actions, ranks * chunks, microbatches)


@given(DRAWN, st.data())
@settings(max_examples=60)
def test_a_permuted_schedule_ends_or_is_refused(drawn, data):
    """Where it is not refused, every action runs after what it needs."""
    name, ranks, count, chunks = drawn
    actions, _, chunks = of(name, ranks, count, chunks)
    rank = data.draw(st.integers(0, ranks - 1))
    actions[rank] = data.draw(st.permutations(actions[rank]))
    try:
        timed = simulate(actions, ranks * chunks, lambda action: 1.0)
    except ScheduleError:
        return
    ends = {t.action: t.end for t in timed}
    for t in timed:
        kind, stage, i = t.action
        if kind == "F" and stage:
            assert ends[ftp.Action("F", stage - 1, i)] <= t.start
        if kind in "BI":
            assert ends[ftp.Action("F", stage, i)] <= t.start


def test_errors():
    with pytest.raises(ScheduleError, match=r"schedule is '1f2b'\. Give one of '1f1b', 'gpipe'"):
        ftp.Pipeline("pp", 2, "1f2b")
    for schedule in (7, [["F", "B"], []]):
        with pytest.raises(ScheduleError, match="it must be a name, or for each rank a list"):
            ftp.Pipeline("pp", 2, schedule)  # type: ignore[arg-type]
    for stages in ("emb", ["emb", "head"], [None, ["head"]], [["emb"], [7]], 2):
        with pytest.raises(SpecError, match="it must be a list of patterns for each stage"):
            ftp.Pipeline("pp", 2, stages=stages)  # type: ignore[arg-type]
    for odd in (("FI", 0, 0), ("", 0, 0), ("F", 0, 0.5), ("F", "0", 0), ("F", None, 0)):
        with pytest.raises(ScheduleError, match="is no action of 1 stages and 1 microbatches"):
            ftp.Pipeline("pp", 1, [[odd]]).actions(1)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="microbatches is 0"):
        ftp.Pipeline("pp", 0)
    with pytest.raises(ScheduleError, match="runs one stage a rank, not chunks=2"):
        ftp.Pipeline("pp", 2, chunks=2)
    with pytest.raises(ScheduleError, match="no whole number of groups"):
        ftp.Pipeline("pp", 3, "interleaved", chunks=2).actions(2)
    backwards = [[ftp.Action("B", 0, 0), ftp.Action("F", 0, 0)]]
    with pytest.raises(ScheduleError, match=r"rank 0 cannot begin Action\(kind='B'"):
        ftp.Pipeline("pp", 1, backwards).actions(1)
    with pytest.raises(ScheduleError, match="lists for 1 ranks, but axis 'pp' has 2"):
        ftp.Pipeline("pp", 1, backwards).actions(2)


def is_possible(actions, stages) -> bool:
    """Whether the actions and what they need are a partial order, by the standard library."""
    known = {action for own in actions for action in own}
    graph: dict[Any, set[Any]] = {action: set() for action in known}
    for own in actions:
        for first, second in itertools.pairwise(own):
            graph[second].add(first)
        for action in own:
            graph[action] |= {a for choice in needs(action, stages) for a in choice if a in known}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True


@given(DRAWN, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_dropped_doubled_and_permuted_actions_are_refused(drawn, random):
    """A list that changes its order is refused exactly where some action could never run."""
    name, ranks, count, chunks = drawn
    actions, microbatches, chunks = of(name, ranks, min(count, 4), chunks)

    def made(lists):
        return ftp.Pipeline("pp", microbatches, lists, chunks=chunks).actions(ranks)

    rank = random.randrange(ranks)
    own = actions[rank]
    at, other = random.randrange(len(own)), random.randrange(len(own))
    for changed in ([*own[:at], *own[at + 1 :]], [*own[:at], own[at], *own[at:]]):
        with pytest.raises(ScheduleError, match=r"missing|must be|in the lists 2 times"):
            made([*actions[:rank], changed, *actions[rank + 1 :]])
    permuted = list(own)
    permuted[at], permuted[other] = own[other], own[at]
    lists = [*actions[:rank], permuted, *actions[rank + 1 :]]
    if is_possible(lists, ranks * chunks):
        made(lists)
    else:
        with pytest.raises(ScheduleError, match="wait for one another"):
            made(lists)


@given(DRAWN, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_no_more_messages_are_on_their_way_than_proven(drawn, random):
    """At drawn speeds of the actions; and ranks with buffers for that many never stop."""
    name, ranks, count, chunks = drawn
    actions, _, chunks = of(name, ranks, min(count, 5), chunks)
    stages = ranks * chunks
    most = buffers.most_on_their_way(actions, stages)
    buffers.check_buffers(actions, stages, most)
    speed = {a: random.choice([0.0, 0.1, 1.0, 9.0]) for own in actions for a in own}
    timed = {t.action: t for t in simulate(actions, stages, speed.__getitem__)}
    sent = buffers.messages(actions, stages)
    assert {m.channel for m in sent} == set(most)
    for m in sent:
        now = timed[m.sender].end
        waiting = [
            x
            for x in sent
            if x.channel == m.channel and timed[x.sender].end <= now < timed[x.reader].start
        ]
        assert len(waiting) <= most[m.channel]


def test_more_messages_than_a_buffer_holds_are_refused():
    """A rank that sends to a buffer without room waits, and the other one for it."""
    first = [Action("F", 0, 0), Action("F", 2, 0), Action("B", 2, 0), Action("B", 0, 0)]
    second = [Action("F", 1, 0), Action("F", 3, 0), Action("B", 3, 0), Action("B", 1, 0)]
    buffers.check_buffers([first, second], 4, {(0, 1): 1, (1, 0): 1})
    with pytest.raises(ScheduleError, match="rank 0 waits to send the results of Action"):
        buffers.check_buffers([first, second], 4, {(0, 1): 0, (1, 0): 1})


def test_rendezvous_deadlocks_what_buffers_allow():
    """Two ranks that each send before they read need a buffer; 1F1B does so in its middle."""
    actions = SCHEDULES["1f1b"](2, 4, 1)
    assert buffers.most_on_their_way(actions, 2) == {(0, 1): 2, (1, 0): 2}
    buffers.check_buffers(actions, 2, {(0, 1): 1, (1, 0): 1})
