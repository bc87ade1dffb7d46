"""Files: which ones are looked at, whether git knows what they were, and how they are written."""

import contextlib
import functools
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

from flambeau_lint.settings import Settings, WrongUsage, matches
from flambeau_lint.versions import NEWEST
from flambeau_lint.virtual import NOTEBOOKS, PAGES

SUFFIXES = (".py", ".pyi", *NOTEBOOKS, *PAGES)
_OURS = "flambeau-lint-"  # in the names of unfinished files, so that no file of the user has such a name
_LEFT_OUT = {
    "__pycache__",
    "node_modules",
    "venv",
    "site-packages",
    "build",
    "dist",
    "__pypackages__",
}


def find_files(paths: Sequence[str], settings: Settings, *, force_exclude: bool) -> list[str]:
    """The files below some paths, each once, in order; a file that is named is taken whatever it is called.

    Raises:
        WrongUsage: if a path does not exist, or a folder cannot be read.
    """
    found: dict[str, None] = {}
    for text in paths:
        path = Path(text)
        if not text or not path.exists():
            raise WrongUsage(f"{text!r} does not exist")
        if path.is_dir():
            found.update(dict.fromkeys(_below(path, settings)))
        elif not (force_exclude and is_excluded(path, settings)):
            found[text] = None
    return list(found)


def is_excluded(path: Path, settings: Settings) -> bool:
    """Whether `exclude` of the settings leaves a file or a folder out."""
    return any(matches(path, pattern, settings.root) for pattern in settings.exclude)


def _below(folder: Path, settings: Settings) -> Iterator[str]:
    for place, folders, names in os.walk(folder, onerror=_refuse_folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _LEFT_OUT
            and not is_excluded(Path(place, name), settings)
            and not os.access(Path(place, name, "pyvenv.cfg"), os.F_OK)
        )
        for name in sorted(names):
            path = Path(place, name)
            if (
                path.suffix.lower() in SUFFIXES
                and path.is_file()
                and not is_excluded(path, settings)
            ):
                yield str(path)


def _refuse_folder(error: OSError) -> None:
    raise WrongUsage(f"{error.filename}: {error.strerror}; --exclude leaves it out")


def own_libraries(path: str) -> frozenset[str]:
    """The libraries of whose sources a file is a part: of the package, or of the tests beside it."""
    return _libraries_of(Path(path).resolve().parent)


@functools.cache
def _libraries_of(folder: Path) -> frozenset[str]:
    is_project = any((folder / name).exists() for name in ("pyproject.toml", "setup.py", ".git"))
    found = {
        library
        for library in NEWEST
        if (folder.name == library and (folder / "__init__.py").exists())
        or (
            is_project
            and any((folder / part / library / "__init__.py").exists() for part in ("", "src"))
        )
    }
    above = frozenset() if folder == folder.parent else _libraries_of(folder.parent)
    return above | found


def unsaved(paths: Sequence[str]) -> dict[str, str]:
    """Files that git could not bring back, with the reason."""
    by_folder: dict[str, list[str]] = {}
    for path in paths:
        by_folder.setdefault(str(Path(path).resolve().parent), []).append(path)
    reasons: dict[str, str] = {}
    for folder, files in by_folder.items():
        names = [Path(path).resolve().name for path in files]
        is_known, dirty = _git_status(folder, names)
        for path, name in zip(files, names):
            if not is_known:
                reasons[path] = "is in no git repository"
            elif name in dirty:
                reasons[path] = dirty[name]
    return reasons


def _git_status(folder: str, names: Sequence[str]) -> tuple[bool, dict[str, str]]:
    """Whether git answers there, and the reason of each file that is not as it was committed."""
    quiet = _without_programs(folder)
    if quiet is None:
        return False, {}
    words = ["status", "--porcelain", "-z", "--ignored", "--untracked-files=all", "--no-renames"]
    words += ["--ignore-submodules=all", "--", *(f"./{name}" for name in names)]
    out = _git(folder, words, quiet)
    if out is None:
        return False, {}
    reasons = {b"??": "is not committed yet", b"!!": "is ignored by git"}
    return True, {
        Path(os.fsdecode(row[3:])).name: reasons.get(row[:2], "has changes that are not committed")
        for row in out.split(b"\0")
        if row
    }


def _without_programs(folder: str) -> Optional[dict[str, str]]:
    """Settings by which git starts none of the programs that a repository names; None if git does not answer.

    A repository of someone else may name some: a monitor of files, hooks, and filters through which each file
    goes. Those that the user has set for all repositories stay.
    """
    settings = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}
    listed = _git(folder, ["config", "--list", "--show-scope", "-z"], {})
    if listed is None:
        return None
    words = os.fsdecode(listed).split("\0")
    for scope, setting in zip(words[::2], words[1::2]):
        key = setting.partition("\n")[0]
        if scope in ("local", "worktree") and key.startswith("filter."):
            name = key.rpartition(".")[0]
            settings.update({f"{name}.clean": "", f"{name}.process": "", f"{name}.required": "0"})
    return settings


def _git(folder: str, words: Sequence[str], settings: dict[str, str]) -> Optional[bytes]:
    """What git prints; None if it fails or is not there. It fetches nothing and writes nothing."""
    environment = {**os.environ, "GIT_LITERAL_PATHSPECS": "1", "GIT_NO_LAZY_FETCH": "1"}
    environment["GIT_ALLOW_PROTOCOL"] = "none"
    environment["GIT_CONFIG_COUNT"] = str(len(settings))
    for number, (key, value) in enumerate(settings.items()):
        environment[f"GIT_CONFIG_KEY_{number}"] = key
        environment[f"GIT_CONFIG_VALUE_{number}"] = value
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words],
            cwd=folder,
            capture_output=True,
            timeout=120,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def write(path: str, old: bytes, new: bytes) -> None:
    """Replace a file in one step; its mode stays, and a link still points to it.

    Raises:
        WrongUsage: if the file is another one than was read, or cannot be written.
    """
    place = Path(path).resolve()
    temporary = ""
    try:
        mode = place.stat().st_mode
        _remove_abandoned(place)
        number, temporary = tempfile.mkstemp(".tmp", f".{place.name}.{_OURS}", dir=place.parent)
        with os.fdopen(number, "wb") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode & 0o7777)
        if place.read_bytes() != old:
            raise WrongUsage(
                f"{path} is not written: another program has changed it meanwhile; run this again"
            )
        Path(temporary).replace(place)
        temporary = ""
    except OSError as error:
        raise WrongUsage(f"{path} is not written: {error.strerror or error}") from None
    finally:
        if temporary:
            Path(temporary).unlink()


def _remove_abandoned(place: Path) -> None:
    """Remove what killed writes of this file have left: nothing was written there for a day."""
    name = re.compile(rf"\.{re.escape(place.name)}\.{_OURS}[a-z0-9_]{{8}}\.tmp")
    for other in _left_in(place.parent):
        with contextlib.suppress(OSError):
            if name.fullmatch(other.name) and time.time() - other.lstat().st_mtime > 86_400:
                other.unlink()


@functools.lru_cache(maxsize=64)
def _left_in(folder: Path) -> tuple[Path, ...]:
    """Unfinished files in a folder, listed once: each of its many files may be fixed."""
    try:
        return tuple(path for path in folder.iterdir() if _OURS in path.name)
    except OSError:
        return ()
