"""Promise 3: parameters, threshold and topology are bit-identical on all workers after two hundred steps of training, in every context.

The gradient depends on the parameters, so that a difference, once there, would stay and grow. Where arrays live on several devices each
device's own copy is compared, otherwise the rows of what is stacked.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax

N = 8
STEPS = 200
KEY = jax.random.key(1)


def _params() -> Any:
    return {"w": 0.1 * jax.random.normal(KEY, (20, 12))}  # one leaf: nearly all the time goes into compiling


def _data() -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(KEY, (N * 32, 20))
    return x, jnp.sin(x[:, :12])


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)


def _trainer(axis: Any) -> tuple[Any, Callable[..., Any]]:
    """A transformation, and one worker's step with it: `(carry, t, x, y) -> (carry, loss)`."""
    tx = optax.chain(exdyna_jax.exdyna(0.02, axis, num_workers=N), optax.sgd(0.1, momentum=0.9, nesterov=True))

    def step(carry: Any, t: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        params, state = carry
        rows = (8 * t + jnp.arange(8)) % x.shape[0]
        loss, g = exdyna_jax.local_value_and_grad(_loss, axis)(params, x[rows], y[rows])
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), lax.pmean(loss, axis)

    return tx, step


def _on_mesh(kind: AxisType, check: bool, sizes: tuple[int, ...] = (N,), scan: bool = False) -> list[float]:
    """`shard_map`, step by step, or all steps in one program."""
    names = tuple("ab"[: len(sizes)])
    axis = names if len(names) > 1 else names[0]
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=jax.devices()[:N])
    tx, step = _trainer(axis)
    with jax.set_mesh(mesh):
        specs = (P(), exdyna_jax.state_specs(jax.eval_shape(tx.init, _params()), axis))
        place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec), is_leaf=lambda x: isinstance(x, P))
        carry = jax.device_put((_params(), tx.init(_params())), place(specs))
        data = jax.device_put(_data(), place((P(axis), P(axis))))
        body = _scanned(step) if scan else step
        train = jax.jit(
            jax.shard_map(body, in_specs=(specs, P(), P(axis), P(axis)), out_specs=(specs, P()), check_vma=check), donate_argnums=0
        )
        if scan:
            carry, losses = train(carry, jnp.arange(STEPS), *data)
        else:
            losses = []
            for t in range(STEPS):
                carry, loss = train(carry, jnp.int32(t), *data)
                losses.append(float(loss))  # waits: XLA for CPU hangs if it is more than 32 programs behind
    assert carry[0]["w"].sharding.num_devices == N
    exdyna_jax.assert_replicas_equal(carry)
    return [float(loss) for loss in losses]


def _scanned(step: Any) -> Any:
    return lambda carry, ts, x, y: lax.scan(lambda carry, t: step(carry, t, x, y), carry, ts)


def _stacked(over: Any) -> list[float]:
    """`pmap` or `vmap`: all that is equal has a row for each worker."""
    tx, step = _trainer("a")
    params = jax.tree.map(lambda x: jnp.stack([x] * N), _params())
    jit = (lambda f: f) if over is jax.pmap else jax.jit
    carry = jit(over(lambda params: (params, tx.init(params)), axis_name="a"))(params)
    train = jit(over(step, axis_name="a", in_axes=(0, None, 0, 0)))
    data = jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), _data())
    losses = []
    for t in range(STEPS):
        carry, loss = train(carry, jnp.int32(t), *data)
        losses.append(float(loss[0]))
    params, (ours, momentum) = carry
    for leaf in jax.tree.leaves((params, ours._replace(residual=None), momentum)):
        rows = np.asarray(leaf)
        np.testing.assert_array_equal(rows.view(np.uint8), np.broadcast_to(rows[:1], rows.shape).copy().view(np.uint8))
    return [float(loss) for loss in losses]


CONTEXTS: dict[str, Callable[[], list[float]]] = {
    "shard_map": functools.partial(_on_mesh, AxisType.Auto, True),
    "shard_map unchecked": functools.partial(_on_mesh, AxisType.Auto, False),
    "explicit mesh": functools.partial(_on_mesh, AxisType.Explicit, True),
    "two axes": functools.partial(_on_mesh, AxisType.Auto, True, (2, 4)),
    "scan": functools.partial(_on_mesh, AxisType.Auto, True, scan=True),
    "pmap": functools.partial(_stacked, jax.pmap),
    "vmap": functools.partial(_stacked, jax.vmap),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_replicas_stay_equal(context: str) -> None:
    losses = CONTEXTS[context]()
    assert np.mean(losses[-20:]) < 0.7 * losses[0], "it must have trained"
