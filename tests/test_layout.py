"""The index space against one flat numpy array: large leaves by themselves, small ones joined, of two dtypes, some with odd sizes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exdyna_jax._accumulator import accumulator_of, marks, sample
from exdyna_jax._layout import make_layout
from exdyna_jax._slots import blanks, put, split, take

SHAPES = [((5, 7), "float32"), ((3 * 2**17 + 5,), "float32"), ((), "float32"), ((64,), "bfloat16"), ((300, 250), "float32")]
SHAPES += [((3, 11, 2), "bfloat16"), ((129,), "float32")]


class Case(NamedTuple):
    layout: Any
    accumulator: Any
    flat: np.ndarray  # [span], zeros where no leaf is
    real: np.ndarray  # bool [span]


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.RandomState(0)
    layout = make_layout([jax.ShapeDtypeStruct(*s) for s in SHAPES], None, 0, None)
    flat, real = np.zeros(layout.span, np.float32), np.zeros(layout.span, bool)
    terms = []
    for leaf in layout.leaves:
        g, e = rng.randint(-9, 10, (2, leaf.size)) / 4
        here = slice(leaf.offset, leaf.offset + leaf.size)
        flat[here], real[here] = g + e, True
        terms.append((jnp.asarray(g, leaf.dtype), jnp.asarray(e, jnp.float32)))
    return Case(layout, accumulator_of(layout, None, tuple(terms), ()), flat, real)


def test_pieces(case: Case) -> None:
    """Two large leaves stay as they are; small ones are joined by dtype."""
    assert [len(piece.leaves) for piece in case.layout.pieces] == [3, 1, 2, 1]
    assert [piece.shape for piece in case.layout.pieces if len(piece.leaves) == 1] == [(3 * 2**17 + 5,), (300, 250)]
    assert all(leaf.offset % 32 == 0 for leaf in case.layout.leaves)


def test_marks(case: Case) -> None:
    """Cut to the bit, also where a leaf is marked chunk by chunk, and where a range ends in what fills up a leaf's last word."""
    span = case.layout.span
    marked = jax.jit(lambda start, stop: marks(case.accumulator, jnp.float32(1), start, stop))
    for start, stop in [
        (0, span),
        (5, 6),
        (31, 33),
        (2**17 - 1, 2**18 + 7),
        (100, 100),
        (3 * 2**17, span - 63),
        (40, 64),
        (span - 200, span),
    ]:
        words = np.asarray(marked(jnp.int32(start), jnp.int32(stop)))
        got = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
        inside = (np.arange(span) >= start) & (np.arange(span) < stop)
        np.testing.assert_array_equal(got, case.real & (np.abs(case.flat) >= 1) & inside)


@pytest.mark.parametrize("slots", [40, 9000])
def test_take_and_put(case: Case, slots: int) -> None:
    """With more slots than a window holds, and fewer; the last ones are padding."""
    layout, rng = case.layout, np.random.RandomState(1)
    chosen = np.sort(rng.choice(np.flatnonzero(case.real), slots - 7, replace=False))
    indices = jnp.asarray(np.append(chosen, [layout.span] * 7), jnp.int32)
    values = np.asarray(jax.jit(lambda indices: take(case.accumulator, indices))(indices))
    np.testing.assert_array_equal(values, np.append(case.flat[chosen], np.zeros(7)))

    def back(indices: jax.Array, values: jax.Array) -> list[list[jax.Array]]:
        rows = [(blank,) for blank in blanks(layout, indices)]
        arrays = put(layout, indices, rows, [(values,)] * len(rows))
        return [split(piece, array) for piece, (array,) in zip(layout.pieces, arrays, strict=True)]

    got, want = np.zeros(layout.span, np.float32), np.zeros(layout.span, np.float32)
    want[chosen] = case.flat[chosen]
    for piece, leaves in zip(layout.pieces, jax.jit(back)(indices, values), strict=True):
        for leaf, array in zip(piece.leaves, leaves, strict=True):
            assert (array.shape, array.dtype) == ((1, *leaf.shape), leaf.dtype)
            got[leaf.offset : leaf.offset + leaf.size] = np.asarray(array, np.float32).reshape(-1)
    np.testing.assert_array_equal(got, want)


def test_sample(case: Case) -> None:
    """Every element once with a stride of one, and none of what fills up words."""
    values, stride = sample(case.accumulator, case.layout.size)
    assert stride == 1
    np.testing.assert_array_equal(np.sort(values), np.sort(case.flat[case.real]))
    values, stride = sample(case.accumulator, 1000)
    assert values.size == -(-case.layout.size // stride) <= 1000
