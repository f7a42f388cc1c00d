"""The k largest magnitudes, exactly: what the methods do that take a number of elements rather than a threshold."""

import jax
import jax.numpy as jnp
from jax import lax

from exdyna_jax._accumulator import Accumulator, add
from exdyna_jax._compact import WORD


def largest(accumulator: Accumulator, k: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Positions of the k largest `|a|` of the whole tree, of equal ones the first; never of a zero.

    Args:
      accumulator: of this worker.
      k: how many, at most `most`.
      most: slots, static.

    Returns:
      int32 [most] ascending positions, then `span`; and int32 [] how many they are.

    The leaves are joined and sorted: the price of an exact top-k, which a threshold avoids.
    """
    layout = accumulator.layout
    magnitudes = jnp.concatenate(
        [
            jnp.pad(jnp.abs(add(accumulator.momentum, *terms)).astype(layout.dtype), (0, -leaf.size % WORD))
            for leaf, terms in zip(layout.leaves, accumulator.leaves, strict=True)
        ]
    )
    top, index = lax.top_k(magnitudes, most)
    chosen = first_of(top, k)
    return jnp.sort(jnp.where(chosen, index.astype(jnp.int32), layout.span)), jnp.sum(chosen, dtype=jnp.int32)


def first_of(descending: jax.Array, k: jax.Array) -> jax.Array:
    """bool: which of the magnitudes, in descending order along the last axis, are among the first k and not zero."""
    rank = lax.broadcasted_iota(jnp.int32, descending.shape, descending.ndim - 1)
    return (rank < k.astype(jnp.int32)) & (descending != 0)
