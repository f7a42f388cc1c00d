"""SIDCo: every worker fits a distribution to its gradient, in stages, and sends what exceeds the threshold that follows from it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from exdyna_jax._accumulator import Accumulator, add, marks
from exdyna_jax._checks import check_capacity
from exdyna_jax._collectives import AxisName, Workers, alike
from exdyna_jax._compact import compact
from exdyna_jax._compact import count as count_marks
from exdyna_jax._density import Density, dense_below, in_tiers, make_density, share, slots, target, tiers
from exdyna_jax._exchange import Local
from exdyna_jax._layout import Layout
from exdyna_jax._sparsify import Exchange, Method, Options, sparsify, widened
from exdyna_jax._threshold import TINY
from exdyna_jax._union import exchange_union

_FIRST_RATIO = 0.25  # what the first of several stages lets through
_EVERY = 5  # steps between two changes of the number of stages


def sidco(
    density: float | optax.Schedule,
    axis_name: AxisName,
    *,
    max_density: float | None = None,
    capacity_factor: float = 1.5,
    num_workers: int | None = None,
    dense_axis: AxisName = None,
    min_size: int = 0,
    every_k: int = 1,
    momentum: float | None = None,
    wire_dtype: Any = None,
    residual_dtype: Any = None,
    nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the elements that exceed a threshold fitted by any worker, and keeps the rest for later.

    As `exdyna_jax.top_k`, but with :math:`S_i = \{j : |a_{i,j}| \ge \eta_i\}`. Were :math:`x = |a_i|` exponentially distributed, with mean
    :math:`\bar x`, the share d of it would exceed :math:`\eta = -\bar x \ln d`. Since the tail has another shape than the bulk, the fit is
    refined in s stages: the first lets a quarter through, :math:`\eta^{(1)} = -\bar x \ln \tfrac14`, and each further one takes what
    reaches the threshold before, with the mean and the minimum of that,

    .. math::
        \eta^{(m)} = x_{\min} - (\bar x - x_{\min}) \ln \delta, \qquad \delta = (4 d)^{1 / (s - 1)}.

    A worker starts with one stage. Every 5 steps it takes one less where it selected more than 1.2 k in the mean, one more below 0.8 k,
    between 1 and :math:`\lceil \ln d / \ln \tfrac12 \rceil`. The density obtained comes near that asked for only as far as the fit does,
    and the union of the workers is larger; of magnitudes that are all equal nothing is selected.

    Args:
      density: d, the share of the N elements that each worker selects, or an optax schedule, as for `exdyna_jax.exdyna`.
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker.
      capacity_factor: slots of a worker's buffer, as a multiple of k, at least 1; `math.inf` never overflows.
      max_density, num_workers, dense_axis, min_size, every_k, momentum, wire_dtype, residual_dtype, nonfinite: as for `exdyna_jax.exdyna`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its updates are equal on all workers.

    Raises:
      ValueError: for options out of range, and at trace time as `exdyna_jax.exdyna`.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.sidco(density=0.5, axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [3. 0. 0. 2.]

    References:
      Abdelmoniem et al., SIDCo (MLSys 2021), https://arxiv.org/abs/2101.10761, its multi-stage fitting with the exponential distribution.
    """
    asked = make_density(density, max_density)
    check_capacity(capacity_factor)
    below = dense_below(asked, min_size)
    options = Options(num_workers, dense_axis, below, every_k, momentum, wire_dtype, residual_dtype, nonfinite)
    return sparsify(_method(asked, capacity_factor), axis_name, options)


class SidcoControl(NamedTuple):
    """What steers the next step, equal on all workers."""

    stages: jax.Array  # int32 [n], of each worker
    ratios: jax.Array  # float32 [n], selected / k of each worker, summed since the last change


def _method(density: Density, capacity_factor: float) -> Method:
    def init(layout: Layout, n: int) -> tuple[SidcoControl, jax.Array, None]:
        del layout
        return SidcoControl(jnp.ones(n, jnp.int32), jnp.zeros(n, jnp.float32)), jnp.float32(0), None

    def exchange(accumulator: Accumulator, control: SidcoControl, count: jax.Array, local: Local, workers: Workers) -> Exchange:
        layout, n = accumulator.layout, workers.size
        k = target(density, count, layout.size)
        d = jnp.maximum(share(density, count), 1 / layout.size).astype(jnp.float32)
        sizes = tiers(density, layout.size)
        capacities = [slots(size, 1, capacity_factor, layout.span) for size in sizes]
        threshold = _fit(accumulator, d, control.stages[workers.rank])
        words = marks(accumulator, threshold, jnp.int32(0), jnp.int32(layout.span))

        def ship(tier: int) -> Exchange:
            mine, marked = compact(words, capacities[tier], layout.span, count)
            done = exchange_union(accumulator, mine, marked, threshold, count, local, workers)
            return widened(done, min(n * capacities[0], layout.span), layout.span)

        done = in_tiers(sizes, k, workers, ship)
        return done._replace(control=_adapt(control, done.selected, k, d, count))

    return Method(init, exchange)


def _fit(accumulator: Accumulator, d: jax.Array, stages: jax.Array) -> jax.Array:
    """This worker's threshold, float32 []."""
    total, _, _ = _above(accumulator, jnp.float32(0))
    first = -total / accumulator.layout.size * jnp.log(jnp.where(stages == 1, d, _FIRST_RATIO))
    ratio = jnp.log(d / _FIRST_RATIO) / jnp.maximum(stages - 1, 1).astype(jnp.float32)

    def refine(_: jax.Array, threshold: jax.Array) -> jax.Array:
        total, number, least = _above(accumulator, threshold)
        mean = total / jnp.maximum(number, 1).astype(jnp.float32)
        return jnp.where(number > 0, least - (mean - least) * ratio, threshold)

    return jnp.maximum(lax.fori_loop(1, stages, refine, alike(first, stages)), TINY)


def _above(accumulator: Accumulator, threshold: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum, number and minimum of the magnitudes that reach a threshold; float32, int32, float32."""
    sums, numbers, minima = [], [], []
    for terms in accumulator.leaves:
        x = jnp.abs(add(accumulator.momentum, *terms)).astype(jnp.float32)
        above = x >= threshold
        sums.append(jnp.sum(jnp.where(above, x, 0)))
        numbers.append(count_marks(above))
        minima.append(jnp.min(jnp.where(above, x, jnp.inf)))
    return jnp.sum(jnp.stack(sums)), jnp.sum(jnp.stack(numbers), dtype=jnp.int32), jnp.min(jnp.stack(minima))


def _adapt(control: SidcoControl, selected: jax.Array, k: jax.Array, d: jax.Array, count: jax.Array) -> SidcoControl:
    ratios = control.ratios + selected.astype(jnp.float32) / k.astype(jnp.float32)
    mean = ratios / _EVERY
    most = jnp.maximum(jnp.ceil(jnp.log(d) / math.log(0.5)), 1).astype(jnp.int32)
    moved = jnp.clip(control.stages + (mean < 0.8).astype(jnp.int32) - (mean > 1.2).astype(jnp.int32), 1, most)
    due = (count + 1) % _EVERY == 0
    return SidcoControl(jnp.where(due, moved, control.stages), jnp.where(due, 0, ratios))


def restage(control: SidcoControl, m: int) -> SidcoControl:
    """The control for another number of workers: a new worker begins with the stages of the old one in its place."""
    n = control.stages.size
    old = jnp.arange(m, dtype=jnp.int32) * n // m
    return SidcoControl(control.stages[old], control.ratios[old])
