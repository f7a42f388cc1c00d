"""Handwritten digits: 1797 grey images of 8 x 8 pixels that come with scikit-learn, and two small networks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from workloads import Batch, Columns, Pace, Params, Statistics, Task

_TEST_SHARE = 0.2
_SPLIT = 0  # the split is the same whatever the seed of the training, so that runs can be compared


class Convolutional(nn.Module):
    """Two convolutions and a hidden layer, about 118,000 parameters."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """float [batch, 8, 8, 1] -> logits float [batch, 10]."""
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(0.25, deterministic=not train)(x)
        x = nn.relu(nn.Dense(96)(x))
        logits: jax.Array = nn.Dense(10)(x)
        return logits


class Perceptron(nn.Module):
    """Two hidden layers, 2.1 million parameters: many for the work that they make, so that the exchange is what counts."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """float [batch, 8, 8, 1] -> logits float [batch, 10]."""
        x = images.reshape(images.shape[0], -1)
        for width in (1408, 1408):
            x = nn.Dropout(0.25, deterministic=not train)(nn.relu(nn.Dense(width)(x)))
        logits: jax.Array = nn.Dense(10)(x)
        return logits


_MODELS = {"cnn": Convolutional, "mlp": Perceptron}


def _columns(images: np.ndarray, labels: np.ndarray) -> Columns:
    pixels = images.astype(np.float32)[..., None] / 16  # 0..16 as they come
    return {"image": pixels, "label": labels.astype(np.int32)}


def _shift(images: jax.Array, key: jax.Array) -> jax.Array:
    """Moves each image by up to a pixel in each direction: so few images would otherwise be known by heart before long."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    corners = jax.random.randint(key, (images.shape[0], 2), 0, 3)
    return jax.vmap(lambda image, corner: lax.dynamic_slice(image, (*corner, 0), (8, 8, 1)))(padded, corners)


def load(model: str) -> Task:
    """The task, with a fifth of the images of each digit held out."""
    digits = load_digits()
    x_train, x_test, y_train, y_test = train_test_split(
        digits.images, digits.target, test_size=_TEST_SHARE, stratify=digits.target, random_state=_SPLIT
    )
    network = _MODELS[model]()

    def init(key: jax.Array) -> tuple[Params, Statistics]:
        return network.init(key, jnp.zeros((1, 8, 8, 1)), train=False)["params"], {}

    def judge(logits: Any, labels: jax.Array) -> dict[str, jax.Array]:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": losses, "accuracy": (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)}

    def loss(
        params: Params, statistics: Statistics, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[Statistics, dict[str, jax.Array]]]:
        key_shift, key_dropout = jax.random.split(key)
        images = _shift(batch["image"], key_shift)
        logits = network.apply({"params": params}, images, train=True, rngs={"dropout": key_dropout})
        means = jax.tree.map(jnp.mean, judge(logits, batch["label"]))
        return means.pop("loss"), (statistics, means)

    def score(params: Params, statistics: Statistics, batch: Batch) -> dict[str, jax.Array]:
        del statistics
        return judge(network.apply({"params": params}, batch["image"], train=False), batch["label"])

    return Task(
        train=_columns(x_train, y_train),
        test=_columns(x_test, y_test),
        init=init,
        loss=loss,
        score=score,
        steps=600,
        paces={"sgd": Pace(0.1), "adamw": Pace(0.01)},
    )
