"""Zip files (.npz, .pth) that zipfile reads to its dismay: refused in a line, whatever they hold."""

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.cli.command import main
from flambeau.data.sources.folder import FolderSource
from flambeau.data.sources.index_cache import stored_index
from flambeau.trainer.evaluation.sample_history import FILE, recorded_losses


def locked(data: bytearray) -> None:
    """As if the members needed a password."""
    change(data, 8, lambda flags: flags | 1)


def unknown_compression(data: bytearray) -> None:
    change(data, 10, lambda method: 93)


def lzma(data: bytearray) -> None:
    change(data, 10, lambda method: 14)


def change(data: bytearray, offset: int, to: Callable[[int], int]) -> None:
    """A number of two bytes in the central directory, and in the members' own headers."""
    for mark, at in ((b"PK\1\2", offset), (b"PK\3\4", offset - 2)):
        start = data.find(mark)
        while start >= 0:
            [value] = struct.unpack_from("<H", data, start + at)
            struct.pack_into("<H", data, start + at, to(value))
            start = data.find(mark, start + 4)


DAMAGES = [locked, unknown_compression, lzma]


def damaged(path: Path, damage: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    with pytest.raises(Exception), zipfile.ZipFile(path) as archive:  # noqa: B017  one of many
        archive.read(archive.namelist()[0])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("verb", ["verify", "check", "convert"])
def test_arrays_of_images(
    verb: str,
    damage: Callable[[bytearray], None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.npz"
    x = np.random.default_rng(0).integers(0, 255, (20, 8, 8, 3), np.uint8)
    np.savez_compressed(path, x=x, y=np.arange(20) % 2)
    damaged(path, damage)
    words = {"convert": [f"{path}", f"{tmp_path}/b.safetensors"]}.get(verb, [f"{path}"])
    code = main([verb, *words])
    said = "".join(capfd.readouterr())
    assert code in (1, 2) and "a.npz" in said and "Traceback" not in said
    assert len(said) < 2000


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_of_torch(
    damage: Callable[[bytearray], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pth"
    torch.save({"w": torch.randn(3)}, path)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    code = main(["verify", f"{path}"])
    said = "".join(capfd.readouterr())
    assert code in (1, 2) and "a.pth" in said and "Traceback" not in said


@pytest.mark.parametrize("damage", DAMAGES)
def test_indexes_are_made_anew(damage: Callable[[bytearray], None], tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 100)

    def made() -> dict[str, np.ndarray]:
        return {"numbers": np.arange(100)}

    stored_index(path, made, kind="facts")
    [kept] = [one for one in tmp_path.iterdir() if one != path]
    damaged(kept, damage)
    assert stored_index(path, made, kind="facts")["numbers"].tolist() == list(range(100))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_with_damaged_losses_has_none(
    damage: Callable[[bytearray], None], tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / "data" / f"{number}").mkdir(parents=True)
        Image.new("L", (4, 4), number).save(tmp_path / "data" / f"{number}" / "a.png")
    source = FolderSource(tmp_path / "data")
    np.savez_compressed(
        tmp_path / FILE,
        loss=np.ones(3),
        seen=np.ones(3),
        other=np.zeros(3),
        fingerprint=source.fingerprint,
    )
    assert recorded_losses(tmp_path, source, most=2) is not None
    damaged(tmp_path / FILE, damage)
    assert recorded_losses(tmp_path, source, most=2) is None
