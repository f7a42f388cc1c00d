"""What training goes through, on digits: NaNs, other optimizers, SIGKILL, a change of the number of workers.

The rival is, in this order: the run without NaNs, the same optimizer on dense gradients, the run that nothing interrupts, and the run whose
number of workers stays.

    python benchmarks/robustness.py [--part nan optimizers kill reshard] [--seeds 0 1 2] [--steps 600] [--json FILE]
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from checkpoint import Log, Saves
from cli import Parser, output_file
from exdyna_jax import reshard
from report import History
from train import Settings, provide_devices, train
from workloads import Batch

Row = dict[str, Any]
WORKERS = 8
NAN_STEPS, NAN_WORKER = (3, 4, 50), 3
# at the default density and rate a hundred steps end where chance alone makes points of difference
NAN_RUN = Settings(workers=WORKERS, steps=100, density=0.1, learning_rate=0.05)
KILLS, KILL_RUN, KILL_SAVE_EVERY, KILL_WORKERS = 20, 100, 5, 4
SIZES = (4, 8, 2, 3, 1)  # numbers of workers, one after the other


class Plan(NamedTuple):
    """What was asked for."""

    seeds: Sequence[int]
    steps: int | None
    tell: Callable[[str], None]  # what is being done


def nan(plan: Plan) -> Iterator[Row]:
    """NaNs in one worker's samples at three steps of a hundred."""

    def spoil(step: int, batch: Batch) -> Batch:
        if step not in NAN_STEPS:
            return batch
        images = batch["image"].copy()
        np.split(images, WORKERS)[NAN_WORKER][:] = np.nan
        return {**batch, "image": images}

    for seed in plan.seeds:
        plan.tell(f"NaN, seed {seed}")
        settings = replace(NAN_RUN, seed=seed)
        rival, spoilt = train(settings), train(settings, alter=spoil)
        yield {"seed": seed, "without": rival.accuracy, "with": spoilt.accuracy, "skipped": spoilt.history["skipped"][-1]}


def optimizers(plan: Plan) -> Iterator[Row]:
    """Each optimizer after dense gradients and after exdyna."""
    for optimizer in ("sgd", "adamw"):
        rows = []
        for seed in plan.seeds:
            row: Row = {"optimizer": optimizer, "seed": seed}
            for method in ("dense", "exdyna"):
                plan.tell(f"{optimizer} after {method}, seed {seed}")
                settings = Settings(workers=WORKERS, steps=plan.steps, seed=seed, method=method, optimizer=optimizer)
                row[method] = train(settings).accuracy
            rows.append(row)
            yield row
        yield {"optimizer": optimizer, "seed": "mean"} | {name: float(np.mean([row[name] for row in rows])) for name in ("dense", "exdyna")}


def kill(plan: Plan) -> Iterator[Row]:
    """SIGKILL at moments drawn uniformly from the time that a whole run takes; run after run until there were enough."""
    with TemporaryDirectory() as folder:
        plan.tell("uninterrupted")
        _example(Path(folder), "warm")  # fills the compilation cache
        began = time.monotonic()
        _example(Path(folder), "rival")
        whole = time.monotonic() - began
        want = _outcome(Path(folder), "rival")

        moments = random.Random(0)
        number, left = 0, KILLS
        while left:
            name, kills, in_save = f"run {number}", 0, 0
            while not _example(Path(folder), name, moments.uniform(0, whole) if kills < left else None):
                kills += 1
                in_save += any("tmp" in entry.name for entry in (Path(folder) / name).glob("*"))
                plan.tell(f"{name}, kill {kills}")
            left -= kills
            yield {"run": number, "kills": kills, "in a save": in_save, "identical": _outcome(Path(folder), name) == want}
            number += 1


def _example(folder: Path, name: str, kill_after: float | None = None) -> bool:
    """Runs the example; whether it came to its end before it was killed."""
    command = [sys.executable, sys.path[0] + "/train.py", f"--workers={KILL_WORKERS}", f"--steps={KILL_RUN}"]
    saving = [f"--save-every={KILL_SAVE_EVERY}", f"--checkpoint={folder / name}", f"--json={folder / name}.json"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with subprocess.Popen([*command, *saving], env=os.environ | cache, stdout=subprocess.DEVNULL) as process:
        try:
            status = process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            return False
    if status:
        raise RuntimeError(f"{name} ended with status {status}")
    return True


def _outcome(folder: Path, name: str) -> tuple[Any, list[bytes]]:
    """All figures but the time, and the bytes of the last state."""
    figures = json.loads((folder / f"{name}.json").read_text())
    del figures["seconds_per_step"]
    state = ocp.StandardCheckpointer().restore(folder / name / str(KILL_RUN) / "state")
    return figures, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


class _Scales(Saves):
    """Weighs the residual before and after it is resharded for as many workers."""

    def __init__(self, directory: Path, every: int, workers: int) -> None:
        super().__init__(directory, every)
        self.workers, self.error = workers, 0.0

    def state(self, log: Log, shapes: Any) -> Any:
        state = super().state(log, shapes)
        before, after = (_mass(tree) for tree in (state, reshard(state, self.workers)))
        self.error = float(np.linalg.norm(after - before) / np.linalg.norm(before))
        return state


def _mass(state: Any) -> Any:
    """The mean over the workers of all residuals, in one vector of float64."""
    leaves = jax.device_get(jax.tree.leaves(optax.tree.get(state, "residual")))
    return np.concatenate([leaf.astype(np.float64).mean(0).ravel() for leaf in leaves])


class _StageOver(Exception):
    pass


def resharding(plan: Plan) -> Iterator[Row]:
    """The number of workers changes four times in a run, through its checkpoint."""
    for seed in plan.seeds:
        plan.tell(f"{SIZES[0]} workers to the end, seed {seed}")
        rival = train(Settings(workers=SIZES[0], steps=plan.steps, seed=seed))
        bounds = [rival.steps * stage // len(SIZES) for stage in range(1, len(SIZES) + 1)]
        errors = []
        with TemporaryDirectory() as folder:
            for workers, bound in zip(SIZES, bounds, strict=True):
                plan.tell(f"{workers} workers up to step {bound}, seed {seed}")

                def stop(history: History, steps: int, bound: int = bound) -> None:
                    if len(history["loss"]) == bound < steps:
                        raise _StageOver

                saves = _Scales(Path(folder), bounds[0], workers)
                with suppress(_StageOver):
                    result = train(Settings(workers=workers, steps=plan.steps, seed=seed), stop, saves)
                errors.append(saves.error)
        yield {"seed": seed, "unchanged": rival.accuracy, "changed": result.accuracy, "mass error": max(errors)}


PARTS = {"nan": nan, "optimizers": optimizers, "kill": kill, "reshard": resharding}


def table(name: str, rows: list[Row]) -> Table:
    shown = Table(*rows[0], title=name)
    for row in rows:
        shown.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return shown


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of optimizers and reshard; default: the task's own")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    provide_devices(max(WORKERS, *SIZES))
    console = Console()
    figures: dict[str, list[Row]] = {}
    with parser.complaining(), Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(arguments.part))
        plan = Plan(arguments.seeds, arguments.steps, lambda what: progress.update(bar, description=what))
        for name in arguments.part:
            figures[name] = []
            for row in PARTS[name](plan):
                figures[name].append(row)
                if arguments.json:
                    arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
            console.print(table(name, figures[name]))
            progress.advance(bar)


if __name__ == "__main__":
    main()
