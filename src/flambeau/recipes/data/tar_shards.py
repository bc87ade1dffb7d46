"""Tar shards of samples (WebDataset's convention): written whole, each sample read at once by its number.

样本的 tar 分片（WebDataset 约定）：完整写入，并可按序号直接读取任一样本。

Source: POSIX.1-2017, pax, "ustar Interchange Format"; the convention: webdataset 1.0.2, tariterators.py.
Files that follow each other and share the name up to the first dot of its last part are one sample: that is
its key, and the rest, in lower case, is the extension: cat/1.jpg and cat/1.cls are jpg and cls of cat/1.

Not for compressed tars, which have no random access, for files of 2 GiB and more, or where damage inside a
file must be found: tar has checksums of its headers alone.
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

# A hidden file (.DS_Store, ._1.jpg of a Mac) and a file without a dot are no part of a sample.
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_META = re.compile(r"__[^/]*__(/|$)")  # notes about a shard, which webdataset skips too
_PACKERS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zX": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MAX_SIZE = 0x7FFFF000  # Linux reads no more at once: read(2)
_RECORD = 20 * 512  # what the length of a tar is a multiple of, by custom

_DAMAGED = "a damaged header; copy or make the tar again"
_CUT = "the tar was cut short or never finished: copy or make it again"


class ShardError(ValueError):
    """A damaged or unusable tar; the message names the file, the byte offset and what is wrong there."""


class TarIndex(NamedTuple):
    """The files of a tar that belong to samples, in its order."""

    names: Sequence[str]
    offsets: Sequence[int]  # of their first bytes
    sizes: Sequence[int]


class TarReader:
    """The samples of a tar file, in its order; safe in threads, after fork and after pickle.

    Args:
        path: the tar file.
        index: its files, or some of them, as `index_tar` finds them; by default they are looked up now.

    Attributes:
        path: absolute.
        keys: of the samples.

    Raises:
        ShardError: a damaged tar; samples whose files do not stand together.

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
        taken: set[str] = set()  # extensions of the sample at hand
        self._extensions: list[str] = []
        for place, name in enumerate(index.names):
            parts = _split(name)
            if parts is None:
                raise self._error(self._offsets[place], f"{name!r} is of no sample; index it again")
            key, extension = parts
            if key not in keys:
                keys[key] = place
                taken.clear()
            elif next(reversed(keys)) != key or extension in taken:
                raise self._error(
                    self._offsets[place],
                    f"{name!r} is of sample {key!r}, which has ended or has this extension already; sort the "
                    "files (tar --sort=name), and have no dot in a name but before its extension",
                )
            taken.add(extension)
            self._extensions.append(sys.intern(extension))
        self.keys = tuple(keys)
        self._starts = array("Q", [*keys.values(), len(self._extensions)])

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: SupportsIndex) -> dict[str, bytes]:
        return {self._extensions[place]: self._read(place) for place in self._places(index)}

    def extensions(self, index: SupportsIndex) -> tuple[str, ...]:
        """The extensions of a sample, in lower case."""
        return tuple(self._extensions[place] for place in self._places(index))

    def read(self, index: SupportsIndex, extension: str) -> bytes:
        """One file of a sample; KeyError where it has no such file."""
        for place in self._places(index):
            if self._extensions[place] == extension:
                return self._read(place)
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

    def _places(self, index: SupportsIndex) -> range:
        sample = range(len(self))[operator.index(index)]  # IndexError, negative numbers
        return range(self._starts[sample], self._starts[sample + 1])

    def _read(self, place: int) -> bytes:
        offset = self._offsets[place]
        size = self._sizes[place]
        if hasattr(os, "pread"):
            data = os.pread(self._file.fileno(), size, offset)
        else:  # Windows: a file of its own, as a shared cursor is not safe in threads
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
    """Find the files of a tar that belong to samples; only headers are read.

    Args:
        path: the tar file: ustar, GNU or pax.

    Raises:
        ShardError: a damaged, cut or compressed tar, data behind its end, links or sparse files in it.

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
        at = 0
        end = os.fstat(file.fileno()).st_size
        try:
            _refuse_packed(file.read(4), path)
            file.seek(0)
            tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
            while member := tar.next():
                at = member.offset
                if tar.offset <= at:  # tarfile before 2025 follows a negative size in circles
                    raise ShardError(f"{_DAMAGED} ({member.name!r} has {member.size} bytes)")
                if tar.offset > end:
                    raise ShardError(f"{member.name!r} goes on after the end of the file; {_CUT}")
                if _split(member.name) and not member.isdir():
                    _require_readable(member)
                    names.append(member.name)
                    offsets.append(member.offset_data)
                    sizes.append(member.size)
                tar.members.clear()  # type: ignore[attr-defined] # a kilobyte a file
                at = tar.offset
            _require_end(file, at)
        except OSError:
            raise
        except ShardError as error:
            raise ShardError(f"{path}, byte {at}: {error}") from None
        except Exception as error:  # of tarfile: TarError, ValueError, RecursionError ...
            raise ShardError(f"{path}, byte {at}: {_DAMAGED} ({error})") from error
    return TarIndex(names, offsets, sizes)


def _split(name: str) -> tuple[str, str] | None:
    """Key and extension of a file, None where it is no part of a sample."""
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


def _require_end(file: IO[bytes], at: int) -> None:
    """tarfile takes a damaged header, and the end of a cut file, for the end of the tar."""
    file.seek(at)
    mark = file.read(512)
    if len(mark) < 512:
        raise ShardError(f"the end mark is missing; {_CUT}")
    if any(mark):
        raise ShardError(_DAMAGED)
    while chunk := file.read(1 << 20):
        if chunk.count(0) < len(chunk):
            raise ShardError("the tar ends here, but data follow; join tars with tar --concatenate")


class TarWriter:
    """Writes a tar of samples, which gets its name only when all is written; always the same bytes.

    Use it in a `with` block: an exception in it leaves nothing, a kill only a file that ends in .tmp.

    Args:
        path: the tar file to make.

    Attributes:
        path: absolute.
        count: samples written so far.
        size_bytes: of them in the file.

    Raises:
        FileExistsError: it exists.

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
            TypeError: values that are not bytes.
            ValueError: a key that is taken, or names that a reader would not give back as they are.
        """
        if key in self._keys or not sample:
            raise ValueError(f"sample {key!r} {'is there already' if sample else 'has no files'}")
        blocks = []
        for extension, value in sample.items():
            info = tarfile.TarInfo(f"{key}.{extension}")  # of 1970, of user 0
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
            os.fsync(self._file.fileno())  # a name must not outlive a power cut without its bytes
            self._file.close()
            self._refuse_existing()
            self._temporary.rename(self.path)
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk refuses the flush of what is thrown away
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
    """Writes samples into tars with numbers, each of which gets its name when it is full.

    Use it in a `with` block: an exception in it leaves the shards before.

    Args:
        pattern: path with a place for the number, from 0: train-%06d.tar.
        max_count: samples per shard.
        max_bytes: bytes per shard, except for a single sample that is larger.

    Attributes:
        paths: of the shards begun, the last one maybe not finished yet.

    Raises:
        ValueError: a pattern without a number, or a limit below 1.

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
        """Append a sample, as TarWriter does; a key may come again in another shard."""
        size = sum(1024 + len(data) for data in sample.values())  # a header, and up to a full block
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
