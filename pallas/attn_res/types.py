"""Data that passes between the two phases of AttnRes, and the result of a read."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Summary(NamedTuple):
    """Unnormalised attention of several pseudo-queries over frozen sources, per site and token.

    `maximum` is the largest score, `total` the sum of exp(score - maximum), `mixed` the sum of
    exp(score - maximum) times the source. All float32.
    """

    maximum: Float[Array, "sites *batch"]
    total: Float[Array, "sites *batch"]
    mixed: Float[Array, "sites *batch D"]


class Read(NamedTuple):
    """The updated prefix and the normalised mix that the next sublayer takes."""

    prefix: Float[Array, "*batch D"]
    normed: Float[Array, "*batch D"]
