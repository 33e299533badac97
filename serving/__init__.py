"""The engine: caches, prefix reuse, retention and continuous batching around the step functions of `k3jax`."""
