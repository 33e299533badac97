"""Sequential heads of DSpark: a logit bias from the previously drafted token (DSpark paper, arXiv 2607.05147)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from k3jax.dspark.config import DSparkConfig
from k3jax.layers.weight import param
from k3jax.params import Tree
from pallas import gemv, markov
from pallas.precision import einsum


class MarkovStep(NamedTuple):
    """Bias of one position, the embedding of the token before it, and the recurrent state (rnn only)."""

    bias: Float[Array, "B V"]
    embedding: Float[Array, "B r"]
    state: Float[Array, "B r"]


class MarkovHead(nnx.Module):
    """vanilla: W2 W1[x]; gated: the embedding is gated by the hidden state; rnn: a gated recurrence over the block."""

    def __init__(self, config: DSparkConfig, parameters: Tree) -> None:
        self.kind = config.markov_kind
        self.weights = nnx.Dict({name: param(weight) for name, weight in parameters.items()})

    @property
    def rank(self) -> int:
        """Width of the token embedding."""
        return self.weights["embedding"].shape[1]

    def __call__(
        self, hidden: Float[Array, "B D"], previous: Int32[Array, " B"], state: Float[Array, "B r"]
    ) -> MarkovStep:
        """One position: `hidden` is the draft's row that predicts it, `previous` the token before it."""
        embedding = self.weights["embedding"][...][previous]
        signal, state = self.signal(hidden, embedding, state)
        (bias,) = gemv.project(signal, self.weights["head"][...], dtypes=(jnp.float32,))
        return MarkovStep(bias, embedding, state)

    def walk(
        self,
        previous: Int32[Array, " B"],
        logits: Float32[Array, "B P V"],
        noise: Float32[Array, "G V"],
        scale: Float32[Array, " B"],
    ) -> markov.Walk:
        """All positions of one row in one launch: see `pallas.markov.walk`.

        Raises `NotImplementedError` with the reason for what it does not serve.
        """
        head = self.weights["head"][...]
        if logits.shape[0] != 1 or self.kind != "vanilla" or not isinstance(head, gemv.Int8Matrix):
            raise NotImplementedError(
                "the walk serves one row and a vanilla head in 8 bits, "
                f"got {logits.shape[0]}, {self.kind}, {type(head).__name__}"
            )
        table = self.weights["embedding"][...]
        return markov.walk(logits[0], noise, scale[0], previous[0], table, head, implementation="mosaic")

    def signal(
        self, hidden: Float[Array, "B D"], embedding: Float[Array, "B r"], state: Float[Array, "B r"]
    ) -> tuple[Float[Array, "B r"], Float[Array, "B r"]]:
        """What the head's matrix turns into the bias, and the recurrent state after it."""
        if self.kind == "vanilla":
            return embedding, state
        if self.kind == "gated":
            gate = jax.nn.sigmoid(self._affine("gate", hidden, embedding))
            return gate * embedding, state
        forget, candidate, output = jnp.split(self._affine("joint", state, embedding, hidden), 3, axis=-1)
        keep = jax.nn.sigmoid(forget)
        state = keep * state + (1 - keep) * jnp.tanh(candidate)
        return jnp.tanh(output), state

    def _affine(self, name: str, *inputs: Float[Array, "B _"]) -> Float[Array, "B _"]:
        product = einsum("bi,oi->bo", jnp.concatenate(inputs, axis=-1), self.weights[name][...])
        return product + self.weights[f"{name}_bias"][...][None]
