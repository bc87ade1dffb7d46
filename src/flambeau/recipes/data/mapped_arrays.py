"""Memory-map the arrays of .npy, .npz and .pth files as tensors, and write .npy files through a map.

把 .npy、.npz 和 .pth 文件中的数组映射为张量而不读取它们；也可就地逐行写出 .npy 文件。

Source: numpy.lib.format (NEP 1) for .npy; APPNOTE.TXT of PKWARE, 4.3.7, for the members of an .npz;
PyTorch's notes on serialization semantics for .pth; mmap(2).

Opening takes microseconds whatever the size. Pages are read when they are touched, kept in the system's page
cache, and shared by all processes that map the file, so that forked workers cost no memory.
The map is private: writing to a tensor changes this process's copy of the page, never the file.

Not for compressed arrays, which cannot be mapped. Not where the file may be truncated, or the network drive
fail, while it is mapped: touching such a page kills the process (SIGBUS).
"""

import ast
import contextlib
import math
import mmap
import os
import platform
import secrets
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

Header = tuple[str, bool, tuple[int, ...], int]  # see `npy_header`

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # bytes, NumPy's limit for ast.literal_eval
_NATIVE = "<" if sys.byteorder == "little" else ">"
_ALIGN = 64  # numpy pads its headers to this, so that the data starts at a multiple of it

_DTYPES = {
    "b1": torch.bool,
    "u1": torch.uint8,
    "i1": torch.int8,
    "u2": torch.uint16,
    "i2": torch.int16,
    "u4": torch.uint32,
    "i4": torch.int32,
    "u8": torch.uint64,
    "i8": torch.int64,
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    "c16": torch.complex128,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

# Linux refuses a private map larger than memory and swap, unless this flag says not to reserve memory for
# writes. Python has the flag from 3.13 on.
_ASM_GENERIC = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64")
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _ASM_GENERIC else 0)


def map_npy(path: str | os.PathLike[str]) -> Tensor:
    """Map the array of an .npy file.

    Returns:
        A CPU tensor of the array's shape and dtype; column-major arrays keep their strides.

    Raises:
        ValueError: not an .npy file, truncated, or of another byte order.
        TypeError: the array holds text, objects, records or dates.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with write_npy(f"{folder}/x.npy", (3, 2), torch.int16) as rows:
        ...         for number in range(3):
        ...             rows[number] = number
        ...     map_npy(f"{folder}/x.npy")
        tensor([[0, 0],
                [1, 1],
                [2, 2]], dtype=torch.int16)
    """
    with Path(path).open("rb") as file:
        return _tensor(npy_header(file, f"{path}"), 0, _map(file), f"{path}")


def map_npz(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Map the arrays of an uncompressed .npz file.

    An array that is not aligned to its item size, as torch needs, is copied into memory: often labels, never
    uint8 images.

    Returns:
        CPU tensors by name; text and objects, for which torch has no dtype, are left out.

    Raises:
        ValueError: not an .npz file, truncated, or compressed.

    Example:
        >>> import numpy, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     numpy.savez(f"{folder}/a.npz", x=numpy.arange(4), note="text")
        ...     map_npz(f"{folder}/a.npz")
        {'x': tensor([0, 1, 2, 3])}
    """
    tensors = {}
    with Path(path).open("rb") as file:
        memory = _map(file)
    for info, header, start in npz_members(path):
        if start is None:
            raise ValueError(f"{path}: {info.filename} is compressed; use numpy.savez")
        with contextlib.suppress(TypeError):
            name = info.filename.removesuffix(".npy")
            tensors[name] = _tensor(header, start, memory, f"{path}: {info.filename}")
    return tensors


def map_pth(path: str | os.PathLike[str]) -> Any:
    """Load a file of torch.save with its tensors mapped, on the CPU.

    Args:
        path: of tensors, numbers, text, and lists, tuples and dicts of these.

    Raises:
        ValueError: written before PyTorch 1.6: no zip file, so it cannot be mapped.
        pickle.UnpicklingError: other objects, such as a whole model, which would run code.
        RuntimeError: damaged, or on Linux larger than memory and swap.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save((torch.arange(4), "text"), f"{folder}/a.pth")
        ...     map_pth(f"{folder}/a.pth")
        (tensor([0, 1, 2, 3]), 'text')
    """
    with Path(path).open("rb") as file:
        if file.read(4) != b"PK\3\4":
            raise ValueError(
                f"{path} is no zip file: damaged, or of before PyTorch 1.6; save it again"
            )
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


@contextlib.contextmanager
def write_npy(
    path: str | os.PathLike[str], shape: Sequence[int], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Write an .npy file by filling a mapped tensor, in any order and from any process.

    Disk space is allocated at the start, and the file named at the end of the `with` block; an exception
    leaves no file, a kill a .tmp file.

    Args:
        shape: the array need not fit into memory.
        dtype: one that NumPy has too.

    Yields:
        The array, zero at first; do not write to it after the block.

    Raises:
        FileExistsError: the file exists.
        OSError: not enough disk space.
        ValueError: the format has no such dtype, such as bfloat16.

    Example:
        >>> import numpy, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with write_npy(f"{folder}/x.npy", (2, 3), torch.float32) as rows:
        ...         rows[1] = torch.rand(3)
        ...     numpy.load(f"{folder}/x.npy")[0]
        array([0., 0., 0.], dtype=float32)
    """
    target = Path(path)
    _refuse_existing(target)
    header = _header(tuple(shape), dtype)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x+b") as file:
            size = len(header) + math.prod(shape) * dtype.itemsize
            # Not sparse: on a full disk, writing to the map of a sparse file kills the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
            file.write(header)
            file.flush()
            memory = mmap.mmap(file.fileno(), size)
            yield _view(memory, dtype, len(header), tuple(shape))
            memory.flush()
            os.fsync(file.fileno())
        _refuse_existing(target)
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def npz_members(
    path: str | os.PathLike[str],
) -> Iterator[tuple[zipfile.ZipInfo, Header, int | None]]:
    """Iterate over the arrays of an .npz file.

    Yields:
        The zip member, the array's header, and the byte offset of the .npy in the file, None if compressed.

    Raises:
        ValueError: not an .npz file, damaged, truncated, or encrypted.

    Example:
        >>> import numpy, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     numpy.savez(f"{folder}/a.npz", x=numpy.arange(4, dtype="<i8"))
        ...     [(info.filename, header, at) for info, header, at in npz_members(f"{folder}/a.npz")]
        [('x.npy', ('<i8', False, (4,), 128), 55)]
    """
    try:
        with zipfile.ZipFile(path) as archive, Path(path).open("rb") as file:
            for info in archive.infolist():
                if info.filename.endswith(".npy"):
                    if info.header_offset < 0:
                        raise zipfile.BadZipFile(
                            f"{info.filename} lies before the start of the file"
                        )
                    with archive.open(info) as member:  # this checks the member's zip header too
                        header = npy_header(member, f"{path}: {info.filename}")
                    file.seek(info.header_offset + 26)
                    name, extra = struct.unpack("<HH", file.read(4))
                    start = info.header_offset + 30 + int(name) + int(extra)
                    yield info, header, None if info.compress_type else start
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError) as error:
        # RuntimeError: an encrypted member, or NotImplementedError; the last: a name of one.
        raise ValueError(f"{path} is no .npz file, or is cut short: {error}") from error


def npy_header(file: IO[bytes], where: str) -> Header:
    """Read the header of an .npy array.

    Args:
        file: at the start of the array.
        where: the array's name in errors.

    Returns:
        The type as NumPy writes it, such as '<f4'; whether column-major; the shape; the header's bytes.

    Raises:
        ValueError: not an .npy array, or damaged.

    Example:
        >>> import io, numpy
        >>> file = io.BytesIO()
        >>> numpy.save(file, numpy.zeros((2, 3), "<f4"))
        >>> _ = file.seek(0)
        >>> npy_header(file, "zeros")
        ('<f4', False, (2, 3), 128)
    """
    head = file.read(12)
    if head[:7] not in (_MAGIC + b"\1", _MAGIC + b"\2") or len(head) < 12:
        raise ValueError(f"{where} is no .npy array of version 1 or 2")
    (length,) = struct.unpack_from("<H" if head[6] == 1 else "<I", head, 8)
    begin = 10 if head[6] == 1 else 12
    text = head[begin:] + file.read(max(0, min(length, _MAX_HEADER) - 12 + begin))
    try:
        header = ast.literal_eval(text.decode("latin1").strip())
        descr, shape = header["descr"], header["shape"]
        if all(type(side) is int and side >= 0 for side in shape):
            # For records with fields, `descr` is a list.
            return str(descr), bool(header["fortran_order"]), tuple(shape), begin + length
        reason = f"shape {shape}"
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        reason = f"{type(error).__name__} in its header"
    raise ValueError(f"{where} is damaged: {reason}")


def _map(file: IO[bytes]) -> mmap.mmap:
    if os.fstat(file.fileno()).st_size == 0:
        raise ValueError(f"{file.name} is empty")
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    # Writable (copy-on-write): torch warns of read-only memory, and a write to it would crash.
    return mmap.mmap(
        file.fileno(), 0, mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    )


def _tensor(header: Header, start: int, memory: mmap.mmap, where: str) -> Tensor:
    """The .npy array that begins at a byte of a file."""
    descr, column_major, shape, size = header
    offset = start + size
    dtype = _DTYPES.get(descr[1:])
    if dtype is None:
        raise TypeError(f"{where} has type {descr!r}, which torch lacks")
    if dtype.itemsize > 1 and descr[0] != _NATIVE:
        raise ValueError(f"{where} has type {descr!r}, of the byte order of another machine")
    end = offset + math.prod(shape) * dtype.itemsize
    if end > len(memory):
        raise ValueError(f"{where} is cut short: it ends at byte {end}, the file at {len(memory)}")
    if column_major:
        return _view(memory, dtype, offset, shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    return _view(memory, dtype, offset, shape)


def _view(memory: mmap.mmap, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if count == 0:  # frombuffer needs at least one item
        return torch.empty(shape, dtype=dtype, device="cpu")
    if offset % dtype.itemsize:
        data = memory[offset : offset + count * dtype.itemsize]
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it or choose another name")


def _header(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    if dtype not in _CODES:
        raise ValueError(f"the .npy format has no {dtype}; write another type")
    descr = ("|" if dtype.itemsize == 1 else _NATIVE) + _CODES[dtype]
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    length = -(10 + len(text) + 1) % _ALIGN + len(text) + 1
    return _MAGIC + b"\1\0" + struct.pack("<H", length) + text.ljust(length - 1) + b"\n"
