"""A DSpark draft against stored outputs of DeepSpec's code.

`<step>.<quantity>`, step by step over one growing context; every step drafts greedily:

    target_features    [new tokens, taps * hidden]    what the step commits to the context; none are kept from before 0
    anchor             []                             the token that follows them
    base_logits        [drafts, draft vocabulary]     before the sequential head
    logits             [drafts, draft vocabulary]     of the drawn tokens
    tokens             [drafts]                       the target's ids
    confidence_logits  [drafts]
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from k3jax.cache import Rows
from k3jax.dspark.config import DSparkConfig
from k3jax.dspark.model import Draft, Drafted, DSpark, empty_pools, greedy
from k3jax.verification.compare import Comparison, compare
from k3jax.verification.golden import GoldenError, arrays_of

QUANTITIES = ("target_features", "anchor", "base_logits", "logits", "tokens", "confidence_logits")
DRAFTED = ("tokens", "logits", "base_logits", "confidence_logits")
"""Quantities with one entry per draft."""
PAGE = 64
_NAME = re.compile(rf"(?P<step>\d+)\.(?P<quantity>{'|'.join(QUANTITIES)})")

Tables = dict[str, Float[Array, "V D"]]
"""The target's embedding and head, for a draft that has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """The contents of a file: quantities of each step, in order."""

    steps: list[dict[str, np.ndarray]]
    unknown: list[str]
    """Names that mean nothing here."""

    path: str

    @property
    def tokens(self) -> int:
        """Tokens that the context comes to."""
        return sum(len(step["target_features"]) for step in self.steps)

    @property
    def block_size(self) -> int | None:
        """Tokens that the first step drafts; a draft's `config.json` may leave them open."""
        sizes = [len(self.steps[0][name]) for name in DRAFTED if np.ndim(self.steps[0].get(name)) > 0]
        return sizes[0] if sizes else None

    def require(self, config: DSparkConfig) -> None:
        """Raises `GoldenError` for inputs that a draft of this kind cannot take."""
        for number, step in enumerate(self.steps):
            features, anchor, name = step["target_features"], step["anchor"], f"{self.path}: {number}"
            if features.ndim != 2 or features.shape[1] != config.features:
                raise GoldenError(
                    f"{name}.target_features is {list(features.shape)}, expected [tokens, {config.features}] "
                    f"({len(config.target_layer_ids)} taps of {config.target_hidden_size})"
                )
            if not 0 <= int(anchor.item()) < config.vocab_size:
                raise GoldenError(f"{name}.anchor is {anchor.item()}, expected 0 to {config.vocab_size - 1}")


def read(path: str | Path) -> Steps:
    """Reads an `.npz` of a draft's outputs.

    Raises `GoldenError` for a file that cannot be read, and for steps that are missing or incomplete.
    """
    arrays = arrays_of(path)
    found: dict[int, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        if match := _NAME.fullmatch(name):
            found.setdefault(int(match["step"]), {})[match["quantity"]] = array
    if not found:
        raise GoldenError(f"{path}: holds no step, expected names such as 0.target_features and 0.anchor")
    if sorted(found) != list(range(len(found))):
        raise GoldenError(f"{path}: holds steps {sorted(found)}, expected 0 to {len(found) - 1}")
    steps = [found[step] for step in range(len(found))]
    for number, step in enumerate(steps):
        _check(f"{path}: {number}", step)
    return Steps(steps, [name for name in arrays if not _NAME.fullmatch(name)], str(path))


def _check(name: str, step: dict[str, np.ndarray]) -> None:
    """Raises `GoldenError` for inputs that are missing or of another kind."""
    for quantity, kind in (("target_features", np.floating), ("anchor", np.integer)):
        array = step.get(quantity)
        if array is None:
            raise GoldenError(f"{name}.{quantity} is missing, expected an array")
        if not np.issubdtype(array.dtype, kind) or (quantity == "anchor" and array.size != 1):
            wanted = "one integer" if quantity == "anchor" else "floating-point numbers"
            raise GoldenError(f"{name}.{quantity} is {array.dtype} {list(array.shape)}, expected {wanted}")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(
    definition: nnx.GraphDef[DSpark],
    arrays: Any,
    pools: Any,
    features: Array,
    rows: Rows,
    anchor: Array,
    tables: Tables,
) -> tuple[Any, Draft, Drafted]:
    """Commits a step's features, then drafts greedily. Donates the pools."""
    draft = nnx.merge(definition, arrays)
    pools = draft.extend(pools, features, rows)
    # A step that commits nothing drafts all the same.
    after = dataclasses.replace(rows.advance(), query_length=jnp.ones_like(rows.query_length))
    block = draft.draft(pools, anchor, after, **tables)
    return block.pools, block._replace(pools=()), draft.sample(block, anchor, greedy)


@dataclasses.dataclass(frozen=True, slots=True)
class DraftVerification:
    """One file's steps on one draft; all of them share one program."""

    draft: DSpark
    golden: Steps
    tolerance: float
    """Relative RMS allowed of any array; tokens must be equal."""
    tables: Tables = dataclasses.field(default_factory=dict)

    def run(self) -> Iterator[Comparison]:
        """Every quantity of every step."""
        for number, (step, (block, drafted)) in enumerate(zip(self.golden.steps, self._outputs(), strict=True)):
            yield from self._compare(str(number), step, block, drafted)

    def _outputs(self) -> Iterator[tuple[Draft, Drafted]]:
        """What the draft makes of each step."""
        config = self.draft.config
        longest = max(1, *(len(step["target_features"]) for step in self.golden.steps))
        # The block's own rows lie behind the context.
        width = -(-(self.golden.tokens + config.block_size) // PAGE)
        dtype = self.draft.context_proj[...].dtype
        pools = empty_pools(config, pages=width + 1, page_size=PAGE, dtype=dtype)
        table = jnp.arange(1, width + 1, dtype=jnp.int32)[None]
        definition, arrays = nnx.split(self.draft)
        committed = 0
        for step in self.golden.steps:
            features = step["target_features"]
            padded = np.zeros((1, longest, config.features), dtype)
            padded[0, : len(features)] = features
            numbers = (jnp.asarray([value], jnp.int32) for value in (1, committed, len(features)))
            slot, length, count = numbers
            anchor = jnp.asarray(step["anchor"].reshape(1), jnp.int32)
            inputs = (jnp.asarray(padded), Rows(slot, table, length, count), anchor, self.tables)
            pools, block, drafted = _advance(definition, arrays, pools, *inputs)
            committed += len(features)
            yield block, drafted

    def _compare(self, name: str, step: dict[str, np.ndarray], block: Draft, drafted: Drafted) -> Iterator[Comparison]:
        ours = {"base_logits": block.logits, "logits": drafted.logits, "confidence_logits": drafted.confidence}
        for quantity, values in ours.items():
            if (theirs := step.get(quantity)) is None:
                continue
            if values is None:
                yield Comparison(f"{name}.{quantity}", np.inf, "this draft has no confidence head", False)
                continue
            yield compare(f"{name}.{quantity}", np.asarray(values[0], np.float32), theirs, self.tolerance)
        if (tokens := step.get("tokens")) is not None:
            yield compare_tokens(f"{name}.tokens", np.asarray(drafted.token[0]), tokens)


def compare_tokens(name: str, ours: np.ndarray, theirs: np.ndarray) -> Comparison:
    """Whether two lists of ids are equal; the error is the share of places where they are not."""
    if ours.shape != theirs.shape:
        return Comparison(name, np.inf, f"shape: ours {list(ours.shape)}, theirs {list(theirs.shape)}", False)
    differs = np.flatnonzero(ours != theirs)
    if not differs.size:
        return Comparison(name, 0.0, f"{theirs.size} ids are equal", True)
    at = int(differs[0])
    detail = f"{differs.size} of {theirs.size} ids differ, first [{at}]: ours {ours[at]}, theirs {theirs[at]}"
    return Comparison(name, differs.size / theirs.size, detail, False)
