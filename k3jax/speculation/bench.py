"""What speculation costs on this device: one step beside plain decoding, split into its parts.

The model has K3's widths and a few of its layers, with random weights made on the device. Times do not depend on what
the weights say, but for the number of distinct experts that a block of tokens reaches, which is counted: random
tokens spread over more of them than a text's would.
"""

import collections
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from k3jax import params, sampling, step
from k3jax.cache import K3Cache, KdaCache, KdaSpeculative, Rows, create
from k3jax.capacity import footprint, tree_bytes
from k3jax.config import K3Config, k3
from k3jax.dspark.config import DraftMla, DSparkConfig, Rope, Yarn
from k3jax.dspark.model import DSpark
from k3jax.dspark.tensors import draft_specs
from k3jax.model import K3, LayerTrace
from k3jax.speculation import parts, synthetic
from k3jax.speculation.drafters import DSparkDrafter, Proposal
from k3jax.speculation.state import SpeculativeState
from k3jax.speculation.step import speculate
from pallas.benchmark import floor_us
from pallas.dispatch import Implementation

PAGE, THREADS = 64, 9
FEW, MANY = 2, 10
"""Calls of a series."""
RESERVE = 6 << 30
"""Bytes kept free for what the programs compute."""
SPARE = 1024
"""Tokens of cache beyond the context; each timed step may take a block of them."""
TOP_P = ", top-p"
"""Marks a part that filters, as it does for settings with top-p."""
FILTERED = sampling.Filters(top_k=False, top_p=True, min_p=False)
PUBLISHED = (2.61, 4.73)
"""Acceptance lengths of K3's draft on creative writing and on code (vLLM's blog, 2026-07-27)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured."""

    config: K3Config
    draft: DSparkConfig
    context: int
    dtype: Any
    implementation: Implementation = None

    @classmethod
    def of_k3(cls, layers: int, experts: int | None, context: int, implementation: Implementation = None) -> "Setting":
        """The first layers of K3 at full width, with all the experts that fit or the number given."""
        full = k3()
        config = dataclasses.replace(
            full, num_layers=layers, mla_layers=tuple(layer for layer in full.mla_layers if layer < layers)
        )
        draft = k3_draft(config)
        count = experts or experts_that_fit(config, draft)
        moe = dataclasses.replace(config.moe, num_experts=count)
        return cls(
            config=dataclasses.replace(config, moe=moe),
            draft=draft,
            context=context,
            dtype=jnp.bfloat16,
            implementation=implementation,
        )


def k3_draft(config: K3Config) -> DSparkConfig:
    """The geometry of Inferact's K3 draft: 5 MLA layers, taps spread over the layers that there are."""
    taps_at = np.unique(np.linspace(0, config.num_layers - 2, 5).round().astype(int)).tolist()
    return DSparkConfig(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=14336,
        num_layers=5,
        attention=DraftMla(
            num_heads=64,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        rope=Rope(
            theta=5e4,
            interleaved=True,
            yarn=Yarn(factor=32.0, original_positions=32768, mscale=1.0, mscale_all_dim=1.0),
        ),
        norm_eps=1e-5,
        target_layer_ids=tuple(taps_at),
        mask_token_id=config.vocab_size - 3,
        block_size=7,
        markov_rank=256,
        markov_kind="vanilla",
        confidence=True,
        confidence_with_markov=True,
    )


def floors(setting: Setting, one: float, block: float) -> dict[str, float]:
    """Microseconds that reading the weights takes at least, where `one` and `block` experts are reached in a layer."""
    draft, sizes = setting.draft, footprint(setting.config, dtype=setting.dtype)
    # One row of the embedding is read, not the table; the head is as large.
    head, dense = sizes.embedding, sizes.weights - sizes.routed - sizes.embedding
    each = sizes.routed / setting.config.moe.num_experts
    markov = tree_bytes(draft_specs(draft)["markov"], setting.dtype)
    moved = {
        "draft": tree_bytes(draft_specs(draft), setting.dtype) - markov + head,
        "markov": draft.block_size * markov / 2,
        "verify": dense + block * each,
        "plain": dense + one * each,
    }
    # Its context projection is the part of the draft that is read when tokens are committed.
    context = draft.hidden_size * draft.features * jnp.dtype(setting.dtype).itemsize
    moved["draft"], moved["commit"] = moved["draft"] - context, context
    moved["whole"] = sum(moved[name] for name in ("draft", "markov", "verify", "commit"))
    return {name: floor_us(float(count)) for name, count in moved.items()}


def experts_that_fit(config: K3Config, draft: DSparkConfig) -> int:
    """Experts per layer for which there is room beside everything else; all of them without a limit."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    most, sizes = config.moe.num_experts, footprint(config, draft=draft)
    if limit is None or not sizes.routed:
        return most
    room = limit - RESERVE - (sizes.weights - sizes.routed)
    return min(most, room // (sizes.routed // most))


class Loaded(NamedTuple):
    """Target, draft, and the states of a sequence of `context` tokens for each kind of decoding."""

    graph: step.Graph
    leaves: tuple[Array, ...]
    drafter: DSparkDrafter
    draft_leaves: tuple[Array, ...]
    plain: step.DecodeState
    speculative: SpeculativeState
    params: sampling.Sampling
    stop_ids: Int32[Array, "1 1"]


def load(setting: Setting) -> Loaded:
    """Random weights and empty caches; what is cached does not change a step's time."""
    config = setting.config
    target = K3(config, synthetic.tree(params.model_specs(config), setting.dtype), setting.implementation)
    draft = DSpark(setting.draft, synthetic.tree(draft_specs(setting.draft), setting.dtype, seed=1))
    width = -(-(setting.context + SPARE) // PAGE)
    pages = {"pages": width + 1, "page_size": PAGE, "dtype": setting.dtype}
    drafter, draft_leaves = DSparkDrafter.of(draft)

    def plain() -> step.DecodeState:
        numbers = ([1], [range(1, width + 1)], [setting.context], [1], [0], [1 << 20])
        slot, table, length, one, token, remaining = (jnp.asarray(np.asarray(n, np.int32)) for n in numbers)
        history = dataclasses.replace(sampling.History.of([[0]], config.vocab_size), position=length + 1)
        cache = create(config, slots=2, **pages)
        return step.DecodeState(cache, Rows(slot, table, length, one), token, remaining, history)

    state = plain()
    speculative = SpeculativeState(
        state.cache, drafter.create(**pages), state.rows, state.token, state.remaining, state.history
    )
    settings = sampling.Sampling.of(1, temperature=1.0)
    graph, leaves = step.split(target)
    stop_ids = jnp.full((1, 1), -1, jnp.int32)
    return Loaded(graph, leaves, drafter, draft_leaves, plain(), speculative, settings, stop_ids)


class Verify(NamedTuple):
    """Result of `Parts.verify`."""

    cache: K3Cache
    """As before, but for the latents."""
    pending: list[Any]
    """Records of each KDA layer."""
    logits: Float[Array, "B W V"]
    features: list[Float[Array, "B W D"]]
    """The tapped prefixes."""
    experts: list[Int32[Array, "N k"]]
    """The experts of each MoE layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The parts of `speculate` as functions of arrays alone, each to be compiled on its own."""

    loaded: Loaded
    filters: sampling.Filters = sampling.NO_FILTERS

    def draft(self, context: Any, leaves: Any, token: Any, rows: Rows, embedding: Any, head: Any) -> Any:
        """The parallel pass of the draft. Donates the context, which comes back."""
        return self.loaded.drafter.merge(leaves).draft(context, token, rows, embedding, head)

    def markov(self, leaves: Any, block: Any, token: Any, rows: Rows, params: Any) -> Proposal:
        """The drafts of a block, left to right."""
        return self.loaded.drafter.choose(leaves, block, token, rows, params, self.filters)

    def verify(self, cache: K3Cache, state: SpeculativeState, leaves: Any, drafts: Any) -> Verify:
        """The target's pass over the cache, which comes back; the state has none. Donates the cache."""
        state = dataclasses.replace(state, cache=cache)
        verified = parts.verify(self.loaded.graph, leaves, state, drafts)
        entries = verified.cache.layers
        pending = [entry.pending for entry in entries if isinstance(entry, KdaSpeculative)]
        plain = (KdaCache(e.state, e.window) if isinstance(e, KdaSpeculative) else e for e in entries)
        tapped = [verified.trace[layer].prefix for layer in self.loaded.drafter.config.target_layer_ids]
        experts = [entry.routing.ids for entry in verified.trace if entry.routing is not None]
        return Verify(K3Cache(tuple(plain)), pending, verified.logits, tapped, experts)

    def accept(self, logits: Any, proposal: Proposal, state: SpeculativeState, given: Any) -> parts.Judged:
        """Which drafts stand, and what follows."""
        return parts.judge(logits, proposal, state, given, parts.Options(filters=self.filters))

    def commit(
        self, pools: tuple[K3Cache, Any], state: SpeculativeState, leaves: Any, pending: Any, features: Any, judged: Any
    ) -> tuple[K3Cache, Any]:
        """Cache and draft context after the block. Donates them; the state has none."""
        left = iter(pending)

        def wait(entry: Any) -> Any:
            return KdaSpeculative(entry.state, entry.window, next(left)) if isinstance(entry, KdaCache) else entry

        cache, context = pools
        config, token = self.loaded.drafter.config, judged.block.token
        # The drafter looks at the tapped layers alone.
        tapped = dict(zip(config.target_layer_ids, features, strict=True))
        layers = [tapped.get(layer, features[0]) for layer in range(max(tapped) + 1)]
        trace = tuple(LayerTrace(feature, None, feature) for feature in layers)
        logits = jnp.zeros((*token.shape, 1), jnp.float32)
        verified = parts.Verified(token, logits, K3Cache(tuple(map(wait, cache.layers))), trace)
        before = dataclasses.replace(state, cache=cache, context=context)
        after = parts.commit(self.loaded.graph, self.loaded.drafter, leaves, before, verified, judged)
        return after.cache, after.context


@dataclasses.dataclass(slots=True)
class Programs:
    """Everything that is timed, compiled; and the inputs that the parts hand on."""

    loaded: Loaded
    compiled: dict[str, Any]
    seconds: float

    @classmethod
    def compile(cls, loaded: Loaded) -> "Programs":
        """All programs, in threads."""
        begin = time.perf_counter()
        makers = dict(_lowerings(loaded))
        with ThreadPoolExecutor(THREADS) as executor:
            compiled = executor.map(lambda make: make().compile(), makers.values())
            return cls(loaded, dict(zip(makers, compiled, strict=True)), time.perf_counter() - begin)

    def transfers(self, name: str) -> list[str]:
        """Instructions of a program that move data between device and host, or make the host look at the device."""
        text = self.compiled[name].as_text()
        found = re.findall(r" (infeed|outfeed|send|recv|conditional)\(", text)
        found += ["host memory"] * text.count("S(5)")
        found += [target for target in _targets(text) if "callback" in target or "python" in target]
        # A loop whose trip count is unknown asks the host after each trip.
        loops = [line for line in text.splitlines() if " while(" in line and "known_trip_count" not in line]
        return found + ["while"] * len(loops)

    def kernels(self, name: str) -> dict[str, int]:
        """Calls of a program that XLA did not generate, by target."""
        return dict(collections.Counter(_targets(self.compiled[name].as_text())).most_common())


def _targets(text: str) -> list[str]:
    """Custom calls of a compiled program, with the op that they belong to."""
    found = []
    for line in text.splitlines():
        if target := re.search(r'custom_call_target="([^"]+)"', line):
            ops = "prefill|decode|verify|commit_layers|experts|route|read|attend"
            op = re.search(rf'op_name="[^"]*?jit\(({ops})\)/', line)
            found.append(f"{op[1]}: {target[1]}" if op else target[1])
    return found


def _bare(state: SpeculativeState) -> SpeculativeState:
    """The state without what is donated apart."""
    return dataclasses.replace(state, cache=K3Cache(()), context=())


def _draft_inputs(loaded: Loaded) -> tuple[Any, ...]:
    model, state = loaded.graph.merge(loaded.leaves), loaded.speculative
    return (
        state.context,
        loaded.draft_leaves,
        state.token,
        state.rows,
        model.embedding[...],
        model.head[...],
    )


def _lowerings(loaded: Loaded) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A function that traces and lowers each program. Inputs that another part makes are abstract."""
    shared = (loaded.params, loaded.stop_ids)
    plain = (loaded.graph, loaded.leaves, loaded.plain, *shared)
    whole = (loaded.graph, loaded.leaves, loaded.drafter, loaded.draft_leaves, loaded.speculative, *shared)
    yield "plain", lambda: step.decode.lower(*plain, filters=sampling.NO_FILTERS)
    yield "whole", lambda: speculate.lower(*whole, filters=sampling.NO_FILTERS)
    one, filtered = Parts(loaded), Parts(loaded, filters=FILTERED)
    state, bare = loaded.speculative, _bare(loaded.speculative)
    draft = _draft_inputs(loaded)
    block = jax.eval_shape(one.draft, *draft)._replace(pools=())
    markov = (loaded.draft_leaves, block, state.token, state.rows, loaded.params)
    proposal = jax.eval_shape(one.markov, *markov)
    verify = (state.cache, bare, loaded.leaves, proposal.token)
    verified = jax.eval_shape(one.verify, *verify)
    accept = (verified.logits, proposal, bare, parts.Given(*shared))
    judged = jax.eval_shape(one.accept, *accept)
    commit = ((state.cache, state.context), bare, loaded.draft_leaves, verified.pending, verified.features, judged)
    yield "draft", lambda: jax.jit(one.draft, donate_argnums=0).lower(*draft)
    yield "verify", lambda: jax.jit(one.verify, donate_argnums=0).lower(*verify)
    yield "commit", lambda: jax.jit(one.commit, donate_argnums=0).lower(*commit)
    for kind, parts_of in (("", one), (TOP_P, filtered)):
        yield f"markov{kind}", lambda these=parts_of: jax.jit(these.markov).lower(*markov)
        yield f"accept{kind}", lambda these=parts_of: jax.jit(these.accept).lower(*accept)


def device_us(run: Callable[[Any], Any], carry: Any, repeats: int = 5) -> float:
    """Microseconds that the device takes for a call of a compiled program; `run` maps the carry to the next one.

    Decoding enqueues a step before the last one has ended, so the host's time for a call does not count. It is kept
    out: calls stand behind work that lasts until all are enqueued, and few are subtracted from many.
    """

    def series(carry: Any, calls: int) -> tuple[Any, float]:
        start = time.perf_counter()
        ahead = _keep_busy()
        for _ in range(calls):
            carry = run(carry)
        jax.block_until_ready((ahead, carry))
        return carry, time.perf_counter() - start

    carry, _ = series(carry, 1)
    best = dict.fromkeys((FEW, MANY), math.inf)
    for _ in range(repeats):
        for calls in best:
            carry, seconds = series(carry, calls)
            # Whatever else the machine does only adds.
            best[calls] = min(best[calls], seconds)
    return (best[MANY] - best[FEW]) / (MANY - FEW) * 1e6


def _keep_busy() -> Array:
    """About thirty milliseconds of a GPU's time; nothing to speak of elsewhere."""
    size, turns = (4096, 150) if jax.default_backend() == "gpu" else (8, 1)
    return _multiply(jnp.ones((size, size), jnp.bfloat16), turns)


@functools.partial(jax.jit, static_argnums=1)
def _multiply(matrix: Float[Array, "N N"], turns: int) -> Float[Array, "N N"]:
    scaled = matrix / jnp.asarray(matrix.shape[0], matrix.dtype)
    return jax.lax.fori_loop(0, turns, lambda _, product: product @ scaled, matrix)


@dataclasses.dataclass(slots=True)
class Stopwatch:
    """Times the programs on what the ones before them made. No array is read while the clock runs."""

    programs: Programs
    experts: list[Array] = dataclasses.field(default_factory=list)
    """The experts that a block reached, by MoE layer; set by `parts`."""

    def parts(self) -> Iterator[tuple[str, float]]:
        """Microseconds of each part, as it is measured."""
        run, loaded = self.programs.compiled, self.programs.loaded
        state, bare = loaded.speculative, _bare(loaded.speculative)
        context, *draft = _draft_inputs(loaded)
        context = jax.tree.map(jnp.copy, context)
        yield "draft", device_us(lambda pools: run["draft"](pools, *draft).pools, context)
        block = run["draft"](jax.tree.map(jnp.copy, state.context), *draft)
        markov = (loaded.draft_leaves, block._replace(pools=()), state.token, state.rows, loaded.params)
        proposal = run["markov"](*markov)
        for kind in ("", TOP_P):
            yield f"markov{kind}", self._repeat(f"markov{kind}", markov)

        def verify(cache: K3Cache) -> Verify:
            return run["verify"](cache, bare, loaded.leaves, proposal.token)

        cache, context = jax.tree.map(jnp.copy, (state.cache, state.context))
        yield "verify", device_us(lambda cache: verify(cache).cache, cache)
        verified = verify(jax.tree.map(jnp.copy, state.cache))
        self.experts = verified.experts
        accept = (verified.logits, proposal, bare, parts.Given(loaded.params, loaded.stop_ids))
        judged = run["accept"](*accept)
        for kind in ("", TOP_P):
            yield f"accept{kind}", self._repeat(f"accept{kind}", accept)
        rest = (bare, loaded.draft_leaves, verified.pending, verified.features, judged)
        pools = (verified.cache, context)
        yield "commit", device_us(lambda pools: run["commit"](pools, *rest), pools)

    def _repeat(self, name: str, inputs: tuple[Any, ...]) -> float:
        call = self.programs.compiled[name]
        return device_us(lambda _: call(*inputs), None)

    def steps(self) -> Iterator[tuple[str, float]]:
        """The two kinds of decoding, whole. Their states are used up."""
        run, loaded = self.programs.compiled, self.programs.loaded
        shared = (loaded.params, loaded.stop_ids)
        yield "plain", device_us(lambda state: run["plain"](loaded.leaves, state, *shared)[0], loaded.plain)

        def whole(state: SpeculativeState) -> SpeculativeState:
            return run["whole"](loaded.leaves, loaded.draft_leaves, state, *shared)[0]

        yield "whole", device_us(whole, loaded.speculative)


def distinct(experts: list[Array], tokens: int | None) -> float:
    """Distinct experts that the first `tokens` of a block reach: the mean over the MoE layers."""
    return float(np.mean([len(np.unique(np.asarray(layer)[:tokens])) for layer in experts]))
