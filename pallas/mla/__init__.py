"""Multi-head latent attention without positional encoding, over paged latents."""

from pallas.mla.api import decode, gather_pages, prefill, quantize_pages, write_pages

__all__ = ["decode", "gather_pages", "prefill", "quantize_pages", "write_pages"]
