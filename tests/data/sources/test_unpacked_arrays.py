"""Arrays of an index: the same in memory and on the disk, whatever the disk is like and the file."""

import io
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from flambeau.data.sources.unpacked_arrays import UnpackedArrays

ARRAYS = {
    "names": np.frombuffer(b"a\0bc\0", np.uint8),
    "labels": np.arange(12, dtype=np.float32).reshape(4, 3),
    "sizes": np.arange(5) * 7,
    "empty": np.zeros((0, 3), np.int32),
}


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr("flambeau.data.sources.unpacked_arrays.LARGE", 0)
    file = io.BytesIO()
    np.savez_compressed(file, **ARRAYS)  # type: ignore[arg-type]
    return file.getvalue()


def is_same(unpacked: UnpackedArrays) -> bool:
    found = unpacked.arrays
    return found.keys() == ARRAYS.keys() and all(
        found[name].dtype == array.dtype and np.array_equal(found[name], array)
        for name, array in ARRAYS.items()
    )


def test_on_the_disk_and_in_memory(data: bytes, tmp_path: Path) -> None:
    scratch = tmp_path / "cache"
    large = UnpackedArrays(data, scratch)
    assert is_same(large)
    large.forget()
    assert is_same(large)
    assert list(scratch.iterdir()) == [], "a file with a name would be left by a kill"
    mapped = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else None
    assert mapped is None or str(scratch) in mapped
    small = UnpackedArrays(data, None)
    small.forget()
    assert is_same(small)


def test_small_arrays_stay_in_memory(
    data: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flambeau.data.sources.unpacked_arrays.LARGE", 10_000)
    assert is_same(UnpackedArrays(data, tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_disk_that_cannot_be_written_is_done_without(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert is_same(UnpackedArrays(data, tmp_path / "file"))


def test_a_full_disk_is_done_without(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(stream: object, file: object, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("shutil.copyfileobj", full)
    assert is_same(UnpackedArrays(data, tmp_path))


@pytest.mark.parametrize("scratch", [True, False])
def test_what_is_damaged_is_no_array(data: bytes, tmp_path: Path, scratch: bool) -> None:
    where = tmp_path if scratch else None
    errors = (ValueError, OSError, EOFError, zipfile.BadZipFile, KeyError, zlib.error)
    plain = io.BytesIO()
    np.savez(plain, **ARRAYS)  # type: ignore[arg-type]
    other = plain.getvalue().replace(b"NUMPY", b"NUMPX")
    for damaged in (b"", data[: len(data) // 2], other):
        with pytest.raises(errors):
            UnpackedArrays(damaged, where)
    objects = io.BytesIO()
    np.savez(objects, names=np.array([{}], object))
    with pytest.raises(ValueError, match=r"not read here|allow_pickle=False"):
        UnpackedArrays(objects.getvalue(), where)


def test_an_array_that_says_it_is_longer_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flambeau.data.sources.unpacked_arrays.LARGE", 0)
    file = io.BytesIO()
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        array, {"descr": "<i8", "fortran_order": False, "shape": (1 << 40,)}
    )
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("sizes.npy", array.getvalue() + bytes(16))
    with pytest.raises(ValueError, match="not as long as it says"):
        UnpackedArrays(file.getvalue(), tmp_path)
