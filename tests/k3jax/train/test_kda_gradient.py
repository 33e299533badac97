"""The chunked KDA's gradient against the recurrence, differentiated token by token in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas import kda

ROWS, TOKENS, HEADS, DIM = 2, 50, 2, 16
BOUND, EPS = -5.0, 1e-5


def recurrence(qkvz, decay_logits, beta_logits, conv, a_log, dt_bias, norm, state, window, length):
    """Section 2.4 of the specification as it is written, one token after the other."""
    rows = jnp.concatenate([window, qkvz[:, :, :, :3]], axis=1)
    mixed = sum(conv[tap][None, None] * rows[:, tap : tap + TOKENS] for tap in range(4))
    mixed = mixed / (1 + jnp.exp(-mixed))
    unit = lambda x: x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)  # noqa: E731
    query, key, value = unit(mixed[:, :, :, 0]) * DIM**-0.5, unit(mixed[:, :, :, 1]), mixed[:, :, :, 2]
    gate = BOUND / (1 + jnp.exp(-jnp.exp(a_log)[None, None, :, None] * (decay_logits + dt_bias[None, None])))
    beta = 1 / (1 + jnp.exp(-beta_logits))

    def advance(state, token):
        query, key, value, gate, beta, output_gate, index = token
        live = (index < length)[:, None, None]
        decayed = jnp.exp(gate)[..., None] * state
        write = beta[..., None] * (value - jnp.einsum("bhkv,bhk->bhv", decayed, key))
        new = decayed + key[..., None] * write[..., None, :]
        reading = jnp.einsum("bhkv,bhk->bhv", new, query)
        normed = reading / jnp.sqrt(jnp.mean(reading**2, axis=-1, keepdims=True) + EPS) * norm[None, None]
        return jnp.where(live[..., None], new, state), jnp.where(live, normed / (1 + jnp.exp(-output_gate)), 0.0)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, gate, beta, qkvz[:, :, :, 3])]
    state, outputs = jax.lax.scan(advance, state, (*tokens, jnp.arange(TOKENS, dtype=jnp.int32)))
    return jnp.moveaxis(outputs, 0, 1), state


def relative(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.isfinite(a).all()
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


def test_chunked_gradient_equals_the_recurrent_one() -> None:
    generator = np.random.default_rng(0)
    draw = lambda *shape, scale=1.0: generator.normal(0, scale, shape)  # noqa: E731
    operands = {
        "qkvz": draw(ROWS, TOKENS, HEADS, 4, DIM),
        "decay_logits": draw(ROWS, TOKENS, HEADS, DIM, scale=2.0),
        "beta_logits": draw(ROWS, TOKENS, HEADS),
        "conv": draw(4, HEADS, 3, DIM, scale=0.5),
        "a_log": draw(HEADS, scale=0.5),
        "dt_bias": draw(HEADS, DIM) - 3,
        "norm": 1 + draw(DIM, scale=0.2),
        "state": draw(ROWS, HEADS, DIM, DIM),
        "window": draw(ROWS, 3, HEADS, 3, DIM),
    }
    length = np.array([TOKENS, TOKENS - 13], np.int32)
    output_weight, state_weight = draw(ROWS, TOKENS, HEADS, DIM), draw(ROWS, HEADS, DIM, DIM)

    def chunked(operands: dict) -> jax.Array:
        weights = kda.KdaWeights(*(operands[name] for name in ("conv", "a_log", "dt_bias", "norm")))
        inputs = (operands[name] for name in ("qkvz", "decay_logits", "beta_logits"))
        result = kda.prefill(
            *inputs, weights, operands["state"], operands["window"], jnp.asarray(length), implementation="xla"
        )
        return jnp.sum(result.output * jnp.float32(output_weight)) + jnp.sum(result.state * jnp.float32(state_weight))

    found = jax.jit(jax.grad(chunked))({name: jnp.asarray(value, jnp.float32) for name, value in operands.items()})

    with jax.enable_x64(True):

        def slow(operands: dict) -> jax.Array:
            output, state = recurrence(**operands, length=jnp.asarray(length))
            return jnp.sum(output * output_weight) + jnp.sum(state * state_weight)

        expected = jax.jit(jax.grad(slow))({name: jnp.asarray(value, jnp.float64) for name, value in operands.items()})
        assert expected["state"].dtype == jnp.float64
    errors = {name: relative(found[name], expected[name]) for name in operands}
    assert max(errors.values()) < 2e-5, errors
