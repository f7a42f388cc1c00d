"""One worker of several, alone on one device: what it computes, without anyone to exchange it with.

The update is traced for n workers, and each collective replaced by what n workers that all hold the same would have got from it. So a
single worker's share can be timed, or its traffic be read off, without room for the others.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

_AXIS = "alone"
_CARRIERS = {"gtop_k": "ppermute", "clt_k": "psum"}  # method -> the first collective that carries the selected indices; else an all-gather

Make = Callable[..., optax.GradientTransformation]  # (density, axis_name, *, num_workers) -> transformation


def bytes_per_step(make: Make, density: float, params: Any, n: int) -> float:
    """What one worker of n sends, and receives, in a step, by ring collectives, padding included. Nothing is run: buffers have fixed sizes.

    Args:
      make: the method.
      density: asked for.
      params: shapes.
      n: workers.
    """
    tx = make(density, _AXIS, num_workers=n)
    jaxpr, results = _trace(tx, params, jax.eval_shape(lambda params: _own(tx.init(params)), params), n)
    return float(_evaluate(jaxpr, n, [results[1].metrics.bytes_sent])[0])


def selection_ms(method: str, make: Make, density: float, params: Any, n: int, repeats: int = 20) -> float:
    """Median milliseconds in which one worker of n has its selected indices ready to be sent.

    The threshold, where there is one, is that of a second step. Where a leader selects for all, it is the leader that is timed. Whether the
    gradient is finite is not looked at.

    Args:
      method: its name.
      make: the same as a function.
      density: asked for.
      params: shapes.
      n: workers.
      repeats: calls of which the median counts, after one that compiles.
    """
    tx = make(density, _AXIS, num_workers=n, nonfinite="propagate")
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    gradient = jax.tree.unflatten(treedef, [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)])
    state = jax.jit(lambda params: _own(tx.init(params)))(gradient)
    jaxpr, results = _trace(tx, params, state, n)
    control, structure = jax.tree.flatten(results[1].control)
    carrier = _CARRIERS.get(method, "all_gather")
    indices = next(equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == carrier).invars

    steer = jax.jit(lambda *args: _evaluate(jaxpr, n, control, *args))
    select = jax.jit(lambda *args: _evaluate(jaxpr, n, indices, *args))
    state = state._replace(control=jax.tree.unflatten(structure, steer(gradient, state)))  # still the step that worker 0 leads
    jax.block_until_ready(select(gradient, state))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(select(gradient, state))
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def update_alone(make: Make, density: float, n: int) -> Callable[[Any, Any], Any]:
    """The whole update of one worker of n: what `update` of the method does, without the exchange.

    Its results make sense only where it doesn't matter which worker looks where; its time always does.

    Args:
      make: the method.
      density: asked for.
      n: workers.
    """
    tx = make(density, _AXIS, num_workers=n)

    def update(gradient: Any, state: Any) -> Any:
        jaxpr, results = _trace(tx, gradient, state, n)
        wanted, structure = jax.tree.flatten(results)
        return jax.tree.unflatten(structure, _evaluate(jaxpr, n, wanted, gradient, state))

    return update


def _own(state: Any) -> Any:
    """The first worker's state out of that of all workers; under jit the others' are never made."""
    residual, velocity = jax.tree.map(lambda leaf: leaf[:1], (state.residual, state.velocity))
    return state._replace(residual=residual, velocity=velocity)


def _trace(tx: optax.GradientTransformation, params: Any, state: Any, n: int) -> tuple[Any, Any]:
    """The update of one of n workers as a jaxpr, and its variables for the results, in their structure."""
    jaxpr, shapes = jax.make_jaxpr(tx.update, axis_env=[(_AXIS, n)], return_shape=True)(params, state)
    return jaxpr, jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.jaxpr.outvars)


def _evaluate(closed: Any, n: int, wanted: list[Any], *args: Any) -> list[Any]:
    """The values of some variables. What they don't depend on is not computed, and may be missing among the arguments."""
    jaxpr = closed.jaxpr
    needed = {variable for variable in wanted if not isinstance(variable, core.Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars):
            equations.append(equation)
            needed |= {variable for variable in equation.invars if not isinstance(variable, core.Literal)}
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=False))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    for equation in reversed(equations):
        operands = [read(variable) for variable in equation.invars]
        if equation.primitive.name in _STAND_INS:
            results = [_STAND_INS[equation.primitive.name](x, n) for x in operands or [0]]
        else:
            bound = equation.primitive.get_bind_params(equation.params)
            functions, parameters = bound if isinstance(bound, tuple) else ((), bound)  # releases of JAX differ here
            results = equation.primitive.bind(*functions, *operands, **parameters)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in wanted]


_STAND_INS: dict[str, Callable[[Any, int], Any]] = {
    "axis_index": lambda x, n: jnp.int32(0),
    "all_gather": lambda x, n: jnp.broadcast_to(x, (n, *x.shape)),
    "psum": lambda x, n: x * n if jnp.issubdtype(x.dtype, jnp.floating) else x,  # integers are broadcast that way: one worker's, else 0
    "pmax": lambda x, n: x,
    "ppermute": lambda x, n: x,
    "all_to_all": lambda x, n: jnp.broadcast_to(x[:1], x.shape),
}
