"""Segments of a tree of parameters: what travels to one peer. Each segment is a few pieces of leaves, and every element is in one."""

from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from exdyna_jax._collectives import kind, path_name
from exdyna_jax._layout import takes_part


class Piece(NamedTuple):
    """Elements `start` .. `stop` of a flattened leaf."""

    leaf: int  # its position among those that take part
    start: int
    stop: int


Segment = tuple[Piece, ...]
Segments = int | str | Callable[[Any], Any] | Any  # as a user says it: `crossover`


def make_segments(tree: Any, segments: Segments) -> tuple[Segment, ...]:
    """The segments of a tree of arrays or of shapes, in tree order; raises a ValueError where labels don't cover it."""
    part = [takes_part(leaf) for leaf in jax.tree.leaves(tree)]
    whole = [Piece(i, 0, leaf.size) for i, leaf in enumerate(compress(jax.tree.leaves(tree), part))]
    if isinstance(segments, str):
        return tuple((piece,) for piece in whole)
    if isinstance(segments, (int, np.integer)):
        return _balanced(whole, int(segments))
    labels = list(compress(_labels(tree, segments(tree) if callable(segments) else segments), part))
    members: dict[Hashable, list[Piece]] = {}
    for piece in whole:
        members.setdefault(labels[piece.leaf], []).append(piece)
    return tuple(map(tuple, members.values()))


def check_segments(segments: Segments) -> None:
    if isinstance(segments, str) and segments != "leaf":
        raise ValueError(f"segments={segments!r} is not 'leaf', a number of segments, or a tree of labels.")
    if segments is None or isinstance(segments, (bool, float)) or (isinstance(segments, (int, np.integer)) and segments < 1):
        raise ValueError(f"segments={segments!r} is not a positive int, 'leaf', or a tree of labels.")


def _balanced(whole: list[Piece], count: int) -> tuple[Segment, ...]:
    """Segments of equal size but for one element, of neighbouring elements; as many as elements at most."""
    total = sum(piece.stop for piece in whole)
    count = min(count, total)
    if not total:
        return ()
    cuts = [total * s // count for s in range(count + 1)]
    found: list[list[Piece]] = [[] for _ in range(count)]
    first, s = 0, 0  # of the leaf, among all elements
    for leaf, _, size in whole:
        start = 0
        while start < size:
            stop = min(size, cuts[s + 1] - first)
            found[s].append(Piece(leaf, start, stop))
            start = stop
            s += first + stop == cuts[s + 1]
        first += size
    return tuple(map(tuple, found))


def _labels(tree: Any, labels: Any) -> list[Hashable]:
    """The label of each leaf."""
    try:
        each: list[Hashable] = jax.tree.leaves(jax.tree.broadcast(labels, tree))
    except ValueError as error:
        raise ValueError(
            f"segments does not cover the parameters: its labels are {labels}, the parameters {jax.tree.structure(tree)}. "
            "Give every leaf, or every branch, a label."
        ) from error
    for (path, _), label in zip(jax.tree_util.tree_leaves_with_path(tree), each, strict=True):
        if not isinstance(label, (str, int)):
            raise ValueError(f"segments has {label!r} for leaf {path_name(path)}: labels are str or int.")
    return each


def pack(leaves: Sequence[jax.Array], segment: Segment) -> list[jax.Array]:
    """A segment as one flat array for each kind of leaf in it: one message each."""
    parts: dict[Any, list[jax.Array]] = {}
    for leaf, start, stop in segment:
        parts.setdefault(kind(leaves[leaf]), []).append(leaves[leaf].reshape(-1)[start:stop])
    return [jnp.concatenate(part) if len(part) > 1 else part[0] for part in parts.values()]


def unpack(leaves: Sequence[jax.Array], segments: Sequence[Segment], packed: Sequence[list[jax.Array]]) -> list[jax.Array]:
    """The leaves again, out of all segments of them."""
    parts: list[dict[int, jax.Array]] = [{} for _ in leaves]
    for segment, arrays in zip(segments, packed, strict=True):
        rest = dict(zip(dict.fromkeys(kind(leaves[leaf]) for leaf, _, _ in segment), arrays, strict=True))
        for leaf, start, stop in segment:
            of = kind(leaves[leaf])
            parts[leaf][start], rest[of] = rest[of][: stop - start], rest[of][stop - start :]
    joined = [[pieces[start] for start in sorted(pieces)] for pieces in parts]
    return [
        (jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]).reshape(leaf.shape) for pieces, leaf in zip(joined, leaves, strict=True)
    ]


def bytes_of(leaves: Sequence[Any], segments: Sequence[Segment]) -> int:
    return sum((stop - start) * jnp.dtype(leaves[leaf].dtype).itemsize for segment in segments for leaf, start, stop in segment)
