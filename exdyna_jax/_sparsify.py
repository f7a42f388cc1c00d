"""The spine: how a method becomes an optax transformation with error feedback.

Follow a gradient from the top of `update`: it joins the residual, the method exchanges some of it, the exchanged mean becomes the update,
the rest becomes the residual. A method says what is exchanged (`Method.exchange`); nothing else in the library knows about optax.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from exdyna_jax._accumulator import Accumulator, accumulator_of, probe, step
from exdyna_jax._checks import check_options, check_params, check_state, check_update, workers_at_init
from exdyna_jax._collectives import AxisName, Workers, agreed, axis_tuple, bind, pmean, psum, to_varying
from exdyna_jax._compact import widen
from exdyna_jax._exchange import Local, compare, compare_bytes, dense_bytes, reduce, reduce_bytes
from exdyna_jax._layout import Layout, Leaf, fitted, make_layout, takes_part
from exdyna_jax._metrics import Metrics
from exdyna_jax._slots import blanks, put, split


class SparsifyState(NamedTuple):
    """State of every sparsifier. Structure, dtypes, shapes and replication are constant from `init` on."""

    exchanges: jax.Array  # int32 [], steps exchanged so far, skipped ones not counted; replicated
    mini_step: jax.Array  # int32 [], gradients taken into the residual since the last exchange (every_k); replicated
    residual: (
        Any  # e, the updates' structure, leaves [1, *shape] of at least float32, [1] if they take no part; per worker ([n, ...] outside)
    )
    velocity: Any  # u of momentum correction, like the residual; None without; per worker
    control: Any  # what steers the method's next step; replicated
    metrics: Metrics  # of the last step, for people; replicated


PER_WORKER = ("residual", "velocity")  # fields that differ between workers


class Exchange(NamedTuple):
    """What a method did in a step."""

    indices: jax.Array  # int32 [K], ascending, each at most once, then padding, which is `span`; replicated
    mean: jax.Array  # [K], the update at the indices; replicated
    unsent: jax.Array  # [K], what stays in the residual at the indices, or a scalar for all; per worker
    dense: tuple[jax.Array, ...]  # the sum over workers of each dense leaf; replicated
    finite: jax.Array  # bool [], no worker had a NaN or an infinity; replicated
    control: Any  # for the next step; replicated
    selected: jax.Array  # int32 [n], marked by each worker; replicated
    sent: jax.Array  # int32 [], exchanged, each index once; replicated
    overflow: jax.Array  # int32 [], marked by some worker, but without a slot; replicated
    threshold: jax.Array | None  # as used
    blocks: jax.Array | None  # as used
    identical: jax.Array  # bool [], all workers' gradients were the same; replicated
    bytes_sent: jax.Array  # float32 [], by one worker


def widened(done: Exchange, slots: int, span: int) -> Exchange:
    """An exchange with more slots, filled up with padding."""
    mean, unsent = widen(done.mean, slots, 0), widen(done.unsent, slots, 0)
    return done._replace(indices=widen(done.indices, slots, span), mean=mean, unsent=unsent)


class Method(NamedTuple):
    """A sparsifier, without the error feedback: two pure functions."""

    # (layout, n) -> control, and the first step's threshold and blocks for the metrics
    init: Callable[[Layout, int], tuple[Any, jax.Array | None, jax.Array | None]]
    exchange: Callable[[Accumulator, Any, jax.Array, Local, Workers], Exchange]  # (.., control, count, ..)
    keep: float = 1.0  # of what a step adds to the accumulator, and does not send, this share joins the residual


def without_control(layout: Layout, n: int) -> tuple[None, None, None]:
    """`init` of a method that needs no memory but the residual."""
    del layout, n
    return None, None, None


class Options(NamedTuple):
    """Options that all sparsifiers share, as documented in `exdyna`."""

    num_workers: int | None = None
    dense_axis: AxisName = None
    min_size: float = 0
    every_k: int = 1
    momentum: float | None = None
    wire_dtype: Any = None
    residual_dtype: Any = None
    nonfinite: str = "skip"


_PROBE_STRIDE = 1021  # a prime: every so many gradient elements one joins the checksum where no finite check reads them all anyway


def sparsify(method: Method, axis_name: AxisName, options: Options) -> optax.GradientTransformationExtraArgs:
    """Error feedback around a method."""
    axes = axis_tuple("axis_name", axis_name)
    fast = axis_tuple("dense_axis", options.dense_axis)
    check_options(options, axes, fast)

    def layout_of(tree: Any) -> Layout:
        return make_layout(tree, options.residual_dtype, options.min_size, options.wire_dtype)

    def init(params: optax.Params) -> SparsifyState:
        n, rows = workers_at_init(axes, options.num_workers)
        check_params(params)
        layout = layout_of(params)
        control, threshold, blocks = method.init(layout, n)
        leaves, treedef = jax.tree.flatten(params)
        zeros = [jnp.zeros(rows, jnp.float32) for _ in leaves]  # of leaves that take no part; not empty, since orbax saves no empty array
        for leaf in layout.leaves + layout.dense:
            zeros[leaf.position] = jnp.zeros((rows, *leaf.shape), leaf.residual_dtype)
        residual = to_varying(jax.tree.unflatten(treedef, zeros), axes)
        return SparsifyState(
            exchanges=jnp.int32(0),
            mini_step=jnp.int32(0),
            residual=residual,
            velocity=None if options.momentum is None else jax.tree.map(jnp.copy, residual),
            control=control,
            metrics=jax.tree.map(jnp.copy, _no_metrics(layout, n, threshold, blocks)),  # no buffer twice, so that all can be donated
        )

    def update(
        updates: optax.Updates, state: SparsifyState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, SparsifyState]:
        del params, extra_args
        if not isinstance(state, SparsifyState):
            raise ValueError(f"The state is a {type(state).__name__}, not a SparsifyState: hand in what init returned, or the last update.")
        workers = bind(axes)
        check_update(updates, state, workers, fast, options.num_workers)
        layout = layout_of(updates)
        control, _, _ = jax.eval_shape(lambda: method.init(layout, workers.size))
        check_state(state, control, options.momentum)
        if options.every_k == 1:
            means, state = exchange(updates, layout, state, workers)
        else:
            due = agreed(state.mini_step + 1 >= options.every_k, workers)
            means, state = lax.cond(due, lambda: exchange(updates, layout, state, workers), lambda: hold(updates, layout, state, workers))
        return _replace(updates, means | _idle(updates)), state

    def exchange(updates: optax.Updates, layout: Layout, state: SparsifyState, workers: Workers) -> tuple[Leaves, SparsifyState]:
        """Some of the accumulator becomes the update, the same on all workers, and the rest the residual."""
        accumulator, local = accumulate(updates, layout, state)
        run = method.exchange if layout.leaves else _exchange_dense
        done = run(accumulator, state.control, state.exchanges, local, workers)
        indices = jnp.where(done.finite, done.indices, layout.span)  # a skipped step has padding only

        rows, values = [], []
        for piece, terms, blank in zip(layout.pieces, accumulator.pieces, blanks(layout, indices), strict=True):
            grown, moved = _grow(options.momentum, piece.shape, terms, done.finite, method.keep)
            mean = fitted(done.mean, blank.dtype)
            rest = done.unsent
            if mean.dtype != done.mean.dtype:  # what the update's dtype can't hold is not lost
                rest = rest + (done.mean - mean.astype(done.mean.dtype))
            rows.append((blank, grown, *moved))
            values.append((mean, rest, *(jnp.zeros((), rest.dtype) for _ in moved)))
        means, residuals, velocities = Leaves(), Leaves(), Leaves()
        for piece, arrays in zip(layout.pieces, put(layout, indices, rows, values), strict=True):
            for leaf, update, residual, *velocity in zip(piece.leaves, *(split(piece, array) for array in arrays), strict=True):
                means[leaf.position] = update
                residuals[leaf.position] = residual
                for u in velocity:
                    velocities[leaf.position] = u
        for leaf, terms, total in zip(layout.dense, accumulator.dense, done.dense, strict=True):
            whole = jnp.where(done.finite, total / workers.size, 0)
            mean = fitted(whole, leaf.dtype)
            means[leaf.position] = mean.reshape(1, *leaf.shape)
            residuals[leaf.position] = jnp.where(done.finite, whole - mean.astype(whole.dtype), terms[1])
            for u in terms[2:]:
                velocities[leaf.position] = jnp.where(done.finite, 0, u)

        return means, SparsifyState(
            exchanges=state.exchanges + done.finite.astype(jnp.int32),
            mini_step=jnp.where(done.finite, 0, state.mini_step),
            residual=_replace(state.residual, residuals),
            velocity=_replace(state.velocity, velocities),
            control=jax.tree.map(lambda new, old: jnp.where(done.finite, new, old), done.control, state.control),
            metrics=_metrics(done, state.metrics, layout, workers.size),
        )

    def hold(updates: optax.Updates, layout: Layout, state: SparsifyState, workers: Workers) -> tuple[Leaves, SparsifyState]:
        """The whole accumulator becomes the residual; nothing is sent but whether all gradients are finite."""
        accumulator, local = accumulate(updates, layout, state)
        finite = psum(local.finite.astype(jnp.int32), workers) == workers.size
        means, residuals, velocities = Leaves(), Leaves(), Leaves()
        for leaf, terms in zip(layout.leaves + layout.dense, accumulator.leaves + accumulator.dense, strict=True):
            grown, moved = _grow(options.momentum, leaf.shape, terms, finite)
            means[leaf.position] = jnp.zeros((1, *leaf.shape), leaf.dtype)
            residuals[leaf.position] = grown
            for u in moved:
                velocities[leaf.position] = u
        idle = _no_metrics(layout, workers.size, state.metrics.threshold, state.metrics.blocks)
        return means, state._replace(
            mini_step=state.mini_step + finite.astype(jnp.int32),
            residual=_replace(state.residual, residuals),
            velocity=_replace(state.velocity, velocities),
            metrics=idle._replace(**_skips(finite, state.metrics)),
        )

    def accumulate(updates: optax.Updates, layout: Layout, state: SparsifyState) -> tuple[Accumulator, Local]:
        """The terms of the accumulator, and what this worker alone knows of them."""
        columns = [jax.tree.leaves(tree) for tree in (updates, state.residual, state.velocity) if tree is not None]

        def terms(leaf: Leaf) -> tuple[jax.Array, ...]:
            g, *rest = (jnp.asarray(column[leaf.position]).reshape(-1) for column in columns)
            return (pmean(g.astype(leaf.residual_dtype), fast) if fast else g, *rest)

        accumulator = accumulator_of(layout, options.momentum, tuple(map(terms, layout.leaves)), tuple(map(terms, layout.dense)))
        checked = options.nonfinite == "skip"
        checksum, finite = probe(accumulator, 1 if checked else _PROBE_STRIDE)
        return accumulator, Local(checksum, finite if checked else jnp.bool(True))

    return optax.GradientTransformationExtraArgs(init, update)


Leaves = dict[int, jax.Array]  # new leaves by their position in the tree


def _replace(tree: Any, new: Leaves) -> Any:
    """The tree with some leaves replaced, each in its old shape; the others pass as they are."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [new[i].reshape(leaf.shape) if i in new else leaf for i, leaf in enumerate(leaves)])


def _idle(updates: optax.Updates) -> Leaves:
    """Leaves that take no part, without elements or float0, made anew: equal on all workers in type too."""
    leaves = enumerate(jax.tree.leaves(updates))
    return {i: _nothing(leaf) for i, leaf in leaves if not takes_part(leaf)}


def _nothing(leaf: Any) -> Any:
    return np.zeros(leaf.shape, leaf.dtype) if leaf.dtype == jax.dtypes.float0 else jnp.zeros(leaf.shape, leaf.dtype)


def _grow(
    momentum: float | None, shape: tuple[int, ...], terms: tuple[jax.Array, ...], finite: jax.Array, keep: float = 1.0
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Residual, and velocity where there is one, in the state's shape, after this step's gradient; as they were in a skipped step."""
    terms = tuple(x.reshape(1, *shape) for x in terms)
    _, e, *velocity = terms
    fresh = step(momentum, *terms)
    grown = jnp.where(finite, jnp.asarray(keep, e.dtype) * fresh + e, e)
    moved = (jnp.where(finite, fresh, u) for u in velocity)
    return grown, tuple(moved)


def _exchange_dense(accumulator: Accumulator, control: Any, count: jax.Array, local: Local, workers: Workers) -> Exchange:
    """Where every leaf is dense there is nothing to select: the mean of the accumulators."""
    del count
    layout, n = accumulator.layout, workers.size
    nothing = jnp.zeros(0, layout.dtype)
    identical = compare(local, workers)
    sums = reduce(nothing, (), accumulator, local, workers)
    each, more = divmod(_counted(layout), n)
    share = each + (jnp.arange(n) < more).astype(jnp.int32)
    return Exchange(
        indices=jnp.zeros(0, jnp.int32),
        mean=nothing,
        unsent=nothing,
        dense=sums.dense,
        finite=sums.finite,
        control=control,
        selected=share,
        sent=jnp.int32(_counted(layout)),
        overflow=jnp.int32(0),
        threshold=None,
        blocks=None,
        identical=identical,
        bytes_sent=jnp.float32(compare_bytes(n) + reduce_bytes(0, 0, layout, n)),
    )


def _counted(layout: Layout) -> int:
    """The elements that metrics count: the sparse ones, or, if there are none, the dense ones, as far as int32 goes."""
    return layout.size or min(sum(leaf.size for leaf in layout.dense), 2**31 - 1)


def _metrics(done: Exchange, last: Metrics, layout: Layout, n: int) -> Metrics:
    per_worker, sent, overflow = (jnp.where(done.finite, x, 0) for x in (done.selected, done.sent, done.overflow))
    total = sent + overflow
    work = per_worker.astype(jnp.float32)
    return Metrics(
        selected=total,
        density=total.astype(jnp.float32) / max(_counted(layout), 1),
        sent=sent,
        selected_per_worker=per_worker,
        threshold=last.threshold if done.threshold is None else done.threshold,
        blocks=last.blocks if done.blocks is None else done.blocks,
        imbalance=jnp.max(work) * n / jnp.maximum(jnp.sum(work), 1),
        overflow=overflow,
        gradients_identical=done.identical,
        bytes_sent=done.bytes_sent,
        bytes_dense=jnp.float32(dense_bytes(layout, n)),
        **_skips(done.finite, last),
    )


def _skips(finite: jax.Array, last: Metrics) -> dict[str, jax.Array]:
    bad = 1 - finite.astype(jnp.int32)
    return {"skipped": last.skipped + bad, "skipped_in_a_row": (last.skipped_in_a_row + 1) * bad}


def _no_metrics(layout: Layout, n: int, threshold: jax.Array | None, blocks: jax.Array | None) -> Metrics:
    """Metrics of a step in which nothing was exchanged."""
    return Metrics(
        selected=jnp.int32(0),
        density=jnp.float32(0),
        sent=jnp.int32(0),
        selected_per_worker=jnp.zeros(n, jnp.int32),
        threshold=threshold,
        blocks=blocks,
        imbalance=jnp.float32(0),
        overflow=jnp.int32(0),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
        gradients_identical=jnp.bool(False),
        bytes_sent=jnp.float32(0),
        bytes_dense=jnp.float32(dense_bytes(layout, n)),
    )
