"""How close the density comes to the one asked for, how even the partitions are, what overflows and what is padded: ExDyna and its rivals.

Workers are simulated on one device with `vmap`. Gradients are normal, correlated between workers, in layers of random sizes with scales
log-uniform over three decades, and drift by 30 % over time. The rivals are the published pair of rules (`--rule paper`), and MiCRO, which
does not balance (`--method micro`).

    python benchmarks/control.py [--method exdyna] [--workers 4 16] [--density 0.01 0.001] [--scale 1e-6 1e-3 1 1e3] [--json FILE]
"""

import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from cli import Parser, output_file
from exdyna_jax import exdyna, metrics, micro
from exdyna_jax._density import slots

LAYERS = 40
CORRELATION = 0.3
DRIFT = 0.3
FIRST, SETTLED, STEPS = 10, 20, 121  # overflow counts from FIRST on, density and imbalance from SETTLED on


def layer_scales(size: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The scale of each element: layers of random sizes, scales log-uniform in 1e-4 .. 1e-1."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, size), LAYERS - 1, replace=False))
    sizes = np.diff(np.concatenate([[0], cuts, [size]]))
    return np.repeat(10 ** rng.uniform(-4, -1, LAYERS), sizes).astype(np.float32)


def make_step(method: str, workers: int, density: float, scale: float, rule: str, layers: jax.Array) -> tuple[Any, Callable[..., Any]]:
    """The state of all workers, and a jitted `(state, t, key) -> state` that draws gradients and updates."""
    if method == "exdyna":
        tx = exdyna(density, "worker", num_workers=workers, threshold_rule=rule, balance=rule)
    else:
        tx = micro(density, "worker", num_workers=workers, threshold_rule=rule)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, t: jax.Array, key: jax.Array) -> Any:
        def draw(worker: jax.Array | int) -> jax.Array:
            return jax.random.normal(jax.random.fold_in(key, t * 1000 + worker), layers.shape)

        common = draw(999)

        def one(residual: jax.Array, worker: jax.Array) -> Any:
            gradient = (CORRELATION**0.5 * common + (1 - CORRELATION) ** 0.5 * draw(worker)) * layers * scale * (1 + DRIFT * jnp.sin(t / 7))
            _, new = tx.update(gradient, state._replace(residual=residual[None]))
            return new._replace(residual=None), new.residual[0]

        control, residual = jax.vmap(one, axis_name="worker", out_axes=(None, 0))(state.residual, jnp.arange(workers))
        return control._replace(residual=residual)

    return tx.init(layers), step


def measure(
    method: str, workers: int, density: float, scale: float, rule: str, size: int, seed: int, advance: Callable[[], None]
) -> dict[str, Any]:
    state, step = make_step(method, workers, density, scale, rule, jnp.asarray(layer_scales(size, seed)))
    key = jax.random.key(seed, impl="unsafe_rbg")
    buffer = workers * slots(density * size, workers, 1.5, size)
    rows = []
    for t in range(STEPS):
        state = step(state, jnp.int32(t), key)
        now = metrics(state)
        overflow = float(now["overflow"]) / max(float(now["selected"]), 1)
        rows.append([float(now["density"]) / density, float(now["imbalance"]), overflow, 1 - float(now["sent"]) / buffer])
        advance()
    obtained, imbalance, overflow, padding = np.array(rows).T
    return {
        "method": method,
        "workers": workers,
        "density": density,
        "scale": scale,
        "mean": float(obtained[SETTLED:].mean()),
        "error": float(np.abs(obtained[SETTLED:] - 1).mean()),
        "highest": float(obtained.max()),
        "imbalance": float(imbalance[SETTLED:].mean()),
        "overflow": float(overflow[FIRST:].max()),
        "overflow_mean": float(overflow[SETTLED:].mean()),
        # of the slots as they are, and were all buffers as long as the busiest worker's
        "padding": float(padding[SETTLED:].mean()),
        "padding_to_busiest": float((1 - 1 / np.maximum(imbalance[SETTLED:], 1)).mean()),
    }


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", choices=["exdyna", "micro"], nargs="+", default=["exdyna"])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--scale", type=float, nargs="+", default=[1e-6, 1e-3, 1.0, 1e3], help="of all gradients")
    parser.add_argument("--rule", choices=["proportional", "paper"], default="proportional", help="of threshold and balance")
    parser.add_argument("--size", type=int, default=1_600_000, help="elements")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    if args.size < LAYERS or min(args.workers) < 1:
        parser.error(f"size={args.size} must be at least {LAYERS}, workers={args.workers} positive")
    if not all(0 < density <= 1 for density in args.density):
        parser.error(f"density={args.density} must be in (0, 1]")
    cases = list(itertools.product(args.method, args.workers, args.density, args.scale))
    figures = []
    with Progress() as progress:
        task = progress.add_task("steps", total=len(cases) * STEPS)
        for method, workers, density, scale in cases:
            figures.append(measure(method, workers, density, scale, args.rule, args.size, args.seed, partial(progress.advance, task)))
            if args.json:
                args.json.write_text(json.dumps({"rule": args.rule, "size": args.size, "seed": args.seed, "figures": figures}, indent=2))
    headings = "method", "workers", "density", "scale", "mean / asked", "mean abs. error", "highest", "imbalance"
    table = Table(*headings, "overflow,\nhighest", "overflow,\nmean", "padding", "padding,\nto the busiest")
    for row in figures:
        case = (row["method"], f"{row['workers']}", f"{row['density']:g}", f"{row['scale']:g}", f"{row['mean']:.3f}")
        shares = (f"{row[name]:.2%}" for name in ("overflow", "overflow_mean", "padding", "padding_to_busiest"))
        table.add_row(*case, f"{row['error']:.1%}", f"{row['highest']:.2f}", f"{row['imbalance']:.3f}", *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
