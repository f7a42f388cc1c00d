"""The form in which indices and reduced-precision values travel: packed in uint32 words, so that no compiler widens them on the way.

An ascending list of indices is split as by Elias and Fano: the low 16 bits of each as they are, and the high bits in unary, one bit a slot
and one for each 65,536 positions of the index space. That is 17 bits a slot, whatever the number of workers and the size of the model.
"""

import jax
import jax.numpy as jnp
from jax import lax

from exdyna_jax._compact import WORD, words_in

_LOW = 16


def index_words(capacity: int, span: int) -> int:
    """uint32 words that `capacity` indices in [0, span] take."""
    return _half_words(capacity) + _unary_words(capacity, span)


def pack_indices(indices: jax.Array, span: int) -> jax.Array:
    """Ascending int32 [capacity] in [0, span] -> uint32 [index_words]."""
    slot = jnp.arange(indices.size, dtype=jnp.int32)
    bit = (indices >> _LOW) + slot  # ascending without ties, since slots are
    unary = jnp.zeros(_unary_words(indices.size, span), jnp.uint32)
    unary = unary.at[bit // WORD].add(jnp.uint32(1) << (bit % WORD).astype(jnp.uint32))
    return jnp.concatenate([pack_halves(indices.astype(jnp.uint16)), unary])


def unpack_indices(words: jax.Array, capacity: int) -> jax.Array:
    """The inverse: uint32 [index_words] -> int32 [capacity]."""
    halves = _half_words(capacity)
    low = unpack_halves(words[:halves], capacity).astype(jnp.int32)
    unary = (words[halves:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None] & 1).astype(jnp.int32).reshape(-1)
    slot = jnp.cumsum(unary, dtype=jnp.int32) - 1
    zeros = jnp.arange(slot.size, dtype=jnp.int32) - slot  # how many bits that are not set precede a slot's
    high = jnp.zeros(capacity, jnp.int32).at[jnp.where(unary == 1, slot, capacity)].set(zeros, mode="drop")
    return high << _LOW | low


def pack_halves(halves: jax.Array) -> jax.Array:
    """[size] of any 16-bit dtype -> uint32 [ceil(size / 2)]."""
    pairs = jnp.pad(halves, (0, halves.size % 2)).reshape(-1, 2)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(pairs, jnp.uint16), jnp.uint32)


def unpack_halves(words: jax.Array, size: int, dtype: jax.typing.DTypeLike = jnp.uint16) -> jax.Array:
    """The inverse: uint32 [ceil(size / 2)] -> [size] of a 16-bit dtype."""
    return lax.bitcast_convert_type(words, dtype).reshape(-1)[:size]


def _half_words(size: int) -> int:
    return -(-size // 2)


def _unary_words(capacity: int, span: int) -> int:
    return words_in(capacity + (span >> _LOW) + 1)
