"""ExDyna: exclusive partitions of blocks, balanced and rotated, and a threshold that is corrected online."""

from typing import Any

import jax
import optax

from exdyna_jax._checks import check_blocks, check_capacity, check_choice
from exdyna_jax._collectives import AxisName
from exdyna_jax._density import dense_below, make_density
from exdyna_jax._exclusive import Partitions, exclusive
from exdyna_jax._layout import Layout
from exdyna_jax._partition import BALANCES, PAPER_BLOCKS, Balance, Topology, edges, make_grid
from exdyna_jax._sparsify import Options, sparsify
from exdyna_jax._threshold import RULES


def exdyna(
    density: float | optax.Schedule,
    axis_name: AxisName,
    *,
    max_density: float | None = None,
    threshold_rule: str = "proportional",
    balance: str = "proportional",
    num_blocks: int | None = None,
    capacity_factor: float = 1.5,
    num_workers: int | None = None,
    dense_axis: AxisName = None,
    min_size: int = 0,
    every_k: int = 1,
    momentum: float | None = None,
    wire_dtype: Any = None,
    residual_dtype: Any = None,
    nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the largest part of the gradient, exclusively partitioned over the workers, and keeps the rest for later.

    In step :math:`t` worker :math:`i` of :math:`n` holds the accumulator :math:`a_i = g_i + e_i` of its gradient and its residual. It looks
    only at partition :math:`p = (t + i) \bmod n` of the index space, marks :math:`S_i = \{j \in p : |a_{i,j}| \ge \delta_t\}`, and all
    workers learn :math:`S = \bigcup_i S_i`, in which no index stands twice. Then

    .. math::
        u_j = \tfrac1n \sum_i a_{i,j}, \quad e_{i,j} \leftarrow 0 \quad (j \in S); \qquad
        u_j = 0, \quad e_{i,j} \leftarrow a_{i,j} \quad (j \notin S).

    The counts steer the next step: the threshold :math:`\delta_{t+1}` so that :math:`|S| \to k = \lfloor d N \rfloor`, and the number of
    blocks in each partition so that the workers select equally many. Nothing is lost: for every element
    :math:`\tfrac1n \sum_i a_i = u + \tfrac1n \sum_i e_i` after the step, whatever overflows, is padded or rounded.

    Put it first in a chain, before momentum and learning rate. Gradients must be each worker's own (see `local_value_and_grad`); updates
    come out equal on all workers. Per worker differs only the residual (and the velocity, with `momentum`): shard the state by
    `state_specs`, and save it whole.

    Args:
      density: d, the share of the N elements to send in a step, in (0, 1], or an optax schedule from the number of exchanges to it. The
        constant 1 is the dense mean.
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker without collectives.
      max_density: the highest density that the schedule reaches; buffers are laid out for it, in four sizes, each a quarter of the one
        before, of which a step takes the smallest that fits. Where the schedule exceeds it, or is NaN, it holds.
      threshold_rule: "proportional" starts from a quantile of the accumulators and corrects log(threshold) by the error of log(count);
        "paper" is the published rule, which starts from :math:`1 / (2 \sqrt k)` and moves by half a percent.
      balance: "proportional" cuts partitions of equal weight by a running average of what was selected per block; "paper" is the published
        rule, which moves one block between neighbours.
      num_blocks: blocks that the index space is cut into; None for 16,384 (1024 where a rule is "paper"), more if the model is so large
        that a block would exceed 65,536 elements, fewer if it is so small that a block would be shorter than 32.
      capacity_factor: slots of a worker's buffer, as a multiple of :math:`k / n`, at least 1; :math:`6 \sqrt{k / n}` come on top. What
        finds no slot stays in the residual and counts as `overflow`. `math.inf` gives as many slots as could ever be needed.
      num_workers: n, needed where `init` runs outside the axis; the residual then has a row for each worker.
      dense_axis: fast mesh axes, over which gradients are averaged whole before; `metrics` do not count that traffic.
      min_size: leaves with fewer elements are averaged whole in the same all-reduce, and do not count in N.
      every_k: exchange in every k-th step only; in between, gradients add up in the residual, and updates are zero.
      momentum: m of momentum correction, :math:`v \leftarrow m v + g, a = v + e`, with v and e zeroed at the sent indices. None leaves
        momentum to the chain, as published.
      wire_dtype: of the values on the network: bfloat16 or float16, None for float32. If narrower than that, each worker sums a share of
        the slots in float32 and sends the rounded sums to all; what either rounding takes away stays in a residual.
      residual_dtype: of the residual, at least float32; None for each leaf's own dtype, but at least float32.
      nonfinite: "skip" lets all workers skip a step together in which a gradient of one of them is not finite, or so large, beyond
        :math:`2^{-40}` of what the residual can hold (3e26 in float32), that sums of it might not be: the update is zero, and of the state
        only `metrics` change. "propagate" saves the check, which reads the gradient once more.

    Returns:
      An `optax.GradientTransformationExtraArgs`. `init(params)` makes a `SparsifyState`, inside the axis this worker's, with residual
      leaves `[1, *shape]`; outside it, with `num_workers` given, that of all workers, with leaves `[n, *shape]`. Of leaves that take no
      part, empty ones and those of integers, only the first axis is there. `update(updates, state)` returns updates with the shapes and
      dtypes it was given, equal on all workers, and the new state. It needs no `params`.

    Raises:
      ValueError: at construction for an option out of range; in `init` outside the axis without `num_workers`; when `update` is traced for
        an axis that is not bound, gradients that were already summed, integer or complex leaves, a state for another number of workers,
        or more than 2^31 elements on a worker.

    Example:
      >>> import jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.exdyna(density=0.5, axis_name=None)
      >>> gradient = jnp.array([3.0, -1.0, 0.5, 2.0])
      >>> update, state = tx.update(gradient, tx.init(gradient))
      >>> print(update)
      [3. 0. 0. 2.]
      >>> print(state.residual)
      [[ 0.  -1.   0.5  0. ]]

    References:
      Yoon and Oh, ExDyna (CCGrid 2024), https://arxiv.org/abs/2402.13781, its algorithms for block-based partitioning, allocation,
      selection and threshold scaling.
    """
    asked = make_density(density, max_density)
    check_choice("threshold_rule", threshold_rule, RULES)
    check_choice("balance", balance, BALANCES)
    check_blocks(num_blocks)
    check_capacity(capacity_factor)
    if num_blocks is None and "paper" in (threshold_rule, balance):
        num_blocks = PAPER_BLOCKS
    below = dense_below(asked, min_size)
    options = Options(num_workers, dense_axis, below, every_k, momentum, wire_dtype, residual_dtype, nonfinite)
    method = exclusive(asked, RULES[threshold_rule], _balanced(BALANCES[balance], num_blocks), capacity_factor)
    return sparsify(method, axis_name, options)


def _balanced(balance: Balance, num_blocks: int | None) -> Partitions:
    """Partitions of whole blocks, which move between neighbours until all workers select equally many."""

    def init(layout: Layout, n: int) -> Topology:
        return balance.init(make_grid(layout.span, num_blocks), n)

    def cut(topology: Topology, layout: Layout, n: int) -> jax.Array:
        return edges(make_grid(layout.span, num_blocks), topology.next_blocks)

    def move(topology: Topology, layout: Layout, selected: jax.Array, indices: jax.Array, sent: jax.Array) -> Topology:
        return balance.next(topology, make_grid(layout.span, num_blocks), layout.size, selected, indices, sent)

    return Partitions(init, cut, lambda topology: topology.next_blocks, move)
