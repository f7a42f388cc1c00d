"""The exchange of methods whose workers may mark the same indices: each index travels once with its values, whoever marked it."""

import jax
import jax.numpy as jnp

from exdyna_jax._accumulator import Accumulator
from exdyna_jax._collectives import Workers
from exdyna_jax._compact import compact, to_words
from exdyna_jax._exchange import Local, gather, gather_bytes, reduce, reduce_bytes
from exdyna_jax._slots import take
from exdyna_jax._sparsify import Exchange

_MOST = 2**31 - 1


def unite(indices: jax.Array, slots: int, span: int, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The distinct ones among indices, ascending, then `span`; and how many they are, which may exceed the slots.

    `[7 2 9 2 9]` becomes `[2 7 9 9]` and 3, with four slots and a span of 9.
    """
    marked = jnp.zeros(span, bool).at[indices].set(True, mode="drop")
    return compact(to_words(marked), slots, span, turn)


def exchange_union(
    accumulator: Accumulator,
    indices: jax.Array,
    marked: jax.Array,
    threshold: jax.Array | None,
    count: jax.Array,
    local: Local,
    workers: Workers,
    everyones: jax.Array | None = None,
) -> Exchange:
    """Gathers the indices of all workers, and sums what all of them hold there. Control stays to be filled in.

    Args:
      accumulator: of this worker.
      indices: int32 [capacity], what this worker marked, then padding.
      marked: int32 [], how many it marked; beyond `capacity` they overflowed.
      threshold: float [], with which it marked, or None.
      count: int32 [], the step, which moves what waits if there are too few slots.
      local: what this worker knows of its own gradient.
      workers: that take part.
      everyones: more indices, that all workers know already; replicated.
    """
    layout, n, capacity = accumulator.layout, workers.size, indices.size
    message = gather(indices, marked, jnp.float32(0) if threshold is None else threshold, local, layout.span, workers)
    everything = message.indices.reshape(-1)
    if everyones is not None:
        everything = jnp.concatenate([everything, everyones])
    slots = min(n * capacity, layout.span)
    together, found = unite(everything, slots, layout.span, count)
    sent = jnp.minimum(found, slots)
    waiting = jnp.minimum(jnp.maximum(message.counts - capacity, 0), _MOST // (n + 1))  # the sum must not wrap
    sums = reduce(take(accumulator, together), (), accumulator, local, workers)
    return Exchange(
        indices=together,
        mean=sums.values / n,
        unsent=sums.unsent,
        dense=sums.dense,
        finite=sums.finite,
        control=None,
        selected=message.counts,
        sent=sent,
        overflow=jnp.minimum(jnp.sum(waiting, dtype=jnp.int32) + found - sent, layout.size - sent),  # those that wait may be the same
        threshold=None if threshold is None else jnp.min(message.thresholds).astype(threshold.dtype),
        blocks=None,
        identical=message.identical,
        bytes_sent=jnp.float32(gather_bytes(capacity, layout.span, n) + reduce_bytes(slots, 0, layout, n)),
    )
