"""What becomes of four processes when one of them dies or freezes, at random moments, and how long they take to start.

Each process is started as on a host of its own, by examples/multihost.py with explicit flags. A whole "host", guard and all, gets SIGKILL
or SIGSTOP at a moment drawn uniformly from the time between the first steps and the end of a run; then the rest has to end by itself, and
all are started again. Seconds are those until the last of the others has ended. The rival is the run that nothing interrupts: what the
resumed ones report has to be identical.

    python benchmarks/failure.py [--signals SIGKILL SIGSTOP] [--times 10] [--steps 40] [--json FILE]
"""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from cli import Parser, output_file

PROCESSES, SAVE_EVERY, BATCH = 4, 5, 8
LIMIT = 600.0  # seconds, for a run to come to its first steps, or to end
Row = dict[str, Any]


class Run:
    """One start of all processes."""

    def __init__(self, folder: Path, name: str, steps: int, start: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            coordinator = f"localhost:{free.getsockname()[1]}"
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        command = [sys.executable, sys.path[0] + "/multihost.py", f"--coordinator={coordinator}", f"--processes={PROCESSES}"]
        command += [f"--steps={steps}", f"--batch={BATCH}", f"--save-every={SAVE_EVERY}", f"--checkpoint={folder / name}"]
        self.began = time.monotonic()
        self.logs = [folder / f"{name}.{start}.{rank}.log" for rank in range(PROCESSES)]
        self.hosts: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self.logs):
            more = [f"--rank={rank}"] + ([f"--json={folder / name}.json"] if rank == 0 else [])
            output: IO[bytes]
            with log.open("wb") as output:
                self.hosts.append(
                    subprocess.Popen(
                        [*command, *more], env=os.environ | cache, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )

    def first_steps(self) -> float:
        """Waits for the first line about steps; seconds from the start. Zero if the run ended without."""
        while time.monotonic() < self.began + LIMIT:
            if re.search(r"^step \d", self.logs[0].read_text(), re.MULTILINE):
                return time.monotonic() - self.began
            if self.hosts[0].poll() is not None:
                return 0.0
            time.sleep(0.02)
        raise TimeoutError(f"no step within {LIMIT:g} s")

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Signals a whole host."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.hosts[rank].pid, number)

    def statuses(self, ranks: list[int], within: float = LIMIT) -> list[int | None]:
        """Waits for these hosts; None for one that has not ended."""
        end = time.monotonic() + within
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.hosts[rank].wait(max(0.0, end - time.monotonic()))
        return [self.hosts[rank].poll() for rank in ranks]

    def close(self) -> None:
        for rank, host in enumerate(self.hosts):
            self.signal(rank, signal.SIGKILL)
            host.wait()


class Uninterrupted(NamedTuple):
    """The rival."""

    outcome: Any
    to_first_step: float
    rest: float  # seconds from the first steps to the end


def outcome(folder: Path, name: str) -> Any:
    """All figures but the time."""
    figures = json.loads((folder / f"{name}.json").read_text())
    del figures["seconds_per_step"]
    return figures


def uninterrupted(folder: Path, steps: int) -> Uninterrupted:
    """Two runs, of which the first fills the compilation cache."""
    for name in ("warm", "rival"):
        run = Run(folder, name, 10 if name == "warm" else steps)
        try:
            first = run.first_steps()
            if any(run.statuses(list(range(PROCESSES)))):
                raise RuntimeError(f"{name} failed:\n{run.logs[0].read_text()}")
            if name == "warm":
                to_first_step = first
            rest = time.monotonic() - run.began - first
        finally:
            run.close()
    return Uninterrupted(outcome(folder, "rival"), to_first_step, rest)


def interrupt(run: Run, number: signal.Signals, victim: int, after: float) -> Row | None:
    """Hits one host after so many seconds of steps. None if the run was over before, or for all others as if nothing had happened."""
    others = [rank for rank in range(PROCESSES) if rank != victim]
    run.first_steps()
    if None not in run.statuses([0], after):
        return None
    run.signal(victim, number)
    hit = time.monotonic()
    statuses = run.statuses(others)
    seconds = time.monotonic() - hit
    if number == signal.SIGSTOP:
        run.signal(victim, signal.SIGCONT)
        thawed = run.statuses([victim], 60.0)[0]
    if not any(statuses):
        return None
    row: Row = {"signal": number.name, "victim": victim, "seconds": round(seconds, 1), "statuses": statuses}
    row["lines"] = [run.logs[rank].read_text().rstrip().rpartition("\n")[2] for rank in others]
    row["first said"] = [
        next((line for line in run.logs[rank].read_text().splitlines() if re.match(r"process \d+ of \d+: ", line)), "") for rank in others
    ]
    if number == signal.SIGSTOP:
        row["victim's status, thawed"] = thawed
    return row


def until_over(
    folder: Path,
    name: str,
    steps: int,
    signals: list[signal.Signals],
    moments: random.Random,
    rest: float,
    starts: Iterator[int],
    tell: Callable[[Row], None],
) -> None:
    """One run, hit by the first of the signals that are left within `rest` seconds of steps and started again, until it is over."""
    while True:
        run = Run(folder, name, steps, next(starts))
        with contextlib.closing(run):
            row = interrupt(run, signals[0], moments.randrange(PROCESSES), moments.uniform(0, rest)) if signals else None
            status = None if row else run.statuses([0])[0]
        if row:
            signals.pop(0)
            tell(row | {"run": name})
        elif status == 0:
            return
        elif status != -signal.SIGKILL:  # host 0 may have been hit when all but it had ended; the next start finds the last save
            raise RuntimeError(f"{name} failed:\n{run.logs[0].read_text()}")


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--signals", nargs="+", choices=("SIGKILL", "SIGSTOP"), default=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--times", type=int, default=10, help="how often each")
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here, as they come")
    arguments = parser.parse_args()
    console = Console()
    rows: list[Row] = []
    finished: list[bool] = []

    def write() -> None:
        if arguments.json:
            figures = {"to first step": rival.to_first_step, "rows": rows, "identical": finished}
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")

    def tell(row: Row) -> None:
        rows.append(row)
        console.print(row, highlight=False, soft_wrap=True)
        write()

    with parser.complaining(), TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rival = uninterrupted(folder, arguments.steps)
        console.print(f"first step after {rival.to_first_step:.1f} s, the rest of {arguments.steps} steps in {rival.rest:.1f} s")
        moments, starts = random.Random(0), itertools.count()
        signals = [signal.Signals[name] for _ in range(arguments.times) for name in arguments.signals]
        while signals:
            name = f"run {len(finished)}"
            until_over(folder, name, arguments.steps, signals, moments, rival.rest, starts, tell)
            finished.append(outcome(folder, name) == rival.outcome)
            write()
    shown = Table("signal", "times", "seconds, median", "most", "statuses", "runs identical", title=f"{PROCESSES} processes")
    for name in arguments.signals:
        ours = [row for row in rows if row["signal"] == name]
        seconds = sorted(row["seconds"] for row in ours)
        statuses = Counter(status for row in ours for status in row["statuses"])
        counts = ", ".join(f"{status}: {times}" for status, times in statuses.items())
        identical = f"{sum(finished)} of {len(finished)} (both signals)"
        shown.add_row(name, str(len(ours)), f"{seconds[len(ours) // 2]}", f"{seconds[-1]}", counts, identical)
    console.print(shown)


if __name__ == "__main__":
    main()
