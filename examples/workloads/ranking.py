"""Recommendation from implicit feedback: of items that a user was never seen with, which is the one that was held out?

Trained and judged as in He et al., arXiv:1708.05031: against each item that a user was seen with stand items drawn at random, in training
four, and in the end 99 that the user was never seen with.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from workloads import Batch, Pace, Params, Statistics, Task

_TOP = 10  # the held-out item is found if it is among so many
_OTHERS = 99  # items that it is ranked against
_NEGATIVES = 4  # items drawn in training for each that was seen


def measures(means: Mapping[str, float]) -> dict[str, float]:
    """Hit rate, and normalised discounted cumulative gain: 1 / log2(1 + rank) of an item that is found."""
    return {f"HR@{_TOP}": means["accuracy"], f"NDCG@{_TOP}": means["ndcg"]}


def unseen_items(seen: np.ndarray, users: np.ndarray, items: int, rng: np.random.Generator) -> np.ndarray:
    """Different items that these users were never seen with, int32 [len(users), 99].

    Args:
      seen: all pairs, int [pairs, 2].
      users: whose items, int [...]; one may come several times.
      items: how many there are.
      rng: draws them.

    Raises:
      ValueError: if a user was seen with so many that too few are left.
    """
    pairs = np.unique(seen[:, 0].astype(np.int64) * items + seen[:, 1])
    most = np.bincount(pairs // items).max()
    if items - most < _OTHERS:
        raise ValueError(f"there are {items} items and a user was seen with {most} of them: fewer than {_OTHERS} are left to rank against")
    drawn = rng.integers(items, size=(len(users), _OTHERS))
    rows = np.arange(len(users))  # that are not right yet
    while rows.size:
        row = drawn[rows]
        keys = users[rows, None] * np.int64(items) + row
        wrong = pairs[np.minimum(np.searchsorted(pairs, keys), pairs.size - 1)] == keys
        order = np.argsort(row, axis=1)
        ascending = np.take_along_axis(row, order, axis=1)
        again = np.zeros_like(wrong)
        np.put_along_axis(again, order[:, 1:], ascending[:, 1:] == ascending[:, :-1], axis=1)
        wrong |= again
        row[wrong] = rng.integers(items, size=np.count_nonzero(wrong))
        drawn[rows] = row
        rows = rows[wrong.any(axis=1)]
    return drawn.astype(np.int32)


def ranking_task(train: np.ndarray, test: np.ndarray, items: int, network: nn.Module, steps: int, paces: Mapping[str, Pace]) -> Task:
    """The task.

    Args:
      train: pairs (user, item) that were seen, int [pairs, 2], numbered from 0 on.
      test: other such pairs, held out.
      items: how many there are.
      network: `users int32 [...], items int32 [...], train: bool -> logits float [...]`.
      steps: of a run.
      paces: by optimizer.

    Raises:
      ValueError: if a user was seen with so many items that too few are left to rank against.
    """
    others = unseen_items(np.concatenate([train, test]), test[:, 0], items, np.random.default_rng(0))
    candidates = np.concatenate([test[:, 1:].astype(np.int32), others], axis=1)

    def init(key: jax.Array) -> tuple[Params, Statistics]:
        nobody = jnp.zeros(1, jnp.int32)
        return network.init(key, nobody, nobody, train=False)["params"], {}

    def loss(
        params: Params, statistics: Statistics, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[Statistics, dict[str, jax.Array]]]:
        key_items, key_dropout = jax.random.split(key)
        seen = batch["item"][:, None]
        drawn = jax.random.randint(key_items, (seen.shape[0], _NEGATIVES), 0, items)  # a seen one now and then: not worth a look-up
        offered = jnp.concatenate([seen, drawn], axis=1)
        asked = jnp.broadcast_to(batch["user"][:, None], offered.shape)
        logits: Any = network.apply({"params": params}, asked, offered, train=True, rngs={"dropout": key_dropout})
        taken = jnp.zeros_like(logits).at[:, 0].set(1)
        right = (logits > 0) == (taken > 0)
        return optax.sigmoid_binary_cross_entropy(logits, taken).mean(), (statistics, {"accuracy": right.astype(jnp.float32).mean()})

    def score(params: Params, statistics: Statistics, batch: Batch) -> dict[str, jax.Array]:
        del statistics
        asked = jnp.broadcast_to(batch["user"][:, None], batch["items"].shape)
        logits: Any = network.apply({"params": params}, asked, batch["items"], train=False)
        behind = logits[:, 1:] < logits[:, :1]  # strictly: who finds all equal, or no number at all, finds nothing
        ahead = (~behind).sum(axis=1).astype(jnp.float32)
        hit = ahead < _TOP
        losses = jnp.concatenate([jax.nn.softplus(-logits[:, :1]), _NEGATIVES / _OTHERS * jax.nn.softplus(logits[:, 1:])], axis=1)
        return {
            "loss": losses.sum(axis=1) / (1 + _NEGATIVES),  # what training minimises, but against items never seen
            "accuracy": hit.astype(jnp.float32),
            "ndcg": jnp.where(hit, 1 / jnp.log2(ahead + 2), 0),
        }

    return Task(
        train={"user": train[:, 0].astype(np.int32), "item": train[:, 1].astype(np.int32)},
        test={"user": test[:, 0].astype(np.int32), "items": candidates},
        init=init,
        loss=loss,
        score=score,
        steps=steps,
        paces=paces,
        measures=measures,
    )
