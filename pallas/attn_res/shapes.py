"""Shapes of Kimi K3's residual stream: blocks of 12 of its 93 layers, a read before every sublayer."""

HIDDEN = 7168
MOST_SOURCES = 8
SITES = 24
"""Reads of a block of twelve layers."""
READS = 186
PREFILL_TOKENS = 8192
