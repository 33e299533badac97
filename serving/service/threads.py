"""Which threads of the process come first when there are more of them than cores."""

import contextlib
import os
from pathlib import Path

ARITHMETIC = "tf_XLAEigen"
"""Name of the threads in which XLA computes on a CPU. They hold no lock that others wait for."""
NICER = 5
"""Steps by which they give way. Alone on its core a thread is as quick as before."""
MOST = 19
"""The system's largest niceness."""


def put_answers_first() -> int:
    """Lets the threads that answer clients interrupt those that compute; returns how many compute.

    On a CPU XLA keeps every core busy, and a refusal passes through half a dozen threads of two processes, each of
    which would wait for a core. Does nothing where the device is no CPU, nor where threads have no priority of their
    own (outside Linux).
    """
    count = 0
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            if (thread / "comm").read_text().strip() == ARITHMETIC:
                number = int(thread.name)
                niceness = os.getpriority(os.PRIO_PROCESS, number) + NICER
                os.setpriority(os.PRIO_PROCESS, number, min(niceness, MOST))
                count += 1
    return count
