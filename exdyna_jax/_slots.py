"""Elements at ascending indices, read from the pieces of a layout and written into them."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from exdyna_jax._accumulator import Accumulator, add
from exdyna_jax._compact import WORD, place_in, words_in
from exdyna_jax._layout import Layout, Piece

T = TypeVar("T")
_WINDOW = 4096  # slots that are looked up or written at a time on CPU, at most


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
            found = what(accumulator.momentum, *(x.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False) for x in terms))
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
      values: for each piece, for each of these arrays, [K] values, or a scalar for all.

    The arrays are not flattened: XLA writes in place only where shapes are the same to the letter.
    """

    results = []
    bounds = _bounds(layout, indices)
    for i, (piece, arrays, news) in enumerate(zip(layout.pieces, rows, values, strict=True)):

        def write(
            window: Window, arrays: tuple[jax.Array, ...], piece: Piece = piece, news: tuple[jax.Array, ...] = news
        ) -> tuple[jax.Array, ...]:
            at = _unravel(_places(piece, window(indices)), piece.shape)
            return tuple(
                x.at[at].set((window(new) if new.ndim else new).astype(x.dtype), mode="drop", wrap_negative_indices=False)
                for x, new in zip(arrays, news, strict=True)
            )

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


def _visit(layout: Layout, i: int, bounds: tuple[jax.Array, jax.Array], slots: int, visit: Callable[[Window, T], T], carry: T) -> T:
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

    # the bounds stay in their arrays up to the loop: a scalar of its own for each piece would be a kernel each
    def more(state: tuple[jax.Array, T]) -> jax.Array:
        return firsts[i] + state[0] < lasts[i]

    def once(state: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        return state[0] + width, visit(Window(firsts[i] + state[0], width), state[1])

    def in_windows(carry: T) -> T:
        return lax.while_loop(more, once, (jnp.int32(0), carry))[1]

    return lax.platform_dependent(carry, cpu=in_windows, default=lambda carry: visit(Window(0, slots), carry))


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
    offset: jax.Array | int
    size: jax.Array | int
    start: jax.Array | int
    if len(piece.leaves) == 1:
        offset, size, start = piece.leaf.offset, piece.size, 0
    else:
        offsets, sizes = jnp.asarray([(leaf.offset, leaf.size) for leaf in piece.leaves], jnp.int32).T
        which = jnp.maximum(place_in(offsets, indices) - 1, 0)
        columns = offsets, sizes, jnp.asarray(piece.starts, jnp.int32)
        offset, size, start = (column.at[which].get(mode="clip") for column in columns)
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
        index.append(lax.div(at, jnp.int32(below)))
        at = lax.rem(at, jnp.int32(below))
    return tuple(index)


def split(piece: Piece, array: jax.Array) -> list[jax.Array]:
    """`[1, *piece.shape]` -> its leaves, `[1, *shape]` each."""
    if len(piece.leaves) == 1:
        return [array]
    bounds = zip(piece.leaves, piece.starts, strict=True)
    return [array[:, start : start + leaf.size].reshape(1, *leaf.shape) for leaf, start in bounds]
