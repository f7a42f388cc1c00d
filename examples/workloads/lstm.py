"""A language model of LSTM layers, its output weights tied to the embedding or not (Press and Wolf, arXiv:1608.05859)."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class LSTM(nn.Module):
    """Embedding, LSTM layers of the same width, and a distribution over the next token; dropout around each layer."""

    vocabulary: int
    width: int
    layers: int = 2
    tied: bool = True
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        """int32 [batch, length] -> logits float [batch, length, vocabulary], of the token that follows each."""
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(0.05))
        drop = nn.Dropout(self.dropout, deterministic=not train)
        x = drop(embed(tokens))
        for _ in range(self.layers):
            nothing = 0 * x[:, 0]  # zeros whose type says, as that of x does, that they may differ between workers
            x = drop(nn.RNN(nn.OptimizedLSTMCell(self.width))(x, initial_carry=(nothing, nothing)))
        if self.tied:
            bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,))
            return embed.attend(x) + jnp.expand_dims(bias, (0, 1))
        logits: jax.Array = nn.Dense(self.vocabulary)(x)
        return logits
