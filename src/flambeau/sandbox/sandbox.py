"""Runs a user's commands so that they cannot change the user's files."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from flambeau.errors import InputError
from flambeau.sandbox.caches import cache_folders
from flambeau.sandbox.inside_trial import HELD, MARK
from flambeau.sandbox.landlock import landlock_version
from flambeau.sandbox.overlay_view import most_in_memory
from flambeau.sandbox.scratch import Scratch, remove_tree
from flambeau.sandbox.trial_processes import (
    adopt_orphans,
    adopted_processes,
    end_processes,
    processes_of,
)
from flambeau.sandbox.trial_start import REPORT

_CLONE = 0x4004_9409  # FICLONE of ioctl_ficlone(2): the copy shares its blocks until one is written
_SMALL_BYTES = 8 * 2**20
_MOST_BYTES = 2**30
_MOST_FILES = 50_000
"""Beyond these limits, which are chosen, a file becomes a link to the real one: readable and replaceable."""


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder for a process that cannot write to it; without unreadable files."""
    left_bytes, left_files = _MOST_BYTES, _MOST_FILES
    for folder, folders, names in os.walk(source):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in [one for one in folders if _is_tool_folder(Path(folder) / one)]:
            folders.remove(name)
            (here / name).symlink_to(Path(folder) / name)
        for name in [*names, *(one for one in folders if (Path(folder) / one).is_symlink())]:
            file = Path(folder) / name
            left_files -= 1
            with suppress(OSError):
                if file.is_symlink():
                    (here / name).symlink_to(_link_target(file, source))
                elif not file.is_file():
                    continue
                elif _cloned(file, here / name):
                    shutil.copystat(file, here / name)
                elif left_files > 0 and file.stat().st_size <= min(_SMALL_BYTES, left_bytes):
                    left_bytes -= file.stat().st_size
                    shutil.copy2(file, here / name)
                else:
                    (here / name).symlink_to(file)


def _is_tool_folder(folder: Path) -> bool:
    """Whether it is a virtual environment or git's storage: many files that a training does not write."""
    return (folder / "pyvenv.cfg").exists() or (folder / "HEAD").exists()


def _link_target(link: Path, source: Path) -> Path:
    """The target for a link in the copy: the copy for links within the folder, else the real file."""
    target = link.readlink()
    is_within = not target.is_absolute() and link.resolve().is_relative_to(source.resolve())
    return target if is_within else link.parent / target


def _cloned(source: Path, target: Path) -> bool:
    """Whether the file system made a copy that shares its blocks; if not, nothing is left."""
    with source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new, _CLONE, old.fileno())
        except OSError:
            target.unlink()
            return False
    return True


_SOURCES = Path(__file__).resolve().parents[2]
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from flambeau.sandbox.trial_start import main; main(sys.argv[2], sys.argv[3:])"
)
_PLAN = "view.json"
_TRY_S = 30.0  # chosen
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts", "/dev/shm")
WAYS = ("overlayfs", "copy")
"""The preferred one first; both leave the user's files unchanged."""

UNPROTECTED = "none"

_NOTICES = {
    "overlayfs": "see your files through an overlay (overlayfs), and change none of them",
    "copy": "write to a copy of the working folder and nowhere else (Landlock), and change no file of yours",
    UNPROTECTED: "may change your files (--trials-may-write)",
}


class HasFileno(Protocol):
    """A file or a pipe."""

    def fileno(self) -> int:
        """Its number in this process."""


class Sandbox:
    """Runs trials, each on the user's files as they are, in one of WAYS or UNPROTECTED.

    Attributes:
        read_only: folders in which only its processes cannot write.
    """

    def __init__(self, way: str | None = None, *, words: Sequence[str] = ()) -> None:
        self._scratch = Scratch()
        adopt_orphans(True)
        self._caches: dict[str, str] = {}
        self._roots = _roots(words)
        self._running: dict[Path, _Running] = {}
        self.read_only: list[str] = []
        try:
            self.way = self._choose([way] if way is not None else WAYS)
        except BaseException:
            self.close()
            raise

    @property
    def folders(self) -> list[Path]:
        return self._scratch.folders

    @property
    def notice(self) -> str:
        """One line: where trials run, and what that means for the user's files."""
        text = f"trials {_NOTICES[self.way]}"
        return f"{text}; read-only: {', '.join(self.read_only)}" if self.read_only else text

    def _choose(self, ways: Sequence[str]) -> str:
        reasons = []
        if sys.platform != "linux" and list(ways) != [UNPROTECTED]:
            raise InputError(
                "only on Linux can trials be kept off your files; --trials-may-write lets them run among them"
            )
        for way in ways:
            if way == UNPROTECTED:
                return way
            reason = self._try(way)
            if not reason:
                return way
            reasons.append(f"{way}: {reason}")
        raise InputError(
            f"this machine cannot keep a script from your files ({'; '.join(reasons)})\n"
            "--trials-may-write runs trials all the same, and lists at the end which files they changed"
        )

    def _try(self, way: str) -> str:
        """Why a way does not work here; '' if a process inside could not write to the user's files."""
        if way == "copy" and landlock_version() < 3:
            return "no Landlock in this kernel"
        self.way = way
        name = f".flambeau-{uuid.uuid4().hex}"
        folders = {Path.cwd(), Path(tempfile.gettempdir()), Path("~").expanduser()}
        canaries = [folder / name for folder in folders if os.access(folder, os.W_OK)]
        code = (
            "import sys\nfor name in sys.argv[1:]:\n    try: open(name, 'x').close()\n"
            "    except OSError as error: (sys.exit(str(error)) if '/' not in name else None)"
        )
        here = [name] if os.access(Path.cwd(), os.W_OK) else []
        command = [sys.executable, "-I", "-S", "-c", code, *here, *map(str, canaries)]
        with tempfile.TemporaryFile() as output:
            process = self.start(command, folder := self.new_folder(), dict(os.environ), output)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TRY_S)
            report = self._report(folder)
            self.end(folder)
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        written = [canary for canary in canaries if canary.exists()]
        for canary in written:
            canary.unlink()
        if process.returncode != 0:
            ended = f"a trial of it ended with code {process.returncode}"
            return str(report.get("failure") or said.rpartition("\n")[2] or ended)
        if written:
            return f"{written[0].parent} can be written to from inside"
        self.read_only = list(report.get("read_only", ()))
        return ""

    # ------------------------------------------------------------ one command

    def new_folder(self) -> Path:
        """A folder in which a command really writes; `end` removes it."""
        return self._scratch.new("trial")[0]

    def start(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: HasFileno,
    ) -> "subprocess.Popen[bytes]":
        """Start a command in a new session."""
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise InputError(
                f"{command[0]}: no such program; what follows -- is a command, as the shell would run it"
            )
        running = _Running(self._scratch, folder)
        self._running[folder] = running
        command = list(command)
        held = {} if self.way == UNPROTECTED else {HELD: "1"}
        environment = {**environment, MARK: str(folder), **held}
        plan: dict[str, Any] = {}
        cwd = Path.cwd()
        if self.way == "copy":
            plan, cwd = self._plan_of_copy(running, command, environment)
        elif self.way != UNPROTECTED:
            plan = {"view": self._view(running)}
        (folder / _PLAN).write_text(json.dumps(plan), encoding="utf-8")
        words = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _START,
            str(_SOURCES),
            str(folder / _PLAN),
            *command,
        ]
        running.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output.fileno(),
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        return running.process

    def failure(self, folder: Path) -> str:
        """Why the command of a folder was not started; '' if it was."""
        reason = self._report(folder).get("failure")
        return f"the sandbox could not be made: {reason}" if reason else ""

    def in_users_words(self, text: str, folder: Path) -> str:
        """What a command says, with the user's working folder in the place of its copy."""
        if self.way != "copy":
            return text
        return text.replace(str(self._running[folder].copy), str(Path.cwd()))

    def written_too_much(self) -> str:
        """Why commands must end now, because they fill the disk; '' if they do not."""
        return self._scratch.written_too_much()

    def end_processes(self, folder: Path) -> None:
        """Kill the remaining processes of a command."""
        running = self._running[folder]
        if running.process is not None:
            namespace = self._report(folder).get("namespace")
            made = {
                name: file
                for name, file in shared_files().items()
                if running.shared_before.get(name) != file
            }
            used = mapped(processes_of(folder, namespace), made) if made else set()
            end_processes(folder, running.process.pid, namespace, running.earlier)
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(5)
            remove_left({name: made[name] for name in used})

    def end(self, folder: Path) -> None:
        """Kill the remaining processes of a command, and remove the folder and everything it wrote."""
        if folder in self._running:
            self.end_processes(folder)
            self._running.pop(folder).remove()
        else:
            remove_tree(folder)

    def close(self) -> None:
        for folder in list(self._running):
            self.end(folder)
        self._scratch.close()
        adopt_orphans(False)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _report(self, folder: Path) -> dict[str, Any]:
        try:
            report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it was killed before
            return {}
        return report if isinstance(report, dict) else {}

    # ------------------------------------------------------------ what it may write

    def _view(self, running: "_Running") -> dict[str, Any]:
        return {
            "scratch": [str(one) for one in running.scratch],
            "real": [str(running.folder)],
            "kept": self._kept(),
            "roots": self._roots,
            "memory_bytes": most_in_memory(),
        }

    def _kept(self) -> dict[str, str]:
        """Scratch folders for caches, which later trials share: for what was compiled or downloaded."""
        for cache in cache_folders():
            self._caches.setdefault(str(cache), "")
        for path, folder in self._caches.items():
            self._caches[path] = folder or str(self._outside(self._scratch.new("cache"), path))
        return {path: folder for path, folder in self._caches.items() if folder}

    @staticmethod
    def _outside(folders: Sequence[Path], path: str) -> Path | str:
        """A folder that is not inside the path that it must cover; '' if there is none."""
        outside = [one for one in folders if not one.is_relative_to(os.path.realpath(path))]
        return next(iter(outside), "")

    def _plan_of_copy(
        self, running: "_Running", command: list[str], environment: dict[str, str]
    ) -> tuple[dict[str, Any], Path]:
        """The plan for `start.main`, and the copy of the working folder; changes command and environment."""
        here = Path.cwd()
        copy = running.copy
        temporary = running.scratch[0] / "tmp"
        temporary.mkdir()
        copy_folder(here, copy)
        command[1:] = [
            str(copy / word.removeprefix(f"{here}/")) if word.startswith(f"{here}/") else word
            for word in command[1:]
        ]
        environment |= {"TMPDIR": str(temporary), "PWD": str(copy)}
        below = [
            running.folder,
            *running.scratch,
            *(one for one in map(Path, _DEVICES) if one.exists()),
        ]
        return {"write_below": [str(one) for one in below]}, copy


class _Running:
    """One command and the folders it writes to."""

    def __init__(self, scratch: Scratch, folder: Path) -> None:
        self.folder = folder
        self.scratch = scratch.new("written")
        self.copy = self.scratch[0] / "folder"  # of the working folder, where there is one
        self.earlier = frozenset(adopted_processes())
        self.shared_before = shared_files()
        self.process: subprocess.Popen[bytes] | None = None

    def remove(self) -> None:
        for one in [*self.scratch, self.folder]:
            remove_tree(one)


def _roots(words: Sequence[str]) -> list[str]:
    """Folders that a command will probably write to."""
    named = [word.rpartition("=")[2] for word in words] + list(os.environ.values())
    folders = [Path.cwd(), Path("~").expanduser(), Path(tempfile.gettempdir()), Path("/var/tmp")]
    for name in named:
        if name.startswith("/") and len(name) < 4096:
            with suppress(OSError, ValueError):
                folders += [one for one in (Path(name), Path(name).parent) if one.is_dir()]
    return list(dict.fromkeys(str(one) for one in folders))


_PROC, _FOLDER = Path("/proc"), Path("/dev/shm")
_Files = dict[str, tuple[int, int]]


def shared_files() -> _Files:
    """The user's files in /dev/shm, which killed processes leave there: inode and device by name."""
    found: _Files = {}
    with suppress(OSError), os.scandir(_FOLDER) as entries:
        for entry in entries:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False) and facts.st_uid == os.geteuid():
                    found[entry.name] = (facts.st_ino, facts.st_dev)
    return found


def mapped(processes: Iterable[int], names: Collection[str]) -> set[str]:
    """Those of some files in /dev/shm that processes have as memory."""
    lines: list[str] = []
    for process in processes:
        with suppress(OSError):
            lines += (_PROC / f"{process}/maps").read_text(errors="surrogateescape").splitlines()
    return _named(lines, names)


def _opened(processes: Iterable[int], names: Collection[str]) -> set[str]:
    links: list[str] = []
    for process in processes:
        for link in (_PROC / f"{process}/fd").glob("*"):
            with suppress(OSError):
                links.append(str(link.readlink()))
    return _named(links, names)


def _named(lines: Iterable[str], names: Collection[str]) -> set[str]:
    parts = (line.rpartition(f"{_FOLDER}/") for line in lines)
    return {name for _, found, name in parts if found and name in names}


def remove_left(files: _Files) -> None:
    """Remove files that no process uses any more; those made anew under their names stay."""
    there = shared_files()
    left = {name for name, file in files.items() if there.get(name) == file}
    if left:
        processes = [int(entry.name) for entry in _PROC.glob("[0-9]*")]
        left -= mapped(processes, left) | _opened(processes, left)
    for name in left:
        with suppress(OSError):
            (_FOLDER / name).unlink()
