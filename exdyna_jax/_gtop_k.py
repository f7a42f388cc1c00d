"""gTop-k: the k largest of the sum of what the workers selected, found in log(n) rounds."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from exdyna_jax._accumulator import Accumulator
from exdyna_jax._collectives import AxisName, Workers, place_along, swap
from exdyna_jax._density import Density, dense_below, in_tiers, make_density, target, tiers
from exdyna_jax._exchange import Local, announce, announce_bytes, reduce, reduce_bytes
from exdyna_jax._largest import first_of, largest
from exdyna_jax._slots import take
from exdyna_jax._sparsify import Exchange, Method, Options, sparsify, widened, without_control


def gtop_k(
    density: float | optax.Schedule,
    axis_name: AxisName,
    *,
    max_density: float | None = None,
    num_workers: int | None = None,
    dense_axis: AxisName = None,
    min_size: int = 0,
    every_k: int = 1,
    momentum: float | None = None,
    residual_dtype: Any = None,
    nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    r"""Sends about the k largest elements of the sum over all workers, and keeps the rest for later.

    Worker :math:`i` selects the :math:`k = \lfloor d N \rfloor` largest of its :math:`|a_i|`, a list of indices with values. Workers merge
    their lists in pairs, :math:`L \oplus L'`: values at equal indices are added up, and the k largest magnitudes survive, of equal ones the
    first. A butterfly of :math:`\log_2 n` rounds gives all of them the same list S, of k elements whatever n: there is no build-up. An
    element of a worker's own list counts as sent if it survived every round on its way, :math:`A_i \subseteq S`:

    .. math::
        u_j = \tfrac1n \sum_{i : j \in A_i} a_{i,j} \quad (j \in S); \qquad
        e_{i,j} \leftarrow 0 \quad (j \in A_i), \quad e_{i,j} \leftarrow a_{i,j} \quad (j \notin A_i).

    What was dropped on the way stays in its worker's residual, even if others bring the index back later, so that nothing is lost; the
    released code loses it. Where n is not a power of two the workers beyond it join a partner first. Along several mesh axes one axis is
    merged after the other, the last one first. With `momentum` the velocity is zeroed on all of S.

    Args:
      density: d, the share of the N elements to send in a step, or an optax schedule, as for `exdyna_jax.exdyna`.
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker.
      max_density, num_workers, dense_axis, min_size, every_k, momentum, residual_dtype, nonfinite: as for `exdyna_jax.exdyna`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its updates are equal on all workers.

    Raises:
      ValueError: for options out of range, and at trace time as `exdyna_jax.exdyna`.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.gtop_k(density=0.5, axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [3. 0. 0. 2.]

    References:
      Shi et al., gTop-k (ICDCS 2019), https://arxiv.org/abs/1901.04359, its tree-structured aggregation.
    """
    asked = make_density(density, max_density)
    below = dense_below(asked, min_size)
    options = Options(num_workers, dense_axis, below, every_k, momentum, None, residual_dtype, nonfinite)
    return sparsify(_method(asked), axis_name, options)


def _method(density: Density) -> Method:
    def exchange(accumulator: Accumulator, control: None, count: jax.Array, local: Local, workers: Workers) -> Exchange:
        layout, n = accumulator.layout, workers.size
        k = target(density, count, layout.size)
        sizes = tiers(density, layout.size)
        selected, marked = largest(accumulator, k, sizes[0])

        def ship(tier: int) -> Exchange:
            mine = selected[: sizes[tier]]
            merged, alive = _merge_all(Entries(mine, take(accumulator, mine)), k, layout.span, workers)
            indices, counts, identical = announce(merged, marked, jnp.int32(0), local, workers)
            values = take(accumulator, indices)
            sent = jnp.where(_among(indices, alive, layout.span), values, 0)
            sums = reduce(sent, (), accumulator, local, workers)
            listed = merge_bytes(sizes[tier], layout.dtype, workers) + announce_bytes(sizes[tier], n)
            done = Exchange(
                indices=indices,
                mean=sums.values / n,
                unsent=values - sent,
                dense=sums.dense,
                finite=sums.finite,
                control=None,
                selected=counts,
                sent=jnp.sum(indices < layout.span, dtype=jnp.int32),
                overflow=jnp.int32(0),
                threshold=None,
                blocks=None,
                identical=identical,
                bytes_sent=jnp.float32(listed + reduce_bytes(sizes[tier], 0, layout, n)),
            )
            return widened(done, sizes[0], layout.span)

        return in_tiers(sizes, k, workers, ship)

    return Method(without_control, exchange)


class Entries(NamedTuple):
    """A list of k slots."""

    indices: jax.Array  # int32 [k], ascending, then `span`
    values: jax.Array  # [k], 0 at the padding


def _merge_all(mine: Entries, k: jax.Array, span: int, workers: Workers) -> tuple[jax.Array, jax.Array]:
    """The indices that all workers end up with, equal on all though not in type, and those of this worker that survived; ascending."""
    merged, alive = mine, mine.indices
    for axis in reversed(workers.axes):
        merged, survivors = _merge_along(axis, merged, k, span)
        alive = jnp.sort(jnp.where(_among(alive, survivors, span), alive, span))
    return merged.indices, alive


def _merge_along(axis: str, mine: Entries, k: jax.Array, span: int) -> tuple[Entries, jax.Array]:
    """Merges the lists of all workers along one axis; and the indices of this worker's list that survived every round, ascending.

    The workers from the largest power of two on hand their list to a partner, and get the outcome from it.
    """
    size, rank = place_along(axis)
    power, beyond, rounds = pairings(size)
    merged = mine
    if size > power:
        joined = _merge(mine, _unpack(swap(_pack(mine), beyond, axis), mine), k, span)
        merged = Entries(*(jnp.where(rank < size - power, x, y) for x, y in zip(joined, mine, strict=True)))
    survivors = merged.indices
    for partners in rounds:
        merged = _merge(merged, _unpack(swap(_pack(merged), partners, axis), merged), k, span)
        survivors = jnp.where(_among(survivors, merged.indices, span), survivors, span)
    if size > power:
        outcome = jnp.concatenate([_pack(merged), survivors])
        outcome = jnp.where(rank < power, outcome, swap(outcome, beyond, axis))
        merged, survivors = _unpack(outcome[: -survivors.size], merged), outcome[-survivors.size :]
    return merged, jnp.sort(survivors)


def _merge(one: Entries, other: Entries, k: jax.Array, span: int) -> Entries:
    """The k largest of the sum of two lists, of equal ones the first. The same to the bit whichever comes first."""
    indices, values = (jnp.concatenate(both) for both in zip(one, other, strict=True))
    indices, values = lax.sort((indices, values), num_keys=1)
    twice = indices[1:] == indices[:-1]
    values = values + jnp.append(jnp.where(twice, values[1:], 0), jnp.zeros_like(values[:1]))
    values = jnp.where(jnp.append(jnp.zeros_like(twice[:1]), twice), 0, values)
    top, at = lax.top_k(jnp.abs(values), one.indices.size)
    chosen = first_of(top, k)
    indices, values = jnp.where(chosen, indices[at], span), jnp.where(chosen, values[at], 0)
    return Entries(*lax.sort((indices, values), num_keys=1))


def _among(indices: jax.Array, ascending: jax.Array, span: int) -> jax.Array:
    """bool: which of the indices are in a list."""
    at = jnp.searchsorted(ascending, indices)
    return (ascending.at[at].get(mode="fill", fill_value=span) == indices) & (indices < span)


def _pack(entries: Entries) -> jax.Array:
    """A list as one array of int32, so that it travels in one piece."""
    return jnp.concatenate([entries.indices, lax.bitcast_convert_type(entries.values, jnp.int32).reshape(-1)])


def _unpack(words: jax.Array, like: Entries) -> Entries:
    k, dtype = like.indices.size, like.values.dtype
    bits = words[k:].reshape(k, -1)
    return Entries(words[:k], lax.bitcast_convert_type(bits[:, 0] if dtype.itemsize == 4 else bits, dtype))


def pairings(size: int) -> tuple[int, list[int], list[list[int]]]:
    """The largest power of two, everyone's partner across it, and everyone's partner in each round of the butterfly below it."""
    depth = size.bit_length() - 1
    power = 2**depth
    beyond = [(r + power if r + power < size else r) if r < power else r - power for r in range(size)]
    return power, beyond, [[r ^ 2**i if r < power else r for r in range(size)] for i in range(depth)]


def swaps(k: int, dtype: Any, size: int) -> list[tuple[int, list[int]]]:
    """Swap by swap, the bytes that a worker hands to its partner, and everyone's partner."""
    entry = 4 + jnp.dtype(dtype).itemsize
    power, beyond, rounds = pairings(size)
    butterfly = [(k * entry, partners) for partners in rounds]
    return butterfly if size == power else [(k * entry, beyond), *butterfly, (k * (entry + 4), beyond)]


def merge_bytes(k: int, dtype: Any, workers: Workers) -> int:
    """Bytes that a worker with a partner in every round sends."""
    return sum(size for axis in workers.axes for size, _ in swaps(k, dtype, place_along(axis)[0]))
