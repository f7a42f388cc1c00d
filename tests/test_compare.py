"""The command line of the comparison: what it shows and writes, that a method which diverges is shown, and how it takes bad input."""

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alone
import compare
import scale
import side_by_side
import train
from exdyna_jax import metrics

pytestmark = pytest.mark.usefixtures("compiled_once")

SUMMARY = {
    "method", "seeds", "accuracy", "accuracy_spread", "loss", "density", "density_error", "build_up", "imbalance", "bytes_per_step",
    "overflow", "consensus_distance", "step_ms", "selection_ms", "diverged",
}  # fmt: skip
POINT = {
    "method", "workers", "build_up_first", "build_up", "density", "density_error", "imbalance", "overflow", "selected", "read", "bytes",
    "model_bytes",
}  # fmt: skip


class Run(NamedTuple):
    folder: Path
    output: str
    figures: dict[str, Any]


def run(folder: Path, *arguments: str) -> Run:
    """What comes of a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["compare.py", *arguments, "--json=out.json", "--plot=out.png"])
        patch.setenv("COLUMNS", "120")
        with (folder / "out.txt").open("w") as out:
            patch.setattr(sys, "stdout", out)
            with jax.numpy_dtype_promotion("standard"):  # optax's schedules ask for it
                compare.main()
    return Run(folder, (folder / "out.txt").read_text(), json.loads((folder / "out.json").read_text()))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("compared")
    return run(folder, "--methods=gtop_k,dense", "--workers=2", "--steps=6", "--batch=8", "--seeds=3,4", "--learning-rate=0.05")


def test_json(compared: Run) -> None:
    summary, runs = compared.figures["summary"], compared.figures["runs"]
    assert [row["method"] for row in summary] == ["gtop_k", "dense"]
    assert all(set(row) == SUMMARY for row in summary)
    assert [(each["method"], each["seed"]) for each in runs] == [("gtop_k", 3), ("gtop_k", 4), ("dense", 3), ("dense", 4)]
    gtop_k, dense = summary
    assert gtop_k["accuracy"] == pytest.approx(np.mean([each["accuracy"] for each in runs[:2]]))
    assert gtop_k["selection_ms"] > 0
    assert dense["selection_ms"] is None
    assert 0 < gtop_k["bytes_per_step"] < dense["bytes_per_step"] / 10
    assert dense["build_up"] == dense["density"] == 1
    assert all(len(values) == 6 for values in runs[0]["history"].values())


def test_table(compared: Run) -> None:
    assert "\x1b" not in compared.output
    assert re.search(r"│ gtop_k +│ +\d+\.\d\d% ± \d+\.\d\d% │", compared.output)
    assert "run 4/4: dense, seed 4" in compared.output
    assert "step 6/6  loss " in compared.output


def test_picture(compared: Run) -> None:
    assert (compared.folder / "out.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_divergence_is_shown_and_stops_nobody(tmp_path: Path) -> None:
    done = run(tmp_path, "--methods=top_k,dense", "--workers=2", "--steps=12", "--batch=8", "--learning-rate=1e30")
    for row in done.figures["summary"]:
        assert row["diverged"]
        assert re.search(rf"│ {row['method']} +│ +diverged ", done.output)
        assert f"{row['method']} diverged, seed 0: {row['diverged'][0].removeprefix('seed 0: ')}" in done.output
    assert (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("losses", "skipped", "held_out", "said"),
    [
        ([2.0] * 20, 0, 1.0, None),
        ([2.0] * 5 + [float("nan")] * 15, 0, 1.0, "loss not finite from step 6"),
        ([2.0] * 20, 10, 1.0, "10 steps skipped in a row"),
        ([2.0] * 20, 0, float("inf"), "held-out loss not finite"),
        ([2.0] * 10 + [9.0] * 10, 0, 1.0, "loss grew from 2 to 9"),
    ],
)
def test_what_counts_as_divergence(losses: list[float], skipped: int, held_out: float, said: str | None) -> None:
    history = {"loss": losses, "skipped_in_a_row": [0] * 19 + [skipped]}
    assert side_by_side.divergence(history, held_out) == said


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("scaled")
    return run(
        folder, "--scale", "--methods=top_k,micro", "--most=5", "--size=20000", "--steps=2", "--density=0.02", "--model-size=1000000"
    )


def test_build_up_of_independent_workers(scaled: Run) -> None:
    for point in scaled.figures["points"]:
        expected = scale.expected(0.02, point["workers"]) if point["method"] == "top_k" else 1
        assert point["build_up_first"] == pytest.approx(expected, rel=0.03 if point["method"] == "top_k" else 0.2)


def test_work_and_bytes(scaled: Run) -> None:
    points = {(point["method"], point["workers"]): point for point in scaled.figures["points"]}
    assert list(points) == [("top_k", 2), ("top_k", 4), ("micro", 2), ("micro", 4)]
    assert all(set(point) == POINT for point in points.values())
    assert points["micro", 4]["read"] == points["micro", 2]["read"] / 2 == 5000
    assert points["top_k", 4]["selected"] == points["top_k", 2]["selected"] == 400
    assert points["top_k", 4]["model_bytes"] > points["micro", 4]["model_bytes"]


def test_scale_table_and_picture(scaled: Run) -> None:
    assert re.search(r"│ top_k +│ +4 │ +3\.\d\d\d │", scaled.output)
    assert "micro, 4 workers" in scaled.output
    assert (scaled.folder / "out.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_workers_that_hold_the_same_build_nothing_up() -> None:
    (point,) = scale.simulate(scale.Scale(("top_k",), density=0.1, size=1000, correlation=1.0, most=3, steps=1, model_size=1000))
    assert point.build_up_first == 1


@pytest.mark.parametrize("method", ["micro", "gtop_k"])
def test_bytes_are_those_that_the_metrics_report(method: str) -> None:
    make = train.METHODS[method].make
    tx = make(0.05, "data", num_workers=3)
    gradients = jax.random.normal(jax.random.key(0), (3, 500))
    _, state = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data"))(gradients)
    counted = alone.bytes_per_step(make, 0.05, jax.ShapeDtypeStruct((500,), jnp.float32), 3)
    assert np.all(metrics(state)["bytes_sent"] == counted)


@pytest.mark.parametrize("method", ["exdyna", "deft", "gtop_k", "clt_k"])
def test_selection_alone_takes_time(method: str) -> None:
    params = {"a": jax.ShapeDtypeStruct((30, 20), jnp.float32), "b": jax.ShapeDtypeStruct((50,), jnp.float32)}
    assert alone.selection_ms(method, train.METHODS[method].make, 0.05, params, 4, repeats=2) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods=exdyna,sorting"], "'sorting' is not one of exdyna, micro, "),
        (["--methods=exdyna,exdyna"], "'exdyna,exdyna' names something twice"),
        (["--seeds=one"], "'one' is not a list of whole numbers, such as 0,1,2"),
        (["--seeds=0,-1"], "seed=-1 is not in 0..4294967295"),
        (["--task=tea"], "invalid choice: 'tea'"),
        (["--density=2"], "density=2.0 is not in (0, 1]"),
        (["--workers=9"], "workers=9, but there are only 8 devices"),
        (["--task=cifar100"], "task='cifar100' needs --data DIR"),
        (["--preset=paper"], "preset='paper' has no settings for task='digits'"),
        (["--most=8"], "--most only goes with --scale"),
        (["--model-size=8"], "--model-size only goes with --scale"),
        (["--json=nowhere/run.json"], "can't write 'nowhere/run.json': No such file or directory"),
        (["--plot=run.txt"], "'run.txt' does not end in the name of a picture format"),
        (["--scale", "--workers=4"], "--workers does not go with --scale"),
        (["--scale", "--most=1"], "most=1 is less than 2 workers"),
        (["--scale", "--correlation=1.5"], "correlation=1.5 is not in [0, 1]"),
        (["--scale", "--size=0"], "size=0 is not in 1..2000000000"),
        (["--scale", "--steps=0"], "steps=0 is not a positive number"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "provide_devices", lambda workers: None)
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 2
    assert re.fullmatch(r"compare\.py: .+\n", said := capsys.readouterr().err)
    assert message in said
    assert not list(tmp_path.iterdir())
