"""A pytree as one index space, without joining its large leaves.

Each sparse leaf gets a range of positions that starts at a whole word; what fills up its last word is never marked. The large leaves stay
as they are, since joining them would cost more than everything else in a step. Small ones are joined, since there may be many, and each
array by itself costs kernels and the time to compile them.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exdyna_jax._compact import WORD, lowest_bits, place_in, to_words, words_in

_SMALL = 2**16  # elements: leaves with fewer are joined
_CHUNK = 2**17  # elements that the marking loop takes at a time on CPU: 0.5 MiB fit the cache, and the loop's cost vanishes
_WINDOW = 4096  # slots that are looked up or written at a time on CPU, at most
_LARGEST_SPAN = 2**31 - 2 * WORD


class Leaf(NamedTuple):
    """One leaf that takes part. Static."""

    position: int  # in jax.tree.leaves order
    shape: tuple[int, ...]
    dtype: Any  # of the gradient
    residual_dtype: Any
    size: int
    offset: int  # first position in the index space; of no meaning for a dense leaf


class Piece(NamedTuple):
    """An array that is worked on: a leaf, in its own shape, or several of the same dtypes joined, each filled up to whole words. Static."""

    leaves: tuple[Leaf, ...]
    starts: tuple[int, ...]  # place of each leaf's first element
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def leaf(self) -> Leaf:
        """The first leaf, whose dtypes are those of all."""
        return self.leaves[0]


class Layout(NamedTuple):
    """Where each leaf lies. Static and hashable."""

    leaves: tuple[Leaf, ...]  # sparsified
    pieces: tuple[Piece, ...]  # in which they are worked on
    dense: tuple[Leaf, ...]  # averaged whole
    size: int  # N, elements of the sparse leaves
    span: int  # positions, a multiple of WORD; also the padding index
    dtype: Any  # of the values that are exchanged
    wire: Any  # narrower dtype in which they travel, or None


class Accumulator(NamedTuple):
    """`a = g + e` of this worker, or `m u + g + e` with momentum correction, not yet added: its terms, flat."""

    layout: Layout
    momentum: float | None  # m, static
    leaves: tuple[tuple[jax.Array, ...], ...]  # (g, e) or (g, e, u) of each sparse leaf
    pieces: tuple[tuple[jax.Array, ...], ...]  # the same of each piece
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
    if residual_dtype is not None and jax.dtypes.canonicalize_dtype(residual_dtype) != jnp.dtype(residual_dtype):
        raise ValueError(
            f"residual_dtype={jnp.dtype(residual_dtype).name} needs jax.config.update('jax_enable_x64', True), or leave it out."
        )
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
    size = sum(leaf.size for leaf in sparse)
    return Layout(tuple(sparse), _pieces_of(sparse), tuple(dense), size, span, dtype, wire_dtype if narrow else None)


def _pieces_of(leaves: list[Leaf]) -> tuple[Piece, ...]:
    small: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.size < _SMALL:
            small.setdefault((leaf.dtype, leaf.residual_dtype), []).append(leaf)
    joined = [tuple(group) for group in small.values() if len(group) > 1]
    taken = set(itertools.chain(*joined))
    alone = [(leaf,) for leaf in leaves if leaf not in taken]
    return tuple(_piece(group) for group in sorted([*joined, *alone], key=lambda group: group[0].offset))


def _piece(leaves: tuple[Leaf, ...]) -> Piece:
    if len(leaves) == 1:
        return Piece(leaves, (0,), leaves[0].shape)
    *starts, size = itertools.accumulate((words_in(leaf.size) * WORD for leaf in leaves), initial=0)
    return Piece(leaves, tuple(starts), (size,))


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


def split(piece: Piece, array: jax.Array) -> list[jax.Array]:
    """`[1, *piece.shape]` -> its leaves, `[1, *shape]` each."""
    if len(piece.leaves) == 1:
        return [array]
    bounds = zip(piece.leaves, piece.starts, strict=True)
    return [array[:, start : start + leaf.size].reshape(1, *leaf.shape) for leaf, start in bounds]


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

    layout = accumulator.layout

    def words_of(terms: tuple[jax.Array, ...], position: jax.Array) -> jax.Array:
        """Words of elements of which each word begins at a position."""
        a = add(accumulator.momentum, *terms)
        words = to_words(jnp.abs(a) >= threshold.astype(a.dtype))
        return words & lowest_bits(stop - position) & ~lowest_bits(start - position)

    def row(first: jax.Array | int, words: int) -> jax.Array:
        return first + jnp.arange(words, dtype=jnp.int32) * WORD

    def at_once() -> jax.Array:
        parts = {}
        for piece, terms in zip(layout.pieces, accumulator.pieces, strict=True):
            for leaf, first in zip(piece.leaves, piece.starts, strict=True):
                mine = tuple(x[first : first + leaf.size] for x in terms)
                parts[leaf] = words_of(mine, row(leaf.offset, words_in(leaf.size)))
        return jnp.concatenate([parts[leaf] for leaf in layout.leaves])

    def in_chunks() -> jax.Array:
        words = jnp.zeros_like(accumulator.leaves[0][0], jnp.uint32, (layout.span // WORD,))
        firsts, lasts = _chunks_in(layout.pieces, start, stop)
        for i, (piece, terms) in enumerate(zip(layout.pieces, accumulator.pieces, strict=True)):
            if len(piece.leaves) > 1:
                position = _word_positions(piece)
                words = words.at[position // WORD].set(words_of(terms, jnp.asarray(position)), unique_indices=True)
                continue
            offset, size, each = piece.leaf.offset, piece.size // WORD * WORD, _chunk(piece)

            def mark(
                chunk: jax.Array, words: jax.Array, terms: Any = terms, offset: int = offset, size: int = size, each: int = each
            ) -> Any:
                at = jnp.minimum(chunk * each, size - each)
                part = tuple(lax.dynamic_slice(x, (at,), (each,)) for x in terms)
                return lax.dynamic_update_slice(words, words_of(part, row(offset + at, each // WORD)), ((offset + at) // WORD,))

            if size:
                words = _while_below(firsts, lasts, i, 1, mark, words)
            if size < piece.size:  # a last word that is not full
                rest = words_of(tuple(x[size:] for x in terms), row(offset + size, 1))
                words = lax.dynamic_update_slice(words, rest, ((offset + size) // WORD,))
        return words

    return lax.platform_dependent(cpu=in_chunks, default=at_once)


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


def _while_below(firsts: jax.Array, lasts: jax.Array, i: int, step: int, visit: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """`visit(at, carry)` for at = firsts[i], firsts[i] + step, ... below lasts[i].

    The bounds stay in their arrays up to the loop: a scalar of its own for each piece would be a kernel each.
    """

    def go_on(state: tuple[jax.Array, Any]) -> jax.Array:
        return firsts[i] + state[0] < lasts[i]

    def once(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return state[0] + step, visit(firsts[i] + state[0], state[1])

    return lax.while_loop(go_on, once, (jnp.int32(0), carry))[1]


def _word_positions(piece: Piece) -> np.ndarray:
    """int32: the position of each word of a piece. Static."""
    return np.concatenate([leaf.offset + np.arange(words_in(leaf.size), dtype=np.int32) * WORD for leaf in piece.leaves])


def take(accumulator: Accumulator, indices: jax.Array, what: Callable[..., jax.Array] = add) -> jax.Array:
    """`a` at ascending indices, 0 at the padding that follows them. int32 [K] -> [K] of dtype `layout.dtype`.

    Something else than `a` with another function `what(momentum, *terms)`.
    """
    layout = accumulator.layout
    values = jnp.zeros_like(accumulator.leaves[0][1], layout.dtype, indices.shape)
    bounds = _bounds(layout, indices)
    for i, (piece, terms) in enumerate(zip(layout.pieces, accumulator.pieces, strict=True)):

        def look_up(window: Window, values: jax.Array, piece: Piece = piece, terms: tuple[jax.Array, ...] = terms) -> jax.Array:
            at = _places(piece, window(indices))
            found = what(accumulator.momentum, *(x.at[at].get(mode="fill", fill_value=0) for x in terms))
            return window.write(values, jnp.where(at < piece.size, found.astype(values.dtype), window(values)))

        values = _visit(layout, i, bounds, indices.size, look_up, values)
    return values


def blanks(layout: Layout, indices: jax.Array) -> list[jax.Array]:
    """Zeros `[1, *piece.shape]` for each piece, in the gradient's dtype, to set elements in.

    Each is a zero of its own that is known at run time only: of equal constants the compiler keeps one, and copies it for each use.
    """
    zeros = jnp.minimum(_bounds(layout, indices)[0], 0)  # bounds are never negative
    return [jnp.full((1, *piece.shape), zeros[i].astype(piece.leaf.dtype)) for i, piece in enumerate(layout.pieces)]


def put(
    layout: Layout, indices: jax.Array, rows: list[tuple[jax.Array, ...]], values: list[tuple[jax.Array, ...]]
) -> list[tuple[jax.Array, ...]]:
    """Sets elements of arrays shaped as the pieces, `[1, *shape]`, at ascending indices; padding is dropped.

    Args:
      layout: of the pieces.
      indices: int32 [K].
      rows: for each piece the arrays to set in.
      values: for each piece, for each of these arrays, [K] values.

    The arrays are not flattened: XLA writes in place only where shapes are the same to the letter.
    """
    results = []
    bounds = _bounds(layout, indices)
    for i, (piece, arrays, news) in enumerate(zip(layout.pieces, rows, values, strict=True)):

        def write(
            window: Window, arrays: tuple[jax.Array, ...], piece: Piece = piece, news: tuple[jax.Array, ...] = news
        ) -> tuple[jax.Array, ...]:
            at = _unravel(_places(piece, window(indices)), piece.shape)
            return tuple(x.at[at].set(window(new).astype(x.dtype), mode="drop") for x, new in zip(arrays, news, strict=True))

        results.append(_visit(layout, i, bounds, indices.size, write, arrays))
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


def _visit(layout: Layout, i: int, bounds: tuple[jax.Array, jax.Array], slots: int, visit: Callable[[Window, Any], Any], carry: Any) -> Any:
    """Calls `visit` on windows that cover the slots whose indices lie in piece i.

    A single leaf's slots lie one behind the other, from `bounds[0][i]` to `bounds[1][i]`; there can't be more of them than elements, so a
    small leaf needs one small window. A large one takes, on CPU, as many windows as its slots fill; elsewhere, where a loop is a train of
    kernel launches, one with all slots. So does a piece of several leaves, whose slots lie here and there.
    """
    piece = layout.pieces[i]
    firsts, lasts = bounds
    if len(piece.leaves) > 1:
        return visit(Window(0, slots), carry)
    width = _width(slots * piece.size / layout.span)
    if min(piece.size, slots) <= width:
        return visit(Window(firsts[i], min(piece.size, slots)), carry)

    def in_windows() -> Any:
        return _while_below(firsts, lasts, i, width, lambda first, carry: visit(Window(first, width), carry), carry)

    return lax.platform_dependent(cpu=in_windows, default=lambda: visit(Window(0, slots), carry))


def _width(even: float) -> int:
    """Slots of a window, where a piece has so many if all are spread evenly: twice as many, so that most pieces need one window."""
    return min(_WINDOW, 2 ** max(math.ceil(math.log2(2 * even)), 6))


def _bounds(layout: Layout, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 [pieces]: the first slot whose ascending index lies in a piece's first leaf or beyond, and the first beyond that leaf."""
    starts = [piece.leaf.offset for piece in layout.pieces]
    ends = [piece.leaf.offset + words_in(piece.leaf.size) * WORD for piece in layout.pieces]
    at = place_in(indices, jnp.asarray(starts + ends, jnp.int32) - 1)
    return at[: len(starts)], at[len(starts) :]


def _places(piece: Piece, indices: jax.Array) -> jax.Array:
    """Indices to places in a piece; `piece.size`, which is out of range, where they lie outside it (-1 would wrap)."""
    if len(piece.leaves) == 1:
        offset, size, start = piece.leaf.offset, piece.size, 0
    else:
        table = jnp.asarray([(leaf.offset, leaf.size, start) for leaf, start in zip(piece.leaves, piece.starts, strict=True)], jnp.int32)
        which = place_in(table[:, 0], indices) - 1
        offset, size, start = table.at[jnp.maximum(which, 0)].get(mode="clip").T
    inside = (indices >= offset) & (indices < offset + size)
    return jnp.where(inside, indices - offset + start, piece.size)


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
    """Of every stride-th gradient element: a scaled sum in the layout's dtype or a wider one, and whether all are finite.

    The sum is as good as never equal for two different gradients. Its scale 2^-30 keeps the sum of finite numbers finite.
    """
    gradients = [terms[0] for terms in accumulator.pieces + accumulator.dense]
    dtype = widest(accumulator.layout.dtype, *(g.dtype for g in gradients))

    def look(g: jax.Array) -> tuple[jax.Array, jax.Array]:
        # both at once: a sum by itself goes to a library in XLA for CPU, and takes three times as long
        g = g[::stride].astype(dtype)
        operands = g * jnp.asarray(2.0**-30, dtype), jnp.isfinite(g)
        found: Any = lax.reduce(operands, (jnp.zeros((), dtype), jnp.bool(True)), lambda a, b: (a[0] + b[0], a[1] & b[1]), (0,))
        return found

    looked = [look(g) for g in gradients]
    return sum((total for total, _ in looked), start=jnp.zeros((), dtype)), jnp.stack([jnp.bool(True), *(fine for _, fine in looked)]).all()
