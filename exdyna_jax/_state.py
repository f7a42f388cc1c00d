"""The state as a user handles it: where it is sharded, what it reports."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from exdyna_jax._checks import check_workers
from exdyna_jax._collectives import AxisName, axis_tuple
from exdyna_jax._gossip import GossipState
from exdyna_jax._partition import Topology, repartition
from exdyna_jax._sidco import SidcoControl, restage
from exdyna_jax._sparsify import PER_WORKER, SparsifyState


def _name(entry: Any) -> Any:
    return getattr(entry, "name", getattr(entry, "key", None))


def state_specs(tree: Any, axis_name: AxisName) -> Any:
    """Partition specs for a tree that holds sparsifier or gossip states, for `in_specs`, `out_specs` and shardings.

    Residuals and velocities differ between workers and get `PartitionSpec(axes)` on their leading axis; everything else is equal on all
    workers and gets `PartitionSpec()`.

    In gossip the parameters differ, and with them all that the optimizer keeps like them. In a tree with a gossip state for n workers every
    array with n rows therefore gets `PartitionSpec(axes)`: hand in `(params, opt_state)` together, with parameters from
    `replicate_params`. An array that has n rows for another reason needs a spec of your own.

    Args:
      tree: an optax state, a flax TrainState, the State that `nnx.split` returns, or any pytree around one; arrays or shapes.
      axis_name: the axis that the transformation was built with.

    Returns:
      A tree of `jax.sharding.PartitionSpec` of the same structure.

    Raises:
      ValueError: for an axis name that is none.

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
    ours = {parent for parent, children in fields.items() if {"exchanges", "mini_step", "residual"} <= children}

    gossips = {parent for parent, children in fields.items() if {"steps", "squared_distance", "bytes_dense"} <= children}
    shapes = [getattr(leaf, "shape", ()) for _, leaf in leaves]
    rows = {
        shape[:1]
        for path, shape in zip(names, shapes, strict=True)
        for parent in gossips
        if path[: len(parent) + 1] == (*parent, "squared_distance")
    }

    def spec(path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
        inside = [name in PER_WORKER for depth, name in enumerate(path) if path[:depth] in ours]
        mine = any(inside) or (not inside and shape[:1] in rows)
        return PartitionSpec(axes) if mine and axes else PartitionSpec()

    return jax.tree.unflatten(treedef, list(map(spec, names, shapes)))


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """What the last step did, as replicated scalars and small vectors: a look-up, without any computation.

    Args:
      opt_state: an optax state, or any tree around one, that holds exactly one sparsifier or gossip state.

    Returns:
      A dict with `selected`, `density`, `sent`, `selected_per_worker` [n], `threshold`, `blocks` [n], `imbalance`, `overflow`, `skipped`,
      `skipped_in_a_row`, `gradients_identical`, `bytes_sent`, `bytes_dense`; without what a method doesn't have. `Metrics` says what each
      is. On a state stacked by `pmap` or `vmap` they keep the leading axis.

      For gossip `consensus_distance`, `bytes_sent` and `bytes_dense`. The first estimates how far workers were from their mean before the
      last mixing, as `exdyna_jax.consensus_distance` measures it, from what each received: the root of the mean over the workers of an
      estimate that is unbiased in squares where peers are drawn from all. Inside the axis it is the worker's own.

    Raises:
      ValueError: for none or several states.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.exdyna(density=0.5, axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> _, state = tx.update(gradient, tx.init(gradient))
      >>> print(exdyna_jax.metrics(state)["selected"])
      2
    """
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_reporting) if _is_reporting(node)]
    if len(found) != 1:
        raise ValueError(
            f"The optimizer state holds {len(found)} sparsifier or gossip states instead of one: hand in the part that holds the one meant."
        )
    state = jax.tree.map(jnp.asarray, found[0])  # flax.nnx wraps the leaves of a state
    if isinstance(state, GossipState):
        distance = jnp.sqrt(jnp.mean(state.squared_distance, axis=-1))
        return {"consensus_distance": distance, "bytes_sent": state.bytes_sent, "bytes_dense": state.bytes_dense}
    return {name: value for name, value in state.metrics._asdict().items() if value is not None}


def _is_reporting(node: Any) -> bool:
    return isinstance(node, (SparsifyState, GossipState))


def _is_ours(node: Any) -> bool:
    return isinstance(node, SparsifyState)


# what of a method's control depends on the number of workers, and how to have it for another number
_AGAIN: dict[type, Callable[[Any, int], Any]] = {Topology: repartition, SidcoControl: restage}


def reshard(opt_state: Any, num_workers: int) -> Any:
    r"""The same state for another number of workers; nothing that waits in the residuals is lost.

    New worker j takes over the share of the old workers that covers its place, :math:`e'_j = \sum_i w_{ji} e_i` with
    :math:`w_{ji} = m \, |[i/n, (i+1)/n) \cap [j/m, (j+1)/m)|`. Each new residual is an average of old ones, and their mean over the workers
    stays what it was. The threshold, the step and what the balancing has learnt are kept; partitions are cut anew.

    Args:
      opt_state: an optax state, a TrainState, or any tree around sparsifier states, in the global view: residual leaves `[n, *shape]`.
        Other leaves pass as they are. A TrainState keeps its old `tx`: `.replace(tx=...)` the new one.
      num_workers: m, the new number of workers.

    Returns:
      The same tree with residual leaves `[m, *shape]`, unsharded where the old ones can't be resharded in place: lay it out with
      `state_specs`.

    Raises:
      ValueError: for a number of workers that is not a positive int, for a tree without a sparsifier state, or for one worker's view.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.exdyna(density=0.01, axis_name="data", num_workers=4)
      >>> state = tx.init(jnp.zeros(100))
      >>> exdyna_jax.reshard(state, 8).residual.shape
      (8, 100)
    """
    check_workers(num_workers)
    if any(isinstance(node, GossipState) for node in jax.tree.leaves(opt_state, is_leaf=_is_reporting)):
        raise ValueError(
            "Gossip has no residual to hand on, but parameters on each worker: average them with exdyna_jax.average_params, give them to "
            "the new workers with exdyna_jax.replicate_params, and call init anew."
        )
    if not any(_is_ours(node) for node in jax.tree.leaves(opt_state, is_leaf=_is_ours)):
        raise ValueError("There is no sparsifier state in this tree: hand in the optimizer state, or what holds it.")
    return jax.tree.map(lambda node: _reshard(node, num_workers) if _is_ours(node) else node, opt_state, is_leaf=_is_ours)


def _reshard(state: SparsifyState, m: int) -> SparsifyState:
    n = state.metrics.selected_per_worker.shape[-1]
    if jnp.ndim(state.exchanges):
        raise ValueError(
            f"The state is stacked, as pmap and vmap return it: exchanges has shape {state.exchanges.shape}, not (). "
            "Hand in the global view: residual and velocity with x[:, 0] for x, everything else in the optimizer state with x[0]."
        )
    rows = {leaf.shape[0] for leaf in jax.tree.leaves((state.residual, state.velocity))}
    if rows - {n}:
        raise ValueError(
            f"The residual has {rows.pop()} rows, but the state is that of {n} workers: call reshard on the global view, outside shard_map."
        )
    corners = np.union1d(np.arange(n + 1) * m, np.arange(m + 1) * n)  # of both divisions, in units of 1 / (n m)
    shares = np.zeros((m, n))
    for start, stop in pairwise(corners):
        shares[start // n, start // m] = (stop - start) / n

    def average(rows: jax.Array) -> jax.Array:
        return jnp.tensordot(jnp.asarray(shares, rows.dtype), rows, axes=1, precision=jax.lax.Precision.HIGHEST)

    last = state.metrics
    idle = jax.tree.map(jnp.zeros_like, last)
    return state._replace(
        residual=jax.tree.map(average, state.residual),
        velocity=jax.tree.map(average, state.velocity),
        control=jax.tree.map(
            lambda part: _AGAIN.get(type(part), lambda part, _: part)(part, m), state.control, is_leaf=lambda part: type(part) in _AGAIN
        ),
        metrics=idle._replace(
            selected_per_worker=jnp.zeros(m, jnp.int32),
            threshold=last.threshold,
            blocks=None if last.blocks is None else jnp.zeros(m, jnp.int32),
            skipped=last.skipped,
            skipped_in_a_row=last.skipped_in_a_row,
        ),
    )
