"""Mapped arrays against numpy's and torch's own readers and writers."""

import multiprocessing
import os
import random
import struct
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from flambeau.recipes.data.mapped_arrays import map_npy, map_npz, map_pth, write_npy

# Python 3.12 warns where a process with threads, such as torch's own, forks.
not_our_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

DTYPES = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]
SHAPES = [(), (0,), (1,), (3, 0, 2), (5, 4, 3), (7, 2, 3, 3)]


def array_of(shape, dtype):
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


def same(tensor, array):
    assert tensor.device.type == "cpu"
    assert tensor.dtype == torch.from_numpy(array).dtype
    torch.testing.assert_close(tensor, torch.from_numpy(array), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_array_that_numpy_saves(tmp_path, shape, dtype):
    array = array_of(shape, dtype)
    np.save(tmp_path / "a.npy", array)
    np.save(tmp_path / "f.npy", np.asfortranarray(array))
    np.savez(tmp_path / "a.npz", first=array, second=array)
    same(map_npy(tmp_path / "a.npy"), array)
    same(map_npy(str(tmp_path / "f.npy")), np.asfortranarray(array))  # which makes () a (1,)
    mapped = map_npz(tmp_path / "a.npz")
    assert list(mapped) == ["first", "second"]
    for tensor in mapped.values():
        same(tensor, array)
        assert tensor.data_ptr() % tensor.itemsize == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy_reads_what_is_written(tmp_path, shape, dtype):
    array = array_of(shape, dtype)
    with write_npy(tmp_path / "a.npy", shape, torch.from_numpy(array).dtype) as tensor:
        assert not tensor.any()
        tensor.copy_(torch.from_numpy(array))
    read = np.load(tmp_path / "a.npy")
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)
    assert (
        (tmp_path / "a.npy").stat().st_size - array.nbytes
    ) % 64 == 0  # as numpy aligns the data


def test_version_2_of_the_header(tmp_path):
    array = array_of((4, 3), "f4")
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version=(2, 0))
    same(map_npy(tmp_path / "a.npy"), array)


def test_what_torch_saves(tmp_path):
    saved = {
        "images": torch.arange(24, dtype=torch.uint8).view(2, 3, 4),
        "names": ["a", "b"],
        "epoch": 3,
    }
    torch.save(saved, tmp_path / "a.pth")
    mapped = map_pth(tmp_path / "a.pth")
    torch.testing.assert_close(mapped.pop("images"), saved.pop("images"), rtol=0, atol=0)
    assert mapped == saved
    mapped = map_pth(tmp_path / "a.pth")["images"]
    mapped.zero_()
    assert map_pth(tmp_path / "a.pth")["images"].sum() == 276


def resident_kib():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_opening_reads_nothing(tmp_path):
    """64 MiB each, of which one page is touched."""
    size = 64 << 20
    with (tmp_path / "a.npy").open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(128 + size)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.write(tmp_path / "a.npy", "a.npy")
    torch.save(torch.zeros(size, dtype=torch.uint8), tmp_path / "a.pth")
    before = resident_kib()
    tensors = [
        map_npy(tmp_path / "a.npy"),
        map_npz(tmp_path / "a.npz")["a"],
        map_pth(tmp_path / "a.pth"),
    ]
    for tensor in tensors:
        assert tensor[size // 2] == 0
    assert resident_kib() - before < 16 << 10


def test_a_map_larger_than_memory(tmp_path):
    """The kernel refuses a private map of more than memory and swap, unless nothing is to be reserved."""
    size = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with (tmp_path / "a.npy").open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (size // 1000, 1000)}
        np.lib.format.write_array_header_1_0(file, header)
        try:
            file.truncate(128 + size)
        except OSError:
            pytest.skip(f"the file system has no files of {size} bytes")
    mapped = map_npy(tmp_path / "a.npy")
    assert mapped[-1].sum() == 0


def test_writing_to_a_map_leaves_the_file_alone(tmp_path):
    array = array_of((5, 4), "i4")
    np.save(tmp_path / "a.npy", array)
    (tmp_path / "a.npy").chmod(0o444)
    mapped = map_npy(tmp_path / "a.npy")
    mapped.fill_(-1)
    same(map_npy(tmp_path / "a.npy"), array)


def _child(tensor, queue):
    queue.put((int(tensor.sum()), tensor.data_ptr()))


@not_our_threads
def test_a_forked_worker_reads_the_same_map(tmp_path):
    np.save(tmp_path / "a.npy", array_of((50, 40), "u1"))
    mapped = map_npy(tmp_path / "a.npy")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(mapped, queue))
    child.start()
    assert queue.get() == (int(mapped.sum()), mapped.data_ptr())
    child.join(60)
    assert child.exitcode == 0


def _fill(rows, number):
    rows[number] = number


@not_our_threads
def test_forked_processes_fill_one_file(tmp_path):
    with write_npy(tmp_path / "a.npy", (4, 3), torch.int64) as rows:
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_fill, args=(rows, number)) for number in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
            assert child.exitcode == 0
    assert np.load(tmp_path / "a.npy").tolist() == [[k] * 3 for k in range(4)]


def test_a_file_appears_when_it_is_whole(tmp_path):
    with pytest.raises(KeyError), write_npy(tmp_path / "a.npy", (4,), torch.uint8):
        assert not (tmp_path / "a.npy").exists()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileExistsError, match="exists: remove it"):  # noqa: SIM117
        with write_npy(tmp_path / "a.npy", (4,), torch.uint8):
            (tmp_path / "a.npy").write_bytes(b"of another")
    assert (tmp_path / "a.npy").read_bytes() == b"of another"
    with pytest.raises(FileExistsError), write_npy(tmp_path / "a.npy", (4,), torch.uint8):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
    with pytest.raises(ValueError, match=r"has no torch\.bfloat16"):  # noqa: SIM117
        with write_npy(tmp_path / "b.npy", (4,), torch.bfloat16):
            pass


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no posix_fallocate")
def test_a_full_disk_is_an_error_at_the_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"), write_npy(tmp_path / "a.npy", (4,), torch.uint8):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_mapped(tmp_path):
    path = tmp_path / "a.npy"
    for array in (np.array(["text"]), np.array([b"ab"]), np.array([None]), np.zeros(3, "i4,f4"),
                  np.zeros(3, "M8[s]")):  # fmt: skip
        np.save(path, array)
        with pytest.raises(TypeError, match="which torch lacks"):
            map_npy(path)
        np.savez(tmp_path / "a.npz", text=array, x=np.arange(3))
        assert list(map_npz(tmp_path / "a.npz")) == ["x"]
    np.save(path, np.arange(3, dtype=">i4"))
    with pytest.raises(ValueError, match="byte order of another machine"):
        map_npy(path)
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(3))
    with pytest.raises(ValueError, match=r"x\.npy is compressed"):
        map_npz(tmp_path / "a.npz")
    torch.save(torch.zeros(3), tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"before PyTorch 1\.6"):
        map_pth(tmp_path / "a.pth")


def with_header(text):
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x93NUMPY", b"\x93NUMPY\3\0v\0    ", b"PK\3\4" + bytes(40),
        with_header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (9,)}"),
        with_header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1,)}"),
        with_header(b"{'descr': '|u1', 'fortran_order': False, 'shape': 3}"),
        with_header(b"{'descr': '|u1', 'shape': (1,)}x"), with_header(b"[1]"), with_header(b"(" * 9000),
        with_header(b"__import__('os').abort()"), with_header(b"{'descr': '|u1', 'shape': (1,)}"),
    ],
    ids=lambda data: repr(data[8:40]),
)  # fmt: skip
def test_damaged_headers(tmp_path, data):
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.npy"):
        map_npy(tmp_path / "a.npy")


def test_a_member_before_the_start_of_the_file_is_refused(tmp_path):
    """The end of a zip says where it starts: with a wrong one, members lie before byte 0."""
    np.savez(tmp_path / "a.npz", a=array_of((5, 4), "u1"))
    good = bytearray((tmp_path / "a.npz").read_bytes())
    at = good.rindex(b"PK\5\6") + 16  # the offset of the list of members: too large by one
    good[at : at + 4] = (int.from_bytes(good[at : at + 4], "little") + 1).to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(good)
    with pytest.raises(ValueError, match=r"a\.npz is no \.npz file, or is cut short"):
        map_npz(tmp_path / "a.npz")


def test_a_name_that_is_no_text_is_damage(tmp_path):
    np.savez(tmp_path / "a.npz", ä=array_of((5, 4), "u1"))
    good = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(good.replace("ä".encode(), b"\xff\xff"))
    with pytest.raises(ValueError, match=r"a\.npz is no \.npz file, or is cut short"):
        map_npz(tmp_path / "a.npz")


def test_mutated_files(tmp_path):
    """Nothing but ValueError or TypeError, or an array that lies within the file."""
    rng, refused = random.Random(0), 0
    np.save(tmp_path / "a.npy", array_of((5, 4), "i4"))
    np.savez(tmp_path / "a.npz", a=array_of((5, 4), "u1"))
    for name, mapper in (("a.npy", map_npy), ("a.npz", lambda path: map_npz(path).get("a"))):
        good = (tmp_path / name).read_bytes()
        for turn in range(300):
            bad = bytearray(good)
            if turn % 2:
                del bad[rng.randrange(len(bad)) :]
            else:
                bad[rng.randrange(min(len(bad), 200))] ^= 1 << rng.randrange(8)
            (tmp_path / name).unlink()  # a file that is mapped must not be cut short
            (tmp_path / name).write_bytes(bad)
            try:
                tensor = mapper(tmp_path / name)
                assert tensor is None or int((tensor != 0).sum()) >= 0
            except (ValueError, TypeError):
                refused += 1
    assert refused >= 300


def test_no_warning(tmp_path):
    """torch warns of memory that is read-only, by default once a process."""
    np.savez(tmp_path / "a.npz", a=np.arange(5, dtype=np.uint8), b=np.arange(5))
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mapped = map_npz(tmp_path / "a.npz")
        with pytest.warns(UserWarning, match="not writable"):
            torch.frombuffer(b"abc", dtype=torch.uint8)
    finally:
        torch.set_warn_always(False)
    assert {name: tensor.tolist() for name, tensor in mapped.items()} == {
        "a": [0, 1, 2, 3, 4],
        "b": [0, 1, 2, 3, 4],
    }
