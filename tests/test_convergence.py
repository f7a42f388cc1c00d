"""The comparison with dense: what it runs, how it compares, and what it shows. The runs themselves are made up here."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convergence
import train
from report import Result

ACCURACY = {"dense": 0.9, "top_k": 0.905, "micro": 0.88, "deft": 0.9, "exdyna": 0.895}
LOSS = {"dense": 2.0, "top_k": 2.0, "micro": 2.1, "deft": float("nan"), "exdyna": 1.98}


def made_up(settings: train.Settings, report: Any) -> Result:
    """A run whose figures depend on method and seed only."""
    accuracy, loss = ACCURACY[settings.method] + 0.001 * settings.seed, LOSS[settings.method]
    quality = {"perplexity": float(np.exp(loss)), "accuracy": accuracy} if settings.task == "text" else {"accuracy": accuracy}
    history = {"loss": [3.0, 2.5, loss], "density": [settings.density] * 3, "bytes_sent": [2e6 * settings.density] * 3, "blocks": [[1]] * 3}
    asked = {name: getattr(settings, name) for name in ("method", "task", "workers", "density", "seed", "batch", "optimizer")}
    return Result(
        **asked, steps=3, learning_rate=0.1, momentum=0.9, data=None, model=None, preset=None, parameters=1000, quality=quality,
        accuracy=accuracy, loss=loss, bytes_sent=6e6 * settings.density, bytes_dense=6e6, seconds_per_step=0.1, history=history,
    )  # fmt: skip


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(convergence, "train", made_up)
    monkeypatch.setattr(sys, "argv", ["convergence.py", *arguments, "--json=out.json", "--plot=out.png"])
    with (folder / "out.txt").open("w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        convergence.main()
    return (folder / "out.txt").read_text()


def test_what_is_named_twice_runs_once() -> None:
    assert convergence.cases(["text", "text"], ["exdyna", "deft", "exdyna"], {0.1: (0,)}) == [
        ("text", "dense", 1.0, (0,)),
        ("text", "exdyna", 0.1, (0,)),
        ("text", "deft", 0.1, (0,)),
    ]


def test_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run(tmp_path, monkeypatch)
    assert "run 57/57: recommend, exdyna, density 0.001, seed 0" in said
    figures = json.loads((tmp_path / "out.json").read_text())
    assert len(figures["runs"]) == 57
    assert set(figures["runs"][0]["history"]) == {"loss", "density", "bytes_sent"}
    rows = {(row["task"], row["method"], row["density"]): row for row in figures["rows"]}
    assert len(rows) == 3 * (1 + 2 * 4)
    assert [row["task"] for row in figures["rows"]] == ["digits"] * 9 + ["text"] * 9 + ["recommend"] * 9
    sparse, sparser = rows["digits", "exdyna", 0.01], rows["digits", "exdyna", 0.001]
    assert (sparse["seeds"], sparser["seeds"]) == ([0, 1, 2], [0])
    assert (sparse["gap"], sparse["spread"]) == (pytest.approx(-0.5), pytest.approx(0.002))
    assert (sparse["megabytes"], sparse["saving"]) == (pytest.approx(0.06), pytest.approx(100))
    assert sparser["gap"] == pytest.approx(-0.5)  # against dense of seed 0, not against its mean
    assert rows["text", "exdyna", 0.01]["gap"] == pytest.approx(1)
    assert rows["text", "micro", 0.01]["gap"] == pytest.approx(-5)
    assert rows["text", "deft", 0.01]["diverged"] == [f"seed {seed}: loss not finite from step 3" for seed in range(3)]
    assert re.search(r"│ digits +│ micro +│ +0\.01 │ +accuracy 88\.10% ± 0\.10% │ +2\.1 │ +-2\.00 points │ +0\.06 │ +100\.0 │", said)
    assert re.search(r"│ text +│ dense +│ +1 │ perplexity 7\.39 ± 0\.00, accuracy 90\.10% │ +2 │ +│", said)
    assert re.search(r"│ text +│ deft +│ +0\.001 │ +diverged │ +nan │ +│", said)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run(tmp_path, monkeypatch, "--tasks", "text", "--methods", "exdyna", "--steps=3", "--workers=2")
    assert "run 7/7: text, exdyna, density 0.001, seed 0" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks=cifar10"], "invalid choice: 'cifar10'"),
        (["--methods=dense"], "invalid choice: 'dense'"),
        (["--steps=0"], "steps=0 is not a positive number"),
        (["--json=nowhere/out.json"], "can't write 'nowhere/out.json'"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convergence.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        convergence.main()
    assert ended.value.code == 2
    assert re.fullmatch(r"convergence\.py: .+\n", said := capsys.readouterr().err)
    assert message in said
