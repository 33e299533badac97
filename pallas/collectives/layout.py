"""Where things lie in an inbox, the memory that a device keeps for what its peers send it.

An inbox has CHANNELS equal parts. Such a part begins with a counter for every unit of 16 bytes that a sum may have,
which says how often this unit was summed; then come the units of an even turn, one run for every sender, and those of
an odd turn. All of it is filled with `EMPTY`, which no sender ever sends, so that a word that is not `EMPTY` has come.
"""

UNIT = 16
"""Bytes that a thread sends to each peer with one store."""
CAPACITY = 28672
"""Units of the largest sum: 16 rows of Kimi K3's width in float32, or 32 in bfloat16."""
CHANNELS = 2
"""Sums that may be under way at the same time, each on its own channel."""
MOST_DEVICES = 8
EMPTY = 0xFFFFFFFF
"""A word that has not come: as float32 and as two bfloat16 a NaN that arithmetic does not make."""
NAN = 0x7FFF7FFF
"""What is sent in place of `EMPTY`: a NaN as well, as float32 and as two bfloat16."""

COUNTERS = 4 * CAPACITY
"""Bytes of a channel's counters."""
RUN = UNIT * CAPACITY
"""Bytes of a sender's units."""


def turn_bytes(devices: int) -> int:
    """Bytes of the units of one turn."""
    return RUN * devices


def channel_bytes(devices: int) -> int:
    """Bytes of a channel."""
    return COUNTERS + 2 * turn_bytes(devices)


def row_words(devices: int) -> int:
    """32-bit words of a device's row of the table: its inbox, its rank, and the inboxes of all, 8 bytes each."""
    return 2 * (2 + devices + devices % 2)
