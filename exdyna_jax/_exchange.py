"""What travels: one all-gather of sorted, padded indices with their counts, then one all-reduce of the values at all gathered indices.

Both buffers have a fixed size. Padding carries the index `span`, which lies outside the index space and is dropped wherever it is used.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from exdyna_jax._collectives import Workers, all_gather, psum
from exdyna_jax._layout import Accumulator, Layout, add

_NOTES = 3  # words behind the indices: count, threshold, checksum


class Message(NamedTuple):
    """What all workers selected, replicated."""

    indices: jax.Array  # int32 [n, capacity], each row ascending, then padding
    counts: jax.Array  # int32 [n], marked by each worker; beyond `capacity` it overflowed
    thresholds: jax.Array  # float32 [n], with which each selected
    identical: jax.Array  # bool [], all workers hold the same gradient: it was summed before it came here


class Local(NamedTuple):
    """What a worker knows of its own gradient before anything is exchanged."""

    checksum: jax.Array  # float []
    finite: jax.Array  # bool []


class Sums(NamedTuple):
    """Sums over the workers, replicated."""

    values: jax.Array  # of the values handed in
    scalars: tuple[jax.Array, ...]
    dense: tuple[jax.Array, ...]  # of each dense leaf's accumulator
    finite: jax.Array  # bool [], no worker saw a NaN or an infinity


def gather(indices: jax.Array, count: jax.Array, threshold: jax.Array, local: Local, workers: Workers) -> Message:
    """All-gathers int32 [capacity] indices, the count, the threshold and the checksum in one buffer of `capacity + 3` words a worker."""
    notes = jnp.stack([count, _bits(threshold), _bits(local.checksum)])
    rows = all_gather(jnp.concatenate([indices, notes]), workers)
    thresholds = lax.bitcast_convert_type(rows[:, -2], jnp.float32)
    return Message(rows[:, :-_NOTES], rows[:, -_NOTES], thresholds, _identical(rows[:, -1]))


class Announcement(NamedTuple):
    """What one worker told all others, replicated."""

    indices: jax.Array  # int32 [capacity], the leader's
    counts: jax.Array  # int32 [n], marked by each worker
    identical: jax.Array  # bool [], as in a message


def announce(indices: jax.Array, count: jax.Array, leader: jax.Array, local: Local, workers: Workers) -> Announcement:
    """Broadcasts the leader's int32 [capacity] indices, and all-gathers counts and checksums, in one all-reduce of integers."""
    n = workers.size
    notes = jnp.stack([count, _bits(local.checksum)])
    table = jnp.where(jnp.arange(n, dtype=jnp.int32)[:, None] == workers.rank, notes[None], 0)  # every worker fills in its own row
    led = jnp.where(workers.rank == leader, indices, 0)
    total = psum(jnp.concatenate([led, table.reshape(-1)]), workers)
    counts, checksums = total[indices.size :].reshape(n, 2).T
    return Announcement(total[: indices.size], counts, _identical(checksums))


def announce_bytes(capacity: int, n: int) -> float:
    """Bytes one worker sends for `announce` by a ring."""
    return broadcast_bytes(capacity + 2 * n, n)


def broadcast_bytes(words: int, n: int) -> float:
    """Bytes one worker sends for a broadcast, which is an all-reduce, by a ring."""
    return 2 * (n - 1) / n * words * 4


def join(rows: jax.Array, filled: jax.Array, fill: int) -> tuple[jax.Array, jax.Array]:
    """Rows of which the first `filled` slots count, one behind the other without the padding between them.

    int32 [n, capacity] and [n] -> int32 [n * capacity], then `fill`; and the row each slot came from, n for padding. Rows that are
    ascending, and begin beyond the end of the row before, so become one ascending list.
    """
    n, capacity = rows.shape
    ends = jnp.cumsum(filled, dtype=jnp.int32)
    slot = jnp.arange(n * capacity, dtype=jnp.int32)
    row = jnp.searchsorted(ends, slot, side="right").astype(jnp.int32)
    column = slot - (ends - filled).at[row].get(mode="clip")
    return rows.at[row, column].get(mode="fill", fill_value=fill), row


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _identical(checksums: jax.Array) -> jax.Array:
    """Whether all workers' checksums agree; a sum of 0 proves nothing, since gradients may be all zero."""
    return jnp.all(checksums == checksums[0]) & (checksums[0] != 0) & (checksums.size > 1)


def reduce(values: jax.Array, scalars: tuple[jax.Array, ...], accumulator: Accumulator, local: Local, workers: Workers) -> Sums:
    """Sums values, scalars and dense leaves over the workers in one all-reduce.

    Whether all is finite rides along although it could be known earlier: the residual may then be overwritten in place only after the
    values were read from it, which the compiler can see, and so makes no copy.
    """
    extra = jnp.stack([x.astype(values.dtype) for x in (*scalars, local.finite)])
    dense = tuple(add(accumulator.momentum, *terms) for terms in accumulator.dense)
    total, dense = psum((jnp.concatenate([values.reshape(-1), extra]), dense), workers)
    extra = total[values.size :]
    return Sums(total[: values.size].reshape(values.shape), tuple(extra[:-1]), dense, extra[-1] == workers.size)


def gather_bytes(capacity: int, n: int) -> float:
    """Bytes one worker sends for `gather` by a ring: its own buffer, then the n - 2 that it passes on."""
    return (n - 1) * (capacity + _NOTES) * 4


def reduce_bytes(values: int, scalars: int, layout: Layout, n: int) -> float:
    """Bytes one worker sends for `reduce` by a ring: 2 (n - 1) / n of the buffer."""
    buffer: Any = (values + scalars + 1) * jnp.dtype(layout.dtype).itemsize
    return 2 * (n - 1) / n * (buffer + sum(leaf.size * jnp.dtype(leaf.residual_dtype).itemsize for leaf in layout.dense))


def dense_bytes(layout: Layout, n: int) -> float:
    """Bytes one worker would send for an all-reduce of the whole gradient by a ring."""
    size = math.fsum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in layout.leaves + layout.dense)
    return 2 * (n - 1) / n * size
