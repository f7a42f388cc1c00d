"""n workers in one process, wherever JAX can run them, with the state as seen from outside: residual leaves `[n, *shape]`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax

AXIS = "data"
CONTEXTS = ("vmap", "shard_map", "shard_map unchecked", "pmap")

# Trees of parameters to choose from. Few, since each new one is a compilation; odd, since sizes off the 32 grid are where things break.
SHAPES: dict[str, Any] = {
    "odd": {"a": (5, 7), "b": (), "c": (1030,), "d": (3, 11, 2), "e": (64,)},
    "large": {"a": (33,), "b": (3, 100_003)},
    "whole": [(96, 32), (1024,), (8, 8, 16)],
    "whole, cut differently": [(64,), (4096,), (960,)],
}
DTYPES: dict[str, dict[str, str]] = {"mixed": {"a": "bfloat16", "c": "bfloat16", "d": "float16"}}  # the shapes of "odd"


FALLING = optax.linear_schedule(0.3, 0.01, 6)
PAPER = {"threshold_rule": "paper", "balance": "paper"}

# (tree, workers, options): each is one compilation, shared by all tests
SETUPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "default": ("odd", 4, {"density": 0.05}),
    "overflow": ("odd", 4, {"density": 0.01, "capacity_factor": 1.0, "num_blocks": 24}),
    "paper": ("odd", 4, {"density": 0.02, **PAPER}),
    "paper, few blocks": ("whole", 2, {"density": 0.01, "num_blocks": 12, **PAPER}),
    "paper threshold, our balance": ("odd", 3, {"density": 0.02, "threshold_rule": "paper", "capacity_factor": float("inf")}),
    "our threshold, paper balance": ("whole", 4, {"density": 0.02, "balance": "paper", "num_blocks": 40}),
    "large": ("large", 2, {"density": 0.02}),
    "one worker": ("odd", 1, {"density": 0.1}),
    "five workers": ("whole", 5, {"density": 0.05, "num_blocks": 64}),
    "more workers than blocks": ("odd", 8, {"density": 0.05, "num_blocks": 3}),
    "64 workers": ("whole", 64, {"density": 0.1}),
    "low precision": ("mixed", 4, {"density": 0.05}),
    "momentum": ("mixed", 4, {"density": 0.05, "momentum": 0.5}),
    "small leaves dense": ("mixed", 2, {"density": 0.05, "min_size": 65, "momentum": 0.5}),
    "bfloat16 on the wire": ("odd", 3, {"density": 0.05, "wire_dtype": "bfloat16"}),
    "every third": ("odd", 2, {"density": 0.05, "every_k": 3}),
    "schedule": ("odd", 4, {"density": FALLING, "max_density": 0.3}),
}


# the same for the other methods
METHODS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "micro": ("odd", 4, {"method": "micro", "density": 0.05}),
    "micro, paper, few slots": ("mixed", 5, {"method": "micro", "density": 0.01, "threshold_rule": "paper", "capacity_factor": 1.0}),
    "deft": ("odd", 4, {"method": "deft", "density": 0.05}),
    "deft, three workers": ("mixed", 3, {"method": "deft", "density": 0.1, "capacity_factor": 1.0, "momentum": 0.5}),
    "top_k": ("mixed", 4, {"method": "top_k", "density": 0.05, "min_size": 60}),
    "gtop_k": ("odd", 4, {"method": "gtop_k", "density": 0.05, "momentum": 0.5}),
    "gtop_k, seven workers, schedule": ("mixed", 7, {"method": "gtop_k", "density": FALLING, "max_density": 0.3}),
    "clt_k": ("odd", 4, {"method": "clt_k", "density": 0.05, "every_k": 2}),
    "hard_threshold": ("odd", 4, {"method": "hard_threshold", "density": 0.02, "threshold": 4.0, "capacity_factor": 1.0}),
    "sidco": ("mixed", 4, {"method": "sidco", "density": FALLING, "max_density": 0.3}),
}


def shapes_of(tree: str) -> Any:
    """A pytree of `jax.ShapeDtypeStruct`."""
    if tree in DTYPES:
        return {k: jax.ShapeDtypeStruct(shape, DTYPES[tree].get(k, "float32")) for k, shape in SHAPES["odd"].items()}
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, "float32"), SHAPES[tree], is_leaf=lambda x: isinstance(x, tuple))


def params_of(tree: str) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes_of(tree))


def gradients(tree: str, n: int, draw: Callable[[tuple[int, ...]], np.ndarray]) -> Any:
    """The gradients of all workers, leaves `[n, *shape]`, filled by `draw(shape)`."""
    return jax.tree.map(lambda s: draw((n, *s.shape)).astype(s.dtype), shapes_of(tree))


def whole(rng: np.random.RandomState, exponent: int = 0) -> Any:
    """Draws small integers times a power of two: sums of a few of them, and halves of the sums, are exact in float32."""
    return lambda shape: rng.randint(-8, 9, shape) * 2.0**exponent


def ordinary(rng: np.random.RandomState, exponent: int = 0, zeros: float = 0) -> Any:
    return lambda shape: rng.standard_normal(shape) * 2.0**exponent * (rng.random_sample(shape) >= zeros)


def mesh(n: int) -> Mesh:
    return jax.make_mesh((n,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


class Simulation(NamedTuple):
    """n workers that take one step at a time."""

    init: Callable[[], Any]  # () -> state
    step: Callable[[Any, Any], tuple[Any, Any]]  # (gradients [n, *shape], state) -> (update, state)


@functools.cache
def simulation(tree: str, n: int, density: float, context: str = "vmap", method: str = "exdyna", **options: Any) -> Simulation:
    """A method on n workers; compiled once for all tests that ask for the same."""
    return simulate(getattr(exdyna_jax, method)(density, AXIS, num_workers=n, **options), shapes_of(tree), n, context)


def simulate(tx: Any, shapes: Any, n: int, context: str = "vmap", *, jit: bool = True) -> Simulation:
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    specs = exdyna_jax.state_specs(jax.eval_shape(tx.init, params), AXIS)
    if context.startswith("shard_map"):
        return _on_devices(tx, params, specs, mesh(n), "unchecked" not in context)
    mapped = jax.tree.map(lambda spec: None if spec == P() else 0, specs, is_leaf=lambda x: isinstance(x, P))
    over = jax.pmap if context == "pmap" else jax.vmap
    # out_axes=None is accepted only where vmap itself knows that the result is equal on all workers
    update = over(tx.update, axis_name=AXIS, in_axes=(0, mapped), out_axes=(None, mapped))

    def step(gradients: Any, state: Any) -> tuple[Any, Any]:
        update_, state = update(gradients, _rows(state, lambda x: x[:, None]))
        return update_, _rows(state, lambda x: x[:, 0])

    return Simulation(lambda: tx.init(params), jax.jit(step) if jit and context == "vmap" else step)


def _rows(state: Any, change: Callable[[Any], Any]) -> Any:
    return state._replace(residual=jax.tree.map(change, state.residual), velocity=jax.tree.map(change, state.velocity))


def _on_devices(tx: Any, params: Any, specs: Any, mesh: Mesh, check_vma: bool) -> Simulation:
    shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    def update(gradients: Any, state: Any) -> tuple[Any, Any]:
        return tx.update(jax.tree.map(lambda g: g[0], gradients), state)

    init = jax.jit(shard(tx.init, in_specs=P(), out_specs=specs))
    step = jax.jit(shard(update, in_specs=(P(AXIS), specs), out_specs=(P(), specs)))
    everywhere = jax.device_put(params, NamedSharding(mesh, P()))
    return Simulation(lambda: init(everywhere), step)


def flat(tree: Any, lead: int = 0, dtype: Any = np.float64) -> np.ndarray:
    """All leaves of a pytree joined into one vector; `lead` leading axes are kept."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]
    return np.concatenate([x.astype(dtype).reshape(*x.shape[:lead], -1) for x in leaves], axis=-1)


def metrics(state: Any) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, exdyna_jax.metrics(state))


_compiled: list[str] = []


def _note(event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


@contextlib.contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """A function that says how many programs were compiled since the block began."""
    start = len(_compiled)
    yield lambda: len(_compiled) - start
