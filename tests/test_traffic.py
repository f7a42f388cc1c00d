"""What a training step sends: compact buffers only, as seen in its jaxpr and in the program that XLA makes of it.

In every step one all-gather of indices and one all-reduce of values, and no collective on a condition. Nothing of the gradient's size,
and as many bytes as the metrics say.

And `traffic`, with which that is seen: it lists each collective, wherever it stands, with the bytes of a ring, as often as it runs. The
check on top of it fails for whatever comes near the gradient's size, in one piece or in many, and where there is nothing to check.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import exdyna_jax
from compiling import HLO_OF_USERS
from simulate import AXIS, mesh, metrics

N = 4
PARAMS = {"in": jnp.zeros((50, 80)), "out": jnp.zeros((80, 20)), "bias": jnp.zeros(20)}
SIZE = 50 * 80 + 80 * 20 + 20
SLOTS = math.ceil(1.5 * int(0.01 * SIZE) / N + 6 * math.sqrt(int(0.01 * SIZE) / N))


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


def _split(fun: Any, args: Any) -> tuple[list[Any], list[Any]]:
    """The collectives of every step, and those on a condition."""
    found = exdyna_jax.traffic(fun, *args)
    assert {c.axis for c in found} == {(AXIS,)}
    assert {c.times for c in found} <= {1}
    return [c for c in found if c.certain], [c for c in found if not c.certain]


@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives_of_a_step(check_vma: bool) -> None:
    always, sometimes = _split(*_training(check_vma))
    gather, reduce = (c for c in always if c.kind != "pmax")  # unchecked: one number, so that a branch is taken under vmap
    assert (gather.kind, reduce.kind) == ("all_gather", "psum")
    assert (gather.dtype, reduce.dtype) == ("uint32", "float32")
    assert gather.shape == (math.ceil(SLOTS / 2) + math.ceil((SLOTS + 1) / 32) + 3,)  # a count, a threshold and a checksum besides
    assert reduce.shape == (N * SLOTS + 2,)  # the slope's measure and a flag besides
    assert not sometimes, "on a condition a collective could meet another one in a different order on each worker"


def test_the_published_rules_send_the_same() -> None:
    always, sometimes = _split(*_training(threshold_rule="paper", balance="paper"))
    assert [c.kind for c in always] == ["all_gather", "psum"]
    assert not sometimes


def test_rounded_values_go_to_their_owners_and_back() -> None:
    """Two to a word: as 16-bit numbers the compiler for CPU would send them in 32 bits."""
    always, sometimes = _split(*_training(wire_dtype="bfloat16"))
    share = math.ceil(SLOTS / 2)
    assert [c[:4] for c in always[1:]] == [
        ("all_to_all", (AXIS,), (N, share), "uint32"),
        ("all_gather", (AXIS,), (share + 2,), "uint32"),
    ]
    assert not sometimes


def test_dense_leaves_ride_along() -> None:
    """One leaf of 20 elements, besides the values; `test_compiled_program` shows that XLA sends both in one all-reduce."""
    always, _ = _split(*_training(min_size=100))
    assert [c.kind for c in always] == ["all_gather", "psum", "psum"]
    assert always[2].shape == (20,)


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
    assert metrics(state)["bytes_sent"] == pytest.approx(sum(c.bytes for c in always), rel=1e-6)
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
    assert [c.kind for c in always] == OTHER_METHODS[method]
    assert not sometimes
    assert max(math.prod(c.shape) for c in always) < SIZE / 4
    exdyna_jax.assert_sparse_traffic(fun, *args, params=PARAMS, most=0.25)
    _, state = fun(*args)
    assert metrics(state)["bytes_sent"] == pytest.approx(sum(c.bytes for c in always), rel=1e-6)


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
    sizes = _compiled(fun.lower(*args).compile(HLO_OF_USERS))
    words = _split(fun, args)[0][0].shape[0]
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
    program = jax.jit(mapped, donate_argnums=1).lower(jax.ShapeDtypeStruct((n, size), jnp.float32), state).compile(HLO_OF_USERS)
    ring = {"all-gather": (n - 1) / n, "all-reduce": 2 * (n - 1) / n, "all-to-all": (n - 1) / n}
    assert sum(ring[kind] * 4 * elements for kind, elements in _compiled(program)) <= most * int(density * size)


WORDS = jax.ShapeDtypeStruct((12, 5), jnp.float32)  # 240 bytes
SWAP = [(0, 1), (1, 0), (2, 3), (3, 2)]

# what each of four workers sends of 240 bytes, counted message by message
RING: dict[str, tuple[Any, float]] = {
    "psum": (lambda x: lax.psum(x, AXIS), 3 * 60 + 3 * 60),  # three shares to add up, three sums to pass on
    "pmax": (lambda x: lax.pmax(x, AXIS), 3 * 60 + 3 * 60),
    "pmin": (lambda x: lax.pmin(x, AXIS), 3 * 60 + 3 * 60),
    "all_gather": (lambda x: lax.all_gather(x, AXIS), 240 + 240 + 240),  # its own, and two to pass on
    "reduce_scatter": (lambda x: lax.psum_scatter(x, AXIS, tiled=True), 3 * 60),
    "all_to_all": (lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True), 3 * 60),
    "ppermute": (lambda x: lax.ppermute(x, AXIS, SWAP), 240),
    "pbroadcast": (lambda x: lax.pbroadcast(x, (AXIS,), 0), 240),
}
WAYS = ("axis_sizes", "shard_map", "shard_map unchecked", "pmap")


def _program(fun: Any, way: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A worker's function as a program of four workers: (function, arguments, options)."""
    if way == "axis_sizes":
        return fun, (WORDS,), {"axis_sizes": {AXIS: N}}
    rows = jax.ShapeDtypeStruct((N, *WORDS.shape), WORDS.dtype)
    if way == "pmap":
        return jax.pmap(fun, axis_name=AXIS, devices=jax.devices()[:N]), (rows,), {}

    def worker(x: Any) -> Any:
        return jax.tree.map(lambda y: y[None], fun(x[0]))

    mapped = jax.shard_map(worker, mesh=mesh(N), in_specs=P(AXIS), out_specs=P(AXIS), check_vma="unchecked" not in way)
    return jax.jit(mapped), (rows,), {}


def _listed(fun: Any, way: str = "axis_sizes") -> list[Any]:
    program, args, options = _program(fun, way)
    return exdyna_jax.traffic(program, *args, **options)


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in RING for way in WAYS if (kind, way) != ("pbroadcast", "shard_map")],  # JAX has none where types are tracked
)
def test_bytes_of_a_ring(kind: str, way: str) -> None:
    fun, sent = RING[kind]
    assert _listed(fun, way) == [(kind, (AXIS,), (12, 5), "float32", sent, 1)]


def test_bytes_of_groups_of_several_axes_and_of_other_dtypes() -> None:
    half = jax.ShapeDtypeStruct((10,), jnp.bfloat16)

    def worker(x: jax.Array) -> Any:
        sums = lax.psum(x, ("slow", "fast")), lax.psum({"a": x, "b": x.astype(bool)}, "fast")
        return sums, lax.psum(x, "fast", axis_index_groups=[[0, 1], [2, 3], [4, 5]]), lax.ppermute(x, "slow", [(0, 0), (1, 1)])

    assert exdyna_jax.traffic(worker, half, axis_sizes={"slow": 2, "fast": 6}) == [
        ("psum", ("slow", "fast"), (10,), "bfloat16", pytest.approx(2 * 11 / 12 * 20), 1),
        ("psum", ("fast",), (10,), "bfloat16", pytest.approx(2 * 5 / 6 * 20), 1),
        ("psum", ("fast",), (10,), "int32", pytest.approx(2 * 5 / 6 * 40), 1),
        ("psum", ("fast",), (10,), "bfloat16", 20, 1),
        ("ppermute", ("slow",), (10,), "bfloat16", 0, 1),
    ]


@jax.custom_vjp
def _with_vjp(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


_with_vjp.defvjp(lambda x: (lax.psum(x, AXIS), None), lambda _, t: (lax.pmax(t, AXIS),))


@jax.custom_jvp
def _with_jvp(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


_with_jvp.defjvp(lambda x, t: (lax.psum(x[0], AXIS), t[0]))


def _scanned(x: jax.Array) -> jax.Array:
    def inner(c: jax.Array, _: None) -> Any:
        return lax.fori_loop(0, 5, lambda i, c: lax.pmean(c, AXIS), c), None

    return lax.scan(inner, x, length=3)[0]


def _looped(x: jax.Array) -> jax.Array:
    return lax.while_loop(
        lambda c: lax.psum(c.sum(), AXIS) < 3, lambda c: lax.scan(lambda c, _: (lax.pmax(c, AXIS), None), c, length=2)[0], x
    )


def _chosen(x: jax.Array) -> jax.Array:
    branches = [lambda x: lax.psum(x, AXIS), lambda x: lax.scan(lambda c, _: (lax.pmin(c, AXIS), None), x, length=4)[0], lambda x: x]
    return lax.scan(lambda c, i: (lax.switch(i, branches, c), None), x, jnp.arange(3))[0]


@pytest.mark.parametrize("way", ["axis_sizes", "shard_map unchecked", "pmap"])
@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (jax.jit(lambda x: lax.psum(x, AXIS)), [("psum", 1, True)]),
        (jax.checkpoint(lambda x: lax.psum(x, AXIS)), [("psum", 1, True)]),
        (jax.vmap(lambda x: lax.psum(x, AXIS)), [("psum", 1, True)]),
        (_with_vjp, [("psum", 1, True)]),
        (jax.grad(lambda x: _with_vjp(x).sum()), [("psum", 1, True), ("pmax", 1, True)]),
        (_with_jvp, [("psum", 1, True)]),
        (_scanned, [("psum", 15, True)]),
        (_looped, [("psum", None, False), ("pmax", None, False)]),
        (_chosen, [("psum", 3, False), ("pmin", 12, False)]),
        (lambda x: lax.axis_index(AXIS) + lax.psum(1, AXIS), []),
    ],
    ids=["jit", "checkpoint", "vmap", "custom_vjp", "its gradient", "custom_jvp", "scan", "while", "cond", "nothing sent"],
)
def test_as_often_as_it_runs(fun: Any, expected: Any, way: str) -> None:
    assert [(c.kind, c.times, c.certain) for c in _listed(fun, way)] == expected


def test_a_bound_is_printed_as_such() -> None:
    assert [str(c.times) for c in _listed(_chosen)] == ["at most 3", "at most 12"]


def test_what_was_traced_before() -> None:
    """With static arguments too, which a jitted function knows of itself."""
    fun = jax.jit(lambda x, n: lax.fori_loop(0, n, lambda i, c: lax.pmean(c, AXIS), x), static_argnums=1)
    mapped = jax.jit(
        lambda x, n: jax.shard_map(lambda x: fun(x, n), mesh=mesh(N), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)(x),
        static_argnums=1,
    )
    rows = jax.ShapeDtypeStruct((N, 3), jnp.float32)
    assert exdyna_jax.traffic(mapped, rows, 7) == exdyna_jax.traffic(mapped.trace(rows, 7)) == [("psum", (AXIS,), (1, 3), "float32", 18, 7)]


def test_any_number_of_workers_without_devices() -> None:
    tx = exdyna_jax.exdyna(0.01, AXIS)
    gradient = jax.ShapeDtypeStruct((100_000,), jnp.float32)
    found = exdyna_jax.traffic(lambda g: tx.update(g, tx.init(g)), gradient, axis_sizes={AXIS: 1000})
    assert [c.shape[0] for c in found if c.kind == "psum"] == [1000 * math.ceil(1.5 + 6) + 2]
    exdyna_jax.assert_sparse_traffic(lambda g: tx.update(g, tx.init(g)), gradient, params=gradient, axis_sizes={AXIS: 4})


def test_simulated_workers_send_nothing() -> None:
    simulated = jax.vmap(lambda x: lax.all_gather(lax.psum(x, AXIS), AXIS), axis_name=AXIS)
    assert exdyna_jax.traffic(simulated, WORDS) == []
    with pytest.raises(AssertionError, match=r"No collective was found.* axis_sizes="):
        exdyna_jax.assert_sparse_traffic(simulated, WORDS, params=PARAMS)


def _summed_before(check_vma: bool) -> tuple[Any, Any]:
    """A step whose gradient is summed on the way: by JAX where types are tracked, by the user where not."""
    tx = exdyna_jax.exdyna(0.01, AXIS, num_workers=N)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        g = jax.grad(_loss)(params, x, y)
        g = jax.tree.map(lambda g: lax.pcast(g, AXIS, to="varying"), g) if check_vma else lax.pmean(g, AXIS)
        return tx.update(g, state)

    state = jax.eval_shape(tx.init, PARAMS)
    specs = exdyna_jax.state_specs(state, AXIS)
    mapped = jax.shard_map(step, mesh=mesh(N), in_specs=(P(), specs, P(AXIS), P(AXIS)), out_specs=(P(), specs), check_vma=check_vma)
    return mapped, (PARAMS, state, jnp.zeros((N * 8, 50)), jnp.zeros((N * 8, 20)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gradient_that_was_summed_before_is_found(check_vma: bool) -> None:
    fun, args = _summed_before(check_vma)
    with pytest.raises(AssertionError, match=r"10\d% of a dense") as raised:
        exdyna_jax.assert_sparse_traffic(fun, *args, params=PARAMS)
    said = str(raised.value)
    assert f"psum over ('{AXIS}',) of float32[50, 80]: {2 * 3 / 4 * 50 * 80 * 4:,.0f} bytes, 1 time\n" in said
    assert f"local_value_and_grad(loss, '{AXIS}')" in said


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sparse_step_passes(check_vma: bool) -> None:
    fun, args = _training(check_vma)
    exdyna_jax.assert_sparse_traffic(fun, *args, params=PARAMS)
    with pytest.raises(AssertionError, match="at most 1% was asked for"):
        exdyna_jax.assert_sparse_traffic(fun, *args, params=PARAMS, most=0.01)


def _checked(fun: Any, **options: Any) -> None:
    """Checks a worker's function against a gradient of 240 bytes."""
    exdyna_jax.assert_sparse_traffic(fun, WORDS, params=WORDS, **{"axis_sizes": {AXIS: N}} | options)


def test_many_small_ones_weigh_as_one() -> None:
    rows = lambda x: [lax.psum(row, AXIS) for row in x]  # noqa: E731
    scanned = lambda x: lax.scan(lambda _, row: (None, lax.psum(row, AXIS)), None, x)  # noqa: E731
    for fun in (rows, scanned):
        _checked(fun, most=1.0)
        with pytest.raises(AssertionError, match="100% of a dense"):
            _checked(fun, most=0.99)
    _checked(scanned, most=0.1, steps=12)


def test_of_a_condition_the_worst_branch_counts() -> None:
    fun = lambda x: lax.cond(x[0, 0] > 0, lambda x: lax.pmax(x, AXIS), lambda x: lax.pmin(lax.psum(x, AXIS), AXIS), x)  # noqa: E731
    _checked(fun, most=2)
    with pytest.raises(AssertionError, match=r"200% .*\n.*at most 1 time"):
        _checked(fun, most=1.99)


def test_only_the_axis_that_was_named_counts() -> None:
    fun = lambda x: (lax.psum(x, "fast"), lax.psum(x[0, 0], "slow"))  # noqa: E731
    sizes = {"fast": 4, "slow": 2}
    _checked(fun, axis_name="slow", axis_sizes=sizes)
    for axis in ("fast", None, ("fast", "slow")):
        with pytest.raises(AssertionError, match="local_value_and_grad"):
            _checked(fun, axis_name=axis, axis_sizes=sizes)
    with pytest.raises(AssertionError, match=r"only over \('fast',\), \('slow',\): name one"):
        _checked(fun, axis_name="nowhere", axis_sizes=sizes)


def test_one_worker_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="only one worker"):
        _checked(lambda x: lax.psum(x, AXIS), axis_sizes={AXIS: 1})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"axis_sizes": {AXIS: 0}}, "0 is not a number of workers"),
        ({"axis_sizes": {}}, "unbound axis name: data.* axis_sizes="),
        ({"most": 0}, "most=0 is not a positive"),
        ({"steps": 1.5}, "steps=1.5 is not a positive int"),
        ({"params": {"w": 3.0}}, "is a float, not an array"),
        ({"params": {"w": jax.ShapeDtypeStruct((3,), jnp.int32)}}, "no floating-point"),
        ({"axis_name": 3}, "axis_name=3"),
    ],
    ids=str,
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    options = {"params": WORDS, "axis_sizes": {AXIS: N}} | options
    with pytest.raises(ValueError, match=said):
        exdyna_jax.assert_sparse_traffic(lambda x: lax.psum(x, AXIS), WORDS, **options)
