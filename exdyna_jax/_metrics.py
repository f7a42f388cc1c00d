"""What a person wants to know of the last step, apart from what the next step needs."""

from typing import NamedTuple

import jax


class Metrics(NamedTuple):
    """Of the last step, replicated. None where a method has no such thing."""

    selected: jax.Array  # int32 [], marked by all workers: sent + overflow
    density: jax.Array  # float32 [], selected / N
    sent: jax.Array  # int32 [], exchanged; an index that several workers marked counts once
    selected_per_worker: jax.Array  # int32 [n], in worker order
    threshold: jax.Array | None  # float [], as used in the step; where workers estimated one each, the lowest
    blocks: jax.Array | None  # int32 [n], blocks per partition as used in the step
    imbalance: jax.Array  # float32 [], n max(k_i) / sum(k_i); 1 is perfect
    overflow: jax.Array  # int32 [], marks that found no slot: they stay in the residual
    skipped: jax.Array  # int32 [], steps skipped so far for a gradient that was not finite, or too large
    skipped_in_a_row: jax.Array  # int32 []
    gradients_identical: jax.Array  # bool [], all workers had the same gradient: it was summed before
    bytes_sent: jax.Array  # float32 [], by one worker, by ring collectives, padding and counts included
    bytes_dense: jax.Array  # float32 [], what a ring all-reduce of the gradient would have sent
