"""Which sequences go through the model together: mini-batches, shares of ranks, micro-batches.

Plain functions on lengths, without tensors, and deterministic: ties are broken by index.
"""

from collections.abc import Hashable, Iterable, Sequence

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


def packs(rows: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[Rows]:
    """Rows whose tokens stand one after another, without padding, within the budget.

    The longest first, each into the first pack with room. A row that is longer than the budget is
    alone.
    """
    return _packed([((row,), lengths[row]) for row in rows], token_budget)


def shared_packs(
    families: Iterable[tuple[int, Sequence[int]]], lengths: Sequence[int], token_budget: int
) -> list[Rows]:
    """The same for rows that share prompts: families of a prompt's length and the rows with it.

    A prompt counts once in a pack. A family that does not fit is cut, the longest rows first; each
    part has the prompt. A row that is longer than the budget is alone.
    """
    parts: list[tuple[Rows, int]] = []
    for prompt, rows in families:
        part: list[int] = []
        size = prompt
        for row in sorted(rows, key=lambda row: (-lengths[row], row)):
            own = lengths[row] - prompt
            if part and size + own > token_budget:
                parts.append((tuple(part), size))
                part, size = [], prompt
            part.append(row)
            size += own
        parts.append((tuple(part), size))
    return _packed(parts, token_budget)


def _packed(parts: Sequence[tuple[Rows, int]], token_budget: int) -> list[Rows]:
    """Parts of given sizes: the largest first, each into the first pack with room."""
    found: list[Rows] = []
    left: list[int] = []
    for rows, size in sorted(parts, key=lambda part: (-part[1], part[0])):
        place = next((i for i, room in enumerate(left) if size <= room), None)
        if place is None:
            found.append(rows)
            left.append(token_budget - size)
        else:
            found[place] += rows
            left[place] -= size
    return found


def assign(minibatches: Sequence[Rows], lengths: Sequence[int], ranks: int) -> list[int]:
    """The rank of each row: every mini-batch is dealt out in nearly equal tokens.

    Rank 0 has the longest row of each mini-batch, and so always something to do.
    """
    rank_of = [0] * sum(map(len, minibatches))
    for minibatch in minibatches:
        for rank, rows in enumerate(shares(minibatch, lengths, ranks)):
            for row in rows:
                rank_of[row] = rank
    return rank_of
