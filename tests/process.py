"""One of several processes that train together, two devices each: `python process.py RANK PROCESSES PORT FOLDER`.

Runs the same steps by `shard_map` and by `pmap`, and writes what this process sees of them to `FOLDER/RANK.npz`.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax

AXIS = "data"
EACH = 2  # devices of a process
STEPS = 6
SHAPES = {"w": (5, 7), "v": (1030,)}


def transformation(n: int | None = None) -> Any:
    return optax.chain(exdyna_jax.exdyna(0.05, AXIS, num_workers=n, momentum=0.5), optax.sgd(0.5, momentum=0.5))


def params() -> Any:
    return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


def gradients(t: int, n: int) -> Any:
    """Of all workers, leaves `[n, *shape]`; whole numbers, so that no order of summation makes a difference. A NaN at step 3."""
    rng = np.random.RandomState(t)
    g = {name: rng.randint(-64, 65, (n, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    if t == 3:
        g["v"][n - 1, 7] = np.nan
    return g


def train(g: Any, params: Any, state: Any) -> Any:
    """One worker's step."""
    updates, state = transformation().update(g, state, params)
    return optax.apply_updates(params, updates), state, updates


def seen(params: Any, state: Any, updates: Any) -> dict[str, Any]:
    """What is compared: equal on all workers but for what they have of their own."""
    told = exdyna_jax.metrics(state)
    return {
        **{f"equal/params/{name}": x for name, x in params.items()},
        **{f"equal/updates/{name}": x for name, x in updates.items()},
        **{f"equal/{name}": told[name] for name in ("sent", "skipped", "blocks", "threshold")},
        **{f"own/residual/{name}": x for name, x in state[0].residual.items()},
        **{f"own/velocity/{name}": x for name, x in state[0].velocity.items()},
    }


def by_shard_map(n: int) -> list[dict[str, Any]]:
    mesh = jax.make_mesh((n,), (AXIS,), axis_types=(AxisType.Auto,))
    tx = transformation(n)
    specs = exdyna_jax.state_specs(jax.eval_shape(tx.init, params()), AXIS)
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    weights = jax.device_put(params(), everywhere)
    state = jax.jit(tx.init, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))(weights)

    def one(g: Any, params: Any, state: Any) -> Any:
        return train(jax.tree.map(lambda x: x[0], g), params, state)

    step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(AXIS), P(), specs), out_specs=(P(), specs, P())))
    steps = []
    for t in range(STEPS):
        g = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, rows, lambda index, x=x: x[index]), gradients(t, n))
        weights, state, updates = step(g, weights, state)
        exdyna_jax.assert_replicas_equal((weights, state, updates))
        steps.append({name: _here(x) for name, x in seen(weights, state, updates).items()})
    return steps


def _here(x: jax.Array) -> np.ndarray:
    """What this process has of an array: all of it, or its rows."""
    shards = [np.asarray(shard.data) for shard in x.addressable_shards]
    return shards[0] if x.is_fully_replicated else np.concatenate(shards)


def by_pmap(n: int) -> list[dict[str, Any]]:
    mine = slice(jax.process_index() * EACH, (jax.process_index() + 1) * EACH)
    copies = jax.tree.map(lambda x: np.stack([x] * EACH), params())
    weights, state = jax.pmap(lambda params: (params, transformation().init(params)), axis_name=AXIS)(copies)
    step = jax.pmap(train, axis_name=AXIS)
    steps = []
    for t in range(STEPS):
        weights, state, updates = step(jax.tree.map(lambda x: x[mine], gradients(t, n)), weights, state)
        rows = {name: _here(x) for name, x in seen(weights, state, updates).items()}
        for name, x in rows.items():
            if name.startswith("equal"):
                np.testing.assert_array_equal(x[0], x[1])
        steps.append({name: x[0] if name.startswith("equal") else x[:, 0] for name, x in rows.items()})
    return steps


def unequal_copies_are_found(n: int) -> None:
    """Copies that differ between processes only, whole and sharded over a second axis: every process must hear of it."""
    mesh = jax.make_mesh((n // EACH, EACH), ("process", "device"), axis_types=(AxisType.Auto,) * 2)
    for spec in (P(), P("device")):
        for wrong in (0.0, 1.0):
            rows = [jax.device_put(np.full(4 // (EACH if spec else 1), wrong * jax.process_index()), d) for d in jax.local_devices()]
            array = jax.make_array_from_single_device_arrays((4,), NamedSharding(mesh, spec), rows)
            if wrong:
                with pytest.raises(AssertionError, match="is not the same on"):
                    exdyna_jax.assert_replicas_equal({"w": array})
            else:
                exdyna_jax.assert_replicas_equal({"w": array})
    alone = jnp.full(3, jax.process_index())
    with pytest.raises(AssertionError, match="is not the same on"):
        exdyna_jax.assert_replicas_equal(alone)


def main() -> None:
    rank, processes, port = map(int, sys.argv[1:4])
    jax.config.update("jax_num_cpu_devices", EACH)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
    n = processes * EACH
    assert jax.device_count() == n
    runs = {"shard_map": by_shard_map(n), "pmap": by_pmap(n)}
    unequal_copies_are_found(n)
    flat = {f"{run}/{t}/{name}": x for run, steps in runs.items() for t, step in enumerate(steps) for name, x in step.items()}
    np.savez(Path(sys.argv[4]) / f"{rank}.npz", **flat)


if __name__ == "__main__":
    main()
