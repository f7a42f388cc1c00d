"""Everything that touches an axis name, and the only place that knows how JAX types replication.

Inside `jax.shard_map(check_vma=True)` a value carries the set of axes along which it varies. Elsewhere (`check_vma=False`, `pmap`,
`vmap(axis_name=)`) nothing is tracked and every cast below is the identity.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

AxisName = str | tuple[str, ...] | None


class Workers(NamedTuple):
    """The workers along an axis, seen from one of them."""

    axes: tuple[str, ...]  # mesh axis names, slowest first; () is a single worker without collectives
    size: int  # n, static
    rank: jax.Array  # r, int32 [], this worker


def axis_tuple(argument: str, axis_name: AxisName) -> tuple[str, ...]:
    """The axis names as a tuple; raises a ValueError for anything that is not `str | tuple[str, ...] | None`."""
    if axis_name is None:
        return ()
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, tuple) or not axes or not all(isinstance(axis, str) and axis for axis in axes) or len(set(axes)) < len(axes):
        raise ValueError(f"{argument}={axis_name!r} is not a mesh axis name, a tuple of different ones, or None.")
    return axes


def bound_size(axes: tuple[str, ...]) -> int | None:
    """Number of workers along `axes`, or None where one of them is not bound here."""
    try:
        return lax.axis_size(axes) if axes else 1
    except NameError:
        return None


def bind(axes: tuple[str, ...]) -> Workers:
    """The workers along `axes`; raises a ValueError where an axis is not bound."""
    size = bound_size(axes)
    if size is None:
        raise ValueError(
            f"axis_name={axes} is not bound here: call this inside jax.shard_map, jax.pmap or jax.vmap over that axis, "
            "or give axis_name=None for a single worker."
        )
    return Workers(axes, size, lax.axis_index(axes).astype(jnp.int32) if axes else jnp.int32(0))


def _varying(x: Any) -> frozenset[str]:
    return getattr(jax.typeof(x).manual_axis_type, "varying", frozenset())


def _tracked(axes: tuple[str, ...]) -> bool:
    """Whether types say what varies along `axes`. The probe is dead code in the compiled program."""
    return bool(axes) and bound_size(axes) is not None and set(axes) <= _varying(lax.axis_index(axes))


def to_varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """`tree` typed as different on every worker, whether it is or not."""

    def cast(x: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in _varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if _tracked(axes) else tree


def alike(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x` typed as different along every axis along which one of the others is, as the branches of a `cond` and loop carries must be."""
    missing = tuple(sorted(frozenset().union(*map(_varying, others)) - _varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def kind(x: jax.Array) -> tuple[Any, frozenset[str]]:
    """What arrays must have in common to be joined without a change of type: their dtype, and the axes along which they vary."""
    return x.dtype, _varying(x)


def over_shards(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A sum that the types say is over a worker's shard only, along axes other than the workers', over all of its shards."""
    others = tuple(sorted(_varying(x) - set(axes)))
    return lax.psum(x, others) if others else x


def unmanaged_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of the mesh, of more than one device, that are left to the compiler inside a `shard_map` over `axes`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not axes or not set(axes) <= set(mesh.manual_axes):
        return ()
    return tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1)


def replicated_paths(tree: Any, axes: tuple[str, ...]) -> list[str]:
    """Paths of the leaves that the types declare equal along one of `axes`; empty where types are not tracked."""
    if not _tracked(axes):
        return []
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [path_name(path) for path, leaf in leaves if not set(axes) <= _varying(leaf)]


def spread_paths(tree: Any, like: Any, axes: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """Paths of the leaves that vary along axes other than `axes` along which the leaf `like` them does not, and these axes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    more = [tuple(sorted(_varying(x) - _varying(y) - {*axes})) for (_, x), y in zip(leaves, jax.tree.leaves(like), strict=True)]
    return [(path_name(path), apart) for (path, _), apart in zip(leaves, more, strict=True) if apart]


def path_name(path: Any) -> str:
    """A leaf's path for a message."""
    return jax.tree_util.keystr(path) or "(the whole tree)"


def all_gather(x: jax.Array, workers: Workers) -> jax.Array:
    """`x` of every worker, stacked along a new first axis, replicated.

    Three workers holding `[1 2]`, `[3 4]`, `[5 6]` all end up with `[[1 2] [3 4] [5 6]]`.
    """
    if not workers.axes:
        return x[None]
    if _tracked(workers.axes):
        return lax.all_gather(to_varying(x, workers.axes), workers.axes, to="invarying")
    for axis in reversed(workers.axes):  # one axis at a time: a nested vmap knows no gather over a tuple
        x = lax.all_gather(x, axis)
    return x.reshape(workers.size, *x.shape[len(workers.axes) :])


def all_to_all(x: jax.Array, workers: Workers) -> jax.Array:
    """Row r of `[n, m]` goes to worker r; row i of what comes back is from worker i, different on each.

    Two workers holding `[[1] [2]]` and `[[3] [4]]` end up with `[[1] [3]]` and `[[2] [4]]`.
    """
    if not workers.axes:
        return x
    if _tracked(workers.axes):
        return lax.all_to_all(to_varying(x, workers.axes), workers.axes, 0, 0, tiled=True)
    x = x.reshape(*(lax.axis_size(axis) for axis in workers.axes), *x.shape[1:])
    for dimension, axis in enumerate(workers.axes):  # one axis at a time: a nested vmap knows no exchange over a tuple
        x = lax.all_to_all(x, axis, dimension, dimension, tiled=True)
    return x.reshape(workers.size, *x.shape[len(workers.axes) :])


def psum(x: Any, workers: Workers) -> Any:
    """Sum over the workers, replicated. `[1 2]`, `[3 4]`, `[5 6]` all end up as `[9 12]`."""
    return lax.psum(to_varying(x, workers.axes), workers.axes) if workers.axes else x


def broadcast(x: jax.Array, leader: jax.Array, workers: Workers) -> jax.Array:
    """The leader's `x`, replicated. `[1 2]`, `[3 4]`, `[5 6]` all end up as `[3 4]` if worker 1 leads."""
    return psum(jnp.where(workers.rank == leader, x, jnp.zeros_like(x)), workers)


def swap(x: jax.Array, partners: list[int], axis: str) -> jax.Array:
    """`x` of the worker's partner along one axis; `partners[r]` is that of r, and r that of `partners[r]`.

    Three workers holding 1, 2, 3 end up with 3, 2, 1 for the partners `[2, 1, 0]`. One axis only, and everyone named, since `vmap` knows no
    other permutation.
    """
    return lax.ppermute(to_varying(x, (axis,)), axis, list(enumerate(partners)))


def permute(x: jax.Array, destinations: Sequence[int], workers: Workers) -> jax.Array:
    """`x` of the worker that sends to this one; worker r sends to `destinations[r]`, and all are named, each once.

    Three workers holding 1, 2, 3 end up with 3, 1, 2 for the destinations `[1, 2, 0]`. Along several axes not under `vmap`:
    `check_permutes`.
    """
    axes = _occupied(workers)
    along = axes[0] if len(axes) == 1 else axes
    return lax.ppermute(to_varying(x, workers.axes), along, [(source, int(to)) for source, to in enumerate(destinations)])


def check_permutes(x: jax.Array, workers: Workers) -> None:
    """Raises a ValueError where workers along several axes can't send to each other, by sending nothing: part of a flat array like `x`."""
    axes = _occupied(workers)
    if len(axes) < 2 or _tracked(axes):
        return
    try:
        permute(x[:0], range(workers.size), workers)
    except AssertionError as error:
        raise ValueError(
            f"vmap sends along one axis only, not along {axes}: simulate all workers along one axis of size {workers.size}, "
            "or use shard_map."
        ) from error


def _occupied(workers: Workers) -> tuple[str, ...]:
    return tuple(axis for axis in workers.axes if lax.axis_size(axis) > 1)


def behind(x: jax.Array, received: jax.Array | None) -> jax.Array:
    """`x`, to be sent only when `received` has come.

    Messages that don't depend on each other may be sent in a different order on each device of a CPU, and wait for each other for ever.
    So a zero is added that depends on what came, and that the compiler can't know to be one.
    """
    if received is None or _varying(received) - _varying(x):
        return x
    bits = lax.bitcast_convert_type(received.reshape(-1)[0].astype(jnp.float32), jnp.int32)
    return x + jnp.minimum(jnp.abs(bits >> 31), 0).astype(x.dtype)


def ring_mean(x: jax.Array, members: int, workers: Workers) -> jax.Array:
    """Mean of a flat array over groups of `members` neighbouring workers, the same to the bit on all of a group.

    Each of `members` chunks goes around the ring once to be summed, and once more to be told: `vmap` and `shard_map(check_vma=True)` know
    no reduction over a part of an axis.
    """
    chunks = jnp.pad(x, (0, -x.size % members)).reshape(members, -1)
    place = workers.rank % members
    onward = [r + 1 if (r + 1) % members else r + 1 - members for r in range(workers.size)]
    part = chunks[place]
    for step in range(1, members):
        part = permute(part, onward, workers) + chunks[(place - step) % members]
    means = jnp.zeros_like(chunks).at[(place + 1) % members].set(part / members)
    for step in range(members - 1):
        part = permute(part, onward, workers)
        means = means.at[(place - step) % members].set(part / members)
    return means.reshape(-1)[: x.size]


def place_along(axis: str) -> tuple[int, jax.Array]:
    """The number of workers along one axis, and the place of this one among them."""
    return lax.axis_size(axis), lax.axis_index(axis).astype(jnp.int32)


def pmean(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mean along mesh axes other than the workers'."""
    return lax.pmean(x, axes)


def agreed(x: jax.Array, workers: Workers) -> jax.Array:
    """A scalar that is equal on all workers anyway, in a form on which `lax.cond` and `lax.switch` really branch.

    Under `vmap` the state is batched, and a batched predicate makes all branches run; the maximum over the workers is not batched. Where
    types are tracked this is the identity; `vmap` can't be told from `pmap`, which so pays for one scalar more.
    """
    if not workers.axes or _tracked(workers.axes):
        return x
    return lax.pmax(x.astype(jnp.int32), workers.axes).astype(x.dtype)
