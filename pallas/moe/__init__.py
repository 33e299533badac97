"""Routing and packed MXFP4 experts of Stable LatentMoE."""

from pallas.moe.api import choose, dequantize, expert_load, experts, require_distinct, require_finite, route
from pallas.moe.parallel import experts as parallel_experts
from pallas.moe.types import DenseExperts, Experts, PackedExperts, Routing

__all__ = [
    "DenseExperts",
    "Experts",
    "PackedExperts",
    "Routing",
    "choose",
    "dequantize",
    "expert_load",
    "experts",
    "parallel_experts",
    "require_distinct",
    "require_finite",
    "route",
]
