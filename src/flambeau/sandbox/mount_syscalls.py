"""The mounts of this process, as /proc/self/mountinfo lists them, and the system calls that add more.

Source: mount(2), unshare(2), proc(5), `include/uapi/linux/mount.h` and `sched.h` of Linux.
"""

import ctypes
import errno
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
MS_RDONLY = 1
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_DROP_FROM_BOUNDING_SET = 24  # PR_CAPBSET_DROP of prctl(2)
_CAP_SYS_PTRACE = 19

_NO_FILES = frozenset(
    {
        "autofs",
        "binfmt_misc",
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "devtmpfs",
        "efivarfs",
        "fusectl",
        "hugetlbfs",
        "mqueue",
        "nsfs",
        "proc",
        "pstore",
        "rpc_pipefs",
        "securityfs",
        "selinuxfs",
        "sysfs",
        "tracefs",
    }
)


@dataclass(frozen=True)
class Mount:
    path: str
    kind: str
    is_read_only: bool

    @property
    def holds_files(self) -> bool:
        """Whether a user's files can be in it; not so for devices, /dev/shm and the kernel's files."""
        inside = any(is_inside(self.path, top) for top in ("/dev", "/proc", "/sys"))
        return not inside and self.kind not in _NO_FILES


def read_mounts(text: str | None = None) -> list[Mount]:
    """The visible mounts, parents first; the last of several at one path."""
    if text is None:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    mounts: dict[str, Mount] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        path = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        options = {*fields[5].split(","), *after.split()[2].split(",")}
        mounts[path] = Mount(path, after.split()[0], "ro" in options)
    return sorted(mounts.values(), key=lambda one: one.path.count("/") * (one.path != "/"))


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder or inside it; both absolute."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount:
    """The mount that contains a path, which is absolute and without links.

    In a chroot whose root is no mount the one around it is unknown: its kind is ''.
    """
    around = [one for one in mounts if is_inside(path, one.path)]
    return max(around, key=lambda one: len(one.path), default=Mount("/", "", is_read_only=False))


def unshare(flags: int) -> None:
    """Leave namespaces of the parent; OSError if the kernel forbids it."""
    system_call("unshare", flags)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2); OSError with the target if it fails."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    system_call("mount", *words, ctypes.c_ulong(flags), os.fsencode(options), path=target)


def drop_ptrace() -> None:
    """Keep later processes from reaching files through /proc of a process with more rights.

    A root without CAP_SYS_PTRACE can still inspect its children, and processes without more rights.
    """
    with suppress(OSError):  # a root that cannot give up a right does not have it in full either
        system_call("prctl", _DROP_FROM_BOUNDING_SET, ctypes.c_ulong(_CAP_SYS_PTRACE))


def die_with_parent() -> None:
    """Let the kernel kill this process, also after exec, when its parent thread ends."""
    system_call("prctl", _DEATH_SIGNAL, ctypes.c_ulong(9))


def system_call(name: str, *arguments: object, path: str | None = None) -> None:
    """Call a function of the C library; OSError with its errno and the path if the result is not 0."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"this system has no {name}")
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path or name)
