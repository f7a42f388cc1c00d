"""The other methods against numpy, step by step from `init` on, and what is particular to each.

gTop-k loses nothing for any number of workers, and an element dropped on the way does not count as sent when others bring its index back;
CLT-k forgets with a low-pass memory what its docstring says; DEFT's buffers rarely overflow; the union of several workers counts once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import exdyna_jax
import oracle_methods
from simulate import AXIS, METHODS, compilations, flat, gradients, metrics, simulate, simulation

SHAPES = {"a": (5, 7), "b": (64,), "c": (101,)}
SIZE = 200


def _run(tx: Any, n: int) -> Any:
    return simulate(tx, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)), n)


def _tree(a: np.ndarray) -> Any:
    """[n, SIZE] as leaves `[n, *shape]`."""
    parts = np.split(a.astype(np.float32), np.cumsum([np.prod(s) for s in SHAPES.values()])[:-1], axis=1)
    return {name: part.reshape(len(a), *shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def _compare(t: int, update: Any, state: Any, want: tuple[np.ndarray, np.ndarray], exact: bool = True) -> None:
    mean, residual = want
    bound = 0 if exact else 2.0**-22 * max(np.abs(residual).max(), np.abs(mean).max())  # a sum of a few numbers, in float32
    np.testing.assert_array_equal(flat(update) != 0, mean != 0, f"step {t}")
    np.testing.assert_allclose(flat(update), mean.astype(np.float32), rtol=0, atol=bound, err_msg=f"step {t}")
    np.testing.assert_array_equal(flat(state.residual, 1), residual, f"step {t}")


def test_micro_partitions_are_equal_in_elements() -> None:
    """67, 67 and 66 of the 200 elements, cut inside words and across leaves whose last word is not full, in rotation."""
    run = _run(exdyna_jax.micro(0.9, AXIS, num_workers=3, capacity_factor=float("inf")), 3)
    edges = [0, 67, 134, 200]
    for t in range(3):
        for worker in range(3):
            g = np.zeros((3, SIZE))
            g[worker] = 1
            update, state = run.step(_tree(g), run.init()._replace(exchanges=jnp.int32(t)))
            p = (t + worker) % 3
            assert np.flatnonzero(flat(update)).tolist() == list(range(edges[p], edges[p + 1]))
            assert metrics(state)["selected_per_worker"].tolist() == [edges[p + 1] - edges[p] if w == worker else 0 for w in range(3)]
    assert "blocks" not in metrics(state)


@pytest.mark.parametrize("n", range(1, 10))
def test_gtop_k(n: int) -> None:
    run = _run(exdyna_jax.gtop_k(0.06, AXIS, num_workers=n), n)
    rng = np.random.RandomState(n)
    state, left_behind = run.init(), 0
    for t in range(12):
        common = rng.randint(-20, 21, (1, SIZE)) * (rng.random_sample((1, SIZE)) < 0.2)  # so that workers meet at some indices
        g = rng.randint(-20, 21, (n, SIZE)) + common if t != 7 else np.zeros((n, SIZE))
        a = (g + flat(state.residual, 1)).astype(np.float32)
        update, state = run.step(_tree(g), state)
        want = oracle_methods.gtop_k(a, 12)
        _compare(t, update, state, want, exact=n in (1, 2, 4, 8))
        at = flat(update) != 0
        told = metrics(state)
        assert told["sent"] == at.sum() <= 12
        assert told["selected_per_worker"].tolist() == [12] * n
        np.testing.assert_allclose(a.sum(axis=0), n * flat(update) + flat(state.residual, 1).sum(axis=0), rtol=0, atol=1e-4)
        left_behind += np.sum((flat(state.residual, 1) != 0) & at)
    assert left_behind > 0 or n == 1, "some must have been dropped at an index that is sent"


def test_gtop_k_drops_what_comes_back_by_others() -> None:
    """Index 0 is dropped when workers 0 and 1 merge, and comes back from workers 2 and 3: what the first two hold there was not sent."""
    g = np.zeros((4, SIZE))
    g[0, [0, 1]] = 5, 6
    g[1, [2]] = 7
    g[2, [0]] = 9
    g[3, [3]] = 8
    run = _run(exdyna_jax.gtop_k(0.005, AXIS, num_workers=4), 4)  # k = 1
    update, state = run.step(_tree(g), run.init())
    assert np.flatnonzero(flat(update)).tolist() == [0]
    assert flat(update)[0] == 9 / 4
    assert flat(state.residual, 1)[:, 0].tolist() == [5, 0, 0, 0]


@pytest.mark.parametrize(("method", "n"), [("top_k", 3), ("top_k", 4), ("clt_k", 3)])
def test_top_k_and_clt_k(method: str, n: int) -> None:
    run = _run(getattr(exdyna_jax, method)(0.06, AXIS, num_workers=n), n)
    rng = np.random.RandomState(n)
    state = run.init()
    for t in range(8):
        g = rng.randint(-20, 21, (n, SIZE)) * (t != 5)
        a = (g + flat(state.residual, 1)).astype(np.float32)
        update, state = run.step(_tree(g), state)
        want = oracle_methods.top_k(a, 12) if method == "top_k" else oracle_methods.clt_k(a, 12, t)
        _compare(t, update, state, want, exact=n == 4)
        told = metrics(state)
        union = np.sum(np.any(want[1] != a, axis=0))
        assert told["sent"] == told["selected"] == union
        assert told["density"] == pytest.approx(union / SIZE)
        leader = [12 if w == t % n else 0 for w in range(n)]
        assert told["selected_per_worker"].tolist() == ([12] * n if method == "top_k" else leader)


def test_low_pass_memory() -> None:
    """e <- (1 - beta) e + beta (a - sent), element by element."""
    n, beta = 2, 0.25
    run = _run(exdyna_jax.clt_k(0.06, AXIS, beta=beta, num_workers=n), n)
    rng = np.random.RandomState(0)
    state = run.init()
    for t in range(6):
        g = rng.randint(-20, 21, (n, SIZE)).astype(np.float32)
        e = flat(state.residual, 1)
        mean, rest = oracle_methods.clt_k((g + e).astype(np.float32), 12, t)
        update, state = run.step(_tree(g), state)
        np.testing.assert_allclose(flat(update), mean, rtol=1e-6)
        np.testing.assert_allclose(flat(state.residual, 1), (1 - beta) * e + beta * rest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("density", [0.02, 0.3])
def test_sidco(density: float) -> None:
    n = 3
    run = _run(exdyna_jax.sidco(density, AXIS, num_workers=n, capacity_factor=float("inf")), n)
    rng = np.random.RandomState(0)
    state, stages, ratios, seen = run.init(), [1] * n, [[] for _ in range(n)], set()
    for t in range(40):
        g = rng.laplace(size=(n, SIZE)) ** np.array([[1.0], [3.0], [1.0]]) * np.array([[1], [1], [1e-4]])
        g[2] = np.abs(g[2]) ** 0.2  # all alike: only more stages find the tail
        a = (g.astype(np.float32) + flat(state.residual, 1)).astype(np.float32)
        update, state = run.step(_tree(g), state)
        thresholds = [oracle_methods.sidco_threshold(np.abs(row), density, s) for row, s in zip(a, stages, strict=True)]
        assert metrics(state)["threshold"] == pytest.approx(min(thresholds), rel=1e-5)
        marked = [np.flatnonzero(np.abs(row) >= threshold) for row, threshold in zip(a, thresholds, strict=True)]
        _compare(t, update, state, oracle_methods.send(a, np.concatenate(marked).tolist()), exact=False)
        assert metrics(state)["selected_per_worker"].tolist() == [len(x) for x in marked]
        for w, x in enumerate(marked):
            ratios[w].append(len(x) / int(density * SIZE))
            if t % 5 == 4:
                stages[w] = oracle_methods.sidco_stages(stages[w], ratios[w], density)
                ratios[w] = []
        assert state.control.stages.tolist() == stages
        seen |= set(stages)
    assert len(seen) > 1


@pytest.mark.parametrize("m", [2, 5])
def test_sidco_for_another_number_of_workers(m: int) -> None:
    rng = np.random.RandomState(0)
    run = _run(exdyna_jax.sidco(0.1, AXIS, num_workers=3), 3)
    _, state = run.step(_tree(rng.standard_normal((3, SIZE))), run.init())
    state = state._replace(control=state.control._replace(stages=jnp.asarray([1, 2, 3], jnp.int32)))
    moved = exdyna_jax.reshard(state, m)
    assert moved.control.stages.tolist() == {2: [1, 2], 5: [1, 1, 2, 2, 3]}[m]
    again = _run(exdyna_jax.sidco(0.1, AXIS, num_workers=m), m)
    _, after = again.step(_tree(rng.standard_normal((m, SIZE))), moved)
    assert metrics(after)["sent"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_counts_agree(name: str) -> None:
    """`selected` is `sent + overflow`, what is sent is what arrives, and only the first step compiles."""
    tree, n, options = METHODS[name]
    run = simulation(tree, n, **options)
    rng = np.random.RandomState(0)
    state, overflow = run.init(), 0
    for t in range(8):
        g = gradients(tree, n, lambda shape: rng.standard_normal(shape) * 4)
        with compilations() as compiled:
            update, state = jax.block_until_ready(run.step(g, state))
            assert t == 0 or compiled() == 0
        told = metrics(state)
        overflow += told["overflow"]
        assert told["selected"] == told["sent"] + told["overflow"]
        assert told["gradients_identical"] == (n == 1)
        if options.get("every_k", 1) == 1 and options.get("threshold_rule") != "paper" and not options.get("min_size"):
            assert np.count_nonzero(flat(update)) == told["sent"]
    assert (overflow > 0) == ("few slots" in name or name == "hard_threshold")
