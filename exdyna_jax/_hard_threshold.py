"""Hard threshold: every worker sends what exceeds a fixed threshold, however much that is."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from exdyna_jax._accumulator import Accumulator, marks
from exdyna_jax._checks import check_capacity, check_threshold
from exdyna_jax._collectives import AxisName, Workers
from exdyna_jax._compact import compact
from exdyna_jax._density import Density, dense_below, in_tiers, make_density, slots, target, tiers
from exdyna_jax._exchange import Local
from exdyna_jax._layout import Layout
from exdyna_jax._sparsify import Exchange, Method, Options, sparsify, widened
from exdyna_jax._union import exchange_union


def hard_threshold(
    density: float | optax.Schedule,
    axis_name: AxisName,
    *,
    max_density: float | None = None,
    threshold: float | None = None,
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
    r"""Sends the elements that exceed a fixed threshold on any worker, and keeps the rest for later.

    As `exdyna_jax.top_k`, but with :math:`S_i = \{j : |a_{i,j}| \ge \lambda\}`, where :math:`\lambda = 1 / (2 \sqrt k)` unless it is given,
    with :math:`k = \lfloor d N \rfloor`. The density is whatever comes out, which depends on the scale of the gradient: d sets the size of
    the buffers, and what finds no slot waits in the residual.

    Args:
      density: d, the expected share of the N elements, or an optax schedule, as for `exdyna_jax.exdyna`.
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker.
      threshold: :math:`\lambda`, positive.
      capacity_factor: slots of a worker's buffer, as a multiple of k, at least 1; `math.inf` never overflows.
      max_density, num_workers, dense_axis, min_size, every_k, momentum, wire_dtype, residual_dtype, nonfinite: as for `exdyna_jax.exdyna`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its updates are equal on all workers.

    Raises:
      ValueError: for options out of range, and at trace time as `exdyna_jax.exdyna`.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.hard_threshold(density=0.5, axis_name=None, threshold=2.5)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [3. 0. 0. 0.]

    References:
      Strom, Scalable distributed DNN training using commodity GPU cloud computing (Interspeech 2015). Sahu et al., Rethinking gradient
      sparsification as total error minimization (NeurIPS 2021), https://arxiv.org/abs/2108.00951, where
      :math:`\lambda = 1 / (2 \sqrt k)` comes from.
    """
    asked = make_density(density, max_density)
    check_threshold(threshold)
    check_capacity(capacity_factor)
    below = dense_below(asked, min_size)
    options = Options(num_workers, dense_axis, below, every_k, momentum, wire_dtype, residual_dtype, nonfinite)
    return sparsify(_method(asked, threshold, capacity_factor), axis_name, options)


def _method(density: Density, threshold: float | None, capacity_factor: float) -> Method:
    def fixed(k: jax.Array) -> jax.Array:
        return 1 / (2 * jnp.sqrt(k)) if threshold is None else jnp.asarray(threshold, k.dtype)

    def init(layout: Layout, n: int) -> tuple[None, jax.Array, None]:
        del n
        return None, fixed(target(density, jnp.int32(0), layout.size)), None

    def exchange(accumulator: Accumulator, control: None, count: jax.Array, local: Local, workers: Workers) -> Exchange:
        layout, n = accumulator.layout, workers.size
        k = target(density, count, layout.size)
        sizes = tiers(density, layout.size)
        capacities = [slots(size, 1, capacity_factor, layout.span) for size in sizes]
        words = marks(accumulator, fixed(k), jnp.int32(0), jnp.int32(layout.span))

        def ship(tier: int) -> Exchange:
            mine, marked = compact(words, capacities[tier], layout.span, count)
            done = exchange_union(accumulator, mine, marked, fixed(k), count, local, workers)
            return widened(done, min(n * capacities[0], layout.span), layout.span)

        return in_tiers(sizes, k, workers, ship)._replace(threshold=fixed(k))

    return Method(init, exchange)
