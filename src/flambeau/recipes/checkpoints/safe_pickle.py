"""List what a pickle-based checkpoint holds, and load its weights, without running any of its code.

基于 pickle 的检查点里有什么以及其中的权重，不执行它指名的任何东西。

Source: original. The opcodes are those of Python's pickletools; the containers are those of torch.save.
A pickle is a program. `torch.load(weights_only=True)` runs it with a short list of allowed calls. Here
the opcodes are only followed: a global stays a name, a call is recorded, and a table in this file builds
tensors, numbers and dicts from that record. Nothing that the file names is imported.
Not for quantized, sparse or conjugated tensors, nor for arrays of anything but numbers and text: they are
listed and left out (`torch.load(weights_only=True)` reads such tensors). Not for TorchScript-only data.
"""

import codecs
import io
import itertools
import math
import mmap
import pickletools
import re
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import torch
from torch import Tensor

_MAX_OPS = 20_000_000  # some GB of memory at worst; a checkpoint of 10 000 tensors has 400 000
_MAX_MADE = 1_000_000  # opcodes that make or fill an object, 3 s to follow; a tensor has eight
_MAX_DEPTH = 100  # of nested containers; real ones stay below 40
# Tuples as keys: hash() reads the whole tuple each time, and many with equal hashes are easily made.
_MAX_KEY_PARTS, _MAX_TUPLE_KEYS = 16, 10_000
_MAGIC = 0x1950A86A20F9469CFC6C  # what torch.save wrote first before PyTorch 1.6
_STORAGE_DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Untyped": torch.uint8,
    "QInt8": torch.qint8,
    "QUInt8": torch.quint8,
    "QInt32": torch.qint32,
}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_STORAGE = re.compile(r"torch\.(?:cuda\.|storage\.)?(\w+)Storage")
_NUMPY_DTYPE = re.compile(r"[<>=|]([biufc][0-9]{1,2}|[SU][0-9]{1,9})")


class PickleRefused(ValueError):
    """The file is damaged, or names something that may not be built; the message says which."""


class NotSupported(PickleRefused, NotImplementedError):
    """The file seems whole, but this module does not read its kind or size."""


@dataclass(frozen=True)
class Foreign:
    """Stands for an object that was not built: the name of its class, and its plain attributes."""

    name: str
    state: Any = None


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        container: 'zip' (torch.save since 1.6), 'torch before 1.6', 'TorchScript', or 'pickle'.
        root: class of the object, such as 'dict' or 'models.Net'.
        names: every global that unpickling would import, in order.
        refused: names that `load_pickle` does not build and pickle.load would run.
        not_read: known types that are not read, such as 'a sparse tensor'.
        weights_only: whether torch.load(weights_only=True) reads it.
        value: the result of `load_pickle(drop_objects=True)`, tensors on 'meta' (without values) or mapped.
    """

    container: str
    root: str
    names: tuple[str, ...]
    refused: tuple[str, ...]
    not_read: tuple[str, ...]
    weights_only: bool
    value: Any


def pickle_contents(path: Path, *, mapped: bool = False) -> Contents:
    """List what a pickle-based file holds; nothing is imported, called or written to disk.

    Args:
        path: a file of torch.save (.pth, .pt, .pth.tar, .bin, any version) or pickle.dump (Python 2 or 3).
        mapped: include the tensors' values, as `load_pickle(mapped=True, checked=True)`.

    Returns:
        The contents; dangerous functions are listed, not refused.

    Raises:
        PickleRefused: damaged or no pickle, or a tensor reaches beyond the stored bytes.
        OSError: the file cannot be opened.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.ones(2, 3)}, Path(folder, "a.pth"))
        ...     contents = pickle_contents(Path(folder, "a.pth"))
        >>> contents.container, contents.refused, contents.weights_only, contents.value["weight"].shape
        ('zip', (), True, torch.Size([2, 3]))
    """
    with _parsed(path, checked=mapped) as parsed:
        builder = _Builder(parsed, drop=True, mapped=mapped or None)
        built = builder.build(parsed.root)
        refused = parsed.refused()
        known = (_OLD_NAMES.get(name, name) for name in parsed.names)
        plain = not refused and all(name[:6] == "torch." or name in _TORCH for name in known)
        plain &= parsed.container in ("zip", "torch before 1.6") and parsed.protocol == 2
        names = _class_of(parsed.root), tuple(parsed.names), refused
        return Contents(parsed.container, *names, tuple(builder.not_read), plain, built)


def load_pickle(
    path: Path, *, drop_objects: bool = False, mapped: bool = False, checked: bool = True
) -> Any:
    """Load a pickle-based file, all tensors on the CPU and without gradients.

    Args:
        path: as for `pickle_contents`.
        drop_objects: put a `Foreign` in place of each object or call that may not be built (a whole model)
            and of data that are not read; by default such a file is refused.
        mapped: leave tensors in the file until they are used, which saves memory; it must not change
            meanwhile.
        checked: compare zip records with their CRC-32, which reads the whole file.

    Returns:
        Plain data: NumPy scalars as Python numbers, a Namespace as a dict, a path as a string, a storage as a
        tensor (N,); strings of Python 2 as Latin-1.

    Raises:
        PickleRefused: damaged, or anything but weights and plain data.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.Linear(2, 3), Path(folder, "whole.pth"))
        ...     model = load_pickle(Path(folder, "whole.pth"), drop_objects=True)
        >>> model.name, list(model.state["_parameters"])
        ('torch.nn.modules.linear.Linear', ['weight', 'bias'])
    """
    with _parsed(path, checked) as parsed:
        if not drop_objects:
            parsed.refuse_names("drop_objects=True takes the weights, and leaves such objects out")
        return _Builder(parsed, drop=drop_objects, mapped=mapped).build(parsed.root)


def plain_pickle(data: bytes) -> Any:
    """Load a pickle in memory, such as a record of a data set, as `load_pickle` does.

    Raises:
        PickleRefused: the pickle is damaged, or names anything but plain data.

    Example:
        >>> import pickle
        >>> plain_pickle(pickle.dumps((b"image", [3, "cat"])))
        (b'image', [3, 'cat'])
    """
    parsed = _parse_stream(io.BytesIO(data))
    parsed.refuse_names()
    return _Builder(parsed, drop=False).build(parsed.root)


@dataclass(frozen=True, slots=True)
class _Name:
    path: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype
    key: str
    size: int  # in elements


@dataclass(eq=False, slots=True)
class _Made:
    """A recorded call: the callable, its arguments, and what was then put into the result."""

    maker: Any
    args: Any
    kwargs: Any = None
    state: Any = None
    items: Any = ()  # a list only once it has items: a million empty lists cost the gc seconds
    pairs: Any = ()

    def extend(self, items: list[Any]) -> None:
        self.items = self.items or []
        self.items += items


class _Machine:
    """Follows the opcodes of a pickle; each call is recorded as a `_Made` instead of being made."""

    def __init__(self, file: Any, outer: "_Machine | None" = None) -> None:
        self.file, self.outer = file, outer  # each `run` reads one pickle of the file
        self.storages: dict[str, _Storage] = {}
        self.held: dict[str, memoryview] = {}  # the bytes of storages that lie in the pickle itself
        self.loaded: dict[int, tuple[Any, _Storage]] = {}
        self.names: dict[str, None] = outer.names if outer else {}
        self.made: Iterator[int] = outer.made if outer else itertools.count()
        self.protocol = 0
        self.checked_key = _KeyCheck()

    def run(self) -> Any:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        try:
            for _ in range(_MAX_OPS):
                name, read = _OPCODES[self.file.read(1)]
                if name in _TAKES and next(self.made) == _MAX_MADE:
                    raise NotSupported(f"too large to be checked: it makes over {_MAX_MADE} things")
                if name == "STOP":
                    return self.stack.pop()
                self.step(name, read(self.file) if read else None)
        except PickleRefused:
            raise
        except _MISUSE as error:
            raise PickleRefused(f"no whole pickle: damaged at byte {self.file.tell()}") from error
        raise NotSupported(f"too large to be checked: it has over {_MAX_OPS} opcodes")

    def step(self, name: str, argument: Any) -> None:
        push = self.stack.append
        items = self.take(_TAKES[name]) if name in _TAKES else []
        if _LOADER.path in self.names and _LOADER in items[name in _CALLS :]:
            raise PickleRefused(f"it hands {_LOADER.path} to something that may call it")
        match name:
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                push(self.memo[argument])
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "EMPTY_TUPLE":
                push(tuple(items))
            case "LIST" | "EMPTY_LIST":
                push(items)
            case "DICT" | "EMPTY_DICT":
                push(self.put_items(items, {}))
            case "SETITEM" | "SETITEMS":
                self.put_items(items, self.stack[-1])
            case "APPEND" | "APPENDS" | "ADDITEMS":
                self.stack[-1].extend(items)
            case "MARK":
                self.marks.append(len(self.stack))
            case "POP":
                at_mark = self.marks and self.marks[-1] == len(self.stack)
                (self.marks if at_mark else self.stack).pop()
            case "DUP":
                push(self.stack[-1])
            case "NEWTRUE" | "NEWFALSE":
                push(name == "NEWTRUE")
            case "PROTO":
                self.protocol = argument
            case "POP_MARK" | "FRAME":
                pass
            case _:
                self.step_of_object(name, argument, items)

    def step_of_object(self, name: str, argument: Any, items: list[Any]) -> None:
        push = self.stack.append
        match name:
            case "GLOBAL" | "STACK_GLOBAL":
                push(self.name(*(items or argument.split(" ", 1))))
            case "REDUCE" | "NEWOBJ" | "NEWOBJ_EX":
                self.call(*items)
            case "BUILD":
                items[0].state = items[1]  # only a _Made has `state`
                push(items[0])
            case "INST":
                self.call(self.name(*argument.split(" ", 1)), tuple(items))
            case "OBJ":
                self.call(items[0], tuple(items[1:]))
            case "EMPTY_SET" | "FROZENSET":
                push(_Made(_SETS[name], (), items=items or ()))
            case "EXT1" | "EXT2" | "EXT4":
                push(self.name("copyreg", f"extension {argument}"))
            case "BINPERSID" | "PERSID" | "NEXT_BUFFER" | "READONLY_BUFFER":
                push(self.persistent(items[0] if items else None))  # None is refused
            case _:  # a number, a string, bytes or None
                push(argument)

    def take(self, count: int | None) -> list[Any]:
        """Pop the last `count` items, or with None all behind the last mark."""
        start = self.marks.pop() if count is None else len(self.stack) - count
        if start < 0:
            raise IndexError("the stack has fewer items")
        items, self.stack[start:] = self.stack[start:], []
        return items

    def name(self, module: Any, name: Any) -> _Name:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleRefused("the name of what it would import is no string")
        path = f"{module}.{name}"[:200]
        path = path if path.isprintable() else ascii(path)[1:-1]  # a terminal may show it
        self.names[path] = None
        return _Name(path)

    def call(self, maker: Any, args: Any, kwargs: Any = None) -> None:
        if maker in _RECONSTRUCTORS:
            maker, args = args[0], ()  # args are class, base and state of the base
        made = _Made(maker, args, kwargs)
        self.stack.append(self.storage_in(*args) if maker == _LOADER else made)

    def storage_in(self, raw: Any) -> _Storage:
        """The storage in bytes that pickle.dump wrote: the torch.save format before PyTorch 1.6."""
        if id(raw) not in self.loaded:
            key = f"in bytes {len(self.loaded)}"
            try:
                if self.outer:  # each level is copied: a file of a few MB could take TB
                    raise PickleRefused("bytes in bytes")
                data = io.BytesIO(_raw(raw.args[0] if isinstance(raw, _Made) else raw))
                parsed = _parse_stream(data, self)
                inner = parsed.root
                self.held[key] = parsed.held[parsed.root.key]
            except (PickleRefused, AttributeError) as error:
                raise PickleRefused(f"{_LOADER.path} of no storage: {error}") from error
            self.loaded[id(raw)] = raw, _Storage(inner.dtype, key, inner.size)
        return self.loaded[id(raw)][1]

    def put_items(self, items: list[Any], target: Any) -> Any:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(target, dict):
                target[self.checked_key(key)] = value
            else:
                target.pairs = target.pairs or []  # only a _Made has `pairs`
                target.pairs.append((key, value))
        return target

    def persistent(self, pid: Any) -> Any:
        kind = pid[0] if isinstance(pid, tuple) and pid else None
        if kind == "module":  # a class with its source, which torch compared to warn of changes
            return pid[1]
        if kind != "storage" or len(pid) not in (5, 6):
            raise NotSupported("it refers to an object outside the file that is no storage")
        _, storage_class, key, _device, size, *view = pid
        match = _STORAGE.fullmatch(getattr(storage_class, "path", ""))
        dtype = _STORAGE_DTYPES.get(match[1]) if match and view in ([], [None]) else None
        if dtype is None or not isinstance(key, str) or not _is_size(size):
            raise NotSupported(f"it refers to a storage of {_class_of(storage_class)}")
        storage = self.storages.setdefault(key, _Storage(dtype, key, size))
        if storage != _Storage(dtype, key, size):
            raise PickleRefused(f"storage {key!r} has two sizes or types")
        return storage


def _python2_string(file: Any) -> str:  # the reader of pickletools takes only ASCII
    raw = cast(bytes, pickletools.read_stringnl(file, decode=False))
    return codecs.escape_decode(raw)[0].decode("latin-1")


_OPCODES: dict[bytes, tuple[str, Any]] = {
    o.code.encode("latin-1"): (o.name, o.arg and o.arg.reader) for o in pickletools.opcodes
} | {b"S": ("STRING", _python2_string)}
# Opcodes that pop equally many items share a line.
_TAKES = {  # how many items an opcode pops; None: all behind the last mark
    **dict.fromkeys(("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), 0),
    **dict.fromkeys(("TUPLE1", "APPEND", "BINPERSID"), 1), "TUPLE3": 3, "NEWOBJ_EX": 3,
    **dict.fromkeys(("TUPLE2", "SETITEM", "BUILD", "STACK_GLOBAL", "REDUCE", "NEWOBJ"), 2),
    **dict.fromkeys(("TUPLE", "LIST", "DICT", "FROZENSET", "APPENDS", "ADDITEMS", "SETITEMS"), None),
    **dict.fromkeys(("POP_MARK", "INST", "OBJ"), None),
}  # fmt: skip
_SETS = {"EMPTY_SET": _Name("builtins.set"), "FROZENSET": _Name("builtins.frozenset")}
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ")  # call the first item that they pop
_LOADER = _Name("torch.storage._load_from_bytes")  # it would call torch.load; here it is followed
_RECONSTRUCTORS = (_Name("copy_reg._reconstructor"), _Name("copyreg._reconstructor"))


class _KeyCheck:
    """Allows keys that are cheap to hash: numbers, strings, and some short tuples of them.

    Nested tuples could make hash() overflow the C stack, and huge numbers can be made to collide.
    """

    num_tuples = 0

    def __call__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        self.num_tuples += parts is key
        if len(parts) > _MAX_KEY_PARTS or self.num_tuples > _MAX_TUPLE_KEYS:
            raise NotSupported(f"a tuple of {len(parts)}, or over {_MAX_TUPLE_KEYS}, as keys")
        for part in parts:
            huge = isinstance(part, int) and part.bit_length() > 64
            if huge or not isinstance(part, str | bytes | int | float | None | _Name | _Made):
                raise NotSupported(f"a dict or set has a key of type {type(part).__name__}")
        return key


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 62


def _class_of(value: Any) -> str:
    for _ in range(_MAX_DEPTH):
        if not isinstance(value, _Made):
            break
        value = value.maker
    return value.path if isinstance(value, _Name) else type(value).__name__


@dataclass
class _Parsed:
    container: str
    root: Any
    names: Mapping[str, None]
    held: Mapping[str, memoryview]  # the bytes of the storages, by key
    protocol: int

    def refused(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if not _known(name))

    def refuse_names(self, remedy: str = "") -> None:
        if refused := self.refused():
            names = f"{', '.join(refused[:3])}{' ...' * (len(refused) > 3)}; nothing was run"
            raise PickleRefused(f"it names {names}\n{remedy}".strip())


@contextmanager
def _parsed(path: Path, checked: bool = False) -> Iterator[_Parsed]:
    """The parsed file, mapped copy-on-write; tensors in it keep the mapping alive."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            raise PickleRefused(f"{path}: the file is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        is_zip = data[:4] == b"PK\x03\x04"
        yield _parse_zip(data, checked) if is_zip else _parse_stream(data)
    except PickleRefused as error:
        raise type(error)(f"{path}: {error}") from error


def _parse_zip(data: mmap.mmap, checked: bool) -> _Parsed:
    try:
        records = zipfile.ZipFile(cast(IO[bytes], data)).infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, struct.error) as error:
        raise PickleRefused(f"a damaged or truncated zip file ({error})") from error
    contents: dict[str, memoryview] = {}
    end = 0
    for record in sorted(records, key=lambda record: record.header_offset):
        if record.header_offset < end:  # a few MB shared by many names could become TB in memory
            raise PickleRefused(f"record {record.filename!r} lies over another one")
        end = record.header_offset + record.compress_size
        if record.filename in contents:
            raise PickleRefused(f"two records {record.filename!r}: a reader may take either")
        if "/code/" not in record.filename:  # TorchScript code is never read
            contents[record.filename] = _record_bytes(memoryview(data), record)
    # torch.serialization.set_crc32_options(False) writes zeros.
    sums = {record.filename: record.CRC for record in records if checked}
    for name, content in contents.items() if any(sums.values()) else ():
        if zlib.crc32(content) != sums[name]:
            raise PickleRefused(f"record {name!r} is not what was saved: its CRC-32 differs")
    prefix = records[0].filename.partition("/")[0] if records else ""
    if f"{prefix}/data.pkl" not in contents:
        raise NotSupported("a zip file without data.pkl: torch.save did not write it")
    if contents.get(f"{prefix}/byteorder", sys.byteorder.encode()) != sys.byteorder.encode():
        raise NotSupported(f"written on a machine whose byte order is not {sys.byteorder}")
    machine = _Machine(io.BytesIO(contents[f"{prefix}/data.pkl"]))
    root = machine.run()
    held = {k: contents.get(f"{prefix}/data/{k}", memoryview(b"")) for k in machine.storages}
    kind = "TorchScript" if f"{prefix}/constants.pkl" in contents else "zip"
    return _Parsed(kind, root, machine.names, held | machine.held, machine.protocol)


def _record_bytes(data: memoryview, record: zipfile.ZipInfo) -> memoryview:
    if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
        raise NotSupported(f"record {record.filename!r} is compressed, as torch.save never does")
    header = bytes(data[record.header_offset : record.header_offset + 30])
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    low = record.header_offset + 30 + lengths
    if header[:4] != b"PK\x03\x04" or low + record.file_size > len(data):
        raise PickleRefused(f"record {record.filename!r} is not where the file says")
    return data[low : low + record.file_size]


def _parse_stream(data: Any, outer: _Machine | None = None) -> _Parsed:
    machine = _Machine(data, outer)
    root = machine.run()
    if root != _MAGIC or type(root) is not int:
        if machine.storages:
            raise NotSupported("it refers to storages, but torch.save did not write it")
        return _Parsed("pickle", root, machine.names, machine.held, machine.protocol)
    if machine.run() != 1001:
        raise NotSupported("an unknown version of the format before PyTorch 1.6")
    system = machine.run()
    if not isinstance(system, dict) or system.get("little_endian") != (sys.byteorder == "little"):
        raise NotSupported(f"written on a machine whose byte order is not {sys.byteorder}")
    root, keys = machine.run(), machine.run()
    whole = data.getbuffer() if isinstance(data, io.BytesIO) else memoryview(data)
    for key in keys if isinstance(keys, list) else ():
        if not isinstance(key, str) or key not in machine.storages or key in machine.held:
            raise PickleRefused("the list of storages does not fit the pickle")
        size = int.from_bytes(data.read(8), "little") * machine.storages[key].dtype.itemsize
        low = data.tell()
        if low + size > len(whole):
            raise PickleRefused(f"truncated: storage {key!r} ends at {low + size} of {len(whole)}")
        machine.held[key] = whole[low : low + size]
        data.seek(low + size)
    if machine.storages.keys() - machine.held.keys():
        raise PickleRefused("truncated: the data of storages are missing at the end")
    return _Parsed("torch before 1.6", root, machine.names, machine.held, machine.protocol)


class _Builder:
    """Builds values from what the machine recorded, by `_MAKERS`."""

    def __init__(self, parsed: _Parsed, *, drop: bool, mapped: bool | None = False) -> None:
        self.parsed, self.drop, self.mapped = parsed, drop, mapped  # mapped=None: tensors on 'meta'
        self.done: dict[int, Any] = {}
        self.not_read: dict[str, None] = {}
        self.storages: dict[str, Tensor] = {}  # as uint8, whatever dtype they are read as
        self.keys: dict[int, int] = {}  # objects used as keys get a number, by id
        self.checked_key = _KeyCheck()
        self.depth = 0

    def build(self, value: Any) -> Any:
        if isinstance(value, _Name):
            return _DTYPES.get(value.path, Foreign(value.path))
        if isinstance(value, _Storage):  # a storage outside any tensor
            if "q" in str(value.dtype):
                return self.left_out("a quantized storage")
            return self.storage(value, value.dtype)
        if not isinstance(value, list | tuple | dict | _Made):
            return value
        if id(value) not in self.done:
            if self.depth == _MAX_DEPTH:
                raise PickleRefused(f"it is nested more than {_MAX_DEPTH} levels deep")
            self.depth += 1
            self.done[id(value)] = self._container(value)
            self.depth -= 1
        return self.done[id(value)]

    def _container(self, value: Any) -> Any:
        if isinstance(value, _Made):
            return self._made(value)
        if isinstance(value, tuple):
            return tuple(self.build(item) for item in value)
        if isinstance(value, list):
            self.done[id(value)] = items = list[Any]()  # first, as a list may hold itself
            items += [self.build(item) for item in value]
            return items
        self.done[id(value)] = mapping = dict[Any, Any]()
        mapping.update(self.pairs(value.items()))
        return mapping

    def pairs(self, pairs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        return ((self.key(key), self.build(value)) for key, value in pairs)

    def key(self, key: Any) -> Any:
        built = self.build(key)
        if isinstance(built, Tensor):  # the state of an optimizer object has tensors as keys
            built = self.left_out("a tensor as a key")
        if isinstance(built, Foreign):  # a dict may have several of one class
            built = f"{built.name} {self.keys.setdefault(id(key), len(self.keys))}"
        return self.checked_key(built)

    def _made(self, made: _Made) -> Any:
        name = _class_of(made)
        maker = _MAKERS.get(_OLD_NAMES.get(name, name)) if isinstance(made.maker, _Name) else None
        if maker is None:
            return self._foreign(made, name)
        try:
            if made.kwargs or not isinstance(made.args, tuple):
                raise TypeError("keyword arguments, or no tuple of them")
            return maker(self, made)
        except PickleRefused:
            raise
        except _MISUSE as error:
            raise PickleRefused(f"{name} with arguments that it does not take") from error

    def _foreign(self, made: _Made, name: str) -> Any:
        if not self.drop:
            raise PickleRefused(f"it would call {name}; nothing was run")
        if made.pairs or made.items:  # a subclass of dict or list: its items are what counts
            return dict(self.pairs(made.pairs)) or [self.build(item) for item in made.items]
        self.done[id(made)] = foreign = Foreign(name, {})
        for part in made.state if isinstance(made.state, tuple) else (made.state,):
            if isinstance(part, dict):  # attributes, or (attributes, slots)
                foreign.state.update(self.pairs(part.items()))
        return foreign

    def left_out(self, what: str) -> Foreign:
        """A `Foreign` in place of data that are not read."""
        if not self.drop:
            raise NotSupported(f"it holds {what}, not read here")
        self.not_read[what] = None
        return Foreign(what)

    def storage(self, storage: _Storage, dtype: torch.dtype) -> Tensor:
        key = storage.key
        held = self.parsed.held[storage.key]
        size_bytes = storage.size * storage.dtype.itemsize
        if size_bytes > len(held):
            raise PickleRefused(f"storage {key!r} has {len(held)} of its {size_bytes} bytes")
        if key not in self.storages:
            device = "meta" if self.mapped is None else "cpu"
            whole = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            if size_bytes and device == "cpu":
                whole = torch.frombuffer(held, dtype=torch.uint8, count=size_bytes)
            stays_mapped = self.mapped and whole.data_ptr() % 8 == 0
            self.storages[key] = whole if stays_mapped else whole.clone()
        return self.storages[key][: size_bytes // dtype.itemsize * dtype.itemsize].view(dtype)


def _tensor(builder: _Builder, made: _Made) -> Any:
    storage, offset, shape, strides, *rest = made.args
    v3 = made.maker.path.endswith("_v3")  # requires_grad, hooks, dtype from v3 on, metadata
    if made.state is not None or any(rest[3:] if v3 else rest[2:]) or "q" in str(storage.dtype):
        return builder.left_out("a tensor that is conjugated, negated, quantized or has attributes")
    dtype = _DTYPES[rest[2].path] if v3 else storage.dtype
    values = builder.storage(storage, dtype)
    shape, strides = builder.build(shape), builder.build(strides)
    if len(shape) > 64 or not all(map(_is_size, (offset, *shape, *strides))):
        raise PickleRefused("a tensor has sizes or strides that no tensor has")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if (0 not in shape and last >= len(values)) or math.prod(shape) >= 1 << 60:
        raise PickleRefused(f"a tensor {shape} reaches beyond its storage of {len(values)}")
    return values.as_strided(shape, strides, 0 if 0 in shape else offset)


def _data(builder: _Builder, made: _Made) -> Any:
    return builder.build(made.args[0])  # Parameter(data, requires_grad ...)


def _typed(builder: _Builder, made: _Made) -> Any:
    function, _type, args, _state = made.args  # a tensor with attributes, which are dropped
    maker = _MAKERS[function.path]
    if maker not in (_tensor, _data):
        return builder.left_out(f"a tensor made by {function.path}")
    return maker(builder, _Made(function, args))


def _mapping(builder: _Builder, made: _Made) -> Any:
    mapping: OrderedDict[Any, Any] = OrderedDict()
    builder.done[id(made)] = mapping
    initial = made.args[-1] if made.args else ()  # items, or the factory of a defaultdict
    if not isinstance(initial, _Name | None):
        mapping.update(builder.pairs(initial.items() if isinstance(initial, dict) else initial))
    mapping.update(builder.pairs(made.pairs))
    state = made.state or {}
    if state.keys() - {"_metadata"}:  # an attribute of every state_dict
        raise PickleRefused(f"it would set attributes of {made.maker.path}")
    vars(mapping).update(builder.build(state))
    return mapping


def _set(builder: _Builder, made: _Made) -> Any:
    items = map(builder.key, [*(made.args[0] if made.args else ()), *made.items])
    return frozenset(items) if made.maker.path.endswith("frozenset") else set(items)


def _raw(data: Any = b"") -> bytes:
    # Strings of Python 2 hold bytes, and Python 3 writes bytes as such strings for old protocols.
    return data.encode("latin-1") if isinstance(data, str) else bytes(memoryview(data))


def _numpy_dtype(builder: _Builder, made: _Made) -> Any:
    import numpy as np

    _, order, *fields = made.state or (3, "|", None, None, None)
    if not _NUMPY_DTYPE.fullmatch(order + made.args[0]) or fields[:3] != [None] * 3:
        return builder.left_out(f"the NumPy dtype {made.args[0][:20]!r}")
    return np.dtype(order + made.args[0])


def _numpy_array(builder: _Builder, made: _Made) -> Any:
    if made.args[0] != _Name("numpy.ndarray"):
        raise PickleRefused(f"it would make a {_class_of(made.args[0])}")
    dtype = builder.build(made.state[2])
    if isinstance(dtype, Foreign):  # objects, records or dates
        return dtype
    _, shape, _, fortran, raw = map(builder.build, made.state)
    return _array(raw, dtype, shape, "F" if fortran else "C")


def _scalar(builder: _Builder, made: _Made) -> Any:
    dtype, raw = map(builder.build, made.args)
    return dtype if isinstance(dtype, Foreign) else _array(raw, dtype).item()


def _array(raw: Any, dtype: Any, shape: tuple[int, ...] = (), order: Any = "C") -> Any:
    import numpy as np

    raw = _raw(raw)
    if not all(map(_is_size, shape)) or math.prod(shape) * dtype.itemsize != len(raw):
        raise PickleRefused(f"a NumPy array {shape} of {len(raw)} bytes")
    return np.frombuffer(bytearray(raw), dtype).reshape(shape, order=order)


_MISUSE = (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError, AttributeError)
_MAKERS: dict[str, Callable[[_Builder, _Made], Any]] = {
    **dict.fromkeys((f"torch._utils._rebuild_tensor{v}" for v in ("", "_v2", "_v3")), _tensor),
    "torch._utils._rebuild_parameter": _data,
    "torch.nn.parameter.Parameter": _data,
    "torch._utils._rebuild_parameter_with_state": _data,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": lambda b, made: torch.Size(b.build(made.args[0])),
    "torch.device": lambda b, made: torch.device(*made.args),
    "collections.OrderedDict": _mapping,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    **dict.fromkeys(
        ("collections.defaultdict", "collections.Counter"), lambda b, m: dict(_mapping(b, m))
    ),
    "builtins.complex": lambda b, made: complex(*map(float, made.args)),
    "builtins.bytearray": lambda b, made: bytearray(_raw(*map(b.build, made.args))),
    "builtins.bytes": lambda b, made: _raw(*made.args),
    "_codecs.encode": lambda b, made: _raw(made.args[0]),
    **dict.fromkeys(
        ("argparse.Namespace", "types.SimpleNamespace"),
        lambda b, made: dict(b.pairs((made.state or {}).items())),
    ),
    "pathlib.PosixPath": lambda b, made: str(PurePosixPath(*made.args)),
    "numpy.dtype": _numpy_dtype,
    "numpy._core.multiarray._reconstruct": _numpy_array,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": lambda b, made: _array(*map(b.build, made.args)),
    "torch._utils._rebuild_sparse_tensor": lambda b, made: b.left_out("a sparse tensor"),
    "torch._utils._rebuild_qtensor": lambda b, made: b.left_out("a quantized tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": lambda b, made: b.left_out("a tensor on meta"),
}
_OLD_NAMES = {n.replace("._core.", ".core.").replace("builtins", "__builtin__"): n for n in _MAKERS}
_ARGUMENTS = {  # allowed only as arguments of the makers above
    "numpy.ndarray",
    "torch.Tensor",
    "copy_reg._reconstructor",
    "copyreg._reconstructor",
    "torch.serialization._get_layout",
    "torch.per_tensor_affine",
    "torch.per_channel_affine",
    _LOADER.path,
    # Python 3 writes the int or str of a defaultdict under its Python 2 name.
    *(
        f"{b}.{t}"
        for b in ("__builtin__", "builtins")
        for t in (
            "object",
            "list",
            "dict",
            "int",
            "long",
            "float",
            "str",
            "unicode",
            "bool",
            "tuple",
        )
    ),
}
_TORCH = {  # the names outside torch that torch.load(weights_only=True) accepts too
    "builtins.set",
    "builtins.bytearray",
    "builtins.complex",
    "_codecs.encode",
    "collections.OrderedDict",
    "collections.Counter",
}


def _known(name: str) -> bool:
    known = _OLD_NAMES.get(name, name) in _MAKERS or name in _ARGUMENTS or name in _DTYPES
    return known or bool(_STORAGE.fullmatch(name))
