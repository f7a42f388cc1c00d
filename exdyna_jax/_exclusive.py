"""Exclusive selection: each worker looks only at its own partition, and a threshold is corrected from the counts. ExDyna's and MiCRO's.

How the index space is partitioned is the difference between the two, and all that a method says of its own (`Partitions`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from exdyna_jax._accumulator import Accumulator, marks
from exdyna_jax._collectives import Workers
from exdyna_jax._compact import compact, or_one, widen
from exdyna_jax._density import Density, in_tiers, slots, target, tiers
from exdyna_jax._exchange import Local, Message, Sums, gather, gather_bytes, join, reduce, reduce_bytes
from exdyna_jax._layout import Layout
from exdyna_jax._partition import by_partition, partition_of
from exdyna_jax._slots import take
from exdyna_jax._sparsify import Exchange, Method
from exdyna_jax._threshold import Rule


class Partitions(NamedTuple):
    """How the index space is shared out among n workers: pure functions of replicated numbers."""

    init: Callable[[Layout, int], Any]  # (layout, n) -> topology before the first step
    edges: Callable[[Any, Layout, int], jax.Array]  # (topology, layout, n) -> int32 [n + 1], first positions, and the end
    blocks: Callable[[Any], jax.Array | None]  # topology -> blocks per partition, for the metrics
    # (topology, layout, selected, indices, sent) -> topology; selected and sent are int32 [n] in partition order
    next: Callable[[Any, Layout, jax.Array, jax.Array, jax.Array], Any]


class Control(NamedTuple):
    """What steers the next step, equal on all workers."""

    rule: Any  # the threshold rule's state, see _threshold.py
    topology: Any  # of the partitions


def exclusive(density: Density, rule: Rule, partitions: Partitions, capacity_factor: float) -> Method:
    """The method of a threshold rule and of partitions."""

    def init(layout: Layout, n: int) -> tuple[Control, jax.Array, jax.Array | None]:
        state = rule.init(target(density, jnp.int32(0), layout.size))
        topology = partitions.init(layout, n)
        return Control(state, topology), state.next_threshold, partitions.blocks(topology)

    def exchange(accumulator: Accumulator, control: Control, count: jax.Array, local: Local, workers: Workers) -> Exchange:
        layout, n = accumulator.layout, workers.size
        k = target(density, count, layout.size)
        sizes = tiers(density, layout.size)
        capacities = [slots(size, n, capacity_factor, layout.span) for size in sizes]

        aimed = rule.aim(control.rule, k)
        own_threshold = rule.start(aimed, accumulator, k, workers)
        edge = partitions.edges(control.topology, layout, n)
        partition = partition_of(count, workers.rank, n)
        start, stop = edge[partition], edge[partition + 1]
        words = marks(accumulator, own_threshold, start, stop)
        if rule.never_empty:
            words = or_one(words, start, stop, count)

        def ship(tier: int) -> Shipped:
            """Sends what is marked in buffers of this tier; the results are as large as for the largest buffers."""
            capacity = capacities[tier]
            indices, marked = compact(words, capacity, layout.span, count)
            message = gather(indices, marked, own_threshold, local, layout.span, workers)
            sent = jnp.minimum(message.counts, capacity)
            indices, owner = join(by_partition(message.indices, count), by_partition(sent, count), layout.span)
            values = take(accumulator, indices)
            own = jnp.where(owner == partition, jnp.abs(values), 0)
            excess = jnp.sum(jnp.where(own > 0, jnp.log(own / own_threshold.astype(own.dtype)), 0))
            sums = reduce(values, (excess,), accumulator, local, workers)
            return Shipped(
                widen(indices, n * capacities[0], layout.span),
                message._replace(indices=jnp.zeros(0, jnp.int32)),
                sums._replace(values=widen(sums.values, n * capacities[0], 0), unsent=widen(sums.unsent, n * capacities[0], 0)),
                sent,
                jnp.float32(gather_bytes(capacity, layout.span, n) + reduce_bytes(values.size, 1, layout, n)),
            )

        indices, message, sums, sent, sent_bytes = in_tiers(sizes, k, workers, ship)
        selected = message.counts
        all_selected, all_sent = jnp.sum(selected, dtype=jnp.int32), jnp.sum(sent, dtype=jnp.int32)
        threshold, lowest = rule.settle(aimed, message.thresholds)
        state = rule.next(aimed, threshold, all_selected, all_sent, sums.scalars[0], k)
        topology = partitions.next(control.topology, layout, by_partition(selected, count), indices, by_partition(sent, count))
        return Exchange(
            indices=indices,
            mean=sums.values / n,
            unsent=sums.unsent,
            dense=sums.dense,
            finite=sums.finite,
            control=Control(state, topology),
            selected=selected,
            sent=all_sent,
            overflow=all_selected - all_sent,
            threshold=lowest,
            blocks=partitions.blocks(control.topology),
            identical=message.identical,
            bytes_sent=sent_bytes,
        )

    return Method(init, exchange)


class Shipped(NamedTuple):
    """What one exchange brought."""

    indices: jax.Array  # int32 [n * capacity], ascending, then padding
    message: Message
    sums: Sums
    sent: jax.Array  # int32 [n]
    bytes_sent: jax.Array  # float32 []
