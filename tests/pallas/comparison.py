"""How far a result is from the expected one."""

import numpy as np
from jax.typing import ArrayLike


def relative(actual: ArrayLike, expected: ArrayLike) -> float:
    """Root mean square of the difference over that of `expected`; both must be finite."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert np.isfinite(actual).all()
    assert np.isfinite(expected).all()
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
