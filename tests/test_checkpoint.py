"""A saved state is restored as it was, also where some leaves take no part: orbax refuses arrays without elements."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import AXIS, mesh

N = 4
PARAMS = {"w": jnp.zeros((4, 33)), "steps": jnp.zeros(2, jnp.int32), "none": jnp.zeros((0, 3)), "nothing": None}
TX = exdyna_jax.exdyna(0.1, AXIS, num_workers=N, momentum=0.5)


def _gradients(t: int) -> Any:
    g = np.random.RandomState(t).standard_normal((N, 4, 33)).astype(np.float32)
    return {"w": g, "steps": np.zeros((N, 2), jax.dtypes.float0), "none": np.zeros((N, 0, 3), np.float32), "nothing": None}


def test_restored_state_goes_on(tmp_path: Path) -> None:
    specs = exdyna_jax.state_specs(jax.eval_shape(TX.init, PARAMS), AXIS)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh(N), spec), specs, is_leaf=lambda x: isinstance(x, P))

    def update(g: Any, state: Any) -> Any:
        own = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype) if x.dtype == jax.dtypes.float0 else x[0], g)
        return TX.update(own, state)

    step = jax.jit(jax.shard_map(update, mesh=mesh(N), in_specs=(P(AXIS), specs), out_specs=(P(), specs)))
    state = jax.device_put(TX.init(PARAMS), shardings)
    for t in range(3):
        _, state = step(_gradients(t), state)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(TX.init, PARAMS), shardings)
        restored = saver.restore(tmp_path / "state", shapes)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.map(lambda x: (x.sharding, x.dtype), restored) == jax.tree.map(lambda x: (x.sharding, x.dtype), state)
    after, other = step(_gradients(3), state), step(_gradients(3), restored)
    jax.tree.map(np.testing.assert_array_equal, after, other)

    fewer = exdyna_jax.reshard(restored, 2)
    fresh = exdyna_jax.exdyna(0.1, AXIS, num_workers=2, momentum=0.5).init(PARAMS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), fewer) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)
