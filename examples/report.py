"""What a person sees of a run: a progress bar, a table, a picture."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

History = dict[str, list[Any]]  # metric -> one entry a step
_RECENT = 10  # steps that the figures beside the bar are averaged over
_SMOOTH = 20  # steps of the running mean in the picture


@dataclass(frozen=True)
class Result:
    """What came of it. Bytes are those that one worker sent in all steps."""

    method: str
    task: str
    workers: int
    density: float  # as asked; 1 for a method that sends everything
    seed: int
    steps: int
    batch: int
    optimizer: str
    learning_rate: float
    momentum: float
    data: str | None
    model: str | None
    preset: str | None
    parameters: int
    quality: dict[str, float]  # what the task is judged by, of the held-out samples, as are accuracy and loss
    accuracy: float
    loss: float
    bytes_sent: float
    bytes_dense: float
    seconds_per_step: float  # compilation and saves not counted
    history: History  # one entry a step


def _recent(history: History) -> str:
    def mean(name: str) -> float:
        return float(np.mean(history[name][-_RECENT:]))

    saved = round((sum(history["bytes_dense"]) - sum(history["bytes_sent"])) / 1e6, 1) + 0.0  # never -0.0
    figure = f"density {mean('density'):.4g}" if "density" in history else f"apart {mean('consensus_distance'):.3g}"
    return f"loss {mean('loss'):.3f}  acc {mean('accuracy'):.1%}  {figure}  saved {saved:.1f} MB"


@contextmanager
def progress(console: Console) -> Iterator[Callable[[History, int], None]]:
    """A live bar on a terminal, a line for each tenth of the way elsewhere. Yields what is to be called with the history and all steps."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, expand=True) as bar:
        run = bar.add_task("compiling", total=None)
        yield lambda history, steps: bar.update(run, completed=len(history["loss"]), total=steps, description=_recent(history))


def _lines(console: Console) -> Callable[[History, int], None]:
    tenth = 0

    def show(history: History, steps: int) -> None:
        nonlocal tenth
        done = len(history["loss"])
        if done * 10 // steps > tenth:
            tenth = done * 10 // steps
            console.print(f"step {done}/{steps}  {_recent(history)}", highlight=False, soft_wrap=True)

    return show


def said(measure: str, value: float) -> str:
    """A measure of quality as one writes it: all but a perplexity are shares."""
    return f"{value:.2f}" if measure == "perplexity" else f"{value:.2%}"


def table(result: Result) -> Table:
    """The figures of a run in brief."""
    history, sent, dense = result.history, result.bytes_sent, result.bytes_dense
    rows = {
        **{f"{name}, held out": said(name, value) for name, value in result.quality.items()},
        "sent by a worker": f"{sent / 1e6:,.2f} MB of {dense / 1e6:,.2f} MB dense, " + (f"1/{dense / sent:.1f}" if sent else "nothing"),
    }
    if "consensus_distance" in history:
        rows["distance to the mean"] = f"{history['consensus_distance'][-1]:.3g} in the last step, as estimated"
    else:
        overflow = sum(history["overflow"]) / max(sum(history["selected"]), 1)
        rows |= {
            "density": f"{np.mean(history['density']):.5f} on average, {result.density:g} asked",
            "imbalance": f"{np.mean(history['imbalance']):.2f} on average, 1 is perfect" if "imbalance" in history else "-",
            "overflow": f"{overflow:.2%} of the selected had to wait",
        }
    rows["time"] = f"{1000 * result.seconds_per_step:.1f} ms a step"
    shown = Table("figure", "value", title=f"{result.method} on {result.task}, {result.workers} workers, {result.steps} steps")
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Writes figures as strict JSON: what is not a finite number becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    path.write_text(json.dumps(plain(figures), allow_nan=False) + "\n")


def plot(path: Path, result: Result) -> None:
    """Draws loss, density, threshold and imbalance over the steps; for the density, in gossip, the distance to the mean."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    quality = ", ".join(f"{name} {said(name, value)}" for name, value in result.quality.items())
    figure.suptitle(
        f"{result.method} on {result.task}: {result.workers} workers, {quality}, "
        f"{result.bytes_sent / 1e6:,.1f} of {result.bytes_dense / 1e6:,.1f} MB sent"
    )
    loss, density, threshold, imbalance = figure.subplots(2, 2, sharex=True).flat
    _draw(loss, result, "loss", log=True)
    if "consensus_distance" in result.history:
        _draw(density, result, "consensus_distance", log=True)
    else:
        _draw(density, result, "density", line=("asked", result.density))
    _draw(threshold, result, "threshold", log=True)
    _draw(imbalance, result, "imbalance", line=("perfect", 1))
    for panel in (threshold, imbalance):
        panel.set_xlabel("step")
    figure.savefig(path, dpi=120)


def _draw(panel: Axes, result: Result, name: str, log: bool = False, line: tuple[str, float] | None = None) -> None:
    """One metric, thin as it is and thick as a centred running mean, with a line to compare; or the word that the method has none."""
    panel.set_title(name, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    values = np.asarray(result.history.get(name, []), float)
    if not values.size or (log and not np.any(values > 0)):  # a method that sends everything may report a threshold of 0
        panel.text(0.5, 0.5, f"{result.method} has no {name}", transform=panel.transAxes, ha="center", va="center", color="gray")
        panel.set_yticks([])
        return
    width = min(_SMOOTH, values.size)
    steps = np.arange(1, values.size + 1)
    means = np.convolve(values, np.full(width, 1 / width), "valid")
    panel.plot(steps, values, color="C0", alpha=0.3, linewidth=0.8, label="each step")
    panel.plot(steps[: means.size] + (width - 1) / 2, means, color="C0", label=f"mean of {width}")
    if line:
        panel.axhline(line[1], color="C1", linestyle="--", label=line[0])
    if log:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())
    else:
        panel.set_ylim(0, None)
    panel.grid(alpha=0.25)
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=9)
