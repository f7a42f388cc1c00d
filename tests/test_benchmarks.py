"""Each benchmark in a small form: it runs, and its figures are what they are called. What they amount to is for an idle machine to say.

Cluster and network have tests of their own; failure and training, which start processes, are tried by what they make of what they saw.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console

import consensus
import control
import failure
import robustness
import selection
import training
import tree
import updates

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs a script's main in this process, and returns the JSON that it wrote."""

    def run(main: Callable[[], None], *flags: object) -> Any:
        file = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", ["script", *map(str, flags), f"--json={file}"])
        main()
        return json.loads(file.read_text())

    return run


def test_selection(run: Callable[..., Any]) -> None:
    told = run(selection.main, "--size=20000", "--density=0.01", "--workers", 1, 2, "--repeats=1")
    assert list(told["share_ms"]) == list(selection.SHARED)
    assert len(told["ms"]) == 5
    assert min(told["ms"].values()) > 0
    assert all(ms > 0 for row in told["share_ms"].values() for ms in row.values())


def test_an_update_against_the_floor() -> None:
    measured = updates.measure([(70_000,), (3, 5), ()], 0.01, 2, 3, lambda what: None)
    floor, *rest = measured.values()
    assert (floor.floors, floor.copies) == (1.0, 0), "a floor that copies is none"
    assert len(rest) == 5
    assert all(row.floors == pytest.approx(row.ms / floor.ms) for row in rest)
    updates.report("small", measured, Console(quiet=True))


def test_copies_are_counted() -> None:
    """Of an argument that is not given away, and is returned with another one's element set, there must be one."""
    x = jax.ShapeDtypeStruct((70_000,), "float32")
    program = jax.jit(lambda x: x.at[0].set(1.0)).lower(x).compile()
    assert updates.large_copies(program) == 1
    assert updates.large_copies(program, least=70_001) == 0


def test_trees() -> None:
    def size(shapes: updates.Shapes) -> int:
        return sum(int(jax.numpy.prod(jax.numpy.asarray(shape))) for shape in shapes)

    assert (len(tree.resnet50()), size(tree.resnet50())) == (161, 25_557_032)  # as the published network
    assert size(tree.transformer()) == pytest.approx(6.9e6, rel=0.01)


def test_control(run: Callable[..., Any]) -> None:
    (row,) = run(control.main, "--size=20000", "--workers=2", "--density=0.01", "--scale=1")["figures"]
    assert row["mean"] == pytest.approx(1, abs=0.1)
    assert row["imbalance"] >= 1
    assert 0 <= row["overflow_mean"] <= row["overflow"] <= 1


def test_consensus(run: Callable[..., Any], tmp_path: Path) -> None:
    figures = run(consensus.main, "--workers=4", "--steps=6", "--size=36", f"--plot={tmp_path / 'distances.png'}")["figures"]
    assert (tmp_path / "distances.png").stat().st_size > 0
    assert all(row["distance"][0] == 1 and row["distance"][-1] < 1 and 0 <= row["contraction"] < 1 for row in figures)


def test_robustness() -> None:
    """The residuals keep their mean while the number of workers changes four times."""
    (row,) = robustness.PARTS["reshard"](robustness.Plan([0], 10, lambda what: None))
    assert row["mass error"] < 1e-6
    robustness.table("reshard", [row])


def test_seconds_to_a_loss(tmp_path: Path) -> None:
    losses = [2.0] * 10 + [1.0] * 10 + [0.5] * 10
    runs = [training.Trained(method, 0, losses, 0.5, 0.9, 1e6) for method in ("dense", "exdyna")]
    assert runs[0].seconds_to(1.55) == 0.5 * 15, "the average of the last ten steps is 1.5 after five low ones"
    assert runs[0].seconds_to(2.05) == 0.5 * 10, "no average is earlier"
    assert runs[0].seconds_to(0.4) is None
    training.draw(runs, 1.5, tmp_path / "loss.svg")
    Console(quiet=True).print(training.report(runs, 0.4, 1e8))


class Ended:
    """In place of processes: one that is hit, after which the others end, or that was over before."""

    def __init__(self, logs: list[Path], over: bool) -> None:
        self.logs, self.over, self.hit = logs, over, list[tuple[int, int]]()

    def first_steps(self) -> float:
        return 0.1

    def signal(self, rank: int, number: int) -> None:
        self.hit.append((rank, number))

    def statuses(self, ranks: list[int], within: float = 0.0) -> list[int | None]:
        if self.hit or self.over:
            return [0 if self.over else 1 for _ in ranks]
        return [None for _ in ranks]


def test_what_is_told_of_a_failure(tmp_path: Path) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in range(failure.PROCESSES)]
    for rank, log in enumerate(logs):
        log.write_text(f"step 5\nprocess {rank} of 4: step 6 failed\nmultihost.py: process {rank} ended with status 1\n")
    victim = random.Random(0).randrange(failure.PROCESSES)
    hit: Any = Ended(logs, over=False)
    row = failure.interrupt(hit, failure.signal.SIGKILL, victim, 0.0)
    assert row is not None
    assert hit.hit == [(victim, failure.signal.SIGKILL)]
    assert row["statuses"] == [1, 1, 1]
    assert all(line.endswith("ended with status 1") for line in row["lines"])
    assert all(line.endswith("step 6 failed") for line in row["first said"])
    over: Any = Ended(logs, over=True)
    assert failure.interrupt(over, failure.signal.SIGKILL, victim, 0.0) is None, "a run that is over can't be interrupted"
