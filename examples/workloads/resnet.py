"""ResNet-18 (He et al., arXiv:1512.03385) in the form for small images: a stem of 3 x 3 that keeps their size."""

import flax.linen as nn
import jax

from workloads.normalised import normalised


class Block(nn.Module):
    """Two convolutions beside a short cut."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """float [batch, height, width, channels] -> [batch, height / stride, width / stride, features]."""
        short = x
        if self.stride > 1 or x.shape[-1] != self.features:
            short = normalised(x, self.features, 1, train, self.stride)
        y = nn.relu(normalised(x, self.features, 3, train, self.stride))
        y = normalised(y, self.features, 3, train)
        return nn.relu(y + short)


class ResNet18(nn.Module):
    """11.2 million parameters."""

    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """float [batch, 32, 32, 3] -> logits float [batch, classes]."""
        x = nn.relu(normalised(images, 64, 3, train))
        for features, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            x = Block(features, stride)(x, train)
            x = Block(features, 1)(x, train)
        logits: jax.Array = nn.Dense(self.classes)(x.mean(axis=(1, 2)))
        return logits
