"""A zip of a folder or of shards: against the folder that was zipped, and damaged."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from PIL import Image

from flambeau.cli.command import main
from flambeau.data.pack.verify import verify_file
from flambeau.data.sources.open_data import open_parts, open_sources
from flambeau.data.sources.zip_members import index_zip, inflated
from flambeau.errors import InputError
from same_sources import mask_png, png

DEFLATED, STORED = zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED


def put(path: Path, files: Mapping[str, bytes], method: int = DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def photos(folders: str = "", count: int = 6) -> dict[str, bytes]:
    """Names with several dots, of files that deflate makes smaller."""
    return {
        f"pets/{folders}{name}/{name}.{number}.bmp": bmp(10 * (name == "dog") + number)
        for name in ("cat", "dog")
        for number in range(count)
    }


def bmp(number: int) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (12, 9), (number, 9, 9)).save(target, "bmp")
    return target.getvalue()


def unzipped(path: Path) -> Path:
    folder = path.with_suffix("")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("method", [DEFLATED, STORED])
@pytest.mark.parametrize("parts", [False, True])
def test_a_zipped_folder_has_the_labels_of_the_folder(
    tmp_path: Path, method: int, parts: bool
) -> None:
    files = photos("train/") | photos("val/", 3) if parts else photos()
    hidden = {
        "__MACOSX/pets/cat/._cat.0.bmp": b"x",
        "pets/.DS_Store": b"x",
        "pets/.old/a/1.bmp": b"x",
    }
    others = {**hidden, "pets/notes.txt": b"x"}
    path = put(tmp_path / "a.zip", files | others, method)
    folder = unzipped(path)
    for near, far in zip(open_sources(path), open_sources(folder / "pets"), strict=True):
        assert near.classes == far.classes == ("cat", "dog")
        found, expected = (
            {(one.read(at), int(one.labels[at])) for at in range(len(one))} for one in (near, far)
        )
        assert parts is False or found == expected
        assert len(near) == len(far)
    (source, _) = open_parts(path)
    assert [dict(one.counts) for one in source.left_out] == [{".txt": 1}]  # type: ignore[attr-defined]


def test_files_of_samples_that_are_mixed_are_sorted(tmp_path: Path) -> None:
    apart = {"1.png": png(1), "0.png": png(0), "1.cls": b"1", "0.cls": b"0"}
    together = {"1.png": png(1), "1.cls": b"1", "0.png": png(0), "0.cls": b"0"}
    (source, _) = open_parts(put(tmp_path / "apart.zip", apart))
    assert list(source.names) == ["0", "1"] and source.labels.tolist() == [0, 1]
    (source, _) = open_parts(put(tmp_path / "together.zip", together))
    assert list(source.names) == ["1", "0"] and source.labels.tolist() == [1, 0]


def test_names_of_windows_and_names_that_come_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(8):
            name = f"{'cat' if number % 2 else 'dog'}\\{number}.png"
            archive.writestr(zipfile.ZipInfo(name), png(number))
    (source, _) = open_parts(tmp_path / "a.zip")
    assert source.classes == ("cat", "dog") and source.names[1] == "cat/1"
    with (
        pytest.warns(UserWarning, match="Duplicate"),
        zipfile.ZipFile(tmp_path / "a.zip", "a") as archive,
    ):
        archive.writestr(zipfile.ZipInfo("cat\\1.png"), png(9))
    with pytest.raises(
        InputError, match=r"'cat/1\.png': there are two files of this name\nZip it again"
    ):
        open_parts(tmp_path / "a.zip")


def test_masks_beside_images_with_dots(tmp_path: Path) -> None:
    files = {}
    for number in range(4):
        files |= {f"a.{number}.png": png(number), f"a.{number}.mask.png": mask_png(number)}
    (source, _) = open_parts(put(tmp_path / "a.zip", files))
    assert source.task == "segmentation"  # type: ignore[attr-defined]
    assert list(source.names) == [f"a.{number}" for number in range(4)]
    assert source.masks.read(2) == mask_png(2)  # type: ignore[attr-defined]


def lying_size(path: Path, size: int) -> None:
    """Let the list of files claim another size of the first one after unpacking."""
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", size)
    path.write_bytes(data)


def lying_place(path: Path, _: int) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 42 : at + 46] = struct.pack("<I", len(data) - 10)
    path.write_bytes(data)


def encrypted(path: Path, _: int) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 8] |= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "value", "words"),
    [
        (lying_size, 1 << 31, "more than can be in its"),
        (lying_place, 0, "its header is damaged"),
        (encrypted, 0, "is encrypted\nUnpack it with its password"),
    ],
)
def test_what_a_zip_claims_is_bounded(
    tmp_path: Path, damage: Callable[[Path, int], None], value: int, words: str
) -> None:
    path = put(tmp_path / "a.zip", photos())
    damage(path, value)
    with pytest.raises(InputError) as caught:
        open_parts(path)
    assert words in str(caught.value) and f"{path}" in str(caught.value)
    assert main(["train", f"{path}", "--out", f"{tmp_path}/run"]) == 2
    assert not (tmp_path / "run").exists()


def test_other_methods_and_cut_files_are_refused(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zip", photos(), zipfile.ZIP_LZMA)
    with pytest.raises(InputError, match="compressed by method 14, not by deflate"):
        open_parts(path)
    put(path, photos())
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"cannot be read as a zip: .*\nCopy or make it again"):
        open_parts(path)
    (report,) = verify_file(path, "zip").damaged
    assert "cannot be read as a zip" in report.what and "zip -FF" in report.what
    encrypted(put(path, photos()), 0)
    report = verify_file(path, "zip")
    assert not report.damaged and "is encrypted" in report.not_read[0].what


def test_other_bytes_are_found(tmp_path: Path) -> None:
    """By their CRC-32, when they are read; `verify --salvage` keeps the others."""
    files = photos()
    path = put(tmp_path / "a.zip", files, STORED)
    data = bytearray(path.read_bytes())
    data[data.index(files["pets/dog/dog.2.bmp"]) + 60] ^= 1
    path.write_bytes(data)
    (source, _) = open_parts(path)
    bad = list(source.names).index("pets/dog/dog.2")
    with pytest.raises(OSError, match="its bytes are not those that were zipped"):
        source.read(bad)
    saved = tmp_path / "saved.zip"
    assert main(["verify", f"{path}", "--salvage", f"{saved}"]) == 1
    (again, _) = open_parts(saved)
    assert {*again.names} == {*source.names} - {"pets/dog/dog.2"}
    assert not verify_file(saved, "zip").damaged


def test_no_more_is_unpacked_than_is_said() -> None:
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(bytes(range(256)) * 1000) + packer.flush()
    assert inflated(packed, 256_000) == bytes(range(256)) * 1000
    assert inflated(packed, 100) == bytes(100)  # another size: not the bytes that were meant
    assert inflated(packed[:50], 256_000) == bytes(256_000)
    assert inflated(b"no deflate", 3) == bytes(3)


def test_the_index_has_places_of_the_files_themselves(tmp_path: Path) -> None:
    files = {"a/1.png": png(1), "a/2.png": png(2)}
    path = put(tmp_path / "a.zip", files, STORED)
    index = index_zip(path)
    content = path.read_bytes()
    pieces = [content[at : at + size] for at, size in zip(index.offsets, index.sizes, strict=True)]
    assert pieces == list(files.values()) and not any(index.packed)
