"""The arrays that go into and come out of the KDA ops.

Dimension names: B rows, T tokens, W verified tokens, H heads, D channels of a head (keys and values alike), N
boundaries, S pool slots.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Float32

WINDOW = 3
"""Raw rows that the causal convolution of width 4 looks back to."""

KEY_EPS = 1e-6
"""Added to the sum of squares when queries and keys are L2-normalised."""


class KdaWeights(NamedTuple):
    """Parameters of one KDA layer beside its projections, all float32.

    `conv[3]` multiplies the current token. `a_log` and `dt_bias` shape the forget gate, `norm` scales the output per
    channel.
    """

    conv: Float32[Array, "4 H 3 D"]
    a_log: Float32[Array, "H"]
    dt_bias: Float32[Array, "H D"]
    norm: Float32[Array, "D"]


class Prefill(NamedTuple):
    """Result of `prefill`: gated output, state and window after each row's last valid token and at its boundaries."""

    output: Float[Array, "B T H D"]
    state: Float32[Array, "B H D D"]
    window: Float[Array, "B 3 H 3 D"]
    boundary_states: Float32[Array, "B N H D D"] | None
    boundary_windows: Float[Array, "B N 3 H 3 D"] | None


class Records(NamedTuple):
    """What `commit` needs to replay a token: write vector u, normalised key k, log decay g (zero for padding)."""

    write: Float32[Array, "B W H D"]
    key: Float32[Array, "B W H D"]
    decay: Float32[Array, "B W H D"]


class Verify(NamedTuple):
    """Result of `verify`: gated output of every token, and the records to commit."""

    output: Float[Array, "B W H D"]
    records: Records


class Decode(NamedTuple):
    """Result of `decode`: gated output and both pools, updated in the rows' slots."""

    output: Float[Array, "B H D"]
    state_pool: Float32[Array, "S H D D"]
    window_pool: Float[Array, "S 3 H 3 D"]


class Pools(NamedTuple):
    """Result of `commit`: both pools, updated in the rows' slots."""

    state_pool: Float32[Array, "S H D D"]
    window_pool: Float[Array, "S 3 H 3 D"]


class Affine(NamedTuple):
    """A piece of a sequence as a map of the state: S_out = transition @ S_in + local_state."""

    transition: Float32[Array, "B H D D"]
    local_state: Float32[Array, "B H D D"]
