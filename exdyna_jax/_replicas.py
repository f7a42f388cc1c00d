"""Whether what should be equal on all devices is."""

import hashlib
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
    """All processes compare the same digests, so that either none of them raises, or all, and none waits for another."""
    index_of = array.sharding.devices_indices_map(array.shape)
    devices: list[Any] = list(index_of)
    mine = np.zeros((len(devices), hashlib.sha256().digest_size), np.uint8)
    for shard in array.addressable_shards:
        data = jax.random.key_data(shard.data) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else shard.data
        mine[devices.index(shard.device)] = np.frombuffer(hashlib.sha256(np.asarray(data).tobytes()).digest(), np.uint8)
    everyone = mine[None] if jax.process_count() == 1 else multihost_utils.process_allgather(mine)
    # an array of this process alone is compared with its like in the others if it is the same on all devices here
    shared = not array.is_fully_addressable or array.is_fully_replicated
    first: dict[Any, tuple[Any, bytes]] = {}
    for process, digests in enumerate(everyone):
        for device, digest in zip(devices, digests, strict=True):
            if array.is_fully_addressable or device.process_index == process:
                index = str(index_of[device])
                holder, there = first.setdefault((index, None if shared else process), (device, digest.tobytes()))
                if digest.tobytes() != there:  # no assert statement, which python -O would leave out
                    raise AssertionError(f"{name}{index_of[device]} is not the same on {holder} and {device}, process {process}.")
