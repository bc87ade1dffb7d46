"""Tar shards of samples (WebDataset's convention): written whole, each sample read directly by number.

样本的 tar 分片（WebDataset 约定）：完整写入，并可按序号直接读取任一样本。

Source: POSIX.1-2017, pax, "ustar Interchange Format"; the convention: webdataset 1.0.2, tariterators.py.
Consecutive files that share the path up to the first dot of the file name are one sample. That part is its
key and the rest, in lower case, the extension: cat/1.jpg and cat/1.cls are jpg and cls of cat/1.

Not for compressed tars, which have no random access, for files of 2 GiB and more, or where damage inside a
file must be detected: tar has checksums only of its headers.
"""

import contextlib
import operator
import os
import re
import secrets
import sys
import tarfile
import weakref
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, SupportsIndex

StrPath = str | os.PathLike[str]

# Hidden files (.DS_Store, ._1.jpg of a Mac) and files without a dot belong to no sample.
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_META = re.compile(r"__[^/]*__(/|$)")  # metadata of a shard, which webdataset skips too
_PACKERS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zX": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MAX_SIZE = 0x7FFFF000  # the most that one read(2) of Linux returns
_RECORD = 20 * 512  # by convention the length of a tar is a multiple of this

_DAMAGED = "a damaged header; copy or make the tar again"
_CUT = "the tar was cut short or never finished: copy or make it again"


class ShardError(ValueError):
    """The tar is damaged or unusable; the message names the file, the byte offset and what is wrong."""


class TarIndex(NamedTuple):
    """The files of a tar that belong to samples, in the order of the tar."""

    names: Sequence[str]
    offsets: Sequence[int]  # of their first bytes
    sizes: Sequence[int]


class TarReader:
    """The samples of a tar file, in file order; safe in threads, after fork and after pickle.

    Args:
        index: of `index_tar`, or a part of it; by default the tar is indexed now.

    Attributes:
        path: absolute.

    Raises:
        ShardError: the tar is damaged, or the files of a sample are not consecutive.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with TarWriter(f"{folder}/pets.tar") as writer:
        ...         writer.write("cat/1", {"jpg": b"an image", "cls": b"0"})
        ...         writer.write("dog/1", {"jpg": b"another", "cls": b"1"})
        ...     reader = TarReader(f"{folder}/pets.tar")
        ...     reader.keys, reader[1], reader.read(0, "cls")
        (('cat/1', 'dog/1'), {'jpg': b'another', 'cls': b'1'}, b'0')
    """

    def __init__(self, path: StrPath, index: TarIndex | None = None) -> None:
        self.path = Path(path).absolute()
        self._open()
        index = index_tar(path) if index is None else index
        self._offsets, self._sizes = array("Q", index.offsets), array("Q", index.sizes)
        keys: dict[str, int] = {}  # with the number of the sample's first file
        taken: set[str] = set()  # extensions of the current sample
        self._extensions: list[str] = []
        for number, name in enumerate(index.names):
            parts = self.split(name)
            if parts is None:
                raise self._error(
                    self._offsets[number], f"{name!r} is of no sample; index it again"
                )
            key, extension = parts
            if key not in keys:
                keys[key] = number
                taken.clear()
            elif next(reversed(keys)) != key or extension in taken:
                raise self._error(
                    self._offsets[number],
                    f"{name!r} is of sample {key!r}, which has ended or has this extension already; sort the "
                    "files (tar --sort=name), and have no dot in a name but before its extension",
                )
            taken.add(extension)
            self._extensions.append(sys.intern(extension))
        self.keys = tuple(keys)
        self._starts = array("Q", [*keys.values(), len(self._extensions)])

    @staticmethod
    def split(name: str) -> tuple[str, str] | None:
        """Key and extension of a file; None if it belongs to no sample."""
        return _split(name)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: SupportsIndex) -> dict[str, bytes]:
        return {self._extensions[number]: self._read(number) for number in self._files(index)}

    def extensions(self, index: SupportsIndex) -> tuple[str, ...]:
        """The extensions of a sample, in lower case."""
        return tuple(self._extensions[number] for number in self._files(index))

    def read(self, index: SupportsIndex, extension: str) -> bytes:
        """One file of a sample; KeyError if the sample has no such file."""
        for number in self._files(index):
            if self._extensions[number] == extension:
                return self._read(number)
        has = ", ".join(self.extensions(index))
        raise KeyError(f"{self.path}: {self.keys[operator.index(index)]} has {has}, no {extension}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
        if self._size != state["_size"]:
            raise self._error(self._size, f"the file ends here, it had {state['_size']} bytes")

    def _open(self) -> None:
        self._file = self.path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._size = os.fstat(self._file.fileno()).st_size

    def _files(self, index: SupportsIndex) -> range:
        sample = range(len(self))[operator.index(index)]  # IndexError, negative numbers
        return range(self._starts[sample], self._starts[sample + 1])

    def _read(self, number: int) -> bytes:
        offset = self._offsets[number]
        size = self._sizes[number]
        if hasattr(os, "pread"):
            data = os.pread(self._file.fileno(), size, offset)
        else:  # Windows: opened for this read, as a shared cursor is not safe in threads
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                data = file.read(size)
        if len(data) < size:
            lack = f"{len(data)} of {size} bytes are there; the file was longer when it was indexed"
            raise self._error(offset, lack)
        return data

    def _error(self, offset: int, reason: str) -> ShardError:
        return ShardError(f"{self.path}, byte {offset}: {reason}")


def index_tar(path: StrPath) -> TarIndex:
    """List the files of a tar (ustar, GNU or pax) that belong to samples; only headers are read.

    Raises:
        ShardError: damaged, truncated or compressed, or with data after its end, links or sparse files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with TarWriter(f"{folder}/a.tar") as writer:
        ...         writer.write("0001", {"jpg": b"an image", "cls": b"3"})
        ...     index_tar(f"{folder}/a.tar")
        TarIndex(names=['0001.jpg', '0001.cls'], offsets=array('Q', [512, 1536]), sizes=array('Q', [8, 1]))
    """
    names: list[str] = []
    offsets, sizes = array("Q"), array("Q")
    with Path(path).open("rb") as file:
        offset = 0
        end = os.fstat(file.fileno()).st_size
        try:
            _refuse_packed(file.read(4), path)
            file.seek(0)
            tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
            while member := tar.next():
                offset = member.offset
                if tar.offset <= offset:  # tarfile before 2025 loops at a negative size
                    raise ShardError(f"{_DAMAGED} ({member.name!r} has {member.size} bytes)")
                if tar.offset > end:
                    raise ShardError(f"{member.name!r} goes on after the end of the file; {_CUT}")
                if _split(member.name) and not member.isdir():
                    _require_readable(member)
                    names.append(member.name)
                    offsets.append(member.offset_data)
                    sizes.append(member.size)
                tar.members.clear()  # type: ignore[attr-defined] # a kilobyte per file
                offset = tar.offset
            _require_end(file, offset)
        except OSError:
            raise
        except ShardError as error:
            raise ShardError(f"{path}, byte {offset}: {error}") from None
        except Exception as error:  # tarfile raises TarError, ValueError, RecursionError ...
            raise ShardError(f"{path}, byte {offset}: {_DAMAGED} ({error})") from error
    return TarIndex(names, offsets, sizes)


def _split(name: str) -> tuple[str, str] | None:
    """Key and extension of a file name; None if the file belongs to no sample."""
    match = _NAME.fullmatch(name)
    return (match[1], match[2].lower()) if match and not _META.match(name) else None


def _refuse_packed(start: bytes, path: StrPath) -> None:
    for magic, program in _PACKERS.items():
        if start.startswith(magic):
            raise ShardError(
                f"packed by {program}, so no sample can be found; unpack it: {program} -dc {path} > NEW.tar"
            )


def _require_readable(member: tarfile.TarInfo) -> None:
    if "\0" in member.name:
        raise ShardError(f"{member.name!r} is no name of a file; make the tar again")
    if member.issparse():
        raise ShardError(f"{member.name!r} is sparse; make the tar without --sparse")
    if not member.isreg():
        raise ShardError(
            f"{member.name!r} is no file but a link or device; "
            "make the tar with --dereference --hard-dereference"
        )
    if member.size > _MAX_SIZE:
        raise ShardError(
            f"{member.name!r} has {member.size} bytes, at most {_MAX_SIZE} can be read; split it"
        )


def _require_end(file: IO[bytes], offset: int) -> None:
    """Check for the end mark: tarfile stops silently at a damaged header and at a cut end."""
    file.seek(offset)
    mark = file.read(512)
    if len(mark) < 512:
        raise ShardError(f"the end mark is missing; {_CUT}")
    if any(mark):
        raise ShardError(_DAMAGED)
    while chunk := file.read(1 << 20):
        if chunk.count(0) < len(chunk):
            raise ShardError("the tar ends here, but data follow; join tars with tar --concatenate")


class TarWriter:
    """Writes a tar of samples, which gets its name only when complete; the same samples give the same bytes.

    In a `with` block an exception leaves no file, a kill only a .tmp file.

    Attributes:
        path: absolute.
        count, size_bytes: samples and bytes written so far.

    Raises:
        FileExistsError: the file exists.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with TarWriter(f"{folder}/a.tar") as writer:
        ...         writer.write("0001", {"jpg": b"an image", "json": b'{"label": 3}'})
        ...     with tarfile.open(writer.path) as tar:
        ...         tar.getnames()
        ['0001.jpg', '0001.json']
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path).absolute()
        self._temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.tmp")
        self._refuse_existing()
        self._file = self._temporary.open("xb")
        self._keys: set[str] = set()
        self.count = self.size_bytes = 0

    def write(self, key: str, sample: Mapping[str, bytes]) -> None:
        """Append a sample.

        Args:
            key: such as 0001 or cat/0001; no dot in its last part.
            sample: bytes by extension, at least one; written in this order.

        Raises:
            TypeError: a value is not bytes.
            ValueError: the key is taken, or readers would split the names differently.
        """
        if key in self._keys or not sample:
            raise ValueError(f"sample {key!r} {'is there already' if sample else 'has no files'}")
        blocks = []
        for extension, value in sample.items():
            info = tarfile.TarInfo(f"{key}.{extension}")  # date 1970, user 0
            if _split(info.name) != (key, extension) or "\0" in info.name:
                raise ValueError(
                    f"{info.name!r} would not come back as key {key!r}, extension {extension!r}: a key "
                    "has a last part without dots, an extension is in lower case"
                )
            data = memoryview(value).tobytes()
            info.size = len(data)
            blocks += [info.tobuf(tarfile.PAX_FORMAT), data, bytes(-len(data) % 512)]
        self._file.writelines(blocks)
        self._keys.add(key)
        self.count += 1
        self.size_bytes += sum(map(len, blocks))

    def close(self) -> None:
        """Finish the file and give it its name; a second call does nothing."""
        if self._file.closed:
            return
        try:
            if self._file.tell() != self.size_bytes:
                raise OSError(f"{self.path}: an earlier write stopped inside a sample")
            self._file.write(bytes(1024 + -(self.size_bytes + 1024) % _RECORD))
            self._file.flush()
            os.fsync(self._file.fileno())  # else a power cut could leave the name without its bytes
            self._file.close()
            self._refuse_existing()
            self._temporary.rename(self.path)
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk the last flush fails
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def _refuse_existing(self) -> None:
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists: remove it or choose another name")


class ShardWriter:
    """Writes samples into numbered tars, each of which gets its name when it is full.

    In a `with` block an exception leaves the earlier shards.

    Args:
        pattern: path with a format for the number, from 0: train-%06d.tar.
        max_count: samples per shard.
        max_bytes: per shard; only a single larger sample may exceed it.

    Attributes:
        paths: the last one may be unfinished.

    Raises:
        ValueError: the pattern has no number, or a limit is below 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ShardWriter(f"{folder}/words-%03d.tar", max_count=2) as writer:
        ...         for number in range(5):
        ...             writer.write(f"{number}", {"txt": b"word"})
        ...     [(path.name, len(TarReader(path))) for path in writer.paths]
        [('words-000.tar', 2), ('words-001.tar', 2), ('words-002.tar', 1)]
    """

    def __init__(
        self, pattern: StrPath, *, max_count: int = 10_000, max_bytes: int = 1 << 30
    ) -> None:
        self._folder, self._name = Path(pattern).parent, Path(pattern).name
        if not re.fullmatch(r"[^%]*%0?\d*d[^%]*", self._name) or min(max_count, max_bytes) < 1:
            raise ValueError(
                f"expected a name such as train-%06d.tar and limits of at least 1, got {self._name}, "
                f"max_count {max_count}, max_bytes {max_bytes}"
            )
        self._max_count, self._max_bytes = max_count, max_bytes
        self._writer: TarWriter | None = None
        self.paths: list[Path] = []

    def write(self, key: str, sample: Mapping[str, bytes]) -> None:
        """Append a sample, as TarWriter does; keys must differ only within a shard."""
        size = sum(1024 + len(data) for data in sample.values())  # header and padding: up to 1024
        if self._writer is not None and (
            self._writer.count == self._max_count
            or self._writer.size_bytes + size + _RECORD > self._max_bytes
        ):
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = TarWriter(self._folder / (self._name % len(self.paths)))
            self.paths.append(self._writer.path)
        self._writer.write(key, sample)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind)
