"""What the process holds and does not need."""

import contextlib
import ctypes
import gc


def release() -> None:
    """Gives memory that is free back to the system."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Gives back what compiling has left over, some hundred MiB, and spares the collector all that stays for good."""
    gc.collect()
    gc.freeze()
    release()
