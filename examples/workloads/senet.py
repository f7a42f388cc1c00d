"""SENet-18 (Hu et al., arXiv:1709.01507): pre-activated residual blocks (arXiv:1603.05027) whose channels are weighed by their means."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from workloads.normalised import batch_norm, convolution, normalised

_SQUEEZE = 16  # channels for each of the hidden layer that weighs them


class Block(nn.Module):
    """Two convolutions, each behind its normalisation, then the weights of the channels, beside a short cut."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """float [batch, height, width, channels] -> [batch, height / stride, width / stride, features]."""
        y = nn.relu(batch_norm(use_running_average=not train)(x))
        short = x
        if self.stride > 1 or x.shape[-1] != self.features:
            short = convolution(self.features, (1, 1), (self.stride, self.stride))(y)
        y = convolution(self.features, (3, 3), (self.stride, self.stride))(y)
        y = nn.relu(batch_norm(use_running_average=not train)(y))
        y = convolution(self.features, (3, 3))(y)
        weights = nn.relu(nn.Dense(self.features // _SQUEEZE)(y.mean(axis=(1, 2))))
        weights = nn.sigmoid(nn.Dense(self.features)(weights))
        return y * jnp.expand_dims(weights, (1, 2)) + short


class SENet18(nn.Module):
    """11.3 million parameters."""

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
