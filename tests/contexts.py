"""The same steps in every context that JAX has for n workers.

Each context is a function `(make, shapes, n, steps) -> [(update, state), ...]`: it builds the transformation with `make(axis_name)`, inits
it for parameters of these shapes, feeds it the gradients of all workers, leaves `[n, *shape]`, step by step, and brings home the update
and the state as seen from outside, residual leaves `[n, *shape]`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax

Make = Callable[[Any], Any]
Seen = list[tuple[Any, Any]]


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype) if x.dtype == jax.dtypes.float0 else x[0], tree)


def _spread(tree: Any, mesh: Any, spec: P) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, spec))


def sharded(
    make: Make, shapes: Any, n: int, steps: list[Any], *, kind: AxisType, check: bool, axes: tuple[int, ...] = (), compiler: Any = None
) -> Seen:
    """`shard_map`, init inside, one step a call. `axes` are the sizes of the mesh axes that together hold the workers."""
    sizes = axes or (n,)
    names = tuple("abc"[: len(sizes)])
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=jax.devices()[:n])
    axis = names if axes else names[0]
    tx = make(axis)
    with jax.set_mesh(mesh):
        params = _spread(_zeros(shapes), mesh, P())
        specs = exdyna_jax.state_specs(_outside(make, axis, shapes, n), axis)
        state = jax.jit(jax.shard_map(tx.init, in_specs=P(), out_specs=specs, check_vma=check))(params)

        def update(gradients: Any, state: Any) -> tuple[Any, Any]:
            return tx.update(_first(gradients), state)

        whole = jax.shard_map(update, in_specs=(P(axis), specs), out_specs=(P(), specs), check_vma=check)
        step = jax.jit(whole, compiler_options=compiler)
        return _loop(lambda g, state: step(_spread(g, mesh, P(axis)), state), state, steps)


def _outside(make: Make, axis: Any, shapes: Any, n: int) -> Any:
    """The shapes of the state, as one worker of a `vmap` sees them: structure is all that matters."""
    names = axis if isinstance(axis, tuple) else (axis,)
    init = make(axis).init
    for name in reversed(names):
        init = jax.vmap(init, axis_name=name, axis_size=1, in_axes=None)
    return jax.eval_shape(init, shapes)


def _loop(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, steps: list[Any]) -> Seen:
    seen = []
    for g in steps:
        update, state = step(g, state)
        seen.append(jax.device_get((update, state)))
    return seen


def scanned(make: Make, shapes: Any, n: int, steps: list[Any]) -> Seen:
    """All steps in one `lax.scan`, init inside too, in a checked `shard_map`; only the last state is seen."""
    mesh = jax.make_mesh((n,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
    tx = make("a")
    specs = exdyna_jax.state_specs(_outside(make, "a", shapes, n), "a")

    def run(params: Any, gradients: Any) -> Any:
        def one(state: Any, g: Any) -> Any:
            update, state = tx.update(_first(g), state)
            return state, update

        return lax.scan(one, tx.init(params), gradients)

    stacked = jax.tree.map(lambda *g: np.stack(g), *steps)
    whole = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P(None, "a")), out_specs=(specs, P())))
    state, updates = jax.device_get(whole(_zeros(shapes), stacked))
    rows = [jax.tree.map(lambda u, t=t: u[t], updates) for t in range(len(steps))]
    return [*((row, None) for row in rows[:-1]), (rows[-1], state)]


def mapped(make: Make, shapes: Any, n: int, steps: list[Any], *, over: Any, jit: bool = False, axes: tuple[int, ...] = ()) -> Seen:
    """`pmap` or `vmap`, nested where there are several axes; everything is stacked, and all copies must be equal."""
    sizes = axes or (n,)
    names = tuple("abc"[: len(sizes)])
    tx = make(names if axes else names[0])
    init: Any = lambda _, params: tx.init(params)  # noqa: E731
    update: Any = tx.update
    for name in reversed(names):
        init = over(init, axis_name=name, in_axes=(0, None))
        update = over(update, axis_name=name)
    state = init(jnp.zeros(sizes), _zeros(shapes))
    step = jax.jit(update) if jit else update

    def stack(x: Any) -> Any:
        return x.reshape(*sizes, *x.shape[1:])

    seen = []
    for g in steps:
        got, state = step(jax.tree.map(stack, g), state)
        seen.append(_home(jax.device_get((got, state)), len(sizes)))
    return seen


def _home(stacked: tuple[Any, Any], depth: int) -> tuple[Any, Any]:
    """One copy of what is equal on all workers, and the rows of what is not."""

    def copy(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(math.prod(x.shape[:depth]), *x.shape[depth:])
        np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))
        return rows[0]

    def rows(x: np.ndarray) -> np.ndarray:
        return x.reshape(math.prod(x.shape[:depth]), *x.shape[depth + 1 :])

    update, state = stacked
    own = {"residual": jax.tree.map(rows, state.residual), "velocity": jax.tree.map(rows, state.velocity)}
    return jax.tree.map(copy, update), jax.tree.map(copy, state._replace(residual=None, velocity=None))._replace(**own)


def alone(make: Make, shapes: Any, n: int, steps: list[Any]) -> Seen:
    """`axis_name=None`, for a single worker."""
    assert n == 1
    tx = make(None)
    step = jax.jit(lambda g, state: tx.update(_first(g), state))
    return _loop(step, tx.init(_zeros(shapes)), steps)
