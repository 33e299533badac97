"""Shapes of Kimi K3's MLA layers: 96 heads, 12 on a rank of eight; 512 latent values and a shared key of 64 a token."""

HEADS = 96
RANK_HEADS = 12
OWN, SHARED, VALUE = 128, 64, 128
RANK = 512
LATENT = RANK + SHARED
SCALE = (OWN + SHARED) ** -0.5
PAGE = 64
PREFILL_TOKENS = 8192
