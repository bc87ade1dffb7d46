"""Restricts this process and its children to writing in some folders: Landlock, which needs no privilege.

Source: landlock(7), `include/uapi/linux/landlock.h` of Linux 5.13 and later.
It does not prevent changes of the mode, owner, times and attributes of the user's files.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

# System calls, with the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38  # PR_SET_NO_NEW_PRIVS of prctl(2)
_WRITE_FILE = 1 << 1
_TRUNCATE = 1 << 14
# remove_dir, remove_file, make_char, make_dir, make_reg, make_sock, make_fifo, make_block, make_sym
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13  # link and rename from one folder into another


def landlock_version() -> int:
    """That of the kernel: 0 without Landlock, 2 with renaming between folders, 3 with truncation."""
    library = ctypes.CDLL(None, use_errno=True)
    return max(0, int(library.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def write_only_below(folders: Sequence[str]) -> None:
    """Restrict this process's writing to folders (absolute) and files such as /dev/null.

    Raises:
        OSError: the kernel's Landlock cannot prevent truncation (before 6.2), or is forbidden here.
    """
    if landlock_version() < 3:
        raise OSError(38, "this kernel has no Landlock of version 3")
    library = ctypes.CDLL(None, use_errno=True)
    rights = _WRITE_FILE | _TRUNCATE | _CHANGE_FOLDER | _REFER
    attributes = struct.pack("=Q", rights)
    ruleset = library.syscall(
        _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )
    _check(ruleset)
    for folder in folders:
        opened = os.open(folder, os.O_PATH)
        allowed = rights if os.path.isdir(folder) else _WRITE_FILE | _TRUNCATE  # noqa: PTH112
        rule = struct.pack("=Qi", allowed, opened)
        _check(library.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
        os.close(opened)
    _check(library.prctl(_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0))
    _check(library.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "Landlock")
