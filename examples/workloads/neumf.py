"""NeuMF, neural collaborative filtering: a matrix factorisation and a network side by side (He et al., arXiv:1708.05031)."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class NeuMF(nn.Module):
    """How likely a user takes to an item."""

    users: int
    items: int
    factors: int = 64  # of the matrix factorisation
    layers: tuple[int, ...] = (256, 256, 128, 64)  # of the network: the first is what goes in, half of it of the user, half of the item
    spread: float = 0.01  # standard deviation of the embeddings in the beginning; from so little plain SGD takes long to get away
    dropout: float = 0.0

    @nn.compact
    def __call__(self, users: jax.Array, items: jax.Array, train: bool) -> jax.Array:
        """int32 [...], of one shape -> logits float [...]."""

        def embed(count: int, width: int, of: jax.Array) -> jax.Array:
            embedded: jax.Array = nn.Embed(count, width, embedding_init=nn.initializers.normal(self.spread))(of)
            return embedded

        product = embed(self.users, self.factors, users) * embed(self.items, self.factors, items)
        half = self.layers[0] // 2
        x = jnp.concatenate([embed(self.users, half, users), embed(self.items, half, items)], axis=-1)
        for width in self.layers[1:]:
            x = nn.relu(nn.Dense(width, kernel_init=nn.initializers.glorot_uniform())(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        logits: jax.Array = nn.Dense(1, kernel_init=nn.initializers.lecun_uniform())(jnp.concatenate([product, x], axis=-1))
        return logits[..., 0]
