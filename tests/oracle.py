"""ExDyna in plain numpy, for all workers at once and without a thought for speed: what one step must make of a state.

`step` takes the library's own state before the step (as numpy arrays, residual leaves `[n, *shape]`) and the gradients of all workers,
and returns the update and the state after it. A test that compares every step so, from `init` on, compares whole runs.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simulate import flat

WORD = 32
FIRST_SLOPE = 4  # guess of -d log(count) / d log(threshold) where none was measured
TINY = np.float32(2.0**-126)  # the smallest normal float32


class Options(NamedTuple):
    density: Any
    max_density: float | None = None
    threshold_rule: str = "proportional"
    balance: str = "proportional"
    num_blocks: int | None = None
    capacity_factor: float = 1.5
    min_size: float = 0
    every_k: int = 1
    momentum: float | None = None
    wire_dtype: Any = np.float32


class Piece(NamedTuple):
    """A floating leaf with at least one element. Its elements lie at `offset ...` of the index space, or nowhere if it goes dense."""

    number: int
    dtype: Any
    size: int
    offset: int | None


def pieces_of(leaves: list[np.ndarray], min_size: float) -> tuple[list[Piece], int]:
    """The leaves `[n, *shape]` in index space, each starting at a whole word, and the length of that space."""
    pieces, end = [], 0
    for number, leaf in enumerate(leaves):
        size = leaf[0].size if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
        if size and size < min_size:
            pieces.append(Piece(number, leaf.dtype, size, None))
        elif size:
            pieces.append(Piece(number, leaf.dtype, size, end))
            end += -(-size // WORD) * WORD
    return pieces, end


def ranks(count: int, capacity: int, turn: int) -> list[int]:
    """Which of `count` marked elements get a slot: all, or else an even sample whose phase moves by the golden ratio every turn."""
    if count <= capacity:
        return list(range(count))
    phase = Fraction((turn * 2654435769 % 2**32) >> 8, 2**24)
    return [math.floor((s + phase) * count / capacity) for s in range(capacity)]


def capacity(k: int, n: int, factor: float, span: int) -> int:
    return span if math.isinf(factor) else min(math.ceil(factor * k / n + 6 * math.sqrt(k / n)), span)


def block_size(span: int, num_blocks: int | None, blocks: np.ndarray) -> int:
    """As published where a number is given; otherwise all blocks have one size, and only the last may be shorter."""
    if num_blocks is None:
        return math.ceil(span / sum(blocks) / WORD) * WORD
    return max(span // num_blocks // WORD * WORD, WORD)


def bounds(span: int, size: int, blocks: np.ndarray) -> list[tuple[int, int]]:
    """The range of each partition; what remains behind the last block belongs to the last partition that has a block."""
    total, ends, taken = int(sum(blocks)), [], 0
    for count in blocks:
        taken += int(count)
        ends.append(span if taken == total else taken * size)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def step(before: Any, gradients: Any, options: Options) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(gradients)
    n = len(leaves[0])
    pieces, span = pieces_of(leaves, options.min_size)
    residual = [np.array(x) for x in jax.tree.leaves(before.residual)]
    velocity = [np.array(x) for x in jax.tree.leaves(before.velocity)]
    update = [np.zeros(x.shape[1:], x.dtype) for x in leaves]

    most = {p.number: 2.0**-40 * float(jnp.finfo(residual[p.number].dtype).max) for p in pieces}  # what is larger counts as infinite
    if not all((np.abs(leaves[p.number].astype(np.float64)) <= most[p.number]).all() for p in pieces):
        told = _nothing_sent(before.metrics, n)._replace(
            threshold=before.metrics.threshold if options.every_k > 1 else None,
            skipped=before.metrics.skipped + 1,
            skipped_in_a_row=before.metrics.skipped_in_a_row + 1,
        )
        return treedef.unflatten(update), before._replace(metrics=told)

    for p in pieces:  # error feedback, with momentum correction where it is on
        g = leaves[p.number].astype(np.float32)
        if options.momentum is not None:
            velocity[p.number] = g = np.float32(options.momentum) * velocity[p.number] + g
        residual[p.number] = g + residual[p.number]

    after = before._replace(residual=_like(before.residual, residual), velocity=_like(before.velocity, velocity))
    if before.mini_step + 1 < options.every_k:
        told = _nothing_sent(before.metrics, n)._replace(skipped_in_a_row=np.int32(0))
        return treedef.unflatten(update), after._replace(mini_step=before.mini_step + 1, metrics=told)

    a = np.zeros((n, span), np.float32)
    real = np.zeros(span, bool)
    for p in pieces:
        if p.offset is not None:
            a[:, p.offset : p.offset + p.size] = residual[p.number].reshape(n, -1)
            real[p.offset : p.offset + p.size] = True

    sent, slots, control, told = _exchange(a, real, before, options)

    for p in pieces:
        rows = residual[p.number].reshape(n, -1)
        at = np.arange(p.size) if p.offset is None else np.array([i - p.offset for i in sent if p.offset <= i < p.offset + p.size], int)
        wire = np.float32 if p.offset is None else options.wire_dtype
        travels = rows[:, at].astype(wire)
        total = travels.astype(np.float64).sum(axis=0).astype(np.float32)
        mean = (total.astype(wire).astype(np.float64) / n).astype(np.float32)
        update[p.number].reshape(-1)[at] = mean
        rows[:, at] -= travels.astype(np.float32)
        for column, i in enumerate(at if p.offset is not None else []):  # the worker that owns a slot keeps what its sum is rounded by
            rows[sent.index(i + p.offset) // slots, i] += total[column] - total[column].astype(wire).astype(np.float32)
        rows[:, at] += mean - mean.astype(p.dtype).astype(np.float32)  # what a low-precision update can't hold
        residual[p.number] = rows.reshape(residual[p.number].shape)
        if options.momentum is not None:
            velocity[p.number].reshape(n, -1)[:, at] = 0
    return treedef.unflatten(update), after._replace(
        exchanges=before.exchanges + 1,
        mini_step=np.int32(0),
        residual=_like(before.residual, residual),
        velocity=_like(before.velocity, velocity),
        control=control,
        metrics=told,
    )


def _like(tree: Any, leaves: list[np.ndarray]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _nothing_sent(last: Any, n: int) -> Any:
    """None: not compared."""
    zero = np.int32(0)
    return last._replace(
        selected=zero, density=zero, sent=zero, overflow=zero, selected_per_worker=np.zeros(n), imbalance=zero, bytes_sent=None,
        gradients_identical=None, blocks=None,
    )  # fmt: skip


def _exchange(a: np.ndarray, real: np.ndarray, before: Any, options: Options) -> tuple[list[int], int, Any, Any]:
    """Positions sent, slots of a worker, next control, metrics of this step. `real` tells elements from what fills up the last words."""
    n, span = a.shape
    size, t = int(real.sum()), int(before.exchanges)
    rule, topology = before.control
    blocks = topology.next_blocks
    k, slots = target(options, t, size, n, span)

    if options.threshold_rule == "proportional":
        rule = aim(rule, k)
    threshold = rule.next_threshold
    own_threshold = [threshold] * n
    if options.threshold_rule == "proportional" and threshold == 0:
        own_threshold = [estimate(np.abs(row[real]), k) for row in a]
        threshold = np.mean(own_threshold, dtype=np.float32)
    num_blocks = options.num_blocks or (1024 if "paper" in (options.threshold_rule, options.balance) else None)
    width = block_size(span, num_blocks, blocks)
    ranges = bounds(span, width, blocks)

    selected, sent = [], []
    for worker in range(n):
        start, stop = ranges[(t + worker) % n]
        marked = [
            start + i for i in np.flatnonzero(real[start:stop] & (np.abs(a[worker, start:stop]) >= np.float32(own_threshold[worker])))
        ]
        if options.threshold_rule == "paper" and not marked and stop > start:
            marked = [start + t % (stop - start)]
        selected.append(marked)
        sent.append([marked[rank] for rank in ranks(len(marked), slots, t)])

    counts = np.array([len(marked) for marked in selected])
    by_partition = np.zeros(n, int)
    sent_by_partition = np.zeros(n, int)
    for worker in range(n):
        by_partition[(t + worker) % n] = counts[worker]
        sent_by_partition[(t + worker) % n] = len(sent[worker])
    everything = sorted(i for part in sent for i in part)

    if options.threshold_rule == "paper":
        next_rule = rule._replace(next_threshold=ladder(threshold, sum(counts) / k))
    else:
        above = np.array([abs(a[worker, i]) / own_threshold[worker] for worker in range(n) for i in sent[worker]], np.float64)
        next_rule = servo(rule, float(threshold), int(sum(counts)), above, k)
    if options.balance == "paper":
        next_topology = topology._replace(next_blocks=np.array(paper_balance(list(blocks), list(by_partition), width, size)))
    else:
        fresh = np.zeros(int(sum(blocks)))
        for p, (start, stop) in enumerate(ranges):
            for i in everything:
                if start <= i < stop:
                    fresh[min(i // width, len(fresh) - 1)] += by_partition[p] / sent_by_partition[p]
        next_topology = proportional_balance(topology, fresh, int(sum(counts)), n)

    told = before.metrics._replace(
        selected=sum(counts), density=sum(counts) / size, sent=len(everything), overflow=sum(counts) - len(everything),
        selected_per_worker=counts, threshold=min(own_threshold), blocks=blocks, imbalance=max(counts) * n / max(sum(counts), 1),
        skipped_in_a_row=np.int32(0), bytes_sent=None, gradients_identical=None,
    )  # fmt: skip
    return everything, slots, before.control._replace(rule=next_rule, topology=next_topology), told


def target(options: Options, t: int, size: int, n: int, span: int) -> tuple[int, int]:
    """k of step t, and the slots of one worker. A schedule chooses among buffers for 1, 1/4, 1/16 and 1/64 of its highest k."""
    if not callable(options.density):
        k = max(int(options.density * size), 1)
        return k, capacity(k, n, options.capacity_factor, span)
    k = max(int(np.float32(options.density(t)) * np.float32(size)), 1)
    tiers = [max(int(options.max_density * size) // 4**i, 1) for i in range(4)]
    return k, capacity(min(tier for tier in tiers if tier >= k), n, options.capacity_factor, span)


def estimate(magnitudes: np.ndarray, k: int) -> np.float32:
    """The magnitude that k elements of a worker reach, by a sample of at most 2**18, but never 0: zeros are not sent."""
    stride = math.ceil(len(magnitudes) / 2**18)
    return max(np.sort(magnitudes[::stride])[-max(round(k / stride), 1)], TINY)


def ladder(threshold: Any, ratio: float) -> float:
    """The published threshold rule."""
    if ratio > 1.1:
        return threshold * 1.005
    if ratio > 0.909:
        return threshold * 1.00125
    return threshold * 0.995


def aim(rule: Any, k: int) -> Any:
    """The proportional rule's threshold, moved to another target along the power law of its slope; forgotten if that is far away."""
    threshold, ratio = float(rule.next_threshold), float(rule.target) / k
    if not 0.5 <= ratio <= 2:
        rule = rule._replace(slope=np.float32(FIRST_SLOPE), trend=np.float32(0), age=np.int32(2) if ratio > 1 else rule.age)
        threshold = 0
    elif threshold and ratio != 1:
        threshold = max(threshold * ratio ** (1 / float(rule.slope)), TINY)
    return rule._replace(next_threshold=np.float32(threshold), target=np.float32(k))


def servo(rule: Any, threshold: float, total: int, above: np.ndarray, k: int) -> Any:
    """The proportional threshold rule; `above` holds what was sent in units of the threshold, each worker's of its own partition."""
    age = 0 if total == 0 and threshold <= TINY else rule.age + 1
    error = math.log((total + 0.5) / (k + 0.5))
    if total == 0 or (abs(error) > math.log(4) and abs(total - k) > 8 * math.sqrt(k)):
        return rule._replace(next_threshold=0, slope=FIRST_SLOPE, trend=0, age=age)
    measured = len(above) / max(float(np.log(above).sum()), 1e-6)
    slope = rule.slope + 0.2 * len(above) / (len(above) + 16) * (min(max(measured, 1.5), 300) - rule.slope)
    correction = k / (k + 16) * min(max(error, -1), 1) / slope
    trend = min(max(rule.trend + 0.2 * correction, -0.1), 0.1)
    move = 0.7 * correction + trend + 0.5 * math.log((rule.age + 2) / (rule.age + 1))
    return rule._replace(next_threshold=max(threshold * math.exp(move), TINY), slope=slope, trend=trend, age=age)


def paper_balance(blocks: list[int], counts: list[int], width: int, size: int) -> list[int]:
    """The published balance rule, pair by pair from left to right. Counts and blocks in partition order."""
    n = len(blocks)
    mean, per_element, floor = int(sum(counts) / n), sum(counts) / size, sum(blocks) / (4 * n)
    moved = int(width * per_element)
    for i in range(n - 1 if mean > 0 else 0):
        left, right = counts[i] / mean, counts[i + 1] / mean
        if left > 1.05 and right < 0.95238:
            giver, taker = i, i + 1
        elif left < 0.95238 and right > 1.05:
            giver, taker = i + 1, i
        else:
            continue
        if blocks[giver] - 1 >= floor:
            blocks[giver], blocks[taker] = blocks[giver] - 1, blocks[taker] + 1
            counts[giver], counts[taker] = counts[giver] - moved, counts[taker] + moved
    return blocks


def proportional_balance(topology: Any, fresh: np.ndarray, total: int, n: int) -> Any:
    """Blocks weigh what was selected in them, on a running average. The partitions are not computed but checked, by `is_even_cut`."""
    news = min(max(total / (n * 400), 0.1), 0.5)
    return topology._replace(next_blocks=None, heat=(1 - news) * topology.heat + news * fresh)


def is_even_cut(heat: np.ndarray, blocks: np.ndarray) -> bool:
    """Whether partitions are cut at the block edges nearest to equal shares of the weight, a block each where there are enough.

    Of edges that are equally near, to the rounding of a float32 sum, each will do.
    """
    n, least = len(blocks), 1 if len(heat) >= len(blocks) else 0
    weights = heat.astype(np.float64) + 0.002 / len(heat) * heat.sum() + 1e-6  # a little of it evenly
    below = np.concatenate([[0], np.cumsum(weights)])  # the weight below each edge
    edges = [0, *np.cumsum(blocks)]
    for i in range(1, n):
        distance = np.abs(below - below[-1] * i / n)
        nearest = np.flatnonzero(distance <= distance.min() + 1e-6 * below[-1])
        lowest, highest = edges[i - 1] + least, len(heat) - (n - i) * least
        if edges[i] not in [min(max(edge, lowest), highest) for edge in nearest]:
            return False
    return edges[n] == len(heat)


def compare(t: int, update: Any, want_update: Any, state: Any, want: Any, bound: float) -> None:
    for got, wanted in zip(jax.tree.leaves(update), jax.tree.leaves(want_update), strict=True):
        assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(flat(update) != 0, flat(want_update) != 0, f"step {t}")
    np.testing.assert_allclose(flat(update), flat(want_update), rtol=0, atol=bound, err_msg=f"step {t}")
    np.testing.assert_array_equal(flat(state.residual, 1), flat(want.residual, 1), f"step {t}")
    if state.velocity is not None:
        np.testing.assert_array_equal(flat(state.velocity, 1), flat(want.velocity, 1), f"step {t}")
    assert (state.exchanges, state.mini_step) == (want.exchanges, want.mini_step)
    rule, topology = state.control
    for field, got in (rule._asdict() | {"heat": topology.heat}).items():
        wanted = want.control.topology.heat if field == "heat" else getattr(want.control.rule, field)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6 if field in ("trend", "heat") else 0, err_msg=f"step {t}: {field}")
    if want.control.topology.next_blocks is None:
        assert is_even_cut(topology.heat, topology.next_blocks), f"step {t}"
    else:
        np.testing.assert_array_equal(topology.next_blocks, want.control.topology.next_blocks, f"step {t}")
    for field, got in state.metrics._asdict().items():
        wanted = getattr(want.metrics, field)
        if wanted is not None:
            np.testing.assert_allclose(got, wanted, rtol=1e-6, err_msg=f"step {t}: {field}")
