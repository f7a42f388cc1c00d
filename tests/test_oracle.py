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
            return np.round(rng.standard_normal(shape) * most) * scale
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
        g = gradients(tree, n, _draws(kind, rng, SCALES[t] if tree != "large" else 1, 3 if tree == "mixed" else 300))
        if t == 4:
            jax.tree.leaves(g)[0].reshape(-1)[0] = np.nan
        if t == 10:
            g = jax.tree.map(np.zeros_like, g)
        want_update, want = oracle.step(state, g, oracle.Options(**options))
        exact = kind == "whole" and n in (1, 2, 4, 8, 64)
        largest = np.nanmax(np.abs(flat(g, 1))) + np.abs(flat(state.residual, 1)).max()
        bound = 0 if exact else (n + 1) * 2.0**-24 * largest
        update, state = jax.device_get(run.step(g, state))
        oracle.compare(t, update, want_update, state, want, bound)
        overflow += state.metrics.overflow
    assert overflow > 0 or name != "overflow", "the setup must do what it is there for"
    assert overflow == 0 or name != "large", "of many thousand ranks float32 rounds some to a neighbour"
