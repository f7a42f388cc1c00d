"""Marks to words to sorted indices, against `numpy.nonzero`.

Held: every marked element and nothing else is listed, ascending, with padding behind; where more are marked than there are slots, those
listed are an even sample, and an element that stays marked is not left waiting for long.
"""

import functools
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from exdyna_jax._compact import compact, or_one, ranks, to_words, words_in

SIZES = (1, 31, 32, 33, 1000, 4099)
CAPACITIES = (1, 7, 64)


@functools.cache
def _compacted(size: int, capacity: int) -> Any:
    return jax.jit(lambda marks, turn: compact(to_words(marks), capacity, size, turn))


@functools.cache
def _ranked(capacity: int) -> Any:
    return jax.jit(lambda count, turn: ranks(count, capacity, turn))


@functools.cache
def _in_turns(capacity: int) -> Any:
    return jax.jit(jax.vmap(lambda count, turn: ranks(count, capacity, turn), in_axes=(None, 0)))


def _numpy_words(marks: np.ndarray) -> np.ndarray:
    padded = np.zeros(words_in(marks.size) * 32, bool)
    padded[: marks.size] = marks
    return np.packbits(padded, bitorder="little").view("<u4")


@st.composite
def some_marks(draw: st.DrawFn) -> np.ndarray:
    """Marks of one of SIZES: a handful, or any share of them."""
    size = draw(st.sampled_from(SIZES))
    share = draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.5, 1]))
    marks = np.random.RandomState(draw(st.integers(0, 2**32 - 1))).random_sample(size) < share
    marks[draw(st.lists(st.integers(0, size - 1), max_size=5))] = True
    return marks


def _only(size: int, *where: int) -> np.ndarray:
    marks = np.zeros(size, bool)
    marks[list(where)] = True
    return marks


@given(some_marks())
@example(_only(4099))
@example(_only(4099, 0))
@example(_only(4099, 4098))
@example(np.ones(4099, bool))
def test_words_are_packed_bits(marks: np.ndarray) -> None:
    words = jax.jit(to_words)(marks)
    assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(words, _numpy_words(marks))


@given(some_marks(), st.sampled_from(CAPACITIES), st.integers(0, 2**31 - 1))
@example(_only(4099), 7, 0)
@example(_only(4099, 0), 7, 0)
@example(_only(4099, 4098), 7, 0)
@example(_only(4099, *range(4092, 4099)), 7, 0)
@example(np.ones(4099, bool), 7, 1)
@example(np.ones(4099, bool), 1, 2)
def test_lists_what_numpy_lists(marks: np.ndarray, capacity: int, turn: int) -> None:
    indices, count = jax.device_get(_compacted(marks.size, capacity)(marks, jnp.int32(turn)))
    marked = np.flatnonzero(marks)
    listed = marked[oracle.ranks(marked.size, capacity, turn)]
    assert indices.dtype == np.int32
    assert count == marked.size
    np.testing.assert_array_equal(indices, np.pad(listed, (0, capacity - listed.size), constant_values=marks.size))


@given(st.integers(0, 2**31 - 1), st.sampled_from((1, 7, 64, 3000)), st.integers(0, 2**31 - 1))
@example(2**31 - 1, 3000, 2**31 - 1)
@example(2**31 - 1, 1, 1)
@example(3001, 3000, 1)
@example(5999, 3000, 17)
def test_ranks_are_an_even_sample(count: int, capacity: int, turn: int) -> None:
    got = np.asarray(_ranked(capacity)(jnp.int32(count), jnp.int32(turn))).astype(np.int64)
    if count <= capacity:
        np.testing.assert_array_equal(got, np.arange(capacity))
        return
    assert got[0] >= 0
    assert got[-1] < count
    assert np.all(np.diff(got) > 0)
    # slot s has its place in the cell [s, s + 1) count / capacity, and all slots the same place in their cells
    step, phase = Fraction(count, capacity), Fraction((turn * 2654435769 % 2**32) >> 8, 2**24)
    exact = np.array([int((s + phase) * step) for s in range(capacity)])
    assert np.abs(got - exact).max() <= 1 + float(step) * 2.0**-22, "off by more than the rounding of float32"


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("count", [8, 65, 100, 500, 4099])
def test_every_rank_gets_its_turn(count: int, capacity: int) -> None:
    turns = -(-2 * count // capacity) + 2
    for first in (0, 1000, 2**31 - 8201):
        listed = _in_turns(capacity)(jnp.int32(count), first + np.arange(8200, dtype=np.int32))[:turns]
        assert set(np.asarray(listed).reshape(-1).tolist()) >= set(range(count))


@given(some_marks(), st.integers(0, 200), st.integers(0, 200), st.integers(0, 2**31 - 1))
@settings(max_examples=50)
def test_or_one_marks_one_element_of_an_empty_range(marks: np.ndarray, first: int, length: int, turn: int) -> None:
    words = _numpy_words(marks)
    start = min(first, words.size) * 32
    stop = min(first + length, words.size) * 32
    marks = np.zeros(words.size * 32, bool) if turn % 2 else np.pad(marks, (0, -marks.size % 32))
    want = marks.copy()
    if not marks.any() and stop > start:
        want[start + turn % (stop - start)] = True
    got = jax.jit(or_one)(_numpy_words(marks), jnp.int32(start), jnp.int32(stop), jnp.int32(turn))
    np.testing.assert_array_equal(got, _numpy_words(want))
