"""The system calls by which a process and all that it starts change files, answered from outside.

A filter of seccomp hands each call to a supervisor before the kernel does it, whoever makes it: Python, the
libraries of C and Rust, data workers. The supervisor lets it happen, answers with an error instead, does a
part of a write, or kills the process. What changes mapped memory is no call, and is not seen.

x86-64 Linux. The process that is to be watched calls `watch_me`; `Supervisor` is the other side.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import re
import select
import signal
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_BY_FD = {
    "write": 1, "pwrite64": 18, "writev": 20, "sendfile": 40, "fsync": 74, "fdatasync": 75, "ftruncate": 77,
    "fallocate": 285, "pwritev": 296, "syncfs": 306, "copy_file_range": 326, "pwritev2": 328,
}  # fmt: skip
_BY_PATH = {"truncate": 76, "mkdir": 83, "rmdir": 84, "creat": 85, "unlink": 87, "open": 2}
_BY_FOLDER_AND_PATH = {"openat": 257, "mkdirat": 258, "unlinkat": 263}
# The name that is made counts: of renames and links the second.
_OF_TWO_PATHS = {"rename": 82, "link": 86}
_SYMLINKS = {"symlink": 88, "symlinkat": 266}
_OF_TWO_FOLDERS = {"renameat": 264, "linkat": 265, "renameat2": 316}
_ALL = _BY_FD | _BY_PATH | _BY_FOLDER_AND_PATH | _OF_TWO_PATHS | _SYMLINKS | _OF_TWO_FOLDERS
_NAMES = {number: name for name, number in _ALL.items()}
WRITES = ("write", "pwrite64", "writev")
GROWING = (*WRITES, "pwritev", "pwritev2", "fallocate", "sendfile", "copy_file_range", "ftruncate",
           "mkdir", "link", "symlink", "create")  # fmt: skip
"""Calls that need room."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_SECCOMP, _PIDFD_OPEN, _PIDFD_GETFD = 317, 434, 438
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LOAD, _EQUAL, _HAS_BIT, _GREATER, _RETURN = 0x20, 0x15, 0x45, 0x25, 0x06


# ------------------------------------------------------------------ the process that is watched


def _program() -> bytes:
    """The filter: calls of the table, but openings only to read and writes to the standard streams."""

    def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    argument = [16 + 8 * number for number in range(6)]
    lines = [line(_LOAD, 0)]
    for name, flags in (("open", 1), ("openat", 2)):
        lines += [
            line(_EQUAL, _ALL[name], 0, 4),
            line(_LOAD, argument[flags]),
            line(_HAS_BIT, _CHANGES, 0, 1),
            line(_RETURN, _NOTIFY),
            line(_RETURN, _ALLOW),
        ]
    for name in ("write", "writev"):
        lines += [
            line(_EQUAL, _ALL[name], 0, 4),
            line(_LOAD, argument[0]),
            line(_GREATER, 2, 1, 0),
            line(_RETURN, _ALLOW),
            line(_RETURN, _NOTIFY),
        ]
    for number in sorted(_ALL.values()):
        lines += [line(_EQUAL, number, 0, 1), line(_RETURN, _NOTIFY)]
    return b"".join([*lines, line(_RETURN, _ALLOW)])


def watch_me(address: str) -> None:
    """From now on each such call of this thread, and of what it starts, waits for the supervisor.

    Raises:
        OSError: the kernel does not allow it.
    """
    program = _program()
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    with socket.socket(socket.AF_UNIX) as to_supervisor:
        to_supervisor.connect(f"\0{address}")
        _LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which a user who is not root needs
        listener = _LIBC.syscall(_SECCOMP, 1, 8, ctypes.c_char_p(filter_))
        if listener < 0:
            raise OSError(ctypes.get_errno(), "seccomp")
        rights = array.array("i", [listener])
        to_supervisor.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        to_supervisor.recv(1)
    os.close(listener)


# ------------------------------------------------------------------ the supervisor


@dataclass(frozen=True)
class Call:
    """One call below the folder that is looked at.

    Attributes:
        name: such as 'write', 'rename', 'create' (an opening that may make a file).
        path: from the folder; of two names the new one.
        nth: of this name and path.
    """

    name: str
    path: str
    nth: int

    def __str__(self) -> str:
        return f"{self.name} {self.path} {self.nth}"


@dataclass(frozen=True)
class Fault:
    """What happens at a call.

    Attributes:
        call: where it begins.
        kind: 'kill', 'torn' (half of a write, then death), 'short' (half of a write), or the name of an
            error's number.
        lasts: later calls fail as well; those that need no room do not where the disk is full.
    """

    call: Call
    kind: str
    lasts: bool = False

    def __post_init__(self) -> None:
        assert self.call.name in WRITES or self.kind not in ("short", "torn"), self

    def __str__(self) -> str:
        return f"{self.kind}{' from then on' if self.lasts else ''} at {self.call}"

    def hits(self, call: Call, *, has_begun: bool) -> bool:
        if call == self.call:
            return True
        is_full = self.kind in ("ENOSPC", "EDQUOT")
        return has_begun and self.lasts and (not is_full or call.name in GROWING)


class Supervisor:
    """Answers the calls of one process and of what it starts.

    Attributes:
        address: for `watch_me`.
        calls: below the folder, in order.
        hit: those that the fault met.
    """

    def __init__(self, folder: Path, fault: Fault | None = None) -> None:
        self.calls: list[Call] = []
        self.hit: list[Call] = []
        self._folder, self._fault = f"{folder.resolve()}/", fault
        self._times: Counter[tuple[str, str]] = Counter()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("")  # a name of the kernel's choice, in no file system
        self._socket.listen()
        self.address = self._socket.getsockname()[1:].decode()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """All that was watched has ended, or never began."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        with connection:
            _, (listener,), _, _ = socket.recv_fds(connection, 1, 1)
            connection.send(b"x")
        waiting = select.poll()
        waiting.register(listener, select.POLLIN)
        try:
            while not any(event & select.POLLHUP for _, event in waiting.poll()):
                asked = bytearray(80)
                with contextlib.suppress(OSError):  # it was killed while it waited
                    fcntl.ioctl(listener, _RECEIVE, asked)
                    key, task, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", asked)
                    answer = self._answer(task, number, arguments)
                    fcntl.ioctl(listener, _SEND, bytearray(struct.pack("=QqiI", key, *answer)))
        finally:
            os.close(listener)

    def _answer(self, task: int, number: int, arguments: list[int]) -> tuple[int, int, int]:
        """(value, minus the number of the error, flags)."""
        happens = 0, 0, _CONTINUE
        name = _NAMES[number]
        path = _path_of(task, name, arguments)
        if not f"{path}/".startswith(self._folder):
            return happens
        call = self._call(name, path.removeprefix(self._folder[:-1]).lstrip("/") or ".")
        fault = self._fault
        if fault is None or not fault.hits(call, has_begun=bool(self.hit)):
            return happens
        self.hit.append(call)
        if fault.kind in ("short", "torn"):
            half = _write_half(task, name, arguments)
            if fault.kind == "short":
                return half, 0, 0
        if fault.kind in ("kill", "torn"):
            os.kill(task, signal.SIGKILL)
            return 0, -errno.EINTR, 0
        return 0, -getattr(errno, fault.kind), 0

    def _call(self, name: str, path: str) -> Call:
        name = {"open": "create", "openat": "create", "creat": "create"}.get(name, name)
        name = re.sub("at2?$", "", name)
        path = without_random_names(path)
        call = Call(name, path, self._times[name, path])
        self._times[name, path] += 1
        self.calls.append(call)
        return call


_RANDOM = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}|(?<=/tmp)\w{8}(?=/|$)|"
    # Eight digits behind a dash are a step's number, and behind a dot a random name like any other.
    r"(?<=\.)(?!tfrecord)[a-z0-9_]{8}(?=[./]|$)|(?<=-)(?!\d{8})[a-z0-9_]{8}(?=[./]|$)"
)


def without_random_names(path: str) -> str:
    """Those of temporary files differ from start to start."""
    return _RANDOM.sub("*", path)


def _path_of(task: int, name: str, arguments: list[int]) -> str:
    if name in _BY_FD:
        number = arguments[2] if name == "copy_file_range" else arguments[0]
        return _link(f"/proc/{task}/fd/{number}").removesuffix(" (deleted)")
    if name in _BY_PATH:
        folder, address = None, arguments[0]
    elif name in _BY_FOLDER_AND_PATH:
        folder, address = arguments[0], arguments[1]
    elif name in _OF_TWO_PATHS or name == "symlink":
        folder, address = None, arguments[1]
    elif name == "symlinkat":
        folder, address = arguments[1], arguments[2]
    else:
        folder, address = arguments[2], arguments[3]
    path = os.fsdecode(_memory(task, address, 4096).partition(b"\0")[0])
    if through := re.match(r"/proc/(?:self|\d+)/fd/(\d+)", path):
        path = _link(f"/proc/{task}/fd/{through[1]}") + path[through.end() :]
    if path.startswith("/"):
        return os.path.normpath(path)
    is_cwd = folder is None or folder & 0xFFFFFFFF == 0xFFFFFF9C  # AT_FDCWD
    start = _link(f"/proc/{task}/cwd" if is_cwd else f"/proc/{task}/fd/{folder}")
    return os.path.normpath(f"{start}/{path}")


def _link(path: str) -> str:
    return f"{Path(path).readlink()}"


def _memory(task: int, address: int, size: int) -> bytes:
    """At most `size` bytes; a page that is not there ends them."""
    with Path(f"/proc/{task}/mem").open("rb", buffering=0) as memory:
        found = b""
        while len(found) < size:
            page = min(size - len(found), 4096 - (address + len(found)) % 4096)
            try:
                found += os.pread(memory.fileno(), page, address + len(found))
            except OSError:
                break
        return found


def _write_half(task: int, name: str, arguments: list[int]) -> int:
    """Write the first half of what the call would write, into the same open file; gives its length."""
    if name == "writev":
        vectors = struct.iter_unpack("=QQ", _memory(task, arguments[1], 16 * arguments[2]))
        data = b"".join(_memory(task, *vector) for vector in vectors)
    else:
        data = _memory(task, arguments[1], arguments[2])
    status = Path(f"/proc/{task}/status").read_text()
    process = int(re.search(r"^Tgid:\s+(\d+)", status, re.MULTILINE)[1])
    of_process = _LIBC.syscall(_PIDFD_OPEN, process, 0)
    file = _LIBC.syscall(_PIDFD_GETFD, of_process, arguments[0], 0)
    try:
        half = max(1, len(data) // 2)
        if name == "pwrite64":
            return os.pwrite(file, data[:half], arguments[3])
        return os.write(file, data[:half])
    finally:
        os.close(file)
        os.close(of_process)
