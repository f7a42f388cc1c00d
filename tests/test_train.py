"""The command line of the training example: what it writes, that it repeats itself, and how it takes bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import train
from compiling import environment

SETTINGS = train.Settings(workers=2, steps=12, batch=8, seed=5, optimizer="adamw")
ASKED = ["--workers=2", "--steps=12", "--batch=8", "--seed=5", "--optimizer=adamw"]
KEYS = {
    "method", "task", "workers", "density", "seed", "steps", "batch", "optimizer", "learning_rate", "momentum", "data",
    "model", "preset", "parameters", "quality", "accuracy",
    "loss", "bytes_sent", "bytes_dense", "seconds_per_step", "history",
}  # fmt: skip


class Run(NamedTuple):
    folder: Path
    output: str
    figures: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, train.__file__, *ASKED, "--json=run.json", "--plot=run.png"]
    done = subprocess.run(command, cwd=folder, env=environment(sys.path), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return Run(folder, done.stdout, json.loads((folder / "run.json").read_text()))


def test_json(run: Run) -> None:
    figures = run.figures
    assert set(figures) == KEYS
    assert (figures["method"], figures["task"], figures["workers"], figures["seed"], figures["steps"]) == ("exdyna", "digits", 2, 5, 12)
    assert 0 < figures["bytes_sent"] < figures["bytes_dense"] / 5
    assert figures["quality"] == {"accuracy": figures["accuracy"]}
    assert {"loss", "accuracy", "density", "threshold", "imbalance", "overflow"} <= set(figures["history"])
    assert {len(values) for values in figures["history"].values()} == {12}


def test_picture(run: Run) -> None:
    assert (run.folder / "run.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_output_that_is_no_terminal(run: Run) -> None:
    assert "\x1b" not in run.output
    assert "\r" not in run.output
    lines = [line for line in run.output.splitlines() if line.startswith("step ")]
    assert lines[-1].startswith("step 12/12  loss ")
    assert re.search(r"accuracy, held out +│ \d+\.\d\d%", run.output)


def test_same_seed_same_run_in_another_process(run: Run) -> None:
    with jax.numpy_dtype_promotion("standard"):  # optax's adamw asks for it
        again = train.train(SETTINGS)
    assert again.history == run.figures["history"]
    assert (again.accuracy, again.loss) == (run.figures["accuracy"], run.figures["loss"])


def complaint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that comes of it."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"train\.py: .+\n", said.err)
    return said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method=sorting"], "invalid choice: 'sorting'"),
        (["--task=tea"], "invalid choice: 'tea'"),
        (["--optimizer=guess"], "invalid choice: 'guess'"),
        (["--density=0"], "density=0.0 is not in (0, 1]"),
        (["--density=much"], "invalid float value: 'much'"),
        (["--workers=0"], "workers=0 is not a positive number"),
        (["--workers=2", "--batch=1000"], "batch=1000 is more than a worker's share: 718 of 1437 samples"),
        (["--workers=9"], "workers=9, but there are only 8 devices"),
        (["--steps=0"], "steps=0 is not a positive number"),
        (["--seed=-1"], "seed=-1 is not in 0..4294967295"),
        (["--learning-rate=nan"], "learning_rate=nan is not a positive number"),
        (["--momentum=1"], "momentum=1.0 is not in [0, 1)"),
        (["--json=nowhere/run.json"], "can't write 'nowhere/run.json': No such file or directory"),
        (["--plot=run.txt"], "'run.txt' does not end in the name of a picture format"),
        (["--save-every=5"], "--save-every only goes with --checkpoint DIR"),
        (["--checkpoint=here", "--save-every=0"], "save_every=0 is not a positive number"),
        ([f"--checkpoint={__file__}"], "test_train.py' is not a directory"),
        (["--task=wikitext2"], "task='wikitext2' needs --data DIR, a directory with the word-level files of WikiText-2"),
        (["--task=text", "--data=here"], "data='here' does not go with it: its data is at hand"),
        (["--task=text", "--model=gpt"], "model='gpt' is not one of lstm, lstm_untied, transformer"),
        (["--task=cifar10", "--data=nowhere"], "data='nowhere' is not a directory"),
        (["--task=cifar10", "--data=."], "data_batch_1 is missing: it should be one of the files data_batch_1, data_batch_2, "),
        (["--task=movielens", "--data=."], "ratings.csv or u.data is missing: it should be MovieLens's ratings.csv: a line userId,"),
        (["--preset=paper"], "preset='paper' has no settings for task='digits', only for cifar10, cifar100, wikitext2, movielens"),
        (["--preset=paper", "--task=cifar10", "--data=.", "--momentum=0.5"], "momentum=0.5 does not go with preset='paper'"),
        (["--workerz=3"], "unrecognized arguments: --workerz=3"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "provide_devices", lambda workers: None)
    assert message in complaint(monkeypatch, capsys, *arguments)
    assert not list(tmp_path.iterdir())
