"""What a program sends, before it runs: its collectives, read off its jaxpr."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from exdyna_jax._checks import check_params
from exdyna_jax._collectives import AxisName, axis_tuple
from exdyna_jax._layout import takes_part

# bytes that one of n workers sends by a ring, for each byte that it hands in
_SENDS: dict[str, Callable[[int], float]] = {
    "psum": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "pmin": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ragged_all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: min(n - 1, 1),
    "pbroadcast": lambda n: min(n - 1, 1),
    "psend": lambda n: min(n - 1, 1),
}


class _AtMost(int):
    """A count that only the run knows, by its bound."""

    def __repr__(self) -> str:
        return f"at most {int(self)}"

    __str__ = __repr__


class Collective(NamedTuple):
    """One array that a collective takes from each worker."""

    kind: str  # psum, pmax, pmin, all_gather, reduce_scatter, all_to_all, ppermute, ..: the primitive, whatever is typed varying or not
    axis: tuple[str, ...]  # the mesh axes it goes over
    shape: tuple[int, ...]  # of what one worker hands in
    dtype: Any
    bytes: float  # one worker sends, each time
    times: int | None  # in one call; see `traffic`

    @property
    def certain(self) -> bool:
        """Whether it runs exactly `times` times: not in a branch of a condition, nor in a while loop."""
        return type(self.times) is int


class _Found(NamedTuple):
    collective: Collective
    group: int  # workers that take part


def traffic(fn: Callable[..., Any], *args: Any, axis_sizes: Mapping[str, int] | None = None) -> list[Collective]:
    r"""Lists the collectives of a function, such as a training step, without compiling or running it.

    They are read off the jaxpr, inside `shard_map`, `pmap`, `jit`, `scan`, `while_loop`, `cond`, `switch`, `checkpoint`, `custom_jvp` and
    `custom_vjp` too. What one of n workers sends for an array of S bytes, by a ring:

    | collective             | one worker sends   | which is                               |
    | ---------------------- | ------------------ | -------------------------------------- |
    | psum, pmax, pmin       | :math:`2S (n-1)/n` | reduce-scatter, then all-gather        |
    | all_gather             | :math:`S (n-1)`    | its own, then the others' but the last |
    | reduce_scatter         | :math:`S (n-1)/n`  | all shares but its own                 |
    | all_to_all             | :math:`S (n-1)/n`  | a share to each other; ragged: at most |
    | ppermute, pbroadcast   | :math:`S`          | nothing if each sends to itself        |

    Not seen is what is not in the jaxpr: what the compiler inserts by itself for sharded arrays under plain `jit`, and along the axes that
    a `shard_map` leaves to it; and what kernels send. What the compiler drops, since nobody reads it, or joins with others, is listed all
    the same.

    Args:
      fn: the function; jitted or not, or the outcome of `jax.jit(fn).trace(...)`, then without args.
      args: its arguments; arrays or `jax.ShapeDtypeStruct`.
      axis_sizes: sizes of axes that `fn` itself does not bind, {"data": 64}. So a worker's own function can be read as one of any number of
        workers, without devices. Under `vmap(axis_name=)`, which simulates workers on one device, nothing is sent and nothing is listed:
        hand in the function below it with `axis_sizes` instead.

    Returns:
      A list of named tuples (kind, axis, shape, dtype, bytes, times), one for each array, in the order of the program. `times` is how often
      in one call: multiplied by the lengths of the scans around it. In a branch of a condition it counts as though taken, and prints as "at
      most"; in a while loop it is None, since only the run knows. `certain` is False for both.

    Raises:
      ValueError: for an axis that nothing binds, or an axis size that is not a positive int.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import exdyna_jax
      >>> def worker(x):
      ...     return jax.lax.psum(x, "data")
      >>> for c in exdyna_jax.traffic(worker, jax.ShapeDtypeStruct((1000,), jnp.float32), axis_sizes={"data": 4}):
      ...     print(c.kind, c.axis, c.shape, c.dtype, c.bytes, c.times)
      psum ('data',) (1000,) float32 6000.0 1
    """
    return [found.collective for found in _collectives(fn, args, axis_sizes, heaviest=False)]


def assert_sparse_traffic(
    fn: Callable[..., Any],
    *args: Any,
    params: Any,
    most: float = 0.1,
    axis_name: AxisName = None,
    axis_sizes: Mapping[str, int] | None = None,
    steps: int = 1,
) -> None:
    r"""Raises if a training step sends too much: if something of the gradient's size slips in, such as JAX's own sum of the gradients.

    With :math:`G` bytes of gradient, a dense ring all-reduce of n workers sends :math:`2 G (n-1)/n` from each. All collectives of the step
    together may send the share `most` of that: many small ones weigh as much as a large one. Sparse leaves, whole ones, statistics of
    layers, the loss: all of it counts. Of a condition the branch that sends most counts, and of a while loop one turn.

    Args:
      fn, args, axis_sizes: as for `traffic`, which says too what can't be seen.
      params: the parameters, arrays or shapes; the gradient is taken to have their sizes and dtypes.
      most: share of the dense all-reduce. `exdyna` sends about twice its density, `top_k` up to n times its density.
      axis_name: the axis to look at, or a tuple of axes; None for all. Name the slow one where others may be used densely.
      steps: training steps in one call, if `fn` scans over several.

    Raises:
      AssertionError: with the largest collectives, and what to do. Also if nothing is sent at all, since that proves nothing.
      ValueError: for arguments out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import exdyna_jax
      >>> tx = exdyna_jax.exdyna(0.01, "data")
      >>> def step(gradient):
      ...     return tx.update(gradient, tx.init(gradient))
      >>> gradient = jax.ShapeDtypeStruct((100_000,), jnp.float32)
      >>> exdyna_jax.assert_sparse_traffic(step, gradient, params=gradient, axis_sizes={"data": 4})
      >>> def too_late(gradient):
      ...     return step(jax.lax.pmean(gradient, "data"))
      >>> exdyna_jax.assert_sparse_traffic(too_late, gradient, params=gradient, axis_sizes={"data": 4})  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      AssertionError: One worker sends 614,334 bytes a step, 102% of a dense all-reduce of the gradient; ...
    """
    axes = axis_tuple("axis_name", axis_name)
    check_params(params)
    if isinstance(most, bool) or not isinstance(most, (int, float)) or not 0 < most < math.inf:
        raise ValueError(f"most={most!r} is not a positive number: it is a share of what a dense all-reduce sends, such as 0.1.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} is not a positive int: it is the number of training steps in one call, mostly 1.")
    gradient = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(params) if takes_part(leaf))
    if not gradient:
        raise ValueError("params have no floating-point elements, hence no gradient to compare with: give the model's parameters.")
    everything = _collectives(fn, args, axis_sizes, heaviest=True)
    found = [f for f in everything if f.group > 1 and (not axes or set(axes) & set(f.collective.axis))]
    if not found:
        raise AssertionError(_nothing(everything, axes))
    share = sum(_total(c) / _SENDS["psum"](n) for c, n in found) / gradient / steps
    if share > most:
        raise AssertionError(_too_much([c for c, _ in found], share, most, steps))


def _collectives(fn: Any, args: tuple[Any, ...], axis_sizes: Mapping[str, int] | None, heaviest: bool) -> list[_Found]:
    sizes = dict(axis_sizes or {})
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"axis_sizes={sizes!r}: {size!r} is not a number of workers along {axis!r}; give a positive int.")
    return list(_walk(_jaxpr(fn, args, sizes), sizes, 1, heaviest))


def _jaxpr(fn: Any, args: tuple[Any, ...], sizes: dict[str, int]) -> Any:
    if isinstance(fn, jax.stages.Traced):
        return fn.jaxpr.jaxpr
    try:
        if isinstance(fn, jax.stages.Wrapped) and not sizes:  # a jitted function knows its static arguments
            return fn.trace(*args).jaxpr.jaxpr
        return jax.make_jaxpr(fn, axis_env=list(sizes.items()))(*args).jaxpr
    except NameError as error:
        if "unbound axis" not in str(error):
            raise
        raise ValueError(
            f"{str(error).split('.')[0]}: hand in the function with the shard_map or pmap around it, or give the number of workers as "
            "axis_sizes={axis: n}."
        ) from error


def _walk(jaxpr: Any, sizes: Mapping[str, int], times: int | None, heaviest: bool) -> Iterator[_Found]:
    """All collectives; of a condition's branches all of them, or only the one that sends most."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        kind = _kind(name)
        if kind is not None:
            yield from _entries(kind, equation, sizes, times)
        inner = times
        if name == "scan" and times is not None:
            inner = type(times)(times * params["length"])
        elif name == "while":
            inner = None
        elif name == "cond" and times is not None:
            inner = _AtMost(times)
        bound = {**sizes, **params["mesh"].shape} if "mesh" in params else sizes
        parts = [list(_walk(getattr(part, "jaxpr", part), bound, inner, heaviest)) for part in jaxprs_in_params(params)]
        if name == "cond" and heaviest:
            parts = [max(parts, key=lambda part: sum(_total(c) / _SENDS["psum"](n) for c, n in part if n > 1))]
        for part in parts:
            yield from part


def _kind(primitive: str) -> str | None:
    """JAX has a primitive of its own for each way in which types change, and for the begin of an asynchronous one."""
    name = primitive.removesuffix("_start").removesuffix("_invariant").removesuffix("_reduced").removeprefix("unreduced_")
    return name if name in _SENDS else None


def _entries(kind: str, equation: Any, sizes: Mapping[str, int], times: int | None) -> Iterator[_Found]:
    params = equation.params
    given = params["axes"] if "axes" in params else params["axis_name"]
    axes = tuple(axis for axis in (given if isinstance(given, (tuple, list)) else (given,)) if not isinstance(axis, int))
    if not axes:
        return  # only a dimension that vmap added: nobody sends
    unknown = [axis for axis in axes if axis not in sizes]
    if unknown:
        raise ValueError(f"The size of axis {unknown[0]!r} is not known here: give axis_sizes={{{unknown[0]!r}: n}}.")
    groups = params.get("axis_index_groups")
    n = max(map(len, groups)) if groups else math.prod(sizes[axis] for axis in axes)
    moves = any(source != target for source, target in params["perm"]) if "perm" in params else True
    operands = equation.invars[:1] if kind == "ragged_all_to_all" else equation.invars  # the rest says where it goes
    for aval in (operand.aval for operand in operands):
        if hasattr(aval, "dtype"):
            sent = _SENDS[kind](n) * aval.size * aval.dtype.itemsize * moves
            yield _Found(Collective(kind, axes, tuple(aval.shape), aval.dtype, float(sent), times), n)


def _total(collective: Collective) -> float:
    return collective.bytes * (1 if collective.times is None else collective.times)


def _nothing(everything: list[_Found], axes: tuple[str, ...]) -> str:
    where = f" over {axes}" if axes else ""
    if any(f.group > 1 for f in everything):
        seen = sorted({f.collective.axis for f in everything})
        return f"Nothing is sent{where}, only over {', '.join(map(str, seen))}: name one of these axes, or leave axis_name out."
    if everything:
        return (
            f"Nothing is sent{where}: there is only one worker. Test with several (jax.config.update('jax_num_cpu_devices', 8) on CPU), "
            "or hand in the worker's function with axis_sizes={axis: n}."
        )
    return (
        f"No collective was found{where}, which proves nothing. Under plain jit the compiler inserts them only later, and "
        "vmap(axis_name=) has none: hand in the step with its shard_map or pmap, or the worker's function with axis_sizes={axis: n}."
    )


_SHOWN = 3


def _too_much(found: list[Collective], share: float, most: float, steps: int) -> str:
    found = sorted(found, key=_total, reverse=True)
    sent = sum(map(_total, found)) / steps
    largest = "".join(f"\n  {_described(c)}" for c in found[:_SHOWN])
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    axes = found[0].axis[0] if len(found[0].axis) == 1 else found[0].axis
    return (
        f"One worker sends {sent:,.0f} bytes a step, {share:.0%} of a dense all-reduce of the gradient; at most {most:.0%} was asked for. "
        f"The largest:{largest}{more}\nIf that is the gradient, it was summed before anything was selected: take it with "
        f"exdyna_jax.local_value_and_grad(loss, {axes!r}), which keeps each worker's gradient its own, and don't average it yourself. "
        "If it is meant to be sent, raise most=, or name the axis to look at with axis_name=."
    )


def _described(c: Collective) -> str:
    times = "in a while loop" if c.times is None else f"{c.times!r} time{'s' * (c.times != 1)}"
    return f"{c.kind} over {c.axis} of {c.dtype}{list(c.shape)}: {c.bytes:,.0f} bytes, {times}"
