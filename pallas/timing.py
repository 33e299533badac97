"""Device time of one call inside a long enqueued chain, and relative errors, for benchmarks and their gates."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def median_call_us(run: Callable[[Any], Any], carry: Any, calls: int, repeats: int = 7, enqueued: int = 4) -> float:
    """Median microseconds per call of a compiled program of `calls` chained calls.

    `run` maps the carry to the next one and may donate it. Several programs are enqueued before the clock is read, so
    launch and host time hide behind the device's.
    """
    carry = jax.block_until_ready(run(carry))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(enqueued):
            carry = run(carry)
        jax.block_until_ready(carry)
        samples.append((time.perf_counter() - start) / (enqueued * calls))
    return statistics.median(samples) * 1e6


def relative_rms(actual: jax.Array, expected: jax.Array) -> float:
    """Root mean square of the difference over that of `expected`; infinite when either holds a non-finite value."""
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    if not (jnp.isfinite(actual).all() and jnp.isfinite(expected).all()):
        return float("inf")
    scale = jnp.sqrt(jnp.mean(expected**2))
    return float(jnp.sqrt(jnp.mean((actual - expected) ** 2)) / jnp.maximum(scale, 1e-30))
