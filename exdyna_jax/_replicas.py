"""Whether what should be equal on all devices is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils


def assert_replicas_equal(tree: Any) -> None:
    """Raises if a leaf that should be equal on several devices is not, bit for bit.

    Compares the copies that devices hold of the same part of an array, on all hosts: parameters, optimizer state, the replicated part of a
    sparsifier's state. Parts that differ by design, such as residuals sharded by `state_specs`, are compared with nothing. Waits for the
    values; meant for tests and for a look now and then.

    Args:
      tree: any pytree of arrays, as seen from outside of `shard_map`.

    Raises:
      AssertionError: naming the first leaf that differs, and the devices.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> exdyna_jax.assert_replicas_equal({"w": jnp.ones(3)})
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array):
            _assert_copies_equal(jax.tree_util.keystr(path), leaf)


def _assert_copies_equal(name: str, array: jax.Array) -> None:
    first: dict[str, tuple[Any, bytes]] = {}
    for shard in array.addressable_shards:
        here = np.asarray(jax.random.key_data(shard.data) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else shard.data).tobytes()
        device, there = first.setdefault(str(shard.index), (shard.device, here))
        assert here == there, f"{name}{shard.index} is not the same on {device} and {shard.device}."
    if jax.process_count() > 1 and array.is_fully_replicated:
        mine = np.frombuffer(next(iter(first.values()))[1], np.uint8)
        everyone = multihost_utils.process_allgather(mine)
        assert (everyone == everyone[0]).all(), f"{name} is not the same in all processes."
