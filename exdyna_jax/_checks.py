"""What can be wrong with what a user hands in, and what to do about it. Every message carries the value it complains about."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from exdyna_jax._collectives import Workers, bound_size, path_name, replicated_paths, spread_paths, unmanaged_axes
from exdyna_jax._layout import takes_part


def _check_common(options: Any, axes: tuple[str, ...]) -> None:
    """What holds for the options of sparsifiers and of gossip: Python values, and a number of workers that goes with the axis."""
    for name, value in options._asdict().items():
        if isinstance(value, jax.Array):
            raise ValueError(_is_static(name))
    n = options.num_workers
    if n is not None and (not _is_int(n) or n < 1):
        raise ValueError(f"num_workers={n!r} is not a positive int: give the number of workers along the axis, or leave it out.")
    if not axes and n not in (None, 1):
        raise ValueError(f"num_workers={n} with axis_name=None, which means a single worker: name the mesh axis of the workers.")


def check_options(options: Any, axes: tuple[str, ...], fast: tuple[str, ...]) -> None:
    """Options that every sparsifier shares, at construction."""
    _check_common(options, axes)
    if set(axes) & set(fast):
        raise ValueError(
            f"dense_axis={fast} and axis_name={axes} share an axis: average densely over the fast axes, sparsify over the others."
        )
    if not (_is_int(options.min_size) or options.min_size == math.inf) or options.min_size < 0:
        raise ValueError(f"min_size={options.min_size!r} is not a number of elements: leaves with fewer go dense, 0 sparsifies all.")
    if not _is_int(options.every_k) or options.every_k < 1:
        raise ValueError(f"every_k={options.every_k!r} is not a positive int: exchange every so many steps, 1 is every step.")
    momentum = options.momentum
    if momentum is not None and (not _is_number(momentum) or not 0 <= momentum < 1):
        raise ValueError(f"momentum={momentum!r} is not in [0, 1): momentum correction decays by it; None turns it off.")
    wire = options.wire_dtype
    if wire is not None and _dtype("wire_dtype", wire) not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"wire_dtype={jnp.dtype(wire).name}: values travel as float32 (None), bfloat16 or float16.")
    check_choice("nonfinite", options.nonfinite, ("skip", "propagate"))
    dtype = options.residual_dtype
    if dtype is None:
        return
    name = _dtype("residual_dtype", dtype)
    if not (jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32):
        raise ValueError(f"residual_dtype={name} would lose small gradients that are added to it one by one: use float32 or float64.")


def _is_static(name: str) -> str:
    return (
        f"{name} is an array (from optax.inject_hyperparams?), but it shapes the program: keep it a Python value, there with "
        f"static_args={name!r}."
    )


def _dtype(argument: str, dtype: Any) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError as error:
        raise ValueError(f"{argument}={dtype!r} is not a dtype such as float32; leave it out for the default.") from error


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def check_workers(num_workers: Any) -> None:
    if not _is_int(num_workers) or num_workers < 1:
        raise ValueError(f"num_workers={num_workers!r} is not a positive int: give the number of workers.")


def check_blocks(num_blocks: Any) -> None:
    if num_blocks is not None and (not _is_int(num_blocks) or num_blocks < 1):
        raise ValueError(f"num_blocks={num_blocks!r} is not a positive int: leave it out, or say into how many blocks to cut the gradient.")


def check_capacity(capacity_factor: Any) -> None:
    if isinstance(capacity_factor, jax.Array):
        raise ValueError(_is_static("capacity_factor"))
    if not _is_number(capacity_factor) or not capacity_factor >= 1:
        raise ValueError(
            f"capacity_factor={capacity_factor!r} is not an int or float of at least 1: less is not even a worker's share. Try 1.5."
        )


def check_threshold(threshold: Any) -> None:
    if threshold is not None and (not _is_number(threshold) or not 0 < threshold < math.inf):
        raise ValueError(f"threshold={threshold!r} is not a positive number: zeros would be sent too. Leave it out for 1 / (2 sqrt(k)).")


def check_beta(beta: Any, every_k: Any) -> None:
    if not _is_number(beta) or not 0 < beta <= 1:
        raise ValueError(f"beta={beta!r} is not in (0, 1]: it is the share of what is not sent that the residual takes up; 1 takes up all.")
    if beta < 1 and every_k != 1:
        raise ValueError(f"beta={beta} with every_k={every_k}: a low-pass memory can't accumulate whole gradients. Set one of them to 1.")


def check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in list(choices):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(repr(choice) for choice in choices)}.")


def workers_at_init(axes: tuple[str, ...], num_workers: int | None) -> tuple[int, int]:
    """The number of workers, and how many of them the residual made here holds: one inside the axis, all of them outside."""
    bound = bound_size(axes)
    if bound is None and num_workers is None:
        raise ValueError(
            f"init was called outside the axis {axes} and num_workers is not given. Call it inside shard_map or pmap over that axis, "
            "or give num_workers=n to get the state of all n workers, to be sharded by state_specs."
        )
    if bound is not None and num_workers is not None and bound != num_workers:
        raise ValueError(_contradicts(axes, bound, num_workers))
    return (bound, 1) if bound is not None else (num_workers or 1, num_workers or 1)


def _contradicts(axes: tuple[str, ...], bound: int, num_workers: int) -> str:
    return f"num_workers={num_workers}, but the axis {axes} has {bound} workers: give num_workers={bound}, or leave it out."


def check_params(params: Any) -> None:
    """Parameters may be integers (their gradients are float0, and pass), but not complex."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise ValueError(f"Leaf {path_name(path)} is a {type(leaf).__name__}, not an array: make it one with jnp.asarray.")
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(_complex(path, leaf))


def _complex(path: Any, leaf: Any) -> str:
    return (
        f"Leaf {path_name(path)} is {leaf.dtype}: magnitudes of complex numbers are not compared here. "
        "Split it into real and imaginary parts, for example with optax.contrib.split_real_and_imaginary around the chain."
    )


def check_update(updates: Any, state: Any, workers: Workers, fast: tuple[str, ...], num_workers: int | None) -> None:
    """The gradient and the state that belongs to it, at trace time."""
    if bound_size(fast) is None:
        raise ValueError(f"dense_axis={fast} is not bound here: call update inside shard_map over it too, or leave it out.")
    unmanaged = unmanaged_axes(workers.axes)
    if unmanaged:
        raise ValueError(
            f"shard_map is manual over {workers.axes} here, but not over {unmanaged}: what is sharded there would be gathered before "
            "anything is selected. Name these axes in axis_names too (or leave axis_names out), or call update inside a shard_map over "
            f"{unmanaged} nested in this one."
        )
    if num_workers is not None and num_workers != workers.size:
        raise ValueError(_contradicts(workers.axes, workers.size, num_workers))
    n = jnp.shape(state.metrics.selected_per_worker)[-1]
    if n != workers.size:
        raise ValueError(
            f"The state was made for {n} workers and there are {workers.size}: make it anew with init, or convert it with "
            "exdyna_jax.reshard."
        )
    gradients = jax.tree_util.tree_leaves_with_path(updates)
    residual = state.residual
    given: Any = jax.tree.structure(updates)
    made_for: Any = jax.tree.structure(residual)
    if given != made_for:
        raise ValueError(
            f"The updates are {given}, but the state was made for {made_for}: call init with the parameters that these gradients belong to."
        )
    rows = jax.tree.leaves(residual)
    for (path, g), e, u in zip(gradients, rows, rows if state.velocity is None else jax.tree.leaves(state.velocity), strict=True):
        _check_leaf(path_name(path), path, g, e)
        if u.shape != e.shape:
            raise ValueError(
                f"The velocity of leaf {path_name(path)} has shape {u.shape}, its residual {e.shape}: pass "
                "exdyna_jax.state_specs(state, axis_name) as in_specs and out_specs of the state."
            )
    floating = jax.tree.map(lambda g: g if takes_part(g) else None, updates)
    axes = workers.axes + fast
    summed = replicated_paths(floating, axes)
    if summed:
        raise ValueError(
            f"The gradients at {summed[0]}{f' and {len(summed) - 1} more' if summed[1:] else ''} are equal on all workers along "
            f"{axes}: inside shard_map(check_vma=True) JAX has already summed them (or optax.MultiSteps has accumulated them in a state "
            "that claims to be replicated: use every_k instead), and nothing is left to sparsify. "
            f"Take them with exdyna_jax.local_value_and_grad(loss, {axes}), which keeps each worker's gradient its own."
        )
    spread = spread_paths(updates, residual, axes)
    if spread:
        raise ValueError(
            f"The gradient at {spread[0][0]} differs along {spread[0][1]}, its residual does not: average along it with dense_axis=, or, "
            "where parameters are sharded along it, give the state an axis of shards too (docs/contexts.md, sharded parameters)."
        )
    claimed = replicated_paths(residual, workers.axes)
    if claimed:
        raise ValueError(
            f"The residual at {claimed[0]} is typed as equal on all workers along {workers.axes}, but each worker has its own: "
            "pass exdyna_jax.state_specs(state, axis_name) as in_specs and out_specs of the state."
        )


def _check_leaf(name: str, path: Any, g: Any, e: Any) -> None:
    if not hasattr(g, "dtype") or not hasattr(g, "shape"):
        raise ValueError(f"Update leaf {name} is a {type(g).__name__}, not an array: make it one with jnp.asarray.")
    if jnp.issubdtype(g.dtype, jnp.complexfloating):
        raise ValueError(_complex(path, g))
    if g.dtype != jax.dtypes.float0 and not jnp.issubdtype(g.dtype, jnp.floating):
        raise ValueError(
            f"Update leaf {name} is {g.dtype}, which is no gradient: differentiate with respect to floating-point parameters only, or give "
            "such leaves a part of their own in optax.partition."
        )
    if takes_part(g) and e.shape[1:] != g.shape:
        raise ValueError(
            f"Update leaf {name} has shape {g.shape}, its residual {e.shape}, which should be {(1, *g.shape)} on each worker: "
            "call init with the parameters that these gradients belong to (inside pmap or vmap, call init there too)."
        )
    if e.shape[0] != 1:
        raise ValueError(
            f"The residual of leaf {name} has {e.shape[0]} rows on this worker instead of one: pass "
            "exdyna_jax.state_specs(state, axis_name) as in_specs and out_specs of the state."
        )


def check_gossip(options: Any, axes: tuple[str, ...], fast: tuple[str, ...]) -> None:
    """Options that both kinds of gossip share, at construction."""
    _check_common(options, axes)
    groups = options.groups
    if set(axes) & set(fast):
        raise ValueError(
            f"group_axis={fast} and axis_name={axes} share an axis: groups gossip along axis_name, and are averaged along group_axis. "
            "For groups of neighbours along one axis give groups=."
        )
    if groups is not None and (not _is_int(groups) or groups < 1):
        raise ValueError(f"groups={groups!r} is not a positive int: give the number of groups along the axis, or leave it out.")
    if groups is not None and fast:
        raise ValueError(f"groups={groups} and group_axis={fast} both say what a group is: leave one out.")
    if not _is_int(options.every_k) or options.every_k < 1:
        raise ValueError(f"every_k={options.every_k!r} is not a positive int: mix every so many steps, 1 is every step.")


def check_seed(seed: Any) -> None:
    if isinstance(seed, jax.Array):
        raise ValueError(_is_static("seed"))
    if not _is_int(seed) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} is not an int in [0, 2**32).")


def check_keep(keep: Any) -> tuple[float, ...]:
    """What each worker keeps; one number for all of them, or n. What float32 takes for 0 or 1 is that."""
    if isinstance(keep, jax.Array):
        raise ValueError(_is_static("keep"))
    shares = tuple(keep) if isinstance(keep, (tuple, list, np.ndarray)) else (keep,)
    if not shares or not all(isinstance(x, (int, float, np.floating)) and 0 < np.float32(x) < 1 for x in shares):
        raise ValueError(f"keep={keep!r} is not a share in (0, 1), nor a sequence of one for each worker. Try 0.5.")
    return tuple(map(float, shares))


def check_groups(groups: int | None, keep: tuple[float, ...] | None, n: int) -> None:
    if groups is not None and groups > n:
        raise ValueError(f"groups={groups}, but there are {n} workers along the axis: give at most {n}.")
    if groups is not None and n % groups:
        raise ValueError(f"groups={groups} doesn't divide the {n} workers along the axis into groups of equal size.")
    if keep is not None and len(keep) > 1 and len(keep) != (groups or n):
        raise ValueError(
            f"keep has {len(keep)} shares, but there are {groups or n} {'groups' if groups else 'workers'}: give one for each."
        )


def check_has_rows(params: Any, n: int) -> None:
    """Parameters of all workers of gossip."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if takes_part(leaf) and leaf.shape[:1] != (n,):
            raise ValueError(
                f"Parameter {path_name(path)} has shape {leaf.shape}, without a row for each of {n} workers: outside of the axis, init "
                "takes what exdyna_jax.replicate_params(params, num_workers) returns."
            )


def check_rows_alike(params: Any, weight: Any) -> None:
    """Parameters of all workers, and push-sum weights if there are some."""
    check_params(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        if takes_part(leaf) and leaf.ndim == 0:
            raise ValueError(f"Parameter {path_name(path)} is a scalar, without a row for each worker: these are one worker's parameters.")
    rows = {leaf.shape[0]: path for path, leaf in leaves if takes_part(leaf)}
    if len(rows) > 1:
        (n, one), (m, other) = list(rows.items())[:2]
        raise ValueError(
            f"Parameter {path_name(one)} has {n} rows, {path_name(other)} has {m}: give the parameters of all workers, [n, *shape] each; "
            "those that are averaged already have none."
        )
    if weight is not None and rows and jnp.size(weight) != next(iter(rows)):
        raise ValueError(f"weight has shape {jnp.shape(weight)}, but there are {next(iter(rows))} workers: give one for each.")


def check_mixing(updates: Any, params: Any, own: Any, workers: Workers, fast: tuple[str, ...], num_workers: int | None) -> None:
    """What is mixed, at trace time; `own` is what the state holds of this worker alone."""
    if params is None:
        raise ValueError("Gossip mixes parameters: call update(updates, state, params) with the parameters that the updates are for.")
    if bound_size(fast) is None:
        raise ValueError(f"group_axis={fast} is not bound here: call update inside shard_map over it too, or leave it out.")
    unmanaged = unmanaged_axes(workers.axes)
    if unmanaged:
        raise ValueError(
            f"shard_map is manual over {workers.axes} here, but not over {unmanaged}: what is sharded there would be gathered before it is "
            "sent. Name these axes in axis_names too (or leave axis_names out)."
        )
    if num_workers is not None and num_workers != workers.size:
        raise ValueError(_contradicts(workers.axes, workers.size, num_workers))
    check_params(params)
    given: Any = jax.tree.structure(updates)
    wanted: Any = jax.tree.structure(params)
    if given != wanted:
        raise ValueError(f"The updates are {given}, but the parameters {wanted}: give update the parameters that the updates are for.")
    for (path, p), u in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(updates), strict=True):
        if not takes_part(p):
            continue
        name = path_name(path)
        if not hasattr(u, "dtype") or not hasattr(u, "shape"):
            raise ValueError(f"The update of {name} is a {type(u).__name__}, not an array: make it one with jnp.asarray.")
        if u.shape != p.shape or not jnp.issubdtype(u.dtype, jnp.floating):
            raise ValueError(
                f"The update of {name} is {jnp.dtype(u.dtype).name}{u.shape}, the parameter {p.dtype}{p.shape}: an update has the shape of "
                "its parameter, and is real floating point."
            )
        if jnp.finfo(u.dtype).nmant < jnp.finfo(p.dtype).nmant:
            raise ValueError(
                f"The update of {name} is {u.dtype}, the parameter {p.dtype}: what is mixed would be rounded to {u.dtype}. Make updates as "
                "wide as the parameters before they are mixed."
            )
    rows = {x.shape for x in jax.tree.leaves(own)}
    if rows != {(1,)}:
        raise ValueError(
            f"What the state holds of this worker has shape {rows.pop()} instead of (1,). Either it is that of all workers: "
            "pass exdyna_jax.state_specs(state, axis_name) as in_specs of the state; or it was made for another number: call init anew."
        )
    floating = jax.tree.map(lambda p: p if takes_part(p) else None, params)
    equal = replicated_paths(floating, workers.axes) or replicated_paths(own, workers.axes)
    if equal:
        raise ValueError(
            f"The parameters or the state at {equal[0]!r} are typed as equal on all workers along {workers.axes}, but each has its own: "
            "give them a row for each with exdyna_jax.replicate_params, and pass exdyna_jax.state_specs((params, state), axis_name) as "
            "in_specs and out_specs."
        )
    averaged = replicated_paths(jax.tree.map(lambda p, u: u if takes_part(p) else None, params, updates), fast)
    if averaged:
        raise ValueError(
            f"The updates at {averaged[0]!r} are equal along group_axis={fast} already, averaged or (by JAX, inside shard_map) summed. If "
            f"averaged, leave group_axis out; else take the gradients with exdyna_jax.local_value_and_grad(loss, {workers.axes + fast})."
        )


def check_state(state: Any, control: Any, momentum: float | None) -> None:
    """A state that belongs to another transformation, at trace time; `control` is what `init` would make, as shapes."""
    anew = "call init again; to keep what waits to be sent, put the old residual into its result with _replace(residual=...)."
    if (state.velocity is None) != (momentum is None):
        has = "no velocity" if state.velocity is None else "a velocity"
        raise ValueError(f"momentum={momentum}, but the state has {has}: {anew}")
    given, expected = _form(state.control), _form(control)
    if given != expected:
        raise ValueError(
            "The state was made by another method, or with other rules or num_blocks: what steers it has shapes "
            f"{given[1]}, not {expected[1]}. Go back to these, or {anew}"
        )


def _form(tree: Any) -> tuple[Any, Any]:
    return jax.tree.structure(tree), jax.tree.map(jnp.shape, tree)
