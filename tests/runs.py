"""Runs of the training example that are stopped, and that must end as others do."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from report import Result


class Stopped(Exception):
    """The run is over before its end."""


def saves_in(folder: Path) -> list[int]:
    """The steps of which there is a whole save."""
    return sorted(int(entry.name) for entry in folder.glob("*") if entry.name.isdecimal())


def last_state(result: Result, folder: Path, like: Any = None) -> Any:
    """Of a run that came to its end, as `like` is laid out."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
    return ocp.StandardCheckpointer().restore(folder / str(result.steps) / "state", shapes)


def check_same(got: tuple[Result, Path], want: tuple[Result, Path], rounding: float = 0.0) -> None:
    """All figures but the time, and the last state, agree up to rounding. A count that is off by one does not."""

    def agree(got: Any, wanted: Any) -> None:
        assert got == wanted or math.isclose(got, wanted, rel_tol=rounding)

    jax.tree.map(agree, *(asdict(replace(result, seconds_per_step=0.0)) for result, _ in (got, want)))
    wanted = last_state(*want)
    state = last_state(*got, wanted)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, rounding, rounding, strict=True), state, wanted)
