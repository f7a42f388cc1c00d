"""Selection on one device: marks and compaction against its rivals, and the share of one worker of several.

Every row is a ratio within one run. The rivals are `lax.top_k`, `lax.approx_max_k` and `jnp.nonzero(size=)`; the floor is one pass over the
data, `jnp.sum(jnp.abs(x))`. The second table times all that one worker of n does until its indices are ready to be sent, alone.

    python benchmarks/selection.py [--size 25600000] [--density 0.001] [--workers 1 2 4 8] [--repeats 7] [--json FILE]
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from alone import selection_ms
from cli import Parser, output_file
from exdyna_jax._compact import compact, to_words
from train import METHODS

SHARED = ("exdyna", "micro", "deft", "top_k")  # methods of the second table


def medians_ms(ways: dict[str, Callable[..., Any]], *args: Any, repeats: int) -> dict[str, float]:
    """Median wall time of each in milliseconds. In turns, so that a slow moment meets all alike, and each right after a call of its own."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            jax.block_until_ready(way(*args))
            start = time.perf_counter()
            jax.block_until_ready(way(*args))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) * 1e3 for name, each in times.items()}


def measure(size: int, density: float, repeats: int) -> dict[str, float]:
    """Milliseconds per way of finding the `density * size` largest magnitudes (or, for the floor, of reading all)."""
    x = jax.random.normal(jax.random.key(0), (size,))
    k = int(density * size)
    capacity = math.ceil(1.5 * k + 6 * math.sqrt(k))
    threshold = jnp.float32(jax.scipy.stats.norm.isf(density / 2))
    ways = {
        "floor: jnp.sum(jnp.abs(x))": lambda x, t: jnp.sum(jnp.abs(x)),
        "exdyna_jax: words and count tree": lambda x, t: compact(to_words(jnp.abs(x) >= t), capacity, size, jnp.int32(0)),
        "lax.top_k": lambda x, t: lax.top_k(jnp.abs(x), k)[1],
        "lax.approx_max_k": lambda x, t: lax.approx_max_k(jnp.abs(x), k)[1],
        "jnp.nonzero(size=)": lambda x, t: jnp.nonzero(jnp.abs(x) >= t, size=capacity, fill_value=size)[0],
    }
    return medians_ms({name: jax.jit(way) for name, way in ways.items()}, x, threshold, repeats=repeats)


def measure_share(method: str, size: int, density: float, workers: list[int], repeats: int) -> dict[int, float]:
    """Milliseconds until one worker of n has selected, for each n."""
    params = jax.ShapeDtypeStruct((size,), jnp.float32)
    return {n: selection_ms(method, METHODS[method].make, density, params, n, repeats) for n in workers}


def report_share(figures: dict[str, dict[int, float]], console: Console) -> None:
    workers = list(next(iter(figures.values())))
    table = Table("ms, one worker of", *(str(n) for n in workers), *(f"{n} / {workers[0]}" for n in workers[1:]))
    for method, row in figures.items():
        times = list(row.values())
        table.add_row(method, *(f"{ms:.2f}" for ms in times), *(f"{ms / times[0]:.3f}" for ms in times[1:]))
    console.print(table)


def report(figures: dict[str, float], console: Console) -> None:
    floor, ours = list(figures.values())[:2]
    table = Table("", "ms", "x floor", "x ours")
    for name, ms in figures.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / floor:.2f}", f"{ms / ours:.2f}")
    console.print(table)


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=25_600_000, help="elements")
    parser.add_argument("--density", type=float, default=1e-3, help="share of them to select")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="of which one selects, in the second table")
    parser.add_argument("--repeats", type=int, default=7, help="calls of which the median counts")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    if min(args.size, args.repeats, *args.workers) < 1 or not 0 < args.density < 1:
        parser.error(f"size={args.size}, repeats={args.repeats}, workers={args.workers} must be positive, density={args.density} in (0, 1)")
    console = Console()
    figures = measure(args.size, args.density, args.repeats)
    report(figures, console)
    shares = {method: measure_share(method, args.size, args.density, args.workers, args.repeats) for method in SHARED}
    report_share(shares, console)
    if args.json:
        asked = {"size": args.size, "density": args.density, "device": str(jax.devices()[0])}
        args.json.write_text(json.dumps(asked | {"ms": figures, "share_ms": shares}, indent=2))


if __name__ == "__main__":
    main()
