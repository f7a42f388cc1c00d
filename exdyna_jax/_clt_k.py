"""CLT-k of ScaleCom: in each step another worker leads, and its k largest elements are sent by all."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from exdyna_jax._accumulator import Accumulator
from exdyna_jax._checks import check_beta
from exdyna_jax._collectives import AxisName, Workers, alike
from exdyna_jax._density import Density, dense_below, in_tiers, make_density, target, tiers
from exdyna_jax._exchange import Local, announce, announce_bytes, reduce, reduce_bytes
from exdyna_jax._largest import largest
from exdyna_jax._slots import take
from exdyna_jax._sparsify import Exchange, Method, Options, sparsify, widened, without_control


def clt_k(
    density: float | optax.Schedule,
    axis_name: AxisName,
    *,
    beta: float = 1.0,
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
    r"""Sends the k largest elements of one worker, the leader, and keeps the rest for later.

    In step :math:`t` the leader is worker :math:`t \bmod n`, and :math:`S` are the :math:`k = \lfloor d N \rfloor` largest of its
    :math:`|a_i|`. All workers send their own values there, :math:`u_j = \tfrac1n \sum_i a_{i,j}` for :math:`j \in S`: no index stands
    twice, and traffic does not grow with n. Workers must see similar gradients, or what only one of them holds waits for its turn.

    The residual is a low-pass memory, :math:`e_i \leftarrow (1 - \beta) e_i + \beta (a_i - \mathrm{sent}_i)` with :math:`a_i = g_i + e_i`.
    At :math:`\beta = 1` it is plain error feedback, and nothing is lost. Below, only the share :math:`\beta` of a gradient that is not sent
    is remembered, the rest is forgotten; and of a residual that is sent the share :math:`1 - \beta` stays, and is sent once more later.

    Args:
      density: d, the share of the N elements to send in a step, or an optax schedule, as for `exdyna_jax.exdyna`.
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker.
      beta: :math:`\beta` in (0, 1]; below 1 only with `every_k=1`.
      max_density, num_workers, dense_axis, min_size, every_k, momentum, wire_dtype, residual_dtype, nonfinite: as for `exdyna_jax.exdyna`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its updates are equal on all workers.

    Raises:
      ValueError: for options out of range, and at trace time as `exdyna_jax.exdyna`.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.clt_k(density=0.5, axis_name=None, beta=0.5)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [3. 0. 0. 2.]
      >>> print(state.residual)
      [[ 0.   -0.5   0.25  0.  ]]

    References:
      Chen et al., ScaleCom (NeurIPS 2020), https://arxiv.org/abs/2104.11125, its cyclic local top-k and equation for the memory.
    """
    asked = make_density(density, max_density)
    check_beta(beta, every_k)
    below = dense_below(asked, min_size)
    options = Options(num_workers, dense_axis, below, every_k, momentum, wire_dtype, residual_dtype, nonfinite)
    return sparsify(_method(asked, beta), axis_name, options)


def _method(density: Density, beta: float) -> Method:
    def exchange(accumulator: Accumulator, control: None, count: jax.Array, local: Local, workers: Workers) -> Exchange:
        layout, n = accumulator.layout, workers.size
        k = target(density, count, layout.size)
        sizes = tiers(density, layout.size)
        leader = count % n
        nobody = alike(jnp.full(sizes[0], layout.span, jnp.int32), workers.rank, accumulator.leaves[0][1])
        mine, marked = lax.cond(
            workers.rank == leader, lambda: largest(accumulator, k, sizes[0]), lambda: (nobody, jnp.zeros_like(nobody[0]))
        )

        def ship(tier: int) -> Exchange:
            indices, counts, identical = announce(mine[: sizes[tier]], marked, leader, local, workers)
            sums = reduce(take(accumulator, indices), (), accumulator, local, workers)
            remembered = take(accumulator, indices, lambda momentum, g, e, *u: e)
            done = Exchange(
                indices=indices,
                mean=sums.values / n,
                unsent=(1 - beta) * remembered + sums.unsent,
                dense=sums.dense,
                finite=sums.finite,
                control=None,
                selected=counts,
                sent=counts[leader],
                overflow=jnp.int32(0),
                threshold=None,
                blocks=None,
                identical=identical,
                bytes_sent=jnp.float32(announce_bytes(sizes[tier], n) + reduce_bytes(sizes[tier], 0, layout, n)),
            )
            return widened(done, sizes[0], layout.span)

        return in_tiers(sizes, k, workers, ship)

    return Method(without_control, exchange, keep=beta)
