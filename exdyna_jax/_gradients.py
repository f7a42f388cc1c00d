"""Gradients that stay each worker's own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from exdyna_jax._collectives import AxisName, axis_tuple, bind, to_varying


def local_value_and_grad(
    fun: Callable[..., Any],
    axis_name: AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, but the gradient stays this worker's own.

    Inside `shard_map(check_vma=True)` the gradient with respect to parameters that are equal on all workers is summed over the workers on
    its way back. Here the parameters are first typed as each worker's own, so that it isn't. Elsewhere this is `jax.value_and_grad`.

    Args:
      fun: the loss of this worker's share of the batch. Don't average over workers in it; average the value that comes back instead.
      axis_name: mesh axis of the workers, a tuple of axes, or None.
      argnums, has_aux, kwargs: as for `jax.value_and_grad`.

    Returns:
      A function of the same arguments as `fun`, which returns `(value, gradient)`, both this worker's own.

    Raises:
      ValueError: for an axis name that is none; by the function that is returned, where the axis is not bound, and where `argnums` is none
        of the arguments that are given by position.

    Example:
      Two workers with inputs 1 and 10, whose gradients stay apart:

      >>> import jax, jax.numpy as jnp
      >>> import exdyna_jax
      >>> def worker(w, x):
      ...     return exdyna_jax.local_value_and_grad(lambda w: w * x, "data")(w)
      >>> value, gradient = jax.vmap(worker, in_axes=(None, 0), axis_name="data")(jnp.float32(2), jnp.array([1.0, 10.0]))
      >>> print(value, gradient)
      [ 2. 20.] [ 1. 10.]
    """
    axes = axis_tuple("axis_name", axis_name)
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    value_and_grad = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux, **kwargs)

    def local(*args: Any, **kwargs: Any) -> Any:
        bind(axes)  # an axis that isn't there would leave the gradient summed, without a word
        for position in positions:
            if not -len(args) <= position < len(args):
                raise ValueError(f"argnums={argnums}, but there are {len(args)} positional arguments: hand over parameters by position.")
        mine = [to_varying(arg, axes) if i in {p % len(args) for p in positions} else arg for i, arg in enumerate(args)]
        return value_and_grad(*mine, **kwargs)

    return local
