"""Language modelling on any sequence of tokens: what comes next?"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from workloads import Batch, Columns, Pace, Params, Statistics, Task


def windows(tokens: np.ndarray, length: int) -> Columns:
    """A sequence cut into samples of `length` tokens and the one behind them, so that each token but the first is asked for once.

    What is left over in the end is left out. A sample knows nothing of the one before it.
    """
    samples = (tokens.size - 1) // length
    starts = np.arange(samples)[:, None] * length
    return {"tokens": tokens[starts + np.arange(length + 1)]}


def perplexity(means: Mapping[str, float]) -> dict[str, float]:
    """Among how many equally likely tokens the model is left to guess, and how often its first guess is right."""
    with np.errstate(over="ignore"):
        return {"perplexity": float(np.exp(means["loss"])), "accuracy": means["accuracy"]}


def language_task(train: Columns, test: Columns, network: nn.Module, steps: int, paces: Mapping[str, Pace]) -> Task:
    """The task.

    Args:
      train: samples as `windows` makes them.
      test: held out, the same.
      network: `int32 [batch, length], train: bool -> logits float [batch, length, vocabulary]`.
      steps: of a run.
      paces: by optimizer.
    """
    length = train["tokens"].shape[1] - 1

    def init(key: jax.Array) -> tuple[Params, Statistics]:
        return network.init(key, jnp.zeros((1, length), jnp.int32), train=False)["params"], {}

    def judge(logits: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        right = (jnp.argmax(logits, axis=-1) == tokens[:, 1:]).astype(jnp.float32)
        return {"loss": losses.mean(axis=1), "accuracy": right.mean(axis=1)}

    def loss(
        params: Params, statistics: Statistics, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[Statistics, dict[str, jax.Array]]]:
        tokens = batch["tokens"].astype(jnp.int32)
        logits = network.apply({"params": params}, tokens[:, :-1], train=True, rngs={"dropout": key})
        means = jax.tree.map(jnp.mean, judge(logits, tokens))
        return means.pop("loss"), (statistics, means)

    def score(params: Params, statistics: Statistics, batch: Batch) -> dict[str, jax.Array]:
        del statistics
        tokens = batch["tokens"].astype(jnp.int32)
        return judge(network.apply({"params": params}, tokens[:, :-1], train=False), tokens)

    return Task(train, test, init, loss, score, steps, paces, perplexity)
