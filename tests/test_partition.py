"""Blocks, partitions, rotation and balancing.

Held: whatever the topology, the partitions cover the index space once and without gaps; in n steps each worker has had each of them; both
balancing rules do what plain loops do; ours gives every worker a block where there are enough, and evens out a skewed gradient.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from exdyna_jax._partition import BALANCES, LARGEST_BLOCK, PAPER_BLOCKS, by_partition, edges, even_blocks, make_grid, partition_of

WORKERS = (1, 2, 3, 5, 8)
spans = st.integers(1, 2000).map(lambda words: 32 * words)


@functools.cache
def _next(balance: str, span: int, n: int, num_blocks: int | None, size: int) -> Any:
    grid = make_grid(span, num_blocks)
    return jax.jit(lambda topology, counts, indices, sent: BALANCES[balance].next(topology, grid, size, counts, indices, sent))


@given(st.one_of(spans, st.sampled_from([25_557_056, 2**31 - 64, 2**25, 2**22 + 32])), st.sampled_from([None, 1, 7, 1024, 10**6]))
def test_blocks_are_whole_words_and_fit_the_space(span: int, num_blocks: int | None) -> None:
    grid = make_grid(span, num_blocks)
    assert grid.block_size % 32 == 0
    assert grid.num_blocks >= 1
    last = grid.span - (grid.num_blocks - 1) * grid.block_size
    if num_blocks is None:
        assert 0 < last <= grid.block_size, "one size, but for the last"
        assert grid.block_size <= LARGEST_BLOCK, "a position in a block fits 16 bits"
    else:
        assert last >= grid.block_size > 0, "what remains belongs to the last block"
        assert grid.num_blocks <= num_blocks


def test_published_blocks() -> None:
    """`N // 1024`, rounded down to a multiple of 32."""
    for size in (32_768, 65_536, 100_000 // 32 * 32, 1_600_000):
        grid = make_grid(size, PAPER_BLOCKS)
        assert grid.num_blocks == 1024
        assert grid.block_size == size // 1024 // 32 * 32


@given(spans, st.data())
def test_partitions_cover_the_space_once(span: int, data: st.DataObject) -> None:
    n = data.draw(st.sampled_from(WORKERS))
    grid = make_grid(span, data.draw(st.sampled_from([1, 3, 16, 1024])))
    cuts = sorted(data.draw(st.lists(st.integers(0, grid.num_blocks), min_size=n - 1, max_size=n - 1)))
    blocks = np.diff([0, *cuts, grid.num_blocks]).astype(np.int32)
    got = np.asarray(edges(grid, jnp.asarray(blocks)))
    assert (got[0], got[-1]) == (0, span)
    assert np.all(np.diff(got) >= 0)
    assert np.all(got % 32 == 0)
    assert list(itertools.pairwise(got)) == oracle.bounds(span, grid.block_size, blocks)


@pytest.mark.parametrize("n", WORKERS)
def test_even_start(n: int) -> None:
    for num_blocks in (1, 3, 16, 1024):
        blocks = np.asarray(even_blocks(num_blocks, n))
        assert blocks.tolist() == [num_blocks // n + (p < num_blocks % n) for p in range(n)]


@pytest.mark.parametrize("n", WORKERS)
def test_rotation_gives_every_worker_every_partition(n: int) -> None:
    had = np.array([[int(partition_of(jnp.int32(t), jnp.int32(r), n)) for r in range(n)] for t in range(n)])
    assert had.tolist() == [[(t + r) % n for r in range(n)] for t in range(n)]
    for t in (0, 1, n, 2**31 - 1):
        counts = jnp.arange(n, dtype=jnp.int32) * 10
        ordered = np.asarray(by_partition(counts, jnp.int32(t)))
        assert all(ordered[int(partition_of(jnp.int32(t), jnp.int32(r), n))] == 10 * r for r in range(n))


@given(st.sampled_from([2, 3, 4, 8]), st.sampled_from([16, 64]), st.data())
@settings(max_examples=200)
def test_published_balance(n: int, num_blocks: int, data: st.DataObject) -> None:
    span = 64 * 96
    counts = data.draw(st.lists(st.integers(0, 60), min_size=n, max_size=n))
    cuts = sorted(data.draw(st.lists(st.integers(1, num_blocks - 1), min_size=n - 1, max_size=n - 1, unique=True)))
    blocks = np.diff([0, *cuts, num_blocks]).astype(np.int32)
    topology = BALANCES["paper"].init(make_grid(span, num_blocks), n)._replace(next_blocks=jnp.asarray(blocks))
    given_counts = jnp.asarray(counts, jnp.int32)
    got = _next("paper", span, n, num_blocks, span)(topology, given_counts, jnp.zeros((n, 4), jnp.int32), given_counts)
    assert got.next_blocks.tolist() == oracle.paper_balance(blocks.tolist(), list(counts), span // num_blocks // 32 * 32, span)
    assert sum(got.next_blocks.tolist()) == num_blocks


def _selected(
    rng: np.random.RandomState, span: int, ranges: list[tuple[int, int]], density: np.ndarray, slots: int
) -> tuple[Any, Any, Any]:
    """What workers with these ranges mark where an element is marked with probability `density`, and what of it finds a slot."""
    marks = rng.random_sample(span) < density
    counts, sent, indices = [], [], np.full((len(ranges), slots), span, np.int32)
    for p, (start, stop) in enumerate(ranges):
        marked = start + np.flatnonzero(marks[start:stop])
        kept = marked[oracle.ranks(len(marked), slots, 0)]
        indices[p, : len(kept)] = kept
        counts.append(len(marked))
        sent.append(len(kept))
    return np.array(counts, np.int32), indices, np.array(sent, np.int32)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("num_blocks", [3, 8, 40])
def test_our_balance_equals_the_loop(n: int, num_blocks: int) -> None:
    rng = np.random.RandomState(100 * n + num_blocks)
    span, slots = 4128, 24
    grid = make_grid(span, num_blocks)
    topology = BALANCES["proportional"].init(grid, n)
    for t in range(10):
        density = np.exp(rng.uniform(-6, -2) + 3 * np.linspace(-1, 1, span) ** 2) if t != 6 else np.zeros(span)
        counts, indices, sent = _selected(rng, span, oracle.bounds(span, grid.block_size, topology.next_blocks), density, slots)
        fresh = np.zeros(grid.num_blocks)
        owner = np.repeat(np.arange(n), topology.next_blocks)
        for i in indices[indices < span]:
            block = min(i // grid.block_size, grid.num_blocks - 1)
            fresh[block] += counts[owner[block]] / sent[owner[block]]
        want = oracle.proportional_balance(jax.device_get(topology), fresh, counts.sum(), n)
        topology = _next("proportional", span, n, num_blocks, span)(topology, counts, indices, sent)
        np.testing.assert_allclose(topology.heat, want.heat, rtol=1e-6)
        assert oracle.is_even_cut(np.asarray(topology.heat), np.asarray(topology.next_blocks))
        assert sum(topology.next_blocks.tolist()) == grid.num_blocks
        assert min(topology.next_blocks.tolist()) >= (1 if grid.num_blocks >= n else 0)


@pytest.mark.parametrize(("n", "num_blocks"), [(4, 400), (8, 3)])
def test_our_balance_keeps_its_floor_where_all_weight_is_in_one_block(n: int, num_blocks: int) -> None:
    span, slots = 400 * 32, 100
    grid = make_grid(span, num_blocks)
    topology = BALANCES["proportional"].init(grid, n)
    rng = np.random.RandomState(0)
    for where in (0, span - grid.block_size, span // 2, 0):
        density = np.zeros(span)
        density[where : where + 32] = 1
        for _ in range(20):
            counts, indices, sent = _selected(rng, span, oracle.bounds(span, grid.block_size, topology.next_blocks), density, slots)
            topology = _next("proportional", span, n, num_blocks, span)(topology, counts, indices, sent)
            blocks = np.asarray(topology.next_blocks)
            assert blocks.sum() == grid.num_blocks
            assert blocks.min() >= (1 if grid.num_blocks >= n else 0)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_our_balance_evens_out_a_skewed_gradient(n: int) -> None:
    """A tenth of the elements holds nine tenths of the selected: from the tenth step on partitions are even but for chance."""
    rng = np.random.RandomState(n)
    span, slots, per_worker = 32 * 1024, 2000, 500
    grid = make_grid(span, 1024)
    density = np.full(span, 0.1 / 0.9)
    density[span // 3 : span // 3 + span // 10] = 9
    density *= n * per_worker / density.sum()
    topology = BALANCES["proportional"].init(grid, n)
    imbalance = []
    for _ in range(40):
        counts, indices, sent = _selected(rng, span, oracle.bounds(span, grid.block_size, topology.next_blocks), density, slots)
        imbalance.append(n * counts.max() / counts.sum())
        topology = _next("proportional", span, n, 1024, span)(topology, counts, indices, sent)
    assert imbalance[0] > 1.5
    assert np.mean(imbalance[10:]) < 1.15
