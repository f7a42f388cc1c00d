"""The accumulator `a = g + e`, which is never written down: what is read of it before anything is exchanged."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exdyna_jax._compact import WORD, lowest_bits, to_words, words_in
from exdyna_jax._layout import Layout, Leaf, Piece, widest

# of the largest number that a residual holds: what is beyond counts as infinite, so that neither 2^20 steps nor as many workers add up to
# an infinity, which would stay in the residual for good
_MODERATE = 2.0**-40


class Accumulator(NamedTuple):
    """`a = g + e` of this worker, or `m u + g + e` with momentum correction, not yet added: its terms, flat."""

    layout: Layout
    momentum: float | None  # m, static
    leaves: tuple[tuple[jax.Array, ...], ...]  # (g, e) or (g, e, u) of each sparse leaf
    pieces: tuple[tuple[jax.Array, ...], ...]  # the same of each piece
    dense: tuple[tuple[jax.Array, ...], ...]  # the same of each dense leaf


def accumulator_of(
    layout: Layout, momentum: float | None, leaves: tuple[tuple[jax.Array, ...], ...], dense: tuple[tuple[jax.Array, ...], ...]
) -> Accumulator:
    """The accumulator whose terms are given leaf by leaf, flat."""
    terms = dict(zip(layout.leaves, leaves, strict=True))

    def joined(piece: Piece) -> tuple[jax.Array, ...]:
        if len(piece.leaves) == 1:
            return terms[piece.leaf]
        filled = ([jnp.pad(x, (0, -leaf.size % WORD)) for x in terms[leaf]] for leaf in piece.leaves)
        return tuple(jnp.concatenate(column) for column in zip(*filled, strict=True))

    return Accumulator(layout, momentum, leaves, tuple(map(joined, layout.pieces)), dense)


def add(momentum: float | None, g: jax.Array, e: jax.Array, u: jax.Array | None = None) -> jax.Array:
    """The accumulator from its terms, in the residual's dtype."""
    return step(momentum, g, e, u) + e


def step(momentum: float | None, g: jax.Array, e: jax.Array, u: jax.Array | None = None) -> jax.Array:
    """What this step adds to the residual: `g`, or `m u + g` with momentum correction."""
    g = g.astype(e.dtype)
    return g if u is None or momentum is None else jnp.asarray(momentum, u.dtype) * u + g


def marks(accumulator: Accumulator, threshold: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """uint32 [span / 32]: bit words of `|a| >= threshold` at the positions in [start, stop).

    On CPU a loop reads the elements of the range and no others, chunk by chunk; elsewhere, where a loop is a train of kernel launches,
    all are read at once.
    """
    layout = accumulator.layout
    pieces = list(zip(layout.pieces, accumulator.pieces, strict=True))

    def words_of(terms: tuple[jax.Array, ...]) -> jax.Array:
        a = add(accumulator.momentum, *terms)
        return to_words(jnp.abs(a) >= threshold.astype(a.dtype))

    def inside(words: jax.Array, position: jax.Array) -> jax.Array:
        """Words of which each begins at a position, without what lies outside the range."""
        return words & lowest_bits(stop - position) & ~lowest_bits(start - position)

    def write(words: jax.Array, new: jax.Array, position: jax.Array | int) -> jax.Array:
        """Neighbouring words, from the one at a position on."""
        new = inside(new, position + jnp.arange(new.size, dtype=jnp.int32) * WORD)
        return lax.dynamic_update_slice(words, new, (jnp.asarray(position, jnp.int32) // WORD,))

    def at_once(words: jax.Array) -> jax.Array:
        for piece, terms in pieces:
            if len(piece.leaves) == 1:
                words = write(words, words_of(terms), piece.leaf.offset)
        return words

    def in_chunks(words: jax.Array) -> jax.Array:
        firsts, lasts = _chunks_in(layout.pieces, start, stop)
        for i, (piece, terms) in enumerate(pieces):
            if len(piece.leaves) > 1:
                continue
            offset, size, each = piece.leaf.offset, piece.size // WORD * WORD, _chunk(piece)

            # the bounds stay in their arrays up to the loop: a scalar of its own for each piece would be a kernel each
            def more(state: tuple[jax.Array, jax.Array], i: int = i) -> jax.Array:
                return firsts[i] + state[0] < lasts[i]

            def mark(
                state: tuple[jax.Array, jax.Array], terms: Any = terms, i: int = i, offset: int = offset, size: int = size, each: int = each
            ) -> tuple[jax.Array, jax.Array]:
                t, words = state
                at = jnp.minimum((firsts[i] + t) * each, size - each)
                return t + 1, write(words, words_of(tuple(lax.dynamic_slice(x, (at,), (each,)) for x in terms)), offset + at)

            if size:
                _, words = lax.while_loop(more, mark, (jnp.int32(0), words))
            if size < piece.size:  # a last word that is not full
                words = write(words, words_of(tuple(x[size:] for x in terms)), offset + size)
        return words

    words = jnp.zeros_like(accumulator.leaves[0][0], jnp.uint32, (layout.span // WORD,))
    for piece, terms in pieces:
        if len(piece.leaves) > 1:
            position = np.concatenate([leaf.offset + np.arange(words_in(leaf.size), dtype=np.int32) * WORD for leaf in piece.leaves])
            words = words.at[position // WORD].set(inside(words_of(terms), jnp.asarray(position)), unique_indices=True)
    return lax.platform_dependent(words, cpu=in_chunks, default=at_once)


_CHUNK = 2**17  # elements that the marking loop takes at a time on CPU: 0.5 MiB fit the cache, and the loop's cost vanishes


def _chunk(piece: Piece) -> int:
    """Elements that the marking loop takes at a time, whole words. The last chunk moves down to have as many."""
    words = piece.size // WORD
    return -(-words // max(words * WORD // _CHUNK, 1)) * WORD


def _chunks_in(pieces: tuple[Piece, ...], start: jax.Array, stop: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 [pieces]: the first chunk of each piece that reaches into [start, stop), and the first behind that doesn't any more."""
    offset = np.asarray([piece.leaf.offset for piece in pieces], np.int32)
    each = np.asarray([max(_chunk(piece), 1) for piece in pieces], np.int32)
    number = np.asarray([piece.size // WORD * WORD for piece in pieces], np.int32) // -each * -1
    first = jnp.clip((start - offset) // each, 0, number)
    return first, jnp.clip(-((offset - stop) // each), 0, number)


def sample(accumulator: Accumulator, most: int) -> tuple[jax.Array, int]:
    """Every stride-th element of `a`, at most about `most` of them, and the stride."""
    layout = accumulator.layout
    stride = max(-(-layout.size // most), 1)
    parts = []
    seen = 0
    for piece, terms in zip(layout.pieces, accumulator.pieces, strict=True):
        first = -seen % stride  # the stride runs on from piece to piece
        sizes = [leaf.size for leaf in piece.leaves]
        seen += sum(sizes)
        if first >= sum(sizes):
            continue
        if len(sizes) == 1:
            at: Any = slice(first, None, stride)
        else:
            at = np.concatenate([start + np.arange(size) for start, size in zip(piece.starts, sizes, strict=True)])[first::stride]
        parts.append(add(accumulator.momentum, *(x[at] for x in terms)).astype(layout.dtype))
    return jnp.concatenate(parts), stride


def probe(accumulator: Accumulator, stride: int) -> tuple[jax.Array, jax.Array]:
    """Of every stride-th gradient element: a scaled sum in the layout's dtype or a wider one, and whether all are finite and moderate.

    The sum is as good as never equal for two different gradients. Its scale 2^-30 keeps the sum of finite numbers finite.
    """
    layout = accumulator.layout
    gradients = [terms[0] for terms in accumulator.pieces + accumulator.dense]
    dtype = widest(layout.dtype, *(g.dtype for g in gradients))

    def look(g: jax.Array, leaf: Leaf) -> tuple[jax.Array, jax.Array]:
        # both at once: a sum by itself goes to a library in XLA for CPU, and takes three times as long
        g = g[::stride].astype(dtype)
        operands = g * jnp.asarray(2.0**-30, dtype), jnp.abs(g) <= _MODERATE * float(jnp.finfo(leaf.residual_dtype).max)
        found: Any = lax.reduce(operands, (jnp.zeros((), dtype), jnp.bool(True)), lambda a, b: (a[0] + b[0], a[1] & b[1]), (0,))
        return found

    leaves = [piece.leaf for piece in layout.pieces] + list(layout.dense)
    looked = [look(g, leaf) for g, leaf in zip(gradients, leaves, strict=True)]
    return sum((total for total, _ in looked), start=jnp.zeros((), dtype)), jnp.stack([jnp.bool(True), *(fine for _, fine in looked)]).all()
