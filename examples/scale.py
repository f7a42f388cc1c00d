"""What a method sends and selects as the number of workers grows: workers simulated on one device, on synthetic gradients.

Worker i draws `sqrt(c) common + sqrt(1 - c) own_i` in each step, normal numbers of one scale, with the correlation c between workers.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from alone import bytes_per_step
from exdyna_jax import metrics
from palette import look
from train import METHODS

_AXIS = "worker"
_TAKEN = {"exdyna": "partition", "micro": "partition", "dense": "nothing"}  # what a worker looks at to select; else everything


@dataclass(frozen=True)
class Scale:
    """What to simulate."""

    methods: tuple[str, ...]
    density: float = 0.01
    size: int = 100_000  # elements of the synthetic gradient
    correlation: float = 0.0
    most: int = 256  # workers: 2, 4, 8, ... up to this
    steps: int = 4
    seed: int = 0
    model_size: int = 110_000_000  # elements of the model whose traffic is counted; it is not run

    def __post_init__(self) -> None:
        gossip = [method for method in self.methods if METHODS[method].gossips]
        checks = {
            f"{', '.join(gossip)}: mixes parameters, and selects nothing from gradients": not gossip,
            f"density={self.density} is not in (0, 1]": 0 < self.density <= 1,
            f"size={self.size} is not in 1..2000000000": 1 <= self.size <= 2_000_000_000,
            f"model_size={self.model_size} is not in 1..2000000000": 1 <= self.model_size <= 2_000_000_000,
            f"correlation={self.correlation} is not in [0, 1]": 0 <= self.correlation <= 1,
            f"most={self.most} is less than 2 workers": self.most >= 2,
            f"steps={self.steps} is not a positive number": self.steps >= 1,
            f"seed={self.seed} is not in 0..4294967295": 0 <= self.seed < 2**32,
        }
        for complaint, fine in checks.items():
            if not fine:
                raise ValueError(complaint)

    @property
    def workers(self) -> list[int]:
        return [2**i for i in range(1, self.most.bit_length())]


@dataclass(frozen=True)
class Point:
    """One method on so many workers. Means are over the steps."""

    method: str
    workers: int
    build_up_first: float  # distinct indices sent / k, in the first step
    build_up: float  # the same, mean
    density: float  # selected by any worker / N, mean
    density_error: float  # mean of |selected / k - 1|
    imbalance: float
    overflow: float  # share of the selected that had to wait
    selected: float  # elements that a worker selected
    read: float  # elements that a worker looked at to select
    bytes: float  # received by a worker in a step, padding included; of the synthetic gradient
    model_bytes: float  # the same for the model of `Scale.model_size` elements


def expected(density: float, n: int) -> float:
    """The build-up of n independent workers that each select a share of the elements."""
    return (1 - (1 - density) ** n) / density


def simulate(
    scale: Scale, tell: Callable[[str], None] = lambda what: None, keep: Callable[[list[Point]], None] = lambda points: None
) -> list[Point]:
    """All points, method by method. `tell` hears what is being done, and `keep` sees those that are."""
    points: list[Point] = []
    for method in scale.methods:
        for n in scale.workers:
            tell(f"{method}, {n} workers")
            points.append(_point(scale, method, n))
            keep(points)
    return points


def _point(scale: Scale, method: str, n: int) -> Point:
    make, size = METHODS[method].make, scale.size
    tx = make(scale.density, _AXIS, num_workers=n)
    state, rows = tx.init(jnp.zeros(size)), []
    step = _make_step(tx, size, n, scale.correlation)
    key = jax.random.key(scale.seed, impl="unsafe_rbg")
    for t in range(scale.steps):
        state = step(state, jax.random.fold_in(key, t))
        rows.append(jax.device_get(metrics(state)))
    k = max(int(scale.density * size), 1) if METHODS[method].thins else size
    sent, selected, overflow = (np.array([float(row[name]) for row in rows]) for name in ("sent", "selected", "overflow"))
    return Point(
        method=method,
        workers=n,
        build_up_first=float(sent[0] / k),
        build_up=float(sent.mean() / k),
        density=float(selected.mean() / size),
        density_error=float(np.abs(selected / k - 1).mean()),
        imbalance=float(np.mean([row["imbalance"] for row in rows])),
        overflow=float(overflow.sum() / max(selected.sum(), 1)),
        selected=float(np.mean([row["selected_per_worker"] for row in rows])),
        read={"partition": size / n, "nothing": 0.0}.get(_TAKEN.get(method, ""), float(size)),
        bytes=float(rows[-1]["bytes_sent"]),
        model_bytes=bytes_per_step(make, scale.density, jax.ShapeDtypeStruct((scale.model_size,), jnp.float32), n),
    )


def _make_step(tx: optax.GradientTransformation, size: int, n: int, correlation: float) -> Any:
    """(state of all workers, key) -> state."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, key: jax.Array) -> Any:
        common = jax.random.normal(key, (size,))
        own = jax.random.normal(jax.random.fold_in(key, 1), (n, size))
        gradients = correlation**0.5 * common[None] + (1 - correlation) ** 0.5 * own

        def one(residual: jax.Array, gradient: jax.Array) -> Any:
            _, new = tx.update(gradient, state._replace(residual=residual[None]))
            return new._replace(residual=None), new.residual[0]

        control, residual = jax.vmap(one, axis_name=_AXIS, out_axes=(None, 0))(state.residual, gradients)
        return control._replace(residual=residual)

    return step


def figures(scale: Scale, points: list[Point]) -> dict[str, Any]:
    """All there is to write to a file."""
    independent = {str(n): expected(scale.density, n) for n in scale.workers}
    return asdict(scale) | {"independent_build_up": independent, "points": [asdict(point) for point in points]}


def table(scale: Scale, points: list[Point]) -> Table:
    """One row a method and number of workers."""
    formula = ", ".join(f"{expected(scale.density, n):.3g}" for n in scale.workers)
    shown = Table(
        "method",
        "workers",
        "build-up,\nfirst step",
        "build-up,\nmean",
        "density\nerror",
        "imbalance",
        "selected,\na worker",
        "read to\nselect",
        "MB a step",
        title=f"{scale.size:,} elements, density {scale.density:g}, correlation {scale.correlation:g}, {scale.steps} steps",
        caption="Build-up: distinct indices sent / k. MB: received by a worker, padding included, "
        f"for a model of {scale.model_size:,} elements (not run: buffers have fixed sizes).\n"
        f"Independent workers that each select k build up to {formula}.",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for i, p in enumerate(points):
        last = i + 1 == len(points) or points[i + 1].method != p.method
        cells = (f"{p.build_up_first:.3f}", f"{p.build_up:.3f}", f"{p.density_error:.1%}", f"{p.imbalance:.2f}", f"{p.selected:,.0f}")
        shown.add_row(p.method, str(p.workers), *cells, f"{p.read:,.0f}", f"{p.model_bytes / 1e6:,.1f}", end_section=last)
    return shown


def plot(path: Path, scale: Scale, points: list[Point]) -> None:
    """Draws build-up, bytes, selected and read elements against the number of workers."""
    figure = Figure(figsize=(12, 8.6), layout="constrained")
    figure.suptitle(f"density {scale.density:g}, correlation {scale.correlation:g} between workers, {scale.size:,} elements")
    build_up, traffic, selected, read = figure.subplots(2, 2, sharex=True).flat
    _draw(build_up, points, "build_up_first", "build-up in the first step: distinct indices sent / k")
    formula = [expected(scale.density, n) for n in scale.workers]
    build_up.plot(scale.workers, formula, color="0.75", linewidth=6, zorder=0, label="independent top_k, formula")
    _draw(traffic, points, "model_bytes", f"MB received by a worker in a step, {scale.model_size:,} elements", unit=1e6)
    _draw(selected, points, "selected", "elements selected by a worker")
    _draw(read, points, "read", "elements that a worker reads to select")
    for panel in (selected, read):
        panel.set_xlabel("workers")
        panel.set_xticks(scale.workers, [str(n) for n in scale.workers])
        panel.minorticks_off()
    handles, labels = build_up.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)


def _draw(panel: Axes, points: list[Point], name: str, title: str, unit: float = 1) -> None:
    """One figure of all methods; where curves lie on each other, the later ones are thinner."""
    panel.set_title(title, loc="left", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    methods = list(dict.fromkeys(point.method for point in points))
    for i, method in enumerate(methods):
        mine = [point for point in points if point.method == method]
        style = look(method)
        panel.plot(
            [point.workers for point in mine],
            [getattr(point, name) / unit or np.nan for point in mine],  # nothing is not on a log axis
            color=style.color,
            linestyle=style.line,
            marker=style.marker,
            markersize=8 - 4 * i / max(len(methods) - 1, 1),
            linewidth=3.5 - 2.3 * i / max(len(methods) - 1, 1),
            label=method,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(alpha=0.25)
