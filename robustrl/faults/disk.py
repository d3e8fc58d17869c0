"""A full disk for one thread alone: a little tmpfs over a folder, in a mount namespace of the calling thread, filled to the last byte.

Nobody else sees it, and nothing of it outlives the thread: what the kernel gave to a namespace goes with it, however the process ends.
Needs the right to mount (root with CAP_SYS_ADMIN). Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_NEW_NAMESPACE = 0x00020000
_PRIVATE, _RECURSIVE, _DETACH = 1 << 18, 1 << 14, 2
_BLOCK = 4096


def fill(folder: Path, size: int = 64 << 10) -> int:
    """From now on ``folder`` is, for this thread, a tmpfs of ``size`` bytes without room. Returns the bytes that were written to it. Raises
    OSError where that is not allowed; everything is then as before.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_NAMESPACE), "a mount namespace of its own")
    _check(libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None), "mounts that nobody else sees")
    _check(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()), f"a tmpfs over {folder}")
    written = 0
    with open(folder / "full", "wb", buffering=0) as file:
        try:
            while True:
                written += file.write(b"\0" * _BLOCK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return written


def free(folder: Path) -> None:
    """The folder is what it was, for this thread."""
    _check(ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(folder), _DETACH), f"the end of the tmpfs over {folder}")


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
