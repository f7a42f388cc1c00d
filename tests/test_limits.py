"""Models as large as an int32 index reaches, by their shapes alone, and replicas that are not equal."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import AXIS, mesh

HUGE = 2**31


def _traced(tx: Any, sizes: list[int]) -> Any:
    """The shapes of the update of two workers."""
    leaves = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    one = jax.eval_shape(tx.init, leaves)._replace(residual=[jax.ShapeDtypeStruct((1, size), jnp.float32) for size in sizes])

    def both(g: Any, state: Any) -> Any:
        return jax.vmap(lambda _: tx.update(g, state)[0], axis_name=AXIS)(jnp.zeros(2))

    return jax.eval_shape(both, leaves, one)


@pytest.mark.parametrize("sizes", [[2**30, 2**29], [HUGE - 64]])
@pytest.mark.parametrize("rule", ["proportional", "paper"])
def test_indices_reach_the_end_of_int32(sizes: list[int], rule: str) -> None:
    tx = exdyna_jax.exdyna(1e-3, AXIS, num_workers=2, threshold_rule=rule, balance=rule)
    assert [leaf.shape for leaf in _traced(tx, sizes)] == [(2, size) for size in sizes]


@pytest.mark.parametrize("sizes", [[HUGE], [HUGE - 64, 1]])
def test_beyond_it_is_an_error(sizes: list[int]) -> None:
    tx = exdyna_jax.exdyna(1e-3, AXIS, num_workers=2)
    with pytest.raises(ValueError, match=r"positions; indices are int32 and end at .*Shard the parameters"):
        _traced(tx, sizes)


def test_dense_has_no_such_limit() -> None:
    assert _traced(exdyna_jax.dense(AXIS, num_workers=2), [2 * HUGE])[0].shape == (2, 2 * HUGE)


def test_unequal_replicas_are_found() -> None:
    everywhere = NamedSharding(mesh(4), P())
    rows = [jax.device_put(np.float32([1, 2, 3 + (device.id == 2)]), device) for device in mesh(4).devices]
    bad = jax.make_array_from_single_device_arrays((3,), everywhere, rows)
    good = jax.device_put(jnp.arange(3.0), everywhere)
    apart = jax.device_put(jnp.arange(4.0), NamedSharding(mesh(4), P(AXIS)))
    exdyna_jax.assert_replicas_equal({"good": good, "apart": apart, "host": np.ones(2), "key": jax.random.key(0)})
    with pytest.raises(AssertionError, match=r"\['bad'\].*not the same"):
        exdyna_jax.assert_replicas_equal({"apart": apart, "bad": bad, "good": good})


def test_zeros_of_either_sign_and_nans_are_compared_by_their_bits() -> None:
    rows = [jax.device_put(np.float32([value]), device) for value, device in zip([0.0, -0.0], mesh(2).devices, strict=True)]
    signed = jax.make_array_from_single_device_arrays((1,), NamedSharding(mesh(2), P()), rows)
    with pytest.raises(AssertionError, match="not the same"):
        exdyna_jax.assert_replicas_equal(signed)
    exdyna_jax.assert_replicas_equal(jax.device_put(jnp.array([jnp.nan]), NamedSharding(mesh(2), P())))
