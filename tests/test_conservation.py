"""Promise 1, nothing is lost: for every element `mean_i(a_i) == update + mean_i(residual_i)`, and a skipped step changes nothing.

On random trees, dtypes, options and gradients, with 1 to 9 workers, slots that are too few, steps that are not finite, and density 1; up to
the rounding of the sums, exactly where values only move. A setup is a compilation, so that there are few of them, one for each number of
workers, with many examples each: 504 in all. `pytest -m matrix` runs 36 setups more, density schedules among them. The other methods have
a setup or two each.
"""

import collections
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exdyna_jax
from simulate import AXIS, FALLING, METHODS, PAPER, flat, ordinary, shapes_of, simulate, whole

EPS = 2.0**-24
MOST = 9  # workers
EXAMPLES = 56  # of each setup
NOT_FINITE = st.tuples(st.integers(0, MOST - 1), st.integers(0, 10**6), st.sampled_from([np.nan, np.inf, -np.inf]))
STEPS = st.lists(st.tuples(st.integers(-8, 8), st.sampled_from([0.0, 0.9, 1.0]), st.none() | NOT_FINITE), min_size=1, max_size=6)


ONE: dict[str, Any] = {"density": 1.0}
SCHEDULE: dict[str, Any] = {"density": FALLING, "max_density": 0.3}


class Setup(NamedTuple):
    shapes: Any
    n: int
    options: dict[str, Any]


def random_setup(number: int) -> Setup:
    rng = np.random.RandomState(7007 + number)

    def choose(*choices: Any) -> Any:
        return choices[rng.randint(len(choices))]

    def leaf() -> Any:
        shape = choose((), (0, 3), (rng.randint(1, 3000),), tuple(rng.randint(1, 40, 2).tolist()), tuple(rng.randint(1, 12, 3).tolist()))
        return choose(None, *5 * [jax.ShapeDtypeStruct(shape, choose("float32", "bfloat16", "float16"))])

    leaves = [jax.ShapeDtypeStruct((rng.randint(40, 2000),), choose("float32", "bfloat16")), *(leaf() for _ in range(rng.randint(4)))]
    cut = rng.randint(len(leaves) + 1)
    few_slots = {"capacity_factor": 1.0, "num_blocks": rng.randint(1, 50)}
    density = {"density": 10.0 ** rng.uniform(-2.5, -0.5)}
    options = (
        (ONE if number % 7 == 3 else SCHEDULE if number % 10 == 9 else density)
        | choose({}, few_slots)
        | choose({}, PAPER, {"balance": "paper"})
        | choose({}, {"momentum": 0.5})
        | choose({}, {}, {"every_k": rng.randint(2, 4)})
        | choose({}, {}, {"min_size": 100})
        | choose({}, {}, {"wire_dtype": "bfloat16"})
    )
    return Setup({"a": leaves[cut:], "b": ({"c": leaves[:cut]},)}, number % MOST + 1, options)


@pytest.mark.parametrize("number", [pytest.param(i, marks=[] if i < MOST else pytest.mark.matrix) for i in range(5 * MOST)])
def test_nothing_is_lost(number: int) -> None:
    happened = _try_out("exdyna", random_setup(number), EXAMPLES)
    options = random_setup(number).options
    if "threshold_rule" in options and "capacity_factor" in options and "max_density" not in options and options["density"] < 0.1:
        assert happened["overflow"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_lost_by_other_methods(name: str) -> None:
    tree, n, options = METHODS[name]
    _try_out(options["method"], Setup(shapes_of(tree), n, {k: v for k, v in options.items() if k != "method"}), 20)


def _try_out(method: str, setup: Setup, examples: int) -> collections.Counter[str]:
    """Runs examples of a setup, and says what happened in them."""
    shapes, n, options = setup
    run = simulate(getattr(exdyna_jax, method)(axis_name=AXIS, num_workers=n, **options), shapes, n)
    happened: collections.Counter[str] = collections.Counter()

    @given(exact=st.booleans(), steps=STEPS, seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=examples)
    def holds(exact: bool, steps: list[Any], seed: int) -> None:
        rng = np.random.RandomState(seed)
        state = jax.device_get(run.init())
        happened["examples"] += 1
        for exponent, zeros, spoilt in steps:
            draw = whole(rng, steps[0][0]) if exact else ordinary(rng, exponent, zeros)
            g = jax.tree.map(lambda s, draw=draw: draw((n, *s.shape)).astype(s.dtype), shapes)
            if spoilt:
                _spoil(g, *spoilt)
            before, (update, state) = state, jax.device_get(run.step(g, state))
            happened["overflow"] += int(state.metrics.overflow)
            happened["spoilt"] += spoilt is not None
            if spoilt:
                assert state.metrics.skipped == before.metrics.skipped + 1
                assert not flat(update).any()
                jax.tree.map(np.testing.assert_array_equal, state._replace(metrics=None), before._replace(metrics=None))
            else:
                _check(update, state, g, before, options.get("momentum"), exact and n in (1, 2, 4, 8))

    holds()
    assert happened["examples"] >= examples
    assert happened["spoilt"] > 0
    return happened


def _spoil(g: Any, worker: int, where: int, value: float) -> None:
    leaves = [leaf for leaf in jax.tree.leaves(g) if leaf.size]
    leaf = leaves[where % len(leaves)]
    row = leaf[worker % len(leaf), ...].reshape(-1)
    row[where % row.size] = value


def _check(update: Any, state: Any, g: Any, before: Any, momentum: float | None, exact: bool) -> None:
    taking_part = [i for i, leaf in enumerate(jax.tree.leaves(g)) if leaf.size]
    terms = [_rows(g, taking_part), _rows(before.residual, taking_part)]
    if momentum is not None:
        terms.append(momentum * _rows(before.velocity, taking_part))
    n = len(terms[0])
    bound = 0 if exact else (n + 3) * EPS * sum(map(np.abs, terms)).mean(axis=0)
    lost = sum(terms).mean(axis=0) - flat(update) - _rows(state.residual, taking_part).mean(axis=0)
    assert np.all(np.abs(lost) <= bound)


def _rows(tree: Any, taking_part: list[int]) -> np.ndarray:
    return flat([jax.tree.leaves(tree)[i] for i in taking_part], 1)
