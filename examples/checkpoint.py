"""Saves of a training run, from the newest of which the run is taken up again.

A save is written beside the others under another name and renamed when it is complete, so that a half-written one is never loaded.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from report import History

_KEPT = 2  # saves; an older one is deleted when a newer one is complete
_FREE = {"workers", "data"}  # settings that may differ from those of the save


class Log(NamedTuple):
    """What is saved beside the state."""

    settings: Mapping[str, Any]
    step: int
    history: History
    seconds: float  # spent in steps


class Saves:
    """The saves of one run in a directory.

    Args:
      directory: of this run alone; made if there is none.
      every: steps between two saves.
      say: is given a line when the run is taken up again.
    """

    def __init__(self, directory: Path, every: int, say: Callable[[str], None] = lambda line: None) -> None:
        if every < 1:
            raise ValueError(f"save_every={every} is not a positive number")
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"checkpoint={str(directory)!r} is not a directory")
        self._directory, self._every, self._say = directory, every, say
        # in the background it would read arrays that the next step donates
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, cleanup_tmp_directories=True, enable_async_checkpointing=False)
        try:
            self._manager = ocp.CheckpointManager(directory.absolute(), options=options)
        except OSError as error:
            raise ValueError(f"checkpoint={str(directory)!r}: can't save there: {error.strerror}") from error

    def newest(self, settings: Mapping[str, Any]) -> Log:
        """The log of the newest save, or one of a run that has yet to begin. Raises a ValueError if it was a run with other settings."""
        step = self._manager.latest_step()
        if step is None:
            return Log(settings, 0, {}, 0.0)
        log = Log(**self._manager.restore(step, args=ocp.args.Composite(log=ocp.args.JsonRestore())).log)
        saved = log.settings
        others = {name: f"{name}={saved.get(name)!r}, not {asked!r}" for name, asked in settings.items() if saved.get(name) != asked}
        if others.keys() - _FREE:
            wrong = "; ".join(other for name, other in others.items() if name not in _FREE)
            raise ValueError(f"the checkpoint in {self._directory} is of a run with {wrong}")
        self._say(f"resuming at step {step} from {self._directory}" + "".join(f", saved with {other}" for other in others.values()))
        return log

    def due(self, step: int, steps: int) -> bool:
        """Whether to save after this step, one of so many."""
        return step % self._every == 0 or step == steps

    def save(self, state: Any, log: Log) -> None:
        """Saves the state, of whatever structure, and the log. It is on disk when this returns."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), log=ocp.args.JsonSave(log._asdict()))
        self._manager.save(log.step, args=args)

    def state(self, log: Log, shapes: Any) -> Any:
        """The state that was saved with the log, in the structure, and laid out as the shardings, of these `jax.ShapeDtypeStruct`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        return self._manager.restore(log.step, args=args).state
