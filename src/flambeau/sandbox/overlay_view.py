"""A view of the file system in which writes have no effect: overlays over all writable folders.

It exists in a mount namespace of the process that calls `enter_view` and of its children, and ends with them.
Their writes go to scratch folders. Devices, /dev/shm, sockets and named pipes stay the real ones.

Source: Documentation/filesystems/overlayfs.rst of Linux, user_namespaces(7), mount_namespaces(7).
"""

import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flambeau.sandbox.mount_syscalls import (
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_BIND,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    Mount,
    drop_ptrace,
    is_inside,
    mount,
    mount_of,
    read_mounts,
    unshare,
)

_MOST_SOCKETS = 500
_MOST_ENTRIES = 20_000  # of temporary folders, searched for named pipes
_PIPES_DEPTH = 3
_MEMORY_SHARE = 0.25  # chosen
_MOST_COPIED_BYTES = 256 * 2**20  # of files of another group, each time a view is made; chosen


def enter_view(
    scratch: Sequence[str],
    *,
    real: Sequence[str] = (),
    kept: Mapping[str, str] | None = None,
    roots: Sequence[str] = (),
    memory_bytes: int = 0,
) -> list[str]:
    """Replace this process's view of the file system.

    Call it in a process of one thread. The working directory is entered again; open files still lead to the
    real ones, the caller's task.

    Args:
        scratch: empty folders for this view's writes; two in different top-level folders allow both of those
            to be covered. Empty: writes go to memory.
        kept: {folder: scratch folder}: writes that the next view with the same one sees.
        roots: folders that will be written to, such as working and home directory. An unprivileged user can
            write into another user's folder, such as a group's, if it is a root.

    Returns:
        Folders that are read-only, because they could not be covered.

    Raises:
        OSError: kernel or container forbids it. The view may be half made: end the process.
    """
    here = Path.cwd()
    is_unprivileged = _leave_mounts()
    view = _View(is_unprivileged=is_unprivileged)
    view.plan(roots)
    view.pin(scratch, real, kept or {}, memory_bytes)
    view.cover()
    if not is_unprivileged:
        drop_ptrace()
    os.chdir(here)
    return view.read_only


def _leave_mounts() -> bool:
    """Enter a new mount namespace; returns whether that took a user namespace."""
    user = os.geteuid()
    group = os.getegid()
    is_unprivileged = False
    try:
        unshare(CLONE_NEWNS)
    except PermissionError:
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        is_unprivileged = True
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    # Otherwise these mounts would appear in the namespaces of other processes.
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    return is_unprivileged


class _View:
    """The work of `enter_view`, in its three steps.

    Everything is opened before anything is mounted, because the path of a covered folder leads to its cover.
    """

    def __init__(self, *, is_unprivileged: bool) -> None:
        self._is_unprivileged = is_unprivileged
        self._mounts = read_mounts()
        self._folders: list[str] = []
        self._pinned: dict[str, int] = {}
        self._uppers: dict[str, str] = {}
        self._roots: set[str] = set()
        self._memory: int | None = None
        self.read_only: list[str] = []

    # ------------------------------------------------------------ which folders are covered

    def plan(self, roots: Sequence[str]) -> None:
        """Find the folders that get an overlay each, parents first."""
        folders: dict[str, None] = {}
        for one in self._mounts:
            if one.holds_files and not one.is_read_only and Path(one.path).is_dir():
                folders.update(dict.fromkeys(self._parts_of(one.path)))
        here = str(Path.cwd())
        if is_inside(here, "/dev/shm"):  # which is not covered otherwise
            folders[here] = None
        if self._is_unprivileged:  # else an overlay can copy the folders of any user
            self._roots = {top for one in roots if (top := self._first_writable(one))}
            folders.update(dict.fromkeys(self._roots))
        self._folders = sorted(folders, key=lambda path: (path.count("/"), path))

    def _parts_of(self, path: str) -> Iterator[str]:
        """A folder, or folders in it if it cannot be covered as a whole.

        The root contains /proc and /dev. In a user namespace the kernel does not allow covering a mount of
        another user, so folders are covered around such mounts.
        """
        holds_mounts = any(is_inside(m.path, path) and m.path != path for m in self._mounts)
        if path != "/" and not (holds_mounts and self._is_unprivileged):
            yield path
            return
        if os.access(path, os.W_OK):
            self.read_only.append(path)
        mounted = {m.path for m in self._mounts}
        with suppress(OSError):
            for entry in sorted(os.scandir(path), key=lambda one: one.name):
                if entry.is_dir(follow_symlinks=False) and entry.path not in mounted:
                    yield from self._parts_of(entry.path)

    def _first_writable(self, path: str) -> str | None:
        """The topmost folder on the way to a path that the user can write to, unless it contains mounts."""
        real = Path(os.path.realpath(path))
        for folder in (*reversed(real.parents), real):
            at = f"{folder}"
            holds_mounts = any(is_inside(m.path, at) for m in self._mounts)
            if not holds_mounts and folder.is_dir() and os.access(folder, os.W_OK):
                return at if mount_of(at, self._mounts).holds_files else None
        return None

    # ------------------------------------------------------------ what is opened before

    def pin(
        self,
        scratch: Sequence[str],
        real: Sequence[str],
        kept: Mapping[str, str],
        memory_bytes: int,
    ) -> None:
        """Open what is covered and what is put back, and make the folders for writes."""
        for path in [*self._folders, *real]:
            self._pin(path)
        for path, folder in kept.items():
            self._pin(path)
            self._uppers[path] = _upper_in(Path(folder))
        self._kept = list(kept)
        self._real = [path for path in real if path in self._pinned]
        self._hidden: list[Mount] = [
            one
            for one in self._mounts
            if one.path != "/"
            and any(is_inside(one.path, top) and one.path != top for top in self._folders)
            and one.path not in self._folders
            and self._pin(one.path)
        ]
        self._channels = [
            path
            for path in _sockets_and_pipes()
            if any(is_inside(path, top) for top in self._folders) and self._pin(path)
        ]
        if memory_bytes and self._folders:
            # Mounted on any folder, since all are covered in a moment.
            mount("tmpfs", self._folders[0], "tmpfs", 0, f"size={memory_bytes},mode=700")
            self._memory = os.open(self._folders[0], os.O_PATH | os.O_DIRECTORY)
        for path in self._folders:
            outside = [one for one in scratch if not is_inside(os.path.realpath(one), path)]
            if outside:
                self._uppers[path] = _upper_in(Path(outside[0]) / f"{len(self._uppers)}")

    def _pin(self, path: str) -> bool:
        with suppress(OSError):
            self._pinned[path] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
            return True
        return False

    # ------------------------------------------------------------ mounting

    def cover(self) -> None:
        """Mount overlays, and put back what must stay real."""
        hidden = {one.path: one for one in self._hidden}
        mounted = {one.path for one in self._mounts}
        for path in self.read_only:  # only a mount can be read-only
            if path not in mounted:
                mount(path, path, None, MS_BIND | MS_REC)
        for one in self._mounts:
            if one.path not in hidden:
                self._guard_file(one)
        for path in sorted({*self._folders, *hidden}, key=lambda one: (one.count("/"), one)):
            if path in hidden:
                mount(self._original(path), path, None, MS_BIND | MS_REC)
                self._guard_file(hidden[path])
            elif path in self._pinned and not self._covers(path):
                mount(self._original(path), path, None, MS_BIND | (MS_REC * self._is_unprivileged))
                self.read_only.append(path)
        for path in self._kept:
            self._cover_kept(path)
        for path in [*self._channels, *self._real]:
            with suppress(FileNotFoundError):  # removed since
                mount(self._original(path), path, None, MS_BIND)
        for path in self.read_only:
            mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | _locked_flags(path))

    def _guard_file(self, one: Mount) -> None:
        """Mount a copy over a file that is a mount itself, as in containers."""
        if not one.holds_files or one.is_read_only or not Path(one.path).is_file():
            return
        if self._memory is not None and Path(one.path).stat().st_size <= _MOST_COPIED_BYTES:
            copy = f"/proc/self/fd/{self._memory}/file-{self._mounts.index(one)}"
            with suppress(OSError):
                shutil.copy2(one.path, copy)
                mount(copy, one.path, None, MS_BIND)
                return
        self.read_only.append(one.path)

    def _original(self, path: str) -> str:
        return f"/proc/self/fd/{self._pinned[path]}"

    def _covers(self, path: str) -> bool:
        """Try scratch, then memory."""
        if path in self._uppers:
            with suppress(OSError):
                self._overlay(path, self._uppers[path])
                return True
        if self._memory is not None:
            with suppress(OSError):
                folder = Path(f"/proc/self/fd/{self._memory}") / f"{self._folders.index(path)}"
                self._overlay(path, _upper_in(folder))
                return True
        return False

    def _cover_kept(self, path: str) -> None:
        """Cover a cache with an overlay, or make a folder on the scratch disk if the user has none."""
        if path in self._pinned:
            with suppress(OSError):
                self._overlay(path, self._uppers[path])
            return
        around = [one for one in (*self._folders, *self.read_only) if is_inside(path, one)]
        if not around or max(around, key=len) in self.read_only:  # it would be made for real
            return
        with suppress(OSError):
            Path(path).mkdir(parents=True, exist_ok=True)
            mount(f"{self._uppers[path]}/upper", path, None, MS_BIND)

    def _overlay(self, path: str, upper: str) -> None:
        facts = Path(self._original(path)).stat()
        top = f"{upper}/upper"
        if self._is_unprivileged:
            most = _MOST_ENTRIES if path in self._roots else _MOST_ENTRIES // 20
            _copy_foreign_files(self._original(path), top, most)
        else:
            os.chown(top, facts.st_uid, facts.st_gid)
        Path(top).chmod(stat.S_IMODE(facts.st_mode))
        os.utime(top, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        options = f"lowerdir={self._original(path)},upperdir={top},workdir={upper}/work"
        # An overlay can rename a folder of the lower layer only outside of user namespaces.
        extra = "redirect_dir=on" if _is_first_user_namespace() else "userxattr"
        mount("overlay", path, "overlay", 0, f"{extra},{options}")


def _upper_in(folder: Path) -> str:
    """The upper and work folder of an overlay; the path leads through a descriptor that no overlay covers."""
    for name in ("upper", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}"


def _copy_foreign_files(lower: str, upper: str, left_entries: int) -> None:
    """Copy folders and small files of another user or group to the upper layer, as this user's.

    The kernel cannot copy them when they are written to, because their owner does not exist in a user
    namespace of one user, for example files of a project's group. Only writable ones are copied.
    """
    left_bytes = _MOST_COPIED_BYTES
    waiting = [""]
    while waiting and left_entries > 0:
        folder = waiting.pop(0)
        try:
            entries = list(os.scandir(f"{lower}/{folder}"))
        except OSError:
            continue
        left_entries -= len(entries)
        for entry in entries:
            inside = f"{folder}/{entry.name}"
            facts = entry.stat(follow_symlinks=False)
            is_folder = stat.S_ISDIR(facts.st_mode)
            if is_folder:
                waiting.append(inside)
            is_ours = (facts.st_uid, facts.st_gid) == (os.geteuid(), os.getegid())
            if is_ours or not os.access(entry.path, os.W_OK):
                continue
            if is_folder:
                _make_folders_like(lower, upper, inside)
            elif stat.S_ISREG(facts.st_mode) and facts.st_size <= left_bytes:
                left_bytes -= facts.st_size
                _make_folders_like(lower, upper, folder)
                shutil.copy2(entry.path, f"{upper}/{inside}")


def _make_folders_like(lower: str, upper: str, inside: str) -> None:
    at = ""
    for name in inside.strip("/").split("/") if inside else ():
        at = f"{at}/{name}"
        if not Path(f"{upper}{at}").is_dir():
            Path(f"{upper}{at}").mkdir()
            shutil.copystat(f"{lower}{at}", f"{upper}{at}")


def _is_first_user_namespace() -> bool:
    first, second, count = Path("/proc/self/uid_map").read_text().split()[:3]
    return (first, second) == ("0", "0") and int(count) == 2**32 - 1


def _locked_flags(path: str) -> int:
    """Flags of a mount that an unprivileged remount must repeat: nosuid, nodev, noexec, relatime, ..."""
    flags = os.statvfs(path).f_flag
    known = {
        os.ST_NOSUID: 2,
        os.ST_NODEV: 4,
        os.ST_NOEXEC: 8,
        os.ST_NOATIME: 1024,
        os.ST_NODIRATIME: 2048,
        os.ST_RELATIME: 1 << 21,
    }
    return sum(flag for bit, flag in known.items() if flags & bit)


def most_in_memory() -> int:
    """Bytes that may be written to memory: a share of what the kernel reports as available."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(_MEMORY_SHARE * 1024 * int(line.split()[1]))
    return 0


def _sockets_and_pipes() -> list[str]:
    """Paths of sockets that somebody listens at, and of open named pipes in temporary folders."""
    sockets: list[str] = []
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]:
            path = line.partition(" /")[2]
            if path and len(sockets) < _MOST_SOCKETS and Path("/" + path).is_socket():
                sockets.append(os.path.realpath("/" + path))
    left = [_MOST_ENTRIES]
    pipes = set[str]()
    for folder in {"/tmp", "/run", os.environ.get("TMPDIR", "/tmp")}:
        pipes.update(_pipes_in(folder, _PIPES_DEPTH, left))
    return sockets + sorted(pipes & _open_files() if pipes else pipes)


def _open_files() -> set[str]:
    """Paths that visible processes have open, read without access to their file systems, which may hang."""
    paths = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            paths.add(str(link.readlink()))
    return paths


def _pipes_in(folder: str, depth: int, left: list[int]) -> Iterator[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            left[0] -= 1
            if left[0] < 0:
                return
            if stat.S_ISFIFO(entry.stat(follow_symlinks=False).st_mode):
                yield os.path.realpath(entry.path)
            elif depth and entry.is_dir(follow_symlinks=False):
                yield from _pipes_in(entry.path, depth - 1, left)
