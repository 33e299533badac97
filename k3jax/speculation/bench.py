"""What speculation costs on this device: one step beside plain decoding, split into its parts.

The model has K3's widths and a few of its layers, with random weights made on the device. Times do not depend on what
the weights say, but for the number of distinct experts that a block of tokens reaches, which is counted: random
tokens spread over more of them than a text's would.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from k3jax import params, sampling, step
from k3jax.cache import K3Cache, KdaCache, KdaSpeculative, Rows, create
from k3jax.capacity import footprint
from k3jax.config import K3Config, k3
from k3jax.dspark import quantized
from k3jax.dspark.config import DraftMla, DSparkConfig, Rope, Yarn
from k3jax.dspark.model import DSpark
from k3jax.dspark.quantized import DraftWeights
from k3jax.dspark.tensors import draft_specs
from k3jax.model import K3, LayerTrace
from k3jax.speculation import parts, synthetic
from k3jax.speculation.drafters import DSparkDrafter, Proposal
from k3jax.speculation.state import SpeculativeState
from pallas import gemv
from pallas.benchmark import floor_us
from pallas.dispatch import Implementation

PAGE = 64
RESERVE = 6 << 30
"""Bytes kept free for what the programs compute."""
SPARE = 1024
"""Tokens of cache beyond the context; each timed step may take a block of them."""
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
    draft_weights: Literal["model", "int8"] = "model"

    @classmethod
    def of_k3(
        cls,
        layers: int,
        experts: int | None,
        context: int,
        implementation: Implementation = None,
        draft_weights: DraftWeights = "auto",
    ) -> "Setting":
        """The first layers of K3 at full width, with all the experts that fit or the number given."""
        full = k3()
        config = dataclasses.replace(
            full, num_layers=layers, mla_layers=tuple(layer for layer in full.mla_layers if layer < layers)
        )
        draft, kind = k3_draft(config), quantized.chosen(draft_weights, jnp.bfloat16)
        count = experts or experts_that_fit(config, draft, kind)
        moe = dataclasses.replace(config.moe, num_experts=count)
        return cls(
            config=dataclasses.replace(config, moe=moe),
            draft=draft,
            context=context,
            dtype=jnp.bfloat16,
            implementation=implementation,
            draft_weights=kind,
        )

    def draft_parameters(self, tree: params.Tree, head: Any) -> params.Tree:
        """A draft's parameters in the kind that is measured; `head` is the target's."""
        return quantized.quantize(tree, head) if self.draft_weights == "int8" else tree

    def shapes(self) -> tuple[params.Tree, params.Tree]:
        """Shapes of the parameters of target and draft."""

        def tree(specs: params.Tree) -> params.Tree:
            return params.map_tree(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.array_dtype(self.dtype)), specs)

        target = tree(params.model_specs(self.config))
        return target, jax.eval_shape(self.draft_parameters, tree(draft_specs(self.draft)), target["head"])


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
    sizes, (_, draft) = footprint(setting.config, dtype=setting.dtype), setting.shapes()
    # One row of the embedding is read, not the table; the head is as large.
    head, dense = sizes.embedding, sizes.weights - sizes.routed - sizes.embedding
    each = sizes.routed / setting.config.moe.num_experts
    markov, context = held(draft["markov"]["head"]), held(draft["context_proj"])
    moved = {
        "draft": held(draft) - held(draft["markov"]) - context + (0 if "head" in draft else head),
        "markov": setting.draft.block_size * markov,
        "verify": dense + block * each,
        "plain": dense + one * each,
        # The context projection is the part of the draft that is read when tokens are committed.
        "commit": context,
    }
    moved["whole"] = sum(moved[name] for name in ("draft", "markov", "verify", "commit"))
    return {name: floor_us(float(count)) for name, count in moved.items()}


def held(tree: Any) -> int:
    """Bytes of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def experts_that_fit(config: K3Config, draft: DSparkConfig, draft_weights: Literal["model", "int8"]) -> int:
    """Experts per layer for which there is room beside everything else; all of them without a limit."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    most, sizes = config.moe.num_experts, footprint(config, draft=draft, draft_weights=draft_weights)
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
    # The draft first: while it is turned into 8 bits there is room for both kinds.
    draft = synthetic.tree(draft_specs(setting.draft), setting.dtype, seed=1)
    draft = setting.draft_parameters(draft, None)
    target = synthetic.tree(params.model_specs(setting.config), setting.dtype)
    if setting.draft_weights == "int8":
        draft["head"] = gemv.quantize(target["head"])
    return assemble(setting, target, draft)


def abstract(setting: Setting) -> Loaded:
    """What `load` gives, as shapes: enough to compile with."""
    static = {}

    def arrays(*trees: params.Tree) -> Loaded:
        loaded = assemble(setting, *trees)
        static.update(graph=loaded.graph, drafter=loaded.drafter)
        return loaded._replace(graph=None, drafter=None)

    return jax.eval_shape(arrays, *setting.shapes())._replace(**static)


def assemble(setting: Setting, target: params.Tree, draft: params.Tree) -> Loaded:
    """Model, draft and states around these parameters."""
    config = setting.config
    graph, leaves = step.split(K3(config, target, setting.implementation))
    drafter, draft_leaves = DSparkDrafter.of(DSpark(setting.draft, draft))
    width = -(-(setting.context + SPARE) // PAGE)
    pages = {"pages": width + 1, "page_size": PAGE, "dtype": setting.dtype}

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
    settings, stop_ids = sampling.Sampling.of(1, temperature=1.0), jnp.full((1, 1), -1, jnp.int32)
    return Loaded(graph, leaves, drafter, draft_leaves, plain(), speculative, settings, stop_ids)


def bare(state: SpeculativeState) -> SpeculativeState:
    """The state without what is donated apart."""
    return dataclasses.replace(state, cache=K3Cache(()), context=())


def draft_inputs(loaded: Loaded, leaves: tuple[Array, ...]) -> tuple[Any, ...]:
    """What `Parts.draft` takes, with the tables of the target's `leaves`."""
    model, state = loaded.graph.merge(leaves), loaded.speculative
    return state.context, loaded.draft_leaves, state.token, state.rows, model.embedding[...], model.head[...]


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
        """The drafts of a block, left to right. Steps of one width look at no confidence."""
        return self.loaded.drafter.choose(leaves, block, token, rows, params, self.filters)._replace(confidence=None)

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
