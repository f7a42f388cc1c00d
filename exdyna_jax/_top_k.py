"""Top-k: every worker sends its own k largest elements. The common baseline."""

from typing import Any

import jax
import optax

from exdyna_jax._accumulator import Accumulator
from exdyna_jax._collectives import AxisName, Workers
from exdyna_jax._density import Density, dense_below, in_tiers, make_density, target, tiers
from exdyna_jax._exchange import Local
from exdyna_jax._largest import largest
from exdyna_jax._sparsify import Exchange, Method, Options, sparsify, widened, without_control
from exdyna_jax._union import exchange_union


def top_k(
    density: float | optax.Schedule,
    axis_name: AxisName,
    *,
    max_density: float | None = None,
    num_workers: int | None = None,
    dense_axis: AxisName = None,
    min_size: int = 0,
    every_k: int = 1,
    momentum: float | None = None,
    wire_dtype: Any = None,
    residual_dtype: Any = None,
    nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the elements that are among the k largest of any worker, and keeps the rest for later.

    With the accumulator :math:`a_i = g_i + e_i` of worker :math:`i` and :math:`k = \lfloor d N \rfloor`, :math:`S_i` are the k largest of
    :math:`|a_i|`, of equal ones the first, and :math:`S = \bigcup_i S_i`:

    .. math::
        u_j = \tfrac1n \sum_i a_{i,j}, \quad e_{i,j} \leftarrow 0 \quad (j \in S); \qquad
        u_j = 0, \quad e_{i,j} \leftarrow a_{i,j} \quad (j \notin S).

    The union grows with the number of workers, up to :math:`n k`: the build-up. `density` in the metrics is that of the union, in which
    each index counts once; `selected_per_worker` holds each worker's own k. Each worker sorts the whole gradient.

    Args:
      density: d, the share of the N elements that each worker selects, or an optax schedule, as for `exdyna_jax.exdyna`.
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker.
      max_density, num_workers, dense_axis, min_size, every_k, momentum, wire_dtype, residual_dtype, nonfinite: as for `exdyna_jax.exdyna`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its updates are equal on all workers.

    Raises:
      ValueError: for options out of range, and at trace time as `exdyna_jax.exdyna`.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.top_k(density=0.5, axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [3. 0. 0. 2.]

    References:
      Stich, Cordonnier and Jaggi, Sparsified SGD with memory (NeurIPS 2018), https://arxiv.org/abs/1809.07599. Its build-up with the
      number of workers: https://arxiv.org/abs/2209.08497.
    """
    asked = make_density(density, max_density)
    below = dense_below(asked, min_size)
    options = Options(num_workers, dense_axis, below, every_k, momentum, wire_dtype, residual_dtype, nonfinite)
    return sparsify(_method(asked), axis_name, options)


def _method(density: Density) -> Method:
    def exchange(accumulator: Accumulator, control: None, count: jax.Array, local: Local, workers: Workers) -> Exchange:
        layout, n = accumulator.layout, workers.size
        k = target(density, count, layout.size)
        sizes = tiers(density, layout.size)
        mine, marked = largest(accumulator, k, sizes[0])

        def ship(tier: int) -> Exchange:
            done = exchange_union(accumulator, mine[: sizes[tier]], marked, None, count, local, workers)
            return widened(done, min(n * sizes[0], layout.span), layout.span)

        return in_tiers(sizes, k, workers, ship)

    return Method(without_control, exchange)
