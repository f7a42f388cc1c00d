"""Trains one task in several processes, on one host or on many: train.py's example over `jax.distributed`.

    python examples/multihost.py --local 4                                           # a try-out: 4 processes on this machine
    python examples/multihost.py --coordinator host0:8476 --processes 2 --rank 0     # on host0; with --rank 1 on the other host
    srun --nodes=4 --ntasks-per-node=1 python examples/multihost.py                  # SLURM; Open MPI the same way, with mpirun

What is started so only guards the process that trains, and says in a last line how that ended, even where JAX aborts it. docs/multihost.md
has more.
"""

import hashlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from argparse import ArgumentTypeError
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from multiprocessing.connection import wait
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from cli import Parser
from report import progress, table
from train import AXIS, Map, Mapped, Output, Settings, add_flags, asked_for, by_shard_map, check_share, mesh_of, one_step, provide_devices
from train import train as train_here
from watchdog import Watchdog
from workloads import Batch, Columns, Task, count, load_task

_MORE = 10  # seconds that what the watchdog should have ended is given


@dataclass(frozen=True)
class Job:
    """What all processes are started with, each with its own rank."""

    settings: Settings  # its number of workers is that of all devices, known once all processes are there
    output: Output
    by: str
    devices: int
    shares: list[float] | None
    patience: float
    startup: float
    local: int | None
    coordinator: str | None
    processes: int | None

    def __post_init__(self) -> None:
        checks = {
            f"devices={self.devices} is not a positive number": self.devices >= 1,
            f"local={self.local} is not a positive number": self.local is None or self.local >= 1,
            f"processes={self.processes} is not a positive number": self.processes is None or self.processes >= 1,
            f"patience={self.patience:g} is not a positive number of seconds": 0 < self.patience < math.inf,
            f"startup={self.startup:g} is not a positive number of seconds": 0 < self.startup < math.inf,
        }
        for complaint, fine in checks.items():
            if not fine:
                raise ValueError(complaint)


def by_pmap(task: Task, shapes: Any, key: jax.Array, columns: Columns, settings: Settings) -> Mapped:
    """The step by `jax.pmap`. Each process has the state of its own workers, stacked on a leading axis."""
    workers = len(mesh_of(shapes).local_devices)
    step = jax.pmap(one_step(task, key), axis_name=AXIS, out_axes=(0, None), donate_argnums=0)

    def run(state: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        return step(state, {name: column.reshape(workers, -1, *column.shape[1:]) for name, column in batch.items()})

    def stack(leaf: jax.Array) -> np.ndarray:
        return np.stack([np.asarray(shard.data) for shard in leaf.addressable_shards])

    def unstack(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        shape = like.sharding.shard_shape(like.shape)
        return jax.make_array_from_single_device_arrays(
            like.shape, like.sharding, [shard.data.reshape(shape) for shard in leaf.addressable_shards]
        )

    return Mapped(run, lambda state: jax.tree.map(stack, state), lambda state: jax.tree.map(unstack, state, shapes))


BY: dict[str, Map] = {"shard_map": by_shard_map, "pmap": by_pmap}


def shard(columns: Columns, process: int, shares: list[float]) -> Columns:
    """A process's part of the data, of a length in proportion to its share. Stands in for files that each host has of its own."""
    ends = [round(count(columns) * end / sum(shares)) for end in accumulate(shares, initial=0.0)]
    return {name: column[ends[process] : ends[process + 1]] for name, column in columns.items()}


class Unreadable(ValueError):
    """Data that a process can't read: only that one knows why."""

    def __init__(self, process: int, wrong: Exception | None) -> None:
        super().__init__(f"process {process}: {wrong}")
        self.process = process


def work(job: Job, rank: int | None) -> None:
    """What one process does. Whatever goes wrong, it says so in a line, and ends without waiting for the others."""
    watchdog = Watchdog(job.patience, job.startup)
    try:
        _connect(job, rank, watchdog)
        try:
            _train(job, watchdog)
        except ValueError as error:  # settings are checked by all processes alike
            if watchdog.started:  # some of what gloo complains of, JAX raises as a ValueError
                raise
            if jax.process_index() == (error.process if isinstance(error, Unreadable) else 0):
                sys.stderr.write(f"multihost.py: {' '.join(str(error).split())}\n")
            status = 2
        else:
            status = 0
        watchdog.watch("the end of the other processes", True)
        jax.distributed.shutdown()
        sys.exit(status)
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):
            watchdog.end(f"failed, most likely because another process has died: {text}")
        traceback.print_exc()
        watchdog.end(f"failed: {type(error).__name__}: {text}")


def _connect(job: Job, rank: int | None, watchdog: Watchdog) -> None:
    provide_devices(job.devices)
    if job.local:
        jax.config.update("jax_platforms", "cpu")  # the processes would be in each other's way on an accelerator
    try:
        jax.distributed.initialize(
            job.coordinator,
            job.processes,
            rank,
            cluster_detection_method=None if rank is None else "deactivate",
            initialization_timeout=math.ceil(job.startup) + _MORE,
            heartbeat_timeout_seconds=2 * math.ceil(job.patience) + _MORE,  # it may come after half of it
            shutdown_timeout_seconds=math.ceil(job.startup) + _MORE,
        )
    except ValueError:  # of an argument that it could not find out
        sys.stderr.write("multihost.py: no cluster that JAX knows: give --coordinator, --processes and --rank, or --local\n")
        sys.exit(2)
    watchdog.name(jax.process_index(), jax.process_count())
    if jax.process_index():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # only process 0 prints; what goes wrong, everyone says


def _train(job: Job, watchdog: Watchdog) -> None:
    settings = replace(job.settings, workers=jax.device_count())
    shares = job.shares or [1.0] * jax.process_count()
    if len(shares) != jax.process_count():
        raise ValueError(f"there are {len(shares)} shares for {jax.process_count()} processes")
    own, batch = None, 0
    wrong: ValueError | OSError | None = None
    try:
        task = load_task(settings.task, settings.data, settings.model)
        own, batch = shard(task.train, jax.process_index(), shares), settings.samples(task)
        if not count(own):
            raise ValueError(f"shares={shares} leave it without samples")
    except (ValueError, OSError) as error:  # the others would wait
        own = None
        wrong = error
    _agree(job, settings, own, batch, wrong)
    console, first = Console(), jax.process_index() == 0
    with progress(console) as show:
        saves = job.output.saves(console.print)
        result = train_here(settings, show, saves, own=own, map_step=BY[job.by], watch=watchdog.watch)
    if first:
        console.print(table(result))
        job.output.write(result)


def _agree(job: Job, settings: Settings, own: Columns | None, batch: int, wrong: Exception | None) -> None:
    """All processes raise a ValueError if one of them was started with other settings, can't read its data, or has too little of it."""
    alike = replace(settings, data=settings.data and "each its own")
    asked = hashlib.sha256(repr((alike, job.shares, job.output.checkpoint, job.output.save_every, job.by)).encode()).digest()
    mine = np.array([int.from_bytes(asked[:4]), 0 if own is None else count(own), jax.local_device_count(), batch], np.uint32)
    everyone = multihost_utils.process_allgather(mine)
    for process, (other, samples, workers, each) in enumerate(everyone.reshape(-1, mine.size)):
        if other != everyone.flat[0]:
            raise ValueError(f"process {process} was started with other settings than process 0")
        if samples == 0:
            raise Unreadable(process, wrong)
        try:
            check_share(int(each), int(samples), int(workers))
        except ValueError as error:
            raise ValueError(f"process {process}: {error}") from error


def guard(job: Job, ranks: list[int | None]) -> tuple[int, str]:
    """Runs the processes of this machine. Returns the status, and what to say of processes that failed."""
    context = multiprocessing.get_context("spawn")
    children = {rank: context.Process(target=work, args=(job, rank)) for rank in ranks}
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit it: Ctrl-C is the guard's business
    signal.signal(signal.SIGTERM, _terminated)
    try:
        for child in children.values():
            child.start()
        signal.signal(signal.SIGINT, interrupted)
        end = math.inf
        while (alive := [child for child in children.values() if child.is_alive()]) and time.monotonic() < end:
            wait([child.sentinel for child in alive], None if end == math.inf else 0.1)
            if end == math.inf and any(child.exitcode for child in children.values()):
                end = time.monotonic() + job.patience + _MORE  # for the others to end by themselves
    finally:
        late = [child for child in children.values() if child.is_alive()]
        for child in late:
            child.kill()
            child.join()
    codes = {rank: child.exitcode for rank, child in children.items() if child.exitcode}
    if set(codes.values()) <= {2}:  # bad input, of which is said what is wrong with it
        return (2 if codes else 0), ""
    ends = [f"{'the process' if rank is None else f'process {rank}'} {_how(code, children[rank] in late)}" for rank, code in codes.items()]
    kept = f"from the last save in {job.output.checkpoint}" if job.output.checkpoint else "from the beginning, since nothing was saved"
    return 1, f"{', '.join(ends)}; start all again to go on {kept}"


def _terminated(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _how(code: int | None, late: bool) -> str:
    if late:
        return "did not end by itself"
    assert code is not None
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def _shares(text: str) -> list[float]:
    try:
        shares = [float(item) for item in text.split(",")]
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers, such as 3,1") from error
    if not all(0 < share < math.inf for share in shares):
        raise ArgumentTypeError(f"{text!r} has a share that is not a positive number")
    return shares


def main() -> None:
    parser = Parser(description="Train one task in several processes, on one host or on many.", allow_abbrev=False)
    where = parser.add_argument_group("processes", "none of these under SLURM and Open MPI, where JAX finds out by itself")
    where.add_argument("--local", type=int, metavar="N", help="start N processes on this machine's CPU")
    where.add_argument("--coordinator", metavar="HOST:PORT", help="process 0's host, and a free port there")
    where.add_argument("--processes", type=int, help="how many there are")
    where.add_argument("--rank", type=int, help="which one this is, from 0 on")
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices of a process where it has no accelerators")
    parser.add_argument("--by", choices=BY, default="shard_map", help="how the workers run the step")
    parser.add_argument("--shares", type=_shares, metavar="A,B,...", help="how the data is divided among the processes; default: equally")
    parser.add_argument("--patience", type=float, default=20, metavar="SECONDS", help="that a step or a save may take; default: 20")
    parser.add_argument("--startup", type=float, default=300, metavar="SECONDS", help="for starting, compiling, evaluating; default: 300")
    add_flags(parser)
    arguments = vars(parser.parse_args())
    with parser.complaining():
        own = {field.name: arguments.pop(field.name) for field in fields(Job)[2:]}  # but for settings and output
        rank = arguments.pop("rank")
        settings, output = asked_for(arguments)
        job = Job(settings, output, **own)
        if job.local:
            if (job.coordinator, job.processes, rank) != (None, None, None):
                raise ValueError("--local starts all processes itself: leave out --coordinator, --processes and --rank")
            job = replace(job, coordinator=f"localhost:{_free_port()}", processes=job.local)
        elif len({job.coordinator is None, job.processes is None, rank is None}) > 1:
            raise ValueError("--coordinator, --processes and --rank go together")
        if rank is not None and job.processes is not None and not 0 <= rank < job.processes:
            raise ValueError(f"rank={rank} is not in 0..{job.processes - 1}")
        status, line = guard(job, list(range(job.local)) if job.local else [rank])
    if line:
        sys.stderr.write(f"{parser.prog}: {line}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
