"""Many files: in several processes where that pays, and not again what is known from last time."""

import gc
import hashlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from flambeau_lint.checked_file import Checked, check, from_json
from flambeau_lint.engine import RuleSet
from flambeau_lint.rules.catalog import BY_CODE

_MANY = 48  # files from which starting processes (0.1 s each) pays
_CHUNK = 16
_ENTRIES = 128  # in each of 256 folders of the cache: some 100 MB at most
_VERSIONS = 3  # of this package that keep a cache


@dataclass(frozen=True)
class Job:
    """One file, and the rules for it."""

    path: str
    codes: tuple[str, ...]


def check_files(
    jobs: Sequence[Job], *, jobs_at_once: int, cache: Optional[Path]
) -> Iterator[Checked]:
    """What each file has, in the order of the files."""
    processes = min(jobs_at_once or os.cpu_count() or 1, len(jobs) // _CHUNK + 1)
    work = [(job, str(cache) if cache else "") for job in jobs]
    if len(jobs) < _MANY or processes < 2:
        yield from map(_check, work)
        return
    kind = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context(kind)) as pool:
        yield from pool.map(_check, work, chunksize=_CHUNK)


_SETS: dict[tuple[str, ...], RuleSet] = {}


def rules_of(codes: tuple[str, ...]) -> RuleSet:
    """The rules with some codes; made once per process."""
    if codes not in _SETS:
        _SETS[codes] = RuleSet([BY_CODE[code] for code in codes])
    return _SETS[codes]


def _check(work: tuple[Job, str]) -> Checked:
    job, cache = work
    try:
        raw = Path(job.path).read_bytes()
    except OSError as error:
        return Checked(job.path, problem=error.strerror or str(error), is_lost=True)
    place = _place(cache, raw, job) if cache else None
    known = _known(place) if place else None
    if known is not None:
        return replace(known, path=job.path)
    is_on = gc.isenabled()
    gc.disable()  # a tree has no circles, and looking for some takes a third of the time
    try:
        found = check(job.path, raw, rules_of(job.codes))
    finally:
        if is_on:
            gc.enable()
    if place is not None:
        _keep(place, found)
    return found


# ---------------------------------------------------------------- the cache


def cache_folder() -> Path:
    """The user's cache folder, as XDG has it; those of versions that are no longer used go."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "flambeau-lint" / _version()
    if not folder.exists():
        for unused in _oldest(folder.parent, keep=_VERSIONS - 1):
            shutil.rmtree(unused, ignore_errors=True)
    return folder


def _oldest(folder: Path, *, keep: int) -> list[Path]:
    """What a folder holds, but for the newest."""
    try:
        by_age = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    except OSError:  # not there, or another process takes the same away
        return []
    return by_age[: max(len(by_age) - keep, 0)]


_VERSION: list[str] = []


def _version() -> str:
    """The sources of this package, in a word: another version has other answers."""
    if not _VERSION:
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.rglob("*.py")):
            digest.update(path.read_bytes())
        _VERSION.append(digest.hexdigest()[:16])
    return _VERSION[0]


def _place(cache: str, raw: bytes, job: Job) -> Path:
    digest = hashlib.sha256(raw)
    digest.update("\0".join((Path(job.path).suffix.lower(), *job.codes)).encode())
    word = digest.hexdigest()
    return Path(cache, word[:2], word[2:])


def _known(place: Path) -> Optional[Checked]:
    try:
        return from_json(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(place: Path, found: Checked) -> None:
    """A cache that cannot be written is none."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(found.as_json())
        Path(temporary).replace(place)
        if sum(1 for _ in place.parent.iterdir()) > _ENTRIES:
            for old in _oldest(place.parent, keep=_ENTRIES // 2):
                old.unlink(missing_ok=True)
    except OSError:
        pass
