"""The benchmark on slow links, as far as it goes without root: how it reads rates, what it makes of figures, and how it refuses."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alone
import cluster
import network
from exdyna_jax import top_k

LINKS = {
    1e9: cluster.Link(1e9, 31_250, 0.95e9, 0.95e9, 9.0, 1100.0),
    network.UNLIMITED: cluster.Link(network.UNLIMITED, None, 5e9, 8e9, 9.0, 1100.0),
}


def measured(method: str, ms: float, sent: float, rate: float = 1e9) -> cluster.Measured:
    return cluster.Measured(
        6_400_000, method, rate, local_ms=20.0, steps=11, ms=ms, payload=1.02 * sent, headers=9.0, bytes_sent=sent, density=1e-3
    )


@pytest.mark.parametrize(
    ("text", "rate", "shown"),
    [
        ("100Mbit", 1e8, "100 Mbit/s"),
        ("2.5 Gbit/s", 2.5e9, "2.5 Gbit/s"),
        ("1e9", 1e9, "1 Gbit/s"),
        ("56kbit", 56e3, "56 kbit/s"),
        ("unlimited", network.UNLIMITED, "unlimited"),
    ],
)
def test_rates(text: str, rate: float, shown: str) -> None:
    assert network.read_rate(text) == rate
    assert network.show_rate(rate) == shown


@pytest.mark.parametrize("text", ["fast", "0", "-1Mbit", "1GB", ""])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate such as"):
        network.read_rate(text)


def test_a_burst_is_little_against_a_sparse_exchange() -> None:
    assert network.burst_bytes(1e8) < 300_000 / 50
    assert network.burst_bytes(1e9) < 300_000 / 8


def test_headers_are_counted_apart() -> None:
    sent = network.Traffic(12_000, 30) - network.Traffic(2_000, 10)
    assert (sent.headers, sent.payload) == (20 * 66, 10_000 - 20 * 66)


def test_bound() -> None:
    assert cluster.bound_ms(20.0, 125_000, 1e9, 9.0) == pytest.approx(1.25 * (20 + 1 + 9))


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 11), (5.0, 8), (12.5, 3), (60.0, 3)])
def test_slow_steps_are_fewer(seconds: float, steps: int) -> None:
    assert cluster.steps_in_budget(seconds, 11) == steps


def test_rows() -> None:
    found = [measured("dense", 400.0, 38.4e6), measured("exdyna", 40.0, 80_300.0), measured("micro", 44.0, 80_300.0)]
    dense, exdyna, micro = cluster.evaluate(found, LINKS, 1e-3, 4)
    assert [row.of_dense for row in (dense, exdyna, micro)] == [1.0, 0.1, 0.11]
    assert exdyna.counted == pytest.approx(1.02)
    assert dense.plan_ms == pytest.approx(
        20 + 307.2 / 0.95 + 6
    )  # the rate that was found; of the empty exchange's nine messages the all-reduce's six
    assert exdyna.plan_bytes == pytest.approx(80_300, rel=0.01)
    assert micro.plan_ms is None


def test_rows_without_dense_and_without_limit() -> None:
    (row,) = cluster.evaluate([measured("exdyna", 40.0, 80_300.0, network.UNLIMITED)], LINKS, 1e-3, 4)
    assert row.of_dense is None
    assert row.bound_ms == pytest.approx(1.25 * (29 + 80_300 * 8 / 8e9 * 1e3))


def test_figures_and_picture(tmp_path: Path) -> None:
    rows = cluster.evaluate([measured(m, 40.0, 80_300.0, rate) for m in ("exdyna", "exdyna_bfloat16") for rate in LINKS], LINKS, 1e-3, 4)
    asked = cluster.Asked(list(LINKS), [6_400_000], ["exdyna"], 1e-3, 4, 11)

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    figures = json.loads(cluster.to_json(asked, cluster.Figures(8.0, LINKS, rows)), parse_constant=refuse)
    assert [row["rate"] for row in figures["rows"]] == ["1 Gbit/s", "unlimited"] * 2
    assert figures["rows"][0]["bound_ms"] > 0
    cluster.draw(rows, tmp_path / "cluster.svg")
    assert "bfloat16" in (tmp_path / "cluster.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "need root"),
        (["--rates", "fast"], "is not a rate"),
        (["--sizes", "0.5"], "--sizes"),
        (["--methods", "magic"], "magic"),
        (["--workers", "1"], "at least 2"),
        (["--density", "2"], "(0, 1]"),
        (["--repeats", "1"], "at least 3"),
        (["--json", "/nowhere/x.json"], "can't write"),
    ],
)
def test_refuses_in_one_line(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stopped:
        cluster.main(arguments)
    told = capsys.readouterr().err
    assert stopped.value.code == 2
    assert complaint in told
    assert told.count("\n") == 1


def test_an_update_alone_is_that_of_workers_that_agree() -> None:
    gradient = jnp.asarray(np.random.default_rng(0).standard_normal(96, np.float32))
    single = top_k(0.1, None)
    wanted, _ = jax.jit(single.update)(gradient, single.init(gradient))
    state = top_k(0.1, "data", num_workers=4).init(gradient)
    first = state._replace(residual=state.residual[:1])
    update, after = jax.jit(alone.update_alone(top_k, 0.1, 4))(gradient, first)
    np.testing.assert_array_equal(update, wanted)
    np.testing.assert_array_equal(after.residual[0], gradient - wanted)
