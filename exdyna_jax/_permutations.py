"""Who sends to whom: fair permutations of the workers, in numpy, before anything is traced.

A permutation is int [n]: worker i sends to `row[i]`. None has a fixed point, so that everyone sends once and receives once, never to
itself.
"""

import functools
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.int64]]


def draw(n: int, rng: np.random.RandomState, allowed: list[int] | None = None) -> list[int]:
    """A random permutation without fixed points: worker by worker, a peer uniformly among the free ones that leave the others a way.

    With every peer but oneself allowed, that is the drawing of Crossover-SGD: all free peers but oneself leave a way until the last but
    one, which must take the last worker if it is still free. `allowed` are bit masks, the peers that each worker may have.
    """
    allowed = [(1 << n) - 1 & ~(1 << i) for i in range(n)] if allowed is None else allowed
    peer, taker = [-1] * n, [-1] * n  # at first any permutation, and then changed, one worker after the other
    for i in range(n):
        _pass_on(i, allowed, peer, taker, 0, sum(1 << j for j in range(n) if taker[j] < 0))
    taken = 0
    for i in range(n):
        free = _bits(allowed[i] & ~taken)
        while True:
            j = free.pop(rng.randint(len(free)))
            if j == peer[i] or _take(i, j, allowed, peer, taker, taken):
                break
        taken |= 1 << j
    return peer


def _bits(mask: int) -> list[int]:
    return [j for j, digit in enumerate(reversed(f"{mask:b}")) if digit == "1"]


def _take(i: int, j: int, allowed: list[int], peer: list[int], taker: list[int], taken: int) -> bool:
    """Worker i takes the peer j of another one, if that one can get along without."""
    left, other = peer[i], taker[j]
    taker[left] = -1
    if not _pass_on(other, allowed, peer, taker, taken | 1 << j, 1 << left):
        taker[left] = i
        return False
    peer[i], taker[j] = j, i
    return True


def _pass_on(worker: int, allowed: list[int], peer: list[int], taker: list[int], taken: int, nobodys: int) -> bool:
    """Gives a worker a peer that nobody has, by a shortest chain of workers of which each takes the next one's (an augmenting path)."""
    queue, wanted_by, seen = [worker], dict[int, int](), taken
    for w in queue:
        found = allowed[w] & ~seen
        if found & nobodys:
            p = (found & nobodys).bit_length() - 1
            while w != worker:
                peer[w], taker[p], p = p, w, peer[w]
                w = wanted_by[p]
            peer[w], taker[p] = p, w
            return True
        for p in _bits(found):
            wanted_by[p] = w
            queue.append(taker[p])
        seen |= found
    return False


@functools.lru_cache(maxsize=64)
def pool(n: int, sets: int, seed: int) -> Rows:
    """`[sets * (n - 1), n]`: permutations in which every ordered pair of workers occurs `sets` times.

    In a set each next permutation is drawn among the pairs that the set doesn't have yet. From RandomState, whose stream numpy keeps as it
    is, so that hosts agree whatever their version.
    """
    rng = np.random.RandomState(seed)
    rows = []
    for _ in range(sets):
        allowed = [(1 << n) - 1 & ~(1 << i) for i in range(n)]
        for _ in range(n - 1):
            row = draw(n, rng, allowed)
            rows.append(row)
            allowed = [mask & ~(1 << j) for mask, j in zip(allowed, row, strict=True)]
    return _frozen(np.array(rows, np.int64).reshape(-1, n))


def exponential(n: int) -> Rows:
    """`[floor(log2(n - 1)) + 1, n]`: the directed exponential graph, to the worker at distance 1, 2, 4, ..; no row for one worker."""
    distances = 2 ** np.arange((n - 1).bit_length())
    return _frozen((np.arange(n) + distances[:, None]) % n)


def lifted(rows: Rows, members: int) -> Rows:
    """The same between groups of as many workers each: member r of a group sends to member r of another."""
    return _frozen((rows[:, :, None] * members + np.arange(members)).reshape(len(rows), -1))


def _frozen(rows: Rows) -> Rows:
    rows.flags.writeable = False
    return rows


def check_rows(rows: Any) -> Rows:
    """A user's permutations; raises a ValueError if one of them is none, or has a fixed point."""
    try:
        array = np.asarray(rows)
    except ValueError as error:
        raise ValueError(f"pool={rows!r} has rows of different lengths: give int permutations [m, n].") from error
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer) or array.shape[0] < 1:
        raise ValueError(f"pool has shape {array.shape} and dtype {array.dtype}: give the number of sets, or int permutations [m, n].")
    n = array.shape[1]
    for row in array:
        if sorted(row.tolist()) != list(range(n)) or np.any(row == np.arange(n)):
            raise ValueError(f"The row {row.tolist()} of pool is not a permutation of 0 .. {n - 1} in which no worker sends to itself.")
    return _frozen(array.astype(np.int64))
