"""What the compiled training step does to arrays of the gradient's size: two passes write them, in place, and nothing copies one.

A donated buffer can only be written in place if the result that takes it is found. XLA pairs them by size in the order of the outputs, JAX
by type and sharding where `out_shardings` are given. So outputs come in the order of the inputs, or with shardings.
"""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import mesh

N = 2
SHAPES = {"w": (600, 512), "b": (5000,), "c": (96,)}  # one leaf by itself, and two that are joined
LARGE = 600 * 512


def _compiled(optimizer: optax.GradientTransformation, state_first: bool, shardings: bool, **options: Any) -> Any:
    tx = optax.chain(exdyna_jax.exdyna(0.001, "data", num_workers=N, **options), optimizer)
    place = mesh(N)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    specs = P(), exdyna_jax.state_specs(jax.eval_shape(tx.init, params), "data")
    to_place = lambda tree: jax.tree.map(lambda spec: NamedSharding(place, spec), tree, is_leaf=lambda x: isinstance(x, P))  # noqa: E731
    carry = jax.device_put((params, tx.init(params)), to_place(specs))
    gradients = jax.device_put(jax.tree.map(lambda x: jnp.zeros((N, *x.shape)), params), to_place(P("data")))

    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda g: g[0], gradients), state, params)
        params = optax.apply_updates(params, updates)
        return (state, params) if state_first else (params, state)

    outputs = specs[::-1] if state_first else specs
    sharded = jax.shard_map(step, mesh=place, in_specs=(*specs, P("data")), out_specs=outputs)
    told = {"out_shardings": to_place(outputs)} if shardings else {}
    return jax.jit(sharded, donate_argnums=(0, 1), **told).lower(*carry, gradients).compile()


def _full_size(program: Any) -> Counter[str]:
    """Operations of the compiled program whose result is one array of at least the large leaf's size; not those inside of fusions."""
    text = program.as_text()
    bodies = re.split(r"\n(?=\S.*\{\n)", text)
    found: Counter[str] = Counter()
    for body in bodies:
        if "fused_computation" in body.split("\n")[0] or "_computation" in body.split("\n")[0]:
            continue
        for name, dims, operation in re.findall(r"%([\w.-]+) = \w+\[([\d,]+)\]\S* ([\w-]+)\(", body):
            passes = operation in ("parameter", "get-tuple-element", "bitcast")
            if not passes and np.prod([int(extent) for extent in dims.split(",")]) >= LARGE:
                found[re.sub(r"[.\d]+$", "", name) if operation == "fusion" else operation] += 1
    return found


@pytest.mark.parametrize("options", [{}, {"nonfinite": "propagate"}, {"wire_dtype": "bfloat16"}], ids=str)
def test_two_passes_and_no_copy(options: dict[str, Any]) -> None:
    """The residual is written once and the update once, sparse elements are set in place; then the optimizer's momentum and parameters."""
    program = _compiled(optax.sgd(0.1, momentum=0.9, nesterov=True), state_first=False, shardings=False, **options)
    found = _full_size(program)
    assert found["copy"] == 0, found
    set_in_place = sum(number for name, number in found.items() if "scatter" in name)
    assert set_in_place == 2, found
    assert found.total() - set_in_place == 4, found


@pytest.mark.parametrize("state_first", [False, True])
def test_no_copy_in_any_order_with_shardings(state_first: bool) -> None:
    found = _full_size(_compiled(optax.sgd(0.1), state_first, shardings=True))
    assert found["copy"] == 0, found


def test_memory_beyond_the_update() -> None:
    """What is alive besides arguments, results and the update itself is buffers, in proportion to the slots."""
    memory = _compiled(optax.sgd(0.1, momentum=0.9), state_first=False, shardings=False).memory_analysis()
    update = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert memory.temp_size_in_bytes <= 1.1 * update
