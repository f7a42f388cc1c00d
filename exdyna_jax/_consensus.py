"""Parameters that differ between workers, as a user handles them: `[n, *shape]`, a row for each."""

from typing import Any

import jax
import jax.numpy as jnp

from exdyna_jax._checks import check_rows_alike, check_workers
from exdyna_jax._layout import takes_part, widest


def replicate_params(params: Any, num_workers: int) -> Any:
    """The same parameters for every worker, leaves `[n, *shape]`: where gossip starts.

    Args:
      params: a pytree of arrays, `[*shape]`.
      num_workers: n.

    Returns:
      A tree of the same structure, to be laid out with `PartitionSpec(axis_name)`; under `jax.jit(.., out_shardings=)` no device ever holds
      all rows. `init` of a chain that ends in gossip takes it.

    Raises:
      ValueError: for a number of workers that is not a positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> exdyna_jax.replicate_params({"w": jnp.ones(3)}, 4)["w"].shape
      (4, 3)
    """
    check_workers(num_workers)
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x)[None], (num_workers, *jnp.shape(x))), params)


def average_params(params: Any, weight: jax.Array | None = None) -> Any:
    r"""One model of those of all workers, :math:`\bar\theta = \sum_i w_i \theta_i / \sum_i w_i`: to evaluate, to export, to start from.

    Args:
      params: a pytree of arrays `[n, *shape]`, outside of `shard_map`, and sharded or not.
      weight: w, `[n]`, push-sum weights of `exdyna_jax.sgp` with unequal shares: `weight` of its state. None is 1 each.

    Returns:
      The same tree with leaves `[*shape]`, averaged in at least float32 and rounded to their dtype; of leaves that are not real floating
      point the first worker's.

    Raises:
      ValueError: for leaves without rows, or with different numbers of them, and for a number of weights that is another one.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> print(exdyna_jax.average_params(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      [2. 4.]
    """

    check_rows_alike(params, weight)

    def average(x: jax.Array) -> jax.Array:
        return _mean(x, weight).astype(x.dtype) if takes_part(x) else x[0]

    return jax.tree.map(average, params)


def consensus_distance(params: Any) -> jax.Array:
    r"""How far workers are from their mean, :math:`\Xi = \sqrt{\tfrac1n \sum_i \|\theta_i - \bar\theta\|^2}`, exactly.

    It reads all parameters of all workers; `exdyna_jax.metrics` has an estimate that costs nothing.

    Args:
      params: a pytree of arrays `[n, *shape]`, outside of `shard_map`, and sharded or not.

    Returns:
      float32 [].

    Raises:
      ValueError: for leaves without rows, or with different numbers of them.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> print(exdyna_jax.consensus_distance(jnp.array([[1.0, 2.0], [3.0, 2.0]])))
      1.0
    """
    check_rows_alike(params, None)
    leaves = [x for x in jax.tree.leaves(params) if takes_part(x)]
    squares = [jnp.sum((x.astype(_wide(x)) - _mean(x, None)[None]) ** 2, dtype=jnp.float32) / x.shape[0] for x in leaves]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _mean(x: jax.Array, weight: jax.Array | None) -> jax.Array:
    wide = x.astype(_wide(x))
    if weight is None:
        return jnp.mean(wide, axis=0)
    weight = jnp.asarray(weight).reshape(-1)
    share = (weight / jnp.sum(weight)).astype(wide.dtype)
    return jnp.tensordot(share, wide, axes=1, precision=jax.lax.Precision.HIGHEST)


def _wide(x: jax.Array) -> Any:
    return widest(x.dtype, jnp.float32)
