"""Threshold rules, as pure functions of counts.

Held: the estimate is the quantile that a sort finds, bit for bit, and never zero; the published rule is its three factors; ours moves the
right way, keeps still at the target, asks for a new estimate when it is lost, and brings power-law counts to the target and keeps them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from exdyna_jax._threshold import RULES, quantile

RULE = RULES["proportional"]
SIZE = 257
floats = st.floats(0, float(np.finfo(np.float32).max), width=32)
_next = jax.jit(RULE.next)
_paper_next = jax.jit(RULES["paper"].next)


@jax.jit
def _quantile(magnitudes: Any, target: Any) -> Any:
    return quantile(magnitudes, target)


@given(st.lists(st.one_of(floats, st.sampled_from([0.0, 1.0, 2.0**-126, 2.0**-127, 2.0**-149])), min_size=1, max_size=SIZE), st.data())
@example([0.0], None)
@example([1.0] * SIZE, None)
@settings(max_examples=200)
def test_quantile_is_what_a_sort_finds(values: list[float], data: Any) -> None:
    padded = np.zeros(SIZE, np.float32)
    padded[: len(values)] = values
    target = 1 if data is None else data.draw(st.integers(1, SIZE))
    got = np.asarray(_quantile(padded, jnp.int32(target)))
    assert got.dtype == np.float32
    assert got == max(np.partition(padded, SIZE - target)[SIZE - target], np.float32(2.0**-126))
    assert np.sum(padded >= got) >= target or got == np.float32(2.0**-126)


def _after(state: Any, threshold: float, selected: int, k: int, slope: float) -> Any:
    """The rule's state after a step in which `selected` elements, all sent, lay above the threshold as in a power law."""
    one, excess = jnp.int32(selected), jnp.float32(selected / slope)
    return jax.device_get(_next(state, jnp.float32(threshold), one, one, excess, jnp.float32(k)))


@pytest.mark.parametrize("selected", [1099, 1100, 1101, 909, 910, 1000, 0, 10**6])
def test_published_rule(selected: int) -> None:
    state = RULES["paper"].init(jnp.float32(1000))
    assert float(state.next_threshold) == pytest.approx(1 / (2 * math.sqrt(1000)), rel=1e-6)
    after = _paper_next(state, state.next_threshold, jnp.int32(selected), jnp.int32(selected), jnp.float32(0), jnp.float32(1000))
    assert float(after.next_threshold) == pytest.approx(oracle.ladder(float(state.next_threshold), selected / 1000), rel=1e-6)


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.floats(1, 20, width=32), st.floats(2.0**-100, 2.0**100, width=32))
@settings(max_examples=200)
def test_our_rule_equals_its_formula(selected: int, k: int, slope: float, threshold: float) -> None:
    state = jax.device_get(RULE.init(jnp.float32(k)))._replace(age=np.int32(3), trend=np.float32(0.02), slope=np.float32(3))
    got = _after(state, threshold, selected, k, slope)
    want = oracle.servo(state, threshold, selected, np.full(selected, math.exp(1 / slope)), k)
    for name in got._fields:
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-6 if name == "trend" else 0, err_msg=name)


@pytest.mark.parametrize("slope", [1.5, 3.0, 8.0])
@pytest.mark.parametrize("k", [10, 600, 1000, 1900, 5000])
def test_our_rule_aims_at_another_target_at_once(slope: float, k: int) -> None:
    """On a power law whose slope it knows it hits a k nearby, and asks for a new estimate far away; the target it had changes nothing."""
    state = jax.device_get(RULE.init(jnp.float32(1000)))._replace(next_threshold=np.float32(2), slope=np.float32(slope))
    aimed = jax.device_get(RULE.aim(state, jnp.float32(k)))
    if 500 <= k <= 2000:
        assert 1000 * (aimed.next_threshold / 2) ** -slope == pytest.approx(k, rel=1e-4)
    else:
        assert aimed.next_threshold == 0
    assert k != 1000 or aimed == state
    assert RULE.aim(state._replace(next_threshold=np.float32(0)), jnp.float32(k)).next_threshold == 0


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_our_rule_moves_the_right_way(scale: float) -> None:
    old = jax.device_get(RULE.init(jnp.float32(1000)))._replace(age=np.int32(1000))
    more, right, fewer = (float(_after(old, scale, selected, 1000, 3).next_threshold) / scale for selected in (1500, 1000, 700))
    assert fewer < 1 < more
    assert right == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("selected", "k"), [(0, 1000), (0, 1), (10_000, 1000), (100, 1000)])
def test_our_rule_forgets_when_it_is_lost(selected: int, k: int) -> None:
    state = jax.device_get(RULE.init(jnp.float32(k)))
    after = _after(state._replace(next_threshold=np.float32(1), trend=np.float32(0.1)), 1.0, selected, k, 3)
    assert after._replace(age=None) == state._replace(age=None)
    assert after.age == 1, "the residuals are as old as before"


def test_our_rule_waits_for_the_first_gradient() -> None:
    """All zero so far: nothing was selected at the least threshold there is, and nothing has aged."""
    state = jax.device_get(RULE.init(jnp.float32(1000)))
    assert _after(state._replace(age=np.int32(7)), 2.0**-126, 0, 1000, 3) == state


def test_chance_alone_is_not_lost() -> None:
    """Of two elements asked for, none lost by chance: ten selected, or half of one, is no reason to start anew."""
    state = jax.device_get(RULE.init(jnp.float32(2)))
    assert _after(state, 1.0, 10, 2, 3).next_threshold > 0


@pytest.mark.parametrize("slope", [1.5, 3.0, 8.0])
@pytest.mark.parametrize("start", [0.6, 1.0, 1.6])
def test_our_rule_settles_on_a_power_law(slope: float, start: float) -> None:
    """`count = k (t / t*) ^ -slope` with t* growing by a percent a step: within 5 % of the target after thirty steps, and so it stays."""
    k, goal = 1000, 1.0
    state = jax.device_get(RULE.init(jnp.float32(k)))._replace(age=np.int32(100))
    threshold, counts = start ** (1 / slope), []
    for _ in range(60):
        counts.append(round(k * (threshold / goal) ** -slope))
        state = _after(state, threshold, counts[-1], k, slope)
        threshold, goal = float(state.next_threshold), goal * 1.01
    assert np.abs(np.array(counts[30:]) / k - 1).max() < 0.05
