"""Arguments and results of the MoE ops."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int32, UInt8


class PackedExperts(NamedTuple):
    """Expert weights in MXFP4: two codes per byte and one E8M0 scale per 32 inputs.

    F is the expert width, L the latent width; `gate_up` stacks w1 and w3, `down` is w2.
    """

    gate_up_packed: UInt8[Array, "E 2 F L//2"]
    gate_up_scale: UInt8[Array, "E 2 F L//32"]
    down_packed: UInt8[Array, "E L F//2"]
    down_scale: UInt8[Array, "E L F//32"]


class DenseExperts(NamedTuple):
    """Expert weights as floating-point arrays, for training."""

    gate_up: Float[Array, "E 2 F L"]
    down: Float[Array, "E L F"]


Experts = PackedExperts | DenseExperts


class Routing(NamedTuple):
    """The experts of each token, best biased score first, and their combination weights."""

    ids: Int32[Array, "N k"]
    weights: Float[Array, "N k"]


class Front(NamedTuple):
    """What a MoE layer makes of its input before the experts run."""

    routing: Routing
    products: tuple[Float[Array, "N ..."], ...]
