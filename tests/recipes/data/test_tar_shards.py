"""Tar shards against webdataset, the standard library and GNU tar; damage of every kind; every refusal."""

import io
import itertools
import multiprocessing
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from flambeau.recipes.data.tar_shards import (
    ShardError,
    ShardWriter,
    TarIndex,
    TarReader,
    TarWriter,
    index_tar,
)

# Python 3.12 warns where a process with threads, such as torch's own, forks.
not_our_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

SAMPLES = {
    "cat/0001": {"jpg": b"one" * 400, "cls": b"0"},
    "cat/0002": {"jpg": b"", "cls": b"0", "seg.png": b"x" * 512},
    "dog.d/0003": {"png": bytes(range(256)) * 5},
    "0004": {"json": b'{"label": 1}'},
}


def put(path, samples=SAMPLES):
    with TarWriter(path) as writer:
        for key, sample in samples.items():
            writer.write(key, sample)
    return path


def put_files(path, files, tar_format=tarfile.PAX_FORMAT):
    """Files as the standard library packs them, which knows nothing of samples."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def read_all(reader):
    return {key: reader[i] for i, key in enumerate(reader.keys)}


def random_samples(count, seed):
    source = random.Random(seed)
    extensions = ["jpg", "cls", "json", "seg.png", "txt"]
    return {
        f"{source.choice(['', 'a/', 'b.c/d/'])}{i:05}": {
            name: source.randbytes(source.choice([0, 1, 511, 512, 513, 3000]))
            for name in source.sample(extensions, source.randint(1, 4))
        }
        for i in range(count)
    }


# ---- the same as others ---------------------------------------------------------------------------


def read_with_webdataset(path):
    """By its parts: its whole reader leaves the file open, which warns."""
    webdataset = pytest.importorskip("webdataset.tariterators")
    with path.open("rb") as file:
        files = webdataset.tar_file_expander([{"url": "a.tar", "stream": file}])
        samples = list(webdataset.group_by_keys(files))
    return {
        sample["__key__"]: {k: v for k, v in sample.items() if k not in ("__key__", "__url__")}
        for sample in samples
    }


def test_webdataset_reads_what_we_write(tmp_path):
    samples = random_samples(200, seed=0)
    found = read_with_webdataset(put(tmp_path / "a.tar", samples))
    assert found == samples
    assert list(found) == list(samples)


def test_we_read_what_webdataset_writes(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    samples = random_samples(200, seed=1)
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        for key, sample in samples.items():
            writer.write({"__key__": key, **sample})
    reader = TarReader(tmp_path / "a.tar")
    assert read_all(reader) == samples
    assert list(reader.keys) == list(samples)
    # Its writer sorts the extensions.
    assert [reader.extensions(i) for i in range(200)] == [
        tuple(sorted(s)) for s in samples.values()
    ]


def test_groups_as_webdataset_does(tmp_path):
    names = [
        "a.jpg",
        "a.CLS",
        "b/a.jpg",
        "b/a.left.JPG",
        "b/a.right.jpg",
        "x.y/c.jpg",
        "x.y/c.Json",
    ]
    names += [
        "README",
        "x.y/LICENSE",
        "__index__.json",
        "__meta__/d.jpg",
        "e__.jpg",
        "./f.jpg",
        "f.jpg",
    ]
    path = put_files(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    found = read_all(TarReader(path))
    assert found == read_with_webdataset(path)
    assert list(found) == ["a", "b/a", "x.y/c", "__index__", "e__", "./f", "f"]
    assert found["b/a"] == {
        "jpg": b"b/a.jpg", "left.jpg": b"b/a.left.JPG", "right.jpg": b"b/a.right.jpg"
    }  # fmt: skip


def test_hidden_files_are_no_samples(tmp_path):
    """webdataset makes samples of these, with keys that end in a slash."""
    names = ["cat/.DS_Store", "cat/._1.jpg", "cat/1.jpg", ".hidden.jpg", ".jpg", "end."]
    path = put_files(tmp_path / "a.tar", [(name, b"x") for name in names])
    assert TarReader(path).keys == ("cat/1",)


LONG = [f"{'d' * 90}/{'n' * 90}.jpg", "é/图.jpg", f"{'路' * 60}/{'n' * 200}.cls"]


@pytest.mark.parametrize(
    "tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_reads_what_the_standard_library_writes(tmp_path, tar_format):
    source = random.Random(2)
    names = [f"{source.choice('ab')}/{i}.jpg" for i in range(60)]
    names += LONG[:1] if tar_format == tarfile.USTAR_FORMAT else LONG
    files = [(name, source.randbytes(source.randrange(2000))) for name in names]
    path = put_files(tmp_path / "a.tar", files, tar_format)
    reader = TarReader(path)
    assert reader.keys == tuple(name.rpartition(".")[0] for name in names)
    with tarfile.open(path) as tar:
        for i, (name, data) in enumerate(files):
            assert tar.extractfile(name).read() == data
            assert reader[i] == {name[-3:]: data}


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program")
@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "pax", "ustar"])
def test_reads_what_the_tar_program_writes(tmp_path, tar_format):
    expected = {}
    for i in range(20):
        key = f"photos/{'cat' if i % 2 else 'dog'}/{'n' * (60 if i % 3 else 10)}{i:02}"
        expected[f"./{key}"] = {"jpg": f"{i}".encode() * 300, "cls": b"1"}
        for extension, data in expected[f"./{key}"].items():
            path = tmp_path / "in" / f"{key}.{extension}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    command = ["tar", f"--format={tar_format}", "--sort=name", "-cf", tmp_path / "a.tar", "."]
    subprocess.run(command, cwd=tmp_path / "in", check=True)
    reader = TarReader(tmp_path / "a.tar")
    assert read_all(reader) == expected
    assert list(reader.keys) == sorted(expected)


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program")
def test_the_tar_program_unpacks_what_we_write(tmp_path):
    samples = SAMPLES | {name.partition(".")[0]: {name[-3:]: b"long"} for name in LONG}
    put(tmp_path / "a.tar", samples)
    (tmp_path / "out").mkdir()
    said = subprocess.run(
        ["tar", "-xf", tmp_path / "a.tar"], cwd=tmp_path / "out", check=True, capture_output=True
    )
    assert said.stderr == b""
    for key, sample in samples.items():
        for extension, data in sample.items():
            assert (tmp_path / "out" / f"{key}.{extension}").read_bytes() == data
    assert read_all(TarReader(tmp_path / "a.tar")) == samples


def naive_block(name, data):
    """A ustar header by the table in POSIX, and the data; device numbers, which are free here, empty."""
    header = struct.pack(
        "100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x",
        name, b"0000644", b"0000000", b"0000000", b"%011o" % len(data), b"00000000000", b" " * 8,
        b"0", b"", b"ustar", b"00", b"", b"", b"", b"", b"",
    )  # fmt: skip
    header = header[:148] + b"%06o\0 " % sum(header) + header[156:]
    return header + data + bytes(-len(data) % 512)


def test_bytes_are_those_of_posix(tmp_path):
    """So they are the same at any time, for any user."""
    blocks = [
        naive_block(f"{key}.{extension}".encode(), data)
        for key, sample in SAMPLES.items()
        for extension, data in sample.items()
    ]
    expected = b"".join(blocks) + bytes(1024)
    expected += bytes(-len(expected) % 10240)
    assert put(tmp_path / "a.tar").read_bytes() == expected


# ---- reading --------------------------------------------------------------------------------------


def test_positions_and_extensions(tmp_path):
    reader = TarReader(str(put(tmp_path / "a.tar")))
    assert len(reader) == 4
    assert reader.keys == tuple(SAMPLES)
    assert reader[-1] == reader[torch.tensor(3)] == reader[np.int64(3)] == SAMPLES["0004"]
    assert reader.extensions(1) == ("jpg", "cls", "seg.png")
    assert reader.read(-3, "seg.png") == b"x" * 512
    assert list(reader) == list(SAMPLES.values())
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            reader[wrong]
        with pytest.raises(IndexError):
            reader.read(wrong, "jpg")
    with pytest.raises(KeyError, match=r"a\.tar: cat/0001 has jpg, cls, no png"):
        reader.read(0, "png")
    with pytest.raises(TypeError):
        reader["cat/0001"]


def test_an_index_spares_the_pass_and_may_be_a_part(tmp_path, monkeypatch):
    path = put(tmp_path / "a.tar")
    index = index_tar(path)
    assert index.names == [f"{key}.{name}" for key, sample in SAMPLES.items() for name in sample]
    monkeypatch.setattr(tarfile, "TarFile", None)
    assert read_all(TarReader(path, index)) == SAMPLES
    part = TarIndex(*(column[4:6] for column in index))
    assert read_all(TarReader(path, part)) == {
        "cat/0002": {"seg.png": b"x" * 512}, "dog.d/0003": SAMPLES["dog.d/0003"]
    }  # fmt: skip


def test_an_index_of_something_else(tmp_path):
    with pytest.raises(ShardError, match="byte 7: 'README' is of no sample; index it again"):
        TarReader(put(tmp_path / "a.tar"), TarIndex(["README"], [7], [1]))


@pytest.mark.timeout(60)
def test_a_hundred_thousand_files_of_one_sample(tmp_path):
    """As names with dots make them: photo.000001.jpg."""
    path = put(tmp_path / "a.tar")
    names = [f"photo.{i:06}.jpg" for i in range(100_000)]
    reader = TarReader(path, TarIndex(names, [512] * len(names), [3] * len(names)))
    assert reader.keys == ("photo",)
    assert reader.extensions(0)[-1] == "099999.jpg"
    assert reader.read(0, "099999.jpg") == b"one"


def test_no_samples(tmp_path):
    reader = TarReader(put(tmp_path / "a.tar", {}))
    assert (len(reader), reader.keys, list(reader)) == (0, (), [])


# ---- threads, processes, platforms ----------------------------------------------------------------


def check_in_threads(reader, samples):
    order = [i % len(samples) for i in range(0, 7 * 4 * len(samples), 7)]
    values = list(samples.values())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reader.__getitem__, order)) == [values[i] for i in order]


def test_threads(tmp_path):
    samples = random_samples(200, seed=3)
    check_in_threads(TarReader(put(tmp_path / "a.tar", samples)), samples)


def test_a_platform_without_positional_reads(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pread")
    samples = random_samples(100, seed=4)
    check_in_threads(TarReader(put(tmp_path / "a.tar", samples)), samples)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@not_our_threads
def test_fork(tmp_path):
    samples = random_samples(100, seed=5)
    reader = TarReader(put(tmp_path / "a.tar", samples))
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:  # the child reads through the same descriptor, at the same time
            right = False
            with suppress(Exception):
                right = all(read_all(reader) == samples for _ in range(20))
            os._exit(0 if right else 1)
        pids.append(pid)
    assert all(read_all(reader) == samples for _ in range(20))
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]


def test_pickle(tmp_path, monkeypatch):
    put(tmp_path / "a.tar")
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(TarReader("a.tar"))
    monkeypatch.chdir("/")
    assert read_all(pickle.loads(data)) == SAMPLES
    os.truncate(tmp_path / "a.tar", 1024)
    with pytest.raises(
        ShardError, match=r"a\.tar, byte 1024: the file ends here, it had 10240 bytes"
    ):
        pickle.loads(data)


@not_our_threads
def test_a_worker_process_of_a_data_loader(tmp_path):
    samples = random_samples(20, seed=6)
    reader = TarReader(put(tmp_path / "a.tar", samples))
    loader = torch.utils.data.DataLoader(
        reader,
        batch_size=None,
        num_workers=2,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )
    assert list(loader) == list(samples.values())


# ---- damage ---------------------------------------------------------------------------------------


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    reader = TarReader(put(tmp_path / "a.tar"))
    os.truncate(reader.path, 600)
    with pytest.raises(
        ShardError, match=r"a\.tar, byte 512: 88 of 1200 bytes are there; the file was lon"
    ):
        reader[0]


def test_cut_anywhere(tmp_path):
    data = put(tmp_path / "good.tar").read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512  # of the last file
    path = tmp_path / "cut.tar"
    for length in itertools.chain(range(0, end + 512, 64), range(1, end + 512, 509)):
        path.write_bytes(data[:length])
        with pytest.raises(
            ShardError, match=r"cut\.tar, byte \d+: .*copy or make (it|the tar) again"
        ):
            TarReader(path)
    path.write_bytes(data[: end + 512])  # one block of zeros: tar programs take it for the end too
    assert read_all(TarReader(path)) == SAMPLES


def test_bits_that_flip(tmp_path):
    data = put(tmp_path / "good.tar").read_bytes()
    good = index_tar(tmp_path / "good.tar")
    inside = {
        place
        for at, size in zip(*good[1:], strict=True)
        for place in range(at, at + size + -size % 512)
    }
    path = tmp_path / "bad.tar"
    source = random.Random(7)
    refused = 0
    for _ in range(500):
        place = source.randrange(len(data))
        flipped = bytearray(data)
        flipped[place] ^= 1 << source.randrange(8)
        path.write_bytes(flipped)
        try:
            found = index_tar(path)
        except ShardError as error:
            at = int(re.search(r"byte (\d+): ", str(error))[1])
            # The header or end that was hit, or the end mark before a last block that is no zero.
            assert at <= place
            refused += 1
        else:
            assert (
                found == good
            )  # in the data, where tar has no checksum, or in the blanks of a checksum
            assert place in inside or 148 <= place % 512 < 156
    assert refused > 150


def test_a_damaged_header_that_others_take_for_the_end(tmp_path):
    samples = {f"{i}": {"cls": b"1"} for i in range(10)}
    data = bytearray(put(tmp_path / "a.tar", samples).read_bytes())
    data[5 * 1024] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    assert len(read_with_webdataset(tmp_path / "a.tar")) == 5
    with pytest.raises(
        ShardError, match=r"a\.tar, byte 5120: a damaged header; copy or make the tar again"
    ):
        TarReader(tmp_path / "a.tar")


def test_bytes_at_random(tmp_path):
    """Whole blocks of headers, with checksums that fit, so that tarfile goes further into them."""
    source = random.Random(8)
    path = tmp_path / "bad.tar"
    data = put(tmp_path / "good.tar", SAMPLES | {"图" * 90: {"jpg": b"x"}}).read_bytes()
    for _ in range(250):
        bad = bytearray(data)
        for at in source.sample(range(0, len(data), 512), 3):
            block = bytearray(bad[at : at + 512])
            for _ in range(source.randint(1, 6)):
                start = source.choice([0, 100, 124, 135, 156, 157, 257, 345, 386, 400, 482])
                size = source.choice([1, 8, 12, 30])
                block[start : start + size] = source.choice(
                    [source.randbytes(size), b"L" * size, b"x" * size, b"S" * size, b"\xff" * size,
                     b"\x80" + b"\0" * (size - 1), b"7" * size]
                )[:size]  # fmt: skip
            block = block[:512]
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            bad[at : at + 512] = block
        path.write_bytes(bad)
        with suppress(ShardError):  # and nothing else, nor a hang
            list(TarReader(path))


def header(name=b"a.jpg", size=b"00000000000", kind=b"0"):
    block = bytearray(naive_block(name, b""))
    block[124 : 124 + len(size)] = size
    block[156:157] = kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


END = bytes(1024)
BAD = {
    "empty": (b"", 0, "damaged header"),
    "text": (b"path,label\na.jpg,3\n" * 60, 0, "damaged header"),
    "header cut": (header()[:300], 0, "damaged header"),
    "no end": (header(), 512, "the end mark is missing"),
    "half an end": (header() + bytes(100), 512, "the end mark is missing"),
    "second header": (header() + header()[1:] + END, 512, "damaged header"),
    "behind the end": (header() + END + header() + END, 512, "data follow; .*--concatenate"),
    "zeros inside": (header() + bytes(512) + header() + END, 512, "data follow"),
    "cut": (header(size=b"00000001000") + bytes(500), 0, r"'a\.jpg' goes on after the end"),
    "cut outside of samples": (
        header(b"README", b"00000001000") + bytes(500),
        0,
        "'README' goes on after",
    ),
    "size below zero": (header(size=b"\xff" * 11 + b"\xfe\x00") + END, 0, "damaged header"),
    "size minus one": (header(size=b"\xff" * 12) + END, 0, "damaged header"),
    "a circle": (
        header() + header(b"b.jpg", b"\xff" * 10 + b"\xfc\x00") + END,
        512,
        "damaged header",
    ),
    "long names without end": (header(kind=b"L") * 5000 + END, 0, "damaged header"),
    "huge": (header(size=b"\x80" + b"\x7f" * 11) + END, 0, "goes on after the end"),
    "link": (header(kind=b"2") + END, 0, r"'a\.jpg' is no file .*--dereference"),
    "hard link": (header(kind=b"1") + END, 0, "is no file but a link"),
    "pipe": (header(kind=b"6") + END, 0, "is no file but"),
    "gzip": (b"\x1f\x8b\x08\0" + bytes(600), 0, "packed by gzip.*; unpack it: gzip -dc "),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(600), 0, "packed by zstd.*; unpack it: zstd -dc "),
    "xz": (b"\xfd7zXZ\0" + bytes(600), 0, "packed by xz.*; unpack it: xz -dc "),
    "bzip2": (b"BZh9" + bytes(600), 0, "packed by bzip2.*; unpack it: bzip2 -dc "),
    "sample again": (
        header(b"a.jpg") + header(b"b.jpg") + header(b"a.cls") + END,
        1536,
        "'a.cls' is of sample 'a'",
    ),
    "file again": (header(b"a.jpg") + header(b"a.JPG") + END, 1024, r"'a\.JPG' is of sample 'a'"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(tmp_path, name):
    data, offset, reason = BAD[name]
    (tmp_path / "bad.tar").write_bytes(data)
    with pytest.raises(ShardError, match=rf"bad\.tar, byte {offset}: .*({reason})"):
        TarReader(tmp_path / "bad.tar")


def test_links_and_directories_that_are_no_samples_do_no_harm(tmp_path):
    data = header(b"v1.0/", kind=b"5") + header(b"latest", kind=b"2") + header(b"v1.0/a.jpg") + END
    (tmp_path / "a.tar").write_bytes(data)
    assert TarReader(tmp_path / "a.tar").keys == ("v1.0/a",)


def test_a_name_with_a_zero(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.jpg")
        info.pax_headers = {"path": "a\0b.jpg"}
        tar.addfile(info)
    with pytest.raises(ShardError, match=r"byte 0: 'a\\x00b.jpg' is no name of a file"):
        TarReader(tmp_path / "a.tar")


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program")
@pytest.mark.parametrize("tar_format", ["gnu", "pax"])
def test_sparse_files(tmp_path, tar_format):
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x")
    command = ["tar", f"--format={tar_format}", "--sparse", "-cf", "a.tar", "a.jpg"]
    subprocess.run(command, cwd=tmp_path, check=True)
    with pytest.raises(ShardError, match=r"'a\.jpg' is sparse; make the tar without --sparse"):
        TarReader(tmp_path / "a.tar")


def test_a_file_of_two_gibibytes(tmp_path):
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(header(size=b"20000000000"))
        file.truncate(512 + (1 << 31) + 1024)  # a hole, which takes no space
    with pytest.raises(ShardError, match=r"'a\.jpg' has 2147483648 bytes, at most 2147479552"):
        TarReader(tmp_path / "a.tar")


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        TarReader(tmp_path / "absent.tar")
    with pytest.raises(IsADirectoryError):
        TarReader(tmp_path)


# ---- writing --------------------------------------------------------------------------------------

REFUSED = ["", "a.b", "cat/", "cat/a.b", ".a", "cat/.a", "__meta__/a", "a\0b"]


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_would_not_come_back(tmp_path, key):
    with TarWriter(tmp_path / "a.tar") as writer:
        with pytest.raises(ValueError, match="would not come back as key"):
            writer.write(key, {"jpg": b"x"})
        writer.write("good", {"jpg": b"x"})
    assert read_all(TarReader(tmp_path / "a.tar")) == {"good": {"jpg": b"x"}}


@pytest.mark.parametrize("extension", ["", "JPG", "a/b", "\0"])
def test_extensions_that_would_not_come_back(tmp_path, extension):
    with TarWriter(tmp_path / "a.tar") as writer, pytest.raises(ValueError, match="not come back"):
        writer.write("a", {"cls": b"3", extension: b"x"})
    assert len(TarReader(tmp_path / "a.tar")) == 0  # not even the good half


def test_samples_that_are_refused(tmp_path):
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write("a", {"jpg": b"x"})
        writer.write("b", {"jpg": bytearray(b"y"), "cls": memoryview(b"3")})
        with pytest.raises(ValueError, match="sample 'a' is there already"):
            writer.write("a", {"cls": b"x"})
        with pytest.raises(ValueError, match="sample 'c' has no files"):
            writer.write("c", {})
        for wrong in ("text", 3, None):
            with pytest.raises(TypeError):
                writer.write("d", {"cls": b"3", "txt": wrong})
        assert writer.count == 2
    assert read_all(TarReader(tmp_path / "a.tar")) == {
        "a": {"jpg": b"x"}, "b": {"jpg": b"y", "cls": b"3"}
    }  # fmt: skip


def test_nothing_is_left_or_overwritten(tmp_path):
    path = tmp_path / "a.tar"
    with pytest.raises(KeyboardInterrupt), TarWriter(path) as writer:
        writer.write("a", {"jpg": b"x"})
        assert [found.suffix for found in tmp_path.iterdir()] == [".tmp"]
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileExistsError), TarWriter(path) as writer:
        writer.write("a", {"jpg": b"x"})
        path.write_bytes(b"of another process")
    assert path.read_bytes() == b"of another process"
    with pytest.raises(FileExistsError, match=r"a\.tar exists: remove it"):
        TarWriter(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    """A caller that goes on after it must not end up with half a sample."""
    writer = TarWriter(tmp_path / "a.tar")
    writer.write("a", {"jpg": b"x"})
    file = writer._file

    class Full:
        closed = False
        tell, close = file.tell, file.close

        def writelines(self, blocks):
            file.write(blocks[0])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(OSError, match="No space left"):
        writer.write("b", {"jpg": b"x"})
    with pytest.raises(OSError, match="an earlier write stopped inside a sample"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_twice(tmp_path):
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write("a", {"jpg": b"x"})
        writer.close()
    assert len(TarReader(tmp_path / "a.tar")) == 1


# ---- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"max_count": 7}, {"max_bytes": 40_000}, {}])
def test_shards_hold_all_in_order_within_their_limits(tmp_path, limits):
    samples = random_samples(60, seed=9)
    with ShardWriter(tmp_path / "train-%03d.tar", **limits) as writer:
        for key, sample in samples.items():
            writer.write(key, sample)
    assert [path.name for path in writer.paths] == sorted(path.name for path in tmp_path.iterdir())
    assert writer.paths[0].name == "train-000.tar"
    readers = [TarReader(path) for path in writer.paths]
    assert len(readers) == 1 if not limits else len(readers) > 5
    assert [item for reader in readers for item in read_all(reader).items()] == list(
        samples.items()
    )
    if "max_count" in limits:
        assert {len(reader) for reader in readers[:-1]} == {7}
    if "max_bytes" in limits:
        sizes = [path.stat().st_size for path in writer.paths]
        assert max(sizes) <= 40_000
        assert min(sizes[:-1]) > 10_000


def test_a_sample_larger_than_a_shard(tmp_path):
    with ShardWriter(tmp_path / "%d.tar", max_bytes=100) as writer:
        for key in "abc":
            writer.write(key, {"jpg": bytes(5000)})
    assert [TarReader(path).keys for path in writer.paths] == [("a",), ("b",), ("c",)]


def test_a_failure_leaves_the_shards_before(tmp_path):
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "%d.tar", max_count=2) as writer:
        for key in "abc":
            writer.write(key, {"jpg": b"x"})
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["0.tar"]
    assert TarReader(tmp_path / "0.tar").keys == ("a", "b")


@pytest.mark.parametrize("pattern", ["train.tar", "%d-%d.tar", "%s.tar", "%%d.tar", "%d/train.tar"])
def test_patterns_that_are_refused(tmp_path, pattern):
    with pytest.raises(ValueError, match=r"expected a name such as train-%06d\.tar"):
        ShardWriter(tmp_path / pattern)


@pytest.mark.parametrize("limits", [{"max_count": 0}, {"max_bytes": 0}])
def test_limits_that_are_refused(tmp_path, limits):
    with pytest.raises(ValueError, match="limits of at least 1"):
        ShardWriter(tmp_path / "%d.tar", **limits)


def test_a_folder_with_a_percent_sign_and_no_samples(tmp_path):
    (tmp_path / "50%d").mkdir()
    with ShardWriter(tmp_path / "50%d" / "%02d.tar") as writer:
        pass
    assert writer.paths == []
    with ShardWriter(tmp_path / "50%d" / "%02d.tar") as writer:
        writer.write("a", {"jpg": b"x"})
    assert [path.relative_to(tmp_path) for path in writer.paths] == [Path("50%d/00.tar")]
