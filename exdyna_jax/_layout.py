"""A pytree as one index space, without joining its large leaves. All static.

Each sparse leaf gets a range of positions that starts at a whole word; what fills up its last word is never marked. The large leaves stay
as they are, since joining them would cost more than everything else in a step. Small ones are joined, since there may be many, and each
array by itself costs kernels and the time to compile them.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exdyna_jax._compact import WORD, words_in

_SMALL = 2**16  # elements: leaves with fewer are joined
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
    # what is taken away is measured by widening the result again: without a barrier some compilers fold both, and find nothing
    return lax.optimization_barrier(jnp.clip(x, -most, most).astype(dtype))


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


def positions(layout: Layout, elements: np.ndarray) -> np.ndarray:
    """Positions of elements that are counted through the sparse leaves, without what fills up words; N and more give the end. Static."""
    ends = np.cumsum([leaf.size for leaf in layout.leaves])
    filled = np.cumsum([0] + [words_in(leaf.size) * WORD - leaf.size for leaf in layout.leaves])
    return np.minimum(elements + filled[np.searchsorted(ends, elements, side="right")], layout.span)
