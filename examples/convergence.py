"""Do sparse methods learn as well as dense? The tasks whose data is at hand, trained with each method, against dense.

    python examples/convergence.py --json convergence.json --plot convergence.png

Density 0.01 with three seeds, 0.001 with one; 57 runs, at most an hour on two idle cores. `--steps 20` tries it out.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from rich.console import Console
from rich.table import Table

from cli import Parser, output_file, picture_file
from palette import look
from report import Result, progress, said, write_json
from side_by_side import divergence, running_mean
from train import Settings, provide_devices, train

TASKS = ("digits", "text", "recommend")
METHODS = ("dense", "top_k", "micro", "deft", "exdyna")  # the rival of all others first
DENSITIES = {0.01: (0, 1, 2), 0.001: (0,)}  # density -> seeds
_KEPT = ("loss", "density", "bytes_sent")  # of the histories


class Case(NamedTuple):
    """Runs that differ in the seed only."""

    task: str
    method: str
    density: float  # 1 for dense, whatever the others are compared at
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """What came of a case: means over its seeds."""

    task: str
    method: str
    density: float
    seeds: tuple[int, ...]
    quality: dict[str, float]
    spread: float  # of the first measure of quality: highest less lowest
    loss: float
    gap: float  # against dense with the same seeds, more is better: points of the first measure, or, of a perplexity, percent of the loss
    megabytes: float  # sent by a worker in all steps
    saving: float  # how many times that a dense all-reduce would send
    diverged: tuple[str, ...]


def cases(tasks: Sequence[str], methods: Sequence[str], densities: dict[float, tuple[int, ...]]) -> list[Case]:
    """What to run, each once, and dense once for all densities."""
    tasks, methods = list(dict.fromkeys(tasks)), list(dict.fromkeys(methods))
    every = tuple(sorted({seed for seeds in densities.values() for seed in seeds}))
    dense = [METHODS[0]]
    return [Case(task, method, 1.0, every) for task in tasks for method in dense] + [
        Case(task, method, density, seeds)
        for density, seeds in densities.items()
        for task in tasks
        for method in methods
        if method not in dense
    ]


def row_of(case: Case, runs: Sequence[Result], dense: Sequence[Result]) -> Row:
    """The row of a case.

    Args:
      case: what was asked.
      runs: one for each seed.
      dense: the runs that it is compared with, among them those with the same seeds.
    """
    rivals = [next(rival for rival in dense if rival.seed == run.seed) for run in runs]
    first = next(iter(runs[0].quality))
    values = [run.quality[first] for run in runs]
    gaps = [_gap(first, run, rival) for run, rival in zip(runs, rivals, strict=True)]
    return Row(
        **case._asdict(),
        quality={name: float(np.mean([run.quality[name] for run in runs])) for name in runs[0].quality},
        spread=max(values) - min(values),
        loss=float(np.mean([run.loss for run in runs])),
        gap=float(np.mean(gaps)),
        megabytes=float(np.mean([run.bytes_sent for run in runs])) / 1e6,
        saving=sum(run.bytes_dense for run in runs) / max(sum(run.bytes_sent for run in runs), 1),
        diverged=tuple(f"seed {run.seed}: {wrong}" for run in runs if (wrong := divergence(run.history, run.loss))),
    )


def _gap(measure: str, run: Result, rival: Result) -> float:
    if measure == "perplexity":
        return 100 * (1 - run.loss / rival.loss)
    return 100 * (run.quality[measure] - rival.quality[measure])


def table(rows: Sequence[Row]) -> Table:
    """One row a case."""
    shown = Table(
        "task", "method", "density", "quality, held out", "loss", "against dense", "MB", "saving",
        title="Convergence: in the end, mean of the seeds ± half of their range",
        caption="against dense of the same seeds: points of the first measure, or, of a perplexity, percent of the loss; more is better.\n"
        "MB: sent by a worker in all steps, padding included. saving: how many times as much dense sends.",
    )  # fmt: skip
    for column in shown.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for i, row in enumerate(rows):
        half = f" ± {_half(row)}" if len(row.seeds) > 1 else ""
        measures = [f"{name} {said(name, value)}" for name, value in row.quality.items()]
        unit = "%" if "perplexity" in row.quality else "points"
        cells = (
            row.task,
            row.method,
            f"{row.density:g}",
            "diverged" if row.diverged else ", ".join([measures[0] + half, *measures[1:]]),
            f"{row.loss:.4g}",
            "" if row.method == METHODS[0] or row.diverged else f"{row.gap:+.2f} {unit}",
            f"{row.megabytes:,.2f}",
            f"{row.saving:.1f}",
        )
        last = i + 1 == len(rows) or rows[i + 1].task != row.task
        shown.add_row(*cells, style="red" if row.diverged else None, end_section=last)
    return shown


def _half(row: Row) -> str:
    return said(next(iter(row.quality)), row.spread / 2)


def plot(path: Path, done: dict[Case, list[Result]], rows: Sequence[Row]) -> None:
    """Draws the training loss of each task at each density, and below the quality over the bytes."""
    tasks = list(dict.fromkeys(case.task for case in done))
    densities = sorted({case.density for case in done if case.method != METHODS[0]}, reverse=True)
    figure = Figure(figsize=(5 * len(tasks), 3.6 * (len(densities) + 1)), layout="constrained")
    panels = figure.subplots(len(densities) + 1, len(tasks), squeeze=False)
    for column, task in enumerate(tasks):
        for line, density in enumerate(densities):
            shown = [case for case in done if case.task == task and case.density in (1.0, density)]
            _curves(panels[line, column], f"{task}, density {density:g}: training loss", [(case, done[case]) for case in shown])
        _qualities(panels[-1, column], [row for row in rows if row.task == task and not row.diverged])
    methods = dict.fromkeys(case.method for case in done)
    key = [Line2D([], [], color=look(m).color, linestyle=look(m).line, marker=look(m).marker, linewidth=2.2, label=m) for m in methods]
    figure.legend(handles=key, loc="outside lower center", ncols=len(key), frameon=False)
    figure.savefig(path, dpi=110)


def _curves(panel: Axes, title: str, shown: Sequence[tuple[Case, list[Result]]]) -> None:
    for case, runs in shown:
        style = look(case.method)
        smooth = np.array([running_mean(np.asarray(run.history["loss"], float)) for run in runs])
        steps = np.arange(1, smooth.shape[1] + 1) + (runs[0].steps - smooth.shape[1]) / 2
        panel.plot(steps, smooth.mean(axis=0), color=style.color, linestyle=style.line, linewidth=1.6)
        if len(runs) > 1:
            panel.fill_between(steps, smooth.min(axis=0), smooth.max(axis=0), color=style.color, alpha=0.15, linewidth=0)
    panel.set_yscale("log")
    _dress(panel, title, "step")


def _qualities(panel: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        style = look(row.method)
        value = next(iter(row.quality.values()))
        panel.errorbar(row.megabytes, value, row.spread / 2, color=style.color, marker=style.marker, markersize=7, capsize=2)
        panel.annotate(f"{row.density:g}", (row.megabytes, value), xytext=(6, 4), textcoords="offset points", fontsize=8, color="0.35")
    panel.set_xscale("log")
    measure = next(iter(rows[0].quality)) if rows else ""
    _dress(panel, f"{measure}, held out; beside the marker the density", "MB sent by a worker")


def _dress(panel: Axes, title: str, along: str) -> None:
    panel.set_title(title, loc="left", fontsize=9)
    panel.set_xlabel(along)
    panel.spines[["top", "right"]].set_visible(False)
    bottom, top = panel.get_ylim()
    wide = panel.get_yscale() == "log" and top > 10 * bottom
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(6))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.25)


def figures(done: dict[Case, list[Result]], rows: Sequence[Row]) -> dict[str, Any]:
    """All there is to write to a file: the histories' main parts only."""
    runs = [replace(run, history={name: run.history[name] for name in _KEPT}) for case in done.values() for run in case]
    return {"rows": [asdict(row) for row in rows], "runs": [asdict(run) for run in runs]}


def converge(asked: Sequence[Case], base: dict[str, Any], console: Console, json_file: Path | None) -> dict[Case, list[Result]]:
    """Runs all cases. What there is so far is in the file, should the rest not come.

    Args:
      asked: what to run.
      base: settings that all runs share.
      console: is shown the progress.
      json_file: where to write.
    """
    done: dict[Case, list[Result]] = {}
    runs, count = sum(len(case.seeds) for case in asked), 0
    for case in asked:
        done[case] = []
        for seed in case.seeds:
            count += 1
            console.print(f"run {count}/{runs}: {case.task}, {case.method}, density {case.density:g}, seed {seed}", highlight=False)
            with progress(console) as show:
                settings = Settings(method=case.method, task=case.task, density=case.density, seed=seed, **base)
                done[case].append(train(settings, show))
        if json_file:
            write_json(json_file, figures(done, rows_of(done)))
    return done


def rows_of(done: dict[Case, list[Result]]) -> list[Row]:
    """The rows of all cases, task by task."""
    dense = {case.task: runs for case, runs in done.items() if case.method == METHODS[0]}
    rows = [row_of(case, runs, dense[case.task]) for case, runs in done.items()]
    return sorted(rows, key=lambda row: (list(dense).index(row.task), -row.density))


def main() -> None:
    parser = Parser(
        description="Train the tasks at hand with dense and sparse methods, and compare how well they learn.", allow_abbrev=False
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help=f"default: {' '.join(TASKS)}")
    parser.add_argument("--methods", nargs="+", choices=METHODS[1:], default=METHODS[1:], help="beside dense; default: all")
    parser.add_argument("--steps", type=int, help="default: each task's own")
    parser.add_argument("--workers", type=int, default=Settings.workers, help=f"default: {Settings.workers}")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw them here")
    arguments = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 130)  # a file has room for the whole table
    with parser.complaining():
        base = {"steps": arguments.steps, "workers": arguments.workers}
        Settings(**base)  # complains before the first run
        provide_devices(arguments.workers)
        done = converge(cases(arguments.tasks, arguments.methods, DENSITIES), base, console, arguments.json)
        rows = rows_of(done)
        console.print(table(rows))
        if arguments.plot:
            plot(arguments.plot, done, rows)


if __name__ == "__main__":
    main()
