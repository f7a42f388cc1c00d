"""GoogLeNet (Szegedy et al., arXiv:1409.4842) with BatchNorm in the form for small images, two convolutions of 3 x 3 for each of 5 x 5."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from workloads.normalised import normalised


class Widths(NamedTuple):
    """The channels of the four branches of a block, and of the 1 x 1 convolutions in front of two of them."""

    one: int
    before_three: int
    three: int
    before_five: int
    five: int
    pooled: int


_BLOCKS = (
    (Widths(64, 96, 128, 16, 32, 32), Widths(128, 128, 192, 32, 96, 64)),
    (
        Widths(192, 96, 208, 16, 48, 64),
        Widths(160, 112, 224, 24, 64, 64),
        Widths(128, 128, 256, 24, 64, 64),
        Widths(112, 144, 288, 32, 64, 64),
        Widths(256, 160, 320, 32, 128, 128),
    ),
    (Widths(256, 160, 320, 32, 128, 128), Widths(384, 192, 384, 48, 128, 128)),
)


class Inception(nn.Module):
    """Looks at the same place with kernels of several sizes."""

    widths: Widths

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """float [batch, height, width, channels] -> the same with the channels of all branches."""

        def branch(y: jax.Array, *layers: tuple[int, int]) -> jax.Array:
            for features, size in layers:
                y = nn.relu(normalised(y, features, size, train))
            return y

        w = self.widths
        pooled = nn.max_pool(x, (3, 3), strides=(1, 1), padding="SAME")
        branches = (
            branch(x, (w.one, 1)),
            branch(x, (w.before_three, 1), (w.three, 3)),
            branch(x, (w.before_five, 1), (w.five, 3), (w.five, 3)),
            branch(pooled, (w.pooled, 1)),
        )
        return jnp.concatenate(branches, axis=-1)


class GoogLeNet(nn.Module):
    """6.2 million parameters."""

    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """float [batch, 32, 32, 3] -> logits float [batch, classes]."""
        x = nn.relu(normalised(images, 192, 3, train))
        for i, group in enumerate(_BLOCKS):
            if i:
                x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for widths in group:
                x = Inception(widths)(x, train)
        logits: jax.Array = nn.Dense(self.classes)(x.mean(axis=(1, 2)))
        return logits
