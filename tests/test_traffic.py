"""What a training step sends: compact buffers only, as seen in its jaxpr and in the program that XLA makes of it.

In every step one all-gather of indices and one all-reduce of values, and no collective on a condition. Nothing of the gradient's size,
and as many bytes as the metrics say.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import AXIS, mesh, metrics

N = 4
PARAMS = {"in": jnp.zeros((50, 80)), "out": jnp.zeros((80, 20)), "bias": jnp.zeros(20)}
SIZE = 50 * 80 + 80 * 20 + 20
SLOTS = math.ceil(1.5 * int(0.01 * SIZE) / N + 6 * math.sqrt(int(0.01 * SIZE) / N))
COLLECTIVES = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter", "ppermute", "all_to_all")


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] + params["bias"][None] - y) ** 2)


@functools.cache
def _training(check_vma: bool = True, method: str = "exdyna", **options: Any) -> tuple[Any, Any]:
    """A jitted training step (params, state, x, y) -> (params, state), and arguments for it."""
    options = {"density": 0.01} | options
    tx = optax.chain(getattr(exdyna_jax, method)(axis_name=AXIS, num_workers=N, **options), optax.sgd(0.1, momentum=0.9))

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        _, g = exdyna_jax.local_value_and_grad(_loss, AXIS)(params, x, y)
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(PARAMS)
    specs = exdyna_jax.state_specs(state, AXIS)
    place = mesh(N)
    mapped = jax.shard_map(step, mesh=place, in_specs=(P(), specs, P(AXIS), P(AXIS)), out_specs=(P(), specs), check_vma=check_vma)
    rng = np.random.RandomState(0)
    arrays = PARAMS, state, rng.standard_normal((N * 8, 50)).astype(np.float32), rng.standard_normal((N * 8, 20)).astype(np.float32)
    shardings = jax.tree.map(lambda spec: NamedSharding(place, spec), (P(), specs, P(AXIS), P(AXIS)), is_leaf=lambda x: isinstance(x, P))
    return jax.jit(mapped), tuple(jax.device_put(array, sharding) for array, sharding in zip(arrays, shardings, strict=True))


def _collectives(jaxpr: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...], list[Any]]]:
    """(kind, the control flow around it, abstract inputs) of each collective."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in COLLECTIVES:
            yield name.removesuffix("_invariant"), inside, [v.aval for v in equation.invars]
        around = (*inside, name) if name in ("cond", "while", "scan") else inside
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _collectives(inner, around)


def _split(fun: Any, args: Any) -> tuple[list[Any], list[Any]]:
    """The collectives of every step, and those on a condition."""
    found = list(_collectives(jax.make_jaxpr(fun)(*args).jaxpr))
    return [c for c in found if not c[1]], [c for c in found if c[1]]


def _bytes(kind: str, avals: list[Any]) -> float:
    """What one worker sends, by a ring."""
    size = sum(aval.size * aval.dtype.itemsize for aval in avals)
    return {"all_gather": N - 1, "psum": 2 * (N - 1) / N, "all_to_all": (N - 1) / N, "ppermute": 1}[kind] * size


@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives_of_a_step(check_vma: bool) -> None:
    always, sometimes = _split(*_training(check_vma))
    always = [c for c in always if c[0] != "pmax"]  # unchecked: one number, so that a branch is taken under vmap
    kinds = [(kind, [(aval.shape, str(aval.dtype)) for aval in avals]) for kind, _, avals in always]
    (gather, [(indices, _)]), (reduce, [(values, _)]) = kinds
    assert (gather, reduce) == ("all_gather", "psum")
    assert [dtype for _, [(_, dtype)] in kinds] == ["uint32", "float32"]
    assert indices == (math.ceil(SLOTS / 2) + math.ceil((SLOTS + 1) / 32) + 3,)  # a count, a threshold and a checksum besides
    assert values == (N * SLOTS + 2,)  # the slope's measure and a flag besides
    assert not sometimes, "on a condition a collective could meet another one in a different order on each worker"


def test_the_published_rules_send_the_same() -> None:
    always, sometimes = _split(*_training(threshold_rule="paper", balance="paper"))
    assert [kind for kind, _, _ in always] == ["all_gather", "psum"]
    assert not sometimes


def test_rounded_values_go_to_their_owners_and_back() -> None:
    """Two to a word: as 16-bit numbers the compiler for CPU would send them in 32 bits."""
    always, sometimes = _split(*_training(wire_dtype="bfloat16"))
    kinds = [(kind, [(aval.shape, str(aval.dtype)) for aval in avals]) for kind, _, avals in always]
    share = math.ceil(SLOTS / 2)
    assert kinds[1:] == [("all_to_all", [((N, share), "uint32")]), ("all_gather", [((share + 2,), "uint32")])]
    assert not sometimes


def test_dense_leaves_ride_along() -> None:
    """One leaf of 20 elements, besides the values; `test_compiled_program` shows that XLA sends both in one all-reduce."""
    always, _ = _split(*_training(min_size=100))
    assert [kind for kind, _, _ in always] == ["all_gather", "psum", "psum"]
    assert always[2][2][0].shape == (20,)


@pytest.mark.parametrize(
    "options",
    [{}, {"min_size": 100}, {"wire_dtype": "bfloat16", "min_size": 100}, {"density": 0.1, "capacity_factor": 3.0}, {"density": 1.0}],
    ids=str,
)
def test_bytes_as_the_metrics_say(options: dict[str, Any]) -> None:
    fun, args = _training(**options)
    always, _ = _split(fun, args)
    told = jax.eval_shape(fun, *args)[1][0].metrics
    assert told.bytes_sent.dtype == jnp.float32  # int32 would wrap for a large model
    _, state = fun(*args)
    assert metrics(state)["bytes_sent"] == pytest.approx(sum(_bytes(kind, avals) for kind, _, avals in always), rel=1e-6)
    assert metrics(state)["bytes_dense"] == pytest.approx(2 * (N - 1) / N * 4 * SIZE, rel=1e-6)


OTHER_METHODS = {
    "micro": ["all_gather", "psum"],
    "top_k": ["all_gather", "psum"],
    "hard_threshold": ["all_gather", "psum"],
    "sidco": ["all_gather", "psum"],
    "clt_k": ["psum", "psum"],  # of the leader's indices, and of values
    "deft": ["psum", "all_gather", "psum"],  # the leader's bins before
    "gtop_k": ["ppermute", "ppermute", "psum", "psum"],  # log2(4) rounds
}


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods(method: str) -> None:
    """Few collectives, none on a condition, none as large as the gradient, and the bytes that the metrics say."""
    fun, args = _training(method=method)
    always, sometimes = _split(fun, args)
    assert [kind for kind, _, _ in always] == OTHER_METHODS[method]
    assert not sometimes
    assert max(sum(aval.size for aval in avals) for _, _, avals in always) < SIZE / 4
    _, state = fun(*args)
    assert metrics(state)["bytes_sent"] == pytest.approx(sum(_bytes(kind, avals) for kind, _, avals in always), rel=1e-6)


def _compiled(program: Any) -> list[tuple[str, int]]:
    """(kind, elements that come out) of each collective of a compiled program. All elements have 32 bits."""
    pattern = r"= \(?([^=]*?)\)? (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
    sizes = []
    for shapes, kind in re.findall(pattern, program.as_text()):
        results = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        assert {dtype for dtype, _ in results} <= {"u32", "f32", "s32"}
        sizes.append((kind, sum(math.prod(int(i) for i in dims.split(",") if i) for _, dims in results)))
    return sizes


@pytest.mark.parametrize("min_size", [0, 100])
def test_compiled_program(min_size: int) -> None:
    """XLA adds no collective of its own, and none is as large as the gradient."""
    fun, args = _training(min_size=min_size) if min_size else _training()
    sizes = _compiled(fun.lower(*args).compile())
    words = _split(fun, args)[0][0][2][0].shape[0]
    dense = 20 if min_size else 0
    assert sorted(sizes) == [("all-gather", N * words), ("all-reduce", N * SLOTS + 2 + dense)]
    assert max(size for _, size in sizes) < SIZE / 4


@pytest.mark.parametrize(("wire_dtype", "most"), [(None, 14.5), ("bfloat16", 9)])
def test_bytes_for_each_selected_element(wire_dtype: Any, most: float) -> None:
    """25.6e6 elements, 8 workers, density 1e-3: from the compiled program, with all padding and counts."""
    n, size, density = 8, 25_600_000, 1e-3
    tx = exdyna_jax.exdyna(density, AXIS, wire_dtype=wire_dtype)
    state = jax.eval_shape(exdyna_jax.exdyna(density, AXIS, num_workers=n).init, jax.ShapeDtypeStruct((size,), jnp.float32))
    specs = exdyna_jax.state_specs(state, AXIS)
    mapped = jax.shard_map(lambda g, s: tx.update(g[0], s), mesh=mesh(n), in_specs=(P(AXIS), specs), out_specs=(P(), specs))
    program = jax.jit(mapped, donate_argnums=1).lower(jax.ShapeDtypeStruct((n, size), jnp.float32), state).compile()
    ring = {"all-gather": (n - 1) / n, "all-reduce": 2 * (n - 1) / n, "all-to-all": (n - 1) / n}
    assert sum(ring[kind] * 4 * elements for kind, elements in _compiled(program)) <= most * int(density * size)
