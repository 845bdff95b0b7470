"""The exchange of rows by groups: for every matrix of counts that a few rows allow, each row is on
the rank and in the group that the counts say, and comes back to its place.
"""

import itertools

import torch

from ftp.ops.exchange_rows import by_group, by_rank, exchanged

N, GROUPS, ROWS = 2, 2, 3  # ranks, groups of each, most rows of a rank


def test_every_matrix_of_counts():
    """What is computed in between is the same for every value of the rows, so that numbers that
    name their rank and place stand for any.
    """
    of_rank = [c for c in itertools.product(range(ROWS + 1), repeat=N * GROUPS) if sum(c) <= ROWS]
    x = [torch.arange(ROWS) + 10 * (rank + 1) for rank in range(N)]
    seen = 0
    for sent in itertools.product(of_rank, repeat=N):
        counts = torch.tensor(sent).view(N, N, GROUPS)
        for fits in (False, True):
            arrived = exchanged([(x[r], counts, N * ROWS, False, fits, "", "") for r in range(N)])
            for rank, got in enumerate(arrived):
                expected = [
                    int(x[source][sum(sent[source][: rank * GROUPS + g]) + i])
                    for g in range(GROUPS)
                    for source in range(N)
                    for i in range(int(counts[source, rank, g]))
                ]
                room = [] if fits else [0] * (N * ROWS - len(expected))
                assert got.tolist() == [*expected, *room]
            back = exchanged([(a, counts, ROWS, True, fits, "", "") for a in arrived])
            for rank, got in enumerate(back):
                own = sum(sent[rank])
                assert got.tolist() == [*x[rank][:own].tolist(), *[0] * (ROWS - own)]
        seen += 1
    assert seen == len(of_rank) ** 2 == 35**2


def test_order_by_group_and_by_rank_are_each_others_inverse():
    for counts in itertools.product(range(3), repeat=6):
        groups = [list(counts[:3]), list(counts[3:])]
        rows = torch.arange(sum(counts))
        assert torch.equal(by_rank(by_group(rows, groups), groups), rows)
