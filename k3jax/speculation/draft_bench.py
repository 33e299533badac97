"""Benchmark of a draft's pass over a block: a gate against float32, then its time at the widths of Kimi K3's draft."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.cache import Rows
from k3jax.config import k3
from k3jax.dspark import quantized
from k3jax.dspark.config import DraftMla, DSparkConfig
from k3jax.dspark.model import Draft, DSpark
from k3jax.dspark.tensors import draft_specs
from k3jax.speculation import synthetic
from k3jax.speculation.bench import held, k3_draft
from k3jax.speculation.drafters import DSparkDrafter
from pallas import timing
from pallas.benchmark import Check, Measurement, compiled, floor_us, measured_peer
from pallas.dispatch import Implementation

CONTEXT, PAGE = 1024, 64
BOUND = 0.01
"""Of bfloat16 activations against float32 through five layers: 0.004 when measured."""
Inputs = tuple[Any, ...]
"""Pools, which may be donated; leaves, anchor, rows, embedding."""


def config_for_device() -> DSparkConfig:
    """K3's draft on a GPU, otherwise a small one."""
    config = k3_draft(dataclasses.replace(k3(), num_layers=8, mla_layers=(3, 7)))
    if jax.default_backend() == "gpu":
        return config
    small = {"vocab_size": 72, "draft_vocab_size": 72, "hidden_size": 64, "intermediate_size": 64, "num_layers": 2}
    small |= {"target_hidden_size": 64, "mask_token_id": 69, "markov_rank": 16}
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return dataclasses.replace(config, **small, attention=DraftMla(num_heads=2, **sizes))


def draw(config: DSparkConfig) -> tuple[DSparkDrafter, Inputs]:
    """A draft with random weights in 8 bits and a head of its own, behind random context."""
    table = jax.random.normal(jax.random.key(0), (config.vocab_size, config.hidden_size), jnp.bfloat16)
    tree = quantized.quantize(synthetic.tree(draft_specs(config), jnp.bfloat16, seed=1), table)
    drafter, leaves = DSparkDrafter.of(DSpark(config, tree))
    pages = 2 * CONTEXT // PAGE
    shape = pages + 1, PAGE, config.attention.row_width
    pools = tuple(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(config.num_layers))
    numbers = [1], [list(range(1, pages + 1))], [CONTEXT], [config.block_size]
    rows = Rows(*(jnp.asarray(x, jnp.int32) for x in numbers))
    return drafter, (pools, leaves, jnp.asarray([7], jnp.int32), rows, table)


def program(drafter: DSparkDrafter, implementation: Implementation) -> Callable[..., Draft]:
    """The pass. Donates the pools."""

    def run(pools: Any, leaves: Any, anchor: jax.Array, rows: Rows, table: jax.Array) -> Draft:
        return drafter.merge(leaves).draft(pools, anchor, rows, table, implementation=implementation)

    return jax.jit(run, donate_argnums=0)


def wide(inputs: Inputs) -> Inputs:
    """The same in float32, but for matrices of 8 bits."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, inputs)


def gate(implementation: Implementation = None) -> list[Check]:
    """What logits are made of and the rows behind the context against float32; and a pass repeated."""
    drafter, inputs = draw(config_for_device())
    fresh = lambda: (jax.tree.map(jnp.copy, inputs[0]), *inputs[1:])  # noqa: E731
    run = program(drafter, implementation)
    ours, again, exact = run(*fresh()), run(*fresh()), program(drafter, "xla")(*wide(inputs))
    tokens = ours.hidden.shape[1]
    behind = ([pool[CONTEXT // PAGE + 1, :tokens] for pool in draft.pools] for draft in (ours, exact))
    errors = [timing.relative_rms(*rows) for rows in zip(*behind, strict=True)]
    return [
        Check("hidden states", timing.relative_rms(ours.hidden, exact.hidden), BOUND),
        Check("rows of the last layer", errors[-1], BOUND),
        Check("rows of the first layer", errors[0], BOUND / 2),
        Check("repeated", float(jnp.sum(ours.logits != again.logits)), 0.0),
    ]


def measure() -> Iterator[Measurement]:
    """Times the pass on the present GPU, beside the layers one by one."""
    config = config_for_device()
    drafter, inputs = draw(config)
    programs = compiled({str(kind): (program(drafter, kind), inputs) for kind in (None, "xla")})

    def time(kind: Implementation) -> float:
        run = lambda pools: programs[str(kind)](pools, *inputs[1:]).pools  # noqa: E731
        return timing.device_call_us(run, jax.tree.map(jnp.copy, inputs[0]), 1)

    draft = drafter.merge(inputs[1])
    idle = [draft.context_proj, *jax.tree.leaves(draft.markov)]
    moved = held(inputs[1]) - sum(held(leaf) for leaf in idle)
    peer = measured_peer("layers one by one", lambda: time("xla"))
    name = f"{config.num_layers} layers and head, {config.block_size} tokens behind {CONTEXT}, int8"
    yield Measurement(name, time(None), floor_us(float(moved)), None, (peer,))
