"""The tasks to train on. Each is loaded when it is asked for, so that what one needs is not needed for another."""

from importlib import import_module

from workloads._task import Batch as Batch
from workloads._task import Columns as Columns
from workloads._task import Params as Params
from workloads._task import Task as Task
from workloads._task import count as count
from workloads._task import held_out_batches as held_out_batches
from workloads._task import training_batches as training_batches

TASKS = {"digits": "workloads.digits"}  # name -> the module whose load() gives the task


def load_task(name: str) -> Task:
    """The task of this name, one of `TASKS`."""
    task: Task = import_module(TASKS[name]).load()
    return task
