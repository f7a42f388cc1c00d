"""A convolution with BatchNorm behind it, as all networks for CIFAR have it."""

from functools import partial

import flax.linen as nn
import jax

# averages move by a tenth; each worker normalises by the mean and variance of its own samples
batch_norm = partial(nn.BatchNorm, momentum=0.9, epsilon=1e-5)
# without a bias: the normalisation behind it would take it away again
convolution = partial(nn.Conv, use_bias=False, kernel_init=nn.initializers.he_normal())


def normalised(x: jax.Array, features: int, size: int, train: bool, stride: int = 1) -> jax.Array:
    """A convolution with kernels of `size` x `size` and BatchNorm, inside a module's `@nn.compact`."""
    x = convolution(features, (size, size), (stride, stride))(x)
    normal: jax.Array = batch_norm(use_running_average=not train)(x)
    return normal
