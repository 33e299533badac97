"""Sampling: every setting is an array with one value per row, so that one program serves all requests.

Order, as in vLLM: penalties, temperature, min-p, top-k, top-p, draw. All in float32.

    repetition  l <- l / r if l > 0 else l * r       tokens in the prompt or the output
    frequency   l <- l - f * count                   count: occurrences in the output
    presence    l <- l - p                           tokens in the output
    min-p       drop p_i < min_p * max(p)
    top-k       keep the k best; ties with the k-th stay
    top-p       keep the best tokens until their mass reaches p; ties with the last one stay

The draw is argmax(l + Gumbel noise). Noise depends on the row's seed and position alone, so that a row
draws the same token whatever its neighbours and the batch size are.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from k3jax.cache import Leaf
from k3jax.conditional import run_if
from pallas.random_bits import GREEDY_BELOW

DIGITS, BASE = 8, 16
"""Digits that find a threshold among all float32 numbers, each in one pass over the logits."""


class SamplingError(ValueError):
    """A sampling setting out of its range."""


class _Range(NamedTuple):
    """Where a setting may lie and what it is by default; `low_open` leaves `low` itself out."""

    default: float
    low: float
    high: float
    dtype: type
    low_open: bool = False

    def admits(self, value: int | float) -> bool:
        """Whether `value` is finite and inside."""
        above = value > self.low if self.low_open else value >= self.low
        return math.isfinite(value) and above and value <= self.high

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"a finite number {'above' if self.low_open else 'of at least'} {self.low:g}"
        return f"a value in {'(' if self.low_open else '['}{self.low:g}, {self.high:g}]"


_RANGES = {
    "temperature": _Range(1.0, 0, math.inf, np.float32),
    "top_k": _Range(0, -1, 2**31 - 1, np.int32),
    "top_p": _Range(1.0, 0, 1, np.float32, low_open=True),
    "min_p": _Range(0.0, 0, 1, np.float32),
    "repetition_penalty": _Range(1.0, 0, math.inf, np.float32, low_open=True),
    "presence_penalty": _Range(0.0, -2, 2, np.float32),
    "frequency_penalty": _Range(0.0, -2, 2, np.float32),
    "seed": _Range(0, 0, 2**32 - 1, np.uint32),
}

Setting = int | float | Sequence[int | float]
"""One value for all rows, or one per row."""


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `Sampling.of` and `k3jax.generate`; what is left out changes nothing."""

    temperature: Setting
    top_k: Setting
    top_p: Setting
    min_p: Setting
    repetition_penalty: Setting
    presence_penalty: Setting
    frequency_penalty: Setting
    seed: Setting


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How each row of a batch is sampled."""

    temperature: Leaf
    """float32 [B], as all but the next and the last: 0 takes the most likely token (the lowest id on ties)."""
    top_k: Leaf
    """int32 [B]: 0 or -1 keeps all tokens."""
    top_p: Leaf
    min_p: Leaf
    repetition_penalty: Leaf
    presence_penalty: Leaf
    frequency_penalty: Leaf
    seed: Leaf
    """uint32 [B]."""

    @classmethod
    def of(cls, batch: int, **settings: Unpack[SamplingOptions]) -> "Sampling":
        """Settings for `batch` rows, each given once for all rows or as a sequence of one per row.

        Raises `SamplingError` that names the setting, the value and its range.
        """
        return cls(**{name: jnp.asarray(column) for name, column in cls.columns(batch, **settings).items()})

    @staticmethod
    def columns(batch: int, **settings: Unpack[SamplingOptions]) -> dict[str, np.ndarray]:
        """What `of` puts on the device, checked, on the host."""
        unknown = settings.keys() - _RANGES.keys()
        if unknown:
            raise SamplingError(f"unknown settings {sorted(unknown)}, expected some of {', '.join(_RANGES)}")
        values = {name: settings.get(name, allowed.default) for name, allowed in _RANGES.items()}
        return {name: _column(name, value, batch) for name, value in values.items()}


def _column(name: str, value: Any, batch: int) -> np.ndarray:
    """One checked value per row."""
    allowed = _RANGES[name]
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    rows = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * batch
    if len(rows) != batch:
        raise SamplingError(f"{name} has {len(rows)} values, expected one number or {batch} of them, one per row")
    whole = np.issubdtype(allowed.dtype, np.integer)
    for item in rows:
        if isinstance(item, bool) or not isinstance(item, int if whole else (int, float)) or not allowed.admits(item):
            raise SamplingError(f"{name} is {item!r}, expected {'an integer, ' if whole else ''}{allowed}")
    return np.asarray(rows, allowed.dtype)


class Filters(NamedTuple):
    """Which filters any row of a batch has; a static argument of whoever knows."""

    top_k: bool = True
    top_p: bool = True
    min_p: bool = True

    @classmethod
    def of(cls, params: Sampling) -> "Filters":
        """Reads the settings, from the device where they are there."""
        top_k, top_p, min_p = (np.asarray(column) for column in (params.top_k, params.top_p, params.min_p))
        return cls(bool((top_k > 0).any()), bool((top_p < 1).any()), bool((min_p > 0).any()))


NO_FILTERS = Filters(top_k=False, top_p=False, min_p=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """What a row has seen and said: the penalties and the noise depend on it."""

    prompt: Leaf
    """bool [B, V]: tokens that occur in the prompt."""
    count: Leaf
    """int32 [B, V]: occurrences of each token in the output."""
    position: Leaf
    """int32 [B]: position of the next token in the sequence."""

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], vocab_size: int) -> "History":
        """Nothing said yet after `prompts`, whose ids must be below `vocab_size`."""
        seen = np.zeros((len(prompts), vocab_size), bool)
        for row, ids in zip(seen, prompts, strict=True):
            row[list(ids)] = True
        position = np.asarray([len(ids) for ids in prompts], np.int32)
        return cls(jnp.asarray(seen), jnp.zeros(seen.shape, jnp.int32), jnp.asarray(position))

    def append(self, token: Int32[Array, " B"], running: Bool[Array, " B"]) -> "History":
        """After each running row has said its `token`."""
        step = running.astype(jnp.int32)
        rows = jnp.arange(token.shape[0], dtype=jnp.int32)
        return dataclasses.replace(self, count=self.count.at[rows, token].add(step), position=self.position + step)


class Sampled(NamedTuple):
    """Result of `sample`."""

    token: Int32[Array, " B"]
    logprob: Float32[Array, " B"]
    """Log-probability under the model itself, before penalties and temperature (as vLLM reports it)."""
    history: History


def sample(
    logits: Float[Array, "B V"],
    params: Sampling,
    history: History,
    running: Bool[Array, " B"],
    filters: Filters | None = None,
) -> Sampled:
    """The next token of each row; rows that are not running get token 0 and keep their history.

    `filters` says what any row has of top-k, top-p and min-p. None: that may change from call to call.
    """
    raw = logits.astype(jnp.float32)
    penalised = penalize(raw, params, history)
    best = _best(penalised)
    random = params.temperature >= GREEDY_BELOW
    if filters is None:
        # Not a second program: batches without randomness skip filters and noise.
        operands = (penalised, params, history.position)
        token = run_if(jnp.any(random & running), draw, lambda logits, *_: _best(logits), *operands)
    else:
        token = draw(penalised, params, history.position, filters)
    token = jnp.where(running, jnp.where(random, token, best), 0)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(raw), token[:, None], axis=-1)[:, 0]
    return Sampled(token, logprob, history.append(token, running))


def _best(logits: Float32[Array, "B V"]) -> Int32[Array, " B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def penalize(logits: Float32[Array, "B V"], params: Sampling, history: History) -> Float32[Array, "B V"]:
    """Logits after the repetition, frequency and presence penalties."""
    said = history.count > 0
    factor = params.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(history.prompt | said, repeated, logits)
    logits -= params.frequency_penalty[:, None] * history.count.astype(jnp.float32)
    return logits - jnp.where(said, params.presence_penalty[:, None], 0.0)


def draw(
    logits: Float32[Array, "B V"], params: Sampling, position: Int32[Array, " B"], filters: Filters | None = None
) -> Int32[Array, " B"]:
    """A random token of each row's filtered distribution; `filters` as in `sample`."""
    scaled = logits / jnp.maximum(params.temperature, GREEDY_BELOW)[:, None]
    kept = keep_likely(scaled, params, filters)
    return jnp.argmax(kept + noise(params.seed, position, logits.shape[-1]), axis=-1).astype(jnp.int32)


def noise(seed: UInt32[Array, " B"], position: Int32[Array, " B"], size: int) -> Float32[Array, "B V"]:
    """Gumbel noise that depends on a row's own seed and position only."""

    def row(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (size,), jnp.float32)

    return jax.vmap(row)(seed, position)


def keep_likely(
    logits: Float32[Array, "B V"], params: Sampling, filters: Filters | None = None, digits: int = DIGITS
) -> Float32[Array, "B V"]:
    """Logits with everything that min-p, top-k and top-p drop set to minus infinity.

    `filters` says which of them any row has, where the caller knows; None: that may change from call to call. Fewer
    `digits` are quicker and may let tokens pass that stand just behind the last one.
    """
    settings = params.top_k, params.top_p, params.min_p
    if filters is not None:
        return _filter(logits, *settings, filters=filters, digits=digits)
    wanted = jnp.any((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    run = functools.partial(_filter, filters=Filters(), digits=digits)
    return run_if(wanted, run, lambda logits, *_: logits, logits, *settings)


def _filter(
    logits: Float32[Array, "B V"],
    top_k: Int32[Array, " B"],
    top_p: Float32[Array, " B"],
    min_p: Float32[Array, " B"],
    *,
    filters: Filters,
    digits: int,
) -> Float32[Array, "B V"]:
    """Min-p, then top-k, then top-p over what is left."""
    if filters.min_p:
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)[:, None]
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    if not (filters.top_k or filters.top_p):
        return logits
    search = functools.partial(keep_top_by_search, filters=filters, digits=digits)
    return jax.lax.platform_dependent(logits, top_k, top_p, cuda=search, default=keep_top_by_sort)


def keep_top_by_sort(
    logits: Float32[Array, "B V"], top_k: Int32[Array, " B"], top_p: Float32[Array, " B"]
) -> Float32[Array, "B V"]:
    """Top-k, then top-p over what is left: one sort finds the lowest logit that stays."""
    size = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    rank = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    kth = jnp.take_along_axis(ordered, rank[:, None] - 1, axis=-1)
    ordered = jnp.where(ordered >= kth, ordered, -jnp.inf)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Rounding may carry the sum to 1 before the last token, so p = 1 is a case of its own.
    inside = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    inside &= ordered > -jnp.inf
    lowest = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)


def keep_top_by_search(
    logits: Float32[Array, "B V"],
    top_k: Int32[Array, " B"],
    top_p: Float32[Array, " B"],
    *,
    filters: Filters,
    digits: int,
) -> Float32[Array, "B V"]:
    """The same without a sort, which would cost a GPU as much and break a step's graph in two."""
    # From the best on, where a few digits must tell likely tokens apart.
    distance = logits - jnp.max(logits, axis=-1, keepdims=True)
    order = _order(logits if digits == DIGITS else distance)
    lowest = jnp.zeros_like(top_k, jnp.uint32)
    if filters.top_k:
        rank = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[-1]), logits.shape[-1])
        lowest = _threshold(order, jnp.ones_like(logits), rank.astype(jnp.float32), digits)
    if filters.top_p:
        mass = jnp.where(order >= lowest[:, None], jnp.exp(distance), 0.0)
        share = jnp.where(top_p < 1, top_p * jnp.sum(mass, axis=-1), jnp.inf)
        lowest = jnp.maximum(lowest, _threshold(order, mass, share, digits))
    return jnp.where(order >= lowest[:, None], logits, -jnp.inf)


def _add_each(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(one + other for one, other in zip(left, right, strict=True))


def _order(values: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Integers in the order of the numbers."""
    bits = jax.lax.bitcast_convert_type(values + 0.0, jnp.uint32)  # the two zeros are one number
    return jnp.where(bits >> 31 > 0, ~bits, bits | jnp.uint32(1 << 31))


@functools.partial(jax.jit, static_argnames="digits")
def _threshold(
    order: UInt32[Array, "B V"], weight: Float32[Array, "B V"], bound: Float32[Array, " B"], digits: int
) -> UInt32[Array, " B"]:
    """The least number whose betters weigh less than `bound`, from its first digit to its last; zeros after those.

    The weight above each of the `BASE` - 1 numbers that a digit chooses from is summed in the same pass.
    """
    found = jnp.zeros_like(bound, jnp.uint32)
    for digit in range(digits):
        unit = 1 << (DIGITS - 1 - digit) * (BASE.bit_length() - 1)
        ends = [found + jnp.uint32((value + 1) * unit - 1) for value in range(BASE - 1)]
        parts = tuple(jnp.where(order > end[:, None], weight, 0.0) for end in ends)
        above = jax.lax.reduce(parts, (jnp.float32(0),) * len(parts), _add_each, (1,))
        value = sum((total >= bound).astype(jnp.uint32) for total in above)
        found = found + value * jnp.uint32(unit)
    return found
