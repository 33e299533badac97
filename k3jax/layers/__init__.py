"""The layers of K3 as Flax NNX modules; each calls the ops in `pallas`."""
