"""Huge pages for the weights that ONNX Runtime packs when it opens a graph.

A step on a CPU is bound by reading the weights once. Packed weights lie in ordinary 4 KiB pages (numpy asks for huge
pages for its own arrays, ONNX Runtime does not), and the misses of the address translation cost 6 % of a one-token step
and 4 % of one of eight tokens (measured on the demonstration target). Advice to the kernel, nothing more: where it is
not taken, nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # now, not when the kernel comes by; Linux 6.1


@contextmanager
def huge_pages() -> Iterator[None]:
    """Ask for huge pages for the anonymous memory that was allocated inside and is still there at the end."""
    if sys.platform != "linux":
        yield
        return
    before = _anonymous_frames()
    yield
    libc = ctypes.CDLL(None)
    frames = sorted(_anonymous_frames() - before)
    for _, run in groupby(enumerate(frames), lambda item: item[1] - item[0]):
        members = [frame for _, frame in run]
        begin, length = members[0] * _HUGE_PAGE_BYTES, len(members) * _HUGE_PAGE_BYTES
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)


def _anonymous_frames() -> set[int]:
    """Numbers of the aligned 2 MiB frames that lie wholly inside private, writable memory without a file."""
    frames: set[int] = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *name = line.split()
        if permissions.startswith("rw") and permissions.endswith("p") and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            frames.update(range(-(-begin // _HUGE_PAGE_BYTES), end // _HUGE_PAGE_BYTES))
    return frames
