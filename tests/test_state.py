"""The state as a user handles it: `state_specs` on whatever holds it, `metrics`, `local_value_and_grad`."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import AXIS, SETUPS, compilations, gradients, mesh, metrics, simulation

N = 2
PARAMS = {"w": jnp.zeros((4, 8)), "residual": jnp.zeros(3)}  # a user may call a parameter what we call a field
TX = exdyna_jax.exdyna(0.1, AXIS, num_workers=N, momentum=0.5)
OURS = ("residual", "velocity")


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _per_worker(specs: Any) -> int:
    return sum(spec == P((AXIS,)) for spec in jax.tree.leaves(specs, is_leaf=_is_spec))


def _check(specs: Any, tree: Any, per_worker: int) -> None:
    """Same structure; a spec on the leading axis of as many leaves as said, each of which has a row for each worker; P() elsewhere."""
    assert jax.tree.structure(specs, is_leaf=_is_spec) == jax.tree.structure(tree)
    pairs = list(zip(jax.tree.leaves(specs, is_leaf=_is_spec), jax.tree.leaves(tree), strict=True))
    assert all(leaf.shape[0] == N for spec, leaf in pairs if spec != P())
    assert sum(spec != P() for spec, _ in pairs) == _per_worker(specs) == per_worker


def test_specs_of_our_state() -> None:
    state = TX.init(PARAMS)
    specs = exdyna_jax.state_specs(state, AXIS)
    _check(specs, state, 4)
    for field in state._fields:
        want = P((AXIS,)) if field in OURS else P()
        assert all(spec == want for spec in jax.tree.leaves(getattr(specs, field), is_leaf=_is_spec)), field


@pytest.mark.parametrize("tx", [exdyna_jax.dense(AXIS, num_workers=N), exdyna_jax.exdyna(1.0, AXIS, num_workers=N)], ids=["dense", "all"])
def test_specs_where_nothing_is_steered(tx: Any) -> None:
    state = tx.init(PARAMS)
    _check(exdyna_jax.state_specs(state, AXIS), state, 2)


def test_specs_of_shapes_and_of_several_axes() -> None:
    shapes = jax.eval_shape(TX.init, PARAMS)
    _check(exdyna_jax.state_specs(shapes, AXIS), shapes, 4)
    assert exdyna_jax.state_specs(shapes, ("slow", "fast")).residual["w"] == P(("slow", "fast"))
    assert exdyna_jax.state_specs(shapes, None).residual["w"] == P()


def test_specs_of_a_chain() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), TX, optax.adamw(1e-3))
    state = tx.init(PARAMS)
    _check(exdyna_jax.state_specs(state, AXIS), state, 4)


def test_specs_of_two_sparsifiers() -> None:
    parts = {"ours": TX, "all": exdyna_jax.dense(AXIS, num_workers=N)}
    state = optax.partition(parts, {"w": "ours", "residual": "all"}).init(PARAMS)
    _check(exdyna_jax.state_specs(state, AXIS), state, 3)


class UserState(NamedTuple):
    """A user's own tree, with fields that are called as ours are."""

    residual: Any
    velocity: Any
    opt_state: Any


def test_fields_of_the_user_are_left_alone() -> None:
    tree = UserState(jnp.zeros((N, 3)), {"residual": jnp.zeros((N, 3))}, TX.init(PARAMS))
    specs = exdyna_jax.state_specs(tree, AXIS)
    _check(specs, tree, 4)
    assert (specs.residual, specs.velocity["residual"]) == (P(), P())


def _put(tree: Any, specs: Any, place: Any) -> Any:
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(place, spec), specs, is_leaf=_is_spec))


def test_fresh_state_can_be_donated() -> None:
    """Made outside jit too: no two of its leaves are one buffer. With `every_k` a step reads all of them."""
    params = PARAMS | {"none": jnp.zeros((0, 3)), "nothing": jnp.zeros(0), "steps": jnp.zeros(2, jnp.int32)}
    for options in ({"momentum": 0.5}, {"threshold_rule": "paper", "balance": "paper"}, {}):
        tx = exdyna_jax.exdyna(0.1, None, every_k=2, **options)
        state = tx.init(params)
        leaves = jax.tree.leaves(state)
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    _, after = jax.jit(tx.update, donate_argnums=1)(params | {"steps": np.zeros(2, jax.dtypes.float0)}, state)
    assert after.mini_step == 1


X = np.random.RandomState(0).standard_normal((N * 8, 4)).astype(np.float32)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_state_laid_out_by_its_specs_compiles_once(kind: AxisType) -> None:
    """What a step returns is laid out as what `state_specs` laid out before the first."""
    place = jax.make_mesh((N,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:N])
    with jax.set_mesh(place):
        state = TX.init(PARAMS)
        specs = exdyna_jax.state_specs(state, AXIS)
        state = _put(state, specs, place)
        given = jax.device_put(jax.tree.map(lambda leaf: jnp.ones((N, *leaf.shape)), PARAMS), NamedSharding(place, P(AXIS)))

        def update(gradients: Any, state: Any) -> Any:
            return TX.update(jax.tree.map(lambda g: g[0], gradients), state)

        step = jax.jit(jax.shard_map(update, in_specs=(P(AXIS), specs), out_specs=(P(), specs)))
        laid_out = jax.tree.map(jax.typeof, state)
        _, state = step(given, state)
        with compilations() as compiled:
            for _ in range(2):
                _, state = jax.block_until_ready(step(given, state))
            assert compiled() == 0
        assert jax.tree.map(jax.typeof, state) == laid_out


def test_linen_train_state() -> None:
    """Created outside the mesh, trained inside, checked, with donated buffers; one compilation."""
    model = nn.Dense(8)
    params = model.init(jax.random.key(0), X)["params"]
    tx = optax.chain(exdyna_jax.exdyna(0.2, AXIS, num_workers=N), optax.sgd(0.1, momentum=0.9))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    specs = exdyna_jax.state_specs(state, AXIS)
    _check(specs, state, 2)
    place = mesh(N)

    def step(state: TrainState, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((state.apply_fn({"params": params}, x) - 1) ** 2)

        value, g = exdyna_jax.local_value_and_grad(loss, AXIS)(state.params)
        return state.apply_gradients(grads=g), lax.pmean(value, AXIS)

    train = jax.jit(jax.shard_map(step, mesh=place, in_specs=(specs, P(AXIS)), out_specs=(specs, P())), donate_argnums=0)
    state, x = _put(state, specs, place), jax.device_put(X, NamedSharding(place, P(AXIS)))
    losses = []
    for _ in range(30):
        old = state
        state, loss = train(state, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.params, old.opt_state[0].residual, old.opt_state[1])))
        losses.append(float(loss))
    assert train._cache_size() == 1
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.step) == 30
    assert exdyna_jax.metrics(state)["sent"] > 0


def test_nnx_optimizer() -> None:
    """`nnx.split` makes dictionaries of our state: known by its fields all the same."""
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(exdyna_jax.exdyna(0.2, AXIS, num_workers=N), optax.sgd(0.1, momentum=0.9)), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    specs = exdyna_jax.state_specs(state, AXIS)
    _check(specs, state, 2)
    place = mesh(N)

    def step(state: Any, x: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        inner, params = nnx.split(model)
        value, g = exdyna_jax.local_value_and_grad(lambda p: jnp.mean((nnx.merge(inner, p)(x) - 1) ** 2), AXIS)(params)
        optimizer.update(model, g)
        return nnx.split((model, optimizer))[1], lax.pmean(value, AXIS)

    train = jax.jit(jax.shard_map(step, mesh=place, in_specs=(specs, P(AXIS)), out_specs=(specs, P())))
    state, x = _put(state, specs, place), jax.device_put(X, NamedSharding(place, P(AXIS)))
    losses = []
    for _ in range(30):
        state, loss = train(state, x)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    _, optimizer = nnx.merge(graph, state)
    assert float(exdyna_jax.metrics(optimizer.opt_state)["sent"]) > 0


KEYS = {
    "selected", "density", "sent", "selected_per_worker", "threshold", "blocks", "imbalance", "overflow", "skipped", "skipped_in_a_row",
    "gradients_identical", "bytes_sent", "bytes_dense",
}  # fmt: skip


def test_metrics() -> None:
    tree, n, options = SETUPS["default"]
    run = simulation(tree, n, **options)
    state = run.init()
    assert set(metrics(state)) == KEYS
    _, state = run.step(gradients(tree, n, np.random.RandomState(0).standard_normal), state)
    told = metrics((optax.EmptyState(), {"inner": [state]}))
    assert set(told) == KEYS
    size = sum(np.prod(g.shape[1:]) for g in jax.tree.leaves(gradients(tree, n, np.zeros)))
    assert told["selected"] == told["selected_per_worker"].sum() == told["sent"] + told["overflow"]
    assert told["density"] == pytest.approx(told["selected"] / size)
    assert told["imbalance"] == pytest.approx(n * told["selected_per_worker"].max() / told["selected"])
    assert told["selected_per_worker"].shape == told["blocks"].shape == (n,)
    assert (told["skipped"], told["skipped_in_a_row"]) == (0, 0)
    assert told["bytes_sent"] > 0


def test_metrics_count_skipped_steps() -> None:
    tree, n, options = SETUPS["default"]
    run = simulation(tree, n, **options)
    state, counted = run.init(), []
    for spoilt in (False, True, True, False, True):
        g = gradients(tree, n, np.ones)
        if spoilt:
            g["c"][1, 7] = np.nan
        _, state = run.step(g, state)
        told = metrics(state)
        counted.append((int(told["skipped"]), int(told["skipped_in_a_row"])))
    assert counted == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1)]


def test_metrics_of_a_stacked_state() -> None:
    state = jax.vmap(exdyna_jax.exdyna(0.1, AXIS).init, axis_name=AXIS, axis_size=3, in_axes=None)(PARAMS)
    assert all(value.shape[0] == 3 for value in exdyna_jax.metrics(state).values())


def test_dense_has_no_threshold() -> None:
    assert set(metrics(exdyna_jax.dense(None).init(PARAMS))) == KEYS - {"threshold", "blocks"}


def _fun(w: Any, x: jax.Array, scale: jax.Array, *, shift: float = 0.0) -> jax.Array:
    return jnp.sum(jnp.tanh(x * w["a"][None]) * scale) + shift * w["b"]


WEIGHTS = {"a": jnp.arange(1.0, 4.0), "b": jnp.float32(2)}
ROWS = jnp.arange(4 * N * 3.0).reshape(4 * N, 3) / 10


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("argnums", [0, (0, 2), -1])
def test_local_value_and_grad_is_each_workers_own(argnums: Any, check_vma: bool) -> None:
    def worker(w: Any, x: jax.Array, scale: jax.Array) -> Any:
        return jax.tree.map(lambda v: v[None], exdyna_jax.local_value_and_grad(_fun, AXIS, argnums)(w, x, scale, shift=3.0))

    mapped = jax.shard_map(worker, mesh=mesh(N), in_specs=(P(), P(AXIS), P()), out_specs=P(AXIS), check_vma=check_vma)
    got = jax.jit(mapped)(WEIGHTS, ROWS, jnp.float32(0.5))
    for i in range(N):
        want = jax.value_and_grad(_fun, argnums=argnums)(WEIGHTS, ROWS[4 * i : 4 * i + 4], jnp.float32(0.5), shift=3.0)
        jax.tree.map(lambda g, w, i=i: np.testing.assert_allclose(g[i], w, rtol=1e-5, atol=1e-6), got, want)


def test_local_value_and_grad_with_aux_over_two_axes() -> None:
    axes = ("slow", "fast")
    place = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def fun(w: Any, x: jax.Array) -> Any:
        return _fun(w, x, jnp.float32(1)), {"seen": jnp.sum(x)}

    def worker(w: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda v: v[None], exdyna_jax.local_value_and_grad(fun, axes, has_aux=True)(w, x))

    got = jax.jit(jax.shard_map(worker, mesh=place, in_specs=(P(), P(axes)), out_specs=P(axes)))(WEIGHTS, ROWS)
    for i in range(4):
        want = jax.value_and_grad(fun, has_aux=True)(WEIGHTS, ROWS[2 * i : 2 * i + 2])
        jax.tree.map(lambda g, w, i=i: np.testing.assert_allclose(g[i], w, rtol=1e-5, atol=1e-6), got, want)


def test_local_value_and_grad_of_a_single_worker() -> None:
    got = exdyna_jax.local_value_and_grad(_fun, None)(WEIGHTS, ROWS, jnp.float32(1))
    jax.tree.map(np.testing.assert_array_equal, got, jax.value_and_grad(_fun)(WEIGHTS, ROWS, jnp.float32(1)))
    with pytest.raises(ValueError, match=r"argnums=0, but there are 0 positional arguments: hand over parameters by position"):
        exdyna_jax.local_value_and_grad(_fun, None)(w=WEIGHTS, x=ROWS, scale=jnp.float32(1))
    with pytest.raises(ValueError, match=r"argnums=\(0, 3\), but there are 3 positional"):
        exdyna_jax.local_value_and_grad(_fun, None, argnums=(0, 3))(WEIGHTS, ROWS, jnp.float32(1))
    with pytest.raises(ValueError, match=r"axis_name=5 is not a mesh axis name"):
        exdyna_jax.local_value_and_grad(_fun, 5)  # type: ignore[arg-type]
