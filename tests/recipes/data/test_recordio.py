"""RecordIO against libmxnet's own bytes, a naive codec written from the format, and every bad input."""

import json
import os
import pickle
import random
import re
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from flambeau.recipes.data.recordio import (
    IRHeader,
    RecordError,
    RecordReader,
    RecordWriter,
    pack,
    unpack,
)

MAGIC = b"\x0a\x23\xd7\xce"
VECTORS = Path(__file__).resolve().parents[4] / "shared" / "vectors" / "recordio"
needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason=f"no {VECTORS}")

# Python 3.12 warns where a process with threads, such as torch's own, forks.
not_our_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

# Payload and file bytes, made by libmxnet.so 1.9.1 (MXRecordIOWriterWriteRecord).
GOLDEN = [
    (b"", "0a23d7ce00000000"),
    (b"a", "0a23d7ce0100000061000000"),
    (b"abc", "0a23d7ce0300000061626300"),
    (b"abcd", "0a23d7ce0400000061626364"),
    (b"record_0", "0a23d7ce080000007265636f72645f30"),
    (MAGIC, "0a23d7ce000000200a23d7ce00000060"),
    (MAGIC + b"xyz", "0a23d7ce000000200a23d7ce0300006078797a00"),
    (b"abcd" + MAGIC + b"efgh", "0a23d7ce04000020616263640a23d7ce0400006065666768"),
    (MAGIC + MAGIC, "0a23d7ce000000200a23d7ce000000400a23d7ce00000060"),
    (b"abcd" + MAGIC, "0a23d7ce04000020616263640a23d7ce00000060"),
    (
        b"abcd" + MAGIC + b"efgh" + MAGIC + b"ij",
        "0a23d7ce04000020616263640a23d7ce04000040656667680a23d7ce02000060696a0000",
    ),
    (b"a" + MAGIC + b"bcd", "0a23d7ce08000000610a23d7ce626364"),
    (b"abcd" + MAGIC[:3], "0a23d7ce07000000616263640a23d700"),
]


def naive_encode(payload: bytes) -> bytes:
    out, done = bytearray(), 0
    for i in range(0, len(payload) // 4 * 4, 4):
        if payload[i : i + 4] == MAGIC:
            flag = 1 if done == 0 else 2
            out += MAGIC + struct.pack("<I", (flag << 29) | (i - done)) + payload[done:i]
            done = i + 4
    flag = 3 if done else 0
    out += MAGIC + struct.pack("<I", (flag << 29) | (len(payload) - done)) + payload[done:]
    return bytes(out) + b"\0" * (-len(payload) % 4)


def naive_decode(data: bytes) -> list[bytes]:
    records, position = [], 0
    while position < len(data):
        out, flag = b"", 1
        while flag in (1, 2):
            magic, word = struct.unpack_from("<4sI", data, position)
            assert magic == MAGIC
            flag, length = word >> 29, word & 0x1FFFFFFF
            out += data[position + 8 : position + 8 + length]
            out += MAGIC if flag in (1, 2) else b""
            position += 8 + (length + 3) // 4 * 4
        records.append(out)
    return records


def random_payloads(count: int, seed: int) -> list[bytes]:
    """Random bytes of which about 40 % are magic words, at any alignment, some cut short."""
    source = random.Random(seed)
    payloads = []
    for _ in range(count):
        pieces = [
            MAGIC if source.random() < 0.4 else source.randbytes(source.randrange(1, 5))
            for _ in range(source.randrange(14))
        ]
        payloads.append(b"".join(pieces)[: source.choice([None, -1, -2, -3])])
    return payloads


def write(folder: Path, payloads: list[bytes], *, index: bool = True) -> Path:
    path = folder / "data.rec"
    with RecordWriter(path, None if index else False) as writer:
        for payload in payloads:
            writer.write(payload)
    return path


def raw(folder: Path, data: bytes, index: str | None = None) -> Path:
    path = folder / "raw.rec"
    path.write_bytes(data)
    path.with_suffix(".idx").unlink(missing_ok=True)
    if index is not None:
        path.with_suffix(".idx").write_text(index)
    return path


# ---- the same bytes as libmxnet -------------------------------------------------------------------


@pytest.mark.parametrize(("payload", "expected"), GOLDEN)
def test_golden_bytes(tmp_path: Path, payload: bytes, expected: str) -> None:
    path = write(tmp_path, [payload], index=False)
    assert path.read_bytes().hex() == expected
    assert naive_encode(payload).hex() == expected
    with RecordReader(path) as reader:
        assert list(reader) == [payload]


@needs_vectors
@pytest.mark.parametrize("index", [True, False])
def test_reads_and_writes_what_libmxnet_wrote(tmp_path: Path, index: bool) -> None:
    expected = json.loads((VECTORS / "expected.json").read_text())
    payloads = [bytes.fromhex(text) for text in expected["records_hex"]]
    rec = (VECTORS / "libmxnet191.rec").read_bytes()
    idx = (VECTORS / "libmxnet191.idx").read_text()
    with RecordReader(raw(tmp_path, rec, idx if index else None)) as reader:
        assert list(reader) == payloads
        assert [reader.get(key) for key in range(len(payloads))] == payloads
        assert list(reader.keys) == list(range(len(payloads)))

    with RecordWriter(tmp_path / "mine.rec") as writer:
        assert [writer.write(payload) for payload in payloads] == expected["offsets"]
    assert (tmp_path / "mine.rec").read_bytes() == rec
    assert (tmp_path / "mine.idx").read_text() == idx


@pytest.mark.parametrize("index", [True, False])
def test_thousands_of_random_records_match_the_naive_codec(tmp_path: Path, index: bool) -> None:
    payloads = random_payloads(3000, seed=index)
    assert sum(MAGIC in payload for payload in payloads) > 1000
    path = write(tmp_path, payloads, index=index)
    data = path.read_bytes()
    assert data == b"".join(map(naive_encode, payloads))
    assert naive_decode(data) == payloads
    with RecordReader(path) as reader:
        assert list(reader) == payloads


def test_offsets_of_the_notes(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "data.rec") as writer:
        offsets = [writer.write(bytes(size)) for size in (5760, 6742, 6773, 1)]
    assert offsets == [0, 5768, 12520, 19304]  # libmxnet's own, for these lengths
    assert (tmp_path / "data.idx").read_bytes() == b"0\t0\n1\t5768\n2\t12520\n3\t19304\n"


# ---- reading --------------------------------------------------------------------------------------


def test_positions_keys_and_order(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "data.rec") as writer:
        for key, payload in [(30, b"x"), (-4, b"yy"), (10**18, b"zzz")]:
            writer.write(payload, key=key)
    with RecordReader(str(tmp_path / "data.rec")) as reader:
        assert len(reader) == 3
        assert [reader[-3], reader[-2], reader[-1]] == [b"x", b"yy", b"zzz"]
        assert reader[torch.tensor(1)] == reader[np.int64(1)] == b"yy"
        assert reader.keys == (30, -4, 10**18)
        assert (reader.get(-4), reader.get(np.int64(30))) == (b"yy", b"x")
        for wrong in (3, -4):
            with pytest.raises(IndexError):
                reader[wrong]
        with pytest.raises(KeyError, match=r"data\.rec has no record with key 0"):
            reader.get(0)
        with pytest.raises(TypeError, match="not a slice"):
            reader[0:2]  # type: ignore[index]
        with pytest.raises(TypeError):
            reader["0"]  # type: ignore[index]


@pytest.mark.parametrize("index", [True, False])
def test_keys_that_count_from_zero(tmp_path: Path, index: bool) -> None:
    with RecordReader(write(tmp_path, [b"a", b"b"], index=index)) as reader:
        assert list(reader.keys) == [0, 1]
        assert reader.get(1) == b"b"
        for wrong in (2, -1):
            with pytest.raises(KeyError):
                reader.get(wrong)


def test_lines_of_an_index_in_any_order_and_place(tmp_path: Path) -> None:
    data = b"".join(map(naive_encode, [b"a", b"bb", MAGIC]))
    path = raw(tmp_path, data)
    elsewhere = tmp_path / "elsewhere.txt"
    elsewhere.write_bytes(b"8 24\r\n5\t0\r\n6\t12")
    with RecordReader(path, elsewhere) as reader:
        assert reader.keys == (5, 6, 8)
        assert list(reader) == [b"a", b"bb", MAGIC]
        assert reader.get(8) == MAGIC


@pytest.mark.parametrize("index", [True, False])
def test_no_record_and_empty_records(tmp_path: Path, index: bool) -> None:
    path = write(tmp_path, [], index=index)
    with RecordReader(path) as reader:
        assert (len(reader), list(reader), list(reader.keys)) == (0, [], [])
        with pytest.raises(IndexError):
            reader[0]
    (tmp_path / "more").mkdir()
    with RecordReader(write(tmp_path / "more", [b"", b"", b"x"], index=index)) as reader:
        assert list(reader) == [b"", b"", b"x"]


def test_seek_after_the_end(tmp_path: Path) -> None:
    with RecordReader(write(tmp_path, [b"first", b"last"])) as reader:
        records = iter(reader)
        assert list(records) == [b"first", b"last"]
        assert next(records, None) is None
        assert reader[0] == reader.get(0) == b"first"  # libmxnet returns None here
        assert list(reader) == [b"first", b"last"]


def test_closing(tmp_path: Path) -> None:
    path = write(tmp_path, [b"x"])
    reader = RecordReader(path)
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader[0]
    RecordReader(path)  # never closed: no ResourceWarning, which would fail this test


def test_names_that_are_wrong(tmp_path: Path) -> None:
    path = write(tmp_path, [b"x"])
    with pytest.raises(FileNotFoundError):
        RecordReader(tmp_path / "absent.rec")
    with pytest.raises(FileNotFoundError):
        RecordReader(path, tmp_path / "absent.idx")
    with pytest.raises(RecordError, match=r"data\.idx, byte 0: no record can start here"):
        RecordReader(path.with_suffix(".idx"))


# ---- threads, processes, platforms ----------------------------------------------------------------


def read_in_threads(reader: RecordReader, payloads: list[bytes]) -> None:
    order = [i % len(payloads) for i in range(0, 7 * 4 * len(payloads), 7)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reader.__getitem__, order)) == [payloads[i] for i in order]


def test_threads(tmp_path: Path) -> None:
    payloads = [payload * 50 for payload in random_payloads(200, seed=2)]
    with RecordReader(write(tmp_path, payloads)) as reader:
        read_in_threads(reader, payloads)


def test_a_platform_without_positional_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pread")
    payloads = [payload * 50 for payload in random_payloads(200, seed=3)]
    for index in (True, False):
        folder = tmp_path / str(index)
        folder.mkdir()
        with RecordReader(write(folder, payloads, index=index)) as reader:
            read_in_threads(reader, payloads)
            assert list(pickle.loads(pickle.dumps(reader))) == payloads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@not_our_threads
def test_fork(tmp_path: Path) -> None:
    payloads = random_payloads(300, seed=4)
    with RecordReader(write(tmp_path, payloads)) as reader:
        assert reader[0] == payloads[0]
        pids = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:  # the child reads through the same descriptor, at the same time
                right = False
                with suppress(Exception):
                    right = all(list(reader) == payloads for _ in range(20))
                os._exit(0 if right else 1)
            pids.append(pid)
        assert all(list(reader) == payloads for _ in range(20))
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]


def test_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordWriter(tmp_path / "data.rec") as writer:
        writer.write(b"five", key=5)
        writer.write(b"two", key=2)
    monkeypatch.chdir(tmp_path)
    with RecordReader("data.rec") as reader:
        data = pickle.dumps(reader)
    monkeypatch.chdir("/")
    (tmp_path / "data.idx").unlink()  # the offsets travel with the pickle
    with pickle.loads(data) as again:
        assert list(again) == [b"five", b"two"]
        assert (again.keys, again.get(2)) == ((5, 2), b"two")
    with (tmp_path / "data.rec").open("ab") as file:
        file.write(b"more")
    with pytest.raises(RecordError, match=r"data\.rec, byte 28: .* it had 24 bytes"):
        pickle.loads(data)


@not_our_threads
def test_a_worker_process_of_a_data_loader(tmp_path: Path) -> None:
    payloads = random_payloads(20, seed=5)
    reader = RecordReader(write(tmp_path, payloads))
    loader: Iterable[list[bytes]] = torch.utils.data.DataLoader(
        reader,  # type: ignore[arg-type]
        batch_size=4,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert [record for batch in loader for record in batch] == payloads


# ---- bad input ------------------------------------------------------------------------------------


def part(flag: int, data: bytes, length: int | None = None) -> bytes:
    word = flag << 29 | (len(data) if length is None else length)
    return MAGIC + struct.pack("<I", word) + data + bytes(-len(data) % 4)


GOOD = part(0, b"good")  # 12 bytes

MALFORMED = {
    "1 stray byte": (
        GOOD + b"\x0a",
        12,
        "truncated header of the record from byte 12",
    ),
    "7 stray bytes": (GOOD + MAGIC + b"\0\0\0", 12, "truncated header of the record from byte 12"),
    "zeros": (GOOD + bytes(8), 12, "wrong magic 00000000"),
    "wrong magic first": (b"\xff" + GOOD[1:], 0, "wrong magic ff23d7ce"),
    "text": (b"0\t0\n1\t8\n", 0, "wrong magic"),
    "short body": (GOOD + part(0, b"abcd")[:-1], 12, "truncated"),
    "no body": (GOOD + part(0, b"", length=400), 12, "truncated"),
    "longest length": (GOOD + part(0, b"", length=2**29 - 1), 12, "truncated"),
    "no padding": (GOOD + part(0, b"abcde")[:-3], 12, "truncated"),
    "short padding": (GOOD + part(0, b"abcde")[:-1], 12, "truncated"),
    "first part only": (
        GOOD + part(1, b"abcd"),
        24,
        "truncated header of the record from byte 12",
    ),
    "no last part": (
        GOOD + part(1, b"") + part(2, b""),
        28,
        "truncated header of the record from byte 12",
    ),
    "starts with 2": (GOOD + part(2, b"abcd"), 12, "flag 2 in a record that starts at byte 12"),
    "starts with 3": (GOOD + part(3, b"abcd"), 12, "flag 3 in a record that starts at byte 12"),
    "goes on with 0": (part(1, b"") + GOOD, 8, "flag 0 in a record that starts at byte 0"),
    "goes on with 1": (
        part(1, b"") + part(1, b"") + part(3, b""),
        8,
        "flag 1 in a record that starts at byte 0",
    ),
    "flag 4": (part(4, b"abcd"), 0, "flag 4"),
    "flag 5": (GOOD + part(5, b"abcd"), 12, "flag 5"),
    "flag 6": (GOOD + part(6, b"abcd"), 12, "flag 6"),
    "flag 7 inside": (
        part(1, b"") + part(7, b"") + GOOD,
        8,
        "flag 7 in a record that starts at byte 0",
    ),
    "first part not 4 x n": (part(1, b"ab") + part(3, b""), 0, "has 2 bytes, not 4 x n"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_when_opened(tmp_path: Path, name: str) -> None:
    data, offset, reason = MALFORMED[name]
    path = raw(tmp_path, data)
    with pytest.raises(RecordError, match=f"{re.escape(str(path))}, byte {offset}: .*{reason}"):
        RecordReader(path)


def test_what_only_reading_can_find(tmp_path: Path) -> None:
    padding = raw(tmp_path, part(0, b"abcd") + MAGIC + struct.pack("<I", 5) + b"abcdefgh")
    with pytest.raises(RecordError, match=r"byte 25: the padding is not zero"):
        RecordReader(padding)[1]
    # A length that ends on the start of a later record swallows the one between.
    swallow = part(0, b"ab", length=2 + 2 + 12)[:-2] + bytes(2) + GOOD + GOOD
    with pytest.raises(RecordError, match=r"byte 0: .*wrong length"):
        RecordReader(raw(tmp_path, swallow))[0]
    inside = part(1, b"", length=8) + part(2, b"") + part(3, b"end!")
    for index in (None, "0\t0\n"):
        with pytest.raises(RecordError, match=r"byte 0: .*wrong length"):
            RecordReader(raw(tmp_path, inside, index))[0]


THREE = b"".join(map(naive_encode, [b"abcd", MAGIC + b"x", b"efgh"]))  # records at 0, 12, 32; 44

BAD_INDEX = {
    "text": ("one\t0\n1\t12\n2\t32\n", r"raw\.idx, line 1: not 'key<TAB>offset': b'one"),
    "one field": ("0\t0\n1\n2\t32\n", r"raw\.idx, line 2: not"),
    "three fields": ("0\t0\n1\t12\t0\n2\t32\n", r"raw\.idx, line 2: not"),
    "blank line": ("0\t0\n\n1\t12\n2\t32\n", r"raw\.idx, line 2: not"),
    "negative offset": ("0\t0\n1\t-12\n2\t32\n", r"raw\.idx, line 2: not"),
    "fraction": ("0\t0\n1\t12.0\n2\t32\n", r"raw\.idx, line 2: not"),
    "endless digits": ("0\t0\n1\t" + "9" * 5000 + "\n", r"raw\.idx, line 2: not"),
    "beyond 64 bits": ("0\t0\n1\t9999999999999999999\n", r"byte 9999999999999999999: .*line 2"),
    "key twice": ("0\t0\n1\t12\n1\t32\n", r"raw\.idx, line 3: key 1 is there twice"),
    "offset twice": ("0\t0\n1\t12\n2\t12\n3\t32\n", r"raw\.rec, byte 12: no record is 0 bytes"),
    "not aligned": ("0\t0\n1\t14\n2\t32\n", r"raw\.rec, byte 14: no record can start .*line 2"),
    "too close": ("0\t0\n1\t12\n2\t16\n3\t32\n", r"raw\.rec, byte 12: no record is 4 bytes"),
    "at the end": ("0\t0\n1\t12\n2\t32\n3\t44\n", r"raw\.rec, byte 44: no record can start"),
    "past the end": ("0\t0\n1\t12\n2\t64\n", r"raw\.rec, byte 64: no record can start .*line 3"),
    "first missing": ("1\t12\n2\t32\n", r"raw\.rec, byte 0: no key for the record here"),
    "empty": ("", r"raw\.rec, byte 0: no key for the record here"),
    "last missing": ("0\t0\n1\t12\n", r"raw\.rec, byte 32: no key for the record here"),
    "last line cut": ("0\t0\n1\t12\n2\t3", r"raw\.rec, byte 3: no record can start .*line 3"),
    "last in a body": ("0\t0\n1\t12\n2\t36\n", r"raw\.rec, byte 36: wrong magic"),
    "last inside a record": ("0\t0\n1\t12\n2\t20\n", r"raw\.rec, byte 20: flag 3 in a record"),
}


@pytest.mark.parametrize("name", BAD_INDEX)
def test_bad_indexes_are_refused_when_opened(tmp_path: Path, name: str) -> None:
    index, message = BAD_INDEX[name]
    with pytest.raises(RecordError, match=message):
        RecordReader(raw(tmp_path, THREE, index))


def test_a_bad_offset_in_the_middle_is_refused_when_read(tmp_path: Path) -> None:
    reader = RecordReader(raw(tmp_path, THREE, "0\t0\n1\t20\n2\t32\n"))
    with pytest.raises(RecordError, match=r"raw\.rec, byte 12: the record ends here, .* at 20"):
        reader[0]
    with pytest.raises(RecordError, match=r"raw\.rec, byte 20: flag 3 in a record that starts"):
        reader[1]
    assert reader[2] == b"efgh"
    missing = RecordReader(raw(tmp_path, THREE, "0\t0\n2\t32\n"))
    with pytest.raises(RecordError, match=r"byte 12: the record ends here"):
        missing[0]
    shifted = RecordReader(raw(tmp_path, THREE, "0\t0\n1\t16\n2\t32\n"))
    with pytest.raises(RecordError, match=r"byte 16: wrong magic"):
        shifted[1]
    shorter = RecordReader(raw(tmp_path, THREE, "0\t0\n1\t8\n2\t32\n"))
    with pytest.raises(RecordError, match=r"byte 0: truncated: 4 bytes and padding end after 8"):
        shorter[0]


def test_an_index_of_another_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"byte 12: no record can start here"):
        RecordReader(raw(tmp_path, GOOD, "0\t0\n1\t12\n"))
    with pytest.raises(RecordError, match=r"byte 12: no key for the record here.* remove it"):
        RecordReader(raw(tmp_path, GOOD + GOOD, "0\t0\n"))
    with pytest.raises(RecordError, match="byte 0: no record can start here"):
        RecordReader(raw(tmp_path, b"", "0\t0\n"))


def test_a_gap_that_no_record_fills_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = raw(tmp_path, GOOD, "0\t0\n1\t1073741840\n")
    with path.open("r+b") as file:  # sparse: 1 GiB that takes no room
        file.seek(1073741840)
        file.write(GOOD)
    with pytest.raises(RecordError, match=r"byte 0: no record is 1073741840 bytes long"):
        RecordReader(path)


PAYLOADS = [
    b"abcdefgh",
    MAGIC + b"x" + MAGIC + b"yz1" + MAGIC,
    b"",
    b"12345",
    b"abcdefghijkl",
    b"z",
]
FILE = b"".join(map(naive_encode, PAYLOADS))
ENDS = [len(b"".join(map(naive_encode, PAYLOADS[:n]))) for n in range(len(PAYLOADS) + 1)]
INDEX = "".join(f"{key}\t{offset}\n" for key, offset in enumerate(ENDS[:-1]))


@pytest.mark.parametrize("index", [INDEX, None])
def test_truncation_at_every_byte_is_found_when_opened(tmp_path: Path, index: str | None) -> None:
    for size in range(len(FILE)):
        path = raw(tmp_path, FILE[:size], index)
        if index is None and size in ENDS:  # a whole, shorter file: nothing in it tells
            assert list(RecordReader(path)) == PAYLOADS[: ENDS.index(size)]
            continue
        with pytest.raises(RecordError, match=r"raw\.rec, byte \d+: "):
            RecordReader(path)
    assert list(RecordReader(raw(tmp_path, FILE, index))) == PAYLOADS


@pytest.mark.parametrize("index", [INDEX, None])
def test_every_flipped_bit(tmp_path: Path, index: str | None) -> None:
    """Damage of a header or of padding raises, except where a length grows over the padding."""
    headers = {
        at + i for at in range(0, len(FILE), 4) if FILE.startswith(MAGIC, at) for i in range(8)
    }
    outcomes = {"raised": 0, "zeros": 0, "payload": 0}
    for bit in range(8 * len(FILE)):
        at = bit // 8
        damaged = bytearray(FILE)
        damaged[at] ^= 1 << bit % 8
        try:
            records = list(RecordReader(raw(tmp_path, bytes(damaged), index)))
        except RecordError:
            outcomes["raised"] += 1
            continue
        if at in headers:
            stripped = [record.rstrip(b"\0") for record in records]
            assert stripped == [payload.rstrip(b"\0") for payload in PAYLOADS]
            outcomes["zeros"] += 1
        else:  # without a checksum, nobody can know
            changed = [(a, b) for a, b in zip(records, PAYLOADS, strict=True) if a != b]
            assert len(changed) == 1
            assert len(changed[0][0]) == len(changed[0][1])
            outcomes["payload"] += 1
    in_payload = 8 * sum(len(payload) for payload in PAYLOADS) - 8 * 4 * 2  # two magics left out
    # The zeros: b"12345" and b"z" with 2 bytes more.
    raised = 8 * len(FILE) - in_payload - 2
    assert outcomes == {"raised": raised, "zeros": 2, "payload": in_payload}


@pytest.mark.parametrize("index", [INDEX, None])
def test_random_damage_never_crashes(tmp_path: Path, index: str | None) -> None:
    source = random.Random(6)
    for _ in range(1500):
        damaged = bytearray(FILE)
        for _ in range(source.randrange(1, 6)):
            at = source.randrange(len(damaged) + 1)
            size = source.randrange(5)
            damaged[at : at + size] = source.choice([b"", MAGIC, source.randbytes(4), bytes(size)])
        with suppress(RecordError):
            reader = RecordReader(raw(tmp_path, bytes(damaged), index))
            assert sum(len(record) for record in reader) <= len(damaged)


def test_a_file_cut_while_it_is_open(tmp_path: Path) -> None:
    path = write(tmp_path, [b"abcd", bytes(100_000)])
    with RecordReader(path) as reader:
        os.truncate(path, 50_000)
        assert reader[0] == b"abcd"
        with pytest.raises(RecordError, match=r"byte 50000: the file ends here"):
            reader[1]


# ---- writing --------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_names_appear_only_when_all_is_written(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "data.rec") as writer:
        writer.write(b"x" * 100_000)
        assert not {"data.rec", "data.idx"} & set(files(tmp_path))
        assert all(name.endswith(".tmp") for name in files(tmp_path))
    assert files(tmp_path) == ["data.idx", "data.rec"]
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"late")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), RecordWriter(tmp_path / "data.rec") as writer:
        writer.write(b"x" * 100_000)
        raise error
    assert files(tmp_path) == []


def test_without_a_with_block(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "data.rec", False)
    writer.write(b"x")
    writer.close()
    assert files(tmp_path) == ["data.rec"]
    assert list(RecordReader(tmp_path / "data.rec")) == [b"x"]


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path, [b"precious"])
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"data\.idx exists"):
        RecordWriter(path)
    path.with_suffix(".idx").unlink()
    with pytest.raises(FileExistsError, match=r"data\.rec exists"):
        RecordWriter(path)
    with (
        pytest.raises(FileExistsError, match=r"other\.idx exists"),
        RecordWriter(tmp_path / "other.rec") as writer,
    ):
        writer.write(b"x")
        (tmp_path / "other.idx").write_text("made meanwhile")
    assert files(tmp_path) == ["data.rec", "other.idx"]
    assert path.read_bytes() == before
    assert (tmp_path / "other.idx").read_text() == "made meanwhile"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this platform")
@pytest.mark.parametrize("num_bytes", [100, 100_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, num_bytes: int) -> None:
    writer = RecordWriter(tmp_path / "data.rec")
    writer._file.close()
    writer._file = open("/dev/full", "wb")  # noqa: PTH123, SIM115 - the writer closes it
    with pytest.raises(OSError, match="No space"), writer:
        writer.write(bytes(num_bytes))
    assert files(tmp_path) == []
    assert writer._file.closed


def test_a_write_that_failed_and_was_swallowed_spoils_the_file(tmp_path: Path) -> None:
    class Failing:
        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def writelines(self, pieces: object) -> None:
            self.file.write(next(iter(pieces)))  # type: ignore[attr-defined, call-overload]
            raise OSError("No space left on device")

    with (
        pytest.raises(OSError, match="an earlier write stopped inside a record"),
        RecordWriter(tmp_path / "data.rec") as writer,
    ):
        writer.write(b"one")
        file = writer._file
        writer._file = Failing(file)  # type: ignore[assignment]
        with suppress(OSError):
            writer.write(b"two")
        writer._file = file
    assert files(tmp_path) == []


def test_refused_writes_leave_the_writer_usable(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "data.rec") as writer:
        writer.write(b"zero")
        with pytest.raises(TypeError, match=r"got str; for text: text\.encode\(\)"):
            writer.write("record_0")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got Tensor"):
            writer.write(torch.zeros(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got int"):
            writer.write(5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at most 536870911 bytes, got 536870912"):
            writer.write(bytes(2**29))
        with pytest.raises(ValueError, match="64-bit integer that is not taken yet, got 0"):
            writer.write(b"again", key=0)
        with pytest.raises(ValueError, match="64-bit integer"):
            writer.write(b"far", key=2**63)
        with pytest.raises(TypeError):
            writer.write(b"half", key=0.5)  # type: ignore[arg-type]
        writer.write(b"two", key=2)
        with pytest.raises(ValueError, match="not taken yet, got 2"):
            writer.write(b"two")  # the third record, whose own number is taken
        writer.write(b"min", key=-(2**63))
    with RecordReader(tmp_path / "data.rec") as reader:
        assert list(reader) == [b"zero", b"two", b"min"]
        assert reader.keys == (0, 2, -(2**63))


def test_every_kind_of_bytes(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    kinds = [b"ab", bytearray(b"ab"), memoryview(b"xabx")[1:3], memoryview(b"a.b.")[::2], array.T]
    with RecordWriter(tmp_path / "data.rec") as writer:
        for payload in kinds:
            writer.write(payload)  # type: ignore[arg-type]
    assert list(RecordReader(tmp_path / "data.rec")) == [b"ab"] * 4 + [array.T.tobytes()]


def test_settings_that_contradict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot both be .*a\.rec: name a \.rec file"):
        RecordWriter(tmp_path / "a.rec", tmp_path / "a.rec")
    with pytest.raises(ValueError, match=r"cannot both be .*a\.idx"):
        RecordWriter(tmp_path / "a.idx")
    with RecordWriter(tmp_path / "a.rec", index_path=False) as writer:
        with pytest.raises(ValueError, match="key 3 cannot be kept"):
            writer.write(b"x", key=3)
        writer.write(b"x")
    with RecordWriter(tmp_path / "c.rec", tmp_path / "elsewhere.txt") as writer:
        writer.write(b"x", key=3)
    assert files(tmp_path) == ["a.rec", "c.rec", "elsewhere.txt"]
    assert RecordReader(tmp_path / "c.rec", tmp_path / "elsewhere.txt").keys == (3,)


# ---- image records --------------------------------------------------------------------------------

PAY = bytes.fromhex("504159")
ID = "0e0a000000000000"
# Made by mxnet 1.9.1's own pack (array rows with a shim for NumPy 2's lost `tostring`).
PACKED = [
    (IRHeader(7, 3.0, 2574, 9), f"0000000000004040{ID}0900000000000000504159"),
    (IRHeader(0, np.float32(4), 2574, 0), f"0000000000008040{ID}0000000000000000504159"),
    (
        IRHeader(0, [1, 2, 3.5], 2574, 0),
        f"0300000000000000{ID}00000000000000000000803f0000004000006040504159",
    ),
    (IRHeader(0, np.array(6.0), 2574, 0), f"0100000000000000{ID}00000000000000000000c040504159"),
    (
        IRHeader(0, [[1, 2], [3, 4]], 2574, 0),
        f"0400000000000000{ID}00000000000000000000803f000000400000404000008040504159",
    ),
    (IRHeader(5, [], 2574, 0), f"0000000000000000{ID}0000000000000000504159"),
]


@pytest.mark.parametrize(("header", "expected"), PACKED)
def test_pack_makes_the_bytes_of_mxnet(header: IRHeader, expected: str) -> None:
    assert pack(header, PAY).hex() == expected


@pytest.mark.parametrize(
    "label",
    [
        [1.5, -2, 3e38],
        (1.5, -2, 3e38),
        torch.tensor([1.5, -2, 3e38], dtype=torch.float64),
        torch.tensor([1.5, -2, 3e38], requires_grad=True),
        np.array([1.5, -2, 3e38], dtype=">f8"),
        np.array([[3e38, -2, 1.5]])[:, ::-1],
    ],
)
def test_label_vectors_of_every_kind(label: object) -> None:
    header, payload = unpack(pack(IRHeader(0, label, 2**64 - 1, 1), b""))
    expected = torch.tensor([1.5, -2, 3e38], dtype=torch.float32)
    assert isinstance(header.label, torch.Tensor)
    torch.testing.assert_close(header.label, expected, rtol=0, atol=0)
    assert (header.flag, header.id, header.id2, payload) == (3, 2**64 - 1, 1, b"")


@pytest.mark.parametrize(
    "label", [True, 3, np.int64(3), np.float16(0.5), -1e-40, float("inf"), 2**24]
)
def test_label_numbers_of_every_kind(label: float) -> None:
    header, payload = unpack(bytearray(pack(IRHeader(9, label, 0, 0), bytearray(PAY))))
    assert header == IRHeader(0, float(np.float32(label)), 0, 0)
    assert type(header.label) is float
    assert payload == PAY


def test_not_a_number_stays_so() -> None:
    label = unpack(pack(IRHeader(0, float("nan"), 0, 0), b""))[0].label
    assert label != label


def test_labels_do_not_follow_torch_defaults() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            header, _ = unpack(pack(IRHeader(0, [0.1, 2], 0, 0), b""))
    finally:
        torch.set_default_dtype(before)
    expected = torch.tensor([0.1, 2], dtype=torch.float32)
    torch.testing.assert_close(header.label, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("header", "error", "message"),
    [
        (IRHeader(0, "3", 0, 0), TypeError, "a label is a number or an array of numbers"),
        (IRHeader(0, None, 0, 0), TypeError, "a label is a number or an array of numbers"),
        (IRHeader(0, [[1], [2, 3]], 0, 0), TypeError, "a label is a number or an array"),
        (IRHeader(0, 2**24 + 1, 0, 0), ValueError, "label 16777217 would be rounded"),
        (IRHeader(0, 1e39, 0, 0), ValueError, "labels must fit float32"),
        (IRHeader(0, [0, -1e39], 0, 0), ValueError, "labels must fit float32"),
        (IRHeader(0, 0, -1, 0), ValueError, r"ids 0 \.\. 2\*\*64 - 1"),
        (IRHeader(0, 0, 0, 2**64), ValueError, r"ids 0 \.\. 2\*\*64 - 1"),
        (IRHeader(0, 0, 1.5, 0), TypeError, "integer"),  # type: ignore[arg-type]
    ],
)
def test_headers_that_are_refused(header: IRHeader, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack(header, PAY)


def test_payloads_that_are_refused() -> None:
    with pytest.raises(TypeError, match="got str"):
        pack(IRHeader(0, 0, 0, 0), "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got str"):
        unpack("text")  # type: ignore[arg-type]


def test_records_too_short_for_their_header() -> None:
    record = pack(IRHeader(0, [1, 2, 3], 4, 0), b"")
    assert len(record) == 36
    for size in range(36):
        with pytest.raises(RecordError, match=f"got {size}"):
            unpack(record[:size])
    with pytest.raises(RecordError, match="flag 4294967295 asks for"):
        unpack(b"\xff" * 4 + record[4:])
