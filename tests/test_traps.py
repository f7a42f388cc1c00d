"""No silent trap: mistakes that would give wrong numbers are an error where types show them, and a metric where they don't."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import AXIS, SETUPS, gradients, mesh, metrics, simulation

N = 2
TX = exdyna_jax.exdyna(0.1, AXIS, num_workers=N)
PARAMS = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
SPECS = exdyna_jax.state_specs(TX.init(PARAMS), AXIS)
X = jnp.ones((6, 8))


def _loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def _trace(fun: Any, in_specs: Any, out_specs: Any, *args: Any, check_vma: bool = True) -> Any:
    return jax.eval_shape(jax.shard_map(fun, mesh=mesh(N), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma), *args)


def _step(params: Any, state: Any, x: jax.Array) -> Any:
    return TX.update(jax.grad(_loss)(params, x), state)


def test_summed_gradient_is_an_error() -> None:
    message = r"\['b'\].*and 1 more.*equal on all workers along \('data',\).*already summed.*local_value_and_grad"
    with pytest.raises(ValueError, match=message):
        _trace(_step, (P(), SPECS, P(AXIS)), (P(), SPECS), PARAMS, TX.init(PARAMS), X)


def test_one_summed_leaf_among_others_is_an_error() -> None:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        g = exdyna_jax.local_value_and_grad(_loss, AXIS)(params, x)[1]
        return TX.update(g | {"w": jax.lax.pmean(g["w"], AXIS)}, state)

    with pytest.raises(ValueError, match=r"gradients at \['w'\] are equal on all workers"):
        _trace(step, (P(), SPECS, P(AXIS)), (P(), SPECS), PARAMS, TX.init(PARAMS), X)


def test_local_gradient_is_no_error() -> None:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        return TX.update(exdyna_jax.local_value_and_grad(_loss, AXIS)(params, x)[1], state)

    for check_vma in (True, False):
        update, state = _trace(step, (P(), SPECS, P(AXIS)), (P(), SPECS), PARAMS, TX.init(PARAMS), X, check_vma=check_vma)
        assert jax.tree.map(jnp.shape, update) == jax.tree.map(jnp.shape, PARAMS)
        assert jax.tree.structure(state) == jax.tree.structure(TX.init(PARAMS))


def test_residual_that_claims_to_be_replicated_is_an_error() -> None:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        state = state._replace(residual=jax.tree.map(lambda e: e[:1], state.residual))
        return TX.update(exdyna_jax.local_value_and_grad(_loss, AXIS)(params, x)[1], state)

    with pytest.raises(ValueError, match=r"residual at \['b'\] is typed as equal on all workers.*state_specs"):
        _trace(step, (P(), P(), P(AXIS)), (P(), P()), PARAMS, TX.init(PARAMS), X)


@pytest.mark.parametrize("check_vma", [True, False])
def test_state_that_was_not_sharded_is_an_error(check_vma: bool) -> None:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        return TX.update(exdyna_jax.local_value_and_grad(_loss, AXIS)(params, x)[1], state)

    with pytest.raises(ValueError, match=r"residual of leaf \['b'\] has 2 rows.*state_specs"):
        _trace(step, (P(), P(), P(AXIS)), (P(), P()), PARAMS, TX.init(PARAMS), X, check_vma=check_vma)


def test_velocity_that_was_not_sharded_is_an_error() -> None:
    tx = exdyna_jax.exdyna(0.1, AXIS, num_workers=N, momentum=0.9)
    state = tx.init(PARAMS)
    specs = exdyna_jax.state_specs(state, AXIS)._replace(velocity=jax.tree.map(lambda _: P(), PARAMS))
    with pytest.raises(ValueError, match=r"velocity of leaf \['b'\] has shape \(2,.*residual \(1,.*state_specs"):
        _trace(lambda g, s: tx.update(g, s), (P(AXIS), specs), (P(), specs), {"w": jnp.ones((16, 4)), "b": jnp.ones(8)}, state)


@pytest.mark.parametrize("method", ["exdyna", "top_k", "dense"])
def test_gradient_that_differs_along_one_axis_more_is_an_error(method: str) -> None:
    """A dense_axis that was forgotten."""
    density = () if method == "dense" else (0.1,)
    tx = getattr(exdyna_jax, method)(*density, axis_name="slow", num_workers=2)
    params = {"w": jnp.zeros(8)}
    specs = exdyna_jax.state_specs(tx.init(params), "slow")
    both = jax.make_mesh((2, 2), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    step = jax.shard_map(lambda g, s: tx.update(g, s), mesh=both, in_specs=(P(("slow", "fast")), specs), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"gradient at \['w'\] differs along \('fast',\), its residual does not.*dense_axis"):
        jax.eval_shape(step, {"w": jnp.zeros(32)}, tx.init(params))


def test_unbound_axis_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"axis_name=\('data',\) is not bound here.*shard_map.*axis_name=None"):
        TX.update(PARAMS, TX.init(PARAMS))


def test_state_for_another_number_of_workers_is_an_error() -> None:
    tx = exdyna_jax.exdyna(0.1, AXIS)
    state = exdyna_jax.exdyna(0.1, AXIS, num_workers=2 * N).init(PARAMS)
    with pytest.raises(ValueError, match=r"state was made for 4 workers and there are 2.*reshard"):
        _trace(lambda g, s: tx.update(g, s), (P(AXIS), SPECS), (P(), SPECS), {"w": jnp.ones((16, 4)), "b": jnp.ones(8)}, state)


@pytest.mark.parametrize("context", ["vmap", "pmap", "shard_map unchecked"])
def test_summed_gradient_shows_where_types_do_not(context: str) -> None:
    """`gradients_identical` where each worker hands in the same gradient; not for different ones, nor for zeros."""
    run = simulation("odd", 4, context=context, **SETUPS["default"][2])
    rng = np.random.RandomState(0)
    own = gradients("odd", 4, rng.standard_normal)
    summed = jax.tree.map(lambda g: np.broadcast_to(g.sum(axis=0), g.shape).copy(), own)
    state = run.init()
    for g, identical in [(own, False), (summed, True), (jax.tree.map(np.zeros_like, own), False), (own, False)]:
        _, state = run.step(g, state)
        assert metrics(state)["gradients_identical"] == identical


def test_one_worker_is_not_suspicious() -> None:
    run = simulation("odd", 1, **SETUPS["one worker"][2])
    _, state = run.step(gradients("odd", 1, np.ones), run.init())
    assert not metrics(state)["gradients_identical"]
