"""The hot path: marks as bit words, bit words to sorted indices. No sort, no `nonzero`, no running sum over the whole array.

A word is a uint32 that holds the marks of 32 neighbouring elements, lowest bit first. To list the marked elements, marks are counted per
group of 32 words, and only these few counts get a running sum. Each output slot then walks down: the group that holds its rank, the word
in that group, the bit in that word. The walk touches `capacity` slots, not the array.
"""

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32
_FEW = 32  # ends
GROUP = 32  # words; deeper and narrower trees were no faster, and their counts take memory


def words_in(size: int) -> int:
    """Words that hold `size` marks."""
    return -(-size // WORD)


def to_words(marks: jax.Array) -> jax.Array:
    """bool [size] -> uint32 [words_in(size)], the last word filled up with zeros."""
    marks = jnp.pad(marks, (0, -marks.size % WORD)).reshape(-1, WORD)
    bits = jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)
    return jnp.sum(jnp.where(marks, bits[None], jnp.uint32(0)), axis=1, dtype=jnp.uint32)


def lowest_bits(count: jax.Array) -> jax.Array:
    """uint32: words whose lowest `count` bits are set; none below 0, all from 32 on."""
    some = (jnp.uint32(1) << jnp.clip(count, 0, WORD - 1).astype(jnp.uint32)) - jnp.uint32(1)
    return jnp.where(count >= WORD, ~jnp.uint32(0), some)


def place_in(ends: jax.Array, x: jax.Array) -> jax.Array:
    """int32 [K]: how many of the ascending ends are at most each x.

    Few ends are compared one by one. Otherwise a binary search: unrolled on accelerators, where a loop is a train of kernels; a loop on
    CPU, where the fused steps take twice as long.
    """
    if ends.size <= _FEW:
        return jnp.sum((ends[None] <= x[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    return lax.platform_dependent(ends, x, cpu=_search_in_loop, default=_search_unrolled)


# named, since JAX traces a function that it has not seen before anew
def _search_in_loop(ends: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.searchsorted(ends, x, side="right", method="scan").astype(jnp.int32)


def _search_unrolled(ends: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.searchsorted(ends, x, side="right", method="scan_unrolled").astype(jnp.int32)


def widen(slots: jax.Array, size: int, fill: int) -> jax.Array:
    """More slots, filled up. A scalar stands for all slots, and stays."""
    return slots if slots.ndim == 0 else jnp.pad(slots, (0, size - slots.size), constant_values=fill)


def count(marks: jax.Array) -> jax.Array:
    """int32 []: how many are marked. By way of words, since XLA's CPU compiler sums a bool array through one of integers as long as it."""
    return jnp.sum(lax.population_count(to_words(marks)).astype(jnp.int32), dtype=jnp.int32)


def _nth_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
    """Position of the set bit number `rank` (from 0, lowest first) of each word, by halving."""
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        below = lax.population_count(word & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        above = rank >= below
        rank = jnp.where(above, rank - below, rank)
        word = jnp.where(above, word >> jnp.uint32(half), word)
        position = position + jnp.where(above, half, 0)
    return position


def _nth_word(words: jax.Array, group: jax.Array, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index [slots] of the word in which mark number `rank` of each group falls, and the rank inside that word."""
    row = words.reshape(-1, GROUP)[group]
    index = jnp.zeros_like(rank)
    before = jnp.zeros_like(rank)
    total = jnp.zeros_like(rank)
    for i in range(GROUP - 1):
        total = total + lax.population_count(row[:, i]).astype(jnp.int32)
        beyond = rank >= total
        index = index + beyond.astype(jnp.int32)
        before = jnp.where(beyond, total, before)
    return group * GROUP + index, rank - before


def ranks(count: jax.Array, capacity: int, turn: jax.Array) -> jax.Array:
    """Which of `count` marked elements get the `capacity` slots: int32 [capacity], ascending; pads count upward from `count`.

    Where all fit, every one. Otherwise an even sample, slot s taking rank `floor((s + f) count / capacity)`, so that what waits is not
    all in one place. The phase is `f = turn * golden ratio mod 1`, whose consecutive values leave no gap of a cycle unvisited for long:
    an element that stays marked at a steady rank waits at most about `2 count / capacity` turns.
    """
    slot = jnp.arange(capacity, dtype=jnp.int32)
    phase = (turn.astype(jnp.uint32) * jnp.uint32(2654435769) >> jnp.uint32(8)).astype(jnp.float32) / 2.0**24
    whole, rest = count // capacity, count % capacity  # apart, so that nothing outgrows int32 or the precision of float32
    shift = phase * whole.astype(jnp.float32) + (slot.astype(jnp.float32) + phase) * (rest.astype(jnp.float32) / capacity)
    even = slot * whole + jnp.minimum(shift.astype(jnp.int32), whole + rest - 1)
    return jnp.where(count <= capacity, slot, even)


def compact(words: jax.Array, capacity: int, fill: int, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of the marked elements, and how many are marked.

    Args:
      words: uint32 [W], marks of elements `32 w + bit`.
      capacity: slots, static. Where more are marked, `ranks` picks which.
      fill: value of the slots beyond the count, static.
      turn: int32 [], moves the window of the elements that get a slot.

    Returns:
      int32 [capacity] ascending indices, then `fill`; and int32 [] the number of marked elements, which may exceed `capacity`.
    """
    words = jnp.pad(words, (0, -words.size % GROUP))
    counts = jnp.sum(lax.population_count(words).reshape(-1, GROUP), axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    marked = ends[-1]
    rank = ranks(marked, capacity, turn)
    group = jnp.minimum(place_in(ends, rank), ends.size - 1)
    word, rank = _nth_word(words, group, rank - (ends[group] - counts[group]))
    index = word * WORD + _nth_bit(words[word], rank)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    return jnp.where(slot < marked, index, fill), marked


def or_one(words: jax.Array, start: jax.Array, stop: jax.Array, turn: jax.Array) -> jax.Array:
    """Marks the one element `start + turn mod (stop - start)` where nothing is marked and the range is not empty."""
    empty = ~jnp.any(words != 0) & (stop > start)
    index = start + turn % jnp.maximum(stop - start, 1)
    bit = jnp.uint32(1) << (index % WORD).astype(jnp.uint32)
    return words.at[index // WORD].add(jnp.where(empty, bit, jnp.uint32(0)))
