"""Host memory of a CPU step: freed blocks stay in the process."""

import ctypes
import sys

# Parameters of glibc's mallopt, from <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for the next step; whether it did (False without glibc).

    By default every large tensor is mapped again and returned to the system when freed, so that each step takes a page
    fault, with 4 KiB to clear, for all that it allocates. The process keeps its peak instead. Source: mallopt(3).
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_MMAP_MAX, 0)) and bool(libc.mallopt(_TRIM_THRESHOLD, -1))
