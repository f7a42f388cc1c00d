"""The training example in several processes: it gives what one process gives, and nobody is left hanging when one of them fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multihost
import train
from checkpoint import Saves
from compiling import environment
from report import History, Result
from runs import Stopped, check_same, saves_in
from workloads import Batch, load_task, training_batches

EVERY, STEPS = 5, 30
SETTINGS = train.Settings(workers=2, steps=STEPS, batch=8)
SHARES = [3.0, 1.0]  # the second process begins its next epoch in the midst of the first one's
SECONDS = 240  # for a whole run, on a busy machine

pytestmark = pytest.mark.usefixtures("compiled_once", "standard_promotion")


def stop(history: History, steps: int) -> None:
    raise Stopped


def start(cache: Path, *flags: object) -> subprocess.Popen[str]:
    """Starts two local processes; their group is one of its own."""
    command = [sys.executable, multihost.__file__, "--local=2", f"--steps={STEPS}", "--batch=8", f"--save-every={EVERY}", *map(str, flags)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(sys.path, cache), start_new_session=True, **pipes)


def finish(started: subprocess.Popen[str], seconds: float = SECONDS) -> tuple[int, str, str]:
    """Waits for the end: status, what was printed, and complaints."""
    try:
        output, errors = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        output, errors = started.communicate()
        pytest.fail(f"not over after {seconds:g} s:\n{output}\n{errors}")
    return started.returncode, output, errors


def of_both_processes(step: int, batch: Batch) -> Batch:
    """What two processes with shards of their own train on in a step."""
    data = load_task(SETTINGS.task).train
    shards = [multihost.shard(data, process, SHARES) for process in range(2)]
    batches = [next(training_batches(shard, SETTINGS.batch, SETTINGS.seed, step - 1, step)) for shard in shards]
    return {name: np.concatenate([part[name] for part in batches]) for name in batch}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The same workers in this process."""
    folder = tmp_path_factory.mktemp("alone")
    return train.train(SETTINGS, saves=Saves(folder, EVERY), alter=of_both_processes), folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run by pmap, of which there is one save."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stopped):
        train.train(SETTINGS, stop, Saves(folder, EVERY), of_both_processes, map_step=multihost.by_pmap)
    assert saves_in(folder) == [EVERY]
    return folder


@pytest.mark.matrix
def test_two_processes_equal_one(alone: tuple[Result, Path], compiled_once: Path, tmp_path: Path) -> None:
    """To the bit, with shards of unequal length."""
    status, output, errors = finish(start(compiled_once, "--shares=3,1", f"--checkpoint={tmp_path}", f"--json={tmp_path / 'run.json'}"))
    assert status == 0, errors
    assert len(re.findall(rf"^step {STEPS}/{STEPS} ", output, re.MULTILINE)) == 1, "only process 0 prints"
    check_same((Result(**json.loads((tmp_path / "run.json").read_text())), tmp_path), alone)


def test_pmap_equals_shard_map(alone: tuple[Result, Path], stopped: Path, tmp_path: Path) -> None:
    """Also through a save. To the bit only where the compiler makes the same of both: JAX 0.10.0 rounds otherwise."""
    folder = Path(shutil.copytree(stopped, tmp_path / "saves"))
    check_same((train.train(SETTINGS, saves=Saves(folder, EVERY), alter=of_both_processes), folder), alone, rounding=1e-5)


def worker_pids(guard: int) -> list[int]:
    """In the order of their ranks."""
    children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.matrix
def test_killed_process_ends_the_other(stopped: Path, compiled_once: Path, tmp_path: Path) -> None:
    """It says in what it was. The saves are good, for one process as for two."""
    folder = Path(shutil.copytree(stopped, tmp_path / "saves"))
    run = start(compiled_once, f"--checkpoint={folder}")
    while run.poll() is None and saves_in(folder)[-1] == EVERY:
        time.sleep(0.02)
    os.kill(worker_pids(run.pid)[1], signal.SIGKILL)
    status, output, errors = finish(run, 60)
    assert status == 1, errors
    assert f"resuming at step {EVERY} from {folder}" in output.replace("\n", "")
    # at once, or after its patience with the save that it may have been in; or JAX has heard of it first, and aborts
    wants = r"^process 0 of 2: (step|the save at step) \d+ (failed, most likely because another process has died: |has not come to its end)"
    how = "ended with status 1" if re.search(wants, errors, re.MULTILINE) else "ended by SIGABRT"
    last = errors.rstrip().splitlines()[-1]
    want = rf"multihost\.py: process 0 {how}, process 1 ended by SIGKILL; start all again to go on from the last save in .*"
    assert re.fullmatch(want, last), errors

    step, said = saves_in(folder)[-1], list[str]()
    result = train.train(SETTINGS, saves=Saves(folder, EVERY, said.append))
    assert said[0].startswith(f"resuming at step {step} from {folder}")
    assert (result.steps, len(result.history["loss"]), saves_in(folder)[-1]) == (STEPS, STEPS, STEPS)


def test_watchdog() -> None:
    """Nobody comes: a line, and the end. What is told in time is no reason."""
    code = "; ".join(
        [
            "import time, watchdog",
            "dog = watchdog.Watchdog(0.8, 60)",
            "dog.name(1, 2)",
            "[(dog.watch(f'step {i}', False), time.sleep(0.5)) for i in (1, 2, 3)]",
            "time.sleep(60)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(sys.path), capture_output=True, text=True, timeout=50)
    want = "process 1 of 2: step 3 has not come to its end within 0.8 s: most likely another process is frozen, or out of reach\n"
    assert (done.returncode, done.stderr) == (1, want)


def settle(monkeypatch: pytest.MonkeyPatch, *jobs: multihost.Job) -> None:
    """The processes of these jobs agree, one after the other, each with those before it."""
    told: list[np.ndarray] = []
    monkeypatch.setattr(multihost.multihost_utils, "process_allgather", lambda mine: (told.append(mine), np.stack(told))[1])
    for job in jobs:
        multihost._agree(job, job.settings, load_task(SETTINGS.task).train, 8, None)


SAVING = train.Output(Path("saves"), 5, None, None)
JOB = multihost.Job(SETTINGS, SAVING, "shard_map", 1, SHARES, 60.0, 60.0, None, "here:1", 2)


@pytest.mark.parametrize(
    "change",
    [
        {"settings": replace(SETTINGS, seed=1)},
        {"shares": [1.0, 3.0]},
        {"by": "pmap"},
        {"output": replace(SAVING, save_every=7)},
        {"output": replace(SAVING, checkpoint=Path("elsewhere"))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_flags_are_noticed(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="process 1 was started with other settings than process 0"):
        settle(monkeypatch, JOB, replace(JOB, **change))


def test_flags_that_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the data lies, how long to wait, and what only process 0 writes."""
    here = replace(JOB, settings=replace(SETTINGS, task="wikitext2", data="here"))
    there = replace(JOB, settings=replace(SETTINGS, task="wikitext2", data="there"), startup=5.0)
    settle(monkeypatch, here, there, replace(here, output=replace(SAVING, json=Path("run.json"))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local=0"], "local=0 is not a positive number"),
        (["--rank=0"], "--coordinator, --processes and --rank go together"),
        (["--local=2", "--rank=0"], "leave out --coordinator, --processes and --rank"),
        (["--coordinator=here:1", "--processes=2", "--rank=2"], "rank=2 is not in 0..1"),
        (["--local=2", "--devices=0"], "devices=0 is not a positive number"),
        (["--local=2", "--shares=1,few"], "'1,few' is not a list of numbers"),
        (["--local=2", "--shares=1,0"], "'1,0' has a share that is not a positive number"),
        (["--local=2", "--patience=0"], "patience=0 is not a positive number of seconds"),
        (["--local=2", "--startup=inf"], "startup=inf is not a positive number of seconds"),
        (["--local=2", "--by=hand"], "invalid choice: 'hand'"),
        (["--local=2", "--density=2"], "density=2.0 is not in (0, 1]"),
        (["--local=2", "--save-every=5"], "--save-every only goes with --checkpoint DIR"),
        (["--local=2", "--task=movielens"], "task='movielens' needs --data DIR"),
        (["--local=2", "--model=lstm"], "model='lstm' is not one of cnn, mlp"),
        (["--local=2", "--preset=paper"], "preset='paper' has no settings for task='digits'"),
    ],
)
def test_bad_input(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, before any process is started."""
    monkeypatch.setattr(sys, "argv", ["multihost.py", *arguments])
    monkeypatch.setattr(multihost, "guard", None)
    with pytest.raises(SystemExit) as ended:
        multihost.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"multihost\.py: .+\n", said.err)
    assert message in said.err
