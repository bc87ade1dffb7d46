"""LMDB against the lmdb package in both directions, and what becomes of damaged files."""

import errno
import hashlib
import os
import pickle
import random
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from flambeau.recipes.data import lmdb_records
from flambeau.recipes.data.lmdb_records import LMDBError, LMDBReader, LMDBWriter, lmdb_key

lmdb = pytest.importorskip("lmdb")


def items(
    count: int, seed: int = 0, sizes=(0, 1, 50, 1900, 2100, 5000, 70_000)
) -> dict[bytes, bytes]:
    generator = random.Random(seed)
    keys = {generator.randbytes(generator.choice((1, 2, 8, 40, 511))) for _ in range(count)}
    return {key: generator.randbytes(generator.choice(sizes)) for key in keys}


def put(path, values, **settings):
    """A file as the lmdb package writes it."""
    settings = {"subdir": False, "map_size": 1 << 28, **settings}
    with lmdb.open(str(path), **settings) as env, env.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, value)
    return path


def peer(path) -> list[tuple[bytes, bytes]]:
    """All there is, read by the lmdb package."""
    with (
        lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False) as env,
        env.begin() as transaction,
    ):
        return list(transaction.cursor())


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- reading


@pytest.mark.parametrize("count", [0, 1, 3, 40, 1500])
def test_reading_what_lmdb_wrote(tmp_path, count):
    path = put(tmp_path / "x.lmdb", items(count))
    expected = peer(path)
    with LMDBReader(path) as reader:
        assert len(reader) == len(expected)
        assert list(zip(reader.keys, reader, strict=True)) == expected
        for place in {0, count // 2, count - 1} & set(range(len(expected))):
            key, value = expected[place]
            assert reader.get(key) == reader[place] == reader[place - len(reader)] == value


def test_a_deep_tree(tmp_path):
    values = {b"%0500d" % number: b"%d" % number for number in range(3000)}
    path = put(tmp_path / "x.lmdb", values)
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env:
        assert env.stat()["depth"] >= 4
    reader = LMDBReader(path)
    assert dict(zip(reader.keys, reader, strict=True)) == values


def test_a_tree_that_has_been_worked_on(tmp_path):
    """Pages that are free, moved and merged; and the second meta page as the newer one."""
    path, generator = tmp_path / "x.lmdb", random.Random(1)
    put(path, items(400, seed=1))
    for seed in range(2, 7):
        with (
            lmdb.open(str(path), subdir=False, map_size=1 << 28) as env,
            env.begin(write=True) as txn,
        ):
            for key, _ in list(txn.cursor()):
                if generator.random() < 0.5:
                    txn.delete(key)
            for key, value in items(200, seed=seed).items():
                txn.put(key, value)
        reader = LMDBReader(path)
        assert list(zip(reader.keys, reader, strict=True)) == peer(path)


@pytest.mark.parametrize("settings", [{"writemap": True, "map_async": True}, {"lock": False}])
def test_other_ways_to_write(tmp_path, settings):
    path = put(tmp_path / "x.lmdb", items(100), map_size=1 << 23, **settings)
    reader = LMDBReader(path)
    assert list(zip(reader.keys, reader, strict=True)) == peer(path)


@pytest.mark.parametrize("compact", [False, True])
def test_a_folder_and_a_copy_of_it(tmp_path, compact):
    put(tmp_path / "folder", items(100), subdir=True)
    (tmp_path / "copy").mkdir()
    with lmdb.open(str(tmp_path / "folder"), readonly=True) as env:
        env.copy(str(tmp_path / "copy"), compact=compact)
    first, second = LMDBReader(tmp_path / "folder"), LMDBReader(tmp_path / "copy")
    assert first.path == tmp_path / "folder" / "data.mdb"
    assert first.keys == second.keys
    assert list(first) == list(second) == [value for _, value in peer(tmp_path / "folder")]


def test_an_index_saves_the_walk(tmp_path, monkeypatch):
    path = put(tmp_path / "x.lmdb", items(100))
    whole = LMDBReader(path)
    monkeypatch.setattr(LMDBReader, "_walk", None)
    again = LMDBReader(path, index=whole.index)
    assert list(again) == list(whole)
    assert again.get(whole.keys[5]) == whole[5]


def test_two_readers_of_one_file_beside_the_library(tmp_path):
    path = put(tmp_path / "x.lmdb", items(50))
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False):
        with pytest.raises(lmdb.Error, match="already open in this process"):
            lmdb.open(str(path), subdir=False, readonly=True, lock=False)
        first, second = LMDBReader(path), LMDBReader(path)
        assert list(first) == list(second)


def test_reading_needs_no_package(tmp_path):
    path = put(tmp_path / "x.lmdb", {b"key": b"value"})
    code = (
        "import sys; sys.modules['lmdb'] = None\n"
        "from flambeau.recipes.data.lmdb_records import LMDBReader, LMDBWriter\n"
        f"assert LMDBReader({str(path)!r}).get('key') == b'value'\n"
        "try: LMDBWriter('y.lmdb')\n"
        "except ImportError as error: assert str(error).endswith('pip install lmdb'), error\n"
        "else: raise SystemExit('written')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path)
    assert not (tmp_path / "y.lmdb").exists()


def test_what_no_reader_gives(tmp_path):
    reader = LMDBReader(put(tmp_path / "x.lmdb", {b"a": b"1", b"c": b"2"}))
    for key in ("b", b"d", "0", 7):
        with pytest.raises(KeyError, match=r"x\.lmdb has no key"):
            reader.get(key)
    for place in (2, -3):
        with pytest.raises(IndexError):
            reader[place]
    with pytest.raises(TypeError):
        reader[0:1]
    with pytest.raises(FileNotFoundError):
        LMDBReader(tmp_path / "y.lmdb")
    reader.close()
    with pytest.raises(ValueError, match="closed file"):
        reader[0]


def test_forks_pickles_and_threads(tmp_path):
    path = put(tmp_path / "x.lmdb", items(300))
    reader = LMDBReader(path)
    expected = [hashlib.sha256(value).digest() for _, value in peer(path)]

    def digest(place):
        return hashlib.sha256(reader[place]).digest()

    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            os._exit(list(map(digest, range(len(reader)))) != expected)
        children.append(child)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(digest, range(len(reader)))) == expected
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    copy = pickle.loads(pickle.dumps(reader))
    assert [hashlib.sha256(value).digest() for value in copy] == expected


def test_a_pickle_of_a_reader_of_another_file(tmp_path):
    path = put(tmp_path / "x.lmdb", items(30))
    data = pickle.dumps(LMDBReader(path))
    put(path, {b"one more": b"value"})
    with pytest.raises(LMDBError, match="has been changed since it was opened first"):
        pickle.loads(data)


# --- files that are refused


def test_named_databases_and_several_values_a_key(tmp_path):
    with lmdb.open(str(tmp_path / "x.lmdb"), subdir=False, max_dbs=2) as env:
        env.open_db(b"inner")
    with pytest.raises(LMDBError, match="b'inner' is a named database or has many values"):
        LMDBReader(tmp_path / "x.lmdb")
    data = bytearray(put(tmp_path / "y.lmdb", {b"key": b"value"}).read_bytes())
    for flag in (2, 4, 8):  # MDB_REVERSEKEY, MDB_DUPSORT, MDB_INTEGERKEY, of the newer head
        data[4096 + 92] = flag
        (tmp_path / "y.lmdb").write_bytes(data)
        with pytest.raises(LMDBError, match="several values per key, or keys not in the order"):
            LMDBReader(tmp_path / "y.lmdb")


@pytest.mark.parametrize(
    ("at", "data", "reason"),
    [
        (16, b"\xbe\xef\xc0\xde", "no LMDB file, or a damaged one"),
        (10, b"\x02\0", "no LMDB file"),
        (20, b"\x02\0\0\0", "format 2 of LMDB; only 1, of LMDB 0.9, is known"),
        (40, b"\x01\x10\0\0", "pages of 4097 bytes: damaged"),
        (40, b"\0\0\0\0", "pages of 0 bytes: damaged"),
        (40, b"\0\x20\0\0", "byte 8192: no LMDB file"),
        (4096 + 40, b"\0\x20\0\0", "byte 4096: pages of 8192 bytes"),
        (4096 + 94, b"\xff\xff", "a tree of 65535 levels: damaged"),
        (4096 + 120, b"\x63", "99 values promised, 20 found"),
        (4096 + 128, b"\x01", "byte 4096: a page of the tree is damaged"),
        (4096 + 130, b"\xff", "bytes were expected"),
    ],
)
def test_a_damaged_head(tmp_path, at, data, reason):
    path = put(tmp_path / "x.lmdb", {b"%d" % n: bytes(3000) for n in range(20)})
    assert struct.unpack_from("<I", path.read_bytes(), 40) == (4096,)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    with pytest.raises(LMDBError, match=reason) as caught:
        LMDBReader(path)
    assert str(caught.value).startswith(f"{path}, byte ")


def test_other_files(tmp_path):
    for content in (b"", b"x", b"hello" * 1000, bytes(9000)):
        (tmp_path / "x.lmdb").write_bytes(content)
        with pytest.raises(LMDBError, match=r"x\.lmdb, byte \d+: "):
            LMDBReader(tmp_path / "x.lmdb")


def test_a_file_cut_short_anywhere(tmp_path):
    """The library kills the process here (SIGBUS)."""
    path = put(tmp_path / "x.lmdb", items(60, sizes=(50, 5000)))
    data, last = (
        path.read_bytes(),
        max(a + b for a, b in zip(*LMDBReader(path).index[1:], strict=True)),
    )
    for size in [*range(0, len(data), 3989), last - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(LMDBError, match=rf"x\.lmdb, byte {size}: the file ends"):
            LMDBReader(path)


def test_a_file_cut_short_while_it_is_read(tmp_path):
    path = put(tmp_path / "x.lmdb", {b"a": bytes(9000), b"b": bytes(9000)})
    reader = LMDBReader(path)
    os.truncate(path, max(reader.index.starts) + 100)
    with pytest.raises(LMDBError, match="the file ends here, it was longer when opened"):
        list(reader)


def test_bits_that_are_flipped_anywhere_in_the_tree(tmp_path):
    """Each is named, or lies where only a checksum could tell: in a key, a size, a value."""
    expected = {b"%0100d" % number: bytes([number % 251]) * 5000 for number in range(200)}
    path = put(tmp_path / "x.lmdb", expected)
    data = path.read_bytes()
    tree = [
        at for at in range(0, len(data), 4096)
        if struct.unpack_from("<H", data, at + 10)[0] in (1, 2) and data[at : at + 8] != bytes(8)
        and int.from_bytes(data[at : at + 8], "little") == at // 4096
    ]  # fmt: skip
    assert len(tree) >= 7
    generator, named, silent = random.Random(0), 0, 0
    for _ in range(200):
        damaged = bytearray(data)
        # Half of the flips where the library would look first: the head of a page and its offsets.
        reach = generator.choice((40, 4096))
        damaged[generator.choice(tree) + generator.randrange(reach)] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            reader = LMDBReader(path)
            found = dict(zip(reader.keys, reader, strict=True))
        except LMDBError:
            named += 1
        else:
            wrong = [key for key in found if found[key] != expected.get(key)]
            assert len(found) == 200
            assert len(wrong) <= 1
            silent += len(wrong)
    assert named > 80
    assert silent < 60


def test_a_number_of_a_page_that_is_another_values(tmp_path):
    """A wrong image in silence would be worse than none."""
    path = put(tmp_path / "x.lmdb", {b"%d" % number: bytes(5000) for number in range(8)})
    data, reader = path.read_bytes(), LMDBReader(path)
    for wanted, given in (
        (3, reader.index.starts[4] // 4096),
        (5, reader.index.starts[5] // 4096 + 1),
    ):
        number = struct.pack("<Q", reader.index.starts[wanted] // 4096)
        at = data.index(b"%d" % wanted + number) + 1
        path.write_bytes(data[:at] + struct.pack("<Q", given) + data[at + 8 :])
        with pytest.raises(
            LMDBError, match=r"8 values promised, 7 found|no value of 5000 bytes starts"
        ):
            list(LMDBReader(path))


def test_trees_that_lead_in_circles(tmp_path):
    values = {b"%0200d" % number: b"x" * 100 for number in range(2000)}
    path = put(tmp_path / "x.lmdb", values)
    data = bytearray(path.read_bytes())
    depth, root = (
        struct.unpack_from("<H", data, 4096 + 94)[0],
        struct.unpack_from("<Q", data, 4096 + 128)[0],
    )
    assert depth == 3
    count = (struct.unpack_from("<H", data, root * 4096 + 12)[0] - 16) // 2
    for node in struct.unpack_from(f"<{count}H", data, root * 4096 + 16):
        struct.pack_into("<HHH", data, root * 4096 + node, root & 0xFFFF, root >> 16, 0)
    for levels in (3, 32):
        struct.pack_into("<H", data, 4096 + 94, levels)
        path.write_bytes(data)
        with pytest.raises(LMDBError, match="a page of the tree is damaged"):
            LMDBReader(path)


# --- writing


def test_lmdb_reads_what_is_written(tmp_path):
    values = items(800)
    with LMDBWriter(tmp_path / "x.lmdb") as writer:
        for key, value in values.items():
            writer.write(key, value)
    assert names(tmp_path) == ["x.lmdb"]
    assert peer(tmp_path / "x.lmdb") == sorted(values.items())
    assert list(LMDBReader(tmp_path / "x.lmdb")) == [values[key] for key in sorted(values)]
    with (
        lmdb.open(str(tmp_path / "x.lmdb"), subdir=False) as env,
        env.begin(write=True) as transaction,
    ):
        assert transaction.put(b"more", b"value")  # a file that can be written on


@pytest.mark.parametrize("batch_bytes", [1, 300_000, 1 << 26])
def test_a_map_that_is_full_grows(tmp_path, monkeypatch, batch_bytes):
    monkeypatch.setattr(lmdb_records, "_FIRST_MAP_BYTES", 1 << 16)
    monkeypatch.setattr(lmdb_records, "_BATCH_BYTES", batch_bytes)
    values = {b"%05d" % number: bytes([number % 256]) * 20_000 for number in range(120)}
    with pytest.raises(lmdb.MapFullError):  # what a fixed map_size ends in
        put(tmp_path / "note.lmdb", values, map_size=1 << 16)
    with LMDBWriter(tmp_path / "x.lmdb") as writer:
        for number in random.Random(0).sample(range(120), 120):
            writer.write(b"%05d" % number, values[b"%05d" % number])
    assert peer(tmp_path / "x.lmdb") == sorted(values.items())


def test_the_reason_of_a_file_that_cannot_be_made_is_the_one_that_lmdb_gives(tmp_path, monkeypatch):
    def failing(*_, **settings):
        error = lmdb.Error("x.lmdb: Disk quota exceeded")
        error.code = errno.EDQUOT
        raise error

    monkeypatch.setattr(lmdb, "open", failing)
    with pytest.raises(OSError, match="Disk quota exceeded") as raised:
        LMDBWriter(tmp_path / "x.lmdb")
    assert raised.value.errno == errno.EDQUOT
    assert raised.value.filename == f"{tmp_path / 'x.lmdb'}"


def test_keys(tmp_path):
    assert lmdb_key("Übung/1.jpg") == "Übung/1.jpg".encode()
    assert [lmdb_key(number) for number in (0, 9, 10, 9_999_999_999)] == sorted(
        [b"0000000000", b"0000000009", b"0000000010", b"9999999999"]
    )
    with LMDBWriter(tmp_path / "x.lmdb") as writer:
        for number in (10, 9, 100, 0):
            writer.write(number, b"%d" % number)
    reader = LMDBReader(tmp_path / "x.lmdb")
    assert list(reader) == [b"0", b"9", b"10", b"100"]
    assert reader.get(100) == b"100"


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (b"", "a key has 1 to 511 bytes, got 0"),
        ("ü" * 256, "a key has 1 to 511 bytes, got 512"),
        (-1, "at least 0 and below"),
        (10**10, "at least 0 and below"),
        (1.5, "integer"),
        (None, "integer"),
    ],
)
def test_keys_that_are_refused(tmp_path, key, error):
    with (
        pytest.raises((ValueError, TypeError), match=error),
        LMDBWriter(tmp_path / "x.lmdb") as writer,
    ):
        writer.write(key, b"value")
    assert names(tmp_path) == []


@pytest.mark.parametrize("batch_bytes", [1, 1 << 26])
def test_a_key_twice(tmp_path, monkeypatch, batch_bytes):
    monkeypatch.setattr(lmdb_records, "_BATCH_BYTES", batch_bytes)
    with (
        pytest.raises(ValueError, match=r"key b?'twice' is there already"),
        LMDBWriter(tmp_path / "x.lmdb") as writer,
    ):
        writer.write("twice", b"1")
        writer.write("twice", b"2")
    assert names(tmp_path) == []


def test_values_are_bytes(tmp_path):
    with LMDBWriter(tmp_path / "x.lmdb") as writer:
        writer.write("a", bytearray(b"1"))
        writer.write("b", memoryview(b"2"))
        for value in ("text", 3, None):
            with pytest.raises(TypeError):
                writer.write("c", value)
    assert peer(tmp_path / "x.lmdb") == [(b"a", b"1"), (b"b", b"2")]


def test_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), LMDBWriter(tmp_path / "x.lmdb") as writer:
        writer.write("a", b"1")
        raise KeyError
    assert names(tmp_path) == []


def test_nothing_is_overwritten(tmp_path):
    path = tmp_path / "x.lmdb"
    with pytest.raises(FileExistsError, match="exists: remove it"), LMDBWriter(path) as writer:
        writer.write("a", b"1")
        path.write_bytes(b"of another process")
    assert path.read_bytes() == b"of another process"
    with pytest.raises(FileExistsError, match="exists: remove it"):
        LMDBWriter(path)
    assert names(tmp_path) == ["x.lmdb"]


def test_closing_twice(tmp_path):
    writer = LMDBWriter(tmp_path / "x.lmdb")
    writer.write("a", b"1")
    writer.close()
    writer.close()
    assert peer(tmp_path / "x.lmdb") == [(b"a", b"1")]


def test_a_killed_writer_leaves_a_file_that_says_so(tmp_path):
    child = os.fork()
    if not child:
        writer = LMDBWriter(tmp_path / "x.lmdb")
        writer.write("a", b"1")
        os._exit(0)
    os.waitpid(child, 0)
    assert all(name.endswith(".tmp") for name in names(tmp_path))
