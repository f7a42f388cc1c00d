"""Selection on one device: marks and compaction against its rivals, and the share of one worker of several.

Every row is a ratio within one run. The rivals are `lax.top_k`, `lax.approx_max_k` and `jnp.nonzero(size=)`; the floor is one pass over the
data, `jnp.sum(jnp.abs(x))`.

    python benchmarks/selection.py [--size 25600000] [--density 0.001] [--repeats 7] [--json FILE]
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

from exdyna_jax._compact import compact, to_words


def median_ms(function: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Median wall time in milliseconds, after one call that compiles."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


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
    return {name: median_ms(jax.jit(way), x, threshold, repeats=repeats) for name, way in ways.items()}


def report(figures: dict[str, float], console: Console) -> None:
    floor, ours = list(figures.values())[:2]
    table = Table("", "ms", "x floor", "x ours")
    for name, ms in figures.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / floor:.2f}", f"{ms / ours:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=25_600_000, help="elements")
    parser.add_argument("--density", type=float, default=1e-3, help="share of them to select")
    parser.add_argument("--repeats", type=int, default=7, help="calls of which the median counts")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.size < 1 or not 0 < args.density <= 1 or args.repeats < 1:
        parser.error(f"size={args.size} and repeats={args.repeats} must be positive, density={args.density} in (0, 1]")
    figures = measure(args.size, args.density, args.repeats)
    report(figures, Console())
    if args.json:
        args.json.write_text(
            json.dumps({"size": args.size, "density": args.density, "device": str(jax.devices()[0]), "ms": figures}, indent=2)
        )


if __name__ == "__main__":
    main()
