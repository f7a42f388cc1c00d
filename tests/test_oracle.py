"""Every step of every option against the plain numpy oracle, from `init` on.

Gradients of "whole" numbers are small integers times a power of two: sums and halves of them are exact in float32, so everything but the
control's logarithms must be equal to the bit. Ordinary ones are compared to the rounding of a sum of n numbers.
"""

from typing import Any

import jax
import numpy as np
import pytest

import oracle
from simulate import SETUPS, flat, gradients, simulation


SCALES = [1, 1, 1, 8, 8, 1 / 16, 1 / 16, 1 / 16, 1, 1, 1, 1]  # what the servo follows, and what makes it start anew


def _draws(kind: str, rng: np.random.RandomState, scale: float, most: int) -> Any:
    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if kind == "whole":
            return rng.randint(-most, most + 1, shape) * scale
        return rng.standard_normal(shape) * scale * np.exp(np.linspace(0, 3, shape[-1]) if len(shape) > 1 else 1)

    return draw


@pytest.mark.parametrize("kind", ["whole", "ordinary"])
@pytest.mark.parametrize("name", SETUPS)
def test_every_step_equals_the_oracle(name: str, kind: str) -> None:
    tree, n, options = SETUPS[name]
    if tree == "mixed":
        kind = "whole"  # a sum that differs in its last bit may round to another bfloat16
    rng = np.random.RandomState(len(name))
    overflow = 0
    run = simulation(tree, n, **options)
    state = jax.device_get(run.init())
    for t in range(12):
        g = gradients(tree, n, _draws(kind, rng, SCALES[t] if tree != "large" else 1, 8 if tree == "mixed" else 1000))
        if t == 4:
            jax.tree.leaves(g)[0].reshape(-1)[0] = np.nan
        if t == 10:
            g = jax.tree.map(np.zeros_like, g)
        want_update, want = oracle.step(state, g, oracle.Options(**options))
        exact = kind == "whole" and n in (1, 2, 4, 8)
        largest = np.nanmax(np.abs(flat(g, 1))) + np.abs(flat(state.residual, 1)).max()
        bound = 0 if exact else (n + 1) * 2.0**-24 * largest
        update, state = jax.device_get(run.step(g, state))
        _compare(t, update, want_update, state, want, bound)
        overflow += state.metrics.overflow
    assert overflow > 0 or name != "overflow", "the setup must do what it is there for"
    assert overflow == 0 or name != "large", "of many thousand ranks float32 rounds some to a neighbour"


def _compare(t: int, update: Any, want_update: Any, state: Any, want: Any, bound: float) -> None:
    for got, wanted in zip(jax.tree.leaves(update), jax.tree.leaves(want_update), strict=True):
        assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(flat(update) != 0, flat(want_update) != 0, f"step {t}")
    np.testing.assert_allclose(flat(update), flat(want_update), rtol=0, atol=bound, err_msg=f"step {t}")
    np.testing.assert_array_equal(flat(state.residual, 1), flat(want.residual, 1), f"step {t}")
    if state.velocity is not None:
        np.testing.assert_array_equal(flat(state.velocity, 1), flat(want.velocity, 1), f"step {t}")
    assert (state.exchanges, state.mini_step) == (want.exchanges, want.mini_step)
    rule, topology = state.control
    for field, got in (rule._asdict() | {"heat": topology.heat}).items():
        wanted = want.control.topology.heat if field == "heat" else getattr(want.control.rule, field)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6 if field in ("trend", "heat") else 0, err_msg=f"step {t}: {field}")
    if want.control.topology.next_blocks is None:
        assert oracle.is_even_cut(topology.heat, topology.next_blocks), f"step {t}"
    else:
        np.testing.assert_array_equal(topology.next_blocks, want.control.topology.next_blocks, f"step {t}")
    for field, got in state.metrics._asdict().items():
        wanted = getattr(want.metrics, field)
        if wanted is not None:
            np.testing.assert_allclose(got, wanted, rtol=1e-6, err_msg=f"step {t}: {field}")
