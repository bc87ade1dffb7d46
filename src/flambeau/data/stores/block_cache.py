"""Blocks of a store's objects on the local disk, shared by the processes and runs of a machine.

One file for each block, written under another name and renamed, with a checksum that each process verifies
when it opens the file. `flock` of one of some lock files lets one of several readers fetch a block; the
others find it afterwards. The longest unused blocks are removed; who reads one meanwhile has it open, and
reads on.
"""

import contextlib
import contextvars
import errno
import os
import re
import secrets
import shutil
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flambeau.errors import InputError
from flambeau.terminal import say

DEFAULT_BYTES = (
    50 * 1000**3
)  # chosen: a small share of a data disk, and a large one of most data sets

_MAGIC = b"FLBLOCK1"
_HEAD = len(_MAGIC) + 8 + 4  # length of the content, its CRC-32
_PIECE = 1 << 18  # bytes
_LOCKS = 512
_POLL_S = 0.02
_OPEN = 256  # blocks that a process keeps open
_IN_MEMORY = 16  # blocks, where there is no disk for them
_STALE_S = 60.0  # age of a temporary file that nobody has locked
_USED_S = 60.0  # between two notes of the last use of a block that stays open
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def _crc32(data: bytes | memoryview, before: int = 0) -> int:
    from isal import isal_zlib  # a block of 8 MiB takes zlib 4 ms, which is felt

    return isal_zlib.crc32(data, before)


def _head(length: int, crc: int) -> bytes:
    """What a block's file begins with."""
    return _MAGIC + length.to_bytes(8, "little") + crc.to_bytes(4, "little")


def parse_bytes(text: str, *, name: str) -> int:
    """A size such as 50GB or 500MB in bytes; InputError for anything else.

    Example:
        >>> parse_bytes("1.5GB", name="cache_size")
        1500000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])b", text.strip().lower())
    if match is None or not float(match[1]):
        raise InputError(f"{name} must be a size such as 50GB or 500MB, got {text!r}")
    return int(float(match[1]) * 1000 ** (1 + "kmgt".index(match[2])))


@dataclass(frozen=True)
class CacheOptions:
    """Where blocks are kept, and how many.

    Attributes:
        folder: None: $FLAMBEAU_CACHE, else ~/.cache/flambeau/store.
        size_bytes: of all blocks; what several processes write at once may exceed it for a moment.
    """

    folder: Path | None = None
    size_bytes: int = DEFAULT_BYTES

    @property
    def path(self) -> Path:
        named = os.environ.get("FLAMBEAU_CACHE") or "~/.cache/flambeau/store"
        return (self.folder or Path(named)).expanduser().absolute()


_chosen: contextvars.ContextVar[CacheOptions | None] = contextvars.ContextVar("cache", default=None)


@contextlib.contextmanager
def cache_chosen(options: CacheOptions | None) -> Iterator[None]:
    """What is opened from a store within the context is kept there, unless it names a cache itself."""
    token = _chosen.set(options)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_cache() -> CacheOptions | None:
    """The cache of the innermost `cache_chosen`; None without one."""
    return _chosen.get()


class BlockCache:
    """The blocks of one process; safe in threads, not across a fork.

    Args:
        tell: called once, with a message, if the disk is full or cannot be written.
    """

    def __init__(self, options: CacheOptions, *, tell: Callable[[str], object] = say) -> None:
        self._folder = options.path
        self._size = options.size_bytes
        self._tell = tell
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Opened] = OrderedDict()
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._unchecked = (
            self._size
        )  # written since the last look at all blocks: the first write looks
        self._is_told = False
        self._blocks = self._folder / "blocks"
        self._temporary = self._folder / "tmp"
        self._locks = self._folder / "locks"
        try:
            for folder in (self._blocks, self._temporary, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the cache {self._folder} cannot be made: {(error.strerror or str(error)).lower()}\n"
                "Name a folder that can be written with --cache or FLAMBEAU_CACHE"
            ) from error

    @property
    def path(self) -> Path:
        return self._folder

    @contextlib.contextmanager
    def new_folder(self) -> Iterator[Path]:
        """A folder on the disk of the cache for files that are removed at the end."""
        import fcntl

        folder = self._temporary / secrets.token_hex(8)
        folder.mkdir()
        number = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(number)

    def read(
        self,
        key: str,
        start: int,
        size: int,
        fetch: Callable[[], bytes],
        *,
        until: float,
    ) -> bytes:
        """Some bytes of a block, which is fetched if it is not there.

        Args:
            key: hexadecimal, of the content.
            until: `time.monotonic()` until which another process may take to fetch it.
        """
        data = self.known(key, start, size)
        if data is not None:
            return data
        self.ensure(key, fetch, until=until)
        data = self.known(key, start, size)
        # Removed again already, where the cache is smaller than what is being read.
        return self._fetched(key, fetch)[start : start + size] if data is None else data

    def ensure(self, key: str, fetch: Callable[[], bytes], *, until: float) -> None:
        """Fetch a block unless it is there."""
        with self.alone(key, until):
            if not self._has(key):
                self._store(key, self._fetched(key, fetch))

    def put(self, key: str, data: bytes) -> None:
        """Keep a block that is at hand, if it is not there yet."""
        if not self._path(key).exists():
            self._store(key, data)

    def _fetched(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        data = fetch()
        with self._lock:
            self._memory[key] = data
            while len(self._memory) > _IN_MEMORY:
                self._memory.popitem(last=False)
        return data

    def known(self, key: str, start: int, size: int) -> bytes | None:
        """Bytes of a block on the disk or in memory; None if it is in neither."""
        with self._lock:
            opened = self._open.get(key)
            if opened is not None:
                self._open.move_to_end(key)
            held = self._memory.get(key)
        if held is not None:
            return held[start : start + size]
        if opened is None:
            opened = self._opened(key)
        if opened is None:
            return None
        data = opened.read(start, size)
        if data is None:
            with self._lock:
                self._open.pop(key, None)
        return data

    def holds(self, key: str) -> bool:
        """Whether a block seems to be there; it is not read."""
        return key in self._memory or self._path(key).exists()

    def _has(self, key: str) -> bool:
        with self._lock:
            if key in self._memory or key in self._open:
                return True
        return self._opened(key) is not None

    def _opened(self, key: str) -> "_Opened | None":
        """The block on the disk, verified; None if there is none, or a damaged one, which is removed."""
        path = self._path(key)
        try:
            opened = _Opened(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with self._lock:
            kept = self._open.setdefault(key, opened)
            # A file is closed when the last thread that reads it lets it go.
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return kept

    def _store(self, key: str, data: bytes) -> None:
        """Write a block; reading goes on without it if the disk does not take it."""
        if len(data) + _HEAD > self._size:
            return
        try:
            self._make_room(len(data) + _HEAD)
            path = self._path(key)
            path.parent.mkdir(exist_ok=True)
            with self.new_file() as file:
                file.write(_head(len(data), _crc32(data)))
                file.write(data)
                file.flush()
                os.replace(file.name, path)  # noqa: PTH105 - a name of a file object
        except OSError as error:
            if error.errno not in _FULL:
                raise InputError(
                    f"the cache {self._folder} cannot be written: {error.strerror or error}"
                ) from error
            self._tell_once(error)
            return
        # From the disk from now on.
        if self._opened(key) is not None:
            with self._lock:
                self._memory.pop(key, None)

    def _tell_once(self, error: OSError) -> None:
        with self._lock:
            is_first = not self._is_told
            self._is_told = True
        if is_first:
            self._tell(
                f"the cache {self._folder} takes nothing more ({(error.strerror or str(error)).lower()}): "
                "images are fetched again in each epoch; make room, or name another --cache or a smaller "
                "--cache-size"
            )

    @contextlib.contextmanager
    def new_file(self) -> Iterator[IO[bytes]]:
        """A new file on the disk of the cache, removed at the end unless it was renamed."""
        import fcntl

        path = self._temporary / secrets.token_hex(8)
        with path.open("xb") as file:
            # The lock ends with the process, whatever ends it, and the next one removes the file.
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield file
            finally:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self, key: str, until: float, *, kind: str = "block") -> Iterator[None]:
        """Alone with a key among all processes; at the latest at `until`, as another one may be stopped."""
        import fcntl

        try:
            file = (self._locks / f"{kind}-{int(key[:8], 16) % _LOCKS:03}").open("ab")
        except OSError:  # a full disk: every reader fetches for itself
            yield
            return
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        break
                    time.sleep(_POLL_S)
            try:
                yield
            finally:
                # Closing is not enough: a worker that was forked meanwhile has the same file open.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _make_room(self, incoming: int) -> None:
        """Remove the longest unused blocks beyond the size of the cache."""
        with self._lock:
            self._unchecked += incoming
            # A look at 6,000 blocks takes 10 ms, so not before each of them.
            if self._unchecked < self._size // 64:
                return
            self._unchecked = 0
        self.remove_stale()
        files = []
        for folder in os.scandir(self._blocks):
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    files.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in files) + incoming
        limit = self._size - self._size // 64
        for _, size, path in sorted(files):
            if total <= limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108 - a name of scandir
                total -= size

    def remove_stale(self) -> None:
        """Remove the temporary files of processes that were killed."""
        import fcntl

        for entry in os.scandir(self._temporary):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime < _STALE_S:
                    continue
                number = os.open(entry.path, os.O_RDONLY)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if entry.is_dir():
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)  # noqa: PTH108 - a name of scandir
                finally:
                    os.close(number)

    def _path(self, key: str) -> Path:
        return self._blocks / key[:2] / key


class _Opened:
    """A verified block; it stays readable after its file was removed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        try:
            self._verify()
        except BaseException:
            self._file.close()
            raise
        self._used = 0.0
        self._note_use()

    def _verify(self) -> None:
        head = self._file.read(_HEAD)
        # In pieces that stay in the processor's cache: the workers of each epoch verify all blocks anew.
        piece = memoryview(bytearray(_PIECE))
        length = 0
        crc = 0
        while count := self._file.readinto(piece):
            length += count
            crc = _crc32(piece[:count], crc)
        if head != _head(length, crc):
            raise ValueError("damaged")

    def read(self, start: int, size: int) -> bytes | None:
        """None if the file was cut short meanwhile."""
        data = os.pread(self._file.fileno(), size, _HEAD + start)
        if time.monotonic() - self._used > _USED_S:
            self._note_use()
        return data if len(data) == size else None

    def _note_use(self) -> None:
        self._used = time.monotonic()
        with contextlib.suppress(OSError):
            os.utime(self._file.fileno())
