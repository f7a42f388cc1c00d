"""The settings that the papers trained with, where they differ from those of the examples.

From the authors' released code to ExDyna, arXiv:2402.13781 (kljp/exdyna: `cnn-lstm/run.py`, `cnn-lstm/train.py`, `ncf/ncf.py`). MiCRO,
arXiv:2310.00967, and DEFT, arXiv:2307.03500, are of the same authors and build on the same code. The norm to which the LSTM's gradient is
clipped is that of the language task, which this code has from PowerSGD's, arXiv:1905.13727 (epfml/powersgd: `tasks/language_modeling`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Recipe(NamedTuple):
    """How to train a task. An epoch is as many steps as it takes to see all samples once."""

    settings: Mapping[str, Any]  # of the example's command line, which may ask for other ones
    epochs: int
    rate: float  # learning rate of `reference` samples in a step; in proportion to the samples elsewhere
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation]
    reference: int | None = None  # None: the rate is the same whatever the samples
    warm_up: int = 0  # epochs in which the rate rises from `rate` to where it belongs
    drops: tuple[int, ...] = ()  # epochs from which on it is a tenth of what it was
    clip: float | None = None  # the norm of a worker's gradient, before it is exchanged

    def peak(self, samples: int) -> float:
        """The highest learning rate, with so many samples in a step."""
        return self.rate if self.reference is None else self.rate * samples / self.reference

    def schedule(self, peak: float, epoch: int) -> optax.Schedule:
        """The learning rate over the steps, of which an epoch has so many."""

        def rate(step: Any) -> jax.Array:
            done = jnp.asarray(step, jnp.float32) / epoch
            raised = self.rate + (peak - self.rate) * jnp.minimum(done / max(self.warm_up, 1), 1) if self.warm_up else jnp.float32(peak)
            return raised * 0.1 ** sum((done >= drop).astype(jnp.float32) for drop in self.drops)

        return rate


def _nesterov_with_decay(schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(1e-4, mask=_but_batch_norm), optax.sgd(schedule, momentum=0.9, nesterov=True))


def _but_batch_norm(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, leaf: "BatchNorm" not in jax.tree_util.keystr(path), params)


VISION = Recipe(
    {"batch": 32, "density": 0.001, "optimizer": "sgd", "momentum": 0.9},
    epochs=200,
    rate=0.1,
    optimizer=_nesterov_with_decay,
    reference=128,
    warm_up=5,
    drops=(150,),
)
LANGUAGE = Recipe(
    {"batch": 32, "density": 0.001, "optimizer": "sgd", "momentum": 0.0},
    epochs=90,
    rate=2.5,
    optimizer=optax.sgd,
    reference=64,
    warm_up=5,
    drops=(60, 80),
    clip=0.4,
)
RECOMMENDATION = Recipe(
    # 2^20 samples in a step of 8 workers, a fifth of which users were seen with
    {"batch": 2**20 // 5 // 8, "density": 0.001, "optimizer": "adam", "momentum": 0.25},
    epochs=30,
    rate=0.0045,
    optimizer=lambda schedule: optax.adam(schedule, b1=0.25, b2=0.5),
)

PRESETS = {"paper": {"cifar10": VISION, "cifar100": VISION, "wikitext2": LANGUAGE, "movielens": RECOMMENDATION}}


def recipe_of(preset: str, task: str) -> Recipe:
    """The recipe of a preset for a task; raises a ValueError if there is none."""
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} is not one of {', '.join(PRESETS)}")
    if task not in PRESETS[preset]:
        raise ValueError(f"preset={preset!r} has no settings for task={task!r}, only for {', '.join(PRESETS[preset])}")
    return PRESETS[preset][task]
