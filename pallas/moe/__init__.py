"""Routing and packed MXFP4 experts of Stable LatentMoE."""

from pallas.moe.api import dequantize, experts, route
from pallas.moe.types import DenseExperts, Experts, PackedExperts, Routing

__all__ = ["DenseExperts", "Experts", "PackedExperts", "Routing", "dequantize", "experts", "route"]
