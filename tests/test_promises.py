"""What the library promises, held for ExDyna, and where a list says METHODS for the others too.

1. Nothing is lost: `mean_i(a_i) == update + mean_i(residual_i)` for every element, with overflow, padding, low-precision leaves and any
   capacity; up to the rounding of the sums, exactly where values only move. A skipped step leaves everything as it was: on random trees
   `test_conservation.py`, at the edges of number formats and of capacity here.
2. Exclusive: no index is exchanged twice in a step and zeros are never selected; `density = 1` is the dense mean, `n = 1` plain threshold
   sparsification with error feedback.
3. Replicas stay equal: parameters, threshold and topology are bit-identical on all workers: `test_replicas.py`.
4. The same answer everywhere: `shard_map` (checked or not), `pmap`, `vmap`, jitted or not; and however the elements are cut into leaves.
5. The state is constant in structure, dtype, shape and sharding type; a second update compiles nothing; `lax.scan` works.
6. The published mode matches the published implementation: `test_golden.py`.
7. The asked density is the obtained density: `test_density.py`.
8. No silent trap: a `ValueError` at trace time where types show the mistake, a metric where they don't: `test_traps.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import (
    AXIS,
    CONTEXTS,
    METHODS,
    SETUPS,
    compilations,
    flat,
    gradients,
    mesh,
    metrics,
    ordinary,
    params_of,
    shapes_of,
    simulate,
    simulation,
    whole,
)

EPS = 2.0**-24


# 1. Nothing is lost


def test_update_too_large_for_its_dtype_is_not_lost() -> None:
    """Three gradients of 30,000 add up to more than float16 can hold: what does not fit into the update waits."""
    shapes = [jax.ShapeDtypeStruct((64,), jnp.float16)]
    run = simulate(exdyna_jax.exdyna(0.5, AXIS, num_workers=2, every_k=3), shapes, 2)
    g, state, moved = [np.full((2, 64), 30_000, np.float16)], run.init(), np.zeros(64)
    for _ in range(6):
        update, state = run.step(g, state)
        moved += flat(update)
    assert np.isfinite(moved).all()
    np.testing.assert_array_equal(moved + flat(state.residual, 1).mean(axis=0), np.full(64, 180_000.0))


@pytest.mark.parametrize("options", [{}, {"every_k": 2}, {"momentum": 0.9}, {"every_k": 3, "momentum": 0.9, "min_size": 40}], ids=str)
@pytest.mark.parametrize("size", [1e27, 1e38, 3e38])
def test_sums_that_could_become_infinite_are_skipped(size: float, options: dict[str, Any]) -> None:
    """Finite gradients whose sums, now or later, would not be: they are skipped like an infinity, and training goes on."""
    run = simulation("odd", 2, 0.3, **options)
    rng = np.random.RandomState(0)
    state = run.init()
    for t in range(8):
        bad = t in (1, 3)
        g = gradients("odd", 2, (lambda shape: np.full(shape, size)) if bad else rng.standard_normal)
        before, (update, state) = state, run.step(g, state)
        assert metrics(state)["skipped"] == (t >= 1) + (t >= 3)
        assert np.isfinite(flat(update)).all()
        assert np.isfinite(flat(state.residual, 1)).all()
        if bad:
            np.testing.assert_array_equal(flat(state.residual, 1), flat(before.residual, 1))


def test_every_element_of_an_overflowing_partition_is_sent() -> None:
    """At a threshold that everything exceeds, partitions overflow in each step; no element waits for ever."""
    run = simulation("odd", 4, **SETUPS["paper"][2])
    rng = np.random.RandomState(0)
    state, never = run.init(), np.ones(flat(params_of("odd")).size, bool)
    for _ in range(150):
        update, state = run.step(gradients("odd", 4, lambda shape: 5 + rng.random_sample(shape)), state)
        assert metrics(state)["overflow"] > 0
        never &= flat(update) == 0
    assert not never.any()


# 2. Exclusive


@pytest.mark.parametrize("name", ["default", "overflow", "paper", "five workers", "more workers than blocks", "schedule"])
def test_no_index_twice_and_no_zero(name: str) -> None:
    tree, n, options = SETUPS[name]
    run = simulation(tree, n, **options)
    rng = np.random.RandomState(0)
    state = run.init()
    for t in range(10):
        g = gradients(tree, n, ordinary(rng, zeros=0.9 if t > 4 else 0))
        a = flat(g, 1, np.float32) + flat(state.residual, 1, np.float32)
        update, state = run.step(g, state)
        told = metrics(state)
        untouched = np.all(flat(state.residual, 1) == a, axis=0)
        moved = ~untouched & np.all(flat(state.residual, 1) == 0, axis=0)
        assert np.all(untouched | moved), "an element is sent by all workers or by none"
        np.testing.assert_array_equal(flat(update) != 0, moved)
        assert told["sent"] == told["selected"] - told["overflow"]
        if options.get("threshold_rule") != "paper":  # there an empty partition sends one element, whatever it is
            assert moved.sum() == told["sent"], "each index once, and none of them a zero"
            assert np.all(np.abs(a[:, moved]).max(axis=0) >= told["threshold"] * (1 - EPS))
            assert told["threshold"] > 0


def test_one_worker_is_threshold_sparsification() -> None:
    run = simulation("odd", 1, **SETUPS["one worker"][2])
    alone = jax.jit(exdyna_jax.exdyna(axis_name=None, **SETUPS["one worker"][2]).update)
    rng = np.random.RandomState(0)
    state = other = run.init()
    for _ in range(8):
        g = gradients("odd", 1, ordinary(rng))
        a = (flat(g, 1, np.float32) + flat(state.residual, 1, np.float32))[0]
        update, state = run.step(g, state)
        keep = np.abs(a) >= metrics(state)["threshold"]
        np.testing.assert_array_equal(flat(update), np.where(keep, a, 0))
        np.testing.assert_array_equal(flat(state.residual), np.where(keep, 0, a))
        update_, other = alone(jax.tree.map(lambda x: x[0], g), other)
        np.testing.assert_array_equal(flat(update_), flat(update))


@pytest.mark.parametrize("n", [1, 4])
def test_density_one_is_the_dense_mean(n: int) -> None:
    run = simulation("odd", n, 1.0)
    rng = np.random.RandomState(0)
    state = run.init()
    for t in range(4):
        g = gradients("odd", n, whole(rng) if t else lambda shape: np.zeros(shape))
        update, state = run.step(g, state)
        np.testing.assert_array_equal(flat(update), flat(g, 1).mean(axis=0))
        assert not flat(state.residual).any()


# 4. The same answer everywhere


@functools.cache
def _reference() -> tuple[list[Any], list[Any]]:
    """Ten steps of gradients, and what `vmap` makes of them."""
    rng = np.random.RandomState(3)
    steps = [gradients("odd", 4, whole(rng, t % 3)) for t in range(10)]
    return steps, _run(simulation("odd", 4, **SETUPS["default"][2]), steps)


def _run(run: Any, steps: list[Any]) -> list[Any]:
    state, seen = run.init(), []
    for g in steps:
        update, state = run.step(g, state)
        seen.append(jax.device_get((update, state)))
    return seen


def _same(got: list[Any], want: list[Any]) -> None:
    for (update, state), (want_update, want_state) in zip(got, want, strict=True):
        np.testing.assert_array_equal(flat(update), flat(want_update))
        np.testing.assert_array_equal(flat(state.residual, 1), flat(want_state.residual, 1))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), state.control, want_state.control)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), state.metrics, want_state.metrics)


@pytest.mark.parametrize("context", CONTEXTS[1:])
def test_same_numbers_in_every_context(context: str) -> None:
    steps, want = _reference()
    run = simulation("odd", 4, context=context, **SETUPS["default"][2])
    _same(_run(run, steps), want)


def test_same_numbers_without_jit() -> None:
    tx = exdyna_jax.exdyna(0.1, axis_name=None)
    g = jnp.asarray(np.random.RandomState(0).standard_normal(100), jnp.float32)
    _same([tx.update(g, tx.init(g))], [jax.jit(tx.update)(g, tx.init(g))])


def test_independent_of_how_elements_are_cut_into_leaves() -> None:
    _, n, options = SETUPS["five workers"]
    cuts = ["whole", "whole, cut differently"]
    rng = np.random.RandomState(0)
    vectors = [whole(rng)((n, 5120)) for _ in range(8)]
    seen = []
    for tree in cuts:
        run = simulation(tree, n, **options)
        edges = np.cumsum([np.prod(s.shape) for s in shapes_of(tree)])[:-1]
        split = [np.split(v.astype(np.float32), edges, axis=1) for v in vectors]
        steps = [[x.reshape(n, *s.shape) for x, s in zip(parts, shapes_of(tree), strict=True)] for parts in split]
        seen.append(_run(run, steps))
    for (update, state), (other, other_state) in zip(*seen, strict=True):
        np.testing.assert_array_equal(flat(update), flat(other))
        np.testing.assert_array_equal(flat(state.residual, 1), flat(other_state.residual, 1))
        jax.tree.map(np.testing.assert_array_equal, state.control, other_state.control)


# 5. The state is constant


@pytest.mark.parametrize("context", CONTEXTS)
def test_second_update_compiles_nothing(context: str) -> None:
    steps, _ = _reference()
    run = simulation("odd", 4, context=context, **SETUPS["default"][2])
    state = run.init()
    first = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
    _, state = jax.block_until_ready(run.step(steps[0], state))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    with compilations() as compiled:
        for g in steps[1:4]:
            _, state = jax.block_until_ready(run.step(g, state))
            assert compiled() == 0
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == first
    assert jax.tree.map(lambda x: x.sharding, state) == shardings


@pytest.mark.parametrize("name", ["paper", "momentum", "schedule", "every third", "small leaves dense", *METHODS])
def test_state_keeps_its_types(name: str) -> None:
    tree, n, options = (SETUPS | METHODS)[name]
    run = simulation(tree, n, **options)
    state = run.init()
    _, after = jax.eval_shape(run.step, gradients(tree, n, np.zeros), state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_scan_equals_the_loop() -> None:
    """Fifty steps inside one checked `shard_map`: the carry has one type, replication included."""
    rng = np.random.RandomState(0)
    steps = [gradients("odd", 4, whole(rng, t // 20)) for t in range(50)]
    run = simulation("odd", 4, context="shard_map", **SETUPS["default"][2])
    tx = exdyna_jax.exdyna(axis_name=AXIS, num_workers=4, **SETUPS["default"][2])
    specs = exdyna_jax.state_specs(run.init(), AXIS)

    def many(state: Any, gradients: Any) -> Any:
        def one(state: Any, g: Any) -> Any:
            update, state = tx.update(jax.tree.map(lambda x: x[0], g), state)
            return state, update

        return lax.scan(one, state, gradients)

    scanned = jax.jit(jax.shard_map(many, mesh=mesh(4), in_specs=(specs, P(None, AXIS)), out_specs=(specs, P())))
    state, updates = jax.device_get(scanned(run.init(), jax.tree.map(lambda *g: np.stack(g), *steps)))
    seen = _run(run, steps)
    for t, (update, _) in enumerate(seen):
        np.testing.assert_array_equal(flat(jax.tree.map(lambda u, t=t: u[t], updates)), flat(update))
    _same([(update, state)], seen[-1:])
