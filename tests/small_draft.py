"""A small random DSpark draft for a small K3: nearly all of its tokens are rejected, the hard case for the state."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from k3jax import params
from k3jax.dspark.config import DraftGqa, DraftMla, DSparkConfig, Rope
from k3jax.dspark.model import DSpark
from k3jax.dspark.tensors import draft_specs
from k3jax.speculation.drafters import DSparkDrafter


def settings(config, *, taps, mask, confidence):
    """One layer that drafts three tokens."""
    return DSparkConfig(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=64,
        num_layers=1,
        attention=DraftGqa(num_heads=2, num_kv_heads=1, head_dim=16),
        rope=Rope(theta=1e4, interleaved=False),
        norm_eps=1e-5,
        target_layer_ids=taps,
        mask_token_id=mask,
        block_size=3,
        markov_rank=8,
        markov_kind="vanilla",
        confidence=confidence,
        confidence_with_markov=confidence,
    )


def published(config, *, layers):
    """The published draft's kind of attention, in small; taps behind as many layers as it has itself."""
    sizes = dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16)
    sizes |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    return dataclasses.replace(
        settings(config, taps=tuple(range(layers)), mask=3, confidence=True),
        num_layers=layers,
        attention=DraftMla(num_heads=2, **sizes),
        rope=Rope(theta=1e4, interleaved=True),
    )


def build(config, *, spread=1, change=dict):
    """Drafter and weights. `spread` scales what has one output, like the confidence head, so that its logits differ.

    `change` is what becomes of the parameters.
    """
    rng = np.random.default_rng(11)

    def fill(spec):
        values = rng.standard_normal(spec.shape) * (spread if spec.shape[0] == 1 else 1) / np.sqrt(spec.shape[-1])
        return jnp.asarray(1 + 0.1 * values if spec.init == "ones" else values, jnp.float32)

    return DSparkDrafter.of(DSpark(config, change(params.map_tree(fill, draft_specs(config)))))
