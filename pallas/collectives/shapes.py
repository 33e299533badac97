"""What Kimi K3 sums up: the residual stream and the latents of its experts, for one token to sixteen."""

HIDDEN = 7168
LATENT = 3584
SUMS = 279
"""Sums of a token with tensor parallelism: one of the embedding, three of a MoE layer, two of the dense one."""
