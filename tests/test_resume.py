"""A run that is stopped and taken up again ends as the run that never stopped: to the bit, however it was stopped.

Each run here is short, saves often, and ends with a save; what is compared are the bytes of that last state and all figures but the time.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import train
from checkpoint import Saves
from report import History, Result

EVERY, STEPS = 3, 20
SETTINGS = train.Settings(workers=2, steps=STEPS, batch=8)
ASKED = ["--workers=2", f"--steps={STEPS}", "--batch=8", f"--save-every={EVERY}"]


class Stopped(Exception):
    """The run is over before its end."""


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All runs share their compiled step. Optax's schedules ask for the promotion."""
    folder = tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()
    with jax.numpy_dtype_promotion("standard"):
        yield folder
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return train.train(SETTINGS, saves=Saves(folder, EVERY)), folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that came to step 10: its last save is of step 9."""
    folder = tmp_path_factory.mktemp("stopped")

    def stop(history: History, steps: int) -> None:
        if len(history["loss"]) == 10:
            raise Stopped

    with pytest.raises(Stopped):
        train.train(SETTINGS, stop, Saves(folder, EVERY))
    return folder


@pytest.fixture
def resumable(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "saves"))


def last_state(folder: Path, step: int = STEPS) -> Any:
    return ocp.StandardCheckpointer().restore(folder / str(step) / "state")


def resume(folder: Path, step: int, settings: train.Settings = SETTINGS) -> Result:
    """Goes on to the end, from this step as it must say."""
    said: list[str] = []
    result = train.train(settings, saves=Saves(folder, EVERY, said.append))
    assert len(said) == 1
    assert said[0].startswith(f"resuming at step {step} from {folder}")
    assert ("saved with workers=2, not" in said[0]) == (settings.workers != 2)
    return result


def check_same(result: Result, folder: Path, want: tuple[Result, Path]) -> None:
    assert replace(result, seconds_per_step=0.0) == replace(want[0], seconds_per_step=0.0)
    jax.tree.map(lambda got, wanted: np.testing.assert_array_equal(got, wanted, strict=True), last_state(folder), last_state(want[1]))


def test_resumed_run_is_bit_identical(resumable: Path, uninterrupted: tuple[Result, Path]) -> None:
    check_same(resume(resumable, 9), resumable, uninterrupted)


def test_saves_change_nothing(uninterrupted: tuple[Result, Path]) -> None:
    assert replace(train.train(SETTINGS), seconds_per_step=0.0) == replace(uninterrupted[0], seconds_per_step=0.0)


def test_finished_run_reports_again(uninterrupted: tuple[Result, Path]) -> None:
    check_same(resume(uninterrupted[1], STEPS), uninterrupted[1], uninterrupted)


def test_half_written_save_is_not_loaded(resumable: Path) -> None:
    """As it lies there when the process is killed in the midst of it: under another name, and something is missing."""
    half = Path(shutil.copytree(resumable / "9", resumable / "12.orbax-checkpoint-tmp"))
    shutil.rmtree(half / "log")
    assert resume(resumable, 9).steps == STEPS
    assert sorted(entry.name for entry in resumable.iterdir()) == ["18", "20"]


def test_killed_run_goes_on(compiled_once: Path, uninterrupted: tuple[Result, Path], tmp_path: Path) -> None:
    """SIGKILL as soon as there is a save, which finds the process in a step or in the next save."""
    folder = tmp_path / "saves"
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_COMPILATION_CACHE_DIR": str(compiled_once),
        "JAX_NUM_CPU_DEVICES": str(jax.device_count()),  # else the compiled step is another one
    }
    command = [sys.executable, train.__file__, *ASKED, f"--checkpoint={folder}"]
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not any(entry.name.isdecimal() for entry in folder.glob("*")):
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    step = max(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
    check_same(resume(folder, step), folder, uninterrupted)


def test_another_number_of_workers(resumable: Path) -> None:
    """Goes on, and what the residuals held is where the new workers start from: their mean is conserved."""
    result = resume(resumable, 9, replace(SETTINGS, workers=3))
    assert (result.workers, result.steps, len(result.history["loss"])) == (3, STEPS, STEPS)
    assert [len(counts) for counts in result.history["selected_per_worker"]] == [2] * 9 + [3] * (STEPS - 9)
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(optax.tree.get(last_state(resumable), "residual"))}
    assert rows == {3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--method=dense", r"method='exdyna', not 'dense'; density=0\.01, not 1\.0"),
        ("--density=0.1", r"density=0\.01, not 0\.1"),
        ("--seed=1", r"seed=0, not 1"),
        ("--batch=9", r"batch=8, not 9"),
        ("--steps=30", r"steps=20, not 30"),
        ("--optimizer=adamw", r"optimizer='sgd', not 'adamw'; learning_rate=0\.1, not 0\.01"),
        ("--learning-rate=0.2", r"learning_rate=0\.1, not 0\.2"),
        ("--momentum=0", r"momentum=0\.9, not 0\.0"),
    ],
)
def test_other_settings_are_refused(
    change: str, message: str, stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *ASKED, f"--checkpoint={stopped}", change])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 2
    assert re.fullmatch(rf"train\.py: the checkpoint in {re.escape(str(stopped))} is of a run with {message}\n", capsys.readouterr().err)
