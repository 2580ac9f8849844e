"""Keeps freed CPU memory in the process, as PyTorch's allocator does on a GPU."""

import ctypes
import sys

# Parameters of glibc's mallopt.
_M_ARENA_MAX = -8
_M_MMAP_MAX = -4
_M_TRIM_THRESHOLD = -1


def keep_freed_memory() -> bool:
    """Reuse large freed blocks of memory instead of returning them to the operating system.

    A forward pass over thousands of tokens allocates and frees tens of megabytes for every
    operation. The C library returns such blocks at once, and touching fresh pages then costs
    several times what an element-wise operation on them does. Call it once, early, in a process
    that exists for inference: what it frees no longer is free for others.

    Returns:
        Whether it took effect: only glibc has these settings (others have allocators of their own
        to preload).
    """
    mallopt = _from_libc("mallopt")
    if mallopt is None:
        return False
    # One arena, as the others cannot grow beyond 64 MiB in one piece; nothing mapped or trimmed
    # block by block.
    settings = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1}
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])


def return_freed_memory() -> None:
    """Return cached memory to the operating system, so that a later peak can be measured."""
    malloc_trim = _from_libc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _from_libc(name: str):
    """Look up a function of glibc; None if the C library has no such function."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
