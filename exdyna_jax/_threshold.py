"""Threshold rules: which threshold gives the asked number of elements. Pure functions of replicated numbers.

A rule is five functions:
  `init(k)`                                                        state before the first step
  `aim(state, k) -> state`                                         before the exchange, where k may be another than in the step before
  `start(state, accumulator, k, workers) -> threshold`             what this worker selects with in this step
  `settle(state, starts) -> threshold, lowest`                     the same for all, from what all workers selected with, [n]
  `next(state, threshold, selected, sent, excess, k) -> state`     after the exchange
where `k` is the target, `selected` what all workers marked, `sent` what found a slot, and `excess` the sum of `log(|a| / threshold)` over
what was sent.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from exdyna_jax._accumulator import Accumulator, sample
from exdyna_jax._collectives import Workers, agreed, alike
from exdyna_jax._compact import count

TINY = 2.0**-126  # the smallest normal float32: as a threshold it lets everything through but zeros
_FIRST_SLOPE = 4.0
_HALF_GROWN = 2  # steps
_SAMPLE = 2**18


class Rule(NamedTuple):
    init: Callable[[jax.Array], Any]
    aim: Callable[[Any, jax.Array], Any]
    start: Callable[..., jax.Array]
    settle: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
    next: Callable[..., Any]
    never_empty: bool  # a worker whose partition holds nothing above the threshold sends one element all the same


class Ladder(NamedTuple):
    """State of the published rule, replicated."""

    next_threshold: jax.Array  # float [], float64 where x64 is enabled


def _paper_init(k: jax.Array) -> Ladder:
    return Ladder(1 / (2 * jnp.sqrt(k)))


def _paper_aim(state: Ladder, k: jax.Array) -> Ladder:
    """As published, a new target is reached step by step."""
    del k
    return state


def _paper_start(state: Ladder, accumulator: Accumulator, k: jax.Array, workers: Workers) -> jax.Array:
    del accumulator, k, workers
    return state.next_threshold


def _paper_settle(state: Ladder, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    del starts
    return state.next_threshold, state.next_threshold


def _paper_next(state: Ladder, threshold: jax.Array, selected: jax.Array, sent: jax.Array, excess: jax.Array, k: jax.Array) -> Ladder:
    """Up half a percent above 1.1 k, down half a percent below 0.909 k, and, as released, up an eighth in between."""
    del state, sent, excess
    ratio = selected.astype(threshold.dtype) / k
    return Ladder(threshold * jnp.where(ratio > 1.1, 1.005, jnp.where(ratio > 0.909, 1.00125, 0.995)))


class Servo(NamedTuple):
    """State of the proportional rule, replicated."""

    next_threshold: jax.Array  # float []; 0: not known, to be estimated from the next accumulator
    target: jax.Array  # float32 [], the k that it is meant for
    slope: jax.Array  # float32 [], -d log(count) / d log(threshold), on a running average
    trend: jax.Array  # float32 [], drift of log(threshold) per step
    age: jax.Array  # int32 [], steps since the residuals were all zero


def quantile(magnitudes: jax.Array, target: int | jax.Array) -> jax.Array:
    """The largest float32 t such that at least `target` of the magnitudes are >= t; the smallest normal one if none is.

    Positive floats are ordered as their bit patterns are, so t is found two bits at a time, in 16 rounds of three counts.
    """
    bits = lax.bitcast_convert_type(magnitudes.astype(jnp.float32), jnp.uint32)

    def narrow(i: jax.Array, low: jax.Array) -> jax.Array:
        shift = (30 - 2 * i).astype(jnp.uint32)
        candidates = low + (jnp.arange(1, 4, dtype=jnp.uint32) << shift)
        counts = jax.vmap(lambda candidate: count(bits >= candidate))(candidates)
        return low + (jnp.sum(counts >= target, dtype=jnp.uint32) << shift)

    low = lax.fori_loop(0, 16, narrow, alike(jnp.uint32(0), bits))
    return jnp.maximum(lax.bitcast_convert_type(low, jnp.float32), TINY)


def _proportional_init(k: jax.Array) -> Servo:
    return Servo(jnp.zeros((), k.dtype), k.astype(jnp.float32), jnp.float32(_FIRST_SLOPE), jnp.float32(0), jnp.int32(0))


def _proportional_aim(state: Servo, k: jax.Array) -> Servo:
    """Where the target moves, the threshold moves with it before anything is selected: along the local slope, or, further than by a factor
    of two, where that says little, to a new estimate."""
    target = k.astype(jnp.float32)
    known, ratio = state.next_threshold, jnp.log(state.target / target)
    moved = jnp.maximum(known * jnp.exp(ratio / state.slope).astype(known.dtype), TINY)
    far = jnp.abs(ratio) > math.log(2)
    return Servo(
        next_threshold=jnp.where(far, 0, jnp.where((known == 0) | (ratio == 0), known, moved)),
        target=target,
        slope=jnp.where(far, _FIRST_SLOPE, state.slope),
        trend=jnp.where(far, 0, state.trend),
        age=jnp.where(far & (ratio > 0), _HALF_GROWN, state.age),  # below a threshold that rises, residuals begin to grow again
    )


def _proportional_start(state: Servo, accumulator: Accumulator, k: jax.Array, workers: Workers) -> jax.Array:
    """The threshold carried over, or, where none is known, a quantile of a sample of this worker's own accumulator.

    No collective here: on a condition it could meet another one of the user's program in a different order on each worker. Each worker
    sees its own partition only, so that the counts add up to about k though the thresholds differ a little.
    """
    known, own = state.next_threshold, accumulator.leaves[0][1]

    def estimate() -> jax.Array:
        values, stride = sample(accumulator, _SAMPLE)
        target = jnp.maximum(jnp.round(k / stride), 1).astype(jnp.int32)
        return alike(quantile(jnp.abs(values), target).astype(known.dtype), known, own)

    return lax.cond(agreed(known == 0, workers), estimate, lambda: alike(known, own))


def _proportional_settle(state: Servo, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean and the lowest of the estimates, or the threshold that was known."""
    known = state.next_threshold
    mean, lowest = (jnp.where(known == 0, x.astype(known.dtype), known) for x in (jnp.mean(starts), jnp.min(starts)))
    return mean, lowest


def _weight(count: jax.Array) -> jax.Array:
    return count.astype(jnp.float32) / (count.astype(jnp.float32) + 16)


def _proportional_next(state: Servo, threshold: jax.Array, selected: jax.Array, sent: jax.Array, excess: jax.Array, k: jax.Array) -> Servo:
    """Moves log(threshold) by the error of log(count) over the local slope, plus a trend, plus what young residuals will grow.

    The slope comes for free from the elements sent: with `count ~ t^-slope` the mean of `log(|a|/t)` above t is `1 / slope`. Small counts
    say little, being mostly chance, and are given less weight.
    """
    k = k.astype(jnp.float32)
    error = jnp.log((selected.astype(jnp.float32) + 0.5) / (k + 0.5))
    bounded = jnp.clip(error, -1, 1)
    measured = jnp.clip(sent.astype(jnp.float32) / jnp.maximum(excess.astype(jnp.float32), 1e-6), 1.5, 300)
    slope = state.slope + 0.2 * _weight(sent) * (measured - state.slope)
    correction = _weight(k) * bounded / slope
    trend = jnp.clip(state.trend + 0.2 * correction, -0.1, 0.1)
    age = state.age.astype(jnp.float32)
    move = 0.7 * correction + trend + 0.5 * jnp.log((age + 2) / (age + 1))
    moved = jnp.maximum(threshold * jnp.exp(move).astype(threshold.dtype), TINY)
    lost = (jnp.abs(error) > jnp.log(4.0)) & (jnp.abs(selected.astype(jnp.float32) - k) > 8 * jnp.sqrt(k)) | (selected == 0)
    return Servo(
        next_threshold=jnp.where(lost, 0, moved),
        target=state.target,
        slope=jnp.where(lost, _FIRST_SLOPE, slope),
        trend=jnp.where(lost, 0, trend),
        age=jnp.where((selected == 0) & (threshold <= TINY), 0, state.age + 1),
    )


RULES = {
    "paper": Rule(_paper_init, _paper_aim, _paper_start, _paper_settle, _paper_next, never_empty=True),
    "proportional": Rule(
        _proportional_init, _proportional_aim, _proportional_start, _proportional_settle, _proportional_next, never_empty=False
    ),
}
