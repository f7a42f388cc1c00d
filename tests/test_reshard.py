"""Another number of workers: nothing that waits is lost, what was learnt is kept, and the new state works."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exdyna_jax
from simulate import AXIS, SHAPES, flat, gradients, metrics, params_of, shapes_of, simulate

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"density": 0.05},
    "published": {"density": 0.02, "threshold_rule": "paper", "balance": "paper"},
    "momentum": {"density": 0.05, "momentum": 0.9, "min_size": 40},
}


def _trained(n: int, options: str, steps: int = 5) -> Any:
    run = simulate(exdyna_jax.exdyna(axis_name=AXIS, num_workers=n, **OPTIONS[options]), shapes_of("odd"), n)
    rng = np.random.RandomState(n)
    state = run.init()
    for _ in range(steps):
        _, state = run.step(gradients("odd", n, rng.standard_normal), state)
    return state


@pytest.mark.parametrize("options", OPTIONS)
def test_mass_and_memory_are_kept(options: str) -> None:
    state = _trained(4, options)
    for m in (8, 2, 3, 1, 5):
        before, state = state, exdyna_jax.reshard(state, m)
        for own in ("residual", "velocity"):
            old, new = getattr(before, own), getattr(state, own)
            if old is None:
                assert new is None
                continue
            assert {x.shape[0] for x in jax.tree.leaves(new)} == {m}
            mass, kept = flat(old, 1).mean(axis=0), flat(new, 1).mean(axis=0)
            np.testing.assert_allclose(kept, mass, rtol=0, atol=1e-6 * np.abs(flat(old, 1)).max())
        assert state.exchanges == before.exchanges
        jax.tree.map(np.testing.assert_array_equal, state.control.rule, before.control.rule)
        np.testing.assert_array_equal(state.control.topology.heat, before.control.topology.heat)
        assert state.control.topology.next_blocks.shape == (m,)
        assert state.control.topology.next_blocks.sum() == before.control.topology.next_blocks.sum()
        fresh = exdyna_jax.exdyna(axis_name=AXIS, num_workers=m, **OPTIONS[options]).init(params_of("odd"))
        assert jax.tree.structure(state) == jax.tree.structure(fresh)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)


@given(n=st.integers(1, 12), m=st.integers(1, 12), seed=st.integers(0, 1000))
@settings(max_examples=50)
def test_each_new_residual_is_an_average_of_old_ones(n: int, m: int, seed: int) -> None:
    """Whole numbers of a size that float32 averages to a few parts in 1e7; a constant stays that constant."""
    state = exdyna_jax.exdyna(0.5, AXIS, num_workers=n).init(jnp.zeros(6))
    old = np.random.RandomState(seed).randint(-100, 100, (n, 6)).astype(np.float32)
    old[:, 0] = 7
    new = np.asarray(exdyna_jax.reshard(state._replace(residual=jnp.asarray(old)), m).residual)
    np.testing.assert_allclose(new.mean(axis=0), old.mean(axis=0), rtol=0, atol=1e-4)
    np.testing.assert_allclose(new[:, 0], 7, rtol=1e-6)
    assert np.all(new >= old.min(axis=0) - 1e-4)
    assert np.all(new <= old.max(axis=0) + 1e-4)
    if n == m:
        np.testing.assert_array_equal(new, old)


def test_training_goes_on() -> None:
    """From 4 to 3 workers: the next step is a step of three workers, with nothing lost and the density still right."""
    tx = exdyna_jax.exdyna(0.05, AXIS, num_workers=3)
    run = simulate(tx, shapes_of("odd"), 3)
    state = exdyna_jax.reshard(_trained(4, "default", 20), 3)
    rng = np.random.RandomState(0)
    selected = []
    for _ in range(20):
        g = gradients("odd", 3, rng.standard_normal)
        want = (flat(g, 1) + flat(state.residual, 1)).mean(axis=0)
        update, state = run.step(g, state)
        np.testing.assert_allclose(flat(update) + flat(state.residual, 1).mean(axis=0), want, rtol=0, atol=1e-5)
        selected.append(metrics(state)["density"])
    assert 0.8 < np.mean(selected) / 0.05 < 1.2


def test_whole_optimizer_states_and_other_leaves() -> None:
    tx = optax.chain(exdyna_jax.exdyna(0.1, AXIS, num_workers=2), optax.adam(1e-3))
    state = tx.init(params_of("odd"))
    new = exdyna_jax.reshard({"optimizer": state, "step": 3}, 4)
    assert new["step"] == 3
    assert jax.tree.structure(new["optimizer"]) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, new["optimizer"][1], state[1])
    assert new["optimizer"][0].residual["a"].shape == (4, *SHAPES["odd"]["a"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: exdyna_jax.reshard(s, 0), "num_workers=0 is not a positive int"),
        (lambda s: exdyna_jax.reshard(s, 2.0), r"num_workers=2\.0 is not a positive int"),
        (lambda s: exdyna_jax.reshard({"a": jnp.zeros(3)}, 2), "no sparsifier state"),
        (lambda s: exdyna_jax.reshard(jax.tree.map(lambda x: jnp.stack([x] * 4), s), 2), r"stacked, as pmap and vmap return it"),
        (lambda s: exdyna_jax.reshard(s._replace(residual=s.residual[:1]), 2), "1 rows, but the state is that of 4 workers"),
    ],
)
def test_wrong_use(call: Any, message: str) -> None:
    state = exdyna_jax.exdyna(0.5, AXIS, num_workers=4).init(jnp.zeros(6))
    with pytest.raises(ValueError, match=message):
        call(state)


def test_forgotten_reshard_names_it() -> None:
    """The state of eight workers on four devices: two rows each."""
    tx = exdyna_jax.exdyna(0.5, AXIS)
    state = exdyna_jax.exdyna(0.5, AXIS, num_workers=8).init(jnp.zeros(64))
    pairs = state._replace(residual=state.residual.reshape(4, 2, 64))
    axes = jax.tree.map(lambda _: None, state)._replace(residual=0)
    with pytest.raises(ValueError, match=r"exdyna_jax\.reshard"):
        jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, axes))(jnp.ones((4, 64)), pairs)
