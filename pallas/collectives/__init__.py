"""Sums over the devices of a mesh, small enough that only the way between devices counts."""

from pallas.collectives.api import all_reduce
from pallas.collectives.inboxes import Inboxes, connect, played
from pallas.collectives.layout import CHANNELS

__all__ = ["CHANNELS", "Inboxes", "all_reduce", "connect", "played"]
