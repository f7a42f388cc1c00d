"""Elements at ascending indices, read from the pieces of a layout and written into them."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
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

    def look_up(window: Window, piece: Piece, terms: tuple[jax.Array, ...], values: jax.Array) -> jax.Array:
        at = _places(piece, window(indices))
        found = what(accumulator.momentum, *(x.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False) for x in terms))
        return window.write(values, jnp.where(at < piece.size, found.astype(values.dtype), window(values)))

    def visit(windows: Windows, values: jax.Array) -> jax.Array:
        for i, window in windows.items():
            values = look_up(window, layout.pieces[i], accumulator.pieces[i], values)
        return values

    return _visit(layout, indices, visit, jnp.zeros_like(accumulator.leaves[0][1], layout.dtype, indices.shape))


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

    def write(window: Window, piece: Piece, arrays: tuple[jax.Array, ...], news: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = _unravel(_places(piece, window(indices)), piece.shape)
        return tuple(
            x.at[at].set((window(new) if new.ndim else new).astype(x.dtype), mode="drop", wrap_negative_indices=False)
            for x, new in zip(arrays, news, strict=True)
        )

    def visit(windows: Windows, rows: list[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        return [write(windows[i], layout.pieces[i], row, values[i]) if i in windows else row for i, row in enumerate(rows)]

    return _visit(layout, indices, visit, rows)


class Window(NamedTuple):
    """A run of slots."""

    start: jax.Array | int
    width: int  # static

    def __call__(self, slots: jax.Array) -> jax.Array:
        """The slots of the window; near the end it moves down, so as to have its width."""
        return lax.dynamic_slice(slots, (self.start,), (self.width,))

    def write(self, slots: jax.Array, values: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(slots, values, (self.start,))


Windows = dict[int, Window]  # by the number of the piece


def _visit(layout: Layout, indices: jax.Array, visit: Callable[[Windows, T], T], carry: T) -> T:
    """Calls `visit` with windows until they have covered, for each piece, the slots whose indices lie in it.

    A single leaf's slots lie one behind the other; there can't be more of them than elements, so a small leaf needs one small window. A
    large one takes, on CPU, as many windows as its slots fill; elsewhere, where a loop is a train of kernel launches, one with all slots.
    So does a piece of several leaves, whose slots lie here and there. One loop goes through all leaves at once, since each loop takes as
    long to compile as what is done in it.
    """
    slots = indices.size
    firsts, lasts = _bounds(layout, indices)
    once: Windows = {}
    widths: dict[int, int] = {}
    for i, piece in enumerate(layout.pieces):
        width = _width(slots * piece.size / layout.span)
        if len(piece.leaves) > 1:
            once[i] = Window(0, slots)
        elif min(piece.size, slots) <= width:
            once[i] = Window(firsts[i], min(piece.size, slots))
        else:
            widths[i] = width
    if once:
        carry = visit(once, carry)
    if not widths:
        return carry
    pieces = np.asarray(list(widths))
    rounds = jnp.max(-((firsts[pieces] - lasts[pieces]) // np.asarray(list(widths.values()), np.int32)))

    def in_windows(carry: T) -> T:
        return lax.fori_loop(0, rounds, lambda t, carry: visit({i: Window(firsts[i] + t * w, w) for i, w in widths.items()}, carry), carry)

    return lax.platform_dependent(carry, cpu=in_windows, default=lambda carry: visit(dict.fromkeys(widths, Window(0, slots)), carry))


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
