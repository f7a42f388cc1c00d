"""An exchange and update between processes on slow links, against the dense mean: time, bytes at the interface, and what `plan` says.

Each worker is a process in a network namespace of its own, at the end of a link that is limited in both directions (`network.py`). All
share the processors of this machine. Needs root. A full run takes about 10 minutes on an idle machine with two cores.

    sudo python benchmarks/cluster.py [--rates 100Mbit 1Gbit 10Gbit unlimited] [--sizes 6.4e6 25.6e6] [--methods dense top_k ... exdyna]
                                      [--density 0.001] [--workers 4] [--repeats 11] [--json FILE] [--plot FILE]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from cli import Parser, output_file, picture_file
from exdyna_jax import plan
from network import KEEP_FREED, UNLIMITED, Network, address, burst_bytes, network, read_rate, show_rate
from palette import look
from worker import METHODS

PLANNED = {"dense": "dense", "top_k": "top_k", "gtop_k": "gtop_k", "exdyna": "exdyna", "exdyna_bfloat16": "exdyna bfloat16"}
SMALL, LARGE, SECONDS_OF_LARGE = 300_000, 100_000_000, 1.0  # bytes of the transfers that measure a link
BUDGET_S, LEAST_STEPS = 40.0, 3  # a row stops after so many seconds, but not before so many steps
EMPTY_STEPS = 20
PORT = 5000


class Link(NamedTuple):
    """What a rate turned out to be, with all links busy at once."""

    rate: float  # bit/s that were asked for; inf is unlimited
    burst: int | None  # bytes that pass unshaped
    small: float  # bit/s of payload, for transfers of 300 kB
    large: float  # the same for as much as takes a second, at most 100 MB
    empty_ms: float  # an exchange of a word: an all-gather, and then an all-reduce
    empty_payload: float  # bytes that one worker sends for it: what gloo adds to a message

    @property
    def bandwidth(self) -> float:
        """Bit/s that were asked for, or, where that is without limit, that were found."""
        return self.large if self.rate == UNLIMITED else self.rate


class Measured(NamedTuple):
    """Of one method, size and rate. Times are those of the slowest worker, and of each worker the median."""

    size: int
    method: str
    rate: float
    local_ms: float  # a step without the exchange, all workers at once
    steps: int
    ms: float  # a step, with the exchange
    payload: float  # bytes that one worker sent in a step, counted at its interface
    headers: float
    bytes_sent: float  # what `metrics` says of that
    density: float


class Row(NamedTuple):
    """What is shown of it."""

    measured: Measured
    of_dense: float | None
    bound_ms: float  # a quarter more than the local floor, the bytes and the latency
    counted: float  # payload at the interface / bytes_sent
    plan_ms: float | None  # None for a method that `plan` doesn't know
    plan_bytes: float | None


def bound_ms(local_ms: float, sent: float, rate: float, empty_ms: float) -> float:
    """What an exchange and update of `sent` bytes may take on links of `rate` bit/s: 1.25 (floor + bytes / rate + latency)."""
    return 1.25 * (local_ms + 8e3 * sent / rate + empty_ms)


def steps_in_budget(step_s: float, repeats: int) -> int:
    """As many steps as asked for, fewer if they take too long."""
    return min(repeats, max(LEAST_STEPS, int(BUDGET_S / step_s)))


def evaluate(measured: Sequence[Measured], links: dict[float, Link], density: float, workers: int) -> list[Row]:
    dense = {(m.size, m.rate): m.ms for m in measured if m.method == "dense"}
    rows = []
    for m in measured:
        link = links[m.rate]
        whole = dense.get((m.size, m.rate))
        bound = bound_ms(m.local_ms, m.bytes_sent, link.bandwidth, link.empty_ms)
        predicted = _predict(m, link, density, workers) or (None, None)
        rows.append(Row(m, whole and m.ms / whole, bound, m.payload / m.bytes_sent, *predicted))
    return rows


def _predict(m: Measured, link: Link, density: float, workers: int) -> tuple[float, float] | None:
    """Milliseconds and bytes by `plan`, which is told what the link carries, the latency of a message, and the worker's own work."""
    if m.method not in PLANNED:
        return None
    name = PLANNED[m.method]
    latency = link.empty_ms / 1e3 / (3 * (workers - 1))  # once around the ring for the gather, twice for the sum
    work = {name.split()[0]: m.local_ms / m.size * 1e6}
    cost = plan(m.size, density, workers, bandwidth=link.large, latency=latency, selection=work).costs[name]
    return cost.seconds * 1e3, cost.bytes_sent


class Cluster:
    """The workers, one on each host of a network."""

    def __init__(self, net: Network, workers: Sequence["subprocess.Popen[str]"], logs: Sequence[IO[str]]) -> None:
        self.net = net
        self._workers = workers
        self._logs = logs

    def tell(self, do: str, **order: Any) -> list[dict[str, Any]]:
        """Gives all workers an order, and waits for the answers."""
        try:
            for worker in self._workers:
                assert worker.stdin
                print(json.dumps({"do": do, **order}), file=worker.stdin, flush=True)
        except BrokenPipeError:
            pass  # has no answer either
        return [self._answer(rank) for rank in range(self.net.size)]

    def _answer(self, rank: int) -> dict[str, Any]:
        output = self._workers[rank].stdout
        assert output
        line = output.readline()
        if not line:
            self._logs[rank].seek(0)
            raise RuntimeError(f"worker {rank} ended; the last it said:\n{self._logs[rank].read()[-2000:]}")
        return json.loads(line)


def slowest_ms(answers: Sequence[dict[str, Any]]) -> float:
    """Of each worker the median counts, and of the workers the slowest."""
    return 1e3 * max(statistics.median(answer["seconds"]) for answer in answers)


@contextmanager
def cluster(net: Network) -> Iterator[Cluster]:
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(net.size)]
        yield Cluster(net, [stack.enter_context(_worker(net, rank, log)) for rank, log in enumerate(logs)], logs)


@contextmanager
def _worker(net: Network, rank: int, log: IO[str]) -> Iterator["subprocess.Popen[str]"]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    environment |= {"JAX_PLATFORMS": "cpu"} | KEEP_FREED
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), f"{rank}", f"{net.size}", f"{address(0)}:{PORT}"]
    pipe = subprocess.PIPE
    worker = subprocess.Popen([*net.inside(rank), *command], env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True)
    try:
        yield worker
    finally:
        worker.kill()
        worker.communicate()


class Asked(NamedTuple):
    rates: list[float]
    sizes: list[int]
    methods: list[str]
    density: float
    workers: int
    repeats: int


class Figures(NamedTuple):
    """Of a run, as far as it is."""

    startup_s: float  # from nothing to the end of the first collective step
    links: dict[float, Link]
    rows: list[Row]


def run(asked: Asked, tell: Callable[[str], None]) -> Iterator[Figures]:
    """Measures row by row; tells what is being done, and yields after each method."""
    with network(asked.workers) as net:
        links = {}
        tell("starting the workers")
        began = time.perf_counter()
        with cluster(net) as workers:
            workers.tell("empty", steps=1)
            startup_s = time.perf_counter() - began
            for rate in asked.rates:
                tell(f"measuring links, {show_rate(rate)}")
                links[rate] = _link(workers, rate)
            yield Figures(startup_s, links, [])
            measured: list[Measured] = []
            for size in asked.sizes:
                for method in asked.methods:
                    where = f"{method}, {size:,} elements"
                    tell(f"{where}: compiling")
                    net.limit(UNLIMITED)
                    workers.tell("build", method=method, size=size, density=asked.density)
                    tell(f"{where}: without the exchange")
                    local_ms = slowest_ms(workers.tell("local", steps=asked.repeats))
                    for rate in asked.rates:
                        tell(f"{where}: {show_rate(rate)}")
                        found = _measure(workers, rate, asked.repeats)
                        measured.append(Measured(size, method, rate, local_ms=local_ms, **found))
                    yield Figures(startup_s, links, evaluate(measured, links, asked.density, asked.workers))


def _link(workers: Cluster, rate: float) -> Link:
    workers.net.limit(rate)
    large = round(min(rate / 8 * SECONDS_OF_LARGE, LARGE))
    small_rate, large_rate = workers.net.rates([SMALL, large])
    burst = None if rate == UNLIMITED else burst_bytes(rate)
    counted = _counted(workers, "empty", EMPTY_STEPS)
    return Link(rate, burst, small_rate, large_rate, slowest_ms(counted.answers), counted.payload)


def _measure(workers: Cluster, rate: float, repeats: int) -> dict[str, Any]:
    workers.net.limit(rate)
    steps = steps_in_budget(slowest_ms(workers.tell("step", steps=1)) / 1e3, repeats)
    answers, payload, headers = _counted(workers, "step", steps)
    told = {name: answers[0][name] for name in ("bytes_sent", "density")}
    return {"steps": steps, "ms": slowest_ms(answers), "payload": payload, "headers": headers, **told}


class Counted(NamedTuple):
    answers: list[dict[str, Any]]
    payload: float  # bytes that one worker sent in a step; the mean over workers and steps
    headers: float


def _counted(workers: Cluster, do: str, steps: int) -> Counted:
    """Has something done, and counts what passes the interfaces meanwhile."""
    net = workers.net
    before = [net.sent(host) for host in range(net.size)]
    answers = workers.tell(do, steps=steps)
    sent = [net.sent(host) - start for host, start in enumerate(before)]  # all have ended: nothing is under way any more
    payload, headers = (statistics.mean(each) / steps for each in zip(*((x.payload, x.headers) for x in sent), strict=True))
    return Counted(answers, payload, headers)


def link_table(links: Sequence[Link]) -> Table:
    shown = Table("link", "unshaped", "300 kB at", "a second's at", "empty exchange", title="links, all at once; Mbit/s of payload")
    for link in links:
        burst = "-" if link.burst is None else f"{link.burst / 1e3:.3g} kB"
        empty = f"{link.empty_ms:.3g} ms, {link.empty_payload / 1e3:.3g} kB"
        shown.add_row(show_rate(link.rate), burst, *(f"{rate / 1e6:,.4g}" for rate in (link.small, link.large)), empty)
    return shown


def time_table(size: int, rows: Sequence[Row]) -> Table:
    shown = Table("rate", "method", "ms", "of dense", "local ms", "bound ms", "plan ms", title=f"{size:,} elements: exchange and update")
    return _filled(shown, size, rows, lambda row: (row.measured.ms, row.of_dense, row.measured.local_ms, row.bound_ms, row.plan_ms))


def byte_table(size: int, rows: Sequence[Row]) -> Table:
    columns = ("counted", "+ headers", "by metrics", "counted / metrics", "by plan")
    shown = Table("rate", "method", *columns, title=f"{size:,} elements: kB that one worker sends in a step")

    def figures(row: Row) -> Sequence[float | None]:
        m = row.measured
        return m.payload / 1e3, m.headers / 1e3, m.bytes_sent / 1e3, row.counted, row.plan_bytes and row.plan_bytes / 1e3

    return _filled(shown, size, rows, figures)


def _filled(shown: Table, size: int, rows: Sequence[Row], figures: Callable[[Row], Sequence[float | None]]) -> Table:
    """Rate by rate, all of one size."""
    chosen = [row for row in rows if row.measured.size == size]
    for rate in dict.fromkeys(row.measured.rate for row in chosen):
        for row in chosen:
            if row.measured.rate == rate:
                texts = ("-" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in figures(row))
                shown.add_row(show_rate(rate), row.measured.method, *texts)
        shown.add_section()
    return shown


def draw(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds against the rate of the links, a panel for each size."""
    sizes = list(dict.fromkeys(row.measured.size for row in rows))
    figure = Figure(figsize=(2 + 4 * len(sizes), 5), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        chosen = [row for row in rows if row.measured.size == size]
        for method in dict.fromkeys(row.measured.method for row in chosen):
            of_method = [row for row in chosen if row.measured.method == method]
            rates = [show_rate(row.measured.rate) for row in of_method]
            style = look(method.removesuffix("_bfloat16"))
            line, face = (":", "white") if method.endswith("_bfloat16") else (style.line, style.color)
            times, label = [row.measured.ms for row in of_method], method.replace("_", ", ") if face == "white" else method
            axes.plot(rates, times, color=style.color, linestyle=line, marker=style.marker, markerfacecolor=face, label=label)
            if method == "exdyna":
                bounds, label = [row.bound_ms for row in of_method], "exdyna: 1.25 (local + bytes / rate + latency)"
                axes.plot(rates, bounds, color=style.color, linestyle="", marker="_", markersize=20, label=label)
        axes.set(title=f"{size:,} elements", yscale="log", xlabel="links")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("exchange and update, ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2 * len(sizes))
    figure.savefig(path)


def to_json(asked: Asked, figures: Figures) -> str:
    def of(named: Any) -> dict[str, Any]:
        return named._asdict() | {"rate": show_rate(named.rate)}

    rows = [of(row.measured) | {name: value for name, value in row._asdict().items() if name != "measured"} for row in figures.rows]
    told = {"density": asked.density, "workers": asked.workers, "startup_s": figures.startup_s, "allocator": KEEP_FREED}
    return json.dumps(told | {"links": [of(link) for link in figures.links.values()], "rows": rows}, indent=2) + "\n"


def _size(text: str) -> int:
    size = float(text)
    if not 1 <= size < 2**31 or not size.is_integer():
        raise ValueError
    return int(size)


def _rate(text: str) -> float:
    try:
        return read_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def read(parser: Parser, arguments: Sequence[str] | None) -> tuple[Asked, Path | None, Path | None]:
    parser.add_argument("--rates", type=_rate, nargs="+", default=[1e8, 1e9, 1e10, UNLIMITED], help="of each link: 100Mbit, 1e9, unlimited")
    parser.add_argument("--sizes", type=_size, nargs="+", default=[6_400_000, 25_600_000], help="elements of the gradient")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--density", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=11, help=f"steps of which the median counts; fewer where they take {BUDGET_S:.0f} s")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to this file, row by row")
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw them")
    args = parser.parse_args(arguments)
    checks = {
        f"workers={args.workers} have nobody to exchange anything with: at least 2": args.workers >= 2,
        f"density={args.density} is not in (0, 1]": 0 < args.density <= 1,
        f"repeats={args.repeats} are too few for a median: at least {LEAST_STEPS}": args.repeats >= LEAST_STEPS,
    }
    for complaint, fine in checks.items():
        if not fine:
            parser.error(complaint)
    rates, sizes, methods = (list(dict.fromkeys(each)) for each in (args.rates, args.sizes, args.methods))
    return Asked(rates, sizes, methods, args.density, args.workers, args.repeats), args.json, args.plot


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    asked, figures_file, picture = read(parser, arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    console = Console()
    with parser.complaining():
        with console.status("making the network") as status:
            for figures in run(asked, status.update):
                if figures_file:
                    figures_file.write_text(to_json(asked, figures))
                if not figures.rows:
                    console.print(f"{asked.workers} workers, density {asked.density:g}, {figures.startup_s:.1f} s from start to first step")
                    console.print(link_table(list(figures.links.values())))
        for size in asked.sizes:
            console.print(time_table(size, figures.rows))
            console.print(byte_table(size, figures.rows))
        if picture:
            draw(figures.rows, picture)


if __name__ == "__main__":
    main()
