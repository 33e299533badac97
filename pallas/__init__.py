"""GPU kernels in JAX for Kimi K3, one folder per op: `api.py`, a plain reference, a portable XLA path and the kernels."""
