"""Draws the pictures of the documentation: one step of each method, and ExDyna's from the gradient to the update, as the library does it.

Four workers are simulated with `vmap`; all methods get the same gradients. What a picture shows is also in it as text, so that the tests
can compare it with the library.

    python docs/pictures.py [--directory docs/pictures]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import exdyna_jax
from exdyna_jax import _exchange
from exdyna_jax._wire import pack_indices

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from palette import look

WORKERS = 4
METHODS = ("exdyna", "micro", "deft", "top_k", "gtop_k", "clt_k", "hard_threshold", "sidco", "dense")
DENSITY = 0.06
STEP = (
    8  # the step that is drawn, from 0: by then residuals have grown and partitions have moved; worker 0 leads, and has the first partition
)
LEAVES = {"a": 64, "b": 128, "c": 192, "d": 96, "e": 32}  # whole words, so that positions are elements
SCALES = {"a": 0.4, "b": 1.0, "c": 0.5, "d": 2.0, "e": 0.7}
SIZE = sum(LEAVES.values())
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of the workers, where they are told apart
GREY, INK = "#D0D0D0", "#333333"


class Seen(NamedTuple):
    """One step, element by element."""

    accumulator: np.ndarray  # [n, N], gradient + residual
    chosen: tuple[tuple[int, ...], ...]  # by each worker: the elements that it selected
    looked: tuple[tuple[tuple[int, int], ...], ...]  # by each worker: the stretches among which it selected
    threshold: float | None
    update: np.ndarray  # [N]
    residual: np.ndarray  # [n, N], after the step


def gradients(step: int) -> dict[str, jax.Array]:
    """Half of it common to all workers; heavy tails, as gradients have them."""
    key = jax.random.fold_in(jax.random.key(4), step)
    keys = dict(zip(LEAVES, jax.random.split(key, len(LEAVES)), strict=True))

    def draw(name: str) -> jax.Array:
        common, own = jax.random.split(keys[name])
        size = LEAVES[name]
        return 0.05 * SCALES[name] * (jax.random.laplace(common, (1, size)) + jax.random.laplace(own, (WORKERS, size)))

    return {name: draw(name) for name in LEAVES}


def observe(method: str) -> Seen:
    """What a method does in the step that is drawn."""
    build = getattr(exdyna_jax, method)
    tx = build("data") if method == "dense" else build(DENSITY, "data")
    told: dict[int, np.ndarray] = {}

    def tell(indices: jax.Array, span: int) -> jax.Array:
        """The one place through which what a worker selected goes on its way to the others."""
        jax.debug.callback(lambda rank, mine: told.update({int(rank): np.asarray(mine)}), lax.axis_index("data"), indices)
        return pack_indices(indices, span)

    with mock.patch.object(_exchange, "pack_indices", tell):
        update = jax.jit(jax.vmap(tx.update, axis_name="data"))
        params = {name: jnp.zeros(size) for name, size in LEAVES.items()}
        state = jax.vmap(tx.init, axis_name="data", in_axes=None, axis_size=WORKERS)(params)
        for step in range(STEP + 1):
            g = gradients(step)
            accumulator = flat(g) + flat(state.residual)
            u, state = jax.block_until_ready(update(g, state))
        jax.effects_barrier()

    report = jax.tree.map(lambda rows: np.asarray(rows[0]), exdyna_jax.metrics(state))
    sent = flat(u)[0].nonzero()[0]
    chosen: list[np.ndarray]
    if method == "dense":
        chosen = [np.arange(SIZE)] * WORKERS
    elif method == "clt_k":  # it tells the leader's choice only, which is what is sent
        chosen = [sent if count else sent[:0] for count in report["selected_per_worker"]]
    elif method == "gtop_k":  # workers merge their lists in pairs; a list is what top-k selects
        top = jax.jit(exdyna_jax.top_k(DENSITY, None).update)
        alone = exdyna_jax.top_k(DENSITY, None).init(jnp.zeros(SIZE))
        chosen = [np.asarray(top(jnp.asarray(a), alone)[0]).nonzero()[0] for a in accumulator]
    else:
        chosen = [told[rank][told[rank] < SIZE] for rank in range(WORKERS)]
    elements = tuple(tuple(map(int, mine)) for mine in chosen)
    return Seen(
        accumulator=accumulator,
        chosen=elements,
        looked=tuple(_looked(method, rank, elements[rank], report) for rank in range(WORKERS)),
        threshold=float(report["threshold"]) if "threshold" in report else None,
        update=flat(u)[0],
        residual=flat(state.residual),
    )


def _looked(method: str, rank: int, mine: tuple[int, ...], report: Any) -> tuple[tuple[int, int], ...]:
    """The stretches among which a worker selects. The step is a multiple of n, so that worker r has partition r."""
    if method in ("exdyna", "micro"):
        blocks = report["blocks"] if method == "exdyna" else np.ones(WORKERS)
        ends = np.cumsum(blocks) * SIZE // blocks.sum()
        return ((int(ends[rank - 1]) if rank else 0, int(ends[rank])),)
    if method == "deft":  # at least one element of each of its layers
        edges = np.asarray(layer_edges())
        layers = sorted(set(np.searchsorted(edges, mine, side="right")))
        return tuple((int(edges[i - 1]), int(edges[i])) for i in layers)
    if method == "clt_k" and not mine:
        return ()
    return ((0, SIZE),)


def layer_edges() -> list[int]:
    """DEFT's layers: leaves, of which those larger than N / n are cut into n."""
    edges = [0]
    for leaf in LEAVES.values():
        pieces = WORKERS if leaf * WORKERS > SIZE else 1
        edges += [edges[-1] + leaf * (i + 1) // pieces for i in range(pieces)]
    return edges


def flat(tree: Any) -> np.ndarray:
    """Leaves [n, 1, m] or [n, m] -> [n, N]."""
    return np.concatenate([np.asarray(leaf).reshape(WORKERS, -1) for leaf in jax.tree.leaves(tree)], axis=1)


def described(seen: Seen) -> str:
    """The text in a picture: what each worker selected, as JSON."""
    return json.dumps(seen.chosen)


def draw_method(method: str, seen: Seen) -> Figure:
    """A lane for each worker: all it holds, grey; where it looks, tinted; what it selects, in the method's colour. Below, the update."""
    figure, axes = plt.subplots(WORKERS + 1, 1, figsize=(8, 2.5), sharex=True, gridspec_kw={"hspace": 0.12})
    shown = look(method).color
    for rank, axis in enumerate(axes[:WORKERS]):
        worker_lane(axis, seen, rank, shown)
    bars(axes[-1], np.abs(seen.update), np.flatnonzero(seen.update), shown)
    lane(axes[-1], "update", f"{np.count_nonzero(seen.update)} of {seen.update.size} sent", shown)
    for axis in axes:
        for edge in np.cumsum(list(LEAVES.values()))[:-1]:
            axis.axvline(edge, color=INK, linewidth=0.5, linestyle=":")
    figure.subplots_adjust(left=0.11, right=0.87, top=0.99, bottom=0.02)
    return figure


def draw_step(seen: Seen) -> Figure:
    """ExDyna's step from top to bottom. Bands are what crosses the network."""
    ratios = [1.0, *[1] * WORKERS, 0.9, 1, 0.9, *[1] * WORKERS, 1.0, 1, 1.0, *[1] * WORKERS, 1.0]
    figure, axes = plt.subplots(len(ratios), 1, figsize=(8, 9.2), sharex=True, gridspec_kw={"hspace": 0.12, "height_ratios": ratios})
    rows = iter(axes)
    indices = seen.update.nonzero()[0]
    owner = {i: rank for rank, mine in enumerate(seen.chosen) for i in mine}

    words(next(rows), "1  Each worker adds the gradient to its residual, and selects what reaches the threshold (dashed) in its partition.")
    for rank in range(WORKERS):
        axis = next(rows)
        worker_lane(axis, seen, rank, COLORS[rank])
        axis.axhline(seen.threshold, color=INK, linewidth=0.7, linestyle="--")
    words(next(rows), "all-gather: indices, 17 bits each, and how many they are", band=True)
    axis = next(rows)
    for i in indices:
        axis.axvline(i + 0.5, color=COLORS[owner[int(i)]], linewidth=1.6)
    lane(axis, "indices", f"{indices.size} of {SIZE}\nnone twice")
    words(next(rows), "2  Now every worker knows all indices, and takes its own values there, selected by itself or not.")
    for rank in range(WORKERS):
        axis = next(rows)
        values = np.where(seen.update != 0, np.abs(seen.accumulator[rank]), 0)
        bars(axis, values, indices, COLORS[rank], np.abs(seen.accumulator).max())
        lane(axis, f"worker {rank}", f"{indices.size} values")
    words(next(rows), "all-reduce: these values, 32 bits each (or 16)", band=True)
    axis = next(rows)
    bars(axis, np.abs(seen.update), indices, look("exdyna").color)
    lane(axis, "update", "the mean", look("exdyna").color)
    words(next(rows), "3  The update is the same on all workers. What was not sent stays, on each worker by itself, as its next residual:")
    for rank in range(WORKERS):
        axis = next(rows)
        bars(axis, np.abs(seen.residual[rank]), (), GREY, np.abs(seen.accumulator).max())
        lane(axis, f"residual {rank}", f"{np.count_nonzero(seen.residual[rank])} waiting")
    words(next(rows), "4  From the counts follow, on all workers alike, the threshold and the partitions of the next step.")
    figure.subplots_adjust(left=0.11, right=0.87, top=0.995, bottom=0.005)
    return figure


def worker_lane(axis: Axes, seen: Seen, rank: int, color: str) -> None:
    """What a worker holds, where it looks, what it selects."""
    for start, stop in seen.looked[rank]:
        axis.axvspan(start, stop, color=color, alpha=0.13, linewidth=0)
    bars(axis, np.abs(seen.accumulator[rank]), seen.chosen[rank], color, np.abs(seen.accumulator).max())
    lane(axis, f"worker {rank}", f"{len(seen.chosen[rank])} selected")


def words(axis: Axes, text: str, band: bool = False) -> None:
    """A row of text; on a dark band if it says what is sent."""
    axis.set_axis_off()
    if band:
        axis.axhspan(0.1, 0.9, color=INK)
    axis.set_ylim(0, 1)
    x, align, color = (0.5, "center", "white") if band else (-0.11, "left", INK)
    axis.text(x, 0.48, text, transform=axis.transAxes, ha=align, va="center", fontsize=9.5, color=color)


def bars(axis: Axes, heights: np.ndarray, marked: Any, color: str, top: float | None = None) -> None:
    """All elements grey, the marked ones in colour and a little wider, so that none is missed."""
    axis.set_ylim(0, top or heights.max())
    at = np.arange(heights.size) + 0.5
    axis.vlines(at, 0, heights, color=GREY, linewidth=0.6, rasterized=True)
    marked = list(marked)
    axis.vlines(at[marked], 0, heights[marked], color=color, linewidth=1.6, rasterized=len(marked) > 100)
    axis.set_xlim(0, heights.size)


def lane(axis: Axes, left: str, right: str, color: str = INK) -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    for side in ("top", "left", "right"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(INK)
    axis.text(-0.01, 0.5, left, transform=axis.transAxes, ha="right", va="center", fontsize=9, color=color)
    axis.text(1.01, 0.5, right, transform=axis.transAxes, ha="left", va="center", fontsize=8, color=color)


def save(figure: Figure, path: Path, seen: Seen) -> None:
    figure.savefig(path, dpi=200, metadata={"Date": None, "Creator": None, "Description": described(seen)})
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent / "pictures")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    plt.rcParams |= {"svg.hashsalt": "exdyna_jax", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    for name in METHODS:
        one = observe(name)
        save(draw_method(name, one), directory / f"{name}.svg", one)
        if name == "exdyna":
            save(draw_step(one), directory / "step.svg", one)
        print(directory / f"{name}.svg", flush=True)
