"""What the tests of the experts share: random packed experts and tokens, and the definition in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas import moe

EXPERTS, LATENT, INNER = 6, 64, 96
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decode(packed, scale):
    """MXFP4 as the format document says, in float64."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = MAGNITUDES[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    return values * 2.0 ** (np.repeat(scale, 32, axis=-1).astype(np.float64) - 127)


def draw_experts(seed=0, experts=EXPERTS, latent=LATENT, inner=INNER):
    rng = np.random.default_rng(seed)

    def packed(*shape):
        return rng.integers(0, 256, shape).astype(np.uint8)

    def scale(*shape):
        return rng.integers(122, 126, shape).astype(np.uint8)

    arrays = (
        packed(experts, 2, inner, latent // 2),
        scale(experts, 2, inner, latent // 32),
        packed(experts, latent, inner // 2),
        scale(experts, latent, inner // 32),
    )
    return moe.PackedExperts(*map(jnp.asarray, arrays))


def definition(x, ids, weights, packed, beta=4.0, linear_beta=25.0):
    gate_up = decode(np.asarray(packed.gate_up_packed), np.asarray(packed.gate_up_scale))
    down = decode(np.asarray(packed.down_packed), np.asarray(packed.down_scale))
    output = np.zeros(x.shape)
    for token, slot in np.ndindex(*ids.shape):
        gate, up = gate_up[ids[token, slot]] @ x[token].astype(np.float64)
        hidden = beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * linear_beta * np.tanh(up / linear_beta)
        output[token] += float(weights[token, slot]) * (down[ids[token, slot]] @ hidden)
    return output


def draw_tokens(tokens, k=3, seed=1, experts=EXPERTS, latent=LATENT):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, latent)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, k)).astype(np.float32)
    return x, ids, weights


@pytest.fixture(scope="session", name="draw_experts")
def _draw_experts():
    return draw_experts


@pytest.fixture(scope="session", name="draw_tokens")
def _draw_tokens():
    return draw_tokens


@pytest.fixture(scope="session", name="definition")
def _definition():
    return definition


@pytest.fixture(scope="session", name="decode")
def _decode():
    return decode
