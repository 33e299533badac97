"""Block Attention Residuals: softmax attention over the depth of the network."""

from pallas.attn_res.api import Read, Summary, merge, mix, read, summarize

__all__ = ["Read", "Summary", "merge", "mix", "read", "summarize"]
