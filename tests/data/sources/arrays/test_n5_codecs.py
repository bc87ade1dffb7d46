"""Compressed blocks against the packages that write them; damage ends in one exception."""

import bz2
import contextlib
import gzip
import json
import lzma
import random
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from flambeau.data.sources.arrays.array_source import open_arrays
from flambeau.data.sources.arrays.n5_codecs import unpack, why_unreadable
from flambeau.errors import InputError

DATA = np.arange(3000, dtype=">u2").tobytes() + random.Random(0).randbytes(2000)
LABELS = np.arange(24) % 5
IMAGES = np.random.default_rng(0).integers(0, 40, (24, 6, 8, 3), np.uint16)


def lz4_block(data, part=4096):
    """As lz4-java's LZ4BlockOutputStream writes it; parts that do not shrink are stored."""
    codec = pytest.importorskip("numcodecs").lz4
    parts = []
    for at in range(0, len(data), part):
        plain = data[at : at + part]
        packed = codec.compress(plain)[4:]
        kind, packed = (0x20, packed) if len(packed) < len(plain) else (0x10, plain)
        parts.append(struct.pack("<8sBIII", b"LZ4Block", kind | 6, len(packed), len(plain), 7))
        parts.append(packed)
    return b"".join((*parts, struct.pack("<8sBIII", b"LZ4Block", 0x16, 0, 0, 0)))


def zstd(data):
    return pytest.importorskip("zstandard").compress(data)


def zstd_of_unknown_size(data):
    compressor = pytest.importorskip("zstandard").ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


def blosc(name):
    def packed(data):
        codec = pytest.importorskip("numcodecs").blosc
        return codec.compress(data, name.encode(), 5, codec.SHUFFLE)

    return packed


PACKED = {
    "gzip": ("gzip", gzip.compress),
    "zlib": ("gzip", zlib.compress),
    "bzip2": ("bzip2", bz2.compress),
    "xz": ("xz", lzma.compress),
    "zstd": ("zstd", zstd),
    "zstd, a stream": ("zstd", zstd_of_unknown_size),
    "blosc, lz4": ("blosc", blosc("lz4")),
    "blosc, blosclz": ("blosc", blosc("blosclz")),
    "blosc, zlib": ("blosc", blosc("zlib")),
    "blosc, zstd": ("blosc", blosc("zstd")),
    "lz4": ("lz4", lz4_block),
}
each = pytest.mark.parametrize(("name", "pack"), PACKED.values(), ids=PACKED)


@each
def test_what_was_packed_comes_back(name, pack):
    assert unpack(pack(DATA), len(DATA), name) == DATA
    assert why_unreadable(name) is None
    assert unpack(pack(bytes(1 << 16)), 1 << 16, name) == bytes(1 << 16)


BOMB = """
import re, sys
from pathlib import Path
from flambeau.data.sources.arrays.n5_codecs import unpack, why_unreadable

def peak_kib():
    return int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

data, name = sys.stdin.buffer.read(), sys.argv[1]
why_unreadable(name)  # imports what is needed
before = peak_kib()
try:
    unpack(data, 100, name)
except OSError as error:
    print(error)
print(peak_kib() - before)
"""


@each
def test_another_size_is_damage_and_a_bomb_is_not_unpacked(name, pack):
    for size in (0, 100, len(DATA) - 1, len(DATA) + 1):
        with pytest.raises(OSError, match=r"."):
            unpack(pack(DATA), size, name)
    if name in ("zstd", "blosc", "lz4"):  # those of the standard library are bounded by max_length
        done = subprocess.run(
            [sys.executable, "-c", BOMB, name],
            input=pack(bytes(1 << 26)),
            capture_output=True,
            check=True,
        )
        *message, kib = done.stdout.decode().splitlines()
        assert message and int(kib) < 20_000, message


@each
def test_damage_is_an_oserror(name, pack):
    whole, numbers = pack(DATA), random.Random(1)
    for length in (0, 1, 7, 15, 16, 20, 21, 30, len(whole) // 2, len(whole) - 30):
        with pytest.raises(OSError, match=r"."):
            unpack(whole[:length], len(DATA), name)
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(numbers.randint(1, 4)):
            place = numbers.randrange(len(broken) if numbers.random() < 0.5 else 40)
            broken[place] = numbers.randrange(256)
        with contextlib.suppress(OSError):  # without a checksum some of it cannot be seen
            assert len(unpack(bytes(broken), len(DATA), name)) == len(DATA)


def test_lz4_by_its_specification():
    """A part of literals alone: a token with their number in its upper half, then they."""
    pytest.importorskip("numcodecs")
    part = bytes.fromhex("b0") + b"hello world"
    data = struct.pack("<8sBIII", b"LZ4Block", 0x26, len(part), 11, 0) + part
    end = struct.pack("<8sBIII", b"LZ4Block", 0x16, 0, 0, 0)
    assert unpack(data + end, 11, "lz4") == b"hello world"
    with pytest.raises(OSError, match="unknown kind 54"):
        unpack(data.replace(b"\x26", b"\x36") + end, 11, "lz4")
    with pytest.raises(OSError, match="begins at byte 33"):
        unpack(data + end.replace(b"4B", b"4b"), 11, "lz4")


# TensorStore ends each process that is forked after it was used: it writes in a process of its own.
TENSORSTORE = """
import json, sys
import numpy as np, tensorstore
for path, metadata, data in json.load(sys.stdin):
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": path}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(np.load(data).T).result()
"""
COMPRESSIONS = [
    {"type": "zstd", "level": 3},
    *(
        {"type": "blosc", "cname": name, "clevel": 5, "shuffle": shuffle}
        for name in ("lz4", "lz4hc", "blosclz", "zlib", "zstd")
        for shuffle in (0, 1, 2)
    ),
]


def written_by_tensorstore(folder, compressions):
    jobs = []
    for name, array in (("images", IMAGES), ("labels", LABELS)):
        np.save(folder / f"{name}.npy", array)
    for number, compression in enumerate(compressions):
        for name, array, block in (("images", IMAGES, (5, 4, 3, 3)), ("labels", LABELS, (7,))):
            facts = {
                "dimensions": array.shape[::-1], "blockSize": block[::-1],
                "dataType": str(array.dtype), "compression": compression,
            }  # fmt: skip
            jobs.append((f"{folder}/{number}.n5/{name}", facts, f"{folder}/{name}.npy"))
    subprocess.run(
        [sys.executable, "-c", TENSORSTORE], input=json.dumps(jobs), text=True, check=True
    )
    return [folder / f"{number}.n5" for number in range(len(compressions))]


def test_n5_as_tensorstore_compresses_it(tmp_path):
    for module in ("tensorstore", "zstandard", "numcodecs"):
        pytest.importorskip(module)
    for root in written_by_tensorstore(tmp_path, COMPRESSIONS):
        source, _ = open_arrays(root, "n5")
        assert source.labels.tolist() == LABELS.tolist()
        for index, image in enumerate(IMAGES):
            np.testing.assert_array_equal(source.read(index), image)


def test_a_damaged_block_is_named_and_a_missing_package_too(tmp_path, monkeypatch):
    for module in ("tensorstore", "numcodecs"):
        pytest.importorskip(module)
    (root,) = written_by_tensorstore(tmp_path, COMPRESSIONS[1:2])
    source, _ = open_arrays(root, "n5")
    block = root / "images/0/0/0/2"
    block.write_bytes(block.read_bytes()[:-5])
    with pytest.raises(OSError, match="0/0/0/2: damaged blosc data: its header says"):
        source.read(11)
    np.testing.assert_array_equal(source.read(4), IMAGES[4])
    monkeypatch.setitem(sys.modules, "numcodecs", None)
    with pytest.raises(InputError) as caught:
        open_arrays(root, "n5")
    assert "the package numcodecs\nInstall it: pip install 'flambeau[formats]'" in str(caught.value)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "the package zstandard" in str(why_unreadable("zstd"))
    assert "compressed by 'snappy'; what can be read is raw, gzip," in str(why_unreadable("snappy"))
