"""The same numbers in every context: each way to have n workers, with each kind of tree, each way to run ExDyna and each other method.

A reference run on `vmap` is compared with the numpy oracle step by step, or, of the other methods, which have their own tests, must have
lost nothing; every other context must equal the reference to the bit. Gradients
are small integers times a power of two, so that no order of summation makes a difference. By default a selection runs in which every pair
of choices occurs; `pytest -m matrix` runs them all.
"""

import contextlib
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import exdyna_jax
import oracle
from compiling import AS_USERS_DO
from contexts import alone, mapped, scanned, sharded
from simulate import PAPER, flat

N = 4
STEPS = 6

CONTEXTS: dict[str, Any] = {
    "shard_map": functools.partial(sharded, kind=AxisType.Auto, check=True, compiler=AS_USERS_DO),
    "shard_map unchecked": functools.partial(sharded, kind=AxisType.Auto, check=False),
    "explicit mesh": functools.partial(sharded, kind=AxisType.Explicit, check=True),
    "explicit mesh unchecked": functools.partial(sharded, kind=AxisType.Explicit, check=False),
    "two axes": functools.partial(sharded, kind=AxisType.Auto, check=True, axes=(2, 2)),
    "two axes unchecked": functools.partial(sharded, kind=AxisType.Explicit, check=False, axes=(2, 2)),
    "scan": scanned,
    "pmap": functools.partial(mapped, over=jax.pmap),
    "nested vmap": functools.partial(mapped, over=jax.vmap, jit=True, axes=(2, 2)),
    "vmap without jit": lambda make, shapes, n, steps: mapped(make, shapes, n, steps[:3], over=jax.vmap),  # each is slow
    "alone": alone,
}

TREES: dict[str, Any] = {
    "float32": {"a": ((5, 7), "float32"), "b": ((), "float32"), "c": ((1030,), "float32"), "d": ((3, 11, 2), "float32")},
    "mixed, with holes": {
        "a": ((5, 7), "bfloat16"),
        "b": None,
        "c": ((1030,), "float16"),
        "d": ((0, 3), "float32"),
        "e": ((64,), "float32"),
        "f": ((2, 2), jax.dtypes.float0),
    },
    "bfloat16": [((96, 32), "bfloat16"), ((128,), "bfloat16")],
    "float64": {"a": ((33,), "float64"), "b": ((3, 401), "float32")},
}

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"density": 0.05},
    "published": {"density": 0.02, **PAPER},
    "momentum, small leaves dense": {"density": 0.05, "momentum": 0.5, "min_size": 50},
    "every third, few slots": {"density": 0.01, "every_k": 3, "capacity_factor": 1.0, "num_blocks": 24},
}

METHODS: dict[str, dict[str, Any]] = {
    "micro": {"density": 0.05},
    "deft": {"density": 0.05},
    "top_k": {"density": 0.05, "momentum": 0.5},
    "gtop_k": {"density": 0.05, "min_size": 40},
    "clt_k": {"density": 0.05, "every_k": 2},
    "hard_threshold": {"density": 0.05, "threshold": 90.0},
    "sidco": {"density": 0.05},
}


def _pairwise(*choices: Any) -> list[tuple[str, ...]]:
    """Combinations, first come first served, such that every pair of choices is in one of them."""
    every = list(itertools.product(*choices))
    missing = {pair for combination in every for pair in _pairs(combination)}
    chosen = []
    while missing:
        best = max(every, key=lambda combination: len(missing & _pairs(combination)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(combination: tuple[str, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(combination), 2))


def _spread_out() -> list[tuple[str, str, str]]:
    """Each method with three trees, and each time in another context; gTop-k, which alone has a collective of its own, in some more."""
    contexts = itertools.cycle(context for context in CONTEXTS if context != "vmap without jit")
    rows = [(next(contexts), tree, method) for method in METHODS for tree in list(TREES)[1:]]
    return rows + [(context, "float32", "gtop_k") for context in ("shard_map", "two axes", "nested vmap", "pmap")]


EVERY = list(itertools.product(CONTEXTS, TREES, OPTIONS | METHODS))
SLOW = "vmap without jit"  # each operation is compiled by itself: one row is enough by default
SELECTED = [row for row in _pairwise(CONTEXTS, TREES, OPTIONS) + _spread_out() if row[0] != SLOW or row[2] == "published"]
ROWS = [pytest.param(*row, id=", ".join(row), marks=[] if row in SELECTED else pytest.mark.matrix) for row in EVERY]


def _leaf(entry: Any) -> bool:
    return entry is None or isinstance(entry, tuple)


def _shapes(tree: str) -> Any:
    return jax.tree.map(lambda e: None if e is None else jax.ShapeDtypeStruct(*e), TREES[tree], is_leaf=_leaf)


def _params(tree: str) -> Any:
    """As the gradients, but where these are float0 the parameters are integers."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "int32") if s.dtype == jax.dtypes.float0 else s, _shapes(tree))


def _gradients(tree: str, n: int, t: int) -> Any:
    rng = np.random.RandomState(100 * t + n)
    scale = 2.0 ** [0, 0, 2, -3, 0, 0][t]

    def draw(s: Any) -> Any:
        if s.dtype == jax.dtypes.float0:
            return np.zeros((n, *s.shape), s.dtype)
        return (rng.randint(-127, 128, (n, *s.shape)) * scale).astype(s.dtype)

    return jax.tree.map(draw, _shapes(tree))


def _with_types(tree: str) -> Any:
    return jax.enable_x64(True) if tree == "float64" else contextlib.nullcontext()


@functools.cache
def _reference(tree: str, options: str, n: int) -> tuple[list[Any], list[Any]]:
    """The gradients of some steps, and what `vmap` makes of them, which equals the oracle."""
    with _with_types(tree):
        steps = [_gradients(tree, n, t) for t in range(STEPS)]
        jax.tree.leaves(steps[4])[0].reshape(-1)[0] = np.nan

        seen = mapped(_make(options), _params(tree), n, steps, over=jax.vmap, jit=True)
        state = jax.device_get(_make(options)("a", num_workers=n).init(_zeros(_params(tree))))
        for t, (g, (update, after)) in enumerate(zip(steps, seen, strict=True)):
            if options in METHODS:
                if t != 4:
                    held = _rows(g, g) + _rows(state.residual, g)
                    if state.velocity is not None:
                        held = held + METHODS[options]["momentum"] * _rows(state.velocity, g)
                    np.testing.assert_array_equal(held.mean(axis=0), flat(update) + _rows(after.residual, g).mean(axis=0), f"step {t}")
            else:
                want_update, want = oracle.step(state, g, oracle.Options(**OPTIONS[options]))
                oracle.compare(t, update, want_update, after, want, 0)
            state = after
        return steps, seen


def _rows(tree: Any, gradients: Any) -> np.ndarray:
    """[n, N]: the leaves of a tree whose gradients take part."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(gradients), strict=True)
    return flat([leaf for leaf, g in pairs if g.size and g.dtype != jax.dtypes.float0], 1)


def _make(options: str) -> Any:
    """(axis_name, ...) -> the transformation."""
    if options in METHODS:
        return lambda axis, **more: getattr(exdyna_jax, options)(axis_name=axis, **METHODS[options], **more)
    return lambda axis, **more: exdyna_jax.exdyna(axis_name=axis, **OPTIONS[options], **more)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


@pytest.mark.parametrize(("context", "tree", "options"), ROWS)
def test_same_numbers(context: str, tree: str, options: str) -> None:
    n = 1 if context == "alone" else N
    steps, want = _reference(tree, options, n)
    with _with_types(tree):
        seen = CONTEXTS[context](_make(options), _params(tree), n, steps)
    for (update, state), (want_update, want_state) in zip(seen, want[: len(seen)], strict=True):
        jax.tree.map(np.testing.assert_array_equal, update, want_update)
        assert jax.tree.map(lambda x: x.dtype, update) == jax.tree.map(lambda x: x.dtype, want_update)
        if state is None:  # inside a scan only the last one is seen
            continue
        np.testing.assert_array_equal(flat(state.residual, 1), flat(want_state.residual, 1))
        if want_state.velocity is not None:
            np.testing.assert_array_equal(flat(state.velocity, 1), flat(want_state.velocity, 1))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), state.control, want_state.control)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), state.metrics, want_state.metrics)


@pytest.mark.parametrize(
    ("method", "check_vma"),
    [("dense", True)] + [pytest.param(*row, marks=pytest.mark.matrix) for row in [("dense", False), ("exdyna", True), ("exdyna", False)]],
)
def test_shard_map_without_jit(method: str, check_vma: bool) -> None:
    """One step: JAX compiles each operation of it alone, in every step anew, so that one of ExDyna takes a minute, whatever the size."""
    tx = exdyna_jax.dense("a", num_workers=2) if method == "dense" else exdyna_jax.exdyna(0.05, "a", num_workers=2)
    state = tx.init(np.zeros(100, np.float32))
    specs = exdyna_jax.state_specs(state, "a")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    step = jax.shard_map(
        lambda g, state: tx.update(g[0], state), mesh=mesh, in_specs=(P("a"), specs), out_specs=(P(), specs), check_vma=check_vma
    )
    g = np.random.RandomState(0).randint(-127, 128, (2, 100)).astype(np.float32)
    seen, want = step(g, state), jax.jit(step)(g, state)
    jax.tree.map(np.testing.assert_array_equal, (seen[0], seen[1].residual), (want[0], want[1].residual))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), seen[1], want[1])
    exdyna_jax.assert_replicas_equal(seen)
