"""The tasks to train on. Each is loaded when it is asked for, so that what one needs is not needed for another."""

from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from workloads._task import Batch as Batch
from workloads._task import Columns as Columns
from workloads._task import Pace as Pace
from workloads._task import Params as Params
from workloads._task import Statistics as Statistics
from workloads._task import Task as Task
from workloads._task import count as count
from workloads._task import held_out_batches as held_out_batches
from workloads._task import training_batches as training_batches


class Entry(NamedTuple):
    """Where a task comes from."""

    loader: str  # module:function
    models: tuple[str, ...] = ()  # to choose from, the default first; none: there is but one
    data: str = ""  # what files it is read from; none: it is at hand


_VISION = ("resnet18", "vgg16", "vgg19", "senet18", "googlenet")
_LANGUAGE = ("lstm", "lstm_untied", "transformer")

TASKS = {
    "digits": Entry("digits:load", ("cnn", "mlp")),
    "text": Entry("text:load", _LANGUAGE),
    "recommend": Entry("recommend:load"),
    "cifar10": Entry("cifar:load_cifar10", _VISION, "the python version of CIFAR-10"),
    "cifar100": Entry("cifar:load_cifar100", _VISION, "the python version of CIFAR-100"),
    "wikitext2": Entry("wikitext:load", _LANGUAGE, "the word-level files of WikiText-2"),
    "movielens": Entry("movielens:load", data="MovieLens's ratings.csv or u.data"),
}


def check_choice(name: str, data: str | None, model: str | None) -> None:
    """Raises a ValueError for a task, a directory and a model that don't go together. Nothing is read."""
    if name not in TASKS:
        raise ValueError(f"task={name!r} is not one of {', '.join(TASKS)}")
    entry = TASKS[name]
    if model is not None and model not in entry.models:
        choice = f"is not one of {', '.join(entry.models)}" if entry.models else "does not go with it: it has a model of its own"
        raise ValueError(f"task={name!r}: model={model!r} {choice}")
    if data is not None and not entry.data:
        raise ValueError(f"task={name!r}: data={data!r} does not go with it: its data is at hand")
    if data is None and entry.data:
        raise ValueError(f"task={name!r} needs --data DIR, a directory with {entry.data}")


@lru_cache(maxsize=1)
def load_task(name: str, data: str | None = None, model: str | None = None) -> Task:
    """A task.

    Args:
      name: one of `TASKS`.
      data: the directory of its files, for a task that has some.
      model: one of the task's, for one that has several. Default: the first.

    Raises:
      ValueError: for what doesn't go together, and for files that are missing, damaged, or of another version.
    """
    check_choice(name, data, model)
    entry = TASKS[name]
    options: dict[str, str | Path] = {}
    if entry.data:
        options["data"] = Path(str(data))
    if entry.models:
        options["model"] = model or entry.models[0]
    module, function = entry.loader.split(":")
    task: Task = getattr(import_module(f"workloads.{module}"), function)(**options)
    return task
