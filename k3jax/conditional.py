"""Work that most batches do not need."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Bool


def run_if(wanted: Bool[Array, ""], run: Callable[..., Any], skip: Callable[..., Any], *operands: Any) -> Any:
    """`run(*operands)` if `wanted`, else `skip(*operands)`, which must then give the same: on a GPU it always runs.

    There a conditional waits for the device to tell the host where to go: a hundred microseconds during which nothing
    runs, and a step that cannot be captured in one graph.
    """

    def choose(*operands: Any) -> Any:
        return jax.lax.cond(wanted, run, skip, *operands)

    return jax.lax.platform_dependent(*operands, cuda=run, default=choose)
