"""Blocks, partitions, rotation and balancing: pure functions of small integers, equal on every worker.

The index space is cut once into blocks of equal size, a whole number of words each; what remains at the end belongs to the last block.
A partition is a run of neighbouring blocks. There are as many partitions as workers, and `blocks[p]` says how many blocks each has.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from exdyna_jax._compact import WORD, words_in

PAPER_BLOCKS = 1024
_DEFAULT_BLOCKS = 16384  # fine enough that a layer which holds most of the selected can still be shared out, 64 KiB of state
LARGEST_BLOCK = 65536  # so that a position inside a block fits 16 bits


class Grid(NamedTuple):
    """How the index space is cut into blocks. All static."""

    span: int  # positions, a multiple of WORD
    block_size: int  # elements, a multiple of WORD
    num_blocks: int


class Topology(NamedTuple):
    """Partitions of the next step, equal on all workers."""

    next_blocks: jax.Array  # int32 [n], blocks per partition, in partition order
    heat: jax.Array  # float32 [num_blocks], running average of the selected per block; [0] where the rule keeps none


class Balance(NamedTuple):
    """A balancing rule.

    `init(grid, n)` is the topology before the first step. `next(topology, grid, size, selected, indices, sent)` is that of the next step,
    from what the partitions selected and of this sent, both int32 [n] in partition order, and the indices sent; `size` is N.
    """

    init: Callable[[Grid, int], Topology]
    next: Callable[[Topology, Grid, int, jax.Array, jax.Array, jax.Array], Topology]


def make_grid(span: int, num_blocks: int | None) -> Grid:
    """Cuts `span` positions into blocks, whatever the number of workers, so that a state can be moved to another.

    By default into blocks of one size, only the last one shorter, about 16,384 or as many as keep a block within 65,536 elements. A given
    `num_blocks` is cut as published: sizes rounded down, what remains belongs to the last block; fewer blocks where one would be shorter
    than a word.
    """
    if num_blocks is None:
        block_size = words_in(-(-span // max(_DEFAULT_BLOCKS, -(-span // LARGEST_BLOCK)))) * WORD
        return Grid(span, max(block_size, WORD), max(-(-span // max(block_size, WORD)), 1))
    block_size = max(span // num_blocks // WORD * WORD, WORD)
    return Grid(span, block_size, max(min(num_blocks, span // block_size), 1))


def even_blocks(num_blocks: int | jax.Array, n: int) -> jax.Array:
    """int32 [n]: blocks per partition as equal as can be, the first ones with one more."""
    return num_blocks // n + (jnp.arange(n, dtype=jnp.int32) < num_blocks % n).astype(jnp.int32)


def edges(grid: Grid, blocks: jax.Array) -> jax.Array:
    """int32 [n + 1]: first position of each partition, and the end of the index space."""
    starts = jnp.cumsum(blocks, dtype=jnp.int32) - blocks
    return jnp.append(jnp.where(starts < grid.num_blocks, starts * grid.block_size, grid.span), jnp.int32(grid.span))


def partition_of(step: jax.Array, worker: jax.Array, n: int) -> jax.Array:
    """Rotation: worker r has partition `(t + r) mod n` in step t."""
    return (step % n + worker) % n


def by_partition(per_worker: jax.Array, step: jax.Array) -> jax.Array:
    """[n, ...] in worker order -> partition order of step t."""
    return jnp.roll(per_worker, step % per_worker.shape[0], axis=0)


def repartition(topology: Topology, n: int) -> Topology:
    """The topology for another number of workers."""
    heat = topology.heat
    return Topology(cut(heat, n) if heat.size else even_blocks(jnp.sum(topology.next_blocks, dtype=jnp.int32), n), heat)


def block_counts(grid: Grid, indices: jax.Array) -> jax.Array:
    """int32 [num_blocks]: how many of the indices fall in each block; padding (>= span) in none. Integers, so that order cannot matter."""
    block = jnp.where(indices < grid.span, jnp.minimum(indices // grid.block_size, grid.num_blocks - 1), grid.num_blocks)
    return jnp.zeros(grid.num_blocks, jnp.int32).at[block.reshape(-1)].add(1, mode="drop")


def block_owner(blocks: jax.Array, num_blocks: int) -> jax.Array:
    """int32 [num_blocks]: the partition to which each block belongs."""
    begun = jnp.zeros(num_blocks, jnp.int32).at[jnp.cumsum(blocks, dtype=jnp.int32)].add(1, mode="drop")
    return jnp.cumsum(begun, dtype=jnp.int32)


def _paper_init(grid: Grid, n: int) -> Topology:
    return Topology(even_blocks(grid.num_blocks, n), jnp.zeros(0, jnp.float32))


def _paper_next(topology: Topology, grid: Grid, size: int, counts: jax.Array, indices: jax.Array, sent: jax.Array) -> Topology:
    """One block moves between neighbours of which one is 5 % too heavy and the other 5 % too light, left to right."""
    del indices, sent
    blocks = topology.next_blocks
    n = blocks.size
    if n == 1:
        return topology
    real = jnp.result_type(float)
    total = jnp.sum(counts, dtype=jnp.int32)
    mean = total // n
    moved = (grid.block_size * (total.astype(real) / size)).astype(jnp.int32)

    def pair(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        blocks, counts = carry
        here, there = counts[i].astype(real) / mean.astype(real), counts[i + 1].astype(real) / mean.astype(real)
        heavy_here = (here > 1.05) & (there < 0.95238)
        heavy_there = (here < 0.95238) & (there > 1.05)
        giver = jnp.where(heavy_here, blocks[i], blocks[i + 1])
        move = (heavy_here | heavy_there) & (4 * n * (giver - 1) >= grid.num_blocks) & (mean > 0)
        sign = jnp.where(move, jnp.where(heavy_here, 1, -1), 0).astype(jnp.int32)
        return blocks.at[i].add(-sign).at[i + 1].add(sign), counts.at[i].add(-sign * moved).at[i + 1].add(sign * moved)

    blocks, _ = jax.lax.fori_loop(0, n - 1, pair, (blocks, counts))
    return topology._replace(next_blocks=blocks)


_AVERAGED = 400  # selected per worker over which counts are averaged: enough that chance moves a partition by a few percent only
_EVEN_SHARE = 0.002  # of the weight is spread evenly, so that blocks where nothing was ever selected are shared out too


def _proportional_init(grid: Grid, n: int) -> Topology:
    return Topology(even_blocks(grid.num_blocks, n), jnp.zeros(grid.num_blocks, jnp.float32))


def _proportional_next(topology: Topology, grid: Grid, size: int, counts: jax.Array, indices: jax.Array, sent: jax.Array) -> Topology:
    """Partitions of equal weight, where a block weighs what was selected in it, on a running average.

    Every worker sees all indices that were exchanged, so the counts per block cost no communication. Where a partition overflowed, its
    indices are a sample of what was selected, and each counts for several.
    """
    n = counts.size
    share = counts.astype(jnp.float32) / jnp.maximum(sent, 1).astype(jnp.float32)
    fresh = block_counts(grid, indices).astype(jnp.float32) * share[block_owner(topology.next_blocks, grid.num_blocks)]
    news = jnp.clip(jnp.sum(counts).astype(jnp.float32) / (n * _AVERAGED), 0.1, 0.5)
    heat = (1 - news) * topology.heat + news * fresh
    return Topology(cut(heat, n), heat)


def cut(heat: jax.Array, n: int) -> jax.Array:
    """int32 [n]: blocks per partition such that all have about equal heat, and at least one block each where there are enough."""
    num_blocks = heat.size
    weight = jnp.cumsum(heat + (_EVEN_SHARE / num_blocks) * jnp.sum(heat) + 1e-6)
    goals = weight[-1] * (jnp.arange(1, n, dtype=jnp.float32) / n)
    after = jnp.searchsorted(weight, goals, method="scan_unrolled").astype(jnp.int32)
    before = jnp.where(after > 0, weight[jnp.maximum(after - 1, 0)], 0.0)
    nearest = jnp.where(goals - before <= weight[after] - goals, after, after + 1)  # block edge
    least = 1 if num_blocks >= n else 0
    order = jnp.arange(1, n, dtype=jnp.int32) * least
    inner = jnp.clip(jax.lax.cummax(nearest - order) if n > 1 else nearest, 0, num_blocks - n * least) + order
    return jnp.diff(jnp.concatenate([jnp.zeros(1, jnp.int32), inner, jnp.full(1, num_blocks, jnp.int32)]))


BALANCES = {
    "paper": Balance(_paper_init, _paper_next),
    "proportional": Balance(_proportional_init, _proportional_next),
}
