"""The other methods in plain numpy, for all workers at once: what a step must send of the workers' accumulators.

Each takes `a`, float32 [n, N], the accumulators of all workers as one vector each, and returns the mean that becomes the update, [N], and
the residuals, [n, N]. Sums are exact where the accumulators are small integers.
"""

import math
from typing import Any

import numpy as np


def top(values: np.ndarray, k: int) -> list[int]:
    """Indices of the k largest magnitudes, of equal ones the first, never of a zero; ascending."""
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    return sorted(int(i) for i in order if values[i] != 0)


def send(a: np.ndarray, indices: Any) -> tuple[np.ndarray, np.ndarray]:
    """All workers send their values at all indices."""
    indices = sorted(set(indices))
    mean, residual = np.zeros(a.shape[1]), a.copy()
    mean[indices] = a[:, indices].astype(np.float64).sum(axis=0) / len(a)
    residual[:, indices] = 0
    return mean, residual


def top_k(a: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    return send(a, [i for row in a for i in top(row, k)])


def clt_k(a: np.ndarray, k: int, t: int) -> tuple[np.ndarray, np.ndarray]:
    return send(a, top(a[t % len(a)], k))


def gtop_k(a: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A list is a dict from index to {worker: contribution}: what is in the outcome says exactly who sent what.

    Merging keeps the k largest sums. The butterfly is a tree: two halves of the workers, each merged by itself, are merged. The workers
    beyond the largest power of two join the first ones before.
    """
    n = len(a)
    lists = [{i: {w: float(row[i])} for i in top(row, k)} for w, row in enumerate(a)]

    def merge(one: dict[int, dict[int, float]], other: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
        both = {i: one.get(i, {}) | other.get(i, {}) for i in sorted(one.keys() | other.keys())}
        kept = [i for i in sorted(both, key=lambda i: -abs(sum(both[i].values()))) if sum(both[i].values()) != 0][:k]
        return {i: both[i] for i in kept}

    power = 2 ** int(math.log2(n))
    lists = [merge(lists[r], lists[r + power]) if r + power < n else lists[r] for r in range(power)]
    while len(lists) > 1:
        lists = [merge(lists[i], lists[i + 1]) for i in range(0, len(lists), 2)]

    mean, residual = np.zeros(a.shape[1]), a.copy()
    for i, contributions in lists[0].items():
        mean[i] = sum(contributions.values()) / n
        for worker in contributions:
            residual[worker, i] = 0
    return mean, residual


def sidco_threshold(x: np.ndarray, d: float, stages: int) -> float:
    """The threshold of one worker, from its magnitudes x; positive, so that no zero is sent."""
    x = x.astype(np.float64)
    if stages == 1:
        return max(-x.mean() * math.log(d), 2.0**-126)
    threshold = -x.mean() * math.log(0.25)
    for _ in range(stages - 1):
        above = x[x >= threshold]
        if above.size:
            threshold = -(above.mean() - above.min()) * math.log((d / 0.25) ** (1 / (stages - 1))) + above.min()
    return max(threshold, 2.0**-126)


def sidco_stages(stages: int, ratios: list[float], d: float) -> int:
    """The number of stages after 5 steps, in which selected / k was so much."""
    mean = sum(ratios) / len(ratios)
    stages += (mean < 0.8) - (mean > 1.2)
    return min(max(stages, 1), max(math.ceil(math.log(d) / math.log(0.5)), 1))
