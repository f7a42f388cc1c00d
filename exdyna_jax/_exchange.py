"""What travels: one all-gather of sorted, padded indices with their counts, then one all-reduce of the values at all gathered indices.

Both buffers have a fixed size. Padding carries the index `span`, which lies outside the index space and is dropped wherever it is used.
Values of reduced precision are summed in full precision by the worker that owns their slots, and what rounding takes away is handed back.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from exdyna_jax._accumulator import Accumulator, add
from exdyna_jax._collectives import Workers, all_gather, all_to_all, psum
from exdyna_jax._compact import place_in
from exdyna_jax._layout import Layout, fitted
from exdyna_jax._wire import index_words, pack_halves, pack_indices, unpack_halves, unpack_indices

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
    unsent: jax.Array  # [K], what rounding kept back of this worker's values, or a scalar 0 without rounding; per worker
    scalars: tuple[jax.Array, ...]
    dense: tuple[jax.Array, ...]  # of each dense leaf's accumulator
    finite: jax.Array  # bool [], no worker saw a NaN or an infinity


def gather(indices: jax.Array, count: jax.Array, threshold: jax.Array, local: Local, span: int, workers: Workers) -> Message:
    """All-gathers int32 [capacity] indices, the count, the threshold and the checksum in one buffer of uint32 words."""
    notes = jnp.stack([lax.bitcast_convert_type(count, jnp.uint32), _bits(threshold), _bits(local.checksum)])
    rows = all_gather(jnp.concatenate([pack_indices(indices, span), notes]), workers)
    thresholds = lax.bitcast_convert_type(rows[:, -2], jnp.float32)
    counts = lax.bitcast_convert_type(rows[:, -_NOTES], jnp.int32)
    unpacked = jax.vmap(lambda row: unpack_indices(row, indices.size))(rows[:, :-_NOTES])
    return Message(unpacked, counts, thresholds, _identical(rows[:, -1]))


def compare(local: Local, workers: Workers) -> jax.Array:
    """bool []: whether all workers hold the same gradient, where there is no message that could say so."""
    return _identical(all_gather(_bits(local.checksum), workers))


class Announcement(NamedTuple):
    """What one worker told all others, replicated."""

    indices: jax.Array  # int32 [capacity], the leader's
    counts: jax.Array  # int32 [n], marked by each worker
    identical: jax.Array  # bool [], as in a message


def announce(indices: jax.Array, count: jax.Array, leader: jax.Array, local: Local, workers: Workers) -> Announcement:
    """Broadcasts the leader's int32 [capacity] indices, and all-gathers counts and checksums, in one all-reduce of integers."""
    n = workers.size
    notes = jnp.stack([count, lax.bitcast_convert_type(_bits(local.checksum), jnp.int32)])
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
    row = place_in(ends, slot)
    column = slot - (ends - filled).at[row].get(mode="clip")
    return rows.at[row, column].get(mode="fill", fill_value=fill), row


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


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
    if accumulator.layout.wire is None:
        total, dense = psum((jnp.concatenate([values, extra]), dense), workers)
        total, extra = total[: values.size], total[values.size :]
        unsent = jnp.zeros((), values.dtype)
    else:
        total, extra, unsent = _reduce_rounded(values, extra, accumulator.layout.wire, workers)
        dense = psum(dense, workers)
    return Sums(total, unsent, tuple(extra[:-1]), dense, extra[-1] == workers.size)


def _reduce_rounded(values: jax.Array, extra: jax.Array, wire: Any, workers: Workers) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sums of values and of what is extra, and what rounding kept back. Each worker owns, and sums, an equal share of the slots."""
    n, share = workers.size, -(-values.size // workers.size)
    mine = jnp.pad(values, (0, n * share - values.size)).reshape(n, share)
    rounded = fitted(mine, wire)
    shares = all_to_all(jax.vmap(pack_halves)(rounded), workers)
    total = jnp.sum(jax.vmap(lambda row: unpack_halves(row, share, wire))(shares).astype(values.dtype), axis=0)
    result = fitted(total, wire)
    rows = all_gather(jnp.concatenate([pack_halves(result), _bits(extra)]), workers)
    results = jax.vmap(lambda row: unpack_halves(row, share, wire))(rows[:, : -extra.size])
    extras = lax.bitcast_convert_type(rows[:, -extra.size :], jnp.float32).astype(values.dtype)
    rest = (mine - rounded.astype(values.dtype)).at[workers.rank].add(total - result.astype(values.dtype))
    return results.reshape(-1)[: values.size].astype(values.dtype), jnp.sum(extras, axis=0), rest.reshape(-1)[: values.size]


def gather_bytes(capacity: int, span: int, n: int) -> float:
    """Bytes one worker sends for `gather` by a ring: its own buffer, then the n - 2 that it passes on."""
    return (n - 1) * (index_words(capacity, span) + _NOTES) * 4


def compare_bytes(n: int) -> float:
    """Bytes one worker sends for `compare` by a ring."""
    return (n - 1) * 4


def reduce_bytes(values: int, scalars: int, layout: Layout, n: int) -> float:
    """Bytes one worker sends for `reduce`: 2 (n - 1) / n of the buffer by a ring; rounded, a share to each other, and then the sums."""
    if layout.wire is None:
        buffer: Any = 2 / n * (values + scalars + 1) * jnp.dtype(layout.dtype).itemsize
    else:
        buffer = 2 * share_bytes(values, n) + (scalars + 1) * 4
    return (n - 1) * (buffer + 2 / n * sum(leaf.size * jnp.dtype(leaf.residual_dtype).itemsize for leaf in layout.dense))


def share_bytes(values: int, n: int) -> int:
    """Bytes of the rounded values that one worker owns, two to a word."""
    return -(-values // n // 2) * 4


def dense_bytes(layout: Layout, n: int) -> float:
    """Bytes one worker would send for an all-reduce of the whole gradient by a ring."""
    size = math.fsum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in layout.leaves + layout.dense)
    return 2 * (n - 1) / n * size
