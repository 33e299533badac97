"""Routing and packed MXFP4 experts of Stable LatentMoE."""

from pallas.moe.api import choose, dequantize, expert_load, experts, front, require_distinct, route
from pallas.moe.parallel import experts as parallel_experts
from pallas.moe.types import DenseExperts, Experts, Front, PackedExperts, Routing

__all__ = [
    "DenseExperts",
    "Experts",
    "Front",
    "PackedExperts",
    "Routing",
    "choose",
    "dequantize",
    "expert_load",
    "experts",
    "front",
    "parallel_experts",
    "require_distinct",
    "route",
]
