"""Public function of the Markov walk."""

from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int32

from pallas.dispatch import Implementation, select
from pallas.gemv.int8 import Int8Matrix
from pallas.markov import mosaic, xla


class Walk(NamedTuple):
    """Tokens of a row, and the bias that each was drawn under."""

    token: Int32[Array, " G"]
    bias: Float32[Array, "G V"]


def walk(
    base: Float32[Array, "G V"],
    scale: Float32[Array, ""],
    anchor: Int32[Array, ""],
    embedding: Float[Array, "V r"],
    head: Int8Matrix,
    *,
    implementation: Implementation = None,
) -> Walk:
    """Token k is argmax(base[k] + scale * bias[k]), bias[k] = head @ embedding[token k - 1]; token -1 is the anchor.

    Of equal scores the lower token counts. `base` are logits times `scale`; Gumbel noise in it makes the argmax a draw.
    A kernel serves ranks of 128 and 256 and embeddings of bfloat16.
    """
    return Walk(*select(implementation, mosaic=mosaic.on_gpu, xla=xla.walk)(base, scale, anchor, embedding, head))
