"""Kimi K3's sizes, for tests and benchmarks."""

EXPERTS = 896
CHOSEN = 16
LATENT = 3584
INNER = 3072
RANK_INNER = 384
"""Expert width on one of eight tensor-parallel devices."""
BETA, LINEAR_BETA = 4.0, 25.0
