"""What Linux must do for a pool, and Python has no call for: huge pages, NUMA placement, populating, punching
holes. And how much memory there is to take."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mooncaked.units import RANGE_MAX, parse_ranges

PAGE = mmap.PAGESIZE
HUGE_PAGES = ("off", "transparent", "2MiB", "1GiB")
HUGE_BYTES = {"2MiB": 2 << 20, "1GiB": 1 << 30}  # of the kinds that are reserved beforehand (hugetlb)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_HUGE_SHIFT = 26
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3
_MBIND_CALL = {"x86_64": 237, "aarch64": 235}  # libnuma is not needed for one call
_NODES_MAX = RANGE_MAX + 1
_NODES = Path("/sys/devices/system/node")
_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGETLB = Path("/sys/kernel/mm/hugepages")

_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL; mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syscall.restype = ctypes.c_long


def round_up(size: int, huge_pages: str) -> int:
    """`size` in whole pages of the kind that is asked for."""
    page = HUGE_BYTES.get(huge_pages, PAGE)
    return -(-size // page) * page


def make_memfd(name: str, size: int, huge_pages: str = "off") -> int:
    """An anonymous file of `size` bytes, sealed against resizing: who maps it can write, but cannot shrink it
    and so crash others. Raises `OSError`, also where the kernel has no huge pages of that kind."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge := HUGE_BYTES.get(huge_pages):
        flags |= os.MFD_HUGETLB | ((huge.bit_length() - 1) << _MFD_HUGE_SHIFT)
    fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def populate(address: int, size: int, fd: int, offset: int) -> None:
    """Put pages in place and into this process's page table, keeping what they hold; raises `OSError`."""
    try:
        madvise(address, size, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel: at least give the file its pages, which leaves cheap faults for the mapping.
        os.posix_fallocate(fd, offset, size)


def madvise(address: int, size: int, advice: int) -> None:
    """As the system call; raises `OSError`."""
    while _libc.madvise(address, size, advice) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EINTR, errno.EAGAIN):
            raise OSError(number, os.strerror(number))


def punch_hole(fd: int, size: int) -> None:
    """Give the pages of the first `size` bytes back to the system, also while others map them: they read
    zeros from then on. Raises `OSError`."""
    while _libc.fallocate64(fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, 0, size) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EINTR, errno.EAGAIN):
            raise OSError(number, os.strerror(number))


# --- NUMA --------------------------------------------------------------------------------------------------


def bind_to_nodes(address: int, size: int, nodes: Sequence[int]) -> None:
    """Let the pages of a shared mapping come from these NUMA nodes, in turn where there are several. For
    pages that are not in place yet; whoever maps the memory gets the same. Raises `OSError`."""
    call = _MBIND_CALL.get(platform.machine())
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    bits = ctypes.c_ulong * (_NODES_MAX // (8 * ctypes.sizeof(ctypes.c_ulong)))
    mask = bits()
    for node in nodes:
        word, bit = divmod(node, 8 * ctypes.sizeof(ctypes.c_ulong))
        mask[word] |= 1 << bit
    mode = _MPOL_BIND if len(nodes) == 1 else _MPOL_INTERLEAVE
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_long(mode), ctypes.byref(mask))
    if _libc.syscall(ctypes.c_long(call), *arguments, ctypes.c_ulong(_NODES_MAX + 1), ctypes.c_uint(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def memory_nodes(root: Path = _NODES) -> list[int]:
    """The NUMA nodes of this machine that have memory; [0] where the kernel knows of none."""
    try:
        return parse_ranges((root / "has_memory").read_text())
    except (OSError, ValueError):
        return [0]


# --- how much there is -------------------------------------------------------------------------------------


def transparent_possible(path: Path = _THP) -> bool:
    """Whether the kernel makes huge pages of shared memory when asked to; True where it does not say."""
    try:
        text = path.read_text()
    except OSError:
        return True
    return "[never]" not in text and "[deny]" not in text


def huge_pages_remedy(huge_pages: str, size: int, root: Path = _HUGETLB) -> str:
    """How an operator reserves the huge pages that a pool of `size` bytes needs."""
    page = HUGE_BYTES[huge_pages]
    count, folder = -(-size // page), f"hugepages-{page >> 10}kB"
    with suppress(OSError, ValueError):
        taken = int((root / folder / "nr_hugepages").read_text())
        count += taken - int((root / folder / "free_hugepages").read_text())
    if huge_pages == "2MiB":
        return f"sysctl vm.nr_hugepages={count}"
    return f"boot with hugepagesz=1G hugepages={count}, or: echo {count} > {root / folder}/nr_hugepages"


def available_memory() -> int:
    """Bytes that a new pool can take: what the kernel calls available, or less where a cgroup has a limit."""
    return min(_meminfo_available(), cgroup_left())


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def cgroup_left(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Room under the tightest memory limit of this process's cgroup (v2) and those above it."""
    left = 1 << 62
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return left
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        with suppress(OSError, ValueError):  # no limit file, or "max"
            limit = int((folder / "memory.max").read_text())
            left = min(left, limit - int((folder / "memory.current").read_text()) + _reclaimable(folder))
    return max(0, left)


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache in a cgroup, which the kernel drops before it refuses memory."""
    for line in (folder / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
