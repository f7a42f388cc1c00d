"""Two processes of two devices each, over gloo, make of the same gradients what one process makes of them that simulates four workers."""

import socket
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest

import process
from compiling import environment

PROCESSES = 2
N = PROCESSES * process.EACH
SECONDS = 240  # for all of it, on a busy machine


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each process saw."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(PROCESSES):
            command = [sys.executable, process.__file__, str(rank), str(PROCESSES), str(port), str(folder)]
            with (folder / f"{rank}.log").open("wb") as log:
                started.append(subprocess.Popen(command, env=environment(sys.path), stdout=log, stderr=subprocess.STDOUT))
        end = time.monotonic() + SECONDS
        # once one has failed the other waits for it in vain
        while any(child.poll() is None for child in started) and not any(child.poll() for child in started) and time.monotonic() < end:
            time.sleep(0.05)
        if any(child.poll() for child in started):
            time.sleep(2)  # most likely the other fails of it, and says so
    finally:
        codes = [child.poll() for child in started]
        for child in started:
            child.kill()
            child.wait()
    logs = "\n".join(f"process {rank}, status {code}:\n{(folder / f'{rank}.log').read_text()}" for rank, code in enumerate(codes))
    assert codes == [0] * PROCESSES, logs
    return [np.load(folder / f"{rank}.npz") for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def wanted() -> list[dict[str, Any]]:
    weights = jax.tree.map(lambda x: np.stack([x] * N), process.params())
    state = jax.vmap(process.transformation().init, axis_name=process.AXIS)(weights)
    step = jax.jit(jax.vmap(process.train, axis_name=process.AXIS))
    steps = []
    for t in range(process.STEPS):
        weights, state, updates = step(process.gradients(t, N), weights, state)
        steps.append(jax.device_get(process.seen(weights, state, updates)))
    assert steps[-1]["equal/skipped"][0] == 1
    return steps


@pytest.mark.parametrize("run", ["shard_map", "pmap"])
def test_two_processes_equal_one(run: str, told: list[Any], wanted: list[dict[str, Any]]) -> None:
    for t, step in enumerate(wanted):
        for name, want in step.items():
            for rank, got in enumerate(told):
                rows = want[0] if name.startswith("equal") else want[rank * process.EACH : (rank + 1) * process.EACH, 0]
                where = f"step {t}, process {rank}, {name}"
                if name == "equal/threshold":  # logarithms may differ in their last bit
                    np.testing.assert_allclose(got[f"{run}/{t}/{name}"], rows, rtol=1e-5, err_msg=where)
                else:
                    np.testing.assert_array_equal(got[f"{run}/{t}/{name}"], rows, where)
