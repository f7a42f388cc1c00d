"""Trains one task with one method, data-parallel, and shows what was sent and what came of it.

    python examples/train.py --method exdyna --density 0.01 --plot run.png

The workers are accelerators where there are enough of them, otherwise virtual CPU devices; with --simulate they share one device.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from checkpoint import Log, Saves
from cli import Parser, output_file, picture_file
from exdyna_jax import (
    average_params,
    clt_k,
    crossover,
    deft,
    dense,
    exdyna,
    gtop_k,
    hard_threshold,
    local_value_and_grad,
    metrics,
    micro,
    replicate_params,
    reshard,
    sgp,
    sidco,
    state_specs,
    top_k,
)
from presets import PRESETS, Recipe, recipe_of
from report import History, Result, plot, progress, table, write_json
from workloads import TASKS, Batch, Columns, Params, Statistics, Task, check_choice, count, held_out_batches, load_task, training_batches

AXIS = "data"
_FETCH_EVERY = 10  # steps between two looks at the metrics: looking at each step would stall the devices

Make = Callable[..., optax.GradientTransformation]


class Method(NamedTuple):
    """A way to exchange gradients or, in gossip, parameters."""

    make: Make  # (density, axis_name, *, num_workers) -> transformation
    thins: bool = True  # whether it asks for a density
    gossips: bool = False  # whether each worker has parameters of its own, which are mixed at the end of the chain


def _whole(make: Make) -> Make:
    """A method that sends everything, and takes no density."""
    return lambda density, axis_name, **options: make(axis_name, **options)


def _hierarchical(axis_name: str, num_workers: int) -> optax.GradientTransformation:
    """Crossover between groups of four neighbours; of two, or of one, where four don't divide the workers."""
    return crossover(axis_name, groups=num_workers // math.gcd(num_workers, 4), num_workers=num_workers)


METHODS = {
    "exdyna": Method(exdyna),
    "micro": Method(micro),
    "deft": Method(deft),
    "top_k": Method(top_k),
    "gtop_k": Method(gtop_k),
    "clt_k": Method(clt_k),
    "hard_threshold": Method(hard_threshold),
    "sidco": Method(sidco),
    "dense": Method(_whole(dense), thins=False),
    "crossover": Method(_whole(crossover), thins=False, gossips=True),
    "hierarchical": Method(_whole(_hierarchical), thins=False, gossips=True),
    "sgp": Method(_whole(sgp), thins=False, gossips=True),
}

# what makes a step of the exchanged gradient: (learning rate, momentum) -> transformation
OPTIMIZERS: dict[str, Callable[[optax.Schedule, float], optax.GradientTransformation]] = {
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum=momentum or None, nesterov=True),
    "adamw": lambda rate, momentum: optax.adamw(rate, b1=momentum, weight_decay=0.01),
}


@dataclass(frozen=True)
class Settings:
    """What to train, and how. Steps, batch, learning rate and momentum are the task's own where they are None, or the preset's."""

    method: str = "exdyna"
    task: str = "digits"
    density: float = 0.01
    workers: int = 8
    steps: int | None = None
    batch: int | None = None
    seed: int = 0
    optimizer: str = "sgd"
    learning_rate: float | None = None
    momentum: float | None = None
    data: str | None = None  # directory, for a task that is read from files
    model: str | None = None  # the task's first where it is None
    preset: str | None = None  # brings its own optimizer and course of the learning rate

    def __post_init__(self) -> None:
        checks = {
            f"method={self.method!r} is not one of {', '.join(METHODS)}": self.method in METHODS,
            f"task={self.task!r} is not one of {', '.join(TASKS)}": self.task in TASKS,
            f"optimizer={self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}": self.optimizer in OPTIMIZERS or self.preset is not None,
            f"density={self.density} is not in (0, 1]": 0 < self.density <= 1,
            f"workers={self.workers} is not a positive number": self.workers >= 1,
            f"steps={self.steps} is not a positive number": self.steps is None or self.steps >= 1,
            f"batch={self.batch} is not a positive number": self.batch is None or self.batch >= 1,
            f"seed={self.seed} is not in 0..4294967295": 0 <= self.seed < 2**32,
            f"learning_rate={self.learning_rate} is not a positive number": self.learning_rate is None or 0 < self.learning_rate < math.inf,
            f"momentum={self.momentum} is not in [0, 1)": self.momentum is None or 0 <= self.momentum < 1,
        }
        for complaint, fine in checks.items():
            if not fine:
                raise ValueError(complaint)
        check_choice(self.task, self.data, self.model)
        if self.preset is not None:
            recipe_of(self.preset, self.task)

    def samples(self, task: Task) -> int:
        """That a worker takes for a step."""
        return self.batch or task.batch

    @property
    def recipe(self) -> Recipe | None:
        """How the preset trains the task."""
        return None if self.preset is None else recipe_of(self.preset, self.task)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """The settings that are given; for all others those of the preset, if there is one, or the defaults."""
    preset = given.get("preset")
    if preset is None:
        return Settings(**given)
    for name in ("optimizer", "learning_rate", "momentum"):
        if name in given:
            raise ValueError(f"{name}={given[name]} does not go with preset={preset!r}, which has its own")
    return Settings(**{**recipe_of(preset, given.get("task", Settings.task)).settings, **given})


class State(TrainState):
    """What a step hands on."""

    statistics: Statistics  # see _settle


Report = Callable[[History, int], None]  # is shown the history so far, and how many steps it will have, every few steps
Alter = Callable[[int, Batch], Batch]  # (step from 1 on, batch of this process's workers, in order) -> what to train on instead
Watch = Callable[[str, bool], None]  # is told what begins now, and whether it may take as long as it likes: compiling, for instance


class Mapped(NamedTuple):
    """The step of all workers, and the form in which it keeps the state: the global view, or another."""

    step: Callable[[Any, Batch], tuple[Any, dict[str, jax.Array]]]  # (state, batch of this process's workers) -> (state, metrics)
    enter: Callable[[State], Any] = lambda state: state  # out of the global view
    leave: Callable[[Any], State] = lambda state: state  # and back


Map = Callable[[Task, Any, jax.Array, Columns, Settings], Mapped]  # (task, shapes of the state, key, data, settings) -> the step


def by_shard_map(task: Task, shapes: Any, key: jax.Array, columns: Columns, settings: Settings) -> Mapped:
    """The step as one program over the mesh."""
    mesh = mesh_of(shapes)
    rows = NamedSharding(mesh, P(AXIS))
    compiled = make_step(task, shapes, key).lower(shapes, _batch_shapes(columns, settings.samples(task) * mesh.size, rows)).compile()
    return Mapped(lambda state, batch: compiled(state, jax.make_array_from_process_local_data(rows, batch)))


def by_vmap(task: Task, shapes: Any, key: jax.Array, columns: Columns, settings: Settings) -> Mapped:
    """The step of workers that share one device."""
    own = jax.tree.map(lambda leaf: 0 if leaf.sharding.spec else None, shapes)  # the axis of the workers; None where they are equal
    step = jax.vmap(one_step(task, key), axis_name=AXIS, in_axes=(own, 0), out_axes=(own, None))

    def each(state: State, change: Callable[[jax.Array], jax.Array]) -> State:
        return jax.tree.map(lambda leaf, like: change(leaf) if like.sharding.spec else leaf, state, shapes)

    @partial(jax.jit, donate_argnums=0)
    def run(state: State, rows: Batch) -> tuple[State, dict[str, jax.Array]]:
        batches = {name: column.reshape(settings.workers, -1, *column.shape[1:]) for name, column in rows.items()}
        state, measured = step(each(state, lambda leaf: leaf[:, None]), batches)  # a worker sees one row
        return each(state, lambda leaf: leaf[:, 0]), measured

    everywhere = NamedSharding(mesh_of(shapes), P())
    return Mapped(run.lower(shapes, _batch_shapes(columns, settings.samples(task) * settings.workers, everywhere)).compile())


def train(
    settings: Settings,
    report: Report = lambda history, steps: None,
    saves: Saves | None = None,
    alter: Alter = lambda step, batch: batch,
    *,
    own: Columns | None = None,
    map_step: Map = by_shard_map,
    devices: int | None = None,
    watch: Watch = lambda what, slow: None,
) -> Result:
    """Trains once, from the newest save on if there is one, and evaluates. Where there are several processes, all call it.

    Args:
      settings: what to train, the same in all processes.
      report: is shown the progress.
      saves: where to save. Each process has its own, of the same directory.
      alter: changes batches.
      own: this process's shard of the training data. It may have another length than that of other processes, since the number of steps
        does not depend on it: a shorter one just begins its next epoch earlier. Default: all of the task's.
      map_step: by what the workers run the step.
      devices: that they run it on. Default: one each. With `by_vmap` 1.
      watch: is told of everything that waits for other processes.

    Raises:
      ValueError: for settings that can't work together.
    """
    task, method = load_task(settings.task, settings.data, settings.model), METHODS[settings.method]
    if method.gossips:
        task = _with_rows(task, settings.workers)
    columns = task.train if own is None else own
    course = course_of(settings, task)
    steps = course.steps
    asked = asdict(settings) | {
        "steps": steps,
        "batch": settings.samples(task),
        "learning_rate": course.peak,
        "momentum": course.momentum,
        "density": settings.density if method.thins else 1.0,
    }
    log = saves.newest(asked) if saves else Log(asked, 0, {}, 0.0)

    mesh = make_mesh(devices or settings.workers)
    here = len(mesh.local_devices) * settings.workers // mesh.size  # workers of this process
    check_share(asked["batch"], count(columns), here)
    key, key_init = jax.random.split(jax.random.key(settings.seed))

    create = partial(_create, task, make_optimizer(settings, course))
    shapes = lay_out(jax.eval_shape(create, key_init), mesh)
    if saves and log.step:
        if method.gossips and log.settings["workers"] != settings.workers:
            raise ValueError(f"{settings.method} goes on only with as many workers as saved their parameters: {log.settings['workers']}")
        before = make_optimizer(replace(settings, workers=log.settings["workers"]), course)
        state = _restore(saves, log, jax.eval_shape(partial(_create, task, before), key_init), shapes, settings.workers)
    else:
        state = jax.jit(create, out_shardings=_shardings(shapes))(key_init)
    mapped = map_step(task, shapes, key, columns, settings)
    state = mapped.enter(state)

    history, pending = log.history, list[dict[str, jax.Array]]()
    began = time.perf_counter() - log.seconds
    # a process that runs ahead of the others can't tell in which step one of them has died
    fetch_every = _FETCH_EVERY if jax.process_count() == 1 else 1
    for step, batch in enumerate(training_batches(columns, asked["batch"] * here, settings.seed, log.step, steps), start=log.step + 1):
        watch(f"step {step}", step == log.step + 1)
        state, measured = mapped.step(state, alter(step, batch))
        pending.append(measured)
        due = saves is not None and saves.due(step, steps)
        if due or step % fetch_every == 0 or step == steps:
            _fetch(pending, history)
            if saves and due:
                watch(f"the save at step {step}", False)
                paused = time.perf_counter()
                saves.save(mapped.leave(state), Log(asked, step, history, paused - began))
                began += time.perf_counter() - paused
            report(history, steps)
    seconds = time.perf_counter() - began

    watch("the evaluation", True)
    last = mapped.leave(state)
    if method.gossips:
        last = last.replace(params=jax.jit(average_params, out_shardings=NamedSharding(mesh, P()))(last.params))
    scores = evaluate(task, last, mesh, asked["batch"] * settings.workers)
    return Result(
        **asked,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(last.params)),
        quality=task.measures(scores),
        accuracy=scores["accuracy"],
        loss=scores["loss"],
        bytes_sent=sum(history["bytes_sent"]),
        bytes_dense=sum(history["bytes_dense"]),
        seconds_per_step=seconds / steps,
        history=history,
    )


train_simulated = partial(train, map_step=by_vmap, devices=1)  # the same with all workers on one device


def check_share(batch: int, samples: int, workers: int) -> None:
    """Raises a ValueError if a process has too few samples for one batch of its workers."""
    share = samples // workers
    if batch > share:
        raise ValueError(f"batch={batch} is more than a worker's share: {share} of {samples} samples with {workers} workers")


def _fetch(pending: list[dict[str, jax.Array]], history: History) -> None:
    """Moves the metrics of the last steps from the devices into the history."""
    for measured in jax.device_get(pending):
        for name, value in measured.items():
            history.setdefault(name, []).append(value.tolist())
    pending.clear()


def provide_devices(workers: int) -> None:
    """Asks for as many virtual CPU devices; possible only before JAX is first used."""
    if jax.config.values["jax_num_cpu_devices"] < workers:
        jax.config.update("jax_num_cpu_devices", workers)


def make_mesh(workers: int) -> Mesh:
    """The workers as a mesh axis: accelerators if there are enough, else CPU devices."""
    devices = jax.devices()
    if len(devices) < workers:
        devices = jax.devices("cpu")
    if len(devices) < workers:
        raise ValueError(f"workers={workers}, but there are only {len(devices)} devices")
    return jax.make_mesh((workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:workers])


class Course(NamedTuple):
    """How long to train, with which learning rates, and with which momentum."""

    steps: int
    peak: float
    rate: optax.Schedule
    momentum: float


def course_of(settings: Settings, task: Task) -> Course:
    """That of the preset; without one the learning rate warms up for a tenth of the steps and falls as a cosine."""
    if settings.recipe:
        samples = settings.samples(task) * settings.workers
        epoch = max(count(task.train) // samples, 1)
        peak, momentum = settings.recipe.peak(samples), settings.recipe.settings["momentum"]
        return Course(settings.steps or settings.recipe.epochs * epoch, peak, settings.recipe.schedule(peak, epoch), momentum)
    steps = settings.steps or task.steps
    pace = task.paces[settings.optimizer]
    peak = settings.learning_rate or pace.peak
    momentum = pace.momentum if settings.momentum is None else settings.momentum
    return Course(steps, peak, optax.warmup_cosine_decay_schedule(peak / 10, peak, warmup_steps=steps // 10, decay_steps=steps), momentum)


def make_optimizer(settings: Settings, course: Course) -> optax.GradientTransformation:
    """The method's exchange and the optimizer, of which gossip mixes the result."""
    method, recipe = METHODS[settings.method], settings.recipe
    exchange = method.make(settings.density, AXIS, num_workers=settings.workers)
    clip = [] if recipe is None or recipe.clip is None else [optax.clip_by_global_norm(recipe.clip)]
    optimizer = recipe.optimizer(course.rate) if recipe else OPTIMIZERS[settings.optimizer](course.rate, course.momentum)
    return optax.chain(*clip, optimizer, exchange) if method.gossips else optax.chain(*clip, exchange, optimizer)


def _create(task: Task, tx: optax.GradientTransformation, key: jax.Array) -> State:
    """The state before the first step, of all workers."""
    params, statistics = task.init(key)
    return State.create(apply_fn=task.score, params=params, tx=tx, statistics=statistics)


def _with_rows(task: Task, workers: int) -> Task:
    """The task with a row of parameters for each worker, which sees one row."""

    def init(key: jax.Array) -> tuple[Params, Statistics]:
        params, statistics = task.init(key)
        return replicate_params(params, workers), statistics

    def loss(params: Params, statistics: Statistics, batch: Batch, key: jax.Array) -> Any:
        return task.loss(jax.tree.map(lambda row: row[0], params), statistics, batch, key)

    return task._replace(init=init, loss=loss)


def lay_out(shapes: Any, mesh: Mesh) -> Any:
    """The shapes of a state, each with its place on the mesh."""
    specs = state_specs(shapes, AXIS)
    return jax.tree.map(lambda leaf, spec: leaf.update(sharding=NamedSharding(mesh, spec)), shapes, specs)


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def mesh_of(shapes: Any) -> Mesh:
    """The mesh on which a state is laid out."""
    mesh: Mesh = jax.tree.leaves(shapes)[0].sharding.mesh
    return mesh


def _batch_shapes(columns: Columns, size: int, sharding: NamedSharding) -> Any:
    def shape(column: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *column.shape[1:]), jax.dtypes.canonicalize_dtype(column.dtype), sharding=sharding)

    return {name: shape(column) for name, column in columns.items()}


def _restore(saves: Saves, log: Log, then: State, now: State, workers: int) -> State:
    """The saved state as it is laid out `now`. `then` has the shapes that it was saved in, of as many workers as there were."""
    if log.settings["workers"] == workers:
        return saves.state(log, now)
    lone = SingleDeviceSharding(mesh_of(now).local_devices[0])  # its rows need not divide among the devices
    saved = reshard(saves.state(log, jax.tree.map(lambda leaf: leaf.update(sharding=lone), then)), workers)
    shapes, treedef = jax.tree.flatten(now)
    return jax.tree.unflatten(treedef, map(_place, jax.tree.leaves(saved), (leaf.sharding for leaf in shapes)))


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """What each process has whole, laid out over the devices of all of them."""
    return jax.make_array_from_callback(leaf.shape, sharding, np.asarray(leaf).__getitem__)


def one_step(task: Task, key: jax.Array) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """One worker's step: (state, its batch) -> (state, metrics)."""

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        mine = jax.random.fold_in(jax.random.fold_in(key, state.step), lax.axis_index(AXIS))
        gradient = local_value_and_grad(task.loss, AXIS, has_aux=True)
        (loss, (statistics, means)), grads = gradient(state.params, state.statistics, batch, mine)
        settled, size = _settle(state.statistics, statistics)
        state = state.apply_gradients(grads=grads, statistics=settled)
        own, told = {"loss": loss, **means}, metrics(state.opt_state)
        told |= {name: told[name] + size for name in ("bytes_sent", "bytes_dense")}
        if "consensus_distance" in told:  # of which each worker has an estimate
            own["consensus_distance"] = told.pop("consensus_distance")
        return state, lax.pmean(own, AXIS) | told

    return step


def _settle(before: Statistics, after: Statistics) -> tuple[Statistics, float]:
    """The mean of the workers' statistics, and the bytes that one of them sends for it, by a ring.

    Each worker normalises by the mean and variance of its own samples, as the recipes do, and moves its own running averages. They are made
    equal in each step, so that the state is the same everywhere: to save, to take up again with another number of workers, to evaluate. As
    a running average is linear in what it averages, to do so once in the end would come to the same. What is not finite is not taken
    over, since the step that it comes from is skipped.
    """
    mean = lax.pmean(after, AXIS)
    settled = jax.tree.map(lambda old, new: jnp.where(jnp.isfinite(new), new, old), before, mean)
    n = lax.axis_size(AXIS)
    return settled, sum(2 * (n - 1) / n * leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(before))


def make_step(task: Task, shapes: State, key: jax.Array) -> Any:
    """The jitted step of all workers: (state, batch) -> (state, metrics)."""
    shardings = _shardings(shapes)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    mesh = mesh_of(shapes)
    sharded = jax.shard_map(one_step(task, key), mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=(specs, P()))
    return jax.jit(sharded, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))


def evaluate(task: Task, state: State, mesh: Mesh, per_step: int) -> dict[str, float]:
    """The means of the scores over the held-out samples, each counted once. Every process has all of them, and scores its rows."""
    rows, everywhere = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())

    @partial(jax.jit, out_shardings=everywhere)
    def add_up(params: Any, statistics: Statistics, batch: Batch, counting: int) -> dict[str, jax.Array]:
        scores = task.score(params, statistics, batch)
        return {name: jnp.where(jnp.arange(per_step) < counting, x, 0).sum() for name, x in scores.items()}

    sums: dict[str, float] = {}
    for batch, counting in held_out_batches(task.test, per_step):
        placed = {name: _place(column, rows) for name, column in batch.items()}
        for name, total in jax.device_get(add_up(state.params, state.statistics, placed, counting)).items():
            sums[name] = sums.get(name, 0.0) + float(total)
    return {name: total / count(task.test) for name, total in sums.items()}


@dataclass(frozen=True)
class Output:
    """Where the command line asks to save and to write."""

    checkpoint: Path | None
    save_every: int | None
    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        if self.save_every is not None and not self.checkpoint:
            raise ValueError("--save-every only goes with --checkpoint DIR")

    def saves(self, say: Callable[[str], None]) -> Saves | None:
        """The saves that are asked for; the line about a run that is taken up again goes to `say`."""
        return Saves(self.checkpoint, 100 if self.save_every is None else self.save_every, say) if self.checkpoint else None

    def write(self, result: Result) -> None:
        """Writes the figures and the picture."""
        if self.json:
            write_json(self.json, asdict(result))
        if self.plot:
            plot(self.plot, result)


def add_task_flags(parser: Any) -> None:
    """The flags that say what is trained, and as whom."""
    parser.add_argument("--task", choices=TASKS, help=f"default: {Settings.task}")
    parser.add_argument("--data", metavar="DIR", help="where the task's files are, for one that is read from files")
    parser.add_argument("--model", help="for a task that has several; default: its first")
    parser.add_argument("--preset", choices=PRESETS, help="batch, density, optimizer and its rates as in the papers")


def add_flags(parser: Parser) -> None:
    """All flags but those that say what the workers are."""
    add_task_flags(parser)
    parser.add_argument("--method", choices=METHODS, help=f"default: {Settings.method}")
    parser.add_argument("--density", type=float, help=f"share of the gradient to send, in (0, 1]; default: {Settings.density}")
    parser.add_argument("--steps", type=int, help="default: the task's own")
    parser.add_argument("--batch", type=int, help="samples per worker and step; default: the task's own")
    parser.add_argument("--seed", type=int, help=f"of parameters, order of the data, and dropout; default: {Settings.seed}")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, help=f"what makes a step of the exchanged gradient; default: {Settings.optimizer}"
    )
    parser.add_argument("--learning-rate", type=float, help="at its peak; default: the task's own for the optimizer")
    parser.add_argument("--momentum", type=float, help="Nesterov's for sgd, adamw's first moment; default: the task's own")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here, and go on from the newest save there is")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="with --checkpoint; default: 100")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw loss, density, threshold and imbalance here")


def asked_for(arguments: dict[str, Any]) -> tuple[Settings, Output]:
    """What the flags ask for; raises a ValueError for what can't be."""
    output = Output(**{field.name: arguments[field.name] for field in fields(Output)})
    given = {field.name: arguments[field.name] for field in fields(Settings) if arguments.get(field.name) is not None}
    return settings_of(given), output


def main() -> None:
    parser = Parser(description="Train one task with one method and report what was sent and what came of it.", allow_abbrev=False)
    parser.add_argument("--workers", type=int, help=f"data-parallel workers, each on a device of its own; default: {Settings.workers}")
    parser.add_argument("--simulate", action="store_true", help="all workers on one device instead")
    add_flags(parser)
    arguments = vars(parser.parse_args())
    one_device = arguments.pop("simulate")
    console = Console()
    with parser.complaining():
        settings, output = asked_for(arguments)
        provide_devices(1 if one_device else settings.workers)
        saves = output.saves(console.print)
        with progress(console) as show:
            result = (train_simulated if one_device else train)(settings, show, saves)
        console.print(table(result))
        output.write(result)


if __name__ == "__main__":
    main()
