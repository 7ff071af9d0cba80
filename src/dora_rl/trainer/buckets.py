"""Which sequences go through the model together: mini-batches, shares of ranks, micro-batches.

Plain functions on lengths, without tensors, and deterministic: ties are broken by index.
"""

from collections.abc import Hashable, Sequence

MAX_PADDING = 0.1  # share of a micro-batch that may be padding

Rows = tuple[int, ...]


def minibatches(groups: Sequence[Hashable], lengths: Sequence[int], count: int) -> list[Rows]:
    """At most `count` parts of nearly equal tokens; the rows of a group stay together.

    `groups` and `lengths` are those of each row. None is empty: few groups give few parts.
    """
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    sizes = [sum(lengths[row] for row in rows) for rows in members.values()]
    parts = _deal(sizes, min(count, len(members)))
    whole = list(members.values())
    return [tuple(sorted(row for i in part for row in whole[i])) for part in parts]


def shares(rows: Sequence[int], lengths: Sequence[int], ranks: int) -> list[Rows]:
    """The rows of each rank, of nearly equal tokens. A share may be empty."""
    parts = _deal([lengths[row] for row in rows], ranks)
    return [tuple(rows[i] for i in part) for part in parts]


def _deal(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices in `parts` lists: the largest first, each to the list that has least."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(parts), key=lambda part: (totals[part], len(dealt[part]), part))
        dealt[least].append(i)
        totals[least] += sizes[i]
    return dealt


def microbatches(rows: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[Rows]:
    """Rows of similar length, the longest first: a micro-batch is as wide as its first row.

    It is closed where one more row would pass the budget, or make padding `MAX_PADDING` of it.
    A row that is longer than the budget is alone.
    """
    batches: list[Rows] = []
    current: list[int] = []
    width = real = 0
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        slots = width * (len(current) + 1)
        padding = slots - real - lengths[row]
        if current and (slots > token_budget or padding >= MAX_PADDING * slots):
            batches.append(tuple(current))
            current, real = [], 0
        if not current:
            width = lengths[row]
        current.append(row)
        real += lengths[row]
    if current:
        batches.append(tuple(current))
    return batches


def plan(
    rows: Sequence[int], lengths: Sequence[int], token_budget: int, ranks: int
) -> list[list[Rows]]:
    """The micro-batches of each rank, equally many; the missing ones are empty."""
    per_rank = [
        microbatches(share, lengths, token_budget) for share in shares(rows, lengths, ranks)
    ]
    most = max(map(len, per_rank))
    return [mine + [()] * (most - len(mine)) for mine in per_rank]
