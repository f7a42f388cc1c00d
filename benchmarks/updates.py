"""How long an update takes, against the floor that any error feedback needs: what `step.py` and `tree.py` measure.

The floor adds the gradient to the residual in place and writes an update of zeros: it reads two arrays of the gradient's size and writes
two. Everything is measured in one process on virtual CPU devices, in turns, buffers donated, gradients changing from step to step.
"""

import ctypes
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import exdyna_jax
from cli import Parser, output_file

AXIS = "data"
_TURNS, _UNCOUNTED = 3, 3
Shapes = Sequence[tuple[int, ...]]


class Measured(NamedTuple):
    """Of one way to update. Memory and copies are those of one device."""

    ms: float
    floors: float  # ms in units of the floor's
    compile_s: float
    temporaries: float  # bytes, as a share of the residual's
    copies: int  # of arrays of at least 65,536 elements, in the compiled program


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed: otherwise an update's fresh pages cost more than the update. Nothing on other systems.

    All threads must share one arena: each has a heap of its own otherwise, whose pages go back to the system as soon as nothing is left in
    it, so that of four new updates two or three would be written to fresh pages in each step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-8, 1)  # M_ARENA_MAX
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def measure(shapes: Shapes, density: float, workers: int, repeats: int, tell: Callable[[str], None]) -> dict[str, Measured]:
    """The ways to update a tree of float32 leaves, by name; the first is the floor."""
    keep_freed_memory()
    mesh = jax.make_mesh((workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers])
    gradients = [_gradients(shapes, mesh, seed) for seed in range(3)]
    ways = {
        "floor: e + g in place, zeros": None,
        "exdyna": exdyna_jax.exdyna(density, AXIS, num_workers=workers),
        'exdyna, nonfinite="propagate"': exdyna_jax.exdyna(density, AXIS, num_workers=workers, nonfinite="propagate"),
        'exdyna, wire_dtype="bfloat16"': exdyna_jax.exdyna(density, AXIS, num_workers=workers, wire_dtype="bfloat16"),
        "top_k": exdyna_jax.top_k(density, AXIS, num_workers=workers),
        "dense": exdyna_jax.dense(AXIS, num_workers=workers),
    }
    size = sum(4 * int(np.prod(shape)) for shape in shapes)
    running: dict[str, Running] = {}
    for name, tx in ways.items():
        tell(f"compiling {name}")
        running[name] = _floor(shapes, gradients[0], mesh) if tx is None else _updating(tx, shapes, gradients[0], mesh)
    measured: dict[str, Measured] = {}
    for name, ms in _median_ms(running, gradients, repeats, tell).items():
        program = running[name].program
        floor = ms if not measured else next(iter(measured.values())).ms
        temporaries = program.memory_analysis().temp_size_in_bytes / size
        measured[name] = Measured(ms, ms / floor, running[name].compile_s, temporaries, large_copies(program))
    return measured


def _gradients(shapes: Shapes, mesh: Mesh, seed: int) -> list[jax.Array]:
    def draw(key: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(jax.random.fold_in(key, i), (mesh.size, *shape)) for i, shape in enumerate(shapes)]

    return jax.jit(draw, out_shardings=NamedSharding(mesh, P(AXIS)))(jax.random.key(seed))


class Running(NamedTuple):
    """A way to update, and where it stands."""

    state: Any
    program: Any  # (state, gradient) -> (state, update)
    compile_s: float


def _floor(shapes: Shapes, gradient: Any, mesh: Mesh) -> Running:
    def update(residual: Any, gradient: Any) -> Any:
        # zeros that are known at run time only: of equal constants the compiler keeps one, and copies it for each use
        zeros = [jnp.broadcast_to(0 * g.reshape(-1)[0], (1, *shape)) for g, shape in zip(gradient, shapes, strict=True)]
        return [e + g for e, g in zip(residual, gradient, strict=True)], zeros

    sharded = jax.shard_map(update, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    return _compiled(sharded, jax.tree.map(jnp.copy, gradient), gradient)


def _updating(tx: Any, shapes: Shapes, gradient: Any, mesh: Mesh) -> Running:
    def update(state: Any, gradient: Any) -> Any:
        updates, state = tx.update([g[0] for g in gradient], state)
        return state, updates

    def init() -> Any:
        return tx.init([jnp.zeros(shape) for shape in shapes])

    specs = exdyna_jax.state_specs(jax.eval_shape(init), AXIS)
    state = jax.jit(init, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))()
    sharded = jax.shard_map(update, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=(specs, P()))
    return _compiled(sharded, state, gradient)


def _compiled(function: Any, state: Any, gradient: Any) -> Running:
    """The program that replaces its state; tracing counts as compiling."""
    began = time.perf_counter()
    program = jax.jit(function, donate_argnums=0).lower(state, gradient).compile()
    return Running(state, program, time.perf_counter() - began)


def _median_ms(running: dict[str, Running], gradients: Sequence[Any], repeats: int, tell: Callable[[str], None]) -> dict[str, float]:
    """Each takes some steps in a row, in turns and in an order drawn anew each time, so that a machine that slows down slows all of them.

    The first steps of a row don't count: they find the caches and the allocator as another way left them, and settle the threshold.
    """
    states = {name: way.state for name, way in running.items()}
    times: dict[str, list[float]] = {name: [] for name in running}
    order = random.Random(0)
    for turn in range(_TURNS):
        tell(f"turn {turn + 1} of {_TURNS}")
        for name in order.sample(list(running), len(running)):
            for step in range(-_UNCOUNTED, -(-repeats // _TURNS)):
                began = time.perf_counter()
                states[name], update = running[name].program(states[name], gradients[step % len(gradients)])
                jax.block_until_ready((states[name], update))
                if step >= 0:
                    times[name].append(time.perf_counter() - began)
                del update
    return {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}


def large_copies(program: Any, least: int = 2**16) -> int:
    """Copies of arrays of at least so many elements in a compiled program."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", program.as_text())
    return sum(int(np.prod([int(extent) for extent in dims.split(",") if extent])) >= least for dims in found)


def report(title: str, measured: dict[str, Measured], console: Console) -> None:
    table = Table("", "ms", "x floor", "compile, s", "temporaries, % of the residual", "large copies", title=title)
    for name, row in measured.items():
        figures = (f"{row.ms:.1f}", f"{row.floors:.2f}", f"{row.compile_s:.1f}", f"{row.temporaries * 100:.1f}", str(row.copies))
        table.add_row(name, *figures)
    console.print(table)


def run(doc: str | None, trees: dict[str, Callable[[], Shapes]]) -> None:
    """The command line of a benchmark that measures one of some trees."""
    parser = Parser(description=(doc or "").splitlines()[0])
    first = next(iter(trees))
    if len(trees) > 1:
        parser.add_argument("--tree", choices=trees, default=first)
    parser.add_argument("--density", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=4, help="each on a virtual CPU device")
    parser.add_argument("--repeats", type=int, default=15, help="steps of which the median counts")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    if args.workers < 1 or not 0 < args.density <= 1 or args.repeats < 1:
        parser.error(f"workers={args.workers} and repeats={args.repeats} must be positive, density={args.density} in (0, 1]")
    tree = getattr(args, "tree", first)
    jax.config.update("jax_num_cpu_devices", args.workers)
    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.status("") as status:
        measured = measure(trees[tree](), args.density, args.workers, args.repeats, status.update)
    report(f"{tree}, {args.workers} workers, density {args.density}", measured, console)
    if args.json:
        figures = {name: row._asdict() for name, row in measured.items()}
        args.json.write_text(json.dumps({"tree": tree, "workers": args.workers, "density": args.density, "measured": figures}, indent=2))
