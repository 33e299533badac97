"""Shapes of Kimi K3's KDA layers: 96 heads of 128 channels, 12 heads on a rank of eight."""

HEAD_DIM = 128
HEADS = 96
RANK_HEADS = 12
LAYERS = 69
VERIFY_TOKENS = 8
PREFILL_TOKENS = 8192
