"""How fast workers agree when they only mix: crossover with 1, 6 and 18 segments, SGP, and a ring, from random vectors without training.

Workers are simulated on one device with `vmap`. Distances are from the mean that the vectors had at the start, which all must come to,
with unequal shares too: that is what the push-sum weights are for. The contraction is the distance after a mixing over that before, as a
geometric mean over the mixings, until the vectors agree to rounding (below 1e-5 of where they started).

    python benchmarks/consensus.py [--workers 8 16 64] [--steps 40] [--json FILE] [--plot FILE]
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from cli import Parser, output_file, picture_file
from exdyna_jax import crossover, sgp

AGREED = 1e-5


def methods(n: int) -> dict[str, Any]:
    onward = [[(i + 1) % n for i in range(n)]]
    named = {f"crossover, {s} segment{'s' if s > 1 else ''}": crossover("worker", segments=s) for s in (1, 6, 18)}
    shares = tuple(0.3 + 0.4 * i / (n - 1) for i in range(n))
    return named | {
        "sgp": sgp("worker"),
        "sgp, shares of 0.3 to 0.7": sgp("worker", keep=shares),
        "ring": crossover("worker", segments=1, pool=onward),
    }


def distances(tx: Any, n: int, size: int, steps: int, seed: int) -> list[float]:
    """The distance before each mixing and after the last, relative to the first."""

    def mix(x: jax.Array, state: Any) -> Any:
        update, state = tx.update(jnp.zeros_like(x), state, x)
        return x + update, state

    def distance(x: jax.Array, mean: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.mean(jnp.sum((x - mean[None]) ** 2, axis=1)))

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=0)

        def step(carry: Any, _: None) -> Any:
            return jax.vmap(mix, axis_name="worker")(*carry), distance(carry[0], mean)

        (last, _), before = jax.lax.scan(step, (x, jax.vmap(tx.init, axis_name="worker")(x)), length=steps)
        return jnp.append(before, distance(last, mean))

    found = run(jax.random.normal(jax.random.key(seed), (n, size)))
    return [float(d) for d in found / found[0]]


def contraction(row: list[float]) -> float:
    """Geometric mean over the mixings after which the workers still differ; 0 if the first one made them agree."""
    last = max(t for t, d in enumerate(row) if d >= AGREED)
    return float(row[last] ** (1 / last)) if last else 0.0


def draw(path: Path, figures: list[dict[str, Any]], workers: list[int]) -> None:
    figure, panels = plt.subplots(1, len(workers), figsize=(4 * len(workers), 3.5), sharey=True, squeeze=False, layout="constrained")
    for panel, n in zip(panels[0], workers, strict=True):
        for row in (row for row in figures if row["workers"] == n):
            panel.semilogy([max(d, AGREED / 10) for d in row["distance"]], label=row["method"])
        panel.set(title=f"{n} workers", xlabel="mixings", ylim=(AGREED / 10, 2))
    panels[0][0].set_ylabel("distance to the first mean")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--steps", type=int, default=40, help="mixings")
    parser.add_argument("--size", type=int, default=1800, help="elements of a worker's vector")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw the distances into this file")
    args = parser.parse_args()
    if min(args.workers) < 2 or args.steps < 1 or args.size < 18:
        parser.error(f"workers={args.workers} must be at least 2, steps={args.steps} positive, size={args.size} at least 18")
    cases = [(n, name, tx) for n in args.workers for name, tx in methods(n).items()]
    figures = []
    for n, name, tx in track(cases, "mixing"):
        row = distances(tx, n, args.size, args.steps, args.seed)
        exact = next((t for t, d in enumerate(row) if d < AGREED), None)
        figures.append({"workers": n, "method": name, "contraction": contraction(row), "agreed_after": exact, "distance": row})
        if args.json:
            args.json.write_text(json.dumps({"size": args.size, "seed": args.seed, "figures": figures}, indent=2))
    table = Table("workers", "method", "contraction", "expected", "agreed after", caption="expected of pairs: sqrt((n-2) / (2 (n-1)))")
    for fig in figures:
        n = fig["workers"]
        expected = f"{((n - 2) / (2 * (n - 1))) ** 0.5:.3f}" if fig["method"].startswith("crossover") else ""
        table.add_row(f"{n}", fig["method"], f"{fig['contraction']:.3f}", expected, f"{fig['agreed_after'] or '-'}")
    Console().print(table)
    if args.plot:
        draw(args.plot, figures, args.workers)


if __name__ == "__main__":
    main()
