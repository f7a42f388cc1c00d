"""What a plan promises: the bytes that the program would send, the links they would cross, and a verdict that turns where it says.

Bytes are compared with the collectives of the traced exchange, links with messages sent one by one.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import exdyna_jax
from exdyna_jax.__main__ import main
from exdyna_jax._plan import METHODS, Plan, transfer_seconds

AXIS = "data"
WORK = {"dense": 1.0, "top_k": 12.0, "gtop_k": 10.0, "exdyna": 2.0}
TREE = {
    "odd": jax.ShapeDtypeStruct((33, 301), jnp.float32),
    "half": jax.ShapeDtypeStruct((5000,), jnp.bfloat16),
    "scalar": jax.ShapeDtypeStruct((), jnp.float32),
    "steps": jax.ShapeDtypeStruct((3,), jnp.int32),
    "empty": jax.ShapeDtypeStruct((0, 4), jnp.float32),
}
COUNT = 40_000


def _plan(params: Any = COUNT, density: Any = 0.01, num_workers: Any = 4, **options: Any) -> Plan:
    return exdyna_jax.plan(params, density, num_workers, **{"selection": WORK} | options)


def _transformation(method: str, density: float, options: dict[str, Any]) -> Any:
    name, *wire = method.split()
    if wire:
        options = options | {"wire_dtype": wire[0]}
    return getattr(exdyna_jax, name)(density, AXIS, **options)


@pytest.mark.parametrize("n", [2, 7, 16])
@pytest.mark.parametrize(
    ("params", "density", "options"),
    [(COUNT, 0.01, {}), (25_600_000, 1e-3, {}), (TREE, 0.1, {}), (TREE, 0.02, {"min_size": 6000}), (TREE, 1e-9, {}), (TREE, 1.0, {})],
    ids=["a count", "25.6e6", "a tree", "dense leaves", "one element", "density 1"],
)
@pytest.mark.parametrize("method", METHODS[1:])
def test_bytes_are_those_of_the_program(method: str, params: Any, density: float, options: dict[str, Any], n: int) -> None:
    tx = _transformation(method, density, options)
    shapes = jax.ShapeDtypeStruct((params,), jnp.float32) if isinstance(params, int) else params

    def worker(params: Any) -> Any:
        gradient = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0), params)
        return tx.update(gradient, tx.init(params))

    found = exdyna_jax.traffic(lambda params: jax.tree.leaves(worker(params)[1]), shapes, axis_sizes={AXIS: n})
    sent = sum(c.bytes for c in found if c.kind != "pmax")  # one number, where types are not tracked
    assert _plan(params, density, n, **options).costs[method].bytes_sent == pytest.approx(sent, rel=1e-12)


def test_dense_bytes_are_a_ring_of_the_gradient() -> None:
    assert _plan(COUNT, num_workers=5).costs["dense"].bytes_sent == 2 * 4 / 5 * 4 * COUNT
    assert _plan(TREE).costs["dense"].bytes_sent == 2 * 3 / 4 * (4 * 33 * 301 + 2 * 5000 + 4)


def _ring(n: int, per_host: int, turns: int) -> tuple[int, int]:
    """Blocks that a host's link carries, and links that one block meets, hop by hop; each turn is n - 1 hops for each of n blocks."""
    carried, met = np.zeros(n // per_host, int), 0
    for origin in range(n):
        at, links = origin, 0
        for _ in range(turns * (n - 1)):
            ahead = (at + 1) % n
            crosses = at // per_host != ahead // per_host
            carried[at // per_host] += crosses
            links += crosses
            at = ahead
        met = max(met, links)
    assert carried.min() == carried.max()
    return int(carried[0]), met


@pytest.mark.parametrize(("n", "per_host"), [(2, 1), (7, 1), (6, 2), (8, 4), (9, 3), (4, 4), (1, 1), (64, 8)])
def test_links_of_a_ring(n: int, per_host: int) -> None:
    """A block of an all-reduce is one of n, and goes around twice; one of an all-gather is all that a worker has, and goes around once."""
    found = _plan(num_workers=n, workers_per_host=per_host)
    dense, ours = found.costs["dense"], found.costs["exdyna"]
    (carried, met), (_, once) = _ring(n, per_host, 2), _ring(n, per_host, 1)
    assert (dense.link_bytes, dense.rounds) == (pytest.approx(carried * 4 * COUNT / n), met)
    assert ours.rounds == met + once
    assert ours.link_bytes == (ours.bytes_sent if n > per_host else 0)


@pytest.mark.parametrize(("n", "per_host"), [(4, 1), (8, 2), (12, 4), (6, 3), (4, 4)])
def test_links_of_pairs(n: int, per_host: int) -> None:
    """Values of 16 bits: each worker hands each other one a share; gTop-k: swaps, of which only those between hosts count."""
    found = _plan(num_workers=n, workers_per_host=per_host)
    narrow, wide = found.costs["exdyna bfloat16"], found.costs["exdyna"]
    host = [r // per_host for r in range(n)]
    slots = math.ceil(1.5 * found.k / n + 6 * math.sqrt(found.k / n))
    share = 4 * math.ceil(slots / 2)
    crossing = sum(host[a] == 0 != host[b] for a in range(n) for b in range(n))
    inside = (n - 1) * share  # what goes to owners, of bytes_sent; all the rest goes by rings
    assert narrow.link_bytes == pytest.approx(crossing * share + (narrow.bytes_sent - inside) * (n > per_host))
    assert narrow.rounds == (2 * _ring(n, per_host, 1)[1] + 1 if n > per_host else 0)
    assert narrow.bytes_sent < wide.bytes_sent

    power = 2 ** (n.bit_length() - 1)
    swaps = [({r: r ^ 2**i for r in range(power)}, 8) for i in range(n.bit_length() - 1)]
    across = {r: r + power for r in range(n - power)} | {r: r - power for r in range(power, n)}
    swaps = [*swaps, (across, 8), (across, 12)] if across else swaps
    out = [max(sum(host[a] == h != host[b] for a, b in pairs.items()) for h in set(host)) for pairs, _ in swaps]
    merged = found.costs["gtop_k"]
    listed = sum(bytes_ * found.k for _, bytes_ in swaps)
    expected = sum(count * bytes_ * found.k for count, (_, bytes_) in zip(out, swaps, strict=True))
    assert merged.link_bytes == pytest.approx(expected + (merged.bytes_sent - listed) * (n > per_host))
    assert merged.rounds == sum(count > 0 for count in out) + 2 * _ring(n, per_host, 2)[1]


def test_time_is_that_of_the_cost_model() -> None:
    assert transfer_seconds(1000, 6, 1e6, 1e-3) == 6e-3 + 8e-3
    for workers_per_host in (1, 2, 4):
        found = _plan(workers_per_host=workers_per_host, bandwidth=3e7, latency=2e-3)
        for method, cost in found.costs.items():
            assert cost.transfer_seconds == pytest.approx(cost.rounds * 2e-3 + cost.link_bytes * 8 / 3e7)
            assert cost.selection_seconds == pytest.approx(WORK[method.split()[0]] * 1e-3 * COUNT / 1e6)
            assert cost.seconds == cost.transfer_seconds + cost.selection_seconds


def test_the_union_of_independent_gradients() -> None:
    rng, n, k = np.random.RandomState(0), 8, 4000
    drawn = [np.unique(np.concatenate([rng.choice(COUNT, k, replace=False) for _ in range(n)])).size for _ in range(5)]
    found = _plan(density=k / COUNT, num_workers=n)
    assert found.costs["top_k"].elements == pytest.approx(np.mean(drawn), rel=0.01)
    assert found.costs["exdyna"].elements == found.costs["gtop_k"].elements == k
    assert found.costs["dense"].elements == COUNT
    assert _plan(TREE, min_size=6000, density=0.1).costs["exdyna"].elements == int(0.1 * 33 * 301) + 5001


@pytest.mark.parametrize("options", [{}, {"workers_per_host": 2}, {"bandwidth": 1e8}, {"latency": 0}, {"capacity_factor": 3.0}], ids=str)
def test_it_pays_up_to_the_break_even(options: dict[str, Any]) -> None:
    options = {"params": 400_000, "num_workers": 8} | options
    found = _plan(**options)
    assert found.pays
    edge = found.break_even_density
    assert edge is not None
    assert _plan(**options, density=edge - 0.5 / 400_000).pays
    assert not _plan(**options, density=edge + 1.5 / 400_000).pays
    speed = found.break_even_bandwidth
    assert _plan(**options | {"bandwidth": speed * 0.999}).pays
    assert not _plan(**options | {"bandwidth": speed * 1.001}).pays


def test_the_break_even_is_the_same_wherever_it_is_asked_from() -> None:
    assert _plan(density=1.0).break_even_density == _plan(density=0.5).break_even_density == _plan(density=1e-3).break_even_density
    assert _plan(bandwidth=1e15).break_even_bandwidth == _plan(bandwidth=1).break_even_bandwidth


def test_in_words() -> None:
    slow, fast = _plan(density=1e-3, bandwidth=1e8), _plan(density=1e-3, bandwidth=1e12)
    assert slow.verdict.startswith("It pays: an exchange takes ")
    assert f" up to density {slow.break_even_density:.2g} and on links slower than " in slow.verdict
    assert fast.verdict.startswith("It does not pay: an exchange takes ")
    assert " It would on links slower than " in fast.verdict
    assert fast.break_even_density is None
    assert " It would up to density " in _plan(density=0.9).verdict.replace(", or on links", "")
    assert "at no density, and on no link" in _plan(num_workers=2, density=1.0, latency=1.0).verdict
    free = _plan(latency=0, selection=0)
    assert free.break_even_bandwidth == math.inf
    assert free.verdict.endswith(f"It does up to density {free.break_even_density:.2g}.")
    assert "a single worker exchanges nothing" in _plan(num_workers=1).verdict
    assert "nothing crosses a link" in _plan(workers_per_host=4).verdict
    for found in (slow, fast, free, _plan(num_workers=1, selection=0), _plan(workers_per_host=4)):
        lines = str(found).splitlines()
        assert lines[-1] == found.verdict
        assert len({len(line) for line in lines[2:-2]}) == 1, "columns are aligned"
        assert [line.split("  ")[0] for line in lines[3:-2]] == list(METHODS)
        assert found.pays == found.verdict.startswith("It pays")


def test_one_number_is_the_work_of_every_method_but_dense() -> None:
    assert _plan(selection=3).selection == {"dense": 0, "top_k": 3, "gtop_k": 3, "exdyna": 3}
    assert _plan(selection={"exdyna": 3}).selection == {"dense": 0, "top_k": 0, "gtop_k": 0, "exdyna": 3}


def test_work_is_measured_if_not_given() -> None:
    """Once for a size and a density; what was measured can be handed in again."""
    found = exdyna_jax.plan(3000, 0.01, 4)
    assert all(0 < ms < math.inf for ms in found.selection.values())
    assert exdyna_jax.plan(3000, 0.01, 4) == exdyna_jax.plan(3000, 0.01, 4, selection=found.selection) == found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"params": 0}, "params=0 is not a positive whole number"),
        ({"params": 2.5}, "params=2.5 is not"),
        ({"params": math.inf}, "params=inf is not"),
        ({"params": True}, "params=True is not"),
        ({"params": {"w": 3.0}}, "is a float, not an array"),
        ({"params": {"w": jnp.zeros(3, jnp.int32)}}, "no floating-point"),
        ({"params": {"w": jnp.zeros(3, jnp.complex64)}}, "complex64"),
        ({"params": 1e10}, "2147483584.* second mesh axis"),
        ({"density": 0}, "density=0 is not in"),
        ({"density": math.nan}, "density=nan is not in"),
        ({"density": lambda count: 0.1}, "single values of a schedule"),
        ({"density": jnp.float32(0.1)}, "is not a number"),
        ({"num_workers": 0}, "num_workers=0 is not an int from 1 to 1,000,000"),
        ({"num_workers": 4.0}, "num_workers=4.0 is not an int from 1 to 1,000,000"),
        ({"workers_per_host": 3}, "num_workers=4 don't fill hosts of workers_per_host=3"),
        ({"workers_per_host": 0}, "workers_per_host=0 is not"),
        ({"bandwidth": 0}, "bandwidth=0 is not a positive number of bit/s"),
        ({"bandwidth": "1Gbit"}, "bandwidth='1Gbit' is not"),
        ({"latency": -1}, "latency=-1 is not"),
        ({"min_size": -1}, "min_size=-1 is not"),
        ({"capacity_factor": 0.5}, "capacity_factor=0.5 is not an int or float of at least 1"),
        ({"selection": {"topk": 1}}, "names 'topk', which is none of dense, top_k"),
        ({"selection": -1}, "-1 is not a number of milliseconds"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _plan(**options)


COMMAND = ["plan", "--params", "25.6e6", "--density", "1e-3", "--workers", "16", "--selection", "dense=1,top_k=12,gtop_k=10,exdyna=2"]


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main([*COMMAND, "--workers-per-host", "2", "--bandwidth", "100Mbit", "--latency", "0.1ms", "--capacity-factor", "2",
          "--json", str(tmp_path / "plan.json")])  # fmt: skip
    expected = _plan(25.6e6, 1e-3, 16, workers_per_host=2, bandwidth=1e8, latency=1e-4, capacity_factor=2)
    said = capsys.readouterr()
    assert said.out == f"{expected}\n"
    assert not said.err
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["verdict"] == expected.verdict
    assert written["break_even_bandwidth"] == expected.break_even_bandwidth
    assert written["costs"]["exdyna"] == expected.costs["exdyna"]._asdict() | {"seconds": expected.costs["exdyna"].seconds}


@pytest.mark.parametrize(
    ("text", "rate"), [("1e9", 1e9), ("1Gbit", 1e9), ("10 gbit/s", 1e10), ("2.5Gbps", 2.5e9), ("100Mb/s", 1e8), ("5.k", 5e3), ("1E+6", 1e6)]
)
def test_rates(text: str, rate: float, tmp_path: Path) -> None:
    main([*COMMAND, "--bandwidth", text, "--json", str(tmp_path / "plan.json")])
    assert json.loads((tmp_path / "plan.json").read_text())["bandwidth"] == pytest.approx(rate)


@pytest.mark.parametrize(("text", "seconds"), [("50e-6", 5e-5), ("50us", 5e-5), ("0.1 ms", 1e-4), ("2s", 2), ("0", 0), ("1e3ns", 1e-6)])
def test_latencies(text: str, seconds: float, tmp_path: Path) -> None:
    main([*COMMAND, "--latency", text, "--json", str(tmp_path / "plan.json")])
    assert json.loads((tmp_path / "plan.json").read_text())["latency"] == pytest.approx(seconds)


def test_no_infinity_in_json(tmp_path: Path) -> None:
    main([*COMMAND, "--selection", "0", "--latency", "0", "--json", str(tmp_path / "plan.json")])
    assert json.loads((tmp_path / "plan.json").read_text())["break_even_bandwidth"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["plan"], "--params, --density, --workers"),
        ([*COMMAND, "--params", "many"], "'many' is not a number"),
        ([*COMMAND, "--params", "1e10"], "second mesh axis"),
        ([*COMMAND, "--density", "2"], "density=2.0 is not in"),
        ([*COMMAND, "--workers", "0"], "num_workers=0"),
        ([*COMMAND, "--workers-per-host", "3"], "workers_per_host=3"),
        ([*COMMAND, "--bandwidth", "1GB"], "'1GB' is not a rate in bit/s"),
        ([*COMMAND, "--bandwidth", "-1"], "bandwidth=-1.0"),
        ([*COMMAND, "--capacity-factor", "0.5"], "capacity_factor=0.5 is not"),
        ([*COMMAND, "--bandwidth", "1e999"], "bandwidth=inf"),
        ([*COMMAND, "--latency", "soon"], "'soon' is not a time"),
        ([*COMMAND, "--selection", "exdyna=fast"], "'exdyna=fast' is not milliseconds"),
        ([*COMMAND, "--selection", "a=1=2"], "'a=1=2' is not milliseconds"),
        ([*COMMAND, "--json", "nowhere/plan.json"], "can't write"),
    ],
    ids=lambda x: " ".join(x[-2:]) if isinstance(x, list) else "",
)
def test_bad_input_is_one_line_with_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.startswith("python -m exdyna_jax")
    assert complaint.count("\n") == 1


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "exdyna_jax", *COMMAND], text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{_plan(25.6e6, 1e-3, 16)}\n", "")
