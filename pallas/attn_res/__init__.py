"""Block Attention Residuals: softmax attention over the depth of the network."""

from pallas.attn_res.api import Summary, merge, mix, summarize

__all__ = ["Summary", "merge", "mix", "summarize"]
