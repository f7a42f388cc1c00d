"""The state as a user handles it: where it is sharded, what it reports."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from exdyna_jax._collectives import AxisName, axis_tuple
from exdyna_jax._sparsify import PER_WORKER, SparsifyState


def _name(entry: Any) -> Any:
    return getattr(entry, "name", getattr(entry, "key", None))


def state_specs(tree: Any, axis_name: AxisName) -> Any:
    """Partition specs for a tree that holds sparsifier states, for `in_specs`, `out_specs` and shardings.

    Residuals and velocities differ between workers and get `PartitionSpec(axes)` on their leading axis; everything else is equal on all
    workers and gets `PartitionSpec()`.

    Args:
      tree: an optax state, a flax TrainState, the State that `nnx.split` returns, or any pytree around one; arrays or shapes.
      axis_name: the axis that the transformation was built with.

    Returns:
      A tree of `jax.sharding.PartitionSpec` of the same structure.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.exdyna(density=0.01, axis_name="data", num_workers=4)
      >>> specs = exdyna_jax.state_specs(tx.init(jnp.zeros(100)), "data")
      >>> specs.residual, specs.exchanges
      (P('data',), P())
    """
    axes = axis_tuple("axis_name", axis_name)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [tuple(_name(entry) for entry in path) for path, _ in leaves]
    # flax.nnx turns the state into nested dicts, so it is known by its fields rather than by its type
    fields: dict[tuple[Any, ...], set[Any]] = {}
    for path in names:
        for depth, name in enumerate(path):
            fields.setdefault(path[:depth], set()).add(name)
    ours = {parent for parent, children in fields.items() if {"residual", "control", "mini_step"} <= children}

    def spec(path: tuple[Any, ...]) -> PartitionSpec:
        mine = any(path[:depth] in ours and name in PER_WORKER for depth, name in enumerate(path))
        return PartitionSpec(axes) if mine and axes else PartitionSpec()

    return jax.tree.unflatten(treedef, [spec(path) for path in names])


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """What the last step did, as replicated scalars and small vectors: a look-up, without any computation.

    Args:
      opt_state: an optax state, or any tree around one, that holds exactly one sparsifier state.

    Returns:
      A dict with `selected`, `density`, `sent`, `selected_per_worker` [n], `threshold`, `blocks` [n], `imbalance`, `overflow`, `skipped`,
      `skipped_in_a_row`, `gradients_identical`, `bytes_sent`, `bytes_dense`; without what a method doesn't have. `Metrics` says what each
      is. On a state stacked by `pmap` or `vmap` they keep the leading axis.

    Raises:
      ValueError: for none or several sparsifier states.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.exdyna(density=0.5, axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> _, state = tx.update(gradient, tx.init(gradient))
      >>> print(exdyna_jax.metrics(state)["selected"])
      2
    """
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_ours) if _is_ours(node)]
    if len(found) != 1:
        raise ValueError(
            f"The optimizer state holds {len(found)} sparsifier states instead of one: hand in the part that holds the one meant."
        )
    return {name: value for name, value in found[0].metrics._asdict().items() if value is not None}


def _is_ours(node: Any) -> bool:
    return isinstance(node, SparsifyState)
