"""How much to send: the target k of a step, and the slots that a buffer for it needs."""

import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exdyna_jax._collectives import Workers, agreed

T = TypeVar("T")

_TIERS = 4  # buffer sizes that a density schedule chooses from, each a quarter of the one before


class Density(NamedTuple):
    """The asked density, checked."""

    schedule: Callable[[jax.Array], Any] | None  # step -> density; None for a constant
    most: float  # the constant, or the bound of the schedule; static, since buffers are


def make_density(density: Any, max_density: float | None) -> Density:
    """Checks a density; raises a ValueError that says what was given and what to do."""
    if callable(density):
        if max_density is None:
            raise ValueError(
                f"density={density!r} is a schedule, but buffers have a fixed size: say the highest density it reaches with max_density=."
            )
        schedule, most, name = density, max_density, "max_density"
    elif isinstance(density, jax.Array):
        if max_density is None:
            raise ValueError(
                "density is an array (from optax.inject_hyperparams?), but buffers have a fixed size: give the highest density it takes "
                "with max_density=, or keep density a Python float (static_args='density')."
            )
        schedule, most, name = (lambda _: density), max_density, "max_density"
    else:
        if max_density is not None:
            raise ValueError(f"max_density={max_density} only goes with a density schedule; density={density} is constant: leave it out.")
        schedule, most, name = None, density, "density"
    if isinstance(most, jax.Array):
        raise ValueError(
            f"{name} is an array (from optax.inject_hyperparams?), but buffers have a fixed size: keep it a Python float, there with "
            f"static_args={name!r}."
        )
    if isinstance(most, bool) or not isinstance(most, Real) or not 0 < most <= 1:
        raise ValueError(f"{name}={most!r} is not in (0, 1]: it is the share of the elements to send, such as 0.001.")
    if schedule is not None:
        _check_first(density, schedule, float(most))
    return Density(schedule, float(most))


def _check_first(density: Any, schedule: Callable[[jax.Array], Any], most: float) -> None:
    """The schedule's first value says most of what can be wrong with it; later ones are known to the devices only."""
    first = schedule(jnp.int32(0))
    if not _is_numeric(first):
        raise ValueError(f"density={density!r} gives {first!r} for step 0, not a number: does the schedule return one?")
    if jnp.shape(first) != ():
        raise ValueError(f"density={density!r} gives shape {jnp.shape(first)} for step 0, not a scalar.")
    if not isinstance(first, jax.core.Tracer) and not 0 <= first <= most:
        raise ValueError(f"density={density!r} gives {first} for step 0, which is not in [0, max_density={most}]: raise max_density.")


def _is_numeric(x: Any) -> bool:
    return isinstance(x, (Real, np.ndarray, jax.Array)) and not isinstance(x, bool)


def _most_k(density: float, size: int) -> int:
    return max(int(density * size), 1)


def target(density: Density, step: jax.Array, size: int) -> jax.Array:
    """float []: k = int(d N), at least 1, so that even a tiny model is sent in time."""
    if density.schedule is None:
        return jnp.asarray(_most_k(density.most, size), jnp.result_type(float))
    return jnp.maximum(jnp.floor(share(density, step) * size), 1)


def share(density: Density, step: jax.Array) -> jax.Array:
    """float []: d."""
    asked = jnp.asarray(density.most if density.schedule is None else density.schedule(step), jnp.result_type(float))
    return jnp.where(asked <= density.most, jnp.maximum(asked, 0), density.most)  # a NaN, too, is sent at the highest density


def slots(k: float, n: int, factor: float, span: int) -> int:
    """Slots of one worker: `factor k / n`, and six deviations of a Poisson count more, so that small counts fit too; at most all."""
    return span if math.isinf(factor) else min(math.ceil(factor * k / n + 6 * math.sqrt(k / n)), span)


def tiers(density: Density, size: int) -> tuple[int, ...]:
    """The targets k for which a buffer is laid out, largest first: one for a constant density."""
    most = _most_k(density.most, size)
    return (most,) if density.schedule is None else tuple(max(most // 4**i, 1) for i in range(_TIERS))


def dense_below(density: Density, min_size: float) -> float:
    """Leaves with fewer elements are averaged whole: all of them at the constant density 1."""
    return math.inf if density.schedule is None and density.most == 1 else min_size


def in_tiers(sizes: tuple[int, ...], k: jax.Array, workers: Workers, ship: Callable[[int], T]) -> T:
    """`ship(i)` with the buffers of the smallest tier that holds k; its results have one shape whatever i."""
    branches = [partial(ship, i) for i in range(len(sizes))]
    return branches[0]() if len(branches) == 1 else lax.switch(agreed(tier_of(sizes, k), workers), branches)


def tier_of(sizes: tuple[int, ...], k: jax.Array) -> jax.Array:
    """int32 []: the smallest tier that holds k."""
    return jnp.maximum(sum((k <= size).astype(jnp.int32) for size in sizes) - 1, 0)
