"""Kimi Delta Attention: prefill, decode, verify and commit, and the affine form for context parallelism."""

from pallas.kda.api import affine, commit, commit_layers, compose, decode, prefill, prefill_packed, recurrent, verify
from pallas.kda.types import Affine, Decode, KdaWeights, Pools, Prefill, Records, Verify

__all__ = [
    "Affine",
    "Decode",
    "KdaWeights",
    "Pools",
    "Prefill",
    "Records",
    "Verify",
    "affine",
    "commit",
    "commit_layers",
    "compose",
    "decode",
    "prefill",
    "prefill_packed",
    "recurrent",
    "verify",
]
