"""A small language model of transformer blocks with causal attention, normalised before each part (Vaswani et al., arXiv:1706.03762)."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Transformer(nn.Module):
    """Embeddings of tokens and positions, blocks of attention and a hidden layer, and a distribution over the next token."""

    vocabulary: int
    width: int
    layers: int = 2
    heads: int = 4
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        """int32 [batch, length] -> logits float [batch, length, vocabulary], of the token that follows each."""
        drop = nn.Dropout(self.dropout, deterministic=not train)
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(0.02))
        positions = self.param("positions", nn.initializers.normal(0.02), (1, tokens.shape[1], self.width))
        x = drop(embed(tokens) + positions)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = x + drop(nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask))
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + drop(nn.Dense(self.width)(hidden))
        bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,))
        return embed.attend(nn.LayerNorm()(x)) + jnp.expand_dims(bias, (0, 1))
