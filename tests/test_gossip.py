"""Gossip: who meets whom, what a mixing does to the parameters, that it does the same everywhere, and what it sends.

Parameters differ between workers here, so a test holds all of them, leaves `[n, *shape]`. `pytest -m matrix` runs the rest of the numbers
of workers, and of the combinations of context, method and tree, of which every pair occurs by default.
"""

import functools
import itertools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax
from exdyna_jax._gossip import _drawn
from exdyna_jax._permutations import draw, exponential, pool
from exdyna_jax._segments import make_segments
from simulate import AXIS, compilations, flat, mesh, ordinary, whole

rows = functools.partial(jax.tree.map, lambda x: x[0])


SHAPES = {"a": (5, 7), "b": (), "c": (103,), "d": (3, 4, 2)}
MIXED = {"a": "bfloat16", "c": "float16"}


def random(n: int, dtypes: dict[str, str] | None = None, seed: int = 0, draw: Any = ordinary) -> Any:
    """Parameters or updates of n workers."""
    fill = draw(np.random.RandomState(seed))
    return {k: fill((n, *shape)).astype(jnp.dtype((dtypes or {}).get(k, "float32"))) for k, shape in SHAPES.items()}


def still(params: Any) -> Any:
    """Updates that do nothing."""
    return jax.tree.map(jnp.zeros_like, params)


class Run:
    """n workers that mix, in one of JAX's contexts: parameters `[n, *shape]`, and the state as seen from outside."""

    def __init__(self, tx: Any, params: Any, context: str = "vmap", axes: dict[str, int] | None = None) -> None:
        self.params = params
        self._place = lambda updates: updates
        if context in ("vmap", "pmap"):
            over = jax.pmap if context == "pmap" else jax.vmap
            self.state = over(tx.init, axis_name=AXIS)(params)
            step = over(functools.partial(_step, tx), axis_name=AXIS)
            self._step = step if context == "pmap" else jax.jit(step)
        else:
            sizes = axes or {AXIS: len(jax.tree.leaves(params)[0])}
            kind = AxisType.Explicit if context == "explicit mesh" else AxisType.Auto
            place = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
            self.state = tx.init(params)
            own = tuple(a for a in sizes if a != "group")
            specs = exdyna_jax.state_specs((params, self.state), own)
            spread = P((*own, "group") if "group" in sizes else own)
            step = functools.partial(_step, tx)
            mapped = jax.shard_map(step, mesh=place, in_specs=(*specs, spread), out_specs=specs, check_vma="unchecked" not in context)
            self._step = jax.jit(mapped)
            shardings = jax.tree.map(lambda spec: NamedSharding(place, spec), specs)
            self.params, self.state = jax.device_put((params, self.state), shardings)
            self._place = lambda updates: jax.device_put(updates, NamedSharding(place, spread))

    def step(self, updates: Any) -> Any:
        self.params, self.state = self._step(self.params, self.state, self._place(updates))
        return jax.device_get(self.params)

    def metrics(self) -> dict[str, np.ndarray]:
        return jax.tree.map(np.asarray, exdyna_jax.metrics(self.state))


def _step(tx: Any, params: Any, state: Any, updates: Any) -> Any:
    updates, state = tx.update(updates, state, params)
    return optax.apply_updates(params, updates), state


# the same in numpy


def drawing(n: int, rng: np.random.RandomState) -> tuple[int, ...]:
    """The paper's, as methods.md has it."""
    chosen: list[int] = []
    for i in range(n):
        free = [j for j in range(n) if j not in chosen]
        last = i == n - 2 and n - 1 in free
        chosen.append(n - 1 if last else rng.choice([j for j in free if j != i]))
    return tuple(chosen)


def crossed(params: Any, segments: Any, t: int, n: int, seed: int = 0) -> Any:
    """float64, `[n, N]`: all parameters after mixing number t."""
    one = rows(params)
    cut = make_segments(one, segments)
    destinations = pool(n, 1, seed)
    chosen = np.asarray(_drawn(seed, jnp.int32(t), len(destinations), len(cut)))
    first = np.cumsum([0, *(leaf.size for leaf in jax.tree.leaves(one))])
    before = flat(params, 1)
    after = before.copy()
    for segment, row in zip(cut, chosen, strict=True):
        for leaf, start, stop in segment:
            at = slice(first[leaf] + start, first[leaf] + stop)
            after[destinations[row], at] = (before[destinations[row], at] + before[:, at]) / 2
    return after


# who meets whom


FEW = {*range(2, 10), 16, 17, 33, 64, 65}  # workers


@pytest.mark.parametrize("n", [pytest.param(n, marks=[] if n in FEW else pytest.mark.matrix) for n in range(2, 66)])
def test_mixing_matrices(n: int) -> None:
    """1000 steps: no worker meets itself, all send once and receive once, rows and columns add up to 1, and the mean stays."""
    destinations = pool(n, 1, n)
    assert np.array_equal(np.sort(destinations, axis=1), np.broadcast_to(np.arange(n), destinations.shape))
    assert not np.any(destinations == np.arange(n))
    pairs = np.zeros((n, n), int)
    for row in destinations:
        pairs[np.arange(n), row] += 1
    np.testing.assert_array_equal(pairs, 1 - np.eye(n, dtype=int))  # every ordered pair equally often
    matrices = np.zeros((len(destinations), n, n))
    for matrix, row in zip(matrices, destinations, strict=True):
        np.fill_diagonal(matrix, 0.5)
        matrix[row, np.arange(n)] = 0.5
    assert np.all(matrices.sum(axis=1) == 1)
    assert np.all(matrices.sum(axis=2) == 1)
    chosen = np.asarray(_thousand(jnp.int32(n - 1), n))
    assert sorted(set(chosen.tolist())) == list(range(n - 1))
    x = np.random.RandomState(n).standard_normal(n).astype(np.float32)
    mean = np.mean(x, dtype=np.float64)
    for row in destinations[chosen]:
        came = np.empty_like(x)
        came[row] = x
        x = (x + came) / 2
    assert np.mean(x, dtype=np.float64) == pytest.approx(mean, abs=1e-5)
    assert np.ptp(x) < 1e-5


@jax.jit
def _thousand(m: jax.Array, seed: Any) -> jax.Array:
    return jax.vmap(lambda t: _drawn(seed, t, m, 1)[0])(jnp.arange(1000, dtype=jnp.int32))


def p_value(one: Counter[Any], other: Counter[Any]) -> float:
    """Of the hypothesis that two samples are from the same distribution, by chi-squared."""
    kinds = sorted(one | other)
    a, b = (np.array([sample[kind] for kind in kinds], float) for sample in (one, other))
    scale = np.sqrt(b.sum() / a.sum())
    return float(scipy.stats.chi2.sf(np.sum((a * scale - b / scale) ** 2 / (a + b)), len(kinds) - 1))


DRAWS = 6000


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_drawing_has_the_published_distribution(n: int) -> None:
    """Of whole permutations."""
    ours, theirs = np.random.RandomState(1), np.random.RandomState(2)
    one = Counter(tuple(draw(n, ours)) for _ in range(DRAWS))
    other = Counter(drawing(n, theirs) for _ in range(DRAWS))
    assert set(one) == set(other)
    assert len(one) == [1, 2, 9, 44][n - 2]
    if n > 2:
        assert p_value(one, other) > 0.01


def test_drawing_of_many_has_the_published_distribution() -> None:
    """Of each worker's peers; and the test would see the difference to permutations that are uniform among those without fixed points."""
    n, ours, theirs, uniform = 9, np.random.RandomState(3), np.random.RandomState(4), np.random.RandomState(5)
    one = np.array([draw(n, ours) for _ in range(DRAWS)])
    other = np.array([drawing(n, theirs) for _ in range(DRAWS)])
    shuffled = [row for row in (uniform.permutation(n) for _ in range(3 * DRAWS)) if not np.any(row == np.arange(n))][:DRAWS]
    p = [p_value(Counter(one[:, i].tolist()), Counter(other[:, i].tolist())) for i in range(n)]
    assert min(p) > 0.01 / n
    q = [p_value(Counter(np.array(shuffled)[:, i].tolist()), Counter(other[:, i].tolist())) for i in range(n)]
    assert min(q) < 1e-4


def test_first_of_a_set_is_drawn_so() -> None:
    for n in (2, 5, 8):
        assert pool(n, 1, 7)[0].tolist() == draw(n, np.random.RandomState(7))


def test_rows_are_chosen_evenly_and_apart() -> None:
    """Over steps and segments, and pairs of segments and of steps in a row."""
    chosen = np.asarray(jax.jit(jax.vmap(lambda t: _drawn(3, t, 7, 4)))(jnp.arange(3000, dtype=jnp.int32)))
    assert scipy.stats.chisquare(np.bincount(chosen.ravel(), minlength=7)).pvalue > 0.01
    for a, b in [(chosen[:, 0], chosen[:, 1]), (chosen[:-1, 0], chosen[1:, 0]), (chosen[:, 2], chosen[:, 3])]:
        assert scipy.stats.chisquare(np.bincount(7 * a + b, minlength=49)).pvalue > 0.001


def test_sets_and_seeds() -> None:
    assert pool(6, 3, 0).shape == (15, 6)
    assert not np.array_equal(pool(6, 1, 0), pool(6, 1, 1))
    assert not pool(6, 1, 0).flags.writeable


@pytest.mark.parametrize(
    ("n", "distances"), [(1, []), (2, [1]), (3, [1, 2]), (4, [1, 2]), (5, [1, 2, 4]), (8, [1, 2, 4]), (9, [1, 2, 4, 8])]
)
def test_exponential_graph(n: int, distances: list[int]) -> None:
    """floor(log2(n - 1)) + 1 distances."""
    assert [((row - np.arange(n)) % n).tolist() for row in exponential(n)] == [[d] * n for d in distances]


# segments


def test_segments_of_equal_size() -> None:
    for count in (1, 2, 3, 7, 18, 10_000):
        tree = rows(random(1))
        cut = make_segments(tree, count)
        sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
        assert len(cut) == min(count, sum(sizes))
        lengths = [sum(stop - start for _, start, stop in segment) for segment in cut]
        assert max(lengths) - min(lengths) <= 1
        seen = [(leaf, i) for segment in cut for leaf, start, stop in segment for i in range(start, stop)]
        assert seen == [(leaf, i) for leaf, size in enumerate(sizes) for i in range(size)]


def test_segments_by_leaf_and_by_label() -> None:
    tree = {
        "stem": {"w": jnp.zeros((2, 3)), "steps": jnp.int32(0)},
        "head": {"w": jnp.zeros(4), "b": jnp.zeros(()), "none": jnp.zeros((0, 2))},
    }
    assert make_segments(tree, "leaf") == (((0, 0, 1),), ((1, 0, 4),), ((2, 0, 6),))  # b, w, stem's w: others take no part
    assert make_segments(tree, {"stem": 0, "head": 1}) == (((0, 0, 1), (1, 0, 4)), ((2, 0, 6),))
    each = {"stem": {"w": "x", "steps": "y"}, "head": {"w": "y", "b": "x", "none": "z"}}
    assert make_segments(tree, each) == (((0, 0, 1), (2, 0, 6)), ((1, 0, 4),))
    assert make_segments(tree, lambda params: {"stem": 0, "head": 1}) == make_segments(tree, {"stem": 0, "head": 1})
    assert make_segments({}, 3) == ()


# a mixing


LABELS = {"a": 0, "b": 1, "c": 0, "d": 2}


@pytest.mark.parametrize(("n", "segments"), [(2, 3), (3, "leaf"), (7, LABELS), (64, 2)], ids=str)
def test_as_in_numpy(n: int, segments: Any) -> None:
    """Whole numbers: all is exact, the mean too."""
    params = random(n, draw=functools.partial(whole, exponent=10))
    run = Run(exdyna_jax.crossover(AXIS, segments=segments, seed=3), params)
    for t in range(4):
        updates = random(n, seed=t + 1, draw=functools.partial(whole, exponent=10))
        stepped = jax.tree.map(np.add, params, updates)
        params = run.step(updates)
        np.testing.assert_array_equal(flat(params, 1), crossed(stepped, segments, t, n, 3))
        np.testing.assert_array_equal(flat(params, 1).mean(axis=0), flat(stepped, 1).mean(axis=0))


UNEQUAL = (0.3, 0.5, 0.9, 0.5, 0.2)


@pytest.mark.parametrize("dtypes", [{}, MIXED], ids=["float32", "mixed"])
@pytest.mark.parametrize("make", [functools.partial(exdyna_jax.crossover, segments=3), functools.partial(exdyna_jax.sgp, keep=UNEQUAL)])
def test_mean_is_kept_to_rounding(dtypes: dict[str, str], make: Any) -> None:
    """And so are the dtypes. A step rounds each of n parameters once or twice."""
    n, steps = 5, 25
    params = random(n, dtypes)
    run = Run(make(AXIS), params)
    mean = flat(params, 1).mean(axis=0)
    for _ in range(steps):
        after = run.step(still(params))
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, params)
    weight = run.state.weight
    got = flat(exdyna_jax.average_params(jax.tree.map(lambda x: x.astype(np.float32), after), weight if weight is None else weight[:, 0]))
    sizes = [leaf.size for leaf in jax.tree.leaves(rows(params))]
    epsilon = np.concatenate([np.full(size, float(jnp.finfo(x.dtype).eps)) for size, x in zip(sizes, jax.tree.leaves(params), strict=True)])
    assert np.all(np.abs(got - mean) <= np.abs(flat(params, 1)).max(axis=0) * epsilon * 10)
    assert np.ptp(flat(after, 1), axis=0).max() < np.ptp(flat(params, 1), axis=0).max() / 10


def test_pairs_come_out_equal() -> None:
    """Two workers have the same afterwards, to the rounding of the update."""
    after = Run(exdyna_jax.crossover(AXIS, segments=3), random(2, MIXED)).step(random(2, MIXED, 1))
    for leaf in jax.tree.leaves(after):
        one, other = leaf.astype(np.float64)
        np.testing.assert_allclose(one, other, rtol=0, atol=8 * float(jnp.finfo(leaf.dtype).eps))


def test_leaves_that_take_no_part() -> None:
    params = {"w": jnp.ones((3, 4)), "count": jnp.arange(3), "none": jnp.zeros((3, 0))}
    updates = {"w": jnp.zeros((3, 4)), "count": np.zeros(3, jax.dtypes.float0), "none": jnp.zeros((3, 0))}
    for tx in (exdyna_jax.crossover(AXIS), exdyna_jax.sgp(AXIS, every_k=2)):

        def step(w: Any, count: Any, none: Any, tx: Any = tx) -> Any:
            params = {"w": w, "count": count, "none": none}
            float0 = np.zeros((), jax.dtypes.float0)
            got, _ = tx.update({"w": jnp.zeros_like(w), "count": float0, "none": none}, tx.init(params), params)
            assert got["count"].dtype == jax.dtypes.float0
            return got["w"], got["none"]

        got, none = jax.jit(jax.vmap(step, axis_name=AXIS))(params["w"], params["count"], params["none"])
        assert not np.any(got)
        assert none.shape == (3, 0)
    assert updates["count"].dtype == jax.dtypes.float0
    empty = {"count": jnp.arange(3)}
    exdyna_jax.average_params(empty)


@pytest.mark.parametrize("make", [exdyna_jax.crossover, exdyna_jax.sgp])
def test_one_worker_takes_its_own_steps(make: Any) -> None:
    for axis in (AXIS, None):
        tx = make(axis)
        step = functools.partial(_step, tx)
        init = jax.vmap(tx.init, axis_name=AXIS) if axis else tx.init
        params, updates = random(1), random(1, seed=1)
        got, state = (jax.vmap(step, axis_name=AXIS) if axis else step)(params, init(params), updates)
        np.testing.assert_array_equal(flat(got), flat(jax.tree.map(np.add, params, updates)))
        assert np.all(np.asarray(state.steps) == 1)
        assert float(np.max(exdyna_jax.metrics(state)["bytes_sent"])) == 0


# the same everywhere

MAKES: dict[str, Any] = {
    "crossover, labels, every second": lambda axis, **o: exdyna_jax.crossover(axis, segments=LABELS, every_k=2, **o),
    "crossover, groups": lambda axis, **o: exdyna_jax.crossover(axis, segments=3, groups=2, **o),
    "sgp, unequal shares": lambda axis, **o: exdyna_jax.sgp(axis, keep=UNEQUAL[:4], **o),
}


CONTEXTS = ("shard_map", "shard_map unchecked", "explicit mesh", "pmap")
TREES = {"float32": {}, "mixed": MIXED}
# every second one: each pair of method and context, of method and tree, and of context and tree is among them
ROWS = [
    pytest.param(name, context, tree, marks=[] if (i + j + k) % 2 else pytest.mark.matrix)
    for (i, name), (j, context), (k, tree) in itertools.product(enumerate(MAKES), enumerate(CONTEXTS), enumerate(TREES))
]


def _seen(name: str, context: str, tree: str) -> tuple[np.ndarray, ...]:
    """What three steps of four workers come to: parameters, estimates of the distance, weights, and the bytes of each step."""
    n = 4
    run, sent = Run(MAKES[name](AXIS, num_workers=n), random(n, TREES[tree]), context), []
    for t in range(3):
        params = run.step(random(n, TREES[tree], t + 1))
        sent.append(np.ravel(run.metrics()["bytes_sent"])[0])
    weight = np.ones(n) if run.state.weight is None else run.state.weight
    return flat(params, 1), np.ravel(run.state.squared_distance), np.ravel(weight), np.array(sent)


_on_vmap = functools.cache(functools.partial(_seen, context="vmap"))


@pytest.mark.parametrize(("name", "context", "tree"), ROWS)
def test_same_everywhere(name: str, context: str, tree: str) -> None:
    """As on `vmap`: parameters, state and metrics. A product may be fused with a sum or not, and then a half rounds either way."""
    tolerance = 2.0**-6 if (name, tree) == ("sgp, unequal shares", "mixed") else 1e-6
    (params, distances, weight, sent), want = _seen(name, context, tree), _on_vmap(name, tree=tree)
    np.testing.assert_allclose(params, want[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(distances, want[1], rtol=10 * tolerance)
    np.testing.assert_allclose(weight, want[2], rtol=1e-6)
    np.testing.assert_array_equal(sent, want[3])


def test_several_axes() -> None:
    """Along a tuple of axes of a mesh the same as along one; in a nested `vmap` an error, unless only one of them has workers."""
    params = random(4)
    one = Run(exdyna_jax.crossover(AXIS, segments=2), params).step(random(4, seed=1))
    two = Run(exdyna_jax.crossover(("a", "b"), segments=2, num_workers=4), params, "shard_map", {"a": 2, "b": 2}).step(random(4, seed=1))
    np.testing.assert_array_equal(flat(one, 1), flat(two, 1))
    tx = exdyna_jax.crossover(("a", "b"))

    def step(x: jax.Array) -> jax.Array:
        return x + tx.update(jnp.zeros_like(x), tx.init(x), x)[0]

    nested = jax.vmap(jax.vmap(step, axis_name="b"), axis_name="a")
    with pytest.raises(ValueError, match=r"vmap sends along one axis only, not along \('a', 'b'\).*one axis of size 4"):
        nested(jnp.zeros((2, 2, 3)))
    np.testing.assert_array_equal(nested(jnp.array([[[0.0], [2.0]]])), [[[1.0], [1.0]]])


def test_sharded_over_another_axis() -> None:
    """Each shard gossips with its like; what every worker has whole stays typed so, and distances are those of whole models."""
    n, sizes = 2, {AXIS: 2, "model": 2}
    place = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    params = {"w": jnp.arange(16.0).reshape(n, 8), "b": jnp.arange(6.0).reshape(n, 3)}
    tx = exdyna_jax.crossover(AXIS, segments=1, num_workers=n)
    specs = {"w": P(AXIS, "model"), "b": P(AXIS)}
    state = tx.init(params)
    states = exdyna_jax.state_specs(state, AXIS)
    step = jax.shard_map(functools.partial(_step, tx), mesh=place, in_specs=(specs, states, specs), out_specs=(specs, states))
    got, state = jax.jit(step)(params, state, still(params))
    np.testing.assert_array_equal(got["w"][0], params["w"].mean(axis=0))
    np.testing.assert_array_equal(got["b"][1], params["b"].mean(axis=0))
    assert exdyna_jax.metrics(state)["consensus_distance"] == pytest.approx(float(exdyna_jax.consensus_distance(params)))


def test_state_is_constant() -> None:
    """A second step compiles nothing, with donated arguments; `lax.scan` takes it."""
    n = 4
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), exdyna_jax.crossover(AXIS, segments=2, num_workers=n, every_k=2))
    params = jax.tree.map(jnp.asarray, random(n))
    state = tx.init(params)
    specs = exdyna_jax.state_specs((params, state), AXIS)
    place = mesh(n)
    shardings = jax.tree.map(lambda spec: NamedSharding(place, spec), (*specs, P(AXIS)))

    def scanned(params: Any, state: Any, updates: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (_step(tx, *carry, updates), None), (params, state), length=3)[0]

    step = jax.jit(
        jax.shard_map(functools.partial(_step, tx), mesh=place, in_specs=(*specs, P(AXIS)), out_specs=specs), donate_argnums=(0, 1)
    )
    scan = jax.jit(jax.shard_map(scanned, mesh=place, in_specs=(*specs, P(AXIS)), out_specs=specs))
    params, state, updates = jax.device_put((params, state, random(n, seed=1)), shardings)
    want = scan(params, state, updates)
    again = params, state
    again = step(*again, updates)
    with compilations() as compiled:
        again = step(*step(*again, updates), updates)
        assert not compiled()
    shapes = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert shapes(again) == shapes(want)
    np.testing.assert_allclose(flat(again[0]), flat(want[0]), rtol=1e-6, atol=1e-6)
    assert int(again[1][1].steps) == 3


# options


def test_every_third_step() -> None:
    n = 3
    params = random(n)
    run = Run(exdyna_jax.crossover(AXIS, every_k=3, segments=1), params)
    for t in range(6):
        updates = random(n, seed=t + 1)
        stepped = jax.tree.map(np.add, params, updates)
        params = run.step(updates)
        mixes = t % 3 == 2
        want = crossed(stepped, 1, t // 3, n) if mixes else flat(stepped, 1)
        np.testing.assert_allclose(flat(params, 1), want, rtol=1e-5, atol=1e-6)
        assert run.metrics()["bytes_sent"][0] == (4 * flat(rows(params)).size if mixes else 0)


@pytest.mark.parametrize("context", ["vmap", "shard_map", pytest.param("shard_map unchecked", marks=pytest.mark.matrix)])
def test_groups(context: str) -> None:
    """Three groups of two, along one axis (on `vmap`) or two: updates are averaged inside, groups meet, and nobody leaves its group."""
    n, along_one = 3, context == "vmap"
    of_groups = random(n, seed=5)
    model = 4 * flat(rows(of_groups)).size
    if along_one:
        twice = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), of_groups)
        run = Run(exdyna_jax.crossover(AXIS, segments=2, groups=n), twice)
    else:
        tx = exdyna_jax.crossover(AXIS, segments=2, group_axis="group", num_workers=n)
        run = Run(tx, of_groups, context, {AXIS: n, "group": 2})
    for t in range(2):
        updates = random(2 * n, seed=t)
        means = jax.tree.map(lambda u: u.reshape(n, 2, *u.shape[1:]).mean(axis=1), updates)
        want = crossed(jax.tree.map(np.add, of_groups, means), 2, t, n)
        of_groups = got = run.step(updates)
        if along_one:
            of_groups = jax.tree.map(lambda x: x[::2], got)
            np.testing.assert_array_equal(flat(of_groups), flat(jax.tree.map(lambda x: x[1::2], got)))  # to the bit
        np.testing.assert_allclose(flat(of_groups, 1), want, rtol=1e-5, atol=1e-6)
    assert np.ravel(run.metrics()["bytes_sent"])[0] == pytest.approx(2 * model)  # a ring of two, and the model
    assert np.ravel(run.metrics()["bytes_dense"])[0] == pytest.approx(2 * 5 / 6 * model)  # over all six, however they are grouped


def test_one_group_is_the_dense_mean() -> None:
    params = exdyna_jax.replicate_params(rows(random(1)), 5)
    updates = random(5, seed=1)
    for make in (exdyna_jax.crossover, exdyna_jax.sgp):
        after = Run(make(AXIS, groups=1), params).step(updates)
        np.testing.assert_allclose(flat(after, 1), flat(params, 1) + flat(updates, 1).mean(axis=0), rtol=1e-5, atol=1e-5)


def test_own_permutations() -> None:
    """A ring."""
    run = Run(exdyna_jax.crossover(AXIS, pool=[[1, 2, 3, 0]]), jnp.array([0.0, 2.0, 4.0, 8.0]))
    np.testing.assert_array_equal(run.step(jnp.zeros(4)), [4.0, 1.0, 3.0, 6.0])


def test_numbers_of_numpy() -> None:
    """They count as Python's."""
    x = random(4)
    plain = Run(exdyna_jax.crossover(AXIS, segments=3, seed=7, pool=2), x).step(still(x))
    numpys = Run(exdyna_jax.crossover(AXIS, segments=np.int64(3), seed=np.int64(7), pool=np.int64(2), every_k=np.int64(1)), x).step(
        still(x)
    )
    np.testing.assert_array_equal(flat(plain, 1), flat(numpys, 1))


# SGP


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_sgp_reaches_the_mean(n: int) -> None:
    """In log2(n) steps, exactly for whole numbers."""
    params = random(n, draw=functools.partial(whole, exponent=10))["a"]
    run = Run(exdyna_jax.sgp(AXIS), params)
    for _ in range(n.bit_length() - 1):
        after = run.step(still(params))
    np.testing.assert_array_equal(flat(after, 1), np.broadcast_to(flat(params, 1).mean(axis=0), (n, flat(params, 1).shape[1])))
    assert np.all(np.asarray(run.state.weight) == 1)


@pytest.mark.parametrize("n", [2, 5, 8, 13])
def test_push_sum_is_exact_for_unequal_weights(n: int) -> None:
    """Unequal shares, and unequal weights at the start: all tend to the weighted mean, and updates move it by their sum."""
    rng = np.random.RandomState(n)
    params, updates = random(n)["a"], random(n, seed=1)["a"]
    run = Run(exdyna_jax.sgp(AXIS, keep=rng.uniform(0.2, 0.8, n)), params)
    start = rng.uniform(0.5, 2, n).astype(np.float32)
    run.state = run.state._replace(weight=jnp.asarray(start)[:, None])
    run.step(updates)
    want = (np.average(flat(params, 1), axis=0, weights=start) * start.sum() + flat(updates, 1).sum(axis=0)) / start.sum()
    for _ in range(80):
        after = run.step(still(params))
    weight = np.asarray(run.state.weight)[:, 0]
    assert np.ptp(weight) > 0.01
    assert weight.sum() == pytest.approx(start.sum(), rel=1e-5)
    np.testing.assert_allclose(flat(after, 1), np.broadcast_to(want, flat(after, 1).shape), rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(flat(exdyna_jax.average_params(after, weight)), want, rtol=1e-4, atol=2e-5)
    assert np.abs(flat(params, 1).mean(axis=0) - want).max() > 0.1  # which is not what a plain mean would give


def test_sgp_in_numpy() -> None:
    """The push-sum of the paper, step by step, in its own variables x and w."""
    n, keep = 5, np.array([0.3, 0.5, 0.9, 0.5, 0.2])
    params = random(n)
    run = Run(exdyna_jax.sgp(AXIS, keep=tuple(keep)), params)
    x, w = flat(params, 1), np.ones(n)
    for t in range(7):
        updates = random(n, seed=t + 1)
        got = run.step(updates)
        x = x + flat(updates, 1)
        source = (np.arange(n) - 2 ** (t % 3)) % n
        x, w = (keep * x.T).T + ((1 - keep) * x.T).T[source], keep * w + ((1 - keep) * w)[source]
        np.testing.assert_allclose(flat(got, 1), x / w[:, None], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.ravel(run.state.weight), w, rtol=1e-5)


# what it sends


def sent(run: Run, workers: int) -> list[tuple[str, int, int]]:
    """(kind, elements, bytes) of each collective of a step; of a switch those of all branches, one after the other."""
    found = exdyna_jax.traffic(run._step, run.params, run.state, random(workers, seed=1))
    return [(c.kind, math.prod(c.shape), int(c.bytes)) for c in found]


@pytest.mark.parametrize(
    ("context", "segments", "count"),
    [("shard_map", 1, 1), ("shard_map", 6, 6), ("shard_map unchecked", LABELS, 3), ("pmap", "leaf", 4)],
)
def test_collectives_of_crossover(context: str, segments: Any, count: int) -> None:
    """A switch for each segment, in each branch a send of its size, and nothing else; one branch of each makes up one model."""
    n = 4
    run = Run(exdyna_jax.crossover(AXIS, num_workers=n, segments=segments), random(n), context)
    found = sent(run, n)
    if context != "shard_map":  # one number, so that a branch is taken under vmap
        assert found.pop(0)[:2] == ("pmax", 1)
    branches = [found[i : i + n - 1] for i in range(0, len(found), n - 1)]
    assert len(branches) == count
    assert all(len(branch) == n - 1 and len(set(branch)) == 1 for branch in branches)
    assert {kind for kind, _, _ in found} == {"ppermute"}
    model = flat(rows(random(n))).size
    assert sum(branch[0][1] for branch in branches) == model
    assert sum(branch[0][2] for branch in branches) == 4 * model
    if segments == 6:
        run.step(random(n, seed=1))
        assert run.metrics()["bytes_sent"] == 4 * model
        assert run.metrics()["bytes_dense"] == pytest.approx(2 * 3 / 4 * 4 * model)


def test_collectives_of_sgp_and_groups() -> None:
    """The weight travels along. With groups there is a reduction over the group axis, or, along one axis, sends among neighbours."""
    model = flat(rows(random(4))).size
    half = model // 2, model - model // 2
    of_sgp = sent(Run(exdyna_jax.sgp(AXIS, num_workers=4), random(4), "shard_map"), 4)
    assert of_sgp == [("ppermute", model + 1, 4 * model + 4)] * 2
    along_one = Run(exdyna_jax.crossover(AXIS, segments=2, num_workers=4, groups=2), random(4), "shard_map")
    assert [elements for _, elements, _ in sent(along_one, 4)] == [half[1]] * 2 + [*half]
    tx = exdyna_jax.crossover(AXIS, segments=2, num_workers=3, group_axis="group")
    along_two = Run(tx, random(3), "shard_map", {AXIS: 3, "group": 2})
    found = exdyna_jax.traffic(along_two._step, along_two.params, along_two.state, random(6, seed=1))
    assert {(c.kind, c.axis) for c in found} == {("psum", ("group",)), ("ppermute", (AXIS,))}
    narrow = Run(exdyna_jax.crossover(AXIS), random(3, MIXED), "pmap")
    found = exdyna_jax.traffic(narrow._step, narrow.params, narrow.state, random(3, MIXED))
    assert {str(c.dtype) for c in found} == {"int32", "float32", "bfloat16", "float16"}  # as they are


# distance, metrics, specs


def test_distance_is_estimated_without_bias() -> None:
    """Averaged over all that may be drawn, and over the workers, it is the distance in squares."""
    n = 7
    params = random(n)["a"]
    run = Run(exdyna_jax.crossover(AXIS, segments=1), params)
    start, drawn = run.state, np.asarray(_thousand(jnp.int32(n - 1), 0))
    squares = []
    for p in range(n - 1):
        run.params, run.state = params, start._replace(steps=jnp.full(n, np.argmax(drawn == p), jnp.int32))
        run.step(still(params))
        squares.append(np.asarray(run.state.squared_distance))
        np.testing.assert_allclose(run.metrics()["consensus_distance"], np.sqrt(squares[-1][:, 0]), rtol=1e-6)  # stacked: one each
    exact = float(exdyna_jax.consensus_distance(params))
    assert exact == pytest.approx(np.sqrt(np.sum((flat(params, 1) - flat(params, 1).mean(axis=0)) ** 2) / n), rel=1e-5)
    assert np.sqrt(np.mean(squares)) == pytest.approx(exact, rel=1e-5)
    state = exdyna_jax.crossover(AXIS, num_workers=n).init(params)._replace(squared_distance=jnp.asarray(squares[0][:, 0]))
    assert exdyna_jax.metrics(state)["consensus_distance"] == pytest.approx(np.sqrt(np.mean(squares[0])), rel=1e-6)


@pytest.mark.parametrize(("n", "segments"), [(2, 2), (4, 1), (8, 6)])
def test_contraction_is_as_documented(n: int, segments: int) -> None:
    """In squares by (n - 2) / (2 (n - 1)) a mixing, on average over what is drawn."""
    x = jnp.asarray(np.random.RandomState(n).standard_normal((n, 60)), jnp.float32)
    run = Run(exdyna_jax.crossover(AXIS, segments=segments), x)
    start, ratios, updates, distance = run.state, [], still(x), jax.jit(exdyna_jax.consensus_distance)
    for t in range(200):
        run.params, run.state = x, start._replace(steps=jnp.full(n, t, jnp.int32))
        ratios.append(float(distance(run.step(updates))) ** 2 / float(distance(x)) ** 2)
    assert np.mean(ratios) == pytest.approx((n - 2) / (2 * (n - 1)), abs=max(4 * np.std(ratios) / 200**0.5, 1e-9))


def test_a_nan_shows() -> None:
    params = random(4)
    params["c"][2, 5] = np.nan
    run = Run(exdyna_jax.crossover(AXIS, segments=1), params)
    run.step(random(4, seed=1))
    assert np.any(np.isnan(run.metrics()["consensus_distance"]))


def test_specs() -> None:
    n = 4
    params = exdyna_jax.replicate_params({"w": jnp.ones((3, 5)), "b": jnp.ones(())}, n)
    tx = optax.chain(optax.adam(1e-3), exdyna_jax.sgp(AXIS, num_workers=n))
    state = tx.init(params)
    specs = exdyna_jax.state_specs({"params": params, "opt_state": state, "step": jnp.int32(0), "key": jax.random.key(0)}, AXIS)
    assert specs["params"] == {"w": P((AXIS,)), "b": P((AXIS,))}
    (adam, _), gossip = specs["opt_state"]
    assert (adam.count, adam.mu["w"], adam.nu["b"]) == (P(), P((AXIS,)), P((AXIS,)))
    assert gossip == type(gossip)(P(), P((AXIS,)), P((AXIS,)), P(), P())
    assert (specs["step"], specs["key"]) == (P(), P())
    both = exdyna_jax.state_specs((exdyna_jax.exdyna(0.5, AXIS, num_workers=n).init(jnp.zeros(8)), gossip_state := state[1]), AXIS)
    assert both[0].metrics.selected_per_worker == P()
    assert both[0].residual == P((AXIS,))
    assert exdyna_jax.metrics(state) == exdyna_jax.metrics(gossip_state)
    nested = exdyna_jax.state_specs({"opt": {f: getattr(gossip_state, f) for f in gossip_state._fields}, "w": params["w"]}, AXIS)
    assert (nested["w"], nested["opt"]["weight"], nested["opt"]["steps"]) == (P((AXIS,)), P((AXIS,)), P())


def test_helpers() -> None:
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "count": jnp.int32(3)}
    everywhere = exdyna_jax.replicate_params(params, 5)
    assert everywhere["w"].shape == (5, 2, 3)
    assert everywhere["count"].shape == (5,)
    back = exdyna_jax.average_params(everywhere)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), back) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert float(exdyna_jax.consensus_distance(everywhere)) == 0
    assert exdyna_jax.average_params(jnp.array([1.0, 4.0]), jnp.array([1.0, 0.5])) == pytest.approx(2)
    assert exdyna_jax.average_params(jnp.array([1.0, 4.0]), jnp.array([[1.0], [0.5]])) == pytest.approx(2)  # as vmap's state has them
    for helper in (exdyna_jax.average_params, exdyna_jax.consensus_distance):
        with pytest.raises(ValueError, match=r"Parameter \['b'\] has 10 rows, \['w'\] has 64: .*averaged already"):
            helper({"b": jnp.zeros(10), "w": jnp.zeros((64, 10))})
        with pytest.raises(ValueError, match=r"Parameter \['b'\] is a scalar, without a row"):
            helper({"b": jnp.float32(0)})
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), but there are 2 workers"):
        exdyna_jax.average_params(jnp.zeros((2, 3)), jnp.ones(3))


# bad input

X = jnp.zeros((4, 6))
AT_CONSTRUCTION: list[tuple[str, dict[str, Any], str]] = [
    *itertools.chain.from_iterable(
        [
            (method, {"axis_name": 3}, r"axis_name=3 is not a mesh axis name"),
            (method, {"num_workers": 0}, r"num_workers=0 is not a positive int"),
            (method, {"axis_name": None, "num_workers": 2}, r"num_workers=2 with axis_name=None"),
            (method, {"group_axis": 3}, r"group_axis=3 is not a mesh axis name"),
            (method, {"group_axis": AXIS}, r"group_axis=\('data',\) and axis_name=\('data',\) share an axis.*give groups="),
            (method, {"groups": 0}, r"groups=0 is not a positive int"),
            (method, {"groups": 2.0}, r"groups=2\.0 is not a positive int"),
            (method, {"groups": 2, "group_axis": "g"}, r"groups=2 and group_axis=\('g',\) both say"),
            (method, {"every_k": 0}, r"every_k=0 is not a positive int"),
        ]
        for method in ("crossover", "sgp")
    ),
    ("crossover", {"segments": 0}, r"segments=0 is not a positive int, 'leaf', or a tree of labels"),
    ("crossover", {"segments": True}, r"segments=True is not"),
    ("crossover", {"segments": None}, r"segments=None is not"),
    ("crossover", {"segments": 2.5}, r"segments=2\.5 is not"),
    ("crossover", {"segments": "leaves"}, r"segments='leaves' is not 'leaf'"),
    ("crossover", {"seed": -1}, r"seed=-1 is not an int in"),
    ("crossover", {"seed": 0.5}, r"seed=0\.5 is not an int"),
    ("crossover", {"pool": 0}, r"pool=0 is not a positive int"),
    ("crossover", {"pool": True}, r"pool=True is not a positive int"),
    ("crossover", {"pool": 1.5}, r"pool=1\.5 is not a positive int"),
    ("crossover", {"pool": [1, 0]}, r"pool has shape \(2,\) and dtype int64"),
    ("crossover", {"pool": [[0, 1]]}, r"The row \[0, 1\] of pool is not a permutation of 0 \.\. 1 in which no worker sends to itself"),
    ("crossover", {"pool": [[1, 1, 0]]}, r"The row \[1, 1, 0\] of pool"),
    ("sgp", {"keep": 0}, r"keep=0 is not a share in \(0, 1\)"),
    ("sgp", {"keep": 1.0}, r"keep=1\.0 is not a share"),
    ("sgp", {"keep": [0.5, 2]}, r"keep=\[0\.5, 2\] is not a share"),
    ("sgp", {"keep": []}, r"keep=\[\] is not a share"),
    ("sgp", {"keep": "0.5"}, r"keep='0\.5' is not a share"),
    ("sgp", {"keep": 0.999999999}, r"keep=0\.999999999 is not a share"),  # 1 in float32: nothing would ever mix
    ("sgp", {"keep": jnp.float32(0.5)}, r"keep is an array.*static_args='keep'"),
    ("crossover", {"seed": jnp.int32(1)}, r"seed is an array.*static_args='seed'"),
    ("crossover", {"every_k": jnp.int32(1)}, r"every_k is an array.*static_args='every_k'"),
    ("crossover", {"pool": [[1, 0], [1, 2, 0]]}, r"pool=\[\[1, 0\], \[1, 2, 0\]\] has rows of different lengths"),
]


@pytest.mark.parametrize(("method", "options", "message"), AT_CONSTRUCTION, ids=[f"{m}, {text[:50]}" for m, _, text in AT_CONSTRUCTION])
def test_at_construction(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(exdyna_jax, method)(**({"axis_name": AXIS} | options))


AT_INIT: list[tuple[str, dict[str, Any], Any, str]] = [
    ("crossover", {}, X, r"init was called outside the axis.*num_workers is not given"),
    (
        "crossover",
        {"num_workers": 3},
        X,
        r"Parameter \(the whole tree\) has .*, without a row for each of 3 workers.*replicate_params",
    ),
    ("crossover", {"num_workers": 4}, {"w": jnp.zeros(())}, r"Parameter \['w'\] has shape \(\), without a row"),
    ("crossover", {"num_workers": 4, "groups": 5}, X, r"groups=5, but there are 4 workers along the axis: give at most 4"),
    ("sgp", {"num_workers": 4, "groups": 5}, X, r"groups=5, but there are 4 workers"),
    ("sgp", {"num_workers": 4, "groups": 3}, X, r"groups=3 doesn't divide the 4 workers"),
    ("sgp", {"num_workers": 4, "keep": [0.5] * 3}, X, r"keep has 3 shares, but there are 4 workers"),
    ("sgp", {"num_workers": 4, "groups": 2, "keep": [0.5] * 4}, X, r"keep has 4 shares, but there are 2 groups"),
    ("crossover", {"num_workers": 4, "segments": {"w": 0}}, {"w": X, "b": X}, r"segments does not cover the parameters: its labels are"),
    ("crossover", {"num_workers": 4, "segments": {"w": 0, "b": None}}, {"w": X, "b": X}, r"segments does not cover the parameters"),
    ("crossover", {"num_workers": 4, "segments": lambda _: {"w": 0}}, {"w": X, "b": X}, r"segments does not cover the parameters"),
    ("crossover", {"num_workers": 4, "segments": {"w": 0, "b": 0.5}}, {"w": X, "b": X}, r"segments has 0\.5 for leaf \['b'\]"),
    ("crossover", {"num_workers": 4}, {"w": 1.0}, r"Leaf \['w'\] is a float, not an array"),
    ("crossover", {"num_workers": 4}, X.astype(jnp.complex64), r"complex64"),
]


@pytest.mark.parametrize(("method", "options", "params", "message"), AT_INIT, ids=[f"{m}, {text[:50]}" for m, _, _, text in AT_INIT])
def test_at_init(method: str, options: dict[str, Any], params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(exdyna_jax, method)(AXIS, **options).init(params)


@pytest.mark.parametrize("make", [exdyna_jax.crossover, exdyna_jax.sgp])
def test_at_update(make: Any) -> None:
    def update(tx: Any, updates: Any, params: Any, state: Any = None) -> Any:
        one = lambda u, p: tx.update(u, tx.init(u) if state is None else state, p)[0]  # noqa: E731
        return jax.vmap(one, axis_name=AXIS)(updates, params)

    tx = make(AXIS)
    with pytest.raises(ValueError, match=r"Gossip mixes parameters: call update\(updates, state, params\)"):
        update(tx, X, None)
    with pytest.raises(ValueError, match=r"The updates are .*, but the parameters"):
        update(tx, X, {"w": X})
    with pytest.raises(ValueError, match=r"The update of \['w'\] is float32\(6,\), the parameter float32\(5,\)"):
        update(tx, {"w": X}, {"w": X[:, :5]})
    with pytest.raises(ValueError, match=r"The update of \(the whole tree\) is int32\(6,\), the parameter float32"):
        update(tx, X.astype(jnp.int32), X)
    with pytest.raises(ValueError, match=r"The update of \['w'\] is a float, not an array"):
        jax.vmap(lambda x: tx.update({"w": 0.0}, tx.init({"w": x}), {"w": x})[0], axis_name=AXIS)(X)
    with pytest.raises(
        ValueError, match=r"The update of .* is bfloat16, the parameter float32: what is mixed would be rounded to bfloat16"
    ):
        update(tx, X.astype(jnp.bfloat16), X)
    other = exdyna_jax.sgp if make is exdyna_jax.crossover else exdyna_jax.crossover
    with pytest.raises(ValueError, match=rf"The state was made by {other.__name__}, and this is {make.__name__}"):
        update(tx, X, X, jax.tree.map(lambda x: x[:1] if x.ndim else x, other(AXIS, num_workers=4).init(X)))
    with pytest.raises(ValueError, match=r"The state is a EmptyState, not a GossipState"):
        update(tx, X, X, optax.EmptyState())
    with pytest.raises(ValueError, match=r"What the state holds of this worker has shape \(3,\) instead of \(1,\).*state_specs"):
        update(tx, X, X, make(AXIS, num_workers=3).init(X[:3]))
    with pytest.raises(ValueError, match=r"num_workers=3, but the axis \('data',\) has 4 workers"):
        update(make(AXIS, num_workers=3), X, X)
    with pytest.raises(ValueError, match=r"axis_name=\('data',\) is not bound here"):
        tx.update(X, make(AXIS, num_workers=4).init(X), X)
    with pytest.raises(ValueError, match=r"group_axis=\('g',\) is not bound here"):
        update(make(AXIS, group_axis="g"), X, X)
    with pytest.raises(ValueError, match=r"groups=5, but there are 4 workers"):
        update(make(AXIS, groups=5), X, X)
    if make is exdyna_jax.crossover:
        with pytest.raises(ValueError, match=r"pool has permutations of 3, but 4 are to be mixed"):
            update(make(AXIS, pool=[[1, 2, 0]]), X, X)


def test_parameters_typed_as_equal() -> None:
    """As they are in every other method: here each worker has its own."""
    tx = exdyna_jax.crossover(AXIS, num_workers=4)
    state = tx.init(X)
    specs = exdyna_jax.state_specs(state, AXIS)
    step = jax.shard_map(lambda p, s: tx.update(p, s, p), mesh=mesh(4), in_specs=(P(), specs), out_specs=(P(AXIS), specs))
    with pytest.raises(
        ValueError, match=r"typed as equal on all workers along \('data',\).*replicate_params.*state_specs\(\(params, state\)"
    ):
        jax.eval_shape(step, X[0], state)


def test_updates_averaged_twice() -> None:
    place = jax.make_mesh((2, 2), (AXIS, "group"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    tx = exdyna_jax.crossover(AXIS, num_workers=2, group_axis="group")
    state = tx.init(X[:2])
    specs = exdyna_jax.state_specs((X[:2], state), AXIS)
    step = jax.shard_map(lambda p, s: tx.update(p, s, p), mesh=place, in_specs=specs, out_specs=specs)
    with pytest.raises(ValueError, match=r"equal along group_axis=\('group',\) already.*local_value_and_grad\(loss, \('data', 'group'\)\)"):
        jax.eval_shape(step, X[:2], state)


def test_metrics_and_reshard() -> None:
    state = exdyna_jax.crossover(AXIS, num_workers=4).init(X)
    with pytest.raises(ValueError, match=r"holds 2 sparsifier or gossip states instead of one"):
        exdyna_jax.metrics((state, state))
    with pytest.raises(ValueError, match=r"average them with exdyna_jax\.average_params.*replicate_params"):
        exdyna_jax.reshard((state,), 2)
    for bad in (0, True, 2.0):
        with pytest.raises(ValueError, match=r"num_workers=.* is not a positive int"):
            exdyna_jax.replicate_params(X, bad)  # type: ignore[arg-type]
