"""MiCRO: exclusive partitions of equal size, rotated, and a threshold that is corrected online. ExDyna without the balancing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from exdyna_jax._checks import check_capacity, check_choice
from exdyna_jax._collectives import AxisName
from exdyna_jax._density import dense_below, make_density
from exdyna_jax._exclusive import Partitions, exclusive
from exdyna_jax._layout import Layout, positions
from exdyna_jax._sparsify import Options, sparsify
from exdyna_jax._threshold import RULES


def micro(
    density: float | optax.Schedule,
    axis_name: AxisName,
    *,
    max_density: float | None = None,
    threshold_rule: str = "proportional",
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
    r"""Sends the largest part of the gradient, shared out over the workers in equal parts, and keeps the rest for later.

    As `exdyna_jax.exdyna`, but partition p is for ever the elements from :math:`\lfloor p N / n \rfloor` or so on: each has
    :math:`\lfloor N / n \rfloor` elements, the first :math:`N \bmod n` one more. In step :math:`t` worker :math:`i` selects
    :math:`\{j \in p : |a_{i,j}| \ge \delta_t\}` with :math:`p = (t + i) \bmod n`. Where large elements crowd, one worker selects more than
    the others, as `imbalance` shows, and overflows more easily: what balancing buys is the difference to ExDyna.

    Args:
      density: d, the share of the N elements to send in a step, or an optax schedule, as for `exdyna_jax.exdyna`.
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker.
      threshold_rule: "proportional", or "paper" as published.
      capacity_factor: slots of a worker's buffer, as a multiple of :math:`k / n`; `math.inf` never overflows.
      max_density, num_workers, dense_axis, min_size, every_k, momentum, wire_dtype, residual_dtype, nonfinite: as for `exdyna_jax.exdyna`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its updates are equal on all workers.

    Raises:
      ValueError: for options out of range, and at trace time as `exdyna_jax.exdyna`.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.micro(density=0.5, axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [3. 0. 0. 2.]

    References:
      Yoon and Oh, MiCRO (HiPC 2023), https://arxiv.org/abs/2310.00967.
    """
    asked = make_density(density, max_density)
    check_choice("threshold_rule", threshold_rule, RULES)
    check_capacity(capacity_factor)
    below = dense_below(asked, min_size)
    options = Options(num_workers, dense_axis, below, every_k, momentum, wire_dtype, residual_dtype, nonfinite)
    return sparsify(exclusive(asked, RULES[threshold_rule], EQUAL, capacity_factor), axis_name, options)


def _cut(topology: None, layout: Layout, n: int) -> jax.Array:
    p = np.arange(n)
    first = layout.size // n * p + np.minimum(p, layout.size % n)
    return jnp.asarray(np.append(positions(layout, first), layout.span), jnp.int32)


EQUAL = Partitions(init=lambda *_: None, edges=_cut, blocks=lambda _: None, next=lambda *_: None)
