"""VGG-16 and VGG-19 (Simonyan and Zisserman, arXiv:1409.1556) with BatchNorm, and one dense layer, as is usual for small images."""

from functools import partial

import flax.linen as nn
import jax

from workloads.normalised import normalised

_FEATURES = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Five groups of convolutions, each of which ends with half the height and width."""

    classes: int
    convolutions: tuple[int, ...]  # of each group

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """float [batch, 32, 32, 3] -> logits float [batch, classes]."""
        x = images
        for features, convolutions in zip(_FEATURES, self.convolutions, strict=True):
            for _ in range(convolutions):
                x = nn.relu(normalised(x, features, 3, train))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        logits: jax.Array = nn.Dense(self.classes)(x.reshape(x.shape[0], -1))
        return logits


VGG16 = partial(VGG, convolutions=(2, 2, 3, 3, 3))  # 14.7 million parameters
VGG19 = partial(VGG, convolutions=(2, 2, 4, 4, 4))  # 20.0 million
