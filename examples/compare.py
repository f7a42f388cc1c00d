"""Trains one task with several methods, side by side, or shows how they scale with the number of workers.

    python examples/compare.py --methods exdyna,top_k,dense --seeds 0,1,2 --plot compared.png
    python examples/compare.py --methods crossover,sgp,dense --workers 32 --simulate
    python examples/compare.py --scale --plot scale.png

With --simulate all workers share one device. With --scale, 2, 4, 8, ... workers are simulated on one device, on synthetic gradients.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import scale
import side_by_side
from alone import selection_ms
from cli import Parser, output_file, picture_file
from report import Result, progress, write_json
from train import METHODS, OPTIMIZERS, Settings, add_task_flags, provide_devices, settings_of, train, train_simulated
from workloads import load_task

_SCALED = ("exdyna", "micro", "deft", "top_k", "gtop_k", "clt_k")  # a fixed or fitted threshold says little on synthetic gradients
_DEFAULT = [name for name, method in METHODS.items() if not method.gossips]
_RUN_ONLY = ("task", "data", "model", "preset", "workers", "seeds", "batch", "optimizer", "learning_rate", "momentum", "simulate")
_SCALE_ONLY = ("most", "size", "correlation", "model_size")


def _listed(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if len(set(items)) < len(items):
        raise argparse.ArgumentTypeError(f"{text!r} names something twice")
    return items


def _methods(text: str) -> list[str]:
    names = _listed(text)
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(METHODS)}")
    return names


def _seeds(text: str) -> list[int]:
    try:
        return [int(item) for item in _listed(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 0,1,2") from error


def compare(
    settings: list[Settings], seeds: list[int], console: Console, train: Callable[..., Result] = train
) -> list[side_by_side.Compared]:
    """Trains each of the settings with each seed. A run that diverges is kept as it is."""
    compared = []
    runs = len(settings) * len(seeds)
    for i, each in enumerate(settings):
        results = []
        for j, seed in enumerate(seeds):
            console.print(f"run {i * len(seeds) + j + 1}/{runs}: {each.method}, seed {seed}", highlight=False)
            with progress(console) as show:
                results.append(train(replace(each, seed=seed), show))
        compared.append(side_by_side.Compared(each.method, results, _time_alone(each)))
        for wrong in compared[-1].diverged:
            console.print(f"{each.method} diverged, {wrong}", style="red", highlight=False)
    return compared


def _time_alone(settings: Settings) -> float | None:
    method = METHODS[settings.method]
    if not method.thins or settings.density == 1:
        return None
    params = jax.eval_shape(load_task(settings.task, settings.data, settings.model).init, jax.random.key(0))[0]
    return selection_ms(settings.method, method.make, settings.density, params, settings.workers)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A bar on a terminal, a line a step elsewhere: what is called before, and after, each of so many steps."""
    if not console.is_terminal:
        yield partial(console.print, highlight=False), lambda: None
        return
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, description=what), lambda: bar.advance(task)


def main() -> None:
    parser = Parser(description="Compare methods: on one task, or, with --scale, on ever more simulated workers.", allow_abbrev=False)
    parser.add_argument("--methods", type=_methods, help=f"separated by commas, of {', '.join(METHODS)}; default: all but gossip")
    parser.add_argument("--density", type=float, help=f"share of the gradient to send, in (0, 1]; default: {Settings.density}")
    parser.add_argument("--steps", type=int, help=f"default: the task's own; {scale.Scale.steps} with --scale")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw them here")
    runs = parser.add_argument_group("training")
    add_task_flags(runs)
    runs.add_argument("--seeds", type=_seeds, help="separated by commas; default: 0")
    runs.add_argument("--workers", type=int, help=f"each on a device of its own; default: {Settings.workers}")
    runs.add_argument("--batch", type=int, help="samples per worker and step; default: the task's own")
    runs.add_argument("--optimizer", choices=OPTIMIZERS, help=f"default: {Settings.optimizer}")
    runs.add_argument("--learning-rate", type=float, help="at its peak; default: the task's own for the optimizer")
    runs.add_argument("--momentum", type=float, help="default: the task's own for the optimizer")
    runs.add_argument("--simulate", action="store_true", default=None, help="all workers on one device instead")
    simulated = parser.add_argument_group("scaling")
    simulated.add_argument("--scale", action="store_true", help="simulate 2, 4, 8, ... workers on synthetic gradients")
    simulated.add_argument("--most", type=int, help=f"workers; default: {scale.Scale.most}")
    simulated.add_argument("--size", type=int, help=f"elements of the gradient; default: {scale.Scale.size:,}")
    simulated.add_argument("--correlation", type=float, help="between workers, in [0, 1]; default: 0")
    simulated.add_argument(
        "--model-size", type=int, help=f"elements of the model whose traffic is told; default: {scale.Scale.model_size:,}"
    )
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    json_file, plot_file, simulating = given.pop("json", None), given.pop("plot", None), given.pop("scale")
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file has room for the whole table
    with parser.complaining():
        for name in _RUN_ONLY if simulating else _SCALE_ONLY:
            if name in given:
                raise ValueError(f"--{name.replace('_', '-')} {'does not go' if simulating else 'only goes'} with --scale")
        if simulating:
            asked = scale.Scale(tuple(given.pop("methods", _SCALED)), **given)
            with _bar(console, len(asked.methods) * len(asked.workers)) as (tell, advance):

                def keep(points: list[scale.Point]) -> None:
                    advance()
                    if json_file:  # as they come: it takes minutes
                        write_json(json_file, scale.figures(asked, points))

                points = scale.simulate(asked, tell, keep)
            console.print(scale.table(asked, points))
            figures, draw = scale.figures(asked, points), partial(scale.plot, scale=asked, points=points)
        else:
            methods, seeds = given.pop("methods", _DEFAULT), given.pop("seeds", [0])
            one_device = given.pop("simulate", False)
            settings = [settings_of({"method": method, **given}) for method in methods]
            for seed in seeds:
                replace(settings[0], seed=seed)  # complains of a bad one before the first run
            provide_devices(1 if one_device else settings[0].workers)
            compared = compare(settings, seeds, console, train_simulated if one_device else train)
            console.print(side_by_side.table(compared))
            figures, draw = side_by_side.figures(compared), partial(side_by_side.plot, everything=compared)
        if json_file:
            write_json(json_file, figures)
        if plot_file:
            draw(plot_file)


if __name__ == "__main__":
    main()
