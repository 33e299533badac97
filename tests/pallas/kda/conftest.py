"""KDA in float64 numpy, token by token, and the cases that every implementation must get right."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas import kda


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@dataclasses.dataclass
class Case:
    """Arguments of `kda.prefill`: `tokens` are the four leading ones."""

    tokens: tuple
    state: jnp.ndarray
    window: jnp.ndarray

    def args(self) -> tuple:
        return (*self.tokens, self.state, self.window)


def gate_logits(rng: np.random.Generator, shape: tuple, gates: str) -> np.ndarray:
    """Logits f whose decay -5 sigmoid(f) lies in the named regime (a_log = dt_bias = 0 there)."""
    slow = rng.uniform(1e-4, 0.05, shape) / 5
    slow = np.log(slow / (1 - slow))
    fast = np.full(shape, 40.0)
    mixed = np.where(np.arange(shape[-1]) % 3 == 0, fast, slow)
    return {"random": rng.standard_normal(shape), "slow": slow, "bound": fast, "mixed": mixed}[gates]


def make_case(rows, tokens, heads, channels, dtype=jnp.float32, gates="random", keys="random", seed=0) -> Case:
    """A random call. keys: "random", "identical", or "collinear" (5 % noise), the last two with beta near 1."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    conv, qkvz = 0.5 * normal(4, heads, 3, channels), normal(rows, tokens, heads, 4, channels)
    window, beta = normal(rows, 3, heads, 3, channels), normal(rows, tokens, heads)
    a_log, dt_bias = (
        (0.3 * normal(heads), normal(heads, channels))
        if gates == "random"
        else (np.zeros(heads), np.zeros((heads, channels)))
    )
    if keys != "random":
        conv[:, :, 1] = np.array([0, 0, 0, 1.0])[:, None, None]
        shared = normal(rows, 1, heads, channels)
        qkvz[..., 1, :] = shared + (0.05 if keys == "collinear" else 0.0) * qkvz[..., 1, :]
        beta = 4 + np.abs(beta)
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    weights = kda.KdaWeights(f32(conv), f32(a_log), f32(dt_bias), f32(1 + 0.1 * normal(channels)))
    logits = gate_logits(rng, (rows, tokens, heads, channels), gates)
    inputs = (jnp.asarray(qkvz, dtype), jnp.asarray(logits, dtype), jnp.asarray(beta, dtype), weights)
    return Case(inputs, f32(0.3 * normal(rows, heads, channels, channels)), jnp.asarray(window, dtype))


def float64_recurrence(case: Case, lengths: list[int], eps: float = 1e-5, operands=np.float64) -> dict[str, np.ndarray]:
    """Output [B, T, H, D] (0 past the length), states and windows after 0, 1, ... T tokens [B, T + 1, ...].

    Nothing is rounded, except q, k and v once where `operands` names a narrower type: the least error that products in
    that type can make, which grows where keys are nearly collinear.
    """
    qkvz, decay, beta, weights, state, window = (
        type(x)(*(np.asarray(y, np.float64) for y in x)) if isinstance(x, tuple) else np.asarray(x, np.float64)
        for x in case.args()
    )
    rows, tokens, _, _, channels = qkvz.shape
    output, states, windows = np.zeros_like(qkvz[..., 3, :]), [], []
    for row in range(rows):
        memory, past = state[row], list(window[row])
        history, pasts = [memory], [np.stack(past)]
        for t in range(tokens):
            if t < lengths[row]:
                past.append(qkvz[row, t, :, :3])
                mixed = sum(weights.conv[j] * past[-4 + j] for j in range(4))
                q, k, v = np.moveaxis(mixed * sigmoid(mixed), 1, 0)
                q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
                q, k, v = (x.astype(operands).astype(np.float64) for x in (q, k, v))
                g = -5 * sigmoid(np.exp(weights.a_log)[:, None] * (decay[row, t] + weights.dt_bias))
                memory = np.exp(g)[..., None] * memory
                u = sigmoid(beta[row, t])[:, None] * (v - np.einsum("hkv,hk->hv", memory, k))
                memory = memory + k[..., None] * u[:, None]
                o = np.einsum("hkv,hk->hv", memory, q) / np.sqrt(channels)
                o = o / np.sqrt((o * o).mean(-1, keepdims=True) + eps) * weights.norm
                output[row, t] = o * sigmoid(qkvz[row, t, :, 3])
            history.append(memory)
            pasts.append(np.stack(past[-3:]))
        states.append(np.stack(history))
        windows.append(np.stack(pasts))
    return {"output": output, "states": np.stack(states), "windows": np.stack(windows)}


def close(actual: jnp.ndarray, expected: np.ndarray, tolerance: float, name: str) -> None:
    """Asserts finite values and a relative RMS difference within `tolerance`; names the worst element."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(expected).all(), f"{name}: the expected values are not finite"
    assert np.isfinite(actual).all(), f"{name}: {np.count_nonzero(~np.isfinite(actual))} values are not finite"
    difference = np.abs(actual - expected)
    error = np.sqrt((difference**2).mean() / max((expected**2).mean(), 1e-30))
    worst = np.unravel_index(difference.argmax(), difference.shape)
    assert error <= tolerance, (
        f"{name}: relative RMS {error:.2e} > {tolerance:.0e}; worst at {worst}: {actual[worst]} for {expected[worst]}"
    )


@pytest.fixture(scope="session", name="make_case")
def make_case_fixture():
    return make_case


@pytest.fixture(scope="session", name="float64_recurrence")
def float64_recurrence_fixture():
    return float64_recurrence


@pytest.fixture(scope="session", name="close")
def close_fixture():
    return close
