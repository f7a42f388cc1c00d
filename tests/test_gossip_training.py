"""Gossip in the training example, whose workers each have parameters of their own; and workers that are simulated on one device."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import compare
import train
from checkpoint import Saves
from report import History
from scale import Scale

STEPS = 4
SETTINGS = train.Settings(workers=3, steps=STEPS, batch=8)
PARAMETERS = 118_186


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All runs share their compiled step. Optax's schedules ask for the promotion."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    compilation_cache.reset_cache()
    with jax.numpy_dtype_promotion("standard"):
        yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("method", ["exdyna", "crossover"])
def test_simulated_workers_do_what_devices_do(method: str) -> None:
    settings = replace(SETTINGS, method=method)
    simulated, real = train.train_simulated(settings), train.train(settings)
    assert simulated.history.keys() == real.history.keys()
    for name in ("loss", "bytes_sent", "bytes_dense"):
        np.testing.assert_allclose(simulated.history[name], real.history[name], rtol=1e-4)
    assert simulated.loss == pytest.approx(real.loss, rel=1e-3)
    assert simulated.parameters == real.parameters == PARAMETERS


def test_one_group_is_dense() -> None:
    """What is evaluated is the mean, which has moved by the mean gradient."""
    one, dense = (train.train_simulated(replace(SETTINGS, method=method, workers=2)) for method in ("hierarchical", "dense"))
    np.testing.assert_allclose(one.history["loss"], dense.history["loss"], rtol=1e-4)
    assert one.loss == pytest.approx(dense.loss, rel=1e-4)
    assert max(one.history["consensus_distance"]) == 0


def test_save_of_all_workers(tmp_path: Path) -> None:
    """A run that is taken up again ends as one that never stopped; with other workers it is not taken up."""
    settings = replace(SETTINGS, method="crossover")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    want = train.train_simulated(settings, saves=Saves(whole, 2))

    class Stopped(Exception):
        pass

    def stop(history: History, steps: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        train.train_simulated(settings, stop, Saves(stopped, 2))
    with pytest.raises(ValueError, match=r"crossover goes on only with as many workers as saved their parameters: 3"):
        train.train_simulated(replace(settings, workers=4), saves=Saves(stopped, 2))
    got = train.train_simulated(settings, saves=Saves(stopped, 2))
    assert replace(got, seconds_per_step=0.0) == replace(want, seconds_per_step=0.0)
    state, wanted = (ocp.StandardCheckpointer().restore(folder / str(STEPS) / "state") for folder in (stopped, whole))
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    assert all(len(np.unique(leaf.reshape(3, -1), axis=0)) == 3 for leaf in jax.tree.leaves(state["params"]))


def _run(main: Any, folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a command line prints, and the figures it writes; it draws a picture."""
    with pytest.MonkeyPatch.context() as patch, (folder / "out.txt").open("w") as out:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "argv", ["example.py", *arguments, "--json=out.json", "--plot=out.png"])
        patch.setattr(sys, "stdout", out)
        main()
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG\r\n")
    return (folder / "out.txt").read_text(), json.loads((folder / "out.json").read_text())


def test_64_workers(tmp_path: Path) -> None:
    output, figures = _run(train.main, tmp_path, "--method=sgp", "--workers=64", "--simulate", "--steps=2", "--batch=2")
    assert re.search(r"distance to the mean │ \d\.\d+ in the last step", output)
    assert re.search(r"^step 2/2  loss \d\.\d+  acc \d+\.\d%  apart \d\.\d+ ", output, re.MULTILINE)
    assert figures["parameters"] == PARAMETERS
    assert figures["bytes_sent"] == 2 * (4 * PARAMETERS + 4)
    assert all(distance > 0 for distance in figures["history"]["consensus_distance"])


def test_side_by_side(tmp_path: Path) -> None:
    output, figures = _run(compare.main, tmp_path, "--methods=hierarchical,dense", "--simulate", "--workers=2", "--steps=4", "--batch=8")
    assert re.search(r"│ hierarchical +│ +\d+\.\d\d% │ +\d\.\d+ │ +- │ +- │ +- │ +- │ +0\.\d+ │ +- │ +- │", output)
    hierarchical, dense = figures["summary"]
    assert hierarchical["consensus_distance"] == 0
    assert hierarchical["density"] is dense["consensus_distance"] is None


def test_gossip_does_not_scale_what_it_selects() -> None:
    with pytest.raises(ValueError, match=r"crossover, sgp: mixes parameters, and selects nothing from gradients"):
        Scale(("crossover", "top_k", "sgp"))
