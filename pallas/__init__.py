"""GPU kernels in JAX for Kimi K3, a folder per op: `api.py`, a plain reference, a portable XLA path, the kernels."""
