"""Meshes of two axes.

With parameters and gradients sharded over a second axis each shard is what a sparsifier of its own would make of it, whether `shard_map` is
manual over both axes or nested; with `dense_axis` the result is that of the sparsifier on gradients that were averaged before.
"""

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import flat, simulate

WORKERS, SHARDS = 2, 2
STEPS = 6
SHAPES = {"a": (6, 35), "b": (400,)}
OPTIONS: dict[str, Any] = {"density": 0.05, "momentum": 0.5}
SHAPES_OF_SHARD = {name: jax.ShapeDtypeStruct((shape[0] // SHARDS, *shape[1:]), np.float32) for name, shape in SHAPES.items()}


def _gradients(t: int, *lead: int) -> Any:
    rng = np.random.RandomState(t)
    return {name: rng.randint(-64, 65, (*lead, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def _mesh(kind: AxisType, *names: str) -> Any:
    return jax.make_mesh((2, 2), names, axis_types=(kind,) * 2, devices=jax.devices()[:4])


def _squeezed(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _lead(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _manual(update: Any, specs: Any, check_vma: bool) -> Any:
    """Manual over both axes: `specs` of the state, which has a row for each shard."""

    def step(g: Any, state: Any) -> Any:
        updates, state = update(_squeezed(g), _squeezed(state))
        return updates, _lead(state)

    return jax.shard_map(step, in_specs=(P("data", "fsdp"), specs), out_specs=(P("fsdp"), specs), check_vma=check_vma)


def _nested(update: Any, specs: Any, check_vma: bool) -> Any:
    """Manual over the workers, and nested in it over the shards, which the outer one leaves to the compiler."""

    def of_shard(g: Any, state: Any) -> Any:
        updates, state = update(g, _squeezed(state))
        return updates, _lead(state)

    inside = jax.tree.map(lambda _: P("fsdp"), specs, is_leaf=lambda x: isinstance(x, P))
    outside = jax.tree.map(lambda spec: P(None, *spec[1:]), specs, is_leaf=lambda x: isinstance(x, P))

    def step(g: Any, state: Any) -> Any:
        shard = jax.shard_map(
            of_shard, in_specs=(P("fsdp"), inside), out_specs=(P("fsdp"), inside), axis_names={"fsdp"}, check_vma=check_vma
        )
        return shard(_squeezed(g), state)

    return jax.shard_map(step, in_specs=(P("data"), outside), out_specs=(P(), outside), axis_names={"data"}, check_vma=check_vma)


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    """(update, state) of each step, for each shard: two sparsifiers that know nothing of each other. A NaN in the second at step 3."""
    run = simulate(exdyna_jax.exdyna(axis_name="data", num_workers=WORKERS, **OPTIONS), SHAPES_OF_SHARD, WORKERS)
    seen: list[list[Any]] = [[] for _ in range(SHARDS)]
    for shard, steps in enumerate(seen):
        state = run.init()
        for t in range(STEPS):
            g = {name: np.split(x, SHARDS, axis=1)[shard] for name, x in _spoilt(t).items()}
            update, state = run.step(g, state)
            steps.append(jax.device_get((update, state)))
    return seen


def _spoilt(t: int) -> Any:
    g = _gradients(t, WORKERS)
    if t == 3:
        g["b"][0, -1] = np.nan
    return g


@pytest.mark.parametrize(
    ("manual", "check_vma", "kind"),
    [
        pytest.param(_manual, True, AxisType.Auto, id="both axes, checked"),
        pytest.param(_manual, False, AxisType.Explicit, id="both axes, explicit, unchecked"),
        *(
            [
                pytest.param(_nested, True, AxisType.Explicit, id="nested, explicit, checked"),
                pytest.param(_nested, False, AxisType.Auto, id="nested, unchecked"),
            ]
            if jax.__version_info__ >= (0, 10, 2)  # older ones can't compile axis_index in there
            else []
        ),
    ],
)
def test_each_shard_is_sparsified_on_its_own(manual: Any, check_vma: bool, kind: AxisType, alone: list[list[Any]]) -> None:
    mesh = _mesh(kind, "data", "fsdp")
    tx = exdyna_jax.exdyna(axis_name="data", num_workers=WORKERS, **OPTIONS)
    shapes = jax.eval_shape(tx.init, SHAPES_OF_SHARD)
    specs = jax.tree.map(lambda spec: P("fsdp", *spec), exdyna_jax.state_specs(shapes, "data"), is_leaf=lambda x: isinstance(x, P))
    with jax.set_mesh(mesh):
        state = jax.tree.map(lambda x: np.stack([x] * SHARDS), tx.init(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), SHAPES_OF_SHARD)))
        state = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)))
        step = jax.jit(manual(tx.update, specs, check_vma))
        for t in range(STEPS):
            g = jax.device_put(_spoilt(t), NamedSharding(mesh, P("data", "fsdp")))
            update, state = step(g, state)
            exdyna_jax.assert_replicas_equal((update, state))
            seen, told = jax.device_get((update, state)), jax.device_get(exdyna_jax.metrics(state))
            for shard, steps in enumerate(alone):
                want_update, want = steps[t]
                mine = {name: np.split(x, SHARDS)[shard] for name, x in seen[0].items()}
                np.testing.assert_array_equal(flat(mine), flat(want_update), f"step {t}, shard {shard}")
                for own in ("residual", "velocity"):
                    rows = jax.tree.map(lambda x, shard=shard: x[shard], getattr(seen[1], own))
                    np.testing.assert_array_equal(flat(rows, 1), flat(getattr(want, own), 1), f"step {t}, shard {shard}, {own}")
                for name, wanted in exdyna_jax.metrics(want).items():
                    np.testing.assert_allclose(told[name][shard], wanted, rtol=1e-5, err_msg=f"step {t}, shard {shard}, {name}")
    np.testing.assert_array_equal(told["skipped"], [0, 1])


def test_partly_manual_is_an_error() -> None:
    """Left to the compiler the shards would be gathered before anything is selected."""
    tx = exdyna_jax.exdyna(axis_name="data", num_workers=WORKERS, **OPTIONS)
    g = _gradients(0, WORKERS)
    state = jax.eval_shape(tx.init, _squeezed(g))
    specs = exdyna_jax.state_specs(state, "data")
    for check_vma in (True, False):
        step = jax.shard_map(
            lambda g, state: tx.update(_squeezed(g), state),
            mesh=_mesh(AxisType.Auto, "data", "fsdp"),
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
            axis_names={"data"},
            check_vma=check_vma,
        )
        with pytest.raises(ValueError, match=r"manual over \('data',\) here, but not over \('fsdp',\).*axis_names.*nested"):
            jax.eval_shape(step, g, state)


# dense_axis

FAST = 2


def _sharded(tx: Any, kind: AxisType, check_vma: bool) -> Any:
    mesh = _mesh(kind, "slow", "fast")
    specs = exdyna_jax.state_specs(jax.eval_shape(tx.init, _gradients(0)), "slow")

    def update(g: Any, state: Any) -> Any:
        return tx.update(_squeezed(_squeezed(g)), state)

    step = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(P("slow", "fast"), specs), out_specs=(P(), specs), check_vma=check_vma))
    state = jax.device_put(
        tx.init(_gradients(0)), jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    )

    def checked(g: Any, state: Any) -> Any:
        update, state = step(jax.device_put(g, NamedSharding(mesh, P("slow", "fast"))), state)
        exdyna_jax.assert_replicas_equal((update, state))
        return update, state.residual, state.velocity, exdyna_jax.metrics(state), state

    return checked, state


def _mapped(tx: Any) -> Any:
    """Two nested `vmap`s; all copies must be equal."""

    def home(x: np.ndarray, rows: bool) -> np.ndarray:
        x = np.asarray(x)
        np.testing.assert_array_equal(x, np.broadcast_to(x[:, :1] if rows else x[:1, :1], x.shape))
        return x[:, 0, 0] if rows else x[0, 0]

    nest = lambda f: jax.vmap(jax.vmap(f, axis_name="fast"), axis_name="slow")  # noqa: E731
    step = jax.jit(nest(tx.update))

    def checked(g: Any, state: Any) -> Any:
        update, state = step(g, state)
        rows = [jax.tree.map(lambda x: home(x, True), own) for own in (state.residual, state.velocity)]
        return (
            jax.tree.map(lambda x: home(x, False), update),
            *rows,
            {k: home(v, False) for k, v in exdyna_jax.metrics(state).items()},
            state,
        )

    return checked, jax.jit(nest(tx.init))(_gradients(0, WORKERS, FAST))


@pytest.fixture(scope="module")
def averaged() -> list[Any]:
    """(update, state) of each step of the sparsifier without `dense_axis`, on gradients that are averaged before. An infinity at step 3."""
    shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    run = simulate(exdyna_jax.exdyna(axis_name="data", num_workers=WORKERS, **OPTIONS), shapes, WORKERS)
    state, seen = run.init(), []
    for t in range(STEPS):
        update, state = run.step({name: x.mean(axis=1) for name, x in _with_infinity(t).items()}, state)
        seen.append(jax.device_get((update, state)))
    return seen


def _with_infinity(t: int) -> Any:
    g = _gradients(t, WORKERS, FAST)
    if t == 3:
        g["b"][1, 0, 5] = np.inf
    return g


@pytest.mark.parametrize("context", ["checked", "explicit, unchecked", "vmap"])
def test_dense_axis_is_the_mean_before(context: str, averaged: list[Any]) -> None:
    tx = exdyna_jax.exdyna(axis_name="slow", num_workers=WORKERS, dense_axis="fast", **OPTIONS)
    if context == "vmap":
        step, state = _mapped(tx)
    else:
        step, state = _sharded(tx, *((AxisType.Auto, True) if context == "checked" else (AxisType.Explicit, False)))
    for t, (want_update, want) in enumerate(averaged):
        update, residual, velocity, told, state = step(_with_infinity(t), state)
        np.testing.assert_array_equal(flat(update), flat(want_update), f"step {t}")
        np.testing.assert_array_equal(flat(residual, 1), flat(want.residual, 1), f"step {t}")
        np.testing.assert_array_equal(flat(velocity, 1), flat(want.velocity, 1), f"step {t}")
        for name, wanted in exdyna_jax.metrics(want).items():
            np.testing.assert_allclose(told[name], wanted, rtol=1e-5, err_msg=f"step {t}: {name}")
    assert told["skipped"] == 1


def test_dense_axis_must_not_be_averaged_before() -> None:
    """A gradient that is equal along the fast axis was averaged there already: an error where types show it."""
    tx = exdyna_jax.exdyna(axis_name="slow", num_workers=WORKERS, dense_axis="fast", **OPTIONS)
    specs = exdyna_jax.state_specs(jax.eval_shape(tx.init, _gradients(0)), "slow")

    def step(g: Any, state: Any) -> Any:
        return tx.update(lax.pmean(_squeezed(_squeezed(g)), "fast"), state)

    mapped = jax.shard_map(step, mesh=_mesh(AxisType.Auto, "slow", "fast"), in_specs=(P("slow", "fast"), specs), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"equal on all workers along \('slow', 'fast'\)"):
        jax.eval_shape(mapped, _gradients(0, WORKERS, FAST), tx.init(_gradients(0)))
