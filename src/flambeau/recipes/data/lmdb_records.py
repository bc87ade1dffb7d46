"""LMDB: many values in one file, each read directly by key or number, without the lmdb package.

LMDB：把许多值装进一个文件，按键或序号直接读取；读取时不需要 lmdb 包。

Source: `libraries/liblmdb/mdb.c` of LMDB 0.9, structs MDB_meta, MDB_db, MDB_page and MDB_node: a B+tree of
pages, whose leaves hold the keys in byte order and the values, or for a long value the number of its pages.
The library is not used for reading, because it maps the file: a truncated file then kills the process
(SIGBUS), damage goes unseen, and a process cannot open the same file twice.

Not for files that are written to meanwhile, for named databases or several values per key, or where damage
inside a value must be detected: the format has no checksum (TFRecord has).
"""

import bisect
import contextlib
import errno
import operator
import os
import secrets
import struct
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, SupportsIndex

# Page header, MDB_meta, and the used fields of its two MDB_db.
_META = struct.Struct("<10xH4x 4sI16x I48x HH24xQQ 8xQ")
_HEAD = struct.Struct("<Q2xHHH")  # page number, flags; end of the node offsets, start of the nodes
# Size of the value (or number of the child), flags (its high bits), key size.
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE, _KINDS = 1, 2, 4, 8, 0x6F
# Flag of a node: the value is on separate pages, and the node holds the number of the first.
_LONG_VALUE = 1
_MAGIC = b"\xde\xc0\xef\xbe"
_MAX_DEPTH = 32  # as in the library
_NONE = (1 << 64) - 1  # the root of an empty tree
_FIRST_MAP_BYTES = 1 << 30  # address space, not disk; doubled whenever it is full
_BATCH_BYTES = 1 << 26  # per transaction; chosen, untested


class LMDBError(ValueError):
    """The file is damaged or unsupported; the message names the file, the byte offset and what is wrong."""


class LMDBUnfit(LMDBError):
    """The file seems whole, but its kind is not supported."""


class LMDBIndex(NamedTuple):
    """The positions of the values, in key order."""

    keys: Sequence[bytes]
    starts: Sequence[int]  # byte offsets of the values in the file
    sizes: Sequence[int]  # bytes


class LMDBReader:
    """The values of an LMDB file, in key order; safe in threads, after fork and after pickle.

    Opening reads all keys, a few microseconds each; `index` saves that.

    Args:
        path: the file, or the folder with its data.mdb.
        index: `reader.index` of an earlier reader of the same, unchanged file.

    Raises:
        LMDBError: at opening or reading: damaged, of another version, or with named databases.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with LMDBWriter(f"{folder}/words.lmdb") as writer:
        ...         writer.write("two", b"zwei")
        ...         writer.write("one", b"eins")
        ...     with LMDBReader(f"{folder}/words.lmdb") as reader:
        ...         len(reader), reader[0], reader[-1], reader.get("two"), reader.keys
        (2, b'eins', b'zwei', b'zwei', (b'one', b'two'))
    """

    def __init__(self, path: str | os.PathLike[str], *, index: LMDBIndex | None = None) -> None:
        self.path = Path(path).absolute()
        if self.path.is_dir():
            self.path = self.path / "data.mdb"
        self._meta = self._open()
        self.index = self._walk() if index is None else index
        self.keys = self.index.keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: SupportsIndex) -> bytes:
        number = range(len(self))[operator.index(index)]  # IndexError, negative numbers
        start = self.index.starts[number]
        size = self.index.sizes[number]
        page, inside = divmod(start, self._page_bytes)
        if inside == _HEAD.size:  # else the value is in a leaf, which was checked with its keys
            page_number, flags, *count = _HEAD.unpack(self._read(start - inside, inside))
            pages = -(-(inside + size) // self._page_bytes)
            if (page_number, flags, count[0] | count[1] << 16) != (page, _OVERFLOW, pages):
                raise self._error(start - inside, f"no value of {size} bytes starts on this page")
        return self._read(start, size)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def get(self, key: bytes | str | SupportsIndex) -> bytes:
        """The value of a key, which `lmdb_key` makes of text or a number; KeyError if there is none."""
        name = lmdb_key(key)
        number = bisect.bisect_left(self.keys, name)
        if number == len(self) or self.keys[number] != name:
            raise KeyError(f"{self.path} has no key {name!r}")
        return self[number]

    def close(self) -> None:
        """Close the file; reading afterwards is a ValueError."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._open() != state["_meta"]:
            raise self._error(0, "the file has been changed since it was opened first")

    def _open(self) -> tuple[int, ...]:
        """Flags, depth, number of keys, root and transaction of the newer meta page."""
        self._file = self.path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)  # data sets are rarely closed explicitly
        self._lock = threading.Lock()
        self._size = os.fstat(self._file.fileno()).st_size
        at = 0
        metas = []
        for _ in range(2):
            head = self._read(at, _META.size)
            flags, magic, version, self._page_bytes, *facts = _META.unpack(head)
            if magic != _MAGIC or flags & _KINDS != _META_PAGE:
                raise self._error(at, "no LMDB file, or a damaged one")
            if version != 1:
                raise self._error(
                    at, f"format {version} of LMDB; only 1, of LMDB 0.9, is known", LMDBUnfit
                )
            if self._page_bytes not in ((at,) if at else (1 << n for n in range(9, 17))):
                raise self._error(at, f"pages of {self._page_bytes} bytes: damaged")
            if facts[1] > _MAX_DEPTH:
                raise self._error(at, f"a tree of {facts[1]} levels: damaged")
            metas.append(tuple(facts))
            at = self._page_bytes
        return max(metas, key=operator.itemgetter(-1))

    def _walk(self) -> LMDBIndex:
        flags, depth, count, root, _ = self._meta
        if flags & 0x7F:
            what = "several values per key, or keys not in the order of their bytes"
            raise self._error(0, what, LMDBUnfit)
        keys: list[bytes] = []
        starts, sizes = array("Q"), array("Q")
        todo = [] if root == _NONE else [(root, depth)]
        while todo:
            number, level = todo.pop()
            at, page, nodes = self._page(number, _BRANCH if level > 1 else _LEAF)
            if level > 1:
                children = [low | high << 16 | top << 32 for _, low, high, top, _ in nodes]
                todo += [(child, level - 1) for child in reversed(children)]
                continue
            for node, low, high, flags, key_bytes in nodes:
                start = node + _NODE.size + key_bytes
                size = low | high << 16
                key = page[start - key_bytes : start]
                if flags & ~_LONG_VALUE:
                    what = f"{key!r} is a named database or has many values"
                    raise self._error(at + node, what, LMDBUnfit)
                if keys and key <= keys[-1]:
                    raise self._error(at + node, f"key {key!r} comes after {keys[-1]!r}")
                if start + (8 if flags else size) > len(page):
                    raise self._error(at + node, f"the value of {key!r} runs over the page")
                offset = at + start
                if flags:
                    first = int.from_bytes(page[start : start + 8], "little")
                    offset = first * self._page_bytes + _HEAD.size
                if offset + size > self._size:
                    raise self._error(self._size, f"the file ends before the value of {key!r}")
                keys.append(key)
                starts.append(offset)
                sizes.append(size)
        if not len(keys) == len(set(starts)) == count:
            raise self._error(0, f"{count} values promised, {len(set(starts))} found: damaged")
        return LMDBIndex(tuple(keys), starts, sizes)

    def _page(self, number: int, kind: int) -> tuple[int, bytes, list[tuple[int, ...]]]:
        """Byte offset and bytes of a page, and its nodes: offset in the page, and the fields of _NODE."""
        at = number * self._page_bytes
        page = self._read(at, self._page_bytes)
        stored, flags, low, high = _HEAD.unpack_from(page)
        count = (low - _HEAD.size) // 2
        if (stored, flags & _KINDS) != (number, kind) or not _HEAD.size < low <= high <= len(page):
            raise self._error(at, "a page of the tree is damaged")
        offsets = struct.unpack_from(f"<{count}H", page, _HEAD.size)
        if not count or min(offsets) < high or max(offsets) > len(page) - _NODE.size:
            raise self._error(at, "a page of the tree is damaged")
        return at, page, [(node, *_NODE.unpack_from(page, node)) for node in offsets]

    def _read(self, start: int, size: int) -> bytes:
        if start + size > self._size:
            raise self._error(self._size, f"the file ends here, {start + size} bytes were expected")
        if hasattr(os, "pread"):
            data = os.pread(self._file.fileno(), size, start)
        else:
            with self._lock:  # Windows, where no fork can copy a held lock
                self._file.seek(start)
                data = self._file.read(size)
        if len(data) < size:
            raise self._error(start + len(data), "the file ends here, it was longer when opened")
        return data

    def _error(self, offset: int, reason: str, kind: type[LMDBError] = LMDBError) -> LMDBError:
        return kind(f"{self.path}, byte {offset}: {reason}")


class LMDBWriter:
    """Writes a single LMDB file, which gets its name only when complete; needs the package lmdb.

    In a `with` block an exception leaves no file, a kill only a .tmp file.

    Raises:
        FileExistsError: the file exists.
        ImportError: lmdb is not installed.
        OSError: the disk is full, or a quota or a limit of file sizes is reached; the error says which.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with LMDBWriter(f"{folder}/a.lmdb") as writer:
        ...         writer.write(7, b"seven")
        ...     LMDBReader(f"{folder}/a.lmdb").keys
        (b'0000000007',)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import lmdb
        except ModuleNotFoundError as error:
            raise ImportError("LMDBWriter needs the package lmdb: pip install lmdb") from error
        self._path = Path(path).absolute()
        self._refuse_existing()
        self._temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.tmp")
        self._full, self._failed = lmdb.MapFullError, lmdb.Error
        with self._disk_errors_named():
            self._env = lmdb.open(
                str(self._temporary),
                subdir=False,
                map_size=_FIRST_MAP_BYTES,
                lock=False,
                sync=False,
                mode=0o644,
            )
        self._batch: dict[bytes, bytes] = {}
        self._batch_bytes = 0
        self._closed = False

    def write(
        self, key: bytes | str | SupportsIndex, value: bytes | bytearray | memoryview
    ) -> None:
        """Add a value.

        Args:
            key: see `lmdb_key`; in any order, but faster in byte order.
            value: bytes-like, less than 2 GiB.

        Raises:
            ValueError: an invalid or repeated key (found by `close` at the latest).
            TypeError: the value is not bytes-like.
        """
        name = lmdb_key(key)
        data = bytes(memoryview(value))
        if name in self._batch:
            raise ValueError(f"key {key!r} is there already")
        self._batch[name] = data
        self._batch_bytes += len(data)
        if self._batch_bytes >= _BATCH_BYTES:
            self._commit()

    def close(self) -> None:
        """Finish the file and give it its name; a second call does nothing."""
        if self._closed:
            return
        try:
            self._commit()
            with self._disk_errors_named():
                self._env.sync(True)  # else a power cut could leave the name without its bytes
            self._env.close()
            self._refuse_existing()
            self._temporary.rename(self._path)
            self._closed = True
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def _commit(self) -> None:
        while self._batch:
            try:
                with self._disk_errors_named(), self._env.begin(write=True) as transaction:
                    for key, value in sorted(self._batch.items()):
                        if not transaction.put(key, value, overwrite=False):
                            raise ValueError(f"key {key!r} is there already")
                self._batch = {}
                self._batch_bytes = 0
            except self._full:  # none of the batch was written
                self._env.set_mapsize(2 * self._env.info()["map_size"])

    @contextlib.contextmanager
    def _disk_errors_named(self) -> Iterator[None]:
        """LMDB reports a short write as an I/O error; writing to the file once more shows the reason."""
        try:
            yield
        except self._full:
            raise
        except self._failed as error:
            number = getattr(error, "code", 0)
            if number <= 0 or number == errno.EIO:  # LMDB's own are negative
                number = errno.EIO
                try:
                    with self._temporary.open("ab") as file:
                        file.write(bytes(_BATCH_BYTES))
                        file.flush()
                        os.fsync(file.fileno())
                except OSError as reason:
                    number = reason.errno or number
            raise OSError(number, os.strerror(number), str(self._path)) from error

    def _discard(self) -> None:
        self._env.close()
        self._closed = True
        self._temporary.unlink(missing_ok=True)

    def _refuse_existing(self) -> None:
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists: remove it or choose another name")


def lmdb_key(key: bytes | str | SupportsIndex) -> bytes:
    """The bytes of a key: text as UTF-8, a number in ten digits, so that byte order is numeric order.

    Raises:
        ValueError: not 1 to 511 bytes, or a number below 0 or of more than ten digits.
        TypeError: neither bytes, text nor an integer.

    Example:
        >>> lmdb_key("cat/1.jpg"), lmdb_key(70)
        (b'cat/1.jpg', b'0000000070')
    """
    if isinstance(key, bytes | str):
        name = key.encode() if isinstance(key, str) else key
        if not 1 <= len(name) <= 511:  # the library's limit
            raise ValueError(f"a key has 1 to 511 bytes, got {len(name)}: {name[:40]!r}")
        return name
    number = operator.index(key)
    if not 0 <= number < 10**10:
        raise ValueError(f"a number as a key is at least 0 and below 10**10, got {number}")
    return b"%010d" % number
