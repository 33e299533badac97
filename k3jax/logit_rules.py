"""What a request adds to the model's logits before it samples: biases, forbidden stop tokens, a grammar's mask.

    bias         l <- l + b                  listed tokens
    min tokens   l <- -inf                   stop tokens, at positions below `min_length`
    mask         l <- -inf                   tokens whose bit is 0, in constrained rows

They come before penalties and temperature, as in vLLM. All are arrays, so that one program serves all requests; batches
without any of them skip the work.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from k3jax.cache import Leaf
from k3jax.conditional import run_if

WORD = 32
"""Tokens per word of a mask."""


def mask_words(vocab_size: int) -> int:
    """Words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // WORD)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of each row of a batch."""

    bias_ids: Leaf
    """int32 [B, K]: filled with -1."""
    bias: Leaf
    """float32 [B, K]."""
    biased: Leaf
    """bool [B]: rows whose biases count."""
    min_length: Leaf
    """int32 [B]: length of the sequence below which no stop token is sampled."""
    allowed: Leaf
    """int32 [B, ceil(V / 32)]: token t is bit t % 32 of word t // 32."""
    constrained: Leaf
    """bool [B]: rows whose mask counts."""

    @classmethod
    def none(cls, batch: int, vocab_size: int, biases: int) -> "LogitRules":
        """Rules that change nothing, with room for `biases` biases a row."""
        return cls(
            np.full((batch, biases), -1, np.int32),
            np.zeros((batch, biases), np.float32),
            np.zeros(batch, bool),
            np.zeros(batch, np.int32),
            np.full((batch, mask_words(vocab_size)), -1, np.int32),
            np.zeros(batch, bool),
        )

    def apply(
        self,
        logits: Float32[Array, "B V"],
        position: Int32[Array, " B"],
        stop_ids: Int32[Array, "B S"],
        running: Bool[Array, " B"],
    ) -> Float32[Array, "B V"]:
        """The logits of the token at `position`; `stop_ids` are filled with -1."""
        early = position < self.min_length
        ruled = jnp.any(running & (early | self.biased | self.constrained))
        return run_if(ruled, self._apply, lambda logits, *_: logits, logits, early, stop_ids)

    def _apply(
        self, logits: Float32[Array, "B V"], early: Bool[Array, " B"], stop_ids: Int32[Array, "B S"]
    ) -> Float32[Array, "B V"]:
        vocab = logits.shape[1]
        row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

        def column(ids: Array, counts: Array) -> Array:
            # A negative index would count from the end; one past the end is dropped.
            return jnp.where((ids >= 0) & counts[:, None], ids, vocab)

        logits = logits.at[row, column(self.bias_ids, self.biased)].add(self.bias, mode="drop")
        logits = logits.at[row, column(stop_ids, early)].set(-jnp.inf, mode="drop")
        return jnp.where(unpack(self.allowed, vocab) | ~self.constrained[:, None], logits, -jnp.inf)


def unpack(words: Int32[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """The bits of packed masks."""
    bit = jnp.arange(WORD, dtype=jnp.int32)
    bits = jax.lax.shift_right_logical(words[:, :, None], jnp.broadcast_to(bit, (*words.shape, WORD))) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] > 0
