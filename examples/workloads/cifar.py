"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 60,000 colour images of 32 x 32 pixels, from the files of the python version."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from workloads import Batch, Columns, Pace, Params, Statistics, Task
from workloads.files import complaint, existing
from workloads.googlenet import GoogLeNet
from workloads.pickled import read_pickle
from workloads.resnet import ResNet18
from workloads.senet import SENet18
from workloads.vgg import VGG16, VGG19

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": ResNet18,
    "vgg16": VGG16,
    "vgg19": VGG19,
    "senet18": SENet18,
    "googlenet": GoogLeNet,
}

_PIXELS = 3 * 32 * 32
_PADDING = 4  # pixels that an image is moved by, at most
_MEAN, _SCALE = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)  # of the colours, over the training images
_STEPS = 20_000  # about a hundred epochs of 8 workers with 32 samples each
_PACES = {"sgd": Pace(0.1), "adamw": Pace(0.001)}


class Version(NamedTuple):
    """One of the two data sets."""

    name: str
    folder: str  # that its archive unpacks to
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str  # the key that the labels have
    classes: int


CIFAR10 = Version("CIFAR-10", "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), "labels", 10)
CIFAR100 = Version("CIFAR-100", "cifar-100-python", ("train",), ("test",), "fine_labels", 100)


def read(data: Path, version: Version, names: tuple[str, ...]) -> Columns:
    """The images uint8 [samples, 32, 32, 3] and labels int32 [samples] of some of the files.

    Raises:
      ValueError: for a file that is missing, damaged, truncated, or of another version.
    """
    form = f"one of the files {', '.join(version.train + version.test)} of the python version of {version.name} ({version.folder})"
    batches = [_read_file(existing(data, name, f"it should be {form}", version.folder), version, form) for name in names]
    images, labels = (np.concatenate(column) for column in zip(*batches, strict=True))
    return {"image": images, "label": labels}


def _read_file(path: Path, version: Version, form: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = read_pickle(path)
    except ValueError as error:
        raise complaint(path, str(error), form) from error
    images, labels = content.get("data"), content.get(version.labels)
    if labels is None:
        raise complaint(path, f"has no {version.labels!r}, only {', '.join(map(repr, sorted(content)))}: is it of another version?", form)
    if not isinstance(images, np.ndarray) or images.shape[1:] != (_PIXELS,):
        raise complaint(path, f"has no 'data' of {_PIXELS} bytes for each image", form)
    if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < version.classes for label in labels):
        raise complaint(path, f"has labels that are not in 0..{version.classes - 1}", form)
    if not len(labels) == len(images) > 0:
        raise complaint(path, f"has {len(images)} images and {len(labels)} labels", form)
    return images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(labels, np.int32)


def _normalised(images: jax.Array) -> jax.Array:
    mean, scale = (jnp.expand_dims(jnp.array(x, jnp.float32), (0, 1, 2)) for x in (_MEAN, _SCALE))
    return (images.astype(jnp.float32) / 255 - mean) / scale


def _augmented(images: jax.Array, key: jax.Array) -> jax.Array:
    """Each image moved by up to four pixels, and every second one mirrored, as the papers do."""
    key_corner, key_mirror = jax.random.split(key)
    padded = jnp.pad(images, ((0, 0), (_PADDING, _PADDING), (_PADDING, _PADDING), (0, 0)))
    corners = jax.random.randint(key_corner, (images.shape[0], 2), 0, 2 * _PADDING + 1)
    mirrored = jax.random.bernoulli(key_mirror, shape=(images.shape[0], 1, 1, 1))
    moved = jax.vmap(lambda image, corner: lax.dynamic_slice(image, (*corner, 0), (32, 32, 3)))(padded, corners)
    return jnp.where(mirrored, moved[:, :, ::-1], moved)


def image_task(train: Columns, test: Columns, network: nn.Module) -> Task:
    """The task, for a network `float [batch, 32, 32, 3], train: bool -> logits float [batch, classes]`."""

    def init(key: jax.Array) -> tuple[Params, Statistics]:
        variables = network.init(key, jnp.zeros((1, 32, 32, 3)), train=False)
        return variables["params"], variables.get("batch_stats", {})

    def judge(logits: Any, labels: jax.Array) -> dict[str, jax.Array]:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": losses, "accuracy": (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)}

    def loss(
        params: Params, statistics: Statistics, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[Statistics, dict[str, jax.Array]]]:
        key_images, key_dropout = jax.random.split(key)
        images = _normalised(_augmented(batch["image"], key_images))
        variables = {"params": params, "batch_stats": statistics}
        logits, after = network.apply(variables, images, train=True, mutable=["batch_stats"], rngs={"dropout": key_dropout})
        means = jax.tree.map(jnp.mean, judge(logits, batch["label"]))
        return means.pop("loss"), (after["batch_stats"], means)

    def score(params: Params, statistics: Statistics, batch: Batch) -> dict[str, jax.Array]:
        logits = network.apply({"params": params, "batch_stats": statistics}, _normalised(batch["image"]), train=False)
        return judge(logits, batch["label"])

    return Task(train, test, init, loss, score, _STEPS, _PACES)


def _load(data: Path, model: str, version: Version) -> Task:
    train, test = read(data, version, version.train), read(data, version, version.test)
    return image_task(train, test, MODELS[model](version.classes))


def load_cifar10(data: Path, model: str) -> Task:
    """CIFAR-10, with its test images held out."""
    return _load(data, model, CIFAR10)


def load_cifar100(data: Path, model: str) -> Task:
    """CIFAR-100 with its fine labels, and its test images held out."""
    return _load(data, model, CIFAR100)
