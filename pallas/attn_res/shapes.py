"""Shapes of Kimi K3's residual stream: 93 layers in blocks of 12, a read before every attention and MLP and at the end."""

HIDDEN = 7168
MOST_SOURCES = 8
SITES = 24
"""Reads of a block of twelve layers."""
READS = 186
PREFILL_TOKENS = 8192
