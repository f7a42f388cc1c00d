"""What training needs to know of a task, and the order in which its samples come."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

Batch = Mapping[str, Any]  # arrays whose first axis counts the samples
Columns = Mapping[str, np.ndarray]  # a whole data set, in the same form
Params = Any
Statistics = Any  # what a model keeps beside its parameters and does not train: the running averages of BatchNorm; {} if it keeps nothing


def by_accuracy(means: Mapping[str, float]) -> dict[str, float]:
    """The measure of a task whose answers are right or wrong."""
    return {"accuracy": means["accuracy"]}


class Pace(NamedTuple):
    """How fast an optimizer goes."""

    peak: float  # the highest learning rate
    momentum: float = 0.9  # Nesterov's, or the decay of AdamW's first moment


class Task(NamedTuple):
    """A model, its data, and how both are judged."""

    train: Columns
    test: Columns  # held out
    init: Callable[[jax.Array], tuple[Params, Statistics]]  # key -> what the model begins with
    # (parameters, statistics, batch, key) -> the mean loss of the batch, and (new statistics, further means of the batch: at least
    # "accuracy"). The key is for whatever the task draws at random in training: dropout, augmentation, negative samples.
    loss: Callable[[Params, Statistics, Batch, jax.Array], tuple[jax.Array, tuple[Statistics, dict[str, jax.Array]]]]
    # (parameters, statistics, batch) -> one number a sample: "loss", and "accuracy", which is the share of right answers, whatever the
    # task asks
    score: Callable[[Params, Statistics, Batch], dict[str, jax.Array]]
    steps: int  # a dense run of 8 workers converges in these steps
    paces: Mapping[str, Pace]  # by optimizer
    measures: Callable[[Mapping[str, float]], dict[str, float]] = by_accuracy  # held-out means of the scores -> what the task is judged by
    batch: int = 32  # samples that a worker takes for a step


def count(columns: Columns) -> int:
    """The number of samples."""
    return len(next(iter(columns.values())))


def training_batches(columns: Columns, size: int, seed: int, start: int, stop: int) -> Iterator[Batch]:
    """The batches of the steps from `start` up to `stop`: each epoch in an order of its own, its incomplete last batch left out.

    What a step sees depends on the seed and the step alone, so that a run can be taken up again at any step.
    """
    samples = count(columns)
    for step in range(start, stop):
        epoch, place = divmod(step, samples // size)
        if step == start or place == 0:
            order = np.random.default_rng((seed, epoch)).permutation(samples)
        rows = order[place * size : (place + 1) * size]
        yield {name: column[rows] for name, column in columns.items()}


def held_out_batches(columns: Columns, size: int) -> Iterator[tuple[Batch, int]]:
    """All samples in order, in batches of one size, with the number of samples that count: the last batch is filled up from the front."""
    samples = count(columns)
    for start in range(0, samples, size):
        rows = np.arange(start, start + size) % samples
        yield {name: column[rows] for name, column in columns.items()}, min(size, samples - start)
