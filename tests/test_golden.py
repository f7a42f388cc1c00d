"""The published rules of every method, step by step against traces of the published implementation.

`golden/*.json` hold runs of the authors' released code (PyTorch, several workers). Its threshold is a 64-bit number. With 64-bit types
enabled ours is one too, and everything must be equal, sums to their rounding; in float32 the first difference, if any, must be an element
that lies within 1e-5 of the threshold that was corrected so far. Methods without such a threshold are equal in float32 too.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import exdyna_jax
from simulate import AXIS, flat, metrics, simulate

TRACES = sorted((Path(__file__).parent / "golden").glob("*.json"))

# how each method is asked for the published rules, and for as many slots as are needed
PUBLISHED: dict[str, dict[str, Any]] = {
    "exdyna": {"threshold_rule": "paper", "balance": "paper"},
    "micro": {"threshold_rule": "paper", "capacity_factor": math.inf},
    "deft": {"capacity_factor": math.inf},
    "top_k": {},
    "clt_k": {},
    "hard_threshold": {"capacity_factor": math.inf},
}


def test_all_traces_are_here() -> None:
    assert len(TRACES) == 10
    assert {json.loads(path.read_text())["case"]["method"] for path in TRACES} == set(PUBLISHED)


def _gradients(case: dict[str, Any], t: int) -> list[np.ndarray]:
    """The gradients that the traces were made with, leaves `[n, size]`."""
    drift = 1 + case["drift"] * math.sin(t / 7)
    workers = []
    for w in range(case["workers"]):
        rng = np.random.RandomState(case["seed"] * 1_000_003 + t * 1009 + w)
        workers.append(
            [(rng.standard_normal(s) * c * drift).astype(np.float32) for s, c in zip(case["sizes"], case["scales"], strict=True)]
        )
    return [np.stack(leaf) for leaf in zip(*workers, strict=True)]


def _differences(update: np.ndarray, told: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """What is not equal to the trace and would have to be, whatever the rounding."""
    nonzero = np.flatnonzero(update)
    equal = {
        "k": told["sent"] == want["k"],
        "selected": told["selected"] == want["k"],
        "k_per_worker": told["selected_per_worker"].tolist() == want.get("k_per_worker", told["selected_per_worker"].tolist()),
        "blocks": "blocks" not in told or told["blocks"].tolist() == want["blocks"],
        "nnz": nonzero.size == want["nnz"],
        "index_sum": nonzero.sum() == want["index_sum"],
        "index_xor": np.bitwise_xor.reduce(nonzero) == want["index_xor"],
        "indices": nonzero.tolist() == want.get("indices", nonzero.tolist()),
    }
    return [name for name, fine in equal.items() if not fine]


@pytest.mark.parametrize("x64", [True, False], ids=["x64", "float32"])
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path, x64: bool) -> None:
    trace = json.loads(path.read_text())
    case, n = trace["case"], trace["case"]["workers"]
    options = dict(PUBLISHED[case["method"]])
    if case["method"] == "exdyna":
        busiest = max(max(step["k_per_worker"]) for step in trace["trace"])
        options["capacity_factor"] = max(busiest * n / int(case["density"] * sum(case["sizes"])), 1)  # as many slots as are needed
    with jax.enable_x64(x64):
        tx = getattr(exdyna_jax, case["method"])(case["density"], AXIS, num_workers=n, **options)
        run = simulate(tx, [jax.ShapeDtypeStruct((size,), jnp.float32) for size in case["sizes"]], n)
        state = run.init()
        for t, want in enumerate(trace["trace"]):
            g = _gradients(case, t)
            a = np.abs(flat(g, 1, np.float32) + flat(state.residual, 1, np.float32))
            update, state = run.step(g, state)
            told, update = metrics(state), flat(update)
            if "threshold" in want:
                assert told["threshold"].dtype == (np.float64 if x64 else np.float32)
                np.testing.assert_allclose(told["threshold"], want["threshold"], rtol=1e-9 if x64 else 1e-5)
            different = _differences(update, told, want)
            if different and not x64 and "threshold" in want:
                near = np.sum(np.abs(a / want["threshold"] - 1) < 1e-5)
                assert 0 < near >= abs(told["sent"] - want["k"]), f"step {t}: {different}, and not enough elements near the threshold"
                break
            assert not different, f"step {t}"
            assert update.sum() == pytest.approx(want["update_sum"], abs=1e-6 * want["update_abs"])
            assert np.abs(update).sum() == pytest.approx(want["update_abs"], rel=1e-6)
            np.testing.assert_allclose(np.linalg.norm(flat(state.residual, 1), axis=1), want["residual_norm"], rtol=1e-6)
        if x64:
            assert t == len(trace["trace"]) - 1
