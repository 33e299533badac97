"""Tokens drawn one after another, each under a bias that the one before it gives."""

from pallas.markov.api import Walk, walk
from pallas.markov.gumbel import noise

__all__ = ["Walk", "noise", "walk"]
