"""Kimi K3's sizes, for tests and benchmarks."""

EXPERTS = 896
CHOSEN = 16
WIDTH = 7168
LATENT = 3584
INNER = 3072
RANK_INNER = 384
"""Expert width on one of eight tensor-parallel devices."""
RANK_SHARED = 768
"""Width of the shared experts there."""
BETA, LINEAR_BETA = 4.0, 25.0
