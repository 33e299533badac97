"""Adaptive width: how many drafts are worth verifying, by the draft's own confidence (DSpark paper, section 3.3).

The confidence of draft k is known before the draft is drawn, from the drafts before it. A row ends its block at the
first offered place whose next draft is unlikely to survive: a decision that follows from the drafts up to that place
alone, so the rules of `acceptance` stay exact. A rule that looked ahead would not be.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


class WidthsError(ValueError):
    """Widths that do not fit the draft."""


@dataclasses.dataclass(frozen=True)
class Widths:
    """Tokens that the target may verify in one pass, drafts and the anchor. Hashable: it is a static argument."""

    sizes: tuple[int, ...]
    """Ascending; one program part is compiled for each."""
    survival: float = 0.2
    """A draft that survives with a smaller chance is not worth its place in the pass."""

    def require(self, block_size: int, *, confidence: bool) -> None:
        """Raises `WidthsError` for widths that a draft of `block_size` tokens cannot be verified in."""
        if not confidence:
            raise WidthsError("draft widths need a draft with a confidence head, and this one has none; leave them out")
        most = block_size + 1
        if list(self.sizes) != sorted(set(self.sizes)) or not self.sizes or self.sizes[0] < 1 or self.sizes[-1] > most:
            shown = ", ".join(map(str, self.sizes))
            raise WidthsError(f"draft widths are {shown}, expected ascending ones from 1 to {most} (drafts and anchor)")
        if not 0 < self.survival < 1:
            raise WidthsError(f"survival is {self.survival}, expected a chance between 0 and 1")

    def limits(self, confidence: Float[Array, "B G"]) -> Int32[Array, " B"]:
        """Drafts of each row that take part; `confidence` are the head's logits."""
        survival = jnp.cumprod(jax.nn.sigmoid(confidence), axis=1)
        limit = jnp.full(confidence.shape[:1], self.sizes[-1] - 1, jnp.int32)
        for size in reversed(self.sizes[:-1]):
            limit = jnp.where(survival[:, size - 1] < self.survival, size - 1, limit)
        return limit

    def choose(self, limit: Int32[Array, " B"], running: Bool[Array, " B"]) -> Int32[Array, ""]:
        """Index of the smallest width that holds every running row."""
        needed = jnp.max(jnp.where(running, limit + 1, 0))
        return jnp.searchsorted(jnp.asarray(self.sizes, jnp.int32), needed).astype(jnp.int32)
