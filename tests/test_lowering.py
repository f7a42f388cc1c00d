"""What accelerators are given: lowered here for CUDA and TPU, without sorting and without loops that grow with the model.

A loop is cheap on a CPU. On an accelerator each of its rounds is a train of kernel launches, so that only loops of a few fixed rounds are
left: one that narrows down a quantile, in the step that estimates a threshold.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import exdyna_jax

TREES: dict[str, Any] = {
    "small": [(100_000,)],
    "large": [(40_000_000,)],
    "many leaves": [(300, 300), *[(64,)] * 20, (5, 7), (1000, 300)],
}


def _lowered(tree: str, platform: str, **options: Any) -> str:
    tx = exdyna_jax.exdyna(1e-3, "data", num_workers=4, **options)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in TREES[tree]]
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    state = jax.eval_shape(tx.init, shapes)
    specs = exdyna_jax.state_specs(state, "data")
    workers = jax.sharding.PartitionSpec("data")

    def update(gradients: Any, state: Any) -> Any:
        return tx.update([g[0] for g in gradients], state)

    step = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(workers, specs), out_specs=(jax.sharding.PartitionSpec(), specs)))
    stacked = [jax.ShapeDtypeStruct((4, *s.shape), s.dtype) for s in shapes]
    return export.export(step, platforms=[platform])(stacked, state).mlir_module()


@pytest.mark.parametrize("options", [{}, {"wire_dtype": "bfloat16", "momentum": 0.9}], ids=str)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("tree", TREES)
def test_no_sort_and_no_long_loop(tree: str, platform: str, options: dict[str, Any]) -> None:
    text = _lowered(tree, platform, **options)
    assert "stablehlo.sort" not in text
    assert len(re.findall(r"stablehlo\.while", text)) == 1
    bound = re.search(r"stablehlo\.while.*?compare +LT, %\w+, (%\w+), SIGNED", text, re.DOTALL)
    assert bound is not None
    assert re.search(rf"{bound.group(1)} = stablehlo\.constant dense<16> : tensor<i32>", text), "the quantile takes 16 rounds"
