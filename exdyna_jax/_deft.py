"""DEFT: layers are shared out over the workers by what selecting in them costs, and each gets a k by its norm."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from exdyna_jax._accumulator import Accumulator, add
from exdyna_jax._checks import check_capacity
from exdyna_jax._collectives import AxisName, Workers, alike, broadcast
from exdyna_jax._compact import compact, place_in, to_words
from exdyna_jax._density import Density, dense_below, in_tiers, make_density, slots, target, tiers
from exdyna_jax._exchange import Local, broadcast_bytes
from exdyna_jax._largest import first_of
from exdyna_jax._layout import Layout
from exdyna_jax._partition import partition_of
from exdyna_jax._sparsify import Exchange, Method, Options, sparsify, widened, without_control
from exdyna_jax._union import exchange_union


def deft(
    density: float | optax.Schedule,
    axis_name: AxisName,
    *,
    max_density: float | None = None,
    capacity_factor: float = 2.0,
    num_workers: int | None = None,
    dense_axis: AxisName = None,
    min_size: int = 0,
    every_k: int = 1,
    momentum: float | None = None,
    wire_dtype: Any = None,
    residual_dtype: Any = None,
    nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the largest elements of every layer, layers shared out over the workers, and keeps the rest for later.

    A leaf larger than :math:`N / n` is cut into n layers of nearly equal size, every other one is a layer. In each step worker :math:`i`
    splits :math:`k = \lfloor d N \rfloor` among the layers by the norms of its accumulator there, the largest first:

    .. math::
        k_l = \min\left(\max\left(1, \left\lfloor k' \frac{\lVert a_{i,l} \rVert}{\nu'} \right\rfloor\right), \mathrm{size}_l\right)

    with what is left, :math:`k'` of k and :math:`\nu'` of the sum of the norms. The leader, worker :math:`t \bmod n`, puts the layers into
    n bins, the most costly first into the least loaded, where selecting costs :math:`\mathrm{size}_l \log_2 k_l`. Worker i takes bin
    :math:`(t + i) \bmod n` and selects the :math:`k_l` largest of each of its layers, by its own norms. Layers that the leader wants whole
    are sent by everyone, without indices. Then as `exdyna_jax.exdyna`: all workers send their values at all selected indices.

    Each layer sends at least one element, so that with more layers than k the density is higher than asked.

    Args:
      density: d, the share of the N elements to send in a step, or an optax schedule, as for `exdyna_jax.exdyna`.
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker.
      capacity_factor: slots of a worker's buffer, as a multiple of :math:`(k + \mathrm{layers}) / n`, at least 1; bins are balanced by
        cost, not by count, so that some workers select more than others. `math.inf` never overflows.
      max_density, num_workers, dense_axis, min_size, every_k, momentum, wire_dtype, residual_dtype, nonfinite: as for `exdyna_jax.exdyna`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; its updates are equal on all workers.

    Raises:
      ValueError: for options out of range, and at trace time as `exdyna_jax.exdyna`.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.deft(density=0.5, axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [3. 0. 0. 2.]

    References:
      Yoon and Oh, DEFT (ICPP 2023), https://arxiv.org/abs/2307.03500, its layer partitioning, local k and layer allocation.
    """
    asked = make_density(density, max_density)
    check_capacity(capacity_factor)
    below = dense_below(asked, min_size)
    options = Options(num_workers, dense_axis, below, every_k, momentum, wire_dtype, residual_dtype, nonfinite)
    return sparsify(_method(asked, capacity_factor), axis_name, options)


def _method(density: Density, capacity_factor: float) -> Method:
    def exchange(accumulator: Accumulator, control: None, count: jax.Array, local: Local, workers: Workers) -> Exchange:
        layout, n = accumulator.layout, workers.size
        layers = _layers_of(layout, n)
        most = [size + len(layers.sizes) for size in tiers(density, layout.size)]  # a layer sends at least one
        capacities = [slots(size, n, capacity_factor, layout.span) for size in most]
        k = target(density, count, layout.size)

        shares = _share_out(_norms(accumulator, layers), layers.sizes, k)
        bins = broadcast(_pack(shares, layers.sizes, n), count % n, workers)
        mine = bins == partition_of(count, workers.rank, n)
        words = _mark(accumulator, layers, shares, mine, most[0])

        def ship(tier: int) -> Exchange:
            selected, marked = compact(words, capacities[tier], layout.span, count)
            whole = _whole(layers, bins == n, most[tier], layout.span)
            done = exchange_union(accumulator, selected, marked, None, count, local, workers, whole)
            return widened(done, min(n * capacities[0], layout.span), layout.span)

        done = in_tiers(tiers(density, layout.size), k, workers, ship)
        return done._replace(bytes_sent=done.bytes_sent + jnp.float32(broadcast_bytes(len(layers.sizes), n)))

    return Method(without_control, exchange)


class Rows(NamedTuple):
    """Layers of one size that lie one behind the other in a leaf. Static."""

    leaf: int  # which of the sparse leaves
    first: int  # element of the leaf
    number: int
    width: int


class Layers(NamedTuple):
    """All layers, in order. Static."""

    rows: tuple[Rows, ...]
    sizes: np.ndarray  # int [L]
    starts: np.ndarray  # int [L], positions in the index space


def _layers_of(layout: Layout, n: int) -> Layers:
    """Leaves larger than N / n are cut into n, the first ones larger by one."""
    rows = []
    for i, leaf in enumerate(layout.leaves):
        pieces = min(n, leaf.size) if leaf.size * n > layout.size else 1
        each, more = divmod(leaf.size, pieces)
        rows += [Rows(i, 0, more, each + 1), Rows(i, more * (each + 1), pieces - more, each)]
    rows = [row for row in rows if row.number]
    sizes = np.repeat([row.width for row in rows], [row.number for row in rows])
    starts = [layout.leaves[row.leaf].offset + row.first + j * row.width for row in rows for j in range(row.number)]
    return Layers(tuple(rows), sizes, np.asarray(starts))


def _terms(accumulator: Accumulator, rows: Rows) -> tuple[jax.Array, ...]:
    """The terms of the accumulator in some layers, each [number, width]."""
    stop = rows.first + rows.number * rows.width
    return tuple(x[rows.first : stop].reshape(rows.number, rows.width) for x in accumulator.leaves[rows.leaf])


def _norms(accumulator: Accumulator, layers: Layers) -> jax.Array:
    """float [L]: the L2 norm of each layer."""
    squares = (jnp.square(add(accumulator.momentum, *_terms(accumulator, rows))) for rows in layers.rows)
    return jnp.sqrt(jnp.concatenate([jnp.sum(x, axis=1).astype(accumulator.layout.dtype) for x in squares]))


def _share_out(norms: jax.Array, sizes: np.ndarray, k: jax.Array) -> jax.Array:
    """int32 [L]: k_l of each layer, by norm in descending order, out of what is left of k."""
    real = jnp.result_type(float)
    norms = norms.astype(real)

    order = jnp.argsort(-norms)
    norms = norms[order]
    totals = jnp.cumsum(norms[::-1])[::-1]  # summed up from the smallest: what is left by subtraction would be rounding in the end

    def share(k: jax.Array, layer: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        norm, total, size = layer
        asked = jnp.where(total > 0, jnp.trunc(k * (norm / total)), 0)
        asked = jnp.where(asked <= k, asked, k)  # whatever rounding or an infinity makes of it
        share = jnp.minimum(jnp.maximum(asked, 1), size)
        return k - share, share

    _, shares = lax.scan(share, alike(k.astype(real), norms), (norms, totals, jnp.asarray(sizes, real)[order]))
    return jnp.zeros(sizes.size, jnp.int32).at[order].set(shares.astype(jnp.int32))


def _pack(shares: jax.Array, sizes: np.ndarray, n: int) -> jax.Array:
    """int32 [L]: the bin of each layer, the most costly first into the least loaded one; n for those sent whole, which cost nothing."""
    real = jnp.result_type(float)
    size = jnp.asarray(sizes, real)
    cost = jnp.where(shares > 1, size * jnp.log2(shares.astype(real)), size)
    whole = shares == jnp.asarray(sizes, jnp.int32)

    def put(loads: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        cost, whole = layer
        least = jnp.argmin(loads).astype(jnp.int32)
        return loads.at[least].add(jnp.where(whole, 0, cost)), jnp.where(whole, n, least)

    order = jnp.argsort(-cost)
    _, bins = lax.scan(put, alike(jnp.zeros(n, real), cost), (cost[order], whole[order]))
    return jnp.zeros(sizes.size, jnp.int32).at[order].set(bins)


def _mark(accumulator: Accumulator, layers: Layers, shares: jax.Array, mine: jax.Array, most: int) -> jax.Array:
    """uint32 [span / 32]: bit words of the k_l largest, of equal ones the first, of this worker's layers. Others are not looked at."""
    marks: list[list[jax.Array]] = [[] for _ in accumulator.layout.leaves]
    done = 0
    for rows in layers.rows:

        def select(terms: tuple[jax.Array, ...], share: jax.Array, width: int = rows.width) -> jax.Array:
            top, at = lax.top_k(jnp.abs(add(accumulator.momentum, *terms)), min(width, most))
            chosen = jnp.where(first_of(top, share), at, width)
            return jnp.zeros_like(terms[0], bool).at[chosen].set(True, mode="drop")

        def look(layer: tuple[Any, ...], select: Any = select) -> jax.Array:
            terms, share, mine = layer
            return lax.cond(mine, lambda: select(terms, share), lambda: jnp.zeros_like(terms[0], bool))

        here = slice(done, done + rows.number)
        done += rows.number
        marks[rows.leaf].append(lax.map(look, (_terms(accumulator, rows), shares[here], mine[here])).reshape(-1))
    return jnp.concatenate([to_words(jnp.concatenate(parts)) for parts in marks])


def _whole(layers: Layers, whole: jax.Array, slots: int, span: int) -> jax.Array:
    """int32 [slots]: the positions of all elements of some layers, then padding."""
    ends = jnp.cumsum(jnp.where(whole, jnp.asarray(layers.sizes, jnp.int32), 0), dtype=jnp.int32)
    slot = jnp.arange(slots, dtype=jnp.int32)
    layer = place_in(ends, slot)
    last = jnp.asarray(layers.starts + layers.sizes, jnp.int32)
    return jnp.where(slot < ends[-1], (last - ends).at[layer].get(mode="clip") + slot, span)
