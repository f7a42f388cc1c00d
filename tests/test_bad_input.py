"""Bad input is a ValueError that says what was given and what to do; odd but legal input works.

Gradients that were already summed, residuals under wrong specs and unbound axes: `test_traps.py`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import exdyna_jax
from simulate import AXIS, flat, mesh, metrics, simulate

RISING = optax.linear_schedule(0.1, 0.01, 10)
W = {"w": jnp.zeros((4, 8))}

METHODS = ("micro", "deft", "top_k", "gtop_k", "clt_k", "hard_threshold", "sidco")

AT_CONSTRUCTION: list[tuple[dict[str, Any], str]] = [
    ({"density": 0}, r"density=0 is not in \(0, 1\].*such as 0\.001"),
    ({"density": 0.0}, r"density=0\.0 is not in \(0, 1\]"),
    ({"density": -0.1}, r"density=-0\.1 is not in \(0, 1\]"),
    ({"density": 1.5}, r"density=1\.5 is not in \(0, 1\]"),
    ({"density": math.nan}, r"density=nan is not in \(0, 1\]"),
    ({"density": True}, r"density=True is not in \(0, 1\]"),
    ({"density": "0.1"}, r"density='0\.1' is not in \(0, 1\]"),
    ({"density": None}, r"density=None is not in \(0, 1\]"),
    ({"density": RISING}, r"density=.* is a schedule.*highest density it reaches with max_density="),
    ({"density": RISING, "max_density": 2}, r"max_density=2 is not in \(0, 1\]"),
    ({"density": RISING, "max_density": 0}, r"max_density=0 is not in \(0, 1\]"),
    ({"density": RISING, "max_density": 0.05}, r"density=.* gives 0\.1.* for step 0, which is not in \[0, max_density=0\.05\]"),
    ({"density": lambda step: math.nan, "max_density": 0.05}, r"density=.* gives nan for step 0"),
    ({"density": lambda step: jnp.zeros(2), "max_density": 0.05}, r"density=.* gives shape \(2,\) for step 0, not a scalar"),
    (
        {"density": lambda step: None, "max_density": 0.05},
        r"density=.* gives None for step 0, not a number: does the schedule return one\?",
    ),
    ({"density": lambda step: "a", "max_density": 0.05}, r"density=.* gives 'a' for step 0, not a number"),
    ({"density": jnp.float32(0.1)}, r"density is an array.*max_density=.*static_args"),
    ({"max_density": 0.5}, r"max_density=0\.5 only goes with a density schedule; density=0\.1 is constant: leave it out"),
    ({"axis_name": 3}, r"axis_name=3 is not a mesh axis name, a tuple of different ones, or None"),
    ({"axis_name": ("data", 3)}, r"axis_name=\('data', 3\) is not a mesh axis name"),
    ({"axis_name": ["data"]}, r"axis_name=\['data'\] is not a mesh axis name"),
    ({"axis_name": ()}, r"axis_name=\(\) is not a mesh axis name, a tuple of different ones, or None"),
    ({"axis_name": ""}, r"axis_name='' is not a mesh axis name"),
    ({"axis_name": ("data", "data")}, r"axis_name=\('data', 'data'\) is not .*a tuple of different ones"),
    ({"dense_axis": 3}, r"dense_axis=3 is not a mesh axis name"),
    ({"dense_axis": "data"}, r"dense_axis=\('data',\) and axis_name=\('data',\) share an axis"),
    ({"threshold_rule": "papre"}, r"threshold_rule='papre' is not one of .*'paper'.*'proportional'"),
    ({"threshold_rule": ["paper"]}, r"threshold_rule=\['paper'\] is not one of"),
    ({"balance": "none"}, r"balance='none' is not one of .*'paper'.*'proportional'"),
    ({"nonfinite": "ignore"}, r"nonfinite='ignore' is not one of 'skip', 'propagate'"),
    ({"num_blocks": 0}, r"num_blocks=0 is not a positive int: leave it out"),
    ({"num_blocks": 8.0}, r"num_blocks=8\.0 is not a positive int"),
    ({"num_blocks": True}, r"num_blocks=True is not a positive int"),
    ({"capacity_factor": 0.99}, r"capacity_factor=0\.99 is not an int or float of at least 1.*Try 1\.5"),
    ({"capacity_factor": math.nan}, r"capacity_factor=nan is not an int or float of at least 1"),
    ({"capacity_factor": "2"}, r"capacity_factor='2'.*Try 1\.5"),
    ({"capacity_factor": True}, r"capacity_factor=True is not an int or float"),
    ({"num_workers": 0}, r"num_workers=0 is not a positive int"),
    ({"num_workers": 2.0}, r"num_workers=2\.0 is not a positive int"),
    ({"num_workers": 4, "axis_name": None}, r"num_workers=4 with axis_name=None.*name the mesh axis"),
    ({"min_size": -1}, r"min_size=-1 is not a number of elements"),
    ({"min_size": 1.5}, r"min_size=1\.5 is not a number of elements"),
    ({"min_size": True}, r"min_size=True is not a number of elements"),
    ({"min_size": None}, r"min_size=None is not a number of elements"),
    ({"every_k": 0}, r"every_k=0 is not a positive int.*1 is every step"),
    ({"every_k": 2.5}, r"every_k=2\.5 is not a positive int"),
    ({"momentum": 1}, r"momentum=1 is not in \[0, 1\).*None turns it off"),
    ({"momentum": -0.5}, r"momentum=-0\.5 is not in \[0, 1\)"),
    ({"momentum": "0.9"}, r"momentum='0\.9' is not in \[0, 1\)"),
    ({"momentum": jnp.float32(0.9)}, r"momentum is an array \(from optax\.inject_hyperparams\?\).*static_args='momentum'"),
    ({"capacity_factor": jnp.float32(2)}, r"capacity_factor is an array .*static_args='capacity_factor'"),
    ({"density": lambda _: 0.1, "max_density": jnp.float32(0.1)}, r"max_density is an array .*static_args='max_density'"),
    ({"residual_dtype": jnp.bfloat16}, r"residual_dtype=bfloat16 would lose small gradients.*use float32 or float64"),
    ({"residual_dtype": "float16"}, r"residual_dtype=float16 would lose small gradients"),
    ({"residual_dtype": "foo"}, r"residual_dtype='foo' is not a dtype such as float32"),
    ({"residual_dtype": jnp.int32}, r"residual_dtype=int32 .*use float32 or float64"),
]


@pytest.mark.parametrize(("options", "message"), AT_CONSTRUCTION, ids=[message[:60] for _, message in AT_CONSTRUCTION])
def test_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exdyna_jax.exdyna(**({"density": 0.1, "axis_name": AXIS} | options))


OTHER_METHODS: list[tuple[str, dict[str, Any], str]] = [
    ("micro", {"threshold_rule": "papre"}, r"threshold_rule='papre' is not one of .*'paper'.*'proportional'"),
    ("micro", {"capacity_factor": 0.5}, r"capacity_factor=0\.5 is not an int or float of at least 1.*Try 1\.5"),
    ("deft", {"capacity_factor": 0}, r"capacity_factor=0 is not an int or float of at least 1"),
    ("sidco", {"capacity_factor": -1}, r"capacity_factor=-1 is not an int or float of at least 1"),
    ("hard_threshold", {"capacity_factor": "2"}, r"capacity_factor='2' is not an int or float of at least 1"),
    ("hard_threshold", {"threshold": 0}, r"threshold=0 is not a positive number.*Leave it out"),
    ("hard_threshold", {"threshold": math.nan}, r"threshold=nan is not a positive number"),
    ("hard_threshold", {"threshold": "1"}, r"threshold='1' is not a positive number"),
    ("clt_k", {"beta": 0}, r"beta=0 is not in \(0, 1\]"),
    ("clt_k", {"beta": 1.5}, r"beta=1\.5 is not in \(0, 1\]"),
    ("clt_k", {"beta": None}, r"beta=None is not in \(0, 1\]"),
    ("clt_k", {"beta": 0.5, "every_k": 2}, r"beta=0\.5 with every_k=2.*Set one of them to 1"),
    *((method, {"density": 1.5}, r"density=1\.5 is not in \(0, 1\]") for method in METHODS),
    *((method, {"max_density": 0.5}, r"max_density=0\.5 only goes with a density schedule") for method in METHODS),
    *((method, {"axis_name": 3}, r"axis_name=3 is not a mesh axis name") for method in METHODS),
    *((method, {"momentum": 2}, r"momentum=2 is not in \[0, 1\)") for method in METHODS),
]


@pytest.mark.parametrize(("method", "options", "message"), OTHER_METHODS, ids=[f"{m}, {o}" for m, o, _ in OTHER_METHODS])
def test_at_construction_of_other_methods(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(exdyna_jax, method)(**({"density": 0.1, "axis_name": AXIS} | options))


def test_numpy_gradients_are_taken() -> None:
    """As by optax; floats as they are, float64 as JAX has it."""
    given = {"a": np.linspace(-3, 4, 40, dtype=np.float32), "b": np.ones(3, np.float32)}
    tx = exdyna_jax.top_k(0.5, None)
    got, want = (tx.update(g, tx.init(given))[0] for g in (given, jax.tree.map(jnp.asarray, given)))
    assert jax.tree.all(jax.tree.map(np.array_equal, got, want))


def test_init_outside_the_axis_needs_the_number_of_workers() -> None:
    with pytest.raises(ValueError, match=r"init was called outside the axis \('data',\) and num_workers is not given.*num_workers=n"):
        exdyna_jax.exdyna(0.1, AXIS).init(W)


@pytest.mark.parametrize("check_vma", [True, False])
def test_number_of_workers_that_contradicts_the_mesh(check_vma: bool) -> None:
    tx = exdyna_jax.exdyna(0.1, AXIS, num_workers=4)
    message = r"num_workers=4, but the axis \('data',\) has 2 workers: give num_workers=2, or leave it out"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.shard_map(tx.init, mesh=mesh(2), in_specs=P(), out_specs=P(), check_vma=check_vma), W)

    def update(g: Any) -> Any:
        return tx.update(g, exdyna_jax.exdyna(0.1, AXIS).init(g))

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.shard_map(update, mesh=mesh(2), in_specs=P(AXIS), out_specs=P(), check_vma=check_vma), W)


def test_state_of_something_else() -> None:
    with pytest.raises(ValueError, match=r"The state is a EmptyState, not a SparsifyState: hand in what init returned"):
        exdyna_jax.exdyna(0.1, None).update(W, optax.EmptyState())


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "no velocity": (
        exdyna_jax.exdyna(0.1, None, momentum=0.9),
        exdyna_jax.exdyna(0.1, None),
        r"momentum=0\.9, but the state has no velocity: call init again.*residual",
    ),
    "velocity": (
        exdyna_jax.exdyna(0.1, None),
        exdyna_jax.exdyna(0.1, None, momentum=0.9),
        r"momentum=None, but the state has a velocity: call init again",
    ),
    "method": (
        exdyna_jax.exdyna(0.1, None),
        exdyna_jax.top_k(0.1, None),
        "another method, or with other rules or num_blocks.*call init again",
    ),
    "method with control": (exdyna_jax.sidco(0.1, None), exdyna_jax.exdyna(0.1, None), "The state was made by another method"),
    "num_blocks": (exdyna_jax.exdyna(0.1, None, num_blocks=4), exdyna_jax.exdyna(0.1, None), "The state was made by another method"),
    "rule": (exdyna_jax.exdyna(0.1, None, threshold_rule="paper"), exdyna_jax.exdyna(0.1, None), "The state was made by another method"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_another_transformation(name: str) -> None:
    tx, other, message = OTHERS[name]
    gradient = jnp.zeros(4000)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.update, gradient, other.init(gradient))


@pytest.mark.parametrize("method", ["exdyna", *METHODS])
def test_state_of_fewer_workers(method: str) -> None:
    tx = getattr(exdyna_jax, method)(0.1, AXIS)
    state = jax.tree.map(lambda x: x[0], jax.vmap(tx.init, axis_name=AXIS, in_axes=None, axis_size=2)(jnp.zeros(60)))
    with pytest.raises(ValueError, match=r"made for 2 workers and there are 4: .*exdyna_jax\.reshard"):
        jax.eval_shape(jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None)), jnp.zeros((4, 60)), state)


def test_wide_residual_without_wide_numbers() -> None:
    with pytest.raises(ValueError, match=r"residual_dtype=float64 needs .*jax_enable_x64"):
        exdyna_jax.exdyna(0.1, None, residual_dtype="float64").init(W)


def test_local_gradient_along_an_unbound_axis() -> None:
    with pytest.raises(ValueError, match=r"axis_name=\('data',\) is not bound here: call this inside jax\.shard_map"):
        exdyna_jax.local_value_and_grad(jnp.sum, AXIS)(jnp.zeros(3))


def test_unbound_dense_axis() -> None:
    tx = exdyna_jax.exdyna(0.1, None, dense_axis="fast")
    with pytest.raises(ValueError, match=r"dense_axis=\('fast',\) is not bound here.*shard_map"):
        tx.update(W, tx.init(W))


PARAMETERS: list[tuple[Any, str]] = [
    ({"w": 1.0}, r"Leaf \['w'\] is a float, not an array: make it one with jnp\.asarray"),
    ({"w": jnp.zeros(3, jnp.complex64)}, r"Leaf \['w'\] is complex64.*split_real_and_imaginary"),
]


@pytest.mark.parametrize(("params", "message"), PARAMETERS, ids=["no array", "complex"])
def test_parameters(params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exdyna_jax.exdyna(0.1, None).init(params)


GRADIENTS: list[tuple[Any, str]] = [
    ({"w": jnp.zeros((4, 8), jnp.int32)}, r"Update leaf \['w'\] is int32, which is no gradient: .*optax\.partition"),
    ({"w": jnp.zeros((4, 8), bool)}, r"Update leaf \['w'\] is bool, which is no gradient"),
    ({"w": jnp.zeros((4, 8), jnp.complex64)}, r"Leaf \['w'\] is complex64.*split_real_and_imaginary"),
    ({"w": 0.0}, r"Update leaf \['w'\] is a float, not an array: make it one with jnp\.asarray"),
    ({"w": jnp.zeros((8, 4))}, r"Update leaf \['w'\] has shape \(8, 4\), its residual \(1, 4, 8\).*should be \(1, 8, 4\).*call init"),
    ({"v": jnp.zeros((4, 8))}, r"updates are .*'v'.*state was made for .*'w'.*call init"),
    ([jnp.zeros((4, 8))], r"updates are .*state was made for .*'w'.*call init"),
]


@pytest.mark.parametrize(("updates", "message"), GRADIENTS, ids=["int", "bool", "complex", "no array", "shape", "name", "structure"])
def test_gradients(updates: Any, message: str) -> None:
    tx = exdyna_jax.exdyna(0.1, None)
    with pytest.raises(ValueError, match=message):
        tx.update(updates, tx.init(W))


def test_a_tree_too_large_for_its_indices() -> None:
    huge = {"w": jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)}
    with pytest.raises(ValueError, match=r"2147483648 positions; indices are int32 and end at 2147483584.*second mesh axis"):
        jax.eval_shape(exdyna_jax.exdyna(0.1, None).init, huge)
    fits = {"w": jax.ShapeDtypeStruct((2**31 - 64,), jnp.float32)}
    assert jax.eval_shape(exdyna_jax.exdyna(0.1, None).init, fits).residual["w"].shape == (1, 2**31 - 64)


@pytest.mark.parametrize(("states", "found"), [((), 0), ((exdyna_jax.dense(None).init(W),) * 2, 2)])
def test_metrics_of_no_state_or_of_two(states: Any, found: int) -> None:
    with pytest.raises(ValueError, match=rf"holds {found} sparsifier or gossip states instead of one"):
        exdyna_jax.metrics(states)


# Odd but legal: (shapes of the leaves, workers, options)
ODD: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "empty tree": ({}, 2, {"density": 0.1}),
    "no tree": (None, 2, {"density": 0.1}),
    "one element, three workers": ((1,), 3, {"density": 0.1}),
    "fewer elements than workers": ({"w": (2,), "b": (1,)}, 5, {"density": 0.5}),
    "fewer than a word, published": ({"w": (7,)}, 4, {"density": 0.3, "threshold_rule": "paper", "balance": "paper"}),
    "k rounds to zero, and zero-size leaves": ({"w": (40,), "none": (0, 3), "b": ()}, 2, {"density": 0.001}),
    "None and a zero-size leaf": ([None, (0,), (33,)], 2, {"density": 0.1, "momentum": 0.5}),
    "all leaves empty": ([(0,), (2, 0)], 2, {"density": 0.1}),
    "one worker": ({"w": (40,)}, 1, {"density": 0.1}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_but_legal(name: str) -> None:
    leaves, n, options = ODD[name]
    _check_odd(exdyna_jax.exdyna(axis_name=AXIS, num_workers=n, **options), leaves, n, options)


@pytest.mark.parametrize("method", METHODS)
def test_fewer_elements_than_workers(method: str) -> None:
    options = {"density": 0.5, "threshold": 1.0} if method == "hard_threshold" else {"density": 0.5}
    _check_odd(getattr(exdyna_jax, method)(axis_name=AXIS, num_workers=5, **options), {"w": (2,), "b": (1,), "none": (0,)}, 5, options)


def _check_odd(tx: Any, leaves: Any, n: int, options: dict[str, Any]) -> None:
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), leaves, is_leaf=lambda x: isinstance(x, tuple))
    run = simulate(tx, shapes, n, "shard_map")
    rng = np.random.RandomState(0)
    state, given, moved = run.init(), 0.0, 0.0
    for _ in range(12):
        g = jax.tree.map(lambda s: rng.randint(1, 9, (n, *s.shape)).astype(np.float32), shapes)
        update, state = run.step(g, state)
        assert jax.tree.map(jnp.shape, update) == jax.tree.map(jnp.shape, shapes)
        if not jax.tree.leaves(g):
            continue
        given, moved = given + flat(g, 1).sum(), moved + flat(update).sum() * n
    assert metrics(state)["skipped"] == 0
    if jax.tree.leaves(shapes) and options.get("momentum") is None:
        assert given == pytest.approx(moved + flat(state.residual, 1).sum(), rel=1e-6)
        assert moved > 0 or given == 0, "something must be sent"


def test_integer_parameters_pass() -> None:
    """Their gradients are float0, which stays as it is."""
    params = {"steps": jnp.zeros(3, jnp.int32), "w": jnp.ones(64)}
    tx = exdyna_jax.exdyna(0.1, AXIS, num_workers=2)
    specs = exdyna_jax.state_specs(tx.init(params), AXIS)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        local = exdyna_jax.local_value_and_grad(lambda p: jnp.sum(p["w"] * x), AXIS, allow_int=True)
        update, state = tx.update(local(params)[1], state)
        assert update["steps"].dtype == jax.dtypes.float0
        assert update["steps"].shape == (3,)
        return optax.apply_updates(params, {"steps": jnp.zeros(3, jnp.int32), "w": update["w"]}), state

    for check_vma in (True, False):
        mapped = jax.shard_map(step, mesh=mesh(2), in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs), check_vma=check_vma)
        state, x = tx.init(params), np.arange(1, 129, dtype=np.float32)
        after, state = jax.jit(mapped)(params, state, x)
        assert np.count_nonzero(np.asarray(after["w"]) - 1) == metrics(state)["sent"] > 0
