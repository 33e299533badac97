"""From a loaded model and a few numbers to an engine that is ready to serve."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import capacity
from k3jax.dspark.config import DSparkConfig
from k3jax.logit_rules import mask_words
from k3jax.runtime import Model
from k3jax.sampling import Sampling, SamplingError
from k3jax.speculation.drafters import DSparkDrafter
from serving.alpha import parse_eviction
from serving.core import Core
from serving.costs import ModelCost
from serving.plan import Shape
from serving.prefix_cache import CacheOptions, PrefixCache
from serving.request import Request, RequestError
from serving.retention import Retention
from serving.runner import JaxRunner, RunnerOptions, drafter_of, tokens_per_step
from serving.scheduler import SchedulerOptions
from serving.tiering import TierOptions, Tiers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The engine's flags. Pools are given in members, or in bytes of both together."""

    rows: int = 8
    """Sequences that run at a time."""
    max_length: int | None = None
    """Positions of a sequence; the model's limit when None."""
    step_tokens: int = 512
    """Prompt tokens computed in one step, at most."""
    pages: int | None = None
    slots: int | None = None
    cache_gib: int | float | None = None
    """Memory of both pools on each device, where `pages` and `slots` are not given."""
    memory_fraction: int | float | None = None
    """Instead: part of each device's memory for weights and pools together."""
    state_fraction: int | float = 0.5
    """Part of the pools' memory for KDA states."""
    page_size: int = 64
    prefix_match_unit: int = 64
    """Tokens per hash unit."""
    retention: str = "prompt,marconi,decode-end,supersede"
    eviction: str = "flop"
    """`lru`, `flop` (tuned while the engine runs) or `flop=ALPHA`."""
    prefix_caching: bool = True
    host_cache_gib: int | float = 0.0
    """Host memory for evicted prefixes."""
    disk_cache: Path | None = None
    """Directory for evicted prefixes that host memory cannot hold."""
    disk_cache_gib: int | float = 0.0
    chunks: tuple[Shape, ...] | None = None
    """Prefill programs; by default one of `step_tokens`, and smaller ones for tails and short prompts."""
    table_widths: tuple[int, ...] | None = None
    """Page-table widths that programs are compiled for; by default 16, 64, 256, ... pages up to `max_length`."""
    device_flops: int | float = 1e13
    """FLOPs a second of prefill; decides whether an evicted prefix is restored or computed again."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Prefill programs."""
        if self.chunks is not None:
            return self.chunks
        # None computes more than `step_tokens`: the longest step is what those who decode beside it wait for.
        small = max(min(64, self.step_tokens // 4), 2)
        shapes = (Shape(1, small), Shape(4, small), Shape(1, self.step_tokens))
        return tuple(dict.fromkeys(shape for shape in shapes if shape.size <= self.step_tokens))


def model_cost(model: Model) -> ModelCost:
    """Costs of the model in the dtype in which it has been loaded; a draft's rows count as latents."""
    latent, item = (jnp.dtype(dtype).itemsize for dtype in (model.latent_dtype, model.dtype))
    cost, draft = ModelCost.of(model.config, latent_bytes=latent, window_bytes=item), _draft_config(model)
    rows = 0 if draft is None else draft.num_layers * draft.attention.row_width * item
    return dataclasses.replace(cost, latent_bytes_per_token=cost.latent_bytes_per_token + rows)


def _draft_config(model: Model) -> DSparkConfig | None:
    drafter = drafter_of(model)
    return drafter.config if isinstance(drafter, DSparkDrafter) else None


def footprint(model: Model, page_size: int) -> capacity.Footprint:
    """Bytes of the model and of each member of the pools, per device."""
    narrow = model.draft is not None and any(leaf.dtype == jnp.int8 for leaf in model.draft.leaves)
    return capacity.footprint(
        model.config,
        layout=model.graph.layout,
        dtype=jnp.dtype(model.dtype),
        page_size=page_size,
        draft=_draft_config(model),
        draft_weights="int8" if narrow else "model",
        kv_cache_dtype=model.kv_cache_dtype,
    )


def divide(sizes: Sizes, each: capacity.Footprint, max_length: int) -> CacheOptions:
    """Members of both pools, the dummies included. By default every row fits at full length, with four states each.

    Raises `ValueError` where memory is short.
    """
    pages, slots = sizes.pages, sizes.slots
    budget = _budget(sizes, each)
    if budget is not None and (pages is None or slots is None):
        pools = capacity.divide(each, budget, sizes.state_fraction)
        pages, slots = pages or pools.pages - 1, slots or pools.slots - 1
    pages = pages or sizes.rows * -(-max_length // sizes.page_size)
    slots = slots or 4 * sizes.rows
    if slots < sizes.rows:
        raise ValueError(
            f"{slots} state slots cannot serve {sizes.rows} rows; give more memory to states or fewer rows"
        )
    return CacheOptions(pages=pages + 1, slots=slots + 1, page_size=sizes.page_size, unit=sizes.prefix_match_unit)


def _budget(sizes: Sizes, each: capacity.Footprint) -> int | float | None:
    """Bytes per device for both pools, where they are not given in members."""
    if sizes.cache_gib is not None:
        return sizes.cache_gib * 2**30
    if sizes.memory_fraction is None:
        return None
    known = jax.local_devices()[0].memory_stats()
    if not known or "bytes_limit" not in known:
        raise ValueError("memory_fraction is given but the device does not tell its memory; give cache_gib instead")
    return sizes.memory_fraction * known["bytes_limit"] - each.weights - sizes.rows * each.row


def describe(cache: CacheOptions, each: capacity.Footprint, rows: int) -> Iterator[str]:
    """The memory plan, one line per part; bytes are those of one device."""
    mib = 2**20
    tokens = (cache.pages - 1) * cache.page_size
    small = rows * each.row
    total = each.weights + small + each.pools(cache.pages, cache.slots)
    parts = f"weights {each.weights / mib:.1f} MiB, {rows} rows {small / mib:.1f} MiB"
    yield f"per device, of {each.devices}: {total / mib:.1f} MiB, {parts}"
    latents, states = cache.pages * each.page / mib, cache.slots * each.slot / mib
    yield f"latents: {cache.pages} pages of {cache.page_size} tokens, {latents:.1f} MiB for {tokens} tokens"
    yield f"states: {cache.slots} slots of {each.slot / mib:.2f} MiB, {states:.1f} MiB"


def checker(model: Model, limits: RunnerOptions) -> Callable[[Request], None]:
    """What refuses a request that the model cannot serve."""
    vocab = model.config.vocab_size
    top = min(limits.top, vocab)

    def check(request: Request) -> None:
        ids = np.asarray(request.tokens)
        bad = np.flatnonzero((ids < 0) | (ids >= vocab))
        if len(bad):
            raise RequestError(f"token {bad[0]} of the prompt is {ids[bad[0]]}, expected an id below {vocab}")
        if len(request.stops) > limits.stops:
            raise RequestError(f"{len(request.stops)} stop ids were given, expected at most {limits.stops}")
        if len(request.logit_bias) > limits.biases:
            raise RequestError(f"{len(request.logit_bias)} logit biases were given, expected at most {limits.biases}")
        for token, value in request.logit_bias.items():
            if not 0 <= token < vocab or not math.isfinite(value):
                raise RequestError(
                    f"logit_bias of {token} is {value}, expected a finite number for an id below {vocab}"
                )
        for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if count is not None and not 0 <= count <= top:
                raise RequestError(f"{name} is {count}, expected 0 to {top} alternatives")
        try:
            Sampling.columns(1, **request.sampling)
        except SamplingError as error:
            raise RequestError(str(error)) from error

    return check


def launch(
    model: Model, sizes: Sizes, *, report: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
) -> Core:
    """Prints the memory plan, allocates, compiles every program, and returns the core.

    Raises `ValueError` (`RetentionError`) for numbers that do not fit together.
    """
    max_length = min(sizes.max_length or model.max_length, model.max_length)
    if sizes.max_length is not None and sizes.max_length > max_length:
        report(f"max-length {sizes.max_length} is more than the model has positions: {max_length} are served")
    cost, each = model_cost(model), footprint(model, sizes.page_size)
    cache = divide(sizes, each, max_length)
    alpha, tuner = parse_eviction(sizes.eviction, cache, cost)
    scheduling = _scheduling(model, sizes, max_length)
    scheduling.check(cache.unit)
    for line in describe(cache, each, sizes.rows):
        report(line)
    shapes = _static_shapes(sizes, scheduling)
    runner = JaxRunner(model, cache, shapes)
    runner.warm_up(lambda name, seconds: report(f"compiled: {name}, {seconds:.1f} s"))
    pools = PrefixCache(cache, cost, alpha=alpha)
    return Core(
        scheduling,
        pools,
        runner,
        tuner=tuner,
        tiers=_tiers(sizes, pools, runner),
        check=checker(model, shapes),
        mask_words=mask_words(model.config.vocab_size),
    )


def _scheduling(model: Model, sizes: Sizes, max_length: int) -> SchedulerOptions:
    # The scheduler counts a drafted block as so many tokens until it knows how many stood.
    block = tokens_per_step(model)
    return SchedulerOptions(
        rows=sizes.rows,
        token_budget=max(shape.size for shape in sizes.shapes) + sizes.rows * block,
        block=block,
        shapes=sizes.shapes,
        max_length=max_length,
        retention=Retention.parse(sizes.retention),
        prefix_caching=sizes.prefix_caching,
        model_id=str(model.path or ""),
    )


def _static_shapes(sizes: Sizes, scheduling: SchedulerOptions) -> RunnerOptions:
    shapes = RunnerOptions.of(
        rows=sizes.rows,
        shapes=sizes.shapes,
        captures=scheduling.captures,
        max_length=scheduling.max_length,
        page_size=sizes.page_size,
    )
    return shapes if sizes.table_widths is None else dataclasses.replace(shapes, widths=sizes.table_widths)


def _tiers(sizes: Sizes, cache: PrefixCache, runner: JaxRunner) -> Tiers | None:
    if not sizes.host_cache_gib and sizes.disk_cache is None:
        return None
    options = TierOptions(
        host_bytes=int(sizes.host_cache_gib * 2**30),
        directory=sizes.disk_cache,
        disk_bytes=int(sizes.disk_cache_gib * 2**30),
        flops=sizes.device_flops,
    )
    return Tiers(cache, runner, options)
