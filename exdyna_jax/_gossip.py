"""Gossip: workers mix parameters with a few peers, and never sum a gradient over all.

Follow the parameters from the top of `update`: the local step is applied, each segment meets that of the worker drawn for it, and the
difference to the old parameters is the update. Who sends to whom is a `Graph`; segments are cut in `_segments.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from exdyna_jax._checks import (
    check_gossip,
    check_groups,
    check_has_rows,
    check_keep,
    check_mixing,
    check_params,
    check_seed,
    workers_at_init,
)
from exdyna_jax._collectives import (
    AxisName,
    Workers,
    agreed,
    alike,
    axis_tuple,
    behind,
    bind,
    bound_size,
    check_permutes,
    over_shards,
    permute,
    pmean,
    ring_mean,
    to_varying,
)
from exdyna_jax._layout import takes_part, widest
from exdyna_jax._permutations import Rows, check_rows, exponential, lifted, pool
from exdyna_jax._segments import Piece, Segment, Segments, bytes_of, check_segments, make_segments, pack, unpack


class GossipState(NamedTuple):
    """State of `crossover` and `sgp`. Structure, dtypes, shapes and replication are constant from `init` on."""

    steps: jax.Array  # int32 [], local steps taken, which decide who is drawn; replicated
    weight: jax.Array | None  # w, float32 [1], push-sum weight; None for crossover; per worker ([n] outside)
    squared_distance: jax.Array  # float32 [1], this worker's estimate at the last mixing; per worker ([n] outside)
    bytes_sent: jax.Array  # float32 [], by one worker in the last step; replicated
    bytes_dense: jax.Array  # float32 [], what a ring all-reduce of the model would have sent; replicated


class Graph(NamedTuple):
    """Who sends to whom."""

    rows: Callable[[int], Rows]  # n -> [m, n], permutations without fixed points
    choose: Callable[[jax.Array, int, int], jax.Array]  # (mixings so far, m, segments) -> which row for each segment, int32; replicated


class GossipOptions(NamedTuple):
    """Options that both share, as documented in `crossover`."""

    num_workers: int | None = None
    group_axis: AxisName = None
    groups: int | None = None
    every_k: int = 1


def crossover(
    axis_name: AxisName,
    *,
    segments: Segments = 18,
    seed: int = 0,
    pool: Any = 1,
    num_workers: int | None = None,
    group_axis: AxisName = None,
    groups: int | None = None,
    every_k: int = 1,
) -> optax.GradientTransformationExtraArgs:
    r"""Crossover-SGD: each worker mixes each segment of its parameters with another worker, drawn anew for each segment and step.

    To be put at the end of a chain. With the update :math:`u_i` of the local optimizer on worker i, and a permutation :math:`\pi_{s,t}`
    without fixed points for segment s in step t,

    .. math::
        \theta_i \leftarrow \theta_i + u_i; \qquad
        \theta_{\pi_{s,t}(i),\,s} \leftarrow \tfrac12 \left(\theta_{\pi_{s,t}(i),\,s} + \theta_{i,s}\right),

    so that each worker sends one model a step and receives one, from up to as many peers as there are segments. The matrices are doubly
    stochastic: the mean of the parameters over the workers moves by the mean of the :math:`u_i` alone, up to rounding. Nobody is asked who
    comes next: every worker draws the same from `seed` and the step, out of a pool in which each ordered pair occurs equally often. So the
    spread :math:`\Xi^2 = \tfrac1n \sum_i \|\theta_i - \bar\theta\|^2` shrinks in a mixing by :math:`\tfrac{n-2}{2(n-1)}` on average, below
    a half for any n and however the model is cut.

    **Parameters differ between workers.** Outside of `shard_map` they and all that the optimizer keeps like them have a leading axis of n
    (`replicate_params`, `state_specs`); `average_params` makes one model of them, to evaluate or to export. A NaN on one worker reaches all
    within a few steps, and shows in `metrics`.

    **Hierarchical.** The updates are averaged inside a group, where all then have equal parameters, and the groups gossip: with
    `group_axis` a group is all workers along another mesh axis, with `groups` it is neighbouring workers along `axis_name`. Averaging
    the updates of SGD is averaging gradients. What an optimizer keeps (momentum, moments) is made of gradients that differ inside the
    group: with `groups` each worker has its own, in its row; along `group_axis` there are no rows. So before an optimizer that keeps
    something, or is not linear in the gradients (Adam, LARS), average them along the other axis with `jax.lax.pmean`, and leave
    `group_axis` out.

    Args:
      axis_name: mesh axis of the workers (of the groups, with `group_axis`), a tuple of axes, or None for a single worker, which mixes
        with nobody. Under `vmap` one axis only.
      segments: a number of segments, equal in size but for an element, of neighbouring leaves or parts of them; the default is as many as
        the paper cuts ResNet-50 into. Or "leaf", a segment for each leaf. Or labels (str or int), a tree or a prefix of one, or a function
        from parameters to it: a segment for each label.
      seed: of all that is drawn; the same on all workers.
      pool: the number of sets of n - 1 random permutations, in each of which every ordered pair occurs once; or permutations of your own,
        int [m, n], worker i sending to `pool[p, i]`. The step holds m (n - 1) sends for each segment, of which one runs.
      num_workers: n, needed where `init` runs outside the axis.
      group_axis: mesh axes over which the updates are averaged, as described; not typed as equal there, `local_value_and_grad` over both.
      groups: into how many groups of n / groups neighbours the workers along `axis_name` are divided, as described.
      every_k: mix only every k-th step.

    Returns:
      An `optax.GradientTransformationExtraArgs`. `init(params)` makes a `GossipState`: inside the axis this worker's; outside, with
      `num_workers`, from parameters `[n, *shape]`, that of all workers. `update(updates, state, params)` needs the parameters; its
      updates differ between workers, in the dtypes of the incoming ones. Leaves that are not real floating point, or empty, pass as they
      are.

    Raises:
      ValueError: for options out of range; at trace time for more groups than workers, groups of unequal size, labels that don't cover the
        parameters, `params` not given, and parameters or a state that are typed as equal on all workers.

    Example:
      Two workers, who have nobody else to mix with:

      >>> import jax, jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.crossover("data")
      >>> def worker(params, updates):
      ...     updates, state = tx.update(updates, tx.init(params), params)
      ...     return params + updates
      >>> params = jnp.array([[0.0, 1.0, 2.0], [4.0, 1.0, 8.0]])
      >>> print(jax.vmap(worker, axis_name="data")(params, -jnp.ones((2, 3))))
      [[1. 0. 4.]
       [1. 0. 4.]]

    References:
      Yeo, Bae, Jeong, Kwon and Oh, Crossover-SGD (CCPE 2023), https://arxiv.org/abs/2012.15198, segment-wise and hierarchical gossip.
    """
    check_segments(segments)
    check_seed(seed)
    graph = Graph(_rows_of(pool, seed), lambda t, m, count: _drawn(seed, t, m, count))
    options = GossipOptions(num_workers, group_axis, groups, every_k)
    return _gossip(graph, axis_name, options, segments, None)


def sgp(
    axis_name: AxisName,
    *,
    keep: float | Sequence[float] = 0.5,
    num_workers: int | None = None,
    group_axis: AxisName = None,
    groups: int | None = None,
    every_k: int = 1,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient push: each worker sends a share of its parameters to one peer, at distance 1, 2, 4, .. in turn.

    To be put at the end of a chain. In step t worker i sends to the worker at distance
    :math:`2^{t \bmod (\lfloor \log_2(n-1) \rfloor + 1)}`, its peer :math:`i'`, and keeps the share :math:`\kappa_i`. Both the parameters
    times a weight, :math:`x_i = w_i \theta_i`, and the weight travel (push-sum):

    .. math::
        x_i \leftarrow x_i + u_i; \qquad
        x_{i'} \leftarrow \kappa_{i'} x_{i'} + (1 - \kappa_i) x_i, \quad
        w_{i'} \leftarrow \kappa_{i'} w_{i'} + (1 - \kappa_i) w_i, \quad
        \theta_i = x_i / w_i.

    Without updates all :math:`\theta_i` tend to :math:`\sum_i w_i \theta_i / \sum_i w_i`, which is kept in every step up to rounding,
    whether the shares are equal or not; with equal shares the weights stay 1. For n a power of two, equal shares and equal weights
    :math:`\log_2 n` mixings make all parameters equal. What is kept and sent is :math:`\theta`, in its dtype; weights are float32.

    Args:
      axis_name: mesh axis of the workers, a tuple of axes, or None for a single worker, which sends nothing.
      keep: :math:`\kappa`, in (0, 1), for all workers (of all groups) or a sequence of n.
      num_workers, group_axis, groups, every_k: as for `exdyna_jax.crossover`, t counting the mixings.

    Returns:
      An `optax.GradientTransformationExtraArgs`, as `exdyna_jax.crossover`. `weight` of its state is what `average_params` takes.

    Raises:
      ValueError: as `exdyna_jax.crossover`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.sgp("data")
      >>> def worker(params):
      ...     state = tx.init(params)
      ...     for _ in range(2):
      ...         updates, state = tx.update(jnp.zeros_like(params), state, params)
      ...         params = params + updates
      ...     return params
      >>> print(jax.vmap(worker, axis_name="data")(jnp.array([0.0, 2.0, 4.0, 8.0])))
      [3.5 3.5 3.5 3.5]

    References:
      Assran, Loizou, Ballas and Rabbat, Stochastic Gradient Push (ICML 2019), https://arxiv.org/abs/1811.10792, algorithm 1, directed
      exponential graph.
    """
    shares = check_keep(keep)
    options = GossipOptions(num_workers, group_axis, groups, every_k)
    return _gossip(Graph(exponential, _in_turn), axis_name, options, 1, shares)


def _rows_of(asked: Any, seed: int) -> Callable[[int], Rows]:
    if isinstance(asked, (int, float, np.number)):
        if isinstance(asked, bool) or not isinstance(asked, (int, np.integer)) or asked < 1:
            raise ValueError(f"pool={asked!r} is not a positive int, the number of sets of permutations, nor permutations [m, n].")
        return lambda n: pool(n, int(asked), int(seed))
    rows = check_rows(asked)

    def given(n: int) -> Rows:
        if rows.shape[1] != n:
            raise ValueError(f"pool has permutations of {rows.shape[1]}, but {n} are to be mixed: give int [m, {n}], or a number of sets.")
        return rows

    return given


def _drawn(seed: int, t: jax.Array, m: int, count: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), t)  # by name: workers must not differ in their configuration
    return jax.random.randint(key, (count,), 0, m, jnp.int32)


def _in_turn(t: jax.Array, m: int, count: int) -> jax.Array:
    return jnp.full(count, t % m, jnp.int32)


def _gossip(
    graph: Graph, axis_name: AxisName, options: GossipOptions, segments: Segments, keep: tuple[float, ...] | None
) -> optax.GradientTransformationExtraArgs:
    """The local step, and the mixing along a graph; with push-sum weights if `keep` says what is kept."""
    axes = axis_tuple("axis_name", axis_name)
    fast = axis_tuple("group_axis", options.group_axis)
    check_gossip(options, axes, fast)

    def init(params: optax.Params) -> GossipState:
        n, rows = workers_at_init(axes, options.num_workers)
        check_params(params)
        check_groups(options.groups, keep, n)
        if bound_size(axes) is None:
            check_has_rows(params, n)
        own = to_varying((jnp.ones(rows, jnp.float32), jnp.zeros(rows, jnp.float32)), axes)
        return GossipState(
            steps=jnp.int32(0),
            weight=None if keep is None else own[0],
            squared_distance=own[1],
            bytes_sent=jnp.float32(0),
            bytes_dense=_dense_bytes(params, segments, n * (bound_size(fast) or 1)) / rows,
        )

    def update(
        updates: optax.Updates, state: GossipState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, GossipState]:
        del extra_args
        if not isinstance(state, GossipState):
            raise ValueError(f"The state is a {type(state).__name__}, not a GossipState: hand in what init returned, or the last update.")
        if (state.weight is None) != (keep is None):
            made, given = ("crossover", "sgp") if keep is not None else ("sgp", "crossover")
            raise ValueError(f"The state was made by {made}, and this is {given}: call its init. Average the parameters first.")
        workers = bind(axes)
        check_mixing(updates, params, (state.squared_distance, state.weight), workers, fast, options.num_workers)
        check_groups(options.groups, keep, workers.size)
        members = workers.size // options.groups if options.groups else 1

        old = [p for p in jax.tree.leaves(params) if takes_part(p)]
        if old:
            check_permutes(old[0].reshape(-1), workers)
        leaves, treedef = jax.tree.flatten(updates)
        part = [i for i, p in enumerate(jax.tree.leaves(params)) if takes_part(p)]
        steps = _mean_in_group([alike(leaves[i], p) for i, p in zip(part, old, strict=True)], members, workers, fast)
        if state.weight is not None:
            steps = [(_wide(u) / _as_scalar(state.weight, u)).astype(u.dtype) for u in steps]
        state = state._replace(
            bytes_sent=jnp.float32(_group_bytes(steps, members, fast)),
            bytes_dense=_dense_bytes(params, segments, workers.size * (bound_size(fast) or 1)),
        )
        if workers.size > members and old:
            count = agreed(state.steps, workers._replace(axes=axes + fast))
            cut = make_segments(params, segments)

            def mixed() -> tuple[list[jax.Array], GossipState]:
                rows = lifted(graph.rows(workers.size // members), members)
                chosen = graph.choose(count // options.every_k, len(rows), len(cut))
                return _mix(old, steps, state, Exchange(cut, rows, chosen), keep, members, workers)

            due = (count + 1) % options.every_k == 0
            steps, state = mixed() if options.every_k == 1 else lax.cond(due, mixed, lambda: (steps, state))
        for i, u in zip(part, steps, strict=True):
            leaves[i] = u
        return jax.tree.unflatten(treedef, leaves), state._replace(steps=state.steps + 1)

    return optax.GradientTransformationExtraArgs(init, update)


class Exchange(NamedTuple):
    """Who sends what to whom in a step."""

    segments: tuple[Segment, ...]
    rows: Rows  # [m, n], static
    chosen: jax.Array  # int32 [segments], the row of each; replicated


def _mix(
    old: list[jax.Array],
    steps: list[jax.Array],
    state: GossipState,
    exchange: Exchange,
    keep: tuple[float, ...] | None,
    members: int,
    workers: Workers,
) -> tuple[list[jax.Array], GossipState]:
    """The updates that take each worker's parameters to those mixed with its peers', and the state after."""
    mine = [_rounded(_wide(p) + _wide(u).astype(_wide(p).dtype), p.dtype) for p, u in zip(old, steps, strict=True)]  # as by apply_updates
    n = workers.size // members
    if keep is None or state.weight is None:
        theirs, weight, share = _exchanged(mine, exchange, workers), None, jnp.full(1, 0.5, jnp.float32)
    else:
        kept = state.weight * jnp.asarray(keep if len(keep) > 1 else keep * n, jnp.float32)[workers.rank // members]
        *theirs, came = _exchanged([*mine, state.weight - kept], _with_weight(exchange, len(mine)), workers)
        weight, share = kept + came, came / (kept + came)
    moves, squares = [], jnp.zeros_like(state.squared_distance)
    for p, u, a, b in zip(old, steps, mine, theirs, strict=True):
        part = _as_scalar(share, a)
        mixed = (1 - part) * _wide(a) + part * _wide(b)  # products with a half are exact: rounded once, the same for both of a pair
        moves.append((mixed - _wide(p)).astype(u.dtype))
        squares = squares + over_shards(jnp.sum((_wide(a) - _wide(b)) ** 2, dtype=jnp.float32), workers.axes)
    # a pair drawn from all is 2 n / (n - 1) times as far apart, in squares, as a worker from the mean
    told = state._replace(weight=weight, squared_distance=(n - 1) / (2 * n) * squares)
    sent = bytes_of(mine, exchange.segments) + (0 if weight is None else 4)
    return moves, told._replace(bytes_sent=told.bytes_sent + sent)


def _with_weight(exchange: Exchange, position: int) -> Exchange:
    """The weight travels with the last segment, as one element more."""
    *others, last = exchange.segments
    return exchange._replace(segments=(*others, (*last, Piece(position, 0, 1))))


def _exchanged(arrays: list[jax.Array], exchange: Exchange, workers: Workers) -> list[jax.Array]:
    """What a worker receives in place of what it sends; one message after the other."""
    sends = [lambda x, row=row: permute(x, row, workers) for row in exchange.rows]
    came: list[list[jax.Array]] = []
    last = None
    for i, segment in enumerate(exchange.segments):
        came.append([])
        for x in pack(arrays, segment):
            message = behind(x, last)
            last = lax.switch(exchange.chosen[i], sends, message) if len(sends) > 1 else sends[0](message)
            came[-1].append(last)
    return unpack(arrays, exchange.segments, came)


def _mean_in_group(steps: list[jax.Array], members: int, workers: Workers, fast: tuple[str, ...]) -> list[jax.Array]:
    """The updates averaged over the other axes, and over neighbours along this one."""
    if members == 1 and not fast:
        return steps
    wide = [_wide(u) for u in steps]
    whole = (tuple(Piece(i, 0, u.size) for i, u in enumerate(wide)),)
    means: list[jax.Array] = []
    for x in pack(wide, *whole):
        x = behind(x, means[-1] if means else None)
        means.append(pmean(x, fast) if fast else ring_mean(x, members, workers))
    return [mean.astype(u.dtype) for mean, u in zip(unpack(wide, whole, [means]), steps, strict=True)]


def _group_bytes(steps: list[jax.Array], members: int, fast: tuple[str, ...]) -> float:
    """Bytes that a worker sends for the mean inside its group, by rings."""
    model = sum(u.size * _wide(u).dtype.itemsize for u in steps)
    return sum(2 * (m - 1) / m * model for m in (members, bound_size(fast) or 1))


def _dense_bytes(params: Any, segments: Segments, n: int) -> jax.Array:
    """float32 []: what a ring all-reduce of these parameters over n workers would send."""
    leaves = [p for p in jax.tree.leaves(params) if takes_part(p)]
    return jnp.float32(2 * (n - 1) / n * bytes_of(leaves, make_segments(params, segments)))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(widest(x.dtype, jnp.float32))


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """In a narrower dtype, in earnest: XLA may leave out the rounding of what is made wide again, here but not at the receiver."""
    limits = jnp.finfo(dtype)
    return (x if limits.bits >= jnp.finfo(x.dtype).bits else lax.reduce_precision(x, limits.nexp, limits.nmant)).astype(dtype)


def _as_scalar(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(()).astype(_wide(like).dtype)
