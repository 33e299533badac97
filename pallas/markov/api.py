"""Public function of the Markov walk."""

from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int32

from pallas.dispatch import Implementation, select
from pallas.gemv.int8 import Int8Matrix
from pallas.markov import mosaic, xla


class Walk(NamedTuple):
    """Tokens of a row, and the scores that each was drawn from, before noise."""

    token: Int32[Array, " G"]
    score: Float32[Array, "G V"]


def walk(
    logits: Float32[Array, "P V"],
    noise: Float32[Array, "G V"],
    scale: Float32[Array, ""],
    anchor: Int32[Array, ""],
    embedding: Float[Array, "V r"],
    head: Int8Matrix,
    *,
    implementation: Implementation = None,
) -> Walk:
    """Token k is argmax(score[k] + noise[k]), score[k] = scale * (logits[k] + head @ embedding[token k - 1]).

    Token -1 is the anchor. Of equal ones the lower token counts. Rows of `logits` behind the last place of `noise` are
    not looked at. A kernel serves ranks of 128 and 256 and embeddings of bfloat16.
    """
    backends = select(implementation, mosaic=mosaic.on_gpu, xla=xla.walk)
    return Walk(*backends(logits, noise, scale, anchor, embedding, head))
