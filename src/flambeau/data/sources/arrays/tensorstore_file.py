"""Arrays in N5 and Zarr (version 2 and 3) stores, which are folders, read and written through tensorstore.

Source: N5's README, "File-system specification"; the Zarr storage specifications, versions 2 and 3;
tensorstore's documentation.

tensorstore runs in a separate process, one for each process that reads. After a process has used it, every
fork of it that uses it too is ended ("fork() use detected"), such as the workers of a DataLoader; 0.1.86
still does so, and it will not change (google/tensorstore#206), because tensorstore has threads.
multiprocessing would import the user's script in the process; a plain subprocess imports only tensorstore.
Damaged data that crash the C++ library raise an error here, and do not end the training.
"""

import atexit
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flambeau.data.sources.arrays.array_roles import role_of
from flambeau.data.sources.arrays.npy_pth import (
    Array,
    MemoryRows,
    RefusedRows,
    Rows,
    absent_chunks,
    damaged,
)
from flambeau.data.sources.fingerprint import sampled_content, size_of
from flambeau.errors import InputError, json_object, why_no_json
from flambeau.optional_packages import extra

_METADATA = {"zarr3": "zarr.json", "zarr": ".zarray", "n5": "attributes.json"}  # by driver
_MAX_METADATA = 1 << 24  # bytes of a metadata file; lists of class names are in it
_MAX_BYTES = 1 << 31  # read as one: the specification of N5 allows no larger block
_MAX_CHUNKS = 1 << 24  # in a file of Zarr 3, whose index has 16 bytes for each
_SIZES = 4096  # sizes of chunk files in a fingerprint: 20 ms


class StoreRows:
    """An array of a store; in random order each image reads a chunk: chunks of one image are best."""

    def __init__(
        self, where: tuple[str, str, bool, int], shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._where, self.shape, self.dtype = where, shape, dtype

    def read(self, start: int, stop: int) -> Array:
        size = (stop - start) * math.prod(self.shape[1:]) * self.dtype.itemsize
        if size > _MAX_BYTES:
            raise OSError(f"{size} bytes would be read at once; at most {_MAX_BYTES}")
        rows: Array = _call("rows", start, stop, *self._where)
        rows.flags.writeable = False
        return rows


def open_store(folder: Path) -> dict[str, Rows]:
    """The arrays of a folder by name, and lists of text in attributes, such as class names.

    Of N5 the last of `dimensions` is NumPy's first axis, as z5py and zarr write it. But if a one-dimensional
    array, such as labels, is as long as the first of `dimensions` and none as the last, they are in NumPy's
    order, as tensorstore writes them.
    """
    extra("tensorstore", what=f"{folder}")
    rows: dict[str, Rows] = {}
    nodes = {node.folder.relative_to(folder).as_posix(): node for node in _nodes(folder)}
    for name, node in nodes.items():
        for key, value in node.attributes.items():
            if role_of(key) is not None and _are_words(value):
                rows[key if name == "." else f"{name}/{key}"] = MemoryRows(np.array(value))
    arrays = {name: node for name, node in nodes.items() if node.sides}
    lengths = {node.sides[0] for node in arrays.values() if len(node.sides) == 1}
    for name, node in arrays.items():
        first, last = node.sides[0], node.sides[-1]
        if node.driver == "n5" and len(node.sides) > 1 and {first, last} <= lengths:
            raise InputError(
                f"{node.folder}: as many labels as the first and the last of dimensions {node.sides}\n"
                "Which of them counts the images is not known; write another format"
            )
        rows[name] = _rows(node, is_reversed=node.driver == "n5" and first not in lengths)
    return rows


def write_store(folder: Path, driver: str, array: Array) -> None:
    """Write an array of one axis as one chunk, or one mapped from a file with a chunk per row."""
    data = str(array.filename) if isinstance(array, np.memmap) else array.tobytes()
    _call("write", str(folder.absolute()), driver, data, array.shape, str(array.dtype))


def store_fingerprint(folder: Path, facts: str) -> str:
    """SHA-256 of the metadata of an array, the sizes of some thousand chunk files, and `facts`."""
    node = _node(folder)
    assert node is not None
    digest = hashlib.sha256(_metadata(node))
    count = math.prod(node.grid)
    for number in range(0, count, -(-count // _SIZES)):
        digest.update(f"{size_of(node.chunk_file(number))} ".encode())
    digest.update(facts.encode())
    return digest.hexdigest()


def store_sample(folder: Path) -> str:
    """`sampled_content` of the chunks of an array, whose sizes say nothing if they are not compressed."""
    node = _node(folder)
    assert node is not None
    return sampled_content(math.prod(node.grid), node.chunk_file)


def check_chunks(folder: Path) -> tuple[bool, list[str]]:
    """Whether all chunks of images have checksums; and a sentence for each array with absent chunks.

    Absent chunks read as the fill value, by design or after the loss of a file. Chunks within a shard are not
    checked.
    """
    checked = True
    absent = []
    for node in _nodes(folder):
        name = node.folder.relative_to(folder).as_posix()
        role = role_of(name)
        if role is not None and role[1] == "images":
            checked &= b"crc32c" in _metadata(node)
        count = math.prod(node.grid) if node.sides else 0
        lost = sum(not node.chunk_file(number).exists() for number in range(count))
        if lost:
            absent.append(absent_chunks(name, lost, count))
    return checked, absent


# ---------------------------------------------------------------- metadata


class _Node(NamedTuple):
    """A folder of a store; for a group, or a folder with attributes only, `sides` and `chunk` are empty.

    Attributes:
        sides, chunk: the shapes of an array and of one chunk file, as they are stored.
        prefix, separator: the name of a chunk file is the prefix and its position in the grid.
    """

    folder: Path
    driver: str
    attributes: dict[str, Any]
    sides: Sequence[int] = ()
    chunk: Sequence[int] = ()
    prefix: str = ""
    separator: str = "/"

    @property
    def grid(self) -> list[int]:
        """The number of chunk files along each side."""
        return [-(-side // step) for side, step in zip(self.sides, self.chunk, strict=True)]

    def chunk_file(self, number: int) -> Path:
        position = []
        for side in self.grid:
            number, at = divmod(number, side)
            position.append(str(at))
        return self.folder / (self.prefix + self.separator.join(position))


def _metadata(node: _Node) -> bytes:
    return (node.folder / _METADATA[node.driver]).read_bytes()


def _nodes(folder: Path) -> Iterator[_Node]:
    """All nodes, but none inside an array, where there may be a file or folder per chunk."""
    node = _node(folder)
    if node is not None:
        yield node
    if node is None or not node.sides:
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                yield from _nodes(path)


def _node(folder: Path) -> _Node | None:
    driver = next((key for key, name in _METADATA.items() if (folder / name).is_file()), None)
    attributes = _json(folder / ".zattrs") if (folder / ".zattrs").is_file() else {}
    if driver is None:
        return _Node(folder, "zarr", attributes) if attributes else None
    path = folder / _METADATA[driver]
    facts = _json(path)
    try:
        if driver == "n5":
            if "dimensions" not in facts:
                return _Node(folder, driver, facts)
            node = _Node(folder, driver, facts, facts["dimensions"], facts["blockSize"])
        elif driver == "zarr":
            separator = facts.get("dimension_separator", ".")
            node = _Node(folder, driver, attributes, facts["shape"], facts["chunks"], "", separator)
        else:
            attributes = dict(facts.get("attributes", {}))
            if facts["node_type"] == "group":
                return _Node(folder, driver, attributes)
            chunk = facts["chunk_grid"]["configuration"]["chunk_shape"]
            key = facts["chunk_key_encoding"]
            is_default = key["name"] == "default"
            default = {"separator": "/" if is_default else "."}
            separator = key.get("configuration", default).get("separator", default["separator"])
            prefix = f"c{separator}" if is_default else ""
            node = _Node(folder, driver, attributes, facts["shape"], chunk, prefix, separator)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"{type(error).__name__} {error}") from error
    for sides in (node.sides, node.chunk):
        if not (isinstance(sides, list) and sides and all(type(n) is int and n > 0 for n in sides)):
            raise damaged(path, f"an axis of {sides!r:.60}, expected numbers above 0")
    if len(node.sides) != len(node.chunk):
        raise damaged(path, "an array and its chunks have not as many axes")
    if node.separator not in ("/", "."):
        raise damaged(path, f"the separator {node.separator!r:.60}")
    return node


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_METADATA:
        raise damaged(path, f"over {_MAX_METADATA} bytes of metadata")
    try:
        facts = json.loads(path.read_bytes(), object_pairs_hook=json_object)
    except (ValueError, RecursionError) as error:
        raise damaged(path, why_no_json(error)) from error
    if not isinstance(facts, dict):
        raise damaged(path, f"a {type(facts).__name__} where an object is expected")
    return facts


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)


def _rows(node: _Node, *, is_reversed: bool) -> Rows:
    # The time makes it a new opening: tensorstore then checks whether its cached chunks have changed.
    where = (str(node.folder.absolute()), node.driver, is_reversed, time.time_ns())
    try:
        shape, code, chunk, file = _call("facts", *where)
    except OSError as error:
        return RefusedRows(tuple(node.sides), f"{node.folder} cannot be read: {error}")
    dtype = np.dtype(code)
    size = math.prod(chunk) * dtype.itemsize
    chunks = math.prod(file) // max(1, math.prod(chunk))
    if size > _MAX_BYTES or chunks > _MAX_CHUNKS:
        raise damaged(node.folder, f"shape {shape}, in chunks of {chunk}, {chunks} in a file")
    return StoreRows(where, shape, dtype)


# ---------------------------------------------------------------- the process of tensorstore


class _Process:
    """Started at the first call; one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def call(self, request: tuple[Any, ...]) -> tuple[bool, Any]:
        with self._lock:
            if self._running is None:
                script = Path(__file__).with_name("tensorstore_process.py")
                self._running = subprocess.Popen(
                    [sys.executable, "-P", "-c", _RUN, str(script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the processes that read
                )
                atexit.register(partial(self._end, os.getpid()))
            assert self._running.stdin is not None
            assert self._running.stdout is not None
            reply: tuple[bool, Any] | None = None
            try:
                pickle.dump(request, self._running.stdin)
                self._running.stdin.flush()
                reply = pickle.load(self._running.stdout)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                raise OSError("the process of tensorstore has ended while it was asked") from error
            finally:
                if reply is None:  # interrupted, perhaps: the next call must not get this reply
                    self._end(os.getpid())
            assert reply is not None
            return reply

    def _end(self, owner: int) -> None:
        running, self._running = self._running, None
        if running is not None and os.getpid() == owner:
            running.kill()  # closing its input is not enough: a fork of this process may hold it open
            running.communicate()


_RUN = "import runpy, sys; runpy.run_path(sys.argv[1])['serve']()"
_processes: dict[int, _Process] = {}  # by the calling process, which may be a fork of another


def _call(*request: Any) -> Any:
    """The result of a function of `tensorstore_process`; OSError with its error."""
    is_good, reply = _processes.setdefault(os.getpid(), _Process()).call(request)
    if not is_good:
        raise OSError(reply)
    return reply
