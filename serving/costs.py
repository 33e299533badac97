"""What tokens cost: FLOPs, bytes and, on a given device, seconds.

Prefill of token t at position p: 2 * active parameters + pair * p FLOPs, where `pair` is what one query-key pair
costs over all MLA layers. KDA costs the same at every position, and is counted per token.
"""

import dataclasses

from k3jax.config import K3Config


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Sizes of one model."""

    flops_per_token: int | float
    flops_per_pair: int | float
    latent_bytes_per_token: int | float
    """Of all MLA layers."""
    state_bytes: int | float
    """State and convolution window of all KDA layers: one slot."""
    active_weight_bytes: int | float = 0.0
    """Weights read for one token."""
    weight_bytes: int | float = 0.0
    touched: int | float = 1.0
    """Part of the routed experts that one token needs."""

    @classmethod
    def of(
        cls,
        config: K3Config,
        *,
        weight_bits: int | float = 4.25,
        latent_bytes: int | float = 1.0,
        window_bytes: int | float = 2.0,
    ) -> "ModelCost":
        """Costs of `config`: routed experts of `weight_bits`, other weights of 16, latents of `latent_bytes`."""
        kda, mla = config.kda, config.mla
        dense, expert = _dense_parameters(config), _expert_parameters(config)
        routed = len(config.moe_layers) * expert
        active = dense + routed * config.moe.num_experts_per_token
        recurrence = len(config.kda_layers) * kda.num_heads * 8 * kda.head_dim**2
        state = kda.num_heads * kda.head_dim**2 * 4 + 3 * 3 * kda.width * window_bytes
        bits = weight_bits / 8
        return cls(
            flops_per_token=2 * active + recurrence,
            flops_per_pair=2 * len(config.mla_layers) * mla.num_heads * (mla.query_width + mla.v_head_dim),
            latent_bytes_per_token=len(config.mla_layers) * mla.latent_width * latent_bytes,
            state_bytes=len(config.kda_layers) * state,
            active_weight_bytes=2 * dense + bits * routed * config.moe.num_experts_per_token,
            weight_bytes=2 * dense + bits * routed * config.moe.num_experts,
            touched=config.moe.num_experts_per_token / config.moe.num_experts,
        )

    def prefill_flops(self, start: int, end: int) -> float:
        """FLOPs of tokens `start` to `end` of a sequence."""
        return (end - start) * self.flops_per_token + self.flops_per_pair * (end**2 - start**2) / 2

    def prefix_bytes(self, tokens: int) -> float:
        """Bytes of a prefix with its state."""
        return self.state_bytes + tokens * self.latent_bytes_per_token


def _dense_parameters(config: K3Config) -> int:
    """Parameters that every token meets, the head included and the embedding not."""
    hidden, mla, width = config.hidden_size, config.mla, config.kda.width
    kda_layer = hidden * (5 * width + config.kda.num_heads + config.kda.head_dim) + config.kda.head_dim * width
    mla_layer = hidden * (mla.q_lora_rank + mla.latent_width + 2 * mla.num_heads * mla.v_head_dim)
    mla_layer += mla.num_heads * mla.q_lora_rank * mla.query_width
    mla_layer += mla.num_heads * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    moe = config.moe
    moe_layer = hidden * (moe.num_experts + 2 * moe.latent_size + 3 * moe.shared_size)
    dense_layers = config.num_layers - len(config.moe_layers)
    return (
        len(config.kda_layers) * kda_layer
        + len(config.mla_layers) * mla_layer
        + len(config.moe_layers) * moe_layer
        + dense_layers * 3 * hidden * config.intermediate_size
        + hidden * config.vocab_size
    )


def _expert_parameters(config: K3Config) -> int:
    return 3 * config.moe.latent_size * config.moe.intermediate_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A group of devices as one roofline."""

    flops: int | float
    """FLOPs a second that prefill reaches, all devices together."""
    bandwidth: int | float
    """Bytes a second that decode reaches, all devices together."""
    overhead: int | float = 5e-4
    """Seconds of a step that neither roof explains."""

    def prefill_seconds(self, cost: ModelCost, start: int, end: int) -> float:
        """Time of tokens `start` to `end` of a prompt, without the overhead of a step."""
        return cost.prefill_flops(start, end) / self.flops

    def decode_seconds(self, cost: ModelCost, contexts: list[int]) -> float:
        """Time of a step with one token for each of the `contexts` (lengths), without overhead."""
        if not contexts:
            return 0.0
        experts = 1 - (1 - cost.touched) ** len(contexts)
        weights = cost.active_weight_bytes + (cost.weight_bytes - cost.active_weight_bytes) * experts
        latents = sum(contexts) * cost.latent_bytes_per_token
        return (weights + latents + 2 * cost.state_bytes * len(contexts)) / self.bandwidth


DEVICES = {
    "h200x8": Device(flops=8 * 400e12, bandwidth=8 * 3.6e12),
    "gb300x16": Device(flops=16 * 1.5e15, bandwidth=16 * 6.5e12),
}
