"""The plain mean of the gradients, as a rival and as a stand-in under the same interface."""

import math
from typing import Any

import jax
import optax

from exdyna_jax._accumulator import Accumulator
from exdyna_jax._collectives import AxisName, Workers
from exdyna_jax._exchange import Local
from exdyna_jax._sparsify import Exchange, Method, Options, sparsify, without_control


def dense(
    axis_name: AxisName,
    *,
    num_workers: int | None = None,
    dense_axis: AxisName = None,
    every_k: int = 1,
    momentum: float | None = None,
    residual_dtype: Any = None,
    nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the gradients over the workers, :math:`u = \frac1n \sum_i a_i`, all of them in every step.

    The residual holds what a low-precision update rounds away, and, with `every_k`, what is accumulated between two exchanges.

    Args:
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker.
      num_workers: n, needed where `init` runs outside the axis.
      dense_axis, every_k, momentum, residual_dtype, nonfinite: as for `exdyna_jax.exdyna`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its updates are equal on all workers.

    Raises:
      ValueError: for options out of range, and at trace time as `exdyna_jax.exdyna`.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.dense(axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [ 3.  -1.   0.5  2. ]
    """
    options = Options(num_workers, dense_axis, math.inf, every_k, momentum, None, residual_dtype, nonfinite)
    return sparsify(Method(without_control, _exchange), axis_name, options)


def _exchange(accumulator: Accumulator, control: None, count: jax.Array, local: Local, workers: Workers) -> Exchange:
    raise AssertionError("every leaf is dense: the spine averages them")
