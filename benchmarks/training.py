"""Seconds of training to a fixed loss over slow links: exdyna against the dense mean.

Each of four processes runs examples/multihost.py in a network namespace of its own, at the end of a link that is limited in both
directions (`network.py`); the model is a perceptron of 2.1e6 parameters on the digits. Seconds count from the first step on, and the loss
is that of the batches, averaged over ten steps. Needs root. A full run takes about 18 minutes on a machine with two cores.

    sudo python benchmarks/training.py [--rate 100Mbit] [--methods dense exdyna] [--density 0.01] [--seeds 0 1 2] [--steps 200]
                                       [--loss 0.25] [--json FILE] [--plot FILE]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from cli import Parser, output_file, picture_file
from network import KEEP_FREED, Network, address, network, read_rate, show_rate
from palette import look

PROCESSES, PORT = 4, 5000
AVERAGED = 10  # steps
LIMIT = 1800.0  # seconds that a run may take


class Trained(NamedTuple):
    """One run."""

    method: str
    seed: int
    losses: list[float]  # of each step's batches
    seconds_per_step: float
    accuracy: float  # on held-out samples, in the end
    bytes_sent: float  # by one worker, in all

    def seconds_to(self, loss: float) -> float | None:
        """Until the average of the last steps is as low as this; None if it never is."""
        averages = np.convolve(self.losses, np.full(AVERAGED, 1 / AVERAGED), mode="valid")
        reached = np.flatnonzero(averages <= loss)
        return float(reached[0] + AVERAGED) * self.seconds_per_step if reached.size else None


def train(net: Network, method: str, seed: int, arguments: argparse.Namespace, folder: Path) -> Trained:
    """One run over the links as they are."""
    figures = folder / f"{method}.{seed}.json"
    script = Path(sys.path[0]) / "multihost.py"
    command = [sys.executable, str(script), f"--coordinator={address(0)}:{PORT}", f"--processes={net.size}", "--model=mlp"]
    command += [f"--method={method}", f"--density={arguments.density}", f"--steps={arguments.steps}", f"--seed={seed}", "--patience=120"]
    with ExitStack() as stack:
        logs = [stack.enter_context((folder / f"{method}.{seed}.{rank}.log").open("w+")) for rank in range(net.size)]
        hosts = []
        for rank, log in enumerate(logs):
            more = [f"--rank={rank}"] + ([f"--json={figures}"] if rank == 0 else [])
            environment = os.environ | {"JAX_PLATFORMS": "cpu"} | KEEP_FREED
            hosts.append(subprocess.Popen([*net.inside(rank), *command, *more], env=environment, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(hosts[-1].wait)
            stack.callback(hosts[-1].kill)
        if any(host.wait(LIMIT) for host in hosts):
            logs[0].seek(0)
            raise RuntimeError(f"{method}, seed {seed} failed:\n{logs[0].read()[-2000:]}")
    told = json.loads(figures.read_text())
    return Trained(method, seed, told["history"]["loss"], told["seconds_per_step"], told["accuracy"], told["bytes_sent"])


def report(runs: Sequence[Trained], loss: float, rate: float) -> Table:
    seconds = f"seconds to a loss of {loss:g}"
    shown = Table(
        "method", "seed", "ms a step", seconds, "MB sent", "accuracy, %", title=f"{PROCESSES} processes, links of {show_rate(rate)}"
    )
    for run in runs:
        reached = run.seconds_to(loss)
        shown.add_row(
            run.method,
            str(run.seed),
            f"{1e3 * run.seconds_per_step:.0f}",
            "not reached" if reached is None else f"{reached:.1f}",
            f"{run.bytes_sent / 1e6:,.1f}",
            f"{100 * run.accuracy:.2f}",
        )
    return shown


def draw(runs: Sequence[Trained], loss: float, path: Path) -> None:
    """Loss against seconds."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        averages = np.convolve(run.losses, np.full(AVERAGED, 1 / AVERAGED), mode="valid")
        style = look(run.method)
        label = run.method if run.seed == runs[0].seed else None
        axes.plot((np.arange(averages.size) + AVERAGED) * run.seconds_per_step, averages, style.line, color=style.color, label=label)
    axes.axhline(loss, color="gray", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="seconds since the first step", ylabel="loss of the batches")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=read_rate, default=1e8, help="of each link: 100Mbit, 1e9, unlimited")
    parser.add_argument("--methods", nargs="+", default=["dense", "exdyna"], help="as in examples/train.py")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--loss", type=float, default=0.25, help="of the batches, to be reached")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to this file, run by run")
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw loss against time")
    arguments = parser.parse_args()
    if arguments.steps < AVERAGED:
        parser.error(f"steps={arguments.steps} are fewer than the {AVERAGED} that the loss is averaged over")
    console = Console(width=None if sys.stdout.isatty() else 120)
    runs: list[Trained] = []
    with parser.complaining(), network(PROCESSES) as net, TemporaryDirectory() as folder:
        net.limit(arguments.rate)
        for seed in arguments.seeds:
            for method in arguments.methods:
                with console.status(f"{method}, seed {seed}"):
                    runs.append(train(net, method, seed, arguments, Path(folder)))
                if arguments.json:
                    arguments.json.write_text(json.dumps(to_json(runs, arguments), indent=2) + "\n")
    console.print(report(runs, arguments.loss, arguments.rate))
    if arguments.plot:
        draw(runs, arguments.loss, arguments.plot)


def to_json(runs: Sequence[Trained], arguments: argparse.Namespace) -> dict[str, Any]:
    told = {"rate": show_rate(arguments.rate), "loss": arguments.loss, "density": arguments.density, "workers": PROCESSES}
    return told | {"runs": [run._asdict() | {"seconds_to_loss": run.seconds_to(arguments.loss)} for run in runs]}


if __name__ == "__main__":
    main()
