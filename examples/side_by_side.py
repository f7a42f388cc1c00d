"""Several methods and seeds on one task, as a table and a picture."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from rich.table import Table

from palette import look
from report import History, Result

_SKIPPED = 10  # steps in a row without which a run is beyond help
_EXPLODED = 3.0  # times the first loss
_RECENT = 10  # steps that the last loss is averaged over
_SMOOTH = 20  # steps of the running mean in the picture


@dataclass(frozen=True)
class Compared:
    """A method with all its runs, which differ in the seed."""

    method: str
    runs: Sequence[Result]
    selection_ms: float | None  # None for a method that selects nothing

    @property
    def diverged(self) -> list[str]:
        """What went wrong, for each run in which something did."""
        return [f"seed {run.seed}: {wrong}" for run in self.runs if (wrong := divergence(run.history, run.loss))]


def divergence(history: History, held_out: float) -> str | None:
    """How a run went wrong; None for one that did not.

    Args:
      history: of the run, one entry a step.
      held_out: the loss in the end.
    """
    losses = np.asarray(history["loss"], float)
    if not np.all(np.isfinite(losses)):
        return f"loss not finite from step {int(np.argmin(np.isfinite(losses))) + 1}"
    in_a_row = np.asarray(history.get("skipped_in_a_row", [0]))
    if np.max(in_a_row) >= _SKIPPED:
        return f"{int(np.max(in_a_row))} steps skipped in a row"
    if not math.isfinite(held_out):
        return "held-out loss not finite"
    if np.mean(losses[-_RECENT:]) > _EXPLODED * losses[0]:
        return f"loss grew from {losses[0]:.3g} to {np.mean(losses[-_RECENT:]):.3g}"
    return None


def _build_up(run: Result) -> np.ndarray[Any, Any]:
    """Distinct indices sent / k, of each step."""
    k = max(int(run.density * run.parameters), 1)
    return np.asarray(run.history.get("sent", []), float) / k


def _mean(values: Sequence[float] | np.ndarray[Any, Any]) -> float:
    """NaN for what a method doesn't have."""
    return float(np.mean(values)) if len(values) else math.nan


def _per_run(run: Result) -> dict[str, float]:
    """The figures of one run that the table averages over the seeds."""
    history = run.history
    density = np.asarray(history.get("density", []), float)
    return {
        "accuracy": run.accuracy,
        "loss": run.loss,
        "density": _mean(density),
        "density_error": _mean(np.abs(density / run.density - 1)),
        "build_up": _mean(_build_up(run)),
        "imbalance": _mean(history.get("imbalance", [])),
        "bytes_per_step": run.bytes_sent / run.steps,
        "overflow": float(sum(history["overflow"]) / max(sum(history["selected"]), 1)) if "overflow" in history else math.nan,
        "consensus_distance": _mean(history.get("consensus_distance", [])),
        "step_ms": 1000 * run.seconds_per_step,
    }


def summary(compared: Compared) -> dict[str, Any]:
    """The figures of a method: the mean over the seeds, and the accuracy's spread (highest less lowest)."""
    rows = [_per_run(run) for run in compared.runs]
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    accuracies = [row["accuracy"] for row in rows]
    spread = {"accuracy_spread": max(accuracies) - min(accuracies), "selection_ms": compared.selection_ms}
    return {"method": compared.method, "seeds": [run.seed for run in compared.runs]} | means | spread | {"diverged": compared.diverged}


def figures(everything: Sequence[Compared]) -> dict[str, Any]:
    """All there is to write to a file."""
    return {"summary": [summary(each) for each in everything], "runs": [asdict(run) for each in everything for run in each.runs]}


def table(everything: Sequence[Compared]) -> Table:
    """One row a method."""
    first = everything[0].runs[0]
    seeds = [run.seed for run in everything[0].runs]
    asked = next((run.density for each in everything for run in each.runs if run.density < 1), 1.0)
    shown = Table(
        "method", "accuracy", "loss", "density", "error", "build-up", "imbalance", "MB\na step", "overflow", "selection,\nms",
        title=f"{first.task}, density {asked:g} asked, {first.workers} workers, {first.steps} steps, seeds {', '.join(map(str, seeds))}",
        caption="accuracy, loss: held out, in the end, mean of the seeds ± half of their range. error: mean of |density / asked - 1|.\n"
        "build-up: distinct indices sent / k. imbalance: 1 is perfect. MB: sent by a worker, padding included.\n"
        "overflow: share of the selected that had to wait. selection: one worker's selection, timed alone.",
    )  # fmt: skip
    for column in shown.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for each in everything:
        row = summary(each)
        half = f" ± {row['accuracy_spread'] / 2:.2%}" if len(seeds) > 1 else ""
        wrong = bool(row["diverged"])
        shown.add_row(
            each.method,
            "diverged" if wrong else f"{row['accuracy']:.2%}{half}",
            f"{row['loss']:.3g}",
            _shown(row["density"], ".3g"),
            _shown(row["density_error"], ".1%"),
            _shown(row["build_up"], ".2f"),
            _shown(row["imbalance"], ".2f"),
            f"{row['bytes_per_step'] / 1e6:.4f}",
            _shown(row["overflow"], ".2%"),
            "-" if each.selection_ms is None else f"{each.selection_ms:.2f}",
            style="red" if wrong else None,
        )
    return shown


def _shown(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def plot(path: Path, everything: Sequence[Compared]) -> None:
    """Draws loss, density, build-up, imbalance, bytes and threshold over the steps, with one key for all."""
    first = everything[0].runs[0]
    seeds = f"mean of {len(everything[0].runs)} seeds, band: their range" if len(everything[0].runs) > 1 else f"seed {first.seed}"
    figure = Figure(figsize=(15, 9.2), layout="constrained")
    figure.suptitle(f"{first.task}, {first.workers} workers, {seeds}; running means of {_width(first.steps)} steps")
    panels = figure.subplots(2, 3, sharex=True)
    curves: list[tuple[str, Callable[[Result], Any]]] = [
        ("training loss", lambda run: run.history["loss"]),
        ("density obtained, of all workers together", lambda run: run.history.get("density", [])),
        ("build-up: distinct indices sent / k", _build_up),
        ("imbalance: busiest worker / mean", lambda run: run.history.get("imbalance", [])),
        ("MB sent by a worker so far", lambda run: np.cumsum(run.history["bytes_sent"]) / 1e6),
        ("threshold", lambda run: run.history.get("threshold", [])),
    ]
    for panel, (title, values) in zip(panels.flat, curves, strict=True):
        _draw(panel, title, [(each, [np.asarray(values(run), float) for run in each.runs]) for each in everything])
    thinned = [run.density for each in everything for run in each.runs if run.density < 1]
    if thinned:
        _target(panels[0, 1], thinned[0], f"asked: {thinned[0]:g}")
    _target(panels[0, 2], 1, "none: 1")
    _target(panels[1, 0], 1, "perfect: 1")
    for panel in panels[1]:
        panel.set_xlabel("step")
    figure.legend(handles=_key(everything), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)


def _key(everything: Sequence[Compared]) -> list[Line2D]:
    """What each curve is, and how it ended."""
    key: list[Line2D] = []
    for each in everything:
        style = look(each.method)
        accuracy = np.mean([run.accuracy for run in each.runs])
        ended = f"DIVERGED ({each.diverged[0]})" if each.diverged else f"{accuracy:.1%} accuracy"
        key.append(Line2D([], [], color=style.color, linestyle=style.line, linewidth=2.2, label=f"{each.method}: {ended}"))
    return key


def _target(panel: Axes, value: float, text: str) -> None:
    panel.axhline(value, color="0.6", linewidth=5, alpha=0.4, zorder=0)
    panel.annotate(
        text, (1, value), xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points", ha="right", color="0.35"
    )


def _draw(panel: Axes, title: str, everything: list[tuple[Compared, list[np.ndarray[Any, Any]]]]) -> None:
    """One panel, log: the running mean over the seeds, their range, and a cross where a method diverged."""
    panel.set_title(title, loc="left", fontsize=11)
    panel.spines[["top", "right"]].set_visible(False)
    without = []
    for each, rows in everything:
        style = look(each.method)
        smooth = np.array([running_mean(row) for row in rows])
        shown = np.where(np.isfinite(smooth) & (smooth > 0), smooth, np.nan)
        if not shown.size or np.all(np.isnan(shown)):
            without.append(each.method)
            continue
        bad = np.isnan(shown)  # of a step that is missing in one seed nothing is drawn
        mean, low, high = (np.where(bad.any(0), np.nan, f(np.where(bad, 0, shown), axis=0)) for f in (np.mean, np.min, np.max))
        steps = np.arange(1, mean.size + 1) + (len(rows[0]) - mean.size) / 2
        panel.plot(steps, mean, color=style.color, linestyle=style.line, linewidth=1.8)
        if len(rows) > 1:
            panel.fill_between(steps, low, high, color=style.color, alpha=0.15, linewidth=0)
        seen = np.flatnonzero(~np.isnan(mean))
        if each.diverged and seen.size:
            panel.plot(steps[seen[-1]], mean[seen[-1]], "x", color=style.color, markersize=12, markeredgewidth=3)
    panel.set_yscale("log")
    bottom, top = panel.get_ylim()
    decades = math.log10(top / bottom)
    panel.yaxis.set_major_locator(MaxNLocator(6) if decades < 1 else LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.25)
    if without:
        panel.annotate(
            f"none: {', '.join(without)}", (0, 0), xycoords="axes fraction", xytext=(4, 4), textcoords="offset points", color="0.35"
        )


def _width(steps: int) -> int:
    return min(_SMOOTH, max(steps // 4, 1))


def running_mean(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The means of so many neighbours, fewer of a short run, and as many fewer than the values."""
    width = _width(values.size)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.convolve(values, np.full(width, 1 / width), "valid") if values.size else values
