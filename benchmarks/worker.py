"""One worker of `cluster.py`, on one device: does what it is told on standard input, an order a line, and answers on standard output.

python worker.py RANK WORKERS COORDINATOR
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import exdyna_jax
from alone import Make, update_alone

AXIS = "data"
METHODS: dict[str, Make] = {
    "dense": lambda density, axis, **options: exdyna_jax.dense(axis, **options),
    "top_k": exdyna_jax.top_k,
    "gtop_k": exdyna_jax.gtop_k,
    "micro": exdyna_jax.micro,
    "exdyna": exdyna_jax.exdyna,
    "exdyna_bfloat16": lambda density, axis, **options: exdyna_jax.exdyna(density, axis, wire_dtype="bfloat16", **options),
}
GRADIENTS = 3  # different ones, in turns
SETTLING = 5  # steps until the threshold has found the density


class Worker:
    """Carries out the orders; all workers get the same ones. What a method returns is the answer."""

    def __init__(self) -> None:
        self._mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
        self._rows = NamedSharding(self._mesh, P(AXIS))
        self._gradients: list[jax.Array] = []
        self._turn = 0
        self._talk = jax.jit(jax.shard_map(_talk, mesh=self._mesh, in_specs=P(AXIS), out_specs=P()))
        self._word = self._spread(np.ones(1, np.float32))

    def empty(self, steps: int) -> dict[str, Any]:
        """Exchanges that carry a word: an all-gather, and then an all-reduce."""
        return {"seconds": _seconds(lambda: self._talk(self._word), steps)}

    def build(self, method: str, size: int, density: float) -> dict[str, Any]:
        """Makes a method ready: compiles it, and lets its threshold settle."""
        began = time.perf_counter()
        if not self._gradients or self._gradients[0].shape[1] != size:
            random = np.random.default_rng(jax.process_index())
            self._gradients = []  # before there are others
            self._gradients = [self._spread(random.standard_normal(size, np.float32)) for _ in range(GRADIENTS)]
        tx = METHODS[method](density, AXIS, num_workers=self._mesh.size)

        def init() -> Any:
            return tx.init(jnp.zeros(size))

        def update(state: Any, gradient: jax.Array) -> Any:
            updates, state = tx.update(gradient[0], state)
            return state, updates

        specs = exdyna_jax.state_specs(jax.eval_shape(init), AXIS)
        sharded = jax.shard_map(update, mesh=self._mesh, in_specs=(specs, P(AXIS)), out_specs=(specs, P()))
        self._state: Any = None  # before there is another
        self._state = jax.jit(init, out_shardings=jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs))()
        self._step = jax.jit(sharded, donate_argnums=0)
        self._alone = update_alone(METHODS[method], density, self._mesh.size)
        _seconds(self._advance, SETTLING)
        return {"seconds": [time.perf_counter() - began]}

    def step(self, steps: int) -> dict[str, Any]:
        """Exchanges and updates."""
        seconds = _seconds(self._advance, steps)
        told = exdyna_jax.metrics(self._state)
        return {"seconds": seconds, "bytes_sent": float(told["bytes_sent"]), "density": float(told["density"])}

    def local(self, steps: int) -> dict[str, Any]:
        """The same without the exchange, with the same control in each step, since there are no others whose counts would correct it."""

        def update(state: Any, gradient: jax.Array) -> Any:
            updates, new = self._alone(gradient[0], state)
            return new._replace(control=state.control), updates, new.control

        program = jax.jit(update, donate_argnums=0)
        state = jax.tree.map(lambda leaf: jnp.copy(leaf.addressable_data(0)), self._state)
        gradients = [gradient.addressable_data(0) for gradient in self._gradients]

        def advance() -> Any:
            nonlocal state
            state, *rest = program(state, self._next(gradients))
            return state, rest

        _seconds(advance, 2)
        return {"seconds": _seconds(advance, steps)}

    def _advance(self) -> Any:
        self._state, updates = self._step(self._state, self._next(self._gradients))
        return self._state, updates

    def _next(self, gradients: list[jax.Array]) -> jax.Array:
        self._turn += 1
        return gradients[self._turn % GRADIENTS]

    def _spread(self, mine: np.ndarray[Any, Any]) -> jax.Array:
        """An array of all workers' rows, of which this is one."""
        return jax.make_array_from_process_local_data(self._rows, mine[None])


def _talk(word: jax.Array) -> jax.Array:
    return lax.psum(jnp.sum(lax.all_gather(word, AXIS)), AXIS)


def _seconds(step: Callable[[], Any], steps: int) -> list[float]:
    """Of each step, until its results are there."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        jax.block_until_ready(step())
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints
    rank, workers, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, workers, rank)
    worker = Worker()
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(worker, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
