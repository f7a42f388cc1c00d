"""A pytree as one index space, without ever joining its leaves.

Each sparse leaf gets a range of positions that starts at a whole word; what fills up its last word is never marked. Gradients and
residuals stay leaf by leaf: joining them would cost more than everything else in a step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exdyna_jax._compact import WORD, lowest_bits, to_words, words_in

_CHUNK = 2**17  # elements that the marking loop takes at a time on CPU, at least: 0.5 MiB fit the cache, and the loop's cost vanishes
_WINDOW = 4096  # slots that are looked up or written at a time on CPU
_LARGEST_SPAN = 2**31 - 2 * WORD


class Leaf(NamedTuple):
    """One leaf that takes part. Static."""

    position: int  # in jax.tree.leaves order
    shape: tuple[int, ...]
    dtype: Any  # of the gradient
    residual_dtype: Any
    size: int
    offset: int  # first position in the index space; of no meaning for a dense leaf


class Layout(NamedTuple):
    """Where each leaf lies. Static and hashable."""

    leaves: tuple[Leaf, ...]  # sparsified
    dense: tuple[Leaf, ...]  # averaged whole
    size: int  # N, elements of the sparse leaves
    span: int  # positions, a multiple of WORD; also the padding index
    dtype: Any  # of the values that are exchanged
    wire: Any  # narrower dtype in which they travel, or None


class Accumulator(NamedTuple):
    """`a = g + e` of this worker, or `m u + g + e` with momentum correction, not yet added: its terms, flat, leaf by leaf."""

    layout: Layout
    momentum: float | None  # m, static
    leaves: tuple[tuple[jax.Array, ...], ...]  # (g, e) or (g, e, u) of each sparse leaf
    dense: tuple[tuple[jax.Array, ...], ...]  # the same of each dense leaf


def takes_part(leaf: Any) -> bool:
    """Whether a leaf is exchanged: real floating point and not empty. float0 (of integer parameters) and empty leaves pass as they are."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and math.prod(leaf.shape) > 0


def widest(*dtypes: Any) -> Any:
    """The floating dtype with the most bits."""
    return max(map(jnp.dtype, dtypes), key=lambda dtype: jnp.finfo(dtype).bits)


def fitted(x: jax.Array, dtype: Any) -> jax.Array:
    """x in a dtype that may be narrower: rounded, and held at the largest number it has, so that what doesn't fit is a finite rest."""
    if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x.astype(dtype)
    most = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
    return jnp.clip(x, -most, most).astype(dtype)


def make_layout(tree: Any, residual_dtype: Any, min_size: float, wire_dtype: Any) -> Layout:
    """The index space of a pytree of arrays or of shapes; raises a ValueError where it outgrows int32."""
    sparse: list[Leaf] = []
    dense: list[Leaf] = []
    span = 0
    for position, leaf in enumerate(jax.tree.leaves(tree)):
        if not takes_part(leaf):
            continue
        size = math.prod(leaf.shape)
        wide = widest(leaf.dtype, residual_dtype or jnp.float32)
        entry = Leaf(position, tuple(leaf.shape), jnp.dtype(leaf.dtype), wide, size, span)
        if size < min_size:
            dense.append(entry)
        else:
            sparse.append(entry)
            span += words_in(size) * WORD
    if span > _LARGEST_SPAN:
        raise ValueError(
            f"This worker's tree has {span} positions; indices are int32 and end at {_LARGEST_SPAN}. Shard the parameters over a second "
            "mesh axis (the sparsifier works shard by shard), or give parts of the tree a transformation each with optax.partition."
        )
    dtype = widest(jnp.float32, *(leaf.residual_dtype for leaf in sparse))
    narrow = wire_dtype is not None and jnp.finfo(wire_dtype).bits < jnp.finfo(dtype).bits
    return Layout(tuple(sparse), tuple(dense), sum(leaf.size for leaf in sparse), span, dtype, wire_dtype if narrow else None)


def positions(layout: Layout, elements: np.ndarray) -> np.ndarray:
    """Positions of elements that are counted through the sparse leaves, without what fills up words; N and more give the end. Static."""
    ends = np.cumsum([leaf.size for leaf in layout.leaves])
    filled = np.cumsum([0] + [words_in(leaf.size) * WORD - leaf.size for leaf in layout.leaves])
    return np.minimum(elements + filled[np.searchsorted(ends, elements, side="right")], layout.span)


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

    def chunk_words(terms: tuple[jax.Array, ...], first: jax.Array | int) -> jax.Array:
        """Words of elements that begin at the position `first`."""
        a = add(accumulator.momentum, *terms)
        words = to_words(jnp.abs(a) >= threshold.astype(a.dtype))
        position = first + jnp.arange(words.size, dtype=jnp.int32) * WORD
        return words & lowest_bits(stop - position) & ~lowest_bits(start - position)

    layout = accumulator.layout

    def at_once() -> jax.Array:
        return jnp.concatenate([chunk_words(terms, leaf.offset) for leaf, terms in zip(layout.leaves, accumulator.leaves, strict=True)])

    def in_chunks() -> jax.Array:
        words = jnp.zeros_like(accumulator.leaves[0][0], jnp.uint32, (layout.span // WORD,))
        for leaf, terms in zip(layout.leaves, accumulator.leaves, strict=True):
            chunks = leaf.size // _CHUNK
            each = leaf.size // WORD // max(chunks, 1) * WORD  # elements in a chunk
            if chunks:
                words = lax.fori_loop(
                    jnp.clip((start - leaf.offset) // each, 0, chunks),
                    jnp.clip(-(-(stop - leaf.offset) // each), 0, chunks),
                    partial(_mark_chunk, chunk_words, leaf.offset, terms, each),
                    words,
                )
            done = chunks * each
            if done < leaf.size:
                rest = chunk_words(tuple(x[done:] for x in terms), leaf.offset + done)
                words = lax.dynamic_update_slice(words, rest, ((leaf.offset + done) // WORD,))
        return words

    return lax.platform_dependent(cpu=in_chunks, default=at_once)


def _mark_chunk(
    chunk_words: Callable[..., jax.Array], offset: int, terms: tuple[jax.Array, ...], size: int, i: jax.Array, words: jax.Array
) -> jax.Array:
    """Writes the words of chunk i of a leaf, of `size` elements, in place."""
    chunk = tuple(lax.dynamic_slice(x, (i * size,), (size,)) for x in terms)
    first = offset + i * size
    return lax.dynamic_update_slice(words, chunk_words(chunk, first), (first // WORD,))


def take(accumulator: Accumulator, indices: jax.Array, what: Callable[..., jax.Array] = add) -> jax.Array:
    """`a` at ascending indices, 0 at the padding that follows them. int32 [K] -> [K] of dtype `layout.dtype`.

    Something else than `a` with another function `what(momentum, *terms)`.
    """
    layout = accumulator.layout
    values = jnp.zeros_like(accumulator.leaves[0][1], layout.dtype, indices.shape)
    for leaf, terms, bounds in zip(layout.leaves, accumulator.leaves, _bounds(layout, indices), strict=True):

        def look_up(window: Window, values: jax.Array, leaf: Leaf = leaf, terms: tuple[jax.Array, ...] = terms) -> jax.Array:
            at = _within(leaf, window(indices))
            found = what(accumulator.momentum, *(x.at[at].get(mode="fill", fill_value=0) for x in terms))
            return window.write(values, jnp.where(at < leaf.size, found.astype(values.dtype), window(values)))

        values = _visit(leaf, bounds, indices.size, look_up, values)
    return values


def put(
    layout: Layout, indices: jax.Array, rows: list[tuple[jax.Array, ...]], values: list[tuple[jax.Array, ...]]
) -> list[tuple[jax.Array, ...]]:
    """Sets elements of arrays shaped as the leaves, `[1, *shape]`, at ascending indices; padding is dropped.

    Args:
      layout: of the leaves.
      indices: int32 [K].
      rows: for each leaf the arrays to set in.
      values: for each leaf, for each of these arrays, [K] values.

    The arrays are not flattened: XLA writes in place only where shapes are the same to the letter.
    """
    results = []
    for leaf, arrays, news, bounds in zip(layout.leaves, rows, values, _bounds(layout, indices), strict=True):

        def write(
            window: Window, arrays: tuple[jax.Array, ...], leaf: Leaf = leaf, news: tuple[jax.Array, ...] = news
        ) -> tuple[jax.Array, ...]:
            at = _unravel(_within(leaf, window(indices)), leaf.shape)
            return tuple(x.at[at].set(window(new).astype(x.dtype), mode="drop") for x, new in zip(arrays, news, strict=True))

        results.append(_visit(leaf, bounds, indices.size, write, arrays))
    return results


class Window(NamedTuple):
    """A run of slots."""

    start: jax.Array | int
    width: int  # static

    def __call__(self, slots: jax.Array) -> jax.Array:
        """The slots of the window; near the end it moves down, so as to have its width."""
        return lax.dynamic_slice(slots, (self.start,), (self.width,))

    def write(self, slots: jax.Array, values: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(slots, values, (self.start,))


def _visit(leaf: Leaf, bounds: tuple[jax.Array, jax.Array], slots: int, visit: Callable[[Window, Any], Any], carry: Any) -> Any:
    """Calls `visit` on windows that cover the slots whose indices lie in a leaf, at positions `bounds[0]` to `bounds[1]`.

    A leaf can't have more slots than elements, so a small one needs one small window. A large one takes, on CPU, as many windows as its
    slots fill; elsewhere, where a loop is a train of kernel launches, one with all slots.
    """
    first, last = bounds
    if min(leaf.size, slots) <= _WINDOW:
        return visit(Window(first, min(leaf.size, slots)), carry)

    def in_windows() -> Any:
        return lax.fori_loop(0, -(-(last - first) // _WINDOW), lambda i, carry: visit(Window(first + i * _WINDOW, _WINDOW), carry), carry)

    return lax.platform_dependent(cpu=in_windows, default=lambda: visit(Window(0, slots), carry))


def _bounds(layout: Layout, indices: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """For each leaf the range of ascending indices that lie in it."""
    starts = jnp.asarray([leaf.offset for leaf in layout.leaves] + [layout.span], jnp.int32)
    at = jnp.searchsorted(indices, starts).astype(jnp.int32)
    return [(at[i], at[i + 1]) for i in range(len(layout.leaves))]


def _within(leaf: Leaf, indices: jax.Array) -> jax.Array:
    """Indices relative to a leaf; `leaf.size`, which is out of range, where they lie outside it (-1 would wrap)."""
    inside = (indices >= leaf.offset) & (indices < leaf.offset + leaf.size)
    return jnp.where(inside, indices - leaf.offset, leaf.size)


def _unravel(at: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Flat indices to one per axis of `[1, *shape]`; what is out of range stays so, along the first axis of `shape`."""
    if not shape:
        return (at,)
    index = [jnp.zeros_like(at)]
    below = math.prod(shape)
    for extent in shape:
        below //= extent
        index.append(at // below)
        at = at % below
    return tuple(index)


def sample(accumulator: Accumulator, most: int) -> tuple[jax.Array, int]:
    """Every stride-th element of `a`, at most about `most` of them, and the stride."""
    layout = accumulator.layout
    stride = max(-(-layout.size // most), 1)
    parts = []
    seen = 0
    for leaf, terms in zip(layout.leaves, accumulator.leaves, strict=True):
        first = -seen % stride  # the stride runs on from leaf to leaf
        seen += leaf.size
        if first < leaf.size:
            parts.append(add(accumulator.momentum, *(x[first::stride] for x in terms)).astype(layout.dtype))
    return jnp.concatenate(parts), stride


def probe(accumulator: Accumulator, stride: int) -> jax.Array:
    """[] in the layout's dtype: a scaled sum of every stride-th gradient element.

    Not finite if one of these elements isn't, and as good as never equal for two different gradients. The scale 2^-30 keeps the sum of
    finite numbers finite.
    """
    gradients = [terms[0] for terms in accumulator.leaves + accumulator.dense]
    dtype = widest(accumulator.layout.dtype, *(g.dtype for g in gradients))
    total = jnp.zeros((), dtype)
    for g in gradients:
        total = total + jnp.sum(g[::stride].astype(dtype) * jnp.asarray(2.0**-30, dtype))
    return total
