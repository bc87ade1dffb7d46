"""TFRecord against TensorFlow's bytes, the package tfrecord, a naive CRC, and every bad input."""

import errno
import os
import pickle
import random
import re
import struct
import sys
import types
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from flambeau.recipes.data import tfrecord
from flambeau.recipes.data.tfrecord import TFRecordError, TFRecordReader, TFRecordWriter, crc32c

# Python 3.12 warns where a process with threads, such as torch's own, forks.
not_our_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

# Payload and file bytes, made by TensorBoard 2.21's RecordWriter.
GOLDEN = [
    (b"", "000000000000000029039807d8ea82a2"),
    (b"hello", "0500000000000000eab2043e68656c6c6fbb1f1c19"),
]
# A record by the package tfrecord 1.14.6: {image: bytes b'abc', label: float 1, index: int 7}.
PEER_RECORD = bytes.fromhex(
    "3700000000000000e7e8ca590a350a110a056c6162656c120812060a040000803f0a100a05696d61676512070a050a03"
    "6162630a0e0a05696e64657812051a030a01071dc3e192"
)

POLYNOMIAL = 0x11EDC6F41  # CRC32C, highest power first


def naive_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def naive_masked(data: bytes) -> bytes:
    crc = naive_crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32)


def naive_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + naive_masked(length) + data + naive_masked(data)


def write(path: Path, payloads: Iterable[bytes]) -> Path:
    with TFRecordWriter(path) as writer:
        for payload in payloads:
            writer.write(payload)
    return path


def random_payloads(count: int, seed: int, most: int = 400) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(source.randrange(most)) for _ in range(count)]


def raw(folder: Path, data: bytes) -> Path:
    path = folder / "raw.tfrecord"
    path.write_bytes(data)
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["as installed", "without a native package"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "as installed":
        monkeypatch.setattr(tfrecord, "_implementation", lambda: tfrecord._folded_crc32c)
    return str(request.param)


# ---- checksums ------------------------------------------------------------------------------------

READ_10 = bytes.fromhex(
    "01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"
)
RFC_3720 = [  # appendix B.4
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (READ_10, 0xD9963A56),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("data", "expected"), RFC_3720)
def test_checksums_of_the_specification(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected
    assert crc32c(bytearray(data)) == crc32c(memoryview(data)) == expected
    assert naive_crc32c(data) == expected


SIZES = [*range(140), 562, 563, 564, 847, 848, 1000, 2500, 6777, 7000, 13554, 30000]


@pytest.mark.parametrize("seed", range(3))
def test_folding_is_the_naive_checksum(seed: int) -> None:
    source = random.Random(seed)
    for size in SIZES[seed::3]:
        for data in (source.randbytes(size), bytes(size), b"\xff" * size):
            assert tfrecord._folded_crc32c(data) == naive_crc32c(data), size


def test_folding_is_the_checksum_of_native_packages() -> None:
    native = pytest.importorskip("crc32c")
    google = pytest.importorskip("google_crc32c")
    source = random.Random(4)
    sizes = [source.randrange(1 << source.randrange(1, 20)) for _ in range(300)]
    for size in [*sizes, 65535, 65536, 65537, 65536 + 72, 65536 + 73, 131072, 1000003]:
        data = source.randbytes(size)
        assert tfrecord._folded_crc32c(data) == native.crc32c(data) == google.value(data), size


@pytest.mark.parametrize("exponents", tfrecord._SPARSE)
def test_sparse_polynomials_are_multiples_of_that_of_the_checksum(
    exponents: tuple[int, ...],
) -> None:
    remainder = sum(1 << exponent for exponent in exponents)
    for power in range(exponents[0], 31, -1):
        if remainder >> power & 1:
            remainder ^= POLYNOMIAL << power - 32
    assert remainder == 0
    assert list(exponents) == sorted(exponents, reverse=True)


@pytest.fixture
def _fresh_choice() -> Iterator[None]:
    tfrecord._implementation.cache_clear()
    yield
    tfrecord._implementation.cache_clear()


@pytest.mark.usefixtures("_fresh_choice")
@pytest.mark.parametrize("first", ["crc32c", "google_crc32c"])
def test_a_native_package_is_used(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)
    package = types.ModuleType(first)
    package.crc32c = package.value = lambda data: 42  # type: ignore[attr-defined]
    package.implementation = "c"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, first, package)
    assert crc32c(b"x") == 42


@pytest.mark.usefixtures("_fresh_choice")
@pytest.mark.parametrize("google", ["absent", "python"])
def test_no_native_package(monkeypatch: pytest.MonkeyPatch, google: str) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)
    slow = types.ModuleType("google_crc32c")
    slow.implementation = "python"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google_crc32c", None if google == "absent" else slow)
    assert crc32c(b"123456789") == 0xE3069283
    assert tfrecord._implementation() is tfrecord._folded_crc32c


# ---- the same bytes as TensorFlow and the package tfrecord -----------------------------------------


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("payload", "expected"), GOLDEN)
def test_golden_bytes(tmp_path: Path, payload: bytes, expected: str) -> None:
    path = write(tmp_path / "a.tfrecord", [payload])
    assert path.read_bytes().hex() == expected
    assert naive_record(payload).hex() == expected
    assert list(TFRecordReader(path)) == [payload]


@pytest.mark.usefixtures("implementation")
def test_a_record_of_the_package_tfrecord(tmp_path: Path) -> None:
    payload = PEER_RECORD[12:-4]
    assert list(TFRecordReader(raw(tmp_path, PEER_RECORD * 3))) == [payload] * 3
    assert write(tmp_path / "mine.tfrecord", [payload]).read_bytes() == PEER_RECORD


@pytest.mark.usefixtures("implementation")
def test_random_records_are_those_of_the_naive_writer(tmp_path: Path) -> None:
    payloads = random_payloads(60, seed=1, most=3000)
    path = tmp_path / "a.tfrecord"
    with TFRecordWriter(path) as writer:
        offsets = [writer.write(payload) for payload in payloads]
    records = list(map(naive_record, payloads))
    assert path.read_bytes() == b"".join(records)
    assert offsets == [sum(map(len, records[:i])) for i in range(len(records))]
    with TFRecordReader(path) as reader:
        assert list(reader) == payloads
        assert list(reader.offsets) == offsets


def test_the_package_tfrecord_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    pytest.importorskip("tfrecord")
    from tfrecord import reader as peer_reader
    from tfrecord import writer as peer_writer
    from tfrecord.tools import tfrecord2idx

    path, index = tmp_path / "peer.tfrecord", tmp_path / "peer.idx"
    writer = peer_writer.TFRecordWriter(str(path))
    for number in range(50):
        data = random.Random(number).randbytes(100 * number)
        writer.write({"image": (data, "byte"), "label": (number, "int")})
    writer.close()
    ours = list(TFRecordReader(path))
    assert [bytes(record) for record in peer_reader.tfrecord_iterator(str(path))] == ours

    mine = write(tmp_path / "mine.tfrecord", ours)
    assert mine.read_bytes() == path.read_bytes()
    assert [bytes(record) for record in peer_reader.tfrecord_iterator(str(mine))] == ours
    loaded = list(peer_reader.tfrecord_loader(str(mine), None, {"label": "int"}))
    assert [int(features["label"][0]) for features in loaded] == list(range(50))

    tfrecord2idx.create_index(str(path), str(index))
    lines = [tuple(map(int, line.split())) for line in index.read_text().splitlines()]
    with TFRecordReader(path, [offset for offset, _ in lines]) as reader:
        assert list(reader) == ours
        assert [len(record) + 16 for record in reader] == [size for _, size in lines]

    # What the package lets through: a byte of the data that has changed.
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    assert len(list(peer_reader.tfrecord_iterator(str(path)))) == 50
    with pytest.raises(TFRecordError, match=f"byte {lines[-1][0]}: the checksum of the 4"):
        list(TFRecordReader(path))


# ---- reading --------------------------------------------------------------------------------------


def test_positions(tmp_path: Path) -> None:
    with TFRecordReader(str(write(tmp_path / "a.tfrecord", [b"x", b"", b"zzz"]))) as reader:
        assert len(reader) == 3
        assert [reader[-3], reader[-2], reader[-1]] == [b"x", b"", b"zzz"]
        assert reader[torch.tensor(2)] == reader[np.int64(2)] == b"zzz"
        assert list(reader) == list(reader) == [b"x", b"", b"zzz"]
        for wrong in (3, -4):
            with pytest.raises(IndexError):
                reader[wrong]
        with pytest.raises(TypeError, match="not a slice"):
            reader[0:2]  # type: ignore[index]
        with pytest.raises(TypeError):
            reader["0"]  # type: ignore[index]


def test_no_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [])
    assert path.read_bytes() == b""
    for offsets in (None, []):
        with TFRecordReader(path, offsets) as reader:
            assert (len(reader), list(reader), list(reader.offsets)) == (0, [], [])


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor, iter])
def test_offsets_are_kept_and_given_again(tmp_path: Path, kind: type) -> None:
    path = write(tmp_path / "a.tfrecord", [b"x", b"", b"zzz"])
    with TFRecordReader(path) as reader:
        kept = np.asarray(reader.offsets)
    assert kept.dtype == np.uint64
    assert kept.tolist() == [0, 17, 33]
    with TFRecordReader(path, kind(kept.tolist())) as again:
        assert list(again) == [b"x", b"", b"zzz"]
        assert list(again.offsets) == [0, 17, 33]


def test_offsets_save_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tfrecord", [bytes(10)] * 1000)
    reads = []
    original = TFRecordReader._read_some

    def counted(self: TFRecordReader, start: int, end: int) -> bytes:
        reads.append(end - start)
        return original(self, start, end)

    monkeypatch.setattr(TFRecordReader, "_read_some", counted)
    offsets = TFRecordReader(path).offsets
    assert reads == [12] * 1000  # of each record only the header
    reads.clear()
    TFRecordReader(path, offsets)
    assert reads == [12]


def test_closing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [b"x"])
    reader = TFRecordReader(path)
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader[0]
    TFRecordReader(path)  # never closed: no ResourceWarning, which would fail this test


def test_a_read_that_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tfrecord", [bytes(range(200))])
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 7), at))
    with TFRecordReader(path) as reader:
        assert reader[0] == bytes(range(200))
        os.truncate(path, 100)
        with pytest.raises(TFRecordError, match=r"byte 100: the file ends here, it was longer"):
            reader[0]


# ---- threads, processes, platforms ----------------------------------------------------------------


def read_in_threads(reader: TFRecordReader, payloads: list[bytes]) -> None:
    order = [i % len(payloads) for i in range(0, 7 * 4 * len(payloads), 7)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reader.__getitem__, order)) == [payloads[i] for i in order]


@pytest.mark.usefixtures("implementation")
def test_threads(tmp_path: Path) -> None:
    payloads = random_payloads(200, seed=2, most=5000)
    with TFRecordReader(write(tmp_path / "a.tfrecord", payloads)) as reader:
        read_in_threads(reader, payloads)


def test_a_platform_without_positional_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pread")
    payloads = random_payloads(200, seed=3)
    with TFRecordReader(write(tmp_path / "a.tfrecord", payloads)) as reader:
        read_in_threads(reader, payloads)
        assert list(pickle.loads(pickle.dumps(reader))) == payloads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.usefixtures("implementation")
@not_our_threads
def test_fork(tmp_path: Path) -> None:
    payloads = random_payloads(200, seed=4)
    with TFRecordReader(write(tmp_path / "a.tfrecord", payloads)) as reader:
        assert reader[0] == payloads[0]
        pids = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:  # the child reads through the same descriptor, at the same time
                right = False
                with suppress(Exception):
                    right = all(list(reader) == payloads for _ in range(10))
                os._exit(0 if right else 1)
            pids.append(pid)
        assert all(list(reader) == payloads for _ in range(10))
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]


def test_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.tfrecord", [b"five", b"two"])
    monkeypatch.chdir(tmp_path)
    with TFRecordReader("a.tfrecord") as reader:
        data = pickle.dumps(reader)
    monkeypatch.chdir("/")
    with pickle.loads(data) as again:
        assert list(again) == [b"five", b"two"]
        assert list(again.offsets) == [0, 20]
    with (tmp_path / "a.tfrecord").open("ab") as file:
        file.write(b"more")
    with pytest.raises(TFRecordError, match=r"a\.tfrecord, byte 43: .* it had 39 bytes"):
        pickle.loads(data)


@not_our_threads
def test_a_worker_process_of_a_data_loader(tmp_path: Path) -> None:
    payloads = random_payloads(20, seed=5)
    loader: Iterable[list[bytes]] = torch.utils.data.DataLoader(
        TFRecordReader(write(tmp_path / "a.tfrecord", payloads)),  # type: ignore[arg-type]
        batch_size=4,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert [record for batch in loader for record in batch] == payloads


# ---- damage ---------------------------------------------------------------------------------------

THREE = [b"", b"hello", bytes(range(20))]  # records at 0, 16, 37; 73
STARTS = [0, 16, 37, 73]


def of_three(offset: int) -> int:
    return max(i for i in range(3) if STARTS[i] <= offset)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("flip", [0x01, 0x80, 0x5A, 0xFF])
def test_each_flipped_byte_is_named(tmp_path: Path, flip: int) -> None:
    good = b"".join(map(naive_record, THREE))
    assert len(good) == 73
    for offset in range(73):
        path = raw(tmp_path, good[:offset] + bytes([good[offset] ^ flip]) + good[offset + 1 :])
        damaged = of_three(offset)
        message = f"{re.escape(str(path))}, byte {STARTS[damaged]}: the checksum of the "
        with pytest.raises(TFRecordError, match=message):
            list(TFRecordReader(path))
        if damaged == 2 and offset < STARTS[2] + 12:
            with pytest.raises(TFRecordError, match=message):  # the last header, when opened
                TFRecordReader(path, STARTS[:3])
            continue
        with TFRecordReader(path, STARTS[:3]) as reader:  # the others stay readable
            for number in range(3):
                if number != damaged:
                    assert reader[number] == THREE[number]
            with pytest.raises(TFRecordError, match=message):
                reader[damaged]


def test_each_truncation_is_named(tmp_path: Path) -> None:
    good = b"".join(map(naive_record, THREE))
    for size in range(73):
        path = raw(tmp_path, good[:size])
        if size in STARTS:  # between two records nothing tells, without offsets
            assert list(TFRecordReader(path)) == THREE[: STARTS.index(size)]
        else:
            message = f"{re.escape(str(path))}, byte {STARTS[of_three(size)]}: truncated"
            with pytest.raises(TFRecordError, match=message):
                TFRecordReader(path)
        with pytest.raises(TFRecordError, match=f"{re.escape(str(path))}, byte "):
            TFRecordReader(path, STARTS[:3])


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = raw(tmp_path, b"".join(map(naive_record, THREE)))
    with TFRecordReader(path) as reader:
        os.truncate(path, 40)
        assert reader[1] == b"hello"
        with pytest.raises(TFRecordError, match=r"byte 40: the file ends here, it was longer"):
            reader[2]


def header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + naive_masked(packed)


GOOD = naive_record(b"good")  # 20 bytes

MALFORMED = {
    "1 stray byte": (GOOD + b"\0", 20, "truncated: 1 bytes of a record's header of 12"),
    "11 stray bytes": (GOOD + bytes(11), 20, "truncated: 11 bytes"),
    "zeros": (GOOD + bytes(16), 20, "the checksum of the record's length"),
    "text": (b"path,label\n0.png,3\n", 0, "the checksum of the record's length"),
    "no data": (GOOD + header(1), 20, "truncated: this record ends at 37, the file at 32"),
    "no checksum": (GOOD + header(0), 20, "truncated: this record ends at 36"),
    "a length of 2**62": (
        GOOD + header(2**62) + bytes(99),
        20,
        "truncated: this record ends at 46",
    ),
    "the greatest length": (
        header(2**64 - 1),
        0,
        "truncated: this record ends at 18446744073709551631",
    ),
    "gzip": (b"\x1f\x8b\x08\0" + bytes(20), 0, r".*compressed \(GZIP\), decompress it"),
    "zlib": (b"\x78\x9c\x08\0" + bytes(20), 0, r".*compressed \(ZLIB\), decompress it"),
}


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_when_opened(tmp_path: Path, name: str) -> None:
    data, offset, reason = MALFORMED[name]
    path = raw(tmp_path, data)
    with pytest.raises(TFRecordError, match=f"{re.escape(str(path))}, byte {offset}: {reason}"):
        TFRecordReader(path)


BAD_OFFSETS = {
    "first missing": ([16, 37], "byte 0: no offset for the record here"),
    "last missing": ([0, 16], "byte 37: no offset for the record here"),
    "none": ([], "byte 0: no offset for the record here"),
    "twice": ([0, 16, 16, 37], "byte 16: no record ends at 16"),
    "backwards": ([0, 37, 16], "byte 37: no record ends at 16"),
    "too close": ([0, 16, 24, 37], "byte 16: no record ends at 24"),
    "at the end": ([0, 16, 37, 73], "byte 73: no record ends at 73"),
    "past the end": ([0, 16, 37, 90], "byte 90: no record ends at 73"),
    "no start": ([0, 16, 40], "byte 40: the checksum of the record's length"),
}


@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_offsets_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    offsets, reason = BAD_OFFSETS[name]
    path = raw(tmp_path, b"".join(map(naive_record, THREE)))
    with pytest.raises(TFRecordError, match=reason):
        TFRecordReader(path, offsets)


def test_offsets_that_only_reading_can_refute(tmp_path: Path) -> None:
    path = raw(tmp_path, b"".join(map(naive_record, THREE)))
    with TFRecordReader(path, [0, 37]) as reader:
        assert reader[1] == THREE[2]
        with pytest.raises(
            TFRecordError, match=r"byte 0: a record of 0 bytes .* the index says to 37"
        ):
            reader[0]
    with (
        TFRecordReader(path, [0, 17, 37]) as reader,
        pytest.raises(TFRecordError, match="byte 17: the checksum of the record's length"),
    ):
        reader[1]


@pytest.mark.parametrize("wrong", [[0, -1], [0, 2**64]])
def test_offsets_that_are_no_64_bit_integers(tmp_path: Path, wrong: list[int]) -> None:
    with pytest.raises(OverflowError):
        TFRecordReader(raw(tmp_path, GOOD), wrong)


def test_names_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TFRecordReader(tmp_path / "absent.tfrecord")
    with pytest.raises(IsADirectoryError):
        TFRecordReader(tmp_path)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("seed", range(4))
def test_random_damage_gives_the_right_records_or_an_error(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    payloads = random_payloads(8, seed, most=60)
    good = b"".join(map(naive_record, payloads))
    named = 0
    for _ in range(150):
        data = bytearray(good)
        at, size = source.randrange(len(good)), source.randrange(1, 30)
        data[at : at + size] = source.randbytes(source.randrange(40))
        path = raw(tmp_path, bytes(data))
        try:
            records = list(TFRecordReader(path))
        except TFRecordError as error:
            assert str(path) in str(error)
            named += 1
        else:
            assert records == payloads[: len(records)]
    assert named > 140


# ---- writing --------------------------------------------------------------------------------------


def test_the_name_comes_last(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    with TFRecordWriter(path) as writer:
        writer.write(b"x")
        (temporary,) = files(tmp_path)
        assert re.fullmatch(r"a\.tfrecord\.[0-9a-f]{8}\.tmp", temporary)
    assert files(tmp_path) == ["a.tfrecord"]
    writer.close()  # a second time: nothing
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"y")


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        writer.write(b"x")
        raise KeyError
    assert files(tmp_path) == []


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"a\.tfrecord exists: remove it or choose another"):
        TFRecordWriter(path)
    late = tmp_path / "late.tfrecord"
    with pytest.raises(FileExistsError), TFRecordWriter(late) as writer:
        writer.write(b"x")
        late.write_bytes(b"mine too")
    assert (path.read_bytes(), late.read_bytes()) == (b"mine", b"mine too")
    assert files(tmp_path) == ["a.tfrecord", "late.tfrecord"]


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    class Full:
        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def writelines(self, pieces: list[bytes]) -> None:
            self.file.write(pieces[0])  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"), TFRecordWriter(tmp_path / "a") as writer:
        writer._file = Full(writer._file)  # type: ignore[assignment]
        writer.write(b"x")
    assert files(tmp_path) == []
    with (
        pytest.raises(OSError, match="an earlier write stopped inside a record"),
        TFRecordWriter(tmp_path / "a") as writer,
    ):
        writer._file = Full(writer._file)  # type: ignore[assignment]
        with suppress(OSError):
            writer.write(b"x")
    assert files(tmp_path) == []


def test_refused_writes_leave_the_writer_usable(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    with TFRecordWriter(path) as writer:
        with pytest.raises(TypeError, match=r"got str; for text: text\.encode\(\)"):
            writer.write("text")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got int"):
            writer.write(5)  # type: ignore[arg-type]
        assert writer.write(b"x") == 0
    assert list(TFRecordReader(path)) == [b"x"]
    with pytest.raises(TypeError, match="got str"):
        crc32c("text")  # type: ignore[arg-type]


def test_every_kind_of_bytes(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    kinds = [b"ab", bytearray(b"ab"), memoryview(b"xabx")[1:3], memoryview(b"a.b.")[::2], array.T]
    path = write(tmp_path / "a.tfrecord", kinds)  # type: ignore[arg-type]
    assert list(TFRecordReader(path)) == [b"ab"] * 4 + [array.T.tobytes()]
