"""What is unpacked is what was packed, in as few words as promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exdyna_jax._wire import index_words, pack_halves, pack_indices, unpack_halves, unpack_indices

_pack = jax.jit(pack_indices, static_argnums=1)
_unpack = jax.jit(unpack_indices, static_argnums=1)


@st.composite
def _lists(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """An ascending list of different indices with padding behind it, and the span."""
    span = 32 * draw(st.sampled_from([1, 2048, 2049, 2**26 - 2]))
    capacity = draw(st.sampled_from([1, 6, 21]))  # few shapes: each is a compilation
    indices = draw(st.sets(st.integers(0, span - 1) | st.sampled_from([0, span - 1]), max_size=capacity))
    return np.array(sorted(indices) + [span] * (capacity - len(indices)), np.int32), span


@given(_lists())
def test_indices(case: tuple[np.ndarray, int]) -> None:
    indices, span = case
    words = _pack(indices, span)
    assert words.dtype == jnp.uint32
    assert words.shape == (index_words(indices.size, span),)
    np.testing.assert_array_equal(_unpack(words, indices.size), indices)


def test_indices_take_17_bits() -> None:
    """And one for each 65,536 positions."""
    assert index_words(5140, 25_600_000) * 32 <= 17 * 5140 + 25_600_000 / 65536 + 64


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.uint16])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_halves(dtype: jax.typing.DTypeLike, size: int) -> None:
    halves = jnp.arange(size).astype(dtype) - jnp.asarray(0 if dtype == jnp.uint16 else 3, dtype)
    words = pack_halves(halves)
    assert words.shape == (-(-size // 2),)
    np.testing.assert_array_equal(unpack_halves(words, size, dtype), halves)
